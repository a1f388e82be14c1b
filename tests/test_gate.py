"""gate_transform and bound_gate: values, gradients, saturation, dtypes, refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import BF16, F16, F32, F64
from draw import P
from table import short
from tolerance import check, check_bitwise
from torch.autograd import forward_ad

from lagraph import errors, ops

KINDS = {"softplus": None, "bounded": -5.0}
SHAPES = ((2, 9, 3), (2, 9, 3, 4))
DEVICES = [
    pytest.param("cpu", "reference", id="reference-cpu"),
    pytest.param("cuda", "reference", id="reference-cuda", marks=pytest.mark.gpu),
    pytest.param("cuda", "fused", id="fused-cuda", marks=pytest.mark.gpu),
]
on_every_device = pytest.mark.parametrize(("device", "impl"), DEVICES)
kinds = pytest.mark.parametrize("kind", KINDS)
shapes = pytest.mark.parametrize("shape", SHAPES, ids=["per head", "per channel"])


def inputs(shape, dtype, device="cpu", param=F32):
    raw = (8.0 * P(shape, 1)).to(dtype)
    return [t.to(device).requires_grad_()
            for t in (raw, P(shape[2:3], 2, param), P(shape[2:], 3, param))]  # fmt: skip


def formula(kind, raw, a_log, bias):
    """In fp64, from the page."""
    raw, a_log, bias = (t.detach().cpu().to(F64).requires_grad_() for t in (raw, a_log, bias))
    amplitude = a_log.exp() if raw.dim() == 3 else a_log.exp()[:, None]
    x = raw + bias
    if kind == "softplus":
        out = -amplitude * torch.log1p(torch.exp(-x.abs())) - amplitude * x.clamp(min=0.0)
    else:
        out = KINDS[kind] / (1.0 + torch.exp(-amplitude * x))
    return out, (raw, a_log, bias)


@on_every_device
@kinds
@shapes
@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=short)
def test_values_and_gradients(device, impl, kind, shape, dtype):
    """fp32 out (fp64 for fp64), gradients in the inputs' dtypes."""
    if impl == "fused" and dtype == F64:
        pytest.skip("refused")
    given = inputs(shape, dtype, device, F64 if dtype == F64 else F32)
    out = ops.gate_transform(*given, kind=kind, lower_bound=KINDS[kind], impl=impl)
    want, leaves = formula(kind, *given)
    assert out.dtype == (F64 if dtype == F64 else F32)
    check({"O": out}, {"O": want.detach()}, out.dtype, device)
    seed = P(shape, 4)
    got = torch.autograd.grad(out, given, seed.to(out))
    grads = torch.autograd.grad(want, leaves, seed)
    for name, a, b, t in zip(("dG", "d_a_log", "d_dt_bias"), got, grads, given, strict=True):
        assert a.dtype == t.dtype
        check({name: a}, {name: b}, t.dtype, device)


@on_every_device
@kinds
def test_strided_and_expanded(device, impl, kind):
    """Columns of a projection, and a gradient that is an expanded view."""
    wide = P((2, 9, 40), 1, F32).to(device)
    _, a_log, bias = inputs(SHAPES[1], F32, device)
    views = [
        wide[..., 5:17].unflatten(2, (3, 4)),
        wide[..., :12].unflatten(2, (3, 4)).transpose(0, 1),
    ]
    for view in views:
        results = []
        for raw in (view, view.contiguous()):
            raw = raw.detach().requires_grad_()
            out = ops.gate_transform(
                raw, a_log, bias, kind=kind, lower_bound=KINDS[kind], impl=impl
            )
            results.append((out, *torch.autograd.grad(out.sum(), (raw, a_log, bias))))
        for at, (a, b) in enumerate(zip(*results, strict=True)):
            if at < 2 or impl == "reference":
                assert torch.equal(a, b)
            else:  # a kernel's layout, and so the order inside a tile, may follow strides
                torch.testing.assert_close(a, b)


@pytest.mark.parametrize("a_log", [50.0, 100.0])
@on_every_device
def test_saturated_gates_have_no_nan(device, impl, a_log):
    """inf times 0 is 0 here: for amplitudes beyond fp32, far and near raw gates."""
    for kind, floor in KINDS.items():
        raw = torch.tensor([0.0, 1e-30, -1e-30, 1.0, -1.0, 1e4, -1e4, 3e38, -3e38], device=device)
        given = [raw.view(1, -1, 1).requires_grad_(),
                 torch.tensor([a_log], device=device, requires_grad=True),
                 torch.zeros(1, device=device, requires_grad=True)]  # fmt: skip
        out = ops.gate_transform(*given, kind=kind, lower_bound=floor, impl=impl)
        for t in (out, *torch.autograd.grad(out, given, torch.ones_like(out))):
            assert not torch.isnan(t).any()
        assert (out <= 0).all()


