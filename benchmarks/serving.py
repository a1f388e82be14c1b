"""Decoding and short convolution against the memory's copy rate, and beside other libraries.

    python benchmarks/serving.py [--only decode,conv] [--tune] [--out FILE]
    python benchmarks/serving.py --compile 80 90 120 [--quick]

Decode: 32 value heads, 16 key heads, K = V = 128, bf16 rows; batches of 1, 8 and 128; pools in fp32
and bf16. Slots rotate through a pool larger than the caches. Bytes are the state's, read and
written once. Convolution: T = 16384, C = 8192, W = 4, bf16, silu; bytes are x and y forward, x, dy
and dx backward. The copy rate is a device copy's of 1 GiB, bytes read and written, measured here.

A kernel is timed only after its results have met the fp64 reference; a failure ends the run with
status 1. Other libraries (Attention Gym, FLA) are timed where they can be imported.

--compile needs no GPU: every kernel is compiled for the architectures named; status 1 on spills.
--tune tries other launch shapes and prints each.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lagraph import registry
from lagraph.ops import conv as conv_ops
from lagraph.ops import decode as decode_ops

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
FAMILIES = ("gdn", "kda", "gdn2", "gdp", "mamba2")
H, HK, K, V = 32, 16, 128, 128
BOUND = 5e-3  # relative L2 error of bf16 outputs
POOL_BYTES = 1 << 30
# Bytes a thread that an assembler may spill to fit one more program on a multiprocessor.
SPILLS = 8


# Timing ------------------------------------------------------------------------------------------


def graphed(calls: Sequence[Callable[[], object]], repeats: int = 15) -> float:
    """Microseconds of device time a call: all calls in one CUDA graph, the median replay."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def queued(call: Callable[[], object], calls: int = 20, repeats: int = 7) -> float:
    """Microseconds a call, one after the other on the stream, launched from Python."""
    call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def copy_rate() -> float:
    """Bytes a second of a device copy, read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (queued(lambda: target.copy_(source)) * 1e-6)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm())


class Table:
    """Rows on screen, and in a file where one is wanted; knows whether a gate has failed."""

    def __init__(self, path: str) -> None:
        self.path, self.lines = path, []
        self.failed = False

    def line(self, text: str) -> None:
        print(text, flush=True)
        self.lines.append(text)
        if self.path:
            Path(self.path).write_text("\n".join(self.lines) + "\n", encoding="utf-8")

    def row(self, what: str, who: str, time: float, nbytes: float, rate: float) -> None:
        got = nbytes / (time * 1e-6)
        share = 100 * got / rate
        self.line(f"{what:34s} {who:16s} {time:9.2f} us {got / 1e9:8.0f} GB/s {share:6.1f} %")

    def gate(self, what: str, errors: dict[str, float]) -> bool:
        bad = {name: e for name, e in errors.items() if not e <= BOUND}
        if bad:
            self.failed = True
            self.line(f"{what:34s} FAILED the correctness gate: {bad}")
        return not bad


# Decode ------------------------------------------------------------------------------------------


def decode_tensors(family: str, B: int, dtype: torch.dtype = BF16, n: int = 2) -> dict:
    """Arguments of a family's decode function, all but pool and indices."""
    torch.manual_seed(0)
    rand = partial(torch.randn, device="cuda")
    key = family in ("kda", "gdn2")
    n = n if family == "gdp" else 1
    gate = rand(1, B, H, K) if key else rand(1, B, H)
    if family == "mamba2":
        return {
            "packed_xbc": rand(B, H * V + 2 * HK * K).to(dtype) * K**-0.5, "dt": gate.to(dtype),
            "A": -torch.rand(H, device="cuda"), "dt_bias": rand(H), "D": rand(H),
            "z": rand(1, B, H, V).to(dtype),
        }  # fmt: skip
    beta = {"gdn2": (1, B, H, K), "gdp": (1, B, n, H)}.get(family, (1, B, H))
    args = {
        "packed_qkv": rand(B, (1 + n) * HK * K + n * H * V).to(dtype), "raw_gate": gate.to(dtype),
        "raw_beta": rand(*beta).to(dtype), "A_log": rand(H) * 0.3,
        "dt_bias": rand(H, K) if key else rand(H),
    }  # fmt: skip
    if family == "gdn2":
        args["w"] = torch.sigmoid(rand(1, B, H, V)).to(dtype)
    return args


