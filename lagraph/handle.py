"""What goes beside a graph: heuristic modes, build policies, handles."""

from __future__ import annotations

import enum
from typing import Any

__all__ = [
    "Handle", "build_plan_policy", "create_handle", "destroy_handle", "heur_mode", "set_stream",
]  # fmt: skip


class heur_mode(enum.Enum):
    """Heuristic modes. All rank alike here; a slow plan is never a silent fallback."""

    A = "A"
    B = "B"
    FALLBACK = "FALLBACK"


class build_plan_policy(enum.Enum):
    """Which plans `build_plans` builds: the first that builds, or all that serve."""

    HEURISTICS_CHOICE = "HEURISTICS_CHOICE"
    ALL = "ALL"


class Handle:
    """Where `execute` launches: a CUDA stream, or None for torch's current one."""

    def __init__(self, stream: Any = None) -> None:
        self.stream = stream

    def __repr__(self) -> str:
        return f"lagraph.Handle(stream={self.stream!r})"


def create_handle() -> Handle:
    """A handle on the current stream of every call."""
    return Handle()


def set_stream(handle: Handle, stream: Any) -> None:
    """Launch on `stream`: a torch.cuda.Stream, or a raw stream pointer."""
    handle.stream = stream


def destroy_handle(handle: Handle) -> None:
    """Nothing is held; here so that a program written for cuDNN runs."""
