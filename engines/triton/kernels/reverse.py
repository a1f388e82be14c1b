"""The reverse pass over chunks: one program per (sequence, head, V-slice), dS on chip.

With dS [BV, K] the gradient of the state after a chunk, in fp32 registers, the chunk is undone by

    dU^T = dO^T P + dS Kc^T                   [BV, C]
    Y^T  = dU^T W                             [BV, C]      delta rule only, W = (I + A)^-1
    dS  <- dS decay + dO^T Q - (Y^T b) E      [BV, K]      b the write strength of a head

the forward's products mirrored, each with a state-like tile on its left, so that again no
accumulator is transposed. Y is the gradient of b (v - S k), hence of everything that is written.
Written by slot, in io dtype: dS after every chunk [V, K], and Y (dU without delta rule) [C, V].
What those tiles leave to do is token-parallel (`gradient`).

The same kernel without these outputs gives the gradient that reaches the first state, and with
dS = I and no dO the transposed transition of a sequence.

As in `scan`, dO and z reach accumulators by a product with the unit matrix, and with SPLIT the
operands around a large inverse are in two parts: of Y both are written.

Loads of one chunk: (1 or 3) C K + CQ V + C C + CQ C io elements, staged by the software pipeline.
"""

import triton
import triton.language as tl

from lagraph.engines.triton.kernels.factor import GROWTH, inverse_growth, load_beta, rest
from lagraph.engines.triton.kernels.gate import sigmoid
from lagraph.engines.triton.kernels.index import ROWS, query_rows, sequence_span

__all__ = ["load_dout", "retreat", "reverse_kernel"]


@triton.jit
def load_dout(p_do, p_z, o_do, o_z, m_q):
    """Gradient of the outputs, taken through Mamba-2's gate z sigmoid(z) where there is one."""
    b_do = tl.load(p_do + o_do, mask=m_q, other=0.0)
    if p_z is not None:
        b_z = tl.load(p_z + o_z, mask=m_q, other=0.0).to(tl.float32)
        b_do = (b_do.to(tl.float32) * (b_z * sigmoid(b_z))).to(p_do.dtype.element_ty)
    return b_do


