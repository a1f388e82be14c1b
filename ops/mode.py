"""Whether a call may run its plan at once, or has to cross the boundary of a registered operator.

Modes, transforms, autocast, tracers and profilers see operators. Where none is active and all
tensors are plain, a direct call gives the same results and saves the crossings.
"""

from __future__ import annotations

import torch
from torch._C import _are_functorch_transforms_active as transforms
from torch._C import _get_tracing_state as tracing
from torch._C import _is_any_autocast_enabled as autocast
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch._C import _len_torch_function_stack as function_modes
from torch._C._autograd import _profiler_enabled as profiling
from torch.autograd import forward_ad

__all__ = ["PLAIN", "busy", "wrapping"]

# Types of tensors that bring no dispatch of their own.
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def wrapping() -> bool:
    """Whether a mode or a transform is active that may hand out other tensors than plain ones."""
    return bool(dispatch_modes() or function_modes() or transforms())


def busy() -> bool:
    """Whether anything is active that has to see operators, or changes what they do."""
    return bool(
        dispatch_modes()
        or function_modes()
        or transforms()
        or autocast()
        or profiling()
        or forward_ad._current_level >= 0
        or tracing() is not None
    )
