"""What the Triton engine serves."""

import torch

from lagraph.select import SupportTable

__all__ = ["SUPPORT"]

FAMILIES = ("gdn", "kda", "gdn2", "gdp", "mamba2")
DIRECTIONS = ("forward", "backward", "summary", "summary_backward")
DIMS = (16, 32, 64, 128, 256)

SUPPORT = SupportTable(
    devices=frozenset({"cuda"}),
    default_on=frozenset({"cuda"}),
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
    arch=(80, None),
    dims={"K": DIMS, "V": DIMS},
    layouts=2,
    loose=2,  # gates and strengths per head, offsets, parameters
    serves=frozenset((family, direction) for family in FAMILIES for direction in DIRECTIONS),
    knobs={
        "chunk": (16, 32, 64),
        "block_k": (16, 32, 64, 128),
        "block_v": (16, 32, 64, 128),
        "share": (1, 2, 4, 8),
        "segment": (0, 4, 8, 16, 32, 64, 128, 256, 512),
        "split": (0, 1, 2),
        "factor_warps": (1, 2, 4, 8),
        "factor_stages": (1, 2, 3),
        "factor_registers": (0, 128, 168),
        "scan_warps": (1, 2, 4, 8),
        "scan_stages": (1, 2, 3, 4),
    },
    summary="Triton kernels, SM80 and newer, K and V in {16, 32, 64, 128, 256}",
)
