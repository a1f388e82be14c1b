"""A kernel that computes nothing of use: the products that the other kernels are made of.

All tiles are [B, B], row-major; x = a b^T in fp32. The outputs, stacked:

    0   cast(x) c                   a rounded accumulator as the left operand
    1   cast(b a^T) c               x^T c as kernels here get it: the transposed product, anew
    2   cast(x) c^T                 the same beside a transposed load
    3   two steps of the serial pass: s += cast(cast(s) b^T) c, s first x
    4   c (c x)                     fp32 operands in three passes: the merge of the inverse
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["probe_kernel"]


@triton.jit
def probe_kernel(p_a, p_b, p_c, p_out, B: tl.constexpr, PREC: tl.constexpr):
    IO = p_a.dtype.element_ty
    o_tile = tl.arange(0, B)[:, None] * B + tl.arange(0, B)[None, :]
    b_a = tl.load(p_a + o_tile)
    b_b = tl.load(p_b + o_tile)
    b_c = tl.load(p_c + o_tile)
    b_x = tl.dot(b_a, tl.trans(b_b))
    b_xt = tl.dot(b_b, tl.trans(b_a))
    tl.store(p_out + o_tile, tl.dot(b_x.to(IO), b_c))
    tl.store(p_out + B * B + o_tile, tl.dot(b_xt.to(IO), b_c))
    tl.store(p_out + 2 * B * B + o_tile, tl.dot(b_x.to(IO), tl.trans(b_c)))
    b_s = b_x
    for _ in range(2):
        b_r = tl.dot(b_s.to(IO), tl.trans(b_b))
        b_s = tl.dot(b_r.to(IO), b_c, b_s)
    tl.store(p_out + 3 * B * B + o_tile, b_s)
    b_w = b_c.to(tl.float32)
    b_m = tl.dot(b_w, tl.dot(b_w, b_x, input_precision=PREC), input_precision=PREC)
    tl.store(p_out + 4 * B * B + o_tile, b_m)
