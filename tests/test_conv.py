"""Short convolution: truth, layouts, pools, errors, torch.compile, and reported faults."""

from __future__ import annotations

from functools import partial
from math import prod

import pytest
import torch
from serving import check_conv, check_conv_decode, check_paged, conv_truth, wide
from tolerance import check, check_bitwise
from torch._dynamo.testing import CompileCounterWithBackend

import lagraph
from lagraph import infer
from lagraph.ops import conv
from lagraph.ops.conv import (
    ShortConvConfig,
    causal_conv1d,
    causal_conv1d_decode,
    paged_causal_conv1d,
    register_activation,
)

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
gpu = pytest.mark.gpu
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=gpu)]
devices = pytest.mark.parametrize("device", DEVICES)
dtypes = pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)


@pytest.fixture(autouse=True)
def fresh(request):
    """Memory holds NaN, but where a compiler reads the allocation."""
    torch._dynamo.reset()
    if not request.node.name.startswith(("test_b75", "test_b83", "test_b85")):
        request.getfixturevalue("poison")


def pattern(shape, seed):
    """P(shape; seed), the reports' fixed pattern."""
    j = torch.arange(prod(shape)) % 1009
    return (((31 * j * j + 17 * j + 101 * seed + 5) % 1009).to(F64) / 504.5 - 1.0).view(shape)


# Values -----------------------------------------------------------------------------------------


def test_anchor_a6():
    x, weight = pattern((6, 3), 1)[None], pattern((3, 4), 2)
    history = pattern((2, 3, 3), 3).transpose(1, 2).contiguous()
    y, final = causal_conv1d(
        x, weight, activation="silu", cu_seqlens=torch.tensor([0, 2, 6]), initial_state=history,
        return_final_state=True,
    )  # fmt: skip
    assert y.sum().item() == pytest.approx(2.787620386, abs=1e-8)
    assert y.square().sum().item() == pytest.approx(2.477193980, abs=1e-8)
    assert y[0, 1].tolist() == pytest.approx([0.254156039, 1.050130689, -0.275802379], abs=1e-8)
    rows = [-0.076313181, -0.789890981, -0.135777998, -0.684836472, -0.694747275, 0.328047572,
            -0.187314172, -0.476709613, 0.914767096]  # fmt: skip
    assert final[0].T.flatten().tolist() == pytest.approx(rows, abs=1e-8)


@pytest.mark.parametrize("W", range(1, 9))
@devices
def test_packed(device, W):
    check_conv(device, F32, W=W)


@dtypes
@devices
def test_packed_dtypes(device, dtype):
    check_conv(device, dtype, lengths=(5, 0, 70, 1, 0), C=72)


def test_packed_fp64():
    check_conv("cpu", F64)


@pytest.mark.parametrize("layout", ["", "columns", "time first", "expanded"])
@pytest.mark.parametrize("history", [True, False])
@devices
def test_dense(device, layout, history):
    check_conv(device, F32, batch=3, lengths=(11,), layout=layout, history=history)


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("final", [True, False])
@devices
def test_options(device, activation, final):
    check_conv(device, F32, activation=activation, final=final, index=torch.int64)


@devices
def test_no_tokens_and_no_sequences(device):
    check_conv(device, F32, lengths=(0, 0), tail=0)
    check_conv(device, F32, lengths=(), tail=3)
    check_conv(device, F32, lengths=(0,), batch=2)


def test_gradcheck():
    rng = torch.Generator().manual_seed(0)
    shapes = (1, 7, 3), (3, 4), (3, 3, 3)
    inputs = [torch.randn(s, generator=rng, dtype=F64, requires_grad=True) for s in shapes]
    cu = torch.tensor([0, 2, 2, 6])

    def call(x, weight, state):
        y, final = causal_conv1d(
            x, weight, activation="silu", cu_seqlens=cu, initial_state=state,
            return_final_state=True,
        )  # fmt: skip
        return y[:, :6], final

    assert torch.autograd.gradcheck(call, inputs)


@devices
def test_pieces_are_the_whole(device):
    """A history carried from piece to piece leaves no seam."""
    x = torch.randn(2, 50, 24, device=device)
    weight = torch.randn(24, 4, device=device)
    whole = causal_conv1d(x, weight, activation="silu")
    state, parts = None, []
    for piece in x.split([1, 2, 17, 30], dim=1):
        y, state = causal_conv1d(
            piece, weight, activation="silu", initial_state=state, return_final_state=True
        )
        parts.append(y)
    got = torch.cat(parts, dim=1)
    torch.testing.assert_close(got, whole, rtol=1e-6, atol=1e-6)
    if device == "cuda":  # on a CPU, torch's silu depends on where its vectors end
        check_bitwise({"y": got}, {"y": whole})


