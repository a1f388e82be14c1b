"""The operators in eager code: gradients of every input, states carried on, torch.compile.

python examples/op_autograd.py [--compile]
"""

from __future__ import annotations

import argparse

import torch

from lagraph.ops import kimi_delta_attention

H, K, V = 2, 32, 32


def layer(
    x: dict[str, torch.Tensor], state: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Kimi Delta Attention with its raw gate, norm and sigmoid fused."""
    return kimi_delta_attention(
        x["q"], x["k"], x["v"], x["g"], x["beta"], x["cu_seqlens"],
        initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, safe_gate=True,
    )  # fmt: skip


def inputs(lengths: list[int]) -> dict[str, torch.Tensor]:
    """Leaves that want gradients."""
    T = sum(lengths)
    shapes = {"q": (T, H, K), "k": (T, H, K), "v": (T, H, V), "g": (T, H, K), "beta": (T, H)}
    x = {name: torch.randn(shape, requires_grad=True) for name, shape in shapes.items()}
    return x | {"cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int()}


def main() -> None:
    """Forward, backward, and a sequence in two pieces."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", action="store_true", help="the same under torch.compile")
    run = layer
    if parser.parse_args().compile:
        run = torch.compile(layer, fullgraph=True, dynamic=True)
    torch.manual_seed(0)
    x = inputs([50, 14])
    o, final = run(x)
    (o.square().mean() + final.square().mean()).backward()
    for name in ("q", "k", "v", "g", "beta"):
        print(f"gradient of {name:4}: norm {x[name].grad.norm():.2e}")

    with torch.no_grad():
        whole = inputs([64])
        o, final = run(whole)
        pieces, state = [], None
        for part in (slice(0, 23), slice(23, 64)):
            piece = {name: t[part] for name, t in whole.items() if name != "cu_seqlens"}
            piece["cu_seqlens"] = torch.tensor([0, part.stop - part.start], dtype=torch.int32)
            out, state = run(piece, state)
            pieces.append(out)
    print(f"in two pieces: outputs differ by {(torch.cat(pieces) - o).abs().max():.1e}, "
          f"states by {(state - final).abs().max():.1e}")  # fmt: skip


if __name__ == "__main__":
    main()
