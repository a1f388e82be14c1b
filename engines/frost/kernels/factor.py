"""The last warpgroup: gates, scores, G, P, and the rows of factors of a chunk."""

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
    blocks, rows, last, sums, strengths, norms, _ = numbers
    pipe_q, pipe_k, _, pipe_f, pipe_b = rings
    tid = cute.arch.thread_idx()[0] % 128
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(tid // 32)
    # Where ptxas keeps no predicates of what is uniform, a number a thread is compared sooner.
    plain = cutlass.const_expr(sig.norm and sig.phase == "close")
    which = tid // 32 if cutlass.const_expr(plain) else warp

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
    ending = cute.make_rmem_tensor(place.shape, sig.io)
    left, last_left = to_p.retile(masked), to_p.retile(ending)
    rest = ending_rest = left_rest = last_rest = t_rest = p_rest = None
    if cutlass.const_expr(sig.split):
        rest = cute.make_rmem_tensor(place.shape, sig.io)
        ending_rest = cute.make_rmem_tensor(place.shape, sig.io)
        left_rest, last_rest = to_p.retile(rest), to_p.retile(ending_rest)
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
    kk = product.accumulator(thread, C, C)
    if work.chunks > 0:
        pipe_k.consumer_wait(at_k)
    issue(scores, kk, aK, at_k, bK, at_k)
    for c in cutlass.range(work.chunks, unroll=1):
        turn = c % 2
        following = sig.chunk(work, c + 1)
        free = pipe_f.producer_try_acquire(at_f)
        if cutlass.const_expr(sig.outputs and not sig.norm):
            there = pipe_q.consumer_try_wait(at_q)
        raw = fetch(sig, gates, work, following, lane)
        if cutlass.const_expr(sig.norm):
            if cutlass.const_expr(sig.outputs):
                pipe_q.consumer_wait(at_q)
            if tid < C:
                norms[tid, 0] = norm(sig, tiles.K, tid, at_k.index)
            else:
                if cutlass.const_expr(sig.outputs):
                    norms[tid - C, 1] = norm(sig, tiles.Q, tid - C, at_q.index)
            meet(sig)
        mine = key_factors(sig, numbers, turn, warp * 16 + lane // 4)
        if cutlass.const_expr(sig.roomy):
            columns = column_factors(sig, numbers, turn, lane, warp, 1)
        # The ring of blocks is as long: what is free there has been inverted.
        pipe_f.producer_acquire(at_f, free)
        cute.nvgpu.warpgroup.wait_group(0)
        if cutlass.const_expr(not sig.roomy):
            columns = column_factors(sig, numbers, turn, lane, warp, 1)
        inverted = blocks[None, at_b.index]
        keep(sig, kk, masked, rest, tiles, inverted, mine, columns, at_f.index, lane, warp, which)
        # Before the next product: what goes to shared memory after it waits for it.
        for i in cutlass.range_constexpr(3):
            if i < warp:
                put(store, left, left_rest, i, t_target, t_rest, i, at_f.index)
        if lane < 16:
            step = 16 * warp + lane
            blocks[inverse.LEAVES * inverse.NUMBERS + step, at_b.index] = strengths[step, turn]
        cute.arch.sync_warp()
        if lane == 0:
            pipe_b.producer_commit(at_b)
        if cutlass.const_expr(sig.outputs):
            qk = product.accumulator(thread, C, C)
            if cutlass.const_expr(not sig.norm):
                pipe_q.consumer_wait(at_q, there)
            issue(scores, qk, aQ, at_q, bK, at_k)

        # While it runs: the rows of factors, and the gates of the next chunk.
        if warp >= 2:
            row = tid - C
            b, total = sums[row, turn], sums[C - 1, turn]
            key = Float32(1.0)
            if cutlass.const_expr(sig.norm):
                key = norms[row, 0]
            rows[row, ERASE, at_f.index] = gate.finite_power(b) * key
            rows[row, WRITE, at_f.index] = gate.finite_power(total - b) * key
            if row == 0:
                last[at_f.index] = cute.math.exp2(total, fastmath=True)
            if cutlass.const_expr(sig.outputs):
                b, query = query_factor(sig, numbers, scale, turn, row % sig.queries)
                if row < sig.queries:
                    rows[row, QUERY, at_f.index] = gate.finite_power(b) * query
        if warp == 0:
            start, length = following * C, work.end - work.begin
            decays(sig, raw, numbers, 1 - turn, amplitude, bias, start, length, lane)
        if cutlass.const_expr(sig.outputs):
            asked = asked_factors(sig, numbers, scale, turn, lane, warp)
            if cutlass.const_expr(sig.roomy):
                columns = column_factors(sig, numbers, turn, lane, warp, sig.n)
            cute.nvgpu.warpgroup.wait_group(0)
            pipe_q.consumer_release(at_q)
            if cutlass.const_expr(not sig.roomy):
                columns = column_factors(sig, numbers, turn, lane, warp, sig.n)
            mask(sig, qk, masked, rest, ending, ending_rest, asked, columns, lane, which)
        pipe_k.consumer_release(at_k)
        at_k.advance()
        # The next chunk's, while this one's are written; after the last one, of no use.
        if c + 1 < work.chunks:
            pipe_k.consumer_wait(at_k)
        issue(scores, kk, aK, at_k, bK, at_k)
        if cutlass.const_expr(sig.outputs):
            for i in cutlass.range_constexpr(4 - sig.n):
                if i < warp * sig.n and warp < sig.queries // 16:
                    put(store, left, left_rest, i, p_target, p_rest, i, at_f.index)
            if warp < sig.queries // 16:
                for i in cutlass.range_constexpr(sig.n):
                    block = warp * sig.n + i
                    put(store, last_left, last_rest, i, p_target, p_rest, block, at_f.index)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        if lane == 0:
            pipe_f.producer_commit(at_f)
        at_q.advance()
        at_f.advance()
        at_b.advance()
        meet(sig)
    cute.nvgpu.warpgroup.wait_group(0)


@cute.jit
def issue(mma, acc, a, at_a, b, at_b):
    """Scores of two tiles, not waited for."""
    product.issue(mma, acc, a[None, None, None, at_a.index], b[None, None, None, at_b.index], False)


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
    """One warp: sums of 64 steps' decays, their strengths, and the decay from every step to the
    blocks of 16 after it; none past the end. A token's decay belongs to the first of its steps."""
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
    first, second = gate.sums(found[0], found[1], lane)
    sums[2 * lane], sums[2 * lane + 1] = first, second
    for block in cutlass.range_constexpr(1, C // 16):
        start = cute.arch.shuffle_sync(first, 8 * block)
        powers = numbers.powers[None, block, turn]
        powers[2 * lane] = gate.finite_power(start - first)
        powers[2 * lane + 1] = gate.finite_power(start - second)


# Scores -----------------------------------------------------------------------------------------


# exp(b_i - b_j) is, left of a block on the diagonal, the decay from j to the block's first step,
# times that from there to i: neither is above 1 where no gate grows, so that neither overflows.


@cute.jit
def key_factors(sig: cutlass.Constexpr, numbers, turn, top):
    """Of rows r and r + 8: cumulative decay, and what scales a row of G: on the diagonal with its
    strength, or negated; left of it, from the block's first step on, negated."""
    sums, strengths, norms = numbers.sums, numbers.strengths, numbers.norms
    start, found = sums[top // 16 * 16, turn], []
    for i in cutlass.range_constexpr(2):
        row = top + 8 * i
        key, b = Float32(1.0), sums[row, turn]
        if cutlass.const_expr(sig.norm):
            key = norms[row, 0]
        power = gate.finite_power(b - start)
        found.append((b, strengths[row, turn] * key, -key, -key * power))
    return found


@cute.jit
def query_factor(sig: cutlass.Constexpr, numbers, scale, turn, row):
    """Of a query: cumulative decay at the last step of its token, and what scales a row of P."""
    query = scale
    if cutlass.const_expr(sig.norm):
        query = scale * numbers.norms[row, 1]
    return numbers.sums[sig.n * row + sig.n - 1, turn], query


@cute.jit
def asked_factors(sig: cutlass.Constexpr, numbers, scale, turn, lane, warp):
    """Of queries r and r + 8: cumulative decay, and what scales a row of P: among the steps of the
    warp's tokens, and before them."""
    within = warp % (sig.queries // 16)  # warps without queries compute what is not used
    start, found = numbers.sums[16 * sig.n * within, turn], []
    for i in cutlass.range_constexpr(2):
        row = 16 * within + lane // 4 + 8 * i
        b, query = query_factor(sig, numbers, scale, turn, row)
        found.append((b, query, query * gate.finite_power(b - start)))
    return found


@cute.jit
def column_factors(
    sig: cutlass.Constexpr, numbers, turn, lane, warp, width: cutlass.Constexpr
):  # fmt: skip
    """Of this thread's columns: of blocks of 16 before the warp's rows the decay to their first
    step, and of the `width` blocks that the rows end in the cumulative decay; both with norms."""
    within = warp % (4 // width)
    before, ending = [], []
    for group in cutlass.range_constexpr(2 * (4 - width)):
        pair = product.pair(numbers.powers[None, within * width, turn], lane, group)
        keys = key_norms(sig, numbers.norms, lane, group)
        before.append((pair[0] * keys[0], pair[1] * keys[1]))
    for i in cutlass.range_constexpr(2 * width):
        group = 2 * width * within + i
        pair = product.pair(numbers.sums[None, turn], lane, group)
        ending.append((pair, key_norms(sig, numbers.norms, lane, group)))
    return before, ending


@cute.jit
def chosen(acc, at: cutlass.Constexpr, step: cutlass.Constexpr, which):
    """Element at + step * which of an accumulator."""
    found = acc[at]
    for i in cutlass.range_constexpr(1, (cute.size(acc) - at + step - 1) // step):
        found = acc[at + step * i] if which == i else found
    return found


@cute.jit
def keep(
    sig: cutlass.Constexpr, kk, joined, rest, tiles, blocks, mine, columns, stage, lane, warp,
    which,
):  # fmt: skip
    """Rows of G, 16 a warp: negated, as operands, what is left of the block of 16 on the diagonal,
    and the lower left 8 by 8 of that; the other two of it, with strengths, in fp32 for their
    inverses. All warps go through the same code without branches, so that loads come ahead."""
    before, ending = columns
    for i in cutlass.range_constexpr(24):  # of no use from the diagonal on
        value = mine[i % 4 // 2][3] * kk[i] * before[i // 4][i % 2]
        product.rounded(value, joined, rest, i)
    for i in cutlass.range_constexpr(8):
        b, strength, minus, _ = mine[i % 4 // 2]
        down, aside = i % 4 // 2, i // 4
        sums, keys = ending[aside]
        if cutlass.const_expr(down >= aside):
            value = chosen(kk, i, 8, which) * gate.finite_power(b - sums[i % 2]) * keys[i % 2]
            row, column = lane // 4, lane % 4 * 2 + i % 2
            if cutlass.const_expr(down == aside):
                inverse.leaf(blocks, 2 * warp + down)[row, column] = strength * value
            else:
                low = (minus * value).to(sig.io)
                row, column = 16 * warp + 8 + row, 16 * warp + column
                tiles.T[row, column, stage] = low
                if cutlass.const_expr(sig.split):
                    lost = minus * value - low.to(Float32)
                    tiles.T_rest[row, column, stage] = lost.to(sig.io)


@cute.jit
def mask(
    sig: cutlass.Constexpr, qk, joined, rest, ending, ending_rest, asked, columns, lane, which
):  # fmt: skip
    """Rows of P, 16 queries a warp, at the last steps of their tokens, in the io dtype, and what
    that loses: of the blocks of 16 before the warp's, and of those that its rows end in."""
    before, own = columns
    for i in cutlass.range_constexpr(8 * (4 - sig.n)):  # of no use from those blocks on
        value = asked[i % 4 // 2][2] * qk[i] * before[i // 4][i % 2]
        product.rounded(value, joined, rest, i)
    for i in cutlass.range_constexpr(8 * sig.n):
        b, query, _ = asked[i % 4 // 2]
        sums, keys = own[i // 4]
        power = gate.finite_power(b - sums[i % 2]) * keys[i % 2]
        value = query * chosen(qk, i, 8 * sig.n, which) * power
        end = (lane // 4 + 8 * (i % 4 // 2) + 1) * sig.n - lane % 4 * 2
        inside = i // 4 * 8 + i % 2 < end
        product.rounded(value if inside else Float32(0.0), ending, ending_rest, i)


@cute.jit
def put(store, source, source_rest, at: cutlass.Constexpr, target, target_rest, block, stage):
    """Block `at` of registers, and what it loses, as block `block` of a tile."""
    cute.copy(store, source[(None, at), None, None], target[(None, block), None, None, stage])
    if cutlass.const_expr(source_rest is not None):
        part = source_rest[(None, at), None, None]
        cute.copy(store, part, target_rest[(None, block), None, None, stage])


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
