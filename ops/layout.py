"""Ownership of a global token stream: which rank holds what, and how states travel between ranks.

Terms (what a plan is made of is global, what touches a rank's tensors is local):

global stream   the whole packed stream, `cu_seqlens_global`                              global
sequence        one document of it                                                        global
fragment        a contiguous range of tokens that a rank owns; it may span sequences      global
subsequence     the tokens of a fragment in one sequence; one local cu_seqlens segment    global
span            a rank's fragments one after the other: its q, k, v, outputs              local
summary         the map of a range of the span from entering to leaving state             local
slot            (cp_rank, fragment) of the exchange: forward the summary of the fragment's last
                subsequence, backward the reverse map of its first; the identity if unwanted
predecessors    slots with the earlier pieces of a fragment's first sequence, in order
successors      slots with the later pieces of its last sequence, last one first
terminal        subsequences that end their sequence: true final states live there        local
starts          subsequences that start their sequence: initial states go there           local

Cuts need no alignment: chunks restart at every subsequence.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, fields
from itertools import accumulate
from operator import index
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lagraph.errors import DeviceMismatch, InvalidOption, RuleBroken, ShapeMismatch
from lagraph.ops.fragments import offsets_of, whole
from lagraph.ops.pieces import balanced, cut

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from lagraph.ops.pieces import Pieces

__all__ = ["ContextParallelPlan", "ContextParallelRouting", "Fragment", "Slot", "Subsequence"]

PLAN = "ContextParallelPlan.from_fragments"
ROUTING = "ContextParallelPlan.routing"


@dataclass(frozen=True, slots=True)
class Subsequence:
    """The part of one fragment inside one sequence: global tokens [start, stop)."""

    sequence: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Tokens."""
        return self.stop - self.start


Fragment = tuple[Subsequence, ...]
Slot = tuple[int, int]


@dataclass(frozen=True)
class ContextParallelPlan:
    """Ownership and routing of one rank, on the host, derived from every rank's fragments.

    table: table[cp_rank][slot] is that rank's fragment behind gather slot `slot`, cut at sequence
        boundaries; an empty fragment has no subsequences.
    cp_rank: this rank's row of the table: its rank in the group.
    predecessors: for each local fragment, the slots of the pieces before its first subsequence in
        the same sequence, in token order.
    successors: the slots of the pieces after its last subsequence, in reverse token order.
    terminal: local indices of the subsequences that end their sequence.
    starts: local indices of those that start theirs.
    chain: the most predecessors that any fragment of any rank has. 0 means that no sequence is cut.
    order: slots of all fragments that are not empty, in token order.
    """

    table: tuple[tuple[Fragment, ...], ...]
    cp_rank: int
    predecessors: tuple[tuple[Slot, ...], ...]
    successors: tuple[tuple[Slot, ...], ...]
    terminal: tuple[int, ...]
    starts: tuple[int, ...]
    chain: int
    order: tuple[Slot, ...]
    offsets: tuple[int, ...]

    @classmethod
    def from_fragments(
        cls,
        cu_seqlens_global: Sequence[int],
        fragments: Sequence[Sequence[tuple[int, int]]],
        cp_rank: int,
    ) -> ContextParallelPlan:
        """Build `cp_rank`'s plan.

        Args:
            cu_seqlens_global: Offsets of the sequences in the global stream, the end included.
            fragments: For every rank its fragments in span order, half-open ranges of global
                tokens. Together they tile [0, total) exactly once; any of them may be empty.
            cp_rank: This rank in the process group, a row of `fragments`.

        Raises:
            RuleBroken: The offsets are none, or the fragments do not tile the stream.
            InvalidOption: There is no such rank.
        """
        offsets = offsets_of(PLAN, "cu_seqlens_global", cu_seqlens_global)
        rows = _ranges(fragments)
        _check_tiling(offsets[-1], rows)
        mend = "Pass torch.distributed.get_rank(group)"
        cp_rank = whole(PLAN, "cp_rank", cp_rank, 0, mend)
        if cp_rank >= len(rows):
            raise InvalidOption(
                PLAN, "cp_rank", expected=f"a row of the {len(rows)} in fragments",
                got=repr(cp_rank), mend=mend,
            )  # fmt: skip
        table = tuple(tuple(_cut(offsets, *found) for found in row) for row in rows)
        pieces = sorted(
            (part.start, part.sequence, (rank, slot))
            for rank, row in enumerate(table)
            for slot, fragment in enumerate(row)
            for part in fragment
        )
        holders: dict[int, list[Slot]] = {}
        for _, sequence, slot in pieces:
            holders.setdefault(sequence, []).append(slot)
        before, after = [], []
        for position, fragment in enumerate(table[cp_rank]):
            at = (cp_rank, position)
            first = holders[fragment[0].sequence] if fragment else [at]
            last = holders[fragment[-1].sequence] if fragment else [at]
            before.append(tuple(first[: first.index(at)]))
            after.append(tuple(reversed(last[last.index(at) + 1 :])))
        parts = [part for fragment in table[cp_rank] for part in fragment]
        return cls(
            table, cp_rank, tuple(before), tuple(after),
            tuple(i for i, p in enumerate(parts) if p.stop == offsets[p.sequence + 1]),
            tuple(i for i, p in enumerate(parts) if p.start == offsets[p.sequence]),
            max((len(slots) - 1 for slots in holders.values()), default=0),
            tuple(dict.fromkeys(slot for _, _, slot in pieces)),
            offsets,
        )  # fmt: skip

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        """This rank's fragments in span order."""
        return self.table[self.cp_rank]

    @property
    def subsequences(self) -> tuple[Subsequence, ...]:
        """This rank's subsequences in span order."""
        return tuple(part for fragment in self.fragments for part in fragment)

    @property
    def cu_seqlens(self) -> tuple[int, ...]:
        """Span offsets, one segment per subsequence."""
        return tuple(accumulate((part.length for part in self.subsequences), initial=0))

    @property
    def slots(self) -> int:
        """Gather slots per rank: the fragments of the widest row, at least 1."""
        return max(1, *map(len, self.table))

    def global_token_ids(self, device: torch.device | str) -> Tensor:
        """Global token of every span token, int64: gathers global tensors into the span."""
        ids = [torch.arange(part.start, part.stop) for part in self.subsequences]
        return torch.cat([torch.empty(0, dtype=torch.int64), *ids]).to(device)

    def routing(
        self,
        device: torch.device | str,
        *,
        slots: int | None = None,
        max_subsequences: int | None = None,
        conv_history: int = 0,
    ) -> ContextParallelRouting:
        """This layout as device tensors; caps make their shapes independent of it.

        Args:
            device: Where the tensors go.
            slots: Fragments per rank, at most; this table's by default.
            max_subsequences: Segments per span, at most; this layout's by default (at least 1).
            conv_history: W - 1 of the short convolution; 0 for none.

        With a cap, nothing about this one layout is built into a call, so that a CUDA graph
        captured with it replays every layout of the same caps and span length. It then always
        exchanges, by all-gather.

        Raises:
            InvalidOption: A cap is below what the layout has, or no number.
        """
        return _routing(self, torch.device(device), slots, max_subsequences, conv_history)


