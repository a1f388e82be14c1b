"""The graph: declare tensors, add one linear-attention node, plan, execute.

    graph = lagraph.Graph(io_data_type=lagraph.data_type.BFLOAT16)
    q, k, v = (graph.tensor([None, H, K], name=n) for n in "qkv")    # T left open
    ...
    O, final_state, _ = graph.gdn(q, k, v, g, beta, cu_seqlens, output_final_state=True)
    O.set_output(True); final_state.set_output(True)
    graph.build()
    graph.execute({q: q_data, ..., O: o_data, final_state: s_data})

Method names, order and meaning follow cuDNN's Python graph. A graph is built by one thread; once
built it is frozen, and any number of threads may execute it.
"""

from __future__ import annotations

import enum
import hashlib
import json
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError

from lagraph import infer, plan, registry, select
from lagraph.desc import (
    DYNAMIC,
    TensorDesc,
    data_type,
    dtype_name,
    row_major,
    to_data_type,
    to_torch_dtype,
)
from lagraph.errors import (
    DeviceMismatch,
    DtypeMismatch,
    GraphError,
    InvalidNode,
    InvalidOption,
    NoEngine,
    PlanNotOffered,
    RuleBroken,
    ShapeMismatch,
)
from lagraph.infer import Meta
from lagraph.node import expected_text
from lagraph.plan import Plan, Request, compiled_source, problem_of, request

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from lagraph.node import Node
    from lagraph.problem import Problem

DataType = data_type  # `Tensor.data_type` hides the name inside the class

__all__ = [
    "Explanation", "Graph", "Handle", "Tensor", "build_plan_policy", "create_handle",
    "destroy_handle", "heur_mode", "set_stream",
]  # fmt: skip


class heur_mode(enum.Enum):
    """Heuristic modes. All rank alike here; a slow plan is never a silent fallback."""

    A = "A"
    B = "B"
    FALLBACK = "FALLBACK"


class build_plan_policy(enum.Enum):
    """Which plans `build_plans` builds: the first that builds, or all that serve."""

    HEURISTICS_CHOICE = "HEURISTICS_CHOICE"
    ALL = "ALL"


class Handle:
    """Where `execute` launches: a CUDA stream, or None for torch's current one."""

    def __init__(self, stream: Any = None) -> None:
        self.stream = stream

    def __repr__(self) -> str:
        return f"lagraph.Handle(stream={self.stream!r})"


def create_handle() -> Handle:
    """A handle on the current stream of every call."""
    return Handle()


def set_stream(handle: Handle, stream: Any) -> None:
    """Launch on `stream`: a torch.cuda.Stream, or a raw stream pointer."""
    handle.stream = stream


def destroy_handle(handle: Handle) -> None:
    """Nothing is held; here so that a program written for cuDNN runs."""


class Tensor:
    """A graph's tensor: a name, a uid and a descriptor. Setters return the tensor itself.

    dim may hold None for an open T or N. An output is virtual until `set_output(True)`; a virtual
    output needs no buffer at execution.
    """

    def __init__(self, graph: Graph, desc: TensorDesc, *, is_virtual: bool, user_uid: bool) -> None:
        self._graph, self._desc = graph, desc
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
        self._graph._mutable(f"change tensor {self.name!r}")
        self._desc = _described(self.name, self._desc.model_dump() | fields)
        return self

    def set_output(self, value: bool = True) -> Tensor:
        """Whether execution is given a buffer for this tensor."""
        self._graph._mutable(f"change tensor {self.name!r}")
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
        self._graph._mutable(f"change tensor {self.name!r}")
        self._graph._claim_name(name, self)
        return self._change(name=name)

    def set_uid(self, uid: int) -> Tensor:
        """A uid, unique in the graph; one that the graph gave itself moves out of the way."""
        self._graph._mutable(f"change tensor {self.name!r}")
        self._graph._claim_uid(uid, self)
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


