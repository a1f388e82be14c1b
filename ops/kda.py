"""Functions of Kimi delta attention under one name, as in attn_gym.linear.kda."""

from lagraph.ops.active import (
    active_token_mask,
    mask_inactive_token_gradients,
    mask_inactive_tokens,
)
from lagraph.ops.chunk import chunk_kda
from lagraph.ops.decode import recurrent_kda_decode
from lagraph.ops.gate import bound_gate
from lagraph.ops.kinds import KernelOptions, ReplayState
from lagraph.ops.paged import paged_chunk_kda
from lagraph.ops.recipe import context_parallel_kda
from lagraph.ops.recurrent import recurrent_kda
from lagraph.ops.staged import chunk_kda_prepare, chunk_kda_prepare_backward

__all__ = [
    "KernelOptions",
    "ReplayState",
    "active_token_mask",
    "bound_gate",
    "chunk_kda",
    "chunk_kda_prepare",
    "chunk_kda_prepare_backward",
    "context_parallel_kda",
    "mask_inactive_token_gradients",
    "mask_inactive_tokens",
    "paged_chunk_kda",
    "recurrent_kda",
    "recurrent_kda_decode",
]
