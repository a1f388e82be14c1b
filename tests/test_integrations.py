"""Doors for other libraries' code: FLA's functions against a plain recurrence in FLA's own
convention, and layers of the transformers package with our functions in place of theirs."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import small
import torch
import torch.nn.functional as F
from tolerance import BF16, F32, F64, relative_error

from lagraph import errors, ops, registry
from lagraph.integrations import fla
from lagraph.integrations import transformers as door

# FLA --------------------------------------------------------------------------------------------


def plain(q, k, v, g, b, w, scale=None, state=None, cu=None, steps=1):
    """The recurrence in FLA's convention, a state [K, V] a head, token by token.

    S = exp(g) S; S += k (w v - (b k)^T S); o = scale q^T S. All [B, T, HV, ...]; k, v, b, w have
    `steps` rows for each token. Returns o and the final states [N, HV, K, V].
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    heads = v.shape[2]
    q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    spans = [(n, 0, q.shape[1]) for n in range(q.shape[0])]
    if cu is not None:
        spans = [(0, a, z) for a, z in itertools.pairwise(cu.tolist())]
    rows, last = [], []
    for n, (batch, begin, end) in enumerate(spans):
        S = q.new_zeros(heads, q.shape[-1], v.shape[-1]) if state is None else state[n]
        for t in range(begin, end):
            S = S * g[batch, t].exp()[..., None]
            for j in range(t * steps, (t + 1) * steps):
                kj, bk = k[batch, j], b[batch, j] * k[batch, j]
                S = S + kj[..., None] * (
                    w[batch, j] * v[batch, j] - (bk[..., None] * S).sum(-2)
                ).unsqueeze(-2)
            rows.append(scale * (q[batch, t][..., None] * S).sum(-2))
        last.append(S)
    return torch.stack(rows).unflatten(0, q.shape[:2]), torch.stack(last)


B, T, H, HV, K, V, N = 2, 21, 2, 4, 16, 24, 3
FAMILIES = {
    "chunk_gated_delta_rule": "gdn", "fused_recurrent_gated_delta_rule": "gdn",
    "chunk_kda": "kda", "fused_recurrent_kda": "kda", "chunk_gdn2": "gdn2",
    "chunk_gated_delta_product": "gdp",
}  # fmt: skip
DIFFERENTIABLE = [name for name in FAMILIES if name.startswith("chunk")]


def draw(family, packed, dtype=F32):
    """Inputs by FLA's names, and offsets: three packed sequences, one of them empty."""
    torch.manual_seed(0)
    batch, length, n = (1, B * T, 2) if packed else (B, T, 2)
    steps = n if family == "gdp" else 1
    heads = HV if family in ("gdn", "kda") else H
    x = {
        "q": torch.randn(batch, length, H, K),
        "k": F.normalize(torch.randn(batch, length * steps, H, K), dim=-1),
        "v": torch.randn(batch, length * steps, heads, V),
        "g": -torch.rand(batch, length, heads, *([K] if family in ("kda", "gdn2") else [])),
        "beta": torch.rand(batch, length * steps, heads),
    }
    if family == "gdn2":
        x["b"], x["w"] = torch.rand(batch, length, heads, K), torch.rand(batch, length, heads, V)
        del x["beta"]
    cu = torch.tensor([0, 17, 17, B * T]) if packed else None
    state = torch.randn(N if packed else B, heads, K, V)
    return {name: t.to(dtype) for name, t in x.items()}, state, cu


def truth(family, x, state, cu, **options):
    """The recurrence on inputs by FLA's names."""
    q, k, v, g = (x[name] for name in ("q", "k", "v", "g"))
    g = g if g.dim() == 4 else g[..., None].expand(*g.shape, K)
    if family == "gdn2":
        b, w = x["b"], x["w"]
    else:
        b, w = (x["beta"][..., None].expand(*x["beta"].shape, n) for n in (K, V))
    return plain(q, k, v, g, b, w, state=state, cu=cu, steps=2 if family == "gdp" else 1, **options)


