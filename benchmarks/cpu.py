"""The eager engine on a CPU, side by side with the PyTorch fallbacks that `transformers` ships.

    python benchmarks/cpu.py [--quick] [--write]

Everything runs in one process, on two threads, in fp32. What is compared takes turns, so that other
work on the machine slows all alike, and the least time of several counts. Nothing is timed before
its results agree with the fp64 recurrence of `tests/oracle.py`.

Inside the timed regions, for both sides alike:

- GDN: `gated_delta_net` and `torch_chunk_gated_delta_rule` of Qwen3-Next: l2norm of q and k, the
  rule, the output, the final state; each from its own layout, [T, H, K] here, [1, T, H, K] there.
- Mamba-2: `mamba2` and `mamba2_chunk_scan`, the function that `Mamba2Mixer.forward` calls without
  kernels: dt_bias, softplus, clamp, the scan, the skip D, the final state. The mixer's projections,
  convolution and gated norm are in neither. Its chunk size is the best of 64, 128 and 256, the
  model's default.
- Token loop: `torch_recurrent_gated_delta_rule` of Qwen3-Next, one call for all tokens; and with a
  call for every token, as the model makes them when it generates.
- Backward: the gradients of all inputs from dO and the gradient of the final state; the forward it
  is held against records for it.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from lagraph import ops

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))
import oracle  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

THREADS = 2
T, H, K, V = 4096, 8, 128, 128
P, N, GROUPS = 64, 128, 1  # Mamba-2: head dim of x, state dim, groups of B and C
CHUNKS = (64, 128, 256)  # tried for the Mamba-2 fallback
LENGTHS = (16384, 65536)
LIMIT = 1e-4  # largest error, relative to the largest value of the truth

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Row:
    """One comparison, in seconds."""

    what: str
    ours: float
    against: str
    theirs: float
    ratio: float
    aim: str
    met: bool
    errors: str = ""

    def __str__(self) -> str:
        ours, theirs = self.ours * 1e3, self.theirs * 1e3
        return (
            f"| {self.what} | {ours:.0f} | {self.against} | {theirs:.0f} "
            f"| {self.ratio:.2f} | {self.aim}{'' if self.met else ' (missed)'} | {self.errors} |"
        )


def best(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Least time of each call, in seconds; the calls take turns, after a first one each."""
    times = dict.fromkeys(calls, math.inf)
    for turn in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if turn:
                times[name] = min(times[name], time.perf_counter() - start)
    return times


