"""Gradients of the public ops in fp64 against finite differences, which share nothing with them.

The oracle's gradients are autograd's through the oracle's own forward; here the op's backward is
held against the op's forward. beta_guard is left out: it is not differentiated, by contract.
"""

from __future__ import annotations

import pytest
import torch
from call import call
from draw import F64, draw
from oracle import FAMILIES, GRADIENTS

SAFE = {"safe_gate": True}
DELTA = {
    "plain": ({}, ()),
    "normalized": ({"use_qk_l2norm": True, "scale": 0.7}, ()),
    "negative eigenvalues": ({"use_beta_sigmoid": True, "allow_neg_eigval": True}, ()),
    "linear gates": ({"gate_domain": "linear"}, ()),
    "safe gates": (SAFE, ("a_log", "dt_bias")),
    "checkpoints": ({"checkpoint_every_n_tokens": 64}, ()),
}
MAMBA2 = {
    "plain": ({}, ()),
    "D, z, dt_bias": ({}, ("d", "z", "dt_bias")),
    "D per channel": ({}, ("d channels",)),
    "clamped": ({"dt_min": 0.02, "dt_max": 0.06}, ("dt_bias",)),
    "no softplus": ({"dt_softplus": False}, ()),
}
# More heads of values, then of queries
HEADS = dict.fromkeys(FAMILIES, ((1, 1, 2), (2, 1, 1))) | {"mamba2": ((1, 1, 2),)}
ROWS = [
    pytest.param(family, heads, *row, id=f"{family}-{name}-{heads}")
    for family in FAMILIES
    for name, row in (MAMBA2 if family == "mamba2" else DELTA).items()
    for heads in HEADS[family]
]


@pytest.mark.parametrize(("family", "heads", "options", "params"), ROWS)
def test_gradcheck(family, heads, options, params):
    """dO and d_final_state together, every input at once, two sequences and an empty one.

    Element by element for more value heads, by random projections for more query heads.
    """
    H, HK, HV = heads
    n = 2 if family == "gdp" else 1
    x = draw(
        family, lengths=(3, 0, 2), H=H, HK=HK, HV=HV, K=3, V=2, n=n, dtype=F64, state=F64,
        params=params, options=options,
    )  # fmt: skip
    names = [name for name in GRADIENTS if name in x]
    chosen = {**options, "output_final_state": True}
    if family == "gdp":
        chosen["num_householder"] = n

    def function(*tensors):
        got = call(family, x | dict(zip(names, tensors, strict=True)), **chosen)
        return got["O"], got["final_state"]

    leaves = [x[name].clone().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(
        function, leaves, eps=1e-6, atol=1e-7, rtol=1e-5, fast_mode=H > HV
    )
