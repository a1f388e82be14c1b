"""One step per family: from gathered tokens to an `Update`. A new delta rule needs one more.

A step reads x: q, k [B, h, C, K], normalized and scaled where asked, on the heads h that the
family's gate needs; v [B, HO, C, V]; g, beta, w, z [B, HO, C, ...]; parameters [HO, ...]. What a
node does not have is None. All are in the dtype of the computation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from lagraph.engines.eager.chunk import Update
from lagraph.engines.eager.gates import guard, log_decay, strength, time_step

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import SimpleNamespace

__all__ = ["FAMILIES", "Family"]


def delta_rule(x: SimpleNamespace, options: SimpleNamespace) -> Update:
    """GDN, KDA, GDP: S += beta (v - S k) k^T."""
    beta = strength(x.beta, options).unsqueeze(-1)
    return Update(x.q, x.k, log_decay(x, options), beta * x.v, erase=x.k, amount=beta)


def split_delta_rule(x: SimpleNamespace, options: SimpleNamespace) -> Update:
    """GDN-2: S += (w . v - S (b . k)) k^T."""
    g, b = log_decay(x, options), strength(x.beta, options)
    if options.beta_guard:
        b = b + (guard(b, x.k, g, x.io_dtype) - b).detach()  # gradients pass straight through
    return Update(x.q, x.k, g, x.v if x.w is None else x.w * x.v, erase=b * x.k)


def state_space(x: SimpleNamespace, options: SimpleNamespace) -> Update:
    """Mamba-2: S = exp(A dt') S + dt' x B^T."""
    dt = time_step(x, options)
    return Update(x.q, x.k, x.a[:, None] * dt, dt.unsqueeze(-1) * x.v)


def skip_and_gate(x: SimpleNamespace, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mamba-2's readout: y + D x before and after the gate z sigmoid(z)."""
    if x.d is not None:
        y = y + x.d.view(x.d.shape[0], 1, -1) * x.v
    return y, y if x.z is None else y * F.silu(x.z)


def plain(x: SimpleNamespace, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs as they are."""
    return y, y


class Family(NamedTuple):
    """A family's step, and what happens to its outputs: (x, y) to y before and after a gate."""

    step: Callable[[SimpleNamespace, SimpleNamespace], Update]
    readout: Callable[[SimpleNamespace, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = plain


FAMILIES = {
    "gdn": Family(delta_rule),
    "kda": Family(delta_rule),
    "gdn2": Family(split_delta_rule),
    "gdp": Family(delta_rule),
    "mamba2": Family(state_space, skip_and_gate),
}
