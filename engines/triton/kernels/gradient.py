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
exceeds 1. Inside a block, pairs of ever smaller blocks go on down to single steps. Where no
exponent exceeds 2^100, the middle of a block, row 7, is its anchor instead and serves all of it;
not for linear gates, whose dg must not be a difference. Tiles are [BK, C], a warp to 16 channels,
so that what was accumulated is multiplied by tiles of all steps without leaving registers.
`beta_key_kernel` adds up the K-blocks' shares of a head's db. GDN-2's guard of b is recomputed, and
its gradient is that of b as it is used.

Without delta rule, where heads share q and k, most of that is shared too: sum_j M_ij D_ij w_j k_j
of all of them is one product with the sum of their M D w. `products_group_kernel` makes that, CR
rows a program, of which q k^T is made once; `gradient_group_kernel`, one program a K-block of dq or
dk, adds up their S^T dO or dS^T v in registers and writes once for HP heads; `step_group_kernel`
then adds up what both left of each head's gates. The serial pass back has dv.

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

from lagraph.engines.triton.kernels.factor import (
    GRID,
    GROWTH,
    MIDDLE,
    REACH,
    _inverse_norm,
    anchored,
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
    "gradient_group_kernel",
    "gradient_head_kernel",
    "gradient_key_kernel",
    "products_group_kernel",
    "products_key_kernel",
    "step_group_kernel",
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
def step_gradient(b_dx, b_x, dt_min, dt_max, SOFTPLUS: tl.constexpr):
    """From the gradient of a step dt to that of the biased raw gate."""
    b_raw = b_x
    if SOFTPLUS:
        b_raw = softplus(b_x)
        b_dx *= sigmoid(b_x)
    return tl.where((b_raw >= dt_min) & (b_raw <= dt_max), b_dx, 0.0)


@triton.jit
def z_gradient(b_z, b_o):
    """Of an output o z sigmoid(z), by z."""
    return b_o * sigmoid(b_z) * (1.0 + b_z * sigmoid(-b_z))


@triton.jit
def beta_gradient(b_db, b_raw, SIGMOID: tl.constexpr, DOUBLE: tl.constexpr):
    """From the gradient of the erase strength to that of the raw beta."""
    if SIGMOID:
        b_db *= sigmoid(b_raw) * sigmoid(-b_raw)
        if DOUBLE:
            b_db *= 2.0
    return b_db


@triton.jit
def _slice_products(
    b_m,
    b_x,
    b_yv,
    b_dd,
    i_v,
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
    V: tl.constexpr,
    BV: tl.constexpr,
    DELTA: tl.constexpr,
    ERASE_KEY: tl.constexpr,
    D_CHANNEL: tl.constexpr,
    PART: tl.constexpr,
    PREC: tl.constexpr,
):
    """A V-slice of `chunk_products`: the sums with it, and its tiles of dO, U and Y."""
    o_v = i_v + tl.arange(0, BV)
    o_tile = tl.arange(0, C)[:, None] * V + o_v[None, :]
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
            b_g *= z_gradient(b_z, b_o.to(tl.float32))
            o_z = o_dzi[:, None] + o_v[None, :]
            tl.store(p_dz + o_z, b_g.to(p_dz.dtype.element_ty), mask=m_q)
    o_dv = o_dvi[:, None] + o_v[None, :]
    tl.store(p_dv + o_dv, b_dv.to(p_dv.dtype.element_ty), mask=m_t)
    return b_m, b_x, b_yv, b_dd, b_do, b_u, b_y


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
    """M, X, and row sums Y . v; stores dv, dw, dz and the partials of dD. Where one slice is all of
    V, also the tiles of dO, U and Y.
    o_*: offsets of rows, head included; p_u, p_y: tiles [C, V] of the chunk."""
    b_m = tl.zeros([CQ, C], tl.float32)
    b_x = tl.zeros([C, C], tl.float32)
    b_yv = tl.zeros([C], tl.float32)
    b_dd = tl.zeros([CQ], tl.float32)
    m_t = m_t[:, None]
    m_q = m_q[:, None]
    if BV == V:
        b_m, b_x, b_yv, b_dd, b_do, b_u, b_y = _slice_products(
            b_m, b_x, b_yv, b_dd, 0, p_v, p_w, p_u, p_y, p_do, p_z, p_pre, p_d, p_dv, p_dw, p_dz,
            p_dd, o_vi, o_wi, o_oi, o_zi, o_pi, o_dvi, o_dwi, o_dzi, s_dv, m_t, m_q, b_beta, C, V,
            BV, DELTA, ERASE_KEY, D_CHANNEL, PART, PREC,
        )  # fmt: skip
    else:
        b_do, b_u, b_y = 0, 0, 0
        for i_v in range(0, V, BV):
            b_m, b_x, b_yv, b_dd, _, _, _ = _slice_products(
                b_m, b_x, b_yv, b_dd, i_v, p_v, p_w, p_u, p_y, p_do, p_z, p_pre, p_d, p_dv, p_dw,
                p_dz, p_dd, o_vi, o_wi, o_oi, o_zi, o_pi, o_dvi, o_dwi, o_dzi, s_dv, m_t, m_q,
                b_beta, C, V, BV, DELTA, ERASE_KEY, D_CHANNEL, PART, PREC,
            )  # fmt: skip
    if not DELTA:  # noqa: SIM102 (constants that fold one by one)
        if p_d is not None:  # noqa: SIM102
            if not D_CHANNEL:
                tl.store(p_dd, tl.sum(b_dd))
    return b_m, b_x, b_yv, b_do, b_u, b_y


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


@triton.jit(do_not_specialize=["N", "T"])
def products_group_kernel(
    p_q,
    p_k,
    p_v,
    p_z,
    p_pre,
    p_do,
    p_rows,
    p_m,
    p_pairs,
    p_dz,
    p_dd,
    p_cu,
    N,
    T,
    scale,
    s_cu,
    s_qt,
    s_qh,
    s_kt,
    s_kh,
    s_vt,
    s_vh,
    s_zt,
    s_zh,
    s_pt,
    s_ph,
    s_ot,
    s_oh,
    s_dzt,
    s_dzh,
    H: tl.constexpr,
    HO: tl.constexpr,
    HP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    CR: tl.constexpr,
    BQ: tl.constexpr,
    STAGES: tl.constexpr,
    D_CHANNEL: tl.constexpr,
    PREC: tl.constexpr,
):
    """M of CR rows of a chunk, decayed and written, summed over HP heads that share q and k; of
    each head the pairs' share of the gradient of its gates and steps, and dz and dD."""
    IO: tl.constexpr = p_k.dtype.element_ty
    # Sums by a product with zeros and ones.
    SUM_PREC: tl.constexpr = PREC if tl.float32 == IO else "tf32"
    SUM: tl.constexpr = tl.bfloat16 if tl.bfloat16 == IO else tl.float32
    NR: tl.constexpr = C // CR
    PARTS: tl.constexpr = HO // HP
    pid = tl.program_id(0).to(tl.int64)
    i_r = (pid % NR).to(tl.int32)
    i_p = pid // NR % PARTS
    slot = pid // (NR * PARTS)
    o_v = tl.arange(0, V)
    if p_dd is not None:
        p_dd += ((slot * NR + i_r) * HO + i_p * HP) * (V if D_CHANNEL else 1)
    _, i_c, begin, length = locate(slot, p_cu, s_cu, N, T, C, 1)
    if i_c < 0:
        if p_dd is not None:
            for i in range(0, HP):
                if D_CHANNEL:
                    tl.store(p_dd + i * V + o_v, tl.zeros([V], tl.float32))
                else:
                    tl.store(p_dd + i, 0.0)
        return
    o_j = tl.arange(0, C)
    o_i = i_r * CR + tl.arange(0, CR)
    left = tl.minimum(length - i_c * C, C).to(tl.int32)
    m_j = (o_j < left)[:, None]
    m_i = (o_i < left)[:, None]
    token = begin + i_c * C
    i_h = i_p * HP // (HO // H)
    p_q += token * s_qt + i_h * s_qh
    p_k += token * s_kt + i_h * s_kh
    b_qk = tl.zeros([CR, C], tl.float32)
    for i_k in range(0, K, BQ):
        o_k = i_k + tl.arange(0, BQ)[None, :]
        b_q = tl.load(p_q + (o_i * s_qt)[:, None] + o_k, mask=m_i, other=0.0)
        b_k = tl.load(p_k + (o_j * s_kt)[:, None] + o_k, mask=m_j, other=0.0)
        b_qk = tl.dot(b_q, tl.trans(b_k), b_qk, input_precision=PREC)
    m_up = o_j[None, :] <= o_i[:, None]
    b_qk = tl.where(m_up, scale * b_qk, 0.0)
    b_before = tl.where(o_j[:, None] < o_j[None, :], 1.0, 0.0).to(SUM)  # [column, step]

    tile = slot * HO + i_p * HP
    p_v += token * s_vt + i_p * HP * s_vh
    p_do += token * s_ot + i_p * HP * s_oh
    if p_z is not None:
        p_z += token * s_zt + i_p * HP * s_zh
        p_pre += token * s_pt + i_p * HP * s_ph
        p_dz += token * s_dzt + i_p * HP * s_dzh
    p_rows += tile * (ROWS * C) + 3 * C
    p_pairs += (tile * NR + i_r) * (2 * C)
    o_ri = (o_i * s_vt)[:, None] + o_v[None, :]
    o_vi = (o_j * s_vt)[:, None] + o_v[None, :]
    o_oi = (o_i * s_ot)[:, None] + o_v[None, :]
    o_zi = (o_i * s_zt)[:, None] + o_v[None, :]
    b_sum = tl.zeros([CR, C], tl.float32)
    for i in tl.range(0, HP, num_stages=STAGES):
        p_zi = p_z
        if p_z is not None:
            p_zi += i * s_zh
        b_do = load_dout(p_do + i * s_oh, p_zi, o_oi, o_zi, m_i)  # [CR, V]
        b_v = tl.load(p_v + i * s_vh + o_vi, mask=m_j, other=0.0)  # [C, V]
        b_gi = tl.load(p_rows + i * (ROWS * C) + o_i)
        b_gj = tl.load(p_rows + i * (ROWS * C) + o_j)
        b_w = tl.load(p_rows + i * (ROWS * C) + C + o_j)
        b_m = tl.dot(b_do, tl.trans(b_v), input_precision=PREC)
        if p_dd is not None:
            if D_CHANNEL:
                b_vr = tl.load(p_v + i * s_vh + o_ri, mask=m_i, other=0.0).to(tl.float32)
                tl.store(p_dd + i * V + o_v, tl.sum(b_do.to(tl.float32) * b_vr, axis=0))
            else:
                m_same = o_j[None, :] == o_i[:, None]
                tl.store(p_dd + i, tl.sum(tl.where(m_same, b_m, 0.0)))
        # No exponent above 0: what is no pair is masked in b_qk, and in the end in the sum.
        b_m *= tl.exp2(tl.minimum(b_gi[:, None] - b_gj[None, :], 0.0))
        b_x = b_m * b_qk
        b_m *= b_w[None, :]
        b_sum += b_m
        tl.store(p_pairs + i * (NR * 2 * C) + C + o_j, tl.sum(b_x, axis=0))  # k h
        # What the gate of step t decays: pairs of a row at or after t and a column before it.
        # Summed without differences, for what is small there may be divided by the gate.
        b_n = tl.dot((b_x * b_w[None, :]).to(SUM), b_before, input_precision=SUM_PREC)
        b_n = tl.where(m_up, b_n, 0.0)
        tl.store(p_pairs + i * (NR * 2 * C) + o_j, tl.sum(b_n, axis=0))

        if p_z is not None:
            b_z = tl.load(p_zi + o_zi, mask=m_i, other=0.0).to(tl.float32)
            b_dz = tl.load(p_do + i * s_oh + o_oi, mask=m_i, other=0.0).to(tl.float32)
            b_o = tl.load(
                p_pre + i * s_ph + (o_i * s_pt)[:, None] + o_v[None, :], mask=m_i, other=0.0
            )
            b_dz *= z_gradient(b_z, b_o.to(tl.float32))
            o_z = (o_i * s_dzt)[:, None] + o_v[None, :]
            tl.store(p_dz + i * s_dzh + o_z, b_dz.to(p_dz.dtype.element_ty), mask=m_i)
    p_m += (slot * PARTS + i_p) * (C * C) + o_i[:, None] * C + o_j[None, :]
    tl.store(p_m, tl.where(m_up, scale * b_sum, 0.0).to(IO))


@triton.jit
def _group_rows(
    p_x,
    p_z,
    p_own,
    p_s,
    p_mate,
    p_rows,
    p_sums,
    scale,
    s_xt,
    s_xh,
    s_zt,
    s_zh,
    s_own,
    m_t,
    HP: tl.constexpr,
    NK: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    KEY: tl.constexpr,
    STAGES: tl.constexpr,
    PREC: tl.constexpr,
):
    """A K-block of dO S, or with KEY of v dS, as they decay, of HP heads together [C, BK]; leaves
    each head's sums over channels with q or k, and with KEY those of dS S over V."""
    o_i = tl.arange(0, C)
    o_v = tl.arange(0, V)
    o_k = tl.arange(0, BK)
    o_xi = (o_i * s_xt)[:, None] + o_v[None, :]
    o_zi = (o_i * s_zt)[:, None] + o_v[None, :]
    o_state = o_v[:, None] * K + o_k[None, :]
    o_turned = o_v[None, :] * K + o_k[:, None]
    m_same = o_k[:, None] == o_k[None, :]
    p_own += (o_i * s_own)[:, None] + o_k[None, :]
    b_own = tl.load(p_own, mask=m_t, other=0.0).to(tl.float32)  # [C, BK]
    b_sum = tl.zeros([C, BK], tl.float32)
    for i in tl.range(0, HP, num_stages=STAGES):
        p_zi = p_z
        if p_z is not None:
            p_zi += i * s_zh
        b_s = tl.load(p_s + i * (V * K) + o_state)  # [V, BK]
        b_x = load_dout(p_x + i * s_xh, p_zi, o_xi, o_zi, m_t)  # [C, V]
        p_row = p_rows + i * (ROWS * C) + 3 * C
        b_g = tl.load(p_row + o_i)
        p_sum = p_sums + i * (NK * (2 * C + BK))
        b_p = tl.dot(b_x, b_s, input_precision=PREC)
        if KEY:
            b_f = tl.exp2(tl.load(p_row + C - 1) - b_g)
            b_sum += b_p * (b_f * tl.load(p_row + C + o_i))[:, None]
            # Of dS S the diagonal is wanted: fewer instructions than sums along rows.
            b_c = tl.load(p_mate + i * (V * K) + o_turned)  # [BK, V]
            b_c = tl.where(m_same, tl.dot(b_c, b_s, input_precision=PREC), 0.0)
            tl.store(p_sum + 2 * C + o_k, tl.sum(b_c, axis=1))
            p_sum += C
        else:
            b_f = scale * tl.exp2(b_g)
            b_sum += b_p * b_f[:, None]
        tl.store(p_sum + o_i, tl.sum(b_p * b_own, axis=1) * b_f)
    return b_sum


@triton.jit(do_not_specialize=["N", "T"])
def gradient_group_kernel(
    p_q,
    p_k,
    p_v,
    p_z,
    p_do,
    p_rows,
    p_m,
    p_s,
    p_ds,
    p_dq,
    p_dk,
    p_sums,
    p_cu,
    N,
    T,
    scale,
    s_cu,
    s_qt,
    s_qh,
    s_kt,
    s_kh,
    s_vt,
    s_vh,
    s_zt,
    s_zh,
    s_ot,
    s_oh,
    s_dqt,
    s_dqh,
    s_dkt,
    s_dkh,
    H: tl.constexpr,
    HO: tl.constexpr,
    HP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    PREC: tl.constexpr,
):
    """dq or dk of HP heads that share q and k, one K-block a program; sums over K a head.

    M of these heads, decayed and written, comes summed; what S and dS give adds up in registers."""
    NK: tl.constexpr = K // BK
    PARTS: tl.constexpr = HO // HP
    pid = tl.program_id(0).to(tl.int64)
    i_k = pid % NK
    side = pid // NK % 2
    i_p = pid // (NK * 2) % PARTS
    slot = pid // (NK * 2 * PARTS)
    _, i_c, begin, length = locate(slot, p_cu, s_cu, N, T, C, 1)
    if i_c < 0:
        return
    o_i = tl.arange(0, C)
    o_k = tl.arange(0, BK)[None, :]
    m_t = (o_i < tl.minimum(length - i_c * C, C).to(tl.int32))[:, None]
    token = begin + i_c * C
    i_h = i_p * HP // (HO // H)
    tile = slot * HO + i_p * HP
    p_k += token * s_kt + i_h * s_kh + i_k * BK
    p_q += token * s_qt + i_h * s_qh + i_k * BK
    p_s += tile * (V * K) + i_k * BK
    p_ds += tile * (V * K) + i_k * BK
    p_rows += tile * (ROWS * C)
    p_sums += (tile * NK + i_k) * (2 * C + BK)
    p_m += (slot * PARTS + i_p) * (C * C) + o_i[:, None] * C + o_i[None, :]
    p_v += token * s_vt + i_p * HP * s_vh
    p_do += token * s_ot + i_p * HP * s_oh
    if p_z is not None:
        p_z += token * s_zt + i_p * HP * s_zh
    if side == 0:
        b_dq = _group_rows(
            p_do, p_z, p_q, p_s, p_ds, p_rows, p_sums, scale, s_ot, s_oh, s_zt, s_zh, s_qt, m_t,
            HP, NK, K, V, C, BK, False, STAGES, PREC,
        )  # fmt: skip
        b_k = tl.load(p_k + (o_i * s_kt)[:, None] + o_k, mask=m_t, other=0.0)
        b_dq = tl.dot(tl.load(p_m), b_k, b_dq, input_precision=PREC)
        p_tile = p_dq + token * s_dqt + i_p * s_dqh + i_k * BK + (o_i * s_dqt)[:, None] + o_k
        tl.store(p_tile, b_dq.to(p_dq.dtype.element_ty), mask=m_t)
    else:
        b_dk = _group_rows(
            p_v, None, p_k, p_ds, p_s, p_rows, p_sums, scale, s_vt, s_vh, 0, 0, s_kt, m_t,
            HP, NK, K, V, C, BK, True, STAGES, PREC,
        )  # fmt: skip
        b_q = tl.load(p_q + (o_i * s_qt)[:, None] + o_k, mask=m_t, other=0.0)
        b_dk = tl.dot(tl.trans(tl.load(p_m)), b_q, b_dk, input_precision=PREC)
        p_tile = p_dk + token * s_dkt + i_p * s_dkh + i_k * BK + (o_i * s_dkt)[:, None] + o_k
        tl.store(p_tile, b_dk.to(p_dk.dtype.element_ty), mask=m_t)


@triton.jit(do_not_specialize=["N", "T"])
def step_group_kernel(
    p_g,
    p_bias,
    p_a,
    p_rows,
    p_pairs,
    p_sums,
    p_dg,
    p_dbias,
    p_da,
    p_cu,
    N,
    T,
    dt_min,
    dt_max,
    s_cu,
    s_gt,
    s_gh,
    s_dgt,
    s_dgh,
    HO: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    NK: tl.constexpr,
    NR: tl.constexpr,
    SOFTPLUS: tl.constexpr,
):
    """The gradient of the steps of a chunk from what `products_group_kernel` and
    `gradient_group_kernel` left: one program a head."""
    pid = tl.program_id(0).to(tl.int64)
    i_h = pid % HO
    _, i_c, begin, length = locate(pid // HO, p_cu, s_cu, N, T, C, 1)
    if i_c < 0:
        if p_dbias is not None:
            tl.store(p_dbias + pid, 0.0)
        if p_da is not None:
            tl.store(p_da + pid, 0.0)
        return
    o_i = tl.arange(0, C)
    o_k = tl.arange(0, BK)
    m_t = i_c * C + o_i < length
    p_row = p_rows + pid * (ROWS * C)
    p_sums += pid * (NK * (2 * C + BK))
    b_late = tl.zeros([C], tl.float32)
    b_soon = tl.zeros([C], tl.float32)  # a step late
    b_es = tl.zeros([C], tl.float32)
    b_cs = tl.zeros([BK], tl.float32)
    for i_k in tl.static_range(NK):
        p_sum = p_sums + i_k * (2 * C + BK)
        b_late += tl.load(p_sum + o_i)
        b_es += tl.load(p_sum + C + o_i)
        b_soon += tl.load(p_sum + C - 1 + o_i, mask=o_i > 0, other=0.0)
        b_cs += tl.load(p_sum + 2 * C + o_k)
    b_dg = tl.zeros([C], tl.float32) + tl.exp2(tl.load(p_row + 4 * C - 1)) * tl.sum(b_cs)
    b_db = b_es
    p_pairs += pid * (NR * 2 * C)
    for i_r in tl.static_range(NR):
        b_dg += tl.load(p_pairs + i_r * (2 * C) + o_i)
        b_db += tl.load(p_pairs + i_r * (2 * C) + C + o_i)
    b_soon *= tl.load(p_row + 4 * C - 1 + o_i, mask=o_i > 0, other=0.0)
    b_dg += tl.cumsum(b_late, axis=0, reverse=True) + tl.cumsum(b_soon, axis=0)
    b_dg = tl.where(m_t, b_dg, 0.0)
    p_g += (begin + i_c * C + o_i) * s_gt + i_h * s_gh
    b_g = tl.load(p_g, mask=m_t, other=0.0).to(tl.float32)
    if p_bias is not None:
        b_g += tl.load(p_bias + i_h).to(tl.float32)
    if p_da is not None:
        tl.store(p_da + pid, tl.sum(b_dg * step_size(b_g, dt_min, dt_max, SOFTPLUS)))
    b_dx = tl.load(p_a + i_h).to(tl.float32) * b_dg + b_db
    b_dx = tl.where(m_t, step_gradient(b_dx, b_g, dt_min, dt_max, SOFTPLUS), 0.0)
    if p_dbias is not None:
        tl.store(p_dbias + pid, tl.sum(b_dx))
    p_dg += (begin + i_c * C + o_i) * s_dgt + i_h * s_dgh
    tl.store(p_dg, b_dx.to(p_dg.dtype.element_ty), mask=m_t)


@triton.jit
def _paired(o_row, o_col, B):
    """Whether a pairing level holds for a row and a column: of neighbouring blocks of B steps."""
    return (o_row // B % 2 == 1) & (o_col // B == o_row // B - 1)


@triton.jit
def _level_sum(o_x, o_t, B):
    """Of a row or column x and a gate t, as zeros and ones: the pairs that the gate decays are
    those of rows from t on, for t in a later block, and of columns before t in an earlier one."""
    m_late = o_t // B % 2 == 1
    m_sum = (o_t // B == o_x // B) & ((m_late & (o_x >= o_t)) | ((m_late == 0) & (o_x < o_t)))
    return tl.where(m_sum, 1.0, 0.0)


@triton.jit
def _tiles(p_m, p_x, p_mt, p_xt, m_tile, m_turned, WIDE: tl.constexpr):
    """M and X, and both transposed, where masks hold."""
    b_m = tl.load(p_m, mask=m_tile, other=0.0).to(WIDE)
    b_x = tl.load(p_x, mask=m_tile, other=0.0).to(WIDE)
    b_mt = tl.load(p_mt, mask=m_turned, other=0.0).to(WIDE)
    b_xt = tl.load(p_xt, mask=m_turned, other=0.0).to(WIDE)
    return b_m, b_x, b_mt, b_xt


@triton.jit
def _pairs(b_dq, b_f, b_h, b_m, b_x, b_mt, b_xt, b_qr, b_er, b_kc, PREC: tl.constexpr):
    """Adds the pairs of decayed rows q, e and columns k [BK, C] to dq, f and h, whose own decay is
    left to the caller."""
    b_kc = b_kc.to(b_m.dtype)
    b_dq = tl.dot(b_kc, b_mt, b_dq, input_precision=PREC)
    b_f = tl.dot(b_kc, b_xt, b_f, input_precision=PREC)
    b_h = tl.dot(b_qr.to(b_m.dtype), b_m, b_h, input_precision=PREC)
    b_h = tl.dot((-b_er).to(b_m.dtype), b_x, b_h, input_precision=PREC)
    return b_dq, b_f, b_h


@triton.jit
def _settled(b_x):
    """x as the accumulator of a product with zeros. What is computed from it stays in that layout,
    in which it becomes a left operand without passing through shared memory."""
    b_a = tl.zeros([b_x.shape[0], 16], tl.bfloat16)
    b_b = tl.zeros([16, b_x.shape[1]], tl.bfloat16)
    return tl.dot(b_a, b_b, b_x)


@triton.jit
def _step_sums(b_x, b_w, b_sum, PREC: tl.constexpr):
    """Adds x w [BK, C], w of zeros and ones. 16-bit products take x in two parts."""
    if b_w.dtype == tl.float32:
        b_sum = tl.dot(b_x, b_w, b_sum, input_precision=PREC)
    else:
        b_top = (b_x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        b_sum = tl.dot(b_top.to(b_w.dtype), b_w, b_sum)
        b_sum = tl.dot((b_x - b_top).to(b_w.dtype), b_w, b_sum)
    return b_sum


@triton.jit
def _block_sums(b_dq, b_f, b_h, b_qr, b_er, b_kc, m_late):
    """What gates of one block of 16 decay of the other [BK, C]: all rows of the later, all columns
    of the earlier."""
    b_rows = tl.sum(tl.where(m_late, b_qr * b_dq - b_er * b_f, 0.0), axis=1)
    b_cols = tl.sum(tl.where(m_late, 0.0, b_kc * b_h), axis=1)
    return tl.where(m_late, b_cols[:, None], b_rows[:, None])


@triton.jit
def _state_rows(
    p_s,
    p_ds,
    p_u,
    p_y,
    p_do,
    o_oi,
    m_t,
    o_k,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PART: tl.constexpr,
    PREC: tl.constexpr,
):
    """`state_products` with channels in rows: (dO S)^T, (Y S)^T, (U dS)^T [BK, C], and
    sum_v dS S [BK]."""
    o_i = tl.arange(0, C)
    o_c = tl.arange(0, BK)
    b_q = tl.zeros([BK, C], tl.float32)
    b_f = tl.zeros([BK, C], tl.float32)
    b_h = tl.zeros([BK, C], tl.float32)
    b_c = tl.zeros([BK, BK], tl.float32)
    m_t = m_t[:, None]
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        o_tile = o_i[:, None] * V + o_v[None, :]
        o_state = o_v[None, :] * K + o_k[:, None]
        b_s = tl.load(p_s + o_state)  # [BK, BV]
        b_ds = tl.load(p_ds + o_state)  # [BK, BV]
        b_do = tl.load(p_do + o_oi[:, None] + o_v[None, :], mask=m_t, other=0.0)  # [C, BV]
        b_q = tl.dot(b_s, tl.trans(b_do), b_q, input_precision=PREC)
        b_y = tl.load(p_y + o_tile)  # [C, BV]
        b_f = tl.dot(b_s, tl.trans(b_y), b_f, input_precision=PREC)
        b_u = tl.load(p_u + o_tile)  # [C, BV]
        b_h = tl.dot(b_ds, tl.trans(b_u), b_h, input_precision=PREC)
        # Of which the diagonal is wanted: fewer instructions than sums along rows. The operand is
        # loaded for itself, so that both loads are staged.
        b_st = tl.load(p_ds + o_v[:, None] * K + o_k[None, :])  # [BV, BK]
        b_c = tl.dot(b_s, b_st, b_c, input_precision=PREC)
        if PART:
            b_y = tl.load(p_y + C * V + o_tile)
            b_f = tl.dot(b_s, tl.trans(b_y), b_f, input_precision=PREC)
            b_u = tl.load(p_u + C * V + o_tile)
            b_h = tl.dot(b_ds, tl.trans(b_u), b_h, input_precision=PREC)
    b_c = tl.sum(tl.where(o_c[:, None] == o_c[None, :], b_c, 0.0), axis=1)
    return b_q, b_f, b_h, b_c


@triton.jit
def _near(
    b_dq,
    b_f,
    b_h,
    b_dg,
    b_q,
    b_e,
    b_k,
    b_l,
    b_mid,
    b_mid1,
    b_end,
    b_end1,
    b_before,
    b_after,
    p_p,
    p_t,
    p_ones,
    C: tl.constexpr,
    BK: tl.constexpr,
    PART: tl.constexpr,
    IO: tl.constexpr,
    PREC: tl.constexpr,
    SUM_PREC: tl.constexpr,
):
    """Decays and pairs of steps where the middle rows of blocks of 16 can be anchors: completes dq,
    f and h [BK, C], but for a row's own column, and returns what a gate decays of the rows of its
    block if it comes no later; the rest is added to dg.

    All is in units of the middle of each block, rounded to a power of two: so no gate changes what
    rounding does to the steps before it. Weaker decays than 2^-26 may come out as zeros."""
    NB: tl.constexpr = C // 16
    o_i = tl.arange(0, C)
    o_n = o_i // 16
    m_late = (o_n == 1)[None, :]
    o_low = o_i[:, None] * C + o_i[None, :]
    o_up = o_i[None, :] * C + o_i[:, None]
    p_m, p_x, p_mt, p_xt = p_p + o_low, p_t + o_low, p_p + o_up, p_t + o_up
    p_ml, p_xl, p_mlt, p_xlt = p_m + C * C, p_x + C * C, p_mt + C * C, p_xt + C * C
    p_ones += o_low
    m_low = o_i[:, None] > o_i[None, :]
    m_up = o_i[:, None] < o_i[None, :]
    # fp16 cannot hold the columns.
    WIDE: tl.constexpr = tl.float32 if tl.float16 == IO else IO
    WIDE_PREC: tl.constexpr = "tf32" if tl.float16 == IO else PREC
    b_mid = tl.floor(b_mid)
    b_mid1 = tl.floor(b_mid1)
    b_s = b_mid[:, None]
    b_u = tl.exp2(b_mid)[:, None]
    b_v = tl.exp2(b_end - b_mid)[:, None]
    if NB == 2:
        b_s = tl.where(m_late, b_mid1[:, None], b_s)
        # Between the middles: 2^-100 at least, then what rows may lose.
        b_w = tl.exp2(b_end - b_mid)[:, None]
        b_z = tl.exp2(b_mid1)[:, None]
        b_u = tl.where(m_late, b_z * b_before[:, None], b_u)
        b_v = tl.where(m_late, tl.exp2(b_end1 - b_mid1)[:, None], b_v * b_after[:, None])
    if tl.float32 == IO:
        b_x, b_y = anchored(b_l, b_s)
    else:
        b_x = (b_l + GRID) - (b_s + GRID)
        b_y = tl.exp2(-b_x)
        b_x = tl.exp2(b_x)
    b_qr = b_q * b_x
    b_er = b_e * b_x
    b_kc = b_k * b_y
    b_dq *= b_u
    b_f *= b_u
    b_h *= b_v
    b_m = tl.load(p_m).to(WIDE)
    b_a = tl.load(p_x).to(WIDE)
    b_mt = tl.load(p_mt).to(WIDE)
    b_at = tl.load(p_xt).to(WIDE)
    if PART:
        b_ml, b_al, b_mlt, b_alt = _tiles(p_ml, p_xl, p_mlt, p_xlt, m_low, m_up, WIDE)
    b_qw, b_ew, b_kw = b_qr, b_er, b_kc
    b_s = b_h
    if NB == 2:
        b_dg += _block_sums(b_dq, b_f, b_h, b_qr, b_er, b_kc, m_late)
        # Columns of the first block and rows of the second: with each other, where what lies
        # between the middles is missing, and inside their blocks.
        b_qw = tl.where(m_late, b_qr, 0.0)
        b_ew = tl.where(m_late, b_er, 0.0)
        b_kw = tl.where(m_late, 0.0, b_kc)
        b_none = tl.zeros([BK, C], tl.float32)
        b_sq, b_sf, b_sh = _pairs(
            b_none, b_none, b_none, b_m, b_a, b_mt, b_at, b_qw, b_ew, b_kw, WIDE_PREC
        )
        if PART:
            b_sq, b_sf, b_sh = _pairs(
                b_sq, b_sf, b_sh, b_ml, b_al, b_mlt, b_alt, b_qw, b_ew, b_kw, WIDE_PREC
            )
        b_dq += tl.where(m_late, b_z * (b_w * b_sq), b_sq)
        b_f += tl.where(m_late, b_z * (b_w * b_sf), b_sf)
        b_s = tl.where(m_late, b_h, b_h + b_w * (b_z * b_sh))
        b_h = tl.where(m_late, b_h + b_sh, b_s)
        # Then the others.
        b_qw = tl.where(m_late, 0.0, b_qr)
        b_ew = tl.where(m_late, 0.0, b_er)
        b_kw = tl.where(m_late, b_kc, 0.0)
    b_dq, b_f, b_h = _pairs(b_dq, b_f, b_h, b_m, b_a, b_mt, b_at, b_qw, b_ew, b_kw, WIDE_PREC)
    if PART:
        b_dq, b_f, b_h = _pairs(
            b_dq, b_f, b_h, b_ml, b_al, b_mlt, b_alt, b_qw, b_ew, b_kw, WIDE_PREC
        )
    b_rows = b_qr * b_dq - b_er * b_f - b_kc * (b_h - b_s)
    b_dg = _step_sums(b_kc * b_s, tl.load(p_ones), b_dg, SUM_PREC)
    b_dq *= b_x
    b_f *= b_x
    b_h *= b_y
    return b_dq, b_f, b_h, b_dg, b_rows


@triton.jit
def _far(
    b_dq,
    b_f,
    b_h,
    b_dg,
    b_q,
    b_e,
    b_k,
    b_l,
    b_end,
    b_end1,
    b_before,
    b_after,
    p_p,
    p_t,
    p_lk,
    p_ones,
    C: tl.constexpr,
    BK: tl.constexpr,
    K: tl.constexpr,
    PART: tl.constexpr,
    IO: tl.constexpr,
    PREC: tl.constexpr,
    SUM_PREC: tl.constexpr,
):
    """As `_near`, for any gates: levels of pairs of blocks, down to single steps."""
    NB: tl.constexpr = C // 16
    o_i = tl.arange(0, C)
    o_n = o_i // 16
    m_late = (o_n == 1)[None, :]
    o_low = o_i[:, None] * C + o_i[None, :]
    o_up = o_i[None, :] * C + o_i[:, None]
    p_m, p_x, p_mt, p_xt = p_p + o_low, p_t + o_low, p_p + o_up, p_t + o_up
    p_ml, p_xl, p_mlt, p_xlt = p_m + C * C, p_x + C * C, p_mt + C * C, p_xt + C * C
    p_ones += o_low
    # From the start of a block, and to its end.
    b_x = tl.exp2(b_l)
    b_y = b_end[:, None]
    if NB == 2:
        b_y = tl.where(m_late, b_end1[:, None], b_y)
    b_y = tl.exp2(b_y - b_l)
    b_qr = b_q * b_x
    b_er = b_e * b_x
    b_kc = b_k * b_y
    if NB == 2:
        b_dq = tl.where(m_late, b_dq * b_before[:, None], b_dq)
        b_f = tl.where(m_late, b_f * b_before[:, None], b_f)
        b_h = tl.where(m_late, b_h, b_h * b_after[:, None])
        b_dg += _block_sums(b_dq, b_f, b_h, b_qr, b_er, b_kc, m_late)
        # Rows of the second block with columns of the first.
        m_tile = o_n[:, None] > o_n[None, :]
        m_turn = o_n[:, None] < o_n[None, :]
        b_qw = tl.where(m_late, b_qr, 0.0)
        b_ew = tl.where(m_late, b_er, 0.0)
        b_kw = tl.where(m_late, 0.0, b_kc)
        b_m, b_a, b_mt, b_at = _tiles(p_m, p_x, p_mt, p_xt, m_tile, m_turn, IO)
        b_dq, b_f, b_h = _pairs(b_dq, b_f, b_h, b_m, b_a, b_mt, b_at, b_qw, b_ew, b_kw, PREC)
        if PART:
            b_m, b_a, b_mt, b_at = _tiles(p_ml, p_xl, p_mlt, p_xlt, m_tile, m_turn, IO)
            b_dq, b_f, b_h = _pairs(b_dq, b_f, b_h, b_m, b_a, b_mt, b_at, b_qw, b_ew, b_kw, PREC)
    b_rows = b_qr * b_dq - b_er * b_f
    b_dg = _step_sums(b_kc * b_h, tl.load(p_ones), b_dg, SUM_PREC)
    b_dq *= b_x
    b_f *= b_x
    b_h *= b_y
    b_none = tl.zeros([BK, C], tl.float32)
    for i_b in tl.range(0, 4, num_stages=1):
        size = 8 >> i_b
        b_s = tl.load(p_lk + ((o_i // (2 * size) * 2 + 1) * size)[None, :] * K)
        b_s = tl.where((o_i // size % 2 == 1)[None, :], b_l - b_s, b_s - b_l)
        b_s = tl.exp2(b_s)
        b_qr = b_q * b_s
        b_er = b_e * b_s
        b_kc = b_k * b_s
        m_tile = _paired(o_i[:, None], o_i[None, :], size)
        m_turn = _paired(o_i[None, :], o_i[:, None], size)
        b_m, b_a, b_mt, b_at = _tiles(p_m, p_x, p_mt, p_xt, m_tile, m_turn, IO)
        b_sq, b_sf, b_sh = _pairs(
            b_none, b_none, b_none, b_m, b_a, b_mt, b_at, b_qr, b_er, b_kc, PREC
        )
        if PART:
            b_m, b_a, b_mt, b_at = _tiles(p_ml, p_xl, p_mlt, p_xlt, m_tile, m_turn, IO)
            b_sq, b_sf, b_sh = _pairs(
                b_sq, b_sf, b_sh, b_m, b_a, b_mt, b_at, b_qr, b_er, b_kc, PREC
            )
        b_dq += b_s * b_sq
        b_f += b_s * b_sf
        b_h += b_s * b_sh
        b_w = _level_sum(o_i[:, None], o_i[None, :], size).to(p_ones.dtype.element_ty)
        b_dg = _step_sums(b_qr * b_sq - b_er * b_sf + b_kc * b_sh, b_w, b_dg, SUM_PREC)
    return b_dq, b_f, b_h, b_dg, b_rows


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
    p_ones,
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
    """M and X of a chunk over the tiles of P and W; M's diagonal and Y . v beside them; dv, dw.

    One program leaves zeros and ones [2, C, C] by which `gradient_key_kernel` adds up steps within
    blocks of 16: columns before t, and rows from t on."""
    IO: tl.constexpr = p_v.dtype.element_ty
    pid = tl.program_id(0).to(tl.int64)
    i_h = pid % HO
    o_i = tl.arange(0, C)
    if pid == 0:
        o_x = o_i[:, None]
        o_t = o_i[None, :]
        m_block = o_x // 16 == o_t // 16
        tl.store(p_ones + o_x * C + o_t, tl.where(m_block & (o_x < o_t), 1.0, 0.0))
        tl.store(p_ones + (C + o_x) * C + o_t, tl.where(m_block & (o_x >= o_t), 1.0, 0.0))
    _, i_c, begin, length = locate(pid // HO, p_cu, s_cu, N, T, C, 1)
    if i_c < 0:
        return
    PARTS: tl.constexpr = 2 if SPLIT else 1
    if SPLIT == 2:  # noqa: SIM102
        if (inverse_growth(p_t, pid, C, SPLIT) > GROWTH).to(tl.int32) != PART:
            return
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
    b_m, b_x, b_yv, _, _, _ = chunk_products(
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
    p_ones,
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
    # Sums over steps by products with zeros and ones.
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
    o_k = i_k * BK + tl.arange(0, BK)
    m_t = o_i < tl.minimum(length - i_c * C, C).to(tl.int32)
    # Everything counts from the chunk's first token: row offsets fit 32 bits.
    token = begin + i_c * C
    p_k += token * s_kt + (i_h // (HO // HK)) * s_kh
    p_q += token * s_qt + (i_h // (HO // H)) * s_qh
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

    if GUARD:
        m_act, m_flat, b_mean, b_eta = guard_rows(
            p_k, p_g, p_beta, p_bias, s_ki, o_i * s_gt, s_bi, b_rk, m_t, amp, lower,
            K, BK, GATE, SIGMOID, DOUBLE, IO,
        )  # fmt: skip

    # Tiles [BK, C]: channels are rows, so that sums over steps and products of pairs take what
    # was accumulated as their left operand, in registers. Loads first: they wait for each other.
    m_at = m_t[None, :] & (o_k >= 0)[:, None]
    o_c = o_k[:, None]
    p_l += tile * ((C + 4 * NB) * K)
    p_lk = p_l + o_c
    b_l = tl.load(p_lk + o_i[None, :] * K)
    b_k = tl.load(p_k + s_ki[None, :] + o_c, mask=m_at, other=0.0)
    b_q = tl.load(p_q + s_qi[None, :] + o_c, mask=m_at, other=0.0)
    b_first = tl.load(p_l + o_k)
    b_mid = tl.load(p_l + MIDDLE * K + o_k)
    b_end = tl.load(p_l + 15 * K + o_k)
    b_mid1, b_end1, b_before, b_after = b_mid, b_end, b_end, b_end
    if NB == 2:
        b_first1 = tl.load(p_l + 16 * K + o_k)
        b_mid1 = tl.load(p_l + (16 + MIDDLE) * K + o_k)
        b_end1 = tl.load(p_l + 31 * K + o_k)
        b_before = tl.load(p_l + (C + 1) * K + o_k)
        b_after = tl.load(p_l + (C + NB) * K + o_k)
    if ERASE_KEY:
        b_b = load_beta(p_beta, s_bi[None, :] + o_c, m_at, SIGMOID, DOUBLE)
        if GUARD:
            b_b = tl.trans(guarded(tl.trans(b_b), m_act, m_flat, b_mean, b_eta, IO))
    else:
        b_b = load_beta(p_beta, s_bi, m_t, SIGMOID, DOUBLE)[None, :]
    p_p += tile * (PARTS * C * C)
    p_t += tile * (PARTS * C * C)
    b_dq, b_f, b_h, b_c = _state_rows(
        p_s + tile * (V * K), p_ds + tile * (V * K), p_u + tile * (PARTS * C * V),
        p_y + tile * (PARTS * C * V), p_do, o_i * s_ot, m_t, o_k, C, K, V, BK, BV, PART, PREC,
    )  # fmt: skip
    b_k = _settled(b_k.to(tl.float32)) * b_rk[None, :]
    b_q = _settled(b_q.to(tl.float32)) * b_rq[None, :]
    b_l = _settled(b_l)
    if ERASE_KEY:
        b_b = _settled(b_b)
    b_e = b_k * b_b

    # Gates <= 0: the ends of a block are farthest from its middle. Linear gates, whose dg is
    # divided by the decay and must not be a difference, are never near.
    far = True
    if GATE != "linear":
        b_far = tl.maximum(b_first - b_mid, b_mid - b_end)
        if NB == 2:
            b_far = tl.maximum(b_far, tl.maximum(b_first1 - b_mid1, b_mid1 - b_end1))
        far = tl.max(b_far, axis=0) >= REACH
    b_all = b_end
    if NB == 2:
        b_all += b_end1
    b_dg = tl.zeros([BK, C], tl.float32) + (tl.exp2(b_all) * b_c)[:, None]
    if far:
        b_dq, b_f, b_h, b_dg, b_rows = _far(
            b_dq, b_f, b_h, b_dg, b_q, b_e, b_k, b_l, b_end, b_end1, b_before, b_after, p_p, p_t,
            p_lk, p_ones, C, BK, K, PART, IO, PREC, SUM_PREC,
        )  # fmt: skip
    else:
        b_dq, b_f, b_h, b_dg, b_rows = _near(
            b_dq, b_f, b_h, b_dg, b_q, b_e, b_k, b_l, b_mid, b_mid1, b_end, b_end1, b_before,
            b_after, p_p, p_t, p_ones, C, BK, PART, IO, PREC, SUM_PREC,
        )  # fmt: skip
    b_self = tl.load(p_sums + tile * (2 * C) + o_i)[None, :]
    b_w = tl.load(p_ones + (C + o_i)[:, None] * C + o_i[None, :])
    b_dg = _step_sums(b_rows, b_w, b_dg, SUM_PREC)
    # A row and its own column: nothing decays between them.
    b_dq += b_self * b_k
    b_h += b_self * b_q

    # Chain rules and stores.
    b_raw = tl.load(p_g + (o_i * s_gt)[None, :] + o_c, mask=m_at, other=0.0).to(tl.float32)
    if p_bias is not None:
        b_raw += tl.load(p_bias + o_k).to(tl.float32)[:, None]
    if p_dbias is not None or p_dalog is not None:
        b_dg = tl.where(m_at, b_dg, 0.0)
    b_dx, b_da = gate_gradient(b_dg, b_raw, amp, lower, GATE)
    p_dg += token * s_dgt + i_h * s_dgh + (o_i * s_dgt)[None, :] + o_c
    tl.store(p_dg, b_dx.to(p_dg.dtype.element_ty), mask=m_at)
    if p_dbias is not None:
        tl.store(p_dbias, tl.sum(b_dx, axis=1))
    if p_dalog is not None:
        tl.store(p_dalog, tl.sum(b_da))
    p_dq += token * s_dqt + i_h * s_dqh + (o_i * s_dqt)[None, :] + o_c
    tl.store(p_dq, (scale * b_dq).to(p_dq.dtype.element_ty), mask=m_at)
    b_h -= b_b * b_f
    p_dk += token * s_dkt + i_h * s_dkh + (o_i * s_dkt)[None, :] + o_c
    tl.store(p_dk, b_h.to(p_dk.dtype.element_ty), mask=m_at)
    if ERASE_KEY:
        b_raw = tl.load(p_beta + s_bi[None, :] + o_c, mask=m_at, other=0.0).to(tl.float32)
        b_db = beta_gradient(-b_k * b_f, b_raw, SIGMOID, DOUBLE)
        p_dbeta += token * s_dbt + i_h * s_dbh + (o_i * s_dbt)[None, :] + o_c
        tl.store(p_dbeta, b_db.to(p_dbeta.dtype.element_ty), mask=m_at)
    else:
        tl.store(p_kf + (tile * NK + i_k) * C + o_i, tl.sum(b_k * b_f, axis=0))


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