@devices
def test_gradients_of_the_inputs_that_want_them(device):
    x = torch.randn(1, 9, 16, device=device)
    weight = torch.randn(16, 4, device=device, requires_grad=True)
    y, final = causal_conv1d(x, weight, return_final_state=True)
    (only,) = torch.autograd.grad(y.sum(), weight)
    flat, w64, _ = wide(x[0], weight, None)
    (want,) = torch.autograd.grad(conv_truth(flat, w64, [0, 9], None, None)[0].sum(), w64)
    check({"dw": only}, {"dw": want}, F32)
    # The final state alone.
    x.requires_grad_()
    y, final = causal_conv1d(x, weight.detach(), return_final_state=True)
    (dx,) = torch.autograd.grad(final.sum(), x)
    want = torch.zeros_like(dx)
    want[:, -3:] = 1.0
    assert torch.equal(dx, want)


# Pools ------------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("fresh", [True, False])
@devices
def test_paged_packed(device, dtype, fresh):
    check_paged(device, dtype, fresh=fresh)


@pytest.mark.parametrize("W", [2, 8])
@pytest.mark.parametrize("T", [0, 1, 19, 200])
@devices
def test_paged_dense(device, T, W):
    check_paged(device, F32, batch=5, lengths=(T,), W=W)


@dtypes
@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("fresh", [True, False])
@devices
def test_decode(device, dtype, index, fresh):
    check_conv_decode(device, dtype, index=index, fresh=fresh)


@pytest.mark.parametrize("W", [2, 3, 8])
@devices
def test_decode_widths(device, W):
    check_conv_decode(device, F32, W=W, activation=None)


@devices
def test_prefill_then_decode_is_one_convolution(device):
    x, weight = torch.randn(2, 9, 24, device=device), torch.randn(24, 4, device=device)
    pool = torch.full((4, 3, 24), float("nan"), device=device)
    slots = torch.tensor([3, 1], dtype=torch.int32, device=device)
    new = torch.zeros(2, dtype=torch.bool, device=device)
    parts = [paged_causal_conv1d(x[:, :5], weight, pool, slots, has_initial_state=new)]
    for t in range(5, 9):
        parts.append(causal_conv1d_decode(x[:, t], weight, pool, state_indices=slots)[:, None])
    whole, final = causal_conv1d(x, weight, return_final_state=True)
    check_bitwise({"y": torch.cat(parts, dim=1)}, {"y": whole})
    check_bitwise({"state": pool[[3, 1]]}, {"state": final})


# Options and errors -----------------------------------------------------------------------------


def good(**changes):
    x = torch.zeros(1, 6, 8)
    args = {"x": x, "weight": torch.zeros(8, 4)}
    return args | changes


def expect(error, words, call, **args):
    with pytest.raises(error) as caught:
        call(**args)
    assert isinstance(caught.value, lagraph.LagraphError)
    for word in words.split("|"):
        assert word in str(caught.value)


