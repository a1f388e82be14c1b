"""GDP: the gated delta rule with several Householder updates per token."""

from __future__ import annotations

from dataclasses import replace

from lagraph.node import Family
from lagraph.nodes.shared import PORTS, attrs, checkpoint_rule, delta_rules, op_order
from lagraph.problem import Traits

__all__ = ["GDP"]

_PORTS = PORTS | {
    "k": replace(PORTS["k"], shape="T*n HK K | T n HK K"),
    "v": replace(PORTS["v"], shape="T*n HV V | T n HV V"),
    "beta": replace(PORTS["beta"], shape="T*n HO | T n HO"),
}

GDP = Family(
    name="gdp",
    op="gated_delta_product",
    title="Gated DeltaProduct",
    equation="S = exp(g) S;  n times: S += beta_i (v_i - S k_i) k_i^T;  o = scale S q",
    source="Siems et al.: DeltaProduct, arXiv:2502.10297, eq. 5",
    traits=Traits(gate="head", substeps=True),
    ports=tuple(_PORTS.values()),
    attrs=attrs(
        "num_householder", "output_transition", "scale", "output_final_state", "use_qk_l2norm",
        "checkpoint_every_n_tokens", "use_beta_sigmoid", "allow_neg_eigval", "safe_gate",
        "gate_domain", "batch_invariant", "overwrite_initial_state",
    ),
    rules=(*delta_rules(), checkpoint_rule(64)),
    checkpoint_step=64,
    op_order=op_order(
        "q, k, v, g, beta, cu_seqlens, num_householder, scale, initial_state, output_final_state, "
        "use_qk_l2norm_in_kernel, batch_invariant, use_beta_sigmoid_in_kernel, allow_neg_eigval, "
        "safe_gate, gate_domain, a_log, dt_bias, checkpoint_every_n_tokens, checkpoint_dtype, "
        "plan_name, overwrite_initial_state, state_indices",
        "k, v, g, beta, cu_seqlens, num_householder, *, initial_state, use_qk_l2norm_in_kernel, "
        "use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate, gate_domain, a_log, dt_bias, "
        "batch_invariant, plan_name",
        "q, k, g, beta, dO, cu_seqlens, num_householder, *, scale, d_final_state, "
        "output_transition, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, "
        "allow_neg_eigval, safe_gate, gate_domain, a_log, dt_bias, batch_invariant, plan_name",
    ),
    notes=(
        "k, v and beta come expanded, n rows per token, or token-major with an axis n.",
        "A token's decay belongs to its first update; checkpoints count updates.",
        "safe_gate: g = -exp(a_log) softplus(g + dt_bias).",
    ),
)  # fmt: skip
