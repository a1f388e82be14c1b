"""The algebra of chunks: the triangular solve, the walk from chunk to chunk, the outputs.

With erase vectors e_i, writes u_i, keys k_i and queries q_i, the recurrence of every family is
    S <- S diag(a_i);   r_i = u_i - S e_i;   S <- S + r_i k_i^T;   o_i = S q_i
where a family without the delta rule has no e. For a chunk that starts from S, with decays as D,
    (I + A) R = U - (D E) S^T,   A_ij = e_i D_ij k_j for i > j
    O = (D Q) S^T + P R,         P_ij = q_i D_ij k_j for i >= j
    S <- D S + R^T (D K)
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch

from lagraph.engines.eager.decay import HeadDecay, KeyDecay, bounded_exp

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Update", "run_chunks"]

LEAF = 16  # rows of the triangles that are solved by substitution


@dataclass(slots=True)
class Update:
    """What a family's step makes of the tokens of B chunks.

    q, k: [B, h, C, K]; q is None where nothing is read.
    g: log decays [B, HO, C] or [B, HO, C, K].
    write: u [B, HO, C, V].
    erase: e [B, h, C, K], or None without the delta rule.
    amount: a factor of erase [B, HO, C, 1], or None if erase holds it.
    """

    q: torch.Tensor | None
    k: torch.Tensor
    g: torch.Tensor
    write: torch.Tensor
    erase: torch.Tensor | None = None
    amount: torch.Tensor | None = None


def _group(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, HO, C, V] to [B, h, C, HO/h * V], to serve a group of heads by one product."""
    if x.shape[1] == heads:
        return x
    return x.unflatten(1, (heads, -1)).transpose(2, 3).flatten(3)


def _stack(s: torch.Tensor, heads: int) -> torch.Tensor:
    """States [B, HO, V, K] as [B, h, HO/h * V, K]."""
    return s.unflatten(1, (heads, -1)).flatten(2, 3)


def _write(r: torch.Tensor, k: torch.Tensor, left: torch.Tensor | None) -> torch.Tensor:
    """(left r)^T k, [B, h, HO/h * V, K], for r [B, HO, C, V] and k [B, h, C, K]."""
    return _group(r if left is None else r * left, k.shape[1]).mT @ k


def _add_write(
    s: torch.Tensor, r: torch.Tensor, k: torch.Tensor, left: torch.Tensor | None
) -> None:
    """Add `_write` to states [B, HO, V, K]."""
    r = _group(r if left is None else r * left, k.shape[1])
    s.view(-1, r.shape[3], s.shape[3]).baddbmm_(r.flatten(0, 1).mT, k.flatten(0, 1))


