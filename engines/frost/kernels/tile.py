"""Sizes that the warps of the forward share: chunks, parts, stages of the rings, registers."""

__all__ = [
    "BLOCK_STAGES",
    "C",
    "ERASE",
    "FACTORS",
    "FACTOR_STAGES",
    "K_STAGES",
    "O_STAGES",
    "PART",
    "QUERY",
    "Q_STAGES",
    "REGISTERS",
    "SLICE",
    "STAGGER",
    "SUBSTEPS",
    "V_STAGES",
    "WRITE",
]

C = 64  # steps of a chunk
PART = 16  # rows of a block of T
SLICE = 64  # rows of V of one warpgroup
K_STAGES, Q_STAGES, V_STAGES, O_STAGES, FACTOR_STAGES, BLOCK_STAGES = 3, 2, 2, 2, 3, 2
# Rows of factors that the state's warpgroups read, per token: of S k, of S q, of u in the update.
ERASE, QUERY, WRITE, FACTORS = 0, 1, 2, 3
STAGGER = True  # two advancing warpgroups start a chunk in turn
# Registers a thread by warpgroup (load, advance, factor), by the number of advancing warpgroups:
# together at most 65536 a CTA.
REGISTERS = {1: (96, 240, 128), 2: (48, 192, 80)}
SUBSTEPS = {1: (96, 240, 128), 2: (48, 176, 112)}  # with fewer queries, whose masks are longer
