"""TMA over packed sequences: tiles that stop at the end of their own sequence.

A packed tensor [T, heads, D] gets one more mode with the stride of a row, and a base T rows lower:
`(T - len + r, d, end, head)` is then row r of the sequence of `len` rows that ends at row `end`,
and the extent T of the first mode, which TMA checks, is that sequence's end. Loads past it give
zeros, stores past it are dropped, and there is no code for tails.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int64
from cutlass.cute.nvgpu import cpasync, warpgroup

__all__ = ["load_atom", "partition", "store_atom", "swizzled", "tiles", "view"]


def swizzled(dtype, rows, columns, stages):
    """Shared layout of `stages` row-major tiles in the 128-byte swizzle that wgmma and TMA read."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))


@cute.jit
def view(x: cute.Tensor):
    """[T, heads, D] as (row, d, end, head): see the module's docstring."""
    T, heads, D = x.shape[0], x.shape[1], x.shape[2]
    step, per_head = x.stride[0], x.stride[1]
    if T == 1:  # the stride of one row may be any, but TMA drops what is below 16 bytes of it
        step = cute.assume(Int64(heads) * D, divby=8)
    base = x.iterator.toint() - Int64(T) * step * (x.element_type.width // 8)
    start = cute.make_ptr(x.element_type, base, cute.AddressSpace.gmem, assumed_align=16)
    layout = cute.make_layout((T, D, T + 1, heads), stride=(step, 1, step, per_head))
    return cute.make_tensor(start, layout)


def _atom(op, x, layout, tile):
    return cpasync.make_tiled_tma_atom(op, view(x), cute.select(layout, [0, 1]), tile)


def load_atom(x, layout, tile):
    """TMA atom and tensor that load tiles (rows, columns) of a packed tensor."""
    return _atom(cpasync.CopyBulkTensorTileG2SOp(), x, layout, tile)


def store_atom(x, layout, tile):
    """TMA atom and tensor that store tiles (rows, columns) of a packed tensor."""
    return _atom(cpasync.CopyBulkTensorTileS2GOp(), x, layout, tile)


@cute.jit
def tiles(g: cute.Tensor, head, begin, end, tile: cutlass.Constexpr):
    """One sequence's and head's tiles: (rows, columns, tile of rows, tile of columns)."""
    rows = cute.domain_offset((g.shape[0] - (end - begin), 0), g[None, None, end, head])
    return cute.local_tile(rows, tile, (None, None))


@cute.jit
def partition(atom, shared: cute.Tensor, tiled: cute.Tensor):
    """What `cute.copy` takes: shared stages, and global tiles."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiled, 0, 2)
    )
