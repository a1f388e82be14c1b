"""Short convolution in plain PyTorch: what the kernels are measured against, on any device.

Every tap reads a row of one table: x's rows, the histories' rows, and a row of zeros. `act` has
`forward` and `derivative` of a pre-activation, or is None. Sums are fp32, or fp64 for fp64 inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["advance", "backward", "forward"]


class Rows(NamedTuple):
    """Which row of a table [x rows | history rows | one zero row] each tap reads.

    taps: [W, rows of x]; final: [N, W - 1]; table: rows of x and of the histories; active: [rows].
    """

    taps: Tensor
    final: Tensor
    active: Tensor


def _rows(B: int, T: int, W: int, cu: Tensor | None, history: bool, device: Any) -> Rows:
    row = torch.arange(B * T, device=device)
    if cu is None:
        ends = (torch.arange(B, device=device) + 1) * T
        starts = ends - T
    else:
        starts, ends = cu[:-1].long(), cu[1:].long()
    N = starts.shape[0]
    seq = torch.searchsorted(ends, row, right=True)
    active = seq < N
    seq = seq.clamp(max=max(N - 1, 0))
    zero = B * T + N * (W - 1) * history
    before = torch.arange(W - 1, -1, -1, device=device)[:, None]  # rows back, by tap

    def source(at: Tensor, start: Tensor, i_n: Tensor, good: Tensor) -> Tensor:
        old = B * T + i_n * (W - 1) + (at - start) + (W - 1) if history else zero
        return torch.where(good, torch.where(at >= start, at, old), zero)

    start = starts[seq] if N else row
    taps = source(row - before, start, seq, active)
    at = ends[:, None] - torch.arange(W - 1, 0, -1, device=device)
    i_n = torch.arange(N, device=device)[:, None]
    return Rows(
        taps, source(at, starts[:, None], i_n, torch.ones_like(at, dtype=torch.bool)), active
    )


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _table(x: Tensor, history: Tensor | None) -> Tensor:
    C = x.shape[-1]
    parts = [x.reshape(-1, C), *([history.reshape(-1, C)] if history is not None else [])]
    return torch.cat([*parts, x.new_zeros(1, C)])


def _pre(table: Tensor, rows: Rows, weight: Tensor) -> Tensor:
    """Pre-activations, wide."""
    pre = table.new_zeros(rows.taps.shape[1], table.shape[1])
    for j, tap in enumerate(rows.taps):
        pre += table[tap] * weight[:, j]
    return pre


def forward(
    x: Tensor, weight: Tensor, cu: Tensor | None, history: Tensor | None, act: Any
) -> tuple[Tensor, Tensor]:
    """Output and final histories; rows past the end are zero."""
    B, T, C = x.shape
    W = weight.shape[1]
    rows = _rows(B, T, W, cu, history is not None, x.device)
    table = _table(x, history)
    y = _pre(_wide(table), rows, _wide(weight))
    if act is not None:
        y = torch.where(rows.active[:, None], act.forward(y), 0.0)
    return y.to(x.dtype).view(B, T, C), table[rows.final]


def backward(
    dy: Tensor, d_final: Tensor | None, x: Tensor, weight: Tensor, cu: Tensor | None,
    history: Tensor | None, act: Any,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """dx, dw and the histories' gradient (None without histories); rows past the end are zero."""
    B, T, C = x.shape
    W = weight.shape[1]
    rows = _rows(B, T, W, cu, history is not None, x.device)
    table, w = _wide(_table(x, history)), _wide(weight)
    dz = torch.where(rows.active[:, None], _wide(dy.reshape(B * T, C)), 0.0)
    if act is not None:
        dz = dz * act.derivative(_pre(table, rows, w))
    d_table = torch.zeros_like(table)
    dw = torch.empty_like(w)
    for j, tap in enumerate(rows.taps):
        d_table.index_add_(0, tap, dz * w[:, j])
        dw[:, j] = (dz * table[tap]).sum(0)
    if d_final is not None:
        d_table.index_add_(0, rows.final.reshape(-1), _wide(d_final.reshape(-1, C)))
    dx = d_table[: B * T].view(B, T, C).to(x.dtype)
    dh = None
    if history is not None:
        dh = d_table[B * T : -1].view(history.shape).to(history.dtype)
    return dx, dw.to(weight.dtype), dh


def advance(
    x: Tensor, weight: Tensor, pool: Tensor, out: Tensor, index: Tensor | None,
    cu: Tensor | None, has: Tensor | None, act: Any,
) -> None:  # fmt: skip
    """Write `out` and advance the pool, in place."""
    N = x.shape[0] if cu is None else cu.shape[0] - 1
    if pool.shape[0] == 0:  # all padding
        out.zero_()
        return
    if index is None:
        slots = torch.arange(N, device=x.device)
        live = torch.ones(N, dtype=torch.bool, device=x.device)
    else:
        live = (index > 0) & (index < pool.shape[0])
        slots = index.long().clamp(0, max(pool.shape[0] - 1, 0))
    known = live if has is None else live & has
    history = torch.where(known[:, None, None], pool[slots], 0.0)
    y, final = forward(x, weight, cu, history, act)
    T = x.shape[1]
    if cu is None:
        keep = live[:, None].expand(N, T)
    else:
        row = torch.arange(T, device=x.device)
        seq = torch.searchsorted(cu[1:].long(), row, right=True)
        keep = torch.cat([live, live.new_zeros(1)])[seq][None]
    out.copy_(torch.where(keep[:, :, None], y, 0.0))
    pool[slots[live]] = final[live]
