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
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch._C import _AutoDispatchBelowAutograd as below_autograd
from torch.autograd import forward_ad

from lagraph import infer, plan, select
from lagraph.errors import NotDifferentiable
from lagraph.ops.function import public
from lagraph.ops.mode import PLAIN, busy
from lagraph.plan import Plan, Request, Runner, metas_of, parse_request, request
from lagraph.problem import DIRECTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lagraph.node import Family, Node

__all__ = ["Operator", "register"]

_LIB = torch.library.Library("lagraph", "DEF")
_DONE: dict[str, dict[str, Callable[..., Any]]] = {}
IN_PLACE = "_inplace"


def register(family: Family) -> dict[str, Callable[..., Any]]:
    """Register a family's operators, once, and make its public functions by name."""
    functions = _DONE.get(family.name)
    if functions is None:
        forward = family.node("forward")
        operators = {d: Operator(family.node(d)) for d in DIRECTIONS}
        in_place = Operator(forward, in_place=True)
        functions = _DONE[family.name] = {
            family.node(d).op: public(operators[d], in_place) for d in DIRECTIONS if d != "backward"
        }
    return functions


class Operator:
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
        self._requests: dict[str, Request] = {}
        self.function: type[torch.autograd.Function] | None = None
        if node.direction == "forward" and not in_place:
            self.function = _differentiable(self)
        elif node.direction == "backward":
            self.function = _once(self)
        # `Function.apply` without its care for torch.func, under which no call is direct.
        self.apply = self.function and super(torch.autograd.Function, self.function).apply  # type: ignore[misc]
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
        outs: Sequence[Any] = self.direct(args[:-1] + self._pad, self.request(args[-1]))
        if self.in_place:
            outs = [outs[i] for i in self._kept]
        return tuple([args[0].new_empty(0) if out is None else out for out in outs])

    def direct(self, ins: Sequence[Any], req: Request) -> tuple[Any, ...]:
        """The same without a crossing of the boundary: node's inputs to its outputs, or None."""
        outs = self.runner(ins, req)
        if self.in_place:
            state = ins[self.runner.state_at]
            if not state.is_inference():
                torch.autograd.graph.increment_version(state)
        return outs

    def request(self, text: str) -> Request:
        """The request of an operator's text."""
        return self._requests.get(text) or self._request(text)

    def _request(self, text: str) -> Request:
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
        function, refuse = self.function, self.in_place

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
                            return function.apply(False, self.request(args[-1]), *args[:-1])
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


def _differentiable(operator: Operator) -> type[torch.autograd.Function]:
    """The autograd formula of a forward: the backward node on the saved tensors."""
    node = operator.node
    back = node.family.node("backward")
    back_runner = plan.runner(back.name)
    names = [port.name for port in operator.ports]
    outs = [out.name for out in operator.returns]
    at_q, at_v, at_g = (names.index(n) for n in "qvg")
    at_z = names.index("z") if "O_pre" in outs else -1
    grads = {port.name: i for i, port in enumerate(p for p in back.inputs if p.grad)}
    order = [grads.get(name, -1) for name in names]
    pad, find = operator._pad, operator.runner.find
    saved = [*names, "state_checkpoints", "O_pre", "dO", "d_final_state"]
    source = [saved.index(port) for port in back.input_names]

    class Forward(torch.autograd.Function):
        """Saves the inputs alone (and checkpoints and, for z, the output before the gate).

        direct: run the plan from here, below autograd; else the operator, which modes see. The
        operator returns all its outputs, a direct call no absent ones after the last that exists.
        """

        @staticmethod
        def forward(ctx: Any, direct: bool, req: Request, *ins: Any) -> tuple[torch.Tensor, ...]:
            gated = at_z >= 0 and ins[at_z] is not None
            made = _gated(req) if gated else req
            results: tuple[Any, ...]
            if direct:
                full = ins + pad
                ready, T, N = find(full, made)
                if (ready.cuda or made.plan_name) and ready not in _SERVED:
                    _refuse_early(operator, full, made)
                    _SERVED.add(ready)
                results = ready.call(full, T, N)
            else:
                if made.plan_name or ins[0].is_cuda:
                    _refuse_unknown(operator, ins + pad, made)
                with below_autograd():
                    results = operator.op(*ins, made.text)
            rows = results[2] if made.every else None
            ctx.save_for_backward(*ins, rows, results[3] if gated else None)
            ctx.request = made
            ctx.set_materialize_grads(False)
            if direct and rows is None:
                return results[:2] if made.final else results[:1]
            if direct:
                results = (results[0], results[1] if made.final else ins[0].new_empty(0), rows)
            ctx.mark_non_differentiable(*results[2 if made.final else 1 :])
            return results

        @staticmethod
        def backward(ctx: Any, *grad: Any) -> tuple[torch.Tensor | None, ...]:
            tensors = ctx.saved_tensors
            d_out, d_state = grad[0], grad[1] if len(grad) > 1 else None
            if d_out is None:
                q, v, g = tensors[at_q], tensors[at_v], tensors[at_g]
                d_out = q.new_zeros((*g.shape[:2], v.shape[-1]))
            given = (*tensors, _dense_rows(d_out), _dense_rows(d_state))
            args, req = [given[at] for at in source], ctx.request.to("backward")
            # Batched gradients (`is_grads_batched`) have no storage, and are no transform.
            plain = torch._C._has_storage(d_out) and all(
                x is None or type(x) in PLAIN for x in args
            )
            if torch.is_grad_enabled() or busy() or not plain:
                results = getattr(torch.ops.lagraph, back.op).default(*args, req.text)
            else:
                results = back_runner(args, req)
            needs = ctx.needs_input_grad[2:]
            return (None, None, *(results[i] if i >= 0 and need else None
                                  for i, need in zip(order, needs)))  # fmt: skip

    return Forward


