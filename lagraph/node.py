"""The declaration of a family, and the four nodes that follow from it.

A family lists its ports, its attributes and its rules once. `Family.node(direction)` derives a
node: which ports it takes and which outputs it gives, by the roles below. Builders, operator
schemas, fakes, plan keys, docs and negative tests are all made from the derived `Node`.

Roles of ports            forward  backward  summary  summary_backward
  query   (q)                x        x                     x
  token   (k, g, beta, a)    x        x         x           x
  write   (v, w)             x        x         x
  state   (initial_state)    x        x         x
  param   (a_log, dt_bias)   x        x         x           x
  readout (d, z)             x        x
  pool    (state_indices)    x
The backward adds dO, state_checkpoints, d_final_state and the saved outputs; the summary's
backward adds dO and d_final_state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from lagraph.errors import InvalidOption, RuleBroken
from lagraph.problem import DIRECTIONS, Direction, Traits

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Attr", "Family", "Node", "Options", "Output", "Port", "Rule", "expected_text"]

Role = Literal["query", "token", "write", "state", "param", "readout", "pool", "cotangent", "saved"]
DtypeRule = Literal["io", "beta", "float", "index", "rows"]

_TAKES: dict[Direction, frozenset[str]] = {
    "forward": frozenset({"query", "token", "write", "state", "param", "readout", "pool"}),
    "backward": frozenset({"query", "token", "write", "state", "param", "readout"}),
    "summary": frozenset({"token", "write", "state", "param"}),
    "summary_backward": frozenset({"query", "token", "param"}),
}
_SUFFIX: dict[Direction, str] = {
    "forward": "",
    "backward": "_bwd",
    "summary": "_summary",
    "summary_backward": "_summary_bwd",
}


@dataclass(frozen=True, slots=True)
class Port:
    """One input tensor of a node.

    shape: letters of `lagraph.desc`; alternatives differ in rank.
    dtype: "io" the token dtype, the same for all such ports; "beta" fp32 or the io dtype;
        "float" fp32, bf16 or fp16 (fp64 too when io is fp64); "index" int32 or int64;
        "rows" the io dtype or fp32.
    grad: name of the gradient that the backward returns, None where there is none.
    op: the operator's name for the port, where it differs (Mamba-2).
    """

    name: str
    shape: str
    dtype: DtypeRule
    role: Role
    doc: str
    grad: str | None = None
    optional: bool = False
    op: str = ""

    @property
    def op_name(self) -> str:
        """The name that the port has in the operator's signature."""
        return self.op or self.name

    @property
    def shapes(self) -> dict[int, tuple[str, ...]]:
        """Letters by rank."""
        options = (tuple(part.split()) for part in self.shape.split("|"))
        return {len(letters): letters for letters in options}


@dataclass(frozen=True, slots=True)
class Output:
    """One output tensor of a node.

    like: an input port whose dtype the output takes ("io" means the token dtype).
    when: whether the output exists, from the options and the ports that are present.
    """

    name: str
    shape: str
    dtype: str
    doc: str
    like: str = ""
    when: Callable[[Any, Callable[[str], bool]], bool] | None = None
    condition: str = ""


