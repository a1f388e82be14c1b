"""The Triton engine's plans under Triton's interpreter, on the CPU, against the fp64 oracle.

Not collected by itself: `test_triton.py` runs it in a process that has TRITON_INTERPRET=1 from
the start. The interpreter multiplies bf16 wrongly, so dtypes here are fp16 and fp32.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache

import oracle
import pytest
import torch
from cases import BF16, CASES, F16, F32, Case, written
from draw import HOSTILE, hostile
from oracle import FAMILIES
from tolerance import check, check_bitwise, check_hostile

from lagraph import infer, registry
from lagraph.plan import problem_of

assert os.environ.get("TRITON_INTERPRET") == "1"

DELTA = [family for family in FAMILIES if family != "mamba2"]
ENGINE = registry.load("lagraph.engines.triton.engine:ENGINE")
TABLE = registry.load("lagraph.engines.triton.support:SUPPORT")


def run(family, direction, x, knobs=None, arch=90, **options):
    """A plan on CPU tensors, its outputs by name; fresh outputs hold NaN."""
    node = registry.family(family).node(direction)
    known = {attr.name for attr in node.attrs}
    chosen = node.options({name: value for name, value in options.items() if name in known})
    ins = [x.get(name) for name in node.input_names]
    metas = [None if t is None else infer.Meta(t.shape, t.dtype) for t in ins]
    bound = infer.bind(node, metas, chosen)
    problem = replace(problem_of(node, bound, chosen, metas), device="cuda", arch=arch)
    # A plan is tested here before the engine offers it.
    assert not [why for why in TABLE.reasons(problem) if not why.startswith("does not serve")]
    outs = {
        name: torch.full(shape, float("nan"), dtype=dtype)
        for name, (shape, dtype) in bound.outputs.items()
    }
    if "state_indices" in x and "final_state" in outs:
        outs["final_state"] = x["initial_state"]
    plan = ENGINE.plan(problem, knobs or {})
    work = torch.full(
        (plan.workspace_size(x["g"].shape[0], len(x["cu_seqlens"]) - 1),), 255, dtype=torch.uint8
    )
    plan.run(ins, [outs.get(name) for name in node.output_names], work)
    return outs


WORDS = (
    "ragged", "ends early", "no sequences", "only empty", "grouped", "fp16", "mixed gates",
    "strong gates", "linear gates", "safe gates", "everything", "guard", "n=3", "token-major",
    "D and z", "checkpoints", "scale", "negative",
)  # fmt: skip


MANY_HEADS = ("grouped", "everything", "ragged")


def shaped(case):
    """The case at the head dims that the engine serves, and a dtype that the interpreter does.

    Heads are programs, which only some cases have to tell apart: others have one.
    """
    dtype = case.dtype if case.dtype in (F32, F16) else F16 if case.dtype == BF16 else F32
    heads = case.H if any(word in case.what for word in MANY_HEADS) else 1
    return replace(case, K=16, V=16 if case.V <= 16 else 32, dtype=dtype, H=heads)


def chosen():
    """The cases that differ, once they are shaped."""
    quick = os.environ.get("LAGRAPH_TEST_ALL") != "1"
    seen = []
    for case in CASES:
        if quick and (not any(word in case.what for word in WORDS) or sum(case.lengths) > 150):
            continue
        made = shaped(case)
        if replace(made, what="") not in seen:
            seen.append(replace(made, what=""))
            yield pytest.param(made, id=case.id)


@pytest.mark.parametrize("case", list(chosen()))
def test_forward(case):
    options = case.call_options()
    got = run(case.family, "forward", case.draw(), **options)
    want = case.truth("forward")
    got = {name: written(case, name, value) for name, value in got.items()}
    want = {name: written(case, name, want[name]) for name in got}
    check(got, want, case.dtype, "cuda")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("what", ["ragged", "everything", "mixed gates"])
def test_summary(family, what):
    case = shaped(next(c for c in CASES if c.id == f"{family}-{what}"))
    got = run(family, "summary", case.draw(), output_transition=True, **case.call_options())
    check(got, case.truth("summary"), case.dtype, "cuda")


def one_head(x):
    """The first head of a draw."""
    cut = {"cu_seqlens": slice(None), "a": slice(1)}
    return {name: t[cut[name]] if name in cut else t[:, :1].contiguous() for name, t in x.items()}


@pytest.mark.parametrize("gate", ["zero", "slow"])
@pytest.mark.parametrize("split", [0, 1, 2])
@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("family", FAMILIES)
def test_hostile(family, kind, split, gate, request):
    """Split operands hold the bound everywhere; single ones, the default without
    allow_neg_eigval, hold it for beta up to 1."""
    if family == "mamba2" and kind.startswith("beta"):
        pytest.skip("Mamba-2 has no beta")
    if split and (family == "mamba2" or not kind.startswith("beta")):
        pytest.skip("the hardest kinds only")
    if kind == "beta 2" and not split:
        request.applymarker(pytest.mark.xfail(reason="beta 2 needs split operands", strict=False))
    x = one_head(hostile(kind, family, lengths=(130,), K=16, V=16, dtype=F16, gate=gate))
    options = {"num_householder": 1} if family == "gdp" else {}
    got = run(family, "forward", x, {"split": split}, output_final_state=True, **options)
    want = oracle.forward(family, x, **options)
    low = oracle.forward(family, x, round_state_to=F16, **options)
    check_hostile(got, want, low, F16, ("O", "final_state"))


@pytest.mark.parametrize("gate", ["zero", "slow"])
@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("family", DELTA)
def test_hostile_gradients(family, split, repeated, gate):
    """Of split operands, beta 2: also keys that are all the same."""
    x = one_head(hostile("beta 2", family, lengths=(130,), K=16, V=16, dtype=F16, gate=gate))
    if repeated:
        x["k"] = x["k"][:1].expand_as(x["k"]).contiguous()
    options = {"num_householder": 1} if family == "gdp" else {}
    got = run(family, "backward", x, {"split": split}, **options)
    want = oracle.backward(family, x, **options)
    low = oracle.backward(family, x, round_state_to=F16, **options)
    check_hostile(got, want, low, F16)


# Of a chunk of 32 steps: its middle serves all, only those of its blocks do, none does.
STEPS = {"near": -1.7, "near blocks": -5.0, "far": -20.0}


def stepped(family, dtype, step, tokens):
    """A draw whose gates are about that strong."""
    x = Case(family, "", lengths=(tokens,), H=1, K=32, V=16, dtype=dtype).draw()
    spread = torch.rand(x["g"].shape, generator=torch.Generator().manual_seed(5))
    return {**x, "g": STEPS[step] * (0.5 + spread)}


def quiet(family, dtype, step, at):
    """The draw whose gates change, without gradients from the token on."""
    x = stepped(family, dtype, step, 45)
    x["dO"][at:] = 0.0
    x.pop("d_final_state", None)
    return x


@cache
def unchanged(family, direction, dtype, step, at):
    """What the draw gives as it is; several changes are compared with it."""
    return run(family, direction, quiet(family, dtype, step, at))


@pytest.mark.parametrize("to", [0.0, -60.0])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("dtype", "at"), [(F16, 5), (F16, 40), (F32, 5)], ids=["fp16-5", "fp16-40", "fp32-5"]
)
@pytest.mark.parametrize("family", ["kda", "gdn2"])
def test_the_future_changes_nothing(family, dtype, at, step, to):
    """B05: gates from a token on leave what comes before alone, to the bit, and its gradients."""
    later = quiet(family, dtype, step, at)
    later["g"][at] = to
    later["g"][at + 2 :] *= 0.5
    a = unchanged(family, "forward", dtype, step, 5)["O"]  # the token matters to gradients only
    b = run(family, "forward", later)["O"]
    check_bitwise({"O": a[:at]}, {"O": b[:at]})
    if to == -60.0 and step != "far":
        return  # a block's middle no longer serves it: gradients of the block are made otherwise
    a, b = unchanged(family, "backward", dtype, step, at), run(family, "backward", later)
    for name in ("dQ", "dK", "dV", "dG", "dBeta", "dW"):
        if name in a:
            check_bitwise({name: a[name][:at]}, {name: b[name][:at]})


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", [F16, F32], ids=["fp16", "fp32"])
@pytest.mark.parametrize("family", ["kda", "gdn2"])
def test_a_replayed_chunk(family, dtype, step):
    """Zero drift: the outputs of a chunk of which only the first rows are filled yet."""
    x = stepped(family, dtype, step, 64)
    whole = run(family, "forward", x)["O"]
    for count in (1, 6, 13, 30, 41):
        y = dict(x)
        for name in ("q", "k", "v", "g", "beta", "w"):
            if name in x:
                y[name] = torch.cat((x[name][:count], torch.zeros_like(x[name][count:])))
        got = run(family, "forward", y)["O"]
        check_bitwise({"O": got[:count]}, {"O": whole[:count]})


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("tokens", [20, 32, 64])  # beyond two such chunks, NaN is possible
@pytest.mark.parametrize("family", ["gdn", "kda", "gdp"])
def test_growing_states(family, tokens):
    """B35: gates of +5 leave fp32, for infinity and not for NaN, and zeros stay zeros."""
    x = one_head(Case(family, "", lengths=(tokens,), K=16, V=16, dtype=F32, state=F32).draw())
    x["beta"] = torch.zeros_like(x["beta"])
    x["g"] = torch.full_like(x["g"], 5.0)
    x["initial_state"] = torch.ones_like(x["initial_state"])
    x["initial_state"][..., ::2] = 0.0
    options = {"num_householder": 1} if family == "gdp" else {}
    got = run(family, "forward", x, output_final_state=True, **options)["final_state"]
    assert (got[..., ::2] == 0.0).all()
    want = oracle.forward(family, x, **options)["final_state"].float()
    assert torch.equal(got.isinf(), want.isinf())


def test_pool():
    case = Case("gdn", "", lengths=(5, 9, 64, 0), K=16, V=16, dtype=F32)
    x = case.draw()
    x["initial_state"] = torch.randn(6, 2, 16, 16)
    x["state_indices"] = torch.tensor([4, -1, 0, 2], dtype=torch.int32)
    want = oracle.forward("gdn", x, output_final_state=True)
    before = x["initial_state"].clone()
    got = run("gdn", "forward", x, output_final_state=True)
    check(got, want, F32, "cuda", names=("O", "final_state"))
    assert torch.equal(x["initial_state"][[1, 3, 5]], before[[1, 3, 5]])
