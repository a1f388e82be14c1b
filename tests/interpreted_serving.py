"""The kernels for convolution, decoding and the token scan under Triton's interpreter.

Not collected by itself: `test_decode.py` runs it in a process that has TRITON_INTERPRET=1 from the
start. The interpreter multiplies bf16 wrongly, so dtypes here are fp16 and fp32; fresh memory holds
NaN.
"""

from __future__ import annotations

import os

import pytest
import torch
import triton
from serving import (
    DECODE,
    check_conv,
    check_conv_decode,
    check_conv_states,
    check_decode,
    check_paged,
    check_scan,
    check_several,
    decode_inputs,
    pool_of,
)
from tolerance import check_bitwise
from triton import language as tl

import lagraph.ops.accept as accept
import lagraph.ops.conv as conv
import lagraph.ops.decode as decode
from lagraph import errors
from lagraph.engines.triton.conv import schedule
from lagraph.ops.step import Steps

assert os.environ.get("TRITON_INTERPRET") == "1"

F16, F32 = torch.float16, torch.float32
FAMILIES = ("gdn", "kda", "gdn2", "gdp", "mamba2")


@pytest.fixture(autouse=True)
def kernels(monkeypatch, poison):
    """CPU tensors are served by the kernels."""
    monkeypatch.setattr(conv, "INTERPRETED", True, raising=False)
    for module in (conv, decode):
        monkeypatch.setattr(module, "wants_kernels", lambda op, impl, x: True)
    monkeypatch.setattr(accept, "wants_kernels", lambda op, pool: True)
    for module in (conv, decode, accept):  # what other tests' calls looked like
        monkeypatch.setattr(module, "_STEPS", Steps())


@triton.jit
def squash(x):
    return 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)


@triton.jit
def squash_slope(x):
    y = squash(x)
    return 1.0 - y * y


def test_schedules_are_small():
    assert schedule("forward", F16, 4).rows == 0
    assert schedule("update", F32, 4).rows == 1


@pytest.mark.parametrize(("W", "dtype"), [(1, F16), (2, F32), (4, F16), (8, F32)])
def test_conv_packed(W, dtype):
    check_conv("cpu", dtype, W=W, lengths=(5, 0, 9, 1))


@pytest.mark.parametrize("layout", ["columns", "time first", "expanded"])
def test_conv_dense(layout):
    check_conv("cpu", F32, batch=2, lengths=(11,), layout=layout, history=layout != "expanded")


def test_conv_without_state_or_activation():
    check_conv("cpu", F16, W=3, history=False, final=False, activation=None, C=40)


def test_conv_many_chunks():
    config = conv.ShortConvConfig(32, 1, 8)
    check_conv(
        "cpu", F32, lengths=(41, 3), index=torch.int64, forward_config=config,
        input_grad_config=config,
    )  # fmt: skip


def test_conv_no_tokens_and_no_sequences():
    check_conv("cpu", F32, lengths=(0, 0), tail=0)
    check_conv("cpu", F32, lengths=(), tail=3)


def test_conv_custom_activation():
    conv.register_activation(
        "interpreted tanh", torch.tanh, lambda x: 1 - x.tanh() ** 2, kernels=(squash, squash_slope)
    )
    try:
        check_conv("cpu", F32, activation="interpreted tanh", lengths=(9, 2))
    finally:
        del conv.ACTIVATIONS["interpreted tanh"]


@pytest.mark.parametrize("fresh", [True, False])
def test_paged_packed(fresh):
    check_paged("cpu", F16, fresh=fresh)


def test_paged_dense():
    check_paged("cpu", F32, batch=4, lengths=(19,))
    check_paged("cpu", F32, batch=4, lengths=(0,))


@pytest.mark.parametrize(("W", "index"), [(2, True), (4, False), (8, True)])
def test_conv_decode(W, index):
    check_conv_decode("cpu", F16, W=W, index=index)


