"""What the frost engine serves, and where it is preferred."""

import torch

from lagraph.select import Preference, SupportTable

__all__ = ["KERNELS", "PREFER", "SUPPORT"]

# The kernel behind each family and direction: its signature class, as an import string.
KERNELS = {("gdn", "forward"): "lagraph.engines.frost.kernels.forward:Forward"}

# Where the engine is chosen without a pin: where it was measured faster than those after it. A row
# holds the measurement. One CTA walks a sequence and head, so that with fewer heads one long
# sequence leaves SMs idle; Triton cuts it. Strengths up to 2 amplify rounding: see docs/engines.md.
PREFER: tuple[Preference, ...] = (
    Preference(
        "gdn",
        "forward",
        where="64 heads or more, strengths up to 1",
        measured="H200, bf16, 8 x 1024 tokens, 16/64 heads, slow gates: 0.195 ms, Triton 0.360",
        holds=lambda problem: (
            problem.sizes["HO"] >= 64 and not getattr(problem.options, "allow_neg_eigval", False)
        ),
    ),
)

SUPPORT = SupportTable(
    devices=frozenset({"cuda"}),
    default_on=frozenset({"cuda"}),
    dtypes=(torch.bfloat16, torch.float16),
    arch=(90, 90),
    dims={"K": (64, 128), "V": (64, 128)},
    layouts=1,  # TMA reads strides that are multiples of 16 bytes
    loose=2,  # gates and strengths per head, offsets, parameters: plain loads
    free=frozenset({"beta"}),  # token-major, it has a third axis
    serves=frozenset(KERNELS),
    knobs={"rows": (64, 128)},
    without={"checkpoint_every_n_tokens": "its kernel writes no checkpoints yet"},
    prefer=PREFER,
    summary="CuTe DSL kernels, SM90 alone, K and V in {64, 128}, bf16 and fp16",
)
