"""Paged KDA whose pool holds the states after complete chunks, and whose caches hold the rest.

A state that was rounded into the middle of a chunk continues otherwise than training would have.
Here the pool keeps the state after a slot's last complete chunk of 64 tokens, and a `ReplayState`
the tokens since: after 150 tokens, the state at 128 and 22 tokens. A call puts those tokens before
its own, runs the complete chunks on the pool and the rest from it without writing, and keeps the
rest. So a token's output does not depend on how the tokens before it came: one by one, or all at
once. All of it is index arithmetic on the device: nothing is read on the host, and a captured
graph replays with other offsets, slots, flags and counts.

Beyond the caches a call takes room for T + 63 N tokens, twice for the outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lagraph.desc import dtype_name
from lagraph.errors import DeviceMismatch, DtypeMismatch, ShapeMismatch
from lagraph.ops.argument import only_tensors
from lagraph.ops.dense import offsets, rows
from lagraph.ops.form import clear_rows, explain, require_inference, write_rows
from lagraph.ops.kinds import ReplayState, engine_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lagraph.ops.form import Call

__all__ = ["CHUNK", "replay"]

CHUNK = 64  # tokens of a complete chunk; a multiple of every engine's


def replay(call: Call, caches: Sequence[torch.Tensor]) -> torch.Tensor:
    """The output of a paged call; advances its pool and the caches."""
    kept = _checked(call, caches)
    tokens: dict[str, Any] = dict(call.tokens)
    pool: Any = call.state
    slots: Any = call.slots
    q = tokens["q"]
    engine = engine_of(call.name, call.impl, q, call.kernel_options, True, False)
    require_inference(call.name, {**tokens, call.state_name: pool}, "Call under torch.no_grad().")
    batch, length = q.shape[0], q.shape[1]
    cu = (offsets(batch, length, q) if call.cu_seqlens is None else call.cu_seqlens).long()
    new = {name: _rows(x, kept[name].dtype) for name, x in tokens.items()}
    T, N, P = new["q"].shape[0], cu.shape[0] - 1, pool.shape[0]
    if N == 0:
        return q.new_zeros(batch, length, *tokens["v"].shape[2:])

    live = (slots > 0) & (slots < P)
    at = torch.where(live, slots, 0).long()
    count = torch.where(live, kept["count"].view(-1)[at].long().clamp(0, CHUNK - 1), 0)
    if call.fresh is not None:
        clear_rows(pool, slots, call.fresh)
        count = torch.where(call.fresh, count, 0)

    # Tokens of a sequence: the kept ones, then its own. `whole` of them are complete chunks.
    begin, total = cu[:-1], cu[1:] - cu[:-1] + count
    ends = total.cumsum(0)
    start = ends - total
    whole = total // CHUNK * CHUNK
    row = torch.arange(T + (CHUNK - 1) * N, device=q.device)
    seq = torch.searchsorted(ends, row, right=True).clamp(max=N - 1)
    step = row - start[seq]
    old = step < count[seq]
    cell = at[seq], step.clamp(0, CHUNK - 1)
    source = (begin[seq] + step - count[seq]).clamp(0, T - 1)
    joined = {
        name: torch.where(_like(old, x), kept[name][cell], x[source]) for name, x in new.items()
    }

    # Complete chunks and rests as sequences of their own, either of them padding in turn.
    cuts = torch.cat([torch.stack([start, start + whole], 1).flatten(), ends[-1:]])
    none = torch.zeros_like(slots)
    given: dict[str, Any] = {call.form.ports.get(n, n): x for n, x in joined.items()}
    given |= {
        "cu_seqlens": cuts, "initial_state": pool[1:], "batch_invariant": True,
        "plan_name": f"{call.form.family}_{engine}",
    }  # fmt: skip
    first = torch.stack([slots, none], 1).flatten() - 1
    rest = torch.stack([none, slots], 1).flatten() - 1
    done, _ = call.form.operator(**given, state_indices=first, output_final_state=True)
    tail, _ = call.form.operator(**given, state_indices=rest, output_final_state=False)
    out = torch.where(_like(step < whole[seq], tail), done, tail)

    offset = torch.arange(CHUNK, device=q.device)
    keep = offset < (total - whole)[:, None]
    where = ((start + whole)[:, None] + offset).clamp(max=row.shape[0] - 1)
    for name, x in joined.items():
        rests = x[where]
        write_rows(kept[name], slots, live, torch.where(_like(keep, rests), rests, 0))
    left = (total - whole).to(torch.int32).view(N, *kept["count"].shape[1:])
    write_rows(kept["count"], slots, live, left)

    token = torch.arange(batch * length, device=q.device)
    seq = torch.searchsorted(cu[1:].contiguous(), token, right=True).clamp(max=N - 1)
    out = out[(token - begin[seq] + count[seq] + start[seq]).clamp(0, row.shape[0] - 1)]
    return out.view(batch, length, *out.shape[1:])


def _rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Packed rows in the caches' dtype; one row of zeros where there is none to point at."""
    x = rows(x).to(dtype)
    return x if x.shape[0] else x.new_zeros(1, *x.shape[1:])


def _like(mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A mask of leading axes, for a tensor with more of them."""
    return mask.view(*mask.shape, *[1] * (x.dim() - mask.dim()))


def _checked(call: Call, caches: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The caches by name, checked like the call's other tensors."""
    explain(call)
    if not isinstance(caches, (tuple, list)) or len(caches) != len(ReplayState._fields):
        raise DtypeMismatch(
            call.name, "replay_state", expected="a ReplayState",
            got=f"{len(caches)} tensors" if isinstance(caches, (tuple, list))
            else type(caches).__name__,
            mend="Pass ReplayState(q, k, v, gate, beta, count)",
        )  # fmt: skip
    kept = ReplayState(*caches)._asdict()
    names = " ".join(f"replay_state.{name}" for name in kept)
    only_tensors(call.name, names, tuple(kept.values()), len(kept))
    slots = call.state.shape[0]  # type: ignore[union-attr]
    for name, x in kept.items():
        argument = f"replay_state.{name}"
        token = call.tokens.get(name)
        if token is None:
            shape, wanted = (slots,), torch.int32
        else:
            shape = (slots, CHUNK, *token.shape[2:])
            wanted = torch.float32 if name in ("gate", "beta") else token.dtype
        if tuple(x.shape) not in (shape, (slots, 1) if token is None else shape):
            raise ShapeMismatch(
                call.name, argument, expected=str(list(shape)), got=str(list(x.shape)),
                mend="Make one row of 64 tokens for every slot of state_cache",
            )  # fmt: skip
        if x.dtype is not wanted:
            raise DtypeMismatch(
                call.name, argument, expected=dtype_name(wanted), got=dtype_name(x.dtype),
                mend=f"Make it in torch.{dtype_name(wanted)}",
            )  # fmt: skip
        if x.device != call.state.device:  # type: ignore[union-attr]
            raise DeviceMismatch(
                call.name, argument, expected=str(call.state.device),  # type: ignore[union-attr]
                got=str(x.device), mend="Move it to the pool's device",
            )  # fmt: skip
    return kept