@dataclass(frozen=True)
class Explanation:
    """Every engine's verdict on a graph, and the plan that would run. `print` it."""

    node: str
    verdicts: tuple[select.Verdict, ...]
    chosen: str | None

    def __str__(self) -> str:
        lines = [f"{self.node}: {'runs ' + self.chosen if self.chosen else 'nothing serves it'}"]
        lines += [f"  {verdict}" for verdict in self.verdicts]
        return "\n".join(lines)


class Graph:
    """One linear-attention node with its tensors; see the module docstring.

    io_data_type: element type of tensors that are given none (indices: int32).
    intermediate_data_type: of virtual tensors that are given none.
    compute_data_type: FLOAT (DOUBLE for fp64 tokens): states and decays are never narrower.
    device: "cpu" or "cuda"; by default that of the first tensor given as a template, else CUDA
        where there is a GPU. sm_version: plan for this architecture (90, or 900 in cuDNN's
        spelling) instead of the device's.
    """

    def __init__(
        self,
        name: str = "graph",
        io_data_type: Any = None,
        intermediate_data_type: Any = None,
        compute_data_type: Any = None,
        handle: Handle | None = None,
        *,
        sm_version: int | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        self.name, self.handle, self.sm_version = name, handle, sm_version
        self.io_data_type = to_torch_dtype(io_data_type, "Graph", "io_data_type")
        self.intermediate_data_type = to_torch_dtype(
            intermediate_data_type, "Graph", "intermediate_data_type"
        )
        self.compute_data_type = to_torch_dtype(compute_data_type, "Graph", "compute_data_type")
        if self.compute_data_type not in (None, torch.float32, torch.float64):
            raise InvalidOption(
                "Graph", "compute_data_type", expected="FLOAT or DOUBLE",
                got=str(compute_data_type),
                mend="States and decays are carried in fp32 or wider; drop it",
            )  # fmt: skip
        self._device = None if device is None else torch.device(device)
        self._tensors: list[Tensor] = []
        self._next_uid = 1
        self._node: Node | None = None
        self._node_name = ""
        self._inputs: dict[str, Tensor] = {}
        self._outputs: dict[str, Tensor] = {}
        self._request: Request | None = None
        self._bound: infer.Bound | None = None
        self._problem: Problem | None = None
        self._plans: list[select.PlanName] | None = None
        self._verdicts: tuple[select.Verdict, ...] = ()
        self._barred: set[str] = set()
        self._pin: int | None = None
        self._chosen: int | None = None
        self._executor: _Executor | None = None
        self._frozen = False

    # Declaring ---------------------------------------------------------------------------------

    def tensor(
        self,
        dim: Sequence[int | None],
        stride: Sequence[int] | None = None,
        data_type: Any = None,
        is_virtual: bool = False,
        *,
        name: str = "",
        uid: int | None = None,
    ) -> Tensor:
        """Declare an input. dim may hold None for an open T or N; strides default to dense."""
        self._mutable("declare a tensor")
        name = name or self._new_name()
        dtype = to_torch_dtype(data_type, f"tensor {name!r}")
        self._claim_name(name, None)
        user_uid = uid is not None and uid != -1
        if dim is None:
            raise InvalidOption(f"tensor {name!r}", "dim", expected="a list of sizes", got="None",
                                mend=_DESC_MENDS["dim"])  # fmt: skip
        desc = _described(name, {"name": name, "uid": uid if user_uid else self._new_uid(),
                                 "dim": dim, "stride": stride, "data_type": dtype})  # fmt: skip
        if user_uid:
            self._claim_uid(desc.uid, None)
        made = Tensor(self, desc, is_virtual=is_virtual, user_uid=user_uid)
        self._tensors.append(made)
        return made

    def tensor_like(self, template: Any, name: str = "", is_virtual: bool = False) -> Tensor:
        """Declare a tensor like a graph tensor, a torch tensor, or any DLPack producer."""
        if isinstance(template, Tensor):
            return self.tensor(
                template.dim or (), template.desc.stride, template.desc.data_type,
                is_virtual, name=name,
            )  # fmt: skip
        data = as_tensor(template, "tensor_like", "template")
        if self._device is None and data.device.type != "meta":
            self._device = data.device
        return self.tensor(data.shape, data.stride(), data.dtype, is_virtual, name=name)

    def _new_name(self) -> str:
        taken = {t.name for t in self._tensors}
        at = len(self._tensors)
        while f"tensor_{at}" in taken:
            at += 1
        return f"tensor_{at}"

    def _new_uid(self) -> int:
        taken = {t.uid for t in self._tensors}
        while self._next_uid in taken:
            self._next_uid += 1
        self._next_uid += 1
        return self._next_uid - 1

    def _claim_uid(self, uid: int, owner: Tensor | None) -> None:
        for other in self._tensors:
            if other.uid == uid and other is not owner:
                if other._user_uid:
                    raise GraphError(f"uid {uid} already belongs to tensor {other.name!r}.")
                self._next_uid = max(self._next_uid, uid + 1)
                other._change(uid=self._new_uid())

    def _claim_name(self, name: str, owner: Tensor | None) -> None:
        if any(other.name == name and other is not owner for other in self._tensors):
            raise GraphError(f"tensor name {name!r} is taken. Give each tensor its own name.")

    def _mutable(self, what: str) -> None:
        if self._frozen:
            raise GraphError(f"cannot {what}: the graph is planned. Build a new graph instead.")

    def _add(self, node: Node, ports: Mapping[str, Any], options: Mapping[str, Any], name: str,
             compute_data_type: Any) -> list[Tensor | None]:  # fmt: skip
        self._mutable(f"add {node.type}")
        if self._node is not None:
            raise GraphError(
                f"one linear-attention node per graph: this one has {self._node.type}, cannot add "
                f"{node.type}. Make a second graph."
            )
        given = {key: value for key, value in options.items() if value is not None}
        req = request(node, given, label=node.name)
        compute = to_torch_dtype(compute_data_type, node.name, "compute_data_type")
        if compute not in (None, torch.float32, torch.float64):
            raise InvalidOption(
                node.name, "compute_data_type", expected="FLOAT or DOUBLE",
                got=str(compute_data_type), mend="Drop it",
            )  # fmt: skip
        declared = len(self._tensors)
        try:
            return self._fill(node, req, ports, name)
        except InvalidNode:  # the graph stays open for a better node
            del self._tensors[declared:]
            self._node, self._request, self._inputs, self._outputs = None, None, {}, {}
            raise

    def _fill(
        self, node: Node, req: Request, ports: Mapping[str, Any], name: str
    ) -> list[Tensor | None]:
        inputs: dict[str, Tensor] = {}
        for port in node.inputs:
            value = ports[port.name]
            if value is None:
                if port.optional:
                    continue
                raise RuleBroken(node.name, port.name, expected="a tensor", got="None",
                                 mend=f"Pass {port.name}")  # fmt: skip
            inputs[port.name] = self._own(
                value, f"{name or node.name}::{port.name}", node, port.name
            )
        outputs: dict[str, Tensor] = {}
        for out in node.present(req.options, inputs.__contains__):
            made = self.tensor((), name=f"{name or node.name}::{out.name}", is_virtual=True)
            made._desc = made._desc.model_copy(update={"dim": None})
            outputs[out.name] = made
        self._node, self._request, self._node_name = node, req, name or node.name
        self._inputs, self._outputs = inputs, outputs
        self._infer(quiet=True)
        return [outputs.get(out.name) for out in node.outputs]

    def _own(self, value: Any, name: str, node: Node, port: str) -> Tensor:
        if isinstance(value, Tensor):
            if value._graph is not self:
                raise GraphError(f"{node.name}.{port}: tensor {value.name!r} is of another graph.")
            return value
        if not (isinstance(value, torch.Tensor) or hasattr(value, "__dlpack__")):
            raise DtypeMismatch(
                node.name, port, expected="a tensor of the graph, or a DLPack producer",
                got=type(value).__name__, mend="Declare it with graph.tensor(...)",
            )  # fmt: skip
        data = as_tensor(value)
        try:
            made = self.tensor_like(data, name=name)
        except InvalidOption:  # a dtype that no graph tensor can have
            raise DtypeMismatch(
                node.name, port, expected="an element type of lagraph.data_type",
                got=dtype_name(data.dtype), mend=f"Convert {port} first",
            ) from None  # fmt: skip
        made.data = data
        return made

    # Checking and planning -----------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device that the graph is planned for."""
        if self._device is not None:
            return self._device
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def _require(self) -> tuple[Node, Request]:
        if self._node is None or self._request is None:
            raise GraphError("the graph has no node. Call a builder first, graph.gdn(...) say.")
        return self._node, self._request

    def _metas(self) -> list[Meta | None]:
        node, _ = self._require()
        metas: list[Meta | None] = []
        for port in node.inputs:
            made = self._inputs.get(port.name)
            if made is None:
                metas.append(None)
                continue
            dtype = made.desc.data_type
            if dtype is None:
                dtype = torch.int32 if port.dtype == "index" else self.io_data_type
                if dtype is None:
                    raise DtypeMismatch(
                        node.name, port.name, expected="a data type", got="none",
                        mend="Pass data_type, or io_data_type to the graph",
                    )  # fmt: skip
            metas.append(Meta(made.dim or (), dtype))
        return metas

    def _infer(self, quiet: bool = False) -> None:
        """Bind letters, and give the outputs the dims and dtypes that follow."""
        node, req = self._require()
        try:
            metas = self._metas()
        except DtypeMismatch:
            if quiet:
                return
            raise
        rows = self._outputs.get("state_checkpoints")
        dtype = rows.desc.data_type if rows is not None and rows._dtype_given else None
        self._bound = infer.bind(node, metas, req.options, checkpoint_dtype=dtype)
        for name, (shape, kind) in self._bound.outputs.items():
            made = self._outputs[name]
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
            made._desc = made._desc.model_copy(update={"dim": merged, "data_type": kind})

    def validate(self) -> None:
        """Check every rule on the declared tensors, and infer the outputs. Raises `InvalidNode`."""
        self._require()
        if not self._frozen:
            self._infer()

    def build_operation_graph(self) -> None:
        """Validate, then freeze the graph."""
        self.validate()
        if self._frozen:
            return
        node, req = self._require()
        metas = self._metas()
        layouts = [0 if m is None else self._layout(p.name, m) for p, m in
                   zip(node.inputs, metas, strict=True)]  # fmt: skip
        here = self.device
        if here.type == "cuda" and here.index is None and torch.cuda.is_available():
            here = torch.device("cuda", torch.cuda.current_device())
        placed = [None if m is None else m._replace(device=here) for m in metas]
        if here.type == "cuda" and not torch.cuda.is_available():
            if self.sm_version is None:
                raise DeviceMismatch(
                    node.name, "device", expected="a CUDA device", got="none on this machine",
                    mend="Pass sm_version to plan without one",
                )  # fmt: skip
            placed = metas
        assert_bound = self._bound
        if assert_bound is None:
            raise GraphError("validate() did not bind the graph.")
        problem = problem_of(node, assert_bound, req.options, placed, layouts)
        if self.sm_version is not None:
            arch = self.sm_version // 10 if self.sm_version >= 300 else self.sm_version
            problem = replace(problem, device="cuda", arch=arch)
        self._problem = problem
        self._frozen = True

    def _layout(self, name: str, meta: Meta) -> int:
        stride = self._inputs[name].desc.stride
        if stride is None or not stride or stride == row_major(meta.shape):
            return 0
        if stride[-1] != 1 and meta.shape[-1] != 1:
            return 3
        return 1 if all(s * meta.dtype.itemsize % 16 == 0 for s in stride[:-1]) else 2

    def create_execution_plans(self, heuristics: Iterable[heur_mode] | None = None) -> None:
        """Rank the plans that serve this graph. Raises `NoEngine` with every engine's reason."""
        if self._plans is not None:
            raise GraphError("plans exist already: planning is done once. Build a new graph.")
        for mode in heuristics or ():
            if not isinstance(mode, heur_mode):
                raise InvalidOption("create_execution_plans", "heuristics",
                                    expected="members of lagraph.heur_mode", got=repr(mode),
                                    mend="Pass [lagraph.heur_mode.A]")  # fmt: skip
        self.build_operation_graph()
        problem = self._problem
        if problem is None:
            raise GraphError("build_operation_graph() did not describe the graph.")
        self._verdicts = select.verdicts(problem)
        serving = sorted((v for v in self._verdicts if v.ok), key=lambda v: not v.default)
        if not serving:
            raise NoEngine(select.nothing_serves(problem))
        self._plans = [select.PlanName(verdict.plan) for verdict in serving]

    def _ranked(self) -> list[select.PlanName]:
        if self._plans is None:
            raise GraphError("no plans yet. Call create_execution_plans() or build() first.")
        return self._plans

    def get_execution_plan_count(self) -> int:
        """Number of plans that serve this graph; 0 before planning."""
        return 0 if self._plans is None else len(self._plans)

    def get_plan_name_at_index(self, index: int) -> str:
        """Name of a ranked plan."""
        return str(self._ranked()[self._index(index)])

    def _index(self, index: int) -> int:
        plans = self._ranked()
        if not 0 <= index < len(plans):
            raise PlanNotOffered(f"plan index {index} is outside 0..{len(plans) - 1}.")
        return index

    def select_plan(self, plan: int | str) -> Graph:
        """Pin a plan by index or by name ("gdn_eager[chunk=32]"). A pin is obeyed or refused."""
        self._require_unbuilt()
        plans = self._ranked()
        if isinstance(plan, bool) or not isinstance(plan, (int, str)):
            raise InvalidOption("select_plan", "plan", expected="an index or a plan's name",
                                got=repr(plan), mend="See get_plan_name_at_index")  # fmt: skip
        if isinstance(plan, int):
            self._pin = self._index(plan)
            return self
        problem = self._problem
        if problem is None:
            raise GraphError("build_operation_graph() did not describe the graph.")
        name = select.select(problem, plan)
        if name not in plans:
            plans.append(name)
        self._pin = plans.index(name)
        return self

    def deselect_engines(self, engine_names: Iterable[str]) -> Graph:
        """Bar plans whose name holds any of these."""
        self._require_unbuilt()
        self._barred.update([engine_names] if isinstance(engine_names, str) else engine_names)
        return self

    def _require_unbuilt(self) -> None:
        if self._executor is not None:
            raise GraphError("the graph is built and its plan chosen. Build a new graph instead.")

    def _is_barred(self, name: select.PlanName) -> bool:
        return any(word in str(name) for word in self._barred)

    def _candidates(self) -> list[int]:
        """Indices that `build_plans` may build, best first."""
        plans = self._ranked()
        if self._pin is not None:
            if self._is_barred(plans[self._pin]):
                raise PlanNotOffered(
                    f"plan {plans[self._pin]} is pinned by select_plan and barred by "
                    f"deselect_engines. Drop one of the two."
                )
            return [self._pin]
        default = {v.plan for v in self._verdicts if v.default}
        return [
            i for i, name in enumerate(plans) if name.base in default and not self._is_barred(name)
        ]

    def check_support(self) -> None:
        """Raise `NoEngine` unless a plan serves the graph without a pin, or the pin serves it."""
        if self._plans is None:
            self.create_execution_plans()
        if not self._candidates():
            problem = self._problem
            if problem is not None:
                raise NoEngine(select.nothing_serves(problem, self._barred))

    def build_plans(self, policy: build_plan_policy = build_plan_policy.HEURISTICS_CHOICE) -> None:
        """Build the best plan, or the pinned one (ALL builds every plan that may run)."""
        if self._plans is None:
            self.create_execution_plans()
        self.check_support()
        candidates = self._candidates()
        executors = {}
        for index in candidates:
            executors[index] = _Executor(self, self._ranked()[index])
            if policy is not build_plan_policy.ALL:
                break
        self._chosen = next(iter(executors))
        self._executor = executors[self._chosen]

    def build(self, heuristics: Iterable[heur_mode] | None = None) -> None:
        """Validate, freeze, plan, check and build, in that order."""
        self.build_operation_graph()
        if self._plans is None:
            self.create_execution_plans(heuristics)
        self.check_support()
        self.build_plans()

    @property
    def plan_name(self) -> str | None:
        """Name of the plan that runs; None before `build_plans`."""
        return None if self._chosen is None else str(self._ranked()[self._chosen])

    def explain(self) -> Explanation:
        """Every engine's verdict on this graph, in words."""
        self.build_operation_graph()
        node, _ = self._require()
        if self._problem is None:
            raise GraphError("build_operation_graph() did not describe the graph.")
        found = select.verdicts(self._problem)
        chosen = self.plan_name or next((v.plan for v in found if v.ok and v.default), None)
        return Explanation(node.type, found, chosen)

    # Running -------------------------------------------------------------------------------------

    def _built(self) -> _Executor:
        if self._executor is None:
            raise GraphError("the graph is not built. Call build() first.")
        return self._executor

    def get_workspace_size(self, T: int | None = None, N: int | None = None) -> int:
        """Bytes of workspace for `execute`; give T and N where the graph leaves them open."""
        executor = self._built()
        sizes = self._bound.sizes if self._bound is not None else {}
        tokens, sequences = (given if given is not None else sizes[letter]
                             for given, letter in ((T, "T"), (N, "N")))  # fmt: skip
        if tokens is None or sequences is None:
            raise GraphError("get_workspace_size: T and N are open here. Pass T=... and N=....")
        return executor.plan.workspace(tokens, sequences)

    def execute(
        self, variant_pack: Mapping[Any, Any], workspace: Any = None, handle: Handle | None = None
    ) -> None:
        """Run the plan on these buffers, on the current stream or the handle's.

        variant_pack: buffers by graph tensor, name or uid: torch tensors or DLPack producers.
        Outputs are written in place. workspace: a uint8 tensor of `get_workspace_size()` bytes;
        allocated if absent. Builds the graph first where that was not done.
        """
        if self._executor is None:
            self.build()
        self._built().run(variant_pack, workspace, handle or self.handle)

    __call__ = execute

    # Looking and keeping ------------------------------------------------------------------------

    def inspect(self) -> dict[str, Any]:
        """The graph as plain data."""
        node = self._node
        return {
            "name": self.name,
            "context": {
                "io_data_type": to_data_type(self.io_data_type).name,
                "intermediate_data_type": to_data_type(self.intermediate_data_type).name,
                "compute_data_type": to_data_type(self.compute_data_type).name,
            },
            "nodes": [] if node is None else [{
                "name": self._node_name,
                "type": node.type,
                "inputs": {port: t.name for port, t in self._inputs.items()},
                "outputs": {port: t.name for port, t in self._outputs.items()},
                "params": json.loads(self._request.text) if self._request else {},
            }],
            "tensors": {t.name: _tensor_data(t) for t in self._tensors},
            "plan": self.plan_name,
        }  # fmt: skip

    def key(self) -> str:
        """A digest of the node, its options and its tensors; names and uids do not count."""
        self.validate()
        node, req = self._require()
        ports = {
            port: [list(t.dim or ()), list(t.stride or ()), t.data_type.name]
            for port, t in (self._inputs | self._outputs).items()
        }
        text = json.dumps([node.type, req.text, ports, str(self.device), self.sm_version])
        return hashlib.sha256(text.encode()).hexdigest()

    def serialize(self) -> str:
        """The graph and its chosen plan as JSON."""
        node, req = self._require()
        return json.dumps({
            "lagraph": 1,
            "name": self.name,
            "io_data_type": to_data_type(self.io_data_type).name,
            "intermediate_data_type": to_data_type(self.intermediate_data_type).name,
            "compute_data_type": to_data_type(self.compute_data_type).name,
            "device": None if self._device is None else str(self._device),
            "sm_version": self.sm_version,
            "tensors": [_tensor_data(t) | {"name": t.name} for t in self._tensors],
            "node": {
                "name": self._node_name,
                "type": node.type,
                "options": json.loads(req.text),
                "inputs": {port: t.uid for port, t in self._inputs.items()},
                "outputs": {port: t.uid for port, t in self._outputs.items()},
            },
            "plan": self.plan_name,
        })  # fmt: skip

    def deserialize(self, text: str) -> Graph:
        """Fill this empty graph from JSON; build it if the saved one was built."""
        if self._tensors or self._node is not None:
            raise GraphError("deserialize() wants an empty graph.")
        try:
            data = json.loads(text)
        except (TypeError, ValueError):
            raise GraphError("deserialize(): this is not the text of serialize().") from None
        version = data.get("lagraph") if isinstance(data, dict) else None
        if version != 1:
            raise GraphError(f"deserialize(): format {version!r} is unknown; 1 is read.")
        fresh = Graph(
            data["name"], _dtype_of(data["io_data_type"]),
            _dtype_of(data["intermediate_data_type"]), _dtype_of(data["compute_data_type"]),
            sm_version=data["sm_version"], device=data["device"], handle=self.handle,
        )  # fmt: skip
        spec = data["node"]
        made: dict[int, Tensor] = {}
        produced = set(spec["outputs"].values())
        for item in data["tensors"]:
            if item["uid"] in produced:
                continue
            made[item["uid"]] = fresh.tensor(
                item["dim"], item["stride"], _dtype_of(item["data_type"]), item["is_virtual"],
                name=item["name"], uid=item["uid"],
            )  # fmt: skip
        ports = {port: made[uid] for port, uid in spec["inputs"].items()}
        getattr(fresh, registry.node(spec["type"]).name)(
            **ports, **spec["options"], name=spec["name"]
        )
        by_uid = {item["uid"]: item for item in data["tensors"]}
        for port, uid in spec["outputs"].items():
            item, out = by_uid[uid], fresh._outputs[port]
            out.set_uid(uid)
            if out.name != item["name"]:
                out.set_name(item["name"])
            out.set_output(not item["is_virtual"])
            if item["dtype_given"]:
                out.set_data_type(_dtype_of(item["data_type"]))
            if item["stride"] is not None:
                out.set_stride(item["stride"])
        self.__dict__.update(fresh.__dict__)
        for tensor in self._tensors:
            tensor._graph = self
        if data["plan"] is not None:
            self.create_execution_plans()
            self.select_plan(data["plan"])
            self.build()
        return self

    def __repr__(self) -> str:
        node = self._node.type if self._node else "empty"
        return f"<Graph {self.name!r} {node}{' built' if self._executor else ''}>"


def _dtype_of(name: str) -> torch.dtype | None:
    return data_type[name].value


def _tensor_data(tensor: Tensor) -> dict[str, Any]:
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


@cache
def _runner(name: str) -> plan.Runner:
    """Graphs have runners of their own: their messages use the node's names."""
    return plan.Runner(registry.node(name), op_names=False)


class _Executor:
    """A built graph: what a warm `execute` needs."""

    def __init__(self, graph: Graph, name: select.PlanName) -> None:
        node, req = graph._require()
        if graph._problem is None or graph._bound is None:
            raise GraphError("the graph is not planned.")
        self.node, self.graph = node, graph
        self.runner = _runner(node.name)
        self.plan = Plan(node, graph._problem, graph._bound, name)
        rows = graph._outputs.get("state_checkpoints")
        self.request = request(
            node, dict(req.options), plan_name=str(name),
            checkpoint_dtype=rows.desc.data_type if rows is not None else None,
        )  # fmt: skip
        self.slots: dict[Any, int] = {}
        self.bindings: list[Any] = []
        self.names: list[str] = []
        for ports, given in (
            (node.input_names, graph._inputs),
            (node.output_names, graph._outputs),
        ):
            for port in ports:
                made = given.get(port)
                self.names.append(port)
                self.bindings.append(None if made is None else made.data)
                if made is not None:
                    at = len(self.names) - 1
                    for key in (made, made.name, made.uid):
                        self.slots[key] = at
        # One tensor may feed several ports.
        self.shared: list[tuple[int, int]] = []
        for at, port in enumerate(node.input_names):
            made = graph._inputs.get(port)
            if made is not None and self.slots[made] != at:
                self.shared.append((at, self.slots[made]))
        self.count = len(node.inputs)
        self.ignored = {key for t in graph._tensors for key in (t, t.name, t.uid)} - set(self.slots)
        self.sizes = {k: v for k, v in graph._bound.sizes.items() if k in "TN" and v is not None}
        pool = "state_indices" in graph._inputs
        for out in node.outputs:  # a T or N that was given to an output counts, too
            made, letter = graph._outputs.get(out.name), out.shape.split()[0]
            if made is None or not made.dim or (pool and out.dtype == "state"):
                continue
            if letter in DYNAMIC and made.dim[0] is not None:
                self.sizes.setdefault(letter, made.dim[0])
        self.pool_rows = graph._bound.sizes.get("P")
        self.accepted: set[Any] = set()

    def run(self, pack: Mapping[Any, Any], workspace: Any, handle: Handle | None) -> None:
        if handle is not None and handle.stream is not None and self.plan.problem.device == "cuda":
            stream = handle.stream
            if isinstance(stream, int):
                stream = torch.cuda.ExternalStream(stream)
            context: Any = torch.cuda.stream(stream)
        else:
            context = nullcontext()
        if torch.is_grad_enabled():
            with context, torch.no_grad():
                self._run(pack, workspace)
        else:
            with context:
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
        self._require_inputs(ins)
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

    def _require_inputs(self, ins: Sequence[Any]) -> None:
        for port, made in self.graph._inputs.items():
            if ins[self.node.input_names.index(port)] is None:
                raise RuleBroken(
                    self.node.name, port, expected=f"a buffer for tensor {made.name!r}",
                    got="none in the variant pack", mend=f"Add {made.name!r} to the variant pack",
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
            made = self.graph._inputs.get(port)
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


# The twenty builders -----------------------------------------------------------------------------


def _install_builders() -> None:
    from lagraph.doc import builder_docstring

    for name, node in registry.nodes().items():
        ports = [p.name + ("=None" if p.optional else "") for p in node.inputs]
        options = [f"{a.name}=None" for a in node.attrs]
        source = (
            f"def {name}(self, {', '.join([*ports, *options])}, *, name='', "
            f"compute_data_type=None):\n"
            f"    ports = {{{', '.join(f'{p.name!r}: {p.name}' for p in node.inputs)}}}\n"
            f"    options = {{{', '.join(f'{a.name!r}: {a.name}' for a in node.attrs)}}}\n"
            f"    return self._add(node, ports, options, name, compute_data_type)\n"
        )
        builder = compiled_source(source, f"<lagraph graph.{name}>", {"node": node})[name]
        builder.__qualname__ = f"Graph.{name}"
        builder.__module__ = __name__
        builder.__doc__ = builder_docstring(node)
        setattr(Graph, name, builder)


_install_builders()
