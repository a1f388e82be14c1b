"""Token-parallel factors of the chunk recurrence: one program per (chunk, head).

A chunk of C steps with entering state S [V, K], erase rows e, keys k, queries q (all [C, K]) and
cumulative log2 gates G obeys

    A[i, j] = e_i . (k_j 2^(G_i - G_j))          j < i         T = (I + A)^-1 diag(write strength)
    P[i, j] = scale q_i . (k_j 2^(G_i - G_j))    j <= i
    U = T (V - E S^T)      O = Q S^T + P U       S <- S diag(2^(G_C)) + U^T Kc
    E_i = e_i 2^(G_i)      Q_i = scale q_i 2^(G_i)             Kc_j = k_j 2^(G_C - G_j)

Everything there that does not involve S is made here, so that the serial kernel only multiplies.
Without FOLD, T is (I + A)^-1 alone: the backward needs the strength apart from it.

`factor_head_kernel` (one gate a head) leaves q and k where they are and writes the row factors
that turn raw rows into E, Q and Kc:  rows[slot, head] = (erase, query, key, G) [4, C] fp32, plus T
and P. Unit norm, scale, gate and Mamba-2's step size all live in row factors.

`factor_key_kernel` (a gate a key channel) writes E, Q, Kc [C, K] in io dtype, the chunk's decay
2^(G_C) [K] in fp32, T and P. G differs by channel, so A and P are sums of K-blocks, and no single
anchor is safe. The strictly lower triangle is tiled by pairs of neighbouring blocks of b = C/2,
..., 16 steps: rows of the later block and columns of the earlier one meet at the first row of the
later block, and both exponents are <= 0. Diagonal blocks of 16 use their own first row as anchor
while every exponent up to that row's end stays below 2^100 (columns then hold up to 2^100, rows
down to 2^-100, products are right); rows past that point, gates beyond -4.3 a step, continue the
pairing down to b = 1. Which of the two a row takes depends on rows up to it only.

Tiles: [C, BK] operands, two [C, C] fp32 accumulators; C = 64, 4 warps, about 64 accumulator
registers a thread, one or two stages of 2 C BK io elements in shared memory.
"""

import triton
import triton.language as tl

from .gate import LOG2E, amplitude, log2_decay, sigmoid, step_size
from .index import locate, query_rows
from .inverse import invert_unit_lower

__all__ = ["factor_head_kernel", "factor_key_kernel"]

