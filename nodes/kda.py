"""KDA: the gated delta rule with one decay per key channel."""

from __future__ import annotations

from dataclasses import replace

from lagraph.node import Family, Port
from lagraph.nodes.shared import (
    PORTS,
    attrs,
    checkpoint_rule,
    delta_rules,
    gate_bound_needs_safe_gate,
    op_order,
)
from lagraph.problem import Traits

__all__ = ["KDA", "KEY_GATE_PORTS"]

KEY_GATE_PORTS: dict[str, Port] = PORTS | {
    "g": replace(PORTS["g"], shape="T HO K"),
    "dt_bias": replace(PORTS["dt_bias"], shape="HO K"),
}

KDA = Family(
    name="kda",
    op="kimi_delta_attention",
    title="Kimi Delta Attention",
    equation="S = S diag(exp(g));  S += beta (v - S k) k^T;  o = scale S q",
    source="Kimi Team: Kimi Linear, arXiv:2510.26692, eq. 1",
    traits=Traits(gate="key"),
    ports=tuple(KEY_GATE_PORTS.values()),
    attrs=attrs(
        "output_transition", "scale", "output_final_state", "use_qk_l2norm",
        "checkpoint_every_n_tokens", "use_beta_sigmoid", "allow_neg_eigval", "safe_gate",
        "gate_domain", "gate_lower_bound", "batch_invariant", "overwrite_initial_state",
    ),
    rules=(*delta_rules(), gate_bound_needs_safe_gate(), checkpoint_rule(16)),
    checkpoint_step=16,
    op_order=op_order(
        "q, k, v, g, beta, cu_seqlens, scale, initial_state, output_final_state, "
        "use_qk_l2norm_in_kernel, batch_invariant, use_beta_sigmoid_in_kernel, allow_neg_eigval, "
        "safe_gate, gate_lower_bound, gate_domain, a_log, dt_bias, checkpoint_every_n_tokens, "
        "checkpoint_dtype, plan_name, overwrite_initial_state, state_indices",
        "k, v, g, beta, cu_seqlens, *, initial_state, use_qk_l2norm_in_kernel, "
        "use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate, gate_lower_bound, gate_domain, "
        "a_log, dt_bias, batch_invariant, plan_name",
        "q, k, g, beta, dO, cu_seqlens, *, scale, d_final_state, output_transition, "
        "use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate, "
        "gate_lower_bound, gate_domain, a_log, dt_bias, batch_invariant, plan_name",
    ),
    notes=("safe_gate: g = gate_lower_bound sigmoid(exp(a_log) (g + dt_bias)).",),
)  # fmt: skip
