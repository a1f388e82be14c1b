"""Token-parallel factors of the chunk recurrence: one program per (chunk, head).

A chunk of C steps with entering state S [V, K], erase rows e, keys k, queries q (all [C, K]) and
cumulative log2 gates G obeys

    A[i, j] = e_i . (k_j 2^(G_i - G_j))          j < i         T = (I + A)^-1 diag(write strength)
    P[i, j] = scale q_i . (k_j 2^(G_i - G_j))    j <= i
    U = T (V - E S^T)      O = Q S^T + P U       S <- S diag(2^(G_C)) + U^T Kc
    E_i = e_i 2^(G_i)      Q_i = scale q_i 2^(G_i)             Kc_j = k_j 2^(G_C - G_j)

Everything there that does not involve S is made here, so that the serial kernel only multiplies.
Without FOLD, T is (I + A)^-1 alone: the backward needs the strength apart from it.

With SPLIT, T and P are followed by what rounding took from them. That of T is there only where the
largest squared row norm of (I + A)^-1, which is left in the last column of its first row, exceeds
GROWTH (1: everywhere): where products would amplify the rounding of their operands, as they do for
keys that repeat and beta near 2.

`factor_head_kernel` (one gate a head) leaves q and k where they are and writes the row factors
that turn raw rows into E, Q and Kc:  rows[slot, head] = (erase, query, key, G, write strength)
[ROWS, C] fp32, plus T and P. Unit norm, scale, gate and Mamba-2's step size live in row factors.

`factor_key_kernel` (a gate a key channel) writes E, Q, Kc [C, K] in io dtype, the chunk's decay
2^(G_C) [K] in fp32, T and P. G differs by channel, so A and P are sums of K-blocks, and no single
anchor is safe. The strictly lower triangle is tiled by pairs of neighbouring blocks of b = C/2,
..., 16 steps: rows of the later block and columns of the earlier one meet at the first row of the
later block, and both exponents are <= 0. Diagonal blocks of 16 use their own middle row, rounded to
a power of two, as anchor while no exponent from the first row to it, or from it on, reaches 2^100
(products of rows and columns are right); rows past that point, gates beyond -12.5 a step, continue
the pairing down to b = 1. Which of the two a row takes depends on rows up to it only.

`factor_near_kernel` does the same, with one anchor, the chunk's middle, where every exponent from
there stays below 2^100 and no gate grows by more than a quarter: gates to -4.3 a step. With BLOCKS,
where that is not so, one or two blocks of 16 have their own middle rows as anchors, and what lies
between them and the chunk's middle, a power of two, brings the same tiles there: gates to -8.6 a
step. All anchors are integers, so which of the two a chunk takes changes no bit of a row. One lane
a channel: rows come from memory and go there as they lie, sums of gates stay in registers, and
tiles for products are put together without a move. Of other chunks, marked FAR, it makes the rows
before the first that is out of reach, and leaves the rest to `factor_key_kernel`, which reads gates
and factors of blocks back from memory: a chunk's later gates change no bit of its earlier rows.

Tiles: [C, BK] operands, two [C, C] fp32 accumulators; C = 64, 4 warps, about 64 accumulator
registers a thread, one or two stages of 2 C BK io elements in shared memory.
"""

import triton
import triton.language as tl

from lagraph.engines.triton.kernels.gate import (
    LOG2E,
    MOST,
    amplitude,
    growth,
    log2_decay,
    sigmoid,
    step_size,
)
from lagraph.engines.triton.kernels.index import ROWS, locate, query_rows
from lagraph.engines.triton.kernels.inverse import invert_in_memory

__all__ = ["factor_head_kernel", "factor_key_kernel", "factor_near_kernel"]

NORM_EPS = tl.constexpr(1e-6)
# Largest exponent that the anchor of a diagonal block may leave to a column.
REACH = tl.constexpr(100.0)
# Sums of gates from -248 on to which this is added become multiples of 2^-15, and their distance to
# an integer is exact.
GRID = tl.constexpr(504.0)
# Least such sum: the distance of what is not below it to an anchor in reach is exact.
LEAST = tl.constexpr(64.0)
MIDDLE = tl.constexpr(7)
# Stands for how much a chunk grows where `factor_near_kernel` leaves rows to `factor_key_kernel`:
# times one more than the rows that it has made.
FAR = tl.constexpr(1e30)
# Squared row norm of an inverse beyond which products with it are in two parts. It is hardly more
# than 2 for ordinary keys, and up to 1 + beta / (2 - beta) for repeated ones.
GROWTH = tl.constexpr(4.0)


@triton.jit
def load_beta(p_beta, o_b, m_b, SIGMOID: tl.constexpr, DOUBLE: tl.constexpr):
    """Erase strength, activated; rows outside m_b are zero."""
    b_beta = tl.load(p_beta + o_b, mask=m_b, other=0.0).to(tl.float32)
    if SIGMOID:
        b_beta = sigmoid(b_beta)
        if DOUBLE:
            b_beta = 2.0 * b_beta
        b_beta = tl.where(m_b, b_beta, 0.0)
    return b_beta


@triton.jit
def _inverse_norm(p_x, s_t, m_t, K: tl.constexpr, BK: tl.constexpr):
    """rsqrt(sum x^2 + eps) of rows at offsets s_t: [rows]."""
    b_sum = tl.zeros_like(s_t).to(tl.float32)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        b_x = tl.load(p_x + s_t[:, None] + o_k[None, :], mask=m_t[:, None], other=0.0)
        b_x = b_x.to(tl.float32)
        b_sum += tl.sum(b_x * b_x, axis=1)
    return tl.rsqrt(b_sum + NORM_EPS)


