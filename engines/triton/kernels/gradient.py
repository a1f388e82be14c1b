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

`gradient_head_kernel` (one gate a head) puts D into M and X. Under a gate a key channel
`products_key_kernel` makes plain M and X first, then `gradient_key_kernel` (one program a K-block)
meets D[i, j] in levels, as no single anchor is safe for it: chunks are of 16 or 32 steps; rows of
the second block of 16 and columns of the first meet at the first row of the second, and no factor
exceeds 1. Inside a block, row 7 is the anchor while every exponent stays below 2^100; otherwise,
and for linear gates (whose dg must not be a difference), pairs of ever smaller blocks go on down to
single steps. `beta_key_kernel` adds up the K-blocks' shares of a head's db. GDN-2's guard of b is
recomputed, and its gradient is that of b as it is used.

With SPLIT, U, Y, M and X are in two parts in chunks whose inverse is large, which launches of their
own serve (PART), so that the others stay as they are.

M and X, rounded to io, become operands by way of memory, over the tiles of P and W which nothing
needs any more: also transposed, and no accumulator is transposed or kept in registers.

Tiles: first a loop over V in blocks of BV, two [C, C] fp32 accumulators; then for every K-block of
BK three [C, BK] accumulators over V again, and the products with k, q, e.
"""

import triton
import triton.language as tl

from lagraph.engines.triton.kernels.factor import (
    GROWTH,
    MIDDLE,
    REACH,
    _inverse_norm,
    _key_rows,
    guard_rows,
    guarded,
    inverse_growth,
    load_beta,
    rest,
)
from lagraph.engines.triton.kernels.gate import amplitude, sigmoid, softplus, step_size
from lagraph.engines.triton.kernels.index import ROWS, locate
from lagraph.engines.triton.kernels.reverse import load_dout

__all__ = [
    "beta_key_kernel",
    "gradient_head_kernel",
    "gradient_key_kernel",
    "products_key_kernel",
]


@triton.jit
def gate_gradient(b_dg, b_x, amp, lower, KIND: tl.constexpr):
    """From the gradient of g to that of the biased raw gate, and to its share of a_log's."""
    if KIND == "linear":
        b_dx = tl.where(b_x >= 1e-10, b_dg / tl.maximum(b_x, 1e-10), 0.0)
        b_da = b_dx
    elif KIND == "softplus":
        b_dx = -amp * sigmoid(b_x) * b_dg
        b_da = -amp * softplus(b_x) * b_dg
    elif KIND == "bounded":
        b_s = amp * b_x
        b_dx = lower * (amp * (sigmoid(b_s) * sigmoid(-b_s))) * b_dg
        b_da = b_dx * b_x
    else:
        b_dx = b_dg
        b_da = b_dg
    return b_dx, b_da


@triton.jit
def beta_gradient(b_db, b_raw, SIGMOID: tl.constexpr, DOUBLE: tl.constexpr):
    """From the gradient of the erase strength to that of the raw beta."""
    if SIGMOID:
        b_db *= sigmoid(b_raw) * sigmoid(-b_raw)
        if DOUBLE:
            b_db *= 2.0
    return b_db


