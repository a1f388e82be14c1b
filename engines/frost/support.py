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


def _gentle(problem: Problem) -> bool:
    return not problem.options.allow_neg_eigval


def _filled(problem: Problem) -> bool:
    # A batch-invariant call neither cuts sequences nor narrows tiles.
    return _gentle(problem) and (not problem.options.batch_invariant or problem.sizes["HO"] >= MANY)


GENTLE = "without allow_neg_eigval"
WHERE = {
    "forward": (f"{GENTLE}; with batch_invariant from {MANY} heads on", _filled),
    "summary": (GENTLE, _gentle),
    "summary_backward": (GENTLE, _gentle),
}
HOW = (
    "H200, bf16, slow gates, K = V = 128, commit 10431da, ms with the host's part, Triton's in "
    "brackets: "
)
MEASURED = {
    ("gdn", "forward"): "1 x 32768, 2/8 heads 0.303 (0.368), 8/32 0.780 (0.974), 16/64 1.245 "
    "(1.667); 1 x 2048, 16/32 0.126 (0.163); 8 x 4096, 8/32 0.408 (0.625)",
    ("gdp", "forward"): "n = 2, 4 x 8192, 16 heads 0.501 (0.907); 1 x 16384 0.441 (0.620); "
    "1 x 4096 0.165 (0.226)",
    ("gdn", "summary"): "1 x 131072, 16 heads 0.961 (8.169); 8 x 4096, 32 heads 0.551 (0.688)",
    ("gdn", "summary_backward"): "1 x 131072, 16 heads 1.355 (6.460); 8 x 4096, 32 heads 0.406 "
    "(0.611)",
    ("gdp", "summary"): "n = 2, 1 x 32768, 16 heads 0.490 (4.105)",
    ("gdp", "summary_backward"): "n = 2, 1 x 32768, 16 heads 0.606 (3.155)",
}
# Where the engine is chosen without a pin: where it was measured faster than those after it.
# Strengths up to 2 amplify rounding: see docs/engines.md.
PREFER: tuple[Preference, ...] = tuple(
    Preference(family, direction, WHERE[direction][0], HOW + text, WHERE[direction][1])
    for (family, direction), text in MEASURED.items()
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
    knobs={"rows": (64, 128), "split": (0, 1), "segment": (0, 1, 2, 4, 8, 16, 32, 64, 128)},
    multiples={"checkpoint_every_n_tokens": 64},
    prefer=PREFER,
    summary="CuTe DSL kernels for GDN and GDP, SM90 alone, K and V in {64, 128}, bf16 and fp16",
)
