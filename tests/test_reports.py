"""Faults that users of such kernels reported in public, each as the kind of fault it was.

A test's name starts with the report's number (B01 to B119, odd numbers only). Golden numbers come
from a plain fp64 recurrence. Reports on convolution, decode and context parallelism are in the
files of those.

Reports that the table of `test_engines.py` covers as well are kept here with their own inputs.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import batch
import oracle
import pytest
import torch
from batch import IMPL
from call import MAMBA2, OPS, arguments, call, gradients, op
from cases import BF16, ENGINES, F16, F32, F64, Case
from draw import P, draw, l2, offsets
from oracle import FAMILIES
from table import grid, param, short, to
from tolerance import check, check_bitwise, relative_error, same_shape_and_finite

import lagraph
import lagraph.ops
from lagraph import ops
from lagraph.errors import InvalidNode, NotSupported

pytestmark = pytest.mark.usefixtures("poison")

DELTA = ("gdn", "kda", "gdn2", "gdp")
LN2 = math.log(2.0)
DT_ONE = 0.541324855  # softplus of it is 1


def every(families=FAMILIES):
    """Every engine with these families."""
    return pytest.mark.parametrize(("engine", "family"), grid(*((f, f) for f in families)))


on_every_engine = pytest.mark.parametrize("engine", [param(engine) for engine in ENGINES])


def test_every_report_has_a_test():
    """All 60 reports are tested in a file of this folder."""
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    here = {name.upper() for name in re.findall(r"def test_(b\d+)_", text)}
    assert {f"B{number:02d}" for number in range(1, 120, 2)} <= here


# Inputs --------------------------------------------------------------------------------------


def r1(T, K=128, V=128, family="gdn", dtype=BF16):
    """Recipe R1, one head: q, k, v, beta rounded to bf16, g = -0.1 |P;4|, scale K^-0.5."""
    x = {
        "q": l2(P((T, 1, K), 1)).to(BF16),
        "k": l2(P((T, 1, K), 2)).to(BF16),
        "v": P((T, 1, V), 3).to(BF16),
        "beta": torch.sigmoid(P((T, 1), 5)).to(BF16).to(F32),
        "g": -0.1 * P((T, 1), 4, F32).abs(),
        "cu_seqlens": offsets((T,)),
        "dO": P((T, 1, V), 7).to(BF16),
    }
    if family == "kda":
        x["g"] = -0.1 * P((T, 1, K), 4, F32).abs()
    return {n: t.to(dtype) if n in ("q", "k", "v", "dO") else t for n, t in x.items()}


def one_hot(family, T, beta=0.5, g=0.0, K=128, V=128, lengths=None, dtype=BF16):
    """The one-hot probe: k = q = e0, v = 1, so that outputs are short fractions."""
    e0 = torch.zeros(T, 1, K)
    e0[..., 0] = 1.0
    per_key = family in ("kda", "gdn2")
    x = {
        "q": e0.to(dtype),
        "k": e0.to(dtype),
        "v": torch.ones(T, 1, V, dtype=dtype),
        "g": torch.full((T, 1, K) if per_key else (T, 1), g),
        "beta": torch.full((T, 1), beta),
        "cu_seqlens": offsets(lengths or (T,)),
    }
    if family == "gdn2":
        x["beta"] = torch.full((T, 1, K), beta, dtype=dtype)
        x["w"] = torch.full((T, 1, V), beta, dtype=dtype)
    return x


def mamba2_probe(L, raw, A, P_=64, N=64, bias=0.0, H=1):
    """x = B = C = e0."""
    e = torch.zeros(L, H, N)
    e[..., 0] = 1.0
    x = torch.zeros(L, H, P_)
    x[..., 0] = 1.0
    return {
        "q": e[:, :1].contiguous(),
        "k": e[:, :1].contiguous(),
        "v": x,
        "g": torch.full((L, H), raw),
        "a": torch.full((H,), A),
        "dt_bias": torch.full((H,), bias),
        "cu_seqlens": offsets((L,)),
    }


def extra(family, **options):
    """Options, with what the family cannot do without."""
    return ({"num_householder": 1} if family == "gdp" else {}) | options


def run(engine, family, x, direction="forward", **options):
    """Through the engine, with the final state unless told otherwise."""
    options = {"output_final_state": True, **extra(family, **options)}
    return call(family, to(engine.device, x), direction, engine.plan(family, direction), **options)


def near(got, want, rel):
    """Every element within `rel` of the largest wanted one."""
    want = torch.as_tensor(want, dtype=F64)
    assert torch.isfinite(got).all()
    error = (got.detach().double().cpu() - want).abs().max().item()
    assert error <= rel * want.abs().max().item(), error


def attempt(function):
    """Its result and "", or None and the message of a refusal: where both are right."""
    try:
        return function(), ""
    except (InvalidNode, NotSupported) as refusal:
        return None, str(refusal)


def in_fresh_process(code, limit):
    """Run code with a time limit; what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True,
        timeout=limit, cwd=Path(__file__).parent, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


# Numerics of a chunk -------------------------------------------------------------------------


@every()
def test_b01_strong_gates_are_finite(engine, family):
    """B01: masked differences of cumulative gates must not be exponentiated to inf * 0.

    g = -20 everywhere: o_t = beta_t (q_t . k_t) v_t, final_state = beta v k^T of the last token.
    """
    if family == "mamba2":
        x = draw("mamba2", lengths=(64,), K=128, V=64, H=1, dtype=BF16)
        x["a"], x["g"] = torch.full((1,), -20.0), torch.full((64, 1), 1.0)
    else:
        x = one_hot(family, 64)
        x |= {
            "q": l2(P((64, 1, 128), 1)).to(BF16),
            "k": l2(P((64, 1, 128), 2)).to(BF16),
            "v": P((64, 1, 128), 3).to(BF16),
            "g": torch.full_like(x["g"], -20.0),
            "dO": P((64, 1, 128), 7).to(BF16),
        }
        if family != "gdn2":
            x["beta"] = torch.sigmoid(P((64, 1), 5)).float()
    options = {} if family == "mamba2" else {"scale": 1.0}
    got = run(engine, family, x, "backward", **options)
    check(got, oracle.backward(family, x, **extra(family, **options)), BF16)
    got = run(engine, family, x, **options)
    if family in ("gdn", "kda", "gdp"):
        q, k, v, beta = (x[name].double() for name in ("q", "k", "v", "beta"))
        o = beta[..., None] * (q * k).sum(-1, keepdim=True) * v
        state = beta[-1, :, None, None] * v[-1, :, :, None] * k[-1, :, None, :]
        check(got, {"O": o, "final_state": state[None]}, BF16)


@on_every_engine
def test_b03_weak_bounded_gates_keep_the_state(engine):
    """B03: raw gates of -8 forget almost nothing; the state's error must not pile up."""
    x = r1(2048, family="kda")
    x["g"] = torch.full((2048, 1, 128), -8.0)
    x |= {"a_log": torch.zeros(1), "dt_bias": torch.zeros(1, 128)}
    got = run(engine, "kda", x, safe_gate=True, gate_lower_bound=-5.0)
    o, state = got["O"].double(), got["final_state"].double()
    near(o.square().sum(), 173.905, 1e-2)
    near(o.abs().max(), 0.09861, 1e-2)
    near(state.square().sum(), 1680.48, 1e-2)
    assert got["final_state"].dtype == F32


@every()
@pytest.mark.parametrize("T", [22, 70])
def test_b05_the_future_changes_nothing(engine, family, T):
    """B05: a later token's gate leaves earlier outputs and gradients alone, to the bit."""
    delta = family != "mamba2"
    case = Case(family, "", lengths=(T,), H=4, K=128, V=128, dtype=BF16)
    x = case.draw()
    x["g"] = torch.full_like(x["g"], -0.7)
    x["dO"][-1] = 0.0
    del x["d_final_state"]
    options = {"safe_gate": True} if delta else {}
    if family in ("kda", "gdn2"):
        options["gate_lower_bound"] = -5.0
    later = {**x, "g": x["g"].clone()}
    later["g"][-1] = 6.0
    a, b = (run(engine, family, y, "backward", **options) for y in (x, later))
    for name in ("O", "dQ", "dK", "dV", "dG", "dBeta", "dW"):
        if name in a:
            check_bitwise({name: a[name][:-1]}, {name: b[name][:-1]})


@on_every_engine
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=short)
def test_b13_gradients_of_one_tile_width(engine, size, dtype):
    """B13: gradients are right for every width of the key tile, forward golden included."""
    x = r1(128, size, size)
    if dtype == BF16 and size == 64:
        got = run(engine, "gdn", x)
        near(got["O"].double().sum(), 4.0149004, 2e-2)
        near(got["O"].double().square().sum(), 3.8774261, 1e-2)
        near(got["final_state"].double().square().sum(), 59.862753, 1e-2)
    x = r1(128, size, size, dtype=dtype)
    got = run(engine, "gdn", x, "backward")
    check(got, oracle.backward("gdn", x), dtype)


@every(DELTA)
@pytest.mark.parametrize("T", [7, 50, 65, 129])
def test_b15_gates_of_exactly_zero(engine, family, T):
    """B15: with g = 0 the gated rule is the ungated one: o_t = 1 - 2^-(t+1)."""
    got = run(engine, family, one_hot(family, T), scale=1.0)
    want = 1.0 - 2.0 ** -torch.arange(1.0, T + 1, dtype=F64)
    near(got["O"], want[:, None, None].expand(T, 1, 128), 2.0**-8)
    state = got["final_state"][0, 0]
    near(state[:, 0], torch.full((128,), 1.0 - 2.0**-T, dtype=F64), 1e-5)
    assert not state[:, 1:].any()


@every(DELTA)
def test_b17_decay_at_the_end_of_a_block(engine, family):
    """B17: without writes final_state is exp(sum g), for every length around a block."""
    golden = {57: 0.18637398, 63: 0.15107181, 64: 0.15107181, 65: 0.14956862, 128: 0.02259560}
    for T, want in golden.items():
        x = one_hot(family, T, beta=0.0)
        x |= {"k": l2(P((T, 1, 128), 2)).to(BF16), "v": P((T, 1, 128), 3).to(BF16)}
        g = -0.01 * (torch.arange(T) % 7).float()
        x["g"] = g.view(T, *[1] * (x["g"].dim() - 1)).expand(x["g"].shape).contiguous()
        x["initial_state"] = torch.ones(1, 1, 128, 128)
        got = run(engine, family, x)["final_state"]
        near(got, torch.full((1, 1, 128, 128), want, dtype=F64), 1e-5)


@every(DELTA)
def test_b19_decay_in_fp32(engine, family):
    """B19: decays of exp(-1/4096) on 4096 tokens leave e^-1 of the state; in bf16 they leave 1."""
    T = 4096
    x = one_hot(family, T, beta=0.0, g=-1.0 / T)
    x |= {name: P((T, 1, 128), seed).to(BF16) for seed, name in enumerate(("q", "k", "v"), 1)}
    x["initial_state"] = torch.ones(1, 1, 128, 128)
    got = run(engine, family, x)["final_state"]
    near(got, torch.full((1, 1, 128, 128), 0.36787944, dtype=F64), 1e-4)


