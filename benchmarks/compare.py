"""Every family on a GPU, beside whichever other libraries are installed, in one process.

    python benchmarks/compare.py [--only gdn,kda] [--direction fwd|f+b|both|table] [--gates slow]
                                 [--plans triton] [--peers fla,gym] [--quick] [--csv FILE] [--json]
    python benchmarks/compare.py --plot FILE.csv ... docs/images/compare.svg
    python benchmarks/compare.py --report FILE.csv ... benchmarks/results/gpu.md
    python benchmarks/compare.py --dry-run        tiny sizes, eager engine, on a CPU

All get the same tensors: bf16 tokens, fp32 gates and states, normalized q and k. Gates come in two
regimes: `slow`, GDN and GDP -0.1 softplus(N(0, 1)), KDA and GDN-2 -0.5 softplus(N(0, 1)), Mamba-2
dt logits N(-2, 0.5); and `strong`, about -5 per token. Forwards ask for final states; a forward +
backward is timed through autograd, for the gradients of all inputs.

Nothing is timed before the very run that would be timed agrees with the fp64 recurrence of
`truth.py`: ours within the tolerances of the tests, others within four times those. Times are
medians of `triton.testing.do_bench`, which empties the L2 cache before each run; host time is that
of issuing calls without waiting; launches are all kernels, copies and fills of a call; memory is
the most that a call takes beyond inputs and results. The exit status is 1 where ours was wrong.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]
import roofline  # noqa: E402
from peers import LIBRARIES, PEERS, Batch, Result, version  # noqa: E402
from tolerance import tolerance  # noqa: E402
from truth import GRADIENTS, Truth  # noqa: E402

from lagraph import ops, registry  # noqa: E402
from lagraph.errors import NotSupported  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OPS = {
    "gdn": "gated_delta_net",
    "kda": "kimi_delta_attention",
    "gdn2": "gated_delta_net_v2",
    "gdp": "gated_delta_product",
    "mamba2": "mamba2",
}
MAMBA2 = {"q": "C", "k": "B", "v": "x", "g": "dt", "a": "A", "d": "D"}
GATES = ("slow", "strong")
DIRECTIONS = ("fwd", "f+b")
SLACK = 4.0  # how many times our tolerance a peer may be off


@dataclass(frozen=True)
class Case:
    """A shape; `table` are the directions in which the published figures give it."""

    family: str
    sequences: int
    length: int
    H: int
    HV: int
    table: tuple[str, ...]
    n: int = 1
    K: int = 128
    V: int = 128

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.length,) * self.sequences

    def __str__(self) -> str:
        heads = str(self.H) if self.H == self.HV else f"{self.H}/{self.HV}"
        more = f" n={self.n}" if self.n > 1 else ""
        return f"{self.sequences}x{self.length} {heads}{more}"

    def sizes(self, state: bool) -> roofline.Sizes:
        return roofline.Sizes(
            self.family, self.sequences * self.length, self.sequences, self.H, self.HV, self.K,
            self.V, self.n, state=state,
        )  # fmt: skip


CASES = (
    Case("gdn", 8, 4096, 8, 32, ("fwd",)),
    Case("gdn", 1, 32768, 8, 32, ("fwd",)),
    Case("gdn", 1, 32768, 2, 8, ("fwd",)),
    Case("gdn", 8, 1024, 16, 64, ("fwd",)),
    Case("gdn", 1, 32768, 16, 64, ("fwd",)),  # where preferring the frost engine costs most
    Case("gdn", 1, 2048, 16, 32, ("fwd",)),  # little work: what the host costs
    Case("gdn", 4, 8192, 16, 32, ("f+b",)),
    Case("kda", 1, 8192, 64, 64, ("fwd",)),
    Case("kda", 8, 1024, 64, 64, ("fwd",)),
    Case("kda", 4, 8192, 32, 32, ("f+b",)),
    Case("gdn2", 4, 8192, 32, 32, ("fwd", "f+b")),
    Case("gdp", 4, 8192, 16, 16, ("fwd", "f+b"), n=2),
    Case("mamba2", 4, 8192, 1, 80, ("fwd", "f+b"), V=64),
)
DRY = tuple(
    Case(family, 2, 96, 1, 2, DIRECTIONS, n=2 if family == "gdp" else 1, K=16, V=16)
    for family in OPS
)


@dataclass
class Row:
    """One system on one case; what was not measured is NaN, and `note` says why."""

    family: str
    case: str
    direction: str
    gates: str
    system: str
    ours: bool
    ms: float = math.nan
    host_us: float = math.nan
    launches: float = math.nan
    memory_mib: float = math.nan
    error: float = math.nan
    error_of: str = ""
    floor_ms: float = math.nan
    floor_bytes: float = math.nan
    floor_operations: float = math.nan
    note: str = ""
    version: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.family, self.case, self.direction, self.gates


# Inputs and calls ----------------------------------------------------------------------------


def inputs(case: Case, gates: str, device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random inputs by node port name, packed; the same for the same case."""
    rng = torch.Generator(device).manual_seed(0)
    T, n, K, V = case.sequences * case.length, case.n, case.K, case.V
    heads = max(case.H, case.HV)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=rng)

    def unit(*shape: int) -> torch.Tensor:
        return torch.nn.functional.normalize(normal(*shape), dim=-1).to(dtype)

    def gate(*shape: int) -> torch.Tensor:
        if gates == "strong":
            return -5.0 + 0.5 * torch.rand(*shape, device=device, generator=rng)
        wide = 0.5 if len(shape) == 3 else 0.1
        return (-wide * torch.nn.functional.softplus(normal(*shape))).clamp(min=-5.0)

    if case.family == "mamba2":
        dt = normal(T, heads) * 0.5 - 2.0 if gates == "slow" else 5.0 + 0.1 * normal(T, heads)
        return {
            "q": normal(T, case.H, K).to(dtype), "k": normal(T, case.H, K).to(dtype),
            "v": normal(T, heads, V).to(dtype), "g": dt, "a": -torch.exp(0.5 * normal(heads)),
            "d": torch.ones(heads, device=device),
        }  # fmt: skip
    x = {"q": unit(T, case.H, K), "k": unit(T * n, case.H, K),
         "v": normal(T * n, case.HV, V).to(dtype)}  # fmt: skip
    x["g"] = gate(T, heads, K) if case.family in ("kda", "gdn2") else gate(T, heads)
    if case.family == "gdn2":
        x["beta"] = torch.sigmoid(normal(T, heads, K)).to(dtype)
        x["w"] = torch.sigmoid(normal(T, heads, V)).to(dtype)
    else:
        x["beta"] = torch.sigmoid(normal(T * n, heads))
    return x


