"""Gradients of one chunk from its tiles: one program per (chunk, head), no order among them.

Given S (entering state) and dS (gradient of the leaving state) [V, K], U (what was written) and Y
(its gradient before the write strength) [C, V], and dO [CQ, V], all in io dtype; G the cumulative
log2 gates, D[i, j] = 2^(G_i - G_j), c = 2^(G_C):

    M = dO U^T   j <= i     X = Y U^T   j < i
    dq_i = 2^G_i (S^T dO)_i + sum_j M_ij D_ij k_j
    f_i  = 2^G_i (S^T Y)_i  + sum_j X_ij D_ij k_j    (minus the gradient of the erase row e)
    h_j  = c / 2^G_j (dS^T U)_j + sum_i (M_ij q_i - X_ij e_i) D_ij
    dk = h - b f      db = Y . v - k . f  (b a number a head), -k f (a number a key channel)
    dv = b Y or w Y   dw = v Y
    dg_t = c sum_v dS S + sum_(i >= t) 2^G_i (q_i S^T dO_i - e_i S^T Y_i)
         + sum_(j < t) k_j c / 2^G_j (dS^T U)_j
         + sum_(i >= t > j) (M_ij q_i - X_ij e_i) k_j D_ij

The last is all that the gate of step t decays: what comes in, what goes out, and pairs of steps on
both sides of it. (The usual reversed sum of q dq - e f - k h equals it, by cancelling all other
pairs; where gates are strong, little more than rounding remains of that.) Without delta rule U is
v, each column carries the step dt, and Y is the gradient of v itself. Chain rules of gates,
strengths, steps, z and D follow at once; the unit norm and sums over head groups are left to
`reduce`, which also sums the partials [chunks, parameters] written here.

Here one gate a head puts D into M and X. `channel` has a gate a key channel, `group` heads that
share q and k without delta rule, `products` what all of them use.

With SPLIT, U, Y, M and X are in two parts in chunks whose inverse is large, which launches of their
own serve (PART), so that the others stay as they are.

M and X, rounded to io, become operands by way of memory, over the tiles of P and W which nothing
needs any more: also transposed, and no accumulator is transposed or kept in registers.

Tiles: first M and X over V in slices of BV, two [C, C] fp32 accumulators; then for every K-block of
BK two or three [C, BK] accumulators over V again, and the products with k and q. Where one slice is
all of V, `gradient_head_kernel` keeps the tiles of dO, U and Y on chip, and loads of S and dS run a
K-block or two ahead. What scales rows of q and k (scale, b, steps) is put into M and X, and b X
and its transpose, which k meets alike, share a tile: no rows are rounded once more.
"""

import triton
import triton.language as tl

from lagraph.engines.triton.kernels.factor import GROWTH, _inverse_norm, inverse_growth, rest
from lagraph.engines.triton.kernels.gate import amplitude, step_size
from lagraph.engines.triton.kernels.index import ROWS, locate
from lagraph.engines.triton.kernels.products import (
    beta_gradient,
    chunk_products,
    gate_gradient,
    state_products,
    step_gradient,
)

__all__ = [
    "gradient_head_kernel",
]


