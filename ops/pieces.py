"""Pieces of a span: the segments of a rank, long ones cut, and what each direction summarizes.

A rank with few heads leaves most of a GPU idle, as the serial pass walks a segment from end to end.
So the recipe cuts long segments into pieces, which run side by side. A piece is to a segment what a
segment is to a sequence: its summary says what it makes of the state that enters. A scan over the
summaries gives the map from a segment's start to each of its cuts, before the exchange; the states
at all cuts are one product after it. Slots of the exchange stay one a fragment.

`Pieces` holds the tables of one layout for one number of pieces. With caps their shapes depend on
the caps, the span's length and that number alone.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from heapq import heapreplace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from lagraph.ops.layout import ContextParallelPlan

__all__ = ["Part", "Pieces", "Rows", "balanced", "cut"]

GRAIN = 64  # pieces are multiples of it: no chunk of any kernel is cut
ALIGN = 16  # rows of a window's start: pointers stay aligned
GAPS = 8  # a part of a window that may be gaps; where there are more, its rows are joined
# What `balanced` weighs, in tokens of a serial walk, by times of GDN and Mamba-2 on one H200: the
# factors of a summary's token; a step of the scan over links, for one of them, and of Mamba-2's.
FACTORS = 0.25
STEP = 45, 5
LONG = 8  # segments shorter than this part of what one walk gets are taken to fill gaps
FINER = (1, 1.5, 2, 3, 4, 6)  # numbers of pieces that it tries, of what fills the device once
GAIN = 0.97  # what finer pieces have to come to, for others may know what a model does not


class Part(NamedTuple):
    """Neighbouring pieces [first, last) of tokens [start, stop), which all wait for other ranks in
    a direction, or none of them."""

    waits: bool
    first: int
    last: int
    start: int
    stop: int


@dataclass(frozen=True)
class Rows:
    """The ranges that one direction summarizes, R of them in token order, as one call of a node.

    need: "map", "bias" where no transition is asked for, or "none" where there are no rows.
    spans: the tokens that the call is given: a window from the first row to the last one; or, where
        much of that is gaps, the rows alone, to be joined; one without tokens where there are none.
    offsets: int32 [S + 1] its segments: the rows, and gaps between them.
    at: int64 [R] the segment of every row. dense: whether there are no gaps.
    feed: int64 [S] the span's segment whose initial state (or cotangent of its last state) enters,
        or `segments` for zero.
    bounds: int32 [R, 2] the rows as ranges of the span; fed: int64 [R] their feed.
    links: int64 [L + 1] the row of every piece of a cut segment but the one applied last, segment
        after segment in order of application; R, the identity, at the end.
    steps: int64 [n, L + 1] step i of the scan composes each link with the one 2^i before it in its
        segment, or with the identity at L.
    through: int64 [L] the segment of every link.
    parts: the span in parts that wait for others or do not; none with caps.
    head, tail: int64 [slots] a slot's map is that of link `head` (L: the identity), then row `tail`
        (R: the identity, where nobody waits for the slot).
    """

    need: str
    spans: tuple[tuple[int, int], ...]
    dense: bool
    parts: tuple[Part, ...]
    offsets: Tensor
    at: Tensor
    feed: Tensor
    bounds: Tensor
    fed: Tensor
    links: Tensor
    steps: Tensor
    through: Tensor
    head: Tensor
    tail: Tensor


@dataclass(frozen=True)
class Pieces:
    """One layout's pieces.

    cu_seqlens: int32 [P + 1] offsets of the pieces, padded with the span's length.
    first, last: int64 [segments] the pieces that a segment starts and ends with.
    whole: whether no segment is cut, so that pieces are segments.
    entry, exit: int64 [P] where a piece's entering state (leaving cotangent) stands among those of
        the segments and, after them, of the links.
    moves: int64 [R of reverse] the forward row whose transition is a reverse row's transposed, or
        R of forward where none is wanted.
    """

    cu_seqlens: Tensor
    first: Tensor
    last: Tensor
    whole: bool
    entry: Tensor
    exit: Tensor
    moves: Tensor
    forward: Rows
    reverse: Rows

    def copy_(self, other: Pieces) -> None:
        """Take the values of another layout of the same caps in place."""
        for mine, theirs in ((self, other), (self.forward, other.forward),
                             (self.reverse, other.reverse)):  # fmt: skip
            for field in fields(mine):
                held = getattr(mine, field.name)
                if isinstance(held, torch.Tensor):
                    held.copy_(getattr(theirs, field.name))


def _crossings(plan: ContextParallelPlan) -> tuple[dict[int, int], dict[int, int]]:
    """By segment, the slot whose forward summary is of that segment; and the reverse summary."""
    starts, terminal = set(plan.starts), set(plan.terminal)
    sent: dict[int, int] = {}
    returned: dict[int, int] = {}
    at = 0
    for slot, fragment in enumerate(plan.fragments):
        if fragment and at not in starts:
            returned[at] = slot
        at += len(fragment)
        if fragment and at - 1 not in terminal:
            sent[at - 1] = slot
    return sent, returned


def _time(lengths: list[float], width: int) -> float:
    """Until all walks of these lengths are done, `width` at a time, started in order."""
    busy = [0.0] * width
    for length in lengths:
        heapreplace(busy, busy[0] + length)
    return max(busy)


def balanced(plan: ContextParallelPlan, width: int, least: int, log2_decay: bool) -> int:
    """The number of pieces that should take a step the least time, forward and backward.

    A cut shortens the walk of a segment, and costs a summary of all of its pieces but one: worth it
    for a sequence that outlasts the others, not where documents fill the device by themselves.

    width: walks that run at a time. least: tokens of a piece. log2_decay: of Mamba-2, whose
    transitions need no walk. Lengths on the host decide, nothing else.
    """
    tokens = plan.cu_seqlens[-1]
    once = max(min(width, tokens // least), 1)
    if once == 1:
        return 1
    (sent, returned), starts = _crossings(plan), set(plan.starts)
    lengths = [part.length for part in plan.subsequences]
    known = [
        (length, i in sent, i in returned, i in starts) for i, length in enumerate(lengths)
        if length * LONG * width > tokens or i in sent or i in returned
    ]  # fmt: skip

    def time(count: int) -> float:
        most = -(-tokens // count)
        walks: list[float] = []
        forward: list[float] = []
        reverse: list[float] = []
        maps = 1
        for length, onward, back, begins in known:
            parts = -(-length // most)
            rows = parts - 1 + onward
            walks += [length / parts] * parts
            forward += [length / parts] * rows
            reverse += [length / parts] * (parts - 1 + back)
            if rows > begins and not log2_decay:
                maps = 2
        links = sum(len(rows) * len(rows).bit_length() for rows in (forward, reverse))
        return (
            3 * max(_time(walks, width), tokens / width)  # outputs; states, and back
            + maps * _time(forward, width) + _time(reverse, width)
            + FACTORS * (sum(forward) + sum(reverse)) / width
            + STEP[log2_decay] * links
        )  # fmt: skip

    best, chosen = time(1), 1
    for count in sorted({min(int(once * by), tokens // least) for by in FINER}):
        needed = time(count)
        if needed < GAIN * best:
            best, chosen = needed, count
    return chosen


class _Span:
    """A span on the host, cut.

    bounds: tokens of every piece; pieces: for every segment its pieces, in order.
    sent, returned: by segment the slot whose forward (reverse) summary is of that segment.
    """

    def __init__(self, plan: ContextParallelPlan, count: int) -> None:
        offsets = plan.cu_seqlens
        self.tokens = offsets[-1]
        self.starts, self.terminal = set(plan.starts), set(plan.terminal)
        self.bounds: list[tuple[int, int]] = []
        self.pieces: list[range] = []
        most = -(-max(self.tokens, 1) // count)
        for start, stop in pairwise(offsets):
            parts = -(-(stop - start) // most)
            even = -(-(stop - start) // parts)
            step = even if parts == 1 else -(-even // GRAIN) * GRAIN
            begin = len(self.bounds)
            self.bounds += pairwise([*range(start, stop, step), stop])
            self.pieces.append(range(begin, len(self.bounds)))
        self.sent, self.returned = _crossings(plan)

    def chain(self, segment: int, reverse: bool) -> range:
        """A segment's pieces in order of application."""
        return self.pieces[segment][::-1] if reverse else self.pieces[segment]

    def parts(self, reverse: bool) -> tuple[Part, ...]:
        """Runs of segments whose entering state (leaving cotangent) comes from others, or not."""
        waiting = self.sent if reverse else self.returned
        made: list[Part] = []
        for segment, pieces in enumerate(self.pieces):
            waits, stop = segment in waiting, self.bounds[pieces[-1]][1]
            part = Part(waits, pieces[0], pieces[-1] + 1, self.bounds[pieces[0]][0], stop)
            if made and made[-1].waits == waits:
                part = made.pop()._replace(last=part.last, stop=stop)
            made.append(part)
        return tuple(made)

    def rows(self, reverse: bool) -> list[tuple[int, int, bool, bool]]:
        """The pieces to summarize: (piece, segment, is its segment's state known here where the
        map is applied, does anything get through).

        A piece is summarized for the pieces after it in its segment, and for other fragments. Its
        segment's own initial state (reverse: the loss's cotangent of its last state) is known, and
        enters the summary of the piece that it reaches first.
        """
        ends = self.terminal if reverse else self.starts
        wanted = self.returned if reverse else self.sent
        found = []
        for segment in range(len(self.pieces)):
            chain = self.chain(segment, reverse)
            for piece in chain:
                if piece != chain[-1] or segment in wanted:
                    entered = piece == chain[0]
                    fed = entered and (reverse or segment in ends)
                    found.append((piece, segment, fed, not (entered and segment in ends)))
        return sorted(found)


