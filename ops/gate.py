"""Gates: from raw projections to the natural-log decays that the functions take.

    bounded    lower_bound sigmoid(exp(A_log) (raw + dt_bias))     in (lower_bound, 0)
    softplus   -exp(A_log) softplus(raw + dt_bias)                 in (-inf, 0)

Both saturate rather than overflow: beyond A_log = 80, exp(A_log) counts as exp(80), which is larger
than any other number here, and a slope that is zero stays zero, whatever it is multiplied by.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch._C import _AutoDispatchBelowAutograd as below_autograd
from torch.autograd import forward_ad

from lagraph import registry
from lagraph.desc import dtype_name
from lagraph.errors import (
    DeviceMismatch,
    DtypeMismatch,
    InvalidOption,
    NotDifferentiable,
    PlanNotOffered,
    RuleBroken,
    ShapeMismatch,
)
from lagraph.ops.argument import boolean, check_layout
from lagraph.ops.kinds import GateTransform, Impl, is_fused

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["bound_gate", "gate_transform"]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LARGEST = 80.0  # of A_log


def gate_transform(
    raw_gate: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    kind: GateTransform | str,
    lower_bound: float | None = None,
    fastmath: bool = True,
    impl: Impl | str = Impl.AUTO,
) -> torch.Tensor:
    """Log decays from raw gates, per head [B, T, H] or per channel [B, T, H, K].

    Computed in fp32 (fp64 for fp64 gates). The gradient of raw_gate has its dtype; those of A_log
    and dt_bias are summed in fp32, in an order that depends on shapes alone, so that repeated runs
    agree in every bit.

    Args:
        raw_gate: [B, T, H] or [B, T, H, K], bf16, fp16, fp32 or fp64.
        A_log: Log amplitude [H], fp32; 16-bit ones are widened, not computed with (fp64 with fp64
            gates).
        dt_bias: [H] or [H, K], likewise.
        kind: "bounded" or "softplus"; there is no default.
        lower_bound: Of "bounded" alone, which needs it: finite, at most 0.
        fastmath: Taken for compatibility: the mathematics are the same for either value.
        impl: "auto" (fused on CUDA, else reference), "fused" or "reference"; see `Impl`.

    Returns:
        Natural logs of decays, in the shape of raw_gate, fp32 (fp64 for fp64 gates).

    Raises:
        ShapeMismatch, DtypeMismatch, DeviceMismatch, InvalidOption, RuleBroken: a bad argument.
        PlanNotOffered: impl="fused" without CUDA tensors, or with fp64.
        NotDifferentiable: second derivatives, forward mode, vmap.
    """
    boolean("gate_transform", "fastmath", fastmath)
    return _gate("gate_transform", raw_gate, A_log, dt_bias, kind, lower_bound, impl)


def bound_gate(
    raw_gate: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    lower_bound: float = -5.0,
    fastmath: bool = True,
    impl: Impl | str = Impl.AUTO,
) -> torch.Tensor:
    """`gate_transform` of kind "bounded" per channel: raw_gate [B, T, H, K], dt_bias [H, K]."""
    boolean("bound_gate", "fastmath", fastmath)
    if isinstance(raw_gate, torch.Tensor) and raw_gate.dim() != 4:
        raise ShapeMismatch(
            "bound_gate", "raw_gate", expected="[B, T, H, K]", got=f"shape {list(raw_gate.shape)}",
            mend="Take gate_transform for gates per head",
        )  # fmt: skip
    return _gate("bound_gate", raw_gate, A_log, dt_bias, "bounded", lower_bound, impl)


def _gate(
    op: str,
    raw: torch.Tensor,
    a_log: torch.Tensor,
    bias: torch.Tensor,
    kind: GateTransform | str,
    lower_bound: float | None,
    impl: Impl | str,
) -> torch.Tensor:
    _check(op, raw, a_log, bias)
    fused = is_fused(op, impl, raw)
    if fused and raw.dtype is torch.float64:
        raise PlanNotOffered(
            f"{op}: impl='fused' takes bfloat16, float16 or float32, raw_gate is float64. Pass "
            f"impl='reference' to run it in PyTorch."
        )
    if kind != "bounded" and kind != "softplus":
        raise InvalidOption(
            op, "kind", expected="'bounded' or 'softplus'", got=repr(kind),
            mend="Name the convention that the model was trained with",
        )  # fmt: skip
    if kind == "softplus" and lower_bound is not None:
        raise RuleBroken(
            op, "lower_bound", expected="None with kind='softplus'", got=repr(lower_bound),
            mend="Drop it, or pass kind='bounded'",
        )  # fmt: skip
    if kind == "bounded" and not _is_bound(lower_bound):
        raise InvalidOption(
            op, "lower_bound", expected="a finite number <= 0 with kind='bounded'",
            got=repr(lower_bound), mend="Pass the model's floor, -5.0, say",
        )  # fmt: skip
    return torch.ops.lagraph.gate_transform(raw, a_log, bias, lower_bound, fused)


def _is_bound(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and -math.inf < x <= 0.0


def _check(op: str, raw: torch.Tensor, a_log: torch.Tensor, bias: torch.Tensor) -> None:
    """Shapes, dtypes, devices."""
    given = {"raw_gate": raw, "A_log": a_log, "dt_bias": bias}
    for argument, x in given.items():
        if not isinstance(x, torch.Tensor):
            raise DtypeMismatch(
                op, argument, expected="a torch.Tensor", got=type(x).__name__,
                mend=f"Pass {argument}",
            )  # fmt: skip
        check_layout(op, argument, x)
        allowed = FLOATS if argument == "raw_gate" or raw.dtype is torch.float64 else FLOATS[:3]
        if x.dtype not in allowed:
            raise DtypeMismatch(
                op, argument, expected=" or ".join(map(dtype_name, allowed[::-1])),
                got=dtype_name(x.dtype), mend=f"Convert it with {argument}.float()",
            )  # fmt: skip
        if x.device != raw.device:
            raise DeviceMismatch(
                op, argument, expected=f"device {raw.device}, as raw_gate", got=str(x.device),
                mend=f"Move it with {argument}.to({str(raw.device)!r})",
            )  # fmt: skip
    if raw.dim() not in (3, 4):
        raise ShapeMismatch(
            op, "raw_gate", expected="[B, T, H] or [B, T, H, K]", got=f"shape {list(raw.shape)}",
            mend="View the projection in that shape",
        )  # fmt: skip
    for argument, x, shape, axes in (
        ("A_log", a_log, raw.shape[2:3], "[H]"),
        ("dt_bias", bias, raw.shape[2:], "[H]" if raw.dim() == 3 else "[H, K]"),
    ):
        if x.shape != shape:
            raise ShapeMismatch(
                op, argument, expected=f"{axes} = {list(shape)}", got=str(list(x.shape)),
                because=f"raw_gate has shape {list(raw.shape)}",
                mend=f"Give {argument} the shape {axes}",
            )  # fmt: skip


def _wide(raw: torch.Tensor, a_log: torch.Tensor, bias: torch.Tensor) -> tuple[Any, Any]:
    """raw + dt_bias, and the amplitude in the rank of raw, in the dtype of the computation."""
    dtype = torch.float64 if raw.dtype is torch.float64 else torch.float32
    amplitude = a_log.to(dtype).clamp(max=LARGEST).exp()
    # Contiguous: PyTorch's loops round by strides, and its sums are ordered by them.
    x = raw.to(dtype).contiguous() + bias.to(dtype)
    return x, amplitude if raw.dim() == 3 else amplitude[:, None]


# The operator: PyTorch's operations, or the Triton engine's two kernels -------------------------


def _forward(raw: Any, a_log: Any, bias: Any, lower_bound: float | None, fused: bool) -> Any:
    if fused:
        return registry.load("lagraph.engines.triton.transform:forward")(
            raw, a_log, bias, lower_bound
        )
    x, amplitude = _wide(raw, a_log, bias)
    if lower_bound is None:
        return -amplitude * F.softplus(x, threshold=40.0)
    return lower_bound * torch.sigmoid(amplitude * x)


def _backward(
    raw: Any, a_log: Any, bias: Any, grad: Any, lower_bound: float | None, fused: bool
) -> Any:
    if fused:
        return registry.load("lagraph.engines.triton.transform:backward")(
            raw, a_log, bias, grad, lower_bound
        )
    x, amplitude = _wide(raw, a_log, bias)
    grad = grad.contiguous()
    if lower_bound is None:
        scaled = -amplitude * grad
        dx, da = scaled * torch.sigmoid(x), scaled * F.softplus(x, threshold=40.0)
    else:
        u = amplitude * x
        slope = lower_bound * torch.sigmoid(u) * torch.sigmoid(-u) * grad
        # Saturated: 0 times an amplitude or a value that may be infinite is 0.
        flat = slope == 0
        dx, da = torch.where(flat, 0, slope * amplitude), torch.where(flat, 0, slope * u)
    if raw.dim() == 4:
        da = da.sum(3)
    return dx.to(raw.dtype), da.sum((0, 1)).to(a_log.dtype), dx.sum((0, 1)).to(bias.dtype)


class _Gate(torch.autograd.Function):
    """Runs below autograd; saves its inputs."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        ctx.save_for_backward(*args[:3])
        ctx.rest = args[3:]
        with below_autograd():
            return torch.ops.lagraph.gate_transform(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        args = (*ctx.saved_tensors, grads[0], *ctx.rest)
        return (*torch.ops.lagraph.gate_transform_bwd(*args), None, None)


class _Once(torch.autograd.Function):
    """A backward that runs, but refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        with below_autograd():
            return torch.ops.lagraph.gate_transform_bwd(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotDifferentiable(
            "gate_transform: not differentiable twice. Second derivatives are not defined for this "
            "operator; drop create_graph=True."
        )


def _derived(name: str, function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """The kernel under the Autograd key."""

    def run(*args: Any) -> Any:
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if forward_ad._current_level >= 0 and any(
            forward_ad.unpack_dual(x).tangent is not None for x in tensors
        ):
            raise NotDifferentiable(
                "gate_transform: forward-mode derivatives (jvp) are not supported. Take gradients "
                "with backward() or torch.autograd.grad."
            )
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            if torch._C._are_functorch_transforms_active():
                raise NotDifferentiable(
                    "gate_transform: torch.func transforms are not supported. Take gradients with "
                    "backward() or torch.autograd.grad."
                )
            return function.apply(*args)
        with below_autograd():
            return getattr(torch.ops.lagraph, name)(*args)

    return run


def _refuse_vmap(info: Any, in_dims: Any, *args: Any) -> Any:
    raise NotDifferentiable(
        "gate_transform: vmap is not supported. Gates are pointwise: put the axis into B or T."
    )


def _like(raw: Any, *rest: Any) -> Any:
    """Shape and dtype of the decays."""
    dtype = torch.float64 if raw.dtype is torch.float64 else torch.float32
    return raw.new_empty(raw.shape, dtype=dtype)


def _like_inputs(*args: Any) -> Any:
    return tuple(x.new_empty(x.shape) for x in args[:3])


_LIB = torch.library.Library("lagraph", "FRAGMENT")
_GIVEN = "Tensor raw_gate, Tensor A_log, Tensor dt_bias"
for _name, _schema, _run, _fake, _function in (
    ("gate_transform", f"({_GIVEN}, float? lower_bound, bool fused) -> Tensor", _forward, _like,
     _Gate),
    ("gate_transform_bwd",
     f"({_GIVEN}, Tensor d_gate, float? lower_bound, bool fused) -> (Tensor, Tensor, Tensor)",
     _backward, _like_inputs, _Once),
):  # fmt: skip
    _LIB.define(_name + _schema)
    _LIB.impl(_name, _run, "CompositeExplicitAutograd")
    _LIB.impl(_name, _derived(_name, _function), "Autograd")
    torch.library.register_fake(f"lagraph::{_name}", _fake, lib=_LIB)
    torch.library.register_vmap(f"lagraph::{_name}", _refuse_vmap, lib=_LIB)
