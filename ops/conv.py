"""Stateful short convolution: causal, depthwise, over dense or packed sequences.

    y[t] = act(sum_j weight[:, j] x[t - (W - 1) + j])

Rows before a sequence's first come from its history: its last W - 1 inputs, oldest first, zero if
absent. `causal_conv1d` is differentiable and returns histories; `paged_causal_conv1d` (prefill) and
`causal_conv1d_decode` (one token a sequence) keep them in a pool, in place, for inference.

On CUDA Triton kernels run (fp16, bf16, fp32; a group of rows in registers, no atomics, so that
gradients are the same on every run); elsewhere, or with impl="reference", plain PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch._C import _AutoDispatchBelowAutograd as below_autograd

from lagraph import registry
from lagraph.errors import InvalidOption, NotDifferentiable, NotSupported, RuleBroken, ShapeMismatch
from lagraph.ops.argument import (
    FLOATS,
    INTS,
    LIB,
    apart,
    boolean,
    check_offsets,
    check_slots,
    need,
    needs_gradient,
    only_tensors,
    options_of,
    options_text,
    overlap,
    refuse_gradient,
    refuse_vmap,
    register_in_place,
    serve,
    wants_kernels,
)
from lagraph.ops.step import Step, Steps, key_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from lagraph.ops.kinds import Impl

__all__ = [
    "ShortConvConfig",
    "causal_conv1d",
    "causal_conv1d_decode",
    "paged_causal_conv1d",
    "register_activation",
]

KERNELS = "lagraph.engines.triton.conv:"
REFERENCE = "lagraph.engines.eager.conv:"
WIDTHS = range(1, 9)


@dataclass(frozen=True, slots=True)
class ShortConvConfig:
    """A schedule of the kernels; every other one compiles anew. Results may differ by rounding of
    the weight gradient alone.

    threads: of a program, a power of two from 32 to 1024.
    channels_per_thread: neighbouring channels of a thread: 1, 2, 4, 8 or 16.
    times_per_block: rows of a program; 0 lets the sizes decide.
    """

    threads: int
    channels_per_thread: int
    times_per_block: int

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("threads", self.threads, (32, 64, 128, 256, 512, 1024)),
            ("channels_per_thread", self.channels_per_thread, (1, 2, 4, 8, 16)),
        ):
            if isinstance(value, bool) or value not in allowed:
                raise InvalidOption(
                    "ShortConvConfig", name, expected=f"one of {', '.join(map(str, allowed))}",
                    got=repr(value), mend="Take one of these",
                )  # fmt: skip
        rows = self.times_per_block
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 0 or rows & (rows - 1):
            raise InvalidOption(
                "ShortConvConfig", "times_per_block", expected="0 or a power of two",
                got=repr(rows), mend="Leave 0: the sizes decide",
            )  # fmt: skip


class Activation(NamedTuple):
    """An activation and its derivative, of the pre-activation: in PyTorch, and in Triton."""

    forward: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]
    kernels: tuple[Any, Any] | None


def _silu_derivative(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1.0 + x * (1.0 - s))


ACTIVATIONS: dict[str, Activation] = {"silu": Activation(F.silu, _silu_derivative, None)}


def register_activation(
    name: str,
    forward: Callable[[Tensor], Tensor],
    derivative: Callable[[Tensor], Tensor],
    *,
    kernels: tuple[Any, Any] | None = None,
) -> None:
    """Add an activation for `causal_conv1d(activation=name)` and its siblings.

    Registering a name again with the same functions does nothing.

    Args:
        name: Any name but "silu".
        forward: Elementwise function of the pre-activation, on fp32 (or fp64) tensors.
        derivative: Its derivative, also of the pre-activation.
        kernels: The same two as `triton.jit` functions of an fp32 block, for the GPU; without them
            the activation is served by impl="reference" alone.

    Raises:
        InvalidOption: The name is empty, or taken by other functions.
    """
    if not isinstance(name, str) or not name:
        raise InvalidOption(
            "register_activation", "name", expected="a name", got=repr(name), mend="Pass a string"
        )
    for argument, value in (("forward", forward), ("derivative", derivative)):
        if not callable(value):
            raise InvalidOption(
                "register_activation", argument, expected="a function", got=repr(value),
                mend="Pass a function of one tensor",
            )  # fmt: skip
    if kernels is not None and (not isinstance(kernels, tuple) or len(kernels) != 2):
        raise InvalidOption(
            "register_activation", "kernels", expected="a pair of triton.jit functions",
            got=repr(kernels), mend="Pass (forward, derivative)",
        )  # fmt: skip
    new = Activation(forward, derivative, kernels)
    if ACTIVATIONS.setdefault(name, new) != new:
        raise InvalidOption(
            "register_activation", "name", expected="a name that is free",
            got=f"{name!r}, which has other functions", mend="Choose another name",
        )  # fmt: skip


def _activation(op: str, name: str | None, fused: bool) -> Any:
    """The activation, or for kernels its pair of jitted functions; None without."""
    if name is None:
        return None
    found = ACTIVATIONS.get(name)
    if found is None:
        raise InvalidOption(
            op, "activation", expected=f"None or one of {', '.join(sorted(ACTIVATIONS))}",
            got=repr(name), mend="Add it with register_activation",
        )  # fmt: skip
    if not fused:
        return found
    if name == "silu":
        return registry.load(KERNELS + "SILU")
    if found.kernels is None:
        raise NotSupported(
            f"{op}: activation {name!r} has no Triton functions. Register it with "
            f"kernels=(forward, derivative), or pass impl='reference'."
        )
    return found.kernels


# Checks -------------------------------------------------------------------------------------------


def _check_rows(op: str, x: Tensor, weight: Tensor, sizes: dict[str, Any], shape: str) -> None:
    need(op, "x", x, shape, sizes, FLOATS)
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        raise RuleBroken(
            op, "x", expected="contiguous channels, stride 1 in the last axis",
            got=f"strides {list(x.stride())}", mend="Call x.contiguous() first",
        )  # fmt: skip
    need(op, "weight", weight, "C W", sizes, (x.dtype,), x.device)
    if sizes["W"] not in WIDTHS:
        raise ShapeMismatch(
            op, "weight", expected="[C, W] with W in 1 .. 8", got=f"W = {sizes['W']}",
            mend="Use a width up to 8",
        )  # fmt: skip
    sizes["W-1"] = sizes["W"] - 1


def _check_offsets(op: str, cu: Tensor | None, x: Tensor, sizes: dict[str, Any]) -> None:
    """cu_seqlens [N + 1] of a packed x [1, T, C]; gives N."""
    if cu is None:
        sizes["N"] = sizes["B"]
        return
    need(op, "cu_seqlens", cu, "N+1", {}, INTS, x.device)
    if cu.shape[0] < 1:
        raise ShapeMismatch(
            op, "cu_seqlens", expected="[N + 1], a leading 0 at least", got="no elements",
            mend="Build it as a cumulative sum of the sequence lengths, with a leading 0",
        )  # fmt: skip
    if x.shape[0] != 1:
        raise RuleBroken(
            op, "cu_seqlens", expected="a packed x [1, T, C]", got=f"x {list(x.shape)}",
            mend="Flatten the batch into the token axis: x.flatten(0, 1)[None]",
        )  # fmt: skip
    sizes["N"] = cu.shape[0] - 1


def _check(x: Tensor, weight: Tensor, cu: Tensor | None, history: Tensor | None, op: str) -> Any:
    """Shapes of a differentiable call; its sizes."""
    sizes: dict[str, Any] = {}
    _check_rows(op, x, weight, sizes, "B T C")
    _check_offsets(op, cu, x, sizes)
    need(op, "initial_state", history, "N W-1 C", sizes, (x.dtype,), x.device)
    return sizes


def _check_advance(
    x: Tensor, weight: Tensor, pool: Tensor, out: Tensor, index: Tensor | None,
    cu: Tensor | None, has: Tensor | None, options: str,
) -> None:  # fmt: skip
    call = options_of(options)
    op, pool_name = call.op, call.pool
    single = x.dim() == 2 and op == "causal_conv1d_decode"
    sizes: dict[str, Any] = {}
    _check_rows(op, x, weight, sizes, "B C" if single else "B T C")
    if sizes["W"] < 2:
        raise ShapeMismatch(
            op, "weight", expected="[C, W] with W >= 2", got="W = 1",
            mend="A convolution of width 1 has no history: use causal_conv1d",
        )  # fmt: skip
    _check_offsets(op, cu, x, sizes)
    need(op, pool_name, pool, "slots W-1 C", sizes, (x.dtype,), x.device)
    if pool.stride(2) != 1 and pool.shape[2] != 1:
        raise RuleBroken(
            op, pool_name, expected="contiguous channels, stride 1 in the last axis",
            got=f"strides {list(pool.stride())}", mend="Keep the pool as [num_slots, W - 1, C]",
        )  # fmt: skip
    row, history = pool.stride(1), (sizes["W"] - 2) * pool.stride(1) + sizes["C"]
    if pool.numel() and (
        (sizes["W"] > 2 and row < sizes["C"]) or (pool.shape[0] > 1 and pool.stride(0) < history)
    ):
        raise RuleBroken(
            op, pool_name, expected="slots and rows that do not overlap",
            got=f"strides {list(pool.stride())}", mend="Pass a pool of its own memory, not a view "
            "that repeats it",
        )  # fmt: skip
    need(op, "state_indices", index, "N", sizes, INTS, x.device)
    need(op, "has_initial_state", has, "N", sizes, (torch.bool,), x.device)
    if index is None and pool.shape[0] < sizes["N"]:
        raise ShapeMismatch(
            op, pool_name, expected=f"a slot for each of {sizes['N']} sequences",
            got=f"{pool.shape[0]} slots", mend="Pass state_indices, or a larger pool",
        )  # fmt: skip
    _activation(op, call.act, False)


# Registered operators -----------------------------------------------------------------------------


def _forward(
    x: Tensor, weight: Tensor, cu: Tensor | None, history: Tensor | None, options: str
) -> tuple[Tensor, Tensor]:
    call = options_of(options)
    sizes = _check(x, weight, cu, history, call.op)
    if cu is not None:
        check_offsets(call.op, cu, x.shape[1])
    fused = wants_kernels(call.op, call.impl, x)
    act = _activation(call.op, call.act, fused)
    if not fused:
        y, final = registry.load(REFERENCE + "forward")(x, weight, cu, history, act)
        return y, final if call.final else x.new_empty(0)
    final = x.new_empty((sizes["N"], sizes["W-1"], sizes["C"])) if call.final else None
    run = registry.load(KERNELS + "forward")
    y = run(x, weight, cu, _rows_dense(history), final, act, call.forward)
    return y, x.new_empty(0) if final is None else final


def _forward_fake(
    x: Tensor, weight: Tensor, cu: Tensor | None, history: Tensor | None, options: str
) -> tuple[Tensor, Tensor]:
    call = options_of(options)
    sizes = _check(x, weight, cu, history, call.op)
    _activation(call.op, call.act, False)
    final = (sizes["N"], sizes["W-1"], sizes["C"]) if call.final else (0,)
    return x.new_empty(x.shape), x.new_empty(final)


def _rows_dense(x: Tensor | None) -> Tensor | None:
    """Kernels want contiguous channels; a gradient may be an expanded or transposed view."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def _backward(
    dy: Tensor, d_final: Tensor | None, x: Tensor, weight: Tensor, cu: Tensor | None,
    history: Tensor | None, want_weight: bool, want_history: bool, options: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    call = options_of(options)
    fused = wants_kernels(call.op, call.impl, x)
    act = _activation(call.op, call.act, fused)
    if not fused:
        run = registry.load(REFERENCE + "backward")
        dx, dw, dh = run(dy, d_final, x, weight, cu, history, act)
    else:
        run = registry.load(KERNELS + "backward")
        dx, dw, dh = run(
            _rows_dense(dy), x, weight, cu, _rows_dense(history), _rows_dense(d_final), act,
            want_weight=want_weight, want_history=want_history, config=call.backward,
        )  # fmt: skip
    empty = x.new_empty(0)
    return (
        dx,
        dw if want_weight and dw is not None else empty,
        dh if want_history and dh is not None else x.new_empty(0),
    )


