"""A one-time check that the installed Triton compiles what the kernels here rely on.

Triton 3.4 to 3.7.0 miscompiles, on SM90, a product whose operand is the transpose of a rounded
wgmma accumulator: silently wrong numbers. No kernel here has one; they multiply the transposed
product anew. But they are full of the pattern's neighbours, so where that compiler meets that
architecture, the first plan on a device runs `kernels/probe.py` on tiles of the size that is hit
and compares with fp64. A wrong result refuses every plan there, with an error. It costs one small
compilation, kept in Triton's cache, and one wait for the device, when the first plan is made.

Nothing can be waited for while a CUDA graph is captured. A first plan that is made there is
refused, too: whoever captures has run the call once before.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from lagraph.errors import MissingBackend, NotSupported
from lagraph.select import _version

if TYPE_CHECKING:
    from collections.abc import Callable

    from lagraph.problem import Problem

__all__ = ["affected", "check_compiler", "deviation", "expected", "probe"]

FIRST, FIXED = (3, 4), (3, 7, 1)
ARCH = 90
TILE = 64
BOUND = 1e-2  # relative; a miscompiled product is off by half and more

# (device index, architecture) -> the error that plans there raise, None where there is none.
_VERDICTS: dict[tuple[int, int], str | None] = {}
_LOCK = threading.Lock()


def affected(triton: str, arch: int) -> bool:
    """Whether this version of Triton is known to miscompile for this architecture."""
    return arch == ARCH and FIRST <= _version(triton) < FIXED


def check_compiler(problem: Problem, run: Callable[[int], float] | None = None) -> None:
    """Refuse a plan where the compiler is wrong. Quick after the first call on a device.

    run: the probe, for tests. Raises `MissingBackend` where the probe's products are wrong,
    `NotSupported` where it cannot run because a CUDA graph is being captured.
    """
    key = problem.index, problem.arch
    if key not in _VERDICTS:
        _first(problem, run or probe)
    found = _VERDICTS[key]
    if found is not None:
        raise MissingBackend(f"{problem.family}_triton: {found}")


def _first(problem: Problem, run: Callable[[int], float]) -> None:
    import triton

    index, version = problem.index, triton.__version__
    key = index, problem.arch
    with _LOCK:
        if key in _VERDICTS:
            return
        if not affected(version, problem.arch) or not _runs_here(problem):
            _VERDICTS[key] = None
            return
        if torch.cuda.is_current_stream_capturing():
            raise NotSupported(
                f"{problem.family}_triton: the first plan on cuda:{index} is made while a CUDA "
                f"graph is captured, where Triton {version} cannot be checked for a known "
                f"miscompilation. Run the call once before the capture."
            )
        error = run(index)
        _VERDICTS[key] = (
            None
            if error <= BOUND  # not so for NaN
            else f"expected products within {BOUND:g} of exact ones, got {error:.1e} from Triton "
            f"{version} on cuda:{index}: it miscompiles them for sm{ARCH}. Install Triton "
            f"{'.'.join(map(str, FIXED))} or newer, or pin another engine's plan."
        )


def _runs_here(problem: Problem) -> bool:
    """Whether kernels run on the problem's device: not interpreted, not only compiled for it."""
    from triton import knobs
    from triton.runtime import driver

    if knobs.runtime.interpret or not torch.cuda.is_available():
        return False
    if not type(driver.active).__module__.startswith("triton."):  # a stand-in, to compile with
        return False
    major, minor = torch.cuda.get_device_capability(problem.index)
    return major * 10 + minor == problem.arch


def probe(index: int) -> float:
    """How far off the probe's products are on a device."""
    with torch.no_grad(), torch.cuda.device(index):
        rng = torch.Generator("cuda").manual_seed(0)
        tiles = torch.randn(3, TILE, TILE, device="cuda", generator=rng) * TILE**-0.5
        return deviation(tiles.to(torch.bfloat16))


def deviation(tiles: torch.Tensor) -> float:
    """The largest relative error of the products of three tiles, for 4 and for 8 warps."""
    from lagraph.engines.triton.kernels.probe import probe_kernel

    a, b, c = tiles
    want = expected(a, b, c)
    worst = 0.0
    for warps in (4, 8):
        got = torch.full(want.shape, float("nan"), dtype=torch.float32, device=a.device)
        probe_kernel[(1,)](a, b, c, got, B=tiles.shape[1], PREC="tf32x3", num_warps=warps)
        errors = (got - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)
        # The wait for the device; NaN, which max would pass over, counts as wrong.
        worst = max(worst, *errors.nan_to_num(nan=float("inf")).tolist())
    return worst


def expected(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """What the probe computes, [5, B, B] in fp64, with its roundings."""

    def cast(x: torch.Tensor) -> torch.Tensor:
        return x.to(a.dtype).double()

    a, b, c = a.double(), b.double(), c.double()
    x = a @ b.mT
    state = x
    for _ in range(2):
        state = state + cast(cast(state) @ b.mT) @ c
    return torch.stack([cast(x) @ c, cast(x.mT) @ c, cast(x) @ c.mT, state, c @ (c @ x)])
