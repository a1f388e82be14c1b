"""The recurrence over chunks: one program per (sequence, head, V-slice), the state on chip.

The state is V-major, S [BV, K] in fp32 registers, and every product has a state-like tile as its
left operand, so that no accumulator is transposed or sent through shared memory:

    R^T = V^T - S E^T        [BV, C]       delta rule only, else U = V
    U^T = R^T T^T            [BV, C]
    O^T = S Q^T + U^T P^T    [BV, CQ]      entering state, io dtype
    S   = S decay + U^T Kc   [BV, K]

E, Q, Kc, T, P come from `factor`: as tiles under a per-key gate; under a per-head gate as row
factors of the raw q and k, applied to the columns of R^T, O^T and U^T. Decay is applied in fp32.
Outputs carry Mamba-2's D and z. Checkpoints are the states at chunk starts that are multiples of
EVERY (a multiple of C).

Loads of one chunk: (2 or 3) C K + C V + C C + CQ C io elements, staged by the software pipeline.
"""

import triton
import triton.language as tl

from lagraph.engines.triton.kernels.gate import sigmoid
from lagraph.engines.triton.kernels.index import checkpoint_base, query_rows, sequence_span

__all__ = ["scan_kernel", "span_decay_kernel"]


@triton.jit
def _state_row(p_index, s_index, i_n, P):
    """Row of the pool that sequence i_n reads and writes, or -1 for padding."""
    if p_index is None:
        i_s = i_n
    else:
        i_s = tl.load(p_index + i_n * s_index).to(tl.int64)
        i_s = tl.where((i_s >= 0) & (i_s < P), i_s, -1)
    return i_s


