"""Several tokens a step with the state after every one, and the step back: `accept_states`."""

from __future__ import annotations

import batch
import pytest
import torch
from draw import draw
from oracle import FAMILIES
from serving import check_conv_states, check_several, check_states
from tolerance import check_bitwise
from torch._dynamo.testing import CompileCounterWithBackend

from lagraph import errors, ops

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NAN = float("nan")
families = pytest.mark.parametrize("family", FAMILIES)
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


# Values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pool", "kept"), [(F32, F32), (BF16, BF16), (F16, F32)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@families
@devices
def test_decode(device, family, dtype, pool, kept):
    check_several(family, device, dtype, pool, kept)


@families
@devices
def test_sizes(device, family):
    check_several(family, device, BF16, K=128, V=128, H=2, HK=1)
    check_several(family, device, F32, K=40, V=72, H=2, HK=2, T=5, n=3)


@devices
def test_options(device):
    check_several("gdn2", device, F32, options={"beta_guard": True, "allow_neg_eigval": True},
                  call={"beta_guard": True, "allow_neg_eigval": True})  # fmt: skip
    check_several(
        "kda", device, F32, options={"gate_lower_bound": -2.0}, call={"lower_bound": -2.0}
    )
    check_several("mamba2", device, F32, options={"dt_min": 0.3, "dt_max": 0.9},
                  call={"dt_min": 0.3, "dt_max": 0.9})  # fmt: skip


@pytest.mark.parametrize("pool", [None, F32, BF16, F16], ids=str)
@pytest.mark.parametrize("dense", [False, True], ids=["packed", "dense"])
@families
@devices
def test_recurrent(device, family, dense, pool):
    check_states(family, device, F32, dense=dense, pool=pool)
    check_states(family, device, BF16, dense=dense, pool=pool, kept=F16)


@families
def test_recurrent_in_fp64(family):
    check_states(family, "cpu", F64, pool=F64, kept=F64)


@pytest.mark.parametrize("W", [2, 4, 8])
@pytest.mark.parametrize("dense", [False, True], ids=["packed", "dense"])
@devices
def test_convolution(device, dense, W):
    check_conv_states(device, F32, W=W, dense=dense)
    check_conv_states(device, BF16, W=W, dense=dense)


@families
@devices
def test_one_token_of_several_is_a_token(device, family):
    """T = 1 gives what rows without a token axis give."""
    check_several(family, device, F32, T=2)
    x = draw(family, lengths=(1, 1), K=16, V=16, n=2 if family == "gdp" else 1, dtype=F32)
    given = batch.tokens(family, {n: t.to(device) for n, t in x.items()}, 2)
    given = given | batch.extra(family)
    heads = x["dO"].shape[1]
    states = torch.empty(2, 1, heads, 16, 16, device=device)
    run = batch.function("recurrent", family)
    a, last = run(**given, states=states, output_final_state=True)
    b, _ = run(**given)
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert torch.equal(states[:, 0], last)


# The step back -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 6, 8), (3, 24)], ids=["states", "histories"])
@pytest.mark.parametrize("packed", [False, True])
@devices
def test_accepted_rows(device, packed, shape):
    """By sequence, none where the count is 0 or the slot padding; gaps keep their bits."""
    store = torch.full((7, 2, *shape), NAN, device=device)
    pool = store[:, 1]
    pool.copy_(torch.randn(7, *shape))
    pool[0] = NAN
    before = store.clone()
    states = torch.randn(4, 3, *shape, dtype=BF16, device=device)
    slots = torch.tensor([5, -1, 2, 0], device=device)
    count, cu = torch.tensor([2, 1, 0, 3], device=device), None
    rows = [states[0, 1]]
    if packed:
        states = states.flatten(0, 1)[None]
        cu = torch.tensor([0, 2, 5, 5, 9], device=device)
        rows = [states[0, 1]]
    ops.accept_states(pool, slots, states, count, cu_seqlens=cu)
    assert torch.equal(pool[5], rows[0].float())
    others = [i for i in range(7) if i != 5]
    check_bitwise({"pool": store[others]}, {"pool": before[others]})
    check_bitwise({"gaps": store[:, 0]}, {"gaps": before[:, 0]})


