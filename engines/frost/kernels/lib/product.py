"""Warpgroup products: issue, and the registers in which results become operands."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

__all__ = [
    "accumulator",
    "as_operand",
    "issue",
    "loader",
    "of_registers",
    "of_shared",
    "of_turned",
    "pair",
    "rounded",
    "scale",
    "scaled",
    "split",
    "storer",
    "transposed",
]

ROWS = 64  # rows of a warpgroup's product


def of_shared(dtype, columns):
    """a [64, k] @ b [columns, k]^T, both row-major in shared memory."""
    op = warpgroup.MmaF16BF16Op(
        dtype, Float32, (ROWS, columns, 16), warpgroup.OperandSource.SMEM,
        OperandMajorMode.K, OperandMajorMode.K,
    )  # fmt: skip
    return cute.make_tiled_mma(op)


def of_turned(dtype, columns, warpgroups):
    """a^T [64 warpgroups, k] @ b [columns, k]^T, both in shared memory: a is stored [k, rows]."""
    op = warpgroup.MmaF16BF16Op(
        dtype, Float32, (ROWS, columns, 16), warpgroup.OperandSource.SMEM,
        OperandMajorMode.MN, OperandMajorMode.K,
    )  # fmt: skip
    return cute.make_tiled_mma(op, (warpgroups, 1, 1))


def of_registers(dtype, columns, major=OperandMajorMode.K):
    """a [64, k] in registers @ b [columns, k]^T; `major` MN reads b as the transpose of a tile."""
    op = warpgroup.MmaF16BF16Op(
        dtype, Float32, (ROWS, columns, 16), warpgroup.OperandSource.RMEM, OperandMajorMode.K, major
    )
    return cute.make_tiled_mma(op)


@cute.jit
def accumulator(thread, rows: cutlass.Constexpr, columns: cutlass.Constexpr):
    return thread.make_fragment_C(thread.partition_shape_C((rows, columns)))


@cute.jit
def as_operand(
    thread,
    acc: cute.Tensor,
    dtype: cutlass.Constexpr,
    rows: cutlass.Constexpr,
    k: cutlass.Constexpr,
):
    """An operand fragment and the same registers in the accumulator's order: what is written to the
    second is read as the first, since both keep pairs, rows r and r + 8, groups of eight."""
    operand = cute.make_rmem_tensor(thread.partition_shape_A((rows, k)), dtype)
    return operand, cute.make_tensor(operand.iterator, acc.layout)


@cute.jit
def issue(mma, acc, a, b, accumulate: cutlass.Constexpr):
    """acc (+)= a @ b^T over the whole k of the fragments, as one group that is not waited for."""
    warpgroup.fence()
    for k in cutlass.range_constexpr(cute.size(b, mode=[2])):
        mma.set(warpgroup.Field.ACCUMULATE, True if k else accumulate)
        cute.gemm(mma, acc, a[None, None, k], b[None, None, k], acc)
    warpgroup.commit_group()


def transposed(tile):
    """A tile [rows, columns, stages] as [columns, rows, stages]."""
    return cute.make_tensor(tile.iterator, cute.select(tile.layout, [1, 0, 2]))


def loader(dtype, mma):
    """Copy of a tile, stored transposed, into the order of an accumulator."""
    return cute.make_tiled_copy_C(
        cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=True, num_matrices=4), dtype), mma
    )


def storer(dtype, mma, transpose):
    """Copy of an accumulator's 16-bit values into a tile, or into a transposed one."""
    return cute.make_tiled_copy_C(
        cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=transpose, num_matrices=4), dtype), mma
    )


@cute.jit
def scale(acc, row: cute.Tensor, lane):
    """Columns of an accumulator by their factors."""
    for group in cutlass.range_constexpr(cute.size(acc) // 4):
        factors = pair(row, lane, group)
        for e in cutlass.range_constexpr(4):
            acc[4 * group + e] = factors[e % 2] * acc[4 * group + e]


@cute.jit
def rounded(value, low, rest, at: cutlass.Constexpr):
    """A number as element `at` of an operand, and what that loses as one of another, if wanted."""
    low[at] = value.to(low.element_type)
    if cutlass.const_expr(rest is not None):
        rest[at] = (value - low[at].to(Float32)).to(low.element_type)


@cute.jit
def split(acc, low, rest):
    """An accumulator as an operand, and what its rounding loses as another, if that is wanted."""
    for i in cutlass.range_constexpr(cute.size(acc)):
        rounded(acc[i], low, rest, i)


@cute.jit
def scaled(acc, low, row: cute.Tensor, lane, negative: cutlass.Constexpr = False, rest=None):
    """Columns of an accumulator by their factors, or by what is opposite, as an operand; rest: as
    of `split`."""
    for group in cutlass.range_constexpr(cute.size(acc) // 4):
        factors = pair(row, lane, group)
        for e in cutlass.range_constexpr(4):
            i = 4 * group + e
            factor = -factors[e % 2] if cutlass.const_expr(negative) else factors[e % 2]
            rounded(factor * acc[i], low, rest, i)


@cute.jit
def pair(row: cute.Tensor, lane, group: cutlass.Constexpr):
    """Of a row of numbers, one a column, the two of this thread's columns in a group of eight."""
    start = row.iterator + cute.assume(8 * group + 2 * (lane % 4), divby=2)
    values = cute.make_rmem_tensor(2, Float32)
    cute.autovec_copy(cute.make_tensor(start, cute.make_layout(2)), values)
    return values[0], values[1]
