"""A node in a graph: its options and its tensors by port; binding, and what follows for outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lagraph import infer
from lagraph.desc import dtype_name, row_major
from lagraph.errors import DtypeMismatch, ShapeMismatch
from lagraph.infer import Meta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lagraph.node import Node
    from lagraph.plan import Request
    from lagraph.tensor import Tensor

__all__ = ["Placed"]


@dataclass(frozen=True, slots=True)
class Placed:
    """A node's request, its name in the graph, and its tensors by port; absent ones are left out.

    io_data_type: of tensors that were given none.
    """

    node: Node
    request: Request
    name: str
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    io_data_type: torch.dtype | None

    def metas(self) -> list[Meta | None]:
        """Shapes and dtypes of the inputs, in the ports' order."""
        metas: list[Meta | None] = []
        for port in self.node.inputs:
            made = self.inputs.get(port.name)
            if made is None:
                metas.append(None)
                continue
            dtype = made.desc.data_type
            if dtype is None:
                dtype = torch.int32 if port.dtype == "index" else self.io_data_type
                if dtype is None:
                    raise DtypeMismatch(
                        self.node.name, port.name, expected="a data type", got="none",
                        mend="Pass data_type, or io_data_type to the graph",
                    )  # fmt: skip
            metas.append(Meta(made.dim or (), dtype))
        return metas

    def bind(self) -> infer.Bound:
        """Bind letters and check rules; give the outputs the dims and dtypes that follow."""
        node = self.node
        rows = self.outputs.get("state_checkpoints")
        dtype = rows.desc.data_type if rows is not None and rows._dtype_given else None
        bound = infer.bind(node, self.metas(), self.request.options, checkpoint_dtype=dtype)
        for name, (shape, kind) in bound.outputs.items():
            made = self.outputs[name]
            declared = made.desc.dim
            merged = tuple(
                b if a is None else a for a, b in zip(declared or (None,) * len(shape), shape)
            )
            if declared is not None and (
                len(declared) != len(shape)
                or any(b is not None and a != b for a, b in zip(merged, shape))
            ):
                raise ShapeMismatch(node.name, name, expected=str(list(shape)),
                                    got=str(list(declared)), mend="Drop set_dim")  # fmt: skip
            if made._dtype_given and made.desc.data_type is not kind:
                raise DtypeMismatch(
                    node.name, name, expected=dtype_name(kind),
                    got=dtype_name(made.desc.data_type), mend="Drop set_data_type",  # type: ignore[arg-type]
                )  # fmt: skip
            made._infer(dim=merged, data_type=kind)
        return bound

    def layouts(self, metas: Sequence[Meta | None]) -> list[int]:
        """`layout_class` of every input, from declared strides."""
        return [
            0 if meta is None else self._layout(port.name, meta)
            for port, meta in zip(self.node.inputs, metas, strict=True)
        ]

    def _layout(self, name: str, meta: Meta) -> int:
        stride = self.inputs[name].desc.stride
        if stride is None or not stride or stride == row_major(meta.shape):
            return 0
        if stride[-1] != 1 and meta.shape[-1] != 1:
            return 3
        return 1 if all(s * meta.dtype.itemsize % 16 == 0 for s in stride[:-1]) else 2
