"""Masks for packed tensors [1, T, ...] of fixed capacity, of which a prefix is active.

The operators read and write only rows before cu_seqlens[-1]; the rest of their outputs and of
their inputs' gradients is unspecified. Around them:

    buffer of the caller -> ordinary operation     `mask_inactive_tokens` on the buffer
    ordinary operation with parameters -> operator `mask_inactive_token_gradients` between them
    operator -> ordinary operation                 `mask_inactive_tokens` on the output
    operator -> operator                           nothing

A zero gradient does not undo a NaN value in a parameter's reduction: 0 * NaN is NaN. One mask,
made on the device inside a captured graph, serves all boundaries and follows the offsets.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from lagraph.errors import DeviceMismatch, DtypeMismatch, ShapeMismatch
from lagraph.ops.argument import check_layout, only_tensors

__all__ = ["active_token_mask", "mask_inactive_token_gradients", "mask_inactive_tokens"]


def active_token_mask(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Which tokens of a packed tensor belong to a sequence.

    Args:
        x: [1, T, ...]; only its shape and device matter.
        cu_seqlens: Offsets [N + 1], int32 or int64, on its device.

    Returns:
        [T], bool: true before cu_seqlens[-1].
    """
    only_tensors("active_token_mask", "x cu_seqlens", (x, cu_seqlens), 2)
    _check_packed("active_token_mask", x)
    check_layout("active_token_mask", "cu_seqlens", cu_seqlens)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ShapeMismatch(
            "active_token_mask", "cu_seqlens", expected="[N+1]",
            got=f"shape {list(cu_seqlens.shape)}",
            mend="Give the first token of every sequence, then the end",
        )  # fmt: skip
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise DtypeMismatch(
            "active_token_mask", "cu_seqlens", expected="int32 or int64",
            got=str(cu_seqlens.dtype), mend="Convert it with cu_seqlens.to(torch.int32)",
        )  # fmt: skip
    _check_device("active_token_mask", "cu_seqlens", cu_seqlens, x)
    return torch.arange(x.shape[1], device=x.device, dtype=cu_seqlens.dtype) < cu_seqlens[-1]


def mask_inactive_tokens(x: torch.Tensor, active_mask: torch.Tensor | None) -> torch.Tensor:
    """Zero the inactive tokens of x, and their gradients.

    Args:
        x: [1, T, ...].
        active_mask: [T], bool, of `active_token_mask`; None returns x itself.

    Returns:
        [1, T, ...], a copy.
    """
    if active_mask is None:
        only_tensors("mask_inactive_tokens", "x", (x,), 1)
        return x
    return torch.where(_checked("mask_inactive_tokens", x, active_mask), x, x.new_zeros(()))


def mask_inactive_token_gradients(
    x: torch.Tensor, active_mask: torch.Tensor | None
) -> torch.Tensor:
    """x as it is, with derivatives that are zero on inactive tokens, whatever arrives there.

    Args:
        x: [1, T, ...].
        active_mask: [T], bool, of `active_token_mask`; None returns x itself.

    Returns:
        [1, T, ...]: a view of x; a copy under torch.compile, torch.func and forward mode.
    """
    if active_mask is None:
        only_tensors("mask_inactive_token_gradients", "x", (x,), 1)
        return x
    mask = _checked("mask_inactive_token_gradients", x, active_mask)
    special = forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
    if special or torch.compiler.is_compiling():
        return torch.where(mask, x, x.detach())
    return _Barrier.apply(x, mask)


class _Barrier(torch.autograd.Function):
    """Identity whose gradient is masked, and that gradient's gradient, too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(mask)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        return torch.where(mask, grads[0], 0), None


def _checked(op: str, x: torch.Tensor, active_mask: torch.Tensor) -> torch.Tensor:
    """The mask in the rank of x."""
    only_tensors(op, "x active_mask", (x, active_mask), 2)
    _check_packed(op, x)
    check_layout(op, "active_mask", active_mask)
    if active_mask.dim() != 1 or active_mask.shape[0] != x.shape[1]:
        raise ShapeMismatch(
            op, "active_mask", expected=f"[T], T = {x.shape[1]}",
            got=f"shape {list(active_mask.shape)}", mend="Take active_token_mask of that tensor",
        )  # fmt: skip
    if active_mask.dtype is not torch.bool:
        raise DtypeMismatch(
            op, "active_mask", expected="bool", got=str(active_mask.dtype),
            mend="Convert it with active_mask.bool()",
        )  # fmt: skip
    _check_device(op, "active_mask", active_mask, x)
    return active_mask.view(1, -1, *[1] * (x.dim() - 2))


def _check_packed(op: str, x: torch.Tensor) -> None:
    check_layout(op, "x", x)
    if x.dim() < 2 or x.shape[0] != 1:
        raise ShapeMismatch(
            op, "x", expected="[1, T, ...]", got=f"shape {list(x.shape)}",
            mend="Pack the sequences along T of a batch of one",
        )  # fmt: skip


def _check_device(op: str, argument: str, x: torch.Tensor, like: torch.Tensor) -> None:
    if x.device != like.device:
        raise DeviceMismatch(
            op, argument, expected=f"device {like.device}, as x", got=str(x.device),
            mend=f"Move it with {argument}.to({str(like.device)!r})",
        )  # fmt: skip
