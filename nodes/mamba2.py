"""Mamba-2: a state-space layer with one decay per head and no erasing."""

from __future__ import annotations

from dataclasses import replace

from lagraph.node import Family, Port, Rule
from lagraph.nodes.shared import PORTS, attrs, checkpoint_rule, op_order, state_rules
from lagraph.problem import Traits

__all__ = ["MAMBA2"]

_PORTS = (
    replace(PORTS["q"], op="C", doc="C: reads the state, one row per group; H groups."),
    replace(PORTS["k"], shape="T H K", op="B", doc="B: input map, one row per group."),
    replace(PORTS["v"], shape="T HO V", op="x", doc="x: inputs, HO heads of size V."),
    replace(PORTS["g"], op="dt", doc="dt: raw step sizes."),
    Port("a", "HO", "float", "token", "A: decay rate per head, < 0.", grad="dA", op="A"),
    PORTS["cu_seqlens"],
    PORTS["initial_state"],
    replace(PORTS["dt_bias"], doc="Added to dt."),
    Port("d", "HO | HO V", "float", "readout", "D: skip from x.", "dD", optional=True, op="D"),
    Port("z", "T HO V", "io", "readout", "Output gate: y *= z sigmoid(z).", "dZ", optional=True),
    PORTS["state_indices"],
)

_DT_RANGE = Rule(
    "dt_min <= dt_max",
    "dt_max",
    expected="dt_max >= dt_min",
    got=lambda o, s: f"dt_min={o.dt_min}, dt_max={o.dt_max}",
    mend="Swap the two, or drop dt_max",
    broken=lambda o, has, s: o.dt_max is not None and not o.dt_max >= o.dt_min,
    sample={"options": {"dt_min": 1.0, "dt_max": 0.5}},
)

MAMBA2 = Family(
    name="mamba2",
    op="mamba2",
    title="Mamba-2 (SSD)",
    equation=(
        "dt' = clamp(softplus(dt + dt_bias), dt_min, dt_max);  S = exp(A dt') S + dt' x B^T;  "
        "y = S C + D x;  y *= z sigmoid(z)"
    ),
    source="Dao, Gu: Transformers are SSMs, arXiv:2405.21060, eq. 16",
    traits=Traits(gate="head", delta=False, erase=None, write=None),
    ports=_PORTS,
    attrs=attrs(
        "output_transition",
        "output_final_state",
        "checkpoint_every_n_tokens",
        "dt_softplus",
        "dt_min",
        "dt_max",
        "output_pre_gate",
        "batch_invariant",
        "overwrite_initial_state",
    ),
    rules=(_DT_RANGE, *state_rules(), checkpoint_rule(128)),
    checkpoint_step=128,
    transition="N HO",
    saved=(Port("O_pre", "T HO V", "io", "saved", "Output before the z gate.", optional=True),),
    op_order=op_order(
        "x, dt, A, B, C, cu_seqlens, D, dt_bias, z, initial_state, output_final_state, "
        "checkpoint_every_n_tokens, dt_softplus, dt_min, dt_max, batch_invariant, state_indices, "
        "overwrite_initial_state, plan_name, checkpoint_dtype",
        "x, dt, A, B, cu_seqlens, *, initial_state, dt_bias, dt_softplus, dt_min, dt_max, "
        "batch_invariant, plan_name",
        "dy, dt, A, C, cu_seqlens, *, d_final_state, dt_bias, output_transition, dt_softplus, "
        "dt_min, dt_max, batch_invariant, plan_name",
    ),
    cotangent="dy",
    op_fill={"B": "C"},  # the state's gradient does not depend on B
    notes=(
        "H counts the groups of B and C; HO is a multiple of H.",
        "The summary's transition is log2 of the span's decay product.",
    ),
    also=(
        "ssd",
        "mamba_chunk_scan_combined",
        "mamba_split_conv1d_scan_combined",
        "selective_state_update",
    ),
)
