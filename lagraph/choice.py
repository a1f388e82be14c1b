"""The plans that serve a graph, and which of them runs: rank, pin, bar."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lagraph import select
from lagraph.errors import InvalidOption, NoEngine, PlanNotOffered

if TYPE_CHECKING:
    from collections.abc import Collection

    from lagraph.problem import Problem

__all__ = ["Choice", "Explanation"]


@dataclass(frozen=True)
class Explanation:
    """Every engine's verdict on a graph, and the plan that would run. `print` it."""

    node: str
    verdicts: tuple[select.Verdict, ...]
    chosen: str | None

    def __str__(self) -> str:
        lines = [f"{self.node}: {'runs ' + self.chosen if self.chosen else 'nothing serves it'}"]
        lines += [f"  {verdict}" for verdict in self.verdicts]
        return "\n".join(lines)


@dataclass(slots=True)
class Choice:
    """Plans of one problem, best first.

    verdicts: every engine's. pin: index of the plan that was asked for. chosen: of the one built.
    """

    problem: Problem
    verdicts: tuple[select.Verdict, ...]
    plans: list[select.PlanName] = field(init=False)
    pin: int | None = None
    chosen: int | None = None

    def __post_init__(self) -> None:
        serving = sorted((v for v in self.verdicts if v.ok), key=lambda v: not v.default)
        if not serving:
            raise NoEngine(select.nothing_serves(self.problem))
        self.plans = [select.PlanName(verdict.plan) for verdict in serving]

    def index(self, index: int) -> int:
        """The index of a plan, if there is one."""
        if not 0 <= index < len(self.plans):
            raise PlanNotOffered(f"plan index {index} is outside 0..{len(self.plans) - 1}.")
        return index

    def select(self, plan: int | str) -> None:
        """Pin a plan by index or by name."""
        if isinstance(plan, bool) or not isinstance(plan, (int, str)):
            raise InvalidOption("select_plan", "plan", expected="an index or a plan's name",
                                got=repr(plan), mend="See get_plan_name_at_index")  # fmt: skip
        if isinstance(plan, int):
            self.pin = self.index(plan)
            return
        name = select.select(self.problem, plan)
        if name not in self.plans:
            self.plans.append(name)
        self.pin = self.plans.index(name)

    def candidates(self, barred: Collection[str]) -> list[int]:
        """Indices of what may be built, best first; plans whose names hold a barred word may not.

        Raises `NoEngine` if nothing is left, `PlanNotOffered` if the pinned plan is barred.
        """

        def is_barred(name: select.PlanName) -> bool:
            return any(word in str(name) for word in barred)

        if self.pin is not None:
            if is_barred(self.plans[self.pin]):
                raise PlanNotOffered(
                    f"plan {self.plans[self.pin]} is pinned by select_plan and barred by "
                    f"deselect_engines. Drop one of the two."
                )
            return [self.pin]
        default = {v.plan for v in self.verdicts if v.default}
        found = [
            i for i, name in enumerate(self.plans) if name.base in default and not is_barred(name)
        ]
        if not found:
            raise NoEngine(select.nothing_serves(self.problem, barred))
        return found
