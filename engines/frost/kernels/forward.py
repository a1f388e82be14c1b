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

Warpgroups, a file each
    load     warp 0 loads K and Q, warp 1 loads V: TMA into rings of chunks;
             warps 2 and 3 invert the blocks on the diagonal, two each
    advance  one for each 64 rows of V: the state, and all products that read or write it; two of
             them start a chunk in turn, so that one multiplies while the other converts
    factor   gates, scores, G and P, up to two chunks ahead of the state

Shared memory at K = V = 128: K 3 x 16 KB, Q 2 x 16, V 2 x 16, O 2 x 16, T and P 3 x 8 each, blocks
to invert 2 x 5.4, factors 4: 207 KB. Tiles are in the 128-byte swizzle; the scores read K as it is,
the update reads its transpose. Sizes, stages and registers: `tile`; allocation: `shared`.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from lagraph.engines.frost.kernels.advance import advance
from lagraph.engines.frost.kernels.factor import factor
from lagraph.engines.frost.kernels.lib import ragged
from lagraph.engines.frost.kernels.load import invert, keys, values
from lagraph.engines.frost.kernels.shared import Work, allocate, layouts
from lagraph.engines.frost.kernels.tile import REGISTERS, SLICE, STAGGER, C
from lagraph.engines.frost.signature import Signature

__all__ = ["SIGNATURES", "Forward"]

DTYPES = {
    "bfloat16": BFloat16,
    "float16": Float16,
    "float32": Float32,
    "int32": Int32,
    "int64": Int64,
}


@dataclass(frozen=True)
class Forward(Signature):
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
    def io(self):
        """The dtype of q, k, v and O."""
        return DTYPES[self.dtype]

    @property
    def slices(self) -> int:
        """Warpgroups that advance a state."""
        return self.rows // SLICE

    @property
    def parts(self) -> int:
        """CTAs of a head."""
        return self.V // self.rows

    @property
    def threads(self) -> int:
        return 128 * (2 + self.slices)

    @property
    def stagger(self) -> bool:
        return self.slices == 2 and STAGGER

    def build(self, options: str):
        """Compile for the options' architecture; needs no GPU."""
        T, N, N1 = cute.sym_int(), cute.sym_int(), cute.sym_int()
        heads = {name: cute.sym_int() for name in ("H", "HK", "HV", "HO")}
        rows = cute.sym_int()
        io = self.io

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

    @cute.jit
    def __call__(
        self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, g: cute.Tensor, beta: cute.Tensor,
        a_log, dt_bias, cu: cute.Tensor, initial, index, out: cute.Tensor, final, scale: Float32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        sig = self.sig
        laid = layouts(sig)
        made = (
            ragged.load_atom(q, laid[0], (C, sig.K)),
            ragged.load_atom(k, laid[1], (C, sig.K)),
            ragged.load_atom(v, laid[2], (C, sig.rows)),
            ragged.store_atom(out, laid[3], (C, SLICE)),
        )
        heads = (q.shape[1], k.shape[1], v.shape[1])
        grid = (cu.shape[0] - 1) * out.shape[1] * sig.parts
        self.kernel(
            tuple(m[0] for m in made), tuple(m[1] for m in made), heads, g, beta, a_log, dt_bias,
            cu, initial, index, out.shape[0], out.shape[1], final, scale, laid,
        ).launch(
            grid=(grid, 1, 1), block=(sig.threads, 1, 1), min_blocks_per_mp=1, stream=stream
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, atoms: tuple, views: tuple, heads: tuple, g: cute.Tensor, beta: cute.Tensor, a_log,
        dt_bias, cu: cute.Tensor, initial, index, T: Int32, HO: Int32, final, scale: Float32,
        laid: tuple,
    ):  # fmt: skip
        sig = self.sig
        block, _, _ = cute.arch.block_idx()
        part = block % sig.parts
        head = (block // sig.parts) % HO
        seq = block // (sig.parts * HO)
        # Offsets of a GPU are not checked on the host: they are kept inside the tensors.
        begin = cutlass.min(cutlass.max(Int32(cu[seq]), Int32(0)), T)
        end = cutlass.min(cutlass.max(Int32(cu[seq + 1]), begin), T)
        work = Work(seq, head, part, begin, end, cute.ceil_div(end - begin, C))

        tiles, numbers, rings = allocate(sig, laid)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(warp // 4)
        registers = REGISTERS[sig.slices]
        if group == 0:
            cute.arch.setmaxregister_decrease(registers[0])
            if warp == 0:
                head_q, head_k = head // (HO // heads[0]), head // (HO // heads[1])
                keys(sig, atoms, views, tiles, rings, head_q, head_k, work)
            if warp == 1:
                values(sig, atoms, views, tiles, rings, head // (HO // heads[2]), work)
            if warp >= 2:
                invert(sig, tiles, numbers, rings, work, warp - 2)
        elif group <= sig.slices:
            cute.arch.setmaxregister_increase(registers[1])
            states = (initial, index, final)
            advance(sig, atoms[3], views[3], tiles, numbers, rings, states, work, group - 1)
        else:
            if cutlass.const_expr(registers[2] > 65536 // sig.threads):
                cute.arch.setmaxregister_increase(registers[2])
            else:
                cute.arch.setmaxregister_decrease(registers[2])
            gates = (g, beta, a_log, dt_bias)
            factor(sig, tiles, numbers, rings, gates, scale, work)


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
