"""What the frost engine serves, and where it is preferred."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lagraph.select import Preference, SupportTable

if TYPE_CHECKING:
    from lagraph.problem import Problem

__all__ = ["KERNELS", "LINK", "PREFER", "SUPPORT"]

# The kernel behind each family and direction, a summary's first: its signature class, as an import
# string.
KERNELS = {
    (family, direction): "lagraph.engines.frost.kernels.forward:Forward"
    for family in ("gdn", "gdp")
    for direction in ("forward", "summary", "summary_backward")
}
# Joins segments.
LINK = "lagraph.engines.frost.kernels.link:Link"

MANY = 64  # heads that fill a GPU with one sequence


def _preferred(problem: Problem) -> bool:
    options = problem.options
    if options.allow_neg_eigval:
        return False
    # Such a call neither cuts sequences nor narrows tiles.
    return not options.batch_invariant or problem.sizes["HO"] >= MANY


# Where the engine is chosen without a pin: where it was measured faster than those after it. A row
# holds the measurement. Strengths up to 2 amplify rounding: see docs/engines.md.
WHERE = f"without allow_neg_eigval; with batch_invariant from {MANY} heads on"
PREFER: tuple[Preference, ...] = (
    Preference(
        "gdn",
        "forward",
        where=WHERE,
        measured="H200, bf16, slow gates, ms, Triton's in brackets",
        holds=_preferred,
    ),
    Preference(
        "gdp",
        "forward",
        where=WHERE,
        measured="H200, bf16, slow gates, ms, Triton's in brackets",
        holds=_preferred,
    ),
)

SUPPORT = SupportTable(
    devices=frozenset({"cuda"}),
    default_on=frozenset({"cuda"}),
    dtypes=(torch.bfloat16, torch.float16),
    arch=(90, 90),
    dims={"K": (64, 128), "V": (64, 128), "n": (2, 4)},
    layouts=1,  # TMA reads strides that are multiples of 16 bytes
    loose=2,  # gates and strengths per head, offsets, parameters: plain loads
    free=frozenset({"beta"}),  # token-major, it has a third axis
    serves=frozenset(KERNELS),
    knobs={"rows": (64, 128), "segment": (0, 1, 2, 4, 8, 16, 32, 64, 128)},
    multiples={"checkpoint_every_n_tokens": 64},
    prefer=PREFER,
    summary="CuTe DSL kernels for GDN and GDP, SM90 alone, K and V in {64, 128}, bf16 and fp16",
)