def batch_of(case: Case, direction: str, gates: str, device: str, dtype: torch.dtype) -> Batch:
    """The inputs of a case; they want gradients where the backward is timed."""
    x = inputs(case, gates, device, dtype)
    if direction == "f+b":
        x = {name: t.requires_grad_() for name, t in x.items()}
    cu = torch.arange(case.sequences + 1, device=device, dtype=torch.int32) * case.length
    return Batch(case.family, case.lengths, case.n, x, cu, cu.long(), state=direction == "fwd")


def ours(plan: str) -> Callable[[Batch], Callable[[], Result]]:
    """An adapter for our public operators, on one engine."""

    def prepare(b: Batch) -> Callable[[], Result]:
        op = getattr(ops, OPS[b.family])
        names = MAMBA2 if b.family == "mamba2" else {}
        given: dict[str, Any] = {names.get(name, name): t for name, t in b.x.items()}
        if b.family == "gdp":
            given["num_householder"] = b.n
        given |= {"cu_seqlens": b.cu, "output_final_state": b.state}
        given["plan_name"] = f"{b.family}_{plan}"

        def call() -> Result:
            o, state = op(**given)
            return o, state if b.state else None

        return call

    return prepare


def directed(
    forward: Callable[[], Result], b: Batch, d_out: torch.Tensor | None
) -> Callable[[], tuple[torch.Tensor | None, ...]]:
    """What is timed: the forward without gradients, or the forward and all gradients."""
    if d_out is None:

        def only() -> tuple[torch.Tensor | None, ...]:
            with torch.no_grad():
                return forward()

        return only
    leaves = list(b.x.values())

    def both() -> tuple[torch.Tensor | None, ...]:
        o = forward()[0]
        return (o, *torch.autograd.grad(o, leaves, d_out))

    return both


