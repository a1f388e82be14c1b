"""Checks of arguments, and registration, for the operators that belong to no node.

A message names the operator, the argument, what was expected, what was got, and the mend.
"""

from __future__ import annotations

import json
from functools import lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _AutoDispatchBelowAutograd as below_autograd
from torch.autograd import forward_ad

from lagraph import infer
from lagraph.desc import dtype_name
from lagraph.errors import (
    DeviceMismatch,
    DtypeMismatch,
    InvalidOption,
    NotDifferentiable,
    NotSupported,
    RuleBroken,
    ShapeMismatch,
)
from lagraph.ops.mode import PLAIN, busy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "FLOATS",
    "INTS",
    "KERNEL_FLOATS",
    "apart",
    "boolean",
    "check_layout",
    "check_offsets",
    "check_slots",
    "need",
    "needs_gradient",
    "number",
    "only_tensors",
    "options_of",
    "options_text",
    "overlap",
    "plain",
    "readable",
    "refuse_gradient",
    "register_in_place",
    "serve",
    "wants_kernels",
]

LIB = torch.library.Library("lagraph", "FRAGMENT")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
KERNEL_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTS = (torch.int32, torch.int64)
IMPLS = ("auto", "fused", "reference")


# Options: canonical text through the operator's boundary ------------------------------------------


@lru_cache(maxsize=1024, typed=True)
def _text(*items: Any) -> str:
    return json.dumps(dict(items), separators=(",", ":"))


def options_text(*items: tuple[str, Any]) -> str:
    """The options of a call as JSON; their values are plain."""
    return _text(*items)


# What torch.compiler.assume_constant_result sets; calling it would import all of Dynamo.
options_text._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=1024)
def options_of(text: str) -> SimpleNamespace:
    """The options behind a text."""
    return SimpleNamespace(**json.loads(text))


def serve(op: str, impl: Any) -> str:
    """The name of an implementation: "auto", "fused" or "reference" (an enum's value will do)."""
    name = getattr(impl, "value", impl)
    if name not in IMPLS:
        raise InvalidOption(
            op, "impl", expected=f"one of {', '.join(IMPLS)}", got=repr(impl),
            mend='Leave "auto": fused on CUDA, reference elsewhere',
        )  # fmt: skip
    return str(name)


def boolean(op: str, name: str, value: Any) -> bool:
    """A flag; anything but a bool is an error."""
    if not isinstance(value, bool):
        raise InvalidOption(op, name, expected="True or False", got=repr(value), mend="Pass a bool")
    return value


def number(op: str, name: str, value: Any, *, none: bool = False) -> float | None:
    """A finite number."""
    if value is None and none:
        return None
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not float("-inf") < value < float("inf"):
        raise InvalidOption(
            op, name, expected="a finite number" + (" or None" if none else ""), got=repr(value),
            mend="Pass a float",
        )  # fmt: skip
    value = float(value)
    # Dynamo holds a number as a symbol; this makes it a constant of the graph.
    return float.fromhex(value.hex()) if torch.compiler.is_compiling() else value


def wants_kernels(op: str, impl: str, x: torch.Tensor) -> bool:
    """Whether the kernels run; refuses where they were asked for and cannot."""
    fused = impl == "fused" or (impl == "auto" and x.is_cuda)
    if fused and not x.is_cuda:
        raise NotSupported(
            f"{op}: impl='fused' needs CUDA tensors, got {x.device.type}. Leave impl='auto', or "
            f"pass impl='reference'."
        )
    if fused and x.dtype not in KERNEL_FLOATS:
        names = ", ".join(dtype_name(dtype) for dtype in KERNEL_FLOATS)
        raise NotSupported(
            f"{op}: the kernels take {names}, got {dtype_name(x.dtype)}. Pass impl='reference'."
        )
    return fused


# Tensors ------------------------------------------------------------------------------------------


