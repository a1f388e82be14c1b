"""Stand-ins for a call's tensors, to compile kernels with: symbols for all that may vary."""

import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint8
from cutlass.cute.runtime import make_fake_tensor

__all__ = ["DTYPES", "packed", "plain", "states", "workspace"]

DTYPES = {
    "bfloat16": BFloat16,
    "float16": Float16,
    "float32": Float32,
    "int32": Int32,
    "int64": Int64,
}


def packed(dtype: str, steps, heads, D: int):
    """Rows that TMA reads or writes: [steps, heads, D]; "" for none, as in all of these."""
    if not dtype:
        return None
    strides = (cute.sym_int64(8), cute.sym_int64(8), 1)
    return make_fake_tensor(DTYPES[dtype], (steps, heads, D), strides, assumed_align=16)


def plain(dtype: str, *shape):
    """Numbers that are read one by one, with any strides."""
    if not dtype:
        return None
    strides = tuple(cute.sym_int64() for _ in shape)
    width = DTYPES[dtype].width // 8
    return make_fake_tensor(DTYPES[dtype], shape, strides, assumed_align=width)


def states(dtype: str, count, heads, V: int, K: int):
    """States [count, heads, V, K] at addresses of 16 bytes."""
    if not dtype:
        return None
    step = 128 // DTYPES[dtype].width
    strides = (*(cute.sym_int64(step) for _ in range(3)), 1)
    return make_fake_tensor(DTYPES[dtype], (count, heads, V, K), strides, assumed_align=16)


def workspace():
    """Bytes."""
    return make_fake_tensor(Uint8, (cute.sym_int64(),), (1,), assumed_align=16)
