"""Algebra on summaries: the affine maps that spans of tokens make of the state entering them.

A summary is packed: [..., V + K, K] holds the bias [V, K] above the transition [K, K] of a
delta-rule family, S_out = S_in @ A + B. Mamba-2 has one decay per head, so there [..., V + 1, K]
holds the bias above a row whose every entry is m, the log2 of the span's decay:
S_out = 2^m S_in + B. Beside a state the number of rows tells the two apart, except for K = 1;
elsewhere a caller has to say so (`log2_decay`).

All functions are differentiable and compute in fp32 (fp64 for fp64 summaries), in IEEE products
whatever `torch.get_float32_matmul_precision` says.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from lagraph.errors import DeviceMismatch, DtypeMismatch, ShapeMismatch
from lagraph.ops.fragments import whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["compose_summaries", "merge_state", "neutral_summary", "pack", "split"]


def neutral_summary(
    heads: int,
    value_dim: int,
    key_dim: int,
    *,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    log2_decay: bool = False,
) -> Tensor:
    """The identity map: `merge_state(state, neutral)` is the state.

    Args:
        heads: Value heads H.
        value_dim: V.
        key_dim: K.
        device: Where to make it.
        dtype: fp32, or fp64.
        log2_decay: Of Mamba-2.

    Returns:
        [H, V + K, K], or [H, V + 1, K] for Mamba-2.
    """
    named = {"heads": heads, "value_dim": value_dim, "key_dim": key_dim}
    for name, size in named.items():
        whole("neutral_summary", name, size, 0, "Give the sizes of a state [H, V, K]")
    if dtype not in (torch.float32, torch.float64):
        raise DtypeMismatch("neutral_summary", "dtype", expected="torch.float32 or torch.float64",
                            got=str(dtype), mend="Leave it out")  # fmt: skip
    rows = 1 if log2_decay else key_dim
    made = torch.zeros(heads, value_dim + rows, key_dim, dtype=dtype, device=device)
    if not log2_decay:
        made[:, value_dim:].diagonal(dim1=-2, dim2=-1).fill_(1.0)
    return made


def merge_state(state: Tensor, summary: Tensor, *, log2_decay: bool | None = None) -> Tensor:
    """The state after a span: `state @ A + B`.

    Args:
        state: [..., V, K].
        summary: [..., V + K, K], or [..., V + 1, K] for Mamba-2; leading axes broadcast.
        log2_decay: Whether it is Mamba-2's; None reads that off the shape (False for K = 1).

    Returns:
        [..., V, K] in the wider dtype of the two, at least fp32.

    Raises:
        ShapeMismatch, DtypeMismatch, DeviceMismatch: The two do not fit, or are no such tensors.
    """
    _floating("merge_state", state=state, summary=summary)
    bias, transition, scalar = split("merge_state", summary, state.shape[-2], log2_decay)
    state, bias, transition = _widened(state, bias, transition)
    if state.shape[-1] != summary.shape[-1]:
        raise ShapeMismatch(
            "merge_state", "state", expected=f"K = {summary.shape[-1]} columns, as summary",
            got=str(state.shape[-1]), mend="Give the state [..., V, K]",
        )  # fmt: skip
    return merged(state, bias, transition, scalar)


def compose_summaries(first: Tensor, then: Tensor, *, log2_decay: bool = False) -> Tensor:
    """The map that applies `first` and then `then`: (A0 A1, B0 A1 + B1).

    Args:
        first: A summary [..., V + K, K], or [..., V + 1, K] for Mamba-2.
        then: Another of its kind; leading axes broadcast.
        log2_decay: Whether they are Mamba-2's: the shape alone does not tell here.

    Returns:
        A summary of the same kind.

    Raises:
        ShapeMismatch, DtypeMismatch, DeviceMismatch: The two do not fit, or are no such tensors.
    """
    _floating("compose_summaries", first=first, then=then)
    first, then = _widened(first, then)
    rows, keys = first.shape[-2:]
    value_dim = rows - (1 if log2_decay else keys)
    if then.shape[-2:] != first.shape[-2:]:
        raise ShapeMismatch(
            "compose_summaries", "then", expected=f"[..., {rows}, {keys}], as first",
            got=f"shape {list(then.shape)}", mend="Compose summaries of one family and size",
        )  # fmt: skip
    split("compose_summaries", then, value_dim, log2_decay)
    return composed(first, then, value_dim, log2_decay)


# The same of tensors that fit, for loops whose tensors are known: checks cost more than launches.


def merged(state: Tensor, bias: Tensor, transition: Tensor, scalar: bool) -> Tensor:
    """`merge_state`, of a summary's parts; scalar: a row of log2 decays."""
    if scalar:
        return torch.addcmul(bias, state, torch.exp2(transition))
    return _product(state, transition) + bias