@on_every_engine
@pytest.mark.parametrize("K", [96, 160, 192, 48])
def test_b23_odd_key_dims(engine, K):
    """B23: key dims that are no power of two are right, or refused by name."""
    x = r1(128, K, 128)
    got, refusal = attempt(lambda: run(engine, "gdn", x))
    if refusal:
        assert engine.device == "cuda", "the CPU takes all dims"
        assert f"K={K}" in refusal
        return
    check(got, oracle.forward("gdn", x), BF16, names=("O", "final_state"))
    if K == 96:
        near(got["O"].double().sum(), 4.5340485, 1e-2)
        near(got["O"].double().square().sum(), 5.0824752, 1e-2)
        near(got["final_state"].double().square().sum(), 123.53543, 1e-2)


@every(("gdn", "kda"))
@pytest.mark.parametrize("T", [1, 2, 7, 8, 15, 16, 17])
def test_b25_short_sequences(engine, family, T):
    """B25: sequences shorter than a tile, forward and backward."""
    x = r1(T, family=family)
    check(run(engine, family, x, "backward"), oracle.backward(family, x), BF16)
    got = run(engine, family, x)
    check(got, oracle.forward(family, x), BF16, names=("O", "final_state"))
    if T == 1:
        q, k, v = (x[name].double() for name in ("q", "k", "v"))
        o = 128**-0.5 * x["beta"].double()[..., None] * (q * k).sum(-1, keepdim=True) * v
        check(got, {"O": o}, BF16)


@every(("gdn", "kda"))
@pytest.mark.parametrize("size", [128, 256])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=short)
def test_b27_whole_and_in_pieces(engine, family, size, dtype):
    """B27: a sequence in two pieces, with the carried state, is the sequence in one."""
    if dtype not in engine.dtypes or (engine.name == "frost" and size > 128):
        pytest.skip("not promised")
    x = r1(256, size, size, family, dtype)
    whole = run(engine, family, x)
    if size == 256 and family == "gdn" and dtype == BF16:
        near(whole["O"].double().sum(), 11.308023, 2e-2)
        near(whole["O"].double().square().sum(), 5.8950496, 1e-2)
        near(whole["final_state"].double().square().sum(), 295.35168, 1e-2)
    for first in (128, 100, 1, 255):
        state, outputs = None, []
        for rows in (slice(0, first), slice(first, 256)):
            part = {name: t[rows] for name, t in x.items() if name != "cu_seqlens"}
            part["cu_seqlens"] = offsets((len(part["q"]),))
            got = run(engine, family, part | {"initial_state": state})
            state = got["final_state"]
            outputs.append(got["O"])
        want = {name: whole[name].double().cpu() for name in ("O", "final_state")}
        check({"O": torch.cat(outputs), "final_state": state}, want, dtype)


# States --------------------------------------------------------------------------------------


@every()
def test_b29_one_final_state_per_sequence(engine, family):
    """B29: final_state has one row per sequence, and initial_state is left alone."""
    case = engine.fit(Case(family, "", lengths=(4, 4), K=16, V=8, dtype=F16, n=1))
    x = case.draw()
    x["initial_state"] = torch.ones(2, 2, case.V, case.K)
    got = run(engine, family, x)
    check(got, oracle.forward(family, x, **extra(family)), F16, names=("O", "final_state"))
    assert torch.equal(x["initial_state"], torch.ones(2, 2, case.V, case.K))


@every()
@pytest.mark.parametrize("direction", ["forward", "backward", "summary"])
def test_b31_permuted_state(engine, family, direction):
    """B31: a permuted view of a state is read by its strides, or refused."""
    K, V = (80, 96) if engine.sizes is None else (engine.sizes[0], engine.sizes[1])
    dtype = F32 if F32 in engine.dtypes else BF16
    x = draw(family, lengths=(2, 3), H=1, HV=2, K=K, V=V, dtype=dtype)
    storage = P((2, 2, V, K), 6, F32).to(engine.device)
    want = oracle.run(family, direction, x | {"initial_state": storage.permute(1, 0, 2, 3)},
                      **extra(family))  # fmt: skip
    for view in (storage.permute(1, 0, 2, 3), storage.mT.contiguous().mT.permute(1, 0, 2, 3)):
        placed = to(engine.device, x) | {"initial_state": view}
        got, refusal = attempt(lambda x=placed: run(engine, family, x, direction))
        if refusal and "does not serve" in refusal:
            pytest.skip(refusal)
        if refusal:
            assert "initial_state" in refusal
            continue
        names = [name for name in want if name not in ("state_checkpoints", "O_pre")]
        check(got, want, dtype, engine.device, names=names)


@every()
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_b33_activation_checkpointing(engine, family, reentrant):
    """B33: under torch.utils.checkpoint every gradient is there, initial_state's included."""
    from torch.utils.checkpoint import checkpoint

    case = engine.fit(Case(family, "", lengths=(130,), n=1))
    x = to(engine.device, case.draw())
    step = {"gdp": 64, "mamba2": 128}.get(family, 64)
    plan = engine.plan(family)
    names = [name for name in oracle.GRADIENTS if name in x]

    options = extra(family, checkpoint_every_n_tokens=step, output_final_state=True)

    def forward(*tensors):
        given = x | dict(zip(names, tensors, strict=True))
        got = call(family, given, "forward", plan, **options)
        return got["O"], got["final_state"]

    def grads(function):
        leaves = [x[name].clone().requires_grad_() for name in names]
        torch.autograd.backward(function(*leaves), (x["dO"], x["d_final_state"]))
        return {oracle.GRADIENTS[n]: leaf.grad for n, leaf in zip(names, leaves, strict=True)}

    plain = grads(forward)
    kept = grads(lambda *t: checkpoint(forward, *t, use_reentrant=reentrant))
    check_bitwise(kept, plain)


@on_every_engine
@pytest.mark.parametrize(
    ("reentrant", "by_name"),
    [(True, False), (False, False), (False, True)],
    ids=["reentrant", "by position", "by name"],
)
def test_b33_golden(engine, reentrant, by_name):
    """B33: three tokens that halve the state give d_initial_state = 0.125."""
    from torch.utils.checkpoint import checkpoint

    x = to(engine.device, one_hot("gdn", 3, beta=0.0, g=-LN2))
    state = torch.ones(1, 1, 128, 128, device=engine.device, requires_grad=True)

    def final(state):
        got = call("gdn", x | {"initial_state": state}, "forward", engine.plan("gdn"),
                   output_final_state=True)  # fmt: skip
        return got["final_state"]

    given = ((), {"state": state}) if by_name else ((state,), {})
    checkpoint(final, *given[0], use_reentrant=reentrant, **given[1]).sum().backward()
    near(state.grad, torch.full((1, 1, 128, 128), 0.125, dtype=F64), 1e-6)


@every(DELTA)
def test_b35_growing_states(engine, family):
    """B35: positive log gates are not clamped: the state grows, to inf where fp32 ends."""
    x = one_hot(family, 64, beta=0.0, g=0.1) | {"initial_state": torch.ones(1, 1, 128, 128)}
    got = run(engine, family, x)["final_state"]
    near(got, torch.full((1, 1, 128, 128), 601.84504, dtype=F64), 1e-4)
    x = one_hot(family, 64, beta=0.0, g=5.0) | {"initial_state": torch.ones(1, 1, 128, 128)}
    got, refusal = attempt(lambda: run(engine, family, x)["final_state"])
    if refusal:
        assert re.search(r"\.g\b", refusal)
        return
    assert torch.isinf(got).all(), "exp(320) is beyond fp32"


@every()
def test_b37_empty_sequences(engine, family):
    """B37: repeated offsets: an empty sequence passes its state and its gradient through."""
    lengths = (0, 5, 0, 4, 0)
    x = draw(family, lengths=lengths, H=1, K=128, V=128, dtype=BF16)
    x["initial_state"] = torch.arange(5.0).view(5, 1, 1, 1).expand(5, 1, 128, 128).contiguous()
    got = run(engine, family, x, "backward")
    empty = [0, 2, 4]
    check_bitwise(
        {"state": got["final_state"][empty], "grad": got["d_initial_state"][empty]},
        {"state": x["initial_state"][empty], "grad": x["d_final_state"][empty]},
    )
    for i, rows in ((1, slice(0, 5)), (3, slice(5, 9))):
        one = {n: t[rows] if len(t) == 9 else t[i : i + 1] if t.dim() == 4 else t
               for n, t in x.items()}  # fmt: skip
        one["cu_seqlens"] = offsets((len(one["q"]),))
        alone = run(engine, family, one, "backward")
        want = {"O": alone["O"].double().cpu(), "dQ": alone["dQ"].double().cpu()}
        check({"O": got["O"][rows], "dQ": got["dQ"][rows]}, want, BF16)
    nothing = {name: t for name, t in x.items() if name != "initial_state"}
    assert not run(engine, family, nothing)["final_state"][empty].any()


@pytest.mark.gpu
def test_b39_long_rows_and_a_ragged_tail():
    """B39: an initial state with long rows and a ragged tail must not hang, nor change a bit."""
    in_fresh_process(
        """
        import torch
        from draw import draw
        from call import call
        from table import to
        lengths = (1238, 1199, 1240, 1216, 1187, 1203, 519)
        x = to("cuda", draw("gdn", lengths=lengths, H=48, K=128, V=128, dtype=torch.bfloat16))
        zero = torch.zeros(7, 48, 128, 128, device="cuda")
        want = call("gdn", x, output_final_state=True)
        for _ in range(20):
            got = call("gdn", x | {"initial_state": zero}, output_final_state=True)
            torch.cuda.synchronize()
        assert torch.equal(got["O"], want["O"])
        assert torch.equal(got["final_state"], want["final_state"])
        """,
        limit=240,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [128, 4])
@pytest.mark.parametrize("T", [16224, 16223, 16225, 8112])
def test_b41_lengths_that_hung(T, heads):
    """B41: batch_invariant at lengths where one worker once waited for ever; zeros give zeros."""
    in_fresh_process(
        f"""
        import torch
        from lagraph.ops import kimi_delta_attention
        T, H, D = {T}, {heads}, 128
        q = torch.zeros(T, H, D, dtype=torch.bfloat16, device="cuda")
        g = torch.zeros(T, H, D, device="cuda")
        beta = torch.ones(T, H, device="cuda")
        cu = torch.tensor([0, T], dtype=torch.int32, device="cuda")
        o, _ = kimi_delta_attention(q, q, q, g, beta, cu, batch_invariant=True)
        torch.cuda.synchronize()
        assert not o.any()
        """,
        limit=120,
    )


