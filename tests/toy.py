"""A kernel that obeys the frost engine's contract and is soon compiled: O = scale^rows q.

It stands in for real ones in the tests of compiling, caching and launching. No
`from __future__ import annotations`: CuTe reads annotations.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
from cutlass import BFloat16, Float16, Float32, Int32, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from lagraph.engines.frost.signature import Signature

__all__ = ["HUNGRY", "SIGNATURES", "Hungry", "Scale"]

DTYPES = {"bfloat16": BFloat16, "float16": Float16, "float32": Float32, "int32": Int32}


@dataclass(frozen=True)
class Scale(Signature):
    """O[t, h, :] = scale^rows q[t, h, :], where K = V. A knob of the real kernels, rows, is used to
    get different ones. What else there is is taken, and not looked at."""

    arguments = (
        "q", "k", "v", "g", "beta", "cu_seqlens", "initial_state", "O", "final_state", "workspace",
        "scale",
    )  # fmt: skip

    dtype: str = "bfloat16"
    V: int = 128
    initial: str = ""
    final: str = ""
    rows: int = 1

    def build(self, options):
        T, N1 = cute.sym_int(), cute.sym_int()

        def tokens():
            strides = (cute.sym_int64(8), cute.sym_int64(8), 1)
            shape = (T, cute.sym_int(), self.V)
            return make_fake_tensor(DTYPES[self.dtype], shape, strides, assumed_align=16)

        def gates():
            strides = (cute.sym_int64(), cute.sym_int64())
            return make_fake_tensor(Float32, (T, cute.sym_int()), strides, assumed_align=4)

        def state(dtype):
            if not dtype:
                return None
            strides = (*(cute.sym_int64(4) for _ in range(3)), 1)
            shape = (cute.sym_int(), cute.sym_int(), self.V, self.V)
            return make_fake_tensor(DTYPES[dtype], shape, strides, assumed_align=16)

        return cute.compile(
            Program(self), tokens(), tokens(), tokens(), gates(), gates(),
            make_fake_tensor(Int32, (N1,), (cute.sym_int64(),), assumed_align=4),
            state(self.initial), tokens(), state(self.final), None, Float32(1.0),
            make_fake_stream(use_tvm_ffi_env_stream=True), options=options,
        )  # fmt: skip


@dataclass(frozen=True)
class Hungry(Scale):
    """Keeps more numbers than it is given registers, so that it spills."""


class Program:
    """The kernel and its launch."""

    def __init__(self, signature):
        self.V, self.rows = signature.V, signature.rows
        self.hungry = isinstance(signature, Hungry)
        self.threads = 1024 if self.hungry else 128  # of 1024, each has 64 registers

    @cute.jit
    def __call__(
        self, q: cute.Tensor, k, v, g, beta, cu_seqlens, initial, o: cute.Tensor, final, workspace,
        scale: Float32, stream: cuda.CUstream,
    ):  # fmt: skip
        self.kernel(q, o, scale).launch(
            grid=(q.shape[0], q.shape[1], 1), block=(self.threads, 1, 1), stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, q: cute.Tensor, o: cute.Tensor, scale: Float32):
        thread, _, _ = cute.arch.thread_idx()
        token, head, _ = cute.arch.block_idx()
        if thread < self.V:
            if cutlass.const_expr(self.hungry):
                row = cute.make_rmem_tensor((self.V,), Float32)
                for i in cutlass.range_constexpr(self.V):
                    row[i] = q[token, head, i].to(Float32)
                for j in cutlass.range(4, unroll=1):
                    for i in cutlass.range_constexpr(self.V):
                        row[i] = row[i] * scale + row[(i + 1) % self.V] * j
                total = Float32(0.0)
                for i in cutlass.range_constexpr(self.V):
                    total = total + row[i] * row[(i + 7) % self.V]
                o[token, head, thread] = total.to(o.element_type)
            else:
                x = q[token, head, thread].to(Float32)
                for _ in cutlass.range_constexpr(self.rows):
                    x = x * scale
                o[token, head, thread] = x.to(o.element_type)


SIGNATURES = (Scale(), Scale(dtype="float16", V=64, initial="float32", rows=3))
HUNGRY = (Hungry(),)
