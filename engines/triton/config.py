"""Fixed launch configurations: tile sizes, warps and stages by architecture and head dims.

`choose` is a pure function of a problem's static facts, so that neither T nor N tunes or recompiles
anything. `schedule` says how the forward's serial pass runs at the T and N of a call: on which of
two prepared tiles, and cut into how many segments. It is a pure function, too, of shapes alone: the
lengths of the sequences are on the device, so it goes by their mean, and what it returns is right
for any lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lagraph.problem import Problem

__all__ = ["Config", "Schedule", "Tile", "Work", "choose", "schedule", "work_of"]


class Tile(NamedTuple):
    """A launch shape of the forward's serial pass.

    block_v: V-slice. resident: programs that share an SM.
    """

    block_v: int
    warps: int
    stages: int
    resident: int


@dataclass(frozen=True, slots=True)
class Config:
    """Tiles and launch shapes.

    chunk: steps a chunk; queries: query rows of a chunk.
    share: heads of one group whose factors one program makes.
    block_k: K-block of the factor kernels; block_v: V-slice of the backward's serial kernels.
    near_k: K-block of the factor kernel for ordinary gates a key channel; near_warps 0: none.
    near_blocks: whether it also has an anchor a block, for strong gates.
    *_warps, *_stages, *_registers: launch shape of each kernel; scan_* are the backward's.
    few, many: the forward's serial pass where few slices of the state leave SMs idle, and where
    they fill them. link_stages: of the kernel that carries states over segments.
    serial_registers: a limit named, since the assembler, where a state spills, may choose 32.
    split: whether 16-bit products around the inverse are in two parts: 0 never, 1 always, 2 where
    a chunk's inverse is large.
    precision: how fp32 operands are multiplied.
    """

    chunk: int
    queries: int
    share: int
    block_k: int
    block_v: int
    factor_warps: int
    factor_stages: int
    factor_registers: int | None
    near_k: int
    near_warps: int
    near_blocks: bool
    near_registers: int | None
    scan_warps: int
    scan_stages: int
    few: Tile
    many: Tile
    link_stages: int
    serial_registers: int | None
    split: int
    precision: str


# Architectures whose blocks get at most 99 KB of shared memory.
SMALL_SHARED = frozenset({86, 87, 89, 120, 121})


def _share(problem: Problem, most: int) -> int:
    """Heads with the same q and k head that one program serves: a power of two, at most `most`."""
    size = problem.sizes
    if problem.traits.gate == "key":
        return 1
    group = size["HO"] // max(size.get("H", 1), size["HK"])
    return min(group & -group, most)


def _split(problem: Problem, knobs: Mapping[str, int | str]) -> int:
    """Only reflections (beta near 2) along keys that repeat need it."""
    if not problem.traits.delta or problem.io_dtype.itemsize != 2:
        return 0
    reflects = getattr(problem.options, "allow_neg_eigval", False)
    return int(knobs.get("split", 2 if reflects else 0))


def _full_precision() -> str:
    """Three passes of tf32 lose two bits of fp32; six of bf16, which take as long, none."""
    from triton import knobs  # schedules are chosen without it

    return "ieee" if knobs.runtime.interpret else "bf16x6"  # which the interpreter does not know


def choose(problem: Problem, knobs: Mapping[str, int | str]) -> Config:
    """The configuration for a problem; a knob overrides the entry of its name."""
    size = problem.sizes
    wide = problem.io_dtype.itemsize == 4
    large = max(size["K"], size["V"]) > 128
    key_gate = problem.traits.gate == "key"
    small_shared = problem.arch in SMALL_SHARED
    # There the operands of a product take registers too.
    no_wgmma = problem.arch < 90 or problem.arch >= 120

    chunk = 64
    if wide and large:
        chunk = 16
    elif wide or large or small_shared or key_gate or (problem.traits.delta and not no_wgmma):
        # The inverse and, under a per-key gate, pairs of blocks cost more than fewer steps gain.
        chunk = 32
    chunk = int(knobs.get("chunk", chunk))
    every = getattr(problem.options, "checkpoint_every_n_tokens", 0)
    if every:
        chunk = gcd(chunk, every)
    substeps = size.get("n", 1)
    queries = chunk // substeps
    if substeps * queries != chunk or queries < 16:
        queries = chunk

    block_k = 32 if wide else 16 if key_gate and chunk <= 32 else 64
    factor_warps = 4
    if not wide and chunk <= 32:
        factor_warps = 1 if key_gate else 2
    near_k = min(size["K"], int(knobs.get("near_k", 128)))
    # For strong gates (about -5) KDA's forward of 8192 steps and 64 heads took 0.87 ms with anchors
    # a block and 1.25 without, for slow ones 0.84 and 0.80. GDN-2, with one operand more, lost 0.13
    # of 1.26 under slow ones.
    near_blocks = bool(int(knobs.get("near_blocks", problem.traits.erase != "key")))
    # Three programs an SM, or as many registers as it takes not to spill.
    near_registers = 0 if large or problem.io_dtype == torch.float16 else 168
    plain = problem.traits.erase != "key" and not near_blocks
    if near_registers and problem.arch >= 90 and size["K"] == 128 and plain:
        near_registers = 128  # four
    split = _split(problem, knobs)
    # Products in two parts there spill a wider slice.
    block_v = 16 if wide else 32 if split and no_wgmma else 64
    block_v = min(size["V"], int(knobs.get("block_v", block_v)))
    scan_warps = int(knobs.get("scan_warps", 8 if wide or large or no_wgmma else 4))
    scan_stages = int(knobs.get("scan_stages", 1 if wide else 2))
    few = many = (block_v, scan_warps, scan_stages)
    # Measured there alone. With a write strength per channel the wide slice spills.
    if (
        90 <= problem.arch < 100
        and not wide
        and problem.traits.delta
        and problem.traits.write != "value"
        and size["K"] == size["V"] == 128
        and chunk >= 32
    ):
        few, many = (64, 4, 3), (128, 8, 3)
    if getattr(problem.options, "batch_invariant", False):
        many = few
    tiles = [_tile(problem, knobs, chunk, queries, *shape) for shape in (few, many)]

    return Config(
        chunk=chunk,
        queries=queries,
        share=_share(problem, int(knobs.get("share", 4 if problem.traits.delta else 8))),
        block_k=min(size["K"], int(knobs.get("block_k", block_k))),
        block_v=block_v,
        factor_warps=int(knobs.get("factor_warps", factor_warps)),
        factor_stages=int(knobs.get("factor_stages", 1 if wide else 2)),
        factor_registers=int(knobs.get("factor_registers", 0)) or None,
        near_k=near_k,
        near_warps=int(knobs.get("near_warps", 0 if wide else max(near_k * chunk // 1024, 1))),
        near_blocks=near_blocks,
        near_registers=int(knobs.get("near_registers", near_registers)) or None,
        scan_warps=scan_warps,
        scan_stages=scan_stages,
        few=tiles[0],
        many=tiles[1],
        link_stages=2 if small_shared else 3,
        serial_registers=255 if large or (split and no_wgmma) else None,
        split=split,
        precision=str(knobs.get("precision", _full_precision() if wide else "tf32x3")),
    )


# Shared memory: what an SM has, what one program may take, and what it needs beside its stages.
KB = 1024
SM_SHARED = {"small": 100 * KB, 80: 164 * KB, 90: 228 * KB}
MARGIN = 6 * KB


def _tile(
    problem: Problem,
    knobs: Mapping[str, int | str],
    chunk: int,
    queries: int,
    block_v: int,
    warps: int,
    stages: int,
) -> Tile:
    """A tile with as many of its stages as shared memory holds, or as the knobs say."""
    size, traits, arch = problem.sizes, problem.traits, problem.arch
    io, key_gate = problem.io_dtype.itemsize, traits.gate == "key"
    block_v = min(size["V"], int(knobs.get("block_v", block_v)))
    warps = int(knobs.get("scan_warps", warps))
    # Elements of a stage: keys and values, queries and scores, the inverse.
    values = block_v * (2 if traits.write == "value" else 1)
    tiles = chunk * (size["K"] * (2 if key_gate else 1) + values) + queries * (size["K"] + chunk)
    if traits.delta:
        tiles += chunk * chunk
    total = SM_SHARED["small" if arch in SMALL_SHARED else 90 if arch >= 90 else 80]
    while stages > 2 and stages * tiles * io + MARGIN > total - KB:
        stages -= 1
    stages = int(knobs.get("scan_stages", stages))
    # Two programs of 4 warps take all registers.
    twice = warps <= 4 and 2 * (stages * tiles * io + MARGIN) <= total
    return Tile(block_v, warps, stages, 2 if twice else 1)


# The forward's serial pass at a call's shapes ---------------------------------------------------

# Microseconds, fitted on an H200 (132 SMs; bf16, K = V = 128): of chunks of 64, slices of 64 x 128
# with 4 warps take 1.7 on half of the SMs and 2.0 on all, 128 x 128 with 8 warps 2.4 on a quarter
# and 2.7 on all; of chunks of 32, these take 1.6 on all, or 1.8 under a gate a key channel.
LATENCY = 0.6  # of a chunk, whatever the slice: products that wait for one another
WORK = 0.85  # of 64 steps of a chunk for every 64 x 128 of the state
KEYS = 1.2  # how much longer where a gate a key channel makes tiles of the rows: more to load
PLAIN = 0.6  # share of WORK that is left without the delta rule
WIDE = 6.0  # how much more WORK fp32 products are
CROWD = 0.2  # how much longer with all SMs busy: L2 and memory are shared
SHARE = 1.53  # how much longer with two programs on an SM
SUMMARY = 0.7  # a chunk without queries and outputs, to one with
LINK = 3.0  # a segment's state from that of the one before it
LAUNCH = 6.0  # of one more kernel
GAIN = 0.9  # segments must be predicted to take at most this share of the time without
SHORTEST = 4  # chunks a segment
SHORT = 80.0  # what takes no longer is not cut: its launches cost the host more than is gained


class Work(NamedTuple):
    """The static facts that `schedule` goes by.

    heads: state heads. weight: of one 64 x 128 slice of the state, to that of the fit.
    slow: how much longer a chunk takes beside. sms: of the device. segment: chunks a segment, 0 for
    whole sequences, or None to choose.
    """

    heads: int
    K: int
    V: int
    delta: bool
    weight: float
    slow: float
    sms: int
    few: Tile
    many: Tile
    segment: int | None = None


class Schedule(NamedTuple):
    """How the serial pass runs: its tile, and chunks of a sequence's first and of later segments.

    span 0: every sequence whole. time: predicted microseconds.
    """

    tile: Tile
    lead: int
    span: int
    time: float


def work_of(
    problem: Problem, config: Config, knobs: Mapping[str, int | str], sms: int, *, cut: bool
) -> Work:
    """The facts of a problem on a device with this many SMs; `cut`: whether its plan can cut."""
    size, traits = problem.sizes, problem.traits
    weight = config.chunk / 64 * (1.0 if traits.delta else PLAIN)
    weight *= WIDE if problem.io_dtype.itemsize == 4 else 1.0
    segment = knobs.get("segment")
    off = not cut or getattr(problem.options, "batch_invariant", False)
    return Work(
        heads=size["HO"],
        K=size["K"],
        V=size["V"],
        delta=traits.delta,
        weight=weight,
        slow=KEYS if traits.gate == "key" else 1.0,
        sms=sms,
        few=config.few,
        many=config.many,
        segment=0 if off else None if segment is None else int(segment),
    )


def schedule(work: Work, chunks: int, sequences: int) -> Schedule:
    """The schedule with the least predicted time for this many sequences of `chunks` chunks.

    Narrow slices where all of them run at once, else the wide ones, whose products are larger. Cut
    into segments only where narrow slices leave SMs idle and the prediction is clear.
    """
    heads = sequences * work.heads
    tile = work.few if heads * (work.V // work.few.block_v) <= work.sms else work.many
    programs = heads * (work.V // tile.block_v)
    time = chunks * _step(work, tile) * _rounds(programs, work.sms, tile)
    whole = Schedule(tile, 0, 0, time)
    if work.segment is not None:
        return whole._replace(lead=work.segment, span=work.segment)
    if programs >= work.sms or time < SHORT:
        return whole
    best = whole._replace(time=GAIN * time)
    for tile in dict.fromkeys((work.few, work.many)):
        for count in _counts(work, tile, heads, chunks):
            found = _segments(work, tile, heads, chunks, count)
            if found.time < best.time:
                best = found
    return best if best.span else whole


def _step(work: Work, tile: Tile) -> float:
    """A chunk of one program that is alone."""
    share = tile.block_v * work.K / (64 * 128)
    return work.slow * (LATENCY + WORK * work.weight * share)


def _rounds(programs: int, sms: int, tile: Tile) -> float:
    """How much longer than one program alone it takes that many, all equally long."""
    crowd = 1.0 + CROWD * min(programs / sms, 1.0)
    if programs <= sms:
        return crowd
    return crowd * (SHARE if tile.resident > 1 else 1.0) * -(-programs // (tile.resident * sms))


def _slices(work: Work, tile: Tile) -> tuple[int, int]:
    """Programs a head of a segment with outputs, and of its summary."""
    outputs = work.V // tile.block_v
    return outputs, outputs + (work.K // min(tile.block_v, work.K) if work.delta else 0)


def _counts(work: Work, tile: Tile, heads: int, chunks: int) -> set[int]:
    """Numbers of segments between the first and the last that fill whole rounds of either launch,
    and halves of them."""
    outputs, summaries = _slices(work, tile)
    slots, leads = tile.resident * work.sms, heads * outputs
    full = {k * (slots - leads) // (heads * summaries) for k in (1, 2, 3)}
    full |= {k * slots // leads - 1 for k in (1, 2)}
    most = chunks // SHORTEST - 2
    found = {min(count // part, most) for count in full for part in (1, 2, 4)}
    return {count for count in found if count > 0}


def _segments(work: Work, tile: Tile, heads: int, chunks: int, count: int) -> Schedule:
    """The schedule with `count` segments between the first and the last.

    The first, with outputs, and the summaries of those share a launch: it is given as many chunks
    as they take time.
    """
    outputs, summaries = _slices(work, tile)
    sms, slots, leads = work.sms, tile.resident * work.sms, heads * outputs
    rest = count * heads * summaries
    programs = leads + rest
    rounds = 1 if programs <= slots else -(-rest // max(slots - leads, 1))
    step = _step(work, tile)
    busy = step * (1.0 + CROWD * min(programs / sms, 1.0))
    busy *= SHARE if tile.resident > 1 and programs > sms else 1.0
    span = -int(-chunks // (max(rounds * SUMMARY, 1.0) + count + 1))
    lead = max(chunks - (count + 1) * span, span)
    first = busy * max(lead, rounds * SUMMARY * span)
    last = step * span * _rounds((count + 1) * leads, sms, tile)
    return Schedule(tile, lead, span, first + last + count * LINK + 2 * LAUNCH)
