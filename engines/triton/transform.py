"""Launches of the gate transforms. Nothing here checks its arguments: `lagraph.ops.gate` does."""

from __future__ import annotations

import torch

from lagraph.engines.triton.bound import Launcher
from lagraph.engines.triton.conv import device_of, power_of_2
from lagraph.engines.triton.kernels.transform import gate_backward_kernel, gate_kernel

__all__ = ["backward", "forward"]

# Elements of a program's tile, and the most partial sums of a parameter's gradient.
TILE = 2048
PARTS = 512


_FORWARD, _BACKWARD = Launcher(gate_kernel), Launcher(gate_backward_kernel)


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """[B, T, H] or [B, T, H, K] as rows, and the strides of row, head and channel."""
    x = x.flatten(0, 1)
    return x, (x.stride(0), x.stride(1), x.stride(2) if x.dim() == 3 else 0)


def _shape(raw: torch.Tensor) -> tuple[int, int, int, int, int]:
    """Rows, columns, channels a head, and the tile."""
    channels = raw.shape[3] if raw.dim() == 4 else 1
    columns = raw.shape[2] * channels
    wide = min(power_of_2(columns), 256)
    return raw.shape[0] * raw.shape[1], columns, channels, TILE // wide, wide


def forward(
    raw: torch.Tensor, a_log: torch.Tensor, bias: torch.Tensor, lower_bound: float | None
) -> torch.Tensor:
    """Log decays, fp32, in the shape of raw [B, T, H] or [B, T, H, K]; softplus without a bound."""
    out = torch.empty(raw.shape, dtype=torch.float32, device=raw.device)
    rows, columns, channels, tall, wide = _shape(raw)
    if out.numel():
        x, strides = _rows(raw)
        with device_of(raw):
            _FORWARD(
                -(-rows // tall) * -(-columns // wide),
                (x, a_log.contiguous(), bias.contiguous(), out),
                (rows,),
                (float(lower_bound or 0.0), *strides),
                {"COLUMNS": columns, "D": channels, "BOUNDED": lower_bound is not None,
                 "BR": tall, "BC": wide, "num_warps": 4},
            )  # fmt: skip
    return out


def backward(
    raw: torch.Tensor,
    a_log: torch.Tensor,
    bias: torch.Tensor,
    d_out: torch.Tensor,
    lower_bound: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of raw, a_log and bias in their dtypes."""
    d_raw = torch.empty(raw.shape, dtype=raw.dtype, device=raw.device)
    rows, columns, channels, tall, wide = _shape(raw)
    if not d_raw.numel():
        return d_raw, torch.zeros_like(a_log), torch.zeros_like(bias)
    parts = min(-(-rows // tall), PARTS)
    sums = torch.empty((2, parts, columns), dtype=torch.float32, device=raw.device)
    (x, strides), (d, d_strides) = _rows(raw), _rows(d_out)
    with device_of(raw):
        _BACKWARD(
            parts * -(-columns // wide),
            (x, a_log.contiguous(), bias.contiguous(), d, d_raw, sums[0], sums[1]),
            (rows,),
            (float(lower_bound or 0.0), *strides, *d_strides),
            {"COLUMNS": columns, "D": channels, "BOUNDED": lower_bound is not None, "BR": tall,
             "BC": wide, "PARTS": parts, "num_warps": 4},
        )  # fmt: skip
    # Each a tensor of its own: compiled code takes results to start where their storage does.
    d_alog, d_bias = sums[0].sum(0).view(-1, channels).sum(1), sums[1].sum(0)
    return d_raw, d_alog.to(a_log.dtype), d_bias.view(bias.shape).to(bias.dtype)