def call(name, x, **options):
    """The function under test."""
    if FAMILIES[name] == "gdp":
        options["num_householder"] = 2
    return getattr(fla, name)(**x, **options)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_states_and_gradients(name, packed):
    """int64 offsets, an empty sequence, grouped heads, K != V, a scale."""
    family = FAMILIES[name]
    x, state, cu = draw(family, packed)
    leaves = {n: t.requires_grad_() for n, t in (x | {"state": state}).items()}
    o, last = call(
        name, {n: leaves[n] for n in x}, initial_state=leaves["state"], output_final_state=True,
        cu_seqlens=cu, scale=0.3,
    )  # fmt: skip
    exact = {n: t.detach().to(F64).requires_grad_() for n, t in leaves.items()}
    wanted = truth(family, exact, exact["state"], cu, scale=0.3)
    assert last.shape == state.shape
    assert o.dtype == F32
    seeds = [torch.randn_like(t) for t in (o, last)]
    assert relative_error(o, wanted[0]) < 1e-5
    assert relative_error(last, wanted[1]) < 1e-5
    got = torch.autograd.grad([o, last], list(leaves.values()), seeds)
    want = torch.autograd.grad(wanted, list(exact.values()), [s.to(F64) for s in seeds])
    for n, a, b in zip(leaves, got, want, strict=True):
        assert relative_error(a, b) < 1e-4, n


@pytest.mark.parametrize("name", FAMILIES)
def test_no_final_state_unless_asked_for(name):
    x, _, _ = draw(FAMILIES[name], False)
    o, last = call(name, x)
    assert last is None
    assert relative_error(o, truth(FAMILIES[name], x, None, None)[0]) < 1e-5


@pytest.mark.parametrize("name", [n for n in FAMILIES if n != "chunk_gated_delta_product"])
def test_states_can_have_v_first(name):
    """The same numbers turned; and a state that comes back is taken again without a copy."""
    x, state, _ = draw(FAMILIES[name], False)
    o, last = call(name, x, initial_state=state, output_final_state=True)
    turned = state.mT.contiguous()
    other, swapped = call(
        name, x, initial_state=turned, output_final_state=True, state_v_first=True
    )
    assert torch.equal(o, other)
    assert torch.equal(last.mT, swapped)
    assert swapped.is_contiguous()
    assert fla._turn(name, last, last.shape[1], K, V, False).data_ptr() == last.data_ptr()


@pytest.mark.parametrize("name", FAMILIES)
def test_norm_in_kernel(name):
    x, state, _ = draw(FAMILIES[name], False)
    unit = x | {n: x[n] * (x[n].square().sum(-1, True) + 1e-6).rsqrt() for n in ("q", "k")}
    o, last = call(name, x, initial_state=state, output_final_state=True,
                   use_qk_l2norm_in_kernel=True)  # fmt: skip
    want = truth(FAMILIES[name], unit, state, None)
    assert relative_error(o, want[0]) < 1e-5
    assert relative_error(last, want[1]) < 1e-5


@pytest.mark.parametrize(("dtype", "bound"), [(F32, 1e-5), (F64, 1e-12)], ids=str)
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("name", [n for n in FAMILIES if FAMILIES[n] in ("gdn", "kda")])
def test_strength_in_kernel(name, double, dtype, bound):
    """Logits are not rounded on the way, fp64 ones neither."""
    x, _, _ = draw(FAMILIES[name], False, dtype)
    x["beta"] = torch.randn_like(x["beta"])
    o, _ = call(name, x, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=double)
    given = x | {"beta": x["beta"].sigmoid() * (2 if double else 1)}
    assert relative_error(o, truth(FAMILIES[name], given, None, None)[0]) < bound


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["softplus", "bounded", "no rate"])
@pytest.mark.parametrize("name", [n for n in FAMILIES if FAMILIES[n] != "gdp"])
def test_gate_in_kernel(name, kind, bias):
    """Raw gates; KDA's bias is flat, as FLA keeps it."""
    family = FAMILIES[name]
    if family == "gdn" and kind != "softplus":
        pytest.skip("GDN has no bounded gate in FLA")
    x, _, _ = draw(family, False)
    x["g"] = torch.randn_like(x["g"])
    heads = x["v"].shape[2]
    rate = torch.randn(heads) * 0.3
    shift = torch.randn(x["g"].shape[2:]) if bias else torch.zeros(x["g"].shape[2:])
    options = {"use_gate_in_kernel": True, "A_log": None if kind == "no rate" else rate}
    if bias:
        options["dt_bias"] = shift.flatten()
    a = rate.exp() if kind != "no rate" else torch.ones(heads)
    a = a if family == "gdn" else a[:, None]
    if kind == "softplus":
        g = -a * F.softplus(x["g"] + shift)
    else:
        options["lower_bound"] = -4.0
        g = -4.0 * torch.sigmoid(a * (x["g"] + shift))
    o, _ = call(name, x, **options)
    assert relative_error(o, truth(family, x | {"g": g}, None, None)[0]) < 1e-5