def decode_gate(table: Table, family: str, pool_dtype: torch.dtype) -> bool:
    """One step against the reference in fp64, on the same rounded inputs; padding stays."""
    B = 8
    args = decode_tensors(family, B)
    call = getattr(decode_ops, f"recurrent_{family}_decode")
    pool = torch.randn(B + 2, H, V, K, device="cuda").to(pool_dtype)
    pool[0] = float("nan")
    index = torch.tensor([*range(1, B), -1], dtype=torch.int32, device="cuda")
    wide = {name: x.double() for name, x in args.items()}
    wide_pool, before = pool.double(), pool.clone()
    o = call(**args, state_cache=pool, state_indices=index)
    want = call(**wide, state_cache=wide_pool, state_indices=index, impl="reference")
    errors = {
        "output": error(o[0, :-1], want[0, :-1]),
        "state": error(pool[1:B], wide_pool[1:B]),
        "padding": float(o[0, -1].abs().max()),
        "other slots": 0.0 if torch.equal(pool[B:], before[B:]) else 1.0,
    }
    return table.gate(f"decode {family} {str(pool_dtype)[6:]}", errors)


def rotation(B: int, pool_dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A pool that no cache holds, and index tensors that walk through all of it."""
    slot = H * V * K * pool_dtype.itemsize
    slots = max(POOL_BYTES // slot, 2 * B)
    pool = torch.zeros(slots + 1, H, V, K, dtype=pool_dtype, device="cuda")
    order = 1 + torch.randperm(slots, device="cuda", dtype=torch.int32)
    calls = max(min(slots // B, 64), 2)
    return pool, [order[i * B : (i + 1) * B].contiguous() for i in range(calls)]


def time_decode(table: Table, rate: float, families: Sequence[str]) -> None:
    for family in families:
        call = getattr(decode_ops, f"recurrent_{family}_decode")
        for pool_dtype in (F32, BF16):
            if not decode_gate(table, family, pool_dtype):
                continue
            for B in (1, 8, 128):
                args = decode_tensors(family, B)
                pool, indices = rotation(B, pool_dtype)
                out = torch.empty(1, B, H, V, dtype=BF16, device="cuda")
                calls = [
                    partial(call, **args, state_cache=pool, state_indices=index, out=out)
                    for index in indices
                ]
                nbytes = 2 * B * H * V * K * pool_dtype.itemsize
                what = f"decode {family} {str(pool_dtype)[6:]} batch {B}"
                table.row(what, "lagraph", graphed(calls), nbytes, rate)
                if B == 1:
                    table.row(what, "from Python", queued(calls[0], 100), nbytes, rate)
                for name, peer in decode_peers(family, B, args, pool, indices, out).items():
                    table.row(what, name, graphed(peer), nbytes, rate)
                del pool, calls


def decode_peers(
    family: str, B: int, args: dict, pool: torch.Tensor, indices: list[torch.Tensor],
    out: torch.Tensor,
) -> dict[str, list[Callable[[], object]]]:  # fmt: skip
    """Other libraries' ways to do the same step, where they are installed."""
    found: dict[str, list[Callable[[], object]]] = {}
    if family in ("gdn", "kda"):
        try:
            import attn_gym.linear as gym

            step = getattr(gym, f"recurrent_{family}_decode")
        except (ImportError, AttributeError):
            step = None
        if step is not None and (family == "gdn" or HK == H):
            found["attention gym"] = [
                partial(step, **args, state_cache=pool, state_indices=index, out=out)
                for index in indices
            ]
    if family == "gdn" and pool.dtype == F32:
        try:
            from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as step
        except ImportError:
            return found
        # It takes what precedes the recurrence ready-made, and returns the states anew.
        q, k, v = args["packed_qkv"].split([HK * K, HK * K, H * V], dim=1)
        q, k, v = (x.view(B, 1, -1, K) for x in (q, k, v))
        g = -torch.nn.functional.softplus(args["raw_gate"].float()).view(B, 1, H)
        beta = args["raw_beta"].sigmoid().view(B, 1, H)
        states = [pool[index.long()].mT.contiguous() for index in indices[:8]]
        found["fla (scan only)"] = [
            partial(
                step, q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            for state in states
        ]  # fmt: skip
    return found


def tune_decode(table: Table, rate: float) -> None:
    run = registry.load("lagraph.engines.triton.recurrent:decode")
    traits = registry.family("gdn").traits
    for pool_dtype in (F32, BF16):
        for B in (8, 128):
            x = decode_tensors("gdn", B)
            pool, indices = rotation(B, pool_dtype)
            out = torch.empty(1, B, H, V, dtype=BF16, device="cuda")
            for block_v in (4, 8, 16, 32, 64):
                for warps in (1, 2, 4, 8):
                    if not 8 <= block_v * K // (32 * warps) <= 64:
                        continue
                    calls = [
                        partial(
                            run, traits, x["packed_qkv"], x["raw_gate"], x["raw_beta"], pool, index,
                            out, a_log=x["A_log"], dt_bias=x["dt_bias"], heads=HK, scale=K**-0.5,
                            block_v=block_v, warps=warps,
                        )
                        for index in indices
                    ]  # fmt: skip
                    what = f"decode gdn {str(pool_dtype)[6:]} batch {B}"
                    shape = f"{block_v} rows {warps} warps"
                    nbytes = 2 * B * H * V * K * pool_dtype.itemsize
                    table.row(what, shape, graphed(calls), nbytes, rate)


# Convolution -------------------------------------------------------------------------------------

T, C, W = 16384, 8192, 4


def conv_tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(1, T, C, device="cuda", dtype=BF16)
    return x, torch.randn(C, W, device="cuda", dtype=BF16) * 0.5, torch.randn_like(x)


def conv_run(x, weight, dy, cu=None, **options):
    """Output, dx and dw."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = conv_ops.causal_conv1d(x, weight, activation="silu", cu_seqlens=cu, **options)
    return (y.detach(), *torch.autograd.grad(y, (x, weight), dy))


def conv_gate(table: Table, what: str, cu: torch.Tensor | None, **options) -> bool:
    """A slice of the channels against the reference in fp64."""
    x, weight, dy = conv_tensors()
    some = slice(C - 256, C)
    got = conv_run(x, weight, dy, cu, **options)
    want = conv_run(
        x[..., some].contiguous().double(), weight[some].double(), dy[..., some].double(), cu,
        impl="reference",
    )  # fmt: skip
    parts = (got[0][..., some], got[1][..., some], got[2][some])
    errors = {n: error(a, b) for n, a, b in zip(("y", "dx", "dw"), parts, want)}
    errors["dx"], errors["dw"] = errors["dx"] / 4, errors["dw"] / 4  # gradients: 2e-2
    return table.gate(what, errors)


def time_conv(table: Table, rate: float) -> None:
    x, weight, dy = conv_tensors()
    one = x.numel() * x.element_size()
    for kind, cu in (
        ("dense", None),
        ("packed 64", torch.linspace(0, T, 65, device="cuda").to(torch.int32)),
    ):
        if not conv_gate(table, f"conv {kind}", cu):
            continue
        run = partial(conv_ops.causal_conv1d, x, weight, activation="silu", cu_seqlens=cu)
        table.row(f"conv {kind} forward", "lagraph", queued(run), 2 * one, rate)
        leaf, w = x.detach().requires_grad_(), weight.detach().requires_grad_()
        y = conv_ops.causal_conv1d(leaf, w, activation="silu", cu_seqlens=cu)
        grad = partial(torch.autograd.grad, y, (leaf, w), dy, retain_graph=True)
        table.row(f"conv {kind} backward", "lagraph", queued(grad), 3 * one, rate)
        for name, peer in conv_peers(cu).items():
            table.row(f"conv {kind} forward", name, queued(partial(peer, x, weight)), 2 * one, rate)
            out = peer(leaf, w)
            grad = partial(torch.autograd.grad, out, (leaf, w), dy, retain_graph=True)
            table.row(f"conv {kind} backward", name, queued(grad), 3 * one, rate)
    pool = torch.zeros(257, W - 1, C, device="cuda", dtype=BF16)
    rows = torch.randn(128, C, device="cuda", dtype=BF16)
    index = torch.arange(1, 129, dtype=torch.int32, device="cuda")
    step = partial(
        conv_ops.causal_conv1d_decode, rows, weight, pool, activation="silu", state_indices=index
    )
    nbytes = 2 * W * rows.numel() * 2
    table.row("conv decode batch 128", "lagraph", graphed([step] * 20), nbytes, rate)


def conv_peers(cu: torch.Tensor | None) -> dict[str, Callable[..., torch.Tensor]]:
    found: dict[str, Callable[..., torch.Tensor]] = {}
    try:
        from attn_gym.linear import causal_conv1d as gym

        found["attention gym"] = partial(gym, activation="silu", cu_seqlens=cu)
    except ImportError:
        pass
    try:
        from fla.modules.convolution import causal_conv1d as fla

        offsets = None if cu is None else cu.long()
        found["fla"] = lambda x, w: fla(x, w, activation="silu", cu_seqlens=offsets)[0]
    except ImportError:
        pass
    return found


def tune_conv(table: Table, rate: float) -> None:
    x, weight, dy = conv_tensors()
    one = x.numel() * x.element_size()
    run = registry.load("lagraph.engines.triton.conv:forward")
    back = registry.load("lagraph.engines.triton.conv:backward")
    silu = registry.load("lagraph.engines.triton.conv:SILU")
    for threads in (64, 128, 256):
        for channels in (2, 4, 8):
            for rows in (16, 32, 64, 128, 256):
                config = (threads, channels, rows)
                who = " ".join(map(str, config))
                forward = partial(run, x, weight, None, None, None, silu, config)
                table.row("conv forward", who, queued(forward), 2 * one, rate)
                if rows >= 32:
                    backward = partial(
                        back, dy, x, weight, None, None, None, silu, config=config
                    )  # fmt: skip
                    table.row("conv backward", who, queued(backward), 3 * one, rate)


# Compiling for GPUs that need not be here --------------------------------------------------------


def compile_all(archs: Sequence[int], quick: bool) -> int:
    """Registers, spills and shared memory of every kernel; 1 if one spills more than SPILLS."""
    from compile import Target, resources
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Numbered(Target):
        """A device number for each architecture: Triton keeps compiled kernels by number."""

        def get_current_device(self) -> int:
            return self.target.arch

    conv = registry.load("lagraph.engines.triton.conv:advance").__globals__
    scan = registry.load("lagraph.engines.triton.recurrent:recurrent_scan")
    decode = registry.load("lagraph.engines.triton.recurrent:decode")
    found: list = []
    real = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = real(self, *args, grid=grid, warmup=True, **kwargs)
        found.append((self.fn.__name__, kernel, kwargs.get("num_warps", 4)))

    e = torch.empty

    def convolutions(dtype: torch.dtype, W: int, C: int) -> None:
        x, w, state = e(1, 256, C, dtype=dtype), e(C, W, dtype=dtype), e(2, W - 1, C, dtype=dtype)
        cu, index = torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
        has = torch.zeros(2, dtype=torch.bool)
        conv["forward"](x, w, None, state[:1], state[:1], conv["SILU"])
        conv["forward"](x, w, cu, None, None, None)
        conv["backward"](x, x, w, cu, state, state, conv["SILU"])
        conv["backward"](x, x, w, None, None, None, conv["SILU"])
        conv["advance"](x, w, state, x, index, cu, has, conv["SILU"])
        conv["advance"](x[0, :2, None], w, state, x[0, :2, None], index, None, has, conv["SILU"])

    def recurrences(family: str, dtype: torch.dtype, pool_dtype: torch.dtype, K: int) -> None:
        traits, n = registry.family(family).traits, 2 if family == "gdp" else 1
        V, delta, key = K, traits.delta, traits.gate == "key"
        B = 2
        pool, index = e(4, H, V, K, dtype=pool_dtype), torch.zeros(B, dtype=torch.int32)
        has, cu = torch.zeros(B, dtype=torch.bool), torch.zeros(B + 1, dtype=torch.int32)
        rows = {True: (1, B, H, K), False: (1, B, H)}
        beta = {"gdn2": (1, B, H, K), "gdp": (1, B, n, H)}.get(family, (1, B, H))
        shared = {
            "w": e(1, B, H, V, dtype=dtype) if family == "gdn2" else None,
            "z": None if delta else e(1, B, H, V, dtype=dtype), "d": None if delta else e(H),
            "a": None if delta else e(H), "a_log": e(H) if delta else None,
            "dt_bias": e(H, K) if key else e(H), "has_initial_state": has,
            "gate": "bounded" if key else "softplus", "guard": family == "gdn2",
        }  # fmt: skip
        width = (1 + n) * HK * K + n * H * V if delta else H * V + 2 * HK * K
        decode(
            traits, e(B, width, dtype=dtype), e(rows[key], dtype=dtype),
            e(beta, dtype=dtype) if delta else None, pool, index, e(1, B, H, V, dtype=dtype),
            heads=HK, substeps=n, **shared,
        )  # fmt: skip
        sub = (n,) if n > 1 else ()
        scan(
            traits, e(1, B, HK, K, dtype=dtype), e(1, B, *sub, HK, K, dtype=dtype),
            e(1, B, *sub, H, V, dtype=dtype), e(rows[key]), e(beta) if delta else None, cu,
            initial_state=pool, final_state=pool, state_indices=index, norm=delta, sigmoid=delta,
            states=e(1, B, H, V, K), **shared,
        )  # fmt: skip

    samples: list[tuple[str, Callable[[], None]]] = []
    for dtype, W, C in ((BF16, 4, 8192), (F32, 4, 2048), (BF16, 8, 2048), (BF16, 3, 40))[
        : 2 if quick else 4
    ]:
        samples.append((f"conv {str(dtype)[6:]} W={W} C={C}", partial(convolutions, dtype, W, C)))
    for family in FAMILIES:
        for pool_dtype, size in ((F32, 128), (BF16, 128), (F32, 64), (F32, 256))[
            : 1 if quick else 4
        ]:
            what = f"{family} {size}x{size} pool {str(pool_dtype)[6:]}"
            samples.append((what, partial(recurrences, family, BF16, pool_dtype, size)))
    bad = 0
    JITFunction.run = compile_only
    try:
        for arch in archs:
            driver.set_active(Numbered(arch))
            for what, run in samples:
                found.clear()
                run()
                for name, kernel, warps in found:
                    use = resources(kernel)
                    bad += use["spilled"] > SPILLS
                    print(
                        f"sm_{arch} {what:28s} {name:22s} {warps:2d} warps "
                        f"{use['registers']:4d} registers {use['spilled']:4d} B spilled "
                        f"{kernel.metadata.shared:6d} B shared",
                        flush=True,
                    )
    finally:
        JITFunction.run = real
    return int(bad > 0)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="decode,conv", help="parts, with commas")
    parser.add_argument("--families", default=",".join(FAMILIES), help="of decode, with commas")
    parser.add_argument("--tune", action="store_true", help="other launch shapes, too")
    parser.add_argument("--out", default="", help="also write the table here")
    parser.add_argument("--compile", type=int, nargs="+", metavar="ARCH", help="compile only")
    parser.add_argument("--quick", action="store_true", help="fewer samples to compile")
    args = parser.parse_args(argv)
    if args.compile:
        return compile_all(args.compile, args.quick)
    if not torch.cuda.is_available():
        print("needs an NVIDIA GPU, or --compile")
        return 1
    table = Table(args.out)
    rate = copy_rate()
    table.line(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, "
        f"copy {rate / 1e12:.2f} TB/s read and written"
    )
    parts = args.only.split(",")
    if "decode" in parts:
        time_decode(table, rate, [f for f in args.families.split(",") if f])
        if args.tune:
            tune_decode(table, rate)
    if "conv" in parts:
        time_conv(table, rate)
        if args.tune:
            tune_conv(table, rate)
    return int(table.failed)


if __name__ == "__main__":
    sys.exit(main())
