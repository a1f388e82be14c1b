"""Decoding in plain PyTorch: what the kernels are measured against, on any device.

x holds the operator's tensors by name, `call` its options. A step runs in fp32, or in fp64 for fp64
rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from lagraph.engines.eager.gates import guard
from lagraph.engines.eager.recurrent import expand, skip_and_gate, start, step_size, walk

if TYPE_CHECKING:
    from types import SimpleNamespace

    from torch import Tensor

__all__ = ["decode"]


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _log_decay(g: Tensor, a_log: Tensor, bias: Tensor, call: SimpleNamespace) -> Tensor:
    """Of raw gates [B, T, H] or [B, T, H, K]."""
    g = g + bias.to(g)
    amplitude = a_log.to(g).exp().clamp(max=3e38).view(-1, *[1] * (g.dim() - 3))
    if call.gate == "softplus":
        return -amplitude * F.softplus(g, threshold=40.0)
    return call.lower * torch.sigmoid(amplitude * g)


def decode(x: dict[str, Any], call: SimpleNamespace, q: Tensor, k: Tensor, v: Tensor) -> None:
    """One token of B rows, or several of [B, T] rows; see `lagraph.ops.decode`.

    q [..., heads, K], k [..., n, heads, K] and v [..., n, H, V] are the sections of the rows.
    """
    pool, packed, out, states = x["state_cache"], x["packed"], x["out"], x["states"]
    slots = x["state_indices"]
    if pool.shape[0] == 0:  # all padding
        out.zero_()
        return
    wide = torch.float64 if packed.dtype == torch.float64 else torch.float32
    _, H, _, K = pool.shape
    delta = call.family != "mamba2"
    rows = {name: x[name] for name in ("gate", "beta", "w", "z", "out")}
    if packed.dim() == 2:  # [1, B, ...] beside rows [B, width]: one token each
        q, k, v = (y[:, None] for y in (q, k, v))
        rows = {name: None if y is None else y.transpose(0, 1) for name, y in rows.items()}
    tokens: list[Any] = [None if rows[n] is None else rows[n].to(wide) for n in list(rows)[:4]]
    g, beta, w, z = tokens
    q, k, v = expand(q.to(wide), H), expand(k.to(wide), H), v.to(wide)
    if delta:
        q, k = _unit(q) * (K**-0.5 if call.scale is None else call.scale), _unit(k)
        g = _log_decay(g, x["A_log"], x["dt_bias"], call)
        amount = torch.sigmoid(beta) * (2.0 if call.double else 1.0)
        if call.guard:
            amount = guard(amount, k[:, :, 0], g, packed.dtype)
        if call.family in ("gdn", "kda"):
            amount = amount[:, :, None]
    else:
        amount = step_size(g, x["dt_bias"], vars(call))
        g = x["A"].to(wide) * amount
    live = (slots > 0) & (slots < pool.shape[0])
    s = start(pool, slots, x["has_initial_state"], wide)
    for t, (o, after) in enumerate(walk(s, q, k, v, g, amount, w)):
        s = after
        o = skip_and_gate(o, v[:, t, 0], x["D"], None if z is None else z[:, t])
        rows["out"][:, t] = torch.where(live[:, None, None], o, 0.0).to(packed.dtype)
        if states is not None:
            states[live, t] = s[live].to(states.dtype)
    if states is None:
        pool[slots.long()[live]] = s[live].to(pool.dtype)