def composed(first: Tensor, then: Tensor, value_dim: int, scalar: bool) -> Tensor:
    """`compose_summaries`; scalar: Mamba-2's."""
    bias, transition = then[..., :value_dim, :], then[..., value_dim:, :]
    if scalar:
        state = torch.addcmul(bias, first[..., :value_dim, :], torch.exp2(transition))
        decay = (first[..., value_dim:, :] + transition).expand_as(state[..., :1, :])
        return torch.cat([state, decay], -2)
    both = _product(first, transition)
    both[..., :value_dim, :] += bias
    return both


def _floating(op: str, **tensors: Any) -> None:
    """Refuse what is no floating tensor [..., rows, K], or on another device than the rest."""
    device = None
    for name, x in tensors.items():
        good = isinstance(x, torch.Tensor)
        if not good or not x.is_floating_point():
            raise DtypeMismatch(
                op, name, expected="a floating torch.Tensor",
                got=str(x.dtype) if good else type(x).__name__, mend=f"Pass {name} as one",
            )  # fmt: skip
        if x.dim() < 2:
            raise ShapeMismatch(op, name, expected="[..., rows, K]", got=f"shape {list(x.shape)}",
                                mend=f"Give {name} at least two axes")  # fmt: skip
        if device is not None and x.device != device:
            raise DeviceMismatch(op, name, expected=f"device {device}", got=str(x.device),
                                 mend="Move both to one device")  # fmt: skip
        device = x.device


def _widened(*tensors: Tensor) -> list[Tensor]:
    """All in the widest dtype among them, at least fp32."""
    dtype = torch.float32
    for x in tensors:
        dtype = torch.promote_types(dtype, x.dtype)
    return [x.to(dtype) for x in tensors]


def pack(bias: Tensor, transition: Tensor) -> Tensor:
    """What a `*_summary` returns, [N, H, V, K] and [N, H, K, K] or log2 decays [N, H], packed."""
    if transition.dim() == 2:
        transition = transition[..., None, None].expand(*transition.shape, 1, bias.shape[-1])
    return torch.cat([bias, transition], -2)


def split(
    op: str, summary: Tensor, value_dim: int, log2_decay: bool | None = None
) -> tuple[Tensor, Tensor, bool]:
    """Bias, transition (a row of log2 decays for Mamba-2), and whether it is Mamba-2's."""
    rows, keys = summary.shape[-2:]
    rest = rows - value_dim
    scalar = rest == 1 and keys != 1 if log2_decay is None else log2_decay
    if rest != (1 if scalar else keys):
        raise ShapeMismatch(
            op, "summary", expected=f"V + K = {value_dim + keys} rows, or V + 1 for Mamba-2",
            got=f"{rows} rows of {keys}", mend="Pack it as [bias; transition]",
        )  # fmt: skip
    return summary[..., :value_dim, :], summary[..., value_dim:, :], scalar


class _Product(torch.autograd.Function):
    """a @ b in IEEE fp32, its gradients too."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        with _ieee(a.device):
            return a @ b

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        da = _product(grad[0], b.mT).sum_to_size(a.shape)
        return da, _product(a.mT, grad[0]).sum_to_size(b.shape)


def _product(a: Tensor, b: Tensor) -> Tensor:
    kind = a.device.type
    if torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):
            return _product(a, b)
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return _Product.apply(a, b)
    with _ieee(a.device):
        return a @ b


@contextmanager
def _ieee(device: torch.device) -> Iterator[None]:
    """fp32 products in full precision; where that is set already, nothing is touched."""
    backend: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    matmul = getattr(backend, "matmul", None)
    name = "fp32_precision" if hasattr(matmul, "fp32_precision") else "allow_tf32"
    full: Any = "ieee" if name == "fp32_precision" else False
    before = getattr(matmul, name, full)
    if before in (full, "none"):
        yield
        return
    setattr(matmul, name, full)
    try:
        yield
    finally:
        setattr(matmul, name, before)
