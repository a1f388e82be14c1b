"""What the frost engine serves, and where it is preferred."""

import torch

from lagraph.select import Preference, SupportTable

__all__ = ["KERNELS", "LINK", "PREFER", "SUPPORT"]

# The kernel behind each family and direction, a summary's first: its signature class, as an import
# string.
KERNELS = {
    (family, direction): "lagraph.engines.frost.kernels.forward:Forward"
    for family in ("gdn", "gdp")
    for direction in ("forward", "summary")
}
# Joins segments.
LINK = "lagraph.engines.frost.kernels.link:Link"

# Where the engine is chosen without a pin: where it was measured faster than those after it. A row
# holds the measurement. One CTA walks a sequence and head, so that few of them leave SMs idle:
# Triton cuts sequences. Strengths up to 2 amplify rounding: see docs/engines.md.
PREFER: tuple[Preference, ...] = (
    Preference(
        "gdn",
        "forward",
        where="64 sequences x heads or more, without allow_neg_eigval",
        measured="H200, bf16, slow gates, ms, Triton's in brackets: 1 x 32768 tokens, 16/64 heads "
        "1.388 (1.753) at 59c90dc; 4 x 8192, 16/32 0.349 (0.700) and 8 x 1024, 16/64 0.195 (0.360) "
        "at 3db077f",
        holds=lambda problem: not getattr(problem.options, "allow_neg_eigval", False),
        least=64,
    ),
)

SUPPORT = SupportTable(
    devices=frozenset({"cuda"}),
    default_on=frozenset({"cuda"}),
    dtypes=(torch.bfloat16, torch.float16),
    arch=(90, 90),
    dims={"K": (64, 128), "V": (64, 128), "n": (2, 4)},
    layouts=1,  # TMA reads strides that are multiples of 16 bytes
    loose=2,  # gates and strengths per head, offsets, parameters: plain loads
    free=frozenset({"beta"}),  # token-major, it has a third axis
    serves=frozenset(KERNELS),
    knobs={"rows": (64, 128), "segment": (0, 1, 2, 4, 8, 16, 32, 64, 128)},
    multiples={"checkpoint_every_n_tokens": 64},
    prefer=PREFER,
    summary="CuTe DSL kernels, SM90 alone, K and V in {64, 128}, bf16 and fp16",
)
