"""Link: the states that enter the segments of a sequence, from what each of them does to a state.

    S_0 = the initial state        S_(s+1) = S_s M_s + H_s        [V, K] fp32

H_s and M_s are the state and the map at the end of segment s (`kernels.forward`, phase open); S_s
is written in the place of H_s, and the phase close starts from it. A summary wants the last state
instead and, from the unit matrix, the product of all maps: rows below V.

One CTA for a sequence, a head and 64 rows, serial over segments: a warpgroup has the rows in
registers, where they are the operand of wgmma in two bf16 parts; M, in two parts, and H come
through TMA, asked for by one more warp. Three of the four products of parts are taken: 2^-17 of S M
is lost. At K = 128: two stages of 96 KB of shared memory.

Chained to the kernel that opens segments: it is resident before that ends, and waits for it.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from lagraph.engines.frost.kernels.lib import fake, product, ragged, segment
from lagraph.engines.frost.kernels.shared import loaded
from lagraph.engines.frost.kernels.tile import CHAINED, SLICE
from lagraph.engines.frost.signature import Signature

__all__ = ["SIGNATURES", "Link"]

WARPS = 4  # that carry; one more loads


@dataclass(frozen=True)
class Link(Signature):
    """carries: write the state that enters every segment; else the last states of a summary.
    reverse: from the last segment to the first.

    n: steps of a token. initial, index, final, transition: a tensor's dtype, "" where it is absent.
    """

    K: int = 128
    V: int = 128
    n: int = 1
    carries: bool = True
    reverse: bool = False
    offsets: str = "int32"
    initial: str = ""
    index: str = ""
    final: str = ""
    transition: str = ""

    arguments = ("T", "HO", "cu_seqlens", "initial_state", "state_indices", "final_state",
                 "transition", "workspace", "span", "less")  # fmt: skip

    @property
    def blocks(self) -> int:
        """CTAs of a sequence and head."""
        return (self.V + (self.K if self.transition else 0)) // SLICE

    @property
    def stages(self) -> int:
        """Segments in shared memory."""
        return 256 // self.K

    @property
    def from_nothing(self) -> bool:
        """Whether the first segment's map is not asked for."""
        return not (self.initial or self.transition)

    def build(self, options: str):
        """Compile for the options' architecture; needs no GPU."""
        N, N1, rows, HO = (cute.sym_int() for _ in range(4))
        return cute.compile(
            LinkKernel(self), Int32(1), Int32(1), fake.plain(self.offsets, N1),
            fake.states(self.initial, rows if self.index else N, HO, self.V, self.K),
            fake.plain(self.index, N), fake.states(self.final, N, HO, self.V, self.K),
            fake.states(self.transition, N, HO, self.K, self.K), fake.workspace(), Int32(1),
            Int32(0), make_fake_stream(use_tvm_ffi_env_stream=True), options=options,
        )  # fmt: skip


