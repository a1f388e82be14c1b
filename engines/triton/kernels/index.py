"""Where things are: chunks, sequences and rows, found on the device.

Nothing here needs a table built ahead or a host read of `cu_seqlens`. A packed batch is cut into
chunks of C steps, each sequence from its own start. Chunk c of sequence i lives in slot

    slot(i, c) = begin_i // C + i + c

of every per-chunk workspace. Slots of different sequences cannot meet, because a sequence spans
at most end // C - begin // C + 1 chunks, so T // C + N slots hold any batch, and a slot's sequence
is found by bisection on `cu_seqlens` alone. Steps are sub-tokens where a token has NS of them.

Offsets read from `cu_seqlens` are clamped to [0, T]: wrong ones give wrong numbers, never an
access out of bounds.
"""

import triton
import triton.language as tl

__all__ = ["ROWS", "checkpoint_base", "locate", "query_rows", "sequence_span"]

# Row factors of a chunk under a per-head gate: erase, query, key, cumulative gate, write strength.
ROWS = tl.constexpr(5)


@triton.jit
def _offset(p_cu, s_cu, i_n, T):
    return tl.minimum(tl.maximum(tl.load(p_cu + i_n * s_cu).to(tl.int64), 0), T)


@triton.jit
def sequence_span(p_cu, s_cu, i_n, T, C: tl.constexpr, NS: tl.constexpr):
    """First token, length in steps and first slot of sequence i_n."""
    begin = _offset(p_cu, s_cu, i_n, T)
    end = tl.maximum(_offset(p_cu, s_cu, i_n + 1, T), begin)
    return begin, (end - begin) * NS, begin * NS // C + i_n


@triton.jit
def locate(slot, p_cu, s_cu, N, T, C: tl.constexpr, NS: tl.constexpr):
    """Sequence, chunk index, first token and length in steps for a slot; chunk -1 if unused."""
    low = tl.zeros([], tl.int64)
    high = low + N
    while high - low > 1:
        middle = (low + high) // 2
        if _offset(p_cu, s_cu, middle, T) * NS // C + middle <= slot:
            low = middle
        else:
            high = middle
    begin, length, first = sequence_span(p_cu, s_cu, low, T, C, NS)
    i_c = slot - first
    i_c = tl.where((i_c >= 0) & (i_c * C < length), i_c, -1)
    return low, i_c, begin, length


@triton.jit
def query_rows(i_c, length, C: tl.constexpr, CQ: tl.constexpr, NS: tl.constexpr):
    """Token (within its sequence), step (within its chunk) and validity of a chunk's CQ queries.

    A query reads the state after the last sub-token of its token. Where NS divides C the tile
    holds the C // NS of them; otherwise it holds all C steps and masks those without a query.
    """
    QS: tl.constexpr = C // CQ
    o_s = tl.arange(0, CQ) * QS + (QS - 1)
    o_t = i_c * C + o_s
    m_q = o_t < length
    if QS != NS:
        m_q = m_q & ((o_t + 1) % NS == 0)
    return o_t // NS, o_s, m_q


@triton.jit
def checkpoint_base(p_cu, s_cu, i_n, T, EVERY: tl.constexpr, NS: tl.constexpr):
    """First checkpoint row of sequence i_n: the rows of all earlier sequences, summed."""
    total = tl.zeros([], tl.int64)
    for i_0 in range(0, i_n, 128):
        o_n = i_0 + tl.arange(0, 128)
        m_n = o_n < i_n
        b_begin = tl.load(p_cu + o_n * s_cu, mask=m_n, other=0).to(tl.int64)
        b_end = tl.load(p_cu + (o_n + 1) * s_cu, mask=m_n, other=0).to(tl.int64)
        b_begin = tl.minimum(tl.maximum(b_begin, 0), T)
        b_end = tl.minimum(tl.maximum(b_end, b_begin), T)
        total += tl.sum(((b_end - b_begin) * NS + EVERY - 1) // EVERY)
    return total
