"""Gradients of a chunk without delta rule (Mamba-2): one program per (chunk, HP heads of a group).

With the notation of `gradient`: S (entering state) and dS (gradient of the leaving one) [V, K] of
every head, in io dtype; G the cumulative log2 gates, D[i, j] = 2^(G_i - G_j), c = 2^(G_C), w the
step dt. q and k belong to the group, so that its heads share q k^T, and the sums over them below
stay on chip:

    M = dO v^T   j <= i
    dq_i = sum_heads 2^G_i (S^T dO)_i           + sum_j W_ij k_j      W = sum_heads M D w_j
    dk_j = sum_heads w_j c / 2^G_j (dS^T v)_j   + sum_i W_ij q_i
    dw_j = k_j . (c / 2^G_j (dS^T v)_j + sum_i M_ij D_ij q_i)
    dg_t = c sum dS S + sum_(i >= t) 2^G_i q_i S^T dO_i + sum_(j < t) w_j k_j c / 2^G_j (dS^T v)_j
         + sum_(i >= t > j) M_ij D_ij w_j q_i k_j

dv is left to `reverse`. Where a group is larger than HP, `reduce` adds up what its programs write.

A chunk's rows are one part of at most 32, or two: an early and a late one, so that products are of
32 rows, too small for wgmma.

What a head leaves to be summed over steps goes through memory: `sums` [heads, V-blocks, 7 C + 2 BV]
has 2^G q (S^T dO) and c / 2^G k (dS^T v); M D q k by column, of early rows and of late ones;
the last line of dg where both steps are of one part, and M D w q k by late row over early columns;
dO v by step; dS S and dO v by value channel. The chain rules follow at the end, once for all heads
of a program.

Tiles: [32, K] fp32 for dq and dk of either part, over all heads; S, dS [BV, K], v and dO of a head
and V-block, staged by the software pipeline.
"""

import triton
import triton.language as tl

from lagraph.engines.triton.kernels.gate import sigmoid, softplus, step_size
from lagraph.engines.triton.kernels.index import ROWS, locate
from lagraph.engines.triton.kernels.reverse import load_dout

__all__ = ["SUMS", "gradient_ssd_kernel"]

# Vectors [C] that a head leaves to be summed over steps.
SUMS = tl.constexpr(7)


@triton.jit
def _through_states(b_do, b_v, b_s, b_ds, b_q, b_k, b_up, b_down, PREC: tl.constexpr):
    """One part's 2^G S^T dO and c / 2^G dS^T v [R, K], and their products with q and k [R, 2]."""
    b_dq = tl.dot(b_do, b_s, input_precision=PREC) * b_up[:, None]
    b_dk = tl.dot(b_v, b_ds, input_precision=PREC) * b_down[:, None]
    b_both = tl.join(b_dq * b_q.to(tl.float32), b_dk * b_k.to(tl.float32))
    return b_dq, b_dk, tl.sum(b_both, axis=1)


@triton.jit
def _pairs(
    b_do, b_v, b_qk, b_gi, b_gj, b_w, AT: tl.constexpr, PREC: tl.constexpr, SUM: tl.constexpr
):
    """Of rows from AT on [R] and all columns [C]: M D w; M D q k summed over rows; the last line of
    dg where both steps are of this part, and M D w q k summed over the columns before it."""
    R: tl.constexpr = b_do.shape[0]
    C: tl.constexpr = b_v.shape[0]
    o_i = tl.arange(0, R)
    o_j = tl.arange(0, C)
    m_up = o_i[:, None] + AT >= o_j[None, :]
    b_d = tl.exp2(tl.where(m_up, b_gi[:, None] - b_gj[None, :], -float("inf")))
    b_m = tl.dot(b_do, tl.trans(b_v), input_precision=PREC) * b_d
    b_a = b_m * b_qk
    b_cols = tl.sum(b_a, axis=0)
    b_m *= b_w[None, :]
    b_a *= b_w[None, :]
    b_rows = tl.sum(tl.where((o_j < AT)[None, :], b_a, 0.0), axis=1)
    # Without differences: for each column its steps, then for each step its rows.
    m_before = (o_j[:, None] < o_i[None, :] + AT) & (o_j[:, None] >= AT)
    b_n = tl.dot(b_a, tl.where(m_before, 1.0, 0.0), input_precision=SUM)
    b_in = tl.sum(tl.where(o_i[:, None] >= o_i[None, :], b_n, 0.0), axis=0)
    return b_m, b_cols, b_in, b_rows