def named(results: tuple[torch.Tensor | None, ...], b: Batch) -> dict[str, torch.Tensor]:
    """Results by node output name, those that the gate knows."""
    got: dict[str, Any] = {"O": results[0]}
    if len(results) == 2 and b.state:
        got["final_state"] = results[1]
    else:
        grads = zip(b.x, results[1:])
        got |= {GRADIENTS[name]: grad for name, grad in grads if name in GRADIENTS}
    return {name: t.detach() for name, t in got.items() if t is not None}


# Measuring -----------------------------------------------------------------------------------


def median_ms(call: Callable[[], Any], device: str, quick: bool) -> float:
    """Median time of a call on the device."""
    if device == "cpu":
        times = []
        for _ in range(3):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return sorted(times)[1] * 1e3
    import triton

    warmup, rep = (10, 40) if quick else (25, 120)
    return float(triton.testing.do_bench(call, warmup=warmup, rep=rep, return_mode="median"))


def host_us(call: Callable[[], Any], device: str, number: int = 10) -> float:
    """Least mean time that the host takes to issue a call."""
    best = math.inf
    for _ in range(3):
        if device != "cpu":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(number if device != "cpu" else 1):
            call()
        best = min(best, (time.perf_counter() - start) / (number if device != "cpu" else 1))
    if device != "cpu":
        torch.cuda.synchronize()
    return best * 1e6


def memory_mib(call: Callable[[], Any]) -> float:
    """The most that a call has allocated beyond its inputs and what it returns."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = call()
    peak, after = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    del kept
    return (peak - before - (after - before)) / 2**20


def launches(call: Callable[[], Any]) -> int:
    """Kernels, copies and fills of a call on the device."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def short(why: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(why).split())
    return f"{type(why).__name__}: {text}"[:300]


@dataclass
class Comparison:
    """A run over cases: its choices, and the rows that come of it."""

    device: str
    dtype: torch.dtype
    plans: list[str]
    peers: list[str] | None
    quick: bool = False
    rows: list[Row] = field(default_factory=list)

    def systems(self, b: Batch, backward: bool) -> Iterator[tuple[str, bool, Any]]:
        """Name, whether it is ours, and adapter of all that a case can be run on."""
        for plan in self.plans:
            yield plan, True, ours(plan)
        for peer in PEERS:
            wanted = self.peers is None or peer.name in self.peers
            if wanted and peer.serves(b, backward):
                yield peer.name, False, peer.prepare

    def prepare(self, case: Case, direction: str, gates: str) -> tuple[Batch, torch.Tensor | None]:
        b = batch_of(case, direction, gates, self.device, self.dtype)
        if direction == "fwd":
            return b, None
        shape = (case.sequences * case.length, max(case.H, case.HV), case.V)
        rng = torch.Generator(self.device).manual_seed(1)
        return b, torch.randn(shape, device=self.device, generator=rng).to(self.dtype)

    def run(self, case: Case, direction: str, gates: str) -> None:
        """One case on every system: check, then time."""
        b, d_out = self.prepare(case, direction, gates)
        plain = {name: t.detach() for name, t in b.x.items()}
        truth = Truth(case.family, plain, case.lengths, case.n, d_out)
        least = roofline.floor(case.sizes(b.state), direction == "f+b")
        for system, mine, adapter in self.systems(b, direction == "f+b"):
            row = Row(case.family, str(case), direction, gates, system, mine)
            row.floor_ms, row.floor_bytes = least.ms, least.bytes
            row.floor_operations = least.operations
            row.version = "" if mine else version(system)
            self.rows.append(row)
            try:
                call = directed(adapter(b), b, d_out)
                row.error, row.error_of, good = self.judged(truth, named(call(), b), mine)
                if not good:
                    row.note = f"wrong: {row.error_of} is off by {row.error:.1e}"
                else:
                    row.ms = median_ms(call, self.device, self.quick)
                    row.host_us = host_us(call, self.device)
                    if self.device != "cpu":
                        row.memory_mib = memory_mib(call)
            except ImportError as why:
                row.note = f"absent: {short(why)}"
            except NotSupported as why:
                row.note = f"declines: {short(why)}"
            except Exception as why:  # another library's failure must not end the run
                row.note = f"failed: {short(why)}"
            told = row.note or f"{row.ms:8.3f} ms, {row.error_of} off by {row.error:.1e}"
            print(f"{'  '.join(row.key)}  {system}: {told}", file=sys.stderr, flush=True)

    def judged(
        self, truth: Truth, got: dict[str, torch.Tensor], mine: bool
    ) -> tuple[float, str, bool]:
        """The error that is largest for what is allowed, of what, and whether it is let pass."""
        kind = "cpu" if self.device == "cpu" else "cuda"
        worst = (0.0, 0.0, "O")
        for name, off in truth.errors(got).items():
            allowed = tolerance(name, self.dtype, got[name].dtype, kind)
            worst = max(worst, (off / allowed, off, name))
        return worst[1], worst[2], worst[0] <= (1.0 if mine else SLACK)

    def count_launches(self, cases: list[tuple[Case, str, str]]) -> None:
        """After all timing, since a profiler may leave launches slower than it found them.

        Gates have no part in them: each case is counted once.
        """
        for case, direction in dict.fromkeys((case, direction) for case, direction, _ in cases):
            same = [row for row in self.rows if row.key[:3] == (case.family, str(case), direction)]
            timed = {row.system for row in same if math.isfinite(row.ms)}
            b, d_out = self.prepare(case, direction, GATES[0])
            for system, _, adapter in self.systems(b, direction == "f+b"):
                if system not in timed:
                    continue
                try:
                    count = launches(directed(adapter(b), b, d_out))
                except Exception as why:  # the profiler is not to be had everywhere
                    print(f"{system}: launches not counted: {short(why)}", file=sys.stderr)
                    continue
                for row in same:
                    if row.system == system and math.isfinite(row.ms):
                        row.launches = count


