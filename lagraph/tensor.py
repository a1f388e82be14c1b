"""A graph's tensors: what a name, a uid and a descriptor make, and the buffers behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError

from lagraph.desc import (
    TensorDesc,
    data_type,
    dtype_name,
    row_major,
    to_data_type,
    to_torch_dtype,
)
from lagraph.errors import DtypeMismatch, GraphError, InvalidOption
from lagraph.node import expected_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DataType = data_type  # `Tensor.data_type` hides the name inside the class

__all__ = ["Tensor", "Tensors", "as_tensor", "tensor_data"]


class Tensor:
    """A graph's tensor: a name, a uid and a descriptor. Setters return the tensor itself.

    dim may hold None for an open T or N. An output is virtual until `set_output(True)`; a virtual
    output needs no buffer at execution.
    """

    def __init__(
        self, owner: Tensors, desc: TensorDesc, *, is_virtual: bool, user_uid: bool
    ) -> None:
        self._owner, self._desc = owner, desc
        self._virtual, self._user_uid = is_virtual, user_uid
        self._dtype_given = desc.data_type is not None
        self.data: Any = None  # what a port was given instead of a tensor of the graph

    name = property(lambda self: self._desc.name)
    uid = property(lambda self: self._desc.uid)
    dim = property(lambda self: self._desc.dim)
    is_virtual = property(lambda self: self._virtual)

    @property
    def desc(self) -> TensorDesc:
        """The frozen descriptor as it stands."""
        return self._desc

    @property
    def stride(self) -> tuple[int, ...] | None:
        """Declared strides, else the dense ones; None while an open dim leaves them unknown."""
        if self._desc.stride is not None or self._desc.dim is None:
            return self._desc.stride
        return row_major(self._desc.dim)

    @property
    def data_type(self) -> DataType:
        """The element type, `NOT_SET` while unknown."""
        return to_data_type(self._desc.data_type)

    def _change(self, **fields: Any) -> Tensor:
        self._owner.require_open(f"change tensor {self.name!r}")
        self._desc = _described(self.name, self._desc.model_dump() | fields)
        return self

    def _infer(self, **fields: Any) -> None:
        """What the node says of an output, which is no change by the user."""
        self._desc = self._desc.model_copy(update=fields)

    def set_output(self, value: bool = True) -> Tensor:
        """Whether execution is given a buffer for this tensor."""
        self._owner.require_open(f"change tensor {self.name!r}")
        self._virtual = not value
        return self

    def set_is_virtual(self, value: bool) -> Tensor:
        """The inverse of `set_output`."""
        return self.set_output(not value)

    def set_data_type(self, value: Any) -> Tensor:
        """Element type: a `data_type`, or a torch.dtype."""
        dtype = to_torch_dtype(value, f"tensor {self.name!r}")
        self._change(data_type=dtype)._dtype_given = dtype is not None
        return self

    def set_name(self, name: str) -> Tensor:
        """A name, unique in the graph."""
        self._owner.require_open(f"change tensor {self.name!r}")
        self._owner.claim_name(name, self)
        return self._change(name=name)

    def set_uid(self, uid: int) -> Tensor:
        """A uid, unique in the graph; one that the graph gave itself moves out of the way."""
        self._owner.require_open(f"change tensor {self.name!r}")
        self._owner.claim_uid(uid, self)
        self._change(uid=uid)._user_uid = True
        return self

    def set_dim(self, dim: Sequence[int | None]) -> Tensor:
        """Dims; given ones are checked against what the node infers."""
        return self._change(dim=dim)

    def set_stride(self, stride: Sequence[int]) -> Tensor:
        """Strides in elements."""
        return self._change(stride=stride)

    def get_name(self) -> str:
        """The name."""
        return self._desc.name

    def get_uid(self) -> int:
        """The uid."""
        return self._desc.uid

    def get_dim(self) -> list[int | None]:
        """Dims, None where open."""
        return list(self._desc.dim or ())

    def get_stride(self) -> list[int]:
        """Strides, declared or dense."""
        return list(self.stride or ())

    def get_data_type(self) -> DataType:
        """The element type."""
        return self.data_type

    def get_is_virtual(self) -> bool:
        """Whether execution needs no buffer for this tensor."""
        return self._virtual

    def __repr__(self) -> str:
        dtype = self._desc.data_type
        return (
            f"<Tensor {self.name!r} uid={self.uid} dim={list(self.dim or ())} "
            f"{'virtual ' if self._virtual else ''}{dtype_name(dtype) if dtype else 'NOT_SET'}>"
        )


class Tensors:
    """The tensors of one graph, each with a name and a uid of its own, in the order they came in.

    Closed once the graph is planned.
    """

    def __init__(self) -> None:
        self._all: list[Tensor] = []
        self._next_uid = 1
        self.closed = False

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def require_open(self, what: str) -> None:
        """Raise `GraphError` if the graph is planned."""
        if self.closed:
            raise GraphError(f"cannot {what}: the graph is planned. Build a new graph instead.")

    def declare(
        self,
        dim: Sequence[int | None],
        stride: Sequence[int] | None,
        data_type: Any,
        is_virtual: bool,
        name: str,
        uid: int | None,
    ) -> Tensor:
        """A new tensor; see `Graph.tensor`."""
        self.require_open("declare a tensor")
        name = name or self._new_name()
        dtype = to_torch_dtype(data_type, f"tensor {name!r}")
        self.claim_name(name, None)
        user_uid = uid is not None and uid != -1
        if dim is None:
            raise InvalidOption(f"tensor {name!r}", "dim", expected="a list of sizes", got="None",
                                mend=_DESC_MENDS["dim"])  # fmt: skip
        desc = _described(name, {"name": name, "uid": uid if user_uid else self._new_uid(),
                                 "dim": dim, "stride": stride, "data_type": dtype})  # fmt: skip
        if user_uid:
            self.claim_uid(desc.uid, None)
        made = Tensor(self, desc, is_virtual=is_virtual, user_uid=user_uid)
        self._all.append(made)
        return made

    def forget(self, count: int) -> None:
        """Drop all but the first `count`."""
        del self._all[count:]

    def _new_name(self) -> str:
        taken = {t.name for t in self._all}
        at = len(self._all)
        while f"tensor_{at}" in taken:
            at += 1
        return f"tensor_{at}"

    def _new_uid(self) -> int:
        taken = {t.uid for t in self._all}
        while self._next_uid in taken:
            self._next_uid += 1
        self._next_uid += 1
        return self._next_uid - 1

    def claim_uid(self, uid: int, owner: Tensor | None) -> None:
        """Free a uid for `owner`: a tensor that the graph gave it gets another.

        Raises `GraphError` if the user gave it to another tensor.
        """
        for other in self._all:
            if other.uid == uid and other is not owner:
                if other._user_uid:
                    raise GraphError(f"uid {uid} already belongs to tensor {other.name!r}.")
                self._next_uid = max(self._next_uid, uid + 1)
                other._change(uid=self._new_uid())

    def claim_name(self, name: str, owner: Tensor | None) -> None:
        """Raise `GraphError` if a tensor other than `owner` has this name."""
        if any(other.name == name and other is not owner for other in self._all):
            raise GraphError(f"tensor name {name!r} is taken. Give each tensor its own name.")


def _described(name: str, fields: dict[str, Any]) -> TensorDesc:
    """A descriptor; `InvalidOption` says which of its fields is wrong."""
    for key in ("dim", "stride"):
        if isinstance(fields[key], (list, torch.Size)):
            fields[key] = tuple(fields[key])
    try:
        return TensorDesc(**fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = str(first["loc"][0]) if first["loc"] else "stride"
        raise InvalidOption(
            f"tensor {name!r}", field, expected=expected_text(first["msg"]),
            got=repr(fields[field]), mend=_DESC_MENDS.get(field, f"Give {field} such a value"),
        ) from None  # fmt: skip


_DESC_MENDS = {
    "dim": "Dims are sizes, or None for an open T or N",
    "stride": "Strides are counted in elements, one for each dim",
}


def tensor_data(tensor: Tensor) -> dict[str, Any]:
    """A tensor as plain data, but for its name."""
    return {
        "uid": tensor.uid,
        "dim": list(tensor.dim or ()),
        "stride": None if tensor.desc.stride is None else list(tensor.desc.stride),
        "data_type": tensor.data_type.name,
        "dtype_given": tensor._dtype_given,
        "is_virtual": tensor.is_virtual,
    }


def as_tensor(value: Any, op: str = "execute", argument: str = "variant_pack") -> torch.Tensor:
    """A torch tensor of any DLPack producer, without a copy."""
    if isinstance(value, torch.Tensor):
        return value
    if hasattr(value, "__dlpack__"):
        return torch.utils.dlpack.from_dlpack(value)
    raise DtypeMismatch(
        op, argument, expected="a torch tensor or a DLPack producer", got=type(value).__name__,
        mend="Convert it with torch.as_tensor",
    )  # fmt: skip
