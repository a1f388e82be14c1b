"""Masks of the active prefix: values, derivatives, NaN, composition, refusals."""

from __future__ import annotations

import pytest
import torch
from cases import BF16, F32, F64
from draw import P
from torch.autograd import forward_ad

from lagraph import errors, ops

CU = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
SHAPES = ((1, 10), (1, 10, 4), (1, 10, 2, 3))


def dirty(shape, dtype=F32):
    """NaN past the seven active tokens."""
    x = P(shape, 1, dtype)
    x[:, 7:] = float("nan")
    return x


def test_the_mask_ends_with_the_last_offset():
    x = torch.zeros(1, 10, 4)
    for cu in (CU, CU.long()):
        assert ops.active_token_mask(x, cu).tolist() == [True] * 7 + [False] * 3
    assert not ops.active_token_mask(x, torch.tensor([0])).any()
    assert ops.active_token_mask(x, torch.tensor([0, 10])).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_values_are_zeroed(shape, dtype):
    """NaN rows become zero, and NaN gradients too; the active ones keep their bits."""
    x = dirty(shape, dtype).requires_grad_()
    y = ops.mask_inactive_tokens(x, ops.active_token_mask(x, CU))
    assert torch.equal(y[:, :7], x[:, :7])
    assert not y[:, 7:].any()
    seed = dirty(shape, dtype)
    (grad,) = torch.autograd.grad(y, x, seed)
    assert torch.equal(grad[:, :7], seed[:, :7])
    assert not grad[:, 7:].any()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_gradients_are_stopped(shape, dtype):
    """Values pass, NaN and all, without a copy; gradients are zero on inactive rows."""
    x = P(shape, 1, dtype).requires_grad_()
    y = ops.mask_inactive_token_gradients(x, ops.active_token_mask(x, CU))
    assert torch.equal(y, x)
    assert y.data_ptr() == x.data_ptr()
    seed = dirty(shape, dtype)
    (grad,) = torch.autograd.grad(y, x, seed)
    assert torch.equal(grad[:, :7], seed[:, :7])
    assert not grad[:, 7:].any()


@pytest.mark.parametrize(
    "mask_of",
    [ops.mask_inactive_tokens, ops.mask_inactive_token_gradients],
    ids=lambda f: f.__name__,
)
def test_higher_derivatives_and_tangents(mask_of):
    mask = ops.active_token_mask(torch.zeros(1, 10, 2), CU)
    x = P((1, 10, 2), 1).requires_grad_()
    (first,) = torch.autograd.grad(mask_of(x, mask).pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    want = torch.where(mask[None, :, None], 6.0 * x, 0.0)
    torch.testing.assert_close(second, want)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.detach(), dirty((1, 10, 2), F64))
        tangent = forward_ad.unpack_dual(mask_of(dual, mask)).tangent
    assert not tangent[:, 7:].any()
    assert tangent[:, :7].isfinite().all()


def test_none_changes_nothing():
    x = torch.ones(1, 3, 2)
    assert ops.mask_inactive_tokens(x, None) is x
    assert ops.mask_inactive_token_gradients(x, None) is x


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_composition_of_the_page(compiled):
    """NaN past the end reaches neither the output, nor any parameter's gradient."""
    torch._dynamo.reset()
    heads, size = 2, 8
    torch.manual_seed(0)
    into = torch.randn(6, 3 * heads * size, requires_grad=True)
    gates = torch.randn(6, 2 * heads, requires_grad=True)
    back = torch.randn(heads * size, 6, requires_grad=True)
    a_log, bias = torch.zeros(heads, requires_grad=True), torch.zeros(heads, requires_grad=True)
    params = (into, gates, back, a_log, bias)

    def layer(hidden, cu, masked):
        mask = ops.active_token_mask(hidden, cu) if masked else None
        hidden = ops.mask_inactive_tokens(hidden, mask)
        projected = ops.mask_inactive_token_gradients(hidden @ into, mask)
        raw = ops.mask_inactive_token_gradients(hidden @ gates, mask)
        q, k, v = projected.unflatten(2, (3, heads, size)).unbind(2)
        gate = ops.gate_transform(raw[..., :heads], a_log, bias, kind="softplus")
        gate = ops.mask_inactive_token_gradients(gate, mask)
        k = torch.nn.functional.normalize(k, dim=-1)
        o, _ = ops.chunk_gdn(q, k, v, gate, raw[..., heads:].sigmoid(), cu_seqlens=cu)
        o = ops.mask_inactive_tokens(o, mask).flatten(2)
        return ops.mask_inactive_token_gradients(o @ back, mask)

    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    hidden = P((1, 40, 6), 1, F32)
    hidden[:, 25:] = float("nan")
    cu = torch.tensor([0, 20, 25, 25], dtype=torch.int32)
    out = run(hidden, cu, True)
    seed = P((1, 40, 6), 2, F32)
    seed[:, 25:] = float("nan")
    grads = torch.autograd.grad(out, params, seed)
    want = layer(hidden[:, :25].clone(), cu, False)
    wanted = torch.autograd.grad(want, params, seed[:, :25].clone())
    torch.testing.assert_close(out[:, :25], want)
    for a, b in zip(grads, wanted, strict=True):
        torch.testing.assert_close(a, b)
    torch._dynamo.reset()


def test_compiled_over_lengths():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def step(x, cu):
        mask = ops.active_token_mask(x, cu)
        return ops.mask_inactive_token_gradients(ops.mask_inactive_tokens(x, mask) * 2.0, mask)

    compiled = torch.compile(step, backend=counter, fullgraph=True)
    for T in (9, 30, 12, 64):
        x, cu = P((1, T, 3), 1, F32), torch.tensor([0, T // 2])
        assert torch.equal(compiled(x, cu), step(x, cu))
    assert counter.frame_count == 2
    torch._dynamo.reset()


X, MASK = torch.zeros(1, 10, 4), torch.ones(10, dtype=torch.bool)
BAD = {
    "a batch": (lambda: ops.active_token_mask(X.expand(2, 10, 4), CU), errors.ShapeMismatch, "x"),
    "rank 1": (lambda: ops.active_token_mask(X[0, 0], CU), errors.ShapeMismatch, "x"),
    "offsets of rank 2": (
        lambda: ops.active_token_mask(X, CU[None]), errors.ShapeMismatch, "cu_seqlens",
    ),
    "no offsets": (lambda: ops.active_token_mask(X, CU[:0]), errors.ShapeMismatch, "cu_seqlens"),
    "float offsets": (
        lambda: ops.active_token_mask(X, CU.float()), errors.DtypeMismatch, "cu_seqlens",
    ),
    "device": (
        lambda: ops.active_token_mask(X.to("meta"), CU), errors.DeviceMismatch, "cu_seqlens",
    ),
    "mask of another length": (
        lambda: ops.mask_inactive_tokens(X, MASK[:9]), errors.ShapeMismatch, "active_mask",
    ),
    "int mask": (
        lambda: ops.mask_inactive_token_gradients(X, MASK.int()), errors.DtypeMismatch,
        "active_mask",
    ),
    "masked batch": (
        lambda: ops.mask_inactive_tokens(X.expand(2, 10, 4), MASK), errors.ShapeMismatch, "x",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_calls(what):
    call, error, argument = BAD[what]
    with pytest.raises(error, match=rf"\.{argument}: "):
        call()
