"""What a problem is to kernels: its facts, and the signatures of the kernels that serve it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

from lagraph import registry
from lagraph.desc import dtype_name
from lagraph.engines.frost.support import KERNELS, LINK

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lagraph.engines.frost.signature import Signature
    from lagraph.problem import Problem

__all__ = ["facts", "pieces", "scalars", "signature_of", "tensors_of", "token_major"]

# Fields of a signature that hold a tensor's dtype.
TENSORS = {
    "g": "g",
    "beta": "beta",
    "a_log": "a_log",
    "bias": "dt_bias",
    "offsets": "cu_seqlens",
    "initial": "initial_state",
    "index": "state_indices",
    "final": "final_state",
    "checkpoints": "state_checkpoints",
    "transition": "transition",
}
# What a kernel that opens segments neither reads nor writes.
CLOSED = {"initial": "", "index": "", "final": "", "checkpoints": "", "every": 0}
PHASES = {"forward": "whole", "summary": "open", "summary_backward": "retreat"}


def tensors_of(problem: Problem) -> Mapping[str, str]:
    """Tensors by the fields that hold their dtypes: backwards, the last state is the initial."""
    if problem.direction == "summary_backward":
        return TENSORS | {"initial": "d_final_state", "final": "d_initial_state"}
    return TENSORS


def token_major(problem: Problem) -> bool:
    """Whether k, v and beta have an axis of steps."""
    return problem.traits.substeps and problem.ranks["k"] == 4


def facts(problem: Problem) -> dict[str, int | str | bool]:
    """The static facts of a problem that a signature may be made of, by field name.

    family, dtype (of the tokens), sizes by letter (n: updates a token, 1 without sub-steps).
    phase: "whole", or of a summary "open" or "retreat"; carries: not a summary; reverse: a
    summary's backward, whose initial is d_final_state and whose final is d_initial_state.
    gate: "log", "linear" or "softplus"; norm, sigmoid, double: l2norm of q and k, sigmoid of beta,
    twice that; split: products in two parts, on by itself for strengths up to 2. g, beta, a_log,
    bias, offsets, initial, index, final, checkpoints, transition: a tensor's dtype, "" where it is
    absent. token_major: k, v and beta have an axis n. every: steps between checkpoints. invariant:
    batch_invariant. rows: rows of V of one CTA, all unless a knob says so. paired: two CTAs an SM,
    which a plan decides call by call.
    """
    options = problem.options
    found: dict[str, int | str | bool] = {"n": 1, **problem.sizes, "rows": problem.sizes["V"]}
    for field, name in tensors_of(problem).items():
        found[field] = dtype_name(problem.dtypes[name]) if problem.has(name) else ""
    found |= {
        "family": problem.family,
        "phase": PHASES[problem.direction],
        "carries": problem.direction == "forward",
        "reverse": problem.direction == "summary_backward",
        "dtype": dtype_name(problem.io_dtype),
        "gate": "softplus" if options.safe_gate else options.gate_domain,
        "norm": bool(options.use_qk_l2norm),
        "sigmoid": bool(options.use_beta_sigmoid),
        "double": bool(options.allow_neg_eigval),
        "split": bool(options.allow_neg_eigval) and problem.direction != "summary_backward",
        "token_major": token_major(problem),
        "every": int(getattr(options, "checkpoint_every_n_tokens", 0) or 0),
        "invariant": bool(options.batch_invariant),
        "paired": False,
    }
    return found


def scalars(problem: Problem) -> dict[str, int | float]:
    """Numbers that a function may take, by name."""
    options = problem.options
    return {
        "scale": float(getattr(options, "scale", None) or 0.0),
        "every": int(getattr(options, "checkpoint_every_n_tokens", 0) or 0),
    }


def signature_of(problem: Problem, knobs: Mapping[str, int | str]) -> Signature:
    """The signature of the kernel that serves a problem, or of a summary's first: every field by
    its name, out of the problem's facts and the plan name's knobs."""
    known = facts(problem) | dict(knobs)
    known["rows"] = min(problem.sizes["V"], int(known["rows"]))
    known["split"] = bool(known["split"])
    if problem.direction != "forward":
        known |= CLOSED | {"rows": min(problem.sizes["K"], int(known["rows"]))}
    return _signature(KERNELS[problem.family, problem.direction], known)


def pieces(problem: Problem, knobs: Mapping[str, int | str]) -> dict[str, Signature]:
    """Signatures of all that a plan may call.

    "whole" sequences, "paired" where an SM has two small ones, "narrow" where a CTA has half of the
    rows, and "open", "link" and "close" of those that are cut; of a summary "open" and "link".
    """
    first, known = signature_of(problem, knobs), facts(problem)
    if problem.direction != "forward":
        return {"open": first, "link": _signature(LINK, known)}
    found = {"whole": first}
    if hasattr(first, "phase") and not problem.options.batch_invariant:
        rows = min(first.V, first.K, first.rows)  # type: ignore[attr-defined]
        link = known | {"final": "", "transition": ""}
        if "rows" not in knobs and first.V > 64:  # type: ignore[attr-defined]
            found["narrow"] = replace(first, rows=64)  # type: ignore[type-var]
        if "segment" not in knobs and first.K == first.V == 64 and not first.split:  # type: ignore[attr-defined]
            found["paired"] = replace(first, paired=True)  # type: ignore[type-var]
        found["open"] = replace(first, phase="open", rows=rows, **CLOSED)  # type: ignore[type-var]
        found["link"] = _signature(LINK, link)
        found["close"] = replace(first, phase="close", initial="")  # type: ignore[type-var]
    return found


def _signature(kernel: str, known: Mapping[str, int | str | bool]) -> Signature:
    kind = registry.load(kernel)
    names = [field.name for field in fields(kind)]
    if not set(names) <= set(known):
        unknown = sorted(set(names) - set(known))
        raise TypeError(f"{kind.__name__}: no fact of a problem and no knob is called {unknown}")
    return kind(**{name: known[name] for name in names})
