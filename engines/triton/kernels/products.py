"""What the gradient kernels share: products of a chunk's tiles over V, and chain rules.

See `gradient` for the algorithm and its names.
"""

import triton
import triton.language as tl

from lagraph.engines.triton.kernels.gate import sigmoid, softplus
from lagraph.engines.triton.kernels.reverse import load_dout

__all__ = [
    "beta_gradient",
    "chunk_products",
    "gate_gradient",
    "state_products",
    "step_gradient",
    "z_gradient",
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
