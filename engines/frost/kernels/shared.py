"""What the warps of a CTA share: its work, its shared memory, and the rings that guard it."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from lagraph.engines.frost.kernels.lib import inverse, ragged
from lagraph.engines.frost.kernels.tile import (
    FACTORS,
    SLICE,
    C,
)

__all__ = [
    "JOIN", "Numbers", "Rings", "Tiles", "Work", "allocate", "clear", "first_turn", "give_turn",
    "layouts", "places", "take_turn",
]  # fmt: skip

TURN = 4  # the first of two named barriers
JOIN = 6  # where the warps meet that make T


class Work(NamedTuple):
    """What one CTA computes: `part` counts slices of V, steps are begin to end - 1.

    A sequence that is cut: `slot` is the segment's, `first` its first step within the sequence,
    `last` 1 for the last segment.
    """

    seq: Int32
    head: Int32
    part: Int32
    begin: Int32
    end: Int32
    chunks: Int32
    slot: Int32
    first: Int32
    last: Int32


class Tiles(NamedTuple):
    """Tiles in the swizzle, [rows, columns, stages]. Q and P: None without queries; O: None where
    it is not written. V: values, or backwards gradients of O. *_rest: what is lost by rounding T
    and P, None where that is not kept."""

    Q: cute.Tensor
    K: cute.Tensor
    V: cute.Tensor
    O: cute.Tensor
    T: cute.Tensor
    P: cute.Tensor
    T_rest: cute.Tensor
    P_rest: cute.Tensor


class Numbers(NamedTuple):
    """fp32 numbers. Sums are cumulative log2 decays, powers the decays from a step to the first one
    of a block of 16 after it; the last mode of both and of strengths is a chunk in turn, that of
    norms is keys and queries."""

    blocks: (
        cute.Tensor
    )  # what the inverse reads: blocks on the diagonal, and the strengths of the chunk
    rows: cute.Tensor  # [C, FACTORS, stages]
    last: cute.Tensor  # decay of a whole chunk
    sums: cute.Tensor
    strengths: cute.Tensor
    norms: cute.Tensor
    powers: cute.Tensor  # [C, blocks, 2]


class Rings(NamedTuple):
    """Pipelines: loaded tiles, factors (T, P, rows, last), blocks to invert."""

    Q: Any
    K: Any
    V: Any
    factors: Any
    blocks: Any


def layouts(sig):
    """Of Q, K, V, O, and T or P."""
    return (
        ragged.swizzled(sig.io, C, sig.K, sig.stages.Q),
        ragged.swizzled(sig.io, C, sig.K, sig.stages.K),
        ragged.swizzled(sig.io, sig.value_rows, sig.rows, sig.stages.V),
        ragged.swizzled(sig.io, sig.queries, SLICE, sig.stages.O * sig.slices),
        ragged.swizzled(sig.io, C, C, sig.stages.factors),
    )


def allocate(sig, laid):
    """Tiles of these layouts, numbers and rings. The barriers need a fence and a meeting yet."""
    smem, kept = SmemAllocator(), sig.stages
    bar_k, bar_q, bar_v, bar_f, bar_b = (
        smem.allocate_array(Int64, 2 * stages)
        for stages in (kept.K, kept.Q, kept.V, kept.factors, kept.blocks)
    )
    made = [
        smem.allocate_tensor(sig.io, laid[at].outer, 1024, laid[at].inner) if held else None
        for at, held in ((0, sig.outputs), (1, True), (2, True), (3, sig.emits), (4, True),
                         (4, sig.outputs), (4, sig.split), (4, sig.split and sig.outputs))
    ]  # fmt: skip
    tiles = Tiles(*made)

    def numbers(*shape, align=128):
        return smem.allocate_tensor(Float32, cute.make_layout(shape), align)

    filled = Numbers(
        blocks=numbers(inverse.NUMBERS * inverse.LEAVES + C, kept.blocks),
        rows=numbers(C, FACTORS, kept.factors),
        last=numbers(kept.factors, align=16),
        sums=numbers(C, 2),
        strengths=numbers(C, 2),
        norms=numbers(C, 2),
        powers=numbers(C, C // 16, 2),
    )
    advancing = 4 * sig.slices  # warps
    nbytes = C * sig.io.width // 8
    K = loaded(bar_k, kept.K, nbytes * sig.K, advancing + 4)
    Q = loaded(bar_q, kept.Q, nbytes * sig.K, advancing + 4) if sig.outputs else None
    V = loaded(bar_v, kept.V, nbytes * sig.rows * sig.value_rows // C, advancing)
    factors = written(bar_f, kept.factors, 6, advancing)
    blocks = written(bar_b, kept.blocks, 4, 2)
    return tiles, filled, Rings(Q, K, V, factors, blocks)


@cute.jit
def clear(sig: cutlass.Constexpr, tiles):
    """T and P above the diagonal, which nobody writes: all of them, by all threads, who have to
    meet yet."""
    tid, _, _ = cute.arch.thread_idx()
    zeros = cute.make_rmem_tensor(8, sig.io)
    zeros.fill(0.0)
    for tile in (tiles.T, tiles.P, tiles.T_rest, tiles.P_rest):
        if cutlass.const_expr(tile is not None):
            count = C * C * sig.stages.factors // 8
            flat = cute.make_tensor(tile.iterator, cute.make_layout((8, count)))
            for turn in cutlass.range_constexpr((count + sig.threads - 1) // sig.threads):
                at = turn * sig.threads + tid
                if at < count:
                    cute.autovec_copy(zeros, flat[None, at])
    cute.arch.fence_view_async_shared()


def places(sig):
    """Where a warpgroup of the state is in the rings of K, Q, V and factors."""
    return tuple(
        pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, stages)
        for stages in (sig.stages.K, sig.stages.Q, sig.stages.V, sig.stages.factors)
    )


# Two warpgroups of the state start a chunk in turn, by a named barrier each.


@cute.jit
def first_turn(sig: cutlass.Constexpr, wg):
    """The first warpgroup goes first."""
    if cutlass.const_expr(sig.stagger):  # noqa: SIM102 - one at compile time, one at run time
        if wg == 1:
            cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=256)


@cute.jit
def take_turn(sig: cutlass.Constexpr, wg):
    if cutlass.const_expr(sig.stagger):
        cute.arch.barrier(barrier_id=TURN + wg, number_of_threads=256)


@cute.jit
def give_turn(sig: cutlass.Constexpr, wg, more):
    """To the other one; `more`: whether another chunk comes, which the first then waits for."""
    if cutlass.const_expr(sig.stagger):  # noqa: SIM102
        if wg == 0 or more:
            cute.arch.barrier_arrive(barrier_id=TURN + 1 - wg, number_of_threads=256)


def agents(count):
    return pipeline.CooperativeGroup(pipeline.Agent.Thread, count)


def loaded(storage, stages, nbytes, readers):
    """A ring that TMA fills; one arrival a reading warp."""
    return pipeline.PipelineTmaAsync.create(
        barrier_storage=storage, num_stages=stages, tx_count=nbytes, producer_group=agents(1),
        consumer_group=agents(readers), cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
        defer_sync=True,
    )  # fmt: skip


def written(storage, stages, writers, readers):
    """A ring that warps fill; one arrival a warp on both sides."""
    return pipeline.PipelineAsync.create(
        barrier_storage=storage, num_stages=stages, producer_group=agents(writers),
        consumer_group=agents(readers), defer_sync=True,
    )  # fmt: skip