@triton.jit(do_not_specialize=["N", "T"])
def factor_head_kernel(
    p_q,
    p_k,
    p_g,
    p_beta,
    p_alog,
    p_bias,
    p_a,
    p_cu,
    p_rows,
    p_x,
    p_t,
    p_p,
    N,
    T,
    scale,
    lower,
    dt_min,
    dt_max,
    s_cu,
    s_qt,
    s_qh,
    s_kt,
    s_ks,
    s_kh,
    s_gt,
    s_gh,
    s_bt,
    s_bs,
    s_bh,
    H: tl.constexpr,
    HK: tl.constexpr,
    HO: tl.constexpr,
    HP: tl.constexpr,
    K: tl.constexpr,
    NS: tl.constexpr,
    C: tl.constexpr,
    CQ: tl.constexpr,
    BK: tl.constexpr,
    GATE: tl.constexpr,
    DELTA: tl.constexpr,
    QUERY: tl.constexpr,
    NORM: tl.constexpr,
    SIGMOID: tl.constexpr,
    DOUBLE: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    SPLIT: tl.constexpr,
    PREC: tl.constexpr,
    FOLD: tl.constexpr = True,
):
    pid = tl.program_id(0).to(tl.int64)
    i_h0 = (pid % (HO // HP)) * HP
    slot = pid // (HO // HP)
    _, i_c, begin, length = locate(slot, p_cu, s_cu, N, T, C, NS)
    if i_c < 0:
        return
    o_i = tl.arange(0, C)
    o_q = tl.arange(0, CQ)
    o_t = i_c * C + o_i
    m_t = o_t < length
    o_tok = begin + o_t // NS
    o_sub = o_t % NS
    m_g = m_t & (o_sub == 0)  # a token's decay belongs to its first step

    # Scores of the rows, once for all heads of the group.
    p_kh = p_k + (i_h0 // (HO // HK)) * s_kh
    s_ki = o_tok * s_kt + o_sub * s_ks
    b_rk = tl.full([C], 1.0, tl.float32)
    if NORM:
        b_rk = _inverse_norm(p_kh, s_ki, m_t, K, BK)
    if QUERY:
        i_tq, o_iq, m_q = query_rows(i_c, length, C, CQ, NS)
        p_qh = p_q + (i_h0 // (HO // H)) * s_qh
        s_qi = (begin + i_tq) * s_qt
        b_rq = tl.full([CQ], 0.0, tl.float32) + scale
        if NORM:
            b_rq *= _inverse_norm(p_qh, s_qi, m_q, K, BK)
        m_up = o_i[None, :] <= o_iq[:, None]
        b_qk = tl.zeros([CQ, C], tl.float32)
    b_kk = tl.zeros([C, C], tl.float32)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        b_k = tl.load(p_kh + s_ki[:, None] + o_k[None, :], mask=m_t[:, None], other=0.0)
        if DELTA:
            b_kk = tl.dot(b_k, tl.trans(b_k), b_kk, input_precision=PREC)
        if QUERY:
            b_q = tl.load(p_qh + s_qi[:, None] + o_k[None, :], mask=m_q[:, None], other=0.0)
            b_qk = tl.dot(b_q, tl.trans(b_k), b_qk, input_precision=PREC)
    if NORM:
        b_kk *= b_rk[:, None] * b_rk[None, :]
        if QUERY:
            b_qk *= b_rk[None, :]

    # Row factors of all heads of the program [HP, C]. They go through memory, so that each gate is
    # computed once, by one thread, and not again in every layout that meets it below.
    p_row = p_rows + (slot * HO + i_h0) * (ROWS * C)
    if NORM:
        tl.store(p_row + o_i, b_rk)
        if QUERY:
            tl.store(p_row + C + o_q, b_rq)
        tl.debug_barrier()
        b_nk = tl.load(p_row + o_i)[None, :]
        if QUERY:
            b_nq = tl.load(p_row + C + o_q)[None, :]
        tl.debug_barrier()
    else:
        b_nk = 1.0
        b_nq = scale
    o_g = tl.arange(0, HP)[:, None]
    b_x = tl.load(p_g + (o_tok * s_gt)[None, :] + (i_h0 + o_g) * s_gh, mask=m_g[None, :], other=0.0)
    b_x = b_x.to(tl.float32)
    if p_bias is not None:
        b_x += tl.load(p_bias + i_h0 + o_g).to(tl.float32)
    if GATE == "ssd":
        b_write = tl.where(m_t[None, :], step_size(b_x, dt_min, dt_max, SOFTPLUS), 0.0)
        b_decay = tl.load(p_a + i_h0 + o_g).to(tl.float32) * b_write * LOG2E
    else:
        b_decay = log2_decay(b_x, amplitude(p_alog, i_h0 + o_g), lower, GATE)
    b_decay = tl.where(m_g[None, :], b_decay, 0.0)
    b_gc = tl.cumsum(b_decay, axis=1)
    b_ck = b_nk * growth(tl.sum(b_decay, axis=1)[:, None] - b_gc)
    if DELTA:
        s_b = (o_tok * s_bt + o_sub * s_bs)[None, :] + (i_h0 + o_g) * s_bh
        b_write = load_beta(p_beta, s_b, m_t[None, :] & (o_g >= 0), SIGMOID, DOUBLE)
    else:
        b_ck *= b_write
    o_row = o_g * (ROWS * C) + o_i[None, :]
    b_ek = b_nk * growth(b_gc)
    # What is not erased shall meet no state that has overflown.
    b_ek = tl.where(b_write == 0.0, 0.0, b_ek) if DELTA else b_ek
    tl.store(p_row + o_row, b_ek)
    tl.store(p_row + 2 * C + o_row, b_ck)
    tl.store(p_row + 3 * C + o_row, b_gc)
    tl.store(p_row + 4 * C + o_row, b_write)
    tl.debug_barrier()
    if QUERY:
        o_row = o_g * (ROWS * C)
        b_gq = tl.load(p_row + 3 * C + o_row + o_iq[None, :])
        tl.store(p_row + C + o_row + o_q[None, :], b_nq * growth(b_gq))

    if DELTA:
        p_x += (slot * HO + i_h0) * (C * C)
    # Not pipelined: what the body stores is read again after it.
    for i_g in tl.range(0, HP, num_stages=1):
        b_gi = tl.load(p_row + 3 * C + o_i)
        if QUERY:
            b_gr = tl.load(p_row + 3 * C + o_iq)
            b_s = growth(tl.where(m_up, b_gr[:, None] - b_gi[None, :], -float("inf")))
            b_p = b_s * (b_qk * b_rq[:, None])
            if not DELTA:
                b_p *= tl.load(p_row + 4 * C + o_i)[None, :]
            PARTS: tl.constexpr = 2 if SPLIT else 1
            tile = (slot * HO + i_h0 + i_g) * PARTS
            p_tile = p_p + tile * (CQ * C) + o_q[:, None] * C + o_i[None, :]
            tl.store(p_tile, b_p.to(p_p.dtype.element_ty))
            if SPLIT:
                tl.store(p_tile + CQ * C, rest(b_p, p_p.dtype.element_ty))
        if DELTA:
            m_lower = o_i[:, None] > o_i[None, :]
            if QUERY and CQ == C and NS == 1:  # the same rows
                b_s = tl.where(m_lower, b_s, 0.0)
            else:
                b_s = growth(tl.where(m_lower, b_gi[:, None] - b_gi[None, :], -float("inf")))
            b_s *= b_kk * tl.load(p_row + 4 * C + o_i)[:, None]
            tl.store(p_x + i_g * (C * C) + o_i[:, None] * C + o_i[None, :], b_s)
        p_row += ROWS * C

    if DELTA:
        invert_in_memory(p_x, HP * C, C, PREC)
        p_row -= HP * ROWS * C
        for i_g in tl.range(0, HP, num_stages=1):
            b_fold = tl.full([C], 1.0, tl.float32)
            if FOLD:
                b_fold = tl.load(p_row + i_g * (ROWS * C) + 4 * C + o_i)
            store_inverse(p_t, p_x + i_g * (C * C), slot * HO + i_h0 + i_g, b_fold, C, SPLIT)


@triton.jit
def rest(b_x, IO: tl.constexpr):
    """What rounding to io dtype takes from x, in io dtype."""
    return (b_x - b_x.to(IO).to(tl.float32)).to(IO)


@triton.jit
def refined(b_u, b_r, b_v, b_t, p_tl, C: tl.constexpr, PREC: tl.constexpr):
    """U^T = (R^T + V^T) T^T [BV, C], made of rounded operands, with the products of what rounding
    took from T (at p_tl) and from R. V is io itself, or None where it is part of R."""
    IO: tl.constexpr = b_t.dtype
    o_i = tl.arange(0, C)
    m_up = o_i[None, :] >= o_i[:, None]
    b_tl = tl.load(p_tl + o_i[None, :] * C + o_i[:, None], mask=m_up, other=0.0)
    b_u = tl.dot(b_r.to(IO), b_tl, b_u, input_precision=PREC)
    if b_v is not None:
        b_u = tl.dot(tl.trans(b_v), b_tl, b_u, input_precision=PREC)
    return tl.dot(rest(b_r, IO), tl.trans(b_t), b_u, input_precision=PREC)


@triton.jit
def store_inverse(p_t, p_x, tile, b_write, C: tl.constexpr, SPLIT: tl.constexpr):
    """T = X diag(write) in io dtype from X [C, C] fp32; with SPLIT, what follows it."""
    IO: tl.constexpr = p_t.dtype.element_ty
    PARTS: tl.constexpr = 2 if SPLIT else 1
    o_i = tl.arange(0, C)
    o_tile = o_i[:, None] * C + o_i[None, :]
    m_tile = o_i[:, None] >= o_i[None, :]
    b_x = tl.load(p_x + o_tile, mask=m_tile, other=0.0)
    b_t = b_x * b_write[None, :]
    p_t += tile * (PARTS * C * C)
    tl.store(p_t + o_tile, b_t.to(IO))
    if SPLIT:
        p_t += C * C
        size = tl.max(tl.sum(b_x * b_x, axis=1), axis=0)
        tl.store(p_t + C - 1, tl.minimum(size, 6.0e4).to(IO))
        LIMIT: tl.constexpr = GROWTH if SPLIT == 2 else 0.0
        if size > LIMIT:
            tl.store(p_t + o_tile, rest(b_t, IO), mask=m_tile)


@triton.jit
def inverse_growth(p_t, tile, C: tl.constexpr, SPLIT: tl.constexpr):
    """What `store_inverse` left of how large the inverse of a tile is, by chunk and head."""
    size = 0.0
    if SPLIT == 2:
        size = tl.load(p_t + tile * (2 * C * C) + (C * C + C - 1)).to(tl.float32)
    return size


@triton.jit
def pair_mask(C: tl.constexpr, B: tl.constexpr):
    """Where a pairing level holds: row in an odd block of B steps, column in the block before."""
    o_i = tl.arange(0, C) // B
    return (o_i[:, None] % 2 == 1) & (o_i[None, :] == o_i[:, None] - 1)


@triton.jit
def guard_limit(b_a1, b_c2):
    """Largest spread R of a row of b that cannot expand the state."""
    b_d = 1.0 - b_a1
    return tl.maximum((b_c2 - 1.0) * (1.0 - b_d * b_d / b_c2), 0.0)


@triton.jit
def guarded(b_b, m_act, m_flat, b_mean, b_eta, IO: tl.constexpr):
    """GDN-2's beta_guard on erase rows b [C, BK]: rows m_act are pulled to their mean, and rounded
    to io dtype; rows m_flat are their mean."""
    b_new = b_mean[:, None] + b_eta[:, None] * (b_b - b_mean[:, None])
    b_new = b_new.to(IO).to(tl.float32)
    b_new = tl.where(m_flat[:, None], b_mean[:, None], b_new)
    return tl.where(m_act[:, None], b_new, b_b)


@triton.jit
def guard_rows(
    p_k,
    p_g,
    p_beta,
    p_bias,
    o_t,
    o_g,
    o_b,
    b_rk,
    m_t,
    amp,
    lower,
    K: tl.constexpr,
    BK: tl.constexpr,
    GATE: tl.constexpr,
    SIGMOID: tl.constexpr,
    DOUBLE: tl.constexpr,
    IO: tl.constexpr,
):
    """What `guarded` needs of every row [C]; pointers include the head, o_* are row offsets."""
    C: tl.constexpr = b_rk.shape[0]
    # Moments of each row of b under p = k^2, and the largest gate: all of [C].
    b_a0 = tl.zeros([C], tl.float32)
    b_a1 = tl.zeros([C], tl.float32)
    b_a2 = tl.zeros([C], tl.float32)
    b_top = tl.full([C], -float("inf"), tl.float32)
    for i_k in tl.range(0, K, BK, num_stages=1):
        o_k = i_k + tl.arange(0, BK)
        m_b = m_t[:, None] & (o_k >= 0)[None, :]
        p_tile = p_g + o_g[:, None] + o_k[None, :]
        b_g = tl.load(p_tile, mask=m_b, other=0.0).to(tl.float32)
        if p_bias is not None:
            b_g += tl.load(p_bias + o_k).to(tl.float32)[None, :]
        b_top = tl.maximum(b_top, tl.max(log2_decay(b_g, amp, lower, GATE), axis=1))
        s_b = o_b[:, None] + o_k[None, :]
        b_e = load_beta(p_beta, s_b, m_b, SIGMOID, DOUBLE)
        p_tile = p_k + o_t[:, None] + o_k[None, :]
        b_k = tl.load(p_tile, mask=m_b, other=0.0).to(tl.float32) * b_rk[:, None]
        b_a0 += tl.sum(b_k * b_k, axis=1)
        b_a1 += tl.sum(b_e * b_k * b_k, axis=1)
        b_a2 += tl.sum(b_e * b_e * b_k * b_k, axis=1)
    b_c2 = tl.exp2(-2.0 * b_top)
    b_r = tl.maximum(b_a0 * b_a2 - b_a1 * b_a1, 0.0)
    b_lim = guard_limit(b_a1, b_c2)
    m_act = (b_a0 > 1e-20) & (b_r > b_lim)
    b_mean = b_a1 / tl.maximum(b_a0, 1e-20)
    b_eta = tl.minimum(tl.sqrt((1.0 - 1.0 / 32.0) * b_lim / tl.maximum(b_r, 1e-30)), 1.0)
    m_flat = b_a0 < 0.0
    if tl.float32 != IO:
        # Rounding may undo it: the rows as they will be rounded, once more.
        EPS4: tl.constexpr = 0.00390625 if tl.float16 == IO else 0.03125
        b_a1 = tl.zeros([C], tl.float32)
        b_a2 = tl.zeros([C], tl.float32)
        for i_k in tl.range(0, K, BK, num_stages=1):
            o_k = i_k + tl.arange(0, BK)
            m_b = m_t[:, None] & (o_k >= 0)[None, :]
            s_b = o_b[:, None] + o_k[None, :]
            b_e = load_beta(p_beta, s_b, m_b, SIGMOID, DOUBLE)
            b_e = guarded(b_e, m_act, m_flat, b_mean, b_eta, IO)
            p_tile = p_k + o_t[:, None] + o_k[None, :]
            b_k = tl.load(p_tile, mask=m_b, other=0.0).to(tl.float32) * b_rk[:, None]
            b_a1 += tl.sum(b_e * b_k * b_k, axis=1)
            b_a2 += tl.sum(b_e * b_e * b_k * b_k, axis=1)
        b_r = tl.maximum(b_a0 * b_a2 - b_a1 * b_a1, 0.0)
        b_lim = guard_limit(b_a1, b_c2) + EPS4 * (b_a0 * b_a2 + b_a1 * b_a1)
        m_flat = m_act & (b_r > b_lim)
        b_mean = tl.where(m_flat, b_a1 / tl.maximum(b_a0, 1e-20), b_mean)
    return m_act, m_flat, b_mean, b_eta


@triton.jit
def anchored(b_l, b_b):
    """2^(l - b) and 2^(b - l) of sums of gates l and an anchor b, an integer, at most REACH away.

    What b adds is an exponent: it changes no rounding of what is multiplied by them."""
    b_n = tl.floor(b_l)
    b_f = b_l - b_n
    b_x = tl.minimum(tl.maximum(b_n - b_b, -REACH), REACH)
    # Where 1.5 2^23 has been added, the last bits of a number are those of an integer.
    b_x = (b_x + 12582912.0).to(tl.int32, bitcast=True) << 23
    b_y = tl.exp2(-b_f) * (1065353216 - b_x).to(tl.float32, bitcast=True)
    b_x = tl.exp2(b_f) * (1065353216 + b_x).to(tl.float32, bitcast=True)
    return b_x, b_y


@triton.jit
def operand(b_x, DTYPE: tl.constexpr, PREC: tl.constexpr):
    """fp32 x as an operand. Rounded to what tf32 has of it, since the hardware cuts the rest off,
    always to one side: with repeated keys that adds up."""
    if PREC == "tf32":
        b_i = b_x.to(tl.int32, bitcast=True) + 4096
        b_x = (b_i & -8192).to(tl.float32, bitcast=True)
    else:
        b_x = b_x.to(DTYPE)
    return b_x


@triton.jit
def _scores(
    b_a, b_p, b_e, b_q, b_k, m_pair, IO: tl.constexpr, QUERY: tl.constexpr, PREC: tl.constexpr
):
    """Adds e k^T and q k^T [C, C], where m_pair holds, to the two sums."""
    b_col = tl.trans(operand(b_k, IO, PREC))
    b_s = tl.dot(operand(b_e, IO, PREC), b_col, input_precision=PREC)
    b_a += tl.where(m_pair, b_s, 0.0)
    if QUERY:
        b_s = tl.dot(operand(b_q, IO, PREC), b_col, input_precision=PREC)
        b_p += tl.where(m_pair, b_s, 0.0)
    return b_a, b_p


@triton.jit
def _load_rows(p_row, s_t, left, m_k):
    """Row i of every block of 16 steps, for all i: 16 tensors [NB, BK], one lane a channel."""
    rows = ()
    for i in tl.static_range(16):
        b_x = tl.load(p_row + i * s_t, mask=(i < left) & m_k, other=0.0)
        rows = rows + (b_x,)  # noqa: RUF005 (kernels cannot unpack)
    return rows


@triton.jit
def _tile(rows):
    """The tile [16 NB, BK] of 16 tensors [NB, BK]: lanes hold columns, so that nothing moves."""
    NB: tl.constexpr = rows[0].shape[0]
    BK: tl.constexpr = rows[0].shape[1]
    for b in tl.static_range(4):
        half = ()
        for i in tl.static_range(8 >> b):
            half = half + (tl.join(rows[i], rows[i + (8 >> b)]),)  # noqa: RUF005
        rows = half
    # The sum of one hides the joins from Triton's choice of how products read their operands.
    b_x = tl.reshape(tl.permute(rows[0], [0, 2, 3, 4, 5, 1]), [16 * NB, BK, 1])
    return tl.sum(b_x, axis=2)


@triton.jit
def _key_row(i: tl.constexpr, keys, p_f, NORM: tl.constexpr):
    """Row i of every block [NB, BK] in fp32. p_f: norms of the chunk's rows."""
    b_k = keys[i].to(tl.float32)
    if NORM:
        b_k *= tl.load(p_f + tl.arange(0, b_k.shape[0])[:, None] * 16 + i)
    return b_k


@triton.jit
def _erase_row(i: tl.constexpr, erases, SIGMOID: tl.constexpr, DOUBLE: tl.constexpr):
    """Erase strengths of row i of every block [NB, BK], activated."""
    b_b = erases[i].to(tl.float32)
    if SIGMOID:
        b_b = sigmoid(b_b)
        if DOUBLE:
            b_b = 2.0 * b_b
    return b_b


@triton.jit
def _anchored_scores(
    b_a,
    b_p,
    gates,
    keys,
    erases,
    queries,
    p_f,
    p_e,
    p_qg,
    p_kc,
    b_from,
    b_fe,
    b_fk,
    b_le,
    b_lk,
    scale,
    K: tl.constexpr,
    NORM: tl.constexpr,
    ERASE_KEY: tl.constexpr,
    QUERY: tl.constexpr,
    SIGMOID: tl.constexpr,
    DOUBLE: tl.constexpr,
    IO: tl.constexpr,
    WIDE: tl.constexpr,
    PREC: tl.constexpr,
):
    """Adds the scores of all pairs of the chunk and stores E, Q, Kc, with anchors b_from [NB, BK],
    as gates count, and what lies before and after them, b_fe and b_fk. What stands above the
    diagonal means nothing.

    Without b_le there is one anchor. With it each of two blocks has its own; b_le and b_lk bring
    rows of the later and columns of the earlier from there to where b_fe and b_fk begin."""
    C: tl.constexpr = b_a.shape[0]
    # One operand after another: each leaves its registers before the next.
    tile = ()
    link = ()
    for i in tl.static_range(16):
        b_k = _key_row(i, keys, p_f, NORM) * tl.exp2(b_from - gates[i])
        tile = tile + (operand(b_k, WIDE, PREC),)  # noqa: RUF005 (kernels cannot unpack)
        if b_lk is not None:
            b_k *= b_lk
            link = link + (operand(b_k, WIDE, PREC),)  # noqa: RUF005
        tl.store(p_kc + i * K, (b_k * b_fk).to(IO))
    b_col = tl.trans(_tile(tile))
    if b_lk is not None:
        b_cl = tl.trans(_tile(link))
        o_i = tl.arange(0, C)
        m_link = o_i[:, None] // 16 > o_i[None, :] // 16
    tile = ()
    link = ()
    for i in tl.static_range(16):
        b_e = _key_row(i, keys, p_f, NORM)
        if ERASE_KEY:
            b_e *= _erase_row(i, erases, SIGMOID, DOUBLE)
        b_e *= tl.exp2(gates[i] - b_from)
        tile = tile + (operand(b_e, WIDE, PREC),)  # noqa: RUF005
        if b_le is not None:
            b_e *= b_le
            link = link + (operand(b_e, WIDE, PREC),)  # noqa: RUF005
        tl.store(p_e + i * K, (b_e * b_fe).to(IO))
    b_s = tl.dot(_tile(tile), b_col, b_a, input_precision=PREC)
    if b_le is not None:
        b_s = tl.where(m_link, tl.dot(_tile(link), b_cl, b_a, input_precision=PREC), b_s)
    b_a = b_s
    if QUERY:
        tile = ()
        link = ()
        for i in tl.static_range(16):
            b_q = _key_row(i, queries, p_f + C, NORM) * tl.exp2(gates[i] - b_from)
            tile = tile + (operand(b_q, WIDE, PREC),)  # noqa: RUF005
            if b_le is not None:
                b_q *= b_le
                link = link + (operand(b_q, WIDE, PREC),)  # noqa: RUF005
            tl.store(p_qg + i * K, (b_q * (b_fe * scale)).to(IO))
        b_s = tl.dot(_tile(tile), b_col, b_p, input_precision=PREC)
        if b_le is not None:
            b_s = tl.where(m_link, tl.dot(_tile(link), b_cl, b_p, input_precision=PREC), b_s)
        b_p = b_s
    return b_a, b_p


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _served(places, b_last, b_anchor):
    """Rows of a chunk before the first that its anchor does not serve, or those of its blocks where
    that is None. Rows that hardly rise between the ends of blocks are near where these are: what
    serves a chunk serves its rows."""
    NB: tl.constexpr = b_last.shape[0]
    o_n = tl.arange(0, NB)[:, None] * 16
    b_served = tl.full(b_last.shape, 16 * NB, tl.int32)
    for i in tl.static_range(16):
        b_x = places[i]
        if b_anchor is None:
            m_row = (places[0 if i <= MIDDLE else MIDDLE] - b_x < REACH + 4.0) & (b_x > LEAST)
        else:
            m_row = tl.abs(b_x - b_anchor) < REACH + 4.0
        m_row = m_row & (b_x - b_last < 0.251)
        b_served = tl.where(m_row, b_served, tl.minimum(b_served, o_n + i))
        b_last = b_x
    return tl.min(b_served)


@triton.jit
def _key_rows(
    p_k,
    p_q,
    p_beta,
    s_k,
    s_q,
    s_b,
    o_k,
    m_t,
    b_rk,
    b_rq,
    ERASE_KEY: tl.constexpr,
    QUERY: tl.constexpr,
    SIGMOID: tl.constexpr,
    DOUBLE: tl.constexpr,
):
    """Rows k, q [C, BK] with norms, and the erase strengths b (one a key), or else k once more."""
    m_t = m_t[:, None]
    b_k = tl.load(p_k + s_k[:, None] + o_k, mask=m_t, other=0.0).to(tl.float32) * b_rk[:, None]
    b_e = b_k
    if ERASE_KEY:
        b_e = load_beta(p_beta, s_b[:, None] + o_k, m_t & (o_k >= 0), SIGMOID, DOUBLE)
    b_q = b_k
    if QUERY:
        b_q = tl.load(p_q + s_q[:, None] + o_k, mask=m_t, other=0.0).to(tl.float32)
        b_q *= b_rq[:, None]
    return b_k, b_e, b_q


@triton.jit(do_not_specialize=["N", "T"])
def factor_near_kernel(
    p_q,
    p_k,
    p_g,
    p_beta,
    p_alog,
    p_bias,
    p_cu,
    p_e,
    p_qg,
    p_kc,
    p_decay,
    p_l,
    p_x,
    p_t,
    p_p,
    N,
    T,
    scale,
    lower,
    s_cu,
    s_qt,
    s_qh,
    s_kt,
    s_kh,
    s_gt,
    s_gh,
    s_bt,
    s_bh,
    H: tl.constexpr,
    HK: tl.constexpr,
    HO: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    GATE: tl.constexpr,
    ERASE_KEY: tl.constexpr,
    QUERY: tl.constexpr,
    NORM: tl.constexpr,
    SIGMOID: tl.constexpr,
    DOUBLE: tl.constexpr,
    SPLIT: tl.constexpr,
    PREC: tl.constexpr,
    FOLD: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    i_h = pid % HO
    _, i_c, begin, length = locate(pid // HO, p_cu, s_cu, N, T, C, 1)
    if i_c < 0:
        return
    IO: tl.constexpr = p_k.dtype.element_ty
    # Columns reach 2^100: fp16 products of them run in tf32.
    WIDE: tl.constexpr = tl.float32 if tl.float16 == IO else IO
    WIDE_PREC: tl.constexpr = "tf32" if tl.float16 == IO else PREC
    NB: tl.constexpr = C // 16
    o_i = tl.arange(0, C)
    o_nb = tl.arange(0, NB)[:, None]
    # Everything counts from the chunk's first token: row offsets fit 32 bits.
    token = begin + i_c * C
    steps = tl.minimum(length - i_c * C, C).to(tl.int32)
    left = steps - o_nb * 16
    p_k += token * s_kt + (i_h // (HO // HK)) * s_kh
    p_q = p_q + token * s_qt + (i_h // (HO // H)) * s_qh if QUERY else p_k
    p_g += token * s_gt + i_h * s_gh
    p_beta += token * s_bt + i_h * s_bh
    p_e += pid * (C * K)
    p_qg = p_qg + pid * (C * K) if QUERY else p_e
    p_kc += pid * (C * K)
    p_decay += pid * K
    p_l += pid * ((C + 4 * NB) * K)
    p_x += pid * (C * C)
    amp = amplitude(p_alog, i_h)
    if NORM:
        m_t = o_i < steps
        tl.store(p_x + o_i, _inverse_norm(p_k, o_i * s_kt, m_t, K, BK))
        if QUERY:
            tl.store(p_x + C + o_i, _inverse_norm(p_q, o_i * s_qt, m_t, K, BK))
        tl.debug_barrier()

    b_a = tl.zeros([C, C], tl.float32)
    b_p = tl.zeros([C, C], tl.float32)
    rise = 0.0  # its sign is read: whether a channel grows
    served = C  # rows before the first that no anchor serves
    for i_k in tl.range(0, K, BK, num_stages=1):
        o_k = i_k + tl.arange(0, BK)[None, :]
        m_k = o_k >= 0
        gates = _load_rows(p_g + o_nb * (16 * s_gt) + o_k, s_gt, left, m_k)
        keys = _load_rows(p_k + o_nb * (16 * s_kt) + o_k, s_kt, left, m_k)
        queries = keys
        if QUERY:
            queries = _load_rows(p_q + o_nb * (16 * s_qt) + o_k, s_qt, left, m_k)
        erases = keys
        if ERASE_KEY:
            erases = _load_rows(p_beta + o_nb * (16 * s_bt) + o_k, s_bt, left, m_k)

        # Gates, cumulative within each block of 16 steps: one lane a channel, all blocks at once.
        b_bias = 0.0
        if p_bias is not None:
            b_bias = tl.load(p_bias + i_h * K + o_k).to(tl.float32)
        b_run = tl.zeros([NB, BK], tl.float32)
        b_top = tl.full([NB, BK], -float("inf"), tl.float32)
        sums = ()
        for i in tl.static_range(16):
            b_g = gates[i].to(tl.float32)
            if p_bias is not None:
                b_g += b_bias
            b_g = log2_decay(b_g, amp, lower, GATE)
            if GATE != "log" or p_bias is not None:
                b_g = tl.where(i < left, b_g, 0.0)
            b_top = tl.maximum(b_top, b_g)
            b_run += b_g
            sums = sums + (b_run,)  # noqa: RUF005 (kernels cannot unpack)
            if KEEP:
                tl.store(p_l + (o_nb * 16 + i) * K + o_k, b_run)

        # From block sums: to the anchor, the chunk's middle, and from it.
        b_before = tl.zeros([NB, BK], tl.float32)
        b_after = tl.zeros([NB, BK], tl.float32)
        b_first = tl.zeros([1, BK], tl.float32)
        b_second = tl.zeros([1, BK], tl.float32)
        for i in tl.static_range(NB):
            b_one = b_run
            if NB > 1:
                b_one = tl.sum(tl.where(o_nb == i, b_run, 0.0), axis=0)[None, :]
            b_before += tl.where(o_nb > i, b_one, 0.0)
            b_after += tl.where(o_nb < i, b_one, 0.0)
            if i < NB // 2:
                b_first += b_one
            else:
                b_second += b_one
        b_total = b_first + b_second
        if KEEP:
            p_f = p_l + (C + o_nb) * K + o_k
            tl.store(p_f, tl.exp2(b_before))
            tl.store(p_f + NB * K, tl.exp2(b_after))
        tl.store(p_decay + o_k, tl.exp2(b_total))

        # What a row is multiplied by depends on gates up to it, and on its anchor, an integer,
        # through a power of two: what comes later changes no rounding.
        places = ()
        for i in tl.static_range(16):
            places = places + (sums[i] + (b_before + GRID),)  # noqa: RUF005
        # Gates that hardly grow: the ends are farthest from the anchor. NaN is not near.
        b_off = b_before - b_first
        m_near = (tl.abs(b_off) < REACH) & (tl.abs(b_off + b_run) < REACH) & (b_top < 0.25)
        m_serve = m_near
        if BLOCKS:
            m_serve = (places[0] - places[MIDDLE] < REACH) & (places[MIDDLE] - places[15] < REACH)
            m_serve = m_near | (m_serve & (places[15] > LEAST + 4.0) & (b_top < 0.25))
        # Where one anchor does not serve; where none does; what grows.
        found = tl.where(m_near, 0, 1) + tl.where(m_serve, 0, 2) + tl.where(b_total > 0.0, 4, 0)
        found = tl.reduce(found, None, _either)
        if found & 4:
            rise = 1.0
        b_anchor = tl.floor(tl.maximum(b_first, -REACH))
        if found & 2:
            served = tl.minimum(
                served, _served(places, b_before + GRID, None if BLOCKS else b_anchor + GRID)
            )
        o_out = o_nb * (16 * K) + o_k
        if BLOCKS and found & 1:
            b_from = tl.floor(tl.maximum(places[MIDDLE], places[0] - REACH))
            b_fe, b_le, b_lk = b_from - GRID, None, None
            b_fk = b_fe
            if NB == 2:
                b_anchor = tl.floor(b_first)
                b_le = tl.exp2(tl.where(o_nb == 1, b_fe - b_anchor, 0.0))
                b_lk = tl.exp2(tl.where(o_nb == 0, b_anchor - b_fe, 0.0))
                b_fk = tl.where(o_nb == 0, b_anchor, b_fe)
                b_fe = tl.where(o_nb == 1, b_anchor, b_fe)
            b_a, b_p = _anchored_scores(
                b_a, b_p, places, keys, erases, queries, p_x, p_e + o_out, p_qg + o_out,
                p_kc + o_out, b_from, tl.exp2(b_fe), tl.exp2(b_total - b_fk), b_le, b_lk, scale, K,
                NORM, ERASE_KEY, QUERY, SIGMOID, DOUBLE, IO, WIDE, WIDE_PREC,
            )  # fmt: skip
        else:
            b_a, b_p = _anchored_scores(
                b_a, b_p, places, keys, erases, queries, p_x, p_e + o_out, p_qg + o_out,
                p_kc + o_out, b_anchor + GRID, tl.exp2(b_anchor), tl.exp2(b_total - b_anchor),
                None, None, scale, K, NORM, ERASE_KEY, QUERY, SIGMOID, DOUBLE, IO, WIDE, WIDE_PREC,
            )  # fmt: skip

    if NORM:
        tl.debug_barrier()  # all have read the norms
    b_write = tl.full([C], 1.0, tl.float32)
    if not ERASE_KEY:
        b_write = load_beta(p_beta, o_i * s_bt, o_i < steps, SIGMOID, DOUBLE)
        b_a *= b_write[:, None]
    o_tile = o_i[:, None] * C + o_i[None, :]
    if QUERY:
        PARTS: tl.constexpr = 2 if SPLIT else 1
        b_p = tl.where(o_i[:, None] >= o_i[None, :], b_p * scale, 0.0)
        p_p += pid * (PARTS * C * C) + o_tile
        tl.store(p_p, b_p.to(IO))
        if SPLIT:
            tl.store(p_p + C * C, rest(b_p, IO))
    if C >= 64:  # the last merge reads what is above the diagonal blocks of 16
        b_a = tl.where(o_i[:, None] >= o_i[None, :], b_a, 0.0)
    tl.store(p_x + o_tile, b_a)
    if served < C:
        tl.debug_barrier()
        tl.store(p_x + C - 2, (served + 1.0) * FAR)
        return
    invert_in_memory(p_x, C, C, "ieee")  # few and small products
    if not FOLD:
        b_write = tl.full([C], 1.0, tl.float32)
    store_inverse(p_t, p_x, pid, b_write, C, SPLIT)
    tl.store(p_x + C - 2, rise)


@triton.jit(do_not_specialize=["N", "T"])
def factor_key_kernel(
    p_q,
    p_k,
    p_g,
    p_beta,
    p_alog,
    p_bias,
    p_cu,
    p_e,
    p_qg,
    p_kc,
    p_decay,
    p_l,
    p_x,
    p_t,
    p_p,
    N,
    T,
    scale,
    lower,
    s_cu,
    s_qt,
    s_qh,
    s_kt,
    s_kh,
    s_gt,
    s_gh,
    s_bt,
    s_bh,
    H: tl.constexpr,
    HK: tl.constexpr,
    HO: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    GATE: tl.constexpr,
    ERASE_KEY: tl.constexpr,
    GUARD: tl.constexpr,
    QUERY: tl.constexpr,
    NORM: tl.constexpr,
    SIGMOID: tl.constexpr,
    DOUBLE: tl.constexpr,
    SPLIT: tl.constexpr,
    PREC: tl.constexpr,
    FOLD: tl.constexpr = True,
    REST: tl.constexpr = False,
):
    pid = tl.program_id(0).to(tl.int64)
    served = 0  # rows that `factor_near_kernel` has made
    if REST:
        left_over = tl.load(p_x + pid * (C * C) + (C - 2))
        if left_over < FAR:
            return
        served = (left_over / FAR - 0.5).to(tl.int32)
    i_h = pid % HO
    slot = pid // HO
    _, i_c, begin, length = locate(slot, p_cu, s_cu, N, T, C, 1)
    if i_c < 0:
        return
    IO: tl.constexpr = p_k.dtype.element_ty
    # Columns of a diagonal block reach 2^100: fp16 products of them run in tf32.
    WIDE: tl.constexpr = tl.float32 if tl.float16 == IO else IO
    WIDE_PREC: tl.constexpr = "tf32" if tl.float16 == IO else PREC
    o_i = tl.arange(0, C)
    m_t = i_c * C + o_i < length
    o_tok = begin + i_c * C + o_i
    m_diag = (o_i[:, None] // 16 == o_i[None, :] // 16) & (o_i[:, None] >= o_i[None, :])

    amp = amplitude(p_alog, i_h)
    p_kh = p_k + (i_h // (HO // HK)) * s_kh
    p_qh = p_q + (i_h // (HO // H)) * s_qh if QUERY else p_kh
    b_rk = tl.full([C], 1.0, tl.float32)
    b_rq = tl.full([C], 0.0, tl.float32) + scale
    if NORM:
        b_rk = _inverse_norm(p_kh, o_tok * s_kt, m_t, K, BK)
        if QUERY:
            b_rq *= _inverse_norm(p_qh, o_tok * s_qt, m_t, K, BK)

    if GUARD:
        p_bh = p_bias + i_h * K if p_bias is not None else p_bias
        m_act, m_flat, b_mean, b_eta = guard_rows(
            p_kh, p_g + i_h * s_gh, p_beta + i_h * s_bh, p_bh, o_tok * s_kt, o_tok * s_gt,
            o_tok * s_bt, b_rk, m_t, amp, lower, K, BK, GATE, SIGMOID, DOUBLE, IO,
        )  # fmt: skip

    # Gates, cumulative within each block of 16 steps: one lane a channel, all blocks at once.
    NB: tl.constexpr = C // 16
    p_l += (slot * HO + i_h) * ((C + 4 * NB) * K)
    p_f = p_l + C * K  # four factors a block and channel [4, NB, K]
    o_nb = tl.arange(0, NB)[:, None]
    o_kk = tl.arange(0, K)[None, :]
    p_gh = p_g + (begin + i_c * C + o_nb * 16) * s_gt + i_h * s_gh + o_kk
    left = length - i_c * C - o_nb * 16
    rows = ()
    for i in tl.static_range(16):
        if REST and not FOLD:
            b_g = tl.load(p_l + (o_nb * 16 + i) * K + o_kk)
        else:
            b_g = tl.load(p_gh + i * s_gt, mask=(i < left) & (o_kk >= 0), other=0.0)
        rows = rows + (b_g.to(tl.float32),)  # noqa: RUF005 (kernels cannot unpack)
    b_run = tl.zeros([NB, K], tl.float32)
    b_from = b_run
    b_serves = tl.full([NB, K], 1.0, tl.float32)
    b_near = b_run
    for i in tl.static_range(16):
        if REST and not FOLD:  # left by `factor_near_kernel`: the same to the bit
            b_run = rows[i]
        else:
            b_g = rows[i]
            if p_bias is not None:
                b_g += tl.load(p_bias + i_h * K + o_kk).to(tl.float32)
            b_run += tl.where(i < left, log2_decay(b_g, amp, lower, GATE), 0.0)
        tl.store(p_l + (o_nb * 16 + i) * K + o_kk, tl.minimum(b_run, MOST))
        # How many rows an anchor serves: up to the middle row, and from there on.
        if i == 0:
            b_from = b_run
        b_serves = tl.where(b_from - b_run < REACH, b_serves, 0.0)
        b_near += b_serves
        if i == MIDDLE:
            b_from = b_run
    b_near = tl.min(b_near, axis=1)
    m_near = o_i % 16 < tl.reshape(tl.broadcast_to(b_near[:, None], [NB, 16]), [C])
    any_far = tl.min(b_near, axis=0) < 16.0
    tl.debug_barrier()

    # What decays from the chunk's start to a block's, and from a block's end to the chunk's; what
    # lies between rows of the later half and columns of the earlier one. From block sums [1, K].
    b_before = tl.zeros([NB, K], tl.float32)
    b_after = tl.zeros([NB, K], tl.float32)
    b_total = tl.zeros([1, K], tl.float32)
    for i in tl.static_range(NB):
        b_one = tl.load(p_l + (i * 16 + 15) * K + o_kk)
        b_total += b_one
        b_before += tl.where(o_nb > i, b_one, 0.0)
        b_after += tl.where(o_nb < i, b_one, 0.0)
        if i == 1:
            b_mid_1 = b_one
        if i == 2:
            b_mid_2 = b_one
    tl.store(p_decay + (slot * HO + i_h) * K + o_kk, growth(b_total))
    rise = tl.max(b_total)
    p_tile = p_f + o_nb * K + o_kk
    b_room = MOST - tl.maximum(tl.load(p_l + (o_nb * 16 + 15) * K + o_kk), 0.0)
    tl.store(p_tile, tl.exp2(tl.minimum(b_before, b_room)))
    tl.store(p_tile + NB * K, tl.exp2(tl.minimum(b_after, b_room)))
    if NB == 4:
        b_skip = tl.where(o_nb == 3, tl.exp2(b_mid_2), tl.where(o_nb == 2, 1.0, 0.0))
        tl.store(p_tile + 2 * NB * K, b_skip)
        b_skip = tl.where(o_nb == 0, tl.exp2(b_mid_1), tl.where(o_nb == 1, 1.0, 0.0))
        tl.store(p_tile + 3 * NB * K, b_skip)
    tl.debug_barrier()

    o_n = o_i // 16
    o_start = (o_n * 16)[:, None] * K
    o_end = (o_n * 16 + 15)[:, None] * K
    o_mid = (o_n * 16 + MIDDLE)[:, None] * K
    b_a = tl.zeros([C, C], tl.float32)
    b_p = tl.zeros([C, C], tl.float32)
    for i_k in range(0, K, BK):
        o_k = (i_k + tl.arange(0, BK))[None, :]
        p_lk = p_l + o_k
        b_l = tl.load(p_lk + o_i[:, None] * K)  # [C, BK]
        b_k, b_e, b_q = _key_rows(
            p_kh, p_qh, p_beta + i_h * s_bh, o_tok * s_kt, o_tok * s_qt, o_tok * s_bt, o_k, m_t,
            b_rk, b_rq, ERASE_KEY, QUERY, SIGMOID, DOUBLE,
        )  # fmt: skip
        if GUARD:
            b_e = b_k * guarded(b_e, m_act, m_flat, b_mean, b_eta, IO)
        elif ERASE_KEY:
            b_e *= b_k
        b_b = tl.floor(tl.maximum(tl.load(p_lk + o_mid), tl.load(p_lk + o_start) - REACH))
        b_c = tl.load(p_lk + o_end)
        p_fk = p_f + o_n[:, None] * K + o_k

        # Diagonal blocks, anchored at their middle row.
        b_x, b_y = anchored(b_l, b_b)
        b_a, b_p = _scores(
            b_a, b_p, b_e * b_x, b_q * b_x, b_k * b_y, m_diag & m_near[:, None],
            WIDE, QUERY, WIDE_PREC,
        )  # fmt: skip

        # Decayed from the start of the block, and to its end; then operands of the recurrence.
        b_x = tl.exp2(b_l)
        b_e *= b_x
        b_q *= b_x
        b_k *= tl.exp2(b_c - b_l)
        o_tile = (slot * HO + i_h) * (C * K) + o_i[:, None] * K + o_k
        b_x = tl.load(p_fk)
        m_row = (o_i >= served)[:, None]
        tl.store(p_e + o_tile, (b_e * b_x).to(IO), mask=m_row)
        if QUERY:
            tl.store(p_qg + o_tile, (b_q * b_x).to(IO), mask=m_row)
        tl.store(p_kc + o_tile, (b_k * tl.load(p_fk + NB * K)).to(IO))

        # Scores between blocks: neighbours in 32 steps, then the two halves of 64.
        if NB >= 2:
            b_a, b_p = _scores(b_a, b_p, b_e, b_q, b_k, pair_mask(C, 16), IO, QUERY, PREC)
        if NB >= 4:
            b_x = tl.load(p_fk + 2 * NB * K)
            b_col = tl.trans((b_k * tl.load(p_fk + 3 * NB * K)).to(IO))
            b_a = tl.dot((b_e * b_x).to(IO), b_col, b_a, input_precision=PREC)
            if QUERY:
                b_p = tl.dot((b_q * b_x).to(IO), b_col, b_p, input_precision=PREC)

    if any_far:  # diagonal blocks that no anchor serves: pairs of ever smaller blocks
        m_far = (m_near == 0)[:, None]
        for i_k in tl.range(0, K, BK, num_stages=1):
            o_k = (i_k + tl.arange(0, BK))[None, :]
            b_l = tl.load(p_l + o_i[:, None] * K + o_k)
            b_k, b_e, b_q = _key_rows(
                p_kh, p_qh, p_beta + i_h * s_bh, o_tok * s_kt, o_tok * s_qt, o_tok * s_bt, o_k,
                m_t, b_rk, b_rq, ERASE_KEY, QUERY, SIGMOID, DOUBLE,
            )  # fmt: skip
            if GUARD:
                b_e = b_k * guarded(b_e, m_act, m_flat, b_mean, b_eta, IO)
            elif ERASE_KEY:
                b_e *= b_k
            for i_b in tl.static_range(4):
                # Rows of odd blocks decay from the first row of their block, others to the next.
                o_at = (o_i // (16 >> i_b) * (16 >> i_b) + (8 >> i_b))[:, None] * K
                b_x = b_l - tl.load(p_l + o_at + o_k)
                b_x = tl.exp2(tl.where((o_i // (8 >> i_b) % 2 == 1)[:, None], b_x, -b_x))
                m_pair = pair_mask(C, 8 >> i_b) & m_far
                b_a, b_p = _scores(
                    b_a, b_p, b_e * b_x, b_q * b_x, b_k * b_x, m_pair, IO, QUERY, PREC
                )
            if QUERY:
                m_self = (o_i[:, None] == o_i[None, :]) & m_far
                b_p += tl.where(m_self, tl.sum(b_q * b_k, axis=1)[:, None], 0.0)

    b_write = tl.full([C], 1.0, tl.float32)
    if not ERASE_KEY:
        b_write = load_beta(p_beta, o_tok * s_bt + i_h * s_bh, m_t, SIGMOID, DOUBLE)
    o_tile = o_i[:, None] * C + o_i[None, :]
    if rise > 15.0:  # positive gates: zeros meet nothing that has overflown
        TOP: tl.constexpr = 6.0e4 if tl.float16 == IO else 3.0e38
        b_a = tl.where(b_write[:, None] == 0.0, 0.0, b_a)
        b_p = tl.minimum(tl.maximum(b_p, -TOP), TOP)
        for i_k in tl.range(0, K, BK, num_stages=1):
            o_kt = o_i[:, None] * K + (i_k + tl.arange(0, BK))[None, :]
            o_kt += (slot * HO + i_h) * (C * K)
            if not ERASE_KEY:
                m_none = (b_write == 0.0)[:, None] & (o_kt >= 0)
                tl.store(p_e + o_kt, tl.zeros([C, BK], IO), mask=m_none)
            if tl.float16 == IO:
                b_kt = tl.load(p_kc + o_kt).to(tl.float32)
                tl.store(p_kc + o_kt, tl.minimum(tl.maximum(b_kt, -TOP), TOP).to(IO))
    if QUERY:
        PARTS: tl.constexpr = 2 if SPLIT else 1
        p_p += (slot * HO + i_h) * (PARTS * C * C) + o_tile
        tl.store(p_p, b_p.to(IO), mask=(o_i >= served)[:, None])
        if SPLIT:
            tl.store(p_p + C * C, rest(b_p, IO), mask=(o_i >= served)[:, None])
    if not ERASE_KEY:
        b_a *= b_write[:, None]
    p_x += (slot * HO + i_h) * (C * C)
    m_row = (o_i >= served)[:, None]
    if REST:
        tl.debug_barrier()  # all have read how many rows are there
    tl.store(p_x + o_tile, b_a, mask=m_row)
    if REST:
        # Nothing stands above the diagonal.
        m_row = (m_row == 0) & (o_i[:, None] < o_i[None, :])
        tl.store(p_x + o_tile, tl.zeros([C, C], tl.float32), mask=m_row)
    invert_in_memory(p_x, C, C, "ieee")  # few and small products
    if not FOLD:
        b_write = tl.full([C], 1.0, tl.float32)
    store_inverse(p_t, p_x, slot * HO + i_h, b_write, C, SPLIT)
    tl.store(p_x + C - 2, rise)