def need(
    op: str,
    name: str,
    x: torch.Tensor | None,
    shape: str,
    sizes: dict[str, Any],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
) -> None:
    """Check the dtype, device and shape of a tensor that is given.

    shape: letters, in brackets' order ("N W-1 C"). `sizes` holds those that are known, and is
    given the others; a plain number stands for itself.
    """
    if x is None:
        return
    check_layout(op, name, x)
    if x.dtype not in dtypes:
        raise DtypeMismatch(
            op, name, expected=" or ".join(dtype_name(dtype) for dtype in dtypes),
            got=dtype_name(x.dtype), mend=f"Convert {name}",
        )  # fmt: skip
    if device is not None and x.device != device:
        raise DeviceMismatch(
            op, name, expected=f"a tensor on {device}", got=f"one on {x.device}",
            mend=f"Move {name} with .to({str(device)!r})",
        )  # fmt: skip
    letters = shape.split()
    if x.dim() != len(letters):
        raise ShapeMismatch(
            op, name, expected=f"[{', '.join(letters)}]", got=f"shape {list(x.shape)}",
            mend="View the tensor in that shape",
        )  # fmt: skip
    for letter, size in zip(letters, x.shape):
        known = int(letter) if letter.isdigit() else sizes.setdefault(letter, size)
        if size != known:
            raise ShapeMismatch(
                op, name, expected=f"[{', '.join(letters)}] with {letter} = {known}",
                got=f"{letter} = {size}, shape {list(x.shape)}",
                mend=f"The other tensors of the call give {letter} = {known}",
            )  # fmt: skip


def check_layout(op: str, name: str, x: torch.Tensor) -> None:
    """Refuse tensors without strides: sparse ones, and nested ones."""
    if x.layout is torch.strided and not x.is_nested:
        return
    raise RuleBroken(
        op, name, expected="a dense tensor", got=f"layout {x.layout}, nested" if x.is_nested
        else f"layout {x.layout}",
        mend="Pass x.values() packed along T, with cu_seqlens=x.offsets()" if x.is_nested
        else f"Call {name}.to_dense() first",
    )  # fmt: skip


def only_tensors(op: str, names: str, values: Sequence[Any], required: int) -> None:
    """Say which argument is not a tensor: an operator's schema would not name it. The first
    `required` of the names must be given."""
    for i, (name, value) in enumerate(zip(names.split(), values)):
        if not isinstance(value, torch.Tensor) and (value is not None or i < required):
            raise DtypeMismatch(
                op, name, expected="a torch.Tensor",
                got="None" if value is None else type(value).__name__,
                mend=f"Pass {name}" if value is None else f"Pass torch.as_tensor({name})",
            )  # fmt: skip
        if value is not None and type(value) not in PLAIN:
            check_layout(op, name, value)


def readable(x: torch.Tensor) -> bool:
    """Whether there are values, and looking at them waits for no device."""
    known = type(x) in PLAIN and not torch.compiler.is_compiling()
    return known and (infer.VALIDATE or not x.is_cuda)


def check_offsets(op: str, cu: torch.Tensor, tokens: int) -> None:
    """The values of cu_seqlens, where they can be read."""
    if readable(cu):
        infer.check_offsets(cu.tolist(), tokens, op)


def check_slots(op: str, index: torch.Tensor, rows: int) -> None:
    """The values of state_indices: positive ones are inside the pool and differ."""
    if not readable(index):
        return
    slots = index.tolist()
    used = [slot for slot in slots if slot > 0]
    if len(set(used)) != len(used) or any(slot >= rows for slot in used):
        raise RuleBroken(
            op, "state_indices", expected=f"distinct slots in 1 .. {rows - 1}, or <= 0 for padding",
            got=str(slots[:16]), mend="Give every sequence a slot of its own",
        )  # fmt: skip


