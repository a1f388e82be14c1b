"""A null engine: plans that do nothing, so that what is timed is the host's own cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lagraph import registry
from lagraph.select import SupportTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lagraph.problem import Problem

__all__ = ["ENGINE", "SUPPORT", "install"]

SUPPORT = SupportTable(
    devices=frozenset({"cpu", "cuda"}),
    default_on=frozenset({"cpu", "cuda"}),
    dtypes=(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    summary="does nothing",
)


class _Plan:
    """Runs nothing and needs no workspace."""

    def run(self, ins: Sequence[Any], outs: Sequence[Any], workspace: Any = None) -> None:
        """Leave the outputs as they are."""

    def workspace_size(self, T: int, N: int) -> int:
        """None."""
        return 0


class _Engine:
    """Makes plans that do nothing."""

    name = "null"

    def plan(self, problem: Problem, knobs: dict[str, int]) -> _Plan:
        """A plan for any problem."""
        return _Plan()


ENGINE = _Engine()


def install() -> None:
    """Make the null engine the only one of this process."""
    module = __name__
    registry.ENGINES = (registry.EngineRow("null", f"{module}:SUPPORT", f"{module}:ENGINE"),)
