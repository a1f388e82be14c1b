"""Launches of the convolution kernels: schedules, scratch, and the current device.

Nothing here checks its arguments (`lagraph.ops.conv` does), and nothing reads a tensor's values.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lagraph.engines.triton.bound import Launcher
from lagraph.engines.triton.kernels.conv import (
    conv_backward_kernel,
    conv_kernel,
    conv_weight_kernel,
    silu,
    silu_slope,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "SILU",
    "Schedule",
    "advance",
    "backward",
    "device_of",
    "forward",
    "power_of_2",
    "schedule",
]

SILU = (silu, silu_slope)
_FORWARD, _BACKWARD = Launcher(conv_kernel), Launcher(conv_backward_kernel)
_WEIGHT = Launcher(conv_weight_kernel)
# Chunks are as long as leaves this many programs.
PROGRAMS = 2048


# Rows that are loaded before the first one is used.
GROUP = 8


@dataclass(frozen=True, slots=True)
class Schedule:
    """threads a program, channels a thread, rows a program (0 lets the sizes decide)."""

    threads: int
    channels: int
    rows: int


def schedule(
    kind: str, dtype: torch.dtype, W: int, chosen: Sequence[int] | None = None
) -> Schedule:
    """The schedule of "forward", "update" or "backward" at a width; `chosen` overrides it."""
    if chosen is not None:
        return Schedule(*chosen)
    # 16 bytes a load, but where the window would take too many registers.
    channels = 4 if dtype.itemsize == 4 or W > 4 else 8
    return {
        "forward": Schedule(128, channels, 0),
        "update": Schedule(64, channels, 1),
        "backward": Schedule(128, 4 if W <= 4 else 2, 0),
    }[kind]


def _rows(plan: Schedule, work: int, most: int) -> int:
    """Rows of a chunk: as many as leave PROGRAMS programs, between GROUP and `most`."""
    if plan.rows:
        return plan.rows
    return power_of_2(max(min(work // PROGRAMS, most), GROUP))


def power_of_2(n: int) -> int:
    """The least power of two from n on; Triton's own costs as much as a launch."""
    return 1 << max(n - 1, 0).bit_length()


def device_of(x: torch.Tensor) -> Any:
    """A context in which kernels are launched on the device of x."""
    if x.is_cuda and torch.cuda.current_device() != x.get_device():
        return torch.cuda.device(x.get_device())
    return nullcontext()


def _block(plan: Schedule, channels: int) -> tuple[int, int]:
    """Channels and warps of a program; not more than there are."""
    block = min(plan.threads * plan.channels, max(power_of_2(channels), 16))
    return block, max(min(plan.threads, block // plan.channels) // 32, 1)


def _lead(count: int, x: torch.Tensor | None) -> tuple[int, ...]:
    """Strides of the leading axes, zeros for an absent tensor."""
    return (0,) * count if x is None else x.stride()[:count]


def _launch(
    plan: Schedule, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, act: Any,
    cu: torch.Tensor | None, history: torch.Tensor | None, index: torch.Tensor | None,
    has: torch.Tensor | None, final: torch.Tensor | None,
) -> None:  # fmt: skip
    B, T, C = x.shape
    W = weight.shape[1]
    N = B if cu is None else cu.shape[0] - 1
    if N == 0 or C == 0:
        return
    block, warps = _block(plan, C)
    blocks = -(-C // block)
    rows = _rows(plan, B * T * blocks, 64)
    if cu is not None or rows < T:
        rows = max(rows, GROUP)  # W - 1 at least
    per = max(-(-T // rows), 1)
    slots = N * per if cu is None else T // rows + N
    if W == 1:
        history = final = None
    with device_of(x):
        _FORWARD(
            slots * blocks,
            (x, weight, y, cu, history, index, has, final),
            (N, T, history.shape[0] if history is not None else 0, per, rows),
            (*_lead(2, x), *_lead(2, weight), *_lead(1, cu), *_lead(2, history), *_lead(1, index),
             *_lead(1, has), *_lead(2, final)),
            {"C": C, "W": W, "BC": block, "R": min(rows, GROUP),
             "ACT": None if act is None else act[0], "num_warps": warps},
        )  # fmt: skip


def forward(
    x: torch.Tensor, weight: torch.Tensor, cu: torch.Tensor | None, history: torch.Tensor | None,
    final: torch.Tensor | None, act: Any, config: Sequence[int] | None = None,
) -> torch.Tensor:  # fmt: skip
    """y like x [B, T, C], contiguous; writes the final histories [N, W-1, C] where given."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    plan = schedule("forward", x.dtype, weight.shape[1], config)
    _launch(plan, x, weight, y, act, cu, history, None, None, final)
    return y


def advance(
    x: torch.Tensor, weight: torch.Tensor, pool: torch.Tensor, y: torch.Tensor,
    index: torch.Tensor | None, cu: torch.Tensor | None, has: torch.Tensor | None, act: Any,
    config: Sequence[int] | None = None,
) -> None:  # fmt: skip
    """Write y [B, T, C] and advance the histories in the pool [P, W-1, C], in place."""
    single = cu is None and x.shape[1] == 1
    plan = schedule("update" if single else "forward", x.dtype, weight.shape[1], config)
    _launch(plan, x, weight, y, act, cu, pool, index, has, pool)


def backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, cu: torch.Tensor | None,
    history: torch.Tensor | None, d_final: torch.Tensor | None, act: Any, *,
    want_weight: bool = True, want_history: bool = True,
    config: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """dx like x, dw [C, W] and the histories' gradient [N, W-1, C]; None where not wanted."""
    B, T, C = x.shape
    W = weight.shape[1]
    N = B if cu is None else cu.shape[0] - 1
    plan = schedule("backward", x.dtype, W, config)
    block, warps = _block(plan, C)
    blocks = -(-C // block)
    # W - 1 rows past a chunk are walked over, too: whole groups with them.
    rows = max(_rows(plan, B * T * blocks, 4096), 4 * GROUP) - (W - 1)
    per = max(-(-T // rows), 1)
    slots = N * per if cu is None else T // rows + N

    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dw = torch.empty_like(weight, memory_format=torch.contiguous_format) if want_weight else None
    dh = None
    if history is not None and want_history:
        dh = torch.empty(history.shape, dtype=history.dtype, device=x.device)
    if N == 0 or C == 0:
        return dx, None if dw is None else dw.zero_(), dh
    parts = None
    if dw is not None:
        parts = torch.empty((slots, W, C), dtype=torch.float32, device=x.device)
    with device_of(x):
        _BACKWARD(
            slots * blocks,
            (x, weight, dy, cu, history, d_final, dx, parts, dh),
            (N, T, per, rows),
            (*_lead(2, x), *_lead(2, weight), *_lead(2, dy), *_lead(1, cu), *_lead(2, history),
             *_lead(2, d_final)),
            {"C": C, "W": W, "BC": block, "R": GROUP, "SLOPE": None if act is None else act[1],
             "num_warps": warps},
        )  # fmt: skip
        if dw is not None:
            width = min(64, max(power_of_2(C), 16))
            constants = {"C": C, "W": W, "B": width, "R": 32, "num_warps": 4}
            _WEIGHT(W * -(-C // width), (parts, dw), (slots,), (), constants)
    return dx, dw, dh
