"""Every family, direction and case against the fp64 oracle, on every engine.

Engines are called through the public ops with a pinned plan. Fresh memory is poisoned with NaN in
every test here, so an element that nobody wrote, or a row that nobody may read, shows.
"""

from __future__ import annotations

from dataclasses import replace

import oracle
import pytest
import torch
from call import arguments, call, gradients, inputs_of, op
from cases import BF16, CASES, EAGER, F16, F32, F64, PROMISED, RAGGED, STEP, Case, written
from draw import HOSTILE, draw, hostile, offsets
from oracle import FAMILIES
from table import fitted, grid, short, to
from tolerance import (
    check,
    check_bitwise,
    check_hostile,
    hostile_slack,
    same_shape_and_finite,
)

from lagraph import registry

pytestmark = pytest.mark.usefixtures("poison")

DIRECTIONS = tuple(oracle.DIRECTIONS)


def run(engine, case, direction, inputs=None, **options):
    """A case, or its inputs changed, through the engine."""
    inputs = to(engine.device, inputs or case.draw())
    options = {**case.call_options(), **options}
    return call(case.family, inputs, direction, engine.plan(case.family, direction), **options)


def parts(case, got):
    """Of every output, what is specified."""
    return {name: written(case, name, value) for name, value in got.items()}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("engine", "case"), fitted(CASES))
def test_against_the_oracle(engine, case, direction):
    """Outputs and gradients are as near to the truth as the contract says."""
    want = case.truth(direction)
    if direction == "forward":
        want = {name: value for name, value in want.items() if name != "O_pre"}
        if "checkpoint_every_n_tokens" not in case.options:
            want.pop("state_checkpoints")
    got = run(engine, case, direction)
    check(parts(case, got), parts(case, want), case.dtype, engine.device)


def test_the_table_is_run():
    """Ids are unique, eager serves every case as it is, and every engine there is has a row."""
    assert all(EAGER.fit(case) is case for case in CASES)
    assert len({case.id for case in CASES}) == len(CASES)
    assert {row.name for row in registry.ENGINES} <= {engine.name for engine in PROMISED}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("numbers", [1, 30_000])
@pytest.mark.parametrize("checkpoints", [False, True], ids=["", "checkpoints"])
def test_many_tiles(monkeypatch, family, direction, numbers, checkpoints):
    """The eager engine works tile by tile; where the tiles end changes nothing."""
    from lagraph.engines.eager import scan

    monkeypatch.setattr(scan, "TILE_NUMBERS", numbers)
    monkeypatch.setattr(scan, "HELD_TILES", 2)
    options = {"checkpoint_every_n_tokens": STEP[family]} if checkpoints else {}
    case = Case(family, "", lengths=(300, *RAGGED), gate="mixed", tail=3, options=options)
    got, want = run(EAGER, case, direction), case.truth(direction)
    names = [name for name in want if name in got]
    check(parts(case, got), parts(case, want), case.dtype, names=names)


# Dtypes and buffers of the states ------------------------------------------------------------


@pytest.mark.parametrize(("engine", "family"), grid(*((f, f) for f in FAMILIES)))
@pytest.mark.parametrize("state", [None, F32, BF16, F16], ids=short)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=short)
def test_state_dtypes(engine, family, dtype, state):
    """final_state has initial_state's dtype, else fp32; O, checkpoints and dQ that of q."""
    every = STEP[family]
    case = engine.fit(Case(family, "", lengths=(3, 9), K=16, V=16, dtype=dtype, state=state))
    if case.dtype != dtype:
        pytest.skip("the engine does not serve the dtype")
    x = case.draw()
    if state is not None:
        x["initial_state"] = x["initial_state"].to(state)
        x["d_final_state"] = x["d_final_state"].to(state)
    got = run(engine, case, "backward", x, checkpoint_every_n_tokens=every)
    assert got["O"].dtype == dtype
    assert got["state_checkpoints"].dtype == dtype
    assert got["final_state"].dtype == (state or F32)
    for name, gradient in oracle.GRADIENTS.items():
        if name in x:
            assert got[gradient].dtype == x[name].dtype, gradient
            assert got[gradient].shape == x[name].shape, gradient


