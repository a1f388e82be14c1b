"""Batches [B, T, ...] as packed rows [B * T, ...], and the offsets of their sequences.

A batch whose rows follow each other in memory is viewed: a contiguous tensor, a column slice of a
fused projection, any batch of one. Where row T of one sequence and row 0 of the next are no step
of the token stride apart (a slice along T of several sequences, a [T, B, ...] tensor transposed)
no view exists, and the rows are copied.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import torch

from lagraph.ops.mode import PLAIN, wrapping

__all__ = ["offsets", "rows"]

CAPACITY = 256  # offsets kept; each is a few bytes a sequence

_OFFSETS: OrderedDict[Any, torch.Tensor] = OrderedDict()
_LOCK = threading.Lock()


def rows(x: torch.Tensor) -> torch.Tensor:
    """[B, T, ...] as [B * T, ...]: a view where the strides allow one, else a copy."""
    return x.flatten(0, 1)


def offsets(batch: int, tokens: int, like: torch.Tensor) -> torch.Tensor:
    """cu_seqlens [B + 1] of B sequences of T tokens, on the device of `like`.

    Kept by (B, T, device, stream): another stream would have to wait for the one that wrote them.
    A capture makes its own, whose memory is the graph's, so that no eviction reaches a graph.
    """
    device = like.device
    # Modes may make traced, fake or wrapped ones for plain tensors: of no use to later calls.
    if torch.compiler.is_compiling() or type(like) not in PLAIN or wrapping():
        return _make(batch, tokens, device)
    stream = 0
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return _make(batch, tokens, device)
        stream = torch.cuda.current_stream(device).cuda_stream
    key = (batch, tokens, device, stream)
    found = _OFFSETS.get(key)
    if found is None:
        with torch.inference_mode(False):  # later calls may save it for a backward
            found = _make(batch, tokens, device)
        with _LOCK:
            _OFFSETS[key] = found
            while len(_OFFSETS) > CAPACITY:
                _OFFSETS.popitem(last=False)
    return found


def _make(batch: int, tokens: int, device: torch.device) -> torch.Tensor:
    dtype = torch.int32 if batch * tokens < 2**31 else torch.int64
    return torch.arange(batch + 1, dtype=dtype, device=device) * tokens
