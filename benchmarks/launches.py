"""Host cost of the Triton engine's launches: by Triton's own call, and bound beforehand.

    python benchmarks/launches.py [--only gdn,backward] [--csv FILE]

One row for every family and direction, and for what is launched outside plans: launches a call,
microseconds of the host a call either way, and what is left of it a launch. Plans run on given
outputs and scratch, so that nothing is allocated; the other operators allocate their results.
Offsets are zeros: no kernel has work, and the device is never what is waited for. Calls are timed
in bursts that fit the device's queue, without waiting inside one; the least burst counts.

The exit status is 1 where bound launches are not served; the reason is printed.
"""

from __future__ import annotations

import argparse
import csv
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import triton
from compile import QUICK, Sample, inputs_of
from triton.runtime.jit import JITFunction

from lagraph import infer, registry
from lagraph.engines.triton import bound
from lagraph.plan import problem_of

DIRECTIONS = ("forward", "backward", "summary", "summary_backward")
QUEUE = 400  # launches a burst; a device takes about a thousand
Call = Callable[[], object]


def plan_call(sample: Sample, device: str = "cuda") -> Call:
    """A call of a plan with everything allocated."""
    node, x, options = inputs_of(sample)
    ins = [x[name].to(device) if name in x else None for name in node.input_names]
    metas = [None if t is None else infer.Meta(t.shape, t.dtype, t.device) for t in ins]
    found = infer.bind(node, metas, options)
    problem = problem_of(node, found, options, metas)
    outs = [
        torch.empty(found.outputs[name][0], dtype=found.outputs[name][1], device=device)
        if name in found.outputs
        else None
        for name in node.output_names
    ]
    plan = registry.load("lagraph.engines.triton.engine:ENGINE").plan(problem, {})
    size = plan.workspace_size(x["g"].shape[0], x["cu_seqlens"].shape[0] - 1)
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    return partial(plan.run, ins, outs, workspace)


def op_calls(device: str = "cuda") -> dict[str, Call]:
    """Calls of what is launched outside plans: the engine's functions, not the public operators."""
    from lagraph.engines.triton import conv, recurrent, transform

    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    F32, N, H, K = torch.float32, 8, 8, 128
    traits = registry.family("gdn").traits
    index = torch.full((N,), -1, dtype=torch.int32, device=device)
    row, gate, pool = zeros(H, dtype=F32), zeros(1, N, H, dtype=F32), zeros(N, H, K, K, dtype=F32)
    x, weight, history = zeros(N, 1, 1024), zeros(1024, 4), zeros(N, 3, 1024)
    return {
        "decode": partial(
            recurrent.decode, traits, zeros(N, 3 * H * K), gate, gate, pool, index,
            zeros(1, N, H, K), a_log=row, dt_bias=row, heads=H,
        ),
        "conv update": partial(
            conv.advance, x, weight, history, torch.empty_like(x), index, None, None, conv.SILU
        ),
        "conv forward": partial(conv.forward, x, weight, None, None, None, conv.SILU),
        "conv backward": partial(conv.backward, x, x, weight, None, None, None, conv.SILU),
        "gate forward": partial(transform.forward, zeros(1, N, H), row, row, None),
        "gate backward": partial(
            transform.backward, zeros(1, N, H), row, row, zeros(1, N, H), None
        ),
    }  # fmt: skip


def launches(call: Call) -> int:
    """Launches of one call, counted where Triton's own call makes them."""
    seen, run = [], JITFunction.run

    def counted(self, *args, **kwargs):
        seen.append(self)
        return run(self, *args, **kwargs)

    JITFunction.run = counted
    try:
        call()
    finally:
        JITFunction.run = run
    return len(seen)


def host(call: Call, count: int, bursts: int) -> float:
    """Microseconds of the host a call: the least of many bursts."""
    calls = max(QUEUE // max(count, 1), 1)
    best = float("inf")
    for _ in range(bursts):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return best * 1e6


def measure(call: Call, bursts: int) -> dict[str, float]:
    """One row."""
    bound.ENABLED = False
    try:
        call()
        count = launches(call)
        ordinary = host(call, count, bursts)
    finally:
        bound.ENABLED = True
    call()
    left = launches(call)
    if left:
        raise RuntimeError(f"{left} of {count} launches are not bound after the first call")
    direct = host(call, count, bursts)
    return {
        "launches": count,
        "ordinary": ordinary,
        "bound": direct,
        "a launch": direct / max(count, 1),
        "ratio": ordinary / direct,
    }


def cases() -> dict[str, Callable[[], Call]]:
    """Makers of all calls by name."""
    made: dict[str, Callable[[], Call]] = {}
    for sample in QUICK:
        for direction in DIRECTIONS:
            chosen = replace(sample, direction=direction, state="summary" not in direction)
            made[f"{sample.family} {direction}"] = partial(plan_call, chosen)
    made |= {name: partial(lambda name: op_calls()[name], name) for name in op_calls()}
    return made


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="words of a row's name, with commas")
    parser.add_argument("--bursts", type=int, default=30)
    parser.add_argument("--csv", default="", help="a file to write the rows to")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.exit("launches.py measures on a GPU; none is here.")
    name = torch.cuda.get_device_name()
    print(f"{name}, Triton {triton.__version__}, torch {torch.__version__}, "
          f"Python {platform.python_version()}; us of the host a call")  # fmt: skip
    if bound.WHY:
        print(f"bound launches are not served: {bound.WHY}")
        return 1
    words = [word for word in args.only.split(",") if word]
    rows = []
    print(f"{'':26s}{'launches':>9s}{'ordinary':>10s}{'bound':>8s}{'a launch':>10s}{'ratio':>7s}")
    for what, make in cases().items():
        if words and not any(word in what for word in words):
            continue
        row = measure(make(), args.bursts)
        rows.append({"call": what, **row})
        print(f"{what:26s}{row['launches']:9.0f}{row['ordinary']:10.1f}{row['bound']:8.1f}"
              f"{row['a launch']:10.1f}{row['ratio']:7.1f}", flush=True)  # fmt: skip
    if args.csv and rows:
        with open(args.csv, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
