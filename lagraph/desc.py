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

from lagraph.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "DYNAMIC", "TensorDesc", "data_type", "dtype_name", "layout_class", "row_major", "to_data_type",
    "to_torch_dtype",
]  # fmt: skip

DYNAMIC = frozenset({"T", "N"})


class data_type(enum.Enum):
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
    FP8_E4M3 = torch.float8_e4m3fn
    FP8_E5M2 = torch.float8_e5m2


_BY_TORCH = {member.value: member for member in data_type if member.value is not None}


def to_torch_dtype(
    value: Any, op: str = "tensor", argument: str = "data_type"
) -> torch.dtype | None:
    """`torch.dtype` of a dtype given as torch's, as `data_type`, or as a name ("bfloat16").

    Raises `InvalidOption`, about this argument of this op.
    """
    found = value.value if isinstance(value, data_type) else value
    if isinstance(value, str):
        found = getattr(torch, value.removeprefix("torch."), value)
        if value in data_type.__members__:
            found = data_type[value].value
    if found is None or (isinstance(found, torch.dtype) and found in _BY_TORCH):
        return found
    raise InvalidOption(
        op, argument, expected="a torch.dtype or a lagraph.data_type", got=repr(value),
        mend=f"Take one of {', '.join(data_type.__members__)}",
    )  # fmt: skip


def to_data_type(value: Any) -> data_type:
    """The `data_type` member of a dtype in any of the accepted spellings."""
    dtype = to_torch_dtype(value)
    return data_type.NOT_SET if dtype is None else _BY_TORCH[dtype]


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
            raise ValueError("sizes >= 0, or None for an open T or N")
        return dim

    @model_validator(mode="after")
    def _ranks(self) -> TensorDesc:
        if self.stride is not None and self.dim is not None and len(self.stride) != len(self.dim):
            raise ValueError(f"{len(self.dim)} strides, as many as dims")
        return self
