"""Engines that compute nothing: each has a support table and records its runs."""

from __future__ import annotations

import torch

from lagraph.registry import EngineRow
from lagraph.select import SupportTable

EVERY = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
RUNS = []  # (engine, problem, knobs) of every run since the last `clear`


def table(**fields):
    """A support table that serves everything everywhere, but for these fields."""
    both = frozenset({"cpu", "cuda"})
    return SupportTable(**{"devices": both, "default_on": both, "dtypes": EVERY} | fields)


class Plan:
    def __init__(self, engine, problem, knobs):
        self.engine, self.problem, self.knobs = engine, problem, knobs

    def workspace_size(self, T, N):
        return self.engine.bytes_per_token * T

    def run(self, ins, outs, workspace=None):
        RUNS.append((self.engine.name, self.problem, self.knobs))
        self.engine.workspaces.append(workspace)
        for out in outs:
            if out is not None:
                out.zero_()


class Engine:
    """One fake engine; `support` and `engine` are what its registry row names."""

    def __init__(self, name, bytes_per_token=0, **fields):
        self.name, self.bytes_per_token = name, bytes_per_token
        self.support, self.workspaces = table(**fields), []

    def plan(self, problem, knobs):
        return Plan(self, problem, knobs)


def install(monkeypatch, *engines, requires=None, eager=True):
    """Put engines before eager in the registry, and forget every plan, now and afterwards."""
    from lagraph import registry

    rows = []
    for engine in engines:
        monkeypatch.setitem(globals(), f"{engine.name}_support", engine.support)
        monkeypatch.setitem(globals(), f"{engine.name}_engine", engine)
        rows.append(EngineRow(engine.name, f"{__name__}:{engine.name}_support",
                              f"{__name__}:{engine.name}_engine",
                              (requires or {}).get(engine.name, ())))  # fmt: skip
    kept = [row for row in registry.ENGINES if row.name == "eager"] if eager else []
    monkeypatch.setattr(registry, "ENGINES", (*rows, *kept))
    forget()
    return rows


def forget():
    """Drop every plan and every verdict that was kept."""
    from lagraph import graph, plan, registry, select
    from lagraph.ops import register

    RUNS.clear()
    for name in registry.nodes():
        plan.runner(name).plans.clear()
        graph._runner(name).plans.clear()
    register._SERVED.clear()
    select.missing.cache_clear()
