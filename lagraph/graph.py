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

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from lagraph import registry, select, serial
from lagraph.choice import Choice, Explanation
from lagraph.desc import dtype_name, to_torch_dtype
from lagraph.errors import (
    DeviceMismatch,
    DtypeMismatch,
    GraphError,
    InvalidNode,
    InvalidOption,
    RuleBroken,
)
from lagraph.execute import Executor
from lagraph.execute import runner as _runner
from lagraph.handle import Handle, build_plan_policy, heur_mode
from lagraph.placed import Placed
from lagraph.plan import compiled_source, problem_of, request
from lagraph.tensor import Tensor, Tensors, as_tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from lagraph.infer import Bound
    from lagraph.node import Node
    from lagraph.problem import Problem

__all__ = ["Graph"]


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
        self._tensors = Tensors()
        self._placed: Placed | None = None
        self._bound: Bound | None = None
        self._problem: Problem | None = None
        self._barred: set[str] = set()
        self._choice: Choice | None = None
        self._executor: Executor | None = None

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
        return self._tensors.declare(dim, stride, data_type, is_virtual, name, uid)

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

    def _add(self, node: Node, ports: Mapping[str, Any], options: Mapping[str, Any], name: str,
             compute_data_type: Any) -> list[Tensor | None]:  # fmt: skip
        self._tensors.require_open(f"add {node.type}")
        if self._placed is not None:
            raise GraphError(
                f"one linear-attention node per graph: this one has {self._placed.node.type}, "
                f"cannot add {node.type}. Make a second graph."
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
            inputs = self._own_all(node, ports, name or node.name)
            outputs: dict[str, Tensor] = {}
            for out in node.present(req.options, inputs.__contains__):
                made = self.tensor((), name=f"{name or node.name}::{out.name}", is_virtual=True)
                made._infer(dim=None)
                outputs[out.name] = made
            placed = Placed(node, req, name or node.name, inputs, outputs, self.io_data_type)
            try:
                placed.metas()
            except DtypeMismatch:
                pass  # a dtype may still be set
            else:
                self._bound = placed.bind()
        except InvalidNode:  # the graph stays open for a better node
            self._tensors.forget(declared)
            raise
        self._placed = placed
        return [outputs.get(out.name) for out in node.outputs]

    def _own_all(self, node: Node, ports: Mapping[str, Any], name: str) -> dict[str, Tensor]:
        """The graph's tensors by port, for those that were given."""
        inputs: dict[str, Tensor] = {}
        for port in node.inputs:
            value = ports[port.name]
            if value is not None:
                inputs[port.name] = self._own(value, f"{name}::{port.name}", node, port.name)
            elif not port.optional:
                raise RuleBroken(node.name, port.name, expected="a tensor", got="None",
                                 mend=f"Pass {port.name}")  # fmt: skip
        return inputs

    def _own(self, value: Any, name: str, node: Node, port: str) -> Tensor:
        if isinstance(value, Tensor):
            if value._owner is not self._tensors:
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

    def _require(self) -> Placed:
        if self._placed is None:
            raise GraphError("the graph has no node. Call a builder first, graph.gdn(...) say.")
        return self._placed

    def validate(self) -> None:
        """Check every rule on the declared tensors, and infer the outputs. Raises `InvalidNode`."""
        placed = self._require()
        if not self._tensors.closed:
            self._bound = placed.bind()

    def build_operation_graph(self) -> None:
        """Validate, then freeze the graph."""
        self._described()

    def _described(self) -> tuple[Problem, Bound]:
        """The frozen graph as engines see it."""
        self.validate()
        bound = self._bound
        if bound is None:
            raise GraphError("validate() did not bind the graph.")
        if self._problem is None:
            self._problem = self._describe(self._require(), bound)
            self._tensors.closed = True
        return self._problem, bound

    def _describe(self, placed: Placed, bound: Bound) -> Problem:
        node, metas = placed.node, placed.metas()
        here = self.device
        if here.type == "cuda" and here.index is None and torch.cuda.is_available():
            here = torch.device("cuda", torch.cuda.current_device())
        on_device = [None if m is None else m._replace(device=here) for m in metas]
        if here.type == "cuda" and not torch.cuda.is_available():
            if self.sm_version is None:
                raise DeviceMismatch(
                    node.name, "device", expected="a CUDA device", got="none on this machine",
                    mend="Pass sm_version to plan without one",
                )  # fmt: skip
            on_device = metas
        options = placed.request.options
        problem = problem_of(node, bound, options, on_device, placed.layouts(metas))
        if self.sm_version is None:
            return problem
        arch = self.sm_version // 10 if self.sm_version >= 300 else self.sm_version
        return replace(problem, device="cuda", arch=arch)

    def create_execution_plans(self, heuristics: Iterable[heur_mode] | None = None) -> None:
        """Rank the plans that serve this graph. Raises `NoEngine` with every engine's reason."""
        if self._choice is not None:
            raise GraphError("plans exist already: planning is done once. Build a new graph.")
        for mode in heuristics or ():
            if not isinstance(mode, heur_mode):
                raise InvalidOption("create_execution_plans", "heuristics",
                                    expected="members of lagraph.heur_mode", got=repr(mode),
                                    mend="Pass [lagraph.heur_mode.A]")  # fmt: skip
        problem, _ = self._described()
        self._choice = Choice(problem, select.verdicts(problem))

    def _ranked(self) -> Choice:
        if self._choice is None:
            raise GraphError("no plans yet. Call create_execution_plans() or build() first.")
        return self._choice

    def get_execution_plan_count(self) -> int:
        """Number of plans that serve this graph; 0 before planning."""
        return 0 if self._choice is None else len(self._choice.plans)

    def get_plan_name_at_index(self, index: int) -> str:
        """Name of a ranked plan."""
        choice = self._ranked()
        return str(choice.plans[choice.index(index)])

    def select_plan(self, plan: int | str) -> Graph:
        """Pin a plan by index or by name ("gdn_eager[chunk=32]"). A pin is obeyed or refused."""
        self._require_unbuilt()
        self._ranked().select(plan)
        return self

    def deselect_engines(self, engine_names: Iterable[str]) -> Graph:
        """Bar plans whose name holds any of these."""
        self._require_unbuilt()
        self._barred.update([engine_names] if isinstance(engine_names, str) else engine_names)
        return self

    def _require_unbuilt(self) -> None:
        if self._executor is not None:
            raise GraphError("the graph is built and its plan chosen. Build a new graph instead.")

    def check_support(self) -> None:
        """Raise `NoEngine` unless a plan serves the graph without a pin, or the pin serves it."""
        if self._choice is None:
            self.create_execution_plans()
        self._ranked().candidates(self._barred)

    def build_plans(self, policy: build_plan_policy = build_plan_policy.HEURISTICS_CHOICE) -> None:
        """Build the best plan, or the pinned one (ALL builds every plan that may run)."""
        self.check_support()
        placed, choice = self._require(), self._ranked()
        problem, bound = self._described()
        candidates = choice.candidates(self._barred)
        if policy is not build_plan_policy.ALL:
            candidates = candidates[:1]
        executors = [
            Executor(placed, self._tensors, problem, bound, choice.plans[index],
                     _runner(placed.node.name))
            for index in candidates
        ]  # fmt: skip
        choice.chosen, self._executor = candidates[0], executors[0]

    def build(self, heuristics: Iterable[heur_mode] | None = None) -> None:
        """Validate, freeze, plan, check and build, in that order."""
        self.build_operation_graph()
        if self._choice is None:
            self.create_execution_plans(heuristics)
        self.build_plans()

    @property
    def plan_name(self) -> str | None:
        """Name of the plan that runs; None before `build_plans`."""
        choice = self._choice
        if choice is None or choice.chosen is None:
            return None
        return str(choice.plans[choice.chosen])

    def explain(self) -> Explanation:
        """Every engine's verdict on this graph, in words."""
        problem, _ = self._described()
        found = select.verdicts(problem)
        chosen = self.plan_name or next((v.plan for v in found if v.ok and v.default), None)
        return Explanation(self._require().node.type, found, chosen)

    # Running -------------------------------------------------------------------------------------

    def _built(self) -> Executor:
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
        return serial.plain(self)

    def key(self) -> str:
        """A digest of the node, its options and its tensors; names and uids do not count."""
        self.validate()
        return serial.digest(self)

    def serialize(self) -> str:
        """The graph and its chosen plan as JSON."""
        return serial.to_text(self)

    def deserialize(self, text: str) -> Graph:
        """Fill this empty graph from JSON; build it if the saved one was built."""
        if len(self._tensors) or self._placed is not None:
            raise GraphError("deserialize() wants an empty graph.")
        self.__dict__.update(serial.from_text(Graph, text, self.handle).__dict__)
        if self._choice is not None:
            self.build()
        return self

    def __repr__(self) -> str:
        node = self._placed.node.type if self._placed else "empty"
        return f"<Graph {self.name!r} {node}{' built' if self._executor else ''}>"


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