CU = partial(torch.tensor, dtype=torch.int32)
BAD = {
    "rank": (ValueError, "causal_conv1d.x|[B, T, C]|[6, 8]", {"x": torch.zeros(6, 8)}),
    "dtype": (TypeError, "causal_conv1d.x|float32|int64", {"x": torch.zeros(1, 6, 8).long()}),
    "none": (TypeError, "causal_conv1d.x|None|Pass x", {"x": None}),
    "list": (TypeError, "causal_conv1d.cu_seqlens|list", {"cu_seqlens": [0, 6]}),
    "channels": (ValueError, "causal_conv1d.x|contiguous", {"x": torch.zeros(1, 8, 6).mT}),
    "weight dtype": (TypeError, "weight|float32|bfloat16",
                     {"weight": torch.zeros(8, 4).bfloat16()}),
    "weight shape": (ValueError, "weight|C = 8|C = 7", {"weight": torch.zeros(7, 4)}),
    "width": (ValueError, "weight|1 .. 8|W = 9", {"weight": torch.zeros(8, 9)}),
    "no width": (ValueError, "weight|W = 0", {"weight": torch.zeros(8, 0)}),
    "state shape": (ValueError, "initial_state|N = 1|N = 2",
                    {"initial_state": torch.zeros(2, 3, 8)}),
    "state rows": (ValueError, "initial_state|W-1 = 3|4", {"initial_state": torch.zeros(1, 4, 8)}),
    "state dtype": (TypeError, "initial_state", {"initial_state": torch.zeros(1, 3, 8).half()}),
    "activation": (ValueError, "activation|'gelu'|register_activation", {"activation": "gelu"}),
    "activation type": (TypeError, "activation|registered name", {"activation": torch.tanh}),
    "impl": (ValueError, "impl|'fast'|reference", {"impl": "fast"}),
    "fused": (NotImplementedError, "fused|cpu|reference", {"impl": "fused"}),
    "flag": (TypeError, "return_final_state|True or False", {"return_final_state": 1}),
    "config": (TypeError, "forward_config|ShortConvConfig", {"forward_config": (128, 4, 8)}),
    "configs": (ValueError, "weight_grad_config|One kernel",
                {"input_grad_config": ShortConvConfig(64, 4, 8),
                 "weight_grad_config": ShortConvConfig(64, 4, 16)}),
    "tma": (NotImplementedError, "persistent_tma", {"persistent_tma_input_gradient": True}),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what):
    error, words, changes = BAD[what]
    expect(error, words, causal_conv1d, **good(**changes))
    causal_conv1d(**good())  # the next good call works


def test_misspelt_options_are_errors():
    with pytest.raises(TypeError, match="activaton"):
        causal_conv1d(**good(), activaton="silu")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight": torch.zeros(8, 1), "state": torch.zeros(4, 0, 8)}, "weight|W >= 2"),
        ({"state": torch.zeros(1, 3, 8)}, "state|2 sequences|1 slots"),
        ({"state": torch.zeros(4, 8, 3).mT}, "state|contiguous"),
        ({"has_initial_state": torch.ones(3, dtype=torch.bool)}, "has_initial_state|N = 2|N = 3"),
        ({"state_indices": torch.tensor([1, 1])}, "state_indices|distinct|[1, 1]"),
        ({"state_indices": torch.tensor([4, 1])}, "state_indices|1 .. 3|[4, 1]"),
    ],
    ids=["width", "slots", "layout", "mask", "twice", "beyond"],
)
def test_bad_pool(changes, words):
    args = {"x": torch.zeros(2, 8), "weight": torch.zeros(8, 4), "state": torch.zeros(4, 3, 8)}
    expect(ValueError, "causal_conv1d_decode." + words, causal_conv1d_decode, **(args | changes))
    causal_conv1d_decode(**args)


def test_a_pool_does_not_overlap_its_input():
    big = torch.zeros(4, 4, 8)
    with pytest.raises(lagraph.RuleBroken, match="overlap"):
        causal_conv1d_decode(big[:, 3], torch.zeros(8, 5), big)


def test_pools_are_for_inference():
    x = torch.zeros(2, 8, requires_grad=True)
    with pytest.raises(lagraph.NotDifferentiable, match="no backward"):
        causal_conv1d_decode(x, torch.zeros(8, 4), torch.zeros(2, 3, 8))
    with torch.no_grad():
        causal_conv1d_decode(x, torch.zeros(8, 4), torch.zeros(2, 3, 8))


def test_derivatives_that_are_refused():
    x, weight = torch.randn(1, 6, 8, requires_grad=True), torch.randn(8, 4)
    y = causal_conv1d(x, weight, activation="silu")
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(lagraph.NotDifferentiable, match="twice"):
        dx.sum().backward()
    with pytest.raises(lagraph.NotDifferentiable, match="jvp"):
        torch.func.jvp(lambda x: causal_conv1d(x, weight), (x.detach(),), (x.detach(),))
    with pytest.raises(lagraph.NotDifferentiable, match="vmap"):
        torch.func.vmap(lambda x: causal_conv1d(x, weight))(x.detach()[None])


@devices
def test_autocast(device):
    x, weight = torch.randn(1, 6, 8, device=device), torch.randn(8, 4, device=device)
    state = torch.randn(1, 3, 8, device=device)
    with torch.autocast(device, dtype=BF16):
        y = causal_conv1d(x, weight, initial_state=state)
    want = causal_conv1d(x.bfloat16(), weight.bfloat16(), initial_state=state.bfloat16())
    check_bitwise({"y": y}, {"y": want})


