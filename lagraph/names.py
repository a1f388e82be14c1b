"""Which node a name means: builder, type, operator, plan, a function of `lagraph.ops`, or a name of
other libraries. Case, a module before the name, dashes and underscores do not matter."""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING

from lagraph import registry
from lagraph.problem import DIRECTIONS

if TYPE_CHECKING:
    from lagraph.node import Family, Node

__all__ = ["FORMS", "nearest", "node_of"]

# What stands around a family's name in the names of functions and plans.
FORMS = (
    "{}", "chunk_{}", "recurrent_{}", "recurrent_{}_decode", "paged_chunk_{}", "fused_recurrent_{}",
    "context_parallel_{}", "chunk_{}_prepare", "{}_inplace",
)  # fmt: skip
ENDS = {
    "forward": ("", "_fwd", "_forward"),
    "backward": ("_bwd", "_backward", "_prepare_backward"),
    "summary": ("_summary",),
    "summary_backward": ("_summary_bwd", "_summary_backward"),
}


def node_of(name: str) -> Node | None:
    """The node that a name means, or None."""
    return _known().get(_plain(name))


def nearest(name: str, count: int = 3) -> list[str]:
    """Names that are spelled like this one, the nearest first."""
    shown = _shown()
    found = get_close_matches(_plain(name), shown, count, 0.5)
    return [shown[plain] for plain in found]


def _plain(name: str) -> str:
    """What is compared: the last part of a dotted name, without knobs, case and punctuation."""
    name = re.sub(r"[\[(].*", "", name.strip(), flags=re.DOTALL)
    return re.sub(r"[\W_]", "", name.rpartition(".")[2].lower())


def _names(family: Family) -> tuple[str, ...]:
    return family.name, family.op, family.title.partition("(")[0], *family.also


@cache
def _known() -> dict[str, Node]:
    known: dict[str, Node] = {}
    for family in registry.families():
        for direction in DIRECTIONS:
            node = family.node(direction)
            for end in ENDS[direction]:
                for name in _names(family):
                    for form in FORMS:
                        known[_plain(form.format(name) + end)] = node
            for row in registry.ENGINES:
                if direction in ("forward", "summary"):
                    known[_plain(f"{node.plan_prefix}_{row.name}")] = node
    return known


@cache
def _shown() -> dict[str, str]:
    """Names to suggest, by what is compared: nodes, operators, functions, others' names."""
    names: list[str] = []
    for family in registry.families():
        names += [node.name for node in family.nodes]
        names += [node.op for node in family.nodes]
        names += [form.format(family.name) for form in FORMS[:5]]
        names += [form.format(name) for name in family.also for form in ("{}", FORMS[1], FORMS[5])]
    return {_plain(name): name for name in names}
