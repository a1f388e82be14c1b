"""Link: the states that enter the segments of a sequence, from what each of them does to a state.

    S_0 = the initial state        S_(s+1) = S_s M_s + H_s        [V, K] fp32

H_s and M_s are the state and the map at the end of segment s (`kernels.forward`, phase open); S_s
is written in the place of H_s, and the phase close starts from it. A summary wants the last state
instead and, from the unit matrix, the product of all maps: rows below V.

One CTA for a sequence, a head and 32 rows, serial over segments. It works on the transpose, whose
rows wgmma asks 64 of: a warpgroup has 64 columns of S in registers, M is read from shared memory as
it is stored, and S passes through it in two bf16 parts, once a segment. M comes in two parts, too,
through TMA up to three segments ahead, H by plain loads one ahead. Three of the four products of
parts are taken: 2^-17 of S M is lost. At K = 128: 224 KB of shared memory.

Chained to the kernel that opens segments: it is resident before that ends, and waits for it.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from lagraph.engines.frost.kernels.lib import fake, product, ragged, segment
from lagraph.engines.frost.kernels.shared import loaded
from lagraph.engines.frost.kernels.tile import CHAINED
from lagraph.engines.frost.signature import Signature

__all__ = ["SIGNATURES", "Link"]

ROWS = 32  # of a CTA
STAGES = 3


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
        return (self.V + (self.K if self.transition else 0)) // ROWS

    @property
    def threads(self) -> int:
        return 2 * self.K

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
        sig = self.sig
        steps, N = T * sig.n, cu.shape[0] - 1
        slots = steps // span + N * segment.per_sequence(less)
        states, maps = segment.ends(workspace, slots, HO, sig.V, sig.K)
        laid = ragged.swizzled(BFloat16, sig.K, sig.K, 2 * STAGES)
        atom, view = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), maps, cute.select(laid, [0, 1]), (sig.K, sig.K)
        )
        self.kernel(
            atom, view, steps, HO, cu, initial, index, final, transition, states, span, less, laid,
            ragged.swizzled(BFloat16, ROWS, sig.K, 4),
        ).launch(
            grid=(N * HO * sig.blocks, 1, 1), block=(sig.threads, 1, 1), use_pdl=CHAINED,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, atom: cute.CopyAtom, view: cute.Tensor, steps: Int32, HO: Int32, cu: cute.Tensor,
        initial, index, final, transition, states: cute.Tensor, span: Int32, less: Int32,
        laid: cute.ComposedLayout, laid_rows: cute.ComposedLayout,
    ):  # fmt: skip
        sig = self.sig
        cute.arch.griddepcontrol_launch_dependents()
        block, _, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        first_warp = cute.arch.make_warp_uniform(tid // 32) == 0
        seq, head = block // (sig.blocks * HO), (block // sig.blocks) % HO
        column = block % sig.blocks  # from V on, rows of the map
        is_map = column * ROWS >= sig.V
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

        smem = SmemAllocator()
        bars = smem.allocate_array(Int64, 2 * STAGES)
        tile = smem.allocate_tensor(BFloat16, laid.outer, 1024, laid.inner)
        rows = smem.allocate_tensor(BFloat16, laid_rows.outer, 1024, laid_rows.inner)
        ring = loaded(bars, STAGES, 2 * sig.K * sig.K * 2, sig.K // 16)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        to, source = ragged.partition(
            atom, tile, cute.local_tile(view, (sig.K, sig.K), (0, 0, None, head, None))
        )

        by_row = product.of_turned(BFloat16, ROWS, sig.K // 64)
        thread = by_row.get_slice(tid)
        M = thread.make_fragment_A(thread.partition_A(product.transposed(tile)))
        operand = thread.make_fragment_B(thread.partition_B(rows))
        S = product.accumulator(thread, sig.K, ROWS)
        H = product.accumulator(thread, sig.K, ROWS)
        ahead = cute.make_rmem_tensor(H.shape, Float32)
        high = cute.make_rmem_tensor(H.shape, BFloat16)
        low = cute.make_rmem_tensor(H.shape, BFloat16)
        store = product.storer(BFloat16, by_row, transpose=True)
        to_rows = store.get_slice(tid)
        parts = to_rows.partition_D(product.transposed(rows))
        at_state = column % (sig.V // ROWS)  # a map's is not used
        unit = thread.partition_C(cute.make_identity_tensor((sig.K, ROWS)))
        if cutlass.const_expr(final is not None):
            ours = turned(thread, final, seq, head, column)
        if cutlass.const_expr(transition is not None):
            theirs = turned(thread, transition, seq, head, column - sig.V // ROWS)

        for i in cutlass.range_constexpr(cute.size(S)):
            k, r = unit[i]
            S[i] = Float32(1.0) if r + column * ROWS - sig.V == k else Float32(0.0)
        if cutlass.const_expr(initial is not None):
            row = seq
            if cutlass.const_expr(index is not None):
                row = Int32(index[seq])
            if row >= 0 and not is_map:
                row = cutlass.min(row, Int32(initial.shape[0]) - 1)
                raw = cute.make_rmem_tensor(S.shape, initial.element_type)
                cute.autovec_copy(turned(thread, initial, row, head, column), raw)
                S.store(raw.load().to(Float32))

        cute.arch.griddepcontrol_wait()
        start = Int32(0)
        if cutlass.const_expr(sig.from_nothing):  # noqa: SIM102
            if last > 0:  # from nothing to the end of the first segment: H
                start = Int32(1)
                segment.gather(states, base, head, at_state * ROWS, tid, H)
                if cutlass.const_expr(sig.carries):
                    segment.scatter(S, states, base, head, at_state * ROWS, tid)
                S.store(H.load())
        at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
        to_fill = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
        if first_warp:
            for s in cutlass.range(start, cutlass.min(start + STAGES, last), unroll=1):
                fill(atom, ring, to_fill, source, to, base + step * s)
                to_fill.advance()
        if start < last:
            segment.gather(states, base + step * start, head, at_state * ROWS, tid, ahead)
        for s in cutlass.range(start, last, unroll=1):
            half = 2 * (s % 2)  # products of the step before may still read the other half
            product.split(S, high, low)
            cute.copy(store, to_rows.retile(high), parts[None, None, None, half])
            cute.copy(store, to_rows.retile(low), parts[None, None, None, half + 1])
            cute.arch.fence_view_async_shared()
            cute.arch.sync_threads()
            for i in cutlass.range_constexpr(cute.size(H)):
                H[i] = Float32(0.0) if is_map else ahead[i]
            # Before the products, since these are not issued until most of them are done; the loads
            # far from the stores of their place, which they would wait for.
            following = base + step * cutlass.min(s + 1, last - 1)
            segment.gather(states, following, head, at_state * ROWS, tid, ahead)
            if cutlass.const_expr(sig.carries):
                segment.scatter(S, states, base + step * s, head, at_state * ROWS, tid)
            ring.consumer_wait(at)
            upper, lower = M[None, None, None, 2 * at.index], M[None, None, None, 2 * at.index + 1]
            first, second = operand[None, None, None, half], operand[None, None, None, half + 1]
            product.issue(by_row, H, upper, first, True)
            product.issue(by_row, H, upper, second, True)
            product.issue(by_row, H, lower, first, True)
            cute.nvgpu.warpgroup.wait_group(0)
            ring.consumer_release(at)
            at.advance()
            S.store(H.load())
            if first_warp and s + STAGES < last:
                fill(atom, ring, to_fill, source, to, base + step * (s + STAGES))
                to_fill.advance()

        if cutlass.const_expr(sig.carries):
            segment.scatter(S, states, base + step * last, head, at_state * ROWS, tid)
        if cutlass.const_expr(final is not None):  # noqa: SIM102
            if not is_map:
                segment.write(S, ours)
        if cutlass.const_expr(transition is not None):  # noqa: SIM102
            if is_map:
                segment.write(S, theirs)


def turned(thread, states, row, head, column):
    """A thread's part of rows of a state [rows, HO, V, K], as an accumulator [K, rows] has it."""
    K = states.shape[3]
    rows = cute.local_tile(states[row, head, None, None], (ROWS, K), (column, 0))
    return thread.partition_C(cute.make_tensor(rows.iterator, cute.select(rows.layout, [1, 0])))


@cute.jit
def fill(atom, ring, at, source, to, slot):
    """Both parts of a segment's map, by one warp."""
    ring.producer_acquire(at)
    bar = ring.producer_get_barrier(at)
    for part in cutlass.range_constexpr(2):
        cute.copy(atom, source[None, part, slot], to[None, 2 * at.index + part], tma_bar_ptr=bar)


# What is compiled, and looked at, without a GPU.
SIGNATURES = (
    Link(),
    Link(K=64, V=128, offsets="int64", initial="bfloat16", index="int32"),
    Link(carries=False, initial="float32", final="float32", transition="float32"),
    Link(carries=False, reverse=True, final="float32"),
)