# Telling -------------------------------------------------------------------------------------


def grouped(rows: list[Row]) -> dict[tuple[str, ...], list[Row]]:
    """Rows of one case together, in order."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(row.key, []).append(row)
    return groups


def best(rows: list[Row], mine: bool) -> Row | None:
    """The fastest of ours, or of the others."""
    timed = [row for row in rows if row.ours == mine and math.isfinite(row.ms)]
    return min(timed, key=lambda row: row.ms, default=None)


def number(value: float, digits: int = 3) -> str:
    return f"{value:.{digits}g}" if math.isfinite(value) and value < 1000 else (
        f"{value:.0f}" if math.isfinite(value) else "-"
    )  # fmt: skip


def table(rows: list[Row]) -> str:
    """One line a case: everyone's ms, ratios, and what ours costs beside time."""
    systems = list(dict.fromkeys(
        [row.system for row in rows if row.ours] + [row.system for row in rows if not row.ours]
    ))  # fmt: skip
    head = ["op", "shape", "gates", *systems, "peer/ours", "x floor", "host us", "peer's",
            "launches", "MiB", "error"]  # fmt: skip
    lines = [head]
    for (family, case, direction, gates), found in grouped(rows).items():
        by = {row.system: row for row in found}
        mine, theirs = best(found, True), best(found, False)
        cells = [f"{family} {direction}", case, gates]
        for system in systems:
            row = by.get(system)
            word = row.note.partition(":")[0] if row is not None else "-"
            cells.append(
                number(row.ms) if row is not None and math.isfinite(row.ms) else word or "-"
            )
        cells.append(f"{theirs.ms / mine.ms:.2f}" if mine and theirs else "-")
        if mine:
            cells += [
                number(mine.ms / mine.floor_ms, 2), number(mine.host_us, 4),
                number(theirs.host_us, 4) if theirs else "-", number(mine.launches, 4),
                number(mine.memory_mib, 4), f"{mine.error:.0e}",
            ]  # fmt: skip
        else:
            cells += ["-"] * 6
        lines.append(cells)
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 3 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    )