NORM_EPS = tl.constexpr(1e-6)
# Largest exponent that the anchor of a diagonal block may leave to a column.
REACH = tl.constexpr(100.0)


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
    PREC: tl.constexpr,
    FOLD: tl.constexpr = True,
):
    pid = tl.program_id(0).to(tl.int64)
    i_h = pid % HO
    slot = pid // HO
    _, i_c, begin, length = locate(slot, p_cu, s_cu, N, T, C, NS)
    if i_c < 0:
        return
    o_i = tl.arange(0, C)
    o_t = i_c * C + o_i
    m_t = o_t < length
    o_tok = begin + o_t // NS
    o_sub = o_t % NS

    # Gates [C]: a token's decay belongs to its first step.
    amp = amplitude(p_alog, i_h)
    m_g = m_t & (o_sub == 0)
    b_x = tl.load(p_g + o_tok * s_gt + i_h * s_gh, mask=m_g, other=0.0).to(tl.float32)
    if p_bias is not None:
        b_x += tl.load(p_bias + i_h).to(tl.float32)
    if GATE == "ssd":
        b_write = tl.where(m_t, step_size(b_x, dt_min, dt_max, SOFTPLUS), 0.0)
        b_decay = tl.load(p_a + i_h).to(tl.float32) * b_write * LOG2E
    else:
        b_decay = log2_decay(b_x, amp, lower, GATE)
    b_gc = tl.cumsum(tl.where(m_g, b_decay, 0.0), axis=0)
    b_end = tl.sum(tl.where(m_g, b_decay, 0.0), axis=0)

    # Scores of raw rows.
    p_kh = p_k + (i_h // (HO // HK)) * s_kh
    s_ki = o_tok * s_kt + o_sub * s_ks
    b_rk = tl.full([C], 1.0, tl.float32)
    if NORM:
        b_rk = _inverse_norm(p_kh, s_ki, m_t, K, BK)
    p_row = p_rows + (slot * HO + i_h) * (4 * C)
    if QUERY:
        i_tq, o_iq, m_q = query_rows(i_c, length, C, CQ, NS)
        p_qh = p_q + (i_h // (HO // H)) * s_qh
        s_qi = (begin + i_tq) * s_qt
        b_rq = tl.full([CQ], 0.0, tl.float32) + scale
        if NORM:
            b_rq *= _inverse_norm(p_qh, s_qi, m_q, K, BK)
        # G at query rows: the sum of the decays up to them.
        m_up = o_i[None, :] <= o_iq[:, None]
        b_gq = tl.sum(tl.where(m_up & m_g[None, :], b_decay[None, :], 0.0), axis=1)
        tl.store(p_row + C + tl.arange(0, CQ), b_rq * tl.exp2(b_gq))
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

    b_ck = b_rk * tl.exp2(b_end - b_gc)
    if GATE == "ssd":
        b_ck *= b_write
    tl.store(p_row + o_i, b_rk * tl.exp2(b_gc))
    tl.store(p_row + 2 * C + o_i, b_ck)
    tl.store(p_row + 3 * C + o_i, b_gc)
    if QUERY:
        b_p = tl.exp2(tl.where(m_up, b_gq[:, None] - b_gc[None, :], -float("inf")))
        b_p *= b_qk * b_rq[:, None] * b_rk[None, :]
        if GATE == "ssd":
            b_p *= b_write[None, :]
        b_p = tl.where(m_up & m_t[None, :], b_p, 0.0)
        p_tile = p_p + (slot * HO + i_h) * (CQ * C)
        p_tile += tl.arange(0, CQ)[:, None] * C + o_i[None, :]
        tl.store(p_tile, b_p.to(p_p.dtype.element_ty))
    if DELTA:
        p_bh = p_beta + i_h * s_bh
        b_beta = load_beta(p_bh, o_tok * s_bt + o_sub * s_bs, m_t, SIGMOID, DOUBLE)
        m_low = o_i[:, None] > o_i[None, :]
        b_a = tl.exp2(tl.where(m_low, b_gc[:, None] - b_gc[None, :], -float("inf")))
        b_a *= b_kk * (b_rk * b_beta)[:, None] * b_rk[None, :]
        b_a = tl.where(m_low, b_a, 0.0)
        b_inv = invert_unit_lower(b_a, PREC)
        if FOLD:
            b_inv *= b_beta[None, :]
        p_tile = p_t + (slot * HO + i_h) * (C * C) + o_i[:, None] * C + o_i[None, :]
        tl.store(p_tile, b_inv.to(p_t.dtype.element_ty))


@triton.jit
def _pick_row(b_x, STEP: tl.constexpr, ROW: tl.constexpr):
    """Row ROW of each group of STEP rows, repeated over its group: [C, D]."""
    C: tl.constexpr = b_x.shape[0]
    D: tl.constexpr = b_x.shape[1]
    b_g = tl.reshape(b_x, [C // STEP, STEP, D])
    m_r = tl.arange(0, STEP)[None, :, None] == ROW
    b_r = tl.sum(tl.where(m_r, b_g, 0.0), axis=1)
    return tl.reshape(tl.broadcast_to(b_r[:, None, :], [C // STEP, STEP, D]), [C, D])


@triton.jit
def pair_decay(b_gc, B: tl.constexpr):
    """Factors of one pairing level [C, D]: rows of odd blocks decay from the first row of their
    block, rows of even blocks to the first row of the next; never above 1 for gates <= 0."""
    C: tl.constexpr = b_gc.shape[0]
    b_x = b_gc - _pick_row(b_gc, 2 * B, B)
    m_odd = (tl.arange(0, C) // B) % 2 == 1
    return tl.exp2(tl.where(m_odd[:, None], b_x, -b_x))


@triton.jit
def pair_mask(C: tl.constexpr, B: tl.constexpr):
    """Where a pairing level holds: row in an odd block of B steps, column in the block before."""
    o_i = tl.arange(0, C) // B
    return (o_i[:, None] % 2 == 1) & (o_i[None, :] == o_i[:, None] - 1)


@triton.jit
def within_reach(b_d):
    """Rows [C] whose distances to the anchor of their 16-block, and those of all rows before them
    in the block, stay below REACH in every channel. b_d: distances [C, D]."""
    C: tl.constexpr = b_d.shape[0]
    o_b = tl.arange(0, 16)
    b_far = tl.reshape(tl.max(tl.abs(b_d), axis=1), [C // 16, 16])
    m_up = o_b[None, None, :] <= o_b[None, :, None]
    b_far = tl.max(tl.where(m_up, b_far[:, None, :], 0.0), axis=2)
    return tl.reshape(b_far, [C]) < REACH


@triton.jit
def _pair_scores(
    b_a, b_p, b_e, b_q, b_k, b_x, m_pair, IO: tl.constexpr, QUERY: tl.constexpr, PREC: tl.constexpr
):
    b_col = tl.trans((b_k * b_x).to(IO))
    b_s = tl.dot((b_e * b_x).to(IO), b_col, input_precision=PREC)
    b_a += tl.where(m_pair, b_s, 0.0)
    if QUERY:
        b_s = tl.dot((b_q * b_x).to(IO), b_col, input_precision=PREC)
        b_p += tl.where(m_pair, b_s, 0.0)
    return b_a, b_p


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
    PREC: tl.constexpr,
    FOLD: tl.constexpr = True,
):
    pid = tl.program_id(0).to(tl.int64)
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

    b_a = tl.zeros([C, C], tl.float32)
    b_p = tl.zeros([C, C], tl.float32)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        # Cumulative gates [C, BK].
        p_tile = p_g + o_tok[:, None] * s_gt + i_h * s_gh + o_k[None, :]
        b_gc = tl.load(p_tile, mask=m_t[:, None], other=0.0).to(tl.float32)
        if p_bias is not None:
            b_gc += tl.load(p_bias + i_h * K + o_k).to(tl.float32)[None, :]
        b_gc = tl.where(m_t[:, None], log2_decay(b_gc, amp, lower, GATE), 0.0)
        b_gc = tl.cumsum(b_gc, axis=0)

        # Rows q, k, e [C, BK].
        p_tile = p_kh + o_tok[:, None] * s_kt + o_k[None, :]
        b_k = tl.load(p_tile, mask=m_t[:, None], other=0.0).to(tl.float32) * b_rk[:, None]
        if ERASE_KEY:
            s_b = o_tok[:, None] * s_bt + i_h * s_bh + o_k[None, :]
            m_b = m_t[:, None] & (o_k >= 0)[None, :]
            b_e = b_k * load_beta(p_beta, s_b, m_b, SIGMOID, DOUBLE)
        else:
            b_e = b_k
        b_q = b_e
        if QUERY:
            p_tile = p_qh + o_tok[:, None] * s_qt + o_k[None, :]
            b_q = tl.load(p_tile, mask=m_t[:, None], other=0.0).to(tl.float32) * b_rq[:, None]

        # Operands of the recurrence.
        b_up = tl.exp2(b_gc)
        b_end = _pick_row(b_gc, C, C - 1)
        o_tile = (slot * HO + i_h) * (C * K) + o_i[:, None] * K + o_k[None, :]
        tl.store(p_e + o_tile, (b_e * b_up).to(IO))
        tl.store(p_kc + o_tile, (b_k * tl.exp2(b_end - b_gc)).to(IO))
        if QUERY:
            tl.store(p_qg + o_tile, (b_q * b_up).to(IO))
        b_last = tl.sum(tl.where((o_i == C - 1)[:, None], b_gc, 0.0), axis=0)
        tl.store(p_decay + (slot * HO + i_h) * K + o_k, tl.exp2(b_last))

        # Pairs of blocks of C/2, ..., 16 steps.
        if C >= 64:
            b_x = pair_decay(b_gc, 32)
            b_a, b_p = _pair_scores(b_a, b_p, b_e, b_q, b_k, b_x, pair_mask(C, 32), IO, QUERY, PREC)
        if C >= 32:
            b_x = pair_decay(b_gc, 16)
            b_a, b_p = _pair_scores(b_a, b_p, b_e, b_q, b_k, b_x, pair_mask(C, 16), IO, QUERY, PREC)

        # Diagonal blocks of 16 steps, anchored at their first row.
        b_d = b_gc - _pick_row(b_gc, 16, 0)
        m_near = within_reach(b_d)
        b_x = tl.exp2(tl.maximum(b_d, -REACH))
        b_y = tl.exp2(tl.minimum(-b_d, REACH))
        b_col = tl.trans((b_k * b_y).to(WIDE))
        m_here = m_diag & m_near[:, None]
        b_s = tl.dot((b_e * b_x).to(WIDE), b_col, input_precision=WIDE_PREC)
        b_a += tl.where(m_here, b_s, 0.0)
        if QUERY:
            b_s = tl.dot((b_q * b_x).to(WIDE), b_col, input_precision=WIDE_PREC)
            b_p += tl.where(m_here, b_s, 0.0)
        if tl.min(m_near.to(tl.int32), axis=0) == 0:
            m_far = (m_near == 0)[:, None]
            for i_b in tl.static_range(4):
                b_x = pair_decay(b_gc, 8 >> i_b)
                m_pair = pair_mask(C, 8 >> i_b) & m_far
                b_a, b_p = _pair_scores(b_a, b_p, b_e, b_q, b_k, b_x, m_pair, IO, QUERY, PREC)
            if QUERY:
                m_self = (o_i[:, None] == o_i[None, :]) & m_far
                b_p += tl.where(m_self, tl.sum(b_q * b_k, axis=1)[:, None], 0.0)

    o_tile = (slot * HO + i_h) * (C * C) + o_i[:, None] * C + o_i[None, :]
    if QUERY:
        tl.store(p_p + o_tile, b_p.to(IO))
    b_a = tl.where(o_i[:, None] > o_i[None, :], b_a, 0.0)
    if not ERASE_KEY:
        b_beta = load_beta(p_beta, o_tok * s_bt + i_h * s_bh, m_t, SIGMOID, DOUBLE)
        b_a *= b_beta[:, None]
    b_inv = invert_unit_lower(b_a, PREC)
    if FOLD and not ERASE_KEY:
        b_inv *= b_beta[None, :]
    tl.store(p_t + o_tile, b_inv.to(IO))