def test_register_activation():
    def slope(x):
        return 1 - x.tanh() ** 2

    register_activation("test tanh", torch.tanh, slope)
    try:
        register_activation("test tanh", torch.tanh, slope)  # the same again
        with pytest.raises(lagraph.InvalidOption, match="other functions"):
            register_activation("test tanh", torch.sin, torch.cos)
        check_conv("cpu", F32, activation="test tanh")
        with pytest.raises(lagraph.NotSupported, match="no Triton functions"):
            conv._activation("causal_conv1d", "test tanh", True)
    finally:
        del conv.ACTIVATIONS["test tanh"]
    with pytest.raises(lagraph.InvalidOption):
        register_activation("silu", torch.tanh, slope)
    with pytest.raises(lagraph.InvalidOption):
        register_activation("", torch.tanh, slope)
    with pytest.raises(lagraph.InvalidOption):
        register_activation("x", torch.tanh, None)


@pytest.mark.parametrize("values", [(48, 4, 8), (128, 3, 8), (128, 4, 6), (128, 4, -1)])
def test_schedules_are_checked(values):
    with pytest.raises(lagraph.InvalidOption, match="ShortConvConfig"):
        ShortConvConfig(*values)


def test_operators_are_registered_well():
    x, weight = torch.randn(1, 6, 8, requires_grad=True), torch.randn(8, 4, requires_grad=True)
    state, cu = torch.randn(2, 3, 8, requires_grad=True), torch.tensor([0, 2, 6])
    options = conv.options_text(
        ("op", "causal_conv1d"), ("impl", "auto"), ("act", "silu"), ("final", True),
        ("forward", None), ("backward", None),
    )  # fmt: skip
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    op = torch.ops.lagraph.causal_conv1d.default
    torch.library.opcheck(op, (x, weight, cu, state, options), test_utils=tests)
    options = conv.options_text(
        ("op", "paged_causal_conv1d"), ("impl", "auto"), ("act", None), ("pool", "state_cache"),
        ("forward", None),
    )  # fmt: skip
    pool, index = torch.zeros(4, 3, 8), torch.tensor([2, 3])
    op = torch.ops.lagraph.causal_conv1d_advance.default
    args = (x.detach(), weight.detach(), pool, torch.zeros(1, 6, 8), index, cu, None, options)
    torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


# torch.compile ----------------------------------------------------------------------------------


def compiled(function):
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=counter, fullgraph=True, dynamic=True), counter


@devices
def test_b75_compiled_over_many_lengths(device):
    weight = torch.randn(24, 4, device=device)

    def call(x, weight, cu, state):
        y, final = causal_conv1d(
            x, weight, activation="silu", cu_seqlens=cu, initial_state=state,
            return_final_state=True,
        )  # fmt: skip
        return y * 2.0, final

    made, counter = compiled(call)
    for T, N in ((20, 5), (30, 4), (40, 3), (64, 2)):
        cu = torch.linspace(0, T, N + 1).to(torch.int32).to(device)
        results = []
        for run in (made, call):
            torch.manual_seed(T)
            x = torch.randn(1, T, 24, device=device, requires_grad=True)
            w = weight.clone().requires_grad_()
            state = torch.randn(N, 3, 24, device=device, requires_grad=True)
            out = run(x, w, cu, state)
            grads = torch.autograd.grad(out[0].square().sum() + out[1].sum(), (x, w, state))
            results.append((*out, *grads))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)
    assert counter.frame_count == 1, "compiled again for another length"
    one = torch.randn(1, 1, 24, device=device)  # 1 may specialize, and is right
    cu, state = CU([0, 1]).to(device), torch.zeros(1, 3, 24, device=device)
    assert torch.equal(made(one, weight, cu, state)[0], call(one, weight, cu, state)[0])


