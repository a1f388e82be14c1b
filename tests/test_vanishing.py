"""A gate's gradient that all but vanishes: what fp32 can know of it.

With one key of unit length for all tokens and beta = 1, each token erases the whole of what the
last one wrote, so that no gate between them matters: the true dG is of the size of |k|^2 - 1, which
fp32 rounds away. It is a sum of terms that cancel, and no fp32 recurrence gets its digits right;
fp64 does, so the formula is.
"""

from __future__ import annotations

import oracle
import pytest
import torch
from call import call
from draw import hostile

F32, F64 = torch.float32, torch.float64
CASES = [(32, 40, 8), (32, 130, 7), (16, 130, 1), (8, 40, 10), (64, 40, 0), (8, 9, 10)]


def repeated(size, length, seed, dtype):
    x = hostile("repeated keys", "gdn", lengths=(length,), K=size, V=size, gate="mixed", seed=seed)
    x["beta"] = torch.ones_like(x["beta"])
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in x.items()}


@pytest.mark.parametrize(("size", "length", "seed"), CASES)
def test_a_gradient_that_cancels_is_as_exact_as_its_terms(size, length, seed):
    x = repeated(size, length, seed, F32)
    want = oracle.backward("gdn", x)
    got = call("gdn", x, "backward")
    # dG is a sum, over rows, of products of rows with their gradients: the terms that cancel.
    rows = {"q": "dQ", "k": "dK", "v": "dV"}
    terms = max((x[a].double() * want[b]).sum(-1).abs().max().item() for a, b in rows.items())
    assert want["dG"].abs().max().item() < 1e-4 * terms, "the case is what it says"
    error = (got["dG"].double() - want["dG"]).abs().max().item()
    assert error <= 8 * torch.finfo(F32).eps * terms
    for name in want.keys() - {"dG"}:
        off = (got[name].double() - want[name]).norm() / want[name].norm()
        assert off < 1e-4, name


@pytest.mark.parametrize(("size", "length", "seed"), CASES)
def test_fp64_has_its_digits(size, length, seed):
    x = repeated(size, length, seed, F64)
    want, got = oracle.backward("gdn", x)["dG"], call("gdn", x, "backward")["dG"]
    assert (got - want).norm() < 1e-5 * want.norm()