@dataclass(frozen=True)
class ContextParallelRouting:
    """One layout of a plan as device tensors of fixed shapes: see `ContextParallelPlan.routing`.

    Host numbers: cp_rank, world, slots, tokens (of the span), chain (the longest chain of
    predecessors; with caps the longest there can be), capped (whether caps were given), aligned
    (whether every cut is a document boundary), order (slots in token order; empty with caps),
    forward_need and reverse_need (what others fold of this rank's slots: "map", or "bias" where
    nothing from beyond gets through any of them, or "none"; with caps always "map"), forward_waits
    and reverse_waits (whether this rank needs any slot at all; with caps always).

    cu_seqlens: int32 [max_subsequences + 1] span offsets, padded with the span's length.
    forward_bounds: int32 [slots, 2] range of each local fragment's last subsequence where it
        continues elsewhere, else empty; for `state_summaries`.
    reverse_bounds: int32 [slots, 2] range of its first subsequence where it continues from
        elsewhere, else empty; for `state_grad_summaries`.
    forward_sources, reverse_sources: int64 [slots] local index of that last, that first.
    forward_resets, reverse_resets: bool [slots] whether nothing from before (after) the fragment
        gets through it.
    predecessors: int64 [slots, world * slots - 1] flat cp_rank * slots + fragment indices of the
        slots before each fragment, in token order, padded with world * slots (the identity).
    successors: the same of its successors, in reverse token order.
    entry_sources: int64 [max_subsequences] local fragment whose folded predecessors are a
        segment's entry state, or slots for one that starts its sequence.
    exit_sources: the same of exit cotangents: or slots for one that ends its sequence.
    terminal: bool [max_subsequences] marks segments that end their sequence.
    starts: bool [max_subsequences] marks those that start theirs.
    sequences: int64 [max_subsequences] the global sequence of a segment; 0 where there is none.
    tail_sources: int64 [slots, conv_history] span token behind each position of a fragment's tail,
        or tokens where the tail is shorter.
    conv_sources: int64 [max_subsequences, conv_history] flat (rank * slots + fragment) *
        conv_history + position of each token before a segment, or world * slots * conv_history.
    """

    cp_rank: int
    world: int
    slots: int
    tokens: int
    chain: int
    capped: bool
    aligned: bool
    order: tuple[Slot, ...]
    forward_need: str
    reverse_need: str
    forward_waits: bool
    reverse_waits: bool
    cu_seqlens: Tensor
    forward_bounds: Tensor
    reverse_bounds: Tensor
    forward_sources: Tensor
    reverse_sources: Tensor
    forward_resets: Tensor
    reverse_resets: Tensor
    predecessors: Tensor
    successors: Tensor
    entry_sources: Tensor
    exit_sources: Tensor
    terminal: Tensor
    starts: Tensor
    sequences: Tensor
    tail_sources: Tensor
    conv_sources: Tensor
    # The layout that the tensors hold now, and its tables by number of pieces.
    _plan: list[ContextParallelPlan] = field(default_factory=list, compare=False, repr=False)
    _pieces: dict[int, Pieces] = field(default_factory=dict, compare=False, repr=False)
    _counts: dict[tuple[int, int, bool], int] = field(
        default_factory=dict, compare=False, repr=False
    )

    @classmethod
    def from_fragments(
        cls,
        cu_seqlens_global: Sequence[int],
        fragments: Sequence[Sequence[tuple[int, int]]],
        cp_rank: int,
        device: torch.device | str,
        *,
        slots: int | None = None,
        max_subsequences: int | None = None,
        conv_history: int = 0,
    ) -> ContextParallelRouting:
        """The routing of `ContextParallelPlan.from_fragments(...)`, in one step."""
        plan = ContextParallelPlan.from_fragments(cu_seqlens_global, fragments, cp_rank)
        return plan.routing(
            device, slots=slots, max_subsequences=max_subsequences, conv_history=conv_history
        )

    @property
    def exchanges(self) -> bool:
        """Whether a call communicates: not where no sequence is cut, unless a capture may be
        replayed with other layouts."""
        return self.capped or self.chain > 0

    def pieces(self, count: int) -> Pieces:
        """The span's segments, the long ones cut: see `lagraph.ops.pieces`. Made once, on first
        use, which reads nothing of the device; a capture has to find them made."""
        found = self._pieces.get(count)
        if found is None:
            found = self._pieces[count] = cut(
                self._plan[0], count, self.cu_seqlens.device,
                segments=len(self.sequences), slots=self.slots, capped=self.capped,
            )  # fmt: skip
        return found

    def balanced(self, width: int, least: int, log2_decay: bool) -> int:
        """The number of pieces that suits this layout: see `lagraph.ops.pieces`. Found once; not
        for a routing with caps, whose layout changes."""
        key = width, least, log2_decay
        if key not in self._counts:
            self._counts[key] = balanced(self._plan[0], *key)
        return self._counts[key]

    def copy_(self, other: ContextParallelRouting) -> ContextParallelRouting:
        """Take another layout's values in place, for the next replay of a captured graph.

        Raises:
            RuleBroken: One of the two has no caps, or group, caps or span length differ.
        """
        for name in ("cp_rank", "world", "slots", "tokens", "capped"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs or (name == "capped" and not mine):
                raise RuleBroken(
                    "ContextParallelRouting.copy_", "other", expected=f"{name} = {mine}",
                    got=str(theirs),
                    mend="Build both by plan.routing with the same slots and max_subsequences",
                )  # fmt: skip
        pairs = [(getattr(self, f.name), getattr(other, f.name), f.name) for f in fields(self)]
        tensors = [pair for pair in pairs if isinstance(pair[0], torch.Tensor)]
        for mine, theirs, name in tensors:
            if mine.shape != theirs.shape:
                raise ShapeMismatch(
                    "ContextParallelRouting.copy_", name, expected=f"shape {list(mine.shape)}",
                    got=str(list(theirs.shape)), mend="Give both the same caps",
                )  # fmt: skip
        for mine, theirs, _ in tensors:
            mine.copy_(theirs)
        for count, held in self._pieces.items():
            held.copy_(other.pieces(count))
        self._plan[:] = other._plan
        return self

    def validate(
        self, span: Tensor, group: dist.ProcessGroup, op: str = "context_parallel"
    ) -> None:
        """Refuse a routing of another group, rank, span length or device. Host only.

        span: [1, tokens, ...]. Raises RuleBroken, ShapeMismatch, DeviceMismatch.
        """
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        if rank < 0 or (world, rank) != (self.world, self.cp_rank):
            got = "none of its ranks" if rank < 0 else f"rank {rank} of {world}"
            raise RuleBroken(
                op, "group", expected=f"rank {self.cp_rank} of {self.world}, as the routing's plan",
                got=got, mend="Build the plan with one row for each rank of this group, in order, "
                "and cp_rank=torch.distributed.get_rank(group)",
            )  # fmt: skip
        if span.dim() < 2 or span.shape[0] != 1 or span.shape[1] != self.tokens:
            raise ShapeMismatch(
                op, "routing", expected=f"a span [1, {self.tokens}, ...]",
                got=f"shape {list(span.shape)}",
                mend="Gather the span with plan.global_token_ids, in a batch of one",
            )  # fmt: skip
        if span.device != self.cu_seqlens.device:
            raise DeviceMismatch(
                op, "routing", expected=f"device {span.device}, as the span",
                got=str(self.cu_seqlens.device), mend="Build it with plan.routing(q.device)",
            )  # fmt: skip


def _ranges(fragments: Any) -> list[list[tuple[int, int]]]:
    """A fragment table as integers."""
    pairs = "pairs (start, stop) of integers, start <= stop"
    mend = "Give every rank of the group a list of half-open ranges"
    try:
        rows = [[tuple(fragment) for fragment in row] for row in fragments]
    except TypeError:
        raise InvalidOption(
            PLAN, "fragments", expected=f"for every rank a list of {pairs}",
            got=repr(fragments)[:80], mend=mend,
        ) from None  # fmt: skip
    made: list[list[tuple[int, int]]] = []
    for row in rows:
        made.append([])
        for found in row:
            if len(found) != 2:
                raise RuleBroken(PLAN, "fragments", expected=pairs, got=str(found), mend=mend)
            try:
                start, stop = index(found[0]), index(found[1])
            except TypeError:
                raise InvalidOption(
                    PLAN, "fragments", expected=pairs, got=str(found), mend=mend
                ) from None
            if start > stop:
                raise RuleBroken(PLAN, "fragments", expected=pairs, got=str(found), mend=mend)
            made[-1].append((start, stop))
    return made


def _check_tiling(total: int, fragments: Sequence[Sequence[tuple[int, int]]]) -> None:
    if not fragments:
        raise RuleBroken(PLAN, "fragments", expected="one row for each rank", got="none",
                         mend="Give every rank of the group a list of (start, stop)")  # fmt: skip
    at = 0
    ranges = [found for row in fragments for found in row]
    for found in ranges:
        if found[0] < 0 or found[1] > total:
            raise RuleBroken(
                PLAN, "fragments", expected=f"ranges inside [0, {total})", got=str(found),
                mend="Cut the stream of cu_seqlens_global",
            )  # fmt: skip
    for start, stop in sorted(found for found in ranges if found[0] < found[1]):
        if start != at:
            break
        at = stop
    else:
        if at == total:
            return
        start = total
    what = f"token {start} twice" if start < at else f"nobody for tokens [{at}, {start})"
    raise RuleBroken(
        PLAN, "fragments", expected=f"every token of [0, {total}) exactly once", got=what,
        mend="Let each fragment start where another one stops",
    )  # fmt: skip


def _cut(offsets: Sequence[int], start: int, stop: int) -> Fragment:
    """A fragment as subsequences; sequences without tokens have none."""
    parts = []
    while start < stop:
        sequence = bisect_right(offsets, start) - 1
        end = min(stop, offsets[sequence + 1])
        parts.append(Subsequence(sequence, start, end))
        start = end
    return tuple(parts)


def _cap(name: str, given: int | None, needed: int) -> int:
    """A cap of at least what this layout has."""
    if given is None:
        return needed
    return whole(ROUTING, name, given, needed, f"Raise {name} to what this layout has, or drop it")


def _routing(
    plan: ContextParallelPlan,
    device: torch.device,
    slots: int | None,
    max_subsequences: int | None,
    history: int,
) -> ContextParallelRouting:
    capped = slots is not None or max_subsequences is not None
    mine, parts, cu = plan.fragments, plan.subsequences, plan.cu_seqlens
    width = _cap("slots", slots, plan.slots)
    segments = _cap("max_subsequences", max_subsequences, max(len(parts), 1))
    history = _cap("conv_history", history, 0)
    world, tokens = len(plan.table), cu[-1]
    starts, terminal = set(plan.starts), set(plan.terminal)
    none, links = world * width, max(world * width - 1, 0)

    forward, reverse = [[0, 0] for _ in range(width)], [[0, 0] for _ in range(width)]
    last, first = [0] * width, [0] * width
    forward_resets, reverse_resets = [True] * width, [True] * width
    before, after = [[none] * links for _ in range(width)], [[none] * links for _ in range(width)]
    entry, exit_ = [width] * segments, [width] * segments
    at = 0
    for slot, fragment in enumerate(mine):
        if not fragment:
            continue
        first[slot], last[slot] = at, at + len(fragment) - 1
        at += len(fragment)
        if last[slot] not in terminal:
            forward[slot] = [cu[last[slot]], cu[last[slot] + 1]]
            forward_resets[slot] = last[slot] in starts
            exit_[last[slot]] = slot
        if first[slot] not in starts:
            reverse[slot] = [cu[first[slot]], cu[first[slot] + 1]]
            reverse_resets[slot] = first[slot] in terminal
            entry[first[slot]] = slot
        for row, chain in ((before, plan.predecessors), (after, plan.successors)):
            flat = [rank * width + position for rank, position in chain[slot]]
            row[slot][: len(flat)] = flat

    def ints(rows: object, columns: int | None = None, dtype: torch.dtype = torch.int64) -> Tensor:
        made = torch.tensor(rows, dtype=dtype)
        return (made if columns is None else made.view(-1, columns)).to(device)

    def flags(rows: object) -> Tensor:
        return torch.tensor(rows, dtype=torch.bool).to(device)

    def table(rows: list[list[int]], columns: int) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), columns).to(device)

    return ContextParallelRouting(
        plan.cp_rank, world, width, tokens, links if capped else plan.chain, capped,
        plan.chain == 0, () if capped else plan.order,
        _need(capped, forward, forward_resets), _need(capped, reverse, reverse_resets),
        capped or any(plan.predecessors), capped or any(plan.successors),
        cu_seqlens=ints([*cu, *[tokens] * (segments + 1 - len(cu))], dtype=torch.int32),
        forward_bounds=ints(forward, 2, torch.int32),
        reverse_bounds=ints(reverse, 2, torch.int32),
        forward_sources=ints(last),
        reverse_sources=ints(first),
        forward_resets=flags(forward_resets),
        reverse_resets=flags(reverse_resets),
        predecessors=table(before, links),
        successors=table(after, links),
        entry_sources=ints(entry),
        exit_sources=ints(exit_),
        terminal=flags([i in terminal for i in range(segments)]),
        starts=flags([i in starts for i in range(segments)]),
        sequences=ints([p.sequence for p in parts] + [0] * (segments - len(parts))),
        tail_sources=table(_tails(plan, width, history), history),
        conv_sources=table(_histories(plan, width, segments, history), history),
        _plan=[plan],
    )  # fmt: skip


