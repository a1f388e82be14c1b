"""Gates in the forms that nodes name: log decays, update strengths, time steps, the beta guard.

Shapes: B chunks, HO heads, C rows of a chunk, K key channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from lagraph.engines.eager.decay import bounded_exp

if TYPE_CHECKING:
    from types import SimpleNamespace

__all__ = ["guard", "log_decay", "strength", "time_step"]

LINEAR_FLOOR = 1e-10
LOG_FLOOR = -800.0  # exp() of it is 0 in fp64 too; keeps -inf out of the sums


class Sigmoid(torch.autograd.Function):
    """sigmoid(x), with a slope that keeps its digits where the value rounds to 1."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * torch.sigmoid(x) * torch.sigmoid(-x)


def _per_head(x: torch.Tensor) -> torch.Tensor:
    """A parameter [HO] or [HO, K] against gates [B, HO, C] or [B, HO, C, K]."""
    return x[:, None] if x.dim() == 1 else x[:, None, :]


def log_decay(x: SimpleNamespace, options: SimpleNamespace) -> torch.Tensor:
    """Log decays from the gate x.g [B, HO, C] or [B, HO, C, K], in the form that options name."""
    g = x.g
    if options.safe_gate:
        g = g if x.dt_bias is None else g + _per_head(x.dt_bias)
        # Beyond exp(80) the gate is saturated: a finite amplitude spares 0 * inf.
        amp = 1.0 if x.a_log is None else bounded_exp(x.a_log).view(-1, *[1] * (g.dim() - 2))
        if x.g.dim() == 3:
            g = -amp * F.softplus(g, threshold=40.0)
        else:
            g = options.gate_lower_bound * Sigmoid.apply(amp * g)
    elif options.gate_domain == "linear":
        g = g.clamp(min=LINEAR_FLOOR).log()
    return g.clamp(min=LOG_FLOOR)


def time_step(x: SimpleNamespace, options: SimpleNamespace) -> torch.Tensor:
    """Mamba-2's dt' = clamp(softplus(dt + dt_bias), dt_min, dt_max), [B, HO, C]."""
    dt = x.g if x.dt_bias is None else x.g + _per_head(x.dt_bias)
    dt = F.softplus(dt, threshold=40.0) if options.dt_softplus else dt
    return dt.clamp(options.dt_min, options.dt_max)


def strength(beta: torch.Tensor, options: SimpleNamespace) -> torch.Tensor:
    """Update strengths from beta, of any shape."""
    if not options.use_beta_sigmoid:
        return beta
    return Sigmoid.apply(beta) * (2.0 if options.allow_neg_eigval else 1.0)


@torch.no_grad()
def guard(b: torch.Tensor, k: torch.Tensor, g: torch.Tensor, io_dtype: torch.dtype) -> torch.Tensor:
    """GDN-2's beta guard: rows of b that expand the state go to their key-weighted mean.

    b, k, g: [B, HO, C, K], k normalized, g the log decays.
    """
    p = k.square()
    growth = (-2.0 * g.amax(-1, keepdim=True)).exp()
    a0 = p.sum(-1, keepdim=True)

    def spread(row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a1 = (row * p).sum(-1, keepdim=True)
        a2 = (row.square() * p).sum(-1, keepdim=True)
        excess = (a0 * a2 - a1.square()).clamp(min=0.0)
        limit = ((growth - 1.0) * (1.0 - (1.0 - a1).square() / growth)).clamp(min=0.0)
        return excess, limit, a1 / a0, a0 * a2 + a1.square()

    excess, limit, mean, _ = spread(b)
    eta = ((1.0 - 1.0 / 32.0) * limit / excess.clamp(min=1e-30)).sqrt().clamp(0.0, 1.0)
    pulled = mean + eta * (b - mean)
    if io_dtype in (torch.float16, torch.bfloat16):
        pulled = pulled.to(io_dtype).to(b.dtype)
        excess2, limit2, mean2, size = spread(pulled)
        slack = 4.0 * (2.0**-10 if io_dtype == torch.float16 else 2.0**-7) * size
        pulled = torch.where(excess2 > limit2 + slack, mean2, pulled)
    return torch.where((a0 > 1e-20) & (excess > limit), pulled, b)
