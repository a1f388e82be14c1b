"""Decoding and short convolution against the memory's copy rate, and beside other libraries.

    python benchmarks/serving.py [--quick] [--only decode,several,conv] [--families gdn,kda]
                                 [--tune] [--no-peers] [--out FILE]
    python benchmarks/serving.py --dry-run        tiny sizes, reference, on a CPU
    python benchmarks/serving.py --compile 80 90 120 [--quick]
    python benchmarks/serving.py --warm 0 4 [...]  time nothing: compile every fourth launch

Decode: 32 value heads, 16 key heads (KDA: 32), K = V = 128, bf16 rows; batches of 1, 8 and 128;
pools in fp32 and bf16. Slots rotate through a pool larger than the caches. Bytes are the state's,
read and written once. Several: 4 tokens a sequence with the state after each; bytes are the state,
read once, and the four written. Convolution: T = 16384, C = 8192, W = 4, bf16, silu; bytes are x
and y forward, x, dy and dx backward. The copy rate is a device copy's of 1 GiB, bytes read and
written, measured here. A line is printed, and written to --out, as soon as it is measured.

A kernel is timed only after its results have met the fp64 reference; a failure ends the run with
status 1. Other libraries (Attention Gym, FLA, FlashInfer, mamba_ssm) are timed where they can be
imported, in the same process on the same tensors; the last column has their difference from our
output, or why one did not run.

--quick: GDN and Mamba-2, batches of 1 and 128, the dense convolution.
--compile needs no GPU: every kernel is compiled for the architectures named; status 1 on spills.
--tune tries other launch shapes and prints each. --warm I N runs every N-th launch once and times
none: N processes side by side fill Triton's cache, so that a run on a rented GPU compiles nothing.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from lagraph import registry
from lagraph.ops import accept_states
from lagraph.ops import conv as conv_ops
from lagraph.ops import decode as decode_ops

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
FAMILIES = ("gdn", "kda", "gdn2", "gdp", "mamba2")
H, HK, K, V = 32, 16, 128, 128
DRAFTS = 4  # tokens a step of the rows with several
AIMS = {"decode": 70, "conv": 80}  # per cent of the copy rate, at the largest sizes
DEVICE = "cuda"  # "cpu" in a dry run, where nothing is timed
BOUND = 5e-3  # relative L2 error of bf16 outputs
POOL_BYTES = 1 << 30
# Bytes a thread that an assembler may spill to fit one more program on a multiprocessor.
SPILLS = 8


# Timing ------------------------------------------------------------------------------------------


class Warm:
    """Which launches a process only compiles: every `of`-th from `part` on; all are timed at 0."""

    part, of, seen, inside = 0, 0, 0, False

    @classmethod
    def skips(cls, call: Callable[[], object]) -> bool:
        """Whether nothing is timed; the call is made if it is this process's. One that a call
        makes itself is the same process's, so that all count alike."""
        if not cls.of:
            return False
        if cls.inside:
            call()
            return True
        mine = cls.seen % cls.of == cls.part
        cls.seen += 1
        if mine:
            cls.inside = True
            try:
                call()
            finally:
                cls.inside = False
        return True


def graphed(calls: Sequence[Callable[[], object]], repeats: int = 15) -> float:
    """Microseconds of device time a call: all calls in one CUDA graph, the median replay."""
    if Warm.skips(calls[0]):
        return math.nan
    for call in calls[:2]:
        call()
    if DEVICE == "cpu":
        return math.nan
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


