"""chunk_* and recurrent_*: against the token recurrence, dense and packed, compiled and refused."""

from __future__ import annotations

import inspect
import threading

import batch
import oracle
import pytest
import torch
from batch import IMPL, call, extra, function, gradients
from cases import BF16, F16, F32, F64, Case
from draw import draw
from oracle import FAMILIES
from table import grid, to
from tolerance import check, check_bitwise

from lagraph import errors, ops
from lagraph.ops import dense, kinds
from lagraph.ops.form import FORMS

pytestmark = pytest.mark.usefixtures("poison")

DELTA = ("gdn", "kda", "gdn2", "gdp")
KINDS = ("chunk", "recurrent")


def every(families=FAMILIES, kinds=KINDS):
    """Engines that the functions name, with families and kinds of function."""
    rows = grid(*((f"{k}-{f}", f, k) for f in families for k in kinds))
    rows = [row for row in rows if row.values[0].name in IMPL]
    return pytest.mark.parametrize(("engine", "family", "kind"), rows)


def fit(engine, family, **fields):
    """A case on the engine's sizes and dtypes, on its device, with its options."""
    if family == "gdp":
        fields.setdefault("n", 2)
    case = engine.fit(Case(family, "", **fields))
    options = {m: v for m, v in case.call_options().items() if m != "output_final_state"}
    return case, to(engine.device, case.draw()), options | {"impl": IMPL[engine.name]}


def truth(case, x, direction="forward"):
    """The oracle's, on the inputs as the function takes them."""
    return oracle.run(case.family, direction, to("cpu", x), **case.call_options())


def steps(family):
    """Updates for each token."""
    return 2 if family == "gdp" else 1


# Values and gradients ------------------------------------------------------------------------


@every()
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
def test_a_dense_batch(engine, family, kind, dtype):
    """[B, T, ...] is B sequences of T tokens."""
    case, x, options = fit(engine, family, lengths=(33, 33, 33), dtype=dtype)
    got = call(kind, family, x, 3, output_final_state=True, **options)
    assert got["O"].dtype == dtype
    check(got, truth(case, x), dtype, names=("O", "final_state"))


@every()
def test_a_packed_batch(engine, family, kind):
    """[1, T, ...] with offsets: ragged, with empty sequences, ending early; NaN past the end."""
    case, x, options = fit(engine, family, lengths=(5, 0, 70, 1), tail=9)
    got = call(kind, family, x, output_final_state=True, **options)
    want = truth(case, x)
    names = {"O": got["O"][: case.end], "final_state": got["final_state"]}
    check(names, want | {"O": want["O"][: case.end]}, case.dtype, names=names)


@every()
def test_gradients_of_a_dense_batch(engine, family, kind):
    """All of them, in the inputs' dtypes and shapes; a fused scan is for inference."""
    case, x, options = fit(engine, family, lengths=(20, 20))
    if kind == "recurrent" and engine.name != "eager":
        with pytest.raises(errors.NotDifferentiable, match=r"chunk_.* for training"):
            gradients(kind, family, x, 2, **options)
        return
    got = gradients(kind, family, x, 2, **options)
    check(got, truth(case, x, "backward"), case.dtype)
    for name, gradient in oracle.GRADIENTS.items():
        if gradient in got:
            assert got[gradient].dtype == x[name].dtype


@every(kinds=("chunk",))
def test_gradients_of_a_packed_batch(engine, family, kind):
    case, x, options = fit(engine, family, lengths=(5, 0, 40))
    check(gradients(kind, family, x, **options), truth(case, x, "backward"), case.dtype)


@every(DELTA)
@pytest.mark.parametrize("heads", [(1, 4), (2, 4)], ids=str)
def test_grouped_heads(engine, family, kind, heads):
    """A query/key head for each block of H // HK value heads."""
    few, many = heads
    case, x, options = fit(engine, family, lengths=(17, 17), H=few, HK=few, HV=many)
    got = call(kind, family, x, 2, output_final_state=True, **options)
    check(got, truth(case, x), case.dtype, names=("O", "final_state"))


