"""Plans: a problem bound to an engine, with what a warm call needs and nothing more.

A `Request` holds a call's options; it is interned, and its canonical text is what operators carry.
A `Runner` (one per node) finds the plan of a call by a generated key, which holds dtypes, devices,
stride classes and static dims, never T or N, then allocates the outputs and runs the engine.
"""

from __future__ import annotations

import json
import re
import threading
from dataclasses import dataclass
from functools import cache, lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from lagraph import infer, registry, select
from lagraph.desc import dtype_name, layout_class, to_torch_dtype
from lagraph.errors import InvalidOption, RuleBroken
from lagraph.infer import Meta
from lagraph.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lagraph.infer import Bound
    from lagraph.node import Node, Options

__all__ = ["Plan", "Request", "Runner", "problem_of", "request", "runner"]

# Plans kept per node. The oldest makes room, not the least recently used: keeping the order of use
# would cost every warm call a write.
CAPACITY = 256
REQUESTS = 4096  # requests kept


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """The options of one call, validated once and interned.

    text: canonical JSON of what differs from the defaults; the same text is the same request.
    final: whether the call makes final states.
    """

    node: Node
    options: Options
    plan_name: str | None
    checkpoint_dtype: torch.dtype | None
    text: str
    n: int
    every: int
    final: bool

    def to(self, direction: Any) -> Request:
        """The same options for another direction of the family, with that direction's pin."""
        return _converted(self, direction)


_REQUESTS: dict[tuple[str, str], Request] = {}


def request(
    node: Node,
    values: Mapping[str, Any],
    *,
    plan_name: str | None = None,
    checkpoint_dtype: Any = None,
    label: str = "",
    op_names: bool = False,
) -> Request:
    """Validate options and intern them. Raises `InvalidOption`."""
    options = node.options(values, label, op_names)
    dtype = to_torch_dtype(checkpoint_dtype, label or node.name, "checkpoint_dtype")
    if not (plan_name is None or isinstance(plan_name, str)):
        raise InvalidOption(
            label or node.name, "plan_name", expected="a plan's name", got=repr(plan_name),
            mend=f"Pass {node.plan_prefix}_eager, say, or None",
        )  # fmt: skip
    given = {k: v for k, v in options if v != type(options).model_fields[k].default}
    if plan_name is not None:
        given["plan_name"] = plan_name
    if dtype is not None:
        given["checkpoint_dtype"] = dtype_name(dtype)
    text = json.dumps(given, sort_keys=True, separators=(",", ":"))
    key = (node.name, text)
    found = _REQUESTS.get(key)
    if found is None:
        if len(_REQUESTS) >= REQUESTS:
            _REQUESTS.clear()
        found = _REQUESTS.setdefault(
            key,
            Request(
                node, options, plan_name, dtype, text,
                n=getattr(options, "num_householder", 1),
                every=getattr(options, "checkpoint_every_n_tokens", 0),
                final=getattr(options, "output_final_state", False)
                or getattr(options, "overwrite_initial_state", False),
            ),
        )  # fmt: skip
    return found


def parse_request(node: Node, text: str) -> Request:
    """The request of a canonical text."""
    found = _REQUESTS.get((node.name, text))
    if found is None:
        values = json.loads(text)
        plan_name, dtype = values.pop("plan_name", None), values.pop("checkpoint_dtype", None)
        found = request(node, values, plan_name=plan_name, checkpoint_dtype=dtype)
        # A text in another spelling is kept under its own key, too.
        _REQUESTS.setdefault((node.name, text), found)
    return found


@lru_cache(maxsize=1024)
def _converted(source: Request, direction: Any) -> Request:
    node = source.node.family.node(direction)
    names = {attr.name for attr in node.attrs}
    values = {k: v for k, v in source.options if k in names}
    return request(node, values, plan_name=_pins(source)[-1])


def _pins(source: Request) -> list[str] | list[None]:
    """The plan names of a request; a comma between knobs separates no plans."""
    if source.plan_name is None:
        return [None]
    return [pin.strip() for pin in re.split(r",(?![^\[]*\])", source.plan_name)]


