"""One-token decoding and the token scan: truth, pools, errors, torch.compile, reported faults."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from serving import DECODE, check_decode, check_scan, decode_inputs
from tolerance import check_bitwise
from torch._dynamo.testing import CompileCounterWithBackend

import lagraph
from lagraph.ops import decode
from lagraph.ops.decode import recurrent_gdn_decode, recurrent_kda_decode

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FAMILIES = tuple(DECODE)
gpu = pytest.mark.gpu
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=gpu)]
devices = pytest.mark.parametrize("device", DEVICES)
families = pytest.mark.parametrize("family", FAMILIES)
I32 = partial(torch.tensor, dtype=torch.int32)
HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def fresh(request):
    """Memory holds NaN, but where a compiler reads the allocation."""
    torch._dynamo.reset()
    if not request.node.name.startswith(("test_b83", "test_b85", "test_compiled")):
        request.getfixturevalue("poison")


# Values -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("pool", [F32, BF16, F16], ids=str)
@families
@devices
def test_decode(device, family, pool, dtype):
    check_decode(family, device, dtype, pool, gap=48)


@families
def test_decode_fp64(family):
    check_decode(family, "cpu", F64, F64)


@pytest.mark.parametrize(("K", "V"), [(128, 128), (64, 64), (256, 128), (40, 72), (16, 8)])
@pytest.mark.parametrize("fresh", [True, False])
@families
@devices
def test_sizes(device, family, fresh, K, V):
    check_decode(family, device, BF16, K=K, V=V, fresh=fresh, out=False, gap=K)


@pytest.mark.parametrize(("H", "HK"), [(1, 1), (6, 3), (8, 1), (4, 4)])
@families
@devices
def test_heads(device, family, H, HK):
    check_decode(family, device, F32, H=H, HK=HK)


@pytest.mark.parametrize("B", [1, 2, 33])
@devices
def test_batches(device, B):
    check_decode("gdn", device, F32, B=B)
    check_decode("kda", device, F32, B=B, gate=BF16)


@devices
def test_options(device):
    check = partial(check_decode, device=device, dtype=F32)
    check(
        "kda", options={"gate_lower_bound": -2.0, "allow_neg_eigval": True},
        call={"lower_bound": -2.0, "allow_neg_eigval": True},
    )  # fmt: skip
    check("gdn", options={"scale": 0.5}, call={"scale": 0.5})
    check("gdn2", options={"beta_guard": True, "allow_neg_eigval": True},
          call={"beta_guard": True, "allow_neg_eigval": True})  # fmt: skip
    check("mamba2", options={"dt_min": 0.3, "dt_max": 0.9}, call={"dt_min": 0.3, "dt_max": 0.9})
    check("gdp", n=3, options={"num_householder": 3})
    check("gdp", n=1, options={"num_householder": 1})


@devices
def test_softplus_gate_of_kda(device):
    """The per-channel softplus gate is none of the nodes': against the formula."""
    _, args, _ = decode_inputs("kda", device, F32)
    packed, gate, beta, a_log, bias = args
    pool = torch.randn(7, 4, 16, 16, device=device)
    start, slots = pool.clone(), I32([3, 1, 5, 2, 6]).to(device)
    recurrent_kda_decode(*args, pool, slots, gate_transform="softplus")
    g = -a_log.exp()[:, None] * torch.nn.functional.softplus(gate[0] + bias)
    _, k, v = packed.double().split([32, 32, 64], dim=1)
    k = k.view(5, 2, 16).repeat_interleave(2, 1)
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    S = start[slots.long()].double() * g.double().exp()[:, :, None]
    r = v.view(5, 4, 16) - (S @ k[..., None])[..., 0]
    S = S + (beta[0].double().sigmoid()[..., None] * r)[..., None] * k[..., None, :]
    torch.testing.assert_close(pool[slots.long()].double(), S, rtol=1e-5, atol=1e-5)