@pytest.mark.parametrize("with_g", [False, True])
def test_gate_by_key_channel(with_g):
    x, _, _ = draw("gdn", False)
    gk = -torch.rand(B, T, HV, K)
    g = x.pop("g")
    o, _ = fla.fused_recurrent_gated_delta_rule(**x, g=g if with_g else None, gk=gk)
    total = gk + g[..., None] if with_g else gk
    assert relative_error(o, truth("kda", x | {"g": total}, None, None)[0]) < 1e-5


def test_gates_and_strengths_that_are_absent():
    """No gate does not decay; no strength is 1."""
    x, _, _ = draw("gdn", False)
    flat = x | {"g": torch.zeros_like(x["g"]), "beta": torch.ones_like(x["beta"])}
    o, _ = fla.fused_recurrent_gated_delta_rule(x["q"], x["k"], x["v"])
    assert relative_error(o, truth("gdn", flat, None, None)[0]) < 1e-5
    x, _, _ = draw("gdp", False)
    o, _ = fla.chunk_gated_delta_product(**(x | {"g": None}), num_householder=2)
    assert relative_error(o, truth("gdp", x | {"g": 0 * x["g"]}, None, None)[0]) < 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_sixteen_bits(name):
    """Outputs in the tokens' dtype, states in fp32; gates in whatever they come in."""
    x, state, _ = draw(FAMILIES[name], False, BF16)
    o, last = call(name, x, initial_state=state, output_final_state=True,
                   use_qk_l2norm_in_kernel=True)  # fmt: skip
    assert (o.dtype, last.dtype) == (BF16, F32)
    exact = {n: t.to(F64) for n, t in x.items()}
    exact |= {n: exact[n] * (exact[n].square().sum(-1, True) + 1e-6).rsqrt() for n in ("q", "k")}
    want = truth(FAMILIES[name], exact, state.to(F64), None)
    assert relative_error(o, want[0]) < 1e-2
    assert relative_error(last, want[1]) < 1e-2


OFF = {
    "an unknown name": ({"ouput_final_state": True}, errors.InvalidOption, "Did you mean output_f"),
    "head first": ({"head_first": True}, errors.InvalidOption, r"transpose\(1, 2\)"),
    "an old name": ({"transpose_state_layout": True}, errors.InvalidOption, "state_v_first"),
    "context": ({"cp_context": object()}, errors.NotSupported, "context_parallel"),
    "states between": ({"return_intermediate_states": True}, errors.NotSupported, "checkpoint_"),
    "a state turned": ({"initial_state": torch.zeros(B, HV, V, K)}, errors.ShapeMismatch,
                       "state_v_first=True"),
    "a batch of packed rows": ({"cu_seqlens": torch.tensor([0, T])}, errors.RuleBroken, "Flatten"),
    "double without sigmoid": ({"allow_neg_eigval": True}, errors.RuleBroken, "sigmoid"),
    "a gate without a rate": ({"use_gate_in_kernel": True}, errors.RuleBroken, "A_log"),
    "safe without a bound": ({"use_gate_in_kernel": True, "safe_gate": True}, errors.RuleBroken,
                             "lower_bound"),
    "a short gate": ({"g": torch.zeros(B, T - 1, HV, K)}, errors.ShapeMismatch, "chunk_kda.g"),
    "no tensor": ({"beta": 0.5}, errors.DtypeMismatch, "chunk_kda.beta"),
    "nothing": ({"beta": None}, errors.RuleBroken, "chunk_kda.beta"),
    "a list of offsets": ({"cu_seqlens": [0, T]}, errors.DtypeMismatch, "chunk_kda.cu_seqlens"),
    "a number for a state": ({"initial_state": 0.0}, errors.DtypeMismatch, "initial_state"),
    "a float for a rate": ({"A_log": 1.0}, errors.DtypeMismatch, "chunk_kda.A_log"),
}  # fmt: skip


