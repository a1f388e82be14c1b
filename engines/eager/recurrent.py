"""The recurrence token by token in plain PyTorch, where the state after every token is wanted.

`walk` is one step after the other, for decoding as well; `scan` is the reference of `recurrent_*`
with `states`: batches or packed rows, pools, in fp32 or wider.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

__all__ = ["expand", "scan", "skip_and_gate", "start", "step_size", "walk"]


def expand(x: Tensor, heads: int) -> Tensor:
    """Heads of the axis before the last, each repeated to serve its group."""
    return x if x.shape[-2] == heads else x.repeat_interleave(heads // x.shape[-2], -2)


def step_size(g: Tensor, dt_bias: Tensor | None, options: Mapping[str, Any]) -> Tensor:
    """Mamba-2's step from the raw one, in g's dtype."""
    dt = g if dt_bias is None else g + dt_bias.to(g)
    dt = F.softplus(dt, threshold=40.0) if options["dt_softplus"] else dt
    return dt.clamp(options["dt_min"], options["dt_max"])


def start(pool: Tensor, slots: Tensor, has: Tensor | None, wide: torch.dtype) -> Tensor:
    """What sequences start from: rows of a pool, zero where one is fresh or padding."""
    known = _live(slots, pool) if has is None else _live(slots, pool) & has
    if pool.shape[0] == 0:
        return torch.zeros((len(slots), *pool.shape[1:]), dtype=wide, device=pool.device)
    rows = pool[torch.where(known, slots, 0).long()]
    return torch.where(known[:, None, None, None], rows, 0.0).to(wide)


def _live(slots: Tensor, pool: Any) -> Tensor:
    """Which slots are no padding."""
    return (slots > 0) & (slots < pool.shape[0])


def walk(
    s: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, amount: Tensor, w: Tensor | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Reading S q [B, H, V] and state [B, H, V, K] after each of T tokens, from states s.

    q [B, T, H, K]; k, v [B, T, n, H, K or V]; log decays g [B, T, H] or [B, T, H, K]. amount: of
    the delta rule [B, T, n, H], or with w [B, T, H, V] of its erasing [B, T, H, K]; else
    Mamba-2's step [B, T, H].
    """
    for t in range(q.shape[1]):
        a = g[:, t].exp()
        s = s * (a[:, :, None] if a.dim() == 3 else a[:, :, None, None])
        for i in range(k.shape[2]):
            key, value = k[:, t, i], v[:, t, i]
            if w is not None:
                u = w[:, t] * value - (s @ (amount[:, t] * key)[..., None])[..., 0]
            elif amount.dim() == 4:
                u = amount[:, t, i, :, None] * (value - (s @ key[..., None])[..., 0])
            else:
                u = amount[:, t, :, None] * value
            s = s + u[..., None] * key[..., None, :]
        yield (s @ q[:, t, :, :, None])[..., 0], s


def skip_and_gate(o: Tensor, v: Tensor, d: Tensor | None, z: Tensor | None) -> Tensor:
    """(o + D v) silu(z), for o, v, z [..., H, V] and D [H] or [H, V]."""
    if d is not None:
        o = o + d.to(o).view(o.shape[-2], -1) * v
    return o if z is None else o * F.silu(z.to(o))


def scan(
    family: str,
    x: Mapping[str, Tensor | None],
    options: Mapping[str, Any],
    cu_seqlens: Tensor | None,
    state: Tensor | None,
    slots: Tensor | None,
    has: Tensor | None,
    final: Tensor,
    states: Tensor,
) -> Tensor:
    """Outputs [B, T, H, V]; fills final states (not under slots) and those after every token.

    x: tokens by the operators' names. A packed batch is cut into its sequences, which reads the
    offsets on the host.
    """
    t: dict[str, Any] = {name: y.to(final.dtype) for name, y in x.items() if y is not None}
    io, (H, V, K) = x["q"].dtype, states.shape[2:]  # type: ignore[union-attr]
    out = torch.zeros(states.shape[:4], dtype=io, device=states.device)
    if t["k"].dim() == 4:
        t["k"], t["v"] = t["k"].unsqueeze(2), t["v"].unsqueeze(2)
    t["q"], t["k"] = expand(t["q"], H), expand(t["k"], H)
    if family == "mamba2":
        t["beta"] = step_size(t["g"], options["dt_bias"], options)
        t["g"] = options["A"].to(t["g"]) * t["beta"]
    else:
        t["q"] = t["q"] * (K**-0.5 if options["scale"] is None else options["scale"])
        if t["beta"].dim() == 3:
            t["beta"] = t["beta"].unsqueeze(2)

    ends = list(range(len(out) + 1)) if cu_seqlens is None else cu_seqlens.tolist()
    N = len(ends) - 1
    if state is None:
        begin = out.new_zeros((N, H, V, K), dtype=final.dtype)
    else:
        begin = state.to(final.dtype) if slots is None else start(state, slots, has, final.dtype)
    # A dense batch is walked at once, packed sequences one after the other.
    cuts: list[Any] = [(slice(0, N), slice(0, N), slice(None))]
    if cu_seqlens is not None:
        cuts = [(slice(i, i + 1), slice(0, 1), slice(*ends[i : i + 2])) for i in range(N)]
    for rows, batch, time in cuts:
        part = {name: y[batch, time] for name, y in t.items()}
        live = None if slots is None else _live(slots[rows], state)
        to, every = out[batch, time], states[batch, time]
        s = begin[rows]
        q, k, v, g, amount = (part[name] for name in ("q", "k", "v", "g", "beta"))
        steps = walk(s, q, k, v, g, amount, part.get("w"))
        for at, (o, after) in enumerate(steps):
            s = after
            z = part["z"][:, at] if "z" in part else None
            o = skip_and_gate(o, v[:, at, 0], options["D"], z)
            if live is None:
                to[:, at], every[:, at] = o.to(io), s.to(states.dtype)
            else:
                to[live, at], every[live, at] = o[live].to(io), s[live].to(states.dtype)
        if slots is None:
            final[rows] = s
    return out
