"""Fragment tables: who owns which tokens of the global stream. Plain Python, for
`ContextParallelPlan.from_fragments`; any other table that tiles the stream will do.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from lagraph.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["contiguous_fragments", "document_aligned_fragments", "zigzag_fragments"]

Table = list[list[tuple[int, int]]]


def contiguous_fragments(total_tokens: int, world: int) -> Table:
    """One fragment per rank, in rank order; lengths differ by one token at most.

    Fewer tokens than ranks leave fragments empty.
    """
    _check("contiguous_fragments", total_tokens, world)
    cuts = [total_tokens * rank // world for rank in range(world + 1)]
    return [[cut] for cut in pairwise(cuts)]


def zigzag_fragments(total_tokens: int, world: int) -> Table:
    """Two fragments per rank, the r-th from the front and the r-th from the back.

    It balances attention layers, whose cost grows with the position; a recurrence does not need it.
    """
    _check("zigzag_fragments", total_tokens, world)
    pieces = [cut for (cut,) in contiguous_fragments(total_tokens, 2 * world)]
    return [[pieces[rank], pieces[-1 - rank]] for rank in range(world)]


def document_aligned_fragments(cu_seqlens_global: Sequence[int], world: int) -> Table:
    """Whole documents, longest first onto the rank with the fewest tokens; neighbours are joined.

    No state crosses ranks, and results have the same bits for every number of them. Ranks differ
    by one document's length at most.
    """
    offsets = [int(offset) for offset in cu_seqlens_global]
    _check("document_aligned_fragments", offsets[-1] if offsets else -1, world)
    load, owned = [0] * world, [[] for _ in range(world)]  # type: ignore[var-annotated]
    for start, stop in sorted(pairwise(offsets), key=lambda d: (d[0] - d[1], d[0])):
        if stop > start:
            rank = load.index(min(load))
            load[rank] += stop - start
            owned[rank].append((start, stop))
    table: Table = []
    for documents in owned:
        joined: list[tuple[int, int]] = []
        for start, stop in sorted(documents):
            if joined and joined[-1][1] == start:
                start = joined.pop()[0]
            joined.append((start, stop))
        table.append(joined)
    return table


def _check(op: str, tokens: int, world: int) -> None:
    if tokens < 0:
        raise InvalidOption(op, "total_tokens", expected="a number >= 0", got=repr(tokens),
                            mend="Give the length of the global stream")  # fmt: skip
    if isinstance(world, bool) or not isinstance(world, int) or world < 1:
        raise InvalidOption(op, "world", expected="a number of ranks >= 1", got=repr(world),
                            mend="Give the size of the process group")  # fmt: skip