@on_every_device
@kinds
def test_16_bit_parameters_are_widened(device, impl, kind):
    """Never computed with in 16 bits; gradients come back in their dtype."""
    for dtype in (BF16, F16):
        raw, a_log, bias = inputs(SHAPES[1], F32, device)
        narrow = [t.detach().to(dtype).requires_grad_() for t in (a_log, bias)]
        wide = [t.detach().float().requires_grad_() for t in narrow]
        results = []
        for params in (narrow, wide):
            out = ops.gate_transform(raw, *params, kind=kind, lower_bound=KINDS[kind], impl=impl)
            results.append((out, *torch.autograd.grad(out.sum(), params)))
        (a, *da), (b, *db) = results
        assert torch.equal(a, b)
        for x, y in zip(da, db, strict=True):
            assert x.dtype == dtype
            assert torch.equal(x, y.to(dtype))


@on_every_device
@kinds
def test_repeated_runs_agree_in_every_bit(device, impl, kind):
    given = inputs((3, 700, 4, 32), BF16, device)
    runs = []
    for _ in range(5):
        out = ops.gate_transform(*given, kind=kind, lower_bound=KINDS[kind], impl=impl)
        runs.append(dict(enumerate((out, *torch.autograd.grad(out.square().sum(), given)))))
    for again in runs[1:]:
        check_bitwise(again, runs[0])
    # Compiled code takes results to start where their storage does.
    assert all(t.storage_offset() == 0 for t in runs[0].values())


@kinds
@shapes
def test_gradcheck(kind, shape):
    def run(*given):
        return ops.gate_transform(*given, kind=kind, lower_bound=KINDS[kind])

    given = inputs(shape, F64, "cpu", F64)
    assert torch.autograd.gradcheck(run, given)


@kinds
@pytest.mark.parametrize("shape", [(0, 5, 2), (2, 0, 2, 3)], ids=str)
def test_empty(kind, shape):
    given = inputs(shape, F32)
    out = ops.gate_transform(*given, kind=kind, lower_bound=KINDS[kind])
    grads = torch.autograd.grad(out.sum(), given)
    assert out.shape == shape
    assert not any(g.any() for g in grads)


@kinds
def test_compiled_over_lengths(kind):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def step(*given):
        return ops.gate_transform(*given, kind=kind, lower_bound=KINDS[kind])

    compiled = torch.compile(step, backend=counter, fullgraph=True)
    for T in (9, 30, 12, 64):
        given = inputs((2, T, 3, 4), BF16)
        results = []
        for f in (compiled, step):
            out = f(*given)
            results.append((out, *torch.autograd.grad(out.square().sum(), given)))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)
    assert counter.frame_count == 2
    torch._dynamo.reset()


def test_bound_gate_is_bounded_by_minus_five():
    given = inputs(SHAPES[1], BF16)
    want = ops.gate_transform(*given, kind=ops.GateTransform.BOUNDED, lower_bound=-5.0)
    assert torch.equal(ops.bound_gate(*given), want)
    floored = ops.kda.bound_gate(*given, lower_bound=-2.0, fastmath=False)
    torch.testing.assert_close(floored, want * 0.4)
    with pytest.raises(errors.ShapeMismatch, match=r"bound_gate\.raw_gate"):
        ops.bound_gate(*inputs(SHAPES[0], F32))


def test_derivatives_that_are_refused():
    given = inputs(SHAPES[0], F64, "cpu", F64)
    out = ops.gate_transform(*given, kind="softplus")
    (first,) = torch.autograd.grad(out.sum(), given[0], create_graph=True)
    with pytest.raises(errors.NotDifferentiable, match="twice"):
        torch.autograd.grad(first.square().sum(), given[1])
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(given[0].detach(), given[0].detach())
        with pytest.raises(errors.NotDifferentiable, match="jvp"):
            ops.gate_transform(dual, *given[1:], kind="softplus")
    given = [t.detach() for t in given]
    with pytest.raises(errors.NotDifferentiable, match="vmap"):
        torch.vmap(lambda raw: ops.gate_transform(raw, *given[1:], kind="softplus"))(given[0][None])


@kinds
@shapes
def test_the_operator_is_registered_whole(kind, shape):
    """Schema, autograd, fakes, under a tracer with open sizes."""
    given = inputs(shape, BF16)
    args = (*given, KINDS[kind], False)
    torch.library.opcheck(torch.ops.lagraph.gate_transform.default, args)
    grads = [t.detach() for t in given]
    args = (*grads, torch.ones(shape), KINDS[kind], False)
    torch.library.opcheck(torch.ops.lagraph.gate_transform_bwd.default, args)