def _read(k: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """k s^T, [B, HO, C, V], for k [B, h, C, K] and s [B, HO, V, K]."""
    y = k @ _stack(s, k.shape[1]).mT
    if k.shape[1] == s.shape[1]:
        return y
    return y.unflatten(3, (-1, s.shape[2])).transpose(2, 3).flatten(1, 2)


def _split(
    grad: torch.Tensor, x: torch.Tensor, factor: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of x [B, h, C, K] and factor [B, HO, C, 1] from that of their product."""
    if factor is None:
        return grad, None
    split = (x.shape[1], -1)
    dfactor = (grad.unflatten(1, split) * x.unsqueeze(2)).flatten(1, 2).sum(-1, keepdim=True)
    return (grad * factor).unflatten(1, split).sum(2), dfactor


def _inverse(a: torch.Tensor) -> torch.Tensor:
    """(I + A)^-1 for A [B, C, C], of which only what is below the diagonal counts.

    Blocks on the diagonal by substitution, what is below them from two products.
    """
    half = a.shape[1] // 2
    if half < LEAF:
        eye = torch.eye(a.shape[1], dtype=a.dtype, device=a.device).expand_as(a)
        return torch.linalg.solve_triangular(a, eye, upper=False, unitriangular=True)
    blocks = torch.cat((a[:, :half, :half], a[:, half:, half:]))
    upper, lower = _inverse(blocks).chunk(2)
    inverse = torch.zeros_like(a)
    inverse[:, :half, :half], inverse[:, half:, half:] = upper, lower
    torch.neg(lower @ (a[:, half:, :half] @ upper), out=inverse[:, half:, :half])
    return inverse


class Solve(torch.autograd.Function):
    """(I + A)^-1 u and (I + A)^-1 w; of A [B, HO, C, C] what is below the diagonal counts.

    By substitution: Neumann series and Newton steps break for correlated keys.
    """

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, u: torch.Tensor, w: torch.Tensor) -> Any:
        inverse = _inverse(a.flatten(0, 1)).view_as(a)
        u, w = inverse @ u, inverse @ w
        ctx.save_for_backward(inverse, u, w)
        return u, w

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        inverse, u, w = ctx.saved_tensors
        du, dw = (inverse.mT @ grad for grad in grads)
        return (du @ u.mT).add_(dw @ w.mT).tril_(-1).neg_(), du, dw


class Scan(torch.autograd.Function):
    """Walks the state from chunk to chunk.

    u [B, HO, C, V]; w [B, HO, C, K] or None; k [B, h, C, K]; left [B, HO, C, 1] or None;
    total [B, HO, 1, 1 or K]; s [N, HO, V, K]; counts as in `Tile`. Returns r = u - w S^T (None
    without w), the states that chunks are entered with [B, HO, V, K], and the states at the end.
    """

    @staticmethod
    def forward(
        ctx: Any,
        u: torch.Tensor,
        w: torch.Tensor | None,
        k: torch.Tensor,
        left: torch.Tensor | None,
        total: torch.Tensor,
        s: torch.Tensor,
        counts: Sequence[int],
    ) -> Any:
        # Applied twice: where exp(total) overflows, a state of 0 remains 0.
        half = bounded_exp(0.5 * total)
        factors: tuple[torch.Tensor, ...] = (half, half)
        if total.device.type == "cpu" and (whole := half * half).isfinite().all():
            factors = (whole,)
        # Level after level; a level's new states land where the next level reads them.
        states = s.new_empty(len(u) + len(s), *s.shape[1:])
        states[: len(s)] = s
        end = torch.empty_like(s)
        r = u if w is None else torch.empty_like(u)
        writes = _write(u, k, left) if w is None else u  # at once, or level by level
        levels = list(pairwise(accumulate(counts, initial=0)))
        for (a, b), rest in zip(levels, (*counts[1:], 0), strict=True):
            now, new = states[a:b], states[b : 2 * b - a]
            torch.mul(now, factors[0][a:b], out=new)
            for factor in factors[1:]:
                new *= factor[a:b]
            # A state that has outgrown the dtype stays infinite, whatever is written to it.
            grown = new.clone() if len(factors) > 1 else None
            if w is None:
                new += writes[a:b].view_as(new)
            else:
                torch.baddbmm(u[a:b].flatten(0, 1), w[a:b].flatten(0, 1), now.flatten(0, 1).mT,
                              alpha=-1, out=r[a:b].flatten(0, 1))  # fmt: skip
                _add_write(new, r[a:b], k[a:b], None if left is None else left[a:b])
            if grown is not None:
                torch.where(grown.isinf(), grown, new, out=new)
            end[rest : b - a] = new[rest:]
        entry = states[: len(u)]
        ctx.levels = levels
        ctx.save_for_backward(r, w, k, left, half, entry)
        return None if w is None else r, entry, end

    @staticmethod
    def backward(ctx: Any, dr: torch.Tensor, dentry: torch.Tensor, ds: torch.Tensor) -> Any:
        r, w, k, left, half, entry = ctx.saved_tensors
        after = torch.empty_like(entry)  # gradients of the states that chunks end with
        start, du = torch.empty_like(ds), torch.empty_like(r)
        # What ends at a level comes from ds, the rest from the next level.
        for (lower, a), (_, b) in pairwise(ctx.levels):
            after[lower + b - a : a] = ds[b - a : a - lower]
        a, b = ctx.levels[-1]
        after[a:b] = ds[: b - a]
        for index in reversed(range(len(ctx.levels))):
            a, b = ctx.levels[index]
            now = after[a:b]
            lower = ctx.levels[index - 1][0]
            target = after[lower : lower + b - a] if index else start
            back = torch.addcmul(dentry[a:b], now * half[a:b], half[a:b])
            if w is None:
                target.copy_(back)
                continue
            seen = _read(k[a:b], now)
            if left is None:
                torch.add(dr[a:b], seen, out=du[a:b])
            else:
                torch.addcmul(dr[a:b], seen, left[a:b], out=du[a:b])
            torch.sub(back, du[a:b].mT @ w[a:b], out=target)
        if w is None:
            du, dw = _read(k, after) if left is None else _read(k, after) * left, None
        else:
            dw = (du @ entry).neg_()
        dk, dleft = _split(r @ after, k, left)
        dtotal = (entry * after).sum(2, keepdim=True)
        if half.shape[-1] == 1:
            dtotal = dtotal.sum(-1, keepdim=True)
        return du, dw, dk, dleft, dtotal * half * half, start, None


class Output(torch.autograd.Function):
    """entered (q S^T) + p r: q [B, h, C, K], entered [B, HO, C, 1] or None, S [B, HO, V, K],
    p [B, HO, C, C], r [B, HO, C, V]. `blank` leaves out the values, if only gradients matter."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        entered: torch.Tensor | None,
        s: torch.Tensor,
        p: torch.Tensor,
        r: torch.Tensor,
        blank: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(q, entered, s, p, r)
        if blank:
            return r.new_zeros(()).expand_as(r)
        read = _read(q, s)
        return (p @ r).add_(read if entered is None else read.mul_(entered))

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        q, entered, s, p, r = ctx.saved_tensors
        ds = _write(dy, q, entered).view_as(s)
        dq, dentered = _split(dy @ s, q, entered)
        return dq, dentered, ds, dy @ r.mT, p.mT @ dy, None


def run_chunks(
    x: Update, s: torch.Tensor, counts: Sequence[int], blank: bool = False
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Outputs [B, HO, C, V] of a tile's chunks (None without q), the states [B, HO, V, K] that
    chunks are entered with, and those at the end; s [N, HO, V, K] enters the tile."""
    decay = HeadDecay(x.g) if x.g.dim() == 3 else KeyDecay(x.g)
    rows = [a for a in (x.erase, x.q) if a is not None]
    scores = list(decay.scores(x.k, *rows)) if rows else []
    r, w = x.write, None
    if x.erase is not None:
        a, (w, factor) = scores.pop(0), decay.enter(x.erase)
        if x.amount is not None:
            a, factor = a * x.amount, x.amount if factor is None else factor * x.amount
        if factor is not None:
            w = (w.unsqueeze(2) * factor.unflatten(1, (w.shape[1], -1))).flatten(1, 2)
        r, w = Solve.apply(a, r, w)
    solved, entry, s = Scan.apply(r, w, *decay.leave(x.k), decay.total, s, counts)
    if x.q is None:
        return None, entry, s
    r = r if solved is None else solved
    return Output.apply(*decay.enter(x.q), entry, scores[0], r, blank), entry, s
