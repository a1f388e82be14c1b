"""Segments of long sequences: whose they are, and where their states are kept.

A sequence is cut into segments of `span` steps, but for the last, which has the rest, and the one
before it, which is shorter by `less` steps: what is opened takes two CTAs, and where SMs are left
for one alone, it does both halves of that one. A sequence without steps has one segment. Segment s
of sequence i has a slot of its own,

    slot(i, s) = begin_i // span + r i + s          r = 1, or 2 where there is a `less`

in every array of segments: a sequence of `length` steps has at most length // span + r of them, so
slots of different sequences cannot meet, steps // span + r N slots hold any batch, and a slot's
sequence is found by bisection on `cu_seqlens` alone. Both numbers are arguments: they depend on T
and N, for which nothing is compiled.

In workspace a slot and head have the state that grows from nothing over the segment, [V, K] fp32,
and the map M that takes a state S over it, to S M, [K, K] in two bf16 parts. `kernels.link` writes
the state that enters a segment in the place of the first. States are in the order of the registers
that hold them, 64 rows by a warpgroup: `place`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

__all__ = [
    "count_of", "ends", "fresh", "gather", "keep", "load", "locate", "per_sequence", "place",
    "rows_before", "scatter", "sequence", "slice_of", "store", "targets", "write",
]  # fmt: skip


@cute.jit
def sequence(cu: cute.Tensor, seq, steps, n: cutlass.Constexpr):
    """First step of a sequence, and the one after its last. Offsets of a GPU are not checked on the
    host: they are kept inside the tensors."""
    begin = cutlass.min(cutlass.max(Int32(cu[seq]) * n, Int32(0)), steps)
    end = cutlass.min(cutlass.max(Int32(cu[seq + 1]) * n, begin), steps)
    return begin, end


@cute.jit
def per_sequence(less):
    """Slots that every sequence has beside length // span."""
    return Int32(2) if less > 0 else Int32(1)


@cute.jit
def count_of(begin, end, span, less):
    """Segments of a sequence."""
    return cutlass.max(cute.ceil_div(end - begin + less, span), Int32(1))


@cute.jit
def locate(cu: cute.Tensor, slot, steps, span, less, n: cutlass.Constexpr):
    """Of a slot: sequence, index of the segment, how many the sequence has, begin and end of the
    sequence. An index from the count on is nobody's."""
    low, high = Int32(0), Int32(cu.shape[0]) - 1
    while high - low > 1:
        middle = (low + high) // 2
        begin, _ = sequence(cu, middle, steps, n)
        if begin // span + per_sequence(less) * middle <= slot:
            low = middle
        else:
            high = middle
    begin, end = sequence(cu, low, steps, n)
    first = begin // span + per_sequence(less) * low
    return low, slot - first, count_of(begin, end, span, less), begin, end


@cute.jit
def ends(workspace: cute.Tensor, slots, heads, V: cutlass.Constexpr, K: cutlass.Constexpr):
    """States [slots, heads, V, K], and maps [K, K, parts, heads, slots], of the workspace."""
    start = cute.recast_ptr(workspace.iterator, dtype=Float32)
    per_head = (V + K) * K
    per_slot = cute.assume(Int64(heads) * per_head, divby=per_head)
    states = cute.make_layout((slots, heads, V, K), stride=(per_slot, per_head, K, 1))
    low = cute.recast_ptr(start + V * K, dtype=BFloat16)
    per_slot = cute.assume(Int64(heads) * (2 * per_head), divby=2 * per_head)
    maps = cute.make_layout((K, K, 2, heads, slots), stride=(K, 1, K * K, 2 * per_head, per_slot))
    return cute.make_tensor(start, states), cute.make_tensor(low, maps)


