"""One-token decoding in plain PyTorch: what the kernel is measured against, on any device.

x holds the operator's tensors by name, `call` its options; `heads` counts the heads of k (Mamba-2:
of B). The step runs in fp32, or in fp64 for fp64 rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from lagraph.engines.eager.gates import guard

if TYPE_CHECKING:
    from types import SimpleNamespace

    from torch import Tensor

__all__ = ["decode"]


def _sections(
    x: dict[str, Any], call: SimpleNamespace, heads: int, wide: Any
) -> tuple[Tensor, ...]:
    """q [B, H, K], keys [B, n, H, K] and values [B, n, H, V], each head of H with its own."""
    _, H, V, K = x["state_cache"].shape
    packed, n = x["packed"].to(wide), call.n
    if call.family == "mamba2":
        v, k, q = packed.split([H * V, heads * K, heads * K], dim=1)
    else:
        q, k, v = packed.split([heads * K, n * heads * K, n * H * V], dim=1)
    group = H // heads
    q = q.view(-1, heads, K).repeat_interleave(group, dim=1)
    k = k.view(-1, n, heads, K).repeat_interleave(group, dim=2)
    return q, k, v.reshape(-1, n, H, V)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _decay(x: dict[str, Any], call: SimpleNamespace, wide: Any) -> tuple[Tensor, Tensor]:
    """Log decay [B, H] or [B, H, K], and Mamba-2's step (else the same)."""
    g = x["gate"][0].to(wide)
    if x["dt_bias"] is not None:
        g = g + x["dt_bias"].to(wide)
    if call.family == "mamba2":
        dt = F.softplus(g, threshold=40.0) if call.dt_softplus else g
        dt = dt.clamp(call.dt_min, call.dt_max)
        return x["A"].to(wide) * dt, dt
    amplitude = x["A_log"].to(wide).exp().clamp(max=3e38)
    amplitude = amplitude.view(-1, *[1] * (g.dim() - 2))
    if call.gate == "softplus":
        g = -amplitude * F.softplus(g, threshold=40.0)
    else:
        g = call.lower * torch.sigmoid(amplitude * g)
    return g, g


def decode(x: dict[str, Any], call: SimpleNamespace, heads: int) -> None:
    """The step in plain PyTorch, fp32 or wider."""
    pool, index, has = x["state_cache"], x["state_indices"].long(), x["has_initial_state"]
    if pool.shape[0] == 0:  # all padding
        x["out"].zero_()
        return
    wide = torch.float64 if x["packed"].dtype == torch.float64 else torch.float32
    delta = call.family != "mamba2"
    q, k, v = _sections(x, call, heads, wide)
    if delta:
        q, k = _unit(q), _unit(k)
    g, dt = _decay(x, call, wide)
    live = (index > 0) & (index < pool.shape[0])
    known = live if has is None else live & has
    slots = index.clamp(0, max(pool.shape[0] - 1, 0))
    S = torch.where(known[:, None, None, None], pool[slots], 0.0).to(wide)  # [B, H, V, K]
    S = S * (g.exp()[:, :, None, :] if g.dim() == 3 else g.exp()[:, :, None, None])
    beta = x["beta"]
    if beta is not None:
        beta = torch.sigmoid(beta[0].to(wide)) * (2.0 if call.double else 1.0)
    for i in range(call.n):
        k_i, v_i = k[:, i], v[:, i]
        if call.family == "gdn2":
            if call.guard:
                beta = guard(beta, k_i, g, x["packed"].dtype)
            u = x["w"][0].to(wide) * v_i - (S @ (beta * k_i)[..., None])[..., 0]
        elif delta:
            b_i = beta[:, i] if call.family == "gdp" else beta
            u = b_i[..., None] * (v_i - (S @ k_i[..., None])[..., 0])
        else:
            u = dt[..., None] * v_i
        S = S + u[..., None] * k_i[..., None, :]
    o = (S @ q[..., None])[..., 0]
    if delta:
        o = o * (pool.shape[3] ** -0.5 if call.scale is None else call.scale)
    if x["D"] is not None:
        o = o + x["D"].to(wide).view(pool.shape[1], -1) * v[:, 0]
    if x["z"] is not None:
        o = o * F.silu(x["z"][0].to(wide))
    x["out"].copy_(torch.where(live[:, None, None], o, 0.0)[None])
    pool[slots[live]] = S[live].to(pool.dtype)