@pytest.mark.parametrize("pool", [F32, F16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_decode(family, pool):
    check_decode(family, "cpu", F16, pool, gap=48, fresh=pool == F32)


@pytest.mark.parametrize("family", ["gdn", "kda", "mamba2"])
def test_decode_of_odd_sizes(family):
    """Sizes that are no powers of two, and several slices of V."""
    check_decode(family, "cpu", F32, B=3, K=40, V=72, H=2, HK=1, out=False)


def test_decode_options():
    check_decode(
        "kda", "cpu", F32, options={"gate_lower_bound": -2.0, "allow_neg_eigval": True},
        call={"lower_bound": -2.0, "allow_neg_eigval": True},
    )  # fmt: skip
    check_decode(
        "gdn2", "cpu", F32, options={"beta_guard": True, "allow_neg_eigval": True},
        call={"beta_guard": True, "allow_neg_eigval": True},
    )  # fmt: skip


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_scan(family, dense):
    check_scan(family, "cpu", F16 if dense else F32, dense=dense)


def test_scan_guard_and_negative_eigenvalues():
    check_scan("gdn2", "cpu", F16, options={"beta_guard": True, "allow_neg_eigval": True})


@pytest.mark.parametrize(("pool", "kept"), [(F32, F16), (F16, F32)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_several_tokens(family, pool, kept):
    check_several(family, "cpu", F16 if pool == F32 else F32, pool, kept)


def test_several_tokens_options():
    check_several("gdn2", "cpu", F16, options={"beta_guard": True, "allow_neg_eigval": True},
                  call={"beta_guard": True, "allow_neg_eigval": True})  # fmt: skip
    check_several("gdp", "cpu", F32, n=1, T=4)


@pytest.mark.parametrize("dense", [False, True])
def test_conv_states(dense):
    check_conv_states("cpu", F16, dense=dense)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", [(4, 6, 8), (3, 24), (2, 80, 64)], ids=str)
def test_accepted_rows(packed, shape):
    """The kernel copies what the reference does, and no padding, empty or unaccepted rows."""
    rng = torch.Generator().manual_seed(1)
    pool, big, _ = pool_of(torch.randn(7, *shape, generator=rng), 8)
    states = torch.randn(5, 3, *shape, generator=rng).to(F16)
    slots, count = torch.tensor([5, -1, 2, 0, 6]), torch.tensor([2, 1, 0, 3, 3])
    cu = torch.tensor([0, 2, 5, 5, 9, 14]) if packed else None
    if packed:
        states = states.flatten(0, 1)[None]
    want = big.clone()
    for i, row in ((0, 1), (4, 11 if packed else 14)):
        want[slots[i], :-8] = states.flatten(0, 1)[row].flatten().float()
    accept.accept_states(pool, slots, states, count, cu_seqlens=cu)
    check_bitwise({"pool": big}, {"pool": want})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_like_an_earlier_one(family):
    """The second call launches at once, on its own tensors, and gives what a first one gives."""
    made = []
    for seed in (1, 2):
        _, args, extra = decode_inputs(family, "cpu", F16, seed=seed)
        pool = torch.randn(8, 4, 16, 16, generator=torch.Generator().manual_seed(seed))
        slots = torch.tensor([3, -1, 5, 1, 5 + seed], dtype=torch.int32)
        made.append((args, extra, pool, slots))
    found = [DECODE[family](*args, pool, slots, **extra) for args, extra, pool, slots in made]
    assert len(decode._STEPS.known) == 1
    args, extra, _, slots = made[1]
    pool = torch.randn(8, 4, 16, 16, generator=torch.Generator().manual_seed(2))
    decode._STEPS.known.clear()
    check_bitwise({"o": found[1], "pool": made[1][2]},
                  {"o": DECODE[family](*args, pool, slots, **extra), "pool": pool})  # fmt: skip


def test_what_a_later_call_still_checks():
    """Addresses and values are another call's; everything else has a key of its own."""
    _, args, _ = decode_inputs("gdn", "cpu", F16)
    pool, slots = torch.randn(8, 4, 16, 16), torch.tensor([3, -1, 5, 0, 2])
    out, run = torch.empty(1, 5, 4, 16, dtype=F16), decode.recurrent_gdn_decode
    for _ in range(2):
        assert run(*args, pool, slots, out=out) is out
    before = pool._version
    run(*args, pool, slots, out=out)
    assert pool._version > before
    flat = args[0].flatten()
    with pytest.raises(errors.RuleBroken, match="overlap with packed_qkv"):
        run(*args, pool, slots, out=flat[: out.numel()].view(out.shape))
    with pytest.raises(errors.RuleBroken, match="distinct"):
        run(*args, pool, torch.tensor([3, 3, 5, 0, 2]), out=out)
    with pytest.raises(errors.ShapeMismatch):
        run(*args, pool, slots[:4], out=out)
    with pytest.raises(errors.DtypeMismatch):
        run(*args, pool, slots.float(), out=out)
    with pytest.raises(errors.InvalidOption):
        run(*args, pool, slots, out=out, allow_neg_eigval=1)
    bias = args[-1].clone().requires_grad_()
    with pytest.raises(errors.NotDifferentiable):
        run(*args[:-1], bias, pool, slots, out=out)
    with torch.no_grad():
        run(*args[:-1], bias, pool, slots, out=out)
    with pytest.raises(errors.NotDifferentiable):
        run(*args[:-1], bias, pool, slots, out=out)


def test_a_convolution_like_an_earlier_one():
    rng = torch.Generator().manual_seed(3)
    weight, run = torch.randn(24, 4, generator=rng), conv.causal_conv1d_decode
    rows, pools = torch.randn(2, 5, 24, generator=rng), torch.randn(2, 9, 3, 24, generator=rng)
    slots, again = torch.tensor([4, -1, 2, 0, 6]), pools[1].clone()
    found = [run(x, weight, pool, activation="silu", state_indices=slots)
             for x, pool in zip(rows, pools)]  # fmt: skip
    assert len(conv._STEPS.known) == 1
    conv._STEPS.known.clear()
    want = run(rows[1], weight, again, activation="silu", state_indices=slots)
    check_bitwise({"y": found[1], "pool": pools[1]}, {"y": want, "pool": again})
    store = torch.zeros(9 * 72 + 120)
    pool = store[: 9 * 72].view(9, 3, 24)
    run(store[-120:].view(5, 24), weight, pool, activation="silu", state_indices=slots)
    with pytest.raises(errors.RuleBroken, match="overlap"):
        run(store[:120].view(5, 24), weight, pool, activation="silu", state_indices=slots)
