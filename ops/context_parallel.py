"""Context parallelism under one name, as in attn_gym.linear.context_parallel.

Plans and routing (`lagraph.ops.layout`), fragment tables, the algebra on summaries, exchanges,
staged operators, and the recipes of all five families. The staged entry points and the recipes of
GDN and KDA are in `lagraph.ops.gdn` and `lagraph.ops.kda`, too.
"""

from lagraph.ops.algebra import compose_summaries, merge_state, neutral_summary
from lagraph.ops.exchange import (
    compose_conv_histories,
    compose_entry_states,
    compose_exit_cotangents,
    context_parallel_conv_history,
    fold_slots,
)
from lagraph.ops.fragments import (
    contiguous_fragments,
    document_aligned_fragments,
    zigzag_fragments,
)
from lagraph.ops.layout import (
    ContextParallelPlan,
    ContextParallelRouting,
    Fragment,
    Slot,
    Subsequence,
)
from lagraph.ops.recipe import (
    context_parallel_chunk,
    context_parallel_gdn,
    context_parallel_gdn2,
    context_parallel_gdp,
    context_parallel_kda,
    context_parallel_mamba2,
    grad_summary_slots,
    summary_slots,
)
from lagraph.ops.staged import (
    PreparedBackward,
    PreparedForward,
    StagedOp,
    chunk_gdn2_prepare,
    chunk_gdn2_prepare_backward,
    chunk_gdn_prepare,
    chunk_gdn_prepare_backward,
    chunk_gdp_prepare,
    chunk_gdp_prepare_backward,
    chunk_kda_prepare,
    chunk_kda_prepare_backward,
    chunk_mamba2_prepare,
    chunk_mamba2_prepare_backward,
)

__all__ = [
    "ContextParallelPlan",
    "ContextParallelRouting",
    "Fragment",
    "PreparedBackward",
    "PreparedForward",
    "Slot",
    "StagedOp",
    "Subsequence",
    "chunk_gdn2_prepare",
    "chunk_gdn2_prepare_backward",
    "chunk_gdn_prepare",
    "chunk_gdn_prepare_backward",
    "chunk_gdp_prepare",
    "chunk_gdp_prepare_backward",
    "chunk_kda_prepare",
    "chunk_kda_prepare_backward",
    "chunk_mamba2_prepare",
    "chunk_mamba2_prepare_backward",
    "compose_conv_histories",
    "compose_entry_states",
    "compose_exit_cotangents",
    "compose_summaries",
    "context_parallel_chunk",
    "context_parallel_conv_history",
    "context_parallel_gdn",
    "context_parallel_gdn2",
    "context_parallel_gdp",
    "context_parallel_kda",
    "context_parallel_mamba2",
    "contiguous_fragments",
    "document_aligned_fragments",
    "fold_slots",
    "grad_summary_slots",
    "merge_state",
    "neutral_summary",
    "summary_slots",
    "zigzag_fragments",
]
