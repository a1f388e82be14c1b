"""T = (I + diag(beta) G)^-1 diag(beta) of a chunk of 64 steps, G strictly lower, by two warps.

Blocks of 8 rows on the diagonal are inverted in fp32, four a warp, a column a lane, by
substitution. Nothing is squared, so that correlated keys, whose powers grow, do no harm. Left of
them T comes by products of 16-bit blocks, twice the size at a time (blocks of 8, of 16, of 32):

    T_ij = T_ii (-G_ij) T_jj

in place of -G, whoever wrote that. Factors are those that are written, rounded: what multiplies W
is then as near to the inverse of one matrix as if its blocks were applied one by one.

Products are of transposes, T_jj^T (-G_ij)^T first, so that a result is the next one's operand in
registers. A tile is [64, 64] in the 128-byte swizzle: 16 bytes at (row, 8 c) are at
128 row + 16 (c ^ row % 8), and a lane that knows its place in one block of 16 finds it in all.

A block to invert is fp32 and transposed (only what is below the diagonal is read), with a pitch of
12: its columns start at 16 bytes, and neither those nor the columns of an accumulator meet a bank
twice.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute import nvgpu

from lagraph.engines.frost.kernels.lib import product

__all__ = ["LEAF", "LEAVES", "NUMBERS", "Tools", "invert", "leaf", "tools"]

LEAF = 8
LEAVES = 8  # of a chunk
PITCH = 12
NUMBERS = LEAF * PITCH + 4  # fp32 numbers of one block
BLOCK = 16  # rows of a block of products
ROW = 128  # bytes of a row of T
DOWN, ASIDE = BLOCK * ROW, 32  # bytes between blocks of 16: added, and exclusive-ored


@cute.jit
def leaf(numbers: cute.Tensor, index):
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
def substitute(start, column):
    """A column of the inverse of the block that starts there."""
    x = []
    for i in cutlass.range_constexpr(LEAF):
        x.append(Float32(1.0) if column == i else Float32(0.0))
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


class Tools(NamedTuple):
    """One warp's product a @ b^T of a [16, 16], and how blocks come and go: each of its matrices of
    8 by 8 as it is or transposed."""

    mma: Any
    plain: Any
    turned: Any
    pair: Any  # two matrices, transposed
    out: Any
    out_pair: Any


def tools(dtype):
    def load(turned, count):
        op = nvgpu.warp.LdMatrix8x8x16bOp(transpose=turned, num_matrices=count)
        return cute.make_copy_atom(op, dtype)

    def store(count):
        op = nvgpu.warp.StMatrix8x8x16bOp(transpose=True, num_matrices=count)
        return cute.make_copy_atom(op, dtype)

    mma = cute.make_tiled_mma(nvgpu.warp.MmaF16BF16Op(dtype, Float32, (BLOCK, 8, BLOCK)))
    return Tools(mma, load(False, 4), load(True, 4), load(True, 2), store(4), store(2))


@cute.jit
def invert(using, parts, numbers, dtype: cutlass.Constexpr, warp, lane, barrier: cutlass.Constexpr):
    """Warp 0 or 1 of two that meet at `barrier`. parts: addresses of T, with -G in it, and of what
    their rounding loses, if that is kept; numbers: the blocks to invert, and strengths."""
    at, column = lane // LEAF + 4 * warp, lane % LEAF
    x = substitute(numbers + cute.assume(at * NUMBERS, divby=4), column)
    strengths = cute.make_tensor(numbers + LEAVES * NUMBERS, cute.make_layout(LEAF * LEAVES))
    strength = strengths[LEAF * at + column]
    for i in cutlass.range_constexpr(LEAF):
        value = x[i] * strength
        for p in cutlass.range_constexpr(len(parts)):
            first = parts[p] + at * (LEAF * ROW + 16) + 2 * column  # row 8 at, in its chunk of 16 B
            low = value.to(dtype)
            there(dtype, (first ^ (16 * i)) + ROW * i, 1, 2)[0] = low
            value = value - low.to(Float32)
    cute.arch.sync_warp()

    # Of both blocks of 16 on the diagonal, side by side: matrix (1, 0).
    row, half = lane % LEAF, lane // LEAF % 2
    lower = ROW * (LEAF + row)  # a row of the lower half of a block
    ones, twos, targets = [], [], []
    for p in cutlass.range_constexpr(len(parts)):
        corner = parts[p] + 2 * warp * DOWN
        here, aside = corner + half * DOWN, ASIDE * (2 * warp + half)
        ones.append(read(using.pair, dtype, (here + ROW * row) ^ (16 * row ^ aside), 2))
        targets.append((here + lower) ^ (16 * row ^ aside))
        here, aside = corner + lane // 16 * DOWN, ASIDE * (2 * warp + lane // 16)
        address = (here + lower) ^ (16 * row ^ aside ^ 16 * half)
        twos.append(read(using.plain, dtype, address, 4))
    y = beside(using, dtype, ones, twos, 0)
    z = beside(using, dtype, y, twos, 1)
    for p in cutlass.range_constexpr(len(parts)):
        cute.copy(using.out_pair, one(z[p], 4), there(dtype, targets[p], 4, 16))
    cute.arch.sync_warp()

    # This lane's place in the first block of 16.
    places = []
    for p in cutlass.range_constexpr(len(parts)):
        offset = ROW * row + lane // 16 * (LEAF * ROW)
        places.append((parts[p] + offset) ^ (16 * row ^ 16 * half))
    first = 2 * warp
    a = read_all(using.turned, dtype, places, first, first)
    b = read_all(using.plain, dtype, places, first + 1, first)
    y = operands(dtype, times(using, ((a, b),)), len(parts))
    b = read_all(using.plain, dtype, places, first + 1, first + 1)
    put(using, dtype, places, times(using, ((y, b),)), first + 1, first)
    cute.arch.barrier(barrier_id=barrier, number_of_threads=64)

    # One column of blocks a warp. T is zero above the diagonal.
    upper = read_all(using.turned, dtype, places, 0, warp)
    lower = read_all(using.turned, dtype, places, 1, warp)
    found = []
    for r in cutlass.range_constexpr(2):
        b = read_all(using.plain, dtype, places, 2 + r, 0)
        c = read_all(using.plain, dtype, places, 2 + r, 1)
        found.append(operands(dtype, times(using, ((upper, b), (lower, c))), len(parts)))
    cute.arch.barrier(barrier_id=barrier, number_of_threads=64)  # all of G has been read
    for r in cutlass.range_constexpr(2):
        pairs = []
        for i in cutlass.range_constexpr(r + 1):
            pairs.append((found[i], read_all(using.plain, dtype, places, 2 + r, 2 + i)))
        put(using, dtype, places, times(using, pairs), 2 + r, warp)


# Blocks ------------------------------------------------------------------------------------------


@cute.jit
def there(dtype: cutlass.Constexpr, address, count: cutlass.Constexpr, align: cutlass.Constexpr):
    """`count` numbers at an address of shared memory."""
    space = cute.AddressSpace.smem
    pointer = cute.make_ptr(dtype, address, space, assumed_align=align)
    return cute.make_tensor(pointer, cute.make_layout((count, 1)))


@cute.jit
def one(registers, count: cutlass.Constexpr):
    """The first registers of an operand as what is copied."""
    return cute.make_tensor(registers.iterator, cute.make_layout((count, 1)))


@cute.jit
def read(atom, dtype: cutlass.Constexpr, address, matrices: cutlass.Constexpr):
    """Four matrices of 8 by 8 in registers, the last of them zero if fewer are read."""
    found = cute.make_rmem_tensor(8, dtype)
    if cutlass.const_expr(matrices < 4):
        found.fill(0.0)
    cute.copy(atom, there(dtype, address, 2 * matrices, 16), one(found, 2 * matrices))
    return found


@cute.jit
def read_all(atom, dtype: cutlass.Constexpr, places, i, j):
    """Block (i, j), in parts."""
    found = []
    for p in cutlass.range_constexpr(len(places)):
        found.append(read(atom, dtype, (places[p] ^ (ASIDE * j)) + DOWN * i, 4))
    return found


@cute.jit
def put(using, dtype: cutlass.Constexpr, places, acc, i, j):
    """The transpose of a result as block (i, j)."""
    lows = operands(dtype, acc, len(places))
    for p in cutlass.range_constexpr(len(places)):
        target = there(dtype, (places[p] ^ (ASIDE * j)) + DOWN * i, 8, 16)
        cute.copy(using.out, one(lows[p], 8), target)


@cute.jit
def operands(dtype: cutlass.Constexpr, acc, count: cutlass.Constexpr):
    """A result [16, 16] as a, in parts."""
    lows = []
    for _ in cutlass.range_constexpr(count):
        lows.append(cute.make_rmem_tensor(8, dtype))
    product.split(one(acc, 8), lows[0], lows[1] if cutlass.const_expr(count > 1) else None)
    return lows


@cute.jit
def times(using, pairs):
    """The sum of a @ b^T over pairs of blocks in parts, but for products of what both lose."""
    acc = cute.make_rmem_tensor(8, Float32)
    acc.fill(0.0)
    out = cute.make_tensor(acc.iterator, cute.make_layout(((2, 2), 1, 2)))
    for n in cutlass.range_constexpr(len(pairs)):
        a, b = pairs[n]
        for i in cutlass.range_constexpr(len(a)):
            for j in cutlass.range_constexpr(len(b) - i):
                rows = cute.make_tensor(a[i].iterator, cute.make_layout(((2, 2, 2), 1, 1)))
                columns = cute.make_tensor(b[j].iterator, cute.make_layout(((2, 2), 2, 1)))
                cute.gemm(using.mma, out, rows, columns, out)
    return acc


@cute.jit
def beside(using, dtype: cutlass.Constexpr, a, b, which: cutlass.Constexpr):
    """Two products of matrices of 8 by 8, as one a again: rows 0 to 7 of a by matrix `which` of b,
    rows 8 to 15 by matrix `which` + 2."""
    acc = cute.make_rmem_tensor(8, Float32)
    acc.fill(0.0)
    for n in cutlass.range_constexpr(2):
        found = cute.make_rmem_tensor(4, Float32)
        found.fill(0.0)
        out = cute.make_tensor(found.iterator, cute.make_layout(((2, 2), 1, 1)))
        for i in cutlass.range_constexpr(len(a)):
            for j in cutlass.range_constexpr(len(b) - i):
                rows = cute.make_tensor(a[i].iterator, cute.make_layout(((2, 2, 2), 1, 1)))
                alone = cute.make_rmem_tensor(4, dtype)
                alone.fill(0.0)
                for e in cutlass.range_constexpr(2):
                    alone[e] = b[j][4 * n + 2 * which + e]
                columns = cute.make_tensor(alone.iterator, cute.make_layout(((2, 2), 1, 1)))
                cute.gemm(using.mma, out, rows, columns, out)
        for e in cutlass.range_constexpr(2):
            acc[2 * n + e] = found[2 * n + e]
    return operands(dtype, acc, len(a))
