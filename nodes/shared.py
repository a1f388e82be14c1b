"""Ports, options and rules that several families share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from lagraph.node import Attr, Port, Rule

if TYPE_CHECKING:
    from lagraph.problem import Direction

__all__ = ["ATTRS", "PORTS", "attrs", "checkpoint_rule", "delta_rules", "op_order", "state_rules"]

_F: tuple[Direction, ...] = ("forward",)
_FB: tuple[Direction, ...] = ("forward", "backward")
_SUMMARIES: tuple[Direction, ...] = ("summary", "summary_backward")

PORTS: dict[str, Port] = {
    port.name: port
    for port in (
        Port("q", "T H K", "io", "query", "Queries, multiplied by scale.", grad="dQ"),
        Port("k", "T HK K", "io", "token", "Keys; HK is H or HV.", grad="dK"),
        Port("v", "T HV V", "io", "write", "Values.", grad="dV"),
        Port(
            "g", "T HO", "float", "token",
            "Natural log of the decay, <= 0; the decay itself under gate_domain='linear'; the raw "
            "gate under safe_gate.", grad="dG",
        ),
        Port(
            "beta", "T HO", "beta", "token",
            "Write strength, in (0, 1), or up to 2; its logit under use_beta_sigmoid.",
            grad="dBeta",
        ),
        Port(
            "cu_seqlens", "N+1", "index", "token",
            "First token of every sequence, then the end; starts at 0, never falls, may end before "
            "T.",
        ),
        Port(
            "initial_state", "N HO V K", "float", "state",
            "State that each sequence starts from (zero if absent); a pool [P, HO, V, K] with "
            "state_indices.", grad="d_initial_state", optional=True,
        ),
        Port(
            "a_log", "HO", "float", "param", "Log amplitude of the safe gate; absent means 0.",
            grad="d_a_log", optional=True,
        ),
        Port(
            "dt_bias", "HO", "float", "param", "Bias of the safe gate; absent means 0.",
            grad="d_dt_bias", optional=True,
        ),
        Port(
            "state_indices", "N", "index", "pool",
            "Row of the pool that each sequence reads and, under output_final_state, writes; a "
            "negative index is padding.", optional=True,
        ),
    )
}  # fmt: skip

ATTRS: dict[str, Attr] = {
    attr.name: attr
    for attr in (
        Attr("num_householder", int, ..., "Updates per token, n.", limits={"ge": 1}),
        Attr(
            "output_transition", bool, False,
            "Also return the span's map from first to last state.", where=_SUMMARIES,
        ),
        Attr(
            "scale", float | None, None, "Query scale; None means K ** -0.5.",
            where=("forward", "backward", "summary_backward"), limits={"allow_inf_nan": False},
        ),
        Attr("output_final_state", bool, False, "Also return the final states.", where=_F),
        Attr(
            "use_qk_l2norm", bool, False,
            "Normalize q and k: x * rsqrt(sum(x^2) + 1e-6).", op="use_qk_l2norm_in_kernel",
        ),
        Attr(
            "checkpoint_every_n_tokens", int, 0,
            "Cadence of the state checkpoints in tokens (GDP: sub-tokens); 0 means none.",
            where=_FB, limits={"ge": 0},
        ),
        Attr(
            "use_beta_sigmoid", bool, False, "beta holds logits: beta = sigmoid(beta).",
            op="use_beta_sigmoid_in_kernel",
        ),
        Attr("allow_neg_eigval", bool, False, "beta = 2 sigmoid(beta)."),
        Attr(
            "beta_guard", bool, False,
            "Pull rows of beta that would expand the state to their key-weighted mean.",
        ),
        Attr("safe_gate", bool, False, "g holds raw gates that are mapped to log decays <= 0."),
        Attr(
            "gate_domain", Literal["log", "linear"], "log",
            "'linear': g holds the decay a itself, floored at 1e-10; dG is with respect to a.",
        ),
        Attr(
            "gate_lower_bound", float | None, None,
            "Lower bound L < 0 of the safe gate; None means -5.",
            limits={"lt": 0, "allow_inf_nan": False},
        ),
        Attr("dt_softplus", bool, True, "dt' = softplus(dt + dt_bias), else dt + dt_bias."),
        Attr("dt_min", float, 0.0, "Lower clamp of dt'.", limits={"ge": 0, "allow_inf_nan": False}),
        Attr("dt_max", float | None, None, "Upper clamp of dt'; None means unbounded."),
        Attr("output_pre_gate", bool, False, "Also return the output before the z gate.", where=_F),
        Attr(
            "batch_invariant", bool, False,
            "Each sequence's bits depend on that sequence alone.",
        ),
        Attr(
            "overwrite_initial_state", bool, False,
            "Write the final states into initial_state (inference only). A backward takes it "
            "without effect.", where=_FB,
        ),
    )
}  # fmt: skip


def attrs(*names: str) -> tuple[Attr, ...]:
    """The shared options of these names, in this order."""
    return tuple(ATTRS[name] for name in names)


def needs(option: str, other: str) -> Rule:
    """`option` may be set only together with `other`."""
    return Rule(
        f"{option} needs {other}",
        option,
        expected=f"{other}=True beside {option}=True",
        got=lambda o, s: f"{other}=False",
        mend=f"Pass {other}=True, or drop {option}",
        broken=lambda o, has, s: getattr(o, option) and not getattr(o, other),
        sample={"options": {option: True, other: False}},
    )


def port_needs(port: str, option: str) -> Rule:
    """An optional port may be given only together with an option."""
    return Rule(
        f"{port} needs {option}",
        port,
        expected=f"{option}=True where {port} is given",
        got=lambda o, s: f"{option}=False",
        mend=f"Pass {option}=True, or drop {port}",
        broken=lambda o, has, s: has(port) and not getattr(o, option),
        sample={"options": {option: False}, "add": (port,)},
    )


def checkpoint_rule(step: int) -> Rule:
    """The checkpoint cadence is a multiple of the family's step."""
    return Rule(
        f"checkpoint cadence is a multiple of {step}",
        "checkpoint_every_n_tokens",
        expected=f"a multiple of {step}",
        got=lambda o, s: str(o.checkpoint_every_n_tokens),
        mend=f"Take 0 or a multiple of {step}",
        broken=lambda o, has, s: o.checkpoint_every_n_tokens % step != 0,
        where=_FB,
        sample={"options": {"checkpoint_every_n_tokens": step - 1}},
    )


