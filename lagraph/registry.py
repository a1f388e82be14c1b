"""The two static tables: families and engines, as import strings.

Nothing is imported before it is asked for, so that `import lagraph` loads no kernel language.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lagraph.node import Family, Node

__all__ = ["ENGINES", "FAMILIES", "EngineRow", "families", "family", "load", "node"]

FAMILIES: dict[str, str] = {
    "gdn": "lagraph.nodes.gdn:GDN",
    "kda": "lagraph.nodes.kda:KDA",
    "gdn2": "lagraph.nodes.gdn2:GDN2",
    "gdp": "lagraph.nodes.gdp:GDP",
    "mamba2": "lagraph.nodes.mamba2:MAMBA2",
}


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One engine: `table` is its import-free support table, `engine` what builds its plans.

    requires: packages with their lowest version; a missing one makes the engine decline.
    """

    name: str
    table: str
    engine: str
    requires: tuple[tuple[str, str], ...] = ()


# In order of preference. Frost comes first, and is chosen where its table says it is faster.
ENGINES: tuple[EngineRow, ...] = (
    EngineRow(
        "frost",
        "lagraph.engines.frost.support:SUPPORT",
        "lagraph.engines.frost.engine:ENGINE",
        requires=(("nvidia-cutlass-dsl", "4.8.1"), ("apache-tvm-ffi", "0.1.12")),
    ),
    EngineRow(
        "triton",
        "lagraph.engines.triton.support:SUPPORT",
        "lagraph.engines.triton.engine:ENGINE",
        requires=(("triton", "3.4"),),
    ),
    EngineRow(
        "eager", "lagraph.engines.eager.support:SUPPORT", "lagraph.engines.eager.engine:ENGINE"
    ),
)


def load(target: str) -> Any:
    """The object behind "module:attribute"."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


@cache
def family(name: str) -> Family:
    """One family by name."""
    return load(FAMILIES[name])


def families() -> tuple[Family, ...]:
    """All families."""
    return tuple(family(name) for name in FAMILIES)


@cache
def nodes() -> dict[str, Node]:
    """All nodes by builder name."""
    return {node.name: node for fam in families() for node in fam.nodes}


def node(name: str) -> Node:
    """One node by builder name ("gdn_bwd") or by type ("GDN_BWD")."""
    return nodes()[name.lower()]