def _need(capped: bool, ranges: list[list[int]], resets: list[bool]) -> str:
    """What others fold of a rank's slots; a range that nobody waits for is empty."""
    through = [not reset for (start, stop), reset in zip(ranges, resets, strict=True)
               if start < stop]  # fmt: skip
    if capped or any(through):
        return "map"
    return "bias" if through else "none"


def _tails(plan: ContextParallelPlan, width: int, history: int) -> list[list[int]]:
    """Span tokens of every local fragment's last `history` tokens, oldest first."""
    tokens = plan.cu_seqlens[-1]
    rows, end = [], 0
    for slot in range(width):
        fragment = plan.fragments[slot] if slot < len(plan.fragments) else ()
        start, end = end, end + sum(part.length for part in fragment)
        rows.append([t if t >= start else tokens for t in range(end - history, end)])
    return rows


def _histories(
    plan: ContextParallelPlan, width: int, segments: int, history: int
) -> list[list[int]]:
    """For every segment the gathered positions of the `history` tokens before it, oldest first."""
    none = len(plan.table) * width * history
    rows = [[none] * history for _ in range(segments)]
    ends = [(plan.table[r][s][-1].stop, plan.table[r][s][0].start, r, s) for r, s in plan.order]
    stops = [end[0] for end in ends]
    for row, part in enumerate(plan.subsequences):
        oldest = max(part.start - history, plan.offsets[part.sequence])
        for token in range(oldest, part.start):
            stop, _, rank, slot = ends[bisect_right(stops, token)]
            position = history - (stop - token)
            if position >= 0:
                rows[row][token - part.start + history] = (rank * width + slot) * history + position
    return rows