def error(got: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    """Largest error of several results, each relative to its largest true value; NaN counts."""
    worst = 0.0
    for g, t in zip(got, truth, strict=True):
        off = ((g.double() - t).abs().max() / t.abs().max()).item()
        worst = max(worst, math.inf if math.isnan(off) else off)
    return worst


def checked(name: str, off: float) -> float:
    """Stops the run where something is wrong: there is nothing to time then."""
    if off > LIMIT:
        sys.exit(f"{name}: differs from the fp64 recurrence by {off:.1e}")
    return off


def delta_inputs(family: str, length: int) -> Tensors:
    """Inputs of a delta-rule family by port name; q and k are normalized by the op."""
    n = 2 if family == "gdp" else 1
    per_key = (K,) if family in ("kda", "gdn2") else ()
    x = {
        "q": torch.randn(length, H, K),
        "k": torch.randn(length * n, H, K),
        "v": torch.randn(length * n, H, V),
        "g": -torch.nn.functional.softplus(torch.randn(length, H, *per_key) - 2),
        "beta": torch.rand(length * n, H, *(per_key if family == "gdn2" else ())),
    }
    if family == "gdn2":
        x["w"] = torch.rand(length, H, V)
    return x | {"cu_seqlens": torch.tensor([0, length], dtype=torch.int32)}


def mamba_inputs(length: int) -> Tensors:
    """Mamba-2's inputs by the op's names."""
    return {
        "x": torch.randn(length, H, P),
        "dt": torch.randn(length, H),
        "A": -torch.arange(1.0, H + 1),
        "B": torch.randn(length, GROUPS, N) / math.sqrt(N),
        "C": torch.randn(length, GROUPS, N),
        "cu_seqlens": torch.tensor([0, length], dtype=torch.int32),
        "D": torch.ones(H),
        "dt_bias": torch.full((H,), -3.0),
    }


PORTS = {"x": "v", "dt": "g", "A": "a", "B": "k", "C": "q", "D": "d"}
OPS = {"gdn": ops.gated_delta_net, "kda": ops.kimi_delta_attention, "gdn2": ops.gated_delta_net_v2,
       "gdp": ops.gated_delta_product, "mamba2": ops.mamba2}  # fmt: skip


def call(family: str, x: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator: output and final state."""
    if family == "mamba2":
        return OPS[family](**x, output_final_state=True)
    more = {"num_householder": 2} if family == "gdp" else {}
    return OPS[family](**x, **more, output_final_state=True, use_qk_l2norm_in_kernel=True)


def truth(family: str, direction: str, x: Tensors) -> Tensors:
    """The fp64 recurrence."""
    options: dict[str, Any] = {"output_final_state": True}
    if family != "mamba2":
        options["use_qk_l2norm"] = True
    if family == "gdp":
        options["num_householder"] = 2
    named = {PORTS.get(name, name) if family == "mamba2" else name: t for name, t in x.items()}
    return oracle.run(family, direction, named, **options)


def forward_truth(family: str, x: Tensors) -> list[torch.Tensor]:
    """Output and final state, in fp64."""
    true = truth(family, "forward", x)
    return [true["O"], true["final_state"]]


def gdn_rows(repeats: int) -> list[Row]:
    """GDN forward against Qwen3-Next's two fallbacks, the second in one call and in T."""
    x = delta_inputs("gdn", T)
    args = [x[name][None] for name in ("q", "k", "v", "g", "beta")]
    more = {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "initial_state": None}
    runs = {
        "ours": lambda: call("gdn", x),
        "chunked": lambda: torch_chunk_gated_delta_rule(*args, **more),
        "loop": lambda: torch_recurrent_gated_delta_rule(*args, **more),
        "calls": lambda: one_call_a_token(args, more),
    }
    true = forward_truth("gdn", x)
    errors = {}
    for name, run in runs.items():
        o, state = run()
        if name != "ours":
            o, state = o[0], state.mT
        errors[name] = checked(f"gdn, {name}", error([o, state], true))
    times = best({name: runs[name] for name in ("ours", "chunked")}, repeats)
    times |= best({name: runs[name] for name in ("loop", "calls")}, max(repeats // 3, 1))
    ours, shape = times["ours"], f"T = {T}, {H} heads, K = V = {K}"
    return [
        Row(f"GDN forward, {shape}", ours, f"{against}, Qwen3-Next", times[name],
            times[name] / ours, f">= {aim}" if aim else "-", times[name] >= aim * ours,
            f"{errors['ours']:.0e} / {errors[name]:.0e}")
        for name, against, aim in (
            ("chunked", "chunked fallback", 1), ("loop", "token loop", 15),
            ("calls", "token loop, a call for every token", 0),
        )
    ]  # fmt: skip


def one_call_a_token(
    args: list[torch.Tensor], more: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Qwen3-Next's recurrent fallback as `generate` calls it, a state handed from call to call."""
    outs, state = [], None
    for t in range(args[0].shape[1]):
        token = (x[:, t : t + 1] for x in args)
        o, state = torch_recurrent_gated_delta_rule(*token, **more | {"initial_state": state})
        outs.append(o)
    return torch.cat(outs, 1), state


def mamba_rows(repeats: int) -> list[Row]:
    """Mamba-2 forward against the fallback of `transformers`."""
    x = mamba_inputs(T)

    def theirs(chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
        return mamba2_chunk_scan(
            x["x"][None], x["dt"][None], x["A"], x["B"][None], x["C"][None], chunk_size=chunk,
            D=x["D"], dt_bias=x["dt_bias"], dt_softplus=True, return_final_states=True,
        )  # fmt: skip

    runs: dict[Any, Callable[[], Any]] = {"ours": lambda: call("mamba2", x)}
    runs |= {chunk: lambda chunk=chunk: theirs(chunk) for chunk in CHUNKS}
    true = forward_truth("mamba2", x)
    errors = {}
    for name, run in runs.items():
        o, state = run()
        o, state = (o, state) if name == "ours" else (o[0], state[0])
        errors[name] = checked(f"mamba2, {name}", error([o, state.view_as(true[1])], true))
    times = best(runs, repeats)
    chunk = min(CHUNKS, key=lambda chunk: times[chunk])
    ours, other = times["ours"], times[chunk]
    return [
        Row(f"Mamba-2 forward, T = {T}, {H} heads, P = {P}, N = {N}", ours,
            f"chunked fallback, Mamba-2, its best chunk size ({chunk})", other, other / ours,
            ">= 1", other >= ours, f"{errors['ours']:.0e} / {errors[chunk]:.0e}")
    ]  # fmt: skip


def length_rows(repeats: int, lengths: tuple[int, ...]) -> list[Row]:
    """GDN forward at growing T, against so many times the time of the shortest."""
    inputs = {length: delta_inputs("gdn", length) for length in (T, *lengths)}
    times = best(
        {length: lambda x=x: call("gdn", x) for length, x in inputs.items()}, max(repeats // 3, 2)
    )
    rows = []
    for length in lengths:
        scaled = times[T] * length / T
        rows.append(
            Row(f"GDN forward, T = {length}", times[length], f"{length // T} times T = {T}",
                scaled, scaled / times[length], ">= 0.8", scaled >= 0.8 * times[length])
        )  # fmt: skip
    return rows


def backward_row(family: str, length: int, repeats: int) -> Row:
    """The backward against its forward; the gradients are checked on a shorter sequence."""

    def inputs(length: int) -> tuple[Tensors, list[torch.Tensor]]:
        x = mamba_inputs(length) if family == "mamba2" else delta_inputs(family, length)
        return x, [t.requires_grad_() for t in x.values() if t.is_floating_point()]

    def backward(outs: tuple, leaves: list, seeds: list) -> list[torch.Tensor]:
        return list(torch.autograd.grad(outs, leaves, seeds))

    x, leaves = inputs(min(length, 200))
    outs = call(family, x)
    seeds = [torch.randn_like(o) for o in outs]
    plain = {name: t.detach() for name, t in x.items()}
    true = truth(family, "backward", plain | {"dO": seeds[0], "d_final_state": seeds[1]})
    names = [PORTS.get(name, name) if family == "mamba2" else name for name in x]
    wanted = [true[oracle.GRADIENTS[name]] for name in names if name in oracle.GRADIENTS]
    off = checked(f"{family} backward", error(backward(outs, leaves, seeds), wanted))

    x, leaves = inputs(length)
    seeds = [torch.randn_like(o) for o in call(family, x)]
    forward_time = backward_time = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        outs = call(family, x)
        middle = time.perf_counter()
        backward(outs, leaves, seeds)
        end = time.perf_counter()
        forward_time = min(forward_time, middle - start)
        backward_time = min(backward_time, end - middle)
    ratio = backward_time / forward_time
    return Row(f"{family.upper()} backward, T = {length}", backward_time, "its forward",
               forward_time, ratio, "<= 3.5", ratio <= 3.5, f"{off:.0e}")  # fmt: skip


def cpu() -> str:
    """The processor's name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")


def main() -> int:
    """Print the table; the exit status is 1 where an aim was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, no long sequences")
    parser.add_argument("--write", action="store_true", help="write results/cpu.md")
    chosen = parser.parse_args()
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    repeats = 3 if chosen.quick else 9
    with torch.no_grad():
        rows = gdn_rows(repeats) + mamba_rows(repeats)
        rows += length_rows(repeats, LENGTHS[:1] if chosen.quick else LENGTHS)
    rows += [backward_row(family, T // 2, repeats) for family in OPS]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                            cwd=HERE, check=False).stdout.strip()  # fmt: skip
    lines = [
        f"{cpu()}, {os.cpu_count()} cores, {THREADS} threads, fp32; Python "
        f"{platform.python_version()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, commit {commit}. Least of up to {repeats} runs. The ratio "
        "says how many times faster than what it is compared with, for a backward how many "
        "times its forward. The error is the largest against the fp64 recurrence, relative to the "
        "largest value: ours / theirs.",
        "",
        "| what | ms | compared with | its ms | ratio | aim | error |",
        "|---|---|---|---|---|---|---|",
        *map(str, rows),
    ]
    print("\n".join(lines))
    if chosen.write:
        path = HERE / "results" / "cpu.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
