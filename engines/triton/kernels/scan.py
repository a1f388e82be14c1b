"""The recurrence over chunks: one program per (span, head, V-slice), the state on chip.

The state is V-major, S [BV, K] in fp32 registers, and every product has a state-like tile as its
left operand, so that no accumulator is transposed or sent through shared memory:

    R^T = -S E^T             [BV, C]       delta rule only, else U = V
    U^T = V^T T^T + R^T T^T  [BV, C]
    O^T = S Q^T + U^T P^T    [BV, CQ]      entering state, io dtype
    S   = S decay + U^T Kc   [BV, K]

E, Q, Kc, T, P come from `factor`: as tiles under a per-key gate; under a per-head gate as row
factors of the raw q and k, applied to the columns of R^T, O^T and U^T. Decay is applied in fp32.
Outputs carry Mamba-2's D and z. Checkpoints are the states at chunk starts that are multiples of
EVERY (a multiple of C).

V is loaded as the token-major tile it is, and only ever is an operand, so that the software
pipeline stages it. Where it (or w or z) meets other factors first, a product with the unit matrix,
which is exact, brings it to a [BV, C] accumulator. Row factors are loaded before the first product,
so that their latency is hidden.

With SPLIT, T, R, P and U are in two parts of io dtype where `factor` found the inverse large (2),
or everywhere (1): products of a part that is left over with one that is not are added.

Loads of one chunk: (2 or 3) C K + C V + C C + CQ C io elements, staged by the software pipeline.

A span is a whole sequence (STAGE "whole"), or a segment of one, where sequences x heads alone would
leave SMs idle (see `segment`). Segments take two launches and `link_kernel` between them:

    open    a sequence's first segment as it is, outputs and all: its state is known. Of every later
            one but the last, without queries: its end state from zero H [V, K], and its transition
            M [K, K], which is the end of the identity when nothing is written
    close   the later segments with outputs, from the states that `link_kernel` made of H and M
"""

import triton
import triton.language as tl

from lagraph.engines.triton.kernels.factor import GROWTH, inverse_growth, refined
from lagraph.engines.triton.kernels.gate import growth, sigmoid
from lagraph.engines.triton.kernels.index import ROWS, checkpoint_base, query_rows, sequence_span
from lagraph.engines.triton.kernels.segment import locate_segment, sequence_segments

__all__ = ["scan_kernel", "span_decay_kernel"]


# Positive gates: a chunk's decay stays finite, so that its products with zeros are zeros; a state
# that is at TOP when it leaves is infinite.
TOP = tl.constexpr(2.0**120)


@triton.jit
def _state_row(p_index, s_index, i_n, P):
    """Row of the pool that sequence i_n reads and writes, or -1 for padding."""
    if p_index is None:
        i_s = i_n
    else:
        i_s = tl.load(p_index + i_n * s_index).to(tl.int64)
        i_s = tl.where((i_s >= 0) & (i_s < P), i_s, -1)
    return i_s


