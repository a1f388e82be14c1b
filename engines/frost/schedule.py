"""How sequences run where few of them would leave SMs idle: a cost model of shapes alone.

Narrow: a CTA has 64 rows of V instead of 128, so that there are twice as many, and each is faster.
Cut: sequences are cut into segments.

The lengths of sequences are on the device, so the model goes by their mean; what it returns is
right for any lengths. T and N are in no key of anything compiled.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

__all__ = ["C", "Choice", "Shape", "choose"]

C = 64  # steps of a chunk
# Microseconds on an H200 (bf16, K = V = 128); how much longer with all SMs busy.
CLOSE, CLOSE_SUBSTEPS, CROWD = 2.5, 2.2, 0.07  # a chunk with outputs; with steps of a token
NARROW, NARROW_SUBSTEPS, NARROW_CROWD = 1.9, 1.4, 0.3  # the same for half of the rows
OPEN = 1.85  # a chunk of a segment that is opened: no queries, no outputs
LINK = 1.0  # a segment's state from that of the one before it
LAUNCH = 5.0  # of one more kernel
GAIN = 0.95  # a cut must be predicted to take at most this share of the time without
SHORT = 100.0  # what takes no longer is not cut: its launches cost the host more than is gained
SHORTEST = 4  # chunks a segment
MOST = 96  # segments a sequence


class Shape(NamedTuple):
    """heads: state heads. opens, closes: CTAs a head of a segment in either phase; closes 0 for a
    summary. sms: of the device. narrow: whether there is a kernel for half of the rows. n: steps
    of a token."""

    heads: int
    opens: int
    closes: int
    sms: int
    narrow: bool = False
    n: int = 1


class Choice(NamedTuple):
    """narrow: CTAs of 64 rows. span: chunks a segment, 0 for whole sequences. less: by how many the
    last but one is shorter. time: predicted microseconds."""

    narrow: bool
    span: int
    less: int
    time: float


def choose(shape: Shape, chunks: int, sequences: int) -> Choice:
    """How sequences of so many chunks on average run."""
    # Rounded, so that a server of many lengths soon knows all that it asks for.
    low = max(chunks.bit_length() - 5, 0)
    return _best(shape, -(-chunks >> low) << low, sequences)


@lru_cache(maxsize=4096)
def _best(shape: Shape, chunks: int, sequences: int) -> Choice:
    heads = sequences * shape.heads
    if shape.closes:
        time = chunks * _close(shape, heads * shape.closes)
    else:
        time = chunks * OPEN * _rounds(heads * shape.opens, shape.sms)
    best = Choice(False, 0, 0, time)
    if heads * max(shape.closes, 1) >= shape.sms:
        return best
    if shape.narrow:
        ctas = 2 * heads * shape.closes
        step = (NARROW if shape.n == 1 else NARROW_SUBSTEPS) * (
            1.0 + NARROW_CROWD * ctas / shape.sms
        )
        time = chunks * step * _rounds(ctas, shape.sms)
        best = min(best, Choice(True, 0, 0, time), key=_time)
    if shape.closes and best.time < SHORT:
        return best
    cut = [
        _cut(shape, chunks, heads, count, halved)
        for count in range(2, min(chunks // SHORTEST, MOST) + 1)
        for halved in (False, True)
        if count > 2 or not halved
    ]
    found = min(cut, key=_time, default=best)
    return found if found.time < GAIN * best.time else best


def _time(choice: Choice) -> float:
    return choice.time


def _rounds(ctas: int, sms: int) -> int:
    return -(-ctas // sms)


def _close(shape: Shape, ctas: int) -> float:
    """A chunk of each of so many CTAs with outputs."""
    alone = CLOSE if shape.n == 1 else CLOSE_SUBSTEPS
    return alone * (1.0 + CROWD * min(ctas / shape.sms, 1.0)) * _rounds(ctas, shape.sms)


def _cut(shape: Shape, chunks: int, heads: int, count: int, halved: bool) -> Choice:
    """In `count` segments, the last but one half as long or not."""
    span = -(-2 * chunks // (2 * count - 1)) if halved else -(-chunks // count)
    less = span // 2 if halved else 0
    if not shape.closes:
        time = span * OPEN * _rounds(heads * count * shape.opens, shape.sms) + count * LINK
        return Choice(False, span, 0, time)
    # Nothing is opened for the last segment's sake, and, from no state, no map of the first.
    ctas = heads * ((count - 1) * shape.opens - shape.opens // 2)
    time = span * OPEN * _rounds(ctas, shape.sms)
    if halved:
        halves = heads * shape.opens
        if ctas - halves // 2 <= shape.sms:  # two halves after one another
            time = span * OPEN
    time += span * _close(shape, heads * count * shape.closes)
    return Choice(False, span, less, time + (count - 1) * LINK + 2 * LAUNCH)