def where(commit: str, device: str) -> dict[str, str]:
    """What the figures belong to."""
    if not commit:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True,
                              text=True, cwd=HERE, check=False)  # fmt: skip
        commit = done.stdout.strip() or "unknown"
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = "none"
    gpu = torch.cuda.get_device_name() if device != "cpu" else "cpu"
    return {"gpu": gpu, "torch": torch.__version__, "triton": version, "commit": commit}


def write(path: Path, rows: list[Row], place: dict[str, str]) -> None:
    """The rows as CSV, each with where it was measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*place, *(f.name for f in fields(Row))])
        writer.writeheader()
        for row in rows:
            cells = asdict(row)
            writer.writerow(place | {name: f"{value:.6g}" if isinstance(value, float) else value
                                     for name, value in cells.items()})  # fmt: skip


def read(path: Path) -> tuple[list[Row], dict[str, str]]:
    """Rows of a CSV file, and where the first was measured."""
    rows, place = [], {}
    with path.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            cells: dict[str, Any] = {}
            for f in fields(Row):
                value = line.pop(f.name)
                cells[f.name] = float(value) if f.type == "float" else value
            cells["ours"] = cells["ours"] == "True"
            place = place or line
            rows.append(Row(**cells))
    return rows, place


def read_all(paths: list[Path]) -> tuple[list[Row], dict[str, str]]:
    """Rows of several files, which must have been measured at the same place."""
    rows, places = [], []
    for path in paths:
        found, place = read(path)
        rows += found
        places.append(place)
    if any(place != places[0] for place in places):
        raise SystemExit(f"not measured at the same place: {places}")
    return rows, places[0]


def titled(row: Row) -> str:
    """A system as a reader knows it."""
    return f"lagraph {row.system}" if row.ours else LIBRARIES.get(row.system, (row.system,))[0]


def plot(sources: list[Path], target: Path, gates: str = "slow") -> None:
    """The picture of CSV files: one regime's shapes, the fastest first in each."""
    rows, place = read_all(sources)
    groups = []
    for (family, case, direction, regime), found in grouped(rows).items():
        timed = sorted((row for row in found if math.isfinite(row.ms)), key=lambda row: row.ms)
        if regime == gates and timed:
            bars = [(titled(row), row.ms, row.ours) for row in timed]
            label = f"{family} {direction}, {case}"
            groups.append({"label": label, "floor": timed[0].floor_ms, "bars": bars})
    if not groups:
        raise SystemExit(f"no times with {gates} gates")
    title = f"{place['gpu']}, bf16, {gates} gates, commit {place['commit']}"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(roofline.svg(title, groups), encoding="utf-8")


