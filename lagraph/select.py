"""Which engine runs a problem: declared support tables, verdicts in words, plan names.

Plan names are `<family>_<engine>` and `<family>_summary_<engine>`, with optional knobs:
`gdn_triton[chunk=64]`. A pinned plan is obeyed or refused, never replaced; a slow path is never
taken silently.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from lagraph import registry
from lagraph.desc import dtype_name
from lagraph.errors import MissingBackend, NoEngine, PlanNotOffered

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from lagraph.problem import Problem
    from lagraph.registry import EngineRow

__all__ = ["PlanName", "Preference", "SupportTable", "Verdict", "select", "verdicts"]

_NAME = re.compile(r"(?P<base>[a-z0-9_]+)(?:\[(?P<knobs>[^\]]*)\])?")


@dataclass(frozen=True, slots=True)
class Preference:
    """Problems for which an engine was measured faster than those after it in the registry.

    where: which of them, in words; holds: the same, as a predicate; None for all of them.
    measured: the measurement behind it: device, shapes, times of both, commit.
    """

    family: str
    direction: str
    where: str
    measured: str
    holds: Callable[[Problem], bool] | None = None

    def __call__(self, problem: Problem) -> bool:
        """Whether the problem is one of them."""
        same = (problem.family, problem.direction) == (self.family, self.direction)
        return same and (self.holds is None or self.holds(problem))


@dataclass(frozen=True, slots=True)
class SupportTable:
    """What one engine serves. None means no limit.

    devices: where it runs; default_on: where it is chosen without a pin.
    prefer: of what it serves, it is chosen without a pin only where one of these holds.
    arch: lowest and highest compute capability (90 for SM90), CUDA only.
    dtypes: token dtypes; K and V: head dims by letter; layouts: highest `layout_class` of inputs.
    loose: inputs of at most this rank may have any strides, whatever `layouts` says; so may the
        inputs that `free` names.
    serves: (family, direction) pairs. knobs: what a plan name may set, with the allowed values.
    without: {option: reason} for options that the engine declines when they are set.
    multiples: {option: number} for options that it takes in multiples of a number.
    """

    devices: frozenset[str]
    default_on: frozenset[str]
    dtypes: tuple[torch.dtype, ...]
    arch: tuple[int, int | None] | None = None
    dims: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    layouts: int = 3
    loose: int = 0
    free: frozenset[str] = frozenset()
    serves: frozenset[tuple[str, str]] | None = None
    knobs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    without: Mapping[str, str] = field(default_factory=dict)
    multiples: Mapping[str, int] = field(default_factory=dict)
    prefer: tuple[Preference, ...] | None = None
    summary: str = ""

    def chosen(self, problem: Problem) -> bool:
        """Whether the engine may be chosen without a pin, where it serves the problem."""
        if problem.device not in self.default_on:
            return False
        return self.prefer is None or any(preference(problem) for preference in self.prefer)

    def reasons(self, problem: Problem) -> list[str]:
        """Why this engine declines the problem; empty if it serves it."""
        why: list[str] = []
        if problem.device not in self.devices:
            why.append(f"runs on {_or(sorted(self.devices))}, not on {problem.device}")
        elif problem.device == "cuda" and self.arch is not None:
            low, high = self.arch
            if problem.arch < low:
                why.append(f"needs sm{low}, this device is sm{problem.arch}")
            elif high is not None and problem.arch > high:
                why.append(f"is not proven beyond sm{high}, this device is sm{problem.arch}")
        if self.serves is not None and (problem.family, problem.direction) not in self.serves:
            why.append(f"does not serve {problem.family} {problem.direction}")
        if problem.io_dtype not in self.dtypes:
            names = _or([dtype_name(dtype) for dtype in self.dtypes])
            why.append(f"takes {names}, not {dtype_name(problem.io_dtype)}")
        for letter, sizes in self.dims.items():
            if letter in problem.sizes and problem.sizes[letter] not in sizes:
                allowed = ", ".join(map(str, sizes))
                why.append(f"{letter}={problem.sizes[letter]} not in {{{allowed}}}")
        for name, layout in problem.layouts.items():
            if layout <= self.layouts or problem.ranks[name] <= self.loose or name in self.free:
                continue
            what = " are no multiples of 16 bytes" if (self.layouts, layout) == (1, 2) else ""
            why.append(f"strides of {name}{what}: call {name}.contiguous() first")
        for option, reason in self.without.items():
            if getattr(problem.options, option, False):
                why.append(f"{option}: {reason}")
        for option, number in self.multiples.items():
            value = getattr(problem.options, option, 0) or 0
            if value % number:
                why.append(f"{option}={value} is no multiple of {number}")
        return why


@dataclass(frozen=True, slots=True)
class PlanName:
    """A parsed plan name."""

    base: str
    knobs: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        inner = ",".join(f"{key}={value}" for key, value in self.knobs)
        return f"{self.base}[{inner}]" if inner else self.base

    @classmethod
    @lru_cache(maxsize=256)
    def parse(cls, text: str) -> PlanName:
        """Parse "gdn_triton[chunk=64]"; `PlanNotOffered` if it is no plan name."""
        match = _NAME.fullmatch(text.strip())
        knobs: dict[str, int] = {}
        good = match is not None
        for part in (match["knobs"] or "").split(",") if match else ():
            key, equals, value = (piece.strip() for piece in part.partition("="))
            if equals and key and key not in knobs and value.lstrip("-").isdigit():
                knobs[key] = int(value)
            elif part.strip():
                good = False
        if not good:
            raise PlanNotOffered(
                f"plan_name: expected <family>_<engine> with optional [knob=integer,...], got "
                f"{text!r}. Plans are listed by python -m lagraph support."
            )
        return cls(match["base"], tuple(sorted(knobs.items())))  # type: ignore[index]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One engine's answer to one problem.

    ok: it can run the problem. default: it may be chosen without a pin. reasons: why not, in words.
    """

    plan: str
    engine: str
    ok: bool
    default: bool
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.ok and self.default:
            return f"{self.plan}: serves"
        if self.ok:
            return f"{self.plan}: serves when pinned"
        return f"{self.plan}: {'; '.join(self.reasons)}"


