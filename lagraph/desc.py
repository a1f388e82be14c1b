"""Tensor descriptors: data types, dims, strides, and the shape grammar of the ports.

A port's shape is written with the field's letters: ``"T HO V"``. ``|`` separates alternatives of
different rank, ``N+1`` and ``T*n`` are computed from their letters. T and N are dynamic: they are
bound at every call and belong to no cache key. All other letters are static.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, ConfigDict, field_validator, model_validator

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DYNAMIC", "TensorDesc", "data_type", "dtype_name", "layout_class", "to_torch_dtype"]

DYNAMIC = frozenset({"T", "N"})


class data_type(enum.Enum):  # noqa: N801  (cuDNN's spelling)
    """Element types, under cuDNN's names."""

    NOT_SET = None
    FLOAT = torch.float32
    DOUBLE = torch.float64
    HALF = torch.float16
    BFLOAT16 = torch.bfloat16
    INT32 = torch.int32
    INT64 = torch.int64
    INT8 = torch.int8
    UINT8 = torch.uint8
    BOOLEAN = torch.bool


_BY_TORCH = {member.value: member for member in data_type if member.value is not None}


def to_torch_dtype(value: Any) -> torch.dtype | None:
    """`torch.dtype` of a dtype given as torch's, as `data_type`, or as a name ("bfloat16")."""
    if value is None or isinstance(value, torch.dtype):
        return value
    if isinstance(value, data_type):
        return value.value
    if isinstance(value, str):
        by_name = getattr(torch, value.removeprefix("torch."), None)
        if isinstance(by_name, torch.dtype):
            return by_name
        if value in data_type.__members__:
            return data_type[value].value
    raise TypeError(f"data_type: expected a torch.dtype or lagraph.data_type, got {value!r}.")


def to_data_type(value: Any) -> data_type:
    """The `data_type` member of a dtype in any of the accepted spellings."""
    dtype = to_torch_dtype(value)
    if dtype is None:
        return data_type.NOT_SET
    try:
        return _BY_TORCH[dtype]
    except KeyError:
        raise TypeError(f"data_type: expected one of {list(data_type)}, got {dtype}.") from None


def dtype_name(dtype: torch.dtype) -> str:
    """Short name for messages: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def layout_class(tensor: torch.Tensor) -> int:
    """Class of a tensor's strides, all that a kernel may specialize on.

    0 dense; 1 innermost contiguous and every other stride a multiple of 16 bytes; 2 innermost
    contiguous; 3 anything else.
    """
    if tensor.is_contiguous():
        return 0
    *outer, inner = tensor.stride()
    if inner != 1 and tensor.shape[-1] != 1:
        return 3
    size = tensor.element_size()
    return 1 if all(stride * size % 16 == 0 for stride in outer) else 2


def row_major(dim: Sequence[int | None]) -> tuple[int, ...] | None:
    """Dense strides of `dim`, or None where an open dim makes them unknown."""
    strides: list[int] = []
    step = 1
    for size in reversed(dim):
        strides.append(step)
        if size is None:
            if len(strides) < len(dim):
                return None
            size = 1
        step *= max(size, 1)
    return tuple(reversed(strides))


class TensorDesc(BaseModel):
    """One tensor of a graph: dims (None for an open T or N), strides in elements, dtype.

    The leading dim of a token tensor or of a state may be None, so that one built graph serves
    every length; dims that are given are checked at every execution.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    name: str = ""
    uid: int = 0
    dim: tuple[int | None, ...] | None = None
    stride: tuple[int, ...] | None = None
    data_type: torch.dtype | None = None

    @field_validator("data_type", mode="before")
    @classmethod
    def _torch_dtype(cls, value: Any) -> torch.dtype | None:
        return to_torch_dtype(value)

    @field_validator("dim")
    @classmethod
    def _sizes(cls, dim: tuple[int | None, ...] | None) -> tuple[int | None, ...] | None:
        if dim is not None and any(size is not None and size < 0 for size in dim):
            raise ValueError(f"dims must be >= 0, or None for an open T or N, got {dim}")
        return dim

    @model_validator(mode="after")
    def _ranks(self) -> TensorDesc:
        if self.stride is not None and self.dim is not None and len(self.stride) != len(self.dim):
            raise ValueError(f"stride {self.stride} and dim {self.dim} differ in rank")
        return self
