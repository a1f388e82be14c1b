"""Segments of long sequences: where they are, and the states that enter them.

A sequence's chunks are cut into a first segment of `lead` chunks and later ones of `span` each, the
last of them shorter (lead >= span). Later segment s of sequence i has a slot of its own,

    slot(i, s) = begin_i // (span C) + s

in every per-segment array: a sequence of `length` steps has at most length // (span C) later
segments, so slots of different sequences cannot meet, T // (span C) slots hold any batch, and a
slot's sequence is found by bisection on `cu_seqlens` alone, as for chunks. `lead` and `span` are
arguments: they depend on T and N, for which nothing compiles.

`link_kernel` carries the state over the segments of a sequence,

    S_1 = end of the first segment            S_(s+1) = S_s M_s + H_s        [V, K] fp32

one program per (sequence, head, V-slice), serial over segments. H_s lies in the place of S_(s+1)
and is overwritten by it. M_s is [K, K] fp32, or under a gate a head without delta rule the log2 of
one decay. K up to 128: the state stays in registers, and the pipeline loads M ahead of it. K = 256:
too large for that, in blocks of 64 x 64 through memory that only this program touches.
"""

import triton
import triton.language as tl

from lagraph.engines.triton.kernels.index import sequence_span

__all__ = ["link_kernel", "locate_segment", "sequence_segments"]

# Widest key dim whose transition is one tile.
WHOLE = tl.constexpr(128)
BLOCK = tl.constexpr(64)


@triton.jit
def sequence_segments(begin, length, lead, span, C: tl.constexpr, NS: tl.constexpr):
    """How many later segments a sequence has, and the slot of the first of them."""
    chunks = tl.cdiv(length, C)
    count = tl.cdiv(tl.maximum(chunks - lead, 0), span)
    return count, begin * NS // (span.to(tl.int64) * C)


@triton.jit
def locate_segment(slot, p_cu, s_cu, N, T, lead, span, C: tl.constexpr, NS: tl.constexpr):
    """Sequence and index of the later segment of a slot, -1 if unused, and how many there are."""
    low = tl.zeros([], tl.int64)
    high = low + N
    while high - low > 1:
        middle = (low + high) // 2
        begin, length, _ = sequence_span(p_cu, s_cu, middle, T, C, NS)
        _, base = sequence_segments(begin, length, lead, span, C, NS)
        if base <= slot:
            low = middle
        else:
            high = middle
    begin, length, _ = sequence_span(p_cu, s_cu, low, T, C, NS)
    count, base = sequence_segments(begin, length, lead, span, C, NS)
    i_g = slot - base
    i_g = tl.where((i_g >= 0) & (i_g < count), i_g, -1)
    return low, i_g, count


@triton.jit(do_not_specialize=["T", "lead", "span"])
def link_kernel(
    p_enter,
    p_move,
    p_cu,
    T,
    lead,
    span,
    s_cu,
    HO: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    NS: tl.constexpr,
    C: tl.constexpr,
    BV: tl.constexpr,
    DELTA: tl.constexpr,
    PREC: tl.constexpr,
):
    NV: tl.constexpr = V // BV
    pid = tl.program_id(0).to(tl.int64)
    i_v = pid % NV
    i_h = (pid // NV) % HO
    i_n = pid // (NV * HO)
    begin, length, _ = sequence_span(p_cu, s_cu, i_n, T, C, NS)
    count, base = sequence_segments(begin, length, lead, span, C, NS)
    if count < 2:
        return
    o_v = i_v * BV + tl.arange(0, BV)
    p_state = p_enter + ((base * HO + i_h) * V + o_v)[:, None] * K
    if K > WHOLE and DELTA:
        o_b = tl.arange(0, BLOCK)
        for i_g in tl.range(0, count - 1, num_stages=1):
            p_from = p_state + i_g * (HO * V * K) + o_b[None, :]
            p_block = p_move + ((base + i_g) * HO + i_h) * (K * K)
            p_block += o_b[:, None] * K + o_b[None, :]
            for i_j in tl.range(0, K, BLOCK, num_stages=1):
                p_to = p_from + HO * V * K + i_j
                b_s = tl.load(p_to)  # [BV, BLOCK]
                for i_k in tl.range(0, K, BLOCK, num_stages=1):
                    b_m = tl.load(p_block + i_k * K + i_j)  # [BLOCK, BLOCK]
                    b_s = tl.dot(tl.load(p_from + i_k), b_m, b_s, input_precision=PREC)
                tl.store(p_to, b_s)
            tl.debug_barrier()
    else:
        o_k = tl.arange(0, K)
        p_state += o_k[None, :]
        b_s = tl.load(p_state)  # [BV, K]
        for i_g in range(0, count - 1):
            p_tile = p_state + (i_g + 1) * (HO * V * K)
            p_span = p_move + (base + i_g) * HO + i_h
            b_h = tl.load(p_tile)
            if DELTA:
                p_span = p_move + ((base + i_g) * HO + i_h) * (K * K)
                b_m = tl.load(p_span + o_k[:, None] * K + o_k[None, :])  # [K, K]
                b_s = tl.dot(b_s, b_m, b_h, input_precision=PREC)
            else:
                b_s = b_s * tl.exp2(tl.load(p_span)) + b_h
            tl.store(p_tile, b_s)