@triton.jit(do_not_specialize=["N", "T", "P"])
def scan_kernel(
    p_q,
    p_k,
    p_e,
    p_v,
    p_w,
    p_rows,
    p_decay,
    p_t,
    p_p,
    p_d,
    p_z,
    p_h0,
    p_index,
    p_o,
    p_pre,
    p_ht,
    p_check,
    p_cu,
    N,
    T,
    P,
    s_cu,
    s_index,
    s_qt,
    s_qh,
    s_kt,
    s_ks,
    s_kh,
    s_vt,
    s_vs,
    s_vh,
    s_wt,
    s_wh,
    s_dh,
    s_dv,
    s_zt,
    s_zh,
    s_0n,
    s_0h,
    s_0v,
    s_fn,
    s_fh,
    s_fv,
    s_ot,
    s_oh,
    s_pt,
    s_ph,
    H: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    HO: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    NS: tl.constexpr,
    C: tl.constexpr,
    CQ: tl.constexpr,
    BV: tl.constexpr,
    KEY_GATE: tl.constexpr,
    DELTA: tl.constexpr,
    IDENTITY: tl.constexpr,
    SPLIT: tl.constexpr,
    EVERY: tl.constexpr,
    PREC: tl.constexpr,
):
    NV: tl.constexpr = V // BV
    IO: tl.constexpr = p_k.dtype.element_ty
    pid = tl.program_id(0).to(tl.int64)
    i_v = pid % NV
    i_h = (pid // NV) % HO
    i_n = pid // (NV * HO)
    begin, length, first = sequence_span(p_cu, s_cu, i_n, T, C, NS)
    i_s = _state_row(p_index, s_index, i_n, P)
    o_i = tl.arange(0, C)
    o_q = tl.arange(0, CQ)
    o_v = i_v * BV + tl.arange(0, BV)
    o_k = tl.arange(0, K)
    o_state = o_v[:, None] * s_0v + o_k[None, :]

    if p_o is not None:
        p_oh = p_o + i_h * s_oh + o_v[:, None]
        if i_s < 0:
            for i_c in range(0, tl.cdiv(length, C)):
                i_tq, _, m_q = query_rows(i_c, length, C, CQ, NS)
                p_tile = p_oh + (begin + i_tq)[None, :] * s_ot
                tl.store(p_tile, tl.zeros([BV, CQ], IO), mask=m_q[None, :])
                if p_pre is not None:
                    p_tile = p_pre + i_h * s_ph + o_v[:, None] + (begin + i_tq)[None, :] * s_pt
                    tl.store(p_tile, tl.zeros([BV, CQ], IO), mask=m_q[None, :])
            return

    # Entering state [BV, K].
    if IDENTITY:
        b_s = tl.where(o_v[:, None] == o_k[None, :], 1.0, 0.0)
    elif p_h0 is not None:
        b_s = tl.load(p_h0 + i_s * s_0n + i_h * s_0h + o_state).to(tl.float32)
    else:
        b_s = tl.zeros([BV, K], tl.float32)
    if p_check is not None:
        row = checkpoint_base(p_cu, s_cu, i_n, T, EVERY, NS)
        p_check += ((row * HO + i_h) * V + o_v)[:, None] * K + o_k[None, :]

    p_vh = p_v + (i_h // (HO // HV)) * s_vh + o_v[:, None] if p_v is not None else p_v
    p_kh = p_k + (i_h // (HO // HK)) * s_kh
    p_qh = p_q + (i_h // (HO // H)) * s_qh if p_o is not None else p_kh
    for i_c in range(0, tl.cdiv(length, C)):
        block = (first + i_c) * HO + i_h
        o_t = i_c * C + o_i
        m_t = o_t < length
        o_tok = begin + o_t // NS
        if p_check is not None:  # noqa: SIM102 (only the inner test is a run-time one)
            if (i_c * C) % EVERY == 0:
                tl.store(
                    p_check + (i_c * C // EVERY) * (HO * V * K), b_s.to(p_check.dtype.element_ty)
                )

        if KEY_GATE:
            o_tile = block * (C * K) + o_i[:, None] * K + o_k[None, :]
            b_k = tl.load(p_k + o_tile)  # [C, K]
        else:
            p_row = p_rows + block * (4 * C)
            s_ki = o_tok * s_kt + (o_t % NS) * s_ks
            b_k = tl.load(p_kh + s_ki[:, None] + o_k[None, :], mask=m_t[:, None], other=0.0)
        if p_v is not None:
            s_vi = o_tok * s_vt + (o_t % NS) * s_vs
            b_v = tl.load(p_vh + s_vi[None, :], mask=m_t[None, :], other=0.0)  # [BV, C]
        b_s16 = b_s.to(IO)
        if SPLIT:
            b_sl = (b_s - b_s16.to(tl.float32)).to(IO)

        if DELTA:
            if KEY_GATE:
                b_e = tl.load(p_e + o_tile)  # [C, K]
                b_r = tl.dot(b_s16, tl.trans(b_e), input_precision=PREC)
                if SPLIT:
                    b_r = tl.dot(b_sl, tl.trans(b_e), b_r, input_precision=PREC)
            else:
                b_r = tl.dot(b_s16, tl.trans(b_k), input_precision=PREC)
                if SPLIT:
                    b_r = tl.dot(b_sl, tl.trans(b_k), b_r, input_precision=PREC)
                b_r *= tl.load(p_row + o_i)[None, :]
            if p_v is None:
                b_r = -b_r
            elif p_w is None:
                b_r = b_v.to(tl.float32) - b_r
            else:
                p_tile = p_w + i_h * s_wh + o_v[:, None] + o_tok[None, :] * s_wt
                b_w = tl.load(p_tile, mask=m_t[None, :], other=0.0)
                b_r = b_v.to(tl.float32) * b_w.to(tl.float32) - b_r
            PARTS: tl.constexpr = 2 if SPLIT else 1
            p_tile = p_t + block * (PARTS * C * C) + o_i[:, None] * C + o_i[None, :]
            b_t = tl.load(p_tile)  # [C, C]
            b_r16 = b_r.to(IO)
            b_u = tl.dot(b_r16, tl.trans(b_t), input_precision=PREC)
            if SPLIT:
                b_rl = (b_r - b_r16.to(tl.float32)).to(IO)
                b_u = tl.dot(b_rl, tl.trans(b_t), b_u, input_precision=PREC)
                b_t = tl.load(p_tile + C * C)
                b_u = tl.dot(b_r16, tl.trans(b_t), b_u, input_precision=PREC)
            b_u16 = b_u.to(IO)
            if SPLIT:
                b_ul = (b_u - b_u16.to(tl.float32)).to(IO)
        else:
            b_u = b_v.to(tl.float32)
            b_u16 = b_v

        if p_o is not None:
            i_tq, _, m_q = query_rows(i_c, length, C, CQ, NS)
            if KEY_GATE:
                b_q = tl.load(p_q + o_tile)  # [CQ, K]
                b_o = tl.dot(b_s16, tl.trans(b_q), input_precision=PREC)
            else:
                p_tile = p_qh + (begin + i_tq)[:, None] * s_qt + o_k[None, :]
                b_q = tl.load(p_tile, mask=m_q[:, None], other=0.0)
                b_o = tl.dot(b_s16, tl.trans(b_q), input_precision=PREC)
                b_o *= tl.load(p_row + C + o_q)[None, :]
            b_p = tl.load(p_p + block * (CQ * C) + o_q[:, None] * C + o_i[None, :])  # [CQ, C]
            b_o = tl.dot(b_u16, tl.trans(b_p), b_o, input_precision=PREC)
            if DELTA and SPLIT:
                b_o = tl.dot(b_ul, tl.trans(b_p), b_o, input_precision=PREC)
            if p_d is not None:
                b_d = tl.load(p_d + i_h * s_dh + o_v * s_dv).to(tl.float32)
                b_o += b_d[:, None] * b_v.to(tl.float32)
            o_out = (begin + i_tq)[None, :]
            if p_pre is not None:
                p_tile = p_pre + i_h * s_ph + o_v[:, None] + o_out * s_pt
                tl.store(p_tile, b_o.to(IO), mask=m_q[None, :])
            if p_z is not None:
                p_tile = p_z + i_h * s_zh + o_v[:, None] + o_out * s_zt
                b_z = tl.load(p_tile, mask=m_q[None, :], other=0.0).to(tl.float32)
                b_o *= b_z * sigmoid(b_z)
            tl.store(p_oh + o_out * s_ot, b_o.to(IO), mask=m_q[None, :])

        if KEY_GATE:
            b_s *= tl.load(p_decay + block * K + o_k)[None, :]
        else:
            b_s *= tl.exp2(tl.load(p_row + 4 * C - 1))
            b_u *= tl.load(p_row + 2 * C + o_i)[None, :]
            b_u16 = b_u.to(IO)
            if DELTA and SPLIT:
                b_ul = (b_u - b_u16.to(tl.float32)).to(IO)
        b_s = tl.dot(b_u16, b_k, b_s, input_precision=PREC)
        if DELTA and SPLIT:
            b_s = tl.dot(b_ul, b_k, b_s, input_precision=PREC)

    if p_ht is not None:
        p_tile = p_ht + i_s * s_fn + i_h * s_fh + o_v[:, None] * s_fv + o_k[None, :]
        tl.store(p_tile, b_s.to(p_ht.dtype.element_ty))


@triton.jit(do_not_specialize=["N", "T"])
def span_decay_kernel(
    p_rows, p_cu, p_out, N, T, s_cu, HO: tl.constexpr, NS: tl.constexpr, C: tl.constexpr
):
    """log2 of a sequence's whole decay, [N, HO]: the sum of G at the end of its chunks."""
    pid = tl.program_id(0).to(tl.int64)
    i_h = pid % HO
    i_n = pid // HO
    _, length, first = sequence_span(p_cu, s_cu, i_n, T, C, NS)
    chunks = tl.cdiv(length, C)
    b_sum = tl.zeros([128], tl.float32)
    for i_0 in range(0, chunks, 128):
        o_c = i_0 + tl.arange(0, 128)
        p_end = p_rows + ((first + o_c) * HO + i_h) * (4 * C) + (4 * C - 1)
        b_sum += tl.load(p_end, mask=o_c < chunks, other=0.0)
    tl.store(p_out + pid, tl.sum(b_sum))
