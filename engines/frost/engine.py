"""The frost engine: SM90, the nodes that `support.KERNELS` lists.

Importing this module loads neither CuTe nor a kernel; the first plan does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lagraph.problem import Problem
    from lagraph.warmup import Job

__all__ = ["ENGINE", "FrostEngine"]


class FrostEngine:
    """Plans problems onto CuTe DSL kernels."""

    name = "frost"

    def plan(self, problem: Problem, knobs: Mapping[str, int | str]) -> Any:
        """A plan for this problem; its kernels are compiled, or loaded, here."""
        from lagraph.engines.frost import launch

        return launch.plan(problem, knobs)

    def jobs(self, problem: Problem, knobs: Mapping[str, int | str]) -> tuple[Job, ...]:
        """What another process can compile for this problem: all that is not on the disk yet."""
        from lagraph.engines.frost import compile
        from lagraph.engines.frost.cache import CACHE
        from lagraph.engines.frost.pieces import pieces
        from lagraph.warmup import Job

        arch = problem.arch
        if CACHE.folder is None:
            return ()
        environment = (
            ("CUDA_VISIBLE_DEVICES", ""),  # compiling needs no device, and no context on one
            ("CUTE_DSL_ARCH", f"sm_{arch}a"),
            ("LAGRAPH_CACHE_DIR", str(CACHE.folder)),
        )
        target = "lagraph.engines.frost.compile:prepare"
        return tuple(
            Job(signature.name, target, (signature, arch), environment)
            for signature in pieces(problem, knobs).values()
            if not compile.ready(signature, arch)
        )


ENGINE = FrostEngine()
