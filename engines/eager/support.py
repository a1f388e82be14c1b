"""What the eager engine serves."""

import torch

from lagraph.select import SupportTable

__all__ = ["SUPPORT"]

SUPPORT = SupportTable(
    devices=frozenset({"cpu", "cuda"}),
    default_on=frozenset({"cpu"}),  # a slow path on a GPU is never silent
    dtypes=(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    knobs={"chunk": (16, 32, 64, 128)},
    summary="PyTorch, any device, any head dims; on CUDA only when pinned",
)
