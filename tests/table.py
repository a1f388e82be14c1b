"""Parameter grids: every engine with every row of a table, and readable ids."""

from __future__ import annotations

import pytest
from cases import ENGINES


def short(value):
    """A readable id of a dtype, a size, a tuple."""
    if isinstance(value, tuple):
        return "+".join(map(str, value))
    return str(value).removeprefix("torch.")


def param(engine, *rest, id=None):
    """A parameter set that is marked `gpu` where the engine's device is one."""
    marks = [pytest.mark.gpu] if engine.device != "cpu" else []
    return pytest.param(engine, *rest, marks=marks, id=id or engine.id)


def grid(*rows):
    """Every engine with every row: rows are (id, values...)."""
    return [
        param(engine, *row[1:], id=f"{engine.id}-{row[0]}") for engine in ENGINES for row in rows
    ]


def to(device, inputs):
    """The inputs on a device."""
    return {name: t.to(device) for name, t in inputs.items() if t is not None}


def fitted(cases):
    """Every engine with every case, as the engine serves it."""
    return [
        param(engine, served, id=f"{engine.id}-{case.id}")
        for engine in ENGINES
        for case in cases
        if (served := engine.fit(case)) is not None
    ]
