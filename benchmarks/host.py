"""Host cost of a warm call, in microseconds, with an engine that does nothing.

    python benchmarks/host.py [--device cuda] [--write]

Stages of an operator call, each timed alone; then whole calls, without and with gradients, and a
warm `Graph.execute`. The least of many repeats, since whatever else runs only adds.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import timeit
from pathlib import Path
from typing import TYPE_CHECKING, Any

import null
import torch

import lagraph
from lagraph import ops, registry
from lagraph.plan import parse_request, runner

if TYPE_CHECKING:
    from collections.abc import Callable

H, K, V, N, TOKENS = 4, 16, 16, 4, 64  # small: a CPU's allocation of large blocks is not ours


def microseconds(call: Callable[[], Any], number: int = 2000, repeat: int = 15) -> float:
    """Least mean time of one call."""
    call()
    return min(timeit.repeat(call, number=number, repeat=repeat)) / number * 1e6


def inputs(T: int, device: str) -> dict[str, torch.Tensor]:
    """GDN's tensors."""
    step = T // N
    return {
        "q": torch.randn(T, H, K, device=device),
        "k": torch.randn(T, H, K, device=device),
        "v": torch.randn(T, H, V, device=device),
        "g": -torch.rand(T, H, device=device),
        "beta": torch.rand(T, H, device=device),
        "cu_seqlens": torch.arange(0, T + 1, step, device=device, dtype=torch.int32),
    }


def op_rows(device: str) -> list[tuple[str, float]]:
    """Stages and whole of an operator call."""
    x = inputs(TOKENS, device)
    args = tuple(x.values())
    node = registry.node("gdn")
    run = runner("gdn")
    text = '{"output_final_state":true}'
    req = parse_request(node, text)
    ins = (*args, None, None, None, None)
    op = torch.ops.lagraph.gated_delta_net.default
    plan, T, n = run.find(ins, req)
    with torch.no_grad():
        rows = [
            ("key of the call", microseconds(lambda: run.key(ins, req))),
            ("find the plan (key, lookup, offsets on a CPU)",
             microseconds(lambda: run.find(ins, req))),
            ("allocate two outputs, run the null plan",
             microseconds(lambda: plan.call(ins, T, n))),
            ("runner: all of the above", microseconds(lambda: run(ins, req))),
            ("registered operator", microseconds(lambda: op(*args, None, None, None, text))),
            ("op call, no gradient",
             microseconds(lambda: ops.gated_delta_net(*args, output_final_state=True))),
        ]  # fmt: skip
    with torch.inference_mode():
        call = microseconds(lambda: ops.gated_delta_net(*args, output_final_state=True))
        rows.append(("op call, inference mode", call))
    leaves = tuple(t.requires_grad_() if t.is_floating_point() else t for t in args)
    call = microseconds(lambda: ops.gated_delta_net(*leaves, output_final_state=True))
    rows.append(("op call, gradient recorded", call))
    call = microseconds(lambda: ops.gated_delta_net(*leaves))
    rows.append(("op call, gradient recorded, no final state", call))

    def both() -> None:
        o, _ = ops.gated_delta_net(*leaves)
        torch.autograd.backward(o, o.detach(), inputs=leaves[:5])

    rows.append(("op call and its backward", microseconds(both, number=500)))
    for t in leaves[:5]:
        t.grad = None
    return rows


def graph_rows(device: str) -> list[tuple[str, float]]:
    """A warm execute, T and N open."""
    graph = lagraph.Graph(io_data_type=torch.float32, device=device)
    dims = {"q": [None, H, K], "k": [None, H, K], "v": [None, H, V], "g": [None, H],
            "beta": [None, H]}  # fmt: skip
    tensors = {name: graph.tensor(dim, name=name) for name, dim in dims.items()}
    tensors["cu_seqlens"] = graph.tensor([None], data_type=torch.int32, name="cu_seqlens")
    o, state, _ = graph.gdn(**tensors, output_final_state=True)
    o.set_output(True)
    state.set_output(True)
    graph.build()
    x = inputs(TOKENS, device)
    pack = {tensors[name]: x[name] for name in tensors}
    pack[o] = torch.empty(TOKENS, H, V, device=device)
    pack[state] = torch.empty(N, H, V, K, device=device)
    by_uid = {key.uid: value for key, value in pack.items()}
    with torch.no_grad():
        rows = [
            ("Graph.execute, buffers by tensor", microseconds(lambda: graph.execute(pack))),
            ("Graph.execute, buffers by uid", microseconds(lambda: graph.execute(by_uid))),
        ]
    rows.append(("Graph.execute, gradient mode on", microseconds(lambda: graph.execute(pack))))
    return rows


def keys_without_lengths(device: str) -> int:
    """Number of plans after calls with many T and N: one."""
    run = runner("gdn")
    before = len(run.plans)
    with torch.no_grad():
        for T in (256, 320, 1024):
            ops.gated_delta_net(*inputs(T, device).values(), output_final_state=True)
    return len(run.plans) - before


def main() -> None:
    """Print the table; with --write also keep it for the docs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", action="store_true", help="write results/host.md")
    chosen = parser.parse_args()
    null.install()
    torch.set_num_threads(1)
    rows = op_rows(chosen.device) + graph_rows(chosen.device)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                            cwd=Path(__file__).parent, check=False).stdout.strip()  # fmt: skip
    lines = [
        f"GDN, H = {H}, K = V = {K}, fp32, N = {N}, final state wanted, device {chosen.device}; "
        f"Python {platform.python_version()}, torch {torch.__version__}, commit {commit}. "
        f"New plans over three other lengths: {keys_without_lengths(chosen.device)}.",
        "",
        "| what | us |",
        "|---|---|",
        *(f"| {name} | {value:.1f} |" for name, value in rows),
    ]
    print("\n".join(lines))
    if chosen.write:
        path = Path(__file__).parent / "results" / "host.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
