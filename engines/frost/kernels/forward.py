"""The fused forward of GDN on Hopper: one launch, one CTA for a sequence, a head and a slice of V.

Algorithm, for a chunk of 64 steps with cumulative log decay b, and the state S [V, K]:

    W^T  = V^T - S K^T diag(exp b)
    U    = (I + L)^-1 diag(beta) W             L_ij = beta_i exp(b_i - b_j) k_i.k_j       (j < i)
    O^T  = S Q^T diag(scale exp b) + U^T P^T   P_ij = scale exp(b_i - b_j) q_i.k_j        (j <= i)
    S   <- exp(b_64) S + U^T diag(exp(b_64 - b)) K

U comes 16 tokens at a time: U_i = T_i (W_i - sum_j<i G_ij U_j), T_i the inverse of a block on the
diagonal with its strengths, G_ij = exp(b_i - b_j) k_i.k_j. Blocks are inverted in fp32.

Whatever holds V is transposed: tokens are columns, a factor of a token scales a column of an
accumulator, and S, W and U are the register operand of wgmma: they never pass through shared
memory. The norms of queries and keys are factors of a token too.

Warpgroups
    load     warp 0 loads K and Q, warp 1 loads V: TMA into rings of chunks;
             warps 2 and 3 invert the blocks on the diagonal, two each
    advance  one for each 64 rows of V: the state, and all products that read or write it; two of
             them start a chunk in turn, so that one multiplies while the other converts
    factor   gates, scores, G and P, up to two chunks ahead of the state

Shared memory at K = V = 128: K 3 x 16 KB, Q 2 x 16, V 2 x 16, O 2 x 16, T and P 3 x 8 each, blocks
to invert 2 x 5.4: 205 KB. Tiles are in the 128-byte swizzle; the scores read K as it is, the update
reads its transpose. Registers a thread: `REGISTERS`.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import BFloat16, Float16, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from lagraph.engines.frost.kernels.lib import gate, inverse, product, ragged

__all__ = ["Forward"]

C = 64  # steps of a chunk
PART = 16  # rows of a block of T
SLICE = 64  # rows of V of one warpgroup
K_STAGES, Q_STAGES, V_STAGES, O_STAGES, FACTOR_STAGES, BLOCK_STAGES = 3, 2, 2, 2, 3, 2
# Rows of factors that the state's warpgroups read, per token: of S k, of S q, of u in the update.
ERASE, QUERY, WRITE, FACTORS = 0, 1, 2, 3
STAGGER = True  # two advancing warpgroups start a chunk in turn
# Registers a thread by warpgroup (load, advance, factor), by the number of advancing warpgroups:
# together at most 65536 a CTA.
REGISTERS = {1: (96, 240, 128), 2: (48, 192, 80)}

DTYPES = {
    "bfloat16": BFloat16,
    "float16": Float16,
    "float32": Float32,
    "int32": Int32,
    "int64": Int64,
}


@dataclass(frozen=True)
class Forward:
    """What one compiled kernel is for; T, N, head counts and strides are arguments.

    rows: rows of V of one CTA, 64 or V. a_log, bias, initial, index, final: a tensor's dtype, ""
    where it is absent.
    """

    dtype: str = "bfloat16"
    K: int = 128
    V: int = 128
    rows: int = 128
    gate: str = "log"
    norm: bool = False
    sigmoid: bool = False
    double: bool = False
    g: str = "float32"
    beta: str = "float32"
    a_log: str = ""
    bias: str = ""
    offsets: str = "int32"
    initial: str = ""
    index: str = ""
    final: str = ""

    # Arguments of the compiled function, in order.
    arguments = ("q", "k", "v", "g", "beta", "a_log", "dt_bias", "cu_seqlens", "initial_state",
                 "state_indices", "O", "final_state", "scale")  # fmt: skip

    @property
    def name(self) -> str:
        """A C identifier."""
        values = [str(getattr(self, field)) for field in self.__dataclass_fields__]
        return "forward_" + "_".join(value or "none" for value in values)

    def build(self, options: str):
        """Compile for the options' architecture; needs no GPU."""
        T, N, N1 = cute.sym_int(), cute.sym_int(), cute.sym_int()
        heads = {name: cute.sym_int() for name in ("H", "HK", "HV", "HO")}
        rows = cute.sym_int()
        io = DTYPES[self.dtype]

        def packed(head, D):
            strides = (cute.sym_int64(8), cute.sym_int64(8), 1)
            return make_fake_tensor(io, (T, heads[head], D), strides, assumed_align=16)

        def plain(dtype, *shape):
            if not dtype:
                return None
            width = DTYPES[dtype].width // 8
            strides = tuple(cute.sym_int64() for _ in shape)
            return make_fake_tensor(DTYPES[dtype], shape, strides, assumed_align=width)

        def state(dtype, count):
            if not dtype:
                return None
            step = 128 // DTYPES[dtype].width  # 16 bytes
            strides = (*(cute.sym_int64(step) for _ in range(3)), 1)
            shape = (count, heads["HO"], self.V, self.K)
            return make_fake_tensor(DTYPES[dtype], shape, strides, assumed_align=16)

        entering = state(self.initial, rows if self.index else N)
        leaving = state(self.final, rows if self.index else N)
        return cute.compile(
            ForwardKernel(self), packed("H", self.K), packed("HK", self.K), packed("HV", self.V),
            plain(self.g, T, heads["HO"]), plain(self.beta, T, heads["HO"]),
            plain(self.a_log, heads["HO"]), plain(self.bias, heads["HO"]), plain(self.offsets, N1),
            entering, plain(self.index, N), packed("HO", self.V), leaving, Float32(1.0),
            make_fake_stream(use_tvm_ffi_env_stream=True), options=options,
        )  # fmt: skip


