"""The operators: fifteen functions with autograd, `torch.compile` and autocast.

Three per family: the forward (differentiable), the summary of a span, and the summary of its
gradient. Signatures are generated from `lagraph.nodes`; `ops/__init__.pyi` has them in full.
"""

from typing import Any

from lagraph.ops.register import register as _register
from lagraph.registry import families as _families

_functions: dict[str, Any] = {
    name: function
    for family in _families()
    for name, function in _register(family).items()
}  # fmt: skip
globals().update(_functions)

__all__ = sorted(_functions)
