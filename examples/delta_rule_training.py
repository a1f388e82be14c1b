"""A delta-rule attention module, trained on a toy task: repeat the last tokens of a prompt.

    python examples/delta_rule_training.py                       a few seconds on a CPU
    python examples/delta_rule_training.py --variant gdn --packed
    python examples/delta_rule_training.py --backend fused --compile          on a GPU

`DeltaRuleAttention` maps [B, T, hidden_size] to the same: projections, a causal short convolution
with silu, gates, the core (KDA, or GDN with `--variant gdn`), a gated RMS norm, the projection out.
It returns its states when asked, and goes on from them. `--packed` lays sequences of different
lengths behind each other in one row; `--compile` runs module and loss as one compiled graph.
"""

from __future__ import annotations

import argparse
import math
import time
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lagraph.ops import (
    active_token_mask,
    causal_conv1d,
    chunk_gdn,
    chunk_kda,
    gate_transform,
    mask_inactive_token_gradients,
    mask_inactive_tokens,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

LOWER_BOUND = -5.0  # of KDA's gates


def unit(x: Tensor) -> Tensor:
    """x / |x| over the last axis, as the decode kernels and use_qk_l2norm_in_kernel have it."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


class AttentionOutput(NamedTuple):
    """What the module returns; the states are None unless asked for."""

    output: Tensor
    final_state: Tensor | None
    final_conv_state: Tensor | None


class DeltaRuleAttention(nn.Module):
    """[B, T, hidden_size] to [B, T, hidden_size], a token mixer for an attention's place.

    A_log, dt_bias and all gates are fp32, whatever the dtype of the projections.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        variant: str = "kda",
        backend: str = "auto",
        conv_width: int = 4,
        mask_inactive_capacity: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.dim, self.width = num_heads, head_dim, conv_width
        self.variant, self.backend, self.mask = variant, backend, mask_inactive_capacity
        inner = num_heads * head_dim
        self.qkv = nn.Linear(hidden_size, 3 * inner, bias=False)
        self.conv = nn.Parameter(torch.randn(3 * inner, conv_width) / math.sqrt(conv_width))
        self.beta = nn.Linear(hidden_size, num_heads, bias=False)
        # Two-stage projections of the gates: hidden_size -> head_dim -> what the gate needs.
        per_gate = inner if variant == "kda" else num_heads
        self.gate = nn.Sequential(
            nn.Linear(hidden_size, head_dim, bias=False), nn.Linear(head_dim, per_gate, bias=False)
        )
        self.z = nn.Sequential(
            nn.Linear(hidden_size, head_dim, bias=False), nn.Linear(head_dim, inner)
        )
        self.A_log = nn.Parameter(torch.zeros(num_heads))
        shape = (num_heads, head_dim) if variant == "kda" else (num_heads,)
        self.dt_bias = nn.Parameter(torch.full(shape, -4.0))
        self.norm = nn.RMSNorm(head_dim, eps=1e-5)
        self.out = nn.Linear(inner, hidden_size, bias=False)

    def forward(
        self,
        hidden: Tensor,
        initial_state: Tensor | None = None,
        *,
        initial_conv_state: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        return_final_state: bool = False,
    ) -> AttentionOutput:
        """hidden [B, T, hidden_size], or [1, T, hidden_size] with cu_seqlens [N + 1]; states:
        initial_state [N, H, D, D], initial_conv_state [N, W - 1, 3 H D]."""
        active = None
        if self.mask and cu_seqlens is not None:
            active = active_token_mask(hidden, cu_seqlens)
            hidden = mask_inactive_tokens(hidden, active)
        heads = (self.heads, self.dim)

        mixed = mask_inactive_token_gradients(self.qkv(hidden), active)
        convolved = causal_conv1d(
            mixed, self.conv, activation="silu", cu_seqlens=cu_seqlens,
            initial_state=initial_conv_state, return_final_state=return_final_state,
            impl=self.backend,
        )  # fmt: skip
        mixed, conv_state = convolved if return_final_state else (convolved, None)
        q, k, v = (x.unflatten(-1, heads) for x in mixed.chunk(3, dim=-1))
        q, k = unit(q), unit(k)

        raw = self.gate(hidden)
        beta = mask_inactive_token_gradients(self.beta(hidden), active).float().sigmoid()
        if self.variant == "kda":
            kind, bound, raw, core = "bounded", LOWER_BOUND, raw.unflatten(-1, heads), chunk_kda
        else:
            kind, bound, core = "softplus", None, chunk_gdn
        decay = gate_transform(
            raw, self.A_log, self.dt_bias, kind=kind, lower_bound=bound, impl=self.backend
        )
        # Its gradients are summed over rows into A_log and dt_bias.
        decay = mask_inactive_token_gradients(decay, active)
        o, state = core(
            q, k, v, decay, beta, initial_state, cu_seqlens=cu_seqlens,
            output_final_state=return_final_state, impl=self.backend,
        )  # fmt: skip
        o = mask_inactive_tokens(o, active)
        o = self.norm(o) * self.z(hidden).unflatten(-1, heads).sigmoid()
        output = mask_inactive_token_gradients(self.out(o.flatten(2)), active)
        return AttentionOutput(output, state, conv_state)


class Model(nn.Module):
    """Embedding, two residual blocks of attention alone, head."""

    def __init__(self, symbols: int, width: int, **options: object) -> None:
        super().__init__()
        self.embed = nn.Embedding(symbols, width)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(3))
        self.mixers = nn.ModuleList(
            DeltaRuleAttention(width, 2, 32, **options)
            for _ in range(2)  # type: ignore[arg-type]
        )
        self.head = nn.Linear(width, symbols, bias=False)

    def forward(self, tokens: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """tokens [B, T] to logits [B, T, symbols]."""
        x = self.embed(tokens)
        for norm, mixer in zip(self.norms, self.mixers):
            x = x + mixer(norm(x), cu_seqlens=cu_seqlens).output
        return self.head(self.norms[2](x))


SYMBOLS = 16  # the last one asks for the repetition


def sequence(length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A prompt, the mark, and the prompt again; targets are -100 where there is nothing to say."""
    half = (length - 1) // 2
    prompt = torch.randint(SYMBOLS - 1, (half,), generator=generator)
    tokens = torch.cat([prompt, torch.tensor([SYMBOLS - 1]), prompt])
    targets = torch.full_like(tokens, -100)
    targets[half:-1] = prompt
    return tokens, targets


def batch(
    sizes: Sequence[int], packed: bool, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens and targets [B, T]; packed [1, T], and offsets."""
    drawn = [sequence(size, generator) for size in sizes]
    join = torch.cat if packed else torch.stack
    tokens, targets = (join([pair[i] for pair in drawn]) for i in range(2))
    if not packed:
        return tokens, targets, None
    ends = torch.tensor([0, *(len(pair[0]) for pair in drawn)]).cumsum(0)
    return tokens[None], targets[None], ends.to(torch.int32)


def lengths(count: int, tokens: int, packed: bool, generator: torch.Generator) -> list[int]:
    """Of every sequence; packed ones follow a truncated Zipf distribution up to `tokens`."""
    if not packed:
        return [tokens] * count
    chances = 1.0 / torch.arange(5, tokens + 1, dtype=torch.float32)
    drawn = torch.multinomial(chances, count, replacement=True, generator=generator) + 5
    return [int(length) for length in drawn]


def cut_in_two(model: Model, device: torch.device) -> float:
    """Largest difference of a module's output when its states are carried over a cut."""
    mixer = model.mixers[0]
    x = torch.randn(2, 50, model.embed.embedding_dim, device=device)
    with torch.no_grad():
        whole = mixer(x).output
        first = mixer(x[:, :23], return_final_state=True)
        rest = mixer(
            x[:, 23:], first.final_state, initial_conv_state=first.final_conv_state,
            return_final_state=True,
        )  # fmt: skip
    return float((torch.cat([first.output, rest.output], 1) - whole).abs().max())


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and show the loss."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--variant", choices=("gdn", "kda"), default="kda")
    parser.add_argument("--backend", choices=("reference", "fused", "auto"), default="auto")
    parser.add_argument("--packed", action="store_true", help="sequences of different lengths")
    parser.add_argument("--compile", action="store_true", help="one compiled graph")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=21, help="of the longest sequence")
    parser.add_argument("--steps", type=int, default=110)
    chosen = parser.parse_args(argv)

    torch.set_num_threads(1)  # tensors are small here: threads only wait for each other
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if chosen.backend == "reference":
        device = torch.device("cpu")
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = Model(SYMBOLS, 64, variant=chosen.variant, backend=chosen.backend).to(device)
    sizes = lengths(chosen.batch_size, chosen.tokens, chosen.packed, generator)
    print(f"{chosen.variant}, backend {chosen.backend} on {device}, "
          f"{sum(p.numel() for p in model.parameters())} parameters")  # fmt: skip

    def loss_of(tokens: Tensor, targets: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        return F.cross_entropy(model(tokens, cu_seqlens).flatten(0, 1), targets.flatten())

    step_loss = torch.compile(loss_of, fullgraph=True) if chosen.compile else loss_of
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=chosen.steps)
    losses: list[Tensor] = []
    began, trained = time.perf_counter(), 0
    for step in range(chosen.steps):
        *data, cu_seqlens = batch(sizes, chosen.packed, generator)
        tokens, targets = (x.to(device) for x in data)
        cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(device)
        if step == 0 and cu_seqlens is not None:
            print(f"cu_seqlens {cu_seqlens.tolist()}")
        loss = step_loss(tokens, targets, cu_seqlens)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        trained += tokens.numel()
    values = torch.stack(losses).tolist()
    took = time.perf_counter() - began

    size = max(chosen.steps // 6, 1)
    print("step   loss (nats; a guess costs 2.71)")
    for at in range(0, chosen.steps, size):
        part = values[at : at + size]
        mean = sum(part) / len(part)
        print(f"{at:4d}   {mean:5.2f}  {'#' * round(mean * 12)}")
    print(f"{trained / took:.0f} tokens a second; carried over a cut, outputs differ by "
          f"{cut_in_two(model, device):.1e}")  # fmt: skip


if __name__ == "__main__":
    main()
