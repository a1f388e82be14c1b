"""Context parallelism over any number of ranks, each case checked against one rank.

    torchrun --nproc-per-node 2 benchmarks/context_parallel.py       on GPUs, NCCL
    torchrun --nproc-per-node 8 benchmarks/context_parallel.py --cpu --quick
    python benchmarks/context_parallel.py --model                    the cost model's table alone
    torchrun --nproc-per-node 2 benchmarks/context_parallel.py --fit its constants, measured
    python benchmarks/context_parallel.py --report ROWS.csv ROWS.md  a table of rows, by --csv

Forward + backward, bf16 on GPUs and fp32 on CPUs, slow gates, of

    long      one sequence of --tokens (2^20): GDN, KDA and Mamba-2
    ragged    as many tokens in documents of very different lengths
    256k      one sequence of 2^18 tokens: GDN and KDA (--quick: a quarter of --tokens)

on contiguous and zig-zag fragments, by all-gather and by recursive doubling. First every way is
compared, at --check tokens, with the plain operator on one rank, all outputs and gradients; gates
are 64 times slower there, and a control without any exchange has to be far off, so that what
crosses a cut counts. Then it is timed: the median over --repeats of the slowest rank's time from a
barrier to the end of its work, host included. Rank 0 times the plain operator on the whole stream
in the same way, alone, while the others wait. A row is printed as soon as it is known:

    one       the plain operator, `chunk_*`, on the whole stream on one rank, ms
    cut       the recipe on the whole stream on one rank, as two fragments of a group of one: the
              same stages and pieces, and no exchange; ms
    ms        all ranks;  over one, over cut: the speed-ups;  efficiency: the lesser / ranks
    MiB       received by a rank in a step, the most;  bound: of that, to a state each way
    exchange  ms of both directions' collectives and folds alone, host included, which work may
              overlap;  share: of ms
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from lagraph import ops
from lagraph.ops import context_parallel as cp
from lagraph.ops.algebra import composed
from lagraph.ops.exchange import gather_slots, received_bytes, start_folds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20
BLOCK = 4096  # tokens that one seed makes, so that a rank draws its own alone
SHARED = ("A",)  # parameters: every rank has all of them
# Sharded and plain results may each be off by the tolerance of the tests.
SLOWER = 64.0  # gates of the check
ERRORS = {torch.bfloat16: (1e-2, 4e-2), torch.float32: (2e-5, 2e-4)}


# The cost model --------------------------------------------------------------------------------

# By --fit on two H200 of one host, NVLink, NCCL of torch 2.11: calls made one after the other, so
# that what the host needs to launch them is in the latencies and products.
MEASURED = {
    "latency": 82.6e-6, "bandwidth": 452e9, "gather_latency": 62.7e-6, "gather_bandwidth": 355e9,
    "fold": 136e-6, "compose": 149e-6,
}  # fmt: skip
# The same with an ASSUMED network: one 400 Gb/s port a GPU.
NETWORK = MEASURED | {"bandwidth": 50e9, "gather_bandwidth": 50e9}


@dataclass(frozen=True)
class Cost:
    """One direction of a step of one long sequence on contiguous fragments, per rank.

    seconds: of the device, if the host is ahead of it; host: of the host, to launch all of it.
    """

    ranks: int
    gather_bytes: int
    gather_steps: int
    gather_seconds: float
    gather_host: float
    doubling_bytes: int
    doubling_steps: int
    doubling_seconds: float
    doubling_host: float


def model(
    ranks: int,
    heads: int,
    K: int,
    V: int,
    latency: float,
    bandwidth: float,
    *,
    fold: float = 0.0,
    compose: float = 0.0,
    gather_latency: float | None = None,
    gather_bandwidth: float | None = None,
    host_send: float = 0.0,
    host_gather: float = 0.0,
    host_fold: float = 0.0,
    host_compose: float = 0.0,
    log2_decay: bool = False,
) -> Cost:
    """What a rank receives in one direction, in how many rounds, and how long that takes.

    latency: seconds of a round; bandwidth: bytes a second into a rank; gather_*: the same within a
    collective, which is taken as a ring; fold: seconds of merging a state into a summary; compose:
    of composing two; host_*: of launching a round of messages, an all-gather, one of these.
    """
    rows = V + (1 if log2_decay else K)
    bias, summary = 4 * heads * V * K, 4 * heads * rows * K
    chain = ranks - 1
    # A chain of one link folds biases alone, and so does the last round of doubling.
    gathered = chain * (bias if chain <= 1 else summary)
    folds = max(chain - 1, 0)  # the first link is a state already
    slow = latency if gather_latency is None else gather_latency
    wide = bandwidth if gather_bandwidth is None else gather_bandwidth
    gather = chain * slow + gathered / wide + folds * fold
    rounds = chain.bit_length()
    received = (rounds - 1) * summary + bias if rounds else 0
    compositions = 2 * (rounds - 1) - 1 if rounds > 1 else 0  # the first comes before nothing
    last = 1 if rounds > 1 else 0
    doubling = rounds * latency + received / bandwidth + compositions * compose + last * fold
    return Cost(
        ranks, gathered, chain, gather, host_gather + folds * host_fold, received, rounds, doubling,
        rounds * host_send + compositions * host_compose + last * host_fold,
    )  # fmt: skip


def model_table(
    heads: int = 16, K: int = 128, V: int = 128, constants: dict[str, float] = MEASURED
) -> str:
    """Markdown: both exchanges for 2 to 1024 ranks."""
    host = any(name.startswith("host_") for name in constants)
    more = " host ms |" if host else ""
    lines = [
        f"| ranks | all-gather MiB | rounds | ms |{more} doubling MiB | rounds | ms |{more}",
        "|" + "---|" * (9 if host else 7),
    ]
    for ranks in (1 << power for power in range(1, 11)):
        cost = model(ranks, heads, K, V, **constants)
        cells = [f"{ranks}"]
        for received, rounds, seconds, launching in (
            (cost.gather_bytes, cost.gather_steps, cost.gather_seconds, cost.gather_host),
            (cost.doubling_bytes, cost.doubling_steps, cost.doubling_seconds, cost.doubling_host),
        ):
            cells += [f"{received / MIB:.0f}", f"{rounds}", f"{1e3 * seconds:.2f}"]
            cells += [f"{1e3 * launching:.2f}"] if host else []
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def crossover(
    heads: int, K: int, V: int, constants: dict[str, float], *, host: bool = False
) -> int:
    """The first number of ranks from which doubling takes less time; 0 if none up to 1024 does."""

    def pays(ranks: int) -> bool:
        cost = model(ranks, heads, K, V, **constants)
        if host:
            return cost.gather_host <= cost.doubling_host
        return cost.gather_seconds <= cost.doubling_seconds

    slower = [ranks for ranks in range(2, 1025) if pays(ranks)]
    return 0 if slower and slower[-1] == 1024 else max(slower, default=1) + 1


def fitted(
    s: Setting, repeats: int
) -> tuple[dict[str, float], list[tuple[str, int, float, float, float]]]:
    """The model's constants on these ranks, and what they were fitted to: (kind of call, bytes,
    seconds of the device, of the host, seconds by the line).

    Lines are fitted to times of messages of 64 KiB and up, around a ring and by all-gather.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    sizes = [1 << power for power in range(16, 23 if s.device.type == "cpu" else 27)]
    around = dist.group.WORLD

    def shift(sent: torch.Tensor, got: torch.Tensor) -> None:
        moves = [dist.P2POp(dist.isend, sent, (rank + 1) % world, around),
                 dist.P2POp(dist.irecv, got, (rank - 1) % world, around)]  # fmt: skip
        for work in dist.batch_isend_irecv(moves):
            work.wait()

    def gather(sent: torch.Tensor, got: torch.Tensor) -> None:
        gather_slots(sent[None], around)

    found: dict[str, float] = {}
    shown = []
    kinds = (("", "host_send", shift, 1), ("gather_", "host_gather", gather, world - 1))
    for name, host, call, rounds in kinds:
        points, hosts = [], []
        for size in sizes:
            sent = torch.zeros(size // 4, device=s.device)
            work, launched = launched_ahead(partial(call, sent, torch.empty_like(sent)), s, repeats)
            points.append((size, work / rounds))
            hosts.append(launched)
        a, b = line(points)
        found |= {f"{name}latency": a, f"{name}bandwidth": 1 / b, host: statistics.median(hosts)}
        what = host.removeprefix("host_")
        shown += [(what, x, y, h, a + b * x) for (x, y), h in zip(points, hosts)]
    K, V = s.dim, s.dim
    one = cp.neutral_summary(s.heads, V, K, device=s.device)
    table = one.expand(2, 1, *one.shape).contiguous()
    chain = torch.zeros(1, OFTEN + 1, dtype=torch.int64, device=s.device)
    with torch.no_grad():
        for name, step in (("fold", partial(cp.fold_slots, table, chain)),
                           ("compose", partial(composed, one, one, V, False))):  # fmt: skip
            work, launched = launched_ahead(step, s, repeats)
            if name == "fold":  # as many in one call
                work, launched = work / OFTEN, launched / OFTEN
            found |= {name: work, f"host_{name}": launched}
    return found, shown


OFTEN = 20  # calls in a row, so that what is before and after counts little


def launched_ahead(call: Callable[[], Any], s: Setting, repeats: int) -> tuple[float, float]:
    """Seconds of the device and of the host for a call, the slowest rank's median: on a GPU a
    product keeps the device busy until all calls are launched. On a CPU both are the same."""
    busy = torch.zeros(8192, 8192, device=s.device) if s.device.type == "cuda" else None
    works, hosts = [], []
    for _ in range(2):
        call()
    for _ in range(repeats):
        wait(s.device)
        dist.barrier()
        wait(s.device)
        if busy is not None:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            busy @ busy
            first.record()
        begin = time.perf_counter()
        for _ in range(OFTEN):
            call()
        hosts.append((time.perf_counter() - begin) / OFTEN)
        if busy is not None:
            last.record()
            wait(s.device)
            works.append(1e-3 * first.elapsed_time(last) / OFTEN)
    made = torch.tensor([works or hosts, hosts], dtype=torch.float64, device=s.device)
    dist.all_reduce(made, op=dist.ReduceOp.MAX)
    work, host = made.median(1).values.tolist()
    return work, host


def line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """a and b > 0 of the line a + b x with the least squares of relative errors, a >= 0."""
    weights = [1 / y**2 for _, y in points]
    n = sum(weights)
    mx = sum(w * x for w, (x, _) in zip(weights, points)) / n
    my = sum(w * y for w, (_, y) in zip(weights, points)) / n
    up = sum(w * (x - mx) * (y - my) for w, (x, y) in zip(weights, points))
    b = up / sum(w * (x - mx) ** 2 for w, (x, _) in zip(weights, points))
    if b <= 0 or my - b * mx < 0:  # no latency to be seen
        b = sum(w * x * y for w, (x, y) in zip(weights, points))
        b /= sum(w * x * x for w, (x, _) in zip(weights, points))
        return 0.0, b
    return my - b * mx, b


# Inputs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Where things run, and how large they are."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    dim: int
    pieces: int | None

    def dims(self, family: str) -> tuple[int, int]:
        """K and V: Mamba-2's heads are half as wide as its state."""
        return self.dim, self.dim // 2 if family == "mamba2" else self.dim


def shapes(family: str, s: Setting) -> dict[str, tuple[int, ...]]:
    """Shapes a token of a family's arguments, in order."""
    H, (K, V) = s.heads, s.dims(family)
    if family == "mamba2":
        return {"x": (H, V), "dt": (H,), "A": (H,), "B": (1, K), "C": (1, K)}
    gate = (H, K) if family == "kda" else (H,)
    return {"q": (H, K), "k": (H, K), "v": (H, V), "gate": gate, "beta": (H,)}


def block(family: str, s: Setting, index: int) -> dict[str, torch.Tensor]:
    """Tokens [BLOCK index, BLOCK (index + 1)) of the stream, and the outputs' gradient."""
    r = torch.Generator(s.device).manual_seed(1000 + index)
    made = {}
    for name, shape in {**shapes(family, s), "d_o": (s.heads, s.dims(family)[1])}.items():
        if name in SHARED:
            continue
        x = torch.randn(BLOCK, *shape, generator=r, device=s.device)
        if name in ("q", "k", "B"):
            x = F.normalize(x, dim=-1)
        elif name == "gate":
            x = -(0.5 if family == "kda" else 0.1) * F.softplus(x)
        elif name == "dt":
            x = 0.5 * x - 2.0
        elif name == "beta":
            x = x.sigmoid()
        made[name] = x if name in ("gate", "beta", "dt") else x.to(s.dtype)
    return made


def draw(
    family: str, s: Setting, ranges: list[tuple[int, int]], slower: float = 1.0
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The arguments [1, T, ...] of ranges of the stream, and the gradient of their outputs.

    slower: what decays are divided by.
    """
    total = sum(stop - start for start, stop in ranges)
    made: dict[str, torch.Tensor] = {}
    at = 0
    if not total:
        made = {n: x[:0] for n, x in block(family, s, 0).items()}
    for start, stop in ranges:
        for index in range(start // BLOCK, -(-stop // BLOCK)):
            a, b = max(start, index * BLOCK), min(stop, (index + 1) * BLOCK)
            for name, x in block(family, s, index).items():
                if name not in made:
                    made[name] = x.new_empty(total, *x.shape[1:])
                made[name][at : at + b - a] = x[a - index * BLOCK : b - index * BLOCK]
            at += b - a
    d_o = made.pop("d_o")[None]
    x = {name: made[name][None] for name in shapes(family, s) if name in made}
    if family == "mamba2":
        r = torch.Generator(s.device).manual_seed(1)
        rate = -torch.exp(0.5 * torch.randn(s.heads, generator=r, device=s.device)) / slower
        x = {"x": x["x"], "dt": x["dt"], "A": rate, "B": x["B"], "C": x["C"]}
    else:
        x["gate"] /= slower
    return {name: t.requires_grad_() for name, t in x.items()}, d_o


def documents(tokens: int) -> tuple[int, ...]:
    """Offsets of documents from a few tokens to a quarter of all, log-uniform."""
    r = torch.Generator().manual_seed(3)
    offsets = [0]
    top = math.log(max(tokens // 4, 2))
    while offsets[-1] < tokens:
        length = int(math.exp(float(torch.rand((), generator=r)) * top)) + 1
        offsets.append(min(offsets[-1] + max(length, 16), tokens))
    return tuple(offsets)


TABLES = {"contiguous": cp.contiguous_fragments, "zigzag": cp.zigzag_fragments}


# Calls -----------------------------------------------------------------------------------------

Results = tuple[torch.Tensor, tuple[torch.Tensor, ...]]


def plain(family: str, x: dict[str, torch.Tensor], d_o: torch.Tensor, cu: torch.Tensor) -> Results:
    """The operator on one rank, forward and backward."""
    out, _ = getattr(ops, f"chunk_{family}")(*x.values(), cu_seqlens=cu)
    return out.detach(), torch.autograd.grad(out, list(x.values()), d_o)


def shared(
    family: str,
    x: dict[str, torch.Tensor],
    d_o: torch.Tensor,
    routing: cp.ContextParallelRouting,
    group: Any,
    exchange: str,
    pieces: int | None,
) -> Results:
    """This rank's part of it."""
    out, _ = getattr(cp, f"context_parallel_{family}")(
        *x.values(), routing=routing, group=group, exchange=exchange, pieces=pieces
    )
    return out.detach(), torch.autograd.grad(out, list(x.values()), d_o)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(call: Callable[[], Any], device: torch.device, repeats: int, meet: bool) -> float:
    """Seconds: the median of the slowest rank's, or of this rank's alone."""
    for _ in range(2 if repeats > 1 else 1):
        call()
    times = []
    for _ in range(repeats):
        wait(device)
        if meet:
            dist.barrier()
            wait(device)
        begin = time.perf_counter()
        made = call()
        wait(device)
        times.append(time.perf_counter() - begin)
        del made
    found = torch.tensor(times, dtype=torch.float64, device=device)
    if meet:
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return statistics.median(found.tolist())


def exchange_time(
    family: str, s: Setting, routing: cp.ContextParallelRouting, kind: str, repeats: int
) -> float:
    """Seconds of both directions' exchange and folds, with nothing beside."""
    K, V = s.dims(family)
    decay = family == "mamba2"
    one = cp.neutral_summary(s.heads, V, K, device=s.device, log2_decay=decay)
    rows = one.expand(routing.slots, *one.shape).contiguous()

    def both() -> None:
        for reverse in (False, True):
            start_folds(rows, routing, dist.group.WORLD, log2_decay=decay, reverse=reverse,
                        exchange=kind).folds()  # fmt: skip

    return timed(both, s.device, 4 * repeats, True)


# Checks ----------------------------------------------------------------------------------------


def worst(family: str, s: Setting, cu: tuple[int, ...], kinds: list[tuple[str, str]]
          ) -> dict[tuple[str, str], tuple[float, float]]:  # fmt: skip
    """Relative errors of outputs and of gradients of every (fragments, exchange) against one rank,
    the largest of all ranks. Every rank computes the whole for itself."""
    x, d_o = draw(family, s, [(0, cu[-1])], SLOWER)
    want = plain(family, x, d_o, torch.tensor(cu, dtype=torch.int32, device=s.device))
    found = {}
    for partition, kind in kinds:
        plan = cp.ContextParallelPlan.from_fragments(
            cu, TABLES[partition](cu[-1], dist.get_world_size()), dist.get_rank()
        )
        routing, ids = plan.routing(s.device), plan.global_token_ids(s.device)
        mine = {
            name: (t if name in SHARED else t[:, ids]).detach().requires_grad_()
            for name, t in x.items()
        }
        got = shared(family, mine, d_o[:, ids], routing, dist.group.WORLD, kind, s.pieces)
        found[partition, kind] = distances(x, got, want, ids)
        control = plain(family, mine, d_o[:, ids], routing.cu_seqlens)
        if routing.chain and distances(x, control, want, ids)[0] < 2 * ERRORS[s.dtype][0]:
            raise SystemExit(f"{family} {partition}: the check sees nothing of the exchange")
    return found


def distances(
    x: dict[str, torch.Tensor], got: Results, want: Results, ids: torch.Tensor
) -> tuple[float, float]:
    """Relative errors of outputs and gradients of all ranks' tokens together."""
    squares = []
    for name, mine, whole in zip(["o", *x], (got[0], *got[1]), (want[0], *want[1]), strict=True):
        if name in SHARED:  # summed over ranks; then all of them count it
            mine = mine.clone()
            dist.all_reduce(mine)
        else:
            whole = whole[:, ids]
        part = (mine.double() - whole.double()).square().sum()
        squares += [part, whole.double().square().sum()]
    sums = torch.stack(squares)
    dist.all_reduce(sums)
    error = (sums[::2] / sums[1::2]).sqrt().nan_to_num(nan=math.inf).tolist()
    return error[0], max(error[1:])


# Rows ------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One line of the table; times in ms, NaN where nothing was measured."""

    shape: str
    family: str
    tokens: int
    ranks: int
    fragments: str
    exchange: str
    one: float = math.nan
    cut: float = math.nan
    ms: float = math.nan
    mib: float = math.nan
    bound: float = math.nan
    exchange_ms: float = math.nan
    output_error: float = math.nan
    gradient_error: float = math.nan
    note: str = ""

    @property
    def speedup(self) -> float:
        return self.one / self.ms

    @property
    def over_cut(self) -> float:
        return self.cut / self.ms

    HEAD = (
        "| shape | op | tokens | ranks | fragments | exchange | one | cut | ms | over one "
        "| over cut | efficiency | MiB | bound | exchange ms | share | errors | note |\n"
        + "|---" * 18 + "|"
    )  # fmt: skip

    def __str__(self) -> str:
        def shown(x: float, form: str) -> str:
            return "-" if math.isnan(x) else format(x, form)

        gains = [x for x in (self.speedup, self.over_cut) if not math.isnan(x)]
        efficiency = min(gains, default=math.nan) / self.ranks
        return (
            f"| {self.shape} | {self.family} | {self.tokens} | {self.ranks} | {self.fragments} "
            f"| {self.exchange} | {shown(self.one, '.2f')} | {shown(self.cut, '.2f')} "
            f"| {shown(self.ms, '.2f')} | {shown(self.speedup, '.2f')} "
            f"| {shown(self.over_cut, '.2f')} | {shown(efficiency, '.2f')} "
            f"| {shown(self.mib, '.2f')} | {shown(self.bound, '.2f')} "
            f"| {shown(self.exchange_ms, '.3f')} | {shown(self.exchange_ms / self.ms, '.1%')} "
            f"| {self.output_error:.0e} {self.gradient_error:.0e} | {self.note} |"
        )


def read_rows(path: str) -> list[Row]:
    """Rows that --csv wrote."""
    kinds = {field.name: field.type for field in fields(Row)}
    convert = {"str": str, "int": int, "float": float}
    with open(path, newline="", encoding="utf-8") as file:
        return [
            Row(**{name: convert[str(kinds[name])](x) for name, x in line.items() if name in kinds})  # type: ignore[arg-type]
            for line in csv.DictReader(file)
        ]


def report(path: str) -> str:
    """Markdown: the rows of a file."""
    return "\n".join([Row.HEAD, *map(str, read_rows(path))]) + "\n"


def alone(
    family: str, s: Setting, cu: tuple[int, ...], repeats: int, solo: Any
) -> tuple[float, float, str]:
    """Rank 0's times of the plain operator and, on a GPU, of the recipe in pieces."""
    one, cut, note = math.nan, math.nan, ""
    if s.device.type == "cuda":
        torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        try:
            offsets = torch.tensor(cu, dtype=torch.int32, device=s.device)
            x, d_o = draw(family, s, [(0, cu[-1])])
            one = timed(lambda: plain(family, x, d_o, offsets), s.device, repeats, False)
            if s.device.type == "cuda" or s.pieces:
                # Two fragments of one rank: a sequence is cut, so that pieces may be.
                half = cu[-1] // 2
                plan = cp.ContextParallelPlan.from_fragments(cu, [[(0, half), (half, cu[-1])]], 0)
                routing = plan.routing(s.device)
                cut = timed(
                    lambda: shared(family, x, d_o, routing, solo, "all_gather", s.pieces),
                    s.device, repeats, False,
                )  # fmt: skip
        except torch.OutOfMemoryError:
            note = "one rank: out of memory"
    dist.barrier()
    if s.device.type == "cuda":
        torch.cuda.empty_cache()
    return one, cut, note


def rows(
    name: str, family: str, s: Setting, cu: tuple[int, ...], kinds: list[tuple[str, str]],
    errors: dict[tuple[str, str], tuple[float, float]], repeats: int, solo: Any,
) -> Iterator[Row]:  # fmt: skip
    """The rows of one shape and family."""
    one, cut, note = alone(family, s, cu, repeats, solo)
    world = dist.get_world_size()
    K, V = s.dims(family)
    for partition, kind in kinds:
        table = TABLES[partition](cu[-1], world)
        plan = cp.ContextParallelPlan.from_fragments(cu, table, dist.get_rank())
        routing = plan.routing(s.device)
        x, d_o = draw(family, s, table[dist.get_rank()])
        call = partial(shared, family, x, d_o, routing, dist.group.WORLD, kind, s.pieces)
        ms = timed(call, s.device, repeats, True)
        del x, d_o, call
        sizes = {"log2_decay": family == "mamba2", "exchange": kind}
        received = sum(
            received_bytes(routing, s.heads, V, K, reverse=reverse, **sizes)
            for reverse in (False, True)
        )
        most = torch.tensor(float(received), dtype=torch.float64, device=s.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        apart = exchange_time(family, s, routing, kind, repeats)
        yield Row(
            name, family, cu[-1], world, partition, kind, 1e3 * one, 1e3 * cut, 1e3 * ms,
            most.item() / MIB, most.item() / (2 * 4 * s.heads * V * K), 1e3 * apart,
            *errors[partition, kind], note,
        )  # fmt: skip


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, help="of the stream; 2^20, 2^16 with --quick")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dim", type=int, help="K and V (Mamba-2: V half of it); 128, 16 on a CPU")
    parser.add_argument("--families", default="gdn,kda,mamba2")
    parser.add_argument("--shapes", default="256k,long,ragged")
    parser.add_argument("--fragments", default="contiguous,zigzag")
    parser.add_argument("--exchanges", default="all_gather,doubling")
    parser.add_argument("--pieces", type=int, help="of a span; chosen by the recipe if absent")
    parser.add_argument("--repeats", type=int, help="7, 3 with --quick")
    parser.add_argument("--check", type=int, help="tokens of the check; 2^14, 2^10 on a CPU")
    parser.add_argument("--check-only", action="store_true", help="check, and time nothing")
    parser.add_argument("--quick", action="store_true", help="short streams and few repeats")
    parser.add_argument("--cpu", action="store_true", help="gloo, although there are GPUs")
    parser.add_argument("--csv", help="a file for the rows")
    parser.add_argument("--model", action="store_true", help="print the cost model and stop")
    parser.add_argument("--report", nargs=2, metavar=("CSV", "MD"), help="write a table and stop")
    parser.add_argument("--fit", action="store_true", help="measure the model's constants and stop")
    args = parser.parse_args()
    args.cpu |= not torch.cuda.is_available()
    args.tokens = args.tokens or (1 << (11 if args.cpu else 16) if args.quick else 1 << 20)
    args.dim = args.dim or (16 if args.cpu else 128)
    args.repeats = args.repeats or (3 if args.quick else 7)
    args.check = min(args.check or 1 << (10 if args.cpu else 14), args.tokens)
    return args


def main() -> None:
    """Check and time every case; the exit status is 1 where something was wrong."""
    args = arguments()
    if args.model:
        print(model_table())
        for name, constants in (("measured", MEASURED), ("by a network", NETWORK)):
            first = crossover(16, 128, 128, constants)
            print(f"{name}: doubling takes less time from {first} ranks on; {constants}")
        return
    if args.report:
        Path(args.report[1]).write_text(report(args.report[0]), encoding="utf-8")
        return
    bound: dict[str, Any] = {}
    if "RANK" not in os.environ:
        bound = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    device = torch.device("cpu")
    if args.cpu:
        torch.set_num_threads(1)
    else:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        bound["device_id"] = device
    dist.init_process_group("gloo" if args.cpu else "nccl", **bound)
    solo = dist.new_group([0])
    rank, world = dist.get_rank(), dist.get_world_size()
    s = Setting(device, torch.float32 if args.cpu else torch.bfloat16, args.heads, args.dim,
                args.pieces)  # fmt: skip
    kinds = [(p, e) for p in args.fragments.split(",") for e in args.exchanges.split(",")]
    families = args.families.split(",")
    streams = {
        "256k": (0, args.tokens // 4 if args.quick else 1 << 18),
        "long": (0, args.tokens),
        "ragged": documents(args.tokens),
    }
    small = {"256k": (0, args.check), "long": (0, args.check), "ragged": documents(args.check)}

    def say(text: object) -> None:
        if rank == 0:
            print(text, flush=True)

    if args.fit:
        if world == 1:
            raise SystemExit("--fit needs two ranks")
        constants, points = fitted(s, args.repeats)
        constants = {name: float(f"{value:.3g}") for name, value in constants.items()}
        say(f"{world} ranks, {s.heads} heads, K = V = {s.dim}: {constants}")
        say("| call | bytes | us | host us | by the line |\n|---|---|---|---|---|")
        for name, size, work, host, by_line in points:
            say(f"| {name} | {size} | {1e6 * work:.1f} | {1e6 * host:.1f} | {1e6 * by_line:.1f} |")
        error = max(abs(by_line - work) / work for _, _, work, _, by_line in points)
        say(f"largest relative error of a line {error:.2f}")
        say(model_table(s.heads, s.dim, s.dim, constants))
        say(f"doubling takes less time from {crossover(s.heads, s.dim, s.dim, constants)} ranks on")
        dist.destroy_process_group()
        return
    where = "CPU" if args.cpu else torch.cuda.get_device_name(device)
    say(f"{world} x {where}, torch {torch.__version__}, {s.dtype}, heads {s.heads}, K {s.dim}; "
        f"checked at {args.check} tokens, errors of outputs and gradients")  # fmt: skip
    say(Row.HEAD)
    written, failed = [], []
    for name in args.shapes.split(","):
        for family in families:
            if name == "256k" and family not in ("gdn", "kda"):
                continue
            begin = time.perf_counter()
            errors = worst(family, s, small[name], kinds)
            allowed = ERRORS[s.dtype]
            failed += [
                f"{name} {family} {kind}: {found}" for kind, found in errors.items()
                if any(a > b for a, b in zip(found, allowed))
            ]  # fmt: skip
            if args.check_only:
                for kind, found in errors.items():
                    row = Row(name, family, small[name][-1], world, *kind, note="checked")
                    row.output_error, row.gradient_error = found
                    say(row)
                    written.append(row)
                continue
            for row in rows(name, family, s, streams[name], kinds, errors, args.repeats, solo):
                say(row)
                written.append(row)
            if rank == 0:
                spent = time.perf_counter() - begin
                print(f"{name} {family}: {spent:.1f} s", file=sys.stderr, flush=True)
    if args.csv and rank == 0:
        with open(args.csv, "w", newline="", encoding="utf-8") as file:
            names = list(asdict(written[0]))
            writer = csv.DictWriter(file, [*names, "speedup"])
            writer.writeheader()
            writer.writerows(asdict(row) | {"speedup": row.speedup} for row in written)
    dist.destroy_process_group()
    if failed:
        raise SystemExit("wrong: " + "; ".join(failed))
    say("all agree with one rank")


if __name__ == "__main__":
    main()
