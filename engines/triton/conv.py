"""Launches of the convolution kernels: schedules, scratch, and the current device.

Nothing here checks its arguments (`lagraph.ops.conv` does), and nothing reads a tensor's values.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from triton.runtime import driver

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

    from lagraph.engines.triton.bound import Bound

__all__ = [
    "SILU",
    "Schedule",
    "advance",
    "backward",
    "bind_step",
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


@dataclass(frozen=True, slots=True)
class Schedule:
    """threads a program, channels a thread, rows a program (0 lets the sizes decide), rows that are
    loaded before the first one is used, registers a thread at most (0: as many as it takes), and
    whether the next rows are on their way meanwhile.
    """

    threads: int
    channels: int
    rows: int
    group: int = 8
    registers: int = 0
    ahead: bool = False


def schedule(
    kind: str, dtype: torch.dtype, W: int, chosen: Sequence[int] | None = None
) -> Schedule:
    """The schedule of "forward", "update" or "backward" at a width; `chosen` overrides it."""
    if kind == "backward":
        # Instructions bound it: what counts is how many warps there are to issue them. Without
        # a limit the compiler takes a third more registers, to no end; before SM90 it needs them.
        limit, group = 0, 4
        if dtype.itemsize == 2 and W > 4:
            group = 2  # four spill
        elif dtype.itemsize == 2:
            arch = _arch()
            limit = 168 if arch < 90 else 112 if arch < 100 else 128
        plan = Schedule(64, 4 if W <= 4 else 2, 0, group, limit, True)
    elif kind == "update":
        # One row has to load the weight for itself, whose taps lie the closer together the fewer
        # channels there are.
        plan = Schedule(128, 2, 1)
    else:
        # 16 bits at 16384 x 8192: 138 us so, with 16 bytes a load and none ahead 142.
        plan = Schedule(128, 4, 0, ahead=dtype.itemsize == 2 and W <= 4)
    if chosen is None:
        return plan
    if len(chosen) > 3 or chosen[1] == plan.channels:
        rest = plan.group, plan.registers, plan.ahead
        return Schedule(*chosen, *rest[len(chosen) - 3 :])
    return Schedule(*chosen, plan.group)


def _arch() -> int:
    """The architecture that kernels are compiled for; in the interpreter any."""
    try:
        return int(driver.active.get_current_target().arch)
    except RuntimeError:
        return 90


def _rows(plan: Schedule, work: int, programs: int, most: int) -> int:
    """Rows of a chunk: as many as leave that many programs, whole groups, at most `most`."""
    if plan.rows:
        return plan.rows
    return power_of_2(max(min(work // programs, most), plan.group))


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


def _bind(
    plan: Schedule, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, act: Any,
    cu: torch.Tensor | None, history: torch.Tensor | None, index: torch.Tensor | None,
    has: torch.Tensor | None, final: torch.Tensor | None,
) -> tuple[Bound, tuple[int, ...]] | None:  # fmt: skip
    """The launch on (x, weight, y, cu, history, index, has, final) and its sizes; None for none."""
    B, T, C = x.shape
    W = weight.shape[1]
    N = B if cu is None else cu.shape[0] - 1
    if N == 0 or C == 0:
        return None
    block, warps = _block(plan, C)
    blocks = -(-C // block)
    rows = _rows(plan, B * T * blocks, PROGRAMS, 32 if plan.ahead else 64)
    if cu is not None or rows < T:
        rows = max(rows, plan.group)  # W - 1 at least
    per = max(-(-T // rows), 1)
    slots = N * per if cu is None else T // rows + N
    if W == 1:
        history = final = None
    bound = _FORWARD.bind(
        slots * blocks,
        (x, weight, y, cu, history, index, has, final),
        (*_lead(2, x), *_lead(2, weight), *_lead(1, cu), *_lead(2, history), *_lead(1, index),
         *_lead(1, has), *_lead(2, final)),
        {"C": C, "W": W, "BC": block, "R": min(rows, plan.group), "AHEAD": plan.ahead,
         "FLAT": weight.stride() == (W, 1) and W == 4,
         "ACT": None if act is None else act[0], "num_warps": warps,
         "maxnreg": plan.registers or None},
    )  # fmt: skip
    return bound, (N, T, history.shape[0] if history is not None else 0, per, rows)


def _launch(
    plan: Schedule, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, act: Any,
    cu: torch.Tensor | None, history: torch.Tensor | None, index: torch.Tensor | None,
    has: torch.Tensor | None, final: torch.Tensor | None,
) -> None:  # fmt: skip
    made = _bind(plan, x, weight, y, act, cu, history, index, has, final)
    if made is not None:
        bound, sizes = made
        if weight.shape[1] == 1:
            history = final = None
        with device_of(x):
            bound((x, weight, y, cu, history, index, has, final), sizes)


def bind_step(
    x: torch.Tensor, weight: torch.Tensor, pool: torch.Tensor, y: torch.Tensor,
    index: torch.Tensor | None, has: torch.Tensor | None, act: Any,
    config: Sequence[int] | None = None,
) -> tuple[Bound, tuple[int, ...]] | None:  # fmt: skip
    """The launch of `advance` on one token a sequence, x and y [N, 1, C], and its sizes.

    It takes (x, weight, y, None, pool, index, has, pool).
    """
    plan = schedule("update", x.dtype, weight.shape[1], config)
    return _bind(plan, x, weight, y, act, None, pool, index, has, pool)


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
    rows = max(_rows(plan, B * T * blocks, PROGRAMS, 4096), 32)
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
            {"C": C, "W": W, "BC": block, "R": plan.group, "AHEAD": plan.ahead,
             "SLOPE": None if act is None else act[1], "num_warps": warps,
             "maxnreg": (plan.registers if history is None and d_final is None else 0) or None},
        )  # fmt: skip
        if dw is not None:
            width = min(64, max(power_of_2(C), 16))
            constants = {"C": C, "W": W, "B": width, "R": 32, "num_warps": 4}
            _WEIGHT(W * -(-C // width), (parts, dw), (slots,), (), constants)
    return dx, dw, dh
