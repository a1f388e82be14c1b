"""The state's warpgroups: 64 rows of V each through all chunks, all products with the state."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode

from lagraph.engines.frost.kernels.lib import product, ragged, segment
from lagraph.engines.frost.kernels.shared import first_turn, give_turn, places, take_turn
from lagraph.engines.frost.kernels.tile import (
    ERASE,
    QUERY,
    SLICE,
    WRITE,
    C,
)

__all__ = ["advance"]


@cute.jit
def advance(sig: cutlass.Constexpr, atom_o, view_o, tiles, numbers, rings, states, work, wg):
    """The life of warpgroup `wg`. states: initial state, state indices, final state, checkpoints,
    the ends of segments; offsets of sequences, and how many steps all have."""
    dtype, chunks = sig.io, work.chunks
    initial, index, final, checkpoints, ends, cu, steps = states
    rows, last = numbers.rows, numbers.last
    pipe_q, pipe_k, pipe_v, pipe_f, _ = rings
    tid = cute.arch.thread_idx()[0] % 128
    lane = cute.arch.lane_idx()
    first_warp = cute.arch.make_warp_uniform(tid // 32) == 0

    # a [64 rows of V, ...] in registers, by tiles of tokens and by the transpose of K.
    by_token = product.of_registers(dtype, C)
    by_key = product.of_registers(dtype, sig.K, OperandMajorMode.MN)
    thread, thread_k = by_token.get_slice(tid), by_key.get_slice(tid)
    bK = thread.make_fragment_B(thread.partition_B(tiles.K))
    bT = thread.make_fragment_B(thread.partition_B(tiles.T))
    bKt = thread_k.make_fragment_B(thread_k.partition_B(product.transposed(tiles.K)))

    S = product.accumulator(thread_k, SLICE, sig.K)
    X = product.accumulator(thread, SLICE, C)
    U = product.accumulator(thread, SLICE, C)
    S_in, S_low = product.as_operand(thread, S, dtype, SLICE, sig.K)
    W_in, W_low = product.as_operand(thread, X, dtype, SLICE, C)
    U_in, U_low = product.as_operand(thread, X, dtype, SLICE, C)
    D_in, D_low = product.as_operand(thread, X, dtype, SLICE, C)  # U as the state takes it
    W_rest = U_rest = D_rest = None
    if cutlass.const_expr(sig.split):  # what their rounding loses
        W_rest_in, W_rest = product.as_operand(thread, X, dtype, SLICE, C)
        U_rest_in, U_rest = product.as_operand(thread, X, dtype, SLICE, C)
        D_rest_in, D_rest = product.as_operand(thread, X, dtype, SLICE, C)
        bT_rest = thread.make_fragment_B(thread.partition_B(tiles.T_rest))

    load = product.loader(dtype, by_token)
    from_v = load.get_slice(tid)
    mine = cute.local_tile(product.transposed(tiles.V), (SLICE, C, sig.stages.V), (wg, 0, 0))
    v_source = from_v.partition_S(mine)
    value = cute.make_rmem_tensor(X.shape, dtype)
    if cutlass.const_expr(sig.phase == "open"):  # nothing is written to a map, be V infinite
        value_bits = cute.recast_tensor(value, Int32)
        taken = Int32(0) if work.part * sig.rows >= sig.V else Int32(-1)
    v_target = from_v.retile(value)

    column = work.part * sig.slices + wg
    if cutlass.const_expr(sig.outputs):
        by_query = product.of_registers(dtype, sig.queries)
        thread_q = by_query.get_slice(tid)
        shape = (sig.queries, sig.K, sig.stages.Q)
        queries = cute.local_tile(tiles.Q, shape, (0, 0, 0))
        bQ = thread_q.make_fragment_B(thread_q.partition_B(queries))
        shape = (sig.queries, C, sig.stages.factors)
        scores = cute.local_tile(tiles.P, shape, (0, 0, 0))
        bP = thread_q.make_fragment_B(thread_q.partition_B(scores))
        if cutlass.const_expr(sig.split):
            scores = cute.local_tile(tiles.P_rest, shape, (0, 0, 0))
            bP_rest = thread_q.make_fragment_B(thread_q.partition_B(scores))
        O = product.accumulator(thread_q, SLICE, sig.queries)
        store = product.storer(dtype, by_query, transpose=True)
        to_o = store.get_slice(tid)
        o_target = to_o.partition_D(product.transposed(tiles.O))
        result = cute.make_rmem_tensor(O.shape, dtype)
        o_source = to_o.retile(result)
        begin, end = work.begin // sig.n, work.end // sig.n
        o_shared, o_global = ragged.partition(
            atom_o, tiles.O, ragged.tiles(view_o, work.head, begin, end, (sig.queries, SLICE))
        )

    # The state that enters, read in the accumulator's own order.
    row = work.seq
    padding = False
    if cutlass.const_expr(index is not None):
        row = Int32(index[work.seq])
        padding = row < 0
        pool = initial if cutlass.const_expr(initial is not None) else final
        if cutlass.const_expr(pool is not None):
            row = cutlass.min(cutlass.max(row, Int32(0)), Int32(pool.shape[0]) - 1)
    # Here: a product in the loop takes `thread_k` along.
    if cutlass.const_expr(sig.phase == "open"):
        target = segment.targets(sig, ends, work, thread_k, column, tid)
    elif cutlass.const_expr(final is not None):
        target = segment.slice_of(thread_k, final, row, work.head, column)
    if cutlass.const_expr(checkpoints is not None):
        every = cute.make_tensor(
            checkpoints.iterator, cute.select(checkpoints.layout, [2, 3, 0, 1])
        )[None, None, None, work.head]
        kept = thread_k.partition_C(cute.local_tile(every, (SLICE, sig.K), (column, 0, None)))
        next_kept = segment.rows_before(sig, cu, work.seq, steps, lane)
        next_kept += cute.ceil_div(work.first, sig.every)
    if cutlass.const_expr(sig.phase == "open"):
        segment.fresh(sig, S, thread_k, column)
    elif cutlass.const_expr(sig.phase == "close"):
        cute.arch.griddepcontrol_wait()
        segment.load(segment.place(ends[0], work.slot, work.head, column, tid), S)
    elif cutlass.const_expr(initial is not None):
        source = segment.slice_of(thread_k, initial, row, work.head, column)
        raw = cute.make_rmem_tensor(S.shape, initial.element_type)
        cute.autovec_copy(source, raw)
        S.store(raw.load().to(Float32))
    else:
        S.fill(0.0)
    S_low.store(S.load().to(dtype))

    at_k, at_q, at_v, at_f = places(sig)
    first_turn(sig, wg)
    for c in cutlass.range(chunks, unroll=1):
        if cutlass.const_expr(checkpoints is not None):  # noqa: SIM102
            if (work.first + c * C) % sig.every == 0:
                # Offsets of a GPU are not checked on the host.
                inside = cutlass.min(next_kept, Int32(checkpoints.shape[0]) - 1)
                segment.write(S, kept[None, None, None, inside])
                next_kept += 1
        pipe_k.consumer_wait(at_k)
        take_turn(sig, wg)
        product.issue(by_token, X, S_in, bK[None, None, None, at_k.index], False)
        if cutlass.const_expr(sig.outputs):  # now, so that the operand's registers are free soon
            pipe_q.consumer_wait(at_q)
            product.issue(by_query, O, S_in, bQ[None, None, None, at_q.index], False)
        pipe_f.consumer_wait(at_f)
        decay = last[at_f.index]
        for i in cutlass.range_constexpr(cute.size(S)):
            S[i] = decay * S[i]
        pipe_v.consumer_wait(at_v)
        cute.nvgpu.warpgroup.wait_group(0)
        if cutlass.const_expr(sig.outputs):
            pipe_q.consumer_release(at_q)
        for group in cutlass.range_constexpr(C // 8):
            if cutlass.const_expr(group % 2 == 0):
                pair = group // 2
                cute.copy(load, v_source[None, None, pair, at_v.index], v_target[None, None, pair])
                if cutlass.const_expr(sig.phase == "open"):
                    for i in cutlass.range_constexpr(4 * pair, 4 * pair + 4):
                        value_bits[i] = value_bits[i] & taken
            erase = product.pair(rows[None, ERASE, at_f.index], lane, group)
            for e in cutlass.range_constexpr(4):
                i = 4 * group + e
                product.rounded(value[i].to(Float32) - erase[e % 2] * X[i], W_low, W_rest, i)

        product.issue(by_token, U, W_in, bT[None, None, None, at_f.index], False)
        if cutlass.const_expr(sig.split):
            product.issue(by_token, U, W_rest_in, bT[None, None, None, at_f.index], True)
            product.issue(by_token, U, W_in, bT_rest[None, None, None, at_f.index], True)
        give_turn(sig, wg, c + 1 < chunks)
        if cutlass.const_expr(sig.outputs):
            product.scale(O, rows[None, QUERY, at_f.index], lane)
        cute.nvgpu.warpgroup.wait_group(0)
        # Only now are products done that depend on V's loads. A release right after the loads
        # overtakes them where wgmma keeps shared memory busy: TMA overwrote V.
        pipe_v.consumer_release(at_v)
        product.scaled(U, D_low, rows[None, WRITE, at_f.index], lane, rest=D_rest)
        product.issue(by_key, S, D_in, bKt[None, None, None, at_k.index], True)
        if cutlass.const_expr(sig.split):
            product.issue(by_key, S, D_rest_in, bKt[None, None, None, at_k.index], True)
        if cutlass.const_expr(sig.outputs):
            product.split(U, U_low, U_rest)
            product.issue(by_query, O, U_in, bP[None, None, None, at_f.index], True)
            if cutlass.const_expr(sig.split):
                product.issue(by_query, O, U_rest_in, bP[None, None, None, at_f.index], True)
                product.issue(by_query, O, U_in, bP_rest[None, None, None, at_f.index], True)
            cute.nvgpu.warpgroup.wait_group(3 if sig.split else 1)
        else:
            cute.nvgpu.warpgroup.wait_group(0)
        pipe_k.consumer_release(at_k)
        S_low.store(S.load().to(dtype))
        if cutlass.const_expr(sig.outputs):
            cute.nvgpu.warpgroup.wait_group(0)
        cute.arch.sync_warp()
        if lane == 0:
            pipe_f.consumer_release(at_f)
        if cutlass.const_expr(sig.outputs):
            slot = (c % sig.stages.O) * sig.slices + wg
            emit(sig, O, result, store, o_source, o_target, slot, padding, first_warp, wg)
            if first_warp:
                cute.copy(atom_o, o_shared[None, slot], o_global[None, c, column])
                cute.arch.cp_async_bulk_commit_group()
        at_k.advance()
        at_q.advance()
        at_v.advance()
        at_f.advance()

    if cutlass.const_expr(sig.phase == "open"):
        if work.first >= 0:
            segment.keep(S, target, column < sig.V // SLICE)
    elif cutlass.const_expr(final is not None):  # noqa: SIM102
        if not padding and work.last != 0:
            segment.write(S, target)
    if cutlass.const_expr(sig.outputs):  # noqa: SIM102
        if first_warp:
            cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def emit(sig: cutlass.Constexpr, O, result, store, source, target, slot, padding, first_warp, wg):
    """A chunk's output to its tile of shared memory, in sight of TMA."""
    if cutlass.const_expr(sig.index):
        for i in cutlass.range_constexpr(cute.size(O)):
            O[i] = Float32(0.0) if padding else O[i]
    result.store(O.load().to(sig.io))
    if cutlass.const_expr(sig.stages.O == 1):  # the store before this one has read the tile
        if first_warp:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=wg + 1, number_of_threads=128)
    cute.copy(store, source, target[None, None, None, slot])
    cute.arch.fence_view_async_shared()
    if cutlass.const_expr(sig.stages.O > 1):  # noqa: SIM102 - it has read what the next one writes
        if first_warp:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
    cute.arch.barrier(barrier_id=wg + 1, number_of_threads=128)