# 33 of 4 x 128 rows: 32 rows a program for 16-bit pools, alone 8.
@pytest.mark.parametrize(("dtype", "size", "B"), [(F32, 16, 9), (BF16, 128, 33)], ids=str)
@families
@devices
def test_the_same_row_in_any_batch(device, family, dtype, size, B):
    """A sequence's bits depend on that sequence alone."""
    _, args, extra = decode_inputs(family, device, BF16, B=B, K=size, V=size)
    base = torch.randn(B + 1, 4, size, size, device=device).to(dtype)
    pool = base.clone()
    slots = I32(list(range(1, B + 1))).to(device)
    whole = DECODE[family](*args, pool, slots, **extra)
    rows = {"packed": 0}
    for i in (0, B - 1):
        cut = [
            t[i : i + 1] if n in rows else t[:, i : i + 1] if t.dim() > 2 else t
            for n, t in zip(["packed", *[""] * (len(args) - 1)], args, strict=True)
        ]
        few = {k: t[:, i : i + 1] if k == "z" else t for k, t in extra.items()}
        again = base.clone()
        one = DECODE[family](*cut, again, slots[i : i + 1], **few)
        if device == "cuda":
            check_bitwise({"o": one[0, 0], "s": again[i + 1]}, {"o": whole[0, i], "s": pool[i + 1]})
        else:
            torch.testing.assert_close(one[0, 0], whole[0, i])
            torch.testing.assert_close(again[i + 1], pool[i + 1])


@gpu
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("pool", [F32], ids=str)
@families
def test_scan(family, pool, dtype, dense):
    check_scan(family, "cuda", dtype, pool_dtype=pool, dense=dense)


@gpu
def test_scan_guard_and_negative_eigenvalues():
    check_scan("gdn2", "cuda", BF16, options={"beta_guard": True, "allow_neg_eigval": True})


@pytest.mark.slow
def test_interpreted():
    """Every kernel in Triton's interpreter, in a process where it is on from the start."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-o", "filterwarnings=default", "-p",
            "no:cacheprovider", "interpreted_serving.py",
        ],
        cwd=HERE, capture_output=True, text=True, check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1"},
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["80", "90", "120"])
def test_compiles(arch, tmp_path):
    """Every kernel for an architecture that need not be here, without spills."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, str(HERE.parent / "benchmarks" / "serving.py"), "--compile", arch,
         "--quick"],
        capture_output=True, text=True, check=False,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"},
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


