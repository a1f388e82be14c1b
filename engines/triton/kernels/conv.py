"""Causal depthwise convolution of short width: forward, backward and one-token update.

    y[t] = act(sum_j w[j] x[t - (W - 1) + j])        t >= 0; x[-(W-1) .. -1] is the history

Channels are innermost: a thread owns a few neighbouring channels and walks over rows, so that a
row is one vector load and the window of W rows stays in registers. A sequence is cut into chunks
from its own start, hence no chunk crosses a boundary. Chunk c of sequence i has the slot

    dense    i per + c                  per chunks in every sequence
    packed   begin_i // rows + i + c    see `index`; chunk 0 exists for empty sequences, too

Programs, one per (slot, BC channels), walk over their chunk R rows at a time, all loaded before the
first store. `rows`, the length of a chunk, is chosen by the launch and compiled into nothing.

`conv_kernel`: the program of chunk 0 reads the history and then writes the final one, so that both
may be the same slot of a pool; a pool therefore needs rows >= W - 1, or one chunk a sequence.

`conv_backward_kernel` goes on for W - 1 rows past its chunk, where it only needs dz = dy act'(pre).
dx[t] is complete W - 1 rows after t; rows before the sequence are the history's gradient. The
chunk's share of dw goes to fp32 partials [slots, W, C], which `conv_weight_kernel` sums in a fixed
order.

Registers a thread with E channels: (R + 2 W) E in the forward, (2 R + 4 W) E in the backward,
halves for R where the rows are 16-bit.
"""

# ruff: noqa: RUF005 (kernels have no unpacking)

import triton
import triton.language as tl

from lagraph.engines.triton.kernels.gate import LOG2E

__all__ = [
    "conv_backward_kernel",
    "conv_kernel",
    "conv_weight_kernel",
    "silu",
    "silu_slope",
]


@triton.jit
def _sigmoid(b_x):
    """Two special functions and no division, whose range checks cost as much as the convolution.

    An overflow of exp2 gives 0, as it should.
    """
    b_r = tl.rsqrt(1.0 + tl.exp2(b_x * -LOG2E))
    return b_r * b_r


@triton.jit
def silu(b_x):
    return b_x * _sigmoid(b_x)


@triton.jit
def silu_slope(b_x):
    b_s = _sigmoid(b_x)
    return b_s * (1.0 + b_x * (1.0 - b_s))


@triton.jit
def _offset(p_cu, s_cu, i_n, T):
    return tl.minimum(tl.maximum(tl.load(p_cu + i_n * s_cu).to(tl.int64), 0), T)


