"""Sequences cut into segments, under Triton's interpreter, against the oracle and the whole scan.

Not collected by itself: `test_triton_segments.py` runs it in a process that has TRITON_INTERPRET=1
from the start. The interpreter multiplies bf16 wrongly, so token dtypes are fp16 and fp32.
"""

from __future__ import annotations

import os

import oracle
import pytest
import torch
from cases import BF16, F16, F32, Case, written
from interpreted import run
from oracle import FAMILIES
from tolerance import check, check_bitwise, tolerance

from lagraph.engines.triton import config, launch

# CI takes a part of the table; LAGRAPH_TEST_ALL=1 takes all of it.
ALL = os.environ.get("LAGRAPH_TEST_ALL") == "1"

# Chunks of 16 in segments of 4: four of them (three in CI), none, two, and one.
LENGTHS = (200, 0, 65, 3) if ALL else (140, 0, 65, 3)
CUT = {"chunk": 16, "segment": 4}
WHOLE = {"chunk": 16, "segment": 0}


@pytest.fixture
def launches(monkeypatch):
    """The stages of the serial pass, as they are launched."""
    seen = []
    scan, link = launch._Plan.scan, launch.ForwardPlan.link

    def scanned(self, *args, stage="whole", **kwargs):
        seen.append(stage)
        scan(self, *args, stage=stage, **kwargs)

    monkeypatch.setattr(launch._Plan, "scan", scanned)
    monkeypatch.setattr(
        launch.ForwardPlan, "link", lambda *args: (seen.append("link"), link(*args))[1]
    )
    return seen


def case_of(family, what="", **fields):
    """A small case with all that a family has."""
    given = {"lengths": LENGTHS, "V": 32, "dtype": F16, "n": 2 if family == "gdp" else 1}
    if not ALL:
        given |= {"H": 1, "HV": 1}
    if family == "mamba2":
        given |= {"H": 1, "HV": 2, "params": ("d", "z", "dt_bias")}
    return Case(family, what, **(given | fields))


def compare(case, launches, knobs=CUT):
    """Cut, a case is as near to the truth as the contract says, and as near to itself whole."""
    x, options = case.draw(), case.call_options()
    got = run(case.family, "forward", x, knobs, **options)
    assert launches == ["open", "link", "close"]
    want = case.truth("forward")
    got = {name: written(case, name, value) for name, value in got.items()}
    check(got, {name: written(case, name, want[name]) for name in got}, case.dtype, "cuda")
    if not (ALL or case.family == "gdn"):
        return
    whole = run(case.family, "forward", x, WHOLE, **options)
    for name, value in got.items():
        other = written(case, name, whole[name]).double()
        bound = tolerance(name, case.dtype, value.dtype, "cuda")
        assert (value.double() - other).norm() <= bound * other.norm(), name


@pytest.mark.parametrize("dtype", [F32, F16] if ALL else [F16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, dtype, launches):
    compare(case_of(family, dtype=dtype), launches)


OPTIONS = {
    "no state, a tail, int64": {"state": None, "tail": 70, "index_dtype": torch.int64},
    "bf16 state": {"state": BF16},
    "grouped heads": {"H": 1, "HK": 2, "HV": 2},
    "shared values": {"H": 2, "HK": 2, "HV": 1},
    "all options": {
        "gate": "mixed", "params": ("a_log", "dt_bias"),
        "options": {"safe_gate": True, "use_beta_sigmoid": True, "use_qk_l2norm": True,
                    "allow_neg_eigval": True, "scale": 0.3},
    },
    "mixed gates": {"gate": "mixed"},
    "no decay": {"gate": "zero"},
    "V before K": {"K": 64, "V": 16},
    "K before V": {"K": 16, "V": 64},
}  # fmt: skip


@pytest.mark.parametrize("what", OPTIONS)
@pytest.mark.parametrize("family", ["gdn", "kda"] if ALL else ["gdn"])
def test_options(family, what, launches):
    case = case_of(family, **({"lengths": (20, 0, 150)} | OPTIONS[what]))
    compare(case, launches)


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints(family, launches):
    """Every row is in its place, whichever segment has it."""
    every = 128 if family == "mamba2" else 64
    case = case_of(family, lengths=(70, 0, 270), H=1, options={"checkpoint_every_n_tokens": every})
    compare(case, launches)


@pytest.mark.parametrize(
    ("lead", "span"), [(7, 5), (5, 1), (40, 9), (4, 4), (13, 4)][: 5 if ALL else 2]
)
@pytest.mark.parametrize("family", ["gdn", "gdp", "mamba2"])
def test_any_cut(family, lead, span, launches, monkeypatch):
    """First segments longer than others; and so long that nothing is left for those."""
    real = config.schedule

    def fixed(*args):
        return real(*args)._replace(lead=lead, span=span)

    monkeypatch.setattr(launch, "schedule", fixed)
    case = case_of(family, dtype=F32, lengths=(65, 0, 1, 64, 180), H=1)
    if lead < 13:
        compare(case, launches)
        return
    got = run(family, "forward", case.draw(), CUT, **case.call_options())
    check(got, case.truth("forward"), F32, "cuda", names=("O", "final_state"))


def test_wide_keys(launches):
    """K = 256: transitions in blocks."""
    compare(case_of("gdn", lengths=(1, 130), H=1, K=256, V=16, dtype=F32), launches)


@pytest.mark.parametrize("family", FAMILIES)
def test_pool(family, launches):
    """Padding writes zeros and touches no row; an empty sequence passes its state through."""
    case = case_of(family, lengths=(150, 140, 0, 65), H=1, HV=1, dtype=F32)
    x = case.draw()
    heads, V, K = x["initial_state"].shape[1:]
    x["initial_state"] = torch.randn(6, heads, V, K)
    x["state_indices"] = torch.tensor([4, -1, 0, 2], dtype=torch.int32)
    before = x["initial_state"].clone()
    options = case.call_options()
    want = oracle.forward(family, x, **options)
    got = run(family, "forward", x, CUT, **options)
    assert launches == ["open", "link", "close"]
    check(got, want, F32, "cuda", names=("O", "final_state"))
    assert (got["O"][150:290] == 0).all()
    assert torch.equal(x["initial_state"][[0, 1, 3, 5]], before[[0, 1, 3, 5]])
    assert not torch.equal(x["initial_state"][4], before[4])


@pytest.mark.parametrize("family", FAMILIES)
def test_batch_invariant_is_whole(family, launches):
    """Bitwise, whatever the knob says."""
    case = case_of(family)
    x, options = case.draw(), case.call_options()
    got = run(family, "forward", x, CUT, **options | {"batch_invariant": True})
    want = run(family, "forward", x, WHOLE, **options)
    assert launches == ["whole", "whole"]
    check_bitwise(got, want)


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0), (5, 3)])
def test_nothing_to_cut(lengths, launches):
    """Batches without a slot for a later segment stay whole."""
    case = case_of("gdn", lengths=lengths, dtype=F32)
    got = run("gdn", "forward", case.draw(), CUT, **case.call_options())
    check(got, case.truth("forward"), F32, "cuda", names=("O", "final_state"))
    assert launches == ["whole"] * (len(lengths) > 0)


def test_without_final_state(launches):
    case = case_of("gdn", dtype=F32)
    options = case.call_options() | {"output_final_state": False}
    got = run("gdn", "forward", case.draw(), CUT, **options)
    check(got, case.truth("forward"), F32, "cuda", names=("O",))
    assert launches == ["open", "link", "close"]