@pytest.mark.slow
def test_benchmark_dry_run(tmp_path):
    """The table's script runs to its end on a CPU, and its gates are met."""
    done = subprocess.run(
        [sys.executable, str(HERE.parent / "benchmarks" / "serving.py"), "--dry-run", "--out",
         str(tmp_path / "table.txt")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    table = (tmp_path / "table.txt").read_text()
    for row in ("decode gdn bfloat16", "several mamba2", "conv packed 64 backward", "conv decode"):
        assert row in table


def test_the_guide_has_the_measured_tables():
    """The serving guide includes what its script makes of the rows; who did not run is told."""
    spec = importlib.util.spec_from_file_location(
        "serving_tables", HERE.parent / "benchmarks" / "serving_tables.py"
    )
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    rows, page = (HERE.parent / "benchmarks" / "results" / f"h200_serving.{kind}"
                  for kind in ("txt", "md"))  # fmt: skip
    assert page.read_text("utf-8") == tables.page(rows.read_text("utf-8"))
    made = tables.page(
        "one GPU\n"
        f"{'decode gdn float32 batch 128':38s} {'lagraph':16s} {141.78:9.2f} us {3787:8.0f} GB/s "
        f"{89.2:6.1f} %  aim 70 %\n"
        f"{'decode gdn float32 batch 128':38s} {'fla':16s} {1.5:9.2f} us {3787:8.0f} GB/s "
        f"{68.2:6.1f} %  differs by 2e-05\n"
        f"{'decode gdn float32 batch 128':38s} {'flashinfer':16s} not run: ValueError: why\n"
    )
    assert "| GDN, fp32 pool |  |  |  | 142 us | 89 % | FLA 1.5 us, FlashInfer not run |" in made


# Options and errors -----------------------------------------------------------------------------


def good(**changes):
    _, args, _ = decode_inputs("gdn", "cpu", F32)
    names = ("packed_qkv", "raw_gate", "raw_beta", "A_log", "dt_bias")
    pool = torch.zeros(6, 4, 16, 16)
    slots = I32([1, 2, 3, 4, 5])
    return dict(zip(names, args, strict=True), state_cache=pool, state_indices=slots) | changes


BAD = {
    "rank": (ValueError, "packed_qkv|[B, width]", {"packed_qkv": torch.zeros(128)}),
    "none": (TypeError, "packed_qkv|None", {"packed_qkv": None}),
    "width": (ValueError, "packed_qkv|HK*K|width 129", {"packed_qkv": torch.zeros(5, 129)}),
    "groups": (ValueError, "packed_qkv|divisor of H", {"packed_qkv": torch.zeros(5, 160)}),
    "layout": (ValueError, "packed_qkv|contiguous", {"packed_qkv": torch.zeros(128, 5).T}),
    "gate": (ValueError, "raw_gate|B = 5|B = 4", {"raw_gate": torch.zeros(1, 4, 4)}),
    "one": (ValueError, "raw_beta|1 = 1|1 = 5", {"raw_beta": torch.zeros(5, 1, 4)}),
    "heads": (ValueError, "A_log|H = 4|H = 3", {"A_log": torch.zeros(3)}),
    "pool rank": (ValueError, "state_cache|num_slots", {"state_cache": torch.zeros(6, 16, 16)}),
    "pool": (ValueError, "state_cache|dense slots",
             {"state_cache": torch.zeros(6, 4, 16, 16).mT}),
    "pool dtype": (TypeError, "state_cache|float64",
                   {"state_cache": torch.zeros(6, 4, 16, 16).double()}),
    "large": (ValueError, "state_cache|256|K = 512", {"state_cache": torch.zeros(6, 4, 16, 512)}),
    "indices": (ValueError, "state_indices|B = 5|B = 4", {"state_indices": I32([1, 2, 3, 4])}),
    "twice": (ValueError, "state_indices|distinct", {"state_indices": I32([1, 1, 3, 4, 5])}),
    "beyond": (ValueError, "state_indices|1 .. 5", {"state_indices": I32([1, 2, 3, 4, 6])}),
    "mask": (TypeError, "has_initial_state|bool", {"has_initial_state": torch.ones(5)}),
    "scale": (TypeError, "scale|finite", {"scale": float("nan")}),
    "impl": (ValueError, "impl|auto, fused, reference", {"impl": "triton"}),
    "fused": (NotImplementedError, "fused|cpu", {"impl": "fused"}),
    "out": (ValueError, "out|B = 5", {"out": torch.zeros(1, 4, 4, 16)}),
    "out dtype": (TypeError, "out|float32", {"out": torch.zeros(1, 5, 4, 16).half()}),
    "out layout": (ValueError, "out|contiguous", {"out": torch.zeros(1, 5, 16, 4).mT}),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what):
    error, words, changes = BAD[what]
    with pytest.raises(error) as caught:
        recurrent_gdn_decode(**good(**changes))
    assert isinstance(caught.value, lagraph.LagraphError)
    assert str(caught.value).startswith("recurrent_gdn_decode")
    for word in words.split("|"):
        assert word in str(caught.value)
    recurrent_gdn_decode(**good())  # the next good call works


def test_other_bad_options():
    args = good()
    args["raw_gate"] = torch.zeros(1, 5, 4, 16)
    args["dt_bias"] = torch.zeros(4, 16)
    recurrent_kda_decode(**args)
    with pytest.raises(lagraph.InvalidOption, match="gate_transform"):
        recurrent_kda_decode(**args, gate_transform="log")
    with pytest.raises(lagraph.InvalidOption, match="lower_bound"):
        recurrent_kda_decode(**args, lower_bound=1.0)
    with pytest.raises(TypeError, match="lowerbound"):
        recurrent_kda_decode(**args, lowerbound=-1.0)
    packed = torch.zeros(8, 128)
    args = good(packed_qkv=packed[:5], out=packed.view(-1)[:320].view(1, 5, 4, 16))
    with pytest.raises(lagraph.RuleBroken, match="overlap with packed_qkv"):
        recurrent_gdn_decode(**args)
    with pytest.raises(lagraph.NotDifferentiable):
        recurrent_gdn_decode(**good(packed_qkv=torch.zeros(5, 128, requires_grad=True)))
    args = good()
    del args["raw_gate"]
    with pytest.raises(lagraph.NotDifferentiable, match="vmap"):
        torch.func.vmap(lambda g: recurrent_gdn_decode(raw_gate=g, **args))(torch.zeros(2, 1, 5, 4))


def test_the_operator_is_registered_well():
    args = list(good().values())
    options = decode._options("recurrent_gdn_decode", "gdn", "auto")
    packed, gate, beta, a_log, bias, pool, slots = args
    full = (packed, gate, beta, None, None, a_log, bias, None, None, pool, slots, None,
            torch.zeros(1, 5, 4, 16), None, options)  # fmt: skip
    op = torch.ops.lagraph.recurrent_decode.default
    torch.library.opcheck(op, full, test_utils=("test_schema", "test_faketensor"))


# Reported faults --------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [1000.0, 3e38])
@devices
def test_b09_strong_gates_forget_everything(device, raw):
    """No overflow on the branch that is not taken: the state is beta v k^T exactly."""
    args = good()
    args = {k: t.to(device) for k, t in args.items()}
    k = torch.zeros(5, 2, 16, device=device)
    k[:, :, 0] = 1.0
    v = torch.randn(5, 64, device=device)
    args["packed_qkv"] = torch.cat([k.flatten(1), k.flatten(1), v], dim=1)
    args |= {"raw_gate": torch.full((1, 5, 4), raw, device=device),
             "raw_beta": torch.zeros(1, 5, 4, device=device),
             "A_log": torch.zeros(4, device=device), "dt_bias": torch.zeros(4, device=device),
             "state_cache": torch.randn(6, 4, 16, 16, device=device)}  # fmt: skip
    recurrent_gdn_decode(**args)
    pool = args["state_cache"][1:]
    norm = torch.rsqrt(torch.tensor(1.0 + 1e-6))
    torch.testing.assert_close(pool[..., 0], 0.5 * norm.item() * v.view(5, 4, 16))
    assert torch.equal(pool[..., 1:], torch.zeros_like(pool[..., 1:]))


def one_hot(device, K=128, V=128, B=1, dtype=BF16):
    """k = q = e0, v = 1; the decay is 1 to the last bit."""
    e = torch.zeros(B, K, dtype=dtype, device=device)
    e[:, 0] = 1.0
    packed = torch.cat([e, e, torch.ones(B, V, dtype=dtype, device=device)], dim=1)
    gate = torch.full((1, B, 1), -1000.0, dtype=dtype, device=device)
    zero = torch.zeros(1, device=device)
    return packed, gate, zero, zero.clone()


@families
@devices
def test_b11_parameters_in_16_bits(device, family):
    """Widened before anything is computed: the bits of the same numbers in fp32."""
    _, args, extra = decode_inputs(family, device, BF16)
    *rows, a, bias = args
    small, wide = (
        [*rows, *(x.to(BF16).to(dtype) for x in (a, bias))] for dtype in (BF16, F32)
    )  # fmt: skip
    pool = torch.randn(6, 4, 16, 16, device=device)
    other, slots = pool.clone(), I32([1, 5, -1, 2, 4]).to(device)
    o = DECODE[family](*small, pool, slots, **extra)
    assert torch.equal(o, DECODE[family](*wide, other, slots, **extra))
    assert torch.equal(pool, other)


@gpu
@families
def test_b61_an_index_past_the_pool_is_padding(family):
    """Where nobody waits to look at the values: no slot is read or written."""
    _, args, extra = decode_inputs(family, "cuda", BF16)
    pool = torch.randn(6, 4, 16, 16, device="cuda")
    before, slots = pool.clone(), I32([5, 6, 6947, 2**31 - 1, -(2**31)]).cuda()
    o = DECODE[family](*args, pool, slots, **extra)
    assert not o[0, 1:].any()
    assert torch.equal(pool[:5], before[:5])
    assert not torch.equal(pool[5], before[5])


@devices
def test_b21_the_strength_is_not_rounded(device):
    packed, gate, a_log, bias = one_hot(device)
    pool = torch.full((2, 1, 128, 128), float("nan"), device=device)
    recurrent_gdn_decode(
        packed, gate, torch.full((1, 1, 1), 0.5, dtype=BF16, device=device), a_log, bias, pool,
        I32([1]).to(device), has_initial_state=torch.tensor([False], device=device),
    )  # fmt: skip
    want = torch.full((128,), 0.6224593312, device=device)
    torch.testing.assert_close(pool[1, 0, :, 0], want, rtol=0, atol=1e-6)


@devices
def test_b57_padding_is_not_the_last_slot(device):
    packed, gate, a_log, bias = one_hot(device, B=2)
    pool = torch.arange(5.0, device=device)[:, None, None, None].expand(5, 1, 128, 128).contiguous()
    before = pool.clone()
    zero = torch.zeros(1, 2, 1, device=device)
    o = recurrent_gdn_decode(
        packed, gate, zero, a_log, bias, pool, I32([4, -1]).to(device), scale=1.0
    )  # fmt: skip
    torch.testing.assert_close(pool[4, 0, :, 0], torch.full((128,), 2.5, device=device))
    assert torch.equal(pool[4, 0, :, 1:], before[4, 0, :, 1:])
    assert torch.equal(pool[:4], before[:4])
    torch.testing.assert_close(o[0, 0].float(), torch.full((1, 128), 2.5, device=device))
    assert torch.equal(o[0, 1], torch.zeros_like(o[0, 1]))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 33])