def state_rules() -> tuple[Rule, ...]:
    """How pools, in-place states and checkpoints go together."""
    return (
        Rule(
            "state_indices needs a pool",
            "state_indices",
            expected="initial_state, the pool that it selects from",
            got=lambda o, s: "no initial_state",
            mend="Pass the pool as initial_state, or drop state_indices",
            broken=lambda o, has, s: has("state_indices") and not has("initial_state"),
            where=_F,
            sample={"add": ("state_indices",), "drop": ("initial_state",)},
        ),
        Rule(
            "state_indices excludes checkpoints",
            "state_indices",
            expected="no checkpoints with a state pool",
            got=lambda o, s: f"checkpoint_every_n_tokens={o.checkpoint_every_n_tokens}",
            mend="Drop one of the two",
            broken=lambda o, has, s: has("state_indices") and o.checkpoint_every_n_tokens > 0,
            where=_F,
            sample={
                "add": ("state_indices", "initial_state"),
                "options": {"checkpoint_every_n_tokens": 128},
            },
        ),
        Rule(
            "overwrite_initial_state needs initial_state",
            "overwrite_initial_state",
            expected="initial_state, the buffer to overwrite",
            got=lambda o, s: "no initial_state",
            mend="Pass initial_state, or drop overwrite_initial_state",
            broken=lambda o, has, s: o.overwrite_initial_state and not has("initial_state"),
            where=_F,
            sample={"options": {"overwrite_initial_state": True}, "drop": ("initial_state",)},
        ),
    )


def delta_rules() -> tuple[Rule, ...]:
    """Rules of all delta-rule families: gates, heads, states."""
    return (
        needs("allow_neg_eigval", "use_beta_sigmoid"),
        port_needs("a_log", "safe_gate"),
        port_needs("dt_bias", "safe_gate"),
        Rule(
            "gate_domain='linear' excludes safe_gate",
            "gate_domain",
            expected="'log' with safe_gate=True",
            got=lambda o, s: repr(o.gate_domain),
            mend="Drop safe_gate, or pass log-domain gates",
            broken=lambda o, has, s: o.safe_gate and o.gate_domain == "linear",
            sample={"options": {"safe_gate": True, "gate_domain": "linear"}},
        ),
        Rule(
            "HK is H or HV",
            "k",
            expected="HK heads, HK = H or HV",
            got=lambda o, s: f"HK={s['HK']} with H={s['H']} and HV={s['HV']}",
            mend="Give k as many heads as q or as v",
            # Without v, HV may be HK where H = HO; without q, `bind` has made H fit.
            broken=lambda o, has, s: (
                s["HK"] not in (s["H"], s["HV"]) and (has("v") or s["HO"] > s["H"])
            ),
            sample={"sizes": {"H": 4, "HK": 1, "HV": 2}},
            sizes=True,
        ),
        *state_rules(),
    )


def gate_bound_needs_safe_gate() -> Rule:
    """The lower bound belongs to the safe gate."""
    return Rule(
        "gate_lower_bound needs safe_gate",
        "gate_lower_bound",
        expected="safe_gate=True beside gate_lower_bound",
        got=lambda o, s: "safe_gate=False",
        mend="Pass safe_gate=True, or drop gate_lower_bound",
        broken=lambda o, has, s: o.gate_lower_bound is not None and not o.safe_gate,
        sample={"options": {"gate_lower_bound": -5.0, "safe_gate": False}},
    )


def op_order(forward: str, summary: str, summary_backward: str) -> dict[Direction, tuple[str, ...]]:
    """Orders of the operators' arguments, written as in a signature, under the operator's names."""

    def names(text: str) -> tuple[str, ...]:
        return tuple(name.strip() for name in text.split(","))

    return {
        "forward": names(forward),
        "summary": names(summary),
        "summary_backward": names(summary_backward),
    }
