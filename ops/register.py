"""Registered torch operators, made from the declarations.

A family gets five: the forward, its in-place form (pools and overwritten states), the backward,
the summary and the summary's backward. A schema is the node's ports under the operator's names,
then `str options`, the canonical text of a `lagraph.plan.Request`: one cheap boundary, readable in
FX graphs. Absent outputs are empty tensors, so that every schema has a fixed arity.

Keys: the implementation runs a plan; Autograd wraps it, once differentiable; Autocast casts the io
tensors; Meta infers; vmap is refused.
"""

from __future__ import annotations

from functools import lru_cache
from operator import index
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _AutoDispatchBelowAutograd as below_autograd
from torch.autograd import forward_ad

from lagraph import infer, plan, select
from lagraph.errors import DtypeMismatch, NotDifferentiable, RuleBroken
from lagraph.plan import Runner, compiled_source, metas_of, parse_request, request
from lagraph.problem import DIRECTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lagraph.node import Family, Node

__all__ = ["public", "register"]

_LIB = torch.library.Library("lagraph", "DEF")
_DONE: dict[str, dict[str, Callable[..., Any]]] = {}
IN_PLACE = "_inplace"


def register(family: Family) -> dict[str, Callable[..., Any]]:
    """Register a family's operators, once, and make its public functions by name."""
    functions = _DONE.get(family.name)
    if functions is None:
        forward = family.node("forward")
        operators = {d: _Operator(family.node(d)) for d in DIRECTIONS}
        in_place = _Operator(forward, in_place=True)
        functions = _DONE[family.name] = {
            family.node(d).op: public(operators[d], in_place) for d in DIRECTIONS if d != "backward"
        }
    return functions


class _Operator:
    """One registered operator: a node, or the in-place form of a forward."""

    def __init__(self, node: Node, in_place: bool = False) -> None:
        self.node, self.in_place = node, in_place
        self.name = node.op + (IN_PLACE if in_place else "")
        self.runner: Runner = plan.runner(node.name)
        # The functional forward has no pool; the in-place form returns no state: it is the buffer.
        self.ports = [p for p in node.inputs if in_place or p.role != "pool"]
        self.returns = [o for o in node.outputs if not (in_place and o.name == "final_state")]
        self._kept = [node.outputs.index(out) for out in self.returns]
        self._pad = (None,) * (len(node.inputs) - len(self.ports))
        self._requests: dict[str, plan.Request] = {}
        self.function: type[torch.autograd.Function] | None = None
        self._register()
        self.op = getattr(torch.ops.lagraph, self.name).default

    def _register(self) -> None:
        _LIB.define(self.schema())
        _LIB.impl(self.name, self.run, "CompositeExplicitAutograd")
        _LIB.impl(self.name, self.autograd(), "Autograd")
        for key, device in (("AutocastCPU", "cpu"), ("AutocastCUDA", "cuda")):
            if self.node.direction != "backward":
                _LIB.impl(self.name, self.autocast(key, device), key)
        torch.library.register_fake(f"lagraph::{self.name}", self.fake, lib=_LIB)
        torch.library.register_vmap(f"lagraph::{self.name}", self.vmap, lib=_LIB)

    def schema(self) -> str:
        """The operator's schema. Every tensor may be None there: validation says what is missing.

        There are no defaults, since torch drops trailing arguments that equal them.
        """
        args = [
            f"Tensor{'(a!)' if self.in_place and port.role == 'state' else ''}? {port.op_name}"
            for port in self.ports
        ]
        returns = ", ".join("Tensor" for _ in self.returns)
        return f"{self.name}({', '.join(args)}, str options) -> ({returns})"

    def run(self, *args: Any) -> tuple[torch.Tensor, ...]:
        """The kernel of every backend: find the plan, run it."""
        text = args[-1]
        req = self._requests.get(text) or self._request(text)
        outs: Sequence[Any] = self.runner(args[:-1] + self._pad, req)
        if self.in_place:
            state = args[self.runner.state_at]
            if not state.is_inference():
                torch.autograd.graph.increment_version(state)
            outs = [outs[i] for i in self._kept]
        return tuple([args[0].new_empty(0) if out is None else out for out in outs])

    def _request(self, text: str) -> plan.Request:
        if len(self._requests) >= plan.REQUESTS:
            self._requests.clear()
        found = self._requests[text] = parse_request(self.node, text)
        return found

    def fake(self, *args: Any) -> tuple[torch.Tensor, ...]:
        """Shapes and dtypes of the outputs, by the same inference as the real call."""
        bound = self.runner.bind(args[:-1] + self._pad, parse_request(self.node, args[-1]))
        like = args[0]
        made = []
        for out in self.returns:
            shape, dtype = bound.outputs.get(out.name, ((0,), like.dtype))
            made.append(like.new_empty(shape, dtype=dtype))
        return tuple(made)

    def vmap(self, info: Any, in_dims: Any, *args: Any) -> Any:
        """vmap has no meaning for a packed batch."""
        raise NotDifferentiable(
            f"{self.node.op}: vmap is not supported. Pack the batch into one call instead: "
            f"sequences along the token axis, with cu_seqlens."
        )

    def autocast(self, key: str, device: str) -> Callable[..., Any]:
        """Cast the io tensors to the autocast dtype; gates, beta and states stay as they are."""
        io = [i for i, port in enumerate(self.ports) if port.dtype == "io"]
        keyset = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

        def run(*args: Any) -> Any:
            dtype = torch.get_autocast_dtype(device)
            cast = list(args)
            for i in io:
                if cast[i] is not None and cast[i].dtype is not torch.float64:
                    cast[i] = cast[i].to(dtype)
            with torch._C._ExcludeDispatchKeyGuard(keyset):
                return self.op(*cast)

        return run

    def autograd(self) -> Callable[..., Any]:
        """The kernel under the Autograd key."""
        if self.node.direction == "forward" and not self.in_place:
            function = _differentiable(self)
        elif self.node.direction == "backward":
            function = _once(self)
        else:
            function = None
        refuse = self.in_place
        self.function = function

        def run(*args: Any) -> Any:
            if forward_ad._current_level >= 0 and (function is not None or refuse):
                refuse_tangents(self.node, args)
            if torch.is_grad_enabled() and (function is not None or refuse):
                for x in args:
                    if isinstance(x, torch.Tensor) and x.requires_grad:
                        if torch._C._are_functorch_transforms_active():
                            raise NotDifferentiable(
                                f"{self.node.op}: torch.func transforms are not supported. Take "
                                f"gradients with backward() or torch.autograd.grad."
                            )
                        if function is not None:
                            return function.apply(*args)
                        raise NotDifferentiable(
                            f"{self.node.op}: overwrite_initial_state and state_indices are for "
                            f"inference. Call under torch.no_grad(), or drop them."
                        )
            with below_autograd():
                return self.op(*args)

        return run