@devices
def test_b83_pools_that_are_views(device):
    """Compiled, a write through a view reaches the base, twice in a row, too."""
    weight = torch.randn(24, 4, device=device)
    slots = torch.tensor([2, 1], dtype=torch.int32, device=device)

    def call(big, x):
        pool = big[1][:, :, 8:]
        paged = big[0].view(5, 96)[:, :72].view(5, 3, 24)
        a = causal_conv1d_decode(x[:, 0], weight, pool, state_indices=slots)
        b = causal_conv1d_decode(x[:, 1], weight, pool, state_indices=slots, activation="silu")
        c = paged_causal_conv1d(x, weight, paged, slots)
        return a + b + c[:, 0], big * 1.0

    torch.manual_seed(0)
    start, x = torch.randn(2, 5, 3, 32, device=device), torch.randn(2, 2, 24, device=device)
    results = []
    for run in (call, compiled(call)[0]):
        big = start.clone()
        out, seen = run(big, x)
        results.append((out, seen, big))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    changed = (results[0][2] != start).any(-1).any(-1)
    assert changed.tolist() == [[False, True, True, False, False]] * 2


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("compile_it", [True, False])
@devices
def test_b85_inference_mode(device, inside, compile_it):
    weight, x = torch.randn(24, 4, device=device), torch.randn(2, 24, device=device)
    slots = torch.tensor([2, 1], dtype=torch.int32, device=device)
    call = partial(causal_conv1d_decode, state_indices=slots)
    run = compiled(call)[0] if compile_it else call
    outside = torch.zeros(3, 3, 24, device=device)
    with torch.inference_mode():
        pool = torch.zeros(3, 3, 24, device=device) if inside else outside
        y = run(x, weight, pool)
        assert torch.equal(pool[[2, 1], 2], x)
        assert torch.equal(pool[0], torch.zeros_like(pool[0]))
    want = causal_conv1d_decode(x, weight, torch.zeros(2, 3, 24, device=device))
    assert torch.equal(y, want)


def test_writes_are_seen_by_autograd():
    pool = torch.zeros(2, 3, 8)
    before = pool._version
    causal_conv1d_decode(torch.zeros(2, 8), torch.zeros(8, 4), pool)
    assert pool._version > before


# Reported faults --------------------------------------------------------------------------------

B45 = {
    "start": ([1, 64], torch.int32), "falling": ([0, 40, 30, 64], torch.int32),
    "past the end": ([0, 80], torch.int32),
}  # fmt: skip


@pytest.mark.parametrize("what", B45)
def test_b45_wrong_offsets(what):
    values, dtype = B45[what]
    with pytest.raises(lagraph.RuleBroken, match=r"causal_conv1d\.cu_seqlens.*start at 0"):
        causal_conv1d(
            torch.zeros(1, 64, 8), torch.zeros(8, 4), cu_seqlens=torch.tensor(values, dtype=dtype)
        )


def test_b45_offsets_of_a_wrong_kind():
    x, weight = torch.randn(1, 64, 8), torch.randn(8, 4)
    with pytest.raises(lagraph.ShapeMismatch, match="cu_seqlens"):
        causal_conv1d(x, weight, cu_seqlens=CU([[0, 64]]))
    with pytest.raises(lagraph.DtypeMismatch, match="cu_seqlens"):
        causal_conv1d(x, weight, cu_seqlens=torch.tensor([0.0, 64.0]))
    with pytest.raises(lagraph.ShapeMismatch, match="cu_seqlens"):
        causal_conv1d(x, weight, cu_seqlens=CU([]))
    a, b = (
        causal_conv1d(x, weight, cu_seqlens=torch.tensor([0, 9, 64], dtype=d))
        for d in (torch.int32, torch.int64)
    )
    assert torch.equal(a, b)


@gpu
@pytest.mark.parametrize("what", B45)
def test_b45_on_a_gpu(what, monkeypatch):
    x, weight = torch.randn(1, 64, 24, device="cuda"), torch.randn(24, 4, device="cuda")
    bad = torch.tensor(B45[what][0], dtype=torch.int32, device="cuda")
    with pytest.raises(lagraph.DeviceMismatch, match="cu_seqlens"):
        causal_conv1d(x, weight, cu_seqlens=bad.cpu())
    causal_conv1d(x, weight, cu_seqlens=bad)  # clamped
    torch.cuda.synchronize()
    with monkeypatch.context() as patch:
        patch.setattr(infer, "VALIDATE", True)
        with pytest.raises(lagraph.RuleBroken, match="cu_seqlens"):
            causal_conv1d(x, weight, cu_seqlens=bad)
    # Written into a captured graph.
    cu = torch.linspace(0, 64, len(bad)).to(torch.int32).cuda()
    right = cu.clone()
    causal_conv1d(x, weight, cu_seqlens=cu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = causal_conv1d(x, weight, cu_seqlens=cu)
    for values in (bad, right):
        cu.copy_(values)
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, causal_conv1d(x, weight, cu_seqlens=right))


