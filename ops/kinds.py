"""Types of the functional surface: which implementation runs, which gate, kernel options.

"reference" pins the eager engine's plan, a backend that is asked for its engine's; "fused" without
one runs the fastest GPU kernels, as an operator without a pin does. None replaces another: a call
that its implementation cannot serve is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

from lagraph.errors import InvalidOption, NotSupported, PlanNotOffered, RuleBroken

if TYPE_CHECKING:
    import torch

__all__ = [
    "BackendOptions",
    "GateTransform",
    "Impl",
    "KernelOptions",
    "ReplayState",
    "SplitOptions",
    "engine_of",
    "is_fused",
    "pin_of",
]


class Impl(str, Enum):
    """Which implementation runs. Its value ("fused", say) is as good as the member.

    AUTO: fused for CUDA tensors, reference for all others.
    FUSED: GPU kernels; refused where they do not serve the call.
    REFERENCE: PyTorch operations on any device, differentiable.
    """

    AUTO = "auto"
    FUSED = "fused"
    REFERENCE = "reference"


class GateTransform(str, Enum):
    """From a raw gate projection to a natural-log decay; for gates per head and per channel.

    BOUNDED: lower_bound * sigmoid(exp(A_log) * (raw_gate + dt_bias)), in (lower_bound, 0).
    SOFTPLUS: -exp(A_log) * softplus(raw_gate + dt_bias), in (-inf, 0).
    """

    BOUNDED = "bounded"
    SOFTPLUS = "softplus"


class BackendOptions(TypedDict, total=False):
    """Which kernels a fused call runs: "fused" (the default) or "cudnn"."""

    backend: Literal["fused", "cudnn"]


class SplitOptions(BackendOptions, total=False):
    """Options of `chunk_gdn`. Only False is served: results here are never approximate."""

    split_backward: bool
    split_forward: bool


class KernelOptions(SplitOptions, total=False):
    """Options of `chunk_kda`. schedule is taken and changes nothing: one schedule serves all."""

    schedule: Literal["auto", "static", "persistent"]


class ReplayState(NamedTuple):
    """Tokens of every slot since its last complete chunk of 64, for `paged_chunk_kda`.

    q, k, v: [num_slots, 64, heads, K or V] in the dtype of the call's q; gate [num_slots, 64, H, K]
    and beta [num_slots, 64, H] in fp32; count [num_slots] or [num_slots, 1], int32, in [0, 63] and
    zero at first.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gate: torch.Tensor
    beta: torch.Tensor
    count: torch.Tensor  # type: ignore[assignment]


# What a backend's plans are called: <family>_<engine>.
ENGINES = {"fused": "triton", "cudnn": "frost"}
CHOICES = {"backend": tuple(ENGINES), "schedule": ("auto", "static", "persistent")}
OPTIONS = ("backend", "split_backward", "split_forward")


def is_fused(op: str, impl: Impl | str, x: torch.Tensor) -> bool:
    """Whether a call on x runs fused. Raises `InvalidOption`, `PlanNotOffered`."""
    if impl == "auto":
        return x.is_cuda
    if impl == "reference":
        return False
    if impl != "fused":
        raise InvalidOption(
            op, "impl", expected="'auto', 'fused' or 'reference'", got=repr(impl),
            mend="Leave it out: auto is fused on CUDA and reference elsewhere",
        )  # fmt: skip
    if not x.is_cuda:
        raise PlanNotOffered(
            f"{op}: impl='fused' runs on CUDA, the tensors are on {x.device}. Pass "
            f"impl='reference', or 'auto' for whichever fits the device."
        )
    return True


def engine_of(
    op: str,
    impl: Impl | str,
    x: torch.Tensor,
    options: Mapping[str, Any] | None = None,
    schedules: bool = False,
    splits: bool = True,
) -> str:
    """Name of the engine that a call on x runs on, its kernel options checked.

    schedules: `schedule` is an option; splits: the split schedules are. Options are for fused
    execution: under impl="auto" a call on another device has no use for them.
    """
    fused = is_fused(op, impl, x)
    if options is not None and not isinstance(options, (dict, Mapping)):
        raise InvalidOption(
            op, "kernel_options", expected="a dict or None", got=repr(options)[:80],
            mend='Pass {"backend": "fused"}, say, or leave it out',
        )  # fmt: skip
    if not options:
        return ENGINES["fused"] if fused else "eager"
    known = (*OPTIONS, "schedule") if schedules else OPTIONS
    for name, value in options.items():
        if name not in known:
            raise InvalidOption(
                op, "kernel_options", expected=f"options out of {', '.join(known)}",
                got=repr(name), mend="Drop it",
            )  # fmt: skip
        allowed: tuple[Any, ...] = (False, True)
        if name in CHOICES:
            allowed = CHOICES[name]
        if not isinstance(value, type(allowed[0])) or value not in allowed:
            raise InvalidOption(
                op, f"kernel_options[{name!r}]", expected=f"one of {list(allowed)}",
                got=repr(value), mend="Leave it out for the default",
            )  # fmt: skip
    backend = options.get("backend", "fused")
    for name in ("split_backward", "split_forward"):
        if not options.get(name, False):
            continue
        if backend != "cudnn" or not splits:
            raise RuleBroken(
                op, f"kernel_options[{name!r}]",
                expected="backend='cudnn' beside it" if splits else "False",
                got="True", mend=f"Drop {name}",
            )  # fmt: skip
        raise NotSupported(
            f"{op}: {name} asks for an approximation, and results here are exact. Drop it."
        )
    if impl == "reference":
        raise RuleBroken(
            op, "kernel_options", expected="none with impl='reference'", got=repr(dict(options)),
            mend="Drop them, or pass impl='fused'",
        )  # fmt: skip
    return ENGINES[backend] if fused else "eager"


def pin_of(family: str, engine: str, options: Mapping[str, Any] | None = None) -> str | None:
    """Name of the plan that a call on an engine of `engine_of` is pinned to; None where the fastest
    kernels are chosen: in fused calls that ask for no backend."""
    if engine == ENGINES["fused"] and "backend" not in (options or {}):
        return None
    return f"{family}_{engine}"
