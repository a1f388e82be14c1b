"""Faults found by trying to break the functions on batches: one test each."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lagraph import ops
from lagraph.errors import LagraphError, NotDifferentiable


def tokens(T=11, B=2):
    return (
        torch.randn(B, T, 2, 8), torch.randn(B, T, 2, 8), torch.randn(B, T, 4, 6),
        -torch.rand(B, T, 4), torch.rand(B, T, 4),
    )  # fmt: skip


def test_offsets_made_under_a_mode_are_not_kept():
    """A fake or functional call leaves nothing behind for the next plain one."""
    x = tokens(T=13)
    ops.chunk_gdn(*(t[:, :5] for t in x))
    with FakeTensorMode(allow_non_fake_inputs=True):
        ops.chunk_gdn(*x)
    assert type(ops.chunk_gdn(*x)[0]) is torch.Tensor
    y = tokens(T=17)
    torch.func.functionalize(lambda *t: ops.chunk_gdn(*t)[0])(*y)
    assert torch.isfinite(ops.chunk_gdn(*y)[0]).all()


def test_a_refused_paged_call_clears_no_slot():
    x = [t[:1] for t in tokens()]
    x[0].requires_grad_()
    pool = torch.ones(4, 4, 6, 8)
    with pytest.raises(NotDifferentiable, match="paged_chunk_gdn"):
        ops.paged_chunk_gdn(*x, pool, torch.tensor([2]), has_initial_state=torch.tensor([False]))
    assert (pool == 1).all()


def test_the_smallest_index_is_padding():
    pool = torch.ones(3, 4, 6, 8)
    slots = torch.tensor([1, -(2**31)], dtype=torch.int32)
    out = ops.paged_chunk_gdn(*tokens(), pool, slots)
    assert not out[1].any()
    assert (pool[[0, 2]] == 1).all()


def packed(B):
    return torch.randn(B, 2 * 2 * 8 + 4 * 6), *torch.randn(2, 1, B, 4), *torch.randn(2, 4)


def test_slots_that_overlap_are_refused():
    pool = torch.zeros(1, 4, 6, 8).expand(4, 4, 6, 8)
    with pytest.raises(LagraphError, match="state_cache"):
        ops.recurrent_gdn_decode(*packed(2), pool, torch.tensor([1, 2]))
    x, weight = torch.randn(2, 5), torch.randn(5, 4)
    for pool in (torch.zeros(1, 3, 5).expand(4, 3, 5), torch.zeros(4, 1, 5).expand(4, 3, 5)):
        with pytest.raises(LagraphError, match="overlap"):
            ops.causal_conv1d_decode(x, weight, pool, state_indices=torch.tensor([1, 2]))


def test_a_pool_without_slots_serves_padding():
    out = ops.recurrent_gdn_decode(*packed(3), torch.zeros(0, 4, 6, 8), torch.tensor([0, -1, 0]))
    assert not out.any()
    x, weight = torch.randn(2, 5), torch.randn(5, 4)
    out = ops.causal_conv1d_decode(
        x, weight, torch.zeros(0, 3, 5), state_indices=torch.tensor([0, -1])
    )
    assert not out.any()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float16])
def test_a_mask_keeps_the_dtype(dtype):
    x = torch.ones(1, 4, 2).to(dtype)
    mask = ops.active_token_mask(x, torch.tensor([0, 3]))
    assert ops.mask_inactive_tokens(x, mask).dtype == dtype


def test_merging_keeps_the_wider_dtype():
    """An fp64 state met by an fp32 or bf16 summary is not rounded down; bf16 is widened."""
    state = torch.randn(4, 6, 8, dtype=torch.float64)
    neutral = ops.context_parallel.neutral_summary(4, 6, 8, device="cpu")
    for summary in (neutral, neutral.bfloat16()):
        assert torch.equal(ops.context_parallel.merge_state(state, summary), state)
        assert ops.context_parallel.merge_state(state.bfloat16(), summary).dtype == torch.float32
    both = ops.context_parallel.compose_summaries(neutral.double(), neutral)
    assert both.dtype == torch.float64