@families
def test_verify_and_go_on(family):
    """Drafts that are half wrong: what follows is what follows the accepted tokens alone."""
    n = 2 if family == "gdp" else 1
    x = draw(family, lengths=(9, 9), K=8, V=6, n=n, dtype=F32)
    given = batch.tokens(family, x, 2)
    run = batch.function("recurrent", family)
    tokens = [m for m in given if m not in ("A", "D", "dt_bias")]

    def part(names, spans):
        """Rows a .. b of each sequence."""
        steps = {m: given[m].shape[1] // 9 for m in names}
        return {m: torch.stack([given[m][i, a * steps[m] : b * steps[m]]
                                for i, (a, b) in enumerate(spans)]) for m in names}  # fmt: skip

    heads = x["dO"].shape[1]
    pool = torch.zeros(4, heads, 6, 8)
    slots = torch.tensor([2, 3])
    rest = {m: t for m, t in given.items() if m not in tokens} | batch.extra(family)
    read = {"initial_state": pool, "state_indices": slots}
    states = torch.empty(2, 4, heads, 6, 8)
    run(**part(tokens, [(0, 4), (0, 4)]), **rest, **read, states=states)
    assert not pool.any()
    ops.accept_states(pool, slots, states, torch.tensor([1, 3]))
    got, _ = run(**part(tokens, [(1, 6), (3, 8)]), **rest, **read)
    want, _ = run(**part(tokens, [(0, 6), (0, 6)]), **rest)
    other, _ = run(**part(tokens, [(0, 8), (0, 8)]), **rest)
    torch.testing.assert_close(got[0], want[0, 1:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got[1], other[1, 3:], rtol=1e-4, atol=1e-5)


# torch.compile, CUDA graphs ----------------------------------------------------------------------


def verify(rows, gate, beta, a_log, bias, pool, slots, states, count):
    o = ops.recurrent_gdn_decode(rows, gate, beta, a_log, bias, pool, slots, states=states)
    ops.accept_states(pool, slots, states, count)
    return o


def decode_args(B, T, device="cpu"):
    return [t.to(device) for t in (
        torch.randn(B, T, 2 * 16 + 2 * 16), torch.randn(B, T, 2), torch.randn(B, T, 2),
        torch.randn(2), torch.randn(2), torch.randn(9, 2, 16, 16),
        torch.arange(1, B + 1, dtype=torch.int32), torch.empty(B, T, 2, 16, 16),
        torch.arange(B) % (T + 1),
    )]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@devices
def test_compiled(device):
    """fullgraph, no recompile for other batches and draft lengths; pools end up alike."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    made = torch.compile(verify, backend=counter, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for B, T in ((4, 3), (6, 3), (5, 4), (3, 2)):
            args = decode_args(B, T, device)
            other = [t.clone() for t in args]
            check_bitwise({"o": made(*args)}, {"o": verify(*other)})
            check_bitwise({"pool": args[5], "states": args[7]},
                          {"pool": other[5], "states": other[7]})  # fmt: skip
    assert counter.frame_count <= 2
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@families
def test_recurrent_compiled(family):
    torch._dynamo.reset()
    run = batch.function("recurrent", family)
    made = torch.compile(run, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for T in (3, 4):
            x = draw(family, lengths=(T, T), K=8, V=6, n=2 if family == "gdp" else 1, dtype=F32)
            given = batch.tokens(family, x) | batch.extra(family)
            shape = (1, 2 * T, x["dO"].shape[1], 6, 8)
            a, b = torch.zeros(shape), torch.zeros(shape)
            assert torch.equal(made(**given, states=a)[0], run(**given, states=b)[0])
            assert torch.equal(a, b)
            assert a.any()
    torch._dynamo.reset()


@pytest.mark.gpu
def test_captured():
    """A replay follows slots and counts."""
    args = decode_args(4, 3, "cuda")
    with torch.no_grad():
        verify(*args)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = verify(*args)
        for slots, count in (([1, 2, 3, 4], [3, 0, 1, 2]), ([8, -1, 5, 0], [1, 1, 0, 3])):
            args[6].copy_(torch.tensor(slots))
            args[8].copy_(torch.tensor(count))
            other = [t.clone() for t in args]
            graph.replay()
            check_bitwise({"o": o, "pool": args[5]}, {"o": verify(*other), "pool": other[5]})


def test_registered_well():
    args = decode_args(3, 2)
    options = ops.decode._options("recurrent_gdn_decode", "gdn", "auto")
    full = (*args[:3], None, None, args[3], args[4], None, None, args[5], args[6], None,
            torch.zeros(3, 2, 2, 16), args[7], options)  # fmt: skip
    op = torch.ops.lagraph.recurrent_decode.default
    torch.library.opcheck(op, full, test_utils=("test_schema", "test_faketensor"))


# Refused -----------------------------------------------------------------------------------------

POOL, STATES = torch.zeros(5, 2, 6, 8), torch.zeros(2, 3, 2, 6, 8)
GOOD = {"state_cache": POOL, "state_indices": torch.tensor([1, 2]), "states": STATES,
        "num_accepted_tokens": torch.tensor([1, 3])}  # fmt: skip
BAD = {
    "no pool": ({"state_cache": None}, errors.DtypeMismatch, "state_cache"),
    "no tensor": ({"num_accepted_tokens": [1, 2]}, errors.DtypeMismatch, "num_accepted_tokens"),
    "flat pool": ({"state_cache": torch.zeros(5)}, errors.ShapeMismatch, "state_cache"),
    "other rows": ({"states": torch.zeros(2, 3, 2, 6, 7)}, errors.ShapeMismatch, "states.*d3 = 8"),
    "too many": ({"num_accepted_tokens": torch.tensor([1, 4])}, errors.RuleBroken, "0 to 3"),
    "negative": ({"num_accepted_tokens": torch.tensor([-1, 1])}, errors.RuleBroken, "0 to 3"),
    "more than the sequence has": (
        {"states": STATES.flatten(0, 1)[None], "cu_seqlens": torch.tensor([0, 1, 3])},
        errors.RuleBroken, "0 to 2 for sequence 1",
    ),
    "counts": ({"num_accepted_tokens": torch.tensor([1])}, errors.ShapeMismatch, "N = 2"),
    "float counts": ({"num_accepted_tokens": torch.ones(2)}, errors.DtypeMismatch, "int32"),
    "slot twice": ({"state_indices": torch.tensor([1, 1])}, errors.RuleBroken, "distinct"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_accepts(what):
    changes, error, pattern = BAD[what]
    with pytest.raises(error, match=rf"accept_states\..*{pattern}"):
        ops.accept_states(**GOOD | changes)


def test_a_pool_that_holds_the_states():
    big = torch.zeros(6, 3, 2, 6, 8)
    with pytest.raises(errors.RuleBroken, match=r"accept_states\.states.*overlap"):
        ops.accept_states(**GOOD | {"state_cache": big[:, 0], "states": big[4:]})


def test_bad_buffers():
    args = decode_args(3, 2)
    run = ops.recurrent_gdn_decode
    with pytest.raises(errors.ShapeMismatch, match=r"recurrent_gdn_decode\.states"):
        run(*args[:7], states=torch.zeros(3, 3, 2, 16, 16))
    with pytest.raises(errors.RuleBroken, match=r"recurrent_gdn_decode\.states.*contiguous"):
        run(*args[:7], states=torch.zeros(3, 2, 2, 16, 16).mT)
    with pytest.raises(errors.DtypeMismatch, match=r"recurrent_gdn_decode\.states"):
        run(*args[:7], states=args[7].double())
    with pytest.raises(errors.RuleBroken, match=r"states.*packed_qkv \[B, T, width\]"):
        run(args[0][:, 0], args[1][:, :1].transpose(0, 1), args[2][:, :1].transpose(0, 1),
            *args[3:7], states=args[7])  # fmt: skip
    with pytest.raises(errors.RuleBroken, match="overlap with state_cache"):
        run(*args[:7], states=args[5].view(-1)[: 3 * 2 * 512].view(3, 2, 2, 16, 16))
    x = draw("gdn", lengths=(2, 2), K=8, V=6, dtype=F32)
    given = batch.tokens("gdn", x, 2)
    for bad, error in (
        (torch.zeros(2, 2, 2, 6, 9), errors.ShapeMismatch), (3, errors.DtypeMismatch),
        (torch.zeros(2, 2, 2, 8, 6).mT, errors.RuleBroken),
        (torch.zeros(2, 2, 2, 6, 8, dtype=F64), errors.DtypeMismatch),
    ):  # fmt: skip
        with pytest.raises(error, match=r"recurrent_gdn\.states"):
            ops.recurrent_gdn(**given, states=bad)
    given["q"].requires_grad_()
    with pytest.raises(errors.NotDifferentiable, match="drop states"):
        ops.recurrent_gdn(**given, states=torch.zeros(2, 2, 2, 6, 8))
    x, weight, pool = torch.zeros(2, 3, 8), torch.zeros(8, 4), torch.zeros(4, 3, 8)
    with pytest.raises(errors.ShapeMismatch, match=r"paged_causal_conv1d\.states"):
        ops.paged_causal_conv1d(x, weight, pool, torch.tensor([1, 2]), states=torch.zeros(2, 3, 8))
