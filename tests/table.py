"""Parameter grids: every engine with every row of a table, and readable ids."""

from __future__ import annotations

import re

import pytest
from cases import ENGINES

from lagraph.engines.frost.support import SUPPORT


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


def pending(error):
    """Whether an engine that is being built declines only what it says that it does not do yet.

    Tests are skipped there; `test_frost.py` lists what that may be.
    """
    found = re.fullmatch(r"plan \w+_frost\S* declines [^:]+: (.*)\.", str(error), re.DOTALL)
    if found is None:
        return False
    known = (
        r"does not serve \w+ \w+",
        *(rf"{option}: .*" for option in SUPPORT.without),
        *(rf"{option}=\d+ is no multiple of \d+" for option in SUPPORT.multiples),
        r"n=\d+ not in .*",
    )
    return all(re.fullmatch("|".join(known), why) for why in found[1].split("; "))