@pytest.mark.parametrize(("engine", "family"), grid(*((f, f) for f in FAMILIES)))
def test_fp32_checkpoint_rows(engine, family):
    """checkpoint_dtype=float32 gives fp32 rows, nearer to the truth than bf16 can be."""
    every = STEP[family]
    options = {"checkpoint_every_n_tokens": every}
    case = engine.fit(
        Case(family, "", lengths=(2 * every + 3, 5), H=1, dtype=BF16, options=options)
    )
    got = run(engine, case, "backward", checkpoint_dtype=F32)
    rows = written(case, "state_checkpoints", got["state_checkpoints"])
    assert rows.dtype == F32
    want = case.truth("forward")["state_checkpoints"]
    check({"state_checkpoints": rows}, {"state_checkpoints": want}, BF16)
    assert torch.equal(rows[0], case.draw()["initial_state"][0].to(rows.device))
    check(got, case.truth("backward"), BF16)


@pytest.mark.parametrize(("engine", "family"), grid(*((f, f) for f in FAMILIES)))
def test_checkpoint_rows_allocated(engine, family):
    """max(T' // every + N, 1) rows are allocated, whatever the lengths use."""
    every = STEP[family]
    n = 2 if family == "gdp" else 1
    for lengths in ((), (0,), (every,), (every + 1, 1, 0, 2 * every - 1), (1,) * 9):
        case = engine.fit(Case(family, "", lengths=lengths, H=1, K=8, V=8, n=n, state=None))
        got = run(engine, case, "forward", checkpoint_every_n_tokens=every)
        want = max(sum(lengths) * n // every + len(lengths), 1)
        assert got["state_checkpoints"].shape[0] == want, lengths


@pytest.mark.parametrize(("engine", "family"), grid(*((f, f) for f in FAMILIES)))
@pytest.mark.parametrize("state", [F32, BF16], ids=short)
def test_overwritten_state(engine, family, state):
    """overwrite_initial_state returns the caller's own buffer, holding the final states."""
    case = engine.fit(Case(family, "", lengths=RAGGED, dtype=BF16, state=state))
    x = to(engine.device, case.draw())
    buffer = x["initial_state"]
    before = buffer.clone()
    want = run(engine, case, "forward", x | {"initial_state": before})
    got = run(engine, case, "forward", x, overwrite_initial_state=True)
    assert got["final_state"] is buffer or got["final_state"].data_ptr() == buffer.data_ptr()
    check_bitwise({"O": got["O"], "final_state": buffer}, want, ("O", "final_state"))
    check(got, case.truth("forward"), BF16, names=("O", "final_state"))


def pool_case(engine, family, lengths, state=F32, dtype=F32):
    """A case, its inputs with a pool of 9 rows, and rows for its sequences."""
    case = engine.fit(Case(family, "", lengths=lengths, dtype=dtype, state=state))
    x = case.draw()
    pool = draw(family, lengths=(1,) * 9, H=2, K=case.K, V=case.V, dtype=dtype, state=state, seed=5)
    rows = torch.tensor([6, -1, 0, 8, -7, 3, 1][: len(lengths)], dtype=torch.int32)
    return case, x | {"initial_state": pool["initial_state"], "state_indices": rows}


@pytest.mark.parametrize(("engine", "family"), grid(*((f, f) for f in FAMILIES)))
@pytest.mark.parametrize("state", [F32, BF16], ids=short)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=short)
def test_pool(engine, family, state, index):
    """Sequence i reads and writes row state_indices[i]; padding is silent; no other bit changes.

    The lengths include empty sequences with a row, empty padding and padding with tokens.
    """
    case, x = pool_case(engine, family, (5, 9, 64, 0, 0, 33, 0), state)
    x = to(engine.device, x)
    x["state_indices"] = x["state_indices"].to(index)
    pool, before = x["initial_state"], x["initial_state"].clone()
    want = oracle.forward(family, x, output_final_state=True)
    got = run(engine, case, "forward", x)
    assert got["final_state"].data_ptr() == pool.data_ptr()
    check({"O": got["O"], "final_state": pool}, want, case.dtype, names=("O", "final_state"))
    idle = [2, 4, 5, 7]
    check_bitwise({"idle": pool[idle]}, {"idle": before[idle]})
    check_bitwise({"empty": pool[[8, 1]]}, {"empty": before[[8, 1]]})
    assert not got["O"][5:14].any(), "padding gives zeros"


@pytest.mark.parametrize(("engine", "family"), grid(*((f, f) for f in FAMILIES)))
def test_pool_is_not_written_unasked(engine, family):
    """Without output_final_state the pool keeps every bit."""
    case, x = pool_case(engine, family, (5, 9, 64, 0, 0, 33, 0))
    x = to(engine.device, x)
    before = x["initial_state"].clone()
    want = oracle.forward(family, x)
    got = run(engine, case, "forward", x, output_final_state=False)
    check(got, want, case.dtype, names=("O",))
    check_bitwise({"pool": x["initial_state"]}, {"pool": before})