@pytest.mark.parametrize("case", OFF)
def test_what_is_refused_says_what_to_do(case):
    given, kind, text = OFF[case]
    x, _, _ = draw("kda", False)
    with pytest.raises(kind, match=text):
        fla.chunk_kda(**(x | given))


def test_refused_by_the_recurrent_form():
    x, _, _ = draw("gdn", False)
    with pytest.raises(errors.NotSupported, match="gv"):
        fla.fused_recurrent_gated_delta_rule(**x, gv=x["v"])
    with pytest.raises(errors.ShapeMismatch, match="beta"):
        fla.fused_recurrent_gated_delta_rule(**(x | {"beta": torch.rand_like(x["v"])}))
    with pytest.raises(errors.RuleBroken, match="allow_neg_eigval"):
        fla.fused_recurrent_gated_delta_rule(**x, allow_neg_eigval=True)


def test_arguments_without_effect_change_nothing():
    x, _, _ = draw("kda", True)
    cu = torch.tensor([0, 17, B * T])
    o, _ = fla.chunk_kda(**x, cu_seqlens=cu)
    other, _ = fla.chunk_kda(
        **x, cu_seqlens=cu, cu_seqlens_cpu=cu, chunk_size=32, disable_recompute=True,
        use_graph=True, max_num_seqs=2, head_first=False,
    )  # fmt: skip
    assert torch.equal(o, other)


def test_signatures_stay_visible():
    """The guard for unknown names keeps names and defaults for `help` and editors."""
    for name in fla.__all__:
        assert "initial_state" in inspect.signature(getattr(fla, name)).parameters


@pytest.mark.parametrize("name", FAMILIES)
def test_one_compiled_graph(name):
    """Forward and backward without a break."""
    x, state, _ = draw(FAMILIES[name], False)
    leaves = [t.requires_grad_() for t in x.values()]

    def run(*tensors):
        return call(name, dict(zip(x, tensors, strict=True)), initial_state=state,
                    output_final_state=True, use_qk_l2norm_in_kernel=True)  # fmt: skip

    got, want = torch.compile(run, fullgraph=True, backend="aot_eager")(*leaves), run(*leaves)
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) < 1e-6
    grads = [torch.autograd.grad(out[0].square().sum(), leaves) for out in (got, want)]
    for a, b in zip(*grads, strict=True):
        assert relative_error(a, b) < 1e-5


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_the_engine_is_chosen_as_by_our_functions(name, monkeypatch):
    """Pinned to the reference on a CPU; on CUDA not pinned, so that the fastest kernels run."""
    family = registry.family(FAMILIES[name])
    x, _, _ = draw(family.name, False)
    seen = []

    def operator(**given):
        seen.append(given["plan_name"])
        return given["q"], None

    operator.__name__ = family.op
    monkeypatch.setattr(ops, family.op, operator)
    call(name, x)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    call(name, x)
    assert seen == [f"{family.name}_eager", None]