@triton.jit
def chunk_products(
    p_v,
    p_w,
    p_u,
    p_y,
    p_do,
    p_z,
    p_pre,
    p_d,
    p_dv,
    p_dw,
    p_dz,
    p_dd,
    o_vi,
    o_wi,
    o_oi,
    o_zi,
    o_pi,
    o_dvi,
    o_dwi,
    o_dzi,
    s_dv,
    m_t,
    m_q,
    b_beta,
    C: tl.constexpr,
    CQ: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    DELTA: tl.constexpr,
    ERASE_KEY: tl.constexpr,
    D_CHANNEL: tl.constexpr,
    PART: tl.constexpr,
    PREC: tl.constexpr,
):
    """M, X, and row sums Y . v; stores dv, dw, dz and the partials of dD.
    o_*: offsets of rows, head included; p_u, p_y: tiles [C, V] of the chunk."""
    o_i = tl.arange(0, C)
    b_m = tl.zeros([CQ, C], tl.float32)
    b_x = tl.zeros([C, C], tl.float32)
    b_yv = tl.zeros([C], tl.float32)
    b_dd = tl.zeros([CQ], tl.float32)
    m_t = m_t[:, None]
    m_q = m_q[:, None]
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        o_tile = o_i[:, None] * V + o_v[None, :]
        b_do = load_dout(p_do, p_z, o_oi[:, None] + o_v[None, :], o_zi[:, None] + o_v[None, :], m_q)
        b_v = tl.load(p_v + o_vi[:, None] + o_v[None, :], mask=m_t, other=0.0)  # [C, BV]
        b_y = tl.load(p_y + o_tile)  # [C, BV]
        if DELTA:
            b_u = tl.load(p_u + o_tile)  # [C, BV]
            b_x = tl.dot(b_y, tl.trans(b_u), b_x, input_precision=PREC)
        else:
            b_u = b_v
        b_m = tl.dot(b_do, tl.trans(b_u), b_m, input_precision=PREC)

        b_dv = b_y.to(tl.float32)
        if PART:
            b_ul = tl.load(p_u + C * V + o_tile)
            b_yl = tl.load(p_y + C * V + o_tile)
            b_m = tl.dot(b_do, tl.trans(b_ul), b_m, input_precision=PREC)
            b_x = tl.dot(b_y, tl.trans(b_ul), b_x, input_precision=PREC)
            b_x = tl.dot(b_yl, tl.trans(b_u), b_x, input_precision=PREC)
            b_dv += b_yl.to(tl.float32)
        b_vf = b_v.to(tl.float32)
        if DELTA:
            if ERASE_KEY:
                if p_w is not None:
                    o_w = o_wi[:, None] + o_v[None, :]
                    b_w = tl.load(p_w + o_w, mask=m_t, other=0.0).to(tl.float32)
                    o_w = o_dwi[:, None] + o_v[None, :]
                    tl.store(p_dw + o_w, (b_dv * b_vf).to(p_dw.dtype.element_ty), mask=m_t)
                    b_dv *= b_w
            else:
                b_yv += tl.sum(b_dv * b_vf, axis=1)
                b_dv *= b_beta[:, None]
        else:
            if p_d is not None:
                b_dof = b_do.to(tl.float32)
                b_dv += tl.load(p_d + o_v * s_dv).to(tl.float32)[None, :] * b_dof
                if D_CHANNEL:
                    tl.store(p_dd + o_v, tl.sum(b_dof * b_vf, axis=0))
                else:
                    b_dd += tl.sum(b_dof * b_vf, axis=1)
            if p_z is not None:
                o_z = o_zi[:, None] + o_v[None, :]
                b_z = tl.load(p_z + o_z, mask=m_q, other=0.0).to(tl.float32)
                b_g = tl.load(p_do + o_oi[:, None] + o_v[None, :], mask=m_q, other=0.0)
                b_g = b_g.to(tl.float32)
                b_o = tl.load(p_pre + o_pi[:, None] + o_v[None, :], mask=m_q, other=0.0)
                b_s = sigmoid(b_z)
                b_g *= b_o.to(tl.float32) * b_s * (1.0 + b_z * sigmoid(-b_z))
                o_z = o_dzi[:, None] + o_v[None, :]
                tl.store(p_dz + o_z, b_g.to(p_dz.dtype.element_ty), mask=m_q)
        o_dv = o_dvi[:, None] + o_v[None, :]
        tl.store(p_dv + o_dv, b_dv.to(p_dv.dtype.element_ty), mask=m_t)
    if not DELTA:  # noqa: SIM102 (constants that fold one by one)
        if p_d is not None:  # noqa: SIM102
            if not D_CHANNEL:
                tl.store(p_dd, tl.sum(b_dd))
    return b_m, b_x, b_yv