@dataclass(frozen=True, slots=True)
class Attr:
    """One option of a node. `where` names the directions that have it; `op` its operator's name."""

    name: str
    type: Any
    default: Any
    doc: str
    where: tuple[Direction, ...] = DIRECTIONS
    op: str = ""
    limits: Mapping[str, Any] = field(default_factory=dict)

    @property
    def op_name(self) -> str:
        """The name that the option has in the operator's signature."""
        return self.op or self.name


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule between options, ports and sizes.

    broken: whether the rule is broken, from (options, has, sizes).
    sample: a call that breaks it: options, ports to add, ports to drop (tests are made from it).
    """

    name: str
    argument: str
    expected: str
    mend: str
    broken: Callable[[Any, Callable[[str], bool], Mapping[str, int]], bool]
    got: Callable[[Any, Mapping[str, int]], str]
    where: tuple[Direction, ...] = DIRECTIONS
    sample: Mapping[str, Any] = field(default_factory=dict)
    sizes: bool = False


class Options(BaseModel):
    """Base of the attribute models: frozen, strict, unknown names refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Family:
    """One linear-attention variant, declared once in `lagraph.nodes`.

    name: prefix of nodes and plans ("gdn"); op: the operator ("gated_delta_net").
    ports, attrs, rules: see the classes above. op_order: the operator's arguments in order, by
    direction; names after "*" are keyword-only. checkpoint_step: what the checkpoint cadence is a
    multiple of. transition: shape of the summaries' transition. saved: outputs that the backward
    takes back. cotangent: the operator's name of dO. op_fill: an operator argument that stands in
    for a port which the operator does not take. also: what other libraries call it.
    """

    def __init__(
        self,
        *,
        name: str,
        op: str,
        title: str,
        equation: str,
        source: str,
        traits: Traits,
        ports: tuple[Port, ...],
        attrs: tuple[Attr, ...],
        rules: tuple[Rule, ...],
        op_order: Mapping[Direction, tuple[str, ...]],
        checkpoint_step: int,
        transition: str = "N HO K K",
        saved: tuple[Port, ...] = (),
        cotangent: str = "dO",
        op_fill: Mapping[str, str] | None = None,
        notes: tuple[str, ...] = (),
        also: tuple[str, ...] = (),
    ) -> None:
        self.name, self.op, self.title = name, op, title
        self.equation, self.source, self.notes = equation, source, notes
        self.also = also
        self.traits, self.ports, self.attrs, self.rules = traits, ports, attrs, rules
        self.op_order, self.checkpoint_step = op_order, checkpoint_step
        self.transition, self.saved = transition, saved
        self.cotangent, self.op_fill = cotangent, dict(op_fill or {})
        self._nodes: dict[Direction, Node] = {}

    def node(self, direction: Direction) -> Node:
        """The derived node of one direction."""
        node = self._nodes.get(direction)
        if node is None:
            node = self._nodes[direction] = Node(self, direction)
        return node

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The four nodes."""
        return tuple(self.node(direction) for direction in DIRECTIONS)

    def __repr__(self) -> str:
        return f"<Family {self.name}>"


class Node:
    """What one direction of a family takes and gives; all of it derived."""

    def __init__(self, family: Family, direction: Direction) -> None:
        self.family, self.direction = family, direction
        self.name = family.name + _SUFFIX[direction]  # builder: graph.gdn_bwd
        self.type = self.name.upper()  # node type: GDN_BWD
        self.op = family.op + _SUFFIX[direction]
        self.inputs: tuple[Port, ...] = _inputs(family, direction)
        self.attrs: tuple[Attr, ...] = _attrs(family, direction)
        self.outputs: tuple[Output, ...] = _outputs(family, direction)
        self.rules = tuple(rule for rule in family.rules if direction in rule.where)
        self.input_names = tuple(port.name for port in self.inputs)
        self.output_names = tuple(out.name for out in self.outputs)
        self.port = {port.name: port for port in self.inputs}
        self.plan_prefix = family.name + ("_summary" if "summary" in direction else "")

    def __repr__(self) -> str:
        return f"<Node {self.type}>"

    @cached_property
    def options_model(self) -> type[Options]:
        """The pydantic model of the node's attributes."""
        fields: dict[str, Any] = {
            attr.name: (attr.type, Field(attr.default, description=attr.doc, **attr.limits))
            for attr in self.attrs
        }
        return create_model(f"{self.type}_Options", __base__=Options, **fields)

    def options(
        self, values: Mapping[str, Any], label: str = "", op_names: bool = False
    ) -> Options:
        """A validated, frozen options model; `InvalidOption` names what is wrong."""
        label = label or self.name
        values = {name: self._plain(name, x, label, op_names) for name, x in values.items()}
        try:
            return self.options_model(**values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = str(first["loc"][0]) if first["loc"] else ""
            shown = self.shown(name, op_names)
            known = ", ".join(a.op_name if op_names else a.name for a in self.attrs)
            unknown = first["type"] == "extra_forbidden"
            missing = first["type"] == "missing"
            expected = "a known option" if unknown else expected_text(first["msg"])
            raise InvalidOption(
                label,
                shown,
                expected="a value" if missing else expected,
                got="nothing" if missing else repr(first["input"]),
                mend=f"Options of {label}: {known}" if unknown else f"Give {shown} such a value",
            ) from None

    def _plain(self, name: str, value: Any, label: str, op_names: bool) -> Any:
        """An option's value: NumPy's scalars as Python's. Tensors are refused, since requests are
        interned and a tensor may change."""
        if isinstance(value, torch.Tensor):
            raise InvalidOption(
                label, self.shown(name, op_names), expected="a plain Python value",
                got="a torch.Tensor", mend="Options are constants; pass a Python number",
            )  # fmt: skip
        return value.tolist() if type(value).__module__ == "numpy" else value

    def shown(self, name: str, op_names: bool) -> str:
        """A port's, option's or output's name as the caller wrote it."""
        if not op_names:
            return name
        named: tuple[Port | Attr, ...] = (*self.inputs, *self.attrs)
        for item in named:
            if item.name == name:
                return item.op_name
        return name

    def present(self, options: Options, has: Callable[[str], bool]) -> tuple[Output, ...]:
        """The outputs that exist for these options and input ports."""
        return tuple(out for out in self.outputs if out.when is None or out.when(options, has))

    def check_rules(
        self,
        options: Options,
        has: Callable[[str], bool],
        sizes: Mapping[str, int],
        label: str,
        op_names: bool,
    ) -> None:
        """Raise `RuleBroken` for the first rule that does not hold."""
        for rule in self.rules:
            if rule.broken(options, has, sizes):
                raise RuleBroken(
                    label,
                    self.shown(rule.argument, op_names),
                    expected=self._renamed(rule.expected, op_names),
                    got=self._renamed(rule.got(options, sizes), op_names),
                    mend=self._renamed(rule.mend, op_names),
                )

    def _renamed(self, text: str, op_names: bool) -> str:
        if not op_names:
            return text
        for attr in self.attrs:
            if attr.op:
                text = text.replace(attr.name, attr.op)
        return text

    def resolve(self, options: Options, sizes: Mapping[str, int]) -> SimpleNamespace:
        """The options as engines read them: every default filled in."""
        values = dict(options)
        if "scale" in values and values["scale"] is None:
            values["scale"] = float(sizes["K"]) ** -0.5
        if "gate_lower_bound" in values and values["gate_lower_bound"] is None:
            values["gate_lower_bound"] = -5.0
        if "dt_max" in values and values["dt_max"] is None:
            values["dt_max"] = float("inf")
        if values.get("overwrite_initial_state") and "output_final_state" in values:
            values["output_final_state"] = True
        return SimpleNamespace(**values)


def expected_text(text: str) -> str:
    """pydantic's "Input should be a valid number" as what follows "expected"."""
    text = text.removeprefix("Input should be ").removeprefix("Value error, ")
    return f"a value {text}" if text.startswith(("greater", "less")) else text


def _given(name: str, options: Any, has: Callable[[str], bool]) -> bool:
    return has(name)


def _inputs(family: Family, direction: Direction) -> tuple[Port, ...]:
    takes = _TAKES[direction]
    ports = [port for port in family.ports if port.role in takes]
    required = [port for port in ports if not port.optional]
    optional = [port for port in ports if port.optional]
    if direction in ("forward", "summary"):
        return (*required, *optional)
    d_output = Port(
        "dO", "T HO V", "io", "cotangent", "Gradient of the output.", op=family.cotangent
    )
    d_state = Port(
        "d_final_state", "N HO V K", "float", "cotangent", "Gradient of the final state.",
        optional=True,
    )  # fmt: skip
    if direction == "summary_backward":
        return (*required, d_output, d_state, *optional)
    rows = Port(
        "state_checkpoints", "R HO V K", "rows", "saved",
        "The forward's checkpoints at the same cadence, read instead of recomputed.",
        optional=True,
    )  # fmt: skip
    states = [port for port in optional if port.role == "state"]
    rest = [port for port in optional if port.role != "state"]
    # The pool of a paged forward is not differentiable, so a backward's state has one row each.
    return (*required, d_output, rows, *states, d_state, *rest, *family.saved)


def _attrs(family: Family, direction: Direction) -> tuple[Attr, ...]:
    return tuple(attr for attr in family.attrs if direction in attr.where)


def _outputs(family: Family, direction: Direction) -> tuple[Output, ...]:
    state = "N HO V K"
    if direction == "forward":
        outputs = [
            Output("O", "T HO V", "io", "Output."),
            Output(
                "final_state", state, "state", "State after each sequence's last token.",
                when=lambda o, has: o.output_final_state or o.overwrite_initial_state,
                condition="output_final_state",
            ),
            Output(
                "state_checkpoints", "R HO V K", "io", "States at the checkpoint cadence.",
                when=lambda o, has: o.checkpoint_every_n_tokens > 0,
                condition="checkpoint_every_n_tokens > 0",
            ),
        ]  # fmt: skip
        if family.saved:
            outputs.append(
                Output(
                    "O_pre",
                    "T HO V",
                    "io",
                    "Output before the z gate.",
                    when=lambda o, has: o.output_pre_gate and has("z"),
                    condition="output_pre_gate and z",
                )
            )
        return tuple(outputs)
    if direction == "backward":
        return tuple(
            Output(
                port.grad,
                port.shape,
                "like",
                f"Gradient of {port.name}.",
                like=port.name,
                when=partial(_given, port.name) if port.optional else None,
                condition=f"{port.name} given" if port.optional else "",
            )
            for port in _inputs(family, "backward")
            if port.grad
        )
    first = (
        Output("final_state", state, "wide", "State after each sequence's last token.")
        if direction == "summary"
        else Output("d_initial_state", state, "wide", "Gradient of each sequence's first state.")
    )
    transition = Output(
        "transition", family.transition, "wide", "Map from the first to the last state.",
        when=lambda o, has: o.output_transition, condition="output_transition",
    )  # fmt: skip
    return first, transition
