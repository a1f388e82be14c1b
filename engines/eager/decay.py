"""Decays inside a chunk, for gates of one number per head and of one per key channel.

Shapes: B chunks, h key heads, HO heads of gates and state, C rows of a chunk, K key channels.
Exponents are sums of log decays over the very rows that they span, so that they are at most 0
wherever g <= 0, keep their relative accuracy, and leave nothing to cancel in the gates' gradients.
Both classes have
    total          log decay over the chunk [B, HO, 1, 1] or [B, HO, 1, K]
    scores(b, *a)  for every a, sum_d a_id b_jd decay_d(j -> i) for i >= j, else 0: [B, HO, C, C]
    enter(a)       a_i decay(entry -> i), as rows and a factor [B, HO, C, 1] that they still lack
    leave(k)       k_i decay(i -> end), likewise
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

__all__ = ["HeadDecay", "KeyDecay", "bounded_exp"]


def bounded_exp(x: torch.Tensor, share: float = 1.0) -> torch.Tensor:
    """exp(x), kept finite: for states that grow, inf times an erased 0 would be NaN.

    share: of a product of exponentials that has to be finite, this one's part.
    """
    return x.clamp(max=share * (700.0 if x.dtype == torch.float64 else 80.0)).exp()


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
        # Above the diagonal the exponents are positive, but bounded: the zeros there are exact.
        gaps = (sums[..., :, None] - sums[..., None, :]).to(dtype)
        self.pairs = bounded_exp(gaps).tril()

    def scores(self, b: torch.Tensor, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See the module."""
        pairs = self.pairs.unflatten(1, (b.shape[1], -1))
        return tuple(((a @ b.mT).unsqueeze(2) * pairs).flatten(1, 2) for a in rows)

    def enter(self, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See the module."""
        return a, self.entered

    def leave(self, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See the module."""
        return k, self.left


@lru_cache(maxsize=32)
def _spans(rows: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Which gates make up the exponents of `KeyDecay`, as zeros and ones.

    [C, C]: rows up to and with i. [C, C]: rows after i. [log2(C) C, C]: for blocks of 2, 4, .., C
    rows whose second half starts at row m, rows m to i if i is in it, else rows after i before m.
    """
    # Kept for later calls, which may record gradients.
    with torch.inference_mode(False):
        i = torch.arange(rows, device=device)[:, None]
        t = torch.arange(rows, device=device)[None, :]
        halves = [torch.empty(0, rows, dtype=torch.bool, device=device)]
        for level in range(rows.bit_length() - 1):
            m = (i >> (level + 1) << (level + 1)) + (1 << level)
            halves.append(torch.where(i >= m, (t >= m) & (t <= i), (t > i) & (t < m)))
        return (t <= i).to(dtype), (t > i).to(dtype), torch.cat(halves).to(dtype)


class SpanExp(torch.autograd.Function):
    """exp(spans @ g), [B, HO, R, K] for spans [R, C] and g [B, HO, C, K]."""

    @staticmethod
    def forward(ctx: Any, g: torch.Tensor, spans: torch.Tensor, share: float) -> torch.Tensor:
        decays = bounded_exp(spans @ g, share)
        ctx.save_for_backward(decays, spans)
        return decays

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        decays, spans = ctx.saved_tensors
        return spans.mT @ (grad * decays), None, None


class Pairs(torch.autograd.Function):
    """Scores of `KeyDecay` between b and each a, all [B, HO, C, K], for decays to the rows between
    halves [B, HO, log2(C) C, K]."""

    @staticmethod
    def forward(ctx: Any, halves: torch.Tensor, b: torch.Tensor, *rows: torch.Tensor) -> Any:
        ctx.save_for_backward(halves, b, *rows)
        scores = tuple(b.new_zeros(*b.shape[:3], b.shape[2]) for _ in rows)
        for p, a in zip(scores, rows, strict=True):
            p.diagonal(dim1=-2, dim2=-1).copy_((a * b).sum(-1))
        for level in range(b.shape[2].bit_length() - 1):
            low, high = _halves(_level(halves, level, b.shape[2]), level)
            right = (_halves(b, level)[1] * high).mT
            for p, a in zip(scores, rows, strict=True):
                _corners(p, level).copy_((_halves(a, level)[0] * low) @ right)
        return scores

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        halves, b, *rows = ctx.saved_tensors
        size = b.shape[2]
        diagonals = [dp.diagonal(dim1=-2, dim2=-1)[..., None] for dp in grads]
        das = [d * b for d in diagonals]
        db = sum(d * a for d, a in zip(diagonals, rows, strict=True))
        dhalves = torch.empty_like(halves)
        for level in range(size.bit_length() - 1):
            low, high = _halves(_level(halves, level, size), level)
            dlow, dhigh = _halves(_level(dhalves, level, size), level)
            b_high = _halves(b, level)[1]
            right = b_high * high
            dright, dleft_a = torch.zeros_like(right), torch.zeros_like(right)
            for dp, a, da in zip(grads, rows, das, strict=True):
                corner, a_low = _corners(dp, level), _halves(a, level)[0]
                dleft = corner @ right
                dright += corner.mT @ (a_low * low)
                dleft_a.addcmul_(dleft, a_low)
                _halves(da, level)[0].addcmul_(dleft, low)
            dlow.copy_(dleft_a)
            torch.mul(dright, b_high, out=dhigh)
            _halves(db, level)[1].addcmul_(dright, high)
        return dhalves, db, *das


def _level(halves: torch.Tensor, level: int, size: int) -> torch.Tensor:
    return halves[:, :, level * size : (level + 1) * size]


def _halves(x: torch.Tensor, level: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Lower (later) and upper (earlier) halves of blocks of 2^(level + 1) rows, each
    [B, HO, blocks, 2^level, K], of x [B, HO, C, K]."""
    upper, lower = x.unflatten(2, (-1, 2, 1 << level)).unbind(3)
    return lower, upper


def _corners(p: torch.Tensor, level: int) -> torch.Tensor:
    """Where lower halves meet upper halves in p [B, HO, C, C]: [B, HO, blocks, 2^l, 2^l]."""
    shape = (-1, 2, 1 << level)
    blocks = p.unflatten(3, shape).unflatten(2, shape).diagonal(dim1=2, dim2=5)
    return blocks[:, :, 1, :, 0].movedim(-1, 2)


class KeyDecay:
    """Decays of one number per head and key channel: g [B, HO, C, K]; h is HO.

    The lower half of a block of rows meets the upper half through the row m between them:
    decay(j -> i) = decay(j -> m) decay(m -> i) are two factors for the operands of one product,
    neither of which grows. Halving goes on down to single rows, for log2(C) exponentials a gate.
    """

    def __init__(self, g: torch.Tensor) -> None:
        upto, after, halves = _spans(g.shape[2], g.dtype, g.device)
        self.total = upto[-1:] @ g
        self.entered, self.left = SpanExp.apply(g, upto, 1.0), SpanExp.apply(g, after, 1.0)
        self.halves = SpanExp.apply(g, halves, 0.5)

    def scores(self, b: torch.Tensor, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See the module."""
        return Pairs.apply(self.halves, b, *rows)

    def enter(self, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See the module."""
        return a * self.entered, None

    def leave(self, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See the module."""
        return k * self.left, None