@triton.jit
def state_products(
    p_s,
    p_ds,
    p_v,
    p_u,
    p_y,
    p_do,
    p_z,
    o_vi,
    o_oi,
    o_zi,
    m_t,
    m_q,
    o_k,
    C: tl.constexpr,
    CQ: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DELTA: tl.constexpr,
    PART: tl.constexpr,
    PREC: tl.constexpr,
):
    """A K-block of dO S [CQ, BK], Y S and U dS [C, BK], and sum_v dS S [BK]."""
    o_i = tl.arange(0, C)
    b_q = tl.zeros([CQ, BK], tl.float32)
    b_f = tl.zeros([C, BK], tl.float32)
    b_h = tl.zeros([C, BK], tl.float32)
    b_c = tl.zeros([BK], tl.float32)
    m_t = m_t[:, None]
    m_q = m_q[:, None]
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        o_tile = o_i[:, None] * V + o_v[None, :]
        o_state = o_v[:, None] * K + o_k[None, :]
        b_s = tl.load(p_s + o_state)  # [BV, BK]
        b_ds = tl.load(p_ds + o_state)  # [BV, BK]
        b_do = load_dout(p_do, p_z, o_oi[:, None] + o_v[None, :], o_zi[:, None] + o_v[None, :], m_q)
        b_q = tl.dot(b_do, b_s, b_q, input_precision=PREC)
        if DELTA:
            b_f = tl.dot(tl.load(p_y + o_tile), b_s, b_f, input_precision=PREC)
            b_u = tl.load(p_u + o_tile)  # [C, BV]
        else:
            b_u = tl.load(p_v + o_vi[:, None] + o_v[None, :], mask=m_t, other=0.0)
        b_h = tl.dot(b_u, b_ds, b_h, input_precision=PREC)
        if PART:
            b_f = tl.dot(tl.load(p_y + C * V + o_tile), b_s, b_f, input_precision=PREC)
            b_h = tl.dot(tl.load(p_u + C * V + o_tile), b_ds, b_h, input_precision=PREC)
        b_c += tl.sum(b_s.to(tl.float32) * b_ds.to(tl.float32), axis=0)
    return b_q, b_f, b_h, b_c


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
    # Sums by a product with zeros and ones.
    SUM_PREC: tl.constexpr = PREC if tl.float32 == IO else "tf32"
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
    b_rq = tl.full([CQ], 0.0, tl.float32) + scale
    if NORM:
        b_rk = _inverse_norm(p_kh, s_ki, m_t, K, BK)
        b_rq *= _inverse_norm(p_qh, s_qi, m_q, K, BK)
    b_rw = b_rk
    if not DELTA:
        b_rw = b_rk * b_write

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
    b_m, b_x, b_yv = chunk_products(
        p_v, None, p_ut, p_yt, p_do, p_z, p_pre, p_dh, p_dv, None, p_dz, p_dd,
        o_vi, o_vi, o_oi, o_zi, o_out * s_pt, o_tok * s_dvt + o_sub * s_dvs, o_vi, o_out * s_dzt,
        s_dv, m_t, m_q, b_write, C, CQ, V, BV, DELTA, False, D_CHANNEL, PART, PREC,
    )  # fmt: skip
    m_up = (o_i[None, :] <= o_iq[:, None]) & m_t[None, :]
    b_m *= tl.exp2(tl.where(m_up, b_gq[:, None] - b_gc[None, :], -float("inf")))
    m_low = o_i[:, None] > o_i[None, :]
    if DELTA:
        b_x *= tl.exp2(tl.where(m_low, b_gc[:, None] - b_gc[None, :], -float("inf")))

    # The products with q, k, e want them as operands, also transposed: by way of memory, as no
    # accumulator should be transposed. The tiles of P and W are free by now.
    o_q = tl.arange(0, CQ)
    p_mt = p_p + pid * (PARTS * CQ * C) + o_q[:, None] * C + o_i[None, :]
    tl.store(p_mt, b_m.to(IO))
    if DELTA:
        p_xt = p_t + pid * (PARTS * C * C) + o_i[:, None] * C + o_i[None, :]
        tl.store(p_xt, b_x.to(IO))
    if PART:
        tl.store(p_mt + CQ * C, rest(b_m, IO))
        tl.store(p_xt + C * C, rest(b_x, IO), mask=m_low)

    # What the gate of step t decays inside the chunk: pairs of a row at or after t and a column
    # before it. Summed without differences, for what is small there may be divided by the gate.
    b_qk = tl.zeros([CQ, C], tl.float32)
    b_kk = tl.zeros([C, C], tl.float32)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        b_k = tl.load(p_kh + s_ki[:, None] + o_k[None, :], mask=m_t[:, None], other=0.0)
        b_q = tl.load(p_qh + s_qi[:, None] + o_k[None, :], mask=m_q[:, None], other=0.0)
        b_qk = tl.dot(b_q, tl.trans(b_k), b_qk, input_precision=PREC)
        if DELTA:
            b_kk = tl.dot(b_k, tl.trans(b_k), b_kk, input_precision=PREC)
    b_before = tl.where(o_i[:, None] < o_i[None, :], 1.0, 0.0)  # [column, step]
    b_m *= b_qk * b_rq[:, None] * b_rw[None, :]
    b_n = tl.dot(b_m, b_before, input_precision=SUM_PREC)
    b_dg = tl.sum(tl.where(o_iq[:, None] >= o_i[None, :], b_n, 0.0), axis=0)
    if DELTA:
        b_x *= b_kk * (b_rk * b_write)[:, None] * b_rk[None, :]
        b_n = tl.dot(b_x, b_before, input_precision=SUM_PREC)
        b_dg -= tl.sum(tl.where(o_i[:, None] >= o_i[None, :], b_n, 0.0), axis=0)
    tl.debug_barrier()

    # Sums over K: q dq and k f from the state, k f and k h in all, k h from the state; dS . S.
    b_qs = tl.zeros([CQ], tl.float32)
    b_rs = tl.zeros([C], tl.float32)
    b_fs = tl.zeros([C], tl.float32)
    b_hs = tl.zeros([C], tl.float32)
    b_es = tl.zeros([C], tl.float32)
    b_cs = tl.zeros([BK], tl.float32)
    p_st = p_s + pid * (V * K)
    p_dst = p_ds + pid * (V * K)
    b_up = tl.exp2(b_gc)
    b_uq = tl.exp2(b_gq)
    b_down = tl.exp2(b_end - b_gc)
    b_mm = tl.load(p_mt)
    if DELTA:
        b_xx = tl.load(p_xt)
    for i_k in tl.range(0, K, BK, num_stages=1):
        o_k = i_k + tl.arange(0, BK)
        b_k = tl.load(p_kh + s_ki[:, None] + o_k[None, :], mask=m_t[:, None], other=0.0)
        b_q = tl.load(p_qh + s_qi[:, None] + o_k[None, :], mask=m_q[:, None], other=0.0)
        b_dq, b_f, b_h, b_c = state_products(
            p_st, p_dst, p_v, p_ut, p_yt, p_do, p_z, o_vi, o_oi, o_zi, m_t, m_q, o_k,
            C, CQ, K, V, BK, BV, DELTA, PART, PREC,
        )  # fmt: skip
        b_kf = b_k.to(tl.float32) * b_rk[:, None]
        b_qf = b_q.to(tl.float32) * b_rq[:, None]
        b_cs += b_c
        b_h *= b_down[:, None]
        b_es += tl.sum(b_h * b_kf, axis=1)
        b_h = tl.dot(tl.trans(b_mm), b_qf.to(IO), b_h, input_precision=PREC)
        b_dq *= b_uq[:, None]
        b_qs += tl.sum(b_dq * b_qf, axis=1)
        b_kw = (b_kf * b_write[:, None]).to(IO)
        if DELTA:
            b_f *= b_up[:, None]
            b_rs += tl.sum(b_f * b_kf, axis=1)
            b_k16 = b_kf.to(IO) if NORM else b_k
            b_dq = tl.dot(b_mm, b_k16, b_dq, input_precision=PREC)
            b_f = tl.dot(b_xx, b_k16, b_f, input_precision=PREC)
            if PART:
                b_ml = tl.load(p_mt + CQ * C)
                b_xl = tl.load(p_xt + C * C, mask=m_low, other=0.0)
                b_dq = tl.dot(b_ml, b_k16, b_dq, input_precision=PREC)
                b_f = tl.dot(b_xl, b_k16, b_f, input_precision=PREC)
                b_h = tl.dot(tl.trans(b_ml), b_qf.to(IO), b_h, input_precision=PREC)
                b_h -= tl.dot(tl.trans(b_xl), b_kw, input_precision=PREC)
            b_fs += tl.sum(b_f * b_kf, axis=1)
            b_h -= tl.dot(tl.trans(b_xx), b_kw, input_precision=PREC)
            b_dk = b_h - b_write[:, None] * b_f
        else:
            b_dq = tl.dot(b_mm, b_kw, b_dq, input_precision=PREC)
            b_dk = b_h * b_write[:, None]
        b_hs += tl.sum(b_h * b_kf, axis=1)
        p_tile = p_dk + (o_tok * s_dkt + o_sub * s_dks)[:, None] + o_k[None, :]
        tl.store(p_tile, b_dk.to(p_dk.dtype.element_ty), mask=m_t[:, None])
        p_tile = p_dq + (o_out * s_dqt)[:, None] + o_k[None, :]
        tl.store(p_tile, (scale * b_dq).to(p_dq.dtype.element_ty), mask=m_q[:, None])

    # And what it decays of the entering state, and of all that leaves.
    b_dg += tl.exp2(b_end) * tl.sum(b_cs)
    m_late = o_iq[:, None] >= o_i[None, :]
    b_dg += tl.sum(tl.where(m_late, b_qs[:, None], 0.0), axis=0)
    m_late = o_i[:, None] >= o_i[None, :]
    if DELTA:
        b_dg += tl.sum(tl.where(m_late, -(b_write * b_rs)[:, None], b_es[:, None]), axis=0)
    else:
        b_dg += tl.sum(tl.where(m_late, 0.0, (b_write * b_es)[:, None]), axis=0)

    # Chain rules, each row once: the factors are free now.
    tl.debug_barrier()
    tl.store(p_row + o_i, b_dg)
    tl.store(p_row + C + o_i, b_yv - b_fs if DELTA else b_hs)
    tl.debug_barrier()
    m_g = m_t & (o_sub == 0)
    b_dg = tl.where(m_g, tl.load(p_row + o_i), 0.0)
    b_db = tl.load(p_row + C + o_i)
    b_g = tl.load(p_g + token * s_gt + i_h * s_gh + o_tok * s_gt, mask=m_g, other=0.0)
    b_g = b_g.to(tl.float32)
    if p_bias is not None:
        b_g += tl.load(p_bias + i_h).to(tl.float32)
    if GATE == "ssd":
        rate = tl.load(p_a + i_h).to(tl.float32)
        if p_da is not None:
            tl.store(p_da + pid, tl.sum(b_dg * step_size(b_g, dt_min, dt_max, SOFTPLUS)))
        b_dx = rate * b_dg + b_db
        b_raw = b_g
        if SOFTPLUS:
            b_raw = softplus(b_g)
            b_dx *= sigmoid(b_g)
        b_dx = tl.where(m_g & (b_raw >= dt_min) & (b_raw <= dt_max), b_dx, 0.0)
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


