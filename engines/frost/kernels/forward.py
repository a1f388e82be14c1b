"""The fused forward of GDN and GDP on Hopper: one CTA for a sequence, a head and a slice of V.

Algorithm, for a chunk of 64 steps with cumulative log decay b, and the state S [V, K]:

    W^T  = V^T - S K^T diag(exp b)
    U    = T W,  T = (I + diag(beta) G)^-1 diag(beta)   G_ij = exp(b_i - b_j) k_i.k_j     (j < i)
    O^T  = S Q^T diag(scale exp b) + U^T P^T   P_ij = scale exp(b_i - b_j) q_i.k_j        (j <= i)
    S   <- exp(b_64) S + U^T diag(exp(b_64 - b)) K

T is inverted in blocks of 16 steps in fp32, and joined by products of blocks: `lib.inverse`.

Whatever holds V is transposed: tokens are columns, a factor of a token scales a column of an
accumulator, and S, W and U are the register operand of wgmma: they never pass through shared
memory. The norms of queries and keys are factors of a token too. A step of GDP is one of the n
updates of a token, which decays at the first and is read at the last: 64 / n queries a chunk.

Phases: "whole" sequences take one launch. Where they leave SMs idle they are cut (`lib.segment`):
"open" finds what a segment does to a state, from nothing and, for rows below V, from the unit
matrix, without queries; `link` carries the state over the segments; "close" starts from it.
"retreat" opens segments for the gradient of the state.

Warpgroups, a file each
    load     warp 0 loads K and Q, warp 1 loads V: TMA into rings of chunks;
             warps 2 and 3 make T of G
    advance  one for each 64 rows of V: the state, and all products that read or write it; two of
             them start a chunk in turn, so that one multiplies while the other converts;
             in the phase "retreat": retreat
    factor   gates, scores, G (where T will be) and P, up to two chunks ahead of the state

Shared memory at K = V = 128: K 3 x 16 KB, Q 2 x 16, V 2 x 16, O 2 x 16, T and P 3 x 8 each, blocks
to invert 3 x 3.4, numbers 6: 209 KB. Tiles are in the 128-byte swizzle; the scores read K as it is,
the update reads its transpose. Sizes, stages and registers: `tile`; allocation: `shared`.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream

from lagraph.engines.frost.kernels.advance import advance
from lagraph.engines.frost.kernels.factor import factor
from lagraph.engines.frost.kernels.lib import fake, ragged, segment
from lagraph.engines.frost.kernels.load import invert, keys, values
from lagraph.engines.frost.kernels.retreat import retreat
from lagraph.engines.frost.kernels.shared import Work, allocate, clear, layouts
from lagraph.engines.frost.kernels.tile import (
    CHAINED,
    COMPACT,
    FULL,
    SLICE,
    SPLIT,
    STAGGER,
    C,
    registers,
)
from lagraph.engines.frost.signature import Signature

__all__ = ["SIGNATURES", "Forward"]


@dataclass(frozen=True)
class Forward(Signature):
    """What one compiled kernel is for; T, N, head counts and strides are arguments.

    phase: "whole" sequences, or of segments "open" (what each does to a state) and "close"
    (outputs from the state that enters); "retreat" is "open" for the gradient of the state, with
    the gradient of O for v. n: steps of a token. rows: rows of V of one CTA. split: T, G, P and U
    in two parts, for strengths near 2. paired: two CTAs an SM, for K and rows of 64. a_log, bias,
    initial, index, final, checkpoints: a tensor's dtype, "" where it is absent. every: steps
    between checkpoints.
    """

    phase: str = "whole"
    dtype: str = "bfloat16"
    n: int = 1
    K: int = 128
    V: int = 128
    rows: int = 128
    split: bool = False
    paired: bool = False
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
    checkpoints: str = ""
    every: int = 0

    # Arguments of the compiled function, in order.
    arguments = ("q", "k", "v", "g", "beta", "a_log", "dt_bias", "cu_seqlens", "initial_state",
                 "state_indices", "O", "final_state", "state_checkpoints", "workspace", "scale",
                 "span", "less", "skip")  # fmt: skip

    @property
    def io(self):
        """The dtype of q, k, v and O."""
        return fake.DTYPES[self.dtype]

    @property
    def outputs(self) -> bool:
        """Whether there are queries."""
        return self.phase != "open"

    @property
    def emits(self) -> bool:
        """Whether O is written."""
        return self.phase in ("whole", "close")

    @property
    def sums_up(self) -> bool:
        """Whether all that is written is what a segment does to a state."""
        return self.phase in ("open", "retreat")

    @property
    def value_rows(self) -> int:
        """Rows of a tile of values, or of gradients of O."""
        return self.queries if self.phase == "retreat" else C

    def chunk(self, work, turn):
        """Which chunk is at its turn."""
        return work.chunks - 1 - turn if self.phase == "retreat" else turn

    @property
    def queries(self) -> int:
        """Queries of a chunk."""
        return C // self.n

    @property
    def slices(self) -> int:
        """Warpgroups that advance a state."""
        return self.rows // SLICE

    @property
    def parts(self) -> int:
        """CTAs of a sequence, or segment, and head: what opens has the unit matrix below V."""
        return (self.V + (self.K if self.sums_up else 0)) // self.rows

    @property
    def threads(self) -> int:
        return 128 * (2 + self.slices)

    @property
    def per_sm(self) -> int:
        """CTAs of an SM."""
        return 2 if self.paired else 1

    @property
    def stages(self):
        """Of the rings: fewer where two CTAs, or tiles in two parts, share the memory."""
        if self.split:
            return SPLIT
        return COMPACT if self.paired else FULL

    @property
    def spills(self) -> int:
        """Bytes let pass: an address that waits in memory for a kernel's end; more where two CTAs
        an SM, or two advancing warpgroups, are worth it."""
        if self.paired:
            return 96
        return 192 if self.split and self.slices == 2 else 8

    @property
    def roomy(self) -> bool:
        """Whether warps that factor have registers for numbers that they will need."""
        return not (self.split or self.paired or self.norm)

    @property
    def stagger(self) -> bool:
        return self.slices == 2 and STAGGER

    def build(self, options: str):
        """Compile for the options' architecture; needs no GPU."""
        T, N, N1, rows, kept = (cute.sym_int() for _ in range(5))
        H, HK, HV, HO = (cute.sym_int() for _ in range(4))
        steps = T if self.n == 1 else cute.sym_int()
        io, count = self.dtype, rows if self.index else N
        q, out = io if self.outputs else "", io if self.emits else ""
        values = T if self.phase == "retreat" else steps
        cut = self.phase != "whole"
        return cute.compile(
            ForwardKernel(self), fake.packed(q, T, H, self.K), fake.packed(io, steps, HK, self.K),
            fake.packed(io, values, HV, self.V), fake.plain(self.g, T, HO),
            fake.plain(self.beta, steps, HO), fake.plain(self.a_log, HO),
            fake.plain(self.bias, HO), fake.plain(self.offsets, N1),
            fake.states(self.initial, count, HO, self.V, self.K), fake.plain(self.index, N),
            fake.packed(out, T, HO, self.V), fake.states(self.final, count, HO, self.V, self.K),
            fake.states(self.checkpoints, kept, HO, self.V, self.K),
            fake.workspace() if cut else None, Float32(1.0), Int32(C), Int32(0), Int32(0),
            make_fake_stream(use_tvm_ffi_env_stream=True), options=options,
        )  # fmt: skip


