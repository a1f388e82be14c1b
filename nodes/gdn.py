"""GDN: the gated delta rule with one decay per head."""

from __future__ import annotations

from lagraph.node import Family
from lagraph.nodes.shared import PORTS, attrs, checkpoint_rule, delta_rules, op_order
from lagraph.problem import Traits

__all__ = ["GDN"]

GDN = Family(
    name="gdn",
    op="gated_delta_net",
    title="Gated DeltaNet",
    equation="S = exp(g) S;  S += beta (v - S k) k^T;  o = scale S q",
    source="Yang, Kautz, Hatamizadeh: Gated Delta Networks, arXiv:2412.06464, eq. 10",
    traits=Traits(gate="head"),
    ports=tuple(PORTS.values()),
    attrs=attrs(
        "output_transition", "scale", "output_final_state", "use_qk_l2norm",
        "checkpoint_every_n_tokens", "use_beta_sigmoid", "allow_neg_eigval", "safe_gate",
        "gate_domain", "batch_invariant", "overwrite_initial_state",
    ),
    rules=(*delta_rules(), checkpoint_rule(16)),
    checkpoint_step=16,
    op_order=op_order(
        "q, k, v, g, beta, cu_seqlens, scale, initial_state, output_final_state, "
        "use_qk_l2norm_in_kernel, batch_invariant, use_beta_sigmoid_in_kernel, allow_neg_eigval, "
        "safe_gate, gate_domain, a_log, dt_bias, checkpoint_every_n_tokens, checkpoint_dtype, "
        "plan_name, overwrite_initial_state, state_indices",
        "k, v, g, beta, cu_seqlens, *, initial_state, use_qk_l2norm_in_kernel, "
        "use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate, gate_domain, a_log, dt_bias, "
        "batch_invariant, plan_name",
        "q, k, g, beta, dO, cu_seqlens, *, scale, d_final_state, output_transition, "
        "use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate, "
        "gate_domain, a_log, dt_bias, batch_invariant, plan_name",
    ),
    notes=("safe_gate: g = -exp(a_log) softplus(g + dt_bias).",),
    also=("gated_delta_rule",),
)  # fmt: skip