class ForwardKernel:
    """The kernel of one signature."""

    def __init__(self, sig: Forward):
        self.sig = sig
        self.dtype = DTYPES[sig.dtype]
        self.slices = sig.rows // SLICE
        self.parts = sig.V // sig.rows  # CTAs of a head
        self.threads = 128 * (2 + self.slices)
        self.stagger = self.slices == 2 and STAGGER

    @cute.jit
    def __call__(
        self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, g: cute.Tensor, beta: cute.Tensor,
        a_log, dt_bias, cu: cute.Tensor, initial, index, out: cute.Tensor, final, scale: Float32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        sig = self.sig
        lay_k = ragged.swizzled(self.dtype, C, sig.K, K_STAGES)
        lay_q = ragged.swizzled(self.dtype, C, sig.K, Q_STAGES)
        lay_v = ragged.swizzled(self.dtype, C, sig.rows, V_STAGES)
        lay_o = ragged.swizzled(self.dtype, C, SLICE, O_STAGES * self.slices)
        lay_f = ragged.swizzled(self.dtype, C, C, FACTOR_STAGES)
        made = (
            ragged.load_atom(q, lay_q, (C, sig.K)),
            ragged.load_atom(k, lay_k, (C, sig.K)),
            ragged.load_atom(v, lay_v, (C, sig.rows)),
            ragged.store_atom(out, lay_o, (C, SLICE)),
        )
        heads = (q.shape[1], k.shape[1], v.shape[1])
        grid = (cu.shape[0] - 1) * out.shape[1] * self.parts
        self.kernel(
            tuple(m[0] for m in made), tuple(m[1] for m in made), heads, g, beta, a_log, dt_bias,
            cu, initial, index, out.shape[0], out.shape[1], final, scale,
            (lay_q, lay_k, lay_v, lay_o, lay_f),
        ).launch(
            grid=(grid, 1, 1), block=(self.threads, 1, 1), min_blocks_per_mp=1, stream=stream
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, atoms: tuple, views: tuple, heads: tuple, g: cute.Tensor, beta: cute.Tensor, a_log,
        dt_bias, cu: cute.Tensor, initial, index, T: Int32, HO: Int32, final, scale: Float32,
        layouts: tuple,
    ):  # fmt: skip
        sig = self.sig
        block, _, _ = cute.arch.block_idx()
        part = block % self.parts
        head = (block // self.parts) % HO
        seq = block // (self.parts * HO)
        # Offsets of a GPU are not checked on the host: they are kept inside the tensors.
        begin = cutlass.min(cutlass.max(Int32(cu[seq]), Int32(0)), T)
        end = cutlass.min(cutlass.max(Int32(cu[seq + 1]), begin), T)
        chunks = cute.ceil_div(end - begin, C)

        smem = SmemAllocator()
        ring = [
            smem.allocate_array(Int64, 2 * stages)
            for stages in (K_STAGES, Q_STAGES, V_STAGES, FACTOR_STAGES, BLOCK_STAGES)
        ]
        sQ, sK, sV, sO = (
            smem.allocate_tensor(self.dtype, lay.outer, 1024, lay.inner) for lay in layouts[:4]
        )
        sT, sP = (
            smem.allocate_tensor(self.dtype, layouts[4].outer, 1024, layouts[4].inner)
            for _ in range(2)
        )
        # What the inverse reads: four blocks of L, and the strengths of the chunk.
        blocks = smem.allocate_tensor(
            Float32, cute.make_layout((4 * inverse.NUMBERS + C, BLOCK_STAGES)), 128
        )
        rows = smem.allocate_tensor(Float32, cute.make_layout((C, FACTORS, FACTOR_STAGES)), 128)
        last = smem.allocate_tensor(Float32, cute.make_layout(FACTOR_STAGES), 16)
        # Of two chunks in turn: cumulative log2 decay, strength; and norms of keys and queries.
        sums = smem.allocate_tensor(Float32, cute.make_layout((C, 2)), 128)
        strengths = smem.allocate_tensor(Float32, cute.make_layout((C, 2)), 128)
        norms = smem.allocate_tensor(Float32, cute.make_layout((C, 2)), 128)

        one = pipeline.CooperativeGroup(pipeline.Agent.Thread, 1)
        warps = 4 * self.slices
        tile = C * sig.K * 2

        def tma_ring(storage, stages, nbytes, readers):
            return pipeline.PipelineTmaAsync.create(
                barrier_storage=storage, num_stages=stages, tx_count=nbytes, producer_group=one,
                consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, readers),
                cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)), defer_sync=True,
            )  # fmt: skip

        pipe_k = tma_ring(ring[0], K_STAGES, tile, warps + 4)
        pipe_q = tma_ring(ring[1], Q_STAGES, tile, warps + 4)
        pipe_v = tma_ring(ring[2], V_STAGES, C * sig.rows * 2, warps)
        pipe_f = pipeline.PipelineAsync.create(
            barrier_storage=ring[3], num_stages=FACTOR_STAGES,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 6),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, warps), defer_sync=True,
        )  # fmt: skip
        pipe_b = pipeline.PipelineAsync.create(
            barrier_storage=ring[4], num_stages=BLOCK_STAGES,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 4),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 2), defer_sync=True,
        )  # fmt: skip
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(warp_idx // 4)
        span = (begin, end, chunks)
        registers = REGISTERS[self.slices]
        if group == 0:
            cute.arch.setmaxregister_decrease(registers[0])
            if warp_idx == 0:
                head_q, head_k = head // (HO // heads[0]), head // (HO // heads[1])
                self.load_keys(atoms, views, sQ, sK, pipe_q, pipe_k, head_q, head_k, span)
            if warp_idx == 1:
                head_v = head // (HO // heads[2])
                self.load_values(atoms[2], views[2], sV, pipe_v, head_v, part, span)
            if warp_idx >= 2:
                self.invert(sT, blocks, pipe_b, pipe_f, chunks, warp_idx - 2)
        elif group <= self.slices:
            cute.arch.setmaxregister_increase(registers[1])
            self.advance(
                atoms[3], views[3], sQ, sK, sV, sO, sT, sP, rows, last,
                (pipe_k, pipe_q, pipe_v, pipe_f), initial, index, final, seq, head, part, span,
                group - 1,
            )  # fmt: skip
        else:
            if cutlass.const_expr(registers[2] > 65536 // self.threads):
                cute.arch.setmaxregister_increase(registers[2])
            else:
                cute.arch.setmaxregister_decrease(registers[2])
            self.factor(
                sQ, sK, sT, sP, blocks, rows, last, sums, strengths, norms,
                (pipe_k, pipe_q, pipe_f, pipe_b), g, beta, a_log, dt_bias, head, scale, span,
            )  # fmt: skip

    # Loading ------------------------------------------------------------------------------------

    @cute.jit
    def load_keys(self, atoms, views, sQ, sK, pipe_q, pipe_k, head_q, head_k, span):
        begin, end, chunks = span
        shape = (C, self.sig.K)
        to_q, from_q = ragged.partition(
            atoms[0], sQ, ragged.tiles(views[0], head_q, begin, end, shape)
        )
        to_k, from_k = ragged.partition(
            atoms[1], sK, ragged.tiles(views[1], head_k, begin, end, shape)
        )
        state_q = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, Q_STAGES)
        state_k = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, K_STAGES)
        for c in cutlass.range(chunks, unroll=1):
            pipe_k.producer_acquire(state_k)
            bar = pipe_k.producer_get_barrier(state_k)
            cute.copy(atoms[1], from_k[None, c, 0], to_k[None, state_k.index], tma_bar_ptr=bar)
            state_k.advance()
            pipe_q.producer_acquire(state_q)
            bar = pipe_q.producer_get_barrier(state_q)
            cute.copy(atoms[0], from_q[None, c, 0], to_q[None, state_q.index], tma_bar_ptr=bar)
            state_q.advance()

    @cute.jit
    def load_values(self, atom, view, sV, pipe, head, part, span):
        begin, end, chunks = span
        to, source = ragged.partition(
            atom, sV, ragged.tiles(view, head, begin, end, (C, self.sig.rows))
        )
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, V_STAGES)
        for c in cutlass.range(chunks, unroll=1):
            pipe.producer_acquire(state)
            bar = pipe.producer_get_barrier(state)
            cute.copy(atom, source[None, c, part], to[None, state.index], tma_bar_ptr=bar)
            state.advance()

    # Inverses -----------------------------------------------------------------------------------

    @cute.jit
    def invert(self, sT, blocks, pipe_b, pipe_f, chunks, warp):
        """One warp: of every chunk the inverses of two blocks of 16 tokens, times strengths."""
        lane = cute.arch.lane_idx()
        column = warp * 2 * PART + lane
        at_b = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, BLOCK_STAGES)
        at_f = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, FACTOR_STAGES)
        for _ in cutlass.range(chunks, unroll=1):
            pipe_b.consumer_wait(at_b)
            numbers = blocks[None, at_b.index]
            strength = numbers[4 * inverse.NUMBERS + column]
            x = inverse.substitute(numbers.iterator + warp * (2 * inverse.NUMBERS), lane)
            pipe_f.producer_acquire(at_f)
            for i in cutlass.range_constexpr(PART):
                row = column // PART * PART + i
                sT[row, column, at_f.index] = (x[i] * strength).to(self.dtype)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            if lane == 0:
                pipe_f.producer_commit(at_f)
                pipe_b.consumer_release(at_b)
            at_b.advance()
            at_f.advance()

    # The state ----------------------------------------------------------------------------------

    @cute.jit
    def advance(
        self, atom_o, view_o, sQ, sK, sV, sO, sT, sP, rows, last, pipes, initial, index, final,
        seq, head, part, span, wg,
    ):  # fmt: skip
        sig, dtype = self.sig, self.dtype
        begin, end, chunks = span
        pipe_k, pipe_q, pipe_v, pipe_f = pipes
        tid = cute.arch.thread_idx()[0] % 128
        lane = cute.arch.lane_idx()
        first_warp = cute.arch.make_warp_uniform(tid // 32) == 0

        # a [64 rows of V, ...] in registers, by tiles of tokens and by the transpose of K.
        by_token = product.of_registers(dtype, C)
        by_part = product.of_registers(dtype, PART)
        by_key = product.of_registers(dtype, sig.K, OperandMajorMode.MN)
        thread, thread_k = by_token.get_slice(tid), by_key.get_slice(tid)
        bK = thread.make_fragment_B(thread.partition_B(sK))
        bQ = thread.make_fragment_B(thread.partition_B(sQ))
        thread_p = by_part.get_slice(tid)
        bT = thread_p.make_fragment_B(thread_p.partition_B(sT))
        bP = thread.make_fragment_B(thread.partition_B(sP))
        sKt = cute.make_tensor(sK.iterator, cute.select(sK.layout, [1, 0, 2]))
        bKt = thread_k.make_fragment_B(thread_k.partition_B(sKt))

        S = product.accumulator(thread_k, SLICE, sig.K)
        X = product.accumulator(thread, SLICE, C)
        O = product.accumulator(thread, SLICE, C)
        U = product.accumulator(thread_p, SLICE, PART)
        W = tuple(product.accumulator(thread_p, SLICE, PART) for _ in range(C // PART))
        count = cute.size(U)
        S_in, S_low = product.as_operand(thread, S, dtype, SLICE, sig.K)
        W_in, W_low = product.as_operand(thread, X, dtype, SLICE, C)
        U_in, U_low = product.as_operand(thread, X, dtype, SLICE, C)
        part_in, part_low = product.as_operand(thread_p, U, dtype, SLICE, PART)

        load = product.loader(dtype, by_token)
        from_v = load.get_slice(tid)
        sVt = cute.make_tensor(sV.iterator, cute.select(sV.layout, [1, 0, 2]))
        mine = cute.local_tile(sVt, (SLICE, C, V_STAGES), (wg, 0, 0))
        v_source = from_v.partition_S(mine)
        value = cute.make_rmem_tensor(X.shape, dtype)
        v_target = from_v.retile(value)

        store = product.storer(dtype, by_token, transpose=True)
        to_o = store.get_slice(tid)
        sOt = cute.make_tensor(sO.iterator, cute.select(sO.layout, [1, 0, 2]))
        o_target = to_o.partition_D(sOt)
        result = cute.make_rmem_tensor(O.shape, dtype)
        o_source = to_o.retile(result)
        o_shared, o_global = ragged.partition(
            atom_o, sO, ragged.tiles(view_o, head, begin, end, (C, SLICE))
        )
        column = part * self.slices + wg

        # The state that enters, read in the accumulator's own order.
        row = seq
        padding = False
        if cutlass.const_expr(index is not None):
            row = Int32(index[seq])
            padding = row < 0
            pool = initial if cutlass.const_expr(initial is not None) else final
            row = cutlass.min(cutlass.max(row, Int32(0)), Int32(pool.shape[0]) - 1)
        if cutlass.const_expr(
            final is not None
        ):  # here: a product in the loop takes `thread_k` along
            ours = cute.local_tile(final[row, head, None, None], (SLICE, sig.K), (column, 0))
            target = thread_k.partition_C(ours)
        if cutlass.const_expr(initial is not None):
            theirs = cute.local_tile(initial[row, head, None, None], (SLICE, sig.K), (column, 0))
            source = thread_k.partition_C(theirs)
            raw = cute.make_rmem_tensor(S.shape, initial.element_type)
            cute.autovec_copy(source, raw)
            S.store(raw.load().to(Float32))
        else:
            S.fill(0.0)
        S_low.store(S.load().to(dtype))

        at_k = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, K_STAGES)
        at_q = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, Q_STAGES)
        at_v = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, V_STAGES)
        at_f = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, FACTOR_STAGES)
        if cutlass.const_expr(self.stagger):  # noqa: SIM102 - one at compile time, one at run time
            if wg == 1:  # the first warpgroup goes first
                cute.arch.barrier_arrive(barrier_id=4, number_of_threads=256)
        for c in cutlass.range(chunks, unroll=1):
            pipe_k.consumer_wait(at_k)
            if cutlass.const_expr(self.stagger):
                cute.arch.barrier(barrier_id=4 + wg, number_of_threads=256)
            product.issue(by_token, X, S_in, bK[None, None, None, at_k.index], False)
            pipe_f.consumer_wait(at_f)
            pipe_v.consumer_wait(at_v)
            cute.nvgpu.warpgroup.wait_group(0)
            for group in cutlass.range_constexpr(C // 8):
                if cutlass.const_expr(group % 2 == 0):
                    pair = group // 2
                    cute.copy(
                        load, v_source[None, None, pair, at_v.index], v_target[None, None, pair]
                    )
                erase = product.pair(rows[None, ERASE, at_f.index], lane, group)
                for e in cutlass.range_constexpr(4):
                    i = 4 * group + e
                    piece = W[i // count]
                    piece[i % count] = value[i].to(Float32) - erase[e % 2] * X[i]

            # U, 16 tokens at a time: their own, then what they take from those that follow.
            stage = bT[None, None, None, at_f.index]
            for p in cutlass.range_constexpr(C // PART):
                part_low.store(W[p].load().to(dtype))
                product.issue_block(by_part, U, part_in, stage, p, p, 1, False)
                if cutlass.const_expr(p == 0):
                    decay = last[at_f.index]
                    for i in cutlass.range_constexpr(cute.size(S)):
                        S[i] = decay * S[i]
                if cutlass.const_expr(p == C // PART - 1):
                    if cutlass.const_expr(self.stagger):  # noqa: SIM102
                        if wg == 0 or c + 1 < chunks:
                            cute.arch.barrier_arrive(barrier_id=5 - wg, number_of_threads=256)
                    pipe_q.consumer_wait(at_q)
                    product.issue(by_token, O, S_in, bQ[None, None, None, at_q.index], False)
                    cute.nvgpu.warpgroup.wait_group(1)
                    # Only now are products done that depend on V's loads. A release right after the
                    # loads overtakes them where wgmma keeps shared memory busy: TMA overwrote V.
                    pipe_v.consumer_release(at_v)
                else:
                    cute.nvgpu.warpgroup.wait_group(0)
                for i in cutlass.range_constexpr(count):
                    U_low[p * count + i] = U[i].to(dtype)
                for n in cutlass.range_constexpr(p + 1, C // PART):
                    product.issue_block(by_part, W[n], U_in[None, None, p], stage, n, p, 1, True)
                self.scale(U, W_low, rows[None, WRITE, at_f.index], lane, p)
                if cutlass.const_expr(p + 1 < C // PART):
                    cute.nvgpu.warpgroup.wait_group(C // PART - 2 - p)
            cute.nvgpu.warpgroup.wait_group(0)
            pipe_q.consumer_release(at_q)
            for group in cutlass.range_constexpr(C // 8):
                query = product.pair(rows[None, QUERY, at_f.index], lane, group)
                for e in cutlass.range_constexpr(4):
                    O[4 * group + e] = query[e % 2] * O[4 * group + e]
            product.issue(by_token, O, U_in, bP[None, None, None, at_f.index], True)
            product.issue(by_key, S, W_in, bKt[None, None, None, at_k.index], True)

            cute.nvgpu.warpgroup.wait_group(1)
            slot = (c % O_STAGES) * self.slices + wg
            self.emit(O, result, store, o_source, o_target, slot, padding, first_warp, wg)
            if first_warp:
                cute.copy(atom_o, o_shared[None, slot], o_global[None, c, column])
                cute.arch.cp_async_bulk_commit_group()
            cute.nvgpu.warpgroup.wait_group(0)
            pipe_k.consumer_release(at_k)
            cute.arch.sync_warp()
            if lane == 0:
                pipe_f.consumer_release(at_f)
            S_low.store(S.load().to(dtype))
            at_k.advance()
            at_q.advance()
            at_v.advance()
            at_f.advance()

        if cutlass.const_expr(final is not None):
            rounded = cute.make_rmem_tensor(S.shape, final.element_type)
            rounded.store(S.load().to(final.element_type))
            if not padding:
                cute.autovec_copy(rounded, target)
        if first_warp:
            cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def emit(self, O, result, store, source, target, slot, padding, first_warp, wg):
        """A chunk's output to its tile of shared memory, in sight of TMA."""
        if cutlass.const_expr(self.sig.index):
            for i in cutlass.range_constexpr(cute.size(O)):
                O[i] = Float32(0.0) if padding else O[i]
        result.store(O.load().to(self.dtype))
        cute.copy(store, source, target[None, None, None, slot])
        cute.arch.fence_view_async_shared()
        if first_warp:  # the store before this one has read its tile, which the next writes
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=wg + 1, number_of_threads=128)

    @cute.jit
    def scale(self, U, low, row, lane, part: cutlass.Constexpr):
        """Columns of U, 16 tokens, by their factors, into the operand of the update."""
        for group in cutlass.range_constexpr(PART // 8):
            write = product.pair(row, lane, group + part * (PART // 8))
            for e in cutlass.range_constexpr(4):
                i = 4 * group + e
                low[i + part * cute.size(U)] = (write[e % 2] * U[i]).to(self.dtype)

    # Factors ------------------------------------------------------------------------------------

    @cute.jit
    def fetch(self, g, beta, head, begin, end, chunk, lane):
        """Gates and strengths of this lane's two tokens of a chunk, as they are in memory. Nothing
        here waits for them."""
        first = cutlass.min(begin + chunk * C + 2 * lane, end - 1)
        second = cutlass.min(begin + chunk * C + 2 * lane + 1, end - 1)
        return g[first, head], g[second, head], beta[first, head], beta[second, head]

    @cute.jit
    def gates(self, raw, sums, strengths, amplitude, bias, end, start, lane):
        """One warp: sums of 64 tokens' decays, and their strengths; none past the end."""
        sig = self.sig
        decays = []
        for i in cutlass.range_constexpr(2):
            inside = start + 2 * lane + i < end
            decay = gate.log2_decay(raw[i].to(Float32), amplitude, bias, sig.gate)
            strength = gate.strength(raw[2 + i].to(Float32), sig.sigmoid, sig.double)
            decays.append(decay if inside else Float32(0.0))
            strengths[2 * lane + i] = strength if inside else Float32(0.0)
        sums[2 * lane], sums[2 * lane + 1] = gate.sums(decays[0], decays[1], lane)

    @cute.jit
    def factor(
        self, sQ, sK, sT, sP, blocks, rows, last, sums, strengths, norms, pipes, g, beta, a_log,
        dt_bias, head, scale, span,
    ):  # fmt: skip
        sig, dtype = self.sig, self.dtype
        begin, end, chunks = span
        pipe_k, pipe_q, pipe_f, pipe_b = pipes
        tid = cute.arch.thread_idx()[0] % 128
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(tid // 32)

        scores = product.of_shared(dtype, C)
        thread = scores.get_slice(tid)
        aK = thread.make_fragment_A(thread.partition_A(sK))
        aQ = thread.make_fragment_A(thread.partition_A(sQ))
        bK = thread.make_fragment_B(thread.partition_B(sK))
        place = thread.partition_C(cute.make_identity_tensor((C, C)))
        store = product.storer(dtype, scores, transpose=False)
        to_p = store.get_slice(tid)
        p_target, t_target = to_p.partition_D(sP), to_p.partition_D(sT)
        masked = cute.make_rmem_tensor(place.shape, dtype)
        amplitude, bias = Float32(1.0), Float32(0.0)
        if cutlass.const_expr(a_log is not None):
            amplitude = cute.math.exp2(a_log[head].to(Float32) * gate.LOG2E)
        if cutlass.const_expr(dt_bias is not None):
            bias = dt_bias[head].to(Float32)

        if warp == 0 and chunks > 0:
            raw = self.fetch(g, beta, head, begin, end, Int32(0), lane)
            self.gates(raw, sums[None, 0], strengths[None, 0], amplitude, bias, end, begin, lane)
        self.meet()

        at_k = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, K_STAGES)
        at_q = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, Q_STAGES)
        at_f = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, FACTOR_STAGES)
        at_b = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, BLOCK_STAGES)
        for c in cutlass.range(chunks, unroll=1):
            turn = c % 2
            raw = self.fetch(g, beta, head, begin, end, c + 1, lane)
            kk = product.accumulator(thread, C, C)
            qk = product.accumulator(thread, C, C)
            pipe_k.consumer_wait(at_k)
            product.issue(
                scores,
                kk,
                aK[None, None, None, at_k.index],
                bK[None, None, None, at_k.index],
                False,
            )
            if cutlass.const_expr(sig.norm):
                pipe_q.consumer_wait(at_q)
                if tid < C:
                    norms[tid, 0] = self.norm(sK, tid, at_k.index)
                else:
                    norms[tid - C, 1] = self.norm(sQ, tid - C, at_q.index)
                self.meet()
            pipe_f.producer_acquire(at_f)
            pipe_b.producer_acquire(at_b)
            mine = self.row_factors(sums, strengths, norms, scale, turn, warp * 16 + lane // 4)
            cute.nvgpu.warpgroup.wait_group(0)
            for w in cutlass.range_constexpr(4):
                if warp == w:
                    self.keep(
                        kk,
                        masked,
                        mine,
                        sums,
                        norms,
                        blocks[None, at_b.index],
                        place,
                        turn,
                        lane,
                        w,
                    )
            if lane < 16:
                blocks[4 * inverse.NUMBERS + 16 * warp + lane, at_b.index] = strengths[
                    16 * warp + lane, turn
                ]
            cute.arch.sync_warp()
            if lane == 0:
                pipe_b.producer_commit(at_b)
            pipe_q.consumer_wait(at_q)
            product.issue(
                scores,
                qk,
                aQ[None, None, None, at_q.index],
                bK[None, None, None, at_k.index],
                False,
            )

            # While it runs: an operand, the rows of factors, and the gates of the next chunk.
            left = to_p.retile(masked)
            for w in cutlass.range_constexpr(1, 4):
                if warp == w:
                    for i in cutlass.range_constexpr(w):
                        cute.copy(
                            store, left[(None, i), None, None],
                            t_target[(None, i), None, None, at_f.index],
                        )  # fmt: skip
            if tid < C:
                b, total = sums[tid, turn], sums[C - 1, turn]
                key, query = Float32(1.0), scale
                if cutlass.const_expr(sig.norm):
                    key, query = norms[tid, 0], scale * norms[tid, 1]
                inward = gate.finite_power(b)
                rows[tid, ERASE, at_f.index] = inward * key
                rows[tid, QUERY, at_f.index] = inward * query
                rows[tid, WRITE, at_f.index] = gate.finite_power(total - b) * key
                if tid == 0:
                    last[at_f.index] = cute.math.exp2(total, fastmath=True)
            if warp == 0:
                start = begin + (c + 1) * C
                self.gates(
                    raw,
                    sums[None, 1 - turn],
                    strengths[None, 1 - turn],
                    amplitude,
                    bias,
                    end,
                    start,
                    lane,
                )
            cute.nvgpu.warpgroup.wait_group(0)
            pipe_k.consumer_release(at_k)
            pipe_q.consumer_release(at_q)
            mine = self.row_factors(sums, strengths, norms, scale, turn, warp * 16 + lane // 4)
            for w in cutlass.range_constexpr(4):
                if warp == w:
                    self.mask(qk, masked, mine, sums, norms, place, turn, lane, w)
            cute.copy(store, to_p.retile(masked), p_target[None, None, None, at_f.index])
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            if lane == 0:
                pipe_f.producer_commit(at_f)
            at_k.advance()
            at_q.advance()
            at_f.advance()
            at_b.advance()
            self.meet()

    @cute.jit
    def row_factors(self, sums, strengths, norms, scale, turn, top):
        """Of rows r and r + 8: cumulative decay, and what scales a row of L, of L without its
        strength, and of P."""
        found = []
        for i in cutlass.range_constexpr(2):
            row = top + 8 * i
            key, query = Float32(1.0), scale
            if cutlass.const_expr(self.sig.norm):
                key, query = norms[row, 0], scale * norms[row, 1]
            found.append((sums[row, turn], strengths[row, turn] * key, key, query))
        return found

    @cute.jit
    def keep(self, kk, joined, mine, sums, norms, blocks, place, turn, lane, w: cutlass.Constexpr):
        """Rows 16 w to 16 w + 15 of L: the block on the diagonal in fp32 for its inverse, and what
        lies left of it, without strengths and negated, as an operand."""
        for group in cutlass.range_constexpr(2 * (w + 1)):
            b_columns = product.pair(sums[None, turn], lane, group)
            keys = self.key_norms(norms, lane, group)
            for e in cutlass.range_constexpr(4):
                i = 4 * group + e
                b, strength, key, _ = mine[e // 2]
                power = gate.finite_power(b - b_columns[e % 2])
                value = kk[i] * power * keys[e % 2]
                row, column = place[i]
                if cutlass.const_expr(group // 2 == w):
                    leaf = inverse.leaf(blocks, w)
                    leaf[row - 16 * w, column - 16 * w] = strength * value
                else:
                    joined[i] = (-key * value).to(self.dtype)

    @cute.jit
    def mask(self, qk, masked, mine, sums, norms, place, turn, lane, w: cutlass.Constexpr):
        """Rows 16 w to 16 w + 15 of P, in the io dtype."""
        for group in cutlass.range_constexpr(C // 8):
            b_columns = product.pair(sums[None, turn], lane, group)
            keys = self.key_norms(norms, lane, group)
            for e in cutlass.range_constexpr(4):
                i = 4 * group + e
                if cutlass.const_expr(group > 2 * w + 1):
                    masked[i] = self.dtype(0.0)
                else:
                    b, _, _, query = mine[e // 2]
                    power = gate.finite_power(b - b_columns[e % 2])
                    value = query * qk[i] * power * keys[e % 2]
                    if cutlass.const_expr(group // 2 == w):
                        row, column = place[i]
                        value = value if column <= row else Float32(0.0)
                    masked[i] = value.to(self.dtype)

    @cute.jit
    def meet(self):
        """All threads of the factor warpgroup."""
        cute.arch.barrier(barrier_id=1 + self.slices, number_of_threads=128)

    @cute.jit
    def key_norms(self, norms, lane, group: cutlass.Constexpr):
        """Of this thread's two columns in a group, 1 / |k|; 1 where keys are taken as they are."""
        if cutlass.const_expr(self.sig.norm):
            return product.pair(norms[None, 0], lane, group)
        return Float32(1.0), Float32(1.0)

    @cute.jit
    def norm(self, tile, row, stage):
        """1 / |x| of one row of a tile."""
        eight = cute.make_rmem_tensor(8, self.dtype)
        total = Float32(0.0)
        source = cute.logical_divide(tile[row, None, stage], cute.make_layout(8))
        for i in cutlass.range(self.sig.K // 8, unroll=2):
            cute.autovec_copy(source[None, i], eight)
            for e in cutlass.range_constexpr(8):
                value = eight[e].to(Float32)
                total += value * value
        return cute.math.rsqrt(total + 1e-6, fastmath=True)


# What is compiled, and looked at, without a GPU.
SIGNATURES = (
    Forward(final="float32"),
    Forward(initial="float32", final="float32", norm=True, sigmoid=True, double=True),
    Forward(
        dtype="float16",
        gate="softplus",
        a_log="float32",
        bias="float32",
        initial="bfloat16",
        final="bfloat16",
        index="int32",
    ),
    Forward(rows=64, gate="linear", g="bfloat16", beta="bfloat16", final="float32"),
    Forward(K=64, V=64, rows=64, offsets="int64", final="float32"),
    Forward(K=64, V=128, rows=128),
)