def pinned(source: Request) -> str | None:
    """The pin of a request's own direction: the first of a pair."""
    pins = _pins(source)
    if len(pins) > 2 or (len(pins) == 2 and source.node.direction != "forward"):
        raise RuleBroken(
            source.node.op,
            "plan_name",
            expected="one plan name, or a forward's and a backward's with a comma between",
            got=repr(source.plan_name),
            mend="Name one plan, or two for a forward",
        )
    return pins[0]


def problem_of(
    node: Node,
    bound: Bound,
    options: Options,
    metas: Sequence[Meta | None],
    layouts: Sequence[int] | None = None,
) -> Problem:
    """The `Problem` of a bound call."""
    dtypes = {p.name: m.dtype for p, m in zip(node.inputs, metas, strict=True) if m is not None}
    ranks = {p.name: len(m.shape) for p, m in zip(node.inputs, metas, strict=True) if m}
    dtypes |= {name: dtype for name, (_, dtype) in bound.outputs.items()}
    device = next((m.device for m in metas if m is not None and m.device is not None), None)
    kind = "cpu" if device is None or device.type == "meta" else device.type
    index = 0 if device is None or device.index is None else device.index
    strides = layouts if layouts is not None else [0] * len(metas)
    return Problem(
        family=node.family.name,
        direction=node.direction,
        traits=node.family.traits,
        sizes=MappingProxyType({k: v for k, v in bound.sizes.items() if k not in "TNPR"}),
        inputs=node.input_names,
        outputs=node.output_names,
        dtypes=MappingProxyType(dtypes),
        options=node.resolve(options, bound.sizes),
        layouts=MappingProxyType(
            {p.name: s for p, m, s in zip(node.inputs, metas, strides, strict=True) if m}
        ),
        ranks=MappingProxyType(ranks),
        device=kind,
        arch=_arch(index) if kind == "cuda" else 0,
        index=index,
    )