@triton.jit(do_not_specialize=["N", "T"])
def gradient_head_kernel(
    p_q,
    p_k,
    p_v,
    p_g,
    p_beta,
    p_alog,
    p_bias,
    p_a,
    p_d,
    p_z,
    p_pre,
    p_do,
    p_rows,
    p_p,
    p_t,
    p_u,
    p_y,
    p_s,
    p_ds,
    p_dq,
    p_dk,
    p_dv,
    p_dg,
    p_dbeta,
    p_dz,
    p_dalog,
    p_dbias,
    p_da,
    p_dd,
    p_cu,
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
    s_vt,
    s_vs,
    s_vh,
    s_gt,
    s_gh,
    s_bt,
    s_bs,
    s_bh,
    s_dh,
    s_dv,
    s_zt,
    s_zh,
    s_pt,
    s_ph,
    s_ot,
    s_oh,
    s_dqt,
    s_dqh,
    s_dkt,
    s_dks,
    s_dkh,
    s_dvt,
    s_dvs,
    s_dvh,
    s_dgt,
    s_dgh,
    s_dbt,
    s_dbs,
    s_dbh,
    s_dzt,
    s_dzh,
    H: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    HO: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    NS: tl.constexpr,
    C: tl.constexpr,
    CQ: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BQ: tl.constexpr,
    STAGES: tl.constexpr,
    GATE: tl.constexpr,
    DELTA: tl.constexpr,
    NORM: tl.constexpr,
    SIGMOID: tl.constexpr,
    DOUBLE: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    D_CHANNEL: tl.constexpr,
    SPLIT: tl.constexpr,
    PART: tl.constexpr,
    PREC: tl.constexpr,
):
    IO: tl.constexpr = p_k.dtype.element_ty
    # Sums by a product with zeros and ones, in parts where operands are.
    SUM_PREC: tl.constexpr = PREC if PART or tl.float32 == IO else "tf32"
    pid = tl.program_id(0).to(tl.int64)
    i_h = pid % HO
    slot = pid // HO
    _, i_c, begin, length = locate(slot, p_cu, s_cu, N, T, C, NS)
    if p_dd is not None:
        p_dd += pid * V if D_CHANNEL else pid
    if i_c < 0:
        if p_dalog is not None:
            tl.store(p_dalog + pid, 0.0)
        if p_dbias is not None:
            tl.store(p_dbias + pid, 0.0)
        if p_da is not None:
            tl.store(p_da + pid, 0.0)
        if p_dd is not None:
            if D_CHANNEL:
                tl.store(p_dd + tl.arange(0, V), tl.zeros([V], tl.float32))
            else:
                tl.store(p_dd, 0.0)
        return
    PARTS: tl.constexpr = 2 if SPLIT else 1
    if SPLIT == 2:  # noqa: SIM102
        if (inverse_growth(p_t, pid, C, SPLIT) > GROWTH).to(tl.int32) != PART:
            return
    # Everything below counts from the chunk's first token: row offsets fit 32 bits.
    QS: tl.constexpr = C // CQ
    o_i = tl.arange(0, C)
    start = i_c * C
    token = begin + start // NS
    phase = (start % NS).to(tl.int32)
    left = tl.minimum(length - start, C).to(tl.int32)
    m_t = o_i < left
    o_tok = (phase + o_i) // NS
    o_sub = (phase + o_i) % NS
    # As `query_rows`: a query reads the state after the last sub-token of its token.
    o_iq = tl.arange(0, CQ) * QS + (QS - 1)
    m_q = o_iq < left
    if QS != NS:
        m_q = m_q & ((phase + o_iq + 1) % NS == 0)
    o_out = (phase + o_iq) // NS

    # Row factors [C] and [CQ].
    p_row = p_rows + pid * (ROWS * C)
    b_gc = tl.load(p_row + 3 * C + o_i)
    b_gq = tl.load(p_row + 3 * C + o_iq)
    b_end = tl.load(p_row + 4 * C - 1)
    b_write = tl.load(p_row + 4 * C + o_i)  # beta, or dt
    p_kh = p_k + token * s_kt + (i_h // (HO // HK)) * s_kh
    p_qh = p_q + token * s_qt + (i_h // (HO // H)) * s_qh
    s_ki = o_tok * s_kt + o_sub * s_ks
    s_qi = o_out * s_qt
    b_rk = tl.full([C], 1.0, tl.float32)
    b_rq = tl.full([CQ], 1.0, tl.float32)
    if NORM:
        b_rk = _inverse_norm(p_kh, s_ki, m_t, K, BK)
        b_rq = _inverse_norm(p_qh, s_qi, m_q, K, BK)

    # M, X, decayed.
    p_v += token * s_vt + (i_h // (HO // HV)) * s_vh
    p_do += token * s_ot + i_h * s_oh
    p_dv += token * s_dvt + i_h * s_dvh
    p_dq += token * s_dqt + i_h * s_dqh
    p_dk += token * s_dkt + i_h * s_dkh
    if p_z is not None:
        p_z += token * s_zt + i_h * s_zh
        p_pre += token * s_pt + i_h * s_ph
        p_dz += token * s_dzt + i_h * s_dzh
    o_vi = o_tok * s_vt + o_sub * s_vs
    o_oi = o_out * s_ot
    o_zi = o_out * s_zt
    p_ut = p_u + pid * (PARTS * C * V) if DELTA else p_u
    p_yt = p_y + pid * (PARTS * C * V)
    p_dh = p_d + i_h * s_dh if p_d is not None else p_d
    b_m, b_x, b_yv, b_do, b_u, b_y = chunk_products(
        p_v, None, p_ut, p_yt, p_do, p_z, p_pre, p_dh, p_dv, None, p_dz, p_dd,
        o_vi, o_vi, o_oi, o_zi, o_out * s_pt, o_tok * s_dvt + o_sub * s_dvs, o_vi, o_out * s_dzt,
        s_dv, m_t, m_q, b_write, C, CQ, V, BV, DELTA, False, D_CHANNEL, PART, PREC,
    )  # fmt: skip
    m_up = (o_i[None, :] <= o_iq[:, None]) & m_t[None, :]
    b_m *= scale * tl.exp2(tl.where(m_up, b_gq[:, None] - b_gc[None, :], -float("inf")))
    m_low = o_i[:, None] > o_i[None, :]
    if DELTA:
        b_x *= tl.exp2(tl.where(m_low, b_gc[:, None] - b_gc[None, :], -float("inf")))
    else:
        b_n = b_m * b_write[None, :]

    # The products with q and k want them as operands, also transposed: by way of memory, as no
    # accumulator should be transposed. The tiles of P and W are free by now. Rows and columns are
    # scaled here, so that q and k are operands as they are; b X and its transpose meet the same
    # rows, and each other nowhere.
    o_q = tl.arange(0, CQ)
    p_mt = p_p + pid * (PARTS * CQ * C) + o_q[:, None] * C + o_i[None, :]
    if DELTA:
        p_xt = p_t + pid * (PARTS * C * C) + o_i[:, None] * C + o_i[None, :]
        p_xu = p_t + pid * (PARTS * C * C) + o_i[None, :] * C + o_i[:, None]
        b_n = -b_x * b_write[:, None]
        tl.store(p_mt, b_m.to(IO))
        tl.store(p_xt, b_n.to(IO), mask=o_i[:, None] >= o_i[None, :])
        tl.store(p_xu, b_n.to(IO), mask=m_low)
        if PART:
            tl.store(p_mt + CQ * C, rest(b_m, IO))
            tl.store(p_xt + C * C, rest(b_n, IO), mask=o_i[:, None] >= o_i[None, :])
            tl.store(p_xu + C * C, rest(b_n, IO), mask=m_low)
    else:
        tl.store(p_mt, b_n.to(IO))

    # What the gate of step t decays inside the chunk: pairs of a row at or after t and a column
    # before it. Summed without differences, for what is small there may be divided by the gate.
    b_qk = tl.zeros([CQ, C], tl.float32)
    b_kk = tl.zeros([C, C], tl.float32)
    for i_k in range(0, K, BQ):
        o_k = i_k + tl.arange(0, BQ)
        b_k = tl.load(p_kh + s_ki[:, None] + o_k[None, :], mask=m_t[:, None], other=0.0)
        b_q = tl.load(p_qh + s_qi[:, None] + o_k[None, :], mask=m_q[:, None], other=0.0)
        b_qk = tl.dot(b_q, tl.trans(b_k), b_qk, input_precision=PREC)
        if DELTA:
            b_kk = tl.dot(b_k, tl.trans(b_k), b_kk, input_precision=PREC)
    b_before = tl.where(o_i[:, None] < o_i[None, :], 1.0, 0.0)  # [column, step]
    if NORM:
        b_qk *= b_rq[:, None] * b_rk[None, :]
        b_kk *= b_rk[:, None] * b_rk[None, :]
    b_m *= b_qk
    if not DELTA:
        b_ks = tl.sum(b_m, axis=0)  # k h of the pairs
        b_m *= b_write[None, :]
    if DELTA:
        b_x *= b_kk
        b_ks = tl.sum(b_x, axis=1)  # k f of the pairs
        b_x *= b_write[:, None]
        if CQ == C:  # the same rows
            b_m -= b_x
        else:
            b_n = tl.dot(b_x, b_before, input_precision=SUM_PREC)
            b_dx = tl.sum(tl.where(o_i[:, None] >= o_i[None, :], b_n, 0.0), axis=0)
    b_n = tl.dot(b_m, b_before, input_precision=SUM_PREC)
    b_dg = tl.sum(tl.where(o_iq[:, None] >= o_i[None, :], b_n, 0.0), axis=0)
    if DELTA and CQ != C:
        b_dg -= b_dx
    tl.debug_barrier()

    # Sums over K from the states: q dq, k f, k h; dS . S.
    WHOLE: tl.constexpr = BV == V
    b_qs = tl.zeros([CQ], tl.float32)
    b_rs = tl.zeros([C], tl.float32)
    b_es = tl.zeros([C], tl.float32)
    b_cs = tl.zeros([V if WHOLE else BK], tl.float32)
    p_st = p_s + pid * (V * K)
    p_dst = p_ds + pid * (V * K)
    b_up = tl.exp2(b_gc)
    b_uq = scale * tl.exp2(b_gq)
    b_down = tl.exp2(b_end - b_gc)
    b_mm = tl.load(p_mt)
    if DELTA:
        b_xx = tl.load(p_xt)
    for i_k in tl.range(0, K, BK, num_stages=STAGES if WHOLE else 1):
        o_k = i_k + tl.arange(0, BK)
        if WHOLE:
            o_v = tl.arange(0, V)
            b_s = tl.load(p_st + o_v[:, None] * K + o_k[None, :])  # [V, BK]
            b_ds = tl.load(p_dst + o_v[:, None] * K + o_k[None, :])  # [V, BK]
        b_k = tl.load(p_kh + s_ki[:, None] + o_k[None, :], mask=m_t[:, None], other=0.0)
        b_q = tl.load(p_qh + s_qi[:, None] + o_k[None, :], mask=m_q[:, None], other=0.0)
        if WHOLE:
            b_dq = tl.dot(b_do, b_s, input_precision=PREC)
            if DELTA:
                b_f = tl.dot(b_y, b_s, input_precision=PREC)
            b_h = tl.dot(b_u, b_ds, input_precision=PREC)
            if PART:
                o_tile = C * V + o_i[:, None] * V + o_v[None, :]
                b_f = tl.dot(tl.load(p_yt + o_tile), b_s, b_f, input_precision=PREC)
                b_h = tl.dot(tl.load(p_ut + o_tile), b_ds, b_h, input_precision=PREC)
            b_cs += tl.sum(b_s.to(tl.float32) * b_ds.to(tl.float32), axis=1)
        else:
            b_dq, b_f, b_h, b_c = state_products(
                p_st, p_dst, p_v, p_ut, p_yt, p_do, p_z, o_vi, o_oi, o_zi, m_t, m_q, o_k,
                C, CQ, K, V, BK, BV, DELTA, PART, PREC,
            )  # fmt: skip
            b_cs += b_c
        if NORM:
            b_k = (b_k.to(tl.float32) * b_rk[:, None]).to(IO)
            b_q = (b_q.to(tl.float32) * b_rq[:, None]).to(IO)
        b_dq *= b_uq[:, None]
        b_qs += tl.sum(b_dq * b_q.to(tl.float32), axis=1)
        b_dq = tl.dot(b_mm, b_k, b_dq, input_precision=PREC)
        b_h *= b_down[:, None]
        b_es += tl.sum(b_h * b_k.to(tl.float32), axis=1)
        if DELTA:
            b_f *= b_up[:, None]
            b_rs += tl.sum(b_f * b_k.to(tl.float32), axis=1)
            b_h -= b_write[:, None] * b_f
        else:
            b_h *= b_write[:, None]
        b_h = tl.dot(tl.trans(b_mm), b_q, b_h, input_precision=PREC)
        if DELTA:
            b_h = tl.dot(b_xx, b_k, b_h, input_precision=PREC)
        if PART:
            b_ml = tl.load(p_mt + CQ * C)
            b_dq = tl.dot(b_ml, b_k, b_dq, input_precision=PREC)
            b_h = tl.dot(tl.trans(b_ml), b_q, b_h, input_precision=PREC)
            b_h = tl.dot(tl.load(p_xt + C * C), b_k, b_h, input_precision=PREC)
        p_tile = p_dk + (o_tok * s_dkt + o_sub * s_dks)[:, None] + o_k[None, :]
        tl.store(p_tile, b_h.to(p_dk.dtype.element_ty), mask=m_t[:, None])
        p_tile = p_dq + (o_out * s_dqt)[:, None] + o_k[None, :]
        tl.store(p_tile, b_dq.to(p_dq.dtype.element_ty), mask=m_q[:, None])

    # And what it decays of the entering state, and of all that leaves.
    b_dg += tl.exp2(b_end) * tl.sum(b_cs)
    if DELTA:
        b_late = -b_write * b_rs
        b_soon = b_es
    else:
        b_late = tl.zeros([C], tl.float32)
        b_soon = b_write * b_es
    if CQ == C:
        b_late += b_qs
    else:
        m_late = o_iq[:, None] >= o_i[None, :]
        b_dg += tl.sum(tl.where(m_late, b_qs[:, None], 0.0), axis=0)
    m_late = o_i[:, None] >= o_i[None, :]
    b_dg += tl.sum(tl.where(m_late, b_late[:, None], b_soon[:, None]), axis=0)

    # Chain rules, each row once: the factors are free now.
    tl.debug_barrier()
    tl.store(p_row + o_i, b_dg)
    tl.store(p_row + C + o_i, b_yv - b_rs - b_ks if DELTA else b_es + b_ks)
    tl.debug_barrier()
    m_g = m_t & (o_sub == 0)
    b_dg = tl.where(m_g, tl.load(p_row + o_i), 0.0)
    b_db = tl.load(p_row + C + o_i)
    b_g = tl.load(p_g + token * s_gt + i_h * s_gh + o_tok * s_gt, mask=m_g, other=0.0)
    b_g = b_g.to(tl.float32)
    if p_bias is not None:
        b_g += tl.load(p_bias + i_h).to(tl.float32)
    if GATE == "ssd":
        if p_da is not None:
            tl.store(p_da + pid, tl.sum(b_dg * step_size(b_g, dt_min, dt_max, SOFTPLUS)))
        b_dx = tl.load(p_a + i_h).to(tl.float32) * b_dg + b_db
        b_dx = tl.where(m_g, step_gradient(b_dx, b_g, dt_min, dt_max, SOFTPLUS), 0.0)
    else:
        b_dx, b_dal = gate_gradient(b_dg, b_g, amplitude(p_alog, i_h), lower, GATE)
        if p_dalog is not None:
            tl.store(p_dalog + pid, tl.sum(b_dal))
    if p_dbias is not None:
        tl.store(p_dbias + pid, tl.sum(b_dx))
    p_tile = p_dg + token * s_dgt + i_h * s_dgh + o_tok * s_dgt
    tl.store(p_tile, b_dx.to(p_dg.dtype.element_ty), mask=m_g)
    if DELTA:
        s_bi = token * s_bt + i_h * s_bh + o_tok * s_bt + o_sub * s_bs
        b_raw = tl.load(p_beta + s_bi, mask=m_t, other=0.0).to(tl.float32)
        b_db = beta_gradient(b_db, b_raw, SIGMOID, DOUBLE)
        p_tile = p_dbeta + token * s_dbt + i_h * s_dbh + o_tok * s_dbt + o_sub * s_dbs
        tl.store(p_tile, b_db.to(p_dbeta.dtype.element_ty), mask=m_t)
