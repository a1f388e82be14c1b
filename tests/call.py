"""One way to call every public op: node port names in, node output names out.

Ops are looked up when called, so a missing one fails its own tests only.
"""

from __future__ import annotations

import re

import torch
from oracle import GRADIENTS

OPS = {
    "gdn": "gated_delta_net",
    "kda": "kimi_delta_attention",
    "gdn2": "gated_delta_net_v2",
    "gdp": "gated_delta_product",
    "mamba2": "mamba2",
}
SUFFIX = {"forward": "", "backward": "", "summary": "_summary", "summary_backward": "_summary_bwd"}

# What the ops call differently
RENAMED = {
    "use_qk_l2norm": "use_qk_l2norm_in_kernel",
    "use_beta_sigmoid": "use_beta_sigmoid_in_kernel",
}
MAMBA2 = {"q": "C", "k": "B", "v": "x", "g": "dt", "a": "A", "d": "D", "dO": "dy"}

# The inputs that each direction's op takes
_TOKENS = ("k", "g", "beta", "a", "cu_seqlens", "a_log", "dt_bias")
_FORWARD = (*_TOKENS, "q", "v", "w", "d", "z", "initial_state", "state_indices")
TAKES = {
    "forward": _FORWARD,
    "backward": _FORWARD,
    "summary": (*_TOKENS, "v", "w", "initial_state"),
    "summary_backward": (*_TOKENS, "q", "dO", "d_final_state"),
}
# The options that only some directions have
_FORWARD_ONLY = {
    "output_final_state",
    "checkpoint_every_n_tokens",
    "checkpoint_dtype",
    "overwrite_initial_state",
    "output_pre_gate",
}
LACKS = {
    "forward": set(),
    "backward": set(),
    "summary": _FORWARD_ONLY | {"scale", "output_transition"},
    "summary_backward": _FORWARD_ONLY,
}


def inputs_of(family, direction, inputs):
    """The inputs that a direction's op takes, out of a draw."""
    takes = TAKES[direction]
    if family == "mamba2" and direction == "summary_backward":
        takes = tuple(name for name in takes if name != "k")  # the op has no B here
    return {name: inputs[name] for name in takes if inputs.get(name) is not None}


def options_of(direction, options):
    """The options that a direction has."""
    return {name: value for name, value in options.items() if name not in LACKS[direction]}


def op(family, direction="forward"):
    """The public op of a family and direction."""
    import lagraph.ops

    return getattr(lagraph.ops, OPS[family] + SUFFIX[direction])


def arguments(family, direction, inputs, plan=None, **options):
    """Keyword arguments of the op."""
    given = inputs_of(family, direction, inputs)
    if family == "mamba2":
        given = {MAMBA2.get(name, name): value for name, value in given.items()}
    kept = options_of(direction, options)
    given |= {RENAMED.get(name, name): value for name, value in kept.items()}
    if plan is not None:
        given["plan_name"] = plan
    return given


def call(family, inputs, direction="forward", plan=None, **options):
    """Run an op on node-named inputs and options; its outputs by their node names.

    backward: the forward op under autograd, then the gradients of
    sum(O dO) + sum(final_state d_final_state) with respect to every float input.
    """
    if direction == "backward":
        return gradients(family, inputs, plan=plan, **options)
    if direction == "summary_backward":
        options = {"output_transition": True, **options}
    got = op(family, direction)(**arguments(family, direction, inputs, plan, **options))
    if direction == "forward":
        return _forward_outputs(got, options)
    first = "final_state" if direction == "summary" else "d_initial_state"
    return {first: got[0], "transition": got[1]}


def _forward_outputs(got, options):
    out = {"O": got[0]}
    if options.get("output_final_state") or options.get("overwrite_initial_state"):
        out["final_state"] = got[1]
    if options.get("checkpoint_every_n_tokens"):
        out["state_checkpoints"] = got[2]
    return out


def paired(family, plan):
    """A plan of an engine that has no backward for the family, with Triton's."""
    from lagraph.engines.frost.support import SUPPORT

    alone = plan is not None and "_frost" in plan and "," not in re.sub(r"\[.*?\]", "", plan)
    has_backward = (family, "backward") in SUPPORT.serves
    return f"{plan},{family}_triton" if alone and not has_backward else plan


def gradients(family, inputs, plan=None, **options):
    """The forward's outputs and all gradients, by node name; see `call`."""
    leaves = {
        name: t.detach().requires_grad_()  # the caller's strides
        for name, t in inputs.items()
        if name in GRADIENTS and t is not None
    }
    options = {**options, "output_final_state": inputs.get("d_final_state") is not None}
    out = call(family, {**inputs, **leaves}, "forward", paired(family, plan), **options)
    ends, seeds = [], []
    if inputs.get("dO") is not None:
        ends.append(out["O"])
        seeds.append(inputs["dO"])
    if inputs.get("d_final_state") is not None:
        ends.append(out["final_state"])
        seeds.append(inputs["d_final_state"].to(out["final_state"].dtype))
    grads = torch.autograd.grad(ends, list(leaves.values()), seeds, allow_unused=True)
    named = {GRADIENTS[name]: grad for name, grad in zip(leaves, grads, strict=True)}
    missing = [name for name, grad in named.items() if grad is None]
    assert not missing, f"no gradient for {missing}; an input that does not matter gets zeros"
    return out | named
