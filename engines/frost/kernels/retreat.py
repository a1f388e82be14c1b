"""The state's warpgroups backwards: its gradient, 64 rows of V, through all chunks from the last.

With D for the gradient of O, for a chunk whose state leaves with the gradient S [V, K]:

    X^T  = S K^T diag(exp(b_64 - b)) + D^T P              what U is due
    W^T  = X^T T                                          what V is due
    S   <- exp(b_64) S + D^T diag(scale exp b) Q - W^T diag(exp b) K

It takes the same tiles as `advance`, transposed: W = T^T X.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode

from lagraph.engines.frost.kernels.lib import product, segment
from lagraph.engines.frost.kernels.shared import first_turn, give_turn, places, take_turn
from lagraph.engines.frost.kernels.tile import (
    ERASE,
    QUERY,
    SLICE,
    WRITE,
    C,
)

__all__ = ["retreat"]


@cute.jit
def retreat(sig: cutlass.Constexpr, tiles, numbers, rings, ends, work, wg):
    """The life of warpgroup `wg`, from nothing, or from the unit matrix below V."""
    dtype = sig.io
    rows, last = numbers.rows, numbers.last
    pipe_q, pipe_k, pipe_v, pipe_f, _ = rings
    tid = cute.arch.thread_idx()[0] % 128
    lane = cute.arch.lane_idx()

    # a [64 rows of V, ...] in registers, by tiles of tokens and by transposes.
    by_token = product.of_registers(dtype, C)
    by_score = product.of_registers(dtype, C, OperandMajorMode.MN)
    by_query = product.of_registers(dtype, sig.queries)
    by_key = product.of_registers(dtype, sig.K, OperandMajorMode.MN)
    thread, thread_s = by_token.get_slice(tid), by_score.get_slice(tid)
    thread_q, thread_k = by_query.get_slice(tid), by_key.get_slice(tid)
    bK = thread.make_fragment_B(thread.partition_B(tiles.K))
    scores = cute.local_tile(tiles.P, (sig.queries, C, sig.stages.factors), (0, 0, 0))
    bP = thread_s.make_fragment_B(thread_s.partition_B(product.transposed(scores)))
    bT = thread_s.make_fragment_B(thread_s.partition_B(product.transposed(tiles.T)))
    queries = cute.local_tile(tiles.Q, (sig.queries, sig.K, sig.stages.Q), (0, 0, 0))
    bQ = thread_k.make_fragment_B(thread_k.partition_B(product.transposed(queries)))
    bKt = thread_k.make_fragment_B(thread_k.partition_B(product.transposed(tiles.K)))

    S = product.accumulator(thread_k, SLICE, sig.K)
    X = product.accumulator(thread_s, SLICE, C)
    W = product.accumulator(thread_s, SLICE, C)
    S_in, S_low = product.as_operand(thread, S, dtype, SLICE, sig.K)
    W_in, W_low = product.as_operand(thread, X, dtype, SLICE, C)
    X_in, X_low = product.as_operand(thread, X, dtype, SLICE, C)
    D = product.accumulator(thread_q, SLICE, sig.queries)
    D_in, D_low = product.as_operand(thread_q, D, dtype, SLICE, sig.queries)
    E_in, E_low = product.as_operand(thread_q, D, dtype, SLICE, sig.queries)

    load = product.loader(dtype, by_query)
    from_d = load.get_slice(tid)
    shape = (SLICE, sig.queries, sig.stages.V)
    mine = cute.local_tile(product.transposed(tiles.V), shape, (wg, 0, 0))
    d_source, d_target = from_d.partition_S(mine), from_d.retile(D_low)
    d_bits = cute.recast_tensor(D_low, Int32)
    taken = Int32(0) if work.part * sig.rows >= sig.V else Int32(-1)

    column = work.part * sig.slices + wg
    target = segment.targets(sig, ends, work, thread_k, column, tid)
    segment.fresh(sig, S, thread_k, column)
    S_low.store(S.load().to(dtype))

    at_k, at_q, at_v, at_f = places(sig)
    first_turn(sig, wg)
    for c in cutlass.range(work.chunks, unroll=1):
        pipe_k.consumer_wait(at_k)
        take_turn(sig, wg)
        product.issue(by_token, X, S_in, bK[None, None, None, at_k.index], False)
        pipe_f.consumer_wait(at_f)
        pipe_v.consumer_wait(at_v)
        for pair in cutlass.range_constexpr(sig.queries // 16):
            cute.copy(load, d_source[None, None, pair, at_v.index], d_target[None, None, pair])
        cute.nvgpu.warpgroup.wait_group(0)
        for i in cutlass.range_constexpr(cute.size(d_bits)):
            d_bits[i] = d_bits[i] & taken
        product.scale(X, rows[None, WRITE, at_f.index], lane)
        product.issue(by_score, X, D_in, bP[None, None, None, at_f.index], True)
        for group in cutlass.range_constexpr(sig.queries // 8):
            query = product.pair(rows[None, QUERY, at_f.index], lane, group)
            for e in cutlass.range_constexpr(4):
                i = 4 * group + e
                E_low[i] = (query[e % 2] * D_low[i].to(Float32)).to(dtype)
        decay = last[at_f.index]
        for i in cutlass.range_constexpr(cute.size(S)):
            S[i] = decay * S[i]
        cute.nvgpu.warpgroup.wait_group(0)
        pipe_v.consumer_release(at_v)  # a product is done that depends on its loads: see `advance`
        X_low.store(X.load().to(dtype))
        product.issue(by_score, W, X_in, bT[None, None, None, at_f.index], False)
        give_turn(sig, wg, c + 1 < work.chunks)
        pipe_q.consumer_wait(at_q)
        product.issue(by_key, S, E_in, bQ[None, None, None, at_q.index], True)
        cute.nvgpu.warpgroup.wait_group(1)
        product.scaled(W, W_low, rows[None, ERASE, at_f.index], lane, True)
        product.issue(by_key, S, W_in, bKt[None, None, None, at_k.index], True)
        cute.nvgpu.warpgroup.wait_group(0)
        pipe_q.consumer_release(at_q)
        pipe_k.consumer_release(at_k)
        cute.arch.sync_warp()
        if lane == 0:
            pipe_f.consumer_release(at_f)
        S_low.store(S.load().to(dtype))
        at_k.advance()
        at_q.advance()
        at_v.advance()
        at_f.advance()

    if work.first >= 0:
        segment.keep(S, target, column < sig.V // SLICE)
