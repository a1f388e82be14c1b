"""The operators: fifteen functions with autograd, `torch.compile` and autocast, and what is built
of them.

Three per family on packed rows: the forward (differentiable), the summary of a span, and the
summary of its gradient, generated from `lagraph.nodes`. On batches [B, T, ...] there are `chunk_*`
for training and prefill; `recurrent_*`, `paged_chunk_*` and one-token `*_decode` for states that
are carried; the short convolution, gates and masks. `lagraph.ops.context_parallel` spreads one
sequence over ranks. `ops/__init__.pyi` has every signature.
"""

# ruff: noqa: F401 (the names imported here are the package's)

from typing import Any

from lagraph.ops import context_parallel, gdn, kda
from lagraph.ops.accept import accept_states
from lagraph.ops.active import (
    active_token_mask,
    mask_inactive_token_gradients,
    mask_inactive_tokens,
)
from lagraph.ops.chunk import chunk_gdn, chunk_gdn2, chunk_gdp, chunk_kda, chunk_mamba2
from lagraph.ops.conv import (
    ShortConvConfig,
    causal_conv1d,
    causal_conv1d_decode,
    paged_causal_conv1d,
    register_activation,
)
from lagraph.ops.decode import (
    recurrent_gdn2_decode,
    recurrent_gdn_decode,
    recurrent_gdp_decode,
    recurrent_kda_decode,
    recurrent_mamba2_decode,
)
from lagraph.ops.gate import bound_gate, gate_transform
from lagraph.ops.kinds import GateTransform, Impl, KernelOptions, ReplayState, SplitOptions
from lagraph.ops.paged import (
    paged_chunk_gdn,
    paged_chunk_gdn2,
    paged_chunk_gdp,
    paged_chunk_kda,
    paged_chunk_mamba2,
)
from lagraph.ops.recurrent import (
    recurrent_gdn,
    recurrent_gdn2,
    recurrent_gdp,
    recurrent_kda,
    recurrent_mamba2,
)
from lagraph.ops.register import register as _register
from lagraph.registry import families as _families

_written = [
    name for name, item in globals().items()
    if not name.startswith("_") and getattr(item, "__module__", "").startswith("lagraph.ops.")
]  # fmt: skip
_functions: dict[str, Any] = {
    name: function
    for family in _families()
    for name, function in _register(family).items()
}  # fmt: skip
globals().update(_functions)

__all__ = sorted([*_functions, *_written])
