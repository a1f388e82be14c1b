"""Inverses of unit lower triangular blocks of 16 rows, in fp32, two blocks a warp.

Lanes 0 to 15 hold a column each of the first block's inverse, lanes 16 to 31 of the second's, by
substitution. Nothing is squared, so that correlated keys, whose powers grow, do no harm. Blocks are
joined by whoever applies them: see `kernels.forward`.

In shared memory a block is transposed (only what is below the diagonal is read), fp32, with a pitch
of 20: its columns start at 16 bytes, and the columns of an accumulator meet no bank twice.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

__all__ = ["LEAF", "NUMBERS", "leaf", "substitute"]

LEAF = 16
PITCH = 20
NUMBERS = LEAF * PITCH  # fp32 numbers of one block


@cute.jit
def leaf(numbers: cute.Tensor, index: cutlass.Constexpr):
    """Where a block goes: indexed (row, column)."""
    start = numbers.iterator + index * NUMBERS
    return cute.make_tensor(start, cute.make_layout((LEAF, LEAF), stride=(1, PITCH)))


@cute.jit
def below(start, j: cutlass.Constexpr):
    """Column j below the diagonal: the quads of rows that hold it."""
    quads = []
    for q in cutlass.range_constexpr((j + 1) // 4, LEAF // 4):
        values = cute.make_rmem_tensor(4, Float32)
        source = cute.make_tensor(start + (j * PITCH + 4 * q), cute.make_layout(4))
        cute.autovec_copy(source, values)
        quads.append(values)
    return quads


@cute.jit
def substitute(numbers, lane):
    """One warp, two blocks from `numbers` on: column lane % 16 of the inverse of lane / 16."""
    start = numbers + cute.assume(lane // LEAF * NUMBERS, divby=4)
    x = []
    for i in cutlass.range_constexpr(LEAF):
        x.append(Float32(1.0) if lane % LEAF == i else Float32(0.0))
    ahead = below(start, 0)  # one column ahead: a load takes longer than a step
    for j in cutlass.range_constexpr(LEAF - 1):
        quads = ahead
        if cutlass.const_expr(j + 1 < LEAF - 1):
            ahead = below(start, j + 1)
        for q in cutlass.range_constexpr((j + 1) // 4, LEAF // 4):
            for e in cutlass.range_constexpr(4):
                i = 4 * q + e
                if cutlass.const_expr(i > j):
                    x[i] = x[i] - quads[q - (j + 1) // 4][e] * x[j]
    return x