def refuse_tangents(node: Node, args: Sequence[Any]) -> None:
    """Forward-mode derivatives would be dropped in silence: refuse them."""
    for x in args:
        if isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotDifferentiable(
                f"{node.op}: forward-mode derivatives (jvp) are not supported. Take gradients with "
                f"backward() or torch.autograd.grad."
            )


def _differentiable(operator: _Operator) -> type[torch.autograd.Function]:
    """The autograd formula of a forward: the backward node on the saved tensors."""
    node = operator.node
    back = node.family.node("backward")
    names = [port.name for port in operator.ports]
    outs = [out.name for out in operator.returns]
    keep_pre = "O_pre" in outs
    at_o, at_s, at_rows = (outs.index(n) for n in ("O", "final_state", "state_checkpoints"))
    grads = {port.name: i for i, port in enumerate(p for p in back.inputs if p.grad)}
    order = [grads.get(name, -1) for name in names]
    saved = [*names, "state_checkpoints", *(["O_pre"] if keep_pre else [])]
    # Where each argument of the backward comes from: a saved tensor, dO or d_final_state.
    source = [saved.index(port) if port in saved else port for port in back.input_names]

    class Forward(torch.autograd.Function):
        """Runs below autograd; saves the inputs alone (and, for z, the output before the gate)."""

        @staticmethod
        def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, ...]:
            *ins, text = args
            req = parse_request(node, text)
            if req.plan_name is not None or ins[0].is_cuda:
                _refuse_early(operator, ins, req)
            call = text
            if keep_pre and ins[names.index("z")] is not None:
                call = _with(node, text, output_pre_gate=True)
            with below_autograd():
                results = operator.op(*ins, call)
            rows = results[at_rows] if req.every else None
            extra = [rows]
            if keep_pre:
                extra.append(results[outs.index("O_pre")] if call is not text else None)
            ctx.save_for_backward(*ins, *extra)
            ctx.text = req.to("backward").text
            ctx.shape, ctx.dtype = results[at_o].shape, results[at_o].dtype
            plain = [results[at_rows]]
            if not (req.options.output_final_state or req.options.overwrite_initial_state):  # type: ignore[attr-defined]
                plain.append(results[at_s])
            if keep_pre:
                plain.append(results[outs.index("O_pre")])
            ctx.mark_non_differentiable(*plain)
            ctx.set_materialize_grads(False)
            return results

        @staticmethod
        def backward(ctx: Any, *grad: Any) -> tuple[torch.Tensor | None, ...]:
            tensors = ctx.saved_tensors
            d_out, d_state = grad[at_o], grad[at_s]
            if d_out is None:
                d_out = tensors[0].new_zeros(ctx.shape, dtype=ctx.dtype)
            named = {"dO": _dense_rows(d_out), "d_final_state": _dense_rows(d_state)}
            args = [tensors[s] if isinstance(s, int) else named.get(s) for s in source]
            results = getattr(torch.ops.lagraph, back.op).default(*args, ctx.text)
            needs = ctx.needs_input_grad
            return (*(results[i] if i >= 0 and needs[j] else None for j, i in enumerate(order)),
                    None)  # fmt: skip

    return Forward


