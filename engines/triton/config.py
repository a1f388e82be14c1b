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
    """chunk: steps a chunk; queries: query rows of a chunk; block_k: K-block of the factor kernel;
    block_v: V-slice of the serial kernels; *_warps, *_stages: launch shape of each kernel; precision:
    how fp32 operands are multiplied."""

    chunk: int
    queries: int
    block_k: int
    block_v: int
    factor_warps: int
    factor_stages: int
    scan_warps: int
    scan_stages: int
    precision: str


def choose(problem: Problem, knobs: Mapping[str, int | str]) -> Config:
    size = problem.sizes
    wide = problem.io_dtype.itemsize == 4
    key_gate = problem.traits.gate == "key"
    largest = max(size["K"], size["V"])
    chunk = int(knobs.get("chunk", 32 if wide or largest > 128 else 64))
    every = getattr(problem.options, "checkpoint_every_n_tokens", 0)
    if every:
        chunk = gcd(chunk, every)
    substeps = size.get("n", 1)
    queries = chunk // substeps
    if substeps * queries != chunk or queries < 16:
        queries = chunk
    block_v = int(knobs.get("block_v", min(size["V"], 32 if largest > 128 or wide else 64)))
    return Config(
        chunk=chunk,
        queries=queries,
        block_k=min(size["K"], int(knobs.get("block_k", 64))),
        block_v=block_v,
        factor_warps=int(knobs.get("factor_warps", 8 if key_gate else 4)),
        factor_stages=int(knobs.get("factor_stages", 2)),
        scan_warps=int(knobs.get("scan_warps", 4)),
        scan_stages=int(knobs.get("scan_stages", 2)),
        precision=str(knobs.get("precision", "tf32x3")),
    )