@triton.jit
def retreat(
    pid,
    p_q,
    p_k,
    p_e,
    p_beta,
    p_rows,
    p_decay,
    p_t,
    p_p,
    p_do,
    p_z,
    p_dht,
    p_ds,
    p_y,
    p_d,
    p_dv,
    p_dh0,
    p_cu,
    T,
    s_cu,
    s_qt,
    s_qh,
    s_kt,
    s_ks,
    s_kh,
    s_bt,
    s_bh,
    s_ot,
    s_oh,
    s_zt,
    s_zh,
    s_fn,
    s_fh,
    s_fv,
    s_0n,
    s_0h,
    s_0v,
    s_dh,
    s_dv,
    s_dvt,
    s_dvh,
    H: tl.constexpr,
    HK: tl.constexpr,
    HO: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    NS: tl.constexpr,
    C: tl.constexpr,
    CQ: tl.constexpr,
    BV: tl.constexpr,
    KEY_GATE: tl.constexpr,
    DELTA: tl.constexpr,
    ERASE_KEY: tl.constexpr,
    IDENTITY: tl.constexpr,
    SIGMOID: tl.constexpr,
    DOUBLE: tl.constexpr,
    SPLIT: tl.constexpr,
    PREC: tl.constexpr,
):
    """The pass of one program. p_dv: instead of Y, which without delta rule is the gradient of v
    but for the skip D dO, that gradient."""
    NV: tl.constexpr = V // BV
    IO: tl.constexpr = p_k.dtype.element_ty
    PARTS: tl.constexpr = 2 if SPLIT else 1
    WRITES: tl.constexpr = DELTA or p_y is not None or p_dv is not None
    i_v = pid % NV
    i_h = (pid // NV) % HO
    i_n = pid // (NV * HO)
    begin, length, first = sequence_span(p_cu, s_cu, i_n, T, C, NS)
    o_i = tl.arange(0, C)
    o_q = tl.arange(0, CQ)
    o_v = i_v * BV + tl.arange(0, BV)
    o_k = tl.arange(0, K)

    # Gradient of the final state [BV, K].
    if IDENTITY:
        b_ds = tl.where(o_v[:, None] == o_k[None, :], 1.0, 0.0)
    elif p_dht is not None:
        p_last = p_dht + i_n * s_fn + i_h * s_fh + o_v[:, None] * s_fv + o_k[None, :]
        b_ds = tl.load(p_last).to(tl.float32)
    else:
        b_ds = tl.zeros([BV, K], tl.float32)

    p_kh = p_k + (i_h // (HO // HK)) * s_kh
    p_qh = p_q + (i_h // (HO // H)) * s_qh if p_do is not None else p_kh
    if p_d is not None:
        b_d = tl.load(p_d + i_h * s_dh + o_v * s_dv).to(tl.float32)
    chunks = tl.cdiv(length, C)
    o_b = tl.arange(0, BV)
    b_unit = tl.where(o_b[:, None] == o_b[None, :], 1.0, 0.0).to(IO)
    size = inverse_growth(p_t, (first + tl.maximum(chunks - 1, 0)) * HO + i_h, C, SPLIT)
    for i_r in range(0, chunks):
        i_c = chunks - 1 - i_r
        block = (first + i_c) * HO + i_h
        o_t = i_c * C + o_i
        m_t = o_t < length
        o_tok = begin + o_t // NS
        o_sub = o_t % NS
        b_ds16 = b_ds.to(IO)
        if p_ds is not None:
            tl.store(p_ds + block * (V * K) + o_v[:, None] * K + o_k[None, :], b_ds16)
        o_tile = block * (C * K) + o_i[:, None] * K + o_k[None, :]
        # Row factors before all else: their latency hides behind the first product.
        if KEY_GATE:
            b_decay = tl.load(p_decay + block * K + o_k)
        else:
            p_row = p_rows + block * (ROWS * C)
            b_decay = tl.load(p_row + 4 * C - 1)
            if WRITES:
                b_kf = tl.load(p_row + 2 * C + o_i)
            if DELTA:
                b_ef = tl.load(p_row + o_i)
            if p_do is not None:
                b_qf = tl.load(p_row + C + o_q)
        if DELTA and not ERASE_KEY:
            if KEY_GATE:
                o_beta = o_tok * s_bt + i_h * s_bh
                b_beta = load_beta(p_beta, o_beta, m_t, SIGMOID, DOUBLE)
            else:
                b_beta = tl.load(p_row + 4 * C + o_i)
        if p_do is not None:
            i_tq, _, m_q = query_rows(i_c, length, C, CQ, NS)
            o_out = (begin + i_tq)[:, None]
            p_tile = p_do + i_h * s_oh + o_out * s_ot + o_v[None, :]
            b_do = tl.trans(tl.load(p_tile, mask=m_q[:, None], other=0.0))  # [BV, CQ]
            if p_z is not None:
                p_tile = p_z + i_h * s_zh + o_out * s_zt + o_v[None, :]
                b_z = tl.load(p_tile, mask=m_q[:, None], other=0.0)  # [CQ, BV]
                b_z = tl.dot(b_unit, tl.trans(b_z), input_precision=PREC)
                b_dof = tl.dot(b_unit, b_do, input_precision=PREC) * (b_z * sigmoid(b_z))
                b_do = b_dof.to(IO)
            elif not KEY_GATE:
                b_dof = tl.dot(b_unit, b_do, input_precision=PREC)

        # Gradient of what the chunk writes.
        if WRITES:
            if KEY_GATE:
                b_k = tl.load(p_k + o_tile)  # [C, K]
                b_du = tl.dot(b_ds16, tl.trans(b_k), input_precision=PREC)
            else:
                s_ki = o_tok * s_kt + o_sub * s_ks
                b_k = tl.load(p_kh + s_ki[:, None] + o_k[None, :], mask=m_t[:, None], other=0.0)
                b_du = tl.dot(b_ds16, tl.trans(b_k), input_precision=PREC)
                b_du *= b_kf[None, :]
            if p_do is not None:
                p_pt = p_p + block * (PARTS * CQ * C) + o_q[:, None] * C + o_i[None, :]
                b_p = tl.load(p_pt)  # [CQ, C]
                b_du = tl.dot(b_do, b_p, b_du, input_precision=PREC)
            b_y = b_du
            if DELTA:
                p_tt = p_t + block * (PARTS * C * C) + o_i[:, None] * C + o_i[None, :]
                b_t = tl.load(p_tt)  # [C, C]
                b_du16 = b_du.to(IO)
                b_y = tl.dot(b_du16, b_t, input_precision=PREC)
            if p_y is not None:
                p_yt = p_y + block * (PARTS * C * V) + o_i[None, :] * V + o_v[:, None]
                tl.store(p_yt, b_y.to(IO))
            if p_dv is not None:  # without delta rule
                if p_d is not None:
                    b_y += b_d[:, None] * b_dof
                p_tile = p_dv + i_h * s_dvh + o_tok[None, :] * s_dvt + o_v[:, None]
                tl.store(p_tile, b_y.to(IO), mask=m_t[None, :])

        # Gradient of the chunk's entering state.
        if KEY_GATE:
            b_ds *= b_decay[None, :]
        else:
            b_ds *= tl.exp2(b_decay)
        if p_do is not None:
            if KEY_GATE:
                b_q = tl.load(p_q + o_tile)  # [CQ, K]
                b_ds = tl.dot(b_do, b_q, b_ds, input_precision=PREC)
            else:
                p_tile = p_qh + (begin + i_tq)[:, None] * s_qt + o_k[None, :]
                b_q = tl.load(p_tile, mask=m_q[:, None], other=0.0)
                b_dq = (b_dof * b_qf[None, :]).to(IO)
                b_ds = tl.dot(b_dq, b_q, b_ds, input_precision=PREC)
        if DELTA:
            b_r = -b_y
            if not ERASE_KEY:
                b_r *= b_beta[None, :]
            if KEY_GATE:
                b_e = tl.load(p_e + o_tile)  # [C, K]
            else:
                b_r *= b_ef[None, :]
                b_e = b_k
            b_r16 = b_r.to(IO)
            b_ds = tl.dot(b_r16, b_e, b_ds, input_precision=PREC)
        if SPLIT:
            flag = True
            if SPLIT == 2:
                flag = size > GROWTH
                i_x = first + tl.maximum(i_c - 1, 0)
                size = inverse_growth(p_t, i_x * HO + i_h, C, SPLIT)
            if flag:
                m_low = o_i[:, None] >= o_i[None, :]
                b_tl = tl.load(p_tt + C * C, mask=m_low, other=0.0)
                b_yl = tl.dot(b_du16, b_tl, input_precision=PREC)
                b_yl = tl.dot(rest(b_du, IO), b_t, b_yl, input_precision=PREC)
                if p_y is not None:
                    tl.store(p_yt + C * V, (b_y + b_yl - b_y.to(IO).to(tl.float32)).to(IO))
                if not ERASE_KEY:
                    b_yl *= b_beta[None, :]
                if not KEY_GATE:
                    b_yl *= b_ef[None, :]
                b_rl = (b_r - b_yl - b_r16.to(tl.float32)).to(IO)
                b_ds = tl.dot(b_rl, b_e, b_ds, input_precision=PREC)

    if p_dh0 is not None:
        p_first = p_dh0 + i_n * s_0n + i_h * s_0h + o_v[:, None] * s_0v + o_k[None, :]
        tl.store(p_first, b_ds.to(p_dh0.dtype.element_ty))


@triton.jit(do_not_specialize=["T"])
def reverse_kernel(
    p_q,
    p_k,
    p_e,
    p_beta,
    p_rows,
    p_decay,
    p_t,
    p_p,
    p_do,
    p_z,
    p_dht,
    p_ds,
    p_y,
    p_dh0,
    p_cu,
    T,
    s_cu,
    s_qt,
    s_qh,
    s_kt,
    s_ks,
    s_kh,
    s_bt,
    s_bh,
    s_ot,
    s_oh,
    s_zt,
    s_zh,
    s_fn,
    s_fh,
    s_fv,
    s_0n,
    s_0h,
    s_0v,
    H: tl.constexpr,
    HK: tl.constexpr,
    HO: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    NS: tl.constexpr,
    C: tl.constexpr,
    CQ: tl.constexpr,
    BV: tl.constexpr,
    KEY_GATE: tl.constexpr,
    DELTA: tl.constexpr,
    ERASE_KEY: tl.constexpr,
    IDENTITY: tl.constexpr,
    SIGMOID: tl.constexpr,
    DOUBLE: tl.constexpr,
    SPLIT: tl.constexpr,
    PREC: tl.constexpr,
):
    retreat(
        tl.program_id(0).to(tl.int64), p_q, p_k, p_e, p_beta, p_rows, p_decay, p_t, p_p, p_do, p_z,
        p_dht, p_ds, p_y, None, None, p_dh0, p_cu, T, s_cu, s_qt, s_qh, s_kt, s_ks, s_kh, s_bt,
        s_bh, s_ot, s_oh, s_zt, s_zh, s_fn, s_fh, s_fv, s_0n, s_0h, s_0v, 0, 0, 0, 0, H, HK, HO, K,
        V, NS, C, CQ, BV, KEY_GATE, DELTA, ERASE_KEY, IDENTITY, SIGMOID, DOUBLE, SPLIT, PREC,
    )  # fmt: skip
