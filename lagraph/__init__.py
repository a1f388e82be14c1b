"""Linear attention and state-space layers as graphs: GDN, KDA, GDN-2, GDP and Mamba-2.

`Graph` declares and runs one node; `lagraph.ops` has the same as functions with autograd. Engines
are loaded when a plan first needs one: importing lagraph loads neither Triton nor CuTe.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lagraph.choice import Explanation
from lagraph.desc import TensorDesc, data_type
from lagraph.errors import (
    DeviceMismatch,
    DtypeMismatch,
    GraphError,
    InvalidNode,
    InvalidOption,
    LagraphError,
    MissingBackend,
    NoEngine,
    NotDifferentiable,
    NotSupported,
    PlanNotOffered,
    RuleBroken,
    ShapeMismatch,
)
from lagraph.graph import Graph
from lagraph.handle import (
    Handle,
    build_plan_policy,
    create_handle,
    destroy_handle,
    heur_mode,
    set_stream,
)
from lagraph.tensor import Tensor
from lagraph.warmup import warmup

if TYPE_CHECKING:
    from lagraph import ops

__version__ = "0.1.0"

pygraph = Graph
cudnnGraphNotSupportedError = NotSupported

__all__ = [
    "DeviceMismatch",
    "DtypeMismatch",
    "Explanation",
    "Graph",
    "GraphError",
    "Handle",
    "InvalidNode",
    "InvalidOption",
    "LagraphError",
    "MissingBackend",
    "NoEngine",
    "NotDifferentiable",
    "NotSupported",
    "PlanNotOffered",
    "RuleBroken",
    "ShapeMismatch",
    "Tensor",
    "TensorDesc",
    "build_plan_policy",
    "create_handle",
    "cudnnGraphNotSupportedError",
    "data_type",
    "destroy_handle",
    "heur_mode",
    "ops",
    "pygraph",
    "set_stream",
    "warmup",
]


def __getattr__(name: str) -> Any:
    if name == "ops":  # registering the operators waits until they are wanted
        return import_module("lagraph.ops")
    raise AttributeError(f"module 'lagraph' has no attribute {name!r}")