def queued(
    call: Callable[[], object], calls: int = 20, repeats: int = 7, *, asleep: bool = True
) -> float:
    """Microseconds a call, one after the other on the stream, launched from Python. The device is
    asleep until all are queued, since a backward through autograd takes the host as long as the
    device; else the host's part is in it."""
    if Warm.skips(call):
        return math.nan
    call()
    if DEVICE == "cpu":
        return math.nan
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if asleep:
            torch.cuda._sleep(40_000_000)  # cycles: some 20 ms
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def copy_rate() -> float:
    """Bytes a second of a device copy, read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / (queued(lambda: target.copy_(source)) * 1e-6)


def error_of(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm())


class Table:
    """Rows on screen, and in a file where one is wanted; knows whether a gate has failed."""

    def __init__(self, path: str, peers: bool = True) -> None:
        self.path, self.lines = path, []
        self.failed, self.peers = False, peers

    def line(self, text: str) -> None:
        print(text, flush=True)
        self.lines.append(text)
        if self.path:
            Path(self.path).write_text("\n".join(self.lines) + "\n", encoding="utf-8")

    def row(
        self, what: str, who: str, time: float, nbytes: float, rate: float, told: str = ""
    ) -> None:
        got = nbytes / (time * 1e-6)
        share = 100 * got / rate
        self.line(
            f"{what:38s} {who:16s} {time:9.2f} us {got / 1e9:8.0f} GB/s {share:6.1f} %  {told}"
        )

    def peer(
        self, what: str, who: str, run: Callable[[], tuple[float, torch.Tensor | None]],
        ours: torch.Tensor, nbytes: float, rate: float,
    ) -> None:  # fmt: skip
        """A row of another library, or why there is none. run: its time, and an output to compare
        with ours."""
        if not self.peers:
            return
        try:
            if Warm.skips(run):
                return
            time, out = run()
        except Exception as error:  # whatever it raises: the table goes on
            text = " ".join(str(error).split())[:90]
            self.line(f"{what:38s} {who:16s} not run: {type(error).__name__}: {text}")
            return
        told = ""
        if out is not None and out.numel() == ours.numel():
            told = f"differs by {error_of(out.reshape(ours.shape), ours):.0e}"
        self.row(what, who, time, nbytes, rate, told)

    def gate(self, what: str, errors: dict[str, float]) -> bool:
        """Whether errors stay within their bound; a failure is told."""
        bad = {name: e for name, e in errors.items() if not e <= BOUND}
        if bad:
            self.failed = True
            self.line(f"{what:38s} FAILED the correctness gate: {bad}")
        return not bad


# Decode ------------------------------------------------------------------------------------------


def key_heads(family: str) -> int:
    """Attention Gym's KDA has as many heads of keys as of values, and so have its models."""
    return H if family == "kda" else HK


def decode_tensors(
    family: str, B: int, dtype: torch.dtype = BF16, n: int = 2, T: int | None = None
) -> dict:
    """Arguments of a family's decode function, all but pool and indices; T: several tokens."""
    torch.manual_seed(0)
    rand = partial(torch.randn, device=DEVICE)
    key, heads = family in ("kda", "gdn2"), key_heads(family)
    n = n if family == "gdp" else 1
    rows, lead = ((B,), (1, B)) if T is None else ((B, T), (B, T))
    gate = rand(*lead, H, K) if key else rand(*lead, H)
    if family == "mamba2":
        return {
            "packed_xbc": rand(*rows, H * V + 2 * heads * K).to(dtype) * K**-0.5,
            "dt": gate.to(dtype), "A": -torch.rand(H, device=DEVICE), "dt_bias": rand(H),
            "D": rand(H), "z": rand(*lead, H, V).to(dtype),
        }  # fmt: skip
    beta = {"gdn2": (H, K), "gdp": (n, H)}.get(family, (H,))
    args = {
        "packed_qkv": rand(*rows, (1 + n) * heads * K + n * H * V).to(dtype),
        "raw_gate": gate.to(dtype), "raw_beta": rand(*lead, *beta).to(dtype),
        "A_log": rand(H) * 0.3, "dt_bias": rand(H, K) if key else rand(H),
    }  # fmt: skip
    if family == "gdn2":
        args["w"] = torch.sigmoid(rand(*lead, H, V)).to(dtype)
    return args


def decode_gate(table: Table, family: str, pool_dtype: torch.dtype) -> bool:
    """One step against the reference in fp64, on the same rounded inputs; padding stays."""
    if Warm.of:
        return True
    B = 8
    args = decode_tensors(family, B)
    call = getattr(decode_ops, f"recurrent_{family}_decode")
    pool = torch.randn(B + 2, H, V, K, device=DEVICE).to(pool_dtype)
    pool[0] = float("nan")
    index = torch.tensor([*range(1, B), -1], dtype=torch.int32, device=DEVICE)
    wide = {name: x.double() for name, x in args.items()}
    wide_pool, before = pool.double(), pool.clone()
    o = call(**args, state_cache=pool, state_indices=index)
    want = call(**wide, state_cache=wide_pool, state_indices=index, impl="reference")
    errors = {
        "output": error_of(o[0, :-1], want[0, :-1]),
        "state": error_of(pool[1:B], wide_pool[1:B]),
        "padding": float(o[0, -1].abs().max()),
        "other slots": 0.0 if torch.equal(pool[B:], before[B:]) else 1.0,
    }
    return table.gate(f"decode {family} {str(pool_dtype)[6:]}", errors)


