"""Gradients of heads that share q and k, without delta rule (Mamba-2). See `gradient`.

Most of what it says is then the same for all of them: sum_j M_ij D_ij w_j k_j
of all of them is one product with the sum of their M D w. `products_group_kernel` makes that, CR
rows a program, of which q k^T is made once; `gradient_group_kernel`, one program a K-block of dq or
dk, adds up their S^T dO or dS^T v in registers and writes once for HP heads; `step_group_kernel`
then adds up what both left of each head's gates. The serial pass back has dv.
"""

import triton
import triton.language as tl

from lagraph.engines.triton.kernels.gate import step_size
from lagraph.engines.triton.kernels.index import ROWS, locate
from lagraph.engines.triton.kernels.products import step_gradient, z_gradient
from lagraph.engines.triton.kernels.reverse import load_dout

__all__ = [
    "gradient_group_kernel",
    "products_group_kernel",
    "step_group_kernel",
]


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
