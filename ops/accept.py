"""Rolling back: the state after the last accepted token becomes what a pool holds.

A step that verifies several tokens writes the state after every one of them to a buffer and leaves
the pool as it is (`states=` of `recurrent_*`, `recurrent_*_decode` and `paged_causal_conv1d`).
Once it is known how many were right, one call moves every sequence on. Nothing is read on the
host: the count may come from the device, and a captured graph follows it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lagraph import infer, registry
from lagraph.errors import RuleBroken, ShapeMismatch
from lagraph.ops.argument import (
    FLOATS,
    INTS,
    apart,
    check_layout,
    check_offsets,
    check_slots,
    need,
    only_tensors,
    options_of,
    options_text,
    readable,
    register_in_place,
)
from lagraph.ops.form import write_rows
from lagraph.ops.step import Step, Steps, key_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["accept_states"]

KERNEL = "lagraph.engines.triton.recurrent"


def accept_states(
    state_cache: Tensor,
    state_indices: Tensor,
    states: Tensor,
    num_accepted_tokens: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
) -> None:
    """state_cache[state_indices[i]] = states[i, num_accepted_tokens[i] - 1], in place.

    Args:
        state_cache: Pool [num_slots, ...] of recurrent states or histories, any float dtype; its
            slots may lie apart.
        state_indices: Slot of every sequence [N], int32 or int64; not positive means padding.
        states: After every token [N, T, ...], or packed [1, T, ...] with cu_seqlens.
        num_accepted_tokens: Tokens to keep of every sequence [N], int32 or int64, from 0, which
            leaves the slot as it is, to the sequence's length.
        cu_seqlens: Offsets [N + 1] of packed sequences.

    Raises:
        ShapeMismatch, DtypeMismatch, DeviceMismatch, RuleBroken: A bad argument. Values are looked
            at on a CPU; on a GPU counts are clamped, and a slot beyond the pool is padding.
        NotDifferentiable: A tensor requires a gradient.
    """
    op = "accept_states"
    given = (state_cache, state_indices, states, num_accepted_tokens, cu_seqlens)
    # Counts are looked at where they can be, which no step does.
    key = None if infer.VALIDATE else key_of(op, given)
    step = None if key is None else _STEPS.get(key)
    if step is not None and step.run(given):
        return
    names = "state_cache state_indices states num_accepted_tokens cu_seqlens"
    only_tensors(op, names, given, 4)
    _accept(*given, options_text(("op", op)))
    if key is not None and state_cache.is_cuda and _fits(state_cache, states):
        launch = registry.load(f"{KERNEL}:accept")(*given, bind_only=True)
        places = tuple(i if x is not None else None for i, x in enumerate(given))
        slots = state_cache.shape[0]
        step = Step(op, launch.bound, places, launch.sizes, given, (0,), ((2, 0),), 1, slots)
        _STEPS.keep(key, step)


def _run(*args: Any) -> None:
    pool, slots, states, count, cu, text = args
    _check(*args)
    T = states.shape[1]
    if slots.shape[0] == 0 or T == 0 or pool.numel() == 0:
        return
    if wants_kernels(options_of(text).op, pool) and _fits(pool, states):
        registry.load(f"{KERNEL}:accept")(pool, slots, states, count, cu)
        return
    count = count.long()
    if cu is None:
        begin = torch.arange(slots.shape[0], device=slots.device) * T
        length = torch.full_like(begin, T)
    else:
        offsets = cu.long().clamp(0, T)
        begin, length = offsets[:-1], offsets.diff().clamp(min=0)
    at = begin + torch.minimum(count, length) - 1
    rows = states.flatten(0, 1).index_select(0, at.clamp(min=0))
    live = (count > 0) & (length > 0)
    # Rows that are not live are sent to slot 0 and put back: what they hold must not matter.
    write_rows(pool, slots, live, rows.to(pool.dtype))


def wants_kernels(op: str, pool: Tensor) -> bool:
    """Whether the kernel runs."""
    return pool.is_cuda


def _fits(pool: Tensor, states: Tensor) -> bool:
    """Whether the kernel can address them: dense slots, dense states, no empty ones."""
    return bool(pool.numel()) and pool[0].is_contiguous() and states.is_contiguous()


def _check(
    pool: Tensor, slots: Tensor, states: Tensor, count: Tensor, cu: Tensor | None, text: str
) -> None:
    op, device = options_of(text).op, pool.device
    check_layout(op, "state_cache", pool)
    if pool.dim() < 2:
        raise ShapeMismatch(
            op, "state_cache", expected="[num_slots, ...]", got=f"shape {list(pool.shape)}",
            mend="Pass the pool itself",
        )  # fmt: skip
    rest = " ".join(f"d{i}" for i in range(1, pool.dim()))
    sizes = {f"d{i}": size for i, size in enumerate(pool.shape) if i}
    need(op, "state_cache", pool, f"num_slots {rest}", {}, FLOATS)
    need(op, "state_indices", slots, "N", sizes, INTS, device)
    need(op, "cu_seqlens", cu, "N+1", {"N+1": sizes["N"] + 1}, INTS, device)
    need(op, "states", states, f"{'N' if cu is None else '1'} T {rest}", sizes, FLOATS, device)
    need(op, "num_accepted_tokens", count, "N", sizes, INTS, device)
    if torch.compiler.is_compiling():
        return
    apart(op, "states", states, "state_cache", pool)
    check_slots(op, slots, pool.shape[0])
    if cu is not None:
        check_offsets(op, cu, states.shape[1])
    if readable(count) and (cu is None or readable(cu)):
        ends = None if cu is None else cu.tolist()
        for i, accepted in enumerate(count.tolist()):
            most = states.shape[1] if ends is None else ends[i + 1] - ends[i]
            if not 0 <= accepted <= most:
                raise RuleBroken(
                    op, "num_accepted_tokens", expected=f"0 to {most} for sequence {i}",
                    got=str(accepted), mend="Count the tokens that were accepted",
                )  # fmt: skip


_STEPS = Steps()
_accept = register_in_place(
    "accept_states",
    "Tensor(a!) state_cache, Tensor state_indices, Tensor states, Tensor num_accepted_tokens, "
    "Tensor? cu_seqlens, str options",
    _run,
    _check,
    writes=(0,),
)
