"""Chunk tables: which token rows each chunk holds, and in what order chunks are computed.

Every sequence is cut into chunks of at most C rows. Sequences are sorted by length, so those that
still have a chunk at some level (chunk number) are a prefix of the order; the chunks of one level
are independent and are computed together. A `Tile` is a run of levels small enough for memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["Block", "Lane", "Tile", "blocks", "pow2"]


def pow2(n: int) -> int:
    """The smallest power of two that is at least n and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


@dataclass(frozen=True, slots=True)
class Lane:
    """How the slots [B, C] of a tile map to the rows of a tensor.

    rows: row of each slot, a slice where slots are consecutive rows; a slot that holds no row of
        its own repeats a row of its sequence, so that nothing else is ever read.
    live: (slots, rows) of the slots that own a row, None where all do.
    """

    chunk: int
    rows: slice | torch.Tensor
    live: tuple[torch.Tensor, torch.Tensor] | None

    def gather(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of x [T, heads, ...] as a fresh tensor [B, heads, C, ...]."""
        picked = x[self.rows] if isinstance(self.rows, slice) else x.index_select(0, self.rows)
        picked = picked.unflatten(0, (-1, self.chunk)).transpose(1, 2)
        return torch.empty(picked.shape, dtype=dtype, device=x.device).copy_(picked)

    def scatter(self, y: torch.Tensor, out: torch.Tensor) -> None:
        """Write y [B, heads, C, ...] to the rows of out [T, heads, ...] that slots own."""
        y = y.transpose(1, 2)
        if isinstance(self.rows, slice):
            out[self.rows].unflatten(0, (-1, self.chunk)).copy_(y)
            return
        y, rows = y.flatten(0, 1), self.rows
        if self.live is not None:
            y, rows = y.index_select(0, self.live[0]), self.live[1]
        out.index_copy_(0, rows, y.to(out.dtype))

    def mask(self, x: torch.Tensor) -> torch.Tensor | None:
        """[B, 1, C] true where a slot of x's device owns no row; None where all do."""
        if self.live is None:
            return None
        idle = torch.ones(self.slots, dtype=torch.bool, device=x.device)
        return idle.index_fill_(0, self.live[0], False).view(-1, 1, self.chunk)

    @property
    def slots(self) -> int:
        """B * C."""
        if isinstance(self.rows, slice):
            return self.rows.stop - self.rows.start
        return self.rows.numel()


@dataclass(frozen=True, slots=True)
class Tile:
    """Chunks of some consecutive levels of a block, level after level.

    counts: live sequences of every level, not increasing.
    keys, decays, reads: lanes of the update rows, of the gates and of the queries and outputs;
        they differ only where a token makes several updates.
    dumps: (chunks, checkpoint rows) whose entering states are checkpoints.
    """

    counts: tuple[int, ...]
    keys: Lane
    decays: Lane
    reads: Lane
    dumps: tuple[torch.Tensor, torch.Tensor] | None


class Block:
    """Some sequences, longest first, and the tiles that cover their chunks."""

    def __init__(
        self,
        ids: Sequence[int],
        spans: Sequence[tuple[int, int]],
        dump_rows: Sequence[int],
        chunk: int,
        every: int,
        limit: int,
        substeps: int,
        device: torch.device,
    ) -> None:
        lengths = [(spans[i][1] - spans[i][0]) * substeps for i in ids]
        self.ids = list(ids)
        self.chunk, self.substeps, self.device = chunk, substeps, device
        self.dumping = every > 0
        self.every = every or max(lengths[0], 1)
        self.per_window = -(-self.every // chunk)
        self.starts = _integers(spans[i][0] * substeps for i in ids)
        self.stops = self.starts + _integers(lengths)
        self.dump_rows = _integers(dump_rows[i] for i in ids)
        chunks = [
            n // self.every * self.per_window + -(-(n % self.every) // chunk) for n in lengths
        ]
        live = len(ids)
        self.counts: list[int] = []
        self.cuts = [0]
        size = 0
        for level in range(chunks[0]):
            while chunks[live - 1] <= level:
                live -= 1
            if size and size + live > limit:
                self.cuts.append(level)
                size = 0
            self.counts.append(live)
            size += live
        if chunks[0]:
            self.cuts.append(chunks[0])

    def __len__(self) -> int:
        return len(self.cuts) - 1

    def tile(self, index: int) -> Tile:
        """Tile number `index`."""
        first, last = self.cuts[index], self.cuts[index + 1]
        counts = _integers(self.counts[first:last])
        level = _integers(range(first, last)).repeat_interleave(counts)
        seq = _integers(range(len(level))) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        window = self.starts[seq] + level // self.per_window * self.every
        start = window + level % self.per_window * self.chunk
        stop = torch.minimum(window + self.every, self.stops[seq]).clamp(max=start + self.chunk)
        rows = start[:, None] + _integers(range(self.chunk))
        owned = (rows < stop[:, None]).flatten()
        rows = torch.minimum(rows, stop[:, None] - 1).flatten()
        dumps = None
        if self.dumping and bool((at := level % self.per_window == 0).any()):
            dump = self.dump_rows[seq[at]] + level[at] // self.per_window
            dumps = at.nonzero().flatten().to(self.device), dump.to(self.device)
        keys = self._lane(rows, owned)
        decays = reads = keys
        if (n := self.substeps) > 1:
            decays = self._lane(rows // n, owned & (rows % n == 0))
            reads = self._lane(rows // n, owned & (rows % n == n - 1))
        return Tile(tuple(counts.tolist()), keys, decays, reads, dumps)

    def _lane(self, rows: torch.Tensor, owned: torch.Tensor) -> Lane:
        if bool(owned.all()):
            if len(self.ids) == 1:  # full chunks of one sequence: consecutive rows
                return Lane(self.chunk, slice(int(rows[0]), int(rows[-1]) + 1), None)
            return Lane(self.chunk, rows.to(self.device), None)
        slots = owned.nonzero().flatten()
        live = slots.to(self.device), rows[slots].to(self.device)
        return Lane(self.chunk, rows.to(self.device), live)


def _integers(values: Iterable[int]) -> torch.Tensor:
    """A table on the CPU, whatever the default device is."""
    return torch.tensor(list(values), dtype=torch.int64, device="cpu")


def blocks(
    spans: Sequence[tuple[int, int]],
    ids: Sequence[int],
    *,
    chunk: int,
    every: int,
    substeps: int,
    limit: int,
    apart: bool,
    device: torch.device,
) -> Iterator[Block]:
    """Blocks that cover sequences `ids` of the token spans, each of at most `limit` at a time.

    chunk: rows of a chunk; shorter where no sequence of a block is that long.
    every: rows between checkpoints, where chunks are cut as well; 0 for none.
    limit: chunks that a tile may hold.
    apart: one sequence in each block, so that its results do not depend on the others.
    """
    dump_rows, total = [], 0
    for start, stop in spans:
        dump_rows.append(total)
        total += -(-(stop - start) * substeps // every) if every else 0
    order = sorted(ids, key=lambda i: spans[i][0] - spans[i][1])
    width = 1 if apart else limit
    for first in range(0, len(order), width):
        some = order[first : first + width]
        longest = (spans[some[0]][1] - spans[some[0]][0]) * substeps
        # Apart: always whole chunks, so that the shapes, and the bits, are a longer sequence's.
        size = min(chunk, every) if apart and every else chunk
        fit = size if apart else min(chunk, pow2(min(longest, every or longest)))
        yield Block(some, spans, dump_rows, fit, every, limit, substeps, device)
