"""Functions of the gated delta rule under one name, as in attn_gym.linear.gdn."""

from lagraph.ops.chunk import chunk_gdn
from lagraph.ops.decode import recurrent_gdn_decode
from lagraph.ops.kinds import KernelOptions, SplitOptions
from lagraph.ops.paged import paged_chunk_gdn
from lagraph.ops.recipe import context_parallel_gdn
from lagraph.ops.recurrent import recurrent_gdn
from lagraph.ops.staged import chunk_gdn_prepare, chunk_gdn_prepare_backward

__all__ = [
    "KernelOptions",
    "SplitOptions",
    "chunk_gdn",
    "chunk_gdn_prepare",
    "chunk_gdn_prepare_backward",
    "context_parallel_gdn",
    "paged_chunk_gdn",
    "recurrent_gdn",
    "recurrent_gdn_decode",
]