def cut(
    plan: ContextParallelPlan,
    count: int,
    device: torch.device,
    *,
    segments: int,
    slots: int,
    capped: bool,
) -> Pieces:
    """Cut a span into about `count` equal pieces, at the boundaries of its segments too.

    segments, slots: of the routing, whose caps they are if it has any.
    """
    span = _Span(plan, count)
    pad = count - 1 if capped else 0
    used, held = len(span.bounds), len(span.pieces)
    many = segments + pad if capped else max(used, segments)
    # A segment without tokens (padding) has a piece without tokens.
    empty = range(used, used + segments - held)
    first, last = ([*(row[end] for row in span.pieces), *empty] for end in (0, -1))
    entry, exit_ = [segments - 1] * many, [segments - 1] * many
    for i in range(segments):
        entry[first[i]] = exit_[last[i]] = i

    def ints(values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device)

    def rows(reverse: bool) -> Rows:
        found = span.rows(reverse)
        total = slots + pad if capped else len(found)
        ranges = [span.bounds[piece] for piece, *_ in found]
        fed = [segment if known else segments for _, segment, known, _ in found]
        start = ranges[0][0] // ALIGN * ALIGN if ranges and not capped else 0
        stop = ranges[-1][1] if ranges else start
        spans = [(0, span.tokens) if capped else (start, stop)]
        gaps = stop - start - sum(end - begin for begin, end in ranges)
        joined = not capped and GAPS * gaps > stop - start
        if joined:
            spans = []
            for begin, end in ranges:
                if spans and spans[-1][1] == begin:
                    begin, _ = spans.pop()
                spans.append((begin, end))
        # Padded rows have no tokens, and every row of a layout with caps has a gap before it.
        ranges += [(stop, stop)] * (total - len(ranges))
        fed += [segments] * (total - len(fed))
        offsets, at, feed = [0], [], []
        for (begin, end), state in zip(ranges, fed, strict=True):
            if capped or (not joined and begin - start > offsets[-1]):
                offsets.append(begin - start)
                feed.append(segments)
            at.append(len(feed))
            offsets.append(offsets[-1] + end - begin)
            feed.append(state)
        index = {piece: r for r, (piece, *_) in enumerate(found)}
        sources, target = (exit_, "returned") if reverse else (entry, "sent")
        links: list[int] = []  # rows
        through: list[int] = []
        before: list[int] = []  # links of the same segment before each
        head, tail = [-1] * slots, [total] * slots
        for segment in range(held):
            chain = span.chain(segment, reverse)
            for position, (piece, then) in enumerate(pairwise(chain)):
                sources[then] = segments + len(links)
                links.append(index[piece])
                through.append(segment)
                before.append(position)
            slot = getattr(span, target).get(segment)
            if slot is not None:
                tail[slot] = index[chain[-1]]
                head[slot] = len(links) - 1 if len(chain) > 1 else -1
        none = pad if capped else len(links)  # the identity among the links
        deepest = none if capped else max(before, default=-1) + 1
        spare = none - len(links)
        before += [0] * (spare + 1)
        steps = [
            [i - (1 << n) if position >> n else none for i, position in enumerate(before)]
            for n in range(max(deepest - 1, 0).bit_length())
        ]
        need = "map" if capped or any(row[3] for row in found) else "bias" if found else "none"
        return Rows(
            need, tuple(spans), len(at) == len(feed),
            () if capped else span.parts(reverse),
            ints(offsets, torch.int32), ints(at), ints(feed),
            torch.tensor(ranges, dtype=torch.int32).reshape(-1, 2).to(device), ints(fed),
            ints(links + [total] * (spare + 1)),
            torch.tensor(steps, dtype=torch.int64).reshape(-1, none + 1).to(device),
            ints(through + [0] * spare), ints([none if i < 0 else i for i in head]), ints(tail),
        )  # fmt: skip

    forward, reverse = rows(False), rows(True)
    at = {piece: r for r, (piece, *_) in enumerate(span.rows(False))}
    moves = [at[piece] if through else len(forward.at) for piece, _, _, through in span.rows(True)]
    moves += [len(forward.at)] * (len(reverse.at) - len(moves))
    edges = [start for start, _ in span.bounds]
    return Pieces(
        ints(edges + [span.tokens] * (many + 1 - len(edges)), torch.int32),
        ints(first), ints(last), len(forward.links) == 1,
        ints(entry), ints(exit_), ints(moves), forward, reverse,
    )  # fmt: skip
