"""Decays inside a chunk, for gates of one number per head and of one per key channel.

Shapes: B chunks, h key heads, HO heads of gates and state, C rows of a chunk, K key channels.
Exponents are sums of log decays over the very rows that they span, so that they are at most 0
wherever g <= 0, keep their relative accuracy, and leave nothing to cancel in the gates' gradients.
Both classes have the same methods:
    scores(a, b)   P_ij = sum_d a_id b_jd decay_d(j -> i) for i >= j, else 0     [B, HO, C, C]
    enter(a)       a_i decay(entry -> i), as rows and a factor [B, HO, C, 1] that they still lack
    leave(k)       k_i decay(i -> end), likewise
    total          log decay over the chunk                            [B, HO, 1, 1] or [B, HO, 1, K]
"""

from __future__ import annotations

from functools import lru_cache

import torch

__all__ = ["HeadDecay", "KeyDecay", "bounded_exp", "group", "ungroup"]


def bounded_exp(x: torch.Tensor) -> torch.Tensor:
    """exp(x), kept finite: for states that grow, inf times an erased 0 would be NaN."""
    return x.clamp(max=700.0 if x.dtype == torch.float64 else 80.0).exp()


def group(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, HO, C, V] to [B, h, C, HO/h * V], to serve the heads of a group by one product."""
    if x.shape[1] == heads:
        return x
    return x.unflatten(1, (heads, -1)).transpose(2, 3).flatten(3)


def ungroup(x: torch.Tensor, width: int) -> torch.Tensor:
    """[B, h, C, HO/h * V] to [B, HO, C, V] of V = width."""
    if x.shape[3] == width:
        return x
    return x.unflatten(3, (-1, width)).transpose(2, 3).flatten(1, 2)


class HeadDecay:
    """Decays of one number per head: g [B, HO, C]. Keys and queries keep their own heads."""

    def __init__(self, g: torch.Tensor) -> None:
        dtype, device, rows = g.dtype, g.device, torch.arange(g.shape[-1], device=g.device)
        # In fp64, which is free for so few numbers, a difference of sums is as good as a sum.
        g = g if device.type == "mps" else g.double()
        after = rows[:, None] > rows
        sums = g @ (~after).to(g.dtype)
        self.total = sums[..., -1, None, None].to(dtype)
        self.entered = bounded_exp(sums.to(dtype))[..., None]
        self.left = bounded_exp((g @ after.to(g.dtype)).to(dtype))[..., None]
        above = torch.zeros(after.shape, dtype=g.dtype, device=device)
        above.masked_fill_(rows[:, None] < rows, -torch.inf)
        gaps = torch.where(after, sums[..., :, None] - sums[..., None, :], above)
        self.pairs = bounded_exp(gaps.to(dtype))

    def scores(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """See the module."""
        dots = (a @ b.mT).unsqueeze(2)
        return (dots * self.pairs.unflatten(1, (a.shape[1], -1))).flatten(1, 2)

    def enter(self, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See the module."""
        return a, self.entered

    def leave(self, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See the module."""
        return k, self.left


@lru_cache(maxsize=32)
def _spans(rows: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Which gates make up the exponents of `KeyDecay`, as zeros and ones [2 + log2 C, C, C].

    Part 0: rows up to and with i. Part 1: rows after i. Then, for blocks of s = 2, 4, .., C rows
    whose second half starts at row m: rows m to i if i is in it, else rows after i and before m.
    """
    i = torch.arange(rows, device=device)[:, None]
    t = torch.arange(rows, device=device)[None, :]
    parts = [t <= i, t > i]
    size = 2
    while size <= rows:
        m = i // size * size + size // 2
        parts.append(torch.where(i >= m, (t >= m) & (t <= i), (t > i) & (t < m)))
        size *= 2
    return torch.stack(parts).to(dtype)


class KeyDecay:
    """Decays of one number per head and key channel: g [B, HO, C, K]; h is HO.

    The lower half of a block of rows meets the upper half through the row m between them:
    decay(j -> i) = decay(j -> m) decay(m -> i) are two factors for the operands of one product,
    neither of which grows. Halving goes on down to single rows, for log2(C) exponentials a gate.
    """

    def __init__(self, g: torch.Tensor) -> None:
        rows = g.shape[-2]
        spans = _spans(rows, g.dtype, g.device)
        self.total = spans.new_ones(1, rows) @ g
        parts = bounded_exp((spans.flatten(0, 1) @ g).unflatten(2, (-1, rows)))
        self.entered, self.left, *self.halves = parts.unbind(2)

    def scores(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """See the module."""
        p = (a * b).sum(-1)[..., None, None]
        for half in self.halves:
            shape = (-1, 2, p.shape[-1])
            low, high, half = (x.unflatten(2, shape).unbind(3) for x in (a, b, half))
            corner = (low[1] * half[1]) @ (high[0] * half[0]).mT
            top = torch.cat([p[:, :, 0::2], torch.zeros_like(corner)], -1)
            p = torch.cat([top, torch.cat([corner, p[:, :, 1::2]], -1)], -2)
        return p.squeeze(2)

    def enter(self, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See the module."""
        return a * self.entered, None

    def leave(self, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See the module."""
        return k * self.left, None
