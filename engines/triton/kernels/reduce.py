"""Deterministic reductions that end the backward: head groups, and parameters over chunks.

`fold_kernel` sums gradients of per-head rows [rows, HO, D] over the heads that share an input head,
in fp32 and in a fixed order, and takes them through the unit norm where there is one:
dx = r (y - x r^2 (x . y)) with r = rsqrt(x . x + eps) and y the sum. One program per (R rows,
head), tiles [R, D].

`total_kernel` sums [rows, n] fp32 partials over rows, which are chunks: one program per B columns.
"""

import triton
import triton.language as tl

from lagraph.engines.triton.kernels.factor import NORM_EPS

__all__ = ["fold_kernel", "total_kernel"]


@triton.jit(do_not_specialize=["rows"])
def fold_kernel(
    p_part,
    p_x,
    p_dx,
    rows,
    s_xt,
    s_xs,
    s_xh,
    s_dt,
    s_ds,
    s_dh,
    HX: tl.constexpr,
    HO: tl.constexpr,
    D: tl.constexpr,
    NS: tl.constexpr,
    R: tl.constexpr,
    NORM: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    i_h = pid % HX
    o_r = (pid // HX) * R + tl.arange(0, R)
    m_r = (o_r < rows)[:, None]
    o_d = tl.arange(0, D)[None, :]
    GROUP: tl.constexpr = HO // HX
    b_y = tl.zeros([R, D], tl.float32)
    for i_g in range(GROUP):
        o_part = (o_r * HO + i_h * GROUP + i_g)[:, None] * D + o_d
        b_y += tl.load(p_part + o_part, mask=m_r, other=0.0).to(tl.float32)  # [R, D]
    if NORM:
        o_x = (o_r // NS * s_xt + o_r % NS * s_xs)[:, None] + i_h * s_xh + o_d
        b_x = tl.load(p_x + o_x, mask=m_r, other=0.0).to(tl.float32)  # [R, D]
        b_r = tl.rsqrt(tl.sum(b_x * b_x, axis=1) + NORM_EPS)
        b_c = tl.sum(b_x * b_y, axis=1) * b_r * b_r
        b_y = (b_y - b_x * b_c[:, None]) * b_r[:, None]
    o_x = (o_r // NS * s_dt + o_r % NS * s_ds)[:, None] + i_h * s_dh + o_d
    tl.store(p_dx + o_x, b_y.to(p_dx.dtype.element_ty), mask=m_r)


@triton.jit(do_not_specialize=["rows"])
def total_kernel(p_part, p_out, rows, n, B: tl.constexpr, R: tl.constexpr):
    o_b = tl.program_id(0) * B + tl.arange(0, B)
    m_b = (o_b < n)[None, :]
    b_sum = tl.zeros([R, B], tl.float32)
    for i_r in range(0, rows, R):
        o_r = (i_r + tl.arange(0, R)).to(tl.int64)[:, None]
        b_sum += tl.load(p_part + o_r * n + o_b[None, :], mask=(o_r < rows) & m_b, other=0.0)
    tl.store(p_out + o_b, tl.sum(b_sum, axis=0).to(p_out.dtype.element_ty), mask=o_b < n)