@pytest.mark.parametrize(("engine", "family"), grid(*((f, f) for f in FAMILIES)))
def test_pool_with_gaps(engine, family):
    """Rows of a pool may lie apart; what lies between them is not touched."""
    case, x = pool_case(engine, family, (5, 9, 64))
    x = to(engine.device, x)
    want = oracle.forward(family, x, output_final_state=True)
    dense = x["initial_state"]
    wide = torch.full((9, 2, *dense.shape[1:]), float("nan"), device=engine.device)
    wide[:, 0] = dense
    x["initial_state"] = wide[:, 0]
    got = run(engine, case, "forward", x)
    got = {"O": got["O"], "final_state": wide[:, 0]}
    check(got, want, case.dtype, names=("O", "final_state"))
    assert wide[:, 1].isnan().all()


# One sequence, cut, batched and composed -----------------------------------------------------


@pytest.mark.parametrize(("engine", "family"), grid(*((f, f) for f in FAMILIES)))
@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=short)
@pytest.mark.parametrize("cut", [(57, 73), (1, 129), (64, 66), (129, 1), (30, 0, 100)], ids=short)
def test_segments(engine, family, dtype, cut):
    """Cut in pieces that pass their state on, a sequence gives the same outputs and state."""
    whole = Case(family, "", lengths=(130,), dtype=dtype, gate="mixed")
    whole = engine.fit(whole)
    if whole is None or whole.dtype != dtype:
        pytest.skip("the engine does not serve the dtype")
    x, state, outputs, first = whole.draw(), None, [], 0
    state = x["initial_state"].to(engine.device)
    for length in cut:
        piece = {name: t[first : first + length] if len(t) == 130 else t for name, t in x.items()}
        piece |= {"initial_state": state, "cu_seqlens": offsets((length,))}
        got = run(engine, whole, "forward", piece)
        state, first = got["final_state"], first + length
        outputs.append(got["O"])
    got = {"O": torch.cat(outputs), "final_state": state}
    check(got, whole.truth("forward"), dtype, names=("O", "final_state"))


@pytest.mark.parametrize(("engine", "family"), grid(*((f, f) for f in FAMILIES)))
def test_token_by_token(engine, family):
    """The chunked run of a sequence agrees with one call per token."""
    case = engine.fit(Case(family, "", lengths=(19,), dtype=F32, gate="mixed", n=1))
    x = case.draw()
    state, outputs = x["initial_state"].to(engine.device), []
    for t in range(19):
        token = {name: v[t : t + 1] if len(v) == 19 else v for name, v in x.items()}
        token |= {"initial_state": state, "cu_seqlens": offsets((1,))}
        got = run(engine, case, "forward", token)
        state = got["final_state"]
        outputs.append(got["O"])
    whole = run(engine, case, "forward")
    want = {name: whole[name].double().cpu() for name in ("O", "final_state")}
    check({"O": torch.cat(outputs), "final_state": state}, want, case.dtype)


def carry(family, state, transition):
    """A state through a transition: X @ M, or X 2^m for Mamba-2."""
    if family == "mamba2":
        return state * torch.exp2(transition)[..., None, None]
    return state @ transition


@pytest.mark.parametrize(("engine", "family"), grid(*((f, f) for f in FAMILIES)))
@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=short)
def test_summaries_compose(engine, family, dtype):
    """Summaries of pieces, folded, give the whole's final state and initial-state gradient."""
    whole = engine.fit(Case(family, "", lengths=(130,), dtype=dtype, gate="slow"))
    if whole is None or whole.dtype != dtype:
        pytest.skip("the engine does not serve the dtype")
    x = whole.draw()
    cut = (57, 0, 9, 64)
    pieces = x | {"cu_seqlens": offsets(cut)}
    forward = run(engine, whole, "summary", {**pieces, "initial_state": None})
    state = x["initial_state"].double()
    for M, X in zip(forward["transition"].cpu(), forward["final_state"].cpu(), strict=True):
        state = carry(family, state, M.double()) + X.double()
    check({"final_state": state}, whole.truth("forward"), dtype, names=("final_state",))

    back = run(engine, whole, "summary_backward", {**pieces, "d_final_state": None})
    d_state = x["d_final_state"].double()
    for M, X in zip(
        back["transition"].cpu().flip(0), back["d_initial_state"].cpu().flip(0), strict=True
    ):
        d_state = carry(family, d_state, M.double()) + X.double()
    want = whole.truth("backward")
    check({"d_initial_state": d_state}, want, dtype, names=("d_initial_state",))
    turned = forward["transition"] if family == "mamba2" else forward["transition"].mT
    check({"transition": back["transition"]}, {"transition": turned.double().cpu()}, dtype)