class LinkKernel:
    """The kernel of one signature."""

    def __init__(self, sig: Link):
        self.sig = sig

    @cute.jit
    def __call__(
        self, T: Int32, HO: Int32, cu: cute.Tensor, initial, index, final, transition,
        workspace: cute.Tensor, span: Int32, less: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        sig, op = self.sig, cpasync.CopyBulkTensorTileG2SOp()
        steps, N = T * sig.n, cu.shape[0] - 1
        slots = steps // span + N * segment.per_sequence(less)
        states, maps = segment.ends(workspace, slots, HO, sig.V, sig.K)
        laid = (
            ragged.swizzled(BFloat16, sig.K, sig.K, 2 * sig.stages),
            cute.make_layout((256, sig.K // 4, sig.stages), stride=(1, 256, SLICE * sig.K)),
        )
        flat = cute.select(laid[0], [0, 1]), cute.select(laid[1], [0, 1])
        M = cpasync.make_tiled_tma_atom(op, maps, flat[0], (sig.K, sig.K))
        H = cpasync.make_tiled_tma_atom(op, segment.tiles(states), flat[1], (256, sig.K // 4))
        self.kernel(
            (M[0], H[0]), (M[1], H[1]), steps, HO, cu, (initial, index, final, transition), states,
            span, less, laid,
        ).launch(
            grid=(N * HO * sig.blocks, 1, 1), block=(32 * (WARPS + 1), 1, 1), use_pdl=CHAINED,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, atoms: tuple, views: tuple, steps: Int32, HO: Int32, cu: cute.Tensor, given: tuple,
        states: cute.Tensor, span: Int32, less: Int32, laid: tuple,
    ):  # fmt: skip
        sig = self.sig
        cute.arch.griddepcontrol_launch_dependents()
        block, _, _ = cute.arch.block_idx()
        seq, head = block // (sig.blocks * HO), (block // sig.blocks) % HO
        column = block % sig.blocks  # from V / 64 on, rows of the map
        begin, end = segment.sequence(cu, seq, steps, sig.n)
        base = begin // span + segment.per_sequence(less) * seq
        last = segment.count_of(begin, end, span, less)
        step = 1
        if cutlass.const_expr(sig.reverse):
            base, step = base + last - 1, -1
        if cutlass.const_expr(sig.carries):
            last -= 1
        elif begin == end:  # without steps a state passes through, to the bit
            last = Int32(0)
        start = Int32(0)
        if cutlass.const_expr(sig.from_nothing):  # H is where the first segment ends
            start = cutlass.min(last, Int32(1))
        line = base, step, start, last

        smem = SmemAllocator()
        bars = smem.allocate_array(Int64, 2 * sig.stages)
        maps = smem.allocate_tensor(BFloat16, laid[0].outer, 1024, laid[0].inner)
        grown = smem.allocate_tensor(Float32, laid[1], 1024)
        ring = loaded(bars, sig.stages, 4 * sig.K * (sig.K + SLICE), WARPS)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == WARPS:
            cute.arch.griddepcontrol_wait()
            load(sig, atoms, views, (maps, grown), ring, line, head, column)
        else:
            carry(sig, (maps, grown), ring, line, given, states, seq, head, column)


@cute.jit
def load(sig: cutlass.Constexpr, atoms, views, tiles, ring, line, head, column):
    """One warp: both parts of every segment's map, and 64 rows of H. A map's CTA has no use for
    these, but for one ring."""
    base, step, start, last = line
    of_state = column % (sig.V // SLICE)
    to_map, from_map = ragged.partition(
        atoms[0], tiles[0], cute.local_tile(views[0], (sig.K, sig.K), (0, 0, None, head, None))
    )
    rows = cute.local_tile(views[1], (256, sig.K // 4), (0, 0, of_state, head, None))
    to_state, from_state = ragged.partition(atoms[1], tiles[1], rows)
    for s in cutlass.range(start + sig.stages, last, unroll=1):  # what opened wrote it a while ago
        slot = base + step * s
        for part in cutlass.range_constexpr(2):
            cute.prefetch(atoms[0], from_map[None, part, slot])
        cute.prefetch(atoms[1], from_state[None, slot])
    at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, sig.stages)
    for s in cutlass.range(start, last, unroll=1):
        slot = base + step * s
        ring.producer_acquire(at)
        bar = ring.producer_get_barrier(at)
        for part in cutlass.range_constexpr(2):
            to = to_map[None, 2 * at.index + part]
            cute.copy(atoms[0], from_map[None, part, slot], to, tma_bar_ptr=bar)
        cute.copy(atoms[1], from_state[None, slot], to_state[None, at.index], tma_bar_ptr=bar)
        at.advance()


@cute.jit
def carry(sig: cutlass.Constexpr, tiles, ring, line, given, states, seq, head, column):
    """The warpgroup that has the state. given: initial state, state indices, final state and
    transition."""
    initial, index, final, transition = given
    base, step, start, last = line
    tid, _, _ = cute.arch.thread_idx()
    of_state = column % (sig.V // SLICE)
    is_map = column >= sig.V // SLICE

    by_row = product.of_registers(BFloat16, sig.K, OperandMajorMode.MN)
    thread = by_row.get_slice(tid)
    M = thread.make_fragment_B(thread.partition_B(product.transposed(tiles[0])))
    S = product.accumulator(thread, SLICE, sig.K)
    high_in, high = product.as_operand(thread, S, BFloat16, SLICE, sig.K)
    low_in, low = product.as_operand(thread, S, BFloat16, SLICE, sig.K)
    if cutlass.const_expr(final is not None):
        ours = segment.slice_of(thread, final, seq, head, of_state)
    if cutlass.const_expr(transition is not None):
        below = cutlass.max(column - sig.V // SLICE, Int32(0))
        theirs = segment.slice_of(thread, transition, seq, head, below)

    segment.fresh(sig, S, thread, column)
    if cutlass.const_expr(initial is not None):
        row = seq
        if cutlass.const_expr(index is not None):
            row = Int32(index[seq])
        if row >= 0 and not is_map:
            row = cutlass.min(row, Int32(initial.shape[0]) - 1)
            raw = cute.make_rmem_tensor(S.shape, initial.element_type)
            cute.autovec_copy(segment.slice_of(thread, initial, row, head, of_state), raw)
            S.store(raw.load().to(Float32))

    cute.arch.griddepcontrol_wait()
    if cutlass.const_expr(sig.from_nothing):  # noqa: SIM102
        if start > 0:
            place = segment.place(states, base, head, of_state, tid)
            H = product.accumulator(thread, SLICE, sig.K)
            segment.load(place, H)
            if cutlass.const_expr(sig.carries):
                segment.store(S, place)
            S.store(H.load())
    at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, sig.stages)
    for s in cutlass.range(start, last, unroll=1):
        product.split(S, high, low)
        ring.consumer_wait(at)
        if cutlass.const_expr(sig.carries):
            segment.store(S, segment.place(states, base + step * s, head, of_state, tid))
        rows = tiles[1].iterator + cute.assume(at.index * (SLICE * sig.K) + 4 * tid, divby=4)
        segment.load(cute.make_tensor(rows, cute.make_layout((4, sig.K // 8), stride=(1, 512))), S)
        if is_map:
            S.fill(0.0)
        upper, lower = M[None, None, None, 2 * at.index], M[None, None, None, 2 * at.index + 1]
        product.issue(by_row, S, high_in, upper, True)
        product.issue(by_row, S, low_in, upper, True)
        product.issue(by_row, S, high_in, lower, True)
        cute.nvgpu.warpgroup.wait_group(0)
        ring.consumer_release(at)
        at.advance()

    if cutlass.const_expr(sig.carries):
        segment.store(S, segment.place(states, base + step * last, head, of_state, tid))
    if cutlass.const_expr(final is not None):  # noqa: SIM102
        if not is_map:
            segment.write(S, ours)
    if cutlass.const_expr(transition is not None):  # noqa: SIM102
        if is_map:
            segment.write(S, theirs)


# What is compiled, and looked at, without a GPU.
SIGNATURES = (
    Link(),
    Link(K=64, V=128, offsets="int64", initial="bfloat16", index="int32"),
    Link(carries=False, initial="float32", final="float32", transition="float32"),
    Link(carries=False, reverse=True, final="float32"),
)