@triton.jit
def _gate_out(p_do, p_z, p_pre, p_dz, o_do, o_z, o_pre, o_dz, m_t):
    """The gradient of z, from that of the outputs and the outputs before z."""
    b_z = tl.load(p_z + o_z, mask=m_t, other=0.0).to(tl.float32)
    b_g = tl.load(p_do + o_do, mask=m_t, other=0.0).to(tl.float32)
    b_o = tl.load(p_pre + o_pre, mask=m_t, other=0.0).to(tl.float32)
    b_g *= b_o * sigmoid(b_z) * (1.0 + b_z * sigmoid(-b_z))
    tl.store(p_dz + o_dz, b_g.to(p_dz.dtype.element_ty), mask=m_t)


@triton.jit(do_not_specialize=["N", "T"])
def gradient_ssd_kernel(
    p_q,
    p_k,
    p_v,
    p_g,
    p_bias,
    p_a,
    p_z,
    p_pre,
    p_do,
    p_rows,
    p_p,
    p_s,
    p_ds,
    p_sums,
    p_dq,
    p_dk,
    p_dg,
    p_dz,
    p_dbias,
    p_da,
    p_dd,
    p_cu,
    N,
    T,
    dt_min,
    dt_max,
    s_cu,
    s_qt,
    s_qh,
    s_kt,
    s_kh,
    s_vt,
    s_vh,
    s_gt,
    s_gh,
    s_zt,
    s_zh,
    s_pt,
    s_ph,
    s_ot,
    s_oh,
    s_dqt,
    s_dqh,
    s_dkt,
    s_dkh,
    s_dgt,
    s_dgh,
    s_dzt,
    s_dzh,
    H: tl.constexpr,
    HO: tl.constexpr,
    HP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BV: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    D_CHANNEL: tl.constexpr,
    PREC: tl.constexpr,
):
    IO: tl.constexpr = p_k.dtype.element_ty
    # Sums by a product with zeros and ones.
    SUM_PREC: tl.constexpr = PREC if tl.float32 == IO else "tf32"
    R: tl.constexpr = 32 if C == 64 else C
    LATE: tl.constexpr = C > R
    NV: tl.constexpr = V // BV
    NP: tl.constexpr = HO // HP
    SUM: tl.constexpr = SUMS * C + 2 * BV
    pid = tl.program_id(0).to(tl.int64)
    i_p = pid % NP
    i_h0 = i_p * HP
    slot = pid // NP
    _, i_c, begin, length = locate(slot, p_cu, s_cu, N, T, C, 1)
    o_g = tl.arange(0, HP)
    o_v = tl.arange(0, BV)
    tile = slot * HO + i_h0  # of the first head
    if i_c < 0:
        if p_dbias is not None:
            tl.store(p_dbias + tile + o_g, tl.zeros([HP], tl.float32))
        if p_da is not None:
            tl.store(p_da + tile + o_g, tl.zeros([HP], tl.float32))
        if p_dd is not None:
            if D_CHANNEL:
                for i_v in tl.static_range(NV):
                    p_tile = p_dd + (tile + o_g)[:, None] * V + (i_v * BV + o_v)[None, :]
                    tl.store(p_tile, tl.zeros([HP, BV], tl.float32))
            else:
                tl.store(p_dd + tile + o_g, tl.zeros([HP], tl.float32))
        return
    # Everything below counts from the chunk's first token: row offsets fit 32 bits.
    o_i = tl.arange(0, R)
    o_k = tl.arange(0, K)
    token = begin + i_c * C
    left = tl.minimum(length - i_c * C, C).to(tl.int32)
    m_0 = (o_i < left)[:, None]
    p_q += token * s_qt + (i_p // (NP // H)) * s_qh
    p_k += token * s_kt + (i_p // (NP // H)) * s_kh
    o_q0 = (o_i * s_qt)[:, None] + o_k[None, :]
    o_k0 = (o_i * s_kt)[:, None] + o_k[None, :]
    b_q0 = tl.load(p_q + o_q0, mask=m_0, other=0.0)
    b_k0 = tl.load(p_k + o_k0, mask=m_0, other=0.0)
    o_c = tl.arange(0, C)
    m_c = (o_c < left)[:, None]
    b_k = tl.load(p_k + (o_c * s_kt)[:, None] + o_k[None, :], mask=m_c, other=0.0)
    b_qk0 = tl.dot(b_q0, tl.trans(b_k), input_precision=PREC)
    b_dq0 = tl.zeros([R, K], tl.float32)
    b_dk0 = tl.zeros([R, K], tl.float32)
    b_ws0 = tl.zeros([R, C], tl.float32)
    if LATE:
        m_1 = (o_i + R < left)[:, None]
        b_q1 = tl.load(p_q + R * s_qt + o_q0, mask=m_1, other=0.0)
        b_k1 = tl.load(p_k + R * s_kt + o_k0, mask=m_1, other=0.0)
        b_qk1 = tl.dot(b_q1, tl.trans(b_k), input_precision=PREC)
        b_dq1 = tl.zeros([R, K], tl.float32)
        b_dk1 = tl.zeros([R, K], tl.float32)
        b_ws1 = tl.zeros([R, C], tl.float32)

    p_v += token * s_vt + i_h0 * s_vh
    p_do += token * s_ot + i_h0 * s_oh
    if p_z is not None:
        p_z += token * s_zt + i_h0 * s_zh
        p_pre += token * s_pt + i_h0 * s_ph
        p_dz += token * s_dzt + i_h0 * s_dzh
    o_v0 = (o_i * s_vt)[:, None] + o_v[None, :]
    o_vc = (o_c * s_vt)[:, None] + o_v[None, :]
    o_do0 = (o_i * s_ot)[:, None] + o_v[None, :]
    o_z0 = (o_i * s_zt)[:, None] + o_v[None, :]
    o_p0 = (o_i * s_pt)[:, None] + o_v[None, :]
    o_dz0 = (o_i * s_dzt)[:, None] + o_v[None, :]
    p_s += tile * (V * K) + o_v[:, None] * K + o_k[None, :]
    p_ds += tile * (V * K) + o_v[:, None] * K + o_k[None, :]
    p_row = p_rows + tile * (ROWS * C)
    o_two = 2 * o_i[:, None] + tl.arange(0, 2)[None, :]
    p_sums += tile * (NV * SUM)
    for i_x in range(HP * NV):
        i_g = i_x // NV
        i_v = i_x % NV * BV
        # Tiles are loaded where they are needed: all at once would take all registers.
        p_rg = p_row + i_g * (ROWS * C)
        p_out = p_sums + i_x * SUM
        p_vg = p_v + i_g * s_vh + i_v
        p_og = p_do + i_g * s_oh + i_v
        p_zg = p_z + i_g * s_zh + i_v if p_z is not None else p_z
        b_end = tl.load(p_rg + 4 * C - 1)
        b_g = tl.load(p_rg + 3 * C + o_c)
        b_w = tl.load(p_rg + 4 * C + o_c)
        b_gi = tl.load(p_rg + 3 * C + o_i)
        b_wi = tl.load(p_rg + 4 * C + o_i)
        b_v = tl.load(p_vg + o_vc, mask=m_c, other=0.0)  # [C, BV]
        b_do = load_dout(p_og, p_zg, o_do0, o_z0, m_0)  # [R, BV]
        b_m, b_cols, b_in, _none = _pairs(b_do, b_v, b_qk0, b_gi, b_g, b_w, 0, PREC, SUM_PREC)
        b_ws0 += b_m
        tl.store(p_out + 2 * C + o_c, b_cols)
        tl.store(p_out + 4 * C + o_i, b_in)
        o_state = i_g * (V * K) + i_v * K
        b_s = tl.load(p_s + o_state)  # [BV, K]
        b_ds = tl.load(p_ds + o_state)  # [BV, K]
        b_x = b_s.to(tl.float32) * b_ds.to(tl.float32)
        tl.store(p_out + SUMS * C + o_v, tl.sum(b_x, axis=1))
        b_vi = tl.load(p_vg + o_v0, mask=m_0, other=0.0)  # [R, BV]
        if p_dd is not None:
            b_dd = tl.sum(b_do.to(tl.float32) * b_vi.to(tl.float32), axis=0 if D_CHANNEL else 1)
        b_x, b_y, b_qk = _through_states(
            b_do, b_vi, b_s, b_ds, b_q0, b_k0, tl.exp2(b_gi), tl.exp2(b_end - b_gi), PREC
        )
        b_dq0 += b_x
        b_dk0 += b_y * b_wi[:, None]
        tl.store(p_out + o_two, b_qk)
        if LATE:
            b_gi = tl.load(p_rg + (3 * C + R) + o_i)
            b_wi = tl.load(p_rg + (4 * C + R) + o_i)
            b_do = load_dout(p_og + R * s_ot, p_zg + R * s_zt if p_z is not None else p_z,
                             o_do0, o_z0, m_1)  # fmt: skip
            b_m, b_cols, b_in, b_rows = _pairs(b_do, b_v, b_qk1, b_gi, b_g, b_w, R, PREC, SUM_PREC)
            b_ws1 += b_m
            tl.store(p_out + 3 * C + o_c, b_cols)
            tl.store(p_out + (4 * C + R) + o_i, b_in)
            tl.store(p_out + (5 * C + R) + o_i, b_rows)
            b_vi = tl.load(p_vg + R * s_vt + o_v0, mask=m_1, other=0.0)
            if p_dd is not None:
                b_x = b_do.to(tl.float32) * b_vi.to(tl.float32)
                b_dd += tl.sum(b_x, axis=0 if D_CHANNEL else 1)
            b_x, b_y, b_qk = _through_states(
                b_do, b_vi, b_s, b_ds, b_q1, b_k1, tl.exp2(b_gi), tl.exp2(b_end - b_gi), PREC
            )
            b_dq1 += b_x
            b_dk1 += b_y * b_wi[:, None]
            tl.store(p_out + 2 * R + o_two, b_qk)
        if p_dd is not None:
            tl.store(p_out + (SUMS * C + BV) + o_v if D_CHANNEL else p_out + 6 * C + o_i, b_dd)
        if p_z is not None:
            p_pg = p_pre + i_g * s_ph + i_v
            p_dzg = p_dz + i_g * s_dzh + i_v
            _gate_out(p_og, p_zg, p_pg, p_dzg, o_do0, o_z0, o_p0, o_dz0, m_0)
            if LATE:
                _gate_out(
                    p_og + R * s_ot, p_zg + R * s_zt, p_pg + R * s_pt, p_dzg + R * s_dzt,
                    o_do0, o_z0, o_p0, o_dz0, m_1,
                )  # fmt: skip

    # W becomes an operand, also transposed, by way of memory: no accumulator should be transposed.
    # The tile of P of the first head is free by now.
    o_w = o_i[:, None] * C + o_i[None, :]
    p_w = p_p + tile * (C * C) + o_w
    p_wc = p_p + tile * (C * C) + o_i[:, None] * C + o_c[None, :]
    tl.store(p_wc, b_ws0.to(IO))
    if LATE:
        tl.store(p_wc + R * C, b_ws1.to(IO))
    tl.debug_barrier()
    b_k0 = tl.load(p_k + o_k0, mask=m_0, other=0.0)
    b_q0 = tl.load(p_q + o_q0, mask=m_0, other=0.0)
    b_w = tl.load(p_w)
    b_dq0 = tl.dot(b_w, b_k0, b_dq0, input_precision=PREC)
    b_dk0 = tl.dot(tl.trans(b_w), b_q0, b_dk0, input_precision=PREC)
    p_dq += token * s_dqt + i_p * s_dqh
    p_dk += token * s_dkt + i_p * s_dkh
    o_dq = (o_i * s_dqt)[:, None] + o_k[None, :]
    o_dk = (o_i * s_dkt)[:, None] + o_k[None, :]
    OUT: tl.constexpr = p_dq.dtype.element_ty
    if LATE:
        b_k1 = tl.load(p_k + R * s_kt + o_k0, mask=m_1, other=0.0)
        b_q1 = tl.load(p_q + R * s_qt + o_q0, mask=m_1, other=0.0)
        b_w = tl.load(p_w + R * C)
        b_dq1 = tl.dot(b_w, b_k0, b_dq1, input_precision=PREC)
        b_dk0 = tl.dot(tl.trans(b_w), b_q1, b_dk0, input_precision=PREC)
        b_w = tl.load(p_w + (R * C + R))
        b_dq1 = tl.dot(b_w, b_k1, b_dq1, input_precision=PREC)
        b_dk1 = tl.dot(tl.trans(b_w), b_q1, b_dk1, input_precision=PREC)
        tl.store(p_dq + R * s_dqt + o_dq, b_dq1.to(OUT), mask=m_1)
        tl.store(p_dk + R * s_dkt + o_dk, b_dk1.to(OUT), mask=m_1)
    tl.store(p_dq + o_dq, b_dq0.to(OUT), mask=m_0)
    tl.store(p_dk + o_dk, b_dk0.to(OUT), mask=m_0)

    # Sums over the chunk's steps, then chain rules: [HP, C].
    o_c = o_c[None, :]
    o_g = o_g[:, None]
    p_w = p_row + o_g * (ROWS * C) + 4 * C + o_c
    m_c = (o_c > 0) & (o_g >= 0)
    b_w = tl.load(p_w)
    b_before = tl.load(p_w - 1, mask=m_c, other=0.0)
    b_dg = tl.zeros([HP, C], tl.float32)
    b_dw = tl.zeros([HP, C], tl.float32)
    b_dd = tl.zeros([HP], tl.float32)
    b_c = tl.exp2(tl.load(p_w - o_c - 1))
    for i_v in tl.static_range(NV):
        p_in = p_sums + (o_g * NV + i_v) * SUM
        p_c = p_in + o_c
        p_two = p_c + o_c
        b_dg += tl.cumsum(tl.load(p_two), axis=1, reverse=True)
        b_dg += tl.cumsum(b_before * tl.load(p_two - 1, mask=m_c, other=0.0), axis=1)
        b_dg += tl.load(p_c + 4 * C)
        b_dw += tl.load(p_two + 1) + tl.load(p_c + 2 * C)
        if LATE:
            b_dw += tl.load(p_c + 3 * C)
            b_x = tl.load(p_c + 5 * C, mask=(o_c >= R) & (o_g >= 0), other=0.0)
            b_x = tl.cumsum(b_x, axis=1, reverse=True)
            b_y = tl.load(p_c + (3 * C - 1), mask=m_c & (o_c < R), other=0.0)
            b_y = tl.cumsum(b_before * b_y, axis=1)
            b_dg += tl.where(o_c >= R, b_x, b_y)
        p_in += SUMS * C + o_v[None, :]
        b_dg += b_c * tl.sum(tl.load(p_in), axis=1)[:, None]
        if p_dd is not None:
            if D_CHANNEL:
                p_tile = p_dd + (tile + o_g) * V + (i_v * BV + o_v)[None, :]
                tl.store(p_tile, tl.load(p_in + BV))
            else:
                p_tile = p_sums + (o_g * NV + i_v) * SUM + 6 * C + o_i[None, :]
                b_dd += tl.sum(tl.load(p_tile), axis=1)
    if p_dd is not None:  # noqa: SIM102 (constants that fold one by one)
        if not D_CHANNEL:
            tl.store(p_dd + tile + tl.arange(0, HP), b_dd)
    m_t = (o_c < left) & (o_g >= 0)
    b_dg = tl.where(m_t, b_dg, 0.0)
    b_g = tl.load(p_g + (token + o_c) * s_gt + (i_h0 + o_g) * s_gh, mask=m_t, other=0.0)
    b_g = b_g.to(tl.float32)
    if p_bias is not None:
        b_g += tl.load(p_bias + i_h0 + o_g).to(tl.float32)
    if p_da is not None:
        b_x = b_dg * step_size(b_g, dt_min, dt_max, SOFTPLUS)
        tl.store(p_da + tile + tl.arange(0, HP), tl.sum(b_x, axis=1))
    b_dx = tl.load(p_a + i_h0 + o_g).to(tl.float32) * b_dg + b_dw
    b_raw = b_g
    if SOFTPLUS:
        b_raw = softplus(b_g)
        b_dx *= sigmoid(b_g)
    b_dx = tl.where(m_t & (b_raw >= dt_min) & (b_raw <= dt_max), b_dx, 0.0)
    if p_dbias is not None:
        tl.store(p_dbias + tile + tl.arange(0, HP), tl.sum(b_dx, axis=1))
    p_tile = p_dg + (token + o_c) * s_dgt + (i_h0 + o_g) * s_dgh
    tl.store(p_tile, b_dx.to(p_dg.dtype.element_ty), mask=m_t)