def _dense_rows(x: torch.Tensor | None) -> torch.Tensor | None:
    """A gradient may be an expanded or transposed view; kernels want contiguous rows."""
    if x is None or x.stride(-1) == 1:
        return x
    return x.contiguous()


def _once(operator: _Operator) -> type[torch.autograd.Function]:
    """A backward that runs, but refuses to be differentiated."""

    class Backward(torch.autograd.Function):
        """The gradients' own gradient is an error."""

        @staticmethod
        def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, ...]:
            with below_autograd():
                return operator.op(*args)

        @staticmethod
        def backward(ctx: Any, *grad: Any) -> Any:
            raise NotDifferentiable(
                f"{operator.node.family.op}: not differentiable twice. Second derivatives are "
                f"not defined for this operator; drop create_graph=True."
            )

    return Backward


@lru_cache(maxsize=256)
def _with(node: Node, text: str, **changes: Any) -> str:
    """The text of a request with some options changed."""
    req = parse_request(node, text)
    return request(
        node, {**dict(req.options), **changes}, plan_name=req.plan_name,
        checkpoint_dtype=req.checkpoint_dtype,
    ).text  # fmt: skip


_SERVED: set[Any] = set()


def _refuse_early(operator: _Operator, ins: Sequence[Any], req: plan.Request) -> None:
    """Refuse at the forward call what no engine, or not the pinned one, could differentiate."""
    full = (*ins, *operator._pad)
    try:
        found = operator.runner.key(req, *full)
    except (AttributeError, IndexError, TypeError, ValueError):
        return  # the call itself says what is wrong
    if found is None or (operator.name, found[0]) in _SERVED:
        return
    node = operator.node
    _, bound = operator.runner.problem(full, req)
    back = node.family.node("backward")
    given: dict[str, Any] = dict(zip(node.input_names, metas_of(full), strict=True))
    device = ins[0].device
    for name, out in (("dO", "O"), ("d_final_state", "final_state"),
                      ("state_checkpoints", "state_checkpoints")):  # fmt: skip
        if out in bound.outputs:
            given[name] = infer.Meta(*bound.outputs[out], device)
    metas = [given.get(name) for name in back.input_names]
    backward = req.to("backward")
    bound = infer.bind(back, metas, backward.options, label=node.op, op_names=True)
    problem = plan.problem_of(back, bound, backward.options, metas)
    select.select(problem, plan.pinned(backward))
    _SERVED.add((operator.name, found[0]))


# The public functions --------------------------------------------------------------------------


def refuse_types(node: Node, names: Sequence[str], values: Sequence[Any]) -> None:
    """Say which argument is not a tensor."""
    for name, value in zip(names, values, strict=True):
        port = next(p for p in node.inputs if p.op_name == name)
        if isinstance(value, torch.Tensor) or (value is None and port.optional):
            continue
        if value is None:
            raise RuleBroken(node.op, name, expected="a tensor", got="None", mend=f"Pass {name}")
        raise DtypeMismatch(
            node.op, name, expected="a torch.Tensor", got=type(value).__name__,
            mend=f"Convert it with torch.as_tensor({name})",
        )  # fmt: skip