GOOD = {"raw_gate": torch.zeros(2, 5, 3), "A_log": torch.zeros(3), "dt_bias": torch.zeros(3),
        "kind": "softplus"}  # fmt: skip
BAD = {
    "kind": ({"kind": "sigmoid"}, errors.InvalidOption, "kind"),
    "kind None": ({"kind": None}, errors.InvalidOption, "kind"),
    "a bound for softplus": ({"lower_bound": -5.0}, errors.RuleBroken, "lower_bound"),
    "no bound": ({"kind": "bounded"}, errors.InvalidOption, "lower_bound"),
    "a bound above 0": ({"kind": "bounded", "lower_bound": 1.0}, errors.InvalidOption, "<= 0"),
    "an infinite bound": (
        {"kind": "bounded", "lower_bound": float("-inf")}, errors.InvalidOption, "finite",
    ),
    "a NaN bound": ({"kind": "bounded", "lower_bound": float("nan")}, errors.InvalidOption, "nan"),
    "a bool bound": ({"kind": "bounded", "lower_bound": False}, errors.InvalidOption, "False"),
    "rank": ({"raw_gate": torch.zeros(5, 3)}, errors.ShapeMismatch, "raw_gate"),
    "int": ({"raw_gate": torch.zeros(2, 5, 3).int()}, errors.DtypeMismatch, "raw_gate.*int32"),
    "A_log fp64": ({"A_log": torch.zeros(3).double()}, errors.DtypeMismatch, "A_log.*float32"),
    "A_log of other heads": ({"A_log": torch.zeros(2)}, errors.ShapeMismatch, "A_log"),
    "dt_bias per channel": ({"dt_bias": torch.zeros(3, 4)}, errors.ShapeMismatch, "dt_bias"),
    "no dt_bias": ({"dt_bias": None}, errors.DtypeMismatch, "dt_bias.*NoneType"),
    "impl": ({"impl": "triton"}, errors.InvalidOption, "impl"),
    "fused on a CPU": ({"impl": "fused"}, errors.PlanNotOffered, "reference"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_calls(what):
    changes, error, pattern = BAD[what]
    with pytest.raises(error, match=rf"^gate_transform.*{pattern}"):
        ops.gate_transform(**GOOD | changes)
    assert ops.gate_transform(**GOOD).shape == (2, 5, 3)


def test_kind_is_required():
    with pytest.raises(TypeError, match="kind"):
        ops.gate_transform(*(GOOD[name] for name in ("raw_gate", "A_log", "dt_bias")))


# The Triton kernels without a GPU -------------------------------------------------------------


INTERPRETED = """
import itertools, torch
from draw import P
from quicken import quicken
from lagraph.engines.triton import transform
from lagraph.ops.gate import _backward, _forward
quicken()
shapes = ((2, 9, 3), (2, 9, 3, 4), (1, 5, 2, 128), (3, 90, 300), (1, 0, 3), (2, 2100, 1))
for shape, floor, dtype in itertools.product(shapes, (None, -5.0), (torch.float32, torch.float16)):
    raw, grad = (8.0 * P(shape, 1)).to(dtype), P(shape, 4, torch.float32)
    params = P(shape[2:3], 2, torch.float32), P(shape[2:], 3, torch.float32)
    for change in (lambda t: t, lambda t: t.transpose(0, 1).contiguous().transpose(0, 1)):
        x, d = change(raw), change(grad)
        got = transform.forward(x, *params, floor), *transform.backward(x, *params, d, floor)
        want = _forward(x, *params, floor, False), *_backward(x, *params, d, floor, False)
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            error = (a.double() - b.double()).norm() / max(b.double().norm(), 1e-30)
            bound = 1e-3 if a.dtype == torch.float16 else 1e-5
            assert error < bound, (shape, floor, dtype, error)
for floor, a_log in itertools.product((None, -5.0), (50.0, 100.0)):
    x = torch.tensor([0.0, 1e-30, -1e-30, 1.0, -1.0, 1e4, -1e4, 3e38, -3e38]).view(1, -1, 1)
    params = torch.tensor([a_log]), torch.zeros(1)
    for t in (transform.forward(x, *params, floor),
              *transform.backward(x, *params, torch.ones_like(x), floor)):
        assert not torch.isnan(t).any(), (floor, a_log)
print("fine")
"""


def test_kernels_interpreted():
    """Forward and backward in Triton's interpreter, against PyTorch's operations."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parent, env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.stdout.strip() == "fine", done.stderr[-3000:]
