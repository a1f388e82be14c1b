"""The batch-first functions, called on node-named packed inputs, so that the oracle judges them.

A draw is packed. `tokens` makes it [1, T, ...] beside its offsets, or, where all sequences are of
one length, [B, T, ...] without them.
"""

from __future__ import annotations

import torch
from oracle import GRADIENTS

NAMES = {"g": "gate"}
MAMBA2 = {"q": "C", "k": "B", "v": "x", "g": "dt", "a": "A", "d": "D"}
TOKENS = ("q", "k", "v", "g", "beta", "w", "z")
IMPL = {"eager": "reference", "triton": "fused"}


def function(kind, family):
    """The public function: kind is chunk, recurrent or paged_chunk."""
    import lagraph.ops

    return getattr(lagraph.ops, f"{kind}_{family}")


def named(family, x):
    """Inputs under the function's names, but for offsets and states."""
    names = MAMBA2 if family == "mamba2" else NAMES
    skip = ("cu_seqlens", "initial_state", "dO", "d_final_state", "state_indices")
    return {names.get(n, n): t for n, t in x.items() if n not in skip}


def tokens(family, x, batch=None):
    """Keyword arguments: packed with cu_seqlens, or dense with `batch` sequences."""
    lead = 1 if batch is None else batch
    x = {n: t.unflatten(0, (lead, -1)) if n in TOKENS else t for n, t in x.items()}
    given = named(family, x)
    if batch is None:
        given["cu_seqlens"] = x["cu_seqlens"]
    return given


def call(kind, family, x, batch=None, **options):
    """Outputs by node name, packed again."""
    given = tokens(family, x, batch) | options
    if x.get("initial_state") is not None:
        given["initial_state"] = x["initial_state"]
    got = function(kind, family)(**given)
    out = {"O": got[0].flatten(0, 1)}
    if got[1] is not None:
        out["final_state"] = got[1]
    return out


def gradients(kind, family, x, batch=None, **options):
    """Outputs, and gradients of sum(O dO) + sum(final_state d_final_state), by node name."""
    leaves = {n: t.detach().requires_grad_() for n, t in x.items() if n in GRADIENTS}
    out = call(kind, family, x | leaves, batch, output_final_state=True, **options)
    ends, seeds = [out["O"]], [x["dO"]]
    if x.get("d_final_state") is not None:
        ends.append(out["final_state"])
        seeds.append(x["d_final_state"].to(out["final_state"].dtype))
    grads = torch.autograd.grad(ends, list(leaves.values()), seeds)
    return out | {GRADIENTS[n]: g for n, g in zip(leaves, grads, strict=True)}


def extra(family, n=2):
    """What GDP cannot do without."""
    return {"num_householder": n} if family == "gdp" else {}
