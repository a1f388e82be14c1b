"""The first warpgroup: one warp loads keys and queries, one values, two make T."""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline

from lagraph.engines.frost.kernels.lib import inverse, ragged
from lagraph.engines.frost.kernels.shared import JOIN
from lagraph.engines.frost.kernels.tile import C

__all__ = ["invert", "keys", "values"]


@cute.jit
def keys(sig: cutlass.Constexpr, atoms, views, tiles, rings, groups, work):
    """Warp 0: every chunk's K and Q."""
    pipe_q, pipe_k = rings.Q, rings.K
    begin, end, shape = work.begin, work.end, (C, sig.K)
    head_q, head_k = work.head // groups[0], work.head // groups[1]
    to_k, from_k = ragged.partition(
        atoms[1], tiles.K, ragged.tiles(views[1], head_k, begin, end, shape)
    )
    if cutlass.const_expr(sig.outputs):
        begin, end = begin // sig.n, end // sig.n
        if cutlass.const_expr(sig.n == 1):
            to_q, from_q = ragged.partition(
                atoms[0], tiles.Q, ragged.tiles(views[0], head_q, begin, end, shape)
            )
    at_q = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, sig.stages.Q)
    at_k = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, sig.stages.K)
    for turn in cutlass.range(work.chunks, unroll=1):
        c = sig.chunk(work, turn)
        pipe_k.producer_acquire(at_k)
        bar = pipe_k.producer_get_barrier(at_k)
        cute.copy(atoms[1], from_k[None, c, 0], to_k[None, at_k.index], tma_bar_ptr=bar)
        at_k.advance()
        if cutlass.const_expr(sig.outputs):
            pipe_q.producer_acquire(at_q)
            bar = pipe_q.producer_get_barrier(at_q)
            if cutlass.const_expr(sig.n == 1):
                cute.copy(atoms[0], from_q[None, c, 0], to_q[None, at_q.index], tma_bar_ptr=bar)
            else:  # C rows, of which this chunk has the first C / n
                start = begin + c * sig.queries
                to, source = ragged.partition(
                    atoms[0], tiles.Q, ragged.tiles(views[0], head_q, start, end, shape)
                )
                cute.copy(atoms[0], source[None, 0, 0], to[None, at_q.index], tma_bar_ptr=bar)
            at_q.advance()


@cute.jit
def values(sig: cutlass.Constexpr, atoms, views, tiles, rings, groups, work):
    """Warp 1: every chunk's rows of V, or of the gradient of O."""
    pipe, atom, head = rings.V, atoms[2], work.head // groups[2]
    begin, end = work.begin, work.end
    if cutlass.const_expr(sig.phase == "retreat"):
        begin, end = begin // sig.n, end // sig.n
    to, source = ragged.partition(
        atom, tiles.V, ragged.tiles(views[2], head, begin, end, (sig.value_rows, sig.rows))
    )
    at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, sig.stages.V)
    part = work.part % (sig.V // sig.rows)  # a map's is not used
    for turn in cutlass.range(work.chunks, unroll=1):
        c = sig.chunk(work, turn)
        pipe.producer_acquire(at)
        bar = pipe.producer_get_barrier(at)
        cute.copy(atom, source[None, c, part], to[None, at.index], tma_bar_ptr=bar)
        at.advance()


@cute.jit
def invert(sig: cutlass.Constexpr, tiles, numbers, rings, work, warp):
    """Warps 2 and 3 (`warp` 0 and 1): every chunk's T."""
    T, using = [tiles.T], inverse.tools(sig.io)
    if cutlass.const_expr(sig.split):
        T.append(tiles.T_rest)
    pipe_f, pipe_b = rings.factors, rings.blocks
    at_b = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, sig.stages.blocks)
    at_f = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, sig.stages.factors)
    for _ in cutlass.range(work.chunks, unroll=1):
        # Of a shuffle, so that no address is kept over the loop: registers are few.
        lane = cute.arch.shuffle_sync(cute.arch.lane_idx(), cute.arch.lane_idx())
        pipe_b.consumer_wait(at_b)  # whoever wrote them has found this stage of factors free
        numbers_here = numbers.blocks[None, at_b.index].iterator
        stage = at_f.index * (C * C * sig.io.width // 8)
        parts = [tile.iterator.toint() + stage for tile in T]
        inverse.invert(using, parts, numbers_here, sig.io, warp, lane, JOIN)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        if lane == 0:
            pipe_f.producer_commit(at_f)
        at_b.advance()
        at_f.advance()