# Packed batches and layouts ------------------------------------------------------------------


@every()
def test_b43_offsets_that_stop_early(engine, family):
    """B43: cu_seqlens [0, 1, 2, 3] with 17 tokens: the other 14 rows, all NaN, are not read."""
    x = draw(family, lengths=(1, 1, 1), tail=14, H=1, K=128, V=128, dtype=BF16)
    got = run(engine, family, x)
    want = oracle.forward(family, x, **extra(family))
    check(
        {"O": got["O"][:3], "final_state": got["final_state"]},
        {"O": want["O"][:3], "final_state": want["final_state"]},
        BF16,
    )


BAD_OFFSETS = {
    "starts late": torch.tensor([1, 64], dtype=torch.int32),
    "negative": torch.tensor([0, -3, 64], dtype=torch.int32),
    "falls": torch.tensor([0, 40, 30, 64], dtype=torch.int32),
    "past the end": torch.tensor([0, 80], dtype=torch.int32),
    "rank 2": torch.tensor([[0, 64]], dtype=torch.int32),
    "rank 0": torch.tensor(64, dtype=torch.int32),
    "no entry": torch.zeros(0, dtype=torch.int32),
    "float": torch.tensor([0.0, 64.0]),
    "int16": torch.tensor([0, 64], dtype=torch.int16),
    "bool": torch.tensor([False, True]),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("direction", ["forward", "summary", "summary_backward"])
@pytest.mark.parametrize("offense", BAD_OFFSETS)
def test_b45_malformed_offsets(family, direction, offense):
    """B45: every malformed cu_seqlens raises, by name; the next good call works."""
    x = draw(family, lengths=(64,), H=1, K=8, V=8, dtype=F32, d_final_state=False)
    options = extra(family)
    with pytest.raises((ValueError, TypeError), match="cu_seqlens") as raised:
        call(family, x | {"cu_seqlens": BAD_OFFSETS[offense]}, direction, **options)
    assert isinstance(raised.value, InvalidNode)
    got = call(family, x | {"cu_seqlens": torch.tensor([0, 64])}, direction, **options)
    name = {"forward": "O", "summary": "final_state"}.get(direction, "d_initial_state")
    want = oracle.run(family, direction, x, **options)
    check({name: got[name]}, {name: want[name]}, F32)


@pytest.mark.gpu
def test_b45_offsets_on_another_device():
    """B45: offsets on the CPU beside tensors on a GPU are refused, by name."""
    x = to("cuda", draw("gdn", lengths=(64,), H=1, K=64, V=64, dtype=BF16))
    with pytest.raises(ValueError, match="cu_seqlens"):
        call("gdn", x | {"cu_seqlens": offsets((64,))})


@every(("gdn", "kda", "gdn2"))
def test_b47_strided_offsets_and_gates(engine, family):
    """B47: a strided cu_seqlens, and gates cut out of a wider projection, forward and backward."""
    x = draw(family, lengths=(5, 4), H=2, K=64, V=64, dtype=BF16)
    want = oracle.backward(family, x)
    views = to(engine.device, x)
    base = torch.tensor([0, 99, 5, 99, 9], dtype=torch.int32, device=engine.device)
    views["cu_seqlens"] = base[::2]
    for name in ("g", "beta"):
        t = views[name]
        wide = torch.full((9, 7, *t.shape[2:]), float("nan"), dtype=t.dtype, device=t.device)
        wide[:, 1:3] = t
        views[name] = wide[:, 1:3]
    check(run(engine, family, views, "backward"), want, BF16)


# Pools of states: state_indices of the ops ---------------------------------------------------


@every(DELTA)
def test_b57_padding_is_no_slot(engine, family):
    """B57: index -1 is padding and never the pool's last row."""
    x = one_hot(family, 2, lengths=(1, 1))
    pool = torch.arange(5.0).view(5, 1, 1, 1).expand(5, 1, 128, 128).contiguous()
    x |= {"initial_state": pool, "state_indices": torch.tensor([4, -1], dtype=torch.int32)}
    x = to(engine.device, x)
    got = run(engine, family, x, scale=1.0)
    row = x["initial_state"][4, 0]
    near(row[:, 0], torch.full((128,), 2.5, dtype=F64), 1e-6)
    assert (row[:, 1:] == 4.0).all()
    near(got["O"][0], torch.full((1, 128), 2.5, dtype=F64), 1e-6)
    assert not got["O"][1].any()
    assert torch.equal(x["initial_state"][:4].cpu(), pool[:4])


@every(DELTA)
@pytest.mark.parametrize("count", [1, 2, 4, 33])
def test_b59_padding_gives_zeros(engine, family, count):
    """B59: rows of padding are exactly zero; the poisoned output buffer would show them as NaN."""
    x = one_hot(family, count, lengths=(1,) * count)
    slots = torch.full((count,), -1, dtype=torch.int32)
    slots[1::3] = torch.arange(len(slots[1::3]), dtype=torch.int32)
    pool = torch.ones(40, 1, 128, 128)
    x |= {"initial_state": pool, "state_indices": slots}
    got = run(engine, family, x, scale=1.0)["O"].cpu()
    assert not got[slots < 0].any()
    assert (got[slots >= 0] == 1.0).all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("slots", [[5, 6947], [5, 26], [5, 5], [26, -1]], ids=str)
def test_b61_indices_beyond_the_pool(family, slots):
    """B61: an index beyond the pool, or a row used twice, raises; nothing is written."""
    x = draw(family, lengths=(1, 1), H=1, K=8, V=8, dtype=F32)
    pool = P((26, 1, 8, 8), 6, F32)
    before = pool.clone()
    x |= {"initial_state": pool, "state_indices": torch.tensor(slots, dtype=torch.int32)}
    with pytest.raises(ValueError, match="state_indices"):
        call(family, x, output_final_state=True, **extra(family))
    assert torch.equal(pool, before)


@every()
def test_b63_pools_with_gaps(engine, family):
    """B63: rows of a pool may lie apart, by any stride; the gaps keep their NaN."""
    x = draw(family, lengths=(3, 4), H=2, K=64, V=64, dtype=BF16)
    dense = P((4, 2, 64, 64), 6, F32)
    slots = torch.tensor([3, 1], dtype=torch.int32)
    want = oracle.forward(
        family, x | {"initial_state": dense, "state_indices": slots}, **extra(family)
    )
    wide = torch.full((4, 2 * 2 * 64 * 64), float("nan"), device=engine.device)
    double = torch.full((8, 2, 64, 64), float("nan"), device=engine.device)
    for store, pool in (
        (wide, wide[:, : 2 * 64 * 64].view(4, 2, 64, 64)),
        (double, double[::2]),
    ):
        pool.copy_(dense)
        gaps = torch.isnan(store)
        placed = to(engine.device, x | {"state_indices": slots}) | {"initial_state": pool}
        got = run(engine, family, placed)
        check({"O": got["O"], "final_state": pool}, want, BF16, names=("O", "final_state"))
        assert torch.equal(torch.isnan(store), gaps)


@every()
def test_b63_rows_that_are_not_dense(engine, family):
    """B63: rows of a pool that are no dense [HO, V, K] are right, or refused by name."""
    x = draw(family, lengths=(3, 4), H=2, K=64, V=64, dtype=BF16)
    dense = P((4, 2, 64, 64), 6, F32)
    slots = torch.tensor([3, 1], dtype=torch.int32)
    want = oracle.forward(
        family, x | {"initial_state": dense, "state_indices": slots}, **extra(family)
    )
    pool = dense.mT.contiguous().mT.to(engine.device)
    before = pool.clone()
    placed = to(engine.device, x | {"state_indices": slots}) | {"initial_state": pool}
    got, refusal = attempt(lambda: run(engine, family, placed))
    if refusal:
        assert "initial_state" in refusal
        assert torch.equal(pool, before)
        return
    check({"O": got["O"], "final_state": pool}, want, BF16, names=("O", "final_state"))


# Large inputs --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.slow
def test_b65_offsets_beyond_32_bits():
    """B65: slices of a buffer with a row pitch so large that offsets pass 2^32."""
    T = 262144
    buffer = torch.empty(T, 16384, dtype=BF16, device="cuda").zero_()
    rng = torch.Generator("cuda").manual_seed(0)
    parts = []
    for column in (0, 4096, 8192):
        values = torch.randn(T, 128, generator=rng, device="cuda")
        view = buffer[:, column : column + 128]
        view.copy_(values / values.norm(dim=-1, keepdim=True))
        parts.append(view.unsqueeze(1))
    g = torch.full((T, 1), -0.1, device="cuda")
    beta = torch.full((T, 1), 0.5, device="cuda")
    cu = torch.tensor([0, T], dtype=torch.int32, device="cuda")
    gdn = op("gdn")
    want, _ = gdn(*(part.contiguous() for part in parts), g, beta, cu)
    got, refusal = attempt(lambda: gdn(*parts, g, beta, cu)[0])
    if refusal:
        assert "stride" in refusal
        return
    assert torch.equal(got[-128:], want[-128:])


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("L", [65536, 262144])
def test_b67_long_mamba2(L):
    """B67: y = 2 - 2^-t at every head up to the last of a very long sequence."""
    x = to("cuda", mamba2_probe(L, 0.0, -LN2, bias=DT_ONE, H=128))
    x = {n: t.to(BF16) if n in ("q", "k", "v") else t for n, t in x.items()}
    got = call("mamba2", x, output_final_state=True)
    t = torch.arange(L, dtype=F64, device="cuda")
    want = 2.0 - 2.0**-t
    for head in (0, 77, 127):
        assert (got["O"][:, head, 0].double() - want).abs().max() <= 2.0**-7
    assert (got["final_state"][0, :, 0, 0] - 2.0).abs().max() <= 1e-3


@every(DELTA)
@pytest.mark.slow
@pytest.mark.parametrize("rows", [65536, 65537, 262141])
def test_b69_more_rows_than_a_grid(engine, family, rows):
    """B69: very many sequences of one token, normalized in the kernel: the last is the first."""
    if engine.device == "cpu":
        rows = 5000  # there is no grid to overflow
    x = {"q": torch.ones(rows, 2, 64, dtype=BF16), "k": torch.ones(rows, 2, 64, dtype=BF16)}
    x["v"] = torch.ones(rows, 2, 64, dtype=BF16)
    per_key = family in ("kda", "gdn2")
    x["g"] = torch.full((rows, 2, 64) if per_key else (rows, 2), -0.1)
    x["beta"] = torch.full((rows, 2), 0.5)
    if family == "gdn2":
        x["beta"] = torch.full((rows, 2, 64), 0.5, dtype=BF16)
        x["w"] = torch.full((rows, 2, 64), 0.5, dtype=BF16)
    x["cu_seqlens"] = torch.arange(rows + 1, dtype=torch.int32)
    got = run(engine, family, x, use_qk_l2norm=True, output_final_state=False)["O"]
    assert (got == got[:1]).all()
    near(got[0], torch.full((2, 64), 0.5 / 8.0, dtype=F64), 5e-3)


# Graphs, compilers, devices ------------------------------------------------------------------


@pytest.mark.gpu
def test_b73_capture_with_offsets_that_change():
    """B73: a captured graph replays with other offsets; nothing synchronizes."""
    x = to("cuda", one_hot("gdn", 8, K=64, V=64))
    x["cu_seqlens"] = torch.tensor([0, 3, 8, 8], dtype=torch.int32, device="cuda")
    x |= {
        "initial_state": torch.zeros(3, 1, 64, 64, device="cuda"),
        "dO": torch.ones(8, 1, 64, dtype=BF16, device="cuda"),
        "d_final_state": torch.ones(3, 1, 64, 64, device="cuda"),
    }
    options = {"output_final_state": True, "scale": 1.0}
    gradients("gdn", x, **options)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = gradients("gdn", x, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for cu, states in (
        ([0, 3, 8, 8], [0.875, 0.96875, 0.0]),
        ([0, 5, 6, 8], [0.96875, 0.5, 0.75]),
    ):
        x["cu_seqlens"].copy_(torch.tensor(cu, dtype=torch.int32))
        graph.replay()
        near(got["final_state"][:, 0, 0, 0], states, 1e-5)
        check_bitwise(got, gradients("gdn", x, **options))


@every(("gdn", "mamba2"))
def test_b75_compiled_at_changing_lengths(engine, family):
    """B75: one compiled function, right at every length, with few compilations."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    plan = engine.plan(family)
    inner = op(family)

    def step(kwargs):
        return inner(**kwargs)[0] * 1.0

    compiled = torch.compile(step, backend=counter, fullgraph=True)
    for L in (20, 30, 40, 1, 64):
        x = to(engine.device, draw(family, lengths=(L,), H=1, K=64, V=64, dtype=BF16))
        kwargs = arguments(family, "forward", x, plan)
        assert torch.equal(compiled(kwargs), step(kwargs)), L
    assert counter.frame_count <= 3
    torch._dynamo.reset()


@every()
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_b83_pools_that_are_views(engine, family, compiled):
    """B83: two writes in a row into a pool that is a view reach its base, compiled or not."""
    x = draw(family, lengths=(1, 1), H=1, K=64, V=64, dtype=BF16)
    x["state_indices"] = torch.tensor([2, 0], dtype=torch.int32)
    x = to(engine.device, x)
    plan, inner = engine.plan(family), op(family)

    def twice(big):
        pool = big[1].view(4, 1, 64, 64)
        kwargs = arguments(family, "forward", x | {"initial_state": pool}, plan,
                           output_final_state=True, **extra(family))  # fmt: skip
        first = inner(**kwargs)[0]
        return first, inner(**kwargs)[0]

    start = P((2, 4 * 64 * 64), 6, F32).to(engine.device)
    want = start.clone()
    outputs = twice(want)
    assert torch.equal(want[0], start[0])
    assert not torch.equal(want[1], start[1])
    if compiled:
        torch._dynamo.reset()
        got = start.clone()
        again = torch.compile(twice, backend="aot_eager", fullgraph=True)(got)
        assert torch.equal(got, want)
        assert all(map(torch.equal, again, outputs))
        torch._dynamo.reset()


@every(("gdn", "mamba2"))
@pytest.mark.parametrize("inside", [True, False], ids=["pool made inside", "pool made outside"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_b85_inference_mode(engine, family, inside, compiled):
    """B85: pools are written under inference_mode, wherever they were made, compiled or not."""
    x = draw(family, lengths=(1, 1), H=1, K=64, V=64, dtype=BF16)
    x["state_indices"] = torch.tensor([2, 0], dtype=torch.int32)
    want = oracle.forward(family, x | {"initial_state": P((4, 1, 64, 64), 6, F32)})
    outside = P((4, 1, 64, 64), 6, F32).to(engine.device)
    plan, inner = engine.plan(family), op(family)

    def step(kwargs):
        return inner(**kwargs)[0]

    torch._dynamo.reset()
    function = torch.compile(step, backend="aot_eager") if compiled else step
    with torch.inference_mode():
        placed = to(engine.device, x)
        pool = outside.clone() if inside else outside
        o = function(arguments(family, "forward", placed | {"initial_state": pool}, plan,
                               output_final_state=True))  # fmt: skip
    check({"O": o, "final_state": pool}, want, BF16, names=("O", "final_state"))
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("engine", [e for e in ENGINES if e.device == "cuda"], ids=lambda e: e.id)
@pytest.mark.parametrize("family", FAMILIES)
def test_b87_a_device_that_is_not_the_current_one(engine, family):
    """B87: tensors on cuda:1 while cuda:0 is current, forward and backward."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    case = Case(family, "", lengths=(70, 13), K=64, V=64, dtype=BF16)
    x = to("cuda:1", case.draw())
    got = gradients(family, x, engine.plan(family), **case.call_options())
    check(got, case.truth("backward"), BF16)
    assert got["O"].device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    with pytest.raises(ValueError, match="cu_seqlens"):
        call(family, x | {"cu_seqlens": x["cu_seqlens"].to("cuda:0")}, **extra(family))


@pytest.mark.gpu
@pytest.mark.parametrize("engine", [e for e in ENGINES if e.device == "cuda"], ids=lambda e: e.id)
def test_b89_the_current_stream(engine):
    """B89: kernels run on the current stream, after what was queued there."""
    x = to("cuda", draw("gdn", lengths=(256,), H=4, K=64, V=64, dtype=BF16))
    plan = engine.plan("gdn")
    want = call("gdn", x, "forward", plan)["O"]
    stream = torch.cuda.Stream()
    blank = {name: torch.full_like(x[name], float("nan")) for name in ("q", "k", "v")}
    torch.cuda.synchronize()
    for _ in range(50):
        with torch.cuda.stream(stream):
            for name in blank:
                blank[name].fill_(float("nan"))
            torch.cuda._sleep(10_000_000)
            for name in blank:
                blank[name].copy_(x[name])
            got = call("gdn", x | blank, "forward", plan)["O"].clone()
            torch.full_like(got, float("nan"))
        stream.synchronize()
        assert torch.equal(got, want)


# Autograd ------------------------------------------------------------------------------------


LOSSES = {
    "concatenation": lambda o, s: (torch.cat([o, o], dim=1) * P((83, 4, 64), 7)).sum(),
    "transposition": lambda o, s: (o.transpose(0, 1).contiguous() * P((2, 83, 64), 7)).sum(),
    "every other row": lambda o, s: (o[::2] * P((42, 2, 64), 7)).sum(),
    "every other head": lambda o, s: (o[:, ::2] * P((83, 1, 64), 7)).sum(),
    "every other channel": lambda o, s: (o[..., ::2] * P((83, 2, 32), 7)).sum(),
    "plain sum": lambda o, s: o.sum(),
    "mean of an expansion": lambda o, s: o.mean(0, keepdim=True).expand(5, 2, 64).sum(),
    "columns of the state": lambda o, s: (s[..., :32] * P((2, 2, 64, 32), 8)).sum() + o.sum(),
    "transposed state": lambda o, s: (s.mT.contiguous() * P((2, 2, 64, 64), 8)).sum(),
}  # fmt: skip


@every()
@pytest.mark.parametrize("loss", LOSSES)
def test_b77_gradients_that_are_views(engine, family, loss):
    """B77: an incoming gradient is read by its own strides, whatever made it."""
    dtype = F32 if F32 in engine.dtypes else BF16
    case = Case(family, "", lengths=(70, 13), K=64, V=64, dtype=dtype, n=1)
    x = to(engine.device, case.draw())
    names = [name for name in oracle.GRADIENTS if name in x]
    leaves = [x[name].clone().requires_grad_() for name in names]
    o, s = op(family)(
        **arguments(family, "forward", x | dict(zip(names, leaves, strict=True)),
                    engine.plan(family), **case.call_options())
    )  # fmt: skip
    got = torch.autograd.grad(LOSSES[loss](o.double().cpu(), s.double().cpu()), leaves,
                              retain_graph=True)  # fmt: skip
    wide_o, wide_s = (t.detach().double().cpu().requires_grad_() for t in (o, s))
    seeds = torch.autograd.grad(LOSSES[loss](wide_o, wide_s), (wide_o, wide_s),
                                allow_unused=True, materialize_grads=True)  # fmt: skip
    seeds = [g.contiguous().to(t.dtype).to(t.device) for g, t in zip(seeds, (o, s), strict=True)]
    want = torch.autograd.grad((o, s), leaves, seeds)
    for name, a, b in zip(names, got, want, strict=True):
        same_shape_and_finite(name, a, b)
        assert relative_error(a, b) <= 1e-6, name


@every()
@pytest.mark.parametrize("loss", ["concatenation", "plain sum", "every other head"])
def test_b77_views_without_a_copy(engine, family, loss):
    """B77: the same with the views handed over as they are, in the op's own dtype."""
    dtype = F32 if F32 in engine.dtypes else BF16
    case = Case(family, "", lengths=(70, 13), K=64, V=64, dtype=dtype, n=1)
    x = to(engine.device, case.draw())
    pattern = P((83, 8, 64), 7).to(dtype).to(engine.device)
    views = {
        "concatenation": pattern[:, 2:4],
        "plain sum": torch.ones((), dtype=dtype, device=engine.device).expand(83, 2, 64),
        "every other head": pattern[:, ::4],
    }
    view = views[loss]
    assert not view.is_contiguous()
    got = gradients(family, x | {"dO": view}, engine.plan(family), **case.call_options())
    want = gradients(family, x | {"dO": view.contiguous()}, engine.plan(family),
                     **case.call_options())  # fmt: skip
    check_bitwise(got, want)


@every()
@pytest.mark.parametrize("output", ["O", "final_state"])
def test_b79_not_differentiable_twice(engine, family, output):
    """B79: a second derivative raises; zero or None would be silently wrong."""
    dtype = F64 if F64 in engine.dtypes else BF16
    x = to(engine.device, draw(family, lengths=(9,), K=64, V=64, dtype=dtype, state=dtype))
    names = [name for name in oracle.GRADIENTS if name in x]
    leaves = {name: x[name].clone().requires_grad_() for name in names}
    got = call(family, x | leaves, "forward", engine.plan(family), output_final_state=True,
               **extra(family))  # fmt: skip
    first = torch.autograd.grad(got[output].square().sum(), leaves["k"], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="twice"):
        torch.autograd.grad(first.square().sum(), leaves["v"])


# Dtypes --------------------------------------------------------------------------------------


WRONG_DTYPES = {
    "q fp32 among bf16": ({"q": F32}, ("q", "k"), ("float32", "bfloat16")),
    "v fp16 among bf16": ({"v": F16}, ("v",), ("bfloat16", "float16")),
    "k fp16 among bf16": ({"k": F16}, ("k",), ("bfloat16", "float16")),
    "beta fp16 beside bf16": ({"beta": F16}, ("beta",), ("float32", "float16")),
    "beta int": ({"beta": torch.int32}, ("beta",), ("int32",)),
    "g fp64 beside bf16": ({"g": F64}, ("g",), ("float64",)),
    "initial_state fp64": ({"initial_state": F64}, ("initial_state",), ("float32", "float64")),
    "q int": ({"q": torch.int8}, ("q",), ("int8",)),
}


@pytest.mark.parametrize(
    ("family", "mix"),
    [(f, mix) for f in FAMILIES for mix in WRONG_DTYPES if f != "mamba2" or "beta" not in mix],
)
def test_b81_dtypes_that_do_not_mix(family, mix):
    """B81: a wrong dtype is a TypeError that names the tensor, what is wanted and what was got."""
    changes, names, words = WRONG_DTYPES[mix]
    x = draw(family, lengths=(5,), K=8, V=8, dtype=BF16, state=F32)
    x |= {name: x[name].to(dtype) for name, dtype in changes.items()}
    with pytest.raises(TypeError) as raised:
        call(family, x, **extra(family))
    text = str(raised.value)
    shown = {MAMBA2.get(name, name) if family == "mamba2" else name for name in names}
    assert any(re.search(rf"\.{name}\b", text) for name in shown), text
    assert all(word in text for word in words), text


@every()
def test_b81_dtypes_that_do_mix(engine, family):
    """B81: bf16 tokens with gates, betas and states of other dtypes, and an fp32 gradient."""
    for gate, beta, state in ((F16, BF16, BF16), (F32, BF16, F16), (BF16, F32, F32)):
        case = Case(family, "", lengths=(9,), K=64, V=64, dtype=BF16, gate_dtype=gate,
                    beta_dtype=beta, state=state, n=1)  # fmt: skip
        x = to(engine.device, case.draw())
        got = gradients(family, x, engine.plan(family), **case.call_options())
        check(got, case.truth("backward"), BF16)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_b81_autocast(family, device):
    """B81: under autocast fp32 tokens are cast; gates, betas and states stay, gradients return."""
    case = Case(family, "", lengths=(9, 5), K=64, V=64, dtype=F32, params=("z",), n=1)
    x = to(device, case.draw())
    x["q"] = x["q"].to(BF16)  # as a projection under autocast would give it
    leaves = {n: x[n].clone().requires_grad_() for n in oracle.GRADIENTS if n in x}
    with torch.autocast(device, BF16):
        got = call(family, x | leaves, "forward", **case.call_options())
    assert got["O"].dtype == BF16
    assert got["final_state"].dtype == F32
    grads = torch.autograd.grad((got["O"], got["final_state"]), list(leaves.values()),
                                (x["dO"].to(BF16), x["d_final_state"]))  # fmt: skip
    io = ("q", "k", "v", "z", "dO", *(("beta",) if family == "gdn2" else ()), "w")
    rounded = {n: t.to(BF16) if n in io else t for n, t in x.items()}
    want = oracle.backward(family, rounded, **case.call_options())
    named = {oracle.GRADIENTS[n]: g for n, g in zip(leaves, grads, strict=True)}
    check(named, want, BF16)
    for name, leaf in leaves.items():
        assert named[oracle.GRADIENTS[name]].dtype == leaf.dtype, name


# Layouts and dispatch ------------------------------------------------------------------------


@every(("gdn", "kda", "gdn2", "mamba2"))
@pytest.mark.parametrize("T", [192, 256])
def test_b91_interleaved_projections(engine, family, T):
    """B91: k and v, or q, k and v, interleaved in one buffer: T is read from the shape."""
    x = draw(family, lengths=(T,), K=64, V=64, dtype=BF16)
    want, d_want = oracle.forward(family, x), oracle.backward(family, x)
    x = to(engine.device, x)
    for names in (("k", "v"), ("q", "k", "v")):
        joint = torch.stack([x[name] for name in names], dim=1)
        views = {name: joint[:, i] for i, name in enumerate(names)}
        got = run(engine, family, x | views, "backward")
        check(got, want, BF16, names=("O", "final_state"))
        check(got, d_want, BF16)


@every()
def test_b93_kernels_are_keyed_by_dtype(engine, family):
    """B93: calls that differ in one dtype, in one process, each give their own right result."""
    base = {"gate_dtype": F32, "beta_dtype": F32, "state": F32, "index_dtype": torch.int32}
    turns = [
        {}, {"gate_dtype": BF16}, {"gate_dtype": F16}, {}, {"beta_dtype": BF16}, {},
        {"state": BF16}, {"state": F16}, {"state": None}, {}, {"index_dtype": torch.int64}, {},
    ]  # fmt: skip
    cases = {
        str(turn): Case(family, "", lengths=(70,), H=1, K=64, V=64, dtype=BF16, **(base | turn))
        for turn in turns
    }
    first = None
    for turn in turns:
        case = cases[str(turn)]
        got = run(engine, family, case.draw(), "backward", **case.call_options())
        check(got, case.truth("backward"), BF16)
        check(got, case.truth("forward"), BF16, names=("O", "final_state"))
        if not turn:
            first = first or got
            check_bitwise(got, first)


@every(("gdn", "kda"))
@pytest.mark.parametrize("T", [63, 65, 500, 1000])
def test_b95_lengths_off_the_chunk(engine, family, T):
    """B95: final_state where T is no multiple of a chunk."""
    x = r1(T, family=family)
    got = run(engine, family, x)
    check(got, oracle.forward(family, x), BF16, names=("O", "final_state"))
    if T == 65 and family == "gdn":
        near(got["O"].double().sum(), 2.4161653, 2e-2)
        near(got["O"].double().square().sum(), 1.5646727, 1e-2)
        near(got["final_state"].double().square().sum(), 115.68111, 1e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_b97_plans_by_name(family):
    """B97: an unknown plan, or another family's, is refused with the list of plans there are."""
    x = draw(family, lengths=(5,), K=8, V=8, dtype=F32)
    other = "kda_eager" if family != "kda" else "gdn_eager"
    summary = f"{family}_summary_eager"
    for name in (f"{family}_nonsense", other, summary, "eager", ""):
        with pytest.raises(NotImplementedError, match=rf"{family}_eager|expected <family>"):
            call(family, x, "forward", name, **extra(family))
    for name in (f"{family}_eager[chunk=17]", f"{family}_eager[chunks=64]"):
        with pytest.raises(NotImplementedError, match="chunk"):
            call(family, x, "forward", name, **extra(family))
    with pytest.raises(NotImplementedError, match=summary):
        call(family, x, "summary", f"{family}_eager", **extra(family))


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_b97_no_silent_slow_path(family):
    """B97: on a GPU a shape that no fast engine serves is refused, and eager is named."""
    x = to("cuda", draw(family, lengths=(5,), K=24, V=24, dtype=F64))
    with pytest.raises(NotImplementedError, match=f"{family}_eager"):
        call(family, x, **extra(family))


CHECKPOINT_LENGTHS = ((64,), (64, 64, 64), (65, 1, 128), (1,) * 70, (0, 64))


@every(("gdn", "kda", "gdn2", "gdp"))
@pytest.mark.parametrize("lengths", CHECKPOINT_LENGTHS, ids=lambda x: f"{len(x)} of {x[-1]}")
def test_b99_checkpoints_have_room(engine, family, lengths):
    """B99: rows for every length, and the same gradients as without checkpoints."""
    dtype = F32 if F32 in engine.dtypes else BF16
    case = Case(family, "", lengths=lengths, H=1, K=64, V=64, dtype=dtype, n=1)
    x = to(engine.device, case.draw())
    options, plan = case.call_options(), engine.plan(family)
    got = gradients(family, x, plan, **options, checkpoint_every_n_tokens=64)
    assert len(got["state_checkpoints"]) == max(sum(lengths) // 64 + len(lengths), 1)
    used = sum(-(-length // 64) for length in lengths)
    assert used <= len(got["state_checkpoints"])
    rows = {"state_checkpoints": got["state_checkpoints"][:used]}
    want = oracle.forward(family, case.draw(), **options, checkpoint_every_n_tokens=64)
    check(rows, want, dtype, engine.device, names=("state_checkpoints",))
    check(got, case.truth("backward"), dtype, engine.device)


HEADS = {
    "HV no multiple of H": ((3, 3, 4), ("3", "4")),
    "H no multiple of HV": ((4, 4, 3), ("4", "3")),
    "no key heads": ((2, 0, 2), ("HK=0",)),
    "HK neither H nor HV": ((2, 3, 4), ("3", "4")),
    "HK divides, but is neither": ((4, 2, 1), ("2", "4")),
}


@pytest.mark.parametrize("family", DELTA)
@pytest.mark.parametrize("heads", HEADS)
def test_b101_head_counts(family, heads):
    """B101: head counts that do not fit are a ValueError with both numbers."""
    (H, HK, HV), numbers = HEADS[heads]
    x = draw(family, lengths=(5,), H=max(H, HV), K=8, V=8, dtype=F32)
    x |= {"q": torch.ones(5, H, 8), "k": torch.ones(5, HK, 8), "v": torch.ones(5, HV, 8)}
    with pytest.raises(ValueError, match=r"head|HO|HK") as raised:
        call(family, x, **extra(family))
    assert isinstance(raised.value, InvalidNode)
    assert all(number in str(raised.value) for number in numbers), str(raised.value)


@every(DELTA)
@pytest.mark.parametrize("heads", [(4, 2, 2), (4, 4, 2), (2, 2, 4), (1, 3, 3)], ids=short)
def test_b101_head_counts_that_fit(engine, family, heads):
    """B101: all documented groupings work, in both directions."""
    H, HK, HV = heads
    case = Case(family, "", lengths=(9,), H=H, HK=HK, HV=HV, K=64, V=64, dtype=BF16, n=1)
    x = to(engine.device, case.draw())
    got = gradients(family, x, engine.plan(family), **case.call_options())
    check(got, case.truth("backward"), BF16)


# Mamba-2 -------------------------------------------------------------------------------------


@on_every_engine
@pytest.mark.parametrize("L", [96, 33, 64, 256])
def test_b103_gradient_of_a(engine, L):
    """B103: dA = sum over t of sum over d <= t of d 2^-d, 186 at L = 96."""
    x = mamba2_probe(L, 0.0, -LN2, bias=DT_ONE)
    x |= {"dO": torch.ones(L, 1, 64)}
    if F32 not in engine.dtypes:
        x = {n: t.to(BF16) if n in ("q", "k", "v", "dO") else t for n, t in x.items()}
    got = run(engine, "mamba2", x, "backward")
    d = torch.arange(L, dtype=F64)
    want = (d * 2.0**-d).cumsum(0).sum()
    if L == 96:
        near(want, 186.0, 1e-5)
    near(got["dA"][0], want, 1e-4 if F32 in engine.dtypes else 2e-2)


@on_every_engine
def test_b105_large_steps(engine):
    """B105: dt = 50 gives y = 50, dx = 50 and d dt = 1, all finite; so do dt = -50 and 1e-8."""
    dtype = F32 if F32 in engine.dtypes else BF16

    def back(raw, **options):
        x = mamba2_probe(64, raw, -1.0) | {"dO": torch.ones(64, 1, 64)}
        x = {n: t.to(dtype) if n in ("q", "k", "v", "dO") else t for n, t in x.items()}
        got = run(engine, "mamba2", x, "backward", **options)
        check(got, oracle.backward("mamba2", x, **options), dtype, engine.device,
              names=("dQ", "dK", "dV", "dG", "d_dt_bias"))  # fmt: skip
        for name, value in got.items():
            assert torch.isfinite(value).all(), name
        return got

    got = back(50.0)
    near(got["O"][..., 0], torch.full((64, 1), 50.0, dtype=F64), 1e-4)
    near(got["dV"][..., 0], torch.full((64, 1), 50.0, dtype=F64), 1e-4)
    near(got["dG"], torch.ones(64, 1, dtype=F64), 1e-4)
    assert got["dA"].abs().max() < 1e-12
    assert back(-50.0)["O"].abs().max() < 1e-19
    back(1e-8, dt_softplus=False)


@on_every_engine
@pytest.mark.parametrize("L", [1, 5])
def test_b107_d_per_channel(engine, L):
    """B107: D of shape [H, P] is one factor per channel; D [H * P] is refused."""
    dtype = F32 if F32 in engine.dtypes else BF16
    x = draw("mamba2", lengths=(L,), H=1, HV=2, K=128, V=64, dtype=dtype)
    x |= {
        "k": torch.zeros_like(x["k"]),
        "v": P((L, 2, 64), 1).to(dtype),
        "d": P((2, 64), 6, F32),
    }
    want = x["d"].double() * x["v"].double()
    check(run(engine, "mamba2", x), {"O": want}, dtype, engine.device)
    state, outputs = None, []
    for t in range(L):
        token = {name: v[t : t + 1] if len(v) == L and name not in ("a", "d") else v
                 for name, v in x.items()} | {"cu_seqlens": offsets((1,))}  # fmt: skip
        got = run(engine, "mamba2", token | {"initial_state": state})
        state = got["final_state"]
        outputs.append(got["O"])
    check({"O": torch.cat(outputs)}, {"O": want}, dtype, engine.device)
    with pytest.raises(ValueError, match="D"):
        run(engine, "mamba2", x | {"d": P((128,), 6, F32)})


@on_every_engine
def test_b109_one_step_at_a_time(engine):
    """B109: four steps of one token are one call of four, for three sequences of eight heads."""
    x = draw("mamba2", lengths=(4, 4, 4), H=1, HV=8, K=64, V=64, dtype=BF16, state=F32)
    whole = run(engine, "mamba2", x)
    state = x["initial_state"]
    for t in range(4):
        token = {name: v[t::4] if len(v) == 12 else v for name, v in x.items()}
        token |= {"initial_state": state, "cu_seqlens": offsets((1, 1, 1))}
        got = run(engine, "mamba2", token)
        state = got["final_state"]
        assert state.shape == (3, 8, 64, 64)
        want = {"O": whole["O"][t::4].double().cpu()}
        check(got, want, BF16)
    check({"final_state": state}, {"final_state": whole["final_state"].double().cpu()}, BF16)


# Determinism, normalization, chunk sizes -----------------------------------------------------


@every()
def test_b111_the_same_bits_every_time(engine, family):
    """B111: under use_deterministic_algorithms repeated runs agree in every bit."""
    mamba2 = family == "mamba2"
    case = Case(
        family, "", lengths=(100, 0, 33), H=1, HV=8, K=64, V=64, dtype=BF16, n=1, gate="mixed",
        params=("d", "z", "dt_bias") if mamba2 else ("a_log", "dt_bias"),
        options={} if mamba2 else {"safe_gate": True},
    )  # fmt: skip
    x = to(engine.device, case.draw())
    torch.use_deterministic_algorithms(True)
    try:
        first = gradients(family, x, engine.plan(family), **case.call_options())
        for _ in range(4 if engine.device == "cpu" else 20):
            again = gradients(family, x, engine.plan(family), **case.call_options())
            check_bitwise(again, first)
    finally:
        torch.use_deterministic_algorithms(False)


@every(("gdn", "kda", "mamba2"))
@pytest.mark.parametrize("copies", [4, 8])
def test_b113_alone_and_repeated(engine, family, copies):
    """B113: a sample repeated in a batch gives equal rows; with batch_invariant, those it has
    alone."""
    x = draw(family, lengths=(256,), H=1, K=64, V=64, dtype=BF16, d_final_state=False)
    rows = {name: t.repeat(copies, *[1] * (t.dim() - 1)) for name, t in x.items() if len(t) == 256}
    batch = x | rows | {"cu_seqlens": offsets((256,) * copies)}
    for invariant in (False, True):
        alone = run(engine, family, x, batch_invariant=invariant)["O"]
        many = run(engine, family, batch, batch_invariant=invariant)["O"].view(copies, 256, 1, 64)
        assert (many == many[:1]).all()
        if invariant:
            assert torch.equal(many[0], alone)
        else:
            check({"O": many[0]}, {"O": alone.double().cpu()}, BF16)


@every(DELTA)
def test_b115_one_epsilon_in_both_directions(engine, family):
    """B115: x / sqrt(x^2 + e) and e / (x^2 + e)^1.5 with e = 1e-6, where x^2 is no larger."""
    dtype = F32 if F32 in engine.dtypes else BF16
    x = one_hot(family, 1, beta=1.0, K=64, V=64, dtype=dtype)
    x["q"] = x["q"] * 1e-3
    x["dO"] = torch.zeros(1, 1, 64, dtype=dtype)
    x["dO"][..., 0] = 1.0
    got = run(engine, family, x, "backward", use_qk_l2norm=True, scale=1.0)
    q = x["q"].double().max().item()
    near(got["O"][0, 0], torch.full((64,), q / (q * q + 1e-6) ** 0.5, dtype=F64), 5e-3)
    rel = 1e-4 if dtype == F32 else 2e-2
    want = torch.zeros(64, dtype=F64)
    want[0] = 1e-6 / (q * q + 1e-6) ** 1.5
    near(got["dQ"][0, 0], want, rel)
    if dtype == F32:
        near(got["O"][0, 0, 0], 0.70710678, 1e-5)
        near(got["dQ"][0, 0, 0], 353.55339, 1e-5)


@every()
@pytest.mark.parametrize("chunk", [16, 32, 64, 128, 8, 48])
def test_b117_chunk_sizes(engine, family, chunk):
    """B117: every chunk size that a plan name takes serves both directions; others are refused."""
    dtype = F32 if F32 in engine.dtypes else BF16
    case = Case(family, "", lengths=(100, 0, 33), K=64, V=64, dtype=dtype, n=1)
    x = to(engine.device, case.draw())
    plan = f"{engine.plan(family)}[chunk={chunk}]"
    _, refusal = attempt(lambda: call(family, x, "forward", plan, **case.call_options()))
    if refusal:
        assert "chunk" in refusal
        assert engine.name != "eager" or chunk in (8, 48)
        return
    got = gradients(family, x, plan, **case.call_options())
    check(got, case.truth("backward"), dtype, engine.device)


@on_every_engine
def test_b119_which_gate_is_on_which_axis(engine):
    """B119: the erase gate acts on keys, the write gate on values."""
    x = one_hot("gdn2", 2, g=-LN2, K=128, V=64)
    x["beta"] = torch.full((2, 1, 128), 0.25, dtype=BF16)
    x["w"] = torch.ones(2, 1, 64, dtype=BF16)
    x["w"][..., 0] = 0.5
    got = run(engine, "gdn2", x, scale=1.0)["O"].float().cpu()
    assert got[:, 0, 0].tolist() == [0.5, 0.6875]
    assert got[:, 0, 1].tolist() == [1.0, 1.375]
    for name, size in (("beta", 64), ("w", 128)):
        wrong = x | {name: torch.ones(2, 1, size, dtype=BF16)}
        with pytest.raises(ValueError, match=rf"\.{name}"):
            run(engine, "gdn2", wrong)


@on_every_engine
def test_b119_gdn2_collapses(engine):
    """B119: one scalar for both gates makes GDN-2 KDA; a scalar decay makes both GDN."""
    scalar = r1(70, 128, 64)
    per_key = scalar | {"g": scalar["g"][..., None].expand(70, 1, 128).contiguous()}
    beta = scalar["beta"].to(BF16)
    gdn2 = per_key | {
        "beta": beta[..., None].expand(70, 1, 128).contiguous(),
        "w": beta[..., None].expand(70, 1, 64).contiguous(),
    }
    want = {name: t.double().cpu() for name, t in run(engine, "gdn", scalar).items()}
    check(run(engine, "kda", per_key), want, BF16)
    check(run(engine, "gdn2", gdn2), want, BF16)


# The batch-first functions, gates and masks -----------------------------------------------------


def surface(*rows, pools=False):
    """Engines that the functions name, with rows; for pools, those that the device chooses."""
    names = ("eager-cpu", "triton-cuda") if pools else ("eager-cpu", "eager-cuda", "triton-cuda")
    if not rows:
        return [param(engine) for engine in ENGINES if engine.id in names]
    return [row for row in grid(*rows) if row.values[0].id in names]


on_every_impl = pytest.mark.parametrize("engine", surface())
on_every_pool = pytest.mark.parametrize(
    ("engine", "kind"), surface(*((k, k) for k in ("recurrent", "paged_chunk")), pools=True)
)


def impl(engine):
    return {"impl": IMPL[engine.name]}


def through_pool(kind, family, x, pool, slots, scale=None, **options):
    """The output of recurrent_* or paged_chunk_* over a pool, packed."""
    given = batch.tokens(family, x) | options
    if not (kind == "paged_chunk" and family == "kda"):
        given["scale"] = scale
    name = "state_cache" if kind == "paged_chunk" else "initial_state"
    slots = torch.tensor(slots, dtype=torch.int32, device=pool.device)
    got = batch.function(kind, family)(**given, **{name: pool}, state_indices=slots)
    return (got if kind == "paged_chunk" else got[0])[0]


@on_every_impl
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=short)
def test_b13_gradients_of_chunk_gdn(engine, size, dtype):
    """B13: chunk_gdn's five gradients, for both widths of the key tile."""
    x = r1(128, size, size, dtype=dtype)
    x["d_final_state"] = torch.zeros(1, 1, size, size)
    got = batch.gradients("chunk", "gdn", to(engine.device, x), **impl(engine))
    check(got, oracle.backward("gdn", x), dtype)


@pytest.mark.parametrize(
    ("engine", "kind"), surface(("chunk", "chunk"), ("recurrent", "recurrent"))
)
@pytest.mark.parametrize("K", [96, 160, 192, 48])
def test_b23_odd_key_dims_of_functions(engine, kind, K):
    """B23: right, or refused by name; on a CPU always right."""
    x = r1(128, K, 128)
    placed = to(engine.device, x)
    got, refusal = attempt(
        lambda: batch.call(kind, "gdn", placed, output_final_state=True, **impl(engine))
    )
    if refusal:
        assert engine.name != "eager"
        assert f"K={K}" in refusal
        return
    check(got, oracle.forward("gdn", x), BF16, names=("O", "final_state"))


@pytest.mark.parametrize(("engine", "family"), surface(("gdn", "gdn"), ("kda", "kda")))
@pytest.mark.parametrize("T", [1, 2, 7, 8, 15, 16, 17])
def test_b25_short_batches(engine, family, T):
    """B25: chunk and recurrent functions agree on sequences shorter than a tile."""
    x = r1(T, family=family)
    x["d_final_state"] = torch.zeros(1, 1, 128, 128)
    placed = to(engine.device, x)
    got = batch.gradients("chunk", family, placed, **impl(engine))
    check(got, oracle.backward(family, x), BF16)
    with torch.no_grad():
        step = batch.call("recurrent", family, placed, output_final_state=True, **impl(engine))
    want = oracle.forward(family, x)
    for outputs in (got, step):
        check(outputs, want, BF16, names=("O", "final_state"))


@on_every_impl
@pytest.mark.parametrize("size", [128, 256])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=short)
def test_b27_chunk_gdn_whole_and_in_pieces(engine, size, dtype):
    """B27: chunk_gdn in two pieces, with the carried state, is chunk_gdn in one."""
    x = to(engine.device, r1(256, size, size, dtype=dtype))
    options = impl(engine) | {"output_final_state": True}
    whole = batch.call("chunk", "gdn", x, 1, **options)
    want = {name: t.double().cpu() for name, t in whole.items()}
    for first in (128, 100, 1, 255):
        state, outputs = None, []
        for rows in (slice(0, first), slice(first, 256)):
            part = {name: t[rows] for name, t in x.items() if name != "cu_seqlens"}
            got = batch.call("chunk", "gdn", part | {"initial_state": state}, 1, **options)
            state = got["final_state"]
            outputs.append(got["O"])
        check({"O": torch.cat(outputs), "final_state": state}, want, dtype)


@on_every_impl
def test_b29_final_states_of_recurrent_gdn(engine):
    """B29: one row for each sequence, and initial_state as it was."""
    x = draw("gdn", lengths=(4, 4), K=16, V=8, dtype=F16, d_final_state=False)
    x["initial_state"] = torch.ones(2, 2, 8, 16)
    placed = to(engine.device, x)
    got, refusal = attempt(
        lambda: batch.call("recurrent", "gdn", placed, 2, output_final_state=True, **impl(engine))
    )
    if refusal:
        assert engine.name != "eager"
        assert "V=8" in refusal
        return
    assert got["final_state"].shape == (2, 2, 8, 16)
    check(got, oracle.forward("gdn", x), F16, names=("O", "final_state"))
    assert (placed["initial_state"] == 1.0).all()


@on_every_impl
def test_b31_permuted_state_of_recurrent_gdn(engine):
    """B31: a permuted state is read by its strides, or refused by name."""
    x = draw("gdn", lengths=(2,), H=1, HV=2, K=80, V=96, dtype=F32, d_final_state=False)
    storage = P((2, 1, 96, 80), 6, F32).to(engine.device)
    x["initial_state"] = storage.permute(1, 0, 2, 3)
    want = oracle.forward("gdn", to("cpu", x))
    got, refusal = attempt(
        lambda: batch.call("recurrent", "gdn", to(engine.device, x), output_final_state=True,
                           **impl(engine))
    )  # fmt: skip
    if refusal:
        assert engine.name != "eager"
        assert re.search(r"initial_state|K=80", refusal)
        return
    check(got, want, F32, engine.device, names=("O", "final_state"))


@on_every_impl
def test_b43_chunk_gdn_whose_offsets_stop_early(engine):
    """B43: 14 rows of NaN past the end of [0, 1, 2, 3] are not read."""
    x = draw("gdn", lengths=(1, 1, 1), tail=14, H=1, K=128, V=128, dtype=BF16)
    want = oracle.forward("gdn", x)
    placed = to(engine.device, x)
    for kind in ("chunk", "recurrent"):
        got = batch.call(kind, "gdn", placed, output_final_state=True, **impl(engine))
        got["O"] = got["O"][:3]
        check(got, want | {"O": want["O"][:3]}, BF16, names=got)


@on_every_pool
@pytest.mark.parametrize("family", ["gdn", "kda"])
def test_b57_padding_of_functions_is_no_slot(engine, kind, family):
    """B57: index -1 is no slot of the pool; neither is 0 here."""
    x = to(engine.device, one_hot(family, 3, lengths=(1, 1, 1)))
    pool = torch.arange(5.0).view(5, 1, 1, 1).expand(5, 1, 128, 128).contiguous()
    before = pool.clone()
    pool = pool.to(engine.device)
    scale = None if (kind, family) == ("paged_chunk", "kda") else 1.0
    o = through_pool(kind, family, x, pool, [4, -1, 0], scale)
    near(pool[4, 0, :, 0], torch.full((128,), 2.5, dtype=F64), 1e-6)
    assert (pool[4, 0, :, 1:] == 4.0).all()
    near(o[0], torch.full((1, 128), 2.5 * (1.0 if scale else 128**-0.5), dtype=F64), 5e-3)
    assert not o[1:].any()
    assert torch.equal(pool[:4].cpu(), before[:4])


@on_every_pool
@pytest.mark.parametrize("count", [1, 2, 4, 33])
def test_b59_padding_of_functions_gives_zeros(engine, kind, count):
    """B59: rows of padding are exactly zero, whatever the output's memory held."""
    x = to(engine.device, one_hot("gdn", count, lengths=(1,) * count))
    slots = [-1] * count
    slots[1::3] = range(1, len(slots[1::3]) + 1)
    pool = torch.ones(40, 1, 128, 128, device=engine.device)
    o = through_pool(kind, "gdn", x, pool, slots, 1.0)
    live = torch.tensor(slots) > 0
    assert not o.cpu()[~live].any()
    assert (o.cpu()[live] == 1.0).all()


@on_every_pool
def test_b63_pools_of_functions_with_gaps(engine, kind):
    """B63: slots may lie apart, and the gaps keep their NaN; rows that are not dense raise."""
    x = to(engine.device, draw("gdn", lengths=(3, 4), H=2, K=64, V=64, dtype=BF16))
    dense = P((4, 2, 64, 64), 6, F32).to(engine.device)
    packed = dense.clone()
    want = through_pool(kind, "gdn", x, packed, [3, 1])
    wide = torch.full((4, 2 * 2 * 64 * 64), float("nan"), device=engine.device)
    double = torch.full((8, 2, 64, 64), float("nan"), device=engine.device)
    for store, pool in (
        (wide, wide[:, : 2 * 64 * 64].view(4, 2, 64, 64)),
        (double, double[::2]),
    ):
        pool.copy_(dense)
        gaps = torch.isnan(store)
        assert torch.equal(through_pool(kind, "gdn", x, pool, [3, 1]), want)
        assert torch.equal(pool, packed)
        assert torch.equal(torch.isnan(store), gaps)
    with pytest.raises(ValueError, match="dense"):
        through_pool(kind, "gdn", x, dense.mT.contiguous().mT, [3, 1])


@on_every_impl
def test_b75_chunk_gdn_at_changing_lengths(engine):
    """B75: one compiled function, right at every length, with few compilations."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def step(x):
        return ops.chunk_gdn(**x, **impl(engine))[0] * 1.0

    compiled = torch.compile(step, backend=counter, fullgraph=True)
    for L in (20, 30, 40, 1, 64):
        x = draw("gdn", lengths=(L, L), H=1, K=64, V=64, dtype=BF16)
        given = batch.tokens("gdn", to(engine.device, x), 2)
        with torch.no_grad():
            assert torch.equal(compiled(given), step(given)), L
    assert counter.frame_count <= 3
    torch._dynamo.reset()


def weighted(x, seed=7):
    """The sum of x with the fixed pattern, in x's own dtype: gradients stay the views they are."""
    return (x * P(x.shape, seed, x.dtype).to(x.device)).sum()


BATCH_LOSSES = {
    "concatenation": lambda o, o2, s: weighted(torch.cat([o, o2], dim=1)) + s.sum(),
    "transposition": lambda o, o2, s: weighted(o.transpose(1, 2)) + o2.sum() + s.sum(),
    "every other token": lambda o, o2, s: weighted(o[:, ::2]) + o2.mean(0).sum() + s.sum(),
    "transposed state": lambda o, o2, s: weighted(s.mT) + weighted(o * o2),
}


@on_every_impl
@pytest.mark.parametrize("loss", BATCH_LOSSES)
def test_b77_gradients_of_a_batch_that_are_views(engine, loss):
    """B77: a batch of two, whose gradients arrive as views of something else."""
    x = to(engine.device, draw("gdn", lengths=(20, 20), K=64, V=64, dtype=F32, state=F32))
    given = batch.tokens("gdn", x, 2) | {"initial_state": x["initial_state"]}
    results, views = [], []
    for contiguous in (False, True):
        leaves = {name: t.clone().requires_grad_() for name, t in given.items()}
        o, s = ops.chunk_gdn(**leaves, output_final_state=True, **impl(engine))
        o2, _ = ops.chunk_gdn(**leaves, scale=0.3, **impl(engine))
        for t in (o, o2, s):
            if contiguous:
                t.register_hook(lambda g: g.contiguous())
            else:
                t.register_hook(lambda g: views.append(not g.is_contiguous()))
        results.append(torch.autograd.grad(BATCH_LOSSES[loss](o, o2, s), list(leaves.values())))
    assert any(views), "no gradient was a view"
    for name, a, b in zip(given, *results, strict=True):
        same_shape_and_finite(name, a, b)
        assert relative_error(a, b) <= 1e-6, name


FUNCTION_DTYPES = {
    "q fp32 among bf16": ({"q": F32}, ("k", "q"), ("float32", "bfloat16")),
    "v fp16 among bf16": ({"v": F16}, ("v",), ("float16", "bfloat16")),
    "initial_state fp64": ({"initial_state": F64}, ("initial_state",), ("float32", "float64")),
    "beta int": ({"beta": torch.int32}, ("beta",), ("int32",)),
    "gate int": ({"gate": torch.int64}, ("gate",), ("int64",)),
}


@pytest.mark.parametrize("kind", ["chunk", "recurrent"])
@pytest.mark.parametrize("family", ["gdn", "kda"])
@pytest.mark.parametrize("mix", FUNCTION_DTYPES)
def test_b81_dtypes_that_do_not_mix_in_functions(kind, family, mix):
    """B81: a TypeError that names the function, the tensor, what is wanted and what was got."""
    changes, names, words = FUNCTION_DTYPES[mix]
    x = draw(family, lengths=(5, 5), K=8, V=8, dtype=BF16, state=F32)
    given = batch.tokens(family, x, 2) | {"initial_state": x["initial_state"]}
    given |= {name: given[name].to(dtype) for name, dtype in changes.items()}
    with pytest.raises(TypeError) as raised:
        batch.function(kind, family)(**given)
    text = str(raised.value)
    assert any(text.startswith(f"{kind}_{family}.{name}:") for name in names), text
    assert all(word in text for word in words), text


@on_every_impl
def test_b81_dtypes_that_do_mix_in_functions(engine):
    """B81: bf16 strengths and fp16 gates beside bf16 tokens, and an fp32 gradient of a bf16 o."""
    case = Case("gdn", "", lengths=(9, 9), K=64, V=64, dtype=BF16, gate_dtype=F16,
                beta_dtype=F16)  # fmt: skip
    x = to(engine.device, case.draw())
    got = batch.gradients("chunk", "gdn", x, 2, **impl(engine))
    check(got, case.truth("backward"), BF16)
    wide = batch.tokens("gdn", x, 2)
    wide["q"] = wide["q"].requires_grad_()
    o, _ = ops.chunk_gdn(**wide, initial_state=x["initial_state"], **impl(engine))
    (dq,) = torch.autograd.grad(o.float(), wide["q"], x["dO"].float().view(o.shape))
    assert dq.dtype == BF16


@on_every_pool
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_b83_pools_of_functions_that_are_views(engine, kind, compiled):
    """B83: two writes in a row into a pool that is a view reach its base, compiled or not."""
    x = to(engine.device, draw("gdn", lengths=(1, 1), H=1, K=64, V=64, dtype=BF16))
    index = torch.tensor([2, 1], dtype=torch.int32, device=engine.device)
    keep = torch.tensor([True, False], device=engine.device)
    given = batch.tokens("gdn", x)
    name = "state_cache" if kind == "paged_chunk" else "initial_state"

    def twice(big):
        pool = big[0].view(4, 1, 64, 64)
        run = batch.function(kind, "gdn")
        first = run(**given, **{name: pool}, state_indices=index, has_initial_state=keep)
        return first, run(**given, **{name: pool}, state_indices=index)

    start = P((2, 4 * 64 * 64), 6, F32).to(engine.device)
    want = start.clone()
    outputs = twice(want)
    assert torch.equal(want[1], start[1])
    assert not torch.equal(want[0], start[0])
    if compiled:
        torch._dynamo.reset()
        got = start.clone()
        again = torch.compile(twice, backend="aot_eager", fullgraph=True)(got)
        assert torch.equal(got, want)
        for a, b in zip(again, outputs, strict=True):
            a, b = (t if kind == "paged_chunk" else t[0] for t in (a, b))
            assert torch.equal(a, b)
        torch._dynamo.reset()


@on_every_pool
@pytest.mark.parametrize("inside", [True, False], ids=["pool made inside", "pool made outside"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_b85_functions_in_inference_mode(engine, kind, inside, compiled):
    """B85: pools are written under inference_mode, wherever they were made, compiled or not."""
    x = draw("gdn", lengths=(1, 1), H=1, K=64, V=64, dtype=BF16)
    start = P((4, 1, 64, 64), 6, F32)
    want = oracle.forward("gdn", x | {"initial_state": start,
                                      "state_indices": torch.tensor([2, 1])})  # fmt: skip
    outside = start.to(engine.device)
    index = torch.tensor([2, 1], dtype=torch.int32, device=engine.device)
    name = "state_cache" if kind == "paged_chunk" else "initial_state"

    def step(given, pool):
        return batch.function(kind, "gdn")(**given, **{name: pool}, state_indices=index)

    torch._dynamo.reset()
    run = torch.compile(step, backend="aot_eager") if compiled else step
    with torch.inference_mode():
        pool = outside.clone() if inside else outside
        o = run(batch.tokens("gdn", to(engine.device, x)), pool)
    o = (o if kind == "paged_chunk" else o[0])[0]
    check({"O": o, "final_state": pool}, want, BF16, names=("O", "final_state"))
    torch._dynamo.reset()


@pytest.mark.parametrize(("engine", "family"), surface(("gdn", "gdn"), ("kda", "kda")))
@pytest.mark.parametrize("copies", [4, 8])
def test_b113_a_sample_in_a_batch(engine, family, copies):
    """B113: copies of a sample give equal rows, dense and packed, and those of it alone (LO)."""
    x = draw(family, lengths=(256,), H=1, K=64, V=64, dtype=BF16, d_final_state=False)
    x = to(engine.device, x)
    alone = batch.call("chunk", family, x, 1, **impl(engine))["O"]
    many = {n: t.repeat(copies, *[1] * (t.dim() - 1)) for n, t in x.items() if n != "cu_seqlens"}
    many["cu_seqlens"] = offsets((256,) * copies).to(engine.device)
    for lead in (copies, None):
        rows = batch.call("chunk", family, many, lead, **impl(engine))["O"].view(copies, 256, 1, 64)
        assert (rows == rows[:1]).all()
        check({"O": rows[0]}, {"O": alone.double().cpu()}, BF16)


@pytest.mark.parametrize("family", ["gdn", "kda"])
def test_b117_functions_have_no_chunk_size(family):
    """B117: a chunk size cannot differ between directions: the functions do not take one."""
    x = batch.tokens(family, draw(family, lengths=(100,), K=8, V=8, dtype=F32), 1)
    with pytest.raises(TypeError, match="chunk_size"):
        batch.function("chunk", family)(**x, chunk_size=32)


on_every_gate = pytest.mark.parametrize("engine", surface())


def gate_of(engine, raw, a_log, kind, lower_bound=None, dtype=F32):
    """gate_transform of one head, and gradients of its sum."""
    given = [torch.tensor(raw, dtype=dtype).view(1, -1, 1), torch.tensor([a_log]), torch.zeros(1)]
    given = [t.to(engine.device).requires_grad_() for t in given]
    out = ops.gate_transform(*given, kind=kind, lower_bound=lower_bound, **impl(engine))
    grads = torch.autograd.grad(out, given, torch.ones_like(out))
    return out.flatten().cpu(), *(g.flatten().cpu() for g in grads)


@on_every_gate
def test_b07_saturated_bounded_gates(engine):
    """B07: a saturated slope is 0, whatever exp(A_log) it meets; never NaN."""
    raw = [10.0, -10.0, 0.0, 1e-30]
    out, d_raw, d_alog, d_bias = gate_of(engine, raw, 50.0, "bounded", -5.0)
    assert out.tolist() == [-5.0, 0.0, -2.5, -2.5]
    assert d_raw[:2].tolist() == [0.0, 0.0]
    near(d_raw[2], -1.25 * math.exp(50.0), 1e-4)
    assert torch.isfinite(torch.cat([d_alog, d_bias])).all()
    out, d_raw, d_alog, d_bias = gate_of(engine, raw, 100.0, "bounded", -5.0)
    assert out.tolist() == [-5.0, 0.0, -2.5, -5.0]
    assert d_raw[:2].tolist() == [0.0, 0.0]
    assert not torch.isnan(torch.cat([d_raw, d_alog, d_bias])).any()
    assert d_raw[2] < -1e30
    assert torch.isfinite(d_alog).all()
    assert gate_of(engine, [0.0], 100.0, "bounded", -5.0)[2].item() == 0.0


@on_every_gate
@pytest.mark.parametrize("dtype", [F32, BF16], ids=short)
def test_b09_softplus_on_both_sides(engine, dtype):
    """B09: softplus far on either side, values and slopes, with no inf * 0."""
    out, d_raw, d_alog, d_bias = gate_of(engine, [100.0, 1000.0, 20.0, -200.0], 0.0, "softplus",
                                         dtype=dtype)  # fmt: skip
    near(out, [-100.0, -1000.0, -20.000000002, 0.0], 1e-6)
    assert out[3].item() == 0.0
    near(d_raw, [-1.0, -1.0, -1.0, 0.0], 1e-6)
    assert d_raw[3].item() == 0.0
    near(d_alog, [-1120.0], 1e-6)
    near(d_bias, [-3.0], 1e-6)


@on_every_gate
def test_b11_parameters_in_16_bits(engine):
    """B11: a bf16 A_log is widened before the exponential; so is dt_bias."""
    a_log = math.log(3.3)
    for dtype, want in ((F32, -2.28738570), (BF16, -2.29056744)):
        params = [torch.tensor([t], dtype=dtype, device=engine.device) for t in (a_log, 0.0)]
        raw = torch.zeros(1, 1, 1, device=engine.device)
        out = ops.gate_transform(raw, *params, kind="softplus", **impl(engine))
        near(out.flatten(), [want], 1e-6)
    bias = torch.tensor([a_log], dtype=BF16, device=engine.device)
    out = ops.gate_transform(raw, torch.zeros(1, device=engine.device), bias, kind="softplus",
                             **impl(engine))  # fmt: skip
    near(out.flatten(), [-math.log1p(math.exp(bias.item()))], 1e-6)


@on_every_gate
@pytest.mark.slow
@pytest.mark.parametrize("rows", [65536, 65537, 262141])
@pytest.mark.parametrize("kind", ["softplus", "bounded"])
@pytest.mark.parametrize("per_channel", [False, True], ids=["per head", "per channel"])
def test_b69_more_gates_than_a_grid(engine, rows, kind, per_channel):
    """B69: the last row is the first, and parameter gradients count every row."""
    shape = (2, 3) if per_channel else (2,)
    given = [torch.full((1, rows, *shape), 0.5), torch.full((2,), 0.3), torch.full(shape, 0.1)]
    given = [t.to(engine.device).requires_grad_() for t in given]
    floor = -5.0 if kind == "bounded" else None
    out = ops.gate_transform(*given, kind=kind, lower_bound=floor, **impl(engine))
    assert (out == out[:, :1]).all()
    d_raw, d_alog, d_bias = torch.autograd.grad(out.sum(), given)
    assert (d_raw == d_raw[:, :1]).all()
    near(d_bias, d_raw[0, 0].double().cpu() * rows, 1e-5)
    one = [t[:, :1] if t.dim() > 2 or t.shape[0] == 1 else t for t in given]
    small = ops.gate_transform(*one, kind=kind, lower_bound=floor, **impl(engine))
    (alone,) = torch.autograd.grad(small.sum(), given[1])
    near(d_alog, alone.double().cpu() * rows, 1e-5)


def test_names_are_known():
    """The ops that this file calls are all there are for the families."""
    assert set(OPS) == set(FAMILIES)
    assert all(hasattr(lagraph.ops, name) for name in OPS.values())