def _or(names: Iterable[str]) -> str:
    *rest, last = names
    return f"{', '.join(rest)} or {last}" if rest else last


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


@cache
def missing(row: EngineRow) -> tuple[str, ...]:
    """Which of the engine's packages are absent or too old, in words."""
    why = []
    for package, needed in row.requires:
        try:
            found = metadata.version(package)
        except metadata.PackageNotFoundError:
            why.append(f"needs {package} >= {needed}, which is not installed")
            continue
        if _version(found) < _version(needed):
            why.append(f"needs {package} >= {needed}, found {found}")
    return tuple(why)


def plan_of(problem: Problem, engine: str) -> str:
    """Name of an engine's plan for a problem."""
    middle = "_summary" if "summary" in problem.direction else ""
    return f"{problem.family}{middle}_{engine}"


def verdicts(problem: Problem) -> tuple[Verdict, ...]:
    """Every engine's verdict, in order of preference."""
    found = []
    for row in registry.ENGINES:
        table: SupportTable = registry.load(row.table)
        reasons = (*missing(row), *table.reasons(problem))
        default = table.chosen(problem)
        found.append(Verdict(plan_of(problem, row.name), row.name, not reasons, default, reasons))
    return tuple(found)


def select(problem: Problem, plan_name: str | None = None) -> PlanName:
    """The plan to run: the pinned one, or the best that serves.

    Raises `PlanNotOffered` where the pinned plan does not exist or declines, and `NoEngine` where
    nothing serves; both list every engine's reason.
    """
    if plan_name is None:
        for verdict in verdicts(problem):
            if verdict.ok and verdict.default:
                return PlanName(verdict.plan)
        raise NoEngine(nothing_serves(problem))
    pinned = PlanName.parse(plan_name)
    for row, verdict in zip(registry.ENGINES, verdicts(problem), strict=True):
        if verdict.plan != pinned.base:
            continue
        if not verdict.ok:
            raise PlanNotOffered(
                f"plan {pinned} declines {_title(problem)}: {'; '.join(verdict.reasons)}."
            )
        _check_knobs(pinned, registry.load(row.table))
        return pinned
    offered = ", ".join(verdict.plan for verdict in verdicts(problem))
    raise PlanNotOffered(
        f"plan_name: no plan {pinned.base!r} for {_title(problem)}. Plans are: {offered}."
    )


def engine(problem: Problem, name: PlanName) -> Any:
    """The engine behind a plan's name, loaded."""
    for row in registry.ENGINES:
        if plan_of(problem, row.name) == name.base:
            if missing(row):
                raise MissingBackend(f"{name}: {'; '.join(missing(row))}.")
            return registry.load(row.engine)
    raise PlanNotOffered(f"plan_name: no plan {name.base!r} for {_title(problem)}.")


def build(problem: Problem, name: PlanName) -> Any:
    """The engine's compiled plan."""
    return engine(problem, name).plan(problem, dict(name.knobs))


def _check_knobs(name: PlanName, table: SupportTable) -> None:
    for key, value in name.knobs:
        allowed = table.knobs.get(key)
        if allowed is None:
            known = ", ".join(table.knobs) or "none"
            raise PlanNotOffered(f"plan {name}: no knob {key!r}. Knobs of {name.base}: {known}.")
        if value not in allowed:
            raise PlanNotOffered(f"plan {name}: {key} is one of {list(allowed)}, got {value}.")


def _title(problem: Problem) -> str:
    place = f"sm{problem.arch}" if problem.device == "cuda" else problem.device
    return f"{problem.family} {problem.direction} on {place}"


def nothing_serves(problem: Problem, barred: Collection[str] = ()) -> str:
    """Why every engine declines, and which may be pinned. barred: words that bar a plan's name."""
    found = verdicts(problem)
    out = {v.plan for v in found if any(word in v.plan for word in barred)}

    def reason(v: Verdict) -> str:
        if not v.ok:
            return ", ".join(v.reasons)
        return "barred by deselect_engines" if v.plan in out else "only when pinned"

    why = "; ".join(f"{v.plan}: {reason(v)}" for v in found)
    pins = [v.plan for v in found if v.ok and v.plan not in out]
    mend = (
        f' Pass plan_name="{pins[0]}" (a graph: select_plan("{pins[0]}")) to run it all the same.'
        if pins
        else ""
    )
    return f"no engine for {_title(problem)}: {why}.{mend}"
