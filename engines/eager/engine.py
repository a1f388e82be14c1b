"""The eager engine: all families and directions in PyTorch, on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lagraph.engines.eager.scan import Scanner

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lagraph.problem import Problem

__all__ = ["ENGINE", "EagerEngine", "EagerPlan"]

# Rows of a chunk by default: the work inside a chunk grows with its rows, and gates per key channel
# have the more of it; states between chunks cost more the more there are.
CHUNK = {"head": 64, "key": 32}
SUBTOKEN_PORTS = ("k", "v", "beta", "dK", "dV", "dBeta")


class EagerPlan:
    """A problem bound to this engine. It keeps no state, so threads may share it."""

    def __init__(self, problem: Problem, chunk: int) -> None:
        self.problem, self.chunk = problem, chunk

    def workspace_size(self, T: int, N: int) -> int:
        """Bytes of workspace: none, PyTorch allocates."""
        return 0

    def run(
        self,
        ins: Sequence[torch.Tensor | None],
        outs: Sequence[torch.Tensor | None],
        workspace: torch.Tensor | None = None,
    ) -> None:
        """Fill outs, in the order of the node's outputs, from ins, in that of its inputs."""
        problem = self.problem
        given = {n: x for n, x in zip(problem.inputs, ins, strict=True) if x is not None}
        wanted = {n: x for n, x in zip(problem.outputs, outs, strict=True) if x is not None}
        flat = dict(wanted)
        if problem.traits.substeps:
            given = {n: _flatten(n, x) for n, x in given.items()}
            flat = {n: _flatten(n, x) for n, x in wanted.items()}
        with torch.no_grad(), torch.autocast(given["k"].device.type, enabled=False):
            getattr(Scanner(problem, self.chunk, given, flat), problem.direction)()
            for name, x in wanted.items():
                if x.data_ptr() != flat[name].data_ptr():  # a strided buffer had to be copied
                    x.copy_(flat[name].view(x.shape))


def _flatten(name: str, x: torch.Tensor) -> torch.Tensor:
    """[T, n, heads, ...] of GDP as [T * n, heads, ...]."""
    heads_at_1 = 2 if name in ("beta", "dBeta") else 3
    return x.flatten(0, 1) if name in SUBTOKEN_PORTS and x.dim() > heads_at_1 else x


class EagerEngine:
    """See the module. Knob: chunk, rows of a chunk (16, 32, 64 or 128)."""

    name = "eager"

    def plan(self, problem: Problem, knobs: Mapping[str, int | str]) -> EagerPlan:
        """A plan for this problem."""
        return EagerPlan(problem, int(knobs.get("chunk", CHUNK[problem.traits.gate])))


ENGINE = EagerEngine()
