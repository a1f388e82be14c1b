"""Gate transforms on their own: raw projections to natural-log decays, and back.

Raw gates are [rows, columns], column c of head c // D; a program takes BR rows of BC columns. The
backward's programs stride over the rows, so that there are PARTS partial sums of each parameter's
gradient whatever the length: another kernel's sum of those has one order, and no atomics.
"""

import triton
import triton.language as tl

from lagraph.engines.triton.kernels.gate import LOG2E, sigmoid, softplus

__all__ = ["gate_backward_kernel", "gate_kernel"]

# exp(80) is larger than any other number here: see lagraph.ops.gate.
LARGEST = tl.constexpr(80.0)


@triton.jit
def _parameters(p_alog, p_bias, o_c, m_c, D: tl.constexpr):
    """exp(A_log) and dt_bias of columns."""
    b_alog = tl.load(p_alog + o_c // D, mask=m_c, other=0.0).to(tl.float32)
    b_bias = tl.load(p_bias + o_c, mask=m_c, other=0.0).to(tl.float32)
    return tl.exp2(tl.minimum(b_alog, LARGEST) * LOG2E), b_bias


@triton.jit(do_not_specialize=["rows", "floor"])
def gate_kernel(
    p_raw,
    p_alog,
    p_bias,
    p_out,
    rows,
    floor,
    s_row,
    s_head,
    s_channel,
    COLUMNS: tl.constexpr,
    D: tl.constexpr,
    BOUNDED: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    NC: tl.constexpr = (COLUMNS + BC - 1) // BC
    o_r = (pid // NC) * BR + tl.arange(0, BR)
    o_c = (pid % NC) * BC + tl.arange(0, BC)
    m_c = o_c < COLUMNS
    m = (o_r < rows)[:, None] & m_c[None, :]
    amp, b_bias = _parameters(p_alog, p_bias, o_c, m_c, D)
    o_x = o_r[:, None] * s_row + ((o_c // D) * s_head + (o_c % D) * s_channel)[None, :]
    b_x = tl.load(p_raw + o_x, mask=m, other=0.0).to(tl.float32) + b_bias[None, :]
    b_g = floor * sigmoid(amp[None, :] * b_x) if BOUNDED else -amp[None, :] * softplus(b_x)
    tl.store(p_out + o_r[:, None] * COLUMNS + o_c[None, :], b_g, mask=m)


@triton.jit(do_not_specialize=["rows", "floor"])
def gate_backward_kernel(
    p_raw,
    p_alog,
    p_bias,
    p_dout,
    p_draw,
    p_dalog,
    p_dbias,
    rows,
    floor,
    s_row,
    s_head,
    s_channel,
    s_drow,
    s_dhead,
    s_dchannel,
    COLUMNS: tl.constexpr,
    D: tl.constexpr,
    BOUNDED: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    PARTS: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    NC: tl.constexpr = (COLUMNS + BC - 1) // BC
    i_p = pid // NC
    o_c = (pid % NC) * BC + tl.arange(0, BC)
    m_c = o_c < COLUMNS
    amp, b_bias = _parameters(p_alog, p_bias, o_c, m_c, D)
    o_h, o_d = o_c // D, o_c % D
    b_dalog = tl.zeros([BC], tl.float32)
    b_dbias = tl.zeros([BC], tl.float32)
    for i_r in range(i_p, tl.cdiv(rows, BR), PARTS):
        o_r = i_r * BR + tl.arange(0, BR)
        m = (o_r < rows)[:, None] & m_c[None, :]
        o_x = o_r[:, None] * s_row + (o_h * s_head + o_d * s_channel)[None, :]
        o_g = o_r[:, None] * s_drow + (o_h * s_dhead + o_d * s_dchannel)[None, :]
        b_x = tl.load(p_raw + o_x, mask=m, other=0.0).to(tl.float32) + b_bias[None, :]
        b_do = tl.load(p_dout + o_g, mask=m, other=0.0).to(tl.float32)
        if BOUNDED:
            b_u = amp[None, :] * b_x
            b_slope = floor * sigmoid(b_u) * sigmoid(-b_u) * b_do
            # Saturated: 0 times what may be infinite is 0.
            flat = b_slope == 0.0
            b_dx = tl.where(flat, 0.0, b_slope * amp[None, :])
            b_da = tl.where(flat, 0.0, b_slope * b_u)
        else:
            b_scaled = -amp[None, :] * b_do
            b_dx = b_scaled * sigmoid(b_x)
            b_da = b_scaled * softplus(b_x)
        o_out = p_draw + o_r[:, None] * COLUMNS + o_c[None, :]
        tl.store(o_out, b_dx.to(p_draw.dtype.element_ty), mask=m)
        b_dalog += tl.sum(tl.where(m, b_da, 0.0), 0)
        b_dbias += tl.sum(tl.where(m, b_dx, 0.0), 0)
    tl.store(p_dalog + i_p * COLUMNS + o_c, b_dalog, mask=m_c)
    tl.store(p_dbias + i_p * COLUMNS + o_c, b_dbias, mask=m_c)