@every(("gdn", "kda", "gdp"))
@pytest.mark.parametrize("gate", [F32, BF16, F16, F64], ids=str)
@pytest.mark.parametrize("beta", [F32, BF16, F16, F64], ids=str)
def test_dtypes_of_gates_and_strengths(engine, family, kind, gate, beta):
    """Any floating dtype beside any token dtype, widened and not rounded."""
    case, x, options = fit(engine, family, lengths=(9, 9), dtype=BF16, gate_dtype=gate,
                           beta_dtype=beta)  # fmt: skip
    got = call(kind, family, x, 2, output_final_state=True, **options)
    check(got, truth(case, x), BF16, names=("O", "final_state"))


@every(("gdn", "mamba2"))
@pytest.mark.parametrize("state", [F32, BF16, F16, None], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
def test_final_states_are_wide(engine, family, kind, dtype, state):
    """fp32 (fp64 with fp64 tokens), whatever initial_state is kept in."""
    if dtype not in engine.dtypes:
        pytest.skip("not promised")
    case, x, options = fit(engine, family, lengths=(9, 9), dtype=dtype, state=state)
    if state is not None:
        x["initial_state"] = x["initial_state"].to(state)
    got = call(kind, family, x, 2, output_final_state=True, **options)
    assert got["final_state"].dtype == (F64 if dtype == F64 else F32)
    check(got, truth(case, x), dtype, names=("O", "final_state"))
    assert "final_state" not in call(kind, family, x, 2, **options)


def test_positional_state_and_options_of_the_page():
    """initial_state may come by position; fastmath, autotune and schedules change nothing."""
    x = draw("kda", lengths=(9,), dtype=F32, state=F32)
    given = [batch.tokens("kda", x, 1)[name] for name in ("q", "k", "v", "gate", "beta")]
    want = ops.chunk_kda(*given, initial_state=x["initial_state"])[0]
    for options in (
        {"fastmath": False}, {"autotune": False}, {"kernel_options": {"schedule": "persistent"}},
        {"impl": "reference"}, {"impl": ops.Impl.REFERENCE}, {"impl": ops.Impl.AUTO},
    ):  # fmt: skip
        assert torch.equal(ops.chunk_kda(*given, x["initial_state"], **options)[0], want)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0)], ids=str)
