"""The fused recurrent_* under Triton's interpreter, through the public functions.

Not collected by itself: `test_paged.py` runs it in a process that has TRITON_INTERPRET=1 from the
start. The interpreter multiplies bf16 wrongly, so dtypes here are fp16 and fp32.
"""

from __future__ import annotations

import os

import batch
import oracle
import pytest
import test_paged
import torch
from cases import F16, F32, Engine
from draw import draw
from oracle import FAMILIES
from serving import check_states
from tolerance import check

import lagraph.ops.form as form
from lagraph import errors, ops

assert os.environ.get("TRITON_INTERPRET") == "1"

ENGINE = Engine("triton", "cpu", (F32, F16))


@pytest.fixture(autouse=True)
def kernels(monkeypatch, poison):
    """CPU tensors are served by the kernels."""
    monkeypatch.setattr(form, "engine_of", lambda *args: "triton")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("lead", [None, 3], ids=["packed", "dense"])
def test_states_out_of_place(family, dtype, lead):
    lengths = (5, 0, 7) if lead is None else (4, 4, 4)
    n = 2 if family == "gdp" else 1
    x = draw(family, lengths=lengths, H=2, HV=4, K=12, V=20, n=n, dtype=dtype, state=F32,
             tail=3 if lead is None else 0)  # fmt: skip
    before = x["initial_state"].clone()
    with torch.no_grad():
        got = batch.call("recurrent", family, x, lead, output_final_state=True,
                         **batch.extra(family))  # fmt: skip
    got["O"] = got["O"][: sum(lengths)]
    want = oracle.forward(family, x, **batch.extra(family))
    want["O"] = want["O"][: sum(lengths)]
    assert got["final_state"].dtype == F32
    check(got, want, dtype, "cuda", names=("O", "final_state"))
    assert torch.equal(x["initial_state"], before)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "test",
    [test_paged.test_dense_batches, test_paged.test_fresh_slots_hold_anything,
     test_paged.test_slots_that_lie_apart, test_paged.test_a_sequence_in_calls_is_the_sequence],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_pools(test, family, monkeypatch):
    monkeypatch.setattr(test_paged, "check", lambda *a, **k: check(*a, device="cuda", **k))
    getattr(test, "__wrapped__", test)(ENGINE, family, "recurrent")


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_pools_in_16_bits(dtype):
    test_paged.test_selected_slots_are_advanced(ENGINE, "gdn", "recurrent", dtype)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dense", [False, True], ids=["packed", "dense"])
@pytest.mark.parametrize(("pool", "kept"), [(None, F32), (F16, F16), (F32, F16)], ids=str)
def test_states_after_every_token(family, dense, pool, kept):
    check_states(family, "cpu", F16 if dense else F32, dense=dense, pool=pool, kept=kept)


def test_strides_and_dtypes():
    """Permuted states, channels that are not innermost, strengths and gates of other dtypes."""
    x = draw("kda", lengths=(5, 5), K=12, V=20, dtype=F32, state=F32)
    given = batch.tokens("kda", x, 2)
    with torch.no_grad():
        want, state = ops.recurrent_kda(**given, initial_state=x["initial_state"],
                                        output_final_state=True)  # fmt: skip
        views = {m: t.mT.contiguous().mT for m, t in given.items() if t.dim() == 4}
        views["beta"] = given["beta"].double()
        state_view = x["initial_state"].mT.contiguous().mT
        got, last = ops.recurrent_kda(**given | views, initial_state=state_view,
                                      output_final_state=True)  # fmt: skip
        narrow = ops.recurrent_kda(**given | {"gate": given["gate"].half()})[0]
    assert torch.equal(got, want)
    assert torch.equal(last, state)
    assert (narrow - ops.recurrent_kda(**given)[0]).abs().max() < 1e-2


def test_autocast():
    """Tokens are cast, gates, strengths and states not."""
    x = draw("gdn2", lengths=(5, 5), K=12, V=20, dtype=F32)
    given = batch.tokens("gdn2", x, 2)
    cast = {m: t.half() if m in ("q", "k", "v", "w") else t for m, t in given.items()}
    with torch.no_grad():
        with torch.autocast("cpu", F16):
            got = ops.recurrent_gdn2(**given | {"q": cast["q"]}, output_final_state=True)
        want = ops.recurrent_gdn2(**cast, output_final_state=True)
    assert got[0].dtype == F16
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_refusals():
    x = draw("gdn", lengths=(5,), K=300, V=20, dtype=F32)
    with pytest.raises(errors.PlanNotOffered, match=r"recurrent_gdn.*K=300"):
        ops.recurrent_gdn(**batch.tokens("gdn", x, 1))
    x = draw("gdn", lengths=(5,), K=12, V=20)
    with pytest.raises(errors.PlanNotOffered, match="float64"):
        ops.recurrent_gdn(**batch.tokens("gdn", x, 1))
    given = batch.tokens("gdn", draw("gdn", lengths=(5,), K=12, V=20, dtype=F32), 1)
    with pytest.raises(errors.NotDifferentiable, match=r"\bv requires a gradient"):
        ops.recurrent_gdn(**given | {"v": given["v"].requires_grad_()})
    x = draw("mamba2", lengths=(5,), H=2, K=12, V=20, dtype=F32)
    for wrong in ({"A": torch.ones(3)}, {"D": torch.ones(2, 3)}, {"dt_bias": torch.ones(1)}):
        with pytest.raises(errors.ShapeMismatch, match=rf"recurrent_mamba2\.{next(iter(wrong))}"):
            ops.recurrent_mamba2(**batch.tokens("mamba2", x, 1) | wrong)


@pytest.mark.parametrize("family", FAMILIES)
def test_traced(family):
    """The fakes are right: shapes under a compiler, in and out of place."""
    n = 2 if family == "gdp" else 1
    x = draw(family, lengths=(5, 5), K=12, V=20, n=n, dtype=F32)
    given = batch.tokens(family, x, 2)

    def step(given, pool, index):
        run = batch.function("recurrent", family)
        o, last = run(**given, output_final_state=True, **batch.extra(family))
        again, _ = run(**given, initial_state=pool, state_indices=index, **batch.extra(family))
        return o, last, again

    index = torch.tensor([2, 0], dtype=torch.int32)
    pools = [torch.ones(4, 2, 20, 12) for _ in range(2)]
    with torch.no_grad():
        got = torch.compile(step, fullgraph=True, backend="aot_eager")(given, pools[0], index)
        want = step(given, pools[1], index)
    for a, b in zip((*got, pools[0]), (*want, pools[1]), strict=True):
        assert torch.equal(a, b)
    torch._dynamo.reset()