@triton.jit
def _locate(slot, p_cu, s_cu, N, T, rows):
    """Sequence, chunk (-1 if the slot is unused), first row and length.

    The search multiplies: a division of 64 bits takes longer than all else of a step.
    """
    low = tl.zeros([], tl.int64)
    high = low + N
    while high - low > 1:
        middle = (low + high) >> 1
        # begin // rows + middle <= slot
        if _offset(p_cu, s_cu, middle, T) < (slot - middle + 1) * rows:
            low = middle
        else:
            high = middle
    begin = _offset(p_cu, s_cu, low, T)
    length = tl.maximum(_offset(p_cu, s_cu, low + 1, T), begin) - begin
    i_c = slot - (begin.to(T.dtype) // rows + low)
    i_c = tl.where((i_c == 0) | ((i_c > 0) & (i_c * rows < length)), i_c, -1)
    return low, i_c, begin, length


@triton.jit
def _only(o_c, m, C: tl.constexpr):
    """The channels, where the scalar m holds. (A scalar and a block do not combine in Triton's
    interpreter.)"""
    return o_c < tl.where(m, C, 0)


@triton.jit
def _row(p_x, p_h, s_xt, s_hw, o_c, i_t, m_x, m_h, C: tl.constexpr, W: tl.constexpr):
    """Row i_t of a sequence in fp32, [BC]; before its start from the history, else zero."""
    m_t = _only(o_c, m_x & (i_t >= 0), C)
    b_x = tl.load(p_x + i_t * s_xt, mask=m_t, other=0.0).to(tl.float32)
    if p_h is not None:
        m_t = _only(o_c, m_h & (i_t < 0), C)
        b_h = tl.load(p_h + (i_t + (W - 1)) * s_hw, mask=m_t, other=0.0)
        b_x = tl.where(i_t < 0, b_h.to(tl.float32), b_x)
    return b_x


@triton.jit
def _taps(
    p_w, o_c, i_c, s_wc, s_ww, C: tl.constexpr, W: tl.constexpr, BC: tl.constexpr,
    FLAT: tl.constexpr,
):  # fmt: skip
    """The weight's columns [BC]. FLAT, four of them lying side by side: by 16 bytes a load, rather
    than a load for each, whose lanes are all lines apart."""
    b_w = ()
    if FLAT:
        o_w = i_c * W + tl.arange(0, BC * W)
        b_t = tl.reshape(tl.load(p_w + o_w, mask=o_w < C * W, other=0.0), [BC, 2, 2])
        b_even, b_odd = tl.split(b_t)
        b_0, b_2 = tl.split(b_even)
        b_1, b_3 = tl.split(b_odd)
        b_w = (
            b_0.to(tl.float32), b_1.to(tl.float32), b_2.to(tl.float32), b_3.to(tl.float32)
        )  # fmt: skip
    else:
        for j in tl.static_range(W):
            b_t = tl.load(p_w + o_c * s_wc + j * s_ww, mask=o_c < C, other=0.0)
            b_w = b_w + (b_t.to(tl.float32),)
    return b_w


@triton.jit
def _some_rows(p_x, s_xt, o_c, i_g, end, live, C: tl.constexpr, R: tl.constexpr):
    """R rows from i_g on, as they are stored; zero from `end` on."""
    b_xs = ()
    for r in tl.static_range(R):
        m_t = _only(o_c, live & (i_g + r < end), C)
        b_xs = b_xs + (tl.load(p_x + (i_g + r) * s_xt, mask=m_t, other=0.0),)
    return b_xs


@triton.jit(
    do_not_specialize=["N", "T", "P", "per", "rows"],
    do_not_specialize_on_alignment=["p_cu", "p_index", "p_has"],
)
def conv_kernel(
    p_x,
    p_w,
    p_y,
    p_cu,
    p_h,
    p_index,
    p_has,
    p_f,
    N,
    T,
    P,
    per,
    rows,
    s_xb,
    s_xt,
    s_wc,
    s_ww,
    s_cu,
    s_hn,
    s_hw,
    s_index,
    s_has,
    s_fn,
    s_fw,
    C: tl.constexpr,
    W: tl.constexpr,
    BC: tl.constexpr,
    R: tl.constexpr,
    AHEAD: tl.constexpr,
    FLAT: tl.constexpr,
    ACT: tl.constexpr,
):
    NC: tl.constexpr = (C + BC - 1) // BC
    pid = tl.program_id(0)
    slot = pid // NC
    if p_cu is None:
        i_n = (slot // per).to(tl.int64)
        i_c = (slot % per).to(tl.int64)
        begin = i_n * T
        length = tl.zeros([], tl.int64) + T
        p_x += i_n * s_xb
    else:
        i_n, i_c, begin, length = _locate(slot.to(tl.int64), p_cu, s_cu, N, T, rows)
        p_x += begin * s_xt
    if i_c < 0:
        return
    o_c = pid % NC * BC + tl.arange(0, BC)
    p_x += o_c
    p_y += begin * C + o_c

    i_s = i_n
    live = i_n >= 0
    if p_index is not None:
        i_s = tl.load(p_index + i_n * s_index).to(tl.int64)
        live = (i_s > 0) & (i_s < P)
        i_s = tl.where(live, i_s, 0)
    known = live
    if p_has is not None:
        known = live & (tl.load(p_has + i_n * s_has) != 0)
    if p_h is not None:
        p_h += i_s * s_hn + o_c

    b_w = _taps(p_w, o_c, pid % NC * BC, s_wc, s_ww, C, W, BC, FLAT)
    i_0 = i_c * rows
    b_x = ()  # rows t - (W - 1) .. t - 1
    for j in tl.static_range(W - 1):
        b_x = b_x + (_row(p_x, p_h, s_xt, s_hw, o_c, i_0 + (j - (W - 1)), live, known, C, W),)
    if p_f is not None:  # noqa: SIM102 (only the inner test is a run-time one)
        if i_c == 0:
            b_f = ()
            for j in tl.static_range(W - 1):
                i_t = length + (j - (W - 1))
                b_f = b_f + (_row(p_x, p_h, s_xt, s_hw, o_c, i_t, live, known, C, W),)
            p_fc = p_f + i_s * s_fn + o_c
            m_f = _only(o_c, live, C)
            tl.debug_barrier()  # a pool's history is read before it is overwritten
            for j in tl.static_range(W - 1):
                tl.store(p_fc + j * s_fw, b_f[j].to(p_f.dtype.element_ty), mask=m_f)

    i_1 = tl.minimum(i_0 + rows, length)
    if AHEAD:
        n_xs = _some_rows(p_x, s_xt, o_c, i_0, i_1, live, C, R)
    for i_g in range(i_0, i_1, R):
        if AHEAD:
            b_xs = n_xs
            n_xs = _some_rows(p_x, s_xt, o_c, i_g + R, i_1, live, C, R)
        else:
            b_xs = _some_rows(p_x, s_xt, o_c, i_g, length, live, C, R)
        for r in tl.static_range(R):
            b_win = b_x + (b_xs[r].to(tl.float32),)
            b_y = b_w[0] * b_win[0]
            for j in tl.static_range(1, W):
                b_y += b_w[j] * b_win[j]
            if ACT is not None:
                b_y = ACT(b_y)
            if p_index is not None:
                b_y = tl.where(live, b_y, 0.0)
            m_t = _only(o_c, i_g + r < length, C)
            tl.store(p_y + (i_g + r) * C, b_y.to(p_y.dtype.element_ty), mask=m_t)
            b_x = ()
            for j in tl.static_range(W - 1):
                b_x = b_x + (b_win[j + 1],)


@triton.jit
def _rows_of(p_x, p_dy, s_xt, s_yt, i_g, m_x, R: tl.constexpr):
    """R rows of x and dy from i_g on, as they are stored, where the mask holds."""
    b_xs = ()
    b_ys = ()
    p_x += i_g * s_xt
    p_dy += i_g * s_yt
    for r in tl.static_range(R):
        b_xs = b_xs + (tl.load(p_x + r * s_xt, mask=m_x, other=0.0),)
        b_ys = b_ys + (tl.load(p_dy + r * s_yt, mask=m_x, other=0.0),)
    return b_xs, b_ys


@triton.jit
def _last_rows(
    p_x, p_dy, s_xt, s_yt, o_c, i_g, length, C: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """The same, zero from `length` on."""
    b_xs = ()
    b_ys = ()
    p_x += i_g * s_xt
    p_dy += i_g * s_yt
    for r in tl.static_range(R):
        m_x = _only(o_c, i_g + r < length, C)
        b_xs = b_xs + (tl.load(p_x + r * s_xt, mask=m_x, other=0.0),)
        b_ys = b_ys + (tl.load(p_dy + r * s_yt, mask=m_x, other=0.0),)
    return b_xs, b_ys


@triton.jit
def _group(
    b_xs, b_ys, b_x, b_z, b_dw, b_w, p_df, p_dx, p_dh, s_fw, o_c, i_g, i_c, i_0, i_1, length,
    C: tl.constexpr, W: tl.constexpr, R: tl.constexpr, MASKED: tl.constexpr, OWN: tl.constexpr,
    SLOPE: tl.constexpr,
):  # fmt: skip
    """R rows from i_g on: their dz, and dx of the W - 1 rows before them, up to i_1.

    MASKED: rows from `length` on are zero, and so is their dz. OWN: they count for dw.
    """
    H: tl.constexpr = W - 1
    m_c = o_c < C
    p_out = p_dx + (i_g - H) * C
    for r in tl.static_range(R):
        b_win = b_x + (b_xs[r].to(tl.float32),)
        b_dz = b_ys[r].to(tl.float32)
        if SLOPE is not None:
            b_pre = b_w[0] * b_win[0]
            for j in tl.static_range(1, W):
                b_pre += b_w[j] * b_win[j]
            # Past the end dy is zero, and the slope finite where the outputs before are.
            b_dz = b_dz * SLOPE(b_pre)
        b_zin = b_z + (b_dz,)
        # dx of row i_p, whose last use is here.
        b_dx = b_w[H] * b_zin[0]
        for j in tl.static_range(1, W):
            b_dx += b_w[H - j] * b_zin[j]
        i_p = i_g + (r - H)
        if p_df is not None:
            i_f = i_p - (length - H)
            m_f = _only(o_c, (i_f >= 0) & (i_f < H), C)
            b_dx += tl.load(p_df + i_f * s_fw, mask=m_f, other=0.0).to(tl.float32)
        if MASKED:
            m_p = _only(o_c, (i_p >= i_0) & (i_p < i_1), C)
        elif r < H:
            m_p = _only(o_c, i_p >= i_0, C)
        else:
            m_p = m_c
        tl.store(p_out + r * C, b_dx.to(p_dx.dtype.element_ty), mask=m_p)
        if p_dh is not None:
            m_p = _only(o_c, (i_p < 0) & (i_c == 0), C)
            tl.store(p_dh + (i_p + H) * C, b_dx.to(p_dh.dtype.element_ty), mask=m_p)
        if OWN:
            b_new = ()
            for j in tl.static_range(W):
                b_new = b_new + (b_dw[j] + b_dz * b_win[j],)
            b_dw = b_new
        b_x = ()
        b_z = ()
        for j in tl.static_range(H):
            b_x = b_x + (b_win[j + 1],)
            b_z = b_z + (b_zin[j + 1],)
    return b_x, b_z, b_dw


@triton.jit(do_not_specialize=["N", "T", "per", "rows"], do_not_specialize_on_alignment=["p_cu"])
def conv_backward_kernel(
    p_x,
    p_w,
    p_dy,
    p_cu,
    p_h,
    p_df,
    p_dx,
    p_dw,
    p_dh,
    N,
    T,
    per,
    rows,
    s_xb,
    s_xt,
    s_wc,
    s_ww,
    s_yb,
    s_yt,
    s_cu,
    s_hn,
    s_hw,
    s_fn,
    s_fw,
    C: tl.constexpr,
    W: tl.constexpr,
    BC: tl.constexpr,
    R: tl.constexpr,
    AHEAD: tl.constexpr,
    SLOPE: tl.constexpr,
):
    NC: tl.constexpr = (C + BC - 1) // BC
    H: tl.constexpr = W - 1
    pid = tl.program_id(0)
    slot = pid // NC
    if p_cu is None:
        i_n = (slot // per).to(tl.int64)
        i_c = (slot % per).to(tl.int64)
        begin = i_n * T
        length = tl.zeros([], tl.int64) + T
        p_x += i_n * s_xb
        p_dy += i_n * s_yb
    else:
        i_n, i_c, begin, length = _locate(slot.to(tl.int64), p_cu, s_cu, N, T, rows)
        p_x += begin * s_xt
        p_dy += begin * s_yt
    o_c = pid % NC * BC + tl.arange(0, BC)
    m_c = o_c < C
    p_x += o_c
    p_dy += o_c
    p_dx += begin * C + o_c
    if p_dw is not None:
        p_dw += slot.to(tl.int64) * (W * C) + o_c
    if i_c < 0:
        if p_dw is not None:  # an unused slot adds nothing
            for j in tl.static_range(W):
                tl.store(p_dw + j * C, tl.zeros([BC], tl.float32), mask=m_c)
        return
    if p_h is not None:
        p_h += i_n * s_hn + o_c
    if p_df is not None:
        p_df += i_n * s_fn + o_c
    if p_dh is not None:
        p_dh += i_n * (H * C) + o_c

    live = i_n >= 0
    i_0 = i_c * rows
    i_1 = tl.minimum(i_0 + rows, length)
    b_w = ()
    b_dw = ()
    b_x = ()  # rows t - (W - 1) .. t - 1
    b_z = ()  # and their dz
    for j in tl.static_range(W):
        b_w = b_w + (tl.load(p_w + o_c * s_wc + j * s_ww, mask=m_c, other=0.0).to(tl.float32),)
        b_dw = b_dw + (tl.zeros([BC], tl.float32),)
    for j in tl.static_range(H):
        b_x = b_x + (_row(p_x, p_h, s_xt, s_hw, o_c, i_0 + (j - H), live, live, C, W),)
        b_z = b_z + (tl.zeros([BC], tl.float32),)

    # Whole groups without masks, AHEAD with the next one on its way; then what is left, then the
    # rows that dx waits for.
    i_2 = i_0 + (i_1 - i_0) // R * R
    if AHEAD:
        n_xs, n_ys = _rows_of(p_x, p_dy, s_xt, s_yt, i_0, _only(o_c, i_0 < i_2, C), R)
    for i_g in range(i_0, i_2, R):
        if AHEAD:
            b_xs = n_xs
            b_ys = n_ys
            n_xs, n_ys = _rows_of(
                p_x, p_dy, s_xt, s_yt, i_g + R, _only(o_c, i_g + R < i_2, C), R
            )  # fmt: skip
        else:
            b_xs, b_ys = _rows_of(p_x, p_dy, s_xt, s_yt, i_g, m_c, R)
        b_x, b_z, b_dw = _group(
            b_xs, b_ys, b_x, b_z, b_dw, b_w, p_df, p_dx, p_dh, s_fw, o_c, i_g, i_c, i_0, i_1,
            length, C, W, R, False, True, SLOPE,
        )  # fmt: skip
    i_3 = i_2
    for i_g in range(i_2, i_1, R):  # once at most
        b_xs, b_ys = _last_rows(p_x, p_dy, s_xt, s_yt, o_c, i_g, length, C, R)
        b_x, b_z, b_dw = _group(
            b_xs, b_ys, b_x, b_z, b_dw, b_w, p_df, p_dx, p_dh, s_fw, o_c, i_g, i_c, i_0, i_1,
            length, C, W, R, True, True, SLOPE,
        )  # fmt: skip
        i_3 += R
    b_xs, b_ys = _last_rows(p_x, p_dy, s_xt, s_yt, o_c, i_3, length, C, H)
    _group(
        b_xs, b_ys, b_x, b_z, b_dw, b_w, p_df, p_dx, p_dh, s_fw, o_c, i_3, i_c, i_0, i_1, length,
        C, W, H, True, False, SLOPE,
    )  # fmt: skip

    if p_dw is not None:
        for j in tl.static_range(W):
            tl.store(p_dw + j * C, b_dw[j], mask=m_c)


@triton.jit(do_not_specialize=["slots"])
def conv_weight_kernel(
    p_part, p_out, slots, C: tl.constexpr, W: tl.constexpr, B: tl.constexpr, R: tl.constexpr
):
    """dw [C, W] from partials [slots, W, C]: one program per B channels of a tap."""
    NB: tl.constexpr = (C + B - 1) // B
    i_j = tl.program_id(0) // NB
    o_c = (tl.program_id(0) % NB) * B + tl.arange(0, B)
    m_c = (o_c < C)[None, :]
    b_sum = tl.zeros([R, B], tl.float32)
    b_lost = tl.zeros([R, B], tl.float32)  # what rounding took: slots may be many, and alike
    for i_r in range(0, slots, R):
        o_r = (i_r + tl.arange(0, R)).to(tl.int64)[:, None]
        p_tile = p_part + (o_r * W + i_j) * C + o_c[None, :]
        b_x = tl.load(p_tile, mask=(o_r < slots) & m_c, other=0.0) - b_lost
        b_new = b_sum + b_x
        b_lost = (b_new - b_sum) - b_x
        b_sum = b_new
    b_out = tl.sum(b_sum, axis=0).to(p_out.dtype.element_ty)
    tl.store(p_out + o_c * W + i_j, b_out, mask=o_c < C)