def _fla(name):
    """FLA's own function."""
    module = {
        "gdn": "gated_delta_rule", "gdp": "gated_delta_product", "kda": "kda", "gdn2": "gdn2"
    }  # fmt: skip
    found = pytest.importorskip(f"fla.ops.{module[FAMILIES[name]]}")
    return getattr(found, name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_against_fla_itself(name):
    """One call of each in bf16, arguments as they are."""
    theirs = _fla(name)
    family = FAMILIES[name]
    torch.manual_seed(0)
    steps, channel = (2, [64]) if family == "gdp" else (1, [64])
    x = {
        "q": torch.randn(2, 128, 2, 64), "k": torch.randn(2, 128 * steps, 2, 64),
        "v": torch.randn(2, 128 * steps, 2, 64),
        "g": -torch.rand(2, 128, 2, *(channel if family in ("kda", "gdn2") else [])),
    }  # fmt: skip
    if family == "gdn2":
        x |= {"b": torch.rand(2, 128, 2, 64), "w": torch.rand(2, 128, 2, 64)}
    else:
        x["beta"] = torch.rand(2, 128 * steps, 2)
    x = {n: (F.normalize(t, dim=-1) if n in "qk" else t).cuda() for n, t in x.items()}
    x = {n: t if n == "g" else t.to(BF16) for n, t in x.items()}
    options = {"initial_state": torch.randn(2, 2, 64, 64, device="cuda")}
    options |= {"output_final_state": True}
    if family == "gdp":
        options["num_householder"] = 2
    with torch.no_grad():
        got, want = getattr(fla, name)(**x, **options), theirs(**x, **options)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert relative_error(a, b) < 1e-2


# transformers -----------------------------------------------------------------------------------

transformers = pytest.importorskip("transformers")


MODELS = [name for name in door.MODELS if small.is_there(transformers, name)]
needed = pytest.mark.skipif(
    int(transformers.__version__.partition(".")[0]) < 5,
    reason="the layers of 4.x call no functions",
)


def models(test):
    """For every model, where the package is new enough."""
    return needed(pytest.mark.parametrize("name", MODELS)(test))


ONE_EACH = ["qwen3_next", "kimi_linear", "mamba2"]  # of every set of functions
one_each = pytest.mark.parametrize("name", [name for name in ONE_EACH if name in MODELS])


def make(name, size=16, seed=0):
    torch.manual_seed(seed)
    return small.make(transformers, name, size)


@pytest.fixture
def counts(monkeypatch):
    """How often each of our functions was called; everything is put back afterwards."""
    seen = Counter()

    def counted(model, at, function):
        def run(*args, **kwargs):
            seen[model, at] += 1
            return function(*args, **kwargs)

        return run

    for name, model in door.MODELS.items():
        functions = {at: counted(name, at, f) for at, f in model.functions.items()}
        monkeypatch.setitem(door.MODELS, name, dataclasses.replace(model, functions=functions))
    yield seen
    door.unpatch()


def ids(rows=2, length=37):
    return torch.randint(64, (rows, length), generator=torch.Generator().manual_seed(1))


def train(model, tokens):
    """Logits, and the gradient of every parameter that has one."""
    model.train()
    model.zero_grad()
    out = model(tokens, labels=tokens, use_cache=False)
    out.loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return out.logits.detach(), grads


@torch.no_grad()
def decode(model, tokens, prefill=20, pieces=2):
    """Logits of a prefill, of another piece on top of the cache, and of single tokens."""
    model.eval()
    taken = inspect.signature(inspect.unwrap(model.forward)).parameters
    name = next(n for n in ("cache", "past_key_values", "cache_params") if n in taken)
    cuts = [0, prefill, prefill + pieces, *range(prefill + pieces + 1, tokens.shape[1] + 1)]
    cache, logits = None, []
    for a, b in itertools.pairwise(cuts):
        given = {} if cache is None else {name: cache}
        if "position_ids" in taken:  # Bamba counts every call from 0
            given["position_ids"] = torch.arange(a, b, device=tokens.device).expand(len(tokens), -1)
        out = model(tokens[:, a:b], use_cache=True, **given)
        cache = getattr(out, name)
        logits.append(out.logits)
    return torch.cat(logits, 1)


@models
def test_a_training_step_is_the_same(name, counts):
    model, tokens = make(name), ids()
    logits, grads = train(model, tokens)
    door.patch(name)
    ours, ours_grads = train(model, tokens)
    assert sum(counts.values()) > 0
    assert relative_error(ours, logits) < 1e-5
    assert ours_grads.keys() == grads.keys()
    for parameter, grad in grads.items():
        got = ours_grads[parameter]
        assert got.any() == grad.any()  # none for a router of one expert
        assert not grad.any() or relative_error(got, grad) < 1e-4, parameter


@models
def test_prefill_and_cached_decode_are_the_same(name, counts):
    model, tokens = make(name), ids(length=26)
    want = decode(model, tokens)
    door.patch(name)
    got = decode(model, tokens)
    assert relative_error(got, want) < 1e-5
    with torch.no_grad():
        whole = model(tokens, use_cache=False).logits
    assert relative_error(got, whole) < 1e-4
    called = {at for model_name, at in counts if model_name == name}
    assert called == set(door.MODELS[name].functions), "every function has run"


WAYS = {
    "greedy": {}, "beams": {"num_beams": 2}, "a static cache": {"cache_implementation": "static"},
    "left padding": {"attention_mask": (torch.arange(11) >= torch.tensor([[4], [0]])).long()},
}  # fmt: skip


@models
@pytest.mark.parametrize("way", WAYS)
def test_generate_writes_the_same_tokens(name, way, counts):
    model, tokens = make(name).eval(), ids(length=11)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    want = model.generate(tokens, **options, **WAYS[way])
    door.patch(name)
    assert torch.equal(model.generate(tokens, **options, **WAYS[way]), want)
    assert sum(counts.values()) > 8


@needed
@one_each
def test_a_patched_model_is_one_compiled_graph(name, counts):
    model, tokens = make(name), ids()
    door.patch(name)
    want, grads = train(model, tokens)
    model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    got, ours = train(model, tokens)
    assert relative_error(got, want) < 1e-6
    for parameter, grad in grads.items():
        assert relative_error(ours[parameter], grad) < 1e-5, parameter


@needed
@pytest.mark.parametrize(
    ("name", "device"),
    [(name, "cpu") for name in MODELS]
    + [pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in ONE_EACH if name in MODELS],
)
def test_sixteen_bit_models(name, device, counts):
    """Against the fp32 model: outputs and gradients no worse than with the package's functions.

    Single gradients are ill-conditioned where a norm divides by a product that nearly cancels, for
    either side in turn: the median over parameters and draws is compared.
    """
    tokens, errors_of = ids(length=70).to(device), {"ours": [], "theirs": []}
    for seed in range(3):
        model, exact = make(name, 32, seed).to(device, BF16), make(name, 32).to(device)
        exact.load_state_dict(model.state_dict())
        logits, grads = train(exact, tokens)
        steps = decode(exact, tokens, 60)
        worst = {}
        for side in errors_of:
            if side == "ours":
                door.patch(name)
            got, got_grads = train(model, tokens)
            worst[side] = (
                relative_error(got, logits),
                relative_error(decode(model, tokens, 60), steps),
            )
            errors_of[side] += [
                relative_error(got_grads[n], grads[n]) for n in grads if grads[n].any()
            ]
            door.unpatch(name)
        for a, b in zip(worst["ours"], worst["theirs"], strict=True):
            assert a < 1.5 * b + 1e-2
    ours, theirs = (sorted(found)[len(found) // 2] for found in errors_of.values())
    assert ours < 1.25 * theirs + 2e-3
    assert sum(counts.values()) > 0


@pytest.mark.gpu
@needed
@one_each
def test_on_a_gpu_as_on_a_cpu(name, counts):
    """fp32 with our kernels there, with the package's functions here."""
    model, tokens = make(name, size=32), ids(length=70)
    want, grads = train(model, tokens)
    steps = decode(model, tokens, 60)
    door.patch(name)
    model = model.cuda()
    got, ours = train(model, tokens.cuda())
    assert relative_error(got, want) < 2e-3
    assert relative_error(decode(model, tokens.cuda(), 60), steps) < 2e-3
    for parameter, grad in grads.items():
        assert not grad.any() or relative_error(ours[parameter], grad) < 1e-2, parameter


@models
def test_packed_sequences(name, counts):
    """What the fallbacks refuse: two sequences in one row, kept apart by offsets; seen behind the
    first layer, before attention mixes them."""
    model, tokens, seen = make(name).eval().base_model, ids(1, 30), []
    kind = getattr(importlib.import_module(door.MODELS[name].module), door.MODELS[name].layer)
    layer = next(module for module in model.modules() if isinstance(module, kind))
    layer.register_forward_hook(lambda module, args, out: seen.append(out))
    cu = torch.tensor([0, 13, 30])
    with torch.no_grad():
        for a, b in ((0, 13), (13, 30)):
            model(tokens[:, a:b], use_cache=False)
        door.patch(name)
        model(tokens, use_cache=False, cu_seq_lens_q=cu)
        model(tokens, use_cache=False)
        first, second, packed, mixed = seen
        alone = torch.cat([first, second], 1)
    assert relative_error(packed, alone) < 1e-5
    assert relative_error(mixed, alone) > 1e-3
    with pytest.raises(errors.NotSupported, match="cu_seq_lens_q"):
        model(tokens, use_cache=False, seq_idx=torch.zeros_like(tokens, dtype=torch.int32))


def on_page(page, word):
    """The names of a page's first block with a word in it."""
    text = (Path(__file__).parent.parent / "docs" / page).read_text("utf-8")
    code = next(c for c in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if word in c)
    scope = {"torch": torch}
    exec(code, scope)
    return scope


def qwen_layer(name):
    """The linear layer of a small model, its decay not the one of fresh weights."""
    model = make(name).eval()
    layer = next(m for m in model.modules() if type(m).__name__ == door.MODELS[name].layer)
    with torch.no_grad():
        layer.A_log.normal_()
    return layer


@needed
def test_pools_serve_the_layer_of_a_model():
    """Prefill and decode of docs/serving.md on the projections of Qwen3.5's layer, as it says."""
    layer, x = qwen_layer("qwen3_5"), torch.randn(1, 20, 32)
    page = on_page("serving.md", "def prefill")
    page |= {
        "H": 4, "HK": 2, "K": 16, "V": 16, "weight": layer.conv1d.weight[:, 0],
        "A_log": layer.A_log, "dt_bias": layer.dt_bias, "states": torch.zeros(3, 4, 16, 16),
        "histories": torch.zeros(3, 3, layer.conv_dim),
    }  # fmt: skip
    slot = torch.tensor([2])
    with torch.no_grad():
        want = layer(x)
        rows, a, b = layer.in_proj_qkv(x), layer.in_proj_a(x), layer.in_proj_b(x)
        now = slice(0, 14)
        fresh = torch.tensor([False])
        parts = [page["prefill"](rows[:, now], a[:, now], b[:, now], None, slot, fresh)]
        for t in range(14, 20):
            parts.append(page["decode"](rows[0, [t]], a[:, [t]], b[:, [t]], slot))
        z = layer.in_proj_z(x).view(20, 4, 16)
        o = layer.norm(torch.cat(parts, 1).flatten(0, 2), z.flatten(0, 1)).view(1, 20, -1)
        got = layer.out_proj(o)
    assert relative_error(got, want) < 1e-5


@needed
def test_the_layer_on_the_page_of_operators():
    """The layer of Qwen3-Next that docs/ops.md writes out is the package's."""
    scope, layer = on_page("ops.md", "def qwen3"), qwen_layer("qwen3_next")
    x = torch.randn(2, 33, 32)
    with torch.no_grad():
        want = layer(x)
        got, _ = scope["qwen3_next"](
            x.flatten(0, 1), layer.state_dict(), torch.tensor([0, 33, 66]), 2, 4, 16, 16
        )
    assert relative_error(got.unflatten(0, (2, 33)), want) < 1e-5


def functions(name):
    model = door.MODELS[name]
    module = importlib.import_module(model.module)
    return {at: getattr(module, at) for at in model.functions}


@needed
def test_patching_twice_and_back():
    before = {name: functions(name) for name in MODELS}
    try:
        door.patch("mamba2")
        assert door.patched() == ("mamba2",)
        assert functions("qwen3_next") == before["qwen3_next"]
        door.patch()
        door.patch()
        for name in MODELS:
            assert functions(name) == door.MODELS[name].functions
        door.unpatch("qwen3_next")
        assert functions("qwen3_next") == before["qwen3_next"]
        assert door.patched() == tuple(name for name in MODELS if name != "qwen3_next")
    finally:
        door.unpatch()
        door.unpatch()
    assert {name: functions(name) for name in MODELS} == before
    assert door.patched() == ()


@needed
def test_a_later_replacement_is_left_alone():
    module, before = sys.modules[door.MODELS["mamba2"].module], functions("mamba2")
    try:
        door.patch("mamba2")
        module.mamba2_chunk_scan = print
        door.unpatch()
        assert functions("mamba2") == before | {"mamba2_chunk_scan": print}
    finally:
        door.unpatch()
        module.mamba2_chunk_scan = before["mamba2_chunk_scan"]


def test_an_unknown_model_is_refused():
    for function in (door.patch, door.unpatch):
        with pytest.raises(errors.InvalidOption, match=r"qwen3_next, .*mamba2"):
            function("qwen4")
    assert door.patched() == ()


@needed
def test_a_version_without_the_functions_is_refused(monkeypatch):
    """Gone, or no longer called by the layer: in either case nothing is changed."""
    before = {name: functions(name) for name in MODELS}
    module = importlib.import_module(door.MODELS["mamba2"].module)
    others = tuple(name for name in MODELS if name != "mamba2")
    for lack in (
        lambda change: change.delattr(module, "mamba2_chunk_scan"),
        lambda change: change.setattr(module.Mamba2Mixer, "forward", lambda self, x: x),
    ):
        with monkeypatch.context() as change:
            lack(change)
            with pytest.raises(errors.MissingBackend, match=r"transformers .* calls no function"):
                door.patch("qwen3_next", "mamba2")
            assert functions("qwen3_next") == before["qwen3_next"]
            assert door.patch() == others, "unnamed, it is left alone"
            door.unpatch()
    assert {name: functions(name) for name in MODELS} == before
    assert door.patched() == ()


@needed
def test_a_version_without_the_model_is_refused(monkeypatch):
    """An older package: a model that is named is refused, another is patched all the same."""
    gone = dataclasses.replace(door.MODELS["mamba2"], module="transformers.models.none.modeling")
    monkeypatch.setitem(door.MODELS, "mamba2", gone)
    with pytest.raises(errors.MissingBackend, match=r"transformers \d.* has no .*models.none"):
        door.patch("mamba2")
    monkeypatch.setattr(door, "MODELS", {"mamba2": gone})
    with pytest.raises(errors.MissingBackend, match=r"models\.none"):
        door.patch()


def test_every_model_has_a_small_one():
    """So that a model of the table has been run."""
    assert set(small.SMALL) == set(door.MODELS)


def test_without_the_package():
    """Importing lagraph and the doors loads neither package; patch() says what it needs."""
    code = """
import sys
import lagraph, lagraph.ops
assert "lagraph.integrations" not in sys.modules
from lagraph.integrations import fla, transformers as door
assert "transformers" not in sys.modules and "fla" not in sys.modules
sys.modules["transformers"] = None
try:
    door.patch()
except lagraph.MissingBackend as error:
    print(error)
door.unpatch()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Install transformers" in done.stdout


def test_values_that_differ_within_a_head_are_refused():
    state, x = torch.zeros(2, 4, 16, 8), torch.randn(2, 4, 16)
    dt, A = torch.randn(2, 4, 1).expand(2, 4, 16), -torch.rand(4, 16, 8)
    B_, C_ = torch.randn(2, 2, 8), torch.randn(2, 2, 8)
    with pytest.raises(errors.NotSupported, match="A differs"):
        door._update(state, x, dt, A, B_, C_)
    assert not state.any()