@triton.jit
def _level_sum(o_i, B):
    """[step t, row or column] of a pairing level, as zeros and ones: the pairs that the gate of t
    decays are those of rows from t on, for t in a later block, and of columns before t in an
    earlier one."""
    o_t = o_i[:, None]
    o_x = o_i[None, :]
    m_late = o_t // B % 2 == 1
    m_sum = (o_t // B == o_x // B) & ((m_late & (o_x >= o_t)) | ((m_late == 0) & (o_x < o_t)))
    return tl.where(m_sum, 1.0, 0.0)


@triton.jit
def _pairs(
    p_mt,
    p_xt,
    m_tile,
    b_q,
    b_e,
    b_k,
    b_row,
    b_col,
    WIDE: tl.constexpr,
    PART: tl.constexpr,
    PREC: tl.constexpr,
):
    """The pairs of one level, rows carrying b_row and columns b_col [C, BK]: their parts of dq, f
    and h. M and X are read where the level holds."""
    b_m = tl.load(p_mt, mask=m_tile, other=0.0).to(WIDE)
    b_x = tl.load(p_xt, mask=m_tile, other=0.0).to(WIDE)
    b_kc = (b_k * b_col).to(WIDE)
    b_qr = (b_q * b_row).to(WIDE)
    b_er = (-b_e * b_row).to(WIDE)
    b_dq = tl.dot(b_m, b_kc, input_precision=PREC)
    b_f = tl.dot(b_x, b_kc, input_precision=PREC)
    b_h = tl.dot(tl.trans(b_m), b_qr, input_precision=PREC)
    b_h = tl.dot(tl.trans(b_x), b_er, b_h, input_precision=PREC)
    if PART:
        C: tl.constexpr = b_m.shape[0]
        o_i = tl.arange(0, C)
        m_tile = m_tile & (o_i[:, None] > o_i[None, :])
        b_ml = tl.load(p_mt + C * C, mask=m_tile, other=0.0).to(WIDE)
        b_xl = tl.load(p_xt + C * C, mask=m_tile, other=0.0).to(WIDE)
        b_dq = tl.dot(b_ml, b_kc, b_dq, input_precision=PREC)
        b_f = tl.dot(b_xl, b_kc, b_f, input_precision=PREC)
        b_h = tl.dot(tl.trans(b_ml), b_qr, b_h, input_precision=PREC)
        b_h = tl.dot(tl.trans(b_xl), b_er, b_h, input_precision=PREC)
    return b_row * b_dq, b_row * b_f, b_col * b_h


@triton.jit(do_not_specialize=["N", "T"])
def products_key_kernel(
    p_v,
    p_w,
    p_beta,
    p_do,
    p_p,
    p_t,
    p_u,
    p_y,
    p_dv,
    p_dw,
    p_sums,
    p_cu,
    N,
    T,
    s_cu,
    s_vt,
    s_vh,
    s_wt,
    s_wh,
    s_bt,
    s_bh,
    s_ot,
    s_oh,
    s_dvt,
    s_dvh,
    s_dwt,
    s_dwh,
    HV: tl.constexpr,
    HO: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BV: tl.constexpr,
    ERASE_KEY: tl.constexpr,
    SIGMOID: tl.constexpr,
    DOUBLE: tl.constexpr,
    SPLIT: tl.constexpr,
    PART: tl.constexpr,
    PREC: tl.constexpr,
):
    """M and X of a chunk over the tiles of P and W; M's diagonal and Y . v beside them; dv, dw."""
    IO: tl.constexpr = p_v.dtype.element_ty
    pid = tl.program_id(0).to(tl.int64)
    i_h = pid % HO
    _, i_c, begin, length = locate(pid // HO, p_cu, s_cu, N, T, C, 1)
    if i_c < 0:
        return
    PARTS: tl.constexpr = 2 if SPLIT else 1
    if SPLIT == 2:  # noqa: SIM102
        if (inverse_growth(p_t, pid, C, SPLIT) > GROWTH).to(tl.int32) != PART:
            return
    o_i = tl.arange(0, C)
    m_t = o_i < tl.minimum(length - i_c * C, C).to(tl.int32)
    token = begin + i_c * C
    p_v += token * s_vt + (i_h // (HO // HV)) * s_vh
    p_do += token * s_ot + i_h * s_oh
    p_dv += token * s_dvt + i_h * s_dvh
    if p_w is not None:
        p_w += token * s_wt + i_h * s_wh
        p_dw += token * s_dwt + i_h * s_dwh
    b_beta = tl.full([C], 1.0, tl.float32)
    if not ERASE_KEY:
        b_beta = load_beta(p_beta + token * s_bt + i_h * s_bh, o_i * s_bt, m_t, SIGMOID, DOUBLE)
    o_vi = o_i * s_vt
    o_oi = o_i * s_ot
    b_m, b_x, b_yv = chunk_products(
        p_v, p_w, p_u + pid * (PARTS * C * V), p_y + pid * (PARTS * C * V), p_do, None, None,
        None, p_dv, p_dw, None, None, o_vi, o_i * s_wt, o_oi, o_oi, o_oi, o_i * s_dvt,
        o_i * s_dwt, o_oi, 0, m_t, m_t, b_beta, C, C, V, BV, True, ERASE_KEY, False, PART, PREC,
    )  # fmt: skip
    m_low = o_i[:, None] > o_i[None, :]
    o_tile = pid * (PARTS * C * C) + o_i[:, None] * C + o_i[None, :]
    tl.store(p_p + o_tile, tl.where(m_low, b_m, 0.0).to(IO))
    tl.store(p_t + o_tile, tl.where(m_low, b_x, 0.0).to(IO))
    if PART:
        tl.store(p_p + C * C + o_tile, rest(b_m, IO), mask=m_low)
        tl.store(p_t + C * C + o_tile, rest(b_x, IO), mask=m_low)
    m_same = o_i[:, None] == o_i[None, :]
    tl.store(p_sums + pid * (2 * C) + o_i, tl.sum(tl.where(m_same, b_m, 0.0), axis=1))
    tl.store(p_sums + pid * (2 * C) + C + o_i, b_yv)


@triton.jit(do_not_specialize=["N", "T"])
def gradient_key_kernel(
    p_q,
    p_k,
    p_v,
    p_g,
    p_beta,
    p_alog,
    p_bias,
    p_do,
    p_l,
    p_p,
    p_t,
    p_u,
    p_y,
    p_s,
    p_ds,
    p_sums,
    p_dq,
    p_dk,
    p_dg,
    p_dbeta,
    p_kf,
    p_dalog,
    p_dbias,
    p_cu,
    N,
    T,
    scale,
    lower,
    s_cu,
    s_qt,
    s_qh,
    s_kt,
    s_kh,
    s_vt,
    s_vh,
    s_gt,
    s_gh,
    s_bt,
    s_bh,
    s_ot,
    s_oh,
    s_dqt,
    s_dqh,
    s_dkt,
    s_dkh,
    s_dgt,
    s_dgh,
    s_dbt,
    s_dbh,
    H: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    HO: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GATE: tl.constexpr,
    ERASE_KEY: tl.constexpr,
    GUARD: tl.constexpr,
    NORM: tl.constexpr,
    SIGMOID: tl.constexpr,
    DOUBLE: tl.constexpr,
    SPLIT: tl.constexpr,
    PART: tl.constexpr,
    PREC: tl.constexpr,
):
    IO: tl.constexpr = p_k.dtype.element_ty
    NK: tl.constexpr = K // BK
    NB: tl.constexpr = C // 16
    # fp16 cannot hold the columns of a diagonal block.
    WIDE: tl.constexpr = tl.float32 if tl.float16 == IO else IO
    WIDE_PREC: tl.constexpr = "tf32" if tl.float16 == IO else PREC
    SUM_PREC: tl.constexpr = PREC if tl.float32 == IO else "tf32"
    pid = tl.program_id(0).to(tl.int64)
    i_k = pid % NK
    tile = pid // NK
    i_h = tile % HO
    slot = tile // HO
    _, i_c, begin, length = locate(slot, p_cu, s_cu, N, T, C, 1)
    if p_dalog is not None:
        p_dalog += (slot * NK + i_k) * HO + i_h
    if p_dbias is not None:
        p_dbias += tile * K + i_k * BK + tl.arange(0, BK)
    if i_c < 0:
        if p_dalog is not None:
            tl.store(p_dalog, 0.0)
        if p_dbias is not None:
            tl.store(p_dbias, tl.zeros([BK], tl.float32))
        return
    PARTS: tl.constexpr = 2 if SPLIT else 1
    if SPLIT == 2:  # noqa: SIM102
        if (inverse_growth(p_t, tile, C, SPLIT) > GROWTH).to(tl.int32) != PART:
            return
    o_i = tl.arange(0, C)
    o_n = o_i // 16
    o_k = i_k * BK + tl.arange(0, BK)
    m_t = o_i < tl.minimum(length - i_c * C, C).to(tl.int32)
    # Everything counts from the chunk's first token: row offsets fit 32 bits.
    token = begin + i_c * C
    p_k += token * s_kt + (i_h // (HO // HK)) * s_kh
    p_q += token * s_qt + (i_h // (HO // H)) * s_qh
    p_v += token * s_vt + (i_h // (HO // HV)) * s_vh
    p_g += token * s_gt + i_h * s_gh
    p_beta += token * s_bt + i_h * s_bh
    p_do += token * s_ot + i_h * s_oh
    if p_bias is not None:
        p_bias += i_h * K
    amp = amplitude(p_alog, i_h)
    s_qi = o_i * s_qt
    s_ki = o_i * s_kt
    s_bi = o_i * s_bt
    b_rk = tl.full([C], 1.0, tl.float32)
    b_rq = tl.full([C], 0.0, tl.float32) + scale
    if NORM:
        b_rk = _inverse_norm(p_k, s_ki, m_t, K, BK)
        b_rq *= _inverse_norm(p_q, s_qi, m_t, K, BK)

    o_tile = tile * (PARTS * C * C) + o_i[:, None] * C + o_i[None, :]
    p_mt = p_p + o_tile
    p_xt = p_t + o_tile
    b_dq, b_f, b_h, b_c = state_products(
        p_s + tile * (V * K), p_ds + tile * (V * K), p_v, p_u + tile * (PARTS * C * V),
        p_y + tile * (PARTS * C * V), p_do, None, o_i * s_vt, o_i * s_ot, o_i, m_t, m_t, o_k,
        C, C, K, V, BK, BV, True, PART, PREC,
    )  # fmt: skip
    p_l += tile * ((C + 4 * NB) * K)
    p_lk = p_l + o_k[None, :]
    p_fk = p_lk + (C + o_n)[:, None] * K
    b_l = tl.load(p_lk + o_i[:, None] * K)
    b_y = tl.exp2(tl.load(p_lk + (o_n * 16 + 15)[:, None] * K) - b_l)
    b_x = tl.exp2(b_l)
    b_k, b_b, b_q = _key_rows(
        p_k, p_q, p_beta, s_ki, s_qi, s_bi, o_k[None, :], m_t, b_rk, b_rq,
        ERASE_KEY, True, SIGMOID, DOUBLE,
    )  # fmt: skip
    if ERASE_KEY:
        if GUARD:
            m_act, m_flat, b_mean, b_eta = guard_rows(
                p_k, p_g, p_beta, p_bias, s_ki, o_i * s_gt, s_bi, b_rk, m_t, amp, lower,
                K, BK, GATE, SIGMOID, DOUBLE, IO,
            )  # fmt: skip
            b_b = guarded(b_b, m_act, m_flat, b_mean, b_eta, IO)
    else:
        b_b = load_beta(p_beta, s_bi, m_t, SIGMOID, DOUBLE)[:, None]
    b_e = b_k * b_b

    # Through the states. b_rows: what a gate decays if it comes no later; b_cols: if later.
    b_s = b_x * tl.load(p_fk)
    b_dq *= b_s
    b_f *= b_s
    b_h *= b_y * tl.load(p_fk + NB * K)
    b_rows = b_q * b_dq - b_e * b_f
    b_cols = b_k * b_h
    b_end = tl.load(p_l + 15 * K + o_k)
    if NB == 2:
        b_end += tl.load(p_l + 31 * K + o_k)
    b_dg = tl.zeros([C, BK], tl.float32) + (tl.exp2(b_end) * b_c)[None, :]
    m_block = o_n[:, None] == o_n[None, :]
    if NB == 2:
        # Gates of one block: all rows of a later one, all columns of an earlier one.
        b_s = tl.where((o_n == 1)[:, None], b_rows, b_cols)
        b_w = tl.where(m_block, 0.0, 1.0)
        b_dg = tl.dot(b_w, b_s, b_dg, input_precision=SUM_PREC)

        # Rows of the second block with columns of the first.
        b_sq, b_sf, b_sh = _pairs(
            p_mt, p_xt, o_n[:, None] > o_n[None, :], b_q, b_e, b_k, b_x, b_y, IO, PART, PREC
        )
        b_dq += b_sq
        b_f += b_sf
        b_h += b_sh
        b_rows += b_q * b_sq - b_e * b_sf
        b_cols += b_k * b_sh
    b_w = tl.where(m_block & (o_i[:, None] > o_i[None, :]), 1.0, 0.0)
    b_dg = tl.dot(b_w, b_cols, b_dg, input_precision=SUM_PREC)

    # Whether the anchors of the diagonal blocks are within reach: gates <= 0, the ends are
    # farthest. For linear gates, whose dg is divided by the decay and must not be a difference,
    # they never are.
    far = True
    if GATE != "linear":
        p_16 = p_l + tl.arange(0, NB)[:, None] * (16 * K) + o_k[None, :]
        b_mid = tl.load(p_16 + MIDDLE * K)
        b_far = tl.maximum(tl.load(p_16) - b_mid, b_mid - tl.load(p_16 + 15 * K))
        far = tl.max(tl.max(b_far, axis=1), axis=0) >= REACH
    if far:
        for i_b in range(4):
            size = 8 >> i_b
            b_s = tl.load(p_lk + ((o_i // (2 * size) * 2 + 1) * size)[:, None] * K)
            m_odd = (o_i // size % 2 == 1)[:, None]
            b_s = tl.exp2(tl.where(m_odd, b_l - b_s, b_s - b_l))
            m_pair = m_odd & (o_i[None, :] // size == (o_i // size - 1)[:, None])
            b_sq, b_sf, b_sh = _pairs(p_mt, p_xt, m_pair, b_q, b_e, b_k, b_s, b_s, IO, PART, PREC)
            b_dq += b_sq
            b_f += b_sf
            b_h += b_sh
            b_s = b_q * b_sq - b_e * b_sf + b_k * b_sh
            b_dg = tl.dot(_level_sum(o_i, size), b_s, b_dg, input_precision=SUM_PREC)
    else:
        b_s = b_l - tl.load(p_lk + (o_n * 16 + MIDDLE)[:, None] * K)
        b_sq, b_sf, b_sh = _pairs(
            p_mt,
            p_xt,
            m_block,
            b_q,
            b_e,
            b_k,
            tl.exp2(b_s),
            tl.exp2(-b_s),
            WIDE,
            PART,
            WIDE_PREC,
        )
        b_dq += b_sq
        b_f += b_sf
        b_h += b_sh
        b_rows += b_q * b_sq - b_e * b_sf - b_k * b_sh
    b_w = tl.where(m_block & (o_i[:, None] <= o_i[None, :]), 1.0, 0.0)
    b_dg = tl.dot(b_w, b_rows, b_dg, input_precision=SUM_PREC)
    # A row and its own column: nothing decays between them.
    b_self = tl.load(p_sums + tile * (2 * C) + o_i)[:, None]
    b_dq += b_self * b_k
    b_h += b_self * b_q

    # Chain rules and stores.
    m_t = m_t[:, None]
    o_k = o_k[None, :]
    b_raw = tl.load(p_g + (o_i * s_gt)[:, None] + o_k, mask=m_t, other=0.0).to(tl.float32)
    if p_bias is not None:
        b_raw += tl.load(p_bias + o_k).to(tl.float32)
    b_dx, b_da = gate_gradient(tl.where(m_t, b_dg, 0.0), b_raw, amp, lower, GATE)
    p_dg += token * s_dgt + i_h * s_dgh + (o_i * s_dgt)[:, None] + o_k
    tl.store(p_dg, b_dx.to(p_dg.dtype.element_ty), mask=m_t)
    if p_dbias is not None:
        tl.store(p_dbias, tl.sum(b_dx, axis=0))
    if p_dalog is not None:
        tl.store(p_dalog, tl.sum(b_da))
    p_dq += token * s_dqt + i_h * s_dqh + (o_i * s_dqt)[:, None] + o_k
    tl.store(p_dq, (scale * b_dq).to(p_dq.dtype.element_ty), mask=m_t)
    b_h -= b_b * b_f
    p_dk += token * s_dkt + i_h * s_dkh + (o_i * s_dkt)[:, None] + o_k
    tl.store(p_dk, b_h.to(p_dk.dtype.element_ty), mask=m_t)
    if ERASE_KEY:
        b_raw = tl.load(p_beta + s_bi[:, None] + o_k, mask=m_t, other=0.0).to(tl.float32)
        b_db = beta_gradient(-b_k * b_f, b_raw, SIGMOID, DOUBLE)
        p_dbeta += token * s_dbt + i_h * s_dbh + (o_i * s_dbt)[:, None] + o_k
        tl.store(p_dbeta, b_db.to(p_dbeta.dtype.element_ty), mask=m_t)
    else:
        tl.store(p_kf + (tile * NK + i_k) * C + o_i, tl.sum(b_k * b_f, axis=1))


@triton.jit(do_not_specialize=["N", "T"])
def beta_key_kernel(
    p_beta,
    p_sums,
    p_kf,
    p_dbeta,
    p_cu,
    N,
    T,
    s_cu,
    s_bt,
    s_bh,
    s_dbt,
    s_dbh,
    HO: tl.constexpr,
    C: tl.constexpr,
    NK: tl.constexpr,
    SIGMOID: tl.constexpr,
    DOUBLE: tl.constexpr,
):
    """db = Y . v - k . f of a chunk, for a strength a head: sums what the K-blocks left."""
    pid = tl.program_id(0).to(tl.int64)
    i_h = pid % HO
    _, i_c, begin, length = locate(pid // HO, p_cu, s_cu, N, T, C, 1)
    if i_c < 0:
        return
    o_i = tl.arange(0, C)
    m_t = i_c * C + o_i < length
    o_t = begin + i_c * C + o_i
    b_db = tl.load(p_sums + pid * (2 * C) + C + o_i)
    for i_k in tl.static_range(NK):
        b_db -= tl.load(p_kf + (pid * NK + i_k) * C + o_i)
    b_raw = tl.load(p_beta + o_t * s_bt + i_h * s_bh, mask=m_t, other=0.0).to(tl.float32)
    b_db = beta_gradient(b_db, b_raw, SIGMOID, DOUBLE)
    tl.store(p_dbeta + o_t * s_dbt + i_h * s_dbh, b_db.to(p_dbeta.dtype.element_ty), mask=m_t)