@cache
def _arch(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return major * 10 + minor


class Plan:
    """A problem bound to one engine's compiled plan. Immutable; any thread may run it."""

    __slots__ = (
        "__weakref__", "aliases", "call", "compiled", "cuda", "device", "dtypes", "key", "name",
        "problem", "shapes", "workspace",
    )  # fmt: skip

    def __init__(
        self, node: Node, problem: Problem, bound: Bound, name: select.PlanName, key: Any = None
    ) -> None:
        self.problem, self.name, self.key = problem, str(name), key
        self.compiled = select.build(problem, name)
        self.workspace: Callable[[int, int], int] = self.compiled.workspace_size
        self.device, self.cuda = torch.device(problem.device), problem.device == "cuda"
        if self.cuda:
            self.device = torch.device("cuda", problem.index)
        self.dtypes = tuple(problem.dtypes.get(name) for name in node.output_names)
        # Position of the output that is an input's buffer.
        self.aliases = node.output_names.index("final_state") if problem.in_place else -1
        shapes = [self._shape(node, bound, out) for out in node.outputs]
        outs = [self._make(node, at, shape) for at, shape in enumerate(shapes)]
        scope = {
            "empty": torch.empty, "empty_like": torch.empty_like, "device": self.device,
            "uint8": torch.uint8, "workspace": self.workspace,
            "run": self.run if self.cuda else self.compiled.run,
        }  # fmt: skip
        scope |= {f"dtype{at}": dtype for at, dtype in enumerate(self.dtypes)}
        source = (
            f"def shapes(ins, T, N):\n    return ({', '.join(shapes)},)\n"
            f"def call(ins, T, N):\n"
            f"    outs = ({', '.join(outs)},)\n"
            f"    size = workspace(T, N)\n"
            f"    run(ins, outs, empty(size, dtype=uint8, device=device) if size else None)\n"
            f"    return outs\n"
        )
        made = compiled_source(source, f"<lagraph {node.name} outputs>", scope)
        # (ins, T, N) -> shapes, and -> outputs of a run; None where an output is absent.
        self.shapes: Callable[..., Any] = made["shapes"]
        self.call: Callable[..., Any] = made["call"]

    def _make(self, node: Node, at: int, shape: str) -> str:
        """Source that makes an output: `torch.empty` is cheapest with sizes as arguments."""
        if shape == "None":
            return shape
        if at == self.aliases:
            return f"ins[{node.input_names.index('initial_state')}]"
        like = node.outputs[at].like
        if like and self.problem.layouts[like] == 0:
            return f"empty_like(ins[{node.input_names.index(like)}])"
        return f"empty(*{shape}, dtype=dtype{at}, device=device)"

    def _shape(self, node: Node, bound: Bound, out: Any) -> str:
        """Source of an output's shape, with all static sizes written in."""
        if not self.problem.has(out.name):
            return "None"
        if out.like:
            return f"ins[{node.input_names.index(out.like)}].shape"
        if out.dtype == "state" and self.problem.has("state_indices"):
            return f"ins[{node.input_names.index('initial_state')}].shape"
        n = self.problem.sizes.get("n", 1)
        every = getattr(self.problem.options, "checkpoint_every_n_tokens", 0) or 1
        terms = {"T": "T", "N": "N", "R": f"max(T * {n} // {every} + N, 1)"}
        return f"({', '.join(terms.get(x) or str(bound.sizes[x]) for x in out.shape.split())},)"

    def run(self, ins: Sequence[Any], outs: Sequence[Any], workspace: Any = None) -> None:
        """Run on the current stream of the tensors' device."""
        if self.cuda and torch.cuda.current_device() != self.problem.index:
            with torch.cuda.device(self.problem.index):
                self.compiled.run(ins, outs, workspace)
        else:
            self.compiled.run(ins, outs, workspace)

    def __repr__(self) -> str:
        return f"<Plan {self.name} for {self.problem.family} {self.problem.direction}>"


def compiled_source(source: str, filename: str, scope: dict[str, Any]) -> dict[str, Any]:
    """Run generated source in `scope`; its lines show in tracebacks."""
    import linecache

    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    exec(compile(source, filename, "exec"), scope)
    return scope


# What reading a key raises where a tensor is missing or misfits; validation says which.
MISFIT = (AttributeError, IndexError, TypeError, ValueError)


def _key_source(node: Node) -> str:
    """Source of `key(ins, request) -> (key, T, N)` and of `find(ins, request) -> (plan, T, N)`.

    Everything static goes into the key, so a tuple that was seen once needs no other check than
    that the dynamic dims agree; key raises one of `MISFIT` if they do not.
    """
    args = [f"x{i}" for i in range(len(node.inputs))]
    at = {port.name: args[i] for i, port in enumerate(node.inputs)}
    lines = [f"    {', '.join(args)} = ins"]
    lines += [f"    T = {at['g']}.shape[0]", f"    N = {at['cu_seqlens']}.shape[0] - 1"]
    parts, checks = ["request.text"], ["N >= 0"]
    pool = f"{at['state_indices']} is not None" if "state_indices" in at else ""
    for port, x in zip(node.inputs, args, strict=True):
        i = x[1:]
        ranks = port.shapes
        head = next(iter(ranks.values()))[0]
        dynamic = {
            "T": f"s{i}[0] == T",
            "N": f"s{i}[0] == N",
            "T*n": f"s{i}[0] == (T if len(s{i}) == {max(ranks)} else T * request.n)",
            "R": f"s{i}[0] == max(T * request.n // (request.every or 1) + N, 1)",
        }.get(head)
        if port.role == "state" and pool:
            dynamic = f"({pool} or {dynamic})"
        # Unpacking checks the rank and is cheaper than a slice.
        dims = [f"d{i}_{j}" for j in range(1, min(ranks))]
        first = "_" if dynamic or head == "N+1" else f"d{i}_0"
        if len(ranks) > 1:
            read, static = f"s{i} = {x}.shape", f"len(s{i}), s{i}[1:]" if dynamic else f"s{i}"
        else:
            read = (
                f"s{i} = {first}, {', '.join(dims)} = {x}.shape"
                if dims
                else (f"s{i} = {first}, = {x}.shape")
            )
            static = ", ".join(dims if dynamic or head == "N+1" else [first, *dims])
        layout = f"0 if {x}.is_contiguous() else layout({x})"
        value = ", ".join(part for part in (f"{x}.dtype", static, layout, f"{x}.device") if part)
        if port.optional:
            lines += [
                f"    if {x} is None:",
                f"        k{i} = None",
                "    else:",
                f"        {read}",
            ]
            lines += (
                [f"        if not {dynamic}:", "            raise ValueError"] if dynamic else []
            )
            lines.append(f"        k{i} = ({value})")
            parts.append(f"k{i}")
        else:
            lines.append(f"    {read}")
            if dynamic and port.name != "g":
                checks.append(dynamic)
            parts.append(value)
    lines += [f"    if not ({' and '.join(checks)}):", "        raise ValueError"]
    lines.append(f"    key = {', '.join(parts)}")
    offsets, slots = at["cu_seqlens"], at.get("state_indices")
    values = [f"check_offsets({offsets}.tolist(), T, label)"]
    if slots:
        rows = f"{at['initial_state']}.shape[0]"
        values.append(f"if {slots} is not None: check_slots({slots}.tolist(), {rows}, label)")
    return "\n".join([
        "def key(ins, request):",
        *lines,
        "    return key, T, N",
        "def find(ins, request):",
        "    try:",
        *(f"    {line}" for line in lines),
        "    except MISFIT:",
        "        refuse(ins, request)",
        "    plan = plans.get(key) or build(ins, request, key)",
        f"    if infer.VALIDATE or not {offsets}.is_cuda:",
        *(f"        {line}" for line in values),
        "    return plan, T, N",
    ])  # fmt: skip


class Runner:
    """Runs one node's calls: warm ones through the plan cache, cold ones through validation.

    find(ins, request): the plan of a call, with T and N; raises before anything runs.
    key(ins, request): the plan's key, with T and N.
    """

    def __init__(self, node: Node, op_names: bool = True) -> None:
        self.node, self.op_names = node, op_names
        self.label = node.op if op_names else node.name
        self.plans: dict[Any, Plan] = {}
        self._lock = threading.Lock()
        pool = "state_indices" in node.port
        self.state_at = node.input_names.index("initial_state") if pool else -1
        scope = {
            "MISFIT": MISFIT, "build": self._build, "check_offsets": infer.check_offsets,
            "check_slots": infer.check_slots, "infer": infer, "label": self.label,
            "layout": layout_class, "plans": self.plans, "refuse": self._refuse,
        }  # fmt: skip
        made = compiled_source(_key_source(node), f"<lagraph {node.name} key>", scope)
        self.find: Callable[[Sequence[Any], Request], tuple[Plan, int, int]] = made["find"]
        self.key: Callable[[Sequence[Any], Request], tuple[Any, int, int]] = made["key"]

    def _refuse(self, ins: Sequence[Any], req: Request) -> NoReturn:
        self.bind(ins, req)
        raise RuntimeError(f"{self.label}: key and validation disagree; please report this")

    def __call__(self, ins: Sequence[Any], req: Request) -> tuple[Any, ...]:
        """Outputs of one call, None where an output is absent."""
        plan, T, N = self.find(ins, req)
        return plan.call(ins, T, N)

    def bind(self, ins: Sequence[Any], req: Request) -> Bound:
        """Full validation, in the caller's names."""
        return infer.bind(
            self.node, metas_of(ins), req.options, label=self.label, op_names=self.op_names,
            checkpoint_dtype=req.checkpoint_dtype,
        )  # fmt: skip

    def problem(self, ins: Sequence[Any], req: Request) -> tuple[Problem, Bound]:
        """Validate a call and describe it for the engines."""
        bound = self.bind(ins, req)
        layouts = [0 if x is None else layout_class(x) for x in ins]
        return problem_of(self.node, bound, req.options, metas_of(ins), layouts), bound

    def _build(self, ins: Sequence[Any], req: Request, key: Any) -> Plan:
        problem, bound = self.problem(ins, req)
        name = select.select(problem, pinned(req))
        with self._lock:
            plan = self.plans.get(key)
            if plan is None:
                plan = Plan(self.node, problem, bound, name, key)
                while len(self.plans) >= CAPACITY:
                    self.plans.pop(next(iter(self.plans)), None)
                self.plans[key] = plan
        return plan


def metas_of(tensors: Sequence[Any]) -> list[Meta | None]:
    """Metas of tensors, None where one is absent."""
    return [None if x is None else Meta(x.shape, x.dtype, x.device) for x in tensors]


@cache
def runner(name: str) -> Runner:
    """The runner of a node, by builder name."""
    return Runner(registry.node(name))