@pytest.mark.parametrize(("engine", "family"), grid(*((f, f) for f in FAMILIES)))
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=short)
def test_batch_invariant(engine, family, direction, dtype):
    """With batch_invariant a sequence has the same bits alone and anywhere in a batch."""
    lengths = (65, 0, 3, 130, 64)
    case = engine.fit(Case(family, "", lengths=lengths, dtype=dtype, gate="mixed"))
    x = case.draw()
    batch = run(engine, case, direction, x, batch_invariant=True)
    cu = offsets(lengths).tolist()
    per_token = {"O", "dQ", "dK", "dV", "dG", "dBeta", "dW", "dZ"}
    for i, length in enumerate(lengths):
        rows = slice(cu[i], cu[i + 1])
        one = {}
        for name, t in x.items():
            if name in ("initial_state", "d_final_state"):
                one[name] = t[i : i + 1]
            elif len(t) == sum(lengths):
                one[name] = t[rows]
            else:
                one[name] = t
        one["cu_seqlens"] = offsets((length,))
        alone = run(engine, case, direction, one, batch_invariant=True)
        for name, value in alone.items():
            if name in ("dA", "d_dt_bias", "dD", "d_a_log"):
                continue  # sums over the batch
            part = batch[name][rows] if name in per_token else batch[name][i : i + 1]
            check_bitwise({name: value}, {name: part})


# Rows that nobody may read or write ----------------------------------------------------------


@pytest.mark.parametrize(("engine", "family"), grid(*((f, f) for f in FAMILIES)))
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("tail", [1, 64, 200])
def test_rows_past_the_end(engine, family, direction, tail):
    """NaN past cu_seqlens[-1] reaches no specified output or gradient, parameters' included."""
    mamba2 = family == "mamba2"
    case = engine.fit(
        Case(
            family, "", lengths=(1, 2, 0, 62), tail=tail, gate="mixed",
            params=("d", "z", "dt_bias") if mamba2 else ("a_log", "dt_bias"),
            options={} if mamba2 else {"safe_gate": True},
        )
    )  # fmt: skip
    got, want = run(engine, case, direction), case.truth(direction)
    names = [name for name in want if name not in ("O_pre", "state_checkpoints")]
    check(parts(case, got), parts(case, want), case.dtype, engine.device, names=names)


def slice_of_wider(x, device):
    """The tensor as a slice, by heads, of a buffer three times as wide that holds NaN elsewhere."""
    axis = {1: 0, 2: 1, 3: 1, 4: 1}[x.dim()]
    heads = x.shape[axis]
    shape = (*x.shape[:axis], 3 * heads, *x.shape[axis + 1 :])
    wide = torch.full(shape, float("nan"), dtype=x.dtype, device=device)
    return wide.narrow(axis, heads, heads).copy_(x)


@pytest.mark.parametrize(("engine", "family"), grid(*((f, f) for f in FAMILIES)))
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_strided_inputs(engine, family, direction):
    """Slices of wider buffers give what contiguous inputs give, forward and backward."""
    case = engine.fit(Case(family, "", lengths=(70, 0, 13), params=("d channels", "z"), n=1))
    x = case.draw()
    views = {name: slice_of_wider(t, engine.device) for name, t in x.items() if len(t) > 4}
    assert not any(view.is_contiguous() for view in views.values())
    views |= {
        name: slice_of_wider(t, engine.device)
        for name, t in x.items()
        if name in ("initial_state", "d_final_state")
    }
    cu = x["cu_seqlens"].to(engine.device)
    views["cu_seqlens"] = torch.stack([cu, cu + 1], dim=-1)[:, 0]
    views = to(engine.device, x) | views
    got = call(family, views, direction, engine.plan(family, direction), **case.call_options())
    want = case.truth(direction)
    names = [name for name in want if name not in ("O_pre", "state_checkpoints")]
    check(got, want, case.dtype, engine.device, names=names)


