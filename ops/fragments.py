"""Fragment tables: who owns which tokens of the global stream. Plain Python, for
`ContextParallelPlan.from_fragments`; any other table that tiles the stream will do.
"""

from __future__ import annotations

from itertools import pairwise
from operator import index
from typing import TYPE_CHECKING, Any

from lagraph.errors import InvalidOption, RuleBroken

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["contiguous_fragments", "document_aligned_fragments", "zigzag_fragments"]

Table = list[list[tuple[int, int]]]
RANKS = "Give the size of the process group"
LENGTH = "Give the length of the global stream"


def contiguous_fragments(total_tokens: int, world: int) -> Table:
    """One fragment per rank, in rank order; lengths differ by one token at most.

    Fewer tokens than ranks leave fragments empty. Raises InvalidOption.
    """
    op = "contiguous_fragments"
    return [[cut] for cut in _cuts(*_checked(op, total_tokens, world))]


def zigzag_fragments(total_tokens: int, world: int) -> Table:
    """Two fragments per rank, the r-th from the front and the r-th from the back.

    It balances attention layers, whose cost grows with the position; a recurrence does not need it.
    Raises InvalidOption.
    """
    tokens, ranks = _checked("zigzag_fragments", total_tokens, world)
    pieces = _cuts(tokens, 2 * ranks)
    return [[pieces[rank], pieces[-1 - rank]] for rank in range(ranks)]


def document_aligned_fragments(cu_seqlens_global: Sequence[int], world: int) -> Table:
    """Whole documents, longest first onto the rank with the fewest tokens; neighbours are joined.

    No state crosses ranks, and results have the same bits for every number of them. Ranks differ
    by one document's length at most. Raises InvalidOption, RuleBroken.
    """
    op = "document_aligned_fragments"
    offsets = offsets_of(op, "cu_seqlens_global", cu_seqlens_global)
    ranks = whole(op, "world", world, 1, RANKS)
    load, owned = [0] * ranks, [[] for _ in range(ranks)]  # type: ignore[var-annotated]
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


def _cuts(tokens: int, parts: int) -> list[tuple[int, int]]:
    return list(pairwise([tokens * part // parts for part in range(parts + 1)]))


def _checked(op: str, tokens: Any, world: Any) -> tuple[int, int]:
    return whole(op, "total_tokens", tokens, 0, LENGTH), whole(op, "world", world, 1, RANKS)


# Checks, for layouts as well ------------------------------------------------------------------


def whole(op: str, name: str, value: Any, least: int, mend: str) -> int:
    """An integer of at least `least`: Python's, NumPy's or a tensor's; no bool, no float."""
    try:
        found = None if isinstance(value, bool) else index(value)
    except TypeError:
        found = None
    if found is None or found < least:
        raise InvalidOption(op, name, expected=f"an integer >= {least}", got=repr(value), mend=mend)
    return found


def offsets_of(op: str, name: str, values: Any) -> tuple[int, ...]:
    """Offsets of sequences, which start at 0 and never fall: a list, an array or a tensor."""
    mend = "Build it as a cumulative sum of the sequence lengths, with a leading 0"
    try:
        found = list(values.tolist() if hasattr(values, "tolist") else values)
        offsets = [index(value) for value in found]
    except TypeError:
        raise InvalidOption(
            op, name, expected="a sequence of integers", got=repr(values)[:80], mend=mend
        ) from None
    if not offsets or offsets[0] != 0 or offsets != sorted(offsets):
        raise RuleBroken(
            op, name, expected="offsets that start at 0 and never fall", got=str(offsets[:16]),
            mend=mend,
        )  # fmt: skip
    return tuple(offsets)