def _dense_rows(x: torch.Tensor | None) -> torch.Tensor | None:
    """A gradient may be an expanded or transposed view; kernels want contiguous rows."""
    if x is None or x.stride(-1) == 1:
        return x
    return x.contiguous()


def _once(operator: Operator) -> type[torch.autograd.Function]:
    """A backward that runs, but refuses to be differentiated."""

    class Backward(torch.autograd.Function):
        """The gradients' own gradient is an error."""

        @staticmethod
        def forward(ctx: Any, direct: bool, req: Request, *ins: Any) -> tuple[torch.Tensor, ...]:
            with below_autograd():
                return operator.op(*ins, req.text)

        @staticmethod
        def backward(ctx: Any, *grad: Any) -> Any:
            raise NotDifferentiable(
                f"{operator.node.family.op}: not differentiable twice. Second derivatives are "
                f"not defined for this operator; drop create_graph=True."
            )

    return Backward


@lru_cache(maxsize=256)
def _gated(req: Request) -> Request:
    """The request of a forward that keeps the output before the gate."""
    return request(
        req.node, {**dict(req.options), "output_pre_gate": True}, plan_name=req.plan_name,
        checkpoint_dtype=req.checkpoint_dtype,
    )  # fmt: skip


_SERVED: WeakSet[Plan] = WeakSet()  # plans of forwards whose backward has an engine, too


def _refuse_unknown(operator: Operator, full: Sequence[Any], req: Request) -> None:
    """Refuse early, unless the plan of the call is known to be served."""
    try:
        ready = operator.runner.plans.get(operator.runner.key(full, req)[0])
    except plan.MISFIT:
        return  # the call itself says what is wrong
    if ready is None or ready not in _SERVED:
        _refuse_early(operator, full, req)
        if ready is not None:
            _SERVED.add(ready)


def _refuse_early(operator: Operator, full: Sequence[Any], req: Request) -> None:
    """Refuse at the forward call what no engine, or not the pinned one, could differentiate."""
    node = operator.node
    _, bound = operator.runner.problem(full, req)
    back = node.family.node("backward")
    given: dict[str, Any] = dict(zip(node.input_names, metas_of(full), strict=True))
    device = full[0].device
    for name, out in (("dO", "O"), ("d_final_state", "final_state"),
                      ("state_checkpoints", "state_checkpoints")):  # fmt: skip
        if out in bound.outputs:
            given[name] = infer.Meta(*bound.outputs[out], device)
    metas = [given.get(name) for name in back.input_names]
    backward = req.to("backward")
    bound = infer.bind(back, metas, backward.options, label=node.op, op_names=True)
    problem = plan.problem_of(back, bound, backward.options, metas)
    select.select(problem, plan.pinned(backward))
