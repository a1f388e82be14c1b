"""The last warpgroup: gates, scores, the blocks of L, P, and the rows of factors of a chunk."""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32

from lagraph.engines.frost.kernels.lib import gate, inverse, product
from lagraph.engines.frost.kernels.tile import (
    ERASE,
    QUERY,
    WRITE,
    C,
)

__all__ = ["factor"]


@cute.jit
def factor(sig: cutlass.Constexpr, tiles, numbers, rings, gates, scale, work):
    """The warpgroup's whole life. gates: g, beta, a_log, dt_bias."""
    a_log, dt_bias = gates[2:]
    blocks, rows, last, sums, strengths, norms = numbers
    pipe_q, pipe_k, _, pipe_f, pipe_b = rings
    tid = cute.arch.thread_idx()[0] % 128
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(tid // 32)

    scores = product.of_shared(sig.io, C)
    thread = scores.get_slice(tid)
    aK = thread.make_fragment_A(thread.partition_A(tiles.K))
    if cutlass.const_expr(sig.outputs):
        aQ = thread.make_fragment_A(thread.partition_A(tiles.Q))
    bK = thread.make_fragment_B(thread.partition_B(tiles.K))
    place = thread.partition_C(cute.make_identity_tensor((C, C)))
    store = product.storer(sig.io, scores, transpose=False)
    to_p = store.get_slice(tid)
    t_target = to_p.partition_D(tiles.T)
    if cutlass.const_expr(sig.outputs):
        p_target = to_p.partition_D(tiles.P)
    masked = cute.make_rmem_tensor(place.shape, sig.io)
    rest = t_rest = None
    if cutlass.const_expr(sig.split):
        rest = cute.make_rmem_tensor(place.shape, sig.io)
        t_rest = to_p.partition_D(tiles.T_rest)
        if cutlass.const_expr(sig.outputs):
            p_rest = to_p.partition_D(tiles.P_rest)
    amplitude, bias = Float32(1.0), Float32(0.0)
    if cutlass.const_expr(a_log is not None):
        amplitude = cute.math.exp2(a_log[work.head].to(Float32) * gate.LOG2E)
    if cutlass.const_expr(dt_bias is not None):
        bias = dt_bias[work.head].to(Float32)

    if warp == 0 and work.chunks > 0:
        first = sig.chunk(work, Int32(0))
        raw = fetch(sig, gates, work, first, lane)
        decays(sig, raw, numbers, 0, amplitude, bias, first * C, work.end - work.begin, lane)
    meet(sig)

    at_k = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, sig.stages.K)
    at_q = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, sig.stages.Q)
    at_f = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, sig.stages.factors)
    at_b = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, sig.stages.blocks)
    for c in cutlass.range(work.chunks, unroll=1):
        turn = c % 2
        following = sig.chunk(work, c + 1)
        raw = fetch(sig, gates, work, following, lane)
        kk = product.accumulator(thread, C, C)
        pipe_k.consumer_wait(at_k)
        key_rows, key_columns = aK[None, None, None, at_k.index], bK[None, None, None, at_k.index]
        product.issue(scores, kk, key_rows, key_columns, False)
        if cutlass.const_expr(sig.norm):
            if cutlass.const_expr(sig.outputs):
                pipe_q.consumer_wait(at_q)
            if tid < C:
                norms[tid, 0] = norm(sig, tiles.K, tid, at_k.index)
            else:
                if cutlass.const_expr(sig.outputs):
                    norms[tid - C, 1] = norm(sig, tiles.Q, tid - C, at_q.index)
            meet(sig)
        pipe_f.producer_acquire(at_f)
        pipe_b.producer_acquire(at_b)
        mine = key_factors(sig, numbers, turn, warp * 16 + lane // 4)
        cute.nvgpu.warpgroup.wait_group(0)
        inverted = blocks[None, at_b.index]
        if cutlass.const_expr(sig.unrolled):
            for w in cutlass.range_constexpr(4):
                if warp == w:
                    keep(sig, kk, masked, rest, inverted, mine, numbers, place, turn, lane, w)
        else:
            keep_by_blocks(sig, kk, masked, rest, inverted, mine, numbers, turn, lane, warp)
        if lane < 16:
            blocks[4 * inverse.NUMBERS + 16 * warp + lane, at_b.index] = strengths[
                16 * warp + lane, turn
            ]
        cute.arch.sync_warp()
        if lane == 0:
            pipe_b.producer_commit(at_b)
        if cutlass.const_expr(sig.outputs):
            qk = product.accumulator(thread, C, C)
            pipe_q.consumer_wait(at_q)
            key_columns = bK[None, None, None, at_k.index]
            product.issue(scores, qk, aQ[None, None, None, at_q.index], key_columns, False)

        # While it runs: an operand, the rows of factors, and the gates of the next chunk.
        left, left_rest = to_p.retile(masked), None
        if cutlass.const_expr(sig.split):
            left_rest = to_p.retile(rest)
        if cutlass.const_expr(sig.unrolled):
            for w in cutlass.range_constexpr(1, 4):
                if warp == w:
                    for i in cutlass.range_constexpr(w):
                        put(store, left, left_rest, t_target, t_rest, i, at_f.index)
        else:
            for i in cutlass.range_constexpr(3):
                if i < warp:
                    put(store, left, left_rest, t_target, t_rest, i, at_f.index)
        if tid < C:
            b, total = sums[tid, turn], sums[C - 1, turn]
            key = Float32(1.0)
            if cutlass.const_expr(sig.norm):
                key = norms[tid, 0]
            rows[tid, ERASE, at_f.index] = gate.finite_power(b) * key
            rows[tid, WRITE, at_f.index] = gate.finite_power(total - b) * key
            if tid == 0:
                last[at_f.index] = cute.math.exp2(total, fastmath=True)
            if cutlass.const_expr(sig.outputs):
                b, query = query_factor(sig, numbers, scale, turn, tid % sig.queries)
                if tid < sig.queries:
                    rows[tid, QUERY, at_f.index] = gate.finite_power(b) * query
        if warp == 0:
            start, length = following * C, work.end - work.begin
            decays(sig, raw, numbers, 1 - turn, amplitude, bias, start, length, lane)
        if cutlass.const_expr(sig.outputs):
            cute.nvgpu.warpgroup.wait_group(0)
            pipe_k.consumer_release(at_k)
            pipe_q.consumer_release(at_q)
            if cutlass.const_expr(sig.unrolled):
                for w in cutlass.range_constexpr(sig.queries // 16):
                    if warp == w:
                        mask(sig, qk, masked, rest, numbers, scale, place, turn, lane, w)
            elif warp < sig.queries // 16:
                mask_by_blocks(sig, qk, masked, rest, numbers, scale, turn, lane, warp)
            if cutlass.const_expr(sig.n == 1 and sig.unrolled):
                cute.copy(store, to_p.retile(masked), p_target[None, None, None, at_f.index])
                if cutlass.const_expr(sig.split):
                    cute.copy(store, to_p.retile(rest), p_rest[None, None, None, at_f.index])
            else:
                if warp < sig.queries // 16:
                    cute.copy(store, to_p.retile(masked), p_target[None, None, None, at_f.index])
                    if cutlass.const_expr(sig.split):
                        cute.copy(store, to_p.retile(rest), p_rest[None, None, None, at_f.index])
        else:
            pipe_k.consumer_release(at_k)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        if lane == 0:
            pipe_f.producer_commit(at_f)
        at_k.advance()
        at_q.advance()
        at_f.advance()
        at_b.advance()
        meet(sig)


# Gates ------------------------------------------------------------------------------------------


@cute.jit
def fetch(sig: cutlass.Constexpr, gates, work, chunk, lane):
    """Gates and strengths of this lane's two steps of a chunk, as they are in memory. Nothing here
    waits for them."""
    g, beta, head = gates[0], gates[1], work.head
    if cutlass.const_expr(sig.phase == "retreat"):
        chunk = cutlass.max(chunk, Int32(0))  # the one before the first is not used
    first = cutlass.min(work.begin + chunk * C + 2 * lane, work.end - 1)
    second = cutlass.min(work.begin + chunk * C + 2 * lane + 1, work.end - 1)
    return g[first // sig.n, head], g[second // sig.n, head], beta[first, head], beta[second, head]


@cute.jit
def decays(sig: cutlass.Constexpr, raw, numbers, turn, amplitude, bias, start, end, lane):
    """One warp: sums of 64 steps' decays, and their strengths; none past the end. A token's decay
    belongs to the first of its steps."""
    sums, strengths = numbers.sums[None, turn], numbers.strengths[None, turn]
    found = []
    for i in cutlass.range_constexpr(2):
        inside = start + 2 * lane + i < end
        decays_here = inside
        if cutlass.const_expr(sig.n > 1):
            decays_here = inside and (2 * lane + i) % sig.n == 0
        decay = gate.log2_decay(raw[i].to(Float32), amplitude, bias, sig.gate)
        strength = gate.strength(raw[2 + i].to(Float32), sig.sigmoid, sig.double)
        found.append(decay if decays_here else Float32(0.0))
        strengths[2 * lane + i] = strength if inside else Float32(0.0)
    sums[2 * lane], sums[2 * lane + 1] = gate.sums(found[0], found[1], lane)


# Scores -----------------------------------------------------------------------------------------


@cute.jit
def key_factors(sig: cutlass.Constexpr, numbers, turn, top):
    """Of rows r and r + 8: cumulative decay, and what scales a row of L, with its strength and
    without."""
    sums, strengths, norms = numbers.sums, numbers.strengths, numbers.norms
    found = []
    for i in cutlass.range_constexpr(2):
        row = top + 8 * i
        key = Float32(1.0)
        if cutlass.const_expr(sig.norm):
            key = norms[row, 0]
        found.append((sums[row, turn], strengths[row, turn] * key, key))
    return found


@cute.jit
def query_factor(sig: cutlass.Constexpr, numbers, scale, turn, row):
    """Of a query: cumulative decay at the last step of its token, and what scales a row of P."""
    query = scale
    if cutlass.const_expr(sig.norm):
        query = scale * numbers.norms[row, 1]
    return numbers.sums[sig.n * row + sig.n - 1, turn], query


@cute.jit
def keep(
    sig: cutlass.Constexpr, kk, joined, rest, blocks, mine, numbers, place, turn, lane,
    w: cutlass.Constexpr,
):  # fmt: skip
    """Rows 16 w to 16 w + 15 of L: the block on the diagonal in fp32 for its inverse, and what lies
    left of it, without strengths and negated, as an operand."""
    for group in cutlass.range_constexpr(2 * (w + 1)):
        b_columns = product.pair(numbers.sums[None, turn], lane, group)
        keys = key_norms(sig, numbers.norms, lane, group)
        for e in cutlass.range_constexpr(4):
            i = 4 * group + e
            b, strength, key = mine[e // 2]
            power = gate.finite_power(b - b_columns[e % 2])
            value = kk[i] * power * keys[e % 2]
            row, column = place[i]
            if cutlass.const_expr(group // 2 == w):
                leaf = inverse.leaf(blocks, w)
                leaf[row - 16 * w, column - 16 * w] = strength * value
            else:
                product.rounded(-key * value, joined, rest, i)


@cute.jit
def mask(
    sig: cutlass.Constexpr, qk, masked, rest, numbers, scale, place, turn, lane,
    w: cutlass.Constexpr,
):  # fmt: skip
    """Rows 16 w to 16 w + 15 of P, queries at the last steps of their tokens, in the io dtype, and
    what that loses."""
    mine = []
    for i in cutlass.range_constexpr(2):
        mine.append(query_factor(sig, numbers, scale, turn, 16 * w + lane // 4 + 8 * i))
    for group in cutlass.range_constexpr(C // 8):
        b_columns = product.pair(numbers.sums[None, turn], lane, group)
        keys = key_norms(sig, numbers.norms, lane, group)
        for e in cutlass.range_constexpr(4):
            i = 4 * group + e
            first, most = 16 * w * sig.n, 16 * (w + 1) * sig.n  # steps of these rows
            if cutlass.const_expr(8 * group >= most):
                masked[i] = sig.io(0.0)
                if cutlass.const_expr(sig.split):
                    rest[i] = sig.io(0.0)
            else:
                b, query = mine[e // 2]
                power = gate.finite_power(b - b_columns[e % 2])
                value = query * qk[i] * power * keys[e % 2]
                if cutlass.const_expr(8 * group + 7 >= first):
                    row, column = place[i]
                    value = value if column < (row + 1) * sig.n else Float32(0.0)
                product.rounded(value, masked, rest, i)


@cute.jit
def put(store, left, left_rest, target, target_rest, block: cutlass.Constexpr, stage):
    """A block of T's operand left of the diagonal, and what it loses, into a tile."""
    cute.copy(store, left[(None, block), None, None], target[(None, block), None, None, stage])
    if cutlass.const_expr(left_rest is not None):
        source = left_rest[(None, block), None, None]
        cute.copy(store, source, target_rest[(None, block), None, None, stage])


# The same in blocks of 16 columns, each taken by a branch, so that all warps run through the same
# code and the instruction cache holds it.


@cute.jit
def keep_by_blocks(
    sig: cutlass.Constexpr, kk, joined, rest, blocks, mine, numbers, turn, lane, warp
):  # fmt: skip
    """Rows of L: the block on the diagonal in fp32 for its inverse, and what lies left of it,
    without strengths and negated, as an operand."""
    leaf = inverse.leaf(blocks, warp)
    for block in cutlass.range_constexpr(C // 16):
        if block <= warp:
            values = cute.make_rmem_tensor(8, Float32)
            for i in cutlass.range_constexpr(8):
                group, e = 2 * block + i // 4, i % 4
                if cutlass.const_expr(e == 0):
                    b_columns = product.pair(numbers.sums[None, turn], lane, group)
                    keys = key_norms(sig, numbers.norms, lane, group)
                power = gate.finite_power(mine[e // 2][0] - b_columns[e % 2])
                values[i] = kk[8 * block + i] * power * keys[e % 2]
            if block == warp:
                for i in cutlass.range_constexpr(8):
                    row, column = lane // 4 + i % 4 // 2 * 8, lane % 4 * 2 + i // 4 * 8 + i % 2
                    leaf[row, column] = mine[i % 4 // 2][1] * values[i]
            else:
                for i in cutlass.range_constexpr(8):
                    key = mine[i % 4 // 2][2]
                    product.rounded(-key * values[i], joined, rest, 8 * block + i)


@cute.jit
def mask_by_blocks(sig: cutlass.Constexpr, qk, masked, rest, numbers, scale, turn, lane, warp):
    """Rows of P, queries at the last steps of their tokens, in the io dtype, and what that
    loses."""
    mine, ends = [], []
    for i in cutlass.range_constexpr(2):
        row = 16 * warp + lane // 4 + 8 * i
        mine.append(query_factor(sig, numbers, scale, turn, row))
        ends.append((row + 1) * sig.n - lane % 4 * 2)
    for block in cutlass.range_constexpr(C // 16):
        values = cute.make_rmem_tensor(8, Float32)
        values.fill(0.0)
        if block < (warp + 1) * sig.n:
            for i in cutlass.range_constexpr(8):
                group, e = 2 * block + i // 4, i % 4
                if cutlass.const_expr(e == 0):
                    b_columns = product.pair(numbers.sums[None, turn], lane, group)
                    keys = key_norms(sig, numbers.norms, lane, group)
                b, query = mine[e // 2]
                power = gate.finite_power(b - b_columns[e % 2])
                values[i] = query * qk[8 * block + i] * power * keys[e % 2]
            if block >= warp * sig.n:
                for i in cutlass.range_constexpr(8):
                    inside = 16 * block + i // 4 * 8 + i % 2 < ends[i % 4 // 2]
                    values[i] = values[i] if inside else Float32(0.0)
        for i in cutlass.range_constexpr(8):
            product.rounded(values[i], masked, rest, 8 * block + i)


# Norms ------------------------------------------------------------------------------------------


@cute.jit
def key_norms(sig: cutlass.Constexpr, norms, lane, group: cutlass.Constexpr):
    """Of this thread's two columns in a group, 1 / |k|; 1 where keys are taken as they are."""
    if cutlass.const_expr(sig.norm):
        return product.pair(norms[None, 0], lane, group)
    return Float32(1.0), Float32(1.0)


@cute.jit
def norm(sig: cutlass.Constexpr, tile, row, stage):
    """1 / |x| of one row of a tile."""
    eight = cute.make_rmem_tensor(8, sig.io)
    total = Float32(0.0)
    source = cute.logical_divide(tile[row, None, stage], cute.make_layout(8))
    for i in cutlass.range(sig.K // 8, unroll=2):
        cute.autovec_copy(source[None, i], eight)
        for e in cutlass.range_constexpr(8):
            value = eight[e].to(Float32)
            total += value * value
    return cute.math.rsqrt(total + 1e-6, fastmath=True)


@cute.jit
def meet(sig: cutlass.Constexpr):
    """All threads of this warpgroup."""
    cute.arch.barrier(barrier_id=1 + sig.slices, number_of_threads=128)
