"""Calls like earlier ones: a decoding step repeats itself thousands of times.

What a call checks, and how it is launched, follows from its options and from what can be seen of
its tensors without reading them: shapes, strides, dtypes, devices, and whether they want gradients.
A `Step` keeps what came of that for one such combination. A call that agrees with an earlier one
looks it up, and launches: no check is left out, since none could end differently, but for those of
addresses and values, which a step makes anew. Where anything is active that has to see operators
(`busy`), there is no key, and a call goes the long way.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch

from lagraph import infer
from lagraph.ops.argument import check_slots
from lagraph.ops.mode import busy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = ["Step", "Steps", "key_of"]

CAPACITY = 4096


def key_of(options: str, tensors: Sequence[Tensor | None]) -> Any:
    """What a call's checks and launch depend on; None where it has to cross its operator."""
    if torch.compiler.is_compiling() or busy():
        return None
    try:
        if torch.is_grad_enabled():
            wants = tuple([x is not None and x.requires_grad for x in tensors])
        else:
            wants = None
        seen = [
            None if x is None else (type(x), x.shape, x.stride(), x.dtype, x.get_device())
            for x in tensors
        ]
    except (AttributeError, RuntimeError, TypeError):  # no dense tensors: the checks will say so
        return None
    return options, wants, *seen


class Step:
    """A launch in place, and what is left to check before it.

    launch: takes the kernel's tensors, sizes and addresses. places: which of the call's tensors
    the kernel takes, in its order; None for an absent one. writes: what is written, for whom
    versions count. apart: pairs of tensors whose stretches of memory may not meet.
    """

    __slots__ = ("apart", "device", "index", "launch", "op", "pick", "sizes", "slots",
                 "spans", "writes")  # fmt: skip

    def __init__(
        self, op: str, launch: Callable[..., None], places: Sequence[int | None],
        sizes: tuple[int, ...], tensors: Sequence[Tensor | None], writes: Sequence[int],
        apart: Sequence[tuple[int, int]], index: int, slots: int,
    ) -> None:  # fmt: skip
        self.op, self.launch, self.sizes = op, launch, sizes
        self.index, self.slots = index, slots
        absent = len(tensors)  # where a call's tensors are followed by a None
        self.pick = itemgetter(*(absent if i is None else i for i in places))
        self.writes = tuple(i for i in writes if tensors[i] is not None)
        span = [_span(x) for x in tensors]
        self.spans = tuple((places.index(i), span[i], places.index(j), span[j])
                           for i, j in apart if span[i] and span[j])  # fmt: skip
        first: Any = tensors[0]
        self.device = first.get_device()

    def run(self, tensors: Sequence[Tensor | None]) -> bool:
        """Launch, and tell whether that was possible: False where tensors overlap."""
        taken = self.pick((*tensors, None))
        start = [0 if x is None else x.data_ptr() for x in taken]
        for i, size, j, other in self.spans:
            if start[i] < start[j] + other and start[j] < start[i] + size:
                return False
        if infer.VALIDATE or self.device < 0:
            index = tensors[self.index]
            if index is not None:
                check_slots(self.op, index, self.slots)
        if self.device >= 0 and torch.cuda.current_device() != self.device:
            with torch.cuda.device(self.device):
                self.launch(taken, self.sizes, start)
        else:
            self.launch(taken, self.sizes, start)
        for i in self.writes:
            x: Any = tensors[i]
            if not x.is_inference():
                torch.autograd.graph.increment_version(x)
        return True


def _span(x: Tensor | None) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if x is None or x.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    return int(last + 1) * x.element_size()


class Steps:
    """Steps by the key of their calls."""

    __slots__ = ("get", "known")

    def __init__(self) -> None:
        self.known: dict[Any, Step] = {}
        self.get = self.known.get

    def keep(self, key: Any, step: Step) -> None:
        """Remember a step for calls with this key."""
        if len(self.known) >= CAPACITY:
            self.known.clear()
        self.known[key] = step
