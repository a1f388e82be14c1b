"""Fixed launch configurations: tile sizes, warps and stages by architecture and head dims.

Pure functions of a problem's static facts, so that neither T nor N ever selects, tunes or
recompiles anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lagraph.problem import Problem

__all__ = ["Config", "choose"]


@dataclass(frozen=True, slots=True)
class Config:
    """Tiles and launch shapes.

    chunk: steps a chunk; queries: query rows of a chunk.
    share: heads of one group whose factors one program makes.
    block_k: K-block of the factor kernels; block_v: V-slice of the serial kernels.
    *_warps, *_stages: launch shape of each kernel.
    precision: how fp32 operands are multiplied.
    """

    chunk: int
    queries: int
    share: int
    block_k: int
    block_v: int
    factor_warps: int
    factor_stages: int
    scan_warps: int
    scan_stages: int
    precision: str


# Architectures whose blocks get at most 99 KB of shared memory.
SMALL_SHARED = frozenset({86, 87, 89, 120, 121})


def _share(problem: Problem, most: int) -> int:
    """Heads with the same q and k head that one program serves: a power of two, at most `most`."""
    size = problem.sizes
    if problem.traits.gate == "key":
        return 1
    group = size["HO"] // max(size.get("H", 1), size["HK"])
    return min(group & -group, most)


def choose(problem: Problem, knobs: Mapping[str, int | str]) -> Config:
    """The configuration for a problem; a knob overrides the entry of its name."""
    size = problem.sizes
    wide = problem.io_dtype.itemsize == 4
    large = max(size["K"], size["V"]) > 128
    key_gate = problem.traits.gate == "key"
    small_shared = problem.arch in SMALL_SHARED
    # There the operands of a product take registers too.
    no_wgmma = problem.arch < 90 or problem.arch >= 120

    chunk = 64
    if wide and large:
        chunk = 16
    elif wide or large or small_shared:
        chunk = 32
    chunk = int(knobs.get("chunk", chunk))
    every = getattr(problem.options, "checkpoint_every_n_tokens", 0)
    if every:
        chunk = gcd(chunk, every)
    substeps = size.get("n", 1)
    queries = chunk // substeps
    if substeps * queries != chunk or queries < 16:
        queries = chunk

    return Config(
        chunk=chunk,
        queries=queries,
        share=_share(problem, int(knobs.get("share", 4 if problem.traits.delta else 8))),
        # A K-block of gates passes through a C x C tile under a gate per key.
        block_k=min(
            size["K"],
            int(knobs.get("block_k", 32 if wide or key_gate else 64)),
            chunk if key_gate else 256,
        ),
        block_v=min(size["V"], int(knobs.get("block_v", 16 if wide else 64))),
        factor_warps=int(knobs.get("factor_warps", 8 if key_gate else 4)),
        factor_stages=int(knobs.get("factor_stages", 1 if wide else 2)),
        scan_warps=int(knobs.get("scan_warps", 8 if wide or large or no_wgmma else 4)),
        scan_stages=int(knobs.get("scan_stages", 1 if wide else 2)),
        precision=str(knobs.get("precision", "tf32x3")),
    )
