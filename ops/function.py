"""The public functions: explicit signatures, generated, each over one call of its operator.

In plain eager mode, where nothing is active that has to see operators, a function runs the plan
itself: what a crossing of the operator's boundary costs is more than all the rest.
"""

from __future__ import annotations

from functools import lru_cache
from operator import index
from typing import TYPE_CHECKING, Any

import torch

from lagraph.errors import DtypeMismatch, RuleBroken
from lagraph.ops.argument import check_layout
from lagraph.ops.mode import PLAIN, busy
from lagraph.plan import Request, compiled_source, request

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lagraph.node import Node
    from lagraph.ops.register import Operator

__all__ = ["public"]


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


def refuse_layouts(node: Node, names: Sequence[str], values: Sequence[Any]) -> None:
    """Of a call that failed, say which tensor has no strides; what is known to be good costs
    nothing this way."""
    for name, value in zip(names, values, strict=True):
        if isinstance(value, torch.Tensor):
            check_layout(node.op, name, value)


def static(value: Any) -> Any:
    """A number that Dynamo holds as a symbol, made a constant (the graph is guarded on it)."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float.fromhex(value.hex())
    return index(value) if isinstance(value, int) else value


def _interners(
    node: Node, names: Sequence[str], fixed: dict[str, Any]
) -> tuple[Callable[..., Request], Callable[..., str]]:
    """Cached functions from option values to their request, and to its canonical text."""
    to_attr = {attr.op_name: attr.name for attr in node.attrs}

    def intern(*values: Any) -> Request:
        given = dict(zip(names, values, strict=True))
        plan_name = given.pop("plan_name", None)
        dtype = given.pop("checkpoint_dtype", None)
        chosen = {to_attr[name]: value for name, value in given.items()} | fixed
        return request(
            node, chosen, plan_name=plan_name, checkpoint_dtype=dtype, label=node.op, op_names=True
        )

    cached = lru_cache(maxsize=1024, typed=True)(intern)

    def text(*values: Any) -> str:
        try:
            return cached(*values).text
        except TypeError:
            return intern(*values).text  # unhashable values: validation says which

    # What torch.compiler.assume_constant_result sets; calling it would import all of Dynamo.
    text._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return cached, text


def _static(node: Node, options: Sequence[str]) -> list[str]:
    """Source that makes numbers static while a compiler traces."""
    kinds = {attr.op_name: attr.type for attr in node.attrs}
    numbers = [name for name in options if kinds.get(name) in (int, float, float | None)]
    if not numbers:
        return ["pass"]
    return [f"{', '.join(numbers)}, = {', '.join(f'static({name})' for name in numbers)},"]


def _indent(lines: Sequence[str], by: int) -> list[str]:
    return [" " * by + line for line in lines]


def public(operator: Operator, in_place: Operator) -> Callable[..., Any]:
    """The public function of an operator."""
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

    checks = [
        f"({n} is None or isinstance({n}, Tensor))" if ports[n].optional
        else f"isinstance({n}, Tensor)"
        for n in tensors
    ]  # fmt: skip
    request_of, text = _interners(node, options, fixed)
    scope: dict[str, Any] = {
        "PLAIN": PLAIN,
        "Tensor": torch.Tensor,
        "busy": busy,
        "is_compiling": torch.compiler.is_compiling,
        "node": node,
        "op": operator.op,
        "refuse_layouts": refuse_layouts,
        "refuse_types": refuse_types,
        "request_of": request_of,
        "run": operator.runner.__call__,
        "static": static,
        "text": text,
    }
    chosen = ", ".join(options)
    plain = [
        f"({n} is None or type({n}) in PLAIN)" if ports[n].optional else f"type({n}) in PLAIN"
        for n in tensors
    ]
    if forward:
        scope |= {
            "differentiable": operator.apply,
            "has_storage": torch._C._has_storage,
            "is_grad_enabled": torch.is_grad_enabled,
            "op_inplace": in_place.op,
            "run_inplace": in_place.direct,
        }
        direct, crossing = _forward(arguments, tensors, ports)
    else:
        # The operator of a summary that has no such option always returns a transition.
        both = "return out[0], out[1]" if fixed else "return out if output_transition else out[0]"
        direct = [f"out = run(({arguments()},), call)", both]
        crossing = [f"out = op({arguments()}, call)", both]
    lines = [
        f"def {node.op}({signature(node)}):",
        "    if is_compiling():",
        *_indent(_static(node, options), 8),
        f"    elif {' and '.join(plain)} and not ({tensors[0]}.is_meta or busy()):",
        "        try:",
        f"            call = request_of({chosen})",
        "        except TypeError:",  # an option that no cache can hold: validation says which
        f"            text({chosen})",
        "            raise",
        "        try:",
        *_indent(direct, 12),
        "        except RuntimeError:",
        f"            refuse_layouts(node, {tensors!r}, ({', '.join(tensors)},))",
        "            raise",
        f"    if not ({' and '.join(checks)}):",
        f"        refuse_types(node, {tensors!r}, ({', '.join(tensors)},))",
        f"    call = text({chosen})",
        "    if is_compiling():",
        *_indent(crossing, 8),
        "    try:",
        *_indent(crossing, 8),
        "    except RuntimeError:",
        f"        refuse_layouts(node, {tensors!r}, ({', '.join(tensors)},))",
        "        raise",
    ]
    source = "\n".join(lines) + "\n"
    function = compiled_source(source, f"<lagraph {node.op}>", scope)[node.op]
    function.__module__ = "lagraph.ops"
    function.__doc__ = op_docstring(node)
    return function


def _forward(
    arguments: Callable[..., str], tensors: Sequence[str], ports: dict[str, Any]
) -> tuple[list[str], list[str]]:
    """Source of a forward call: direct, where that is possible, and through the operator."""
    graded = [n for n in tensors if ports[n].grad]
    # What torch.func leaves behind has no storage, and a gradient that leads nowhere.
    real = " and ".join(f"has_storage({n})" for n in graded if not ports[n].optional)
    needs = [
        f"({n} is not None and {n}.requires_grad)" if ports[n].optional else f"{n}.requires_grad"
        for n in graded
    ]
    functional = "state_indices is None and not overwrite_initial_state"
    given_back = [
        "kept = output_final_state or overwrite_initial_state",
        "final_state = initial_state if kept else initial_state.new_empty(0)",
        "return (O, final_state, rows) if checkpoint_every_n_tokens else (O, final_state)",
    ]
    full = arguments().replace("state_indices", "None")
    first = tensors[0]
    direct = [
        f"grown = is_grad_enabled() and ({' or '.join(needs)})",
        f"if {functional}:",
        "    if not grown:",
        f"        out = run(({full},), call)",
        f"    elif {real}:",
        f"        out = differentiable(True, call, {arguments('pool')})",
        "    else:",
        f"        out = op({arguments('pool')}, call.text)",
        f"    final_state = out[1] if output_final_state else {first}.new_empty(0)",
        "    if checkpoint_every_n_tokens:",
        "        return out[0], final_state, out[2]",
        "    return out[0], final_state",
        "elif not grown:",
        f"    out = run_inplace(({arguments()},), call)",
        "    O, rows = out[0], out[2]",
        *_indent(given_back, 4),
    ]
    crossing = [
        f"if {functional}:",
        f"    out = op({arguments('pool')}, call)",
        "    return out[:3] if checkpoint_every_n_tokens else out[:2]",
        f"out = op_inplace({arguments()}, call)",
        "O, rows = out[0], out[1]",
        *given_back,
    ]
    return direct, crossing
