"""Sizes that the warps of the forward share: chunks, parts, stages of the rings, registers."""

from typing import NamedTuple

__all__ = [
    "C",
    "CHAINED",
    "COMPACT",
    "ERASE",
    "FACTORS",
    "FULL",
    "QUERY",
    "SLICE",
    "SPLIT",
    "STAGGER",
    "WRITE",
    "Stages",
    "registers",
]

C = 64  # steps of a chunk
SLICE = 64  # rows of V of one warpgroup
# Rows of factors that the state's warpgroups read, per token: of S k, of S q, of u in the update.
ERASE, QUERY, WRITE, FACTORS = 0, 1, 2, 3
CHAINED = True  # kernels of a cut call start while the one before them ends
STAGGER = True  # two advancing warpgroups start a chunk in turn


class Stages(NamedTuple):
    """Of the rings."""

    K: int = 3
    Q: int = 2
    V: int = 2
    O: int = 2
    factors: int = 3

    @property
    def blocks(self) -> int:
        """As many as of factors, so that where one is free the other is."""
        return self.factors


# Of one CTA an SM, of two, and where T and P are kept in two parts.
FULL, COMPACT, SPLIT = Stages(), Stages(O=1, factors=2), Stages(factors=2)

# Registers a thread by warpgroup (load, advance, factor), by the number of advancing warpgroups:
# together no more than a launch gives, or whoever asks for more waits for ever: 512 with four
# warpgroups, 504 with three, 240 each where two CTAs share an SM.
REGISTERS = {1: (96, 240, 128), 2: (48, 192, 80)}
SMALL = {1: (96, 240, 128), 2: (64, 160, 128)}  # K of 64
HALF = (32, 144, 64)  # each of two CTAs


def registers(slices: int, K: int, per_sm: int) -> tuple[int, int, int]:
    """Registers a thread of the loading, advancing and factoring warpgroups."""
    if per_sm == 2:
        return HALF
    return (SMALL if K == 64 else REGISTERS)[slices]