# Hostile data --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "family", "kind"),
    grid(
        *(
            (f"{family}-{kind}", family, kind)
            for family in FAMILIES
            for kind in HOSTILE
            if family != "mamba2" or not kind.startswith("beta")
        )
    ),
)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=short)
@pytest.mark.parametrize("gate", ["zero", "slow"])
def test_hostile_data(engine, family, kind, dtype, gate):
    """Finite, and within twice the error of a recurrence whose state is rounded every token."""
    if dtype not in engine.dtypes:
        pytest.skip("the engine does not serve the dtype")
    size = 16 if engine.sizes is None else engine.sizes[0]
    x = hostile(kind, family, lengths=(130,), K=size, V=size, dtype=dtype, gate=gate)
    options = {"output_final_state": True}
    if family == "gdp":
        options["num_householder"] = 1
    want = oracle.forward(family, x, **options)
    names = [name for name in ("O", "final_state") if name in want]
    on = to(engine.device, x)
    plan = engine.split_plan(family) if kind == "beta 2" else engine.plan(family)
    got = gradients(family, on, plan, **options)
    if kind in ("zero keys", "deep gates"):  # a trap for NaN alone: these errors do not last
        check(got, want, dtype, engine.device, names=names)
        check(got, oracle.backward(family, x, **options), dtype, engine.device)
        return
    low = oracle.forward(family, x, round_state_to=dtype, **options)
    slack = hostile_slack(engine.name, dtype, kind)
    check_hostile(got, want, low, dtype, names, engine.name, slack)
    want = oracle.backward(family, x, **options)
    low = oracle.backward(family, x, round_state_to=dtype, **options)
    backward = engine.name if engine.name == "eager" else "triton"
    slack = hostile_slack(backward, dtype, kind, backward=True)
    check_hostile(got, want, low, dtype, engine=engine.name, slack=slack)


# Details of the calls ------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "family"), grid(*((f, f) for f in FAMILIES)))
@pytest.mark.parametrize("kept", ["dO", "d_final_state"])
def test_one_cotangent(engine, family, kept):
    """A loss on the outputs alone, or on the final states alone; the rest gets zeros."""
    case = engine.fit(Case(family, "", lengths=(70, 0, 13), params=("z",)))
    other = "d_final_state" if kept == "dO" else "dO"
    x = {name: t for name, t in case.draw().items() if name != other}
    got = gradients(family, to(engine.device, x), engine.plan(family), **case.call_options())
    want = oracle.backward(family, x, **case.call_options())
    check(got, want, case.dtype, engine.device)


@pytest.mark.parametrize(("engine", "family"), grid(*((f, f) for f in FAMILIES)))
def test_some_gradients(engine, family):
    """Asking for few gradients changes none of them."""
    case = engine.fit(Case(family, "", lengths=(70, 0, 13)))
    x = to(engine.device, case.draw())
    want = case.truth("backward")
    plan = engine.plan(family)
    for name in ("q", "k", "v", "g", "beta", "w", "a", "initial_state"):
        if name not in x:
            continue
        leaf = x[name].clone().requires_grad_()
        got = call(family, x | {name: leaf}, "forward", plan, **case.call_options())
        (grad,) = torch.autograd.grad(
            (got["O"], got["final_state"]), (leaf,), (x["dO"], x["d_final_state"])
        )
        gradient = oracle.GRADIENTS[name]
        check({gradient: grad}, want, case.dtype, engine.device, names=(gradient,))


@pytest.mark.parametrize(("engine", "family"), grid(*((f, f) for f in FAMILIES)))
def test_inputs_are_left_alone(engine, family):
    """No call writes to its inputs."""
    case = engine.fit(Case(family, "", lengths=(70, 0, 13), params=("z",)))
    x = to(engine.device, case.draw())
    before = {name: t.clone() for name, t in x.items()}
    for direction in DIRECTIONS:
        call(family, x, direction, engine.plan(family, direction), **case.call_options())
    for name, t in before.items():
        assert torch.equal(x[name], t), name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_default_on_a_cpu_is_eager(family):
    """Without a plan name a CPU call is the pinned eager one, to the bit."""
    case = replace(Case(family, "", lengths=(70, 0, 13)), dtype=F32)
    pinned = run(EAGER, case, "forward")
    plain = call(family, case.draw(), "forward", **case.call_options())
    check_bitwise(plain, pinned)


@pytest.mark.parametrize("family", FAMILIES)
def test_returns(family):
    """(o, final_state), with an empty final_state unless asked; checkpoints come third."""
    case = Case(family, "", lengths=(3, 4), n=1)
    x = inputs_of(family, "forward", case.draw())
    plain = call(family, x, **{**case.call_options(), "output_final_state": False})
    assert list(plain) == ["O"]
    extra = {"num_householder": 1} if family == "gdp" else {}
    got = op(family)(**arguments(family, "forward", x, **extra))
    assert len(got) == 2
    assert got[1].numel() == 0
    same_shape_and_finite("O", got[0], case.truth("forward")["O"])
    kwargs = arguments(family, "forward", x, checkpoint_every_n_tokens=STEP[family], **extra)
    assert len(op(family)(**kwargs)) == 3
