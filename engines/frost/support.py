"""What the frost engine serves, and where it is preferred."""

import torch

from lagraph.select import Preference, SupportTable

__all__ = ["KERNELS", "PREFER", "SUPPORT"]

# The kernel behind each family and direction: its signature class, as an import string.
KERNELS = {("gdn", "forward"): "lagraph.engines.frost.kernels.forward:Forward"}

# Where the engine is chosen without a pin: where it was measured faster than those after it. A row
# holds the measurement. None yet.
PREFER: tuple[Preference, ...] = ()

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