def report(sources: list[Path], target: Path) -> None:
    """The tables of CSV files for the docs: times side by side, then what ours costs beside."""
    rows, place = read_all(sources)
    versions = {titled(row): row.version for row in rows if row.version}
    told = ", ".join(f"{name} {which}" for name, which in versions.items())
    lines = [
        f"{place['gpu']}, torch {place['torch']}, Triton {place['triton']}, commit "
        f"{place['commit']}{'; ' + told if told else ''}. Times in ms; the ratio is the fastest "
        "other library over ours; the error is ours, relative, the largest for what is allowed.",
        "",
        "| op | shape, heads | gates | ours | others | ratio | times the floor | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    costs = ["", "| op | shape, heads | system | launches | host us | MiB beyond results |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for (family, case, direction, gates), found in grouped(rows).items():
        mine, theirs = best(found, True), best(found, False)
        cells = ["; ".join(
            f"{titled(row)} {number(row.ms)}" if math.isfinite(row.ms)
            else f"{titled(row)}: {row.note.partition(':')[0]}"
            for row in found if row.ours == side
        ) or "-" for side in (True, False)]  # fmt: skip
        ratio = f"{theirs.ms / mine.ms:.2f}" if mine and theirs else "-"
        more = [number(mine.ms / mine.floor_ms, 2), f"{mine.error:.0e}"] if mine else ["-", "-"]
        lines.append(
            f"| {' | '.join([f'{family} {direction}', case, gates, *cells, ratio, *more])} |"
        )
        if gates == GATES[0]:
            costs += [
                f"| {family} {direction} | {case} | {titled(row)} | {number(row.launches, 4)} "
                f"| {number(row.host_us, 4)} | {number(row.memory_mib, 4)} |"
                for row in found if math.isfinite(row.ms)
            ]  # fmt: skip
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("\n".join(lines + costs) + "\n", encoding="utf-8")


# The command ---------------------------------------------------------------------------------


def chosen(args: argparse.Namespace) -> list[tuple[Case, str, str]]:
    """Cases with their direction and gates, as the options say."""
    words = [word for word in args.only.split(",") if word]
    picked = []
    for case in DRY if args.dry_run else CASES:
        if words and not any(word == case.family or word in str(case) for word in words):
            continue
        wanted = {"table": case.table, "both": DIRECTIONS}.get(args.direction, (args.direction,))
        for gates in args.gates.split(","):
            picked += [(case, direction, gates) for direction in wanted]
    return picked


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--only", default="", help="families or words of a shape, with commas")
    made.add_argument(
        "--direction",
        choices=["table", *DIRECTIONS, "both"],
        default="table",
        help="as published (the default), forward, forward + backward, or both",
    )
    made.add_argument("--gates", default=",".join(GATES), help="slow, strong, or both")
    made.add_argument("--plans", default="", help="our engines, with commas; all but eager")
    made.add_argument(
        "--peers", default=None, help="columns of the table, with commas; '' for none"
    )
    made.add_argument("--quick", action="store_true", help="fewer repeats")
    made.add_argument("--no-launches", action="store_true", help="do not count launches")
    made.add_argument("--csv", type=Path, help="write all figures here")
    made.add_argument("--json", action="store_true", help="print all figures as JSON, no table")
    made.add_argument("--commit", default="", help="what was measured; default: ask git")
    made.add_argument("--plot", type=Path, nargs="+", help="CSV files, then the SVG to draw")
    made.add_argument("--report", type=Path, nargs="+", help="CSV files, then the page to write")
    made.add_argument("--dry-run", action="store_true", help="tiny, on the CPU, eager engine")
    return made


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    for paths, make in ((args.plot, plot), (args.report, report)):
        if paths:
            if len(paths) < 2:
                parser().error("name CSV files, then the file to write")
            make(paths[:-1], paths[-1])
            return 0
    unknown = set(args.gates.split(",")) - set(GATES)
    if unknown:
        parser().error(f"--gates: {', '.join(sorted(unknown))}: there are {', '.join(GATES)}")
    peers = None if args.peers is None else [word for word in args.peers.split(",") if word]
    strangers = set(peers or ()) - {peer.name for peer in PEERS}
    if strangers:
        parser().error(f"--peers: no {', '.join(sorted(strangers))}")
    plans = [word for word in args.plans.split(",") if word]
    if args.dry_run:
        run = Comparison("cpu", torch.float32, plans or ["eager"], peers or [], quick=True)
    else:
        if not torch.cuda.is_available():
            parser().error("needs an NVIDIA GPU; --dry-run does without")
        engines = [row.name for row in registry.ENGINES if row.name != "eager"]
        run = Comparison("cuda", torch.bfloat16, plans or engines, peers, quick=args.quick)
    place = where(args.commit, run.device)
    cases = chosen(args)
    for case, direction, gates in cases:
        run.run(case, direction, gates)
        if args.csv:  # after each case: a run that is cut short keeps what it has
            write(args.csv, run.rows, place)
    if run.device != "cpu" and not args.no_launches:
        run.count_launches(cases)
    if args.csv:
        write(args.csv, run.rows, place)
    if args.json:
        print(json.dumps([place | asdict(row) for row in run.rows], indent=1))
    else:
        for row in run.rows:
            if row.note:
                print(f"{'  '.join(row.key)}  {row.system}: {row.note}")
        print(", ".join(f"{name} {value}" for name, value in place.items()))
        print(table(run.rows))
    return int(any(row.ours and row.note.startswith(("wrong", "failed")) for row in run.rows))


if __name__ == "__main__":
    sys.exit(main())