@families
@devices
def test_b59_padded_rows_are_zero(device, family, rows):
    _, args, extra = decode_inputs(family, device, F16, B=rows)
    slots = torch.full((rows,), -1, dtype=torch.int32)
    slots[rows // 2] = 1
    out = torch.full((1, rows, 4, 16), float("nan"), dtype=F16, device=device)
    pool = torch.randn(2, 4, 16, 16, device=device)
    DECODE[family](*args, pool, slots.to(device), **extra, out=out)
    padded = out[0][slots.to(device) < 0]
    assert torch.equal(padded, torch.zeros_like(padded))
    assert out[0, rows // 2].abs().max() > 0


def compiled(function):
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=counter, fullgraph=True, dynamic=True), counter


@families
@devices
def test_compiled_over_many_batches(device, family):
    made, counter = compiled(DECODE[family])
    for B in (5, 3, 9):
        _, args, extra = decode_inputs(family, device, F32, B=B)
        slots = I32(list(range(1, B + 1))).to(device)
        start = torch.randn(11, 4, 16, 16, device=device)
        results = []
        for run in (made, DECODE[family]):
            pool = start.clone()
            results.append((run(*args, pool, slots, **extra), pool))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)
    assert counter.frame_count in (1, 2), "compiled again for another batch"


@devices
def test_b83_pools_that_are_views(device):
    _, args, _ = decode_inputs("gdn", device, F32)
    slots = I32([3, -1, 1, 2, 4]).to(device)

    def call(big, out):
        pool = big[1].view(6, 4, 24, 16)[:, :, :16].narrow(0, 0, 6)
        a = recurrent_gdn_decode(*args, big[0].view(6, 6, 16, 16)[:, 1:5], slots)
        b = recurrent_gdn_decode(*args, big[0].view(6, 6, 16, 16)[:, 1:5], slots, out=out)
        return a + b, big * 1.0, pool.sum()

    torch.manual_seed(0)
    start = torch.randn(2, 6, 6 * 256, device=device)
    results = []
    for run in (call, compiled(call)[0]):
        big, out = start.clone(), torch.zeros(1, 5, 4, 16, device=device)
        results.append((*run(big, out), big, out))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(results[0][3][1], start[1])
    assert not torch.equal(results[0][3][0], start[0])


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("compile_it", [True, False])
@devices
def test_b85_inference_mode(device, inside, compile_it):
    _, args, _ = decode_inputs("gdn", device, F32)
    slots = I32([3, -1, 1, 2, 4]).to(device)
    run = compiled(recurrent_gdn_decode)[0] if compile_it else recurrent_gdn_decode
    start = torch.randn(6, 4, 16, 16, device=device)
    outside, want = start.clone(), start.clone()
    o_want = recurrent_gdn_decode(*args, want, slots)
    with torch.inference_mode():
        pool = start.clone() if inside else outside
        o = run(*args, pool, slots)
    assert torch.equal(o, o_want)
    assert torch.equal(pool, want)