class ForwardKernel:
    """The kernel of one signature."""

    def __init__(self, sig: Forward):
        self.sig = sig

    @cute.jit
    def __call__(
        self, q, k: cute.Tensor, v: cute.Tensor, g: cute.Tensor, beta: cute.Tensor, a_log, dt_bias,
        cu: cute.Tensor, initial, index, out, final, checkpoints, workspace, scale: Float32,
        span: Int32, less: Int32, skip: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        sig = self.sig
        laid = layouts(sig)
        made = [
            None,
            ragged.load_atom(k, laid[1], (C, sig.K)),
            ragged.load_atom(v, laid[2], (sig.value_rows, sig.rows)),
            None,
        ]
        if cutlass.const_expr(sig.outputs):
            made[0] = ragged.load_atom(q, laid[0], (C, sig.K))
        if cutlass.const_expr(sig.emits):
            made[3] = ragged.store_atom(out, laid[3], (sig.queries, SLICE))
        atoms = tuple(None if m is None else m[0] for m in made)
        views = tuple(None if m is None else m[1] for m in made)
        steps, HO, slots = k.shape[0], g.shape[1], cu.shape[0] - 1
        ends = None
        if cutlass.const_expr(workspace is not None):
            slots = steps // span + slots * segment.per_sequence(less)
            ends = segment.ends(workspace, slots, HO, sig.V, sig.K)
        # Heads that share a query's, a key's and a value's head.
        groups = (
            1 if cutlass.const_expr(q is None) else HO // q.shape[1],
            HO // k.shape[1],
            HO // v.shape[1],
        )
        self.kernel(
            atoms, views, groups, (g, beta, a_log, dt_bias), cu,
            (initial, index, final, checkpoints, ends), steps, HO, scale, (span, less, skip), laid,
        ).launch(
            grid=(slots * HO * sig.parts, 1, 1), block=(sig.threads, 1, 1),
            min_blocks_per_mp=sig.per_sm, preferred_smem_carveout=100,
            use_pdl=CHAINED and sig.phase == "close", stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, atoms: tuple, views: tuple, groups: tuple, gates: tuple, cu: cute.Tensor,
        states: tuple, steps: Int32, HO: Int32, scale: Float32, cut: tuple, laid: tuple,
    ):  # fmt: skip
        sig = self.sig
        if cutlass.const_expr(sig.sums_up):
            cute.arch.griddepcontrol_launch_dependents()
        work = mine(sig, cu, steps, HO, cut)
        tiles, numbers, rings = allocate(sig, laid)
        clear(sig, tiles)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(warp // 4)
        load, advanced, factored = registers(sig.slices, sig.K, sig.per_sm)
        if group == 0:
            cute.arch.setmaxregister_decrease(load)
            if warp == 0:
                keys(sig, atoms, views, tiles, rings, groups, work)
            if warp == 1:
                values(sig, atoms, views, tiles, rings, groups, work)
            if warp >= 2:
                invert(sig, tiles, numbers, rings, work, warp - 2)
        elif group <= sig.slices:
            cute.arch.setmaxregister_increase(advanced)
            if cutlass.const_expr(sig.phase == "retreat"):
                retreat(sig, tiles, numbers, rings, states[4], work, group - 1)
            else:
                given = (*states, cu, steps)
                advance(sig, atoms[3], views[3], tiles, numbers, rings, given, work, group - 1)
        else:
            if cutlass.const_expr(factored * sig.per_sm > 65536 // sig.threads):
                cute.arch.setmaxregister_increase(factored)
            else:
                cute.arch.setmaxregister_decrease(factored)
            factor(sig, tiles, numbers, rings, gates, scale, work)


@cute.jit
def mine(sig: cutlass.Constexpr, cu: cute.Tensor, steps, HO, cut: tuple):
    """The work of this CTA; first -1 where there is none. cut: span and less of `lib.segment`, and
    what to skip: 1 for the map of the segment that is entered first, 2 for all of a last one."""
    block, _, _ = cute.arch.block_idx()
    part = block % sig.parts
    head = (block // sig.parts) % HO
    slot = block // (sig.parts * HO)
    if cutlass.const_expr(sig.phase == "whole"):
        begin, end = segment.sequence(cu, slot, steps, sig.n)
        chunks = cute.ceil_div(end - begin, C)
        return Work(slot, head, part, begin, end, chunks, slot, Int32(0), Int32(1))
    span, less, skip = cut
    seq, at, count, begin, end = segment.locate(cu, slot, steps, span, less, sig.n)
    last = Int32(1) if at == count - 1 else Int32(0)
    idle = at < 0 or at >= count  # before the first sequence, or nobody's
    if cutlass.const_expr(sig.sums_up):
        is_map = part * sig.rows >= sig.V
        entered = last == 1 if cutlass.const_expr(sig.phase == "retreat") else at == 0
        idle = idle or (skip >= 2 and last == 1) or (skip % 2 == 1 and entered and is_map)
    first = at * span
    length = span
    if at == count - 1 and count > 1:
        first -= less
    if at == count - 2:
        length -= less
    begin = cutlass.min(begin + first, end)
    end = cutlass.min(begin + length, end)
    chunks = cute.ceil_div(end - begin, C)
    if idle:
        chunks, last, first = Int32(0), Int32(0), Int32(-1)
    return Work(seq, head, part, begin, end, chunks, slot, first, last)


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
    Forward(K=64, V=64, rows=64, paired=True, final="float32"),
    Forward(K=64, V=128, rows=128),
    Forward(phase="open"),
    Forward(phase="open", norm=True, sigmoid=True, rows=64),
    Forward(phase="close", final="float32"),
    Forward(phase="retreat"),
    Forward(phase="retreat", n=2, rows=64, norm=True),
    Forward(n=2, final="float32", norm=True),
    Forward(n=4, rows=64, final="float32"),
    Forward(final="float32", checkpoints="bfloat16", every=64),
    Forward(norm=True, sigmoid=True, double=True, split=True, final="float32"),
    Forward(phase="open", norm=True, sigmoid=True, double=True, split=True),
    Forward(n=2, rows=64, norm=True, sigmoid=True, double=True, split=True, final="float32"),
)
