"""GDN-2: KDA with an erase strength per key channel and a write strength per value channel."""

from __future__ import annotations

from dataclasses import replace

from lagraph.node import Family, Port
from lagraph.nodes.kda import KEY_GATE_PORTS
from lagraph.nodes.shared import (
    attrs,
    checkpoint_rule,
    delta_rules,
    gate_bound_needs_safe_gate,
    needs,
    op_order,
)
from lagraph.problem import Traits

__all__ = ["GDN2"]

_BETA = replace(
    KEY_GATE_PORTS["beta"],
    shape="T HO K",
    doc="Erase strength per key channel; its logit under use_beta_sigmoid.",
)
_W = Port("w", "T HO V", "io", "write", "Write strength per value channel.", grad="dW")
_ORDER = (
    "q", "k", "v", "g", "beta", "w", "cu_seqlens", "initial_state", "a_log", "dt_bias",
    "state_indices",
)  # fmt: skip
_PORTS = KEY_GATE_PORTS | {"beta": _BETA, "w": _W}

GDN2 = Family(
    name="gdn2",
    op="gated_delta_net_v2",
    title="Gated DeltaNet-2",
    equation="S = S diag(exp(g));  S += (w . v - S (beta . k)) k^T;  o = scale S q",
    source="cuDNN Frontend, Linear Attention: GDN-2",
    traits=Traits(gate="key", erase="key", write="value"),
    ports=tuple(_PORTS[name] for name in _ORDER),
    attrs=attrs(
        "output_transition", "scale", "output_final_state", "use_qk_l2norm",
        "checkpoint_every_n_tokens", "use_beta_sigmoid", "allow_neg_eigval", "beta_guard",
        "safe_gate", "gate_domain", "gate_lower_bound", "batch_invariant",
        "overwrite_initial_state",
    ),
    rules=(
        *delta_rules(),
        gate_bound_needs_safe_gate(),
        needs("beta_guard", "use_qk_l2norm"),
        checkpoint_rule(16),
    ),
    checkpoint_step=16,
    op_order=op_order(
        "q, k, v, g, beta, w, cu_seqlens, scale, initial_state, output_final_state, "
        "use_qk_l2norm_in_kernel, batch_invariant, use_beta_sigmoid_in_kernel, allow_neg_eigval, "
        "beta_guard, safe_gate, gate_domain, gate_lower_bound, a_log, dt_bias, "
        "checkpoint_every_n_tokens, checkpoint_dtype, plan_name, overwrite_initial_state, "
        "state_indices",
        "k, v, g, beta, w, cu_seqlens, *, initial_state, use_qk_l2norm_in_kernel, "
        "use_beta_sigmoid_in_kernel, allow_neg_eigval, beta_guard, safe_gate, gate_domain, a_log, "
        "dt_bias, batch_invariant, plan_name, gate_lower_bound",
        "q, k, g, beta, dO, cu_seqlens, *, scale, d_final_state, output_transition, "
        "use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, beta_guard, "
        "safe_gate, gate_domain, a_log, dt_bias, batch_invariant, plan_name, gate_lower_bound",
    ),
    notes=("safe_gate: g = gate_lower_bound sigmoid(exp(a_log) (g + dt_bias)).",),
)  # fmt: skip