# CUDA graphs ------------------------------------------------------------------------------------


@gpu
@families
def test_graph_replays_follow_the_indices(family):
    _, args, extra = decode_inputs(family, "cuda", BF16)
    pool = torch.randn(9, 4, 16, 16, device="cuda")
    slots, has = I32([1, 2, 3, 4, 5]).cuda(), torch.ones(5, dtype=torch.bool, device="cuda")
    out = torch.empty(1, 5, 4, 16, dtype=BF16, device="cuda")

    def call():
        return DECODE[family](*args, pool, slots, **extra, has_initial_state=has, out=out)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for index, mask in (([8, 0, 7, -1, 6], [1, 1, 0, 0, 1]), ([2, 3, 1, 5, 4], [0, 1, 1, 1, 0])):
        slots.copy_(I32(index))
        has.copy_(torch.tensor(mask, dtype=torch.bool))
        start = pool.clone()
        graph.replay()
        got = out.clone(), pool.clone()
        pool.copy_(start)
        want = call().clone(), pool.clone()
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)
        rest = [i for i in range(9) if i not in index]
        assert torch.equal(pool[rest], start[rest])


@gpu
def test_offsets_beyond_two_gigabytes():
    """Slots whose offset needs more than 31 bits."""
    _, args, _ = decode_inputs("gdn", "cuda", BF16, B=1, H=32, HK=16, K=128, V=128)
    slots = 5000
    pool = torch.zeros(slots, 32, 128, 128, dtype=BF16, device="cuda")
    small = torch.zeros(2, 32, 128, 128, dtype=BF16, device="cuda")
    a = recurrent_gdn_decode(*args, pool, I32([slots - 1]).cuda())
    b = recurrent_gdn_decode(*args, small, I32([1]).cuda())
    assert torch.equal(a, b)
    assert torch.equal(pool[-1], small[1])
    assert not pool[:-1].any()
