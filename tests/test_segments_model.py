"""Frost's segments, by the text of its kernels run in Python: no compiler and no GPU.

`lib.segment` and `forward.mine` say which CTA computes what, and `launch` how large the workspace
is. Here their own source is run on plain integers, for all CTAs of random batches.
"""

from __future__ import annotations

import ast
import random
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest

from lagraph.engines.frost import launch, schedule

KERNELS = Path(launch.__file__).parent / "kernels"
C = schedule.C


class Int32(int):
    """A number of 32 bits that does not wrap but fails."""

    def __new__(cls, value):
        if not -(1 << 31) <= value < 1 << 31:
            raise OverflowError(f"{value} in 32 bits")
        return super().__new__(cls, value)


def _operation(name):
    plain = getattr(int, name)
    return lambda self, other: Int32(plain(self, other))


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "mod"):
    setattr(Int32, f"__{_name}__", _operation(f"__{_name}__"))


def ceil_div(a, b):
    return (a + b - 1) // b


def functions(path, names, scope):
    """Functions of a kernel's file, of its own text without decorators and annotations."""
    found = [
        node for node in ast.parse((KERNELS / path).read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name in names
    ]  # fmt: skip
    assert {node.name for node in found} == set(names)
    for node in found:
        node.decorator_list = []
        for argument in node.args.args:
            argument.annotation = None
    exec(compile(ast.Module(found, []), path, "exec"), scope)
    return SimpleNamespace(**{name: scope[name] for name in names})


BLOCK = SimpleNamespace(now=Int32(0))
SCOPE = {
    "Int32": Int32,
    "C": C,
    "cutlass": SimpleNamespace(min=min, max=max, const_expr=bool),
    "cute": SimpleNamespace(
        ceil_div=ceil_div, arch=SimpleNamespace(block_idx=lambda: (BLOCK.now, 0, 0))
    ),
    "Work": namedtuple("Work", "seq head part begin end chunks slot first last"),
}
segment = functions(
    "lib/segment.py", ("sequence", "per_sequence", "count_of", "locate"), dict(SCOPE)
)
mine = functions("forward.py", ("mine",), SCOPE | {"segment": segment}).mine


class Offsets(list):
    @property
    def shape(self):
        return (len(self),)


Batch = namedtuple("Batch", "cu T n span less slots")


def batch_of(lengths, tail, n, span, less):
    """A batch; lengths in tokens, span and less in chunks."""
    cu = Offsets([Int32(0)])
    for length in lengths:
        cu.append(Int32(cu[-1] + length))
    T = int(cu[-1]) + tail
    return Batch(cu, T, n, Int32(C * span), Int32(C * less), slots(T, n, len(lengths), span, less))


def slots(T, n, N, span, less):
    """How many the workspace holds, by what plans say of its size."""
    cut = SimpleNamespace(choice=lambda T, N: schedule.Choice(False, span, less, 0.0), n=n, slot=1)
    return launch._Plan.workspace_size(cut, T, N)


def works(batch, phase="close", skip=0, V=64, K=64, rows=64, only=None):
    """What all CTAs compute, of one head; `only`: of these slots."""
    sums_up = phase in ("open", "retreat")
    parts = (V + (K if sums_up else 0)) // rows
    sig = SimpleNamespace(phase=phase, n=batch.n, V=V, rows=rows, parts=parts, sums_up=sums_up)
    found = []
    for slot in range(batch.slots) if only is None else only:
        for part in range(parts):
            BLOCK.now = Int32(slot * parts + part)
            cut = (batch.span, batch.less, skip)
            found.append(mine(sig, batch.cu, Int32(batch.T * batch.n), Int32(1), cut))
    return found


def linked(batch, seq):
    """First slot and number of segments of a sequence, as the kernel that links them has them."""
    begin, end = segment.sequence(batch.cu, seq, Int32(batch.T * batch.n), batch.n)
    base = begin // batch.span + segment.per_sequence(batch.less) * seq
    return base, segment.count_of(begin, end, batch.span, batch.less)


def draw(rng):
    """Lengths of every class: none, one token, around chunks, segments and their ends."""
    n, span = rng.choice((1, 1, 2, 4)), rng.choice((1, 1, 2, 3, 4, 7))
    less = rng.choice((0, span // 2, rng.randrange(span)))
    edges = (0, 1, C // n, span * C // n, (span - less) * C // n, (2 * span - less) * C // n)
    lengths = []
    for _ in range(rng.choice((1, 1, 2, 3, 5, 9))):
        length = rng.choice(edges) + rng.choice((-1, 0, 0, 1))
        if rng.random() < 0.3:
            length = rng.randrange(3 * span * C // n + 2)
        lengths.append(max(length, 0))
    return batch_of(lengths, rng.choice((0, 0, 1, 77)), n, span, less)


@pytest.mark.parametrize("seed", range(4))
def test_every_step_is_of_one_segment(seed):
    """Segments tile their sequence from its first step, in order, in chunks; every sequence, be it
    empty, has one last segment; the slots that are linked are those."""
    rng = random.Random(seed)
    for _ in range(300):
        batch = draw(rng)
        by_sequence = {}
        for work in works(batch):
            if work.first >= 0:
                by_sequence.setdefault(work.seq, []).append(work)
        assert list(by_sequence) == list(range(len(batch.cu) - 1)), batch
        for seq, found in by_sequence.items():
            begin, at = batch.cu[seq] * batch.n, batch.cu[seq] * batch.n
            for work in found:
                assert (work.begin, work.first) == (at, at - begin), batch
                assert work.first % C == 0, batch
                assert work.chunks == -(-(work.end - work.begin) // C), batch
                assert work.end - work.begin <= batch.span
                at = work.end
            assert at == batch.cu[seq + 1] * batch.n, batch
            assert [work.last for work in found] == [0] * (len(found) - 1) + [1], batch
            base, count = linked(batch, seq)
            assert [work.slot for work in found] == list(range(base, base + count)), batch
            assert base + count <= batch.slots


@pytest.mark.parametrize(("V", "K", "rows"), [(64, 64, 64), (128, 128, 128), (64, 128, 64)])
def test_what_is_linked_was_opened(V, K, rows):
    """A forward reads states and maps of all segments but the last, from no state without the
    first map; a summary all; its backward the same from the last on."""
    rng = random.Random(0)
    for _ in range(100):
        batch = draw(rng)
        spans = [linked(batch, seq) for seq in range(len(batch.cu) - 1)]
        for phase, skip in (("open", 0), ("open", 1), ("open", 2), ("open", 3), ("retreat", 1)):
            found = works(batch, phase, skip, V, K, rows)
            states = {work.slot for work in found if work.first >= 0 and work.part * rows < V}
            maps = {work.slot for work in found if work.first >= 0 and work.part * rows >= V}
            wanted, turned = set(), set()
            for base, count in spans:
                slots = list(range(base, base + count - skip // 2))
                wanted |= set(slots)
                if phase == "retreat":
                    slots.reverse()
                turned |= set(slots[skip % 2 :])
            assert (states, maps) == (wanted, turned), (batch, phase, skip)


def test_checkpoints_are_packed():
    """Rows of a sequence's segments follow those before them, one every so many steps."""
    rng = random.Random(1)
    for _ in range(300):
        batch, every = draw(rng), C * rng.choice((1, 2, 3))
        kept = []
        for work in works(batch):
            lengths = [b - a for a, b in zip(batch.cu, batch.cu[1 : work.seq + 1], strict=False)]
            row = sum(-(-length * batch.n // every) for length in lengths)
            row += ceil_div(work.first, every)
            for c in range(work.chunks):
                if (work.first + c * C) % every == 0:
                    kept.append((row, work.seq, work.first + c * C))
                    row += 1
        wanted = [
            (seq, step)
            for seq, (a, b) in enumerate(zip(batch.cu, batch.cu[1:], strict=False))
            for step in range(0, (b - a) * batch.n, every)
        ]
        assert kept == [(row, *place) for row, place in enumerate(wanted)], batch
        assert len(kept) <= max(batch.T * batch.n // every + len(batch.cu) - 1, 1)


def test_offsets_that_are_wrong_stay_inside():
    """Nothing checks offsets of a GPU: whatever they are, steps and slots are those of tensors."""
    rng = random.Random(2)
    for _ in range(300):
        batch = draw(rng)
        hostile = [
            rng.choice((-5, 0, x, x + 100, batch.T, 1 << 30, rng.randrange(batch.T + 1)))
            for x in batch.cu
        ]
        batch = batch._replace(cu=Offsets(hostile), n=1, T=batch.T * batch.n)
        for work in works(batch):
            assert 0 <= work.begin <= work.end <= batch.T, batch
            assert 0 <= work.seq < len(hostile) - 1
            assert work.first >= 0 or not work.chunks, batch
        for seq in range(len(hostile) - 1):
            base, count = linked(batch, seq)
            assert base >= 0, batch
            assert base + count <= batch.slots, batch


LONG = {
    "one of 2^28 steps": ([1 << 26], 4, 4096, 2048),
    "one of 2^24 chunk by chunk": ([1 << 24], 1, 1, 0),
    "many": ([1 << 20] * 60 + [0] * 60 + [1], 1, 64, 32),
    "a summary's, whole": ([1 << 27, 5, 0, 1 << 27], 1, launch.WHOLE // C, 0),
}


@pytest.mark.parametrize(("lengths", "n", "span", "less"), LONG.values(), ids=LONG)
def test_long_ones_fit_32_bits(lengths, n, span, less):
    batch = batch_of(lengths, 0, n, span, less)
    at = set()
    for seq in range(len(lengths)):
        base, count = linked(batch, seq)
        at |= {base, base + count - 1, min(base + count, batch.slots - 1)}
    assert max(at) < batch.slots
    for phase in ("open", "close"):
        found = works(batch, phase, 2 if phase == "open" else 0, only=sorted(at))
        assert all(0 <= work.begin <= work.end <= batch.T * n for work in found)


def test_what_is_chosen_is_cut_as_was_counted():
    """A segment is not longer than its sequence, and 32 bits hold whatever is chosen."""
    for sms in (1, 78, 132):
        for heads in (1, 3, 16, 64, 131, 1000):
            for opens, closes, narrow in ((2, 1, True), (3, 1, True), (4, 2, False), (2, 0, False)):
                shape = schedule.Shape(heads, opens, closes, sms, narrow)
                for chunks in (1, 7, 8, 63, 500, 10**4, 1 << 22):
                    for sequences in (1, 5, 10**5):
                        found = schedule.choose(shape, chunks, sequences)
                        assert found.time > 0
                        assert found.span == 0 or schedule.SHORTEST <= found.span <= chunks
                        assert 0 <= found.less < max(found.span, 1)
                        assert not (found.narrow and not narrow)
                        assert C * found.span < 1 << 31