def rotation(B: int, pool_dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A pool that no cache holds, and index tensors that walk through all of it."""
    slot = H * V * K * pool_dtype.itemsize
    slots = max(POOL_BYTES // slot, 2 * B)
    pool = torch.zeros(slots + 1, H, V, K, dtype=pool_dtype, device=DEVICE)
    order = 1 + torch.randperm(slots, device=DEVICE, dtype=torch.int32)
    calls = max(min(slots // B, 64), 2)
    # Cloned: a library may want its tensors aligned.
    return pool, [order[i * B : (i + 1) * B].clone() for i in range(calls)]


def several_gate(table: Table, family: str, dtype: torch.dtype) -> bool:
    """Several tokens with the state after each, against the reference in fp64."""
    if Warm.of:
        return True
    B = 8
    args = decode_tensors(family, B, T=DRAFTS)
    call = getattr(decode_ops, f"recurrent_{family}_decode")
    pool = torch.randn(B + 1, H, V, K, device=DEVICE).to(dtype)
    index = torch.arange(1, B + 1, dtype=torch.int32, device=DEVICE)
    states = torch.empty(B, DRAFTS, H, V, K, dtype=dtype, device=DEVICE)
    wide = {name: x.double() for name, x in args.items()}
    truth, before = states.double(), pool.clone()
    o = call(**args, state_cache=pool, state_indices=index, states=states)
    want = call(
        **wide, state_cache=pool.double(), state_indices=index, states=truth, impl="reference"
    )
    errors = {"output": error_of(o, want), "states": error_of(states, truth),
              "pool": 0.0 if torch.equal(pool, before) else 1.0}  # fmt: skip
    return table.gate(f"several {family} {str(dtype)[6:]}", errors)


def time_decode(table: Table, rate: float, families: Sequence[str], batches: Sequence[int]) -> None:
    for family in families:
        call = getattr(decode_ops, f"recurrent_{family}_decode")
        for pool_dtype in (F32, BF16):
            if not decode_gate(table, family, pool_dtype):
                continue
            for B in batches:
                args = decode_tensors(family, B)
                pool, indices = rotation(B, pool_dtype)
                out = torch.empty(1, B, H, V, dtype=BF16, device=DEVICE)
                calls = [
                    partial(call, **args, state_cache=pool, state_indices=index, out=out)
                    for index in indices
                ]
                nbytes = 2 * B * H * V * K * pool_dtype.itemsize
                what = f"decode {family} {str(pool_dtype)[6:]} batch {B}"
                told = f"aim {AIMS['decode']} %" if batches[-1] == B else ""
                table.row(what, "lagraph", graphed(calls), nbytes, rate, told)
                if B == 1:
                    took = queued(calls[0], 100, asleep=False)
                    table.row(what, "from Python", took, nbytes, rate)
                time_peers(table, what, family, args, pool, indices, nbytes, rate)
                del pool, calls


def time_several(table: Table, rate: float, families: Sequence[str], B: int) -> None:
    for family in families:
        call = getattr(decode_ops, f"recurrent_{family}_decode")
        for dtype in (F32, BF16):
            if not several_gate(table, family, dtype):
                continue
            args = decode_tensors(family, B, T=DRAFTS)
            pool, indices = rotation(B, dtype)
            states = torch.empty(B, DRAFTS, H, V, K, dtype=dtype, device=DEVICE)
            calls = [
                partial(call, **args, state_cache=pool, state_indices=index, states=states)
                for index in indices
            ]
            nbytes = (1 + DRAFTS) * B * H * V * K * dtype.itemsize
            what = f"several {family} {str(dtype)[6:]} batch {B} x {DRAFTS}"
            table.row(what, "lagraph", graphed(calls), nbytes, rate)
            if family == families[0]:
                count = torch.full((B,), 2, device=DEVICE)
                accepts = [partial(accept_states, pool, index, states, count) for index in indices]
                told, one = f"accept {str(dtype)[6:]} batch {B}", 2 * nbytes / (1 + DRAFTS)
                table.row(told, "lagraph", graphed(accepts), one, rate)
                del accepts
            if family == "gdn":
                index, ours = indices[0], calls[0]()
                q, k, v, gate, beta = sections(args, B, DRAFTS)

                def flashinfer(pool=pool, index=index, states=states, rows=(q, k, v),
                               gate=gate, beta=beta, args=args):  # fmt: skip
                    from flashinfer.gdn_decode import gated_delta_rule_mtp as step

                    run = partial(
                        step, *rows, pool, index, args["A_log"], gate, args["dt_bias"], beta,
                        intermediate_states_buffer=states, disable_state_update=True,
                    )  # fmt: skip
                    return graphed([run]), run()[0]

                table.peer(what, "flashinfer", flashinfer, ours, nbytes, rate)
            del pool, states, calls


def sections(args: dict, B: int, T: int) -> tuple[torch.Tensor, ...]:
    """q, k, v, raw gate and raw strength of GDN's rows as [B, T, heads, ...]."""
    rows = args["packed_qkv"].view(B, T, -1)
    q, k, v = rows.split([HK * K, HK * K, H * V], dim=2)
    parts = [x.unflatten(2, (-1, K)).contiguous() for x in (q, k, v)]
    return *parts, *(args[name].view(B, T, H) for name in ("raw_gate", "raw_beta"))


def time_peers(
    table: Table, what: str, family: str, args: dict, pool: torch.Tensor,
    indices: list[torch.Tensor], nbytes: float, rate: float,
) -> None:  # fmt: skip
    """Other libraries' ways to do the same step. Outputs are compared from a small pool, which
    every call gets anew."""
    B = indices[0].shape[0]
    few = torch.randn(B + 1, H, V, K, device=DEVICE).to(pool.dtype) * 0.1
    first = torch.arange(1, B + 1, dtype=torch.int32, device=DEVICE)
    call = getattr(decode_ops, f"recurrent_{family}_decode")
    ours = call(**args, state_cache=few.clone(), state_indices=first)

    def gym() -> tuple[float, torch.Tensor]:
        import attn_gym.linear as library

        step = getattr(library, f"recurrent_{family}_decode")
        out = torch.empty_like(ours)
        calls = [
            partial(step, **args, state_cache=pool, state_indices=index, out=out)
            for index in indices
        ]
        again = step(**args, state_cache=few.clone(), state_indices=first)
        return graphed(calls), again

    def fla() -> tuple[float, torch.Tensor]:
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as step

        # It takes what precedes the recurrence ready-made, and returns the states anew.
        q, k, v, gate, beta = sections(args, B, 1)
        g = -args["A_log"].exp() * F.softplus(gate.float() + args["dt_bias"])
        run = partial(
            step, q, k, v, g=g, beta=beta.float().sigmoid(), output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        states = [pool[index.long()].mT.contiguous().float() for index in indices[:4]]
        again = run(initial_state=few[1:].mT.contiguous().float())[0]
        return graphed([partial(run, initial_state=state) for state in states]), again

    def flashinfer() -> tuple[float, torch.Tensor]:
        from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose as step

        q, k, v, gate, beta = sections(args, B, 1)
        out = torch.empty(B, 1, H, V, dtype=BF16, device=DEVICE)

        def run(pool: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return step(
                q, k, v, None, args["A_log"], gate, args["dt_bias"], beta, output=out,
                initial_state=pool, initial_state_indices=index,
            )[0]  # fmt: skip

        again = run(few.clone(), first).clone()
        return graphed([partial(run, pool, index) for index in indices]), again

    def mamba_ssm() -> tuple[float, torch.Tensor]:
        from mamba_ssm.ops.triton.selective_state_update import selective_state_update as step

        x, b, c = args["packed_xbc"].split([H * V, HK * K, HK * K], dim=1)
        x = x.view(B, H, V)
        b, c = (t.view(B, HK, K) for t in (b, c))
        dt = args["dt"][0, :, :, None].expand(B, H, V)
        rate_, skip = (args[n][:, None].expand(H, V) for n in ("A", "D"))
        bias = args["dt_bias"][:, None].expand(H, V)

        def run(pool: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return step(
                pool, x, dt, rate_[..., None].expand(H, V, K), b, c, D=skip, z=args["z"][0],
                dt_bias=bias, dt_softplus=True, state_batch_indices=index,
            )  # fmt: skip

        again = run(few.clone(), first)
        return graphed([partial(run, pool, index) for index in indices]), again

    known: dict[str, dict[str, Callable[[], tuple[float, torch.Tensor]]]] = {
        "gdn": {"attention gym": gym, "fla (scan only)": fla, "flashinfer": flashinfer},
        "kda": {"attention gym": gym},
        "mamba2": {"mamba_ssm": mamba_ssm},
    }
    for name, run in known.get(family, {}).items():
        table.peer(what, name, run, ours, nbytes, rate)


DECODE_SHAPES = ((8, 1), (16, 1), (4, 1), (16, 2), (32, 4))  # rows of the state, warps


def tune_decode(table: Table, rate: float, families: Sequence[str]) -> None:
    """Launch shapes of one token and of several, at the largest batch."""
    decode = registry.load("lagraph.engines.triton.recurrent:decode")
    B = 128
    for family in families:
        traits, n = registry.family(family).traits, 2 if family == "gdp" else 1
        names = {"A_log": "a_log", "A": "a", "D": "d", "dt_bias": "dt_bias", "w": "w", "z": "z"}
        for dtype in (F32, BF16):
            for tokens in (None, DRAFTS):
                x = decode_tensors(family, B, T=tokens)
                first = [x.pop(m) for m in list(x)[:3]] if traits.delta else [
                    x.pop("packed_xbc"), x.pop("dt"), None]  # fmt: skip
                more = {names[m]: t for m, t in x.items()}
                pool, indices = rotation(B, dtype)
                lead = (1, B) if tokens is None else (B, tokens)
                out = torch.empty(*lead, H, V, dtype=BF16, device=DEVICE)
                moved = 2 if tokens is None else 1 + tokens
                if tokens is not None:
                    more["states"] = torch.empty(*lead, H, V, K, dtype=dtype, device=DEVICE)
                    indices = indices[:8]
                for block_v, warps in DECODE_SHAPES:
                    calls = [
                        decode(
                            traits, *first, pool, index, out, **more, heads=key_heads(family),
                            substeps=n, scale=K**-0.5, block_v=block_v, warps=warps,
                            gate="bounded" if traits.gate == "key" else "softplus", bind_only=True,
                        ).run
                        for index in indices
                    ]  # fmt: skip
                    what = f"decode {family} {str(dtype)[6:]} {B} x {tokens or 1}"
                    nbytes = moved * B * H * V * K * dtype.itemsize
                    table.row(what, f"{block_v} rows {warps} w", graphed(calls), nbytes, rate)
                more.pop("states", None)
                del pool, calls


# Convolution -------------------------------------------------------------------------------------

T, C, W = 16384, 8192, 4


def conv_tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(1, T, C, device=DEVICE, dtype=BF16)
    return x, torch.randn(C, W, device=DEVICE, dtype=BF16) * 0.5, torch.randn_like(x)


def conv_run(x, weight, dy, cu=None, **options):
    """Output, dx and dw."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = conv_ops.causal_conv1d(x, weight, activation="silu", cu_seqlens=cu, **options)
    return (y.detach(), *torch.autograd.grad(y, (x, weight), dy))


def conv_gate(table: Table, what: str, cu: torch.Tensor | None, **options) -> bool:
    """A slice of the channels against the reference in fp64."""
    if Warm.of:
        return True
    x, weight, dy = conv_tensors()
    some = slice(max(C - 256, 0), C)
    got = conv_run(x, weight, dy, cu, **options)
    want = conv_run(
        x[..., some].contiguous().double(), weight[some].double(), dy[..., some].double(), cu,
        impl="reference",
    )  # fmt: skip
    parts = (got[0][..., some], got[1][..., some], got[2][some])
    errors = {n: error_of(a, b) for n, a, b in zip(("y", "dx", "dw"), parts, want)}
    errors["dx"], errors["dw"] = errors["dx"] / 4, errors["dw"] / 4  # gradients: 2e-2
    return table.gate(what, errors)


def time_conv(table: Table, rate: float, quick: bool) -> None:
    x, weight, dy = conv_tensors()
    one = x.numel() * x.element_size()
    aim = f"aim {AIMS['conv']} %"
    kinds: list[tuple[str, torch.Tensor | None]] = [("dense", None)]
    if not quick:
        cu = torch.linspace(0, T, 65, device=DEVICE).to(torch.int32)
        kinds.append(("packed 64", cu))
    for kind, cu in kinds:
        if not conv_gate(table, f"conv {kind}", cu):
            continue
        run = partial(conv_ops.causal_conv1d, x, weight, activation="silu", cu_seqlens=cu)
        table.row(f"conv {kind} forward", "lagraph", queued(run), 2 * one, rate, aim)
        leaf, w = x.detach().requires_grad_(), weight.detach().requires_grad_()
        y = conv_ops.causal_conv1d(leaf, w, activation="silu", cu_seqlens=cu)
        grad = partial(torch.autograd.grad, y, (leaf, w), dy, retain_graph=True)
        table.row(f"conv {kind} backward", "lagraph", queued(grad), 3 * one, rate, aim)
        dx = grad()[0]
        for name, peer in conv_peers(cu).items():

            def forward(peer=peer) -> tuple[float, torch.Tensor]:
                return queued(partial(peer(), x, weight)), peer()(x, weight)

            def backward(peer=peer, leaf=leaf, w=w) -> tuple[float, torch.Tensor]:
                out = peer()(leaf, w)
                run = partial(torch.autograd.grad, out, (leaf, w), dy, retain_graph=True)
                return queued(run), run()[0]

            table.peer(f"conv {kind} forward", name, forward, y.detach(), 2 * one, rate)
            table.peer(f"conv {kind} backward", name, backward, dx, 3 * one, rate)
    batch = 128 if DEVICE == "cuda" else 4
    pool = torch.zeros(2 * batch + 1, W - 1, C, device=DEVICE, dtype=BF16)
    rows = torch.randn(batch, C, device=DEVICE, dtype=BF16)
    index = torch.arange(1, batch + 1, dtype=torch.int32, device=DEVICE)
    step = partial(
        conv_ops.causal_conv1d_decode, rows, weight, pool, activation="silu", state_indices=index
    )
    nbytes = 2 * W * rows.numel() * 2
    table.row(f"conv decode batch {batch}", "lagraph", graphed([step] * 20), nbytes, rate)


def conv_peers(cu: torch.Tensor | None) -> dict[str, Callable[[], Callable[..., torch.Tensor]]]:
    """Ways to get other libraries' functions of x and weight."""

    def gym() -> Callable[..., torch.Tensor]:
        from attn_gym.linear import causal_conv1d as function

        return partial(function, activation="silu", cu_seqlens=cu)

    def fla() -> Callable[..., torch.Tensor]:
        from fla.modules.convolution import causal_conv1d as function

        offsets = None if cu is None else cu.long()

        def first(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            out = function(x, w, activation="silu", cu_seqlens=offsets)
            return out[0] if isinstance(out, tuple) else out

        return first

    return {"attention gym": gym, "fla": fla}


# Threads, channels, rows, rows at once, registers; of backward, whether the next are on their way.
BACKWARD_SHAPES = (
    (64, 4, 128, 4, 128, 1), (64, 4, 128, 4, 112, 1), (64, 4, 128, 2, 104, 1),
    (64, 4, 64, 4, 112, 1), (64, 4, 256, 4, 112, 1), (128, 4, 128, 4, 112, 1),
    (128, 4, 64, 4, 112, 1), (32, 4, 128, 4, 112, 1), (64, 4, 128, 4, 104, 0),
    (64, 4, 64, 4, 104, 0), (128, 4, 128, 4, 104, 0), (64, 4, 128, 4, 0, 0),
    (64, 4, 128, 8, 0, 0), (64, 8, 128, 4, 168, 0),
)  # fmt: skip
FORWARD_SHAPES = (
    (128, 8, 64, 8, 0), (128, 8, 32, 8, 0), (64, 8, 64, 8, 0), (128, 4, 64, 8, 0),
    (128, 8, 64, 4, 0), (128, 4, 32, 4, 0),
)  # fmt: skip
UPDATE_SHAPES = ((128, 2, 1), (64, 2, 1), (64, 4, 1), (128, 4, 1), (64, 8, 1), (128, 1, 1))


def tune_conv(table: Table, rate: float) -> None:
    """Launch shapes of the convolution."""
    x, weight, dy = conv_tensors()
    one = x.numel() * x.element_size()
    run = registry.load("lagraph.engines.triton.conv:forward")
    back = registry.load("lagraph.engines.triton.conv:backward")
    step = registry.load("lagraph.engines.triton.conv:advance")
    silu = registry.load("lagraph.engines.triton.conv:SILU")
    for config in BACKWARD_SHAPES:
        call = partial(back, dy, x, weight, None, None, None, silu, config=config)
        who = " ".join(map(str, config))
        table.row("conv backward", who, queued(call), 3 * one, rate)
    for config in FORWARD_SHAPES:
        call = partial(run, x, weight, None, None, None, silu, config)
        table.row("conv forward", " ".join(map(str, config)), queued(call), 2 * one, rate)
    pool = torch.zeros(257, W - 1, C, device=DEVICE, dtype=BF16)
    rows, index = x[0, :128, None], torch.arange(1, 129, dtype=torch.int32, device=DEVICE)
    y = torch.empty_like(rows)
    for config in UPDATE_SHAPES:
        call = partial(step, rows, weight, pool, y, index, None, None, silu, config)
        who = " ".join(map(str, config))
        table.row("conv decode", who, graphed([call] * 20), 4 * W * rows.numel(), rate)


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
    accept = registry.load("lagraph.engines.triton.recurrent:accept")
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
        for block_v in (32, 8) if pool_dtype == BF16 else (None,):  # of many rows, of few
            decode(
                traits, e(B, width, dtype=dtype), e(rows[key], dtype=dtype),
                e(beta, dtype=dtype) if delta else None, pool, index, e(1, B, H, V, dtype=dtype),
                heads=HK, substeps=n, block_v=block_v, **shared,
            )  # fmt: skip
        if family == "gdn":
            kept, count = e(B, 3, H, V, K, dtype=pool_dtype), torch.zeros(B, dtype=torch.int64)
            accept(pool, index, kept, count, None)
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


def header(rate: float, commit: str) -> str:
    """What was measured, and where."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parent,
    )  # fmt: skip
    commit = commit or done.stdout.strip() or "unknown"
    if DEVICE == "cpu":
        return f"a dry run on a CPU: nothing is timed; commit {commit}"
    import triton

    return (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, "
        f"commit {commit}; a copy moves {rate / 1e12:.2f} TB/s, read and written"
    )


def dry() -> None:
    """Tiny sizes, on the CPU."""
    global DEVICE, H, HK, K, V, T, C, POOL_BYTES
    DEVICE, H, HK, K, V, T, C, POOL_BYTES = "cpu", 4, 2, 16, 16, 64, 256, 1 << 14


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="decode,several,conv", help="parts, with commas")
    parser.add_argument("--families", default="", help="of decode, with commas")
    parser.add_argument("--tune", action="store_true", help="other launch shapes, and no tables")
    parser.add_argument("--warm", type=int, nargs=2, metavar=("I", "N"), help="compile a part")
    parser.add_argument("--no-peers", action="store_true", help="time no other libraries")
    parser.add_argument("--out", default="", help="also write the table here")
    parser.add_argument("--commit", default="", help="what was measured; default: ask git")
    parser.add_argument("--compile", type=int, nargs="+", metavar="ARCH", help="compile only")
    parser.add_argument("--quick", action="store_true", help="fewer rows, or samples to compile")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU, nothing timed")
    args = parser.parse_args(argv)
    if args.compile:
        return compile_all(args.compile, args.quick)
    if args.dry_run:
        dry()
    elif not torch.cuda.is_available():
        print("needs an NVIDIA GPU, or --compile, or --dry-run")
        return 1
    table, began = Table(args.out, not args.no_peers), time.perf_counter()
    if args.warm:
        Warm.part, Warm.of = args.warm
    rate = math.nan if args.dry_run or args.warm else copy_rate()
    table.line(header(rate, args.commit))
    families = [f for f in args.families.split(",") if f]
    families = families or (["gdn", "mamba2"] if args.quick else list(FAMILIES))
    batches = (1, 128) if args.quick else (1, 8, 128)
    if args.dry_run:
        batches = (1, 3)
    parts = ["tune"] if args.tune else args.only.split(",")
    if "decode" in parts:
        time_decode(table, rate, families, batches)
    if "tune" in parts:
        tune_decode(table, rate, families)
        tune_conv(table, rate)
    if "several" in parts:
        time_several(table, rate, families, batches[-1])
    if "conv" in parts:
        time_conv(table, rate, args.quick)
    print(f"{time.perf_counter() - began:.0f} s")
    return int(table.failed)


if __name__ == "__main__":
    sys.exit(main())
