"""Plans: a problem's signature, its compiled function, and the call of it.

Everything static is bound when a plan is made: `run` is generated source that names the tensors
and calls the function with them in the order of `Signature.arguments`. TVM-FFI checks dtypes,
shapes and alignment, and launches on torch's current stream. No tensor value is read on the host.
"""

from __future__ import annotations

import re
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from lagraph import registry
from lagraph.desc import dtype_name, layout_class
from lagraph.engines.frost import compile
from lagraph.engines.frost.support import KERNELS
from lagraph.plan import compiled_source

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lagraph.engines.frost.signature import Signature
    from lagraph.problem import Problem

__all__ = ["ForwardPlan", "facts", "scalars", "signature_of"]

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
}
ALIGN = 16  # bytes: what TMA, and vector loads, ask of an address and of strides
# Read by plain loads, whatever their address and strides.
PLAIN = frozenset({"g", "beta", "a_log", "dt_bias", "cu_seqlens", "state_indices", "workspace"})


def facts(problem: Problem) -> dict[str, int | str | bool]:
    """The static facts of a problem that a signature may be made of, by field name.

    family, dtype (of the tokens), sizes by letter (n: updates a token, 1 without sub-steps).
    gate: "log", "linear" or "softplus"; norm, sigmoid, double: l2norm of q and k, sigmoid of beta,
    twice that. g, beta, a_log, bias, offsets, initial, index, final, checkpoints: a tensor's dtype,
    "" where it is absent. token_major: k, v and beta have an axis n. every: steps between
    checkpoints. invariant: batch_invariant. rows: rows of V of one CTA, all unless a knob says so.
    """
    options = problem.options
    found: dict[str, int | str | bool] = {"n": 1, **problem.sizes, "rows": problem.sizes["V"]}
    for field, name in TENSORS.items():
        found[field] = dtype_name(problem.dtypes[name]) if problem.has(name) else ""
    found |= {
        "family": problem.family,
        "dtype": dtype_name(problem.io_dtype),
        "gate": "softplus" if options.safe_gate else options.gate_domain,
        "norm": bool(options.use_qk_l2norm),
        "sigmoid": bool(options.use_beta_sigmoid),
        "double": bool(options.allow_neg_eigval),
        "token_major": problem.traits.substeps and problem.ranks["k"] == 4,
        "every": int(getattr(options, "checkpoint_every_n_tokens", 0) or 0),
        "invariant": bool(options.batch_invariant),
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
    """The signature of the kernel that serves a problem: every field by its name, out of the
    problem's facts and the plan name's knobs."""
    kind = registry.load(KERNELS[problem.family, problem.direction])
    known = facts(problem) | dict(knobs)
    names = [field.name for field in fields(kind)]
    if not set(names) <= set(known):
        unknown = sorted(set(names) - set(known))
        raise TypeError(f"{kind.__name__}: no fact of a problem and no knob is called {unknown}")
    return kind(**{name: known[name] for name in names})


class ForwardPlan:
    """A problem bound to one compiled function. It keeps no state, so threads may share it.

    run(ins, outs, workspace): fill outs, in the order of the node's outputs, from ins.
    """

    def __init__(self, problem: Problem, knobs: Mapping[str, int | str]) -> None:
        self.problem, self.signature = problem, signature_of(problem, knobs)
        self.function = compile.function(self.signature, problem.arch)
        self.scalars = scalars(problem)
        # A pool, or a buffer to overwrite: an input that comes back as the output.
        self.in_place = problem.has("final_state") and (
            problem.has("state_indices")
            or getattr(problem.options, "overwrite_initial_state", False)
        )
        self.outputs = [name for name in problem.outputs if problem.has(name)]
        present = {name for name in problem.inputs if problem.has(name)} | set(self.outputs)
        if not present <= set(self.signature.arguments):
            ignored = sorted(present - set(self.signature.arguments))
            raise TypeError(f"{type(self.signature).__name__}.arguments: {ignored} are not among")
        scope = {"function": self.function, "repair": self._repair, "idle": self._idle}
        scope |= {f"scalar_{name}": value for name, value in self.scalars.items()}
        text = self._source()
        made = compiled_source(text, f"<lagraph frost {self.signature.name}>", scope)
        self.run: Callable[..., None] = made["run"]

    def workspace_size(self, T: int, N: int) -> int:
        """Bytes of workspace at these sizes."""
        return 0

    def _source(self) -> str:
        """Source of `run`."""
        problem = self.problem
        floats = [
            name for name in problem.inputs
            if problem.has(name) and problem.dtypes[name].is_floating_point
        ]  # fmt: skip
        # What no support table sees: a sign bit that kernels would not, a caller's strided output.
        checks = [f"{name}.is_neg()" for name in floats]
        checks += [
            f"not {name}.is_contiguous()" for name in self.outputs
            if not (self.in_place and name == "final_state")
        ]  # fmt: skip
        call = ", ".join(map(self._argument, self.signature.arguments))
        return "\n    ".join([
            "def run(ins, outs, workspace=None):",
            f"{', '.join(problem.inputs)}, = ins",
            f"{', '.join(problem.outputs)}, = outs",
            "if cu_seqlens.numel() < 2 or not g.numel():",
            "    return idle(ins, outs)",
            "cause = None",
            f"if not ({' or '.join(checks)}):",
            "    try:",
            f"        function({call})",
            "        return",
            "    except ValueError as error:",
            "        cause = error",
            f"repair(cause, [{call}])",
        ]) + "\n"  # fmt: skip

    def _argument(self, name: str) -> str:
        """Source of one argument of the function."""
        problem = self.problem
        if name in problem.inputs or name in problem.outputs:
            return name if problem.has(name) else "None"
        if name == "workspace":
            return name
        if name in self.scalars:
            return f"scalar_{name}"
        raise TypeError(
            f"{type(self.signature).__name__}.arguments: expected a tensor of "
            f"{problem.family} {problem.direction}, workspace or one of {list(self.scalars)}, "
            f"got {name!r}"
        )

    def _idle(self, ins: Sequence[Any], outs: Sequence[Any]) -> None:
        """A call without tokens, or without sequences: states pass through, nothing is launched."""
        given = dict(zip(self.problem.inputs, ins, strict=True))
        final = dict(zip(self.problem.outputs, outs, strict=True)).get("final_state")
        if final is None or self.in_place:
            return
        if given["initial_state"] is None:
            final.zero_()
        else:
            final.copy_(given["initial_state"])

    def _repair(self, error: ValueError | None, values: list[Any]) -> None:
        """Call the function with copies of the tensors that it cannot take as they are.

        That are those whose address, or of an output a stride, is no multiple of 16 bytes, and
        those that are negated when they are read. error: what a call without copies was refused
        with; None where none was made.
        """
        copies: dict[Any, torch.Tensor] = {}
        back = []
        for at, (name, x) in enumerate(zip(self.signature.arguments, values, strict=True)):
            if not isinstance(x, torch.Tensor) or x.numel() == 0:
                continue
            is_output = name in self.outputs
            fits = name in PLAIN or x.data_ptr() % ALIGN == 0
            if fits and not x.is_neg() and not (is_output and layout_class(x) > 1):
                continue
            place = x.data_ptr(), x.shape, x.stride()
            if place not in copies:  # a state that is advanced in place has two names
                copies[place] = torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
            values[at] = copies[place]
            if is_output:
                back.append((x, values[at]))
        if error is not None and not copies:
            self._refuse(error)
        self.function(*values)
        for x, copy in back:
            x.copy_(copy)

    def _refuse(self, error: ValueError) -> NoReturn:
        found = re.search(r"argument #(\d+)", str(error))
        name = self.signature.arguments[int(found[1])] if found else "a tensor"
        raise RuntimeError(
            f"{self.problem.family}_frost: the kernel {self.signature.name} does not take {name}; "
            f"please report this: {error}"
        ) from error
