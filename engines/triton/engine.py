"""The Triton engine: SM80 and newer, every family, both directions.

Importing this module loads neither Triton nor a kernel; the first plan does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lagraph.problem import Problem

__all__ = ["ENGINE", "TritonEngine"]


class TritonEngine:
    """Plans problems onto Triton kernels."""

    name = "triton"
    supports: Any = None

    def plan(self, problem: Problem, knobs: Mapping[str, int | str]) -> Any:
        from lagraph.engines.triton import backward, launch
        from lagraph.engines.triton.check import check_compiler

        check_compiler(problem)
        plans = {
            "forward": launch.ForwardPlan,
            "backward": backward.BackwardPlan,
            "summary": launch.SummaryPlan,
            "summary_backward": backward.SummaryBackwardPlan,
        }
        return plans[problem.direction](problem, knobs)


ENGINE = TritonEngine()