def place(states, slot, head, column, tid):
    """Four registers at a time of a thread's part of 64 rows: [4, quads]."""
    K = states.shape[3]
    start = states[slot, head, None, None].iterator + column * (64 * K) + 4 * tid
    return cute.make_tensor(
        cute.make_ptr(Float32, start.toint(), cute.AddressSpace.gmem, assumed_align=16),
        cute.make_layout((4, K // 8), stride=(1, 512)),
    )


@cute.jit
def load(source, registers):
    """A thread's part of 64 rows into an accumulator."""
    four = cute.make_rmem_tensor(4, Float32)
    for q in cutlass.range_constexpr(cute.size(registers) // 4):
        cute.autovec_copy(source[None, q], four)
        for e in cutlass.range_constexpr(4):
            registers[4 * q + e] = four[e]


@cute.jit
def store(registers, target):
    """An accumulator into a thread's part of 64 rows."""
    four = cute.make_rmem_tensor(4, Float32)
    for q in cutlass.range_constexpr(cute.size(registers) // 4):
        for e in cutlass.range_constexpr(4):
            four[e] = registers[4 * q + e]
        cute.autovec_copy(four, target[None, q])


def strewn(states, slot, head, row, tid):
    """Where those registers are that a thread has of 32 rows, from `row` on, in an accumulator
    [K, 32], of which a warpgroup has 64 rows."""
    K = states.shape[3]
    lane, warp = tid % 32, tid // 32
    first = row // 64 * (64 * K) + row % 64 // 16 * 128
    first += 1024 * warp + 4 * (lane % 4 * 8 + lane // 8) + lane // 4 % 2
    start = states[slot, head, None, None].iterator + first
    return cute.make_tensor(start, cute.make_layout((2, 2, 2, 2), stride=(16, 512, 2, 128)))


@cute.jit
def gather(states, slot, head, row, tid, registers):
    """A thread's part of 32 rows into an accumulator of their transpose."""
    source = strewn(states, slot, head, row, tid)
    for i in cutlass.range_constexpr(16):
        registers[i] = source[i]


@cute.jit
def scatter(registers, states, slot, head, row, tid):
    """An accumulator of 32 rows' transpose to where their state is kept."""
    target = strewn(states, slot, head, row, tid)
    for i in cutlass.range_constexpr(16):
        target[i] = registers[i]


@cute.jit
def fresh(sig: cutlass.Constexpr, registers, thread, column):
    """What segments are opened from: 64 rows of nothing, or below V of the unit matrix."""
    rows = thread.partition_C(cute.make_identity_tensor((64, sig.K)))
    for i in cutlass.range_constexpr(cute.size(registers)):
        r, k = rows[i]
        registers[i] = Float32(1.0) if r + column * 64 - sig.V == k else Float32(0.0)


@cute.jit
def targets(sig: cutlass.Constexpr, ends, work, thread, column, tid):
    """Where `keep` puts 64 rows: of the state, and of the map's parts."""
    of_state = sig.V // 64
    state = place(ends[0], work.slot, work.head, column % of_state, tid)
    maps = ends[1][None, None, None, work.head, work.slot]
    row = cutlass.max(column - of_state, Int32(0))
    return state, thread.partition_C(cute.local_tile(maps, (64, sig.K), (row, 0, None)))


@cute.jit
def keep(registers, targets, is_state):
    """What a segment does to a state: the end of one, or 64 rows of a map in two parts."""
    state, parts = targets
    if is_state:
        store(registers, state)
    else:
        rounded = cute.make_rmem_tensor(registers.shape, BFloat16)
        rounded.store(registers.load().to(BFloat16))
        cute.autovec_copy(rounded, parts[None, None, None, 0])
        for i in cutlass.range_constexpr(cute.size(registers)):
            rounded[i] = (registers[i] - rounded[i].to(Float32)).to(BFloat16)
        cute.autovec_copy(rounded, parts[None, None, None, 1])


@cute.jit
def write(registers, target):
    """An accumulator, rounded to its target's dtype."""
    rounded = cute.make_rmem_tensor(registers.shape, target.element_type)
    rounded.store(registers.load().to(target.element_type))
    cute.autovec_copy(rounded, target)


def slice_of(thread, states, row, head, column):
    """A thread's part of 64 rows of a state [rows, HO, V, K], in an accumulator's own order."""
    K = states.shape[3]
    return thread.partition_C(cute.local_tile(states[row, head, None, None], (64, K), (column, 0)))


@cute.jit
def rows_before(sig: cutlass.Constexpr, cu: cute.Tensor, seq, steps, lane):
    """Checkpoint rows of all sequences before one; by a whole warp."""
    total = Int32(0)
    for i in cutlass.range(lane, seq, 32, unroll=1):
        begin, end = sequence(cu, i, steps, sig.n)
        total += cute.ceil_div(end - begin, sig.every)
    for i in cutlass.range_constexpr(5):
        total += cute.arch.shuffle_sync_bfly(total, 1 << i)
    return total