def _backward_fake(
    dy: Tensor, d_final: Tensor | None, x: Tensor, weight: Tensor, cu: Tensor | None,
    history: Tensor | None, want_weight: bool, want_history: bool, options: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dw = x.new_empty(weight.shape if want_weight else 0)
    dh = x.new_empty(history.shape if want_history and history is not None else 0)
    return x.new_empty(x.shape), dw, dh


class _Differentiable(torch.autograd.Function):
    """The formula of `causal_conv1d`, on the saved inputs alone."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        *tensors, options = args
        with below_autograd():
            y, final = _OP(*args)
        ctx.save_for_backward(*tensors)
        ctx.options = options
        if not options_of(options).final:
            ctx.mark_non_differentiable(final)
        ctx.set_materialize_grads(False)
        return y, final

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, cu, history = ctx.saved_tensors
        dy, d_final = grads
        if dy is None:
            dy = x.new_zeros(x.shape)
        need_x, need_w, _, need_h, _ = ctx.needs_input_grad
        need_h = need_h and history is not None
        dx, dw, dh = _BACKWARD(
            dy, d_final, x, weight, cu, history, need_w, need_h, ctx.options
        )  # fmt: skip
        return dx if need_x else None, dw if need_w else None, None, dh if need_h else None, None


class _Once(torch.autograd.Function):
    """A backward that runs, but refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        with below_autograd():
            return _BACKWARD(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotDifferentiable(
            "causal_conv1d: not differentiable twice. Second derivatives are not defined for this "
            "operator; drop create_graph=True."
        )


def _autograd(*args: Any) -> tuple[Tensor, ...]:
    refuse_gradient("causal_conv1d", args, transforms_only=True)
    if needs_gradient(args):
        return _Differentiable.apply(*args)
    with below_autograd():
        return _OP(*args)


def _backward_autograd(*args: Any) -> tuple[Tensor, ...]:
    refuse_gradient("causal_conv1d", args, transforms_only=True)
    if needs_gradient(args):
        return _Once.apply(*args)
    with below_autograd():
        return _BACKWARD(*args)


def _autocast(key: str, device: str) -> Callable[..., Any]:
    """x, weight and history are cast together."""
    keyset = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def run(
        x: Tensor, weight: Tensor, cu: Tensor | None, history: Tensor | None, options: str
    ) -> Any:
        dtype = torch.get_autocast_dtype(device)
        if x.dtype != torch.float64:
            x, weight = x.to(dtype), weight.to(dtype)
            history = None if history is None else history.to(dtype)
        with torch._C._ExcludeDispatchKeyGuard(keyset):
            return _OP(x, weight, cu, history, options)

    return run


_ROWS = "Tensor x, Tensor weight, Tensor? cu_seqlens, Tensor? initial_state"
LIB.define(f"causal_conv1d({_ROWS}, str options) -> (Tensor, Tensor)")
LIB.define(
    f"causal_conv1d_bwd(Tensor dy, Tensor? d_final_state, {_ROWS}, bool want_weight, "
    f"bool want_state, str options) -> (Tensor, Tensor, Tensor)"
)
for _name, _run, _fake, _grad in (
    ("causal_conv1d", _forward, _forward_fake, _autograd),
    ("causal_conv1d_bwd", _backward, _backward_fake, _backward_autograd),
):
    LIB.impl(_name, _run, "CompositeExplicitAutograd")
    LIB.impl(_name, _grad, "Autograd")
    torch.library.register_fake(f"lagraph::{_name}", _fake, lib=LIB)
    torch.library.register_vmap(f"lagraph::{_name}", refuse_vmap(_name), lib=LIB)
for _key, _device in (("AutocastCPU", "cpu"), ("AutocastCUDA", "cuda")):
    LIB.impl("causal_conv1d", _autocast(_key, _device), _key)
_OP = torch.ops.lagraph.causal_conv1d.default
_BACKWARD = torch.ops.lagraph.causal_conv1d_bwd.default


def _advance(
    x: Tensor, weight: Tensor, pool: Tensor, out: Tensor, index: Tensor | None,
    cu: Tensor | None, has: Tensor | None, options: str,
) -> None:  # fmt: skip
    call = options_of(options)
    _check_advance(x, weight, pool, out, index, cu, has, options)
    if overlap(x, pool):
        raise RuleBroken(
            call.op, call.pool, expected="memory apart from x", got="an overlap",
            mend="Clone one of the two",
        )  # fmt: skip
    if x.dim() == 2:
        x, out = x[:, None], out[:, None]
    if cu is not None:
        check_offsets(call.op, cu, x.shape[1])
    if index is not None:
        check_slots(call.op, index, pool.shape[0])
    fused = wants_kernels(call.op, call.impl, x)
    act = _activation(call.op, call.act, fused)
    if fused:
        run = registry.load(KERNELS + "advance")
        run(x, weight, pool, out, index, cu, has, act, call.forward)
    else:
        registry.load(REFERENCE + "advance")(x, weight, pool, out, index, cu, has, act)


def _check_states(
    x: Tensor, weight: Tensor, pool: Tensor, out: Tensor, states: Tensor, index: Tensor,
    cu: Tensor | None, has: Tensor | None, options: str,
) -> None:  # fmt: skip
    _check_advance(x, weight, pool, out, index, cu, has, options)
    op, sizes = options_of(options).op, {"W-1": weight.shape[1] - 1}
    sizes |= {"B": x.shape[0], "T": x.shape[1], "C": x.shape[2]}
    need(op, "states", states, "B T W-1 C", sizes, (x.dtype,), x.device)
    if not states.is_contiguous():
        raise RuleBroken(
            op, "states", expected="a contiguous buffer", got=f"strides {list(states.stride())}",
            mend="Allocate it as torch.empty(B, T, W - 1, C)",
        )  # fmt: skip


def _states(
    x: Tensor, weight: Tensor, pool: Tensor, out: Tensor, states: Tensor, index: Tensor,
    cu: Tensor | None, has: Tensor | None, options: str,
) -> None:  # fmt: skip
    """Convolve from a pool that is only read, and write the history after every token.

    Histories are gathered and cut from the rows by plain operations: they are small.
    """
    call = options_of(options)
    _check_states(x, weight, pool, out, states, index, cu, has, options)
    for name, other in (("x", x), ("state_cache", pool)):
        apart(call.op, "states", states, name, other)
    if cu is not None:
        check_offsets(call.op, cu, x.shape[1])
    check_slots(call.op, index, pool.shape[0])
    if out.numel() == 0 or index.shape[0] == 0:
        return
    live = (index > 0) & (index < pool.shape[0])
    known = live if has is None else live & has
    if pool.shape[0]:
        history = pool[torch.where(known, index, 0).long()]
        history = torch.where(known[:, None, None], history, 0)
    else:
        history = x.new_zeros((index.shape[0], *pool.shape[1:]))
    fused = wants_kernels(call.op, call.impl, x)
    act = _activation(call.op, call.act, fused)
    if fused:
        run = registry.load(KERNELS + "forward")
        y = run(x, weight, cu, history, None, act, call.forward)
    else:
        y, _ = registry.load(REFERENCE + "forward")(x, weight, cu, history, act)

    # Input p of a sequence is a row of x, or before its first one of its history.
    B, T, past = x.shape[0], x.shape[1], history.shape[1]
    ends = torch.arange(B + 1, device=x.device) * T if cu is None else cu.long().clamp(0, T)
    row = torch.arange(B * T, device=x.device)
    seq = torch.searchsorted(ends[1:].contiguous(), row, right=True).clamp(max=len(index) - 1)
    good = live[seq] & (row < ends[-1])
    at = row[:, None] + torch.arange(1 - past, 1, device=x.device)
    before = at - ends[:-1][seq][:, None]
    old = history[seq[:, None], (before + past).clamp(0, past - 1)]
    rows = torch.where((before < 0)[..., None], old, x.flatten(0, 1)[at.clamp(min=0)])
    flat = states.view(B * T, past, -1)
    flat.copy_(torch.where(good[:, None, None], rows, flat))
    out.copy_(torch.where(live[seq].view(B, T, 1), y, 0))


_advance_op = register_in_place(
    "causal_conv1d_advance",
    "Tensor x, Tensor weight, Tensor(a!) state, Tensor(b!) out, Tensor? state_indices, "
    "Tensor? cu_seqlens, Tensor? has_initial_state, str options",
    _advance,
    _check_advance,
    writes=(2, 3),
)
_states_op = register_in_place(
    "causal_conv1d_states",
    "Tensor x, Tensor weight, Tensor state, Tensor(a!) out, Tensor(b!) states, "
    "Tensor state_indices, Tensor? cu_seqlens, Tensor? has_initial_state, str options",
    _states,
    _check_states,
    writes=(3, 4),
)


# Public functions ---------------------------------------------------------------------------------


def _config(op: str, name: str, config: Any) -> tuple[int, int, int] | None:
    if config is None:
        return None
    if not isinstance(config, ShortConvConfig):
        raise InvalidOption(
            op, name, expected="a ShortConvConfig or None", got=repr(config),
            mend="Pass ShortConvConfig(threads, channels_per_thread, times_per_block)",
        )  # fmt: skip
    return config.threads, config.channels_per_thread, config.times_per_block


def _named(op: str, activation: Any) -> str | None:
    if activation is None or isinstance(activation, str):
        return activation
    raise InvalidOption(
        op, "activation", expected="a registered name or None", got=repr(activation),
        mend="Register the function, then pass its name",
    )  # fmt: skip


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    *,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    forward_config: ShortConvConfig | None = None,
    input_grad_config: ShortConvConfig | None = None,
    weight_grad_config: ShortConvConfig | None = None,
    persistent_tma_input_gradient: bool = False,
    impl: Impl | str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal depthwise convolution, differentiable once in x, weight and initial_state.

    Args:
        x: [B, T, C], channels contiguous, batch and token strides free. fp16, bf16 or fp32
            (reference: fp64, too). Every batch row is a sequence of its own.
        weight: [C, W], W in 1 .. 8, of x's dtype.
        activation: "silu", a name from `register_activation`, or None.
        cu_seqlens: [N + 1] int32 or int64 offsets of the sequences packed into x [1, T, C]: from 0,
            never falling, equal ones for empty sequences. They may end before T; what lies past
            their end is not read, and outputs and input gradients there are unspecified.
        initial_state: History [N, W - 1, C] of x's dtype, oldest input first; zero if absent.
        return_final_state: Also return the last W - 1 inputs of every sequence.
        forward_config, input_grad_config, weight_grad_config: Schedules. Both gradients come from
            one kernel: give one of the two, or the same.
        persistent_tma_input_gradient: There is no such kernel here: must be False.
        impl: "auto" (fused on CUDA, else reference), "fused" or "reference".

    Returns:
        The output, contiguous, like x; with return_final_state, also the histories [N, W - 1, C],
        newly allocated.

    Raises:
        ShapeMismatch, DtypeMismatch, DeviceMismatch: A tensor does not fit x.
        RuleBroken: Channels are not contiguous; cu_seqlens with B > 1, or with wrong values (on a
            GPU only under LAGRAPH_VALIDATE=1; otherwise they are clamped to [0, T]).
        InvalidOption: An option or activation that is not known.
        NotSupported: impl="fused" cannot serve.
        NotDifferentiable: A second, forward-mode or vmapped derivative.
    """
    op = "causal_conv1d"
    backward = _config(op, "input_grad_config", input_grad_config)
    other = _config(op, "weight_grad_config", weight_grad_config)
    if backward is not None and other is not None and backward != other:
        raise RuleBroken(
            op, "weight_grad_config", expected="the schedule of input_grad_config",
            got=f"{other} beside {backward}", mend="One kernel makes both gradients: give one",
        )  # fmt: skip
    if boolean(op, "persistent_tma_input_gradient", persistent_tma_input_gradient):
        raise NotSupported(
            f"{op}: persistent_tma_input_gradient: there is no such kernel here. Leave it False."
        )
    options = options_text(
        ("op", op),
        ("impl", serve(op, impl)),
        ("act", _named(op, activation)),
        ("final", boolean(op, "return_final_state", return_final_state)),
        ("forward", _config(op, "forward_config", forward_config)),
        ("backward", backward if backward is not None else other),
    )
    names = "x weight cu_seqlens initial_state"
    only_tensors(op, names, (x, weight, cu_seqlens, initial_state), 2)
    y, final = _OP(x, weight, cu_seqlens, initial_state, options)
    return (y, final) if return_final_state else y


def paged_causal_conv1d(
    x: Tensor,
    weight: Tensor,
    state_cache: Tensor,
    state_indices: Tensor,
    *,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    states: Tensor | None = None,
    impl: Impl | str = "auto",
) -> Tensor:
    """Convolution of several tokens a sequence that advances a pool of histories in place.

    For inference; safe to capture in a CUDA graph, replayed with other indices and offsets.

    Args:
        x: [B, T, C], channels contiguous, other strides free; packed [1, T, C] with cu_seqlens.
        weight: [C, W], W in 2 .. 8.
        state_cache: Pool [num_slots, W - 1, C] of x's dtype. Slots may lie apart, channels are
            contiguous.
        state_indices: [N] int32 or int64. Positive ones differ and select a slot; others are
            padding: zero output, the pool is not touched.
        activation: "silu", a registered name, or None.
        cu_seqlens: As in `causal_conv1d`.
        has_initial_state: [N] bool. False reads zeros in place of the slot and overwrites it, even
            for an empty sequence; one that resumes keeps its slot.
        states: Contiguous [B, T, W - 1, C] of x's dtype, to write the history after every token
            to, for tokens that may turn out wrong. The pool is only read then, see `accept_states`;
            rows of padding and past the end of cu_seqlens are not written.
        impl: "auto" (fused on CUDA, else reference), "fused" or "reference".

    Returns:
        The output, contiguous, like x. Rows past the end of cu_seqlens are unspecified.

    Raises:
        As `causal_conv1d`; NotDifferentiable where an input requires a gradient.
    """
    op = "paged_causal_conv1d"
    options = options_text(
        ("op", op), ("impl", serve(op, impl)), ("act", _named(op, activation)),
        ("pool", "state_cache"), ("forward", None),
    )  # fmt: skip
    names = "x weight state_cache state_indices cu_seqlens has_initial_state states"
    optional = (cu_seqlens, has_initial_state)
    only_tensors(op, names, (x, weight, state_cache, state_indices, *optional, states), 4)
    out = x.new_empty(x.shape)
    if states is not None:
        _states_op(x, weight, state_cache, out, states, state_indices, *optional, options)
        return out
    _advance_op(x, weight, state_cache, out, state_indices, *optional, options)
    return out


def causal_conv1d_decode(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    *,
    activation: str | None = None,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    forward_config: ShortConvConfig | None = None,
    impl: Impl | str = "auto",
) -> Tensor:
    """One token of every sequence: convolve it, and shift it into the sequence's history.

    For inference; safe to capture in a CUDA graph, replayed with other indices.

    Args:
        x: [N, C], channels contiguous, rows any stride apart.
        weight: [C, W], W in 2 .. 8.
        state: Histories [num_slots, W - 1, C] of x's dtype, oldest input first, advanced in place.
        activation: "silu", a registered name, or None.
        state_indices: [N] int32 or int64 slots. Positive ones differ; others are padding: zero
            output, the pool is not touched. Without, sequence i has slot i, slot 0 included.
        has_initial_state: [N] bool; where False the history starts as zeros and is not read.
        forward_config: A schedule.
        impl: "auto" (fused on CUDA, else reference), "fused" or "reference".

    Returns:
        The output [N, C], contiguous.

    Raises:
        As `causal_conv1d`; NotDifferentiable where an input requires a gradient.
    """
    op = "causal_conv1d_decode"
    options = options_text(
        ("op", op), ("impl", serve(op, impl)), ("act", _named(op, activation)), ("pool", "state"),
        ("forward", _config(op, "forward_config", forward_config)),
    )  # fmt: skip
    given = (x, weight, state, state_indices, has_initial_state)
    key = key_of(options, given)
    step = None if key is None else _STEPS.get(key)
    if step is not None:
        out = x.new_empty(x.shape)
        if step.run((x, weight, state, out, state_indices, has_initial_state)):
            return out
    only_tensors(op, "x weight state state_indices has_initial_state", given, 3)
    out = x.new_empty(x.shape)
    _advance_op(x, weight, state, out, state_indices, None, has_initial_state, options)
    if key is not None:
        _remember(key, options, x, weight, state, out, state_indices, has_initial_state)
    return out


_STEPS = Steps()


def _remember(
    key: Any, options: str, x: Tensor, weight: Tensor, pool: Tensor, out: Tensor,
    index: Tensor | None, has: Tensor | None,
) -> None:  # fmt: skip
    """Keep the launch of a call that went well, for the next one like it."""
    call = options_of(options)
    if not wants_kernels(call.op, call.impl, x):
        return
    act = _activation(call.op, call.act, True)
    bind = registry.load(KERNELS + "bind_step")
    made = bind(x[:, None], weight, pool, out[:, None], index, has, act, call.forward)
    if made is not None:
        # The pool may not reach into x, nor the output, which is new, into anything.
        step = Step(
            call.op, made[0], (0, 1, 3, None, 2, 4, 5, 2), made[1],
            (x, weight, pool, out, index, has), (2,), ((2, 0),), 4, pool.shape[0],
        )  # fmt: skip
        _STEPS.keep(key, step)