@devices
def test_b49_weight_gradient_of_packed_rows(device):
    weight = torch.ones(8, 4, device=device, requires_grad=True)
    cu = CU([0, 4, 8]).to(device)
    causal_conv1d(torch.ones(1, 8, 8, device=device), weight, cu_seqlens=cu).sum().backward()
    assert weight.grad.tolist() == [[2.0, 4.0, 6.0, 8.0]] * 8
    with pytest.raises(lagraph.RuleBroken, match=r"packed x \[1, T, C\]"):
        causal_conv1d(torch.ones(2, 4, 8, device=device), weight, cu_seqlens=cu)


@gpu
@pytest.mark.parametrize("T", [63, 64, 65, 127, 129, 257, 4099])
def test_b51_tails_of_blocks(T):
    check_conv("cuda", BF16, C=256, lengths=(T // 3, T // 2, T - T // 3 - T // 2), tail=0)
    check_conv("cuda", F32, C=256, lengths=(T // 3, T // 2, T - T // 3 - T // 2), tail=5)


@devices
def test_b53_gradients_that_are_views(device):
    """q, k and v are split from x, and their outputs joined again."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(1, 8, 48, generator=rng).to(device).requires_grad_()
    weights = [torch.randn(16, 4, generator=rng).to(device).requires_grad_() for _ in range(3)]
    seed = pattern((1, 8, 48), 7).float().to(device)
    parts = [
        causal_conv1d(piece, weight, activation="silu")
        for piece, weight in zip(x.split(16, dim=-1), weights, strict=True)
    ]
    got = torch.autograd.grad((torch.cat(parts, -1) * seed).sum(), (x, *weights))
    want = []
    for i, weight in enumerate(weights):
        piece = x.detach()[..., 16 * i : 16 * i + 16].contiguous().requires_grad_()
        y = causal_conv1d(piece, weight, activation="silu")
        want.append(torch.autograd.grad(y, (piece, weight), seed.split(16, -1)[i].contiguous()))
    torch.testing.assert_close(got[0], torch.cat([w[0] for w in want], -1), atol=1e-6, rtol=1e-6)
    for a, b in zip(got[1:], want, strict=True):
        torch.testing.assert_close(a, b[1], atol=1e-6, rtol=1e-6)
    # Transposed and expanded ones.
    y = causal_conv1d(x, torch.cat(weights).detach(), activation="silu")
    dense = torch.randn(1, 48, 8, generator=rng).to(device)
    a = torch.autograd.grad(y, x, dense.mT, retain_graph=True)[0]
    assert torch.equal(a, torch.autograd.grad(y, x, dense.mT.contiguous(), retain_graph=True)[0])
    one = torch.ones((), device=device).expand(1, 8, 48)
    a = torch.autograd.grad(y, x, one, retain_graph=True)[0]
    assert torch.equal(a, torch.autograd.grad(y, x, one.contiguous())[0])


@devices
def test_b55_fewer_indices_than_rows(device):
    x, weight = torch.randn(8, 16, device=device), torch.randn(16, 4, device=device)
    pool = torch.randn(6, 3, 16, device=device)
    before = pool.clone()
    with pytest.raises(ValueError, match=r"state_indices.*N = 8.*N = 5"):
        causal_conv1d_decode(x, weight, pool, state_indices=CU([1, 2, 3, 4, 5]).to(device))
    assert torch.equal(pool, before)
    slots = CU([1, 2, 3, 4, 5, -1, -1, -1]).to(device)
    y = causal_conv1d_decode(x, weight, pool, state_indices=slots)
    assert torch.equal(y[5:], torch.zeros_like(y[5:]))
    assert torch.equal(pool[0], before[0])
    assert torch.equal(pool[1:, 2], x[:5])


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 33])
@devices
def test_b59_padded_rows_are_zero(device, rows):
    slots = torch.full((rows,), -1, dtype=torch.int32)
    slots[rows // 2] = 1
    x, weight = torch.randn(rows, 16, device=device), torch.randn(16, 4, device=device)
    pool = torch.randn(2, 3, 16, device=device)
    y = causal_conv1d_decode(x, weight, pool, state_indices=slots.to(device))
    padded = slots < 0
    assert torch.equal(y.cpu()[padded], torch.zeros(rows - 1, 16))
    assert y[rows // 2].abs().max() > 0


@gpu
def test_b61_an_index_past_the_pool_is_padding():
    """Where nobody waits to look at the values: no slot is read or written."""
    slots = CU([5, 6, 6947, 2**31 - 1, -(2**31)]).cuda()
    weight, start = torch.randn(16, 4, device="cuda"), torch.randn(6, 3, 16, device="cuda")
    for call, x in (
        (causal_conv1d_decode, torch.randn(5, 16, device="cuda")),
        (paged_causal_conv1d, torch.randn(5, 7, 16, device="cuda")),
    ):
        pool = start.clone()
        y = call(x, weight, pool, state_indices=slots)
        assert not y[1:].any()
        assert torch.equal(pool[:5], start[:5])
        assert not torch.equal(pool[5], start[5])


@gpu
@pytest.mark.parametrize("rows", [65536, 65537, 262141])
def test_b69_many_rows(rows):
    """Nothing is lost beyond a grid's limits: the last row equals the first, dense and packed."""
    one = torch.randn(1, 16, device="cuda")
    weight = torch.randn(16, 4, device="cuda", requires_grad=True)
    x = one.expand(rows, 1, 16)
    y = causal_conv1d(x, weight, activation="silu")
    assert torch.equal(y[-1], y[0])
    y.sum().backward()
    got = weight.grad.clone()
    weight.grad = None
    causal_conv1d(one[None], weight, activation="silu").sum().backward()
    torch.testing.assert_close(got, rows * weight.grad, rtol=1e-5, atol=1e-5)
    cu = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
    packed = causal_conv1d(x.reshape(1, rows, 16), weight, activation="silu", cu_seqlens=cu)
    assert torch.equal(packed[0], y[:, 0])


# CUDA graphs ------------------------------------------------------------------------------------


@gpu
def test_graph_replays_follow_the_indices():
    x = torch.randn(1, 40, 64, device="cuda")
    weight = torch.randn(64, 4, device="cuda")
    pool = torch.randn(8, 3, 64, device="cuda")
    cu = CU([0, 7, 7, 40]).cuda()
    slots, has = CU([1, 2, 3]).cuda(), torch.ones(3, dtype=torch.bool, device="cuda")

    def call():
        y = paged_causal_conv1d(x, weight, pool, slots, cu_seqlens=cu, has_initial_state=has)
        return y, causal_conv1d_decode(x[0, :3], weight, pool, state_indices=slots)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for at, index, mask in (
        ([0, 7, 7, 40], [1, 2, 3], [True, True, False]),
        ([0, 3, 5, 5], [7, -1, 4], [False, True, True]),
        ([0, 0, 30, 31], [0, 6, 5], [True, False, True]),
    ):
        cu.copy_(CU(at))
        slots.copy_(CU(index))
        has.copy_(torch.tensor(mask))
        start = pool.clone()
        graph.replay()
        got = [t.clone() for t in (*out, pool)]
        pool.copy_(start)
        want = [*call(), pool]
        got[0], want[0] = got[0][:, : at[-1]], want[0][:, : at[-1]]
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)


@gpu
def test_schedules_agree():
    x = torch.randn(1, 300, 264, device="cuda", dtype=BF16)
    weight = torch.randn(264, 4, device="cuda", dtype=BF16)
    cu = CU([0, 100, 300]).cuda()
    want = causal_conv1d(x, weight, activation="silu", cu_seqlens=cu)
    for values in ((32, 2, 16), (256, 8, 64), (128, 4, 0)):
        config = ShortConvConfig(*values)
        got = causal_conv1d(x, weight, activation="silu", cu_seqlens=cu, forward_config=config)
        assert torch.equal(got, want)
    check_conv("cuda", BF16, C=264, input_grad_config=ShortConvConfig(64, 2, 64))


@gpu
def test_gradients_are_the_same_every_time():
    x = torch.randn(1, 5000, 512, device="cuda", dtype=BF16, requires_grad=True)
    weight = torch.randn(512, 4, device="cuda", dtype=BF16, requires_grad=True)
    dy = torch.randn_like(x)
    runs = [
        torch.autograd.grad(causal_conv1d(x, weight, activation="silu"), (x, weight), dy)
        for _ in range(3)
    ]
    for run in runs[1:]:
        for a, b in zip(run, runs[0], strict=True):
            assert torch.equal(a, b)