@triton.jit
def _advance(
    b_s,
    i_first,
    i_last,
    begin,
    length,
    first,
    i_h,
    o_v,
    v_end,
    p_q,
    p_k,
    p_e,
    p_v,
    p_w,
    p_rows,
    p_decay,
    p_t,
    p_x,
    p_p,
    p_d,
    p_z,
    p_o,
    p_pre,
    p_check,
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
    KEY_GATE: tl.constexpr,
    DELTA: tl.constexpr,
    SPLIT: tl.constexpr,
    EVERY: tl.constexpr,
    PREC: tl.constexpr,
):
    """The state [BV, K] carried over chunks [i_first, i_last) of a sequence, with what they write.

    Values of steps from v_end on count as zero. p_check: where the rows of this head and slice
    begin, one [BV, K] tile.
    """
    IO: tl.constexpr = p_k.dtype.element_ty
    BV: tl.constexpr = b_s.shape[0]
    PARTS: tl.constexpr = 2 if SPLIT else 1
    o_i = tl.arange(0, C)
    o_q = tl.arange(0, CQ)
    o_k = tl.arange(0, K)
    if p_o is not None:
        p_oh = p_o + i_h * s_oh + o_v[:, None]
    p_vh = p_v + (i_h // (HO // HV)) * s_vh + o_v[None, :] if p_v is not None else p_v
    o_b = tl.arange(0, BV)
    b_unit = tl.where(o_b[:, None] == o_b[None, :], 1.0, 0.0).to(IO)
    p_kh = p_k + (i_h // (HO // HK)) * s_kh
    p_qh = p_q + (i_h // (HO // H)) * s_qh if p_o is not None else p_kh
    # Tiles are loaded ahead by the pipeline, scalars so: the inverse's growth.
    size = inverse_growth(p_t, (first + i_first) * HO + i_h, C, SPLIT)
    # Where gates have made the state grow, what has reached TOP is infinite at the end. Another
    # write strength leaves no registers to keep the largest gate.
    SATURATE: tl.constexpr = DELTA and p_w is None
    risen = 0.0
    for i_c in range(i_first, i_last):
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
            b_decay = tl.load(p_decay + block * K + o_k)
            b_k = tl.load(p_k + o_tile)  # [C, K]
        else:
            p_row = p_rows + block * (ROWS * C)
            b_decay = tl.load(p_row + 4 * C - 1)
            b_kf = tl.load(p_row + 2 * C + o_i)
            if DELTA:
                b_ef = tl.load(p_row + o_i)
            if p_o is not None:
                b_qf = tl.load(p_row + C + o_q)
            s_ki = o_tok * s_kt + (o_t % NS) * s_ks
            b_k = tl.load(p_kh + s_ki[:, None] + o_k[None, :], mask=m_t[:, None], other=0.0)
        b_s16 = b_s.to(IO)

        if DELTA:
            b_e = tl.load(p_e + o_tile) if KEY_GATE else b_k  # [C, K]
            b_r = tl.dot(b_s16, tl.trans(b_e), input_precision=PREC)
            b_r = -b_r if KEY_GATE else b_r * -b_ef[None, :]
        if p_v is not None:
            s_vi = o_tok * s_vt + (o_t % NS) * s_vs
            m_v = o_t < v_end
            b_v = tl.load(p_vh + s_vi[:, None], mask=m_v[:, None], other=0.0)  # [C, BV]
            if p_w is not None:
                p_tile = p_w + i_h * s_wh + o_tok[:, None] * s_wt + o_v[None, :]
                b_w = tl.load(p_tile, mask=m_v[:, None], other=0.0)  # [C, BV]
                b_w = tl.dot(b_unit, tl.trans(b_w), input_precision=PREC)
                b_r += tl.dot(b_unit, tl.trans(b_v), input_precision=PREC) * b_w
        if DELTA:
            p_tt = p_t + block * (PARTS * C * C)
            b_t = tl.load(p_tt + o_i[:, None] * C + o_i[None, :])  # [C, C]
            b_u = tl.zeros([BV, C], tl.float32)
            if p_v is not None:  # noqa: SIM102 (constants that fold one by one)
                if p_w is None:
                    b_u = tl.dot(tl.trans(b_v), tl.trans(b_t), b_u, input_precision=PREC)
            b_r16 = b_r.to(IO)
            b_u = tl.dot(b_r16, tl.trans(b_t), b_u, input_precision=PREC)
            b_u16 = b_u.to(IO)
        else:
            b_u = tl.dot(b_unit, tl.trans(b_v), input_precision=PREC)  # [BV, C]
            b_u16 = b_u.to(IO)

        if p_o is not None:
            i_tq, _, m_q = query_rows(i_c, length, C, CQ, NS)
            if KEY_GATE:
                b_q = tl.load(p_q + o_tile)  # [CQ, K]
                b_o = tl.dot(b_s16, tl.trans(b_q), input_precision=PREC)
            else:
                p_tile = p_qh + (begin + i_tq)[:, None] * s_qt + o_k[None, :]
                b_q = tl.load(p_tile, mask=m_q[:, None], other=0.0)
                b_o = tl.dot(b_s16, tl.trans(b_q), input_precision=PREC)
                b_o *= b_qf[None, :]
            p_pt = p_p + block * (PARTS * CQ * C) + o_q[:, None] * C + o_i[None, :]
            b_p = tl.load(p_pt)  # [CQ, C]
            b_o = tl.dot(b_u16, tl.trans(b_p), b_o, input_precision=PREC)
            if p_d is not None:
                b_d = tl.load(p_d + i_h * s_dh + o_v * s_dv).to(tl.float32)
                b_o += b_d[:, None] * b_u
            o_out = (begin + i_tq)[None, :]
            if p_pre is not None:
                p_tile = p_pre + i_h * s_ph + o_v[:, None] + o_out * s_pt
                tl.store(p_tile, b_o.to(IO), mask=m_q[None, :])
            if p_z is not None:
                p_tile = p_z + i_h * s_zh + (begin + i_tq)[:, None] * s_zt + o_v[None, :]
                b_z = tl.load(p_tile, mask=m_q[:, None], other=0.0)  # [CQ, BV]
                b_z = tl.dot(b_unit, tl.trans(b_z), input_precision=PREC)
                b_o *= b_z * sigmoid(b_z)
            if not SPLIT:
                tl.store(p_oh + o_out * s_ot, b_o.to(IO), mask=m_q[None, :])

        if KEY_GATE:
            b_s *= b_decay[None, :]
            b_uk = b_u16
        else:
            b_s *= growth(b_decay)
            b_uk = (b_u * b_kf[None, :]).to(IO)
        b_s = tl.dot(b_uk, b_k, b_s, input_precision=PREC)

        if SPLIT:
            flag = True
            if SPLIT == 2:
                flag = size > GROWTH
                i_x = first + tl.minimum(i_c + 1, i_last - 1)
                size = inverse_growth(p_t, i_x * HO + i_h, C, SPLIT)
            if flag:
                # What rounding took from T^T, times what it left of the rest, and the reverse: what
                # U lacks, beside what its own rounding took.
                # V of another write strength is part of R.
                b_vt = b_v if p_v is not None and p_w is None else None
                b_u = refined(b_u, b_r, b_vt, b_t, p_tt + C * C, C, PREC)
                b_ul = (b_u - b_u16.to(tl.float32)).to(IO)
                if p_o is not None:
                    b_o = tl.dot(b_ul, tl.trans(b_p), b_o, input_precision=PREC)
                    b_pl = tl.load(p_pt + CQ * C)
                    b_o = tl.dot(b_u16, tl.trans(b_pl), b_o, input_precision=PREC)
                if not KEY_GATE:
                    b_ul = (b_u * b_kf[None, :] - b_uk.to(tl.float32)).to(IO)
                b_s = tl.dot(b_ul, b_k, b_s, input_precision=PREC)
            if p_o is not None:
                tl.store(p_oh + o_out * s_ot, b_o.to(IO), mask=m_q[None, :])

        if SATURATE:
            rise = tl.load(p_x + block * (C * C) + (C - 2)) if KEY_GATE else b_decay
            risen = tl.maximum(risen, rise)

    if SATURATE:  # noqa: SIM102
        if risen > 0.0:
            b_s = tl.where(tl.abs(b_s) >= TOP, b_s * TOP, b_s)
    return b_s


@triton.jit
def _summarize(
    pid,
    p_k,
    p_e,
    p_v,
    p_w,
    p_rows,
    p_decay,
    p_t,
    p_x,
    p_index,
    p_enter,
    p_move,
    p_cu,
    N,
    T,
    P,
    lead,
    span,
    s_cu,
    s_index,
    s_kt,
    s_ks,
    s_kh,
    s_vt,
    s_vs,
    s_vh,
    s_wt,
    s_wh,
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
    SPLIT: tl.constexpr,
    PREC: tl.constexpr,
):
    """One slice of H or of M of the later segment of a slot: V // BV of one, K // BV of the other.

    Without the delta rule M is a number: the log2 of the segment's decay.
    """
    NV: tl.constexpr = V // BV
    NX: tl.constexpr = NV + K // BV if DELTA else NV
    i_x = pid % NX
    i_h = (pid // NX) % HO
    slot = pid // (NX * HO)
    i_n, i_g, count = locate_segment(slot, p_cu, s_cu, N, T, lead, span, C, NS)
    if (i_g < 0) | (i_g + 1 >= count):
        return
    if _state_row(p_index, s_index, i_n, P) < 0:
        return
    begin, length, first = sequence_span(p_cu, s_cu, i_n, T, C, NS)
    i_first = lead + i_g * span
    o_k = tl.arange(0, K)
    # Nothing is written to a transition.
    v_end = tl.where(i_x < NV, length, 0)
    o_v = tl.where(i_x < NV, i_x, i_x - NV) * BV + tl.arange(0, BV)
    b_s = tl.where((o_v[:, None] == o_k[None, :]) & (i_x >= NV), 1.0, 0.0)  # [BV, K]
    b_s = _advance(
        b_s, i_first, i_first + span, begin, length, first, i_h, o_v, v_end,
        None, p_k, p_e, p_v, p_w, p_rows, p_decay, p_t, p_x, None, None, None, None, None, None,
        0, 0, s_kt, s_ks, s_kh, s_vt, s_vs, s_vh, s_wt, s_wh, 0, 0, 0, 0, 0, 0, 0, 0,
        H, HK, HV, HO, K, V, NS, C, CQ, KEY_GATE, DELTA, SPLIT, 1, PREC,
    )  # fmt: skip
    if i_x < NV:
        p_tile = p_enter + (((slot + 1) * HO + i_h) * V + o_v)[:, None] * K + o_k[None, :]
        tl.store(p_tile, b_s)
    elif DELTA:
        p_tile = p_move + ((slot * HO + i_h) * K + o_v)[:, None] * K + o_k[None, :]
        tl.store(p_tile, b_s)
    if not DELTA:  # noqa: SIM102 (only the inner test is a run-time one)
        if i_x == 0:
            b_sum = _log_decay(p_rows, first + i_first, span, i_h, HO, C)
            tl.store(p_move + slot * HO + i_h, b_sum)


@triton.jit
def _log_decay(p_rows, first, chunks, i_h, HO: tl.constexpr, C: tl.constexpr):
    """log2 of the decay over chunks from slot `first`: the sum of G at their ends."""
    b_sum = tl.zeros([128], tl.float32)
    for i_0 in range(0, chunks, 128):
        o_c = i_0 + tl.arange(0, 128)
        p_end = p_rows + ((first + o_c) * HO + i_h) * (ROWS * C) + (4 * C - 1)
        b_sum += tl.load(p_end, mask=o_c < chunks, other=0.0)
    return tl.sum(b_sum)


@triton.jit(do_not_specialize=["N", "T", "P", "lead", "span"])
def scan_kernel(
    p_q,
    p_k,
    p_e,
    p_v,
    p_w,
    p_rows,
    p_decay,
    p_t,
    p_x,
    p_p,
    p_d,
    p_z,
    p_h0,
    p_index,
    p_o,
    p_pre,
    p_ht,
    p_check,
    p_enter,
    p_move,
    p_cu,
    N,
    T,
    P,
    lead,
    span,
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
    STAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    EVERY: tl.constexpr,
    PREC: tl.constexpr,
):
    NV: tl.constexpr = V // BV
    IO: tl.constexpr = p_k.dtype.element_ty
    pid = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, K)
    if STAGE == "open":
        spans = pid - N * (HO * NV)
        if spans >= 0:
            _summarize(
                spans, p_k, p_e, p_v, p_w, p_rows, p_decay, p_t, p_x, p_index, p_enter, p_move,
                p_cu, N, T, P, lead, span, s_cu, s_index, s_kt, s_ks, s_kh, s_vt, s_vs, s_vh, s_wt,
                s_wh, H, HK, HV, HO, K, V, NS, C, CQ, BV, KEY_GATE, DELTA, SPLIT, PREC,
            )  # fmt: skip
            return
    i_v = pid % NV
    i_h = (pid // NV) % HO
    i_n = pid // (NV * HO)
    o_v = i_v * BV + tl.arange(0, BV)
    # The span: chunks [i_first, i_last).
    if STAGE == "close":
        slot = i_n
        i_n, i_g, _count = locate_segment(slot, p_cu, s_cu, N, T, lead, span, C, NS)
        if i_g < 0:
            return
    begin, length, first = sequence_span(p_cu, s_cu, i_n, T, C, NS)
    chunks = tl.cdiv(length, C)
    i_first = 0
    i_last = chunks
    if STAGE == "open":
        i_last = tl.minimum(chunks, lead)
    if STAGE == "close":
        i_first = lead + i_g * span
        i_last = tl.minimum(chunks, i_first + span)
    i_s = _state_row(p_index, s_index, i_n, P)
    o_state = o_v[:, None] * s_0v + o_k[None, :]

    if p_o is not None:  # noqa: SIM102 (only the inner test is a run-time one, as below)
        if i_s < 0:
            p_oh = p_o + i_h * s_oh + o_v[:, None]
            for i_c in range(i_first, i_last):
                i_tq, _, m_q = query_rows(i_c, length, C, CQ, NS)
                p_tile = p_oh + (begin + i_tq)[None, :] * s_ot
                tl.store(p_tile, tl.zeros([BV, CQ], IO), mask=m_q[None, :])
                if p_pre is not None:
                    p_tile = p_pre + i_h * s_ph + o_v[:, None] + (begin + i_tq)[None, :] * s_pt
                    tl.store(p_tile, tl.zeros([BV, CQ], IO), mask=m_q[None, :])
            return

    # Entering state [BV, K].
    if STAGE == "close":
        b_s = tl.load(p_enter + ((slot * HO + i_h) * V + o_v)[:, None] * K + o_k[None, :])
    elif IDENTITY:
        b_s = tl.where(o_v[:, None] == o_k[None, :], 1.0, 0.0)
    elif p_h0 is not None:
        b_s = tl.load(p_h0 + i_s * s_0n + i_h * s_0h + o_state).to(tl.float32)
    else:
        b_s = tl.zeros([BV, K], tl.float32)
    if p_check is not None:
        row = checkpoint_base(p_cu, s_cu, i_n, T, EVERY, NS)
        p_check += ((row * HO + i_h) * V + o_v)[:, None] * K + o_k[None, :]

    b_s = _advance(
        b_s, i_first, i_last, begin, length, first, i_h, o_v, length,
        p_q, p_k, p_e, p_v, p_w, p_rows, p_decay, p_t, p_x, p_p, p_d, p_z, p_o, p_pre, p_check,
        s_qt, s_qh, s_kt, s_ks, s_kh, s_vt, s_vs, s_vh, s_wt, s_wh, s_dh, s_dv, s_zt, s_zh,
        s_ot, s_oh, s_pt, s_ph,
        H, HK, HV, HO, K, V, NS, C, CQ, KEY_GATE, DELTA, SPLIT, EVERY, PREC,
    )  # fmt: skip

    if STAGE == "open":  # noqa: SIM102
        if i_last < chunks:
            _count, base = sequence_segments(begin, length, lead, span, C, NS)
            p_tile = p_enter + ((base * HO + i_h) * V + o_v)[:, None] * K + o_k[None, :]
            tl.store(p_tile, b_s)
            return
    if STAGE == "close":  # noqa: SIM102
        if i_last < chunks:
            return
    if p_ht is not None:
        p_tile = p_ht + i_s * s_fn + i_h * s_fh + o_v[:, None] * s_fv + o_k[None, :]
        tl.store(p_tile, b_s.to(p_ht.dtype.element_ty))


@triton.jit(do_not_specialize=["T"])
def span_decay_kernel(
    p_rows, p_cu, p_out, T, s_cu, HO: tl.constexpr, NS: tl.constexpr, C: tl.constexpr
):
    """log2 of a sequence's whole decay, [N, HO]: the sum of G at the end of its chunks."""
    pid = tl.program_id(0).to(tl.int64)
    i_h = pid % HO
    i_n = pid // HO
    _, length, first = sequence_span(p_cu, s_cu, i_n, T, C, NS)
    b_sum = _log_decay(p_rows, first, tl.cdiv(length, C), i_h, HO, C)
    tl.store(p_out + pid, b_sum)
