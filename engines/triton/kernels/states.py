"""Chunk-entry states for the backward: the forward's serial pass again, without outputs.

    R^T = V^T - S E^T        [BV, C]       delta rule only
    U^T = (R^T b) W^T        [BV, C]       W = (I + A)^-1, b the write strength of a head
    S   = S decay + U^T Kc   [BV, K]

One program per (span, head, V-slice), the state in fp32 registers as in `scan`. A span is a whole
sequence, or what lies between two checkpoints of it, each span starting from its own row. Written,
in io dtype and by slot: S at every chunk's start [V, K], and the corrected values U [C, V].

As in `scan`, v and w reach their accumulators by a product with the unit matrix, and with SPLIT the
operands around a large inverse are in two parts: of U both are written.

Loads of one chunk: (1 or 2) C K + C V + C C io elements, staged by the software pipeline.
"""

import triton
import triton.language as tl

from lagraph.engines.triton.kernels.factor import GROWTH, inverse_growth, load_beta, refined
from lagraph.engines.triton.kernels.index import ROWS, checkpoint_base, locate, sequence_span

__all__ = ["advance"]


@triton.jit
def advance(
    pid,
    p_k,
    p_e,
    p_v,
    p_w,
    p_beta,
    p_rows,
    p_decay,
    p_t,
    p_h0,
    p_check,
    p_s,
    p_u,
    p_cu,
    N,
    T,
    s_cu,
    s_kt,
    s_ks,
    s_kh,
    s_vt,
    s_vs,
    s_vh,
    s_wt,
    s_wh,
    s_bt,
    s_bh,
    s_0n,
    s_0h,
    s_0v,
    HK: tl.constexpr,
    HV: tl.constexpr,
    HO: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    NS: tl.constexpr,
    C: tl.constexpr,
    BV: tl.constexpr,
    KEY_GATE: tl.constexpr,
    DELTA: tl.constexpr,
    ERASE_KEY: tl.constexpr,
    SIGMOID: tl.constexpr,
    DOUBLE: tl.constexpr,
    EVERY: tl.constexpr,
    SPLIT: tl.constexpr,
    PREC: tl.constexpr,
):
    """The pass of one program."""
    NV: tl.constexpr = V // BV
    IO: tl.constexpr = p_k.dtype.element_ty
    PARTS: tl.constexpr = 2 if SPLIT else 1
    i_v = pid % NV
    i_h = (pid // NV) % HO
    i_n = pid // (NV * HO)
    o_i = tl.arange(0, C)
    o_v = i_v * BV + tl.arange(0, BV)
    o_k = tl.arange(0, K)

    # The span's chunks [i_c, last), and its entering state [BV, K].
    if p_check is not None:
        i_n, i_r, _, _ = locate(i_n, p_cu, s_cu, N, T, EVERY, NS)
        used = i_r >= 0
        i_r = tl.maximum(i_r, 0)
        begin, length, first = sequence_span(p_cu, s_cu, i_n, T, C, NS)
        row = checkpoint_base(p_cu, s_cu, i_n, T, EVERY, NS) + i_r
        i_first = i_r * (EVERY // C)
        last = tl.where(used, tl.cdiv(tl.minimum(length, (i_r + 1) * EVERY), C), i_first)
        p_enter = p_check + ((row * HO + i_h) * V + o_v)[:, None] * K + o_k[None, :]
        m_enter = (o_v[:, None] < tl.where(used, V, 0)) & (o_k[None, :] >= 0)
        b_s = tl.load(p_enter, mask=m_enter, other=0.0).to(tl.float32)
    else:
        begin, length, first = sequence_span(p_cu, s_cu, i_n, T, C, NS)
        i_first = begin * 0
        last = tl.cdiv(length, C)
        if p_h0 is not None:
            p_enter = p_h0 + i_n * s_0n + i_h * s_0h + o_v[:, None] * s_0v + o_k[None, :]
            b_s = tl.load(p_enter).to(tl.float32)
        else:
            b_s = tl.zeros([BV, K], tl.float32)

    p_vh = p_v + (i_h // (HO // HV)) * s_vh + o_v[None, :]
    o_b = tl.arange(0, BV)
    b_unit = tl.where(o_b[:, None] == o_b[None, :], 1.0, 0.0).to(IO)
    p_kh = p_k + (i_h // (HO // HK)) * s_kh
    size = inverse_growth(p_t, (first + i_first) * HO + i_h, C, SPLIT)
    for i_c in range(i_first, last):
        block = (first + i_c) * HO + i_h
        o_t = i_c * C + o_i
        m_t = o_t < length
        o_tok = begin + o_t // NS
        o_sub = o_t % NS
        # Row factors before all else: their latency hides behind the first product.
        if KEY_GATE:
            o_tile = block * (C * K) + o_i[:, None] * K + o_k[None, :]
            b_decay = tl.load(p_decay + block * K + o_k)
            b_k = tl.load(p_k + o_tile)  # [C, K]
        else:
            p_row = p_rows + block * (ROWS * C)
            b_decay = tl.load(p_row + 4 * C - 1)
            b_kf = tl.load(p_row + 2 * C + o_i)
            if DELTA:
                b_ef = tl.load(p_row + o_i)
            s_ki = o_tok * s_kt + o_sub * s_ks
            b_k = tl.load(p_kh + s_ki[:, None] + o_k[None, :], mask=m_t[:, None], other=0.0)
        if DELTA and not ERASE_KEY:
            if KEY_GATE:
                o_beta = o_tok * s_bt + i_h * s_bh
                b_beta = load_beta(p_beta, o_beta, m_t, SIGMOID, DOUBLE)
            else:
                b_beta = tl.load(p_row + 4 * C + o_i)
        s_vi = o_tok * s_vt + o_sub * s_vs
        b_v = tl.load(p_vh + s_vi[:, None], mask=m_t[:, None], other=0.0)  # [C, BV]
        b_s16 = b_s.to(IO)
        tl.store(p_s + block * (V * K) + o_v[:, None] * K + o_k[None, :], b_s16)

        if DELTA:
            b_e = tl.load(p_e + o_tile) if KEY_GATE else b_k  # [C, K]
            b_r = tl.dot(b_s16, tl.trans(b_e), input_precision=PREC)
            b_r = -b_r if KEY_GATE else b_r * -b_ef[None, :]
            if p_w is None:
                b_r = tl.dot(b_unit, tl.trans(b_v), b_r, input_precision=PREC)
            else:
                p_tile = p_w + i_h * s_wh + o_tok[:, None] * s_wt + o_v[None, :]
                b_w = tl.load(p_tile, mask=m_t[:, None], other=0.0)  # [C, BV]
                b_w = tl.dot(b_unit, tl.trans(b_w), input_precision=PREC)
                b_r += tl.dot(b_unit, tl.trans(b_v), input_precision=PREC) * b_w
            if not ERASE_KEY:
                b_r *= b_beta[None, :]
            p_tt = p_t + block * (PARTS * C * C)
            b_t = tl.load(p_tt + o_i[:, None] * C + o_i[None, :])  # [C, C]
            b_r16 = b_r.to(IO)
            b_u = tl.dot(b_r16, tl.trans(b_t), input_precision=PREC)
            b_u16 = b_u.to(IO)
            p_ut = p_u + block * (PARTS * C * V) + o_i[None, :] * V + o_v[:, None]
            tl.store(p_ut, b_u16)
        else:
            b_u = tl.dot(b_unit, tl.trans(b_v), input_precision=PREC)  # [BV, C]

        if KEY_GATE:
            b_s *= b_decay[None, :]
            b_uk = b_u.to(IO)
        else:
            b_s *= tl.exp2(b_decay)
            b_uk = (b_u * b_kf[None, :]).to(IO)
        b_s = tl.dot(b_uk, b_k, b_s, input_precision=PREC)

        if SPLIT:
            flag = True
            if SPLIT == 2:
                flag = size > GROWTH
                i_x = first + tl.minimum(i_c + 1, last - 1)
                size = inverse_growth(p_t, i_x * HO + i_h, C, SPLIT)
            if flag:
                b_u = refined(b_u, b_r, None, b_t, p_tt + C * C, C, PREC)
                b_ul = (b_u - b_u16.to(tl.float32)).to(IO)
                tl.store(p_ut + C * V, b_ul)
                if not KEY_GATE:
                    b_ul = (b_u * b_kf[None, :] - b_uk.to(tl.float32)).to(IO)
                b_s = tl.dot(b_ul, b_k, b_s, input_precision=PREC)