def apart(op: str, name: str, x: torch.Tensor, other: str, y: torch.Tensor) -> None:
    """Refuse a buffer x that reaches over a stretch of y's memory."""
    try:
        shared = overlap(x, y)
    except RuntimeError:  # no memory to point at
        check_layout(op, name, x)
        check_layout(op, other, y)
        raise
    if shared:
        raise RuleBroken(
            op, name, expected="memory of its own", got=f"an overlap with {other}",
            mend="Allocate it anew",
        )  # fmt: skip


def overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors reach over a common stretch of memory."""
    known = type(x) in PLAIN and type(y) in PLAIN  # others, fake ones say, may have no memory
    if not known or x.numel() == 0 or y.numel() == 0 or x.device != y.device:
        return False

    def span(t: torch.Tensor) -> tuple[int, int]:
        last = sum((size - 1) * step for size, step in zip(t.shape, t.stride()))
        return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()

    (a, b), (c, d) = span(x), span(y)
    return a < d and c < b


def plain(args: Sequence[Any]) -> bool:
    """Whether the tensors among the arguments bring no dispatch of their own."""
    return all(not isinstance(x, torch.Tensor) or type(x) in PLAIN for x in args)


# Registration -------------------------------------------------------------------------------------


def needs_gradient(args: Sequence[Any]) -> bool:
    """Whether autograd would record a call on these arguments."""
    return torch.is_grad_enabled() and any(
        isinstance(x, torch.Tensor) and x.requires_grad for x in args
    )


def refuse_gradient(op: str, args: Sequence[Any], *, transforms_only: bool = False) -> None:
    """Refuse derivatives that would be dropped in silence."""
    if forward_ad._current_level >= 0:
        for x in args:
            if isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None:
                raise NotDifferentiable(
                    f"{op}: forward-mode derivatives (jvp) are not supported. Take gradients with "
                    f"backward() or torch.autograd.grad."
                )
    if not needs_gradient(args):
        return
    if torch._C._are_functorch_transforms_active():
        raise NotDifferentiable(
            f"{op}: torch.func transforms are not supported. Take gradients with backward() or "
            f"torch.autograd.grad."
        )
    if not transforms_only:
        raise NotDifferentiable(
            f"{op}: advances a pool in place and has no backward. Call it under torch.no_grad(), "
            f"or detach its inputs."
        )


def refuse_vmap(op: str) -> Callable[..., Any]:
    """A vmap rule that says what to do instead."""

    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        raise NotDifferentiable(
            f"{op}: vmap is not supported. Pack the batch into one call instead: sequences along "
            f"the batch axis, or along the token axis with cu_seqlens."
        )

    return rule


def register_in_place(
    name: str, schema: str, run: Callable[..., None], check: Callable[..., Any],
    writes: Sequence[int],
) -> Callable[..., None]:  # fmt: skip
    """Register an operator that writes into its arguments at `writes`; returns a way to call it.

    run: checks and computes; check: what can be known from shapes alone. Their last argument is
    the text of the options, whose `op` names the caller's function in messages. Plain eager calls
    spare themselves the crossing of the operator's boundary.
    """
    LIB.define(f"{name}({schema}) -> ()")

    def kernel(*args: Any) -> None:
        run(*args)
        for at in writes:
            if args[at] is not None and not args[at].is_inference():
                torch.autograd.graph.increment_version(args[at])

    def autograd(*args: Any) -> None:
        refuse_gradient(options_of(args[-1]).op, args)
        with below_autograd():
            op(*args)

    LIB.impl(name, kernel, "CompositeExplicitAutograd")
    LIB.impl(name, autograd, "Autograd")
    torch.library.register_fake(f"lagraph::{name}", check, lib=LIB)
    torch.library.register_vmap(f"lagraph::{name}", refuse_vmap(name), lib=LIB)
    op = getattr(torch.ops.lagraph, name).default

    def call(*args: Any) -> None:
        if torch.compiler.is_compiling() or not plain(args) or busy():
            op(*args)
        else:
            refuse_gradient(options_of(args[-1]).op, args)
            kernel(*args)

    return call
