"""One validated linear-attention problem, in the form that engines read.

A `Problem` is what remains of a graph node, or of an op call, once every rule has held: the
family, the direction, the static sizes, the dtypes of the tensors that are present, and the
options with their defaults filled in. It holds neither T nor N: one problem serves every length.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = ["DIRECTIONS", "Direction", "Problem", "Traits"]

Direction = Literal["forward", "backward", "summary", "summary_backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "summary", "summary_backward")


@dataclass(frozen=True, slots=True)
class Traits:
    """What tells one family's recurrence from another's; kernels specialize on it.

    gate: the decay is one number per head, or one per key channel.
    delta: the update erases before it writes (the delta rule); False for Mamba-2.
    erase: the erase strength is `beta` per head or `beta` per key channel; None without erasing.
    write: the write strength is shared with the erase, or `w` per value channel; None without.
    substeps: one token makes `num_householder` updates.
    """

    gate: Literal["head", "key"]
    delta: bool = True
    erase: Literal["head", "key"] | None = "head"
    write: Literal["shared", "value"] | None = "shared"
    substeps: bool = False


@dataclass(frozen=True, slots=True)
class Problem:
    """A bound, validated node: see the module docstring.

    sizes: static letters of the family's shapes: H, HK, HV, HO, K, V and, for GDP, n.
    inputs: the node's input ports in declared order, absent optional ones too.
    outputs: the node's outputs in declared order, absent ones too.
    dtypes: dtype of every input that is present and of every output that is wanted; a name that
        is missing here is absent in this problem.
    options: attributes of the node by name, defaults resolved (`scale` is a float, for example).
    layouts: stride class of every present input: see `lagraph.desc.layout_class`.
    ranks: rank of every present input (GDP's `k`, `v`, `beta` have two, Mamba-2's `d` too).
    device: "cpu" or "cuda"; arch: CUDA compute capability as major * 10 + minor, else 0.
    """

    family: str
    direction: Direction
    traits: Traits
    sizes: Mapping[str, int]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dtypes: Mapping[str, torch.dtype]
    options: SimpleNamespace
    layouts: Mapping[str, int] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)
    device: str = "cpu"
    arch: int = 0
    index: int = 0

    def has(self, name: str) -> bool:
        """Whether this input is present, or this output is wanted."""
        return name in self.dtypes

    @property
    def in_place(self) -> bool:
        """Whether the final states are written into a pool, or into the initial states."""
        return (
            self.has("initial_state")
            and self.has("final_state")
            and (
                self.has("state_indices") or getattr(self.options, "overwrite_initial_state", False)
            )
        )

    @property
    def io_dtype(self) -> torch.dtype:
        """Dtype of the token tensors (q or, where there is no q, k)."""
        return self.dtypes["q"] if "q" in self.dtypes else self.dtypes["k"]
