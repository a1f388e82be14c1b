"""A built graph: from a pack of buffers to a run of its plan."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from lagraph import plan, registry
from lagraph.desc import DYNAMIC, dtype_name
from lagraph.errors import DeviceMismatch, DtypeMismatch, GraphError, RuleBroken, ShapeMismatch
from lagraph.plan import Plan, request
from lagraph.tensor import Tensor, as_tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from lagraph.handle import Handle
    from lagraph.infer import Bound
    from lagraph.placed import Placed
    from lagraph.problem import Problem
    from lagraph.select import PlanName

__all__ = ["Executor", "runner"]


@cache
def runner(name: str) -> plan.Runner:
    """Graphs have runners of their own: their messages use the node's names."""
    return plan.Runner(registry.node(name), op_names=False)


class Executor:
    """What a warm `execute` of one plan needs.

    tensors: all of the graph's; packs may hold those that the node does not use.
    """

    def __init__(
        self,
        placed: Placed,
        tensors: Iterable[Tensor],
        problem: Problem,
        bound: Bound,
        name: PlanName,
        runner: plan.Runner,
    ) -> None:
        node = placed.node
        self.node, self.inputs, self.runner = node, placed.inputs, runner
        self.plan = Plan(node, problem, bound, name)
        rows = placed.outputs.get("state_checkpoints")
        self.request = request(
            node, dict(placed.request.options), plan_name=str(name),
            checkpoint_dtype=rows.desc.data_type if rows is not None else None,
        )  # fmt: skip
        self.slots: dict[Any, int] = {}
        self.bindings: list[Any] = []
        for ports, given in (
            (node.input_names, placed.inputs),
            (node.output_names, placed.outputs),
        ):
            for port in ports:
                made = given.get(port)
                if made is not None:
                    for key in (made, made.name, made.uid):
                        self.slots[key] = len(self.bindings)
                self.bindings.append(None if made is None else made.data)
        # One tensor may feed several ports.
        self.shared: list[tuple[int, int]] = []
        for at, port in enumerate(node.input_names):
            made = placed.inputs.get(port)
            if made is not None and self.slots[made] != at:
                self.shared.append((at, self.slots[made]))
        self.count = len(node.inputs)
        self.needed = [node.input_names.index(port) for port in placed.inputs]
        self.ignored = {key for t in tensors for key in (t, t.name, t.uid)} - set(self.slots)
        self.sizes = {k: v for k, v in bound.sizes.items() if k in "TN" and v is not None}
        pool = "state_indices" in placed.inputs
        for out in node.outputs:  # a T or N that was given to an output counts, too
            made, letter = placed.outputs.get(out.name), out.shape.split()[0]
            if made is None or not made.dim or (pool and out.dtype == "state"):
                continue
            if letter in DYNAMIC and made.dim[0] is not None:
                self.sizes.setdefault(letter, made.dim[0])
        self.pool_rows = bound.sizes.get("P")
        self.accepted: set[Any] = set()

    def run(self, pack: Mapping[Any, Any], workspace: Any, handle: Handle | None) -> None:
        """Run the plan on these buffers, on the current stream or the handle's."""
        stream = None if handle is None else handle.stream
        if stream is not None and self.plan.cuda:
            if isinstance(stream, int):
                stream = torch.cuda.ExternalStream(stream)
            with torch.cuda.stream(stream), torch.no_grad():
                self._run(pack, workspace)
        elif torch.is_grad_enabled():
            with torch.no_grad():
                self._run(pack, workspace)
        else:
            self._run(pack, workspace)

    def _run(self, pack: Mapping[Any, Any], workspace: Any) -> None:
        buffers = self.bindings.copy()
        try:
            items = pack.items()
        except AttributeError:
            raise DtypeMismatch(
                "execute", "variant_pack", expected="a dict of buffers", got=type(pack).__name__,
                mend="Key it by graph tensor, name or uid",
            ) from None  # fmt: skip
        for key, value in items:
            try:
                at = self.slots[key]
            except KeyError:
                self._unknown(key)
                continue
            buffers[at] = value if type(value) is torch.Tensor else _convert(value)
        for at, source in self.shared:
            buffers[at] = buffers[source]
        count = self.count
        ins, given = buffers[:count], buffers[count:]
        for at in self.needed:
            if ins[at] is None:
                self._missing(ins)
        ready, T, N = self.runner.find(ins, self.request)
        for letter, size in self.sizes.items():
            got = T if letter == "T" else N
            if got != size:
                raise ShapeMismatch(
                    self.node.name, "g" if letter == "T" else "cu_seqlens",
                    expected=f"{letter}={size}, as the graph declares", got=f"{letter}={got}",
                    mend=f"Leave {letter} open (None) in the graph's tensors",
                )  # fmt: skip
        if self.pool_rows is not None:
            rows = ins[self.runner.state_at].shape[0]
            if rows != self.pool_rows:
                raise ShapeMismatch(
                    self.node.name, "initial_state", expected=f"a pool of {self.pool_rows} rows",
                    got=f"{rows} rows", mend="Leave the pool's first dim open (None) in the graph",
                )  # fmt: skip
        if ready.key not in self.accepted:
            self._accept(ready, ins)
        shapes = ready.shapes(ins, T, N)
        outs: list[torch.Tensor | None] = []
        for at, shape in enumerate(shapes):
            out = given[at]
            if shape is None:
                outs.append(None)
                continue
            dtype = ready.dtypes[at]
            if ready.aliases == at:
                state = ins[self.node.input_names.index("initial_state")]
                if out is not None and out.data_ptr() != state.data_ptr():
                    raise RuleBroken(
                        self.node.name, "final_state", expected="the buffer of initial_state",
                        got="another buffer", mend="Pass initial_state's buffer, or leave it out",
                    )  # fmt: skip
                out = state
            elif out is None:
                out = torch.empty(shape, dtype=dtype, device=ready.device)
            elif out.shape != shape or out.dtype is not dtype or out.device != ready.device:
                self._bad_output(at, out, shape, dtype, ready)
            outs.append(out)
        size = ready.workspace(T, N)
        if size and workspace is None:
            workspace = torch.empty(size, dtype=torch.uint8, device=ready.device)
        elif size and workspace.numel() * workspace.element_size() < size:
            raise ShapeMismatch("execute", "workspace", expected=f"{size} bytes",
                                got=f"{workspace.numel() * workspace.element_size()} bytes",
                                mend="Allocate get_workspace_size() bytes")  # fmt: skip
        ready.run(ins, outs, workspace)

    def _missing(self, ins: Sequence[Any]) -> NoReturn:
        port = next(p for p in self.inputs if ins[self.node.input_names.index(p)] is None)
        name = self.inputs[port].name
        raise RuleBroken(
            self.node.name, port, expected=f"a buffer for tensor {name!r}",
            got="none in the variant pack", mend=f"Add {name!r} to the variant pack",
        )  # fmt: skip

    def _unknown(self, key: Any) -> None:
        if key is None or key in self.ignored:
            return
        shown = repr(key.name) if isinstance(key, Tensor) else repr(key)
        known = ", ".join(sorted(k for k in self.slots if isinstance(k, str)))
        raise GraphError(f"execute: {shown} names no tensor of the graph. Tensors are: {known}.")

    def _accept(self, ready: Plan, ins: Sequence[Any]) -> None:
        """Compare real tensors with their declarations, once per static signature."""
        for port, tensor in zip(self.node.input_names, ins, strict=True):
            made = self.inputs.get(port)
            if made is None or tensor is None:
                continue
            declared = made.dim or ()
            if len(declared) != tensor.dim() or any(
                a is not None and a != b for a, b in zip(declared, tensor.shape)
            ):
                raise ShapeMismatch(self.node.name, port, expected=str(list(declared)),
                                    got=str(list(tensor.shape)),
                                    mend="Pass what the graph declares")  # fmt: skip
            wanted = made.desc.data_type or self.plan.problem.dtypes[port]
            if tensor.dtype is not wanted:
                raise DtypeMismatch(self.node.name, port, expected=dtype_name(wanted),
                                    got=dtype_name(tensor.dtype),
                                    mend=f"Convert it with .to({wanted})")  # fmt: skip
            if tensor.device.type != self.plan.problem.device:
                raise DeviceMismatch(
                    self.node.name, port, expected=f"a tensor on {self.plan.problem.device}",
                    got=str(tensor.device), mend="Move the tensors, or build the graph for them",
                )  # fmt: skip
        self.accepted.add(ready.key)

    def _bad_output(self, at: int, out: Any, shape: Any, dtype: Any, ready: Plan) -> None:
        name = self.node.output_names[at]
        if out.shape != shape:
            raise ShapeMismatch(self.node.name, name, expected=str(list(shape)),
                                got=str(list(out.shape)), mend="Pass such a buffer")  # fmt: skip
        if out.dtype is not dtype:
            raise DtypeMismatch(self.node.name, name, expected=dtype_name(dtype),
                                got=dtype_name(out.dtype), mend="Pass such a buffer")  # fmt: skip
        raise DeviceMismatch(self.node.name, name, expected=str(ready.device), got=str(out.device),
                             mend="Pass a buffer on that device")  # fmt: skip


def _convert(value: Any) -> Any:
    return None if value is None else as_tensor(value)