def test_empty_batches(family, shape):
    """No sequences, or no tokens: states pass through."""
    x = draw(family, lengths=(5,) * 2, n=steps(family), dtype=F32, state=F32, d_final_state=False)
    given = batch.tokens(family, x, 2)
    given = {m: t[: shape[0], : t.shape[1] // 5 * shape[1]] if t.dim() > 2 else t
             for m, t in given.items()}  # fmt: skip
    state = x["initial_state"][: shape[0]]
    o, last = function("chunk", family)(**given, initial_state=state, output_final_state=True,
                                        **extra(family))  # fmt: skip
    assert o.shape[:2] == shape
    assert torch.equal(last, state)


@pytest.mark.parametrize("family", ["gdn", "kda"])
def test_gradcheck(family):
    x = draw(family, lengths=(7, 7), H=1, HV=2, K=3, V=2, dtype=F64, state=F64)
    given = batch.tokens(family, x, 2)
    leaves = [given[m].clone().requires_grad_() for m in ("q", "k", "v", "gate", "beta")]
    leaves.append(x["initial_state"].requires_grad_())
    run = function("chunk", family)
    assert torch.autograd.gradcheck(lambda *t: run(*t, output_final_state=True), leaves)


@pytest.mark.parametrize("family", FAMILIES)
def test_not_differentiable_twice(family):
    x = draw(family, lengths=(9,), dtype=F64, n=steps(family))
    given = batch.tokens(family, x, 1)
    leaf = next(iter(given))
    given[leaf] = given[leaf].clone().requires_grad_()
    o, _ = function("chunk", family)(**given, **extra(family))
    (first,) = torch.autograd.grad(o.square().sum(), given[leaf], create_graph=True)
    with pytest.raises(errors.NotDifferentiable, match="twice"):
        torch.autograd.grad(first.square().sum(), given[leaf])


@pytest.mark.parametrize("family", ["gdn", "kda"])
def test_autocast(family):
    """Tokens are cast, gates and strengths not; mixed ones are, too."""
    x = draw(family, lengths=(9, 9), dtype=F32, beta_dtype=BF16, d_final_state=False)
    given = batch.tokens(family, x, 2)
    run = function("chunk", family)
    with torch.autocast("cpu", BF16):
        o, _ = run(**given)
        mixed, _ = run(**given | {"q": given["q"].bfloat16()})
    tokens = {m: given[m].bfloat16() for m in ("q", "k", "v")}
    want, _ = run(**given | tokens | {"beta": given["beta"].float()})
    assert o.dtype == BF16
    assert torch.equal(o, want)
    assert torch.equal(mixed, want)


# Views and offsets ---------------------------------------------------------------------------


def pieces():
    """Batches [B, T, H, K], and whether their rows can be viewed."""
    wide = torch.randn(2, 6, 3 * 8)
    yield "contiguous", torch.randn(2, 6, 2, 4), True
    yield "columns of a projection", wide[..., 8:16].unflatten(2, (2, 4)), True
    yield "tokens of one sequence", torch.randn(1, 9, 2, 4)[:, 2:8], True
    yield "every other token of one", torch.randn(1, 12, 2, 4)[:, ::2], True
    yield "tokens of two sequences", torch.randn(2, 9, 2, 4)[:, 2:8], False
    yield "[T, B, ...] transposed", torch.randn(6, 2, 2, 4).transpose(0, 1), False
    yield "one token each", torch.randn(5, 7, 2, 4)[:, 3:4], True


PIECES = {name: piece for name, *piece in pieces()}


@pytest.mark.parametrize("name", PIECES)
def test_rows_are_views_where_strides_allow(name):
    x, viewed = PIECES[name]
    rows = dense.rows(x)
    assert torch.equal(rows, x.reshape(-1, 2, 4))
    assert (rows.data_ptr() == x.data_ptr()) == viewed, name


@pytest.mark.parametrize("family", FAMILIES)
def test_strided_batches(family):
    """Slices along T of several sequences, transposed and expanded ones give the same."""
    x = draw(family, lengths=(12, 12), n=1, dtype=F32)
    given = batch.tokens(family, x, 2)
    run = function("chunk", family)
    want, _ = run(**given, **extra(family, 1))
    for change in (
        lambda t: torch.cat([torch.full_like(t, torch.nan), t], 1)[:, t.shape[1] :],
        lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    ):
        views = {m: change(t) if t.dim() > 2 else t for m, t in given.items()}
        assert torch.equal(run(**views, **extra(family, 1))[0], want)


def test_offsets_are_kept_and_bounded():
    like = torch.zeros(1)
    a = dense.offsets(3, 5, like)
    assert a.tolist() == [0, 5, 10, 15]
    assert dense.offsets(3, 5, like) is a
    with torch.inference_mode():
        b = dense.offsets(3, 7, like)
    assert not b.is_inference()
    for length in range(2 * dense.CAPACITY):
        dense.offsets(1, length, like)
    assert len(dense._OFFSETS) <= dense.CAPACITY
    assert dense.offsets(3, 5, like) is not a
    assert dense.offsets(2**16, 2**16, like.to("meta")).dtype == torch.int64


def test_offsets_from_many_threads():
    """More shapes than are kept, from threads that race: every one gets its own numbers."""
    wrong = []

    def work(seed):
        for i in range(600):
            length = (i * 7 + seed) % 400
            if dense.offsets(2, length, torch.zeros(1)).tolist() != [0, length, 2 * length]:
                wrong.append(length)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_a_captured_dense_batch(family):
    """Capture without a warm offsets cache, evict everything, replay on other values."""
    x = to("cuda", draw(family, lengths=(32, 32), n=steps(family), K=64, V=64, dtype=BF16))
    given = batch.tokens(family, x, 2)
    run = function("chunk", family)
    with torch.no_grad():
        run(**given, **extra(family))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o, _ = run(**given, **extra(family))
        for length in range(300):
            dense.offsets(1, length, o)
        for t in given.values():
            if t.dim() > 2:
                t.copy_(t.flip(0))
        graph.replay()
        assert torch.equal(o, run(**given, **extra(family))[0])


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_no_synchronization(family, kind):
    x = to("cuda", draw(family, lengths=(32, 32), n=steps(family), K=64, V=64, dtype=BF16))
    run = function(kind, family)
    for lead in (None, 2):
        given = batch.tokens(family, x, lead)
        with torch.no_grad():
            run(**given, **extra(family))
            torch.cuda.set_sync_debug_mode("error")
            try:
                run(**given, **extra(family))
            finally:
                torch.cuda.set_sync_debug_mode("default")


# Compiled ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_compiled_over_lengths(family, kind, packed):
    """fullgraph, one more graph once T is dynamic, then none; gradients, too."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    run = function(kind, family)

    def step(given):
        return run(**given, output_final_state=True, **extra(family))

    compiled = torch.compile(step, backend=counter, fullgraph=True)
    counts = []
    for T in (20, 30, 40, 64, 12):
        lengths = (T - 3, 3) if packed else (T, T)
        x = draw(family, lengths=lengths, n=steps(family), dtype=F32, state=F32)
        given = batch.tokens(family, x, None if packed else 2) | {
            "initial_state": x["initial_state"]
        }
        results = []
        for f in (compiled, step):
            leaves = {m: t.clone().requires_grad_() for m, t in given.items() if m != "cu_seqlens"}
            o, last = f(given | leaves)
            grads = torch.autograd.grad(o.sum() + last.square().sum(), list(leaves.values()))
            results.append((o, last, *grads))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)
        counts.append(counter.frame_count)
    assert counts[-1] == counts[1], "compiled again for another length"
    torch._dynamo.reset()


# Refused -------------------------------------------------------------------------------------


X = draw("gdn", lengths=(6, 6), H=1, HV=2, K=8, V=4, dtype=F32, d_final_state=False)
GIVEN = batch.tokens("gdn", X, 2)
ONE = {name: t[:1] for name, t in GIVEN.items()}


def halved(name, axis):
    return {name: GIVEN[name].narrow(axis, 0, GIVEN[name].shape[axis] // 2)}


BAD = {
    "k of another batch": (halved("k", 0), errors.ShapeMismatch, r"\.k: .*B = 2, got 1"),
    "k as many rows, other shape": (
        {"k": GIVEN["k"].view(4, 3, 1, 8)}, errors.ShapeMismatch, r"\.k: .*B = 2, got 4",
    ),
    "v shorter": (halved("v", 1), errors.ShapeMismatch, r"\.v: .*T = 6, got 3"),
    "gate per channel": (
        {"gate": torch.zeros(2, 6, 2, 8)}, errors.ShapeMismatch, r"\.gate: .*\[B, T, H\]",
    ),
    "beta of other heads": (halved("beta", 2), errors.ShapeMismatch, r"\.beta: .*H = 2, got 1"),
    "k of another size": (halved("k", 3), errors.ShapeMismatch, r"\.k: .*K = 8, got 4"),
    "q packed": ({"q": GIVEN["q"][0]}, errors.ShapeMismatch, r"\.q: .*\[B, T, HK, K\]"),
    "more queries than values": (
        {"q": torch.ones(2, 6, 4, 8), "k": torch.ones(2, 6, 4, 8)},
        errors.ShapeMismatch, r"H=2 with HK=4",
    ),
    "v fp16": ({"v": GIVEN["v"].half()}, errors.DtypeMismatch, r"\.v: .*float32.*float16"),
    "q int": ({"q": GIVEN["q"].int()}, errors.DtypeMismatch, r"\.q: .*int32"),
    "beta int": ({"beta": GIVEN["beta"].int()}, errors.DtypeMismatch, r"\.beta: .*int32"),
    "gate missing": ({"gate": None}, errors.DtypeMismatch, r"\.gate: .*NoneType"),
    "q missing": ({"q": None}, errors.DtypeMismatch, r"\.q: .*NoneType"),
    "state fp64": (
        {"initial_state": torch.zeros(2, 2, 4, 8, dtype=F64)}, errors.DtypeMismatch,
        r"\.initial_state: .*float64",
    ),
    "state for another N": (
        {"initial_state": torch.zeros(3, 2, 4, 8)}, errors.ShapeMismatch,
        r"\.initial_state: .*N = 2, got 3",
    ),
    "state K-major": (
        {"initial_state": torch.zeros(2, 2, 8, 4)}, errors.ShapeMismatch, r"\.initial_state: ",
    ),
    "offsets of a dense batch": (
        {"cu_seqlens": torch.tensor([0, 12])}, errors.RuleBroken, r"\.cu_seqlens: .*B = 1",
    ),
    "offsets that start late": (
        ONE | {"cu_seqlens": torch.tensor([1, 6])}, errors.RuleBroken, r"\.cu_seqlens: ",
    ),
    "float offsets": (
        ONE | {"cu_seqlens": torch.tensor([0.0, 6.0])}, errors.DtypeMismatch, r"\.cu_seqlens: ",
    ),
    "offsets of rank 2": (
        ONE | {"cu_seqlens": torch.tensor([[0, 6]])}, errors.ShapeMismatch, r"\.cu_seqlens: ",
    ),
    "scale": ({"scale": "big"}, errors.InvalidOption, r"\.scale: "),
    "impl": ({"impl": "fusd"}, errors.InvalidOption, r"\.impl: .*'fused'"),
    "fused on a CPU": ({"impl": "fused"}, errors.PlanNotOffered, r"impl='reference'"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", BAD)
def test_bad_calls(kind, what):
    """Typed, in the function's names; the next good call works."""
    changes, error, pattern = BAD[what]
    run = function(kind, "gdn")
    with pytest.raises(error, match=rf"^{kind}_gdn.*{pattern}") as raised:
        run(**GIVEN | changes)
    assert str(raised.value).count(f"{kind}_gdn") == 1
    assert run(**GIVEN)[0].shape == (2, 6, 2, 4)


def test_unknown_arguments():
    for name in ("chunk_size", "Scale", "use_qk_l2norm"):
        with pytest.raises(TypeError, match=name):
            ops.chunk_gdn(**GIVEN, **{name: 1})


OPTIONS = {
    "unknown": ({"backends": "fused"}, errors.InvalidOption, "backends"),
    "value": ({"backend": "triton"}, errors.InvalidOption, "backend"),
    "type": ({"split_forward": 1}, errors.InvalidOption, "split_forward"),
    "split without cudnn": ({"split_forward": True}, errors.RuleBroken, "cudnn"),
    "split": ({"backend": "cudnn", "split_backward": True}, errors.NotSupported, "exact"),
    "GDN has no schedule": ({"schedule": "auto"}, errors.InvalidOption, "schedule"),
}


@pytest.mark.parametrize("what", OPTIONS)
def test_bad_kernel_options(what):
    options, error, pattern = OPTIONS[what]
    with pytest.raises(error, match=pattern):
        ops.chunk_gdn(**GIVEN, kernel_options=options)
    with pytest.raises(errors.RuleBroken, match="reference"):
        ops.chunk_gdn(**GIVEN, impl="reference", kernel_options={"backend": "fused"})


@pytest.mark.parametrize(
    ("engine", "options", "pin"),
    [
        ("eager", None, "gdn_eager"), ("triton", None, None), ("triton", {}, None),
        ("triton", {"split_forward": False}, None), ("triton", {"backend": "fused"}, "gdn_triton"),
        ("frost", {"backend": "cudnn"}, "gdn_frost"),
    ],
)  # fmt: skip
def test_what_a_call_is_pinned_to(engine, options, pin):
    """A fused call that asks for no backend leaves the choice to the selection."""
    assert kinds.pin_of("gdn", engine, options) == pin


# The page ------------------------------------------------------------------------------------


TAIL = "cu_seqlens=None, scale=None, output_final_state=False"
PAGE = {
    "chunk_gdn": f"q, k, v, gate, beta, initial_state=None, *, {TAIL}, impl, kernel_options=None",
    "chunk_kda": f"q, k, v, gate, beta, initial_state=None, *, {TAIL}, fastmath=True, "
    "autotune=True, impl, kernel_options=None",
    "recurrent_gdn": f"q, k, v, gate, beta, initial_state=None, *, {TAIL}, state_indices=None, "
    "has_initial_state=None, autotune=True, impl",
    "recurrent_kda": f"q, k, v, gate, beta, initial_state=None, *, {TAIL}, state_indices=None, "
    "has_initial_state=None, autotune=True, impl",
    "paged_chunk_gdn": "q, k, v, gate, beta, state_cache, state_indices, *, cu_seqlens=None, "
    "has_initial_state=None, scale=None, kernel_options=None",
    "paged_chunk_kda": "q, k, v, gate, beta, state_cache, state_indices, *, cu_seqlens=None, "
    "has_initial_state=None, autotune=True, kernel_options=None, replay_state=None",
    "gate_transform": "raw_gate, A_log, dt_bias, *, kind, lower_bound=None, fastmath=True, impl",
    "bound_gate": "raw_gate, A_log, dt_bias, *, lower_bound=-5.0, fastmath=True, impl",
    "active_token_mask": "x, cu_seqlens",
    "mask_inactive_tokens": "x, active_mask",
    "mask_inactive_token_gradients": "x, active_mask",
}


# What we have beyond it, after its arguments and by keyword.
BEYOND = {"recurrent_gdn": ", states=None", "recurrent_kda": ", states=None"}


@pytest.mark.parametrize("name", PAGE)
def test_signatures_are_the_page_s(name):
    """Names, order, kinds and defaults; only impl's default is another."""
    found, star = [], False
    for p in inspect.signature(getattr(ops, name)).parameters.values():
        if p.kind is p.KEYWORD_ONLY and not star:
            found.append("*")
            star = True
        if p.name == "impl":
            assert p.default is ops.Impl.AUTO
        plain = p.default is p.empty or p.name == "impl"
        found.append(p.name if plain else f"{p.name}={p.default}")
    assert ", ".join(found) == PAGE[name] + BEYOND.get(name, "")


def test_names_are_where_the_page_has_them():
    for name in ("chunk_gdn", "paged_chunk_gdn", "recurrent_gdn"):
        assert getattr(ops.gdn, name) is getattr(ops, name)
    for name in ("chunk_kda", "paged_chunk_kda", "recurrent_kda", "bound_gate",
                 "active_token_mask", "mask_inactive_tokens",
                 "mask_inactive_token_gradients"):  # fmt: skip
        assert getattr(ops.kda, name) is getattr(ops, name)
    assert ops.Impl("fused") is ops.Impl.FUSED
    assert ops.GateTransform("bounded") is ops.GateTransform.BOUNDED
    assert set(FORMS) == set(FAMILIES)
    assert callable(ops.mamba2), "the operator, not a module"


@pytest.mark.parametrize("family", FAMILIES)
def test_one_sequence_whole_and_in_pieces(family):
    """Final states of a call enter the next one."""
    x = draw(family, lengths=(40,), n=steps(family), dtype=F64)
    given = batch.tokens(family, x, 1)
    whole = function("chunk", family)(**given, output_final_state=True, **extra(family))
    state, outputs = None, []
    for rows in (slice(0, 13), slice(13, 14), slice(14, 40)):
        part = {m: t.unflatten(1, (40, -1))[:, rows].flatten(1, 2) if t.dim() > 2 else t
                for m, t in given.items()}  # fmt: skip
        kind = "recurrent" if rows.stop == 14 else "chunk"
        o, state = function(kind, family)(**part, initial_state=state, output_final_state=True,
                                          **extra(family))  # fmt: skip
        outputs.append(o)
    want = {"O": whole[0], "final_state": whole[1]}
    check({"O": torch.cat(outputs, 1), "final_state": state}, want, F64)


def test_the_same_bits_as_the_operator():
    """A function is its operator on packed rows."""
    x = draw("kda", lengths=(30, 30), dtype=F32, state=F32)
    got = call("chunk", "kda", x, 2, output_final_state=True)
    o, last = ops.kimi_delta_attention(
        *(x[m] for m in ("q", "k", "v", "g", "beta", "cu_seqlens")),
        initial_state=x["initial_state"], output_final_state=True,
    )  # fmt: skip
    check_bitwise(got, {"O": o, "final_state": last})