def static(value: Any) -> Any:
    """A number that Dynamo holds as a symbol, made a constant (the graph is guarded on it)."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float.fromhex(value.hex())
    return index(value) if isinstance(value, int) else value


def _interner(node: Node, names: Sequence[str], fixed: dict[str, Any]) -> Callable[..., str]:
    """A cached function from option values to the canonical text of their request."""
    to_attr = {attr.op_name: attr.name for attr in node.attrs}

    def intern(*values: Any) -> str:
        given = dict(zip(names, values, strict=True))
        plan_name = given.pop("plan_name", None)
        dtype = given.pop("checkpoint_dtype", None)
        chosen = {to_attr[name]: value for name, value in given.items()} | fixed
        return request(
            node, chosen, plan_name=plan_name, checkpoint_dtype=dtype, label=node.op, op_names=True
        ).text

    cached = lru_cache(maxsize=1024, typed=True)(intern)

    def text(*values: Any) -> str:
        try:
            return cached(*values)
        except TypeError:
            return intern(*values)  # unhashable values: validation says which

    # What torch.compiler.assume_constant_result sets; calling it would import all of Dynamo.
    text._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return text


def _static(node: Node, options: Sequence[str]) -> list[str]:
    """Source that makes numbers static while a compiler traces."""
    kinds = {attr.op_name: attr.type for attr in node.attrs}
    numbers = [name for name in options if kinds.get(name) in (int, float, float | None)]
    if not numbers:
        return []
    values = ", ".join(f"static({name})" for name in numbers)
    return ["    if is_compiling():", f"        {', '.join(numbers)}, = {values},"]


def public(operator: _Operator, in_place: _Operator) -> Callable[..., Any]:
    """The public function of an operator: an explicit signature, generated, over one call of it.

    What the Autograd key would find out in Python is decided before the call, where nothing but
    plain eager mode is active: it saves a crossing of the boundary.
    """
    from lagraph.doc import op_docstring, signature

    node = operator.node
    family, forward = node.family, node.direction == "forward"
    order = [name for name in family.op_order[node.direction] if name != "*"]
    ports = {port.op_name: port for port in node.inputs}
    tensors = [name for name in order if name in ports]
    options = [name for name in order if name not in ports]
    fixed = {} if forward or "output_transition" in options else {"output_transition": True}

    def arguments(skip: str = "") -> str:
        names = [p.op_name for p in node.inputs if p.role != skip]
        return ", ".join(family.op_fill.get(n, n) if n not in tensors else n for n in names)

    required = [n for n in tensors if not ports[n].optional]
    optional = [n for n in tensors if ports[n].optional]
    checks = [f"isinstance({n}, Tensor)" for n in required]
    checks += [f"({n} is None or isinstance({n}, Tensor))" for n in optional]
    body = [
        f"    if not ({' and '.join(checks)}):",
        f"        refuse_types(node, {tensors!r}, ({', '.join(tensors)},))",
        *_static(node, options),
        f"    options = intern({', '.join(options)})",
    ]
    scope: dict[str, Any] = {
        "Tensor": torch.Tensor,
        "is_compiling": torch.compiler.is_compiling,
        "static": static,
        "intern": _interner(node, options, fixed),
        "node": node,
        "refuse_types": refuse_types,
        "op": operator.op,
    }
    if forward:
        if operator.function is None:
            raise RuntimeError(f"{node.op}: no autograd formula")
        scope |= {
            "op_inplace": in_place.op,
            "differentiable": operator.function.apply,
            "below_autograd": below_autograd,
            "is_grad_enabled": torch.is_grad_enabled,
            "transforms": torch._C._are_functorch_transforms_active,
            "forward_ad": forward_ad,
            "autocast": torch._C._is_any_autocast_enabled,
        }
        floating = [n for n in tensors if ports[n].grad and not ports[n].optional]
        maybe = [n for n in tensors if ports[n].grad and ports[n].optional]
        needs = [f"{n}.requires_grad" for n in floating]
        needs += [f"({n} is not None and {n}.requires_grad)" for n in maybe]
        body += [
            "    if state_indices is None and not overwrite_initial_state:",
            "        if is_compiling() or transforms() or autocast() or "
            "forward_ad._current_level >= 0:",
            f"            out = op({arguments('pool')}, options)",
            f"        elif is_grad_enabled() and ({' or '.join(needs)}):",
            f"            out = differentiable({arguments('pool')}, options)",
            "        else:",
            "            with below_autograd():",
            f"                out = op({arguments('pool')}, options)",
            "        O, final_state, rows = out[0], out[1], out[2]",
            "    else:",
            f"        out = op_inplace({arguments()}, options)",
            "        O, rows = out[0], out[1]",
            "        kept = output_final_state or overwrite_initial_state",
            "        final_state = initial_state if kept else initial_state.new_empty(0)",
            "    return (O, final_state, rows) if checkpoint_every_n_tokens else (O, final_state)",
        ]
    elif fixed:
        body.append(f"    return op({arguments()}, options)")
    else:
        body += [
            f"    state, transition = op({arguments()}, options)",
            "    return (state, transition) if output_transition else state",
        ]
    head = f"def {node.op}({signature(node)}):"
    source = "\n".join([head, *body]) + "\n"
    function = compiled_source(source, f"<lagraph {node.op}>", scope)[node.op]
    function.__module__ = "lagraph.ops"
    function.__doc__ = op_docstring(node)
    return function
