"""The inverse of a unit lower triangular tile, stable for correlated keys.

    (I + A)^-1 for strictly lower A [C, C], C in {16, 32, 64}

The 16x16 diagonal blocks are inverted by substitution in fp32, all at once. Neighbouring inverses
X1, X2 of size b are then merged into one of size 2b:  [[X1, 0], [-X2 A21 X1, X2]], with products
that accumulate in fp32 and keep fp32 accuracy of the operands (PREC). No power of A is formed, so
nothing grows beyond the inverse itself.
"""

import triton
import triton.language as tl

__all__ = ["invert_in_memory", "invert_unit_lower"]


@triton.jit
def _diagonal_blocks(b_a, B: tl.constexpr):
    """The diagonal blocks [C // B, B, B] of a [C, C] tile."""
    N: tl.constexpr = b_a.shape[0] // B
    if N == 1:
        b_d = tl.reshape(b_a, [1, B, B])
    else:
        o_n = tl.arange(0, N)
        m_n = o_n[:, None, None, None] == o_n[None, None, :, None]
        b_d = tl.sum(tl.where(m_n, tl.reshape(b_a, [N, B, N, B]), 0.0), axis=2)
    return b_d


@triton.jit
def _lower_left(b_d):
    """Quadrant (1, 0) [N, b, b] of blocks [N, 2b, 2b]."""
    N: tl.constexpr = b_d.shape[0]
    B: tl.constexpr = b_d.shape[1] // 2
    b_q = tl.permute(tl.reshape(b_d, [N, 2, B, 2, B]), [0, 2, 4, 1, 3])
    left, _ = tl.split(b_q)
    _, lower = tl.split(left)
    return lower


@triton.jit
def invert_unit_lower(b_a, PREC: tl.constexpr):
    C: tl.constexpr = b_a.shape[0]
    NB: tl.constexpr = C // 16
    o_b = tl.arange(0, 16)
    b_d = _diagonal_blocks(b_a, 16)
    b_x = tl.zeros([NB, 16, 16], tl.float32) + tl.where(o_b[:, None] == o_b[None, :], 1.0, 0.0)
    # Row j of the inverse is final once rows before it have been eliminated.
    for j in tl.static_range(15):
        b_col = tl.sum(tl.where(o_b[None, None, :] == j, b_d, 0.0), axis=2)  # [NB, 16]
        b_row = tl.sum(tl.where(o_b[None, :, None] == j, b_x, 0.0), axis=1)  # [NB, 16]
        b_x -= b_col[:, :, None] * b_row[:, None, :]
    if NB >= 2:
        b_x = _merge(b_x, b_a, PREC)
    if NB >= 4:
        b_x = _merge(b_x, b_a, PREC)
    return tl.reshape(b_x, [C, C])


@triton.jit
def _merge(b_x, b_a, PREC: tl.constexpr):
    """Inverses [2N, b, b] of neighbouring blocks into inverses [N, 2b, 2b]."""
    N: tl.constexpr = b_x.shape[0] // 2
    B: tl.constexpr = b_x.shape[1]
    b_lower = _lower_left(_diagonal_blocks(b_a, 2 * B))
    b_x1, b_x2 = tl.split(tl.permute(tl.reshape(b_x, [N, 2, B, B]), [0, 2, 3, 1]))
    if N == 1:
        b_m = tl.dot(tl.reshape(b_lower, [B, B]), tl.reshape(b_x1, [B, B]), input_precision=PREC)
        b_m = tl.dot(tl.reshape(b_x2, [B, B]), b_m, input_precision=PREC)
        b_m = tl.reshape(b_m, [1, B, B])
    else:
        b_m = tl.dot(b_x2, tl.dot(b_lower, b_x1, input_precision=PREC), input_precision=PREC)
    b_top = tl.permute(tl.join(b_x1, tl.zeros_like(b_x1)), [0, 1, 3, 2])  # [N, b, 2, b]
    b_low = tl.permute(tl.join(-b_m, b_x2), [0, 1, 3, 2])
    b_y = tl.join(tl.reshape(b_top, [N, B, 2 * B]), tl.reshape(b_low, [N, B, 2 * B]))
    return tl.reshape(tl.permute(b_y, [0, 3, 1, 2]), [N, 2 * B, 2 * B])


@triton.jit
def invert_in_memory(p_x, R: tl.constexpr, C: tl.constexpr, PREC: tl.constexpr):
    """Writes (I + A)^-1 over each of R // C strictly lower fp32 tiles A [C, C], stacked at p_x.

    The algorithm of `invert_unit_lower` on tiles that only this program touches, so they stay in
    cache: every step reads what it needs in the shape it needs, where registers would have to be
    shuffled, and all tiles share one pass. Entries above the diagonal blocks of 16 are neither
    read nor written. Begins and ends with a barrier.
    """
    tl.debug_barrier()
    # Diagonal blocks. One lane a column, of all blocks: row i of the inverse is the unit row less
    # the rows before it.
    o_r = tl.arange(0, R)
    o_c = o_r % 16
    p_leaf = p_x + (o_r // 16) * (16 * C) + (o_r % C // 16) * 16
    rows = (tl.where(o_c == 0, 1.0, 0.0),)
    for i in tl.static_range(1, 16):
        b_row = tl.where(o_c == i, 1.0, 0.0)  # [R]
        for j in tl.static_range(i):
            b_row -= tl.load(p_leaf + (i * C + j)) * rows[j]
        rows = rows + (b_row,)  # noqa: RUF005 (kernels cannot unpack)
    tl.debug_barrier()
    for i in tl.static_range(16):
        tl.store(p_leaf + i * C + o_c, rows[i])
    if C >= 32:
        _merge_in_memory(p_x, R, C, 16, PREC)
    if C >= 64:
        _merge_in_memory(p_x, R, C, 32, PREC)
    tl.debug_barrier()


@triton.jit
def _merge_in_memory(p_x, R: tl.constexpr, C: tl.constexpr, B: tl.constexpr, PREC: tl.constexpr):
    """A21 <- -X2 A21 X1 in every pair of neighbouring diagonal blocks X1, X2 of size B."""
    N: tl.constexpr = R // (2 * B)
    tl.debug_barrier()
    o_b = tl.arange(0, B)
    if N == 1:
        p_1 = p_x + o_b[:, None] * C + o_b[None, :]  # [B, B]
    else:
        o_n = tl.arange(0, N) * (2 * B)
        o_n = o_n * C + o_n % C
        p_1 = p_x + o_n[:, None, None] + (o_b[:, None] * C + o_b[None, :])[None]  # [N, B, B]
    b_m = tl.dot(tl.load(p_1 + B * C), tl.load(p_1), input_precision=PREC)
    b_m = tl.dot(tl.load(p_1 + (B * C + B)), b_m, input_precision=PREC)
    tl.store(p_1 + B * C, -b_m)
