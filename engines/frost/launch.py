"""Plans: a problem's signatures, their compiled functions, and the calls of them.

Everything static is bound when a plan is made: `run` is generated source that names the tensors
and calls the function with them in the order of `Signature.arguments`. TVM-FFI checks dtypes,
shapes and alignment, and launches on torch's current stream. No tensor value is read on the host.

Where few sequences and heads would leave SMs idle, sequences are cut: three kernels open their
segments, link their states and close them (`kernels.lib.segment`). They are compiled, or loaded,
when a call first needs them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from lagraph.desc import layout_class
from lagraph.engines.frost import compile
from lagraph.engines.frost.pieces import pieces, scalars, signature_of, tensors_of, token_major
from lagraph.engines.frost.schedule import C, Choice, Shape, choose
from lagraph.errors import PlanNotOffered
from lagraph.plan import compiled_source

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lagraph.engines.frost.signature import Signature
    from lagraph.problem import Problem

__all__ = ["ForwardPlan", "SummaryBackwardPlan", "SummaryPlan", "plan"]

ALIGN = 16  # bytes: what TMA, and vector loads, ask of an address and of strides
# Read by plain loads, whatever their address and strides.
PLAIN = frozenset({"g", "beta", "a_log", "dt_bias", "cu_seqlens", "state_indices"})
# With an axis of sub-steps, or flat.
STEPS = frozenset({"k", "v", "beta"})
AS_IT_IS = Choice(False, 0, 0, 0.0)
WHOLE = 1 << 30  # steps: longer than any sequence that is left whole
SMS = 132  # of a device that is not here


def plan(problem: Problem, knobs: Mapping[str, int | str]) -> Any:
    """The plan of a problem; its first kernel is compiled, or loaded, here."""
    return PLANS[problem.direction](problem, knobs)


def _sms(index: int) -> int:
    if not torch.cuda.is_available():
        return SMS
    return torch.cuda.get_device_properties(index).multi_processor_count


class Functions(dict):
    """Compiled functions by name, made when they are first asked for."""

    def __init__(self, signatures: Mapping[str, Signature], arch: int) -> None:
        super().__init__()
        self.signatures, self.arch = signatures, arch

    def __missing__(self, name: str) -> Callable[..., Any]:
        found = self[name] = compile.function(self.signatures[name], self.arch)
        return found


class _Plan:
    """A problem bound to compiled functions. It keeps no state, so threads may share it.

    run(ins, outs, workspace): fill outs, in the order of the node's outputs, from ins.
    """

    def __init__(self, problem: Problem, knobs: Mapping[str, int | str]) -> None:
        self.problem, self.signature = problem, signature_of(problem, knobs)
        self.pieces = pieces(problem, knobs)
        # What runs where there are many sequences, and what else does.
        many = self.pieces.get("paired", self.signature)
        self.function = compile.function(many, problem.arch)
        self.functions = Functions(self.pieces, problem.arch)
        self.scalars = scalars(problem)
        size = problem.sizes
        self.n = size.get("n", 1)
        # Of a slot of segments, in the workspace: fp32 states and maps.
        self.slot = 4 * size["HO"] * (size["V"] + size["K"]) * size["K"]
        self.segment = int(knobs.get("segment", -1))
        if self.segment > 0 and problem.options.batch_invariant:
            raise PlanNotOffered(
                f"plan {problem.family}_frost: segment={self.segment} cuts sequences, which "
                f"batch_invariant forbids. Drop one of them."
            )
        self.outputs = [name for name in problem.outputs if problem.has(name)]
        self.arguments = self._arguments()
        present = {name for name in problem.inputs if problem.has(name)} | set(self.outputs)
        if not present <= set(self.arguments):
            ignored = sorted(present - set(self.arguments))
            raise TypeError(f"{type(self.signature).__name__}.arguments: {ignored} are not among")
        self.shape = self._shape()
        self.few = self._few()
        scope = {
            "function": self.function, "repair": self._repair, "idle": self._idle,
            "choose": self.chosen, "few": self.few,
            "empty": torch.empty, "uint8": torch.uint8, "size": self.workspace_size,
        }  # fmt: skip
        scope |= {f"scalar_{name}": value for name, value in self.scalars.items()}
        text = self._source()
        made = compiled_source(text, f"<lagraph frost {self.signature.name}>", scope)
        self.run: Callable[..., None] = made["run"]

    def _arguments(self) -> tuple[str, ...]:
        """What `function` and `cut` take, in order and by name."""
        return self.signature.arguments

    def _shape(self) -> Shape | None:
        """What the length of segments depends on; None where sequences stay whole."""
        raise NotImplementedError

    def _few(self) -> int:
        """From how many sequences on `cut` is never called."""
        if self.shape is None or self.segment == 0:
            return 0
        if self.segment > 0:
            return WHOLE
        return -(-self.shape.sms // (self.shape.heads * self.shape.closes))

    def cut(self, *values: Any) -> None:
        """Run on segments: arguments as `arguments` has them."""
        raise NotImplementedError

    def choice(self, T: int, N: int) -> Choice:
        """How sequences of these shapes run."""
        if self.shape is None or not 0 < N < self.few:
            return AS_IT_IS
        if self.segment >= 0:
            return AS_IT_IS._replace(span=self.segment)
        return choose(self.shape, -(-T * self.n // (C * N)), N)

    def chosen(self, T: int, N: int) -> tuple[Any, int, int]:
        """What runs these shapes; steps a segment, 0 for whole sequences, and by how many the last
        but one is shorter."""
        best = self.choice(T, N)
        if best.span:
            return self.cut, C * best.span, C * best.less
        return self.functions["narrow" if best.narrow else "whole"], 0, 0

    def workspace_size(self, T: int, N: int) -> int:
        """Bytes of workspace at these sizes."""
        _, span, less, _ = self.choice(T, N)
        return (T * self.n // (C * span) + (2 if less else 1) * N) * self.slot if span else 0

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
            if not (problem.in_place and name == "final_state")
        ]  # fmt: skip
        call = ", ".join(map(self._argument, self.arguments))
        lines = [
            "def run(ins, outs, workspace=None):",
            f"{', '.join(problem.inputs)}, = ins",
            f"{', '.join(problem.outputs)}, = outs",
            "if cu_seqlens.numel() < 2 or not g.numel():",
            "    return idle(ins, outs)",
            "cause, call, span, less = None, function, 0, 0",
        ]
        if not self.few:
            lines.append("workspace = None")  # a caller's, of no bytes
        else:
            lines += [
                "N = cu_seqlens.shape[0] - 1",
                "if N < few:",
                "    T = g.shape[0]",
                "    call, span, less = choose(T, N)",
                "    if span and workspace is None:",
                "        workspace = empty(size(T, N), dtype=uint8, device=g.device)",
                "if not span:",
                "    workspace = None",
            ]
        lines += [
            f"if not ({' or '.join(checks)}):",
            "    try:",
            f"        call({call})",
            "        return",
            "    except ValueError as error:",
            "        cause = error",
            f"repair(cause, call, [{call}])",
        ]
        return "\n    ".join(lines) + "\n"

    def _argument(self, name: str) -> str:
        """Source of one argument of the function."""
        problem = self.problem
        if name in problem.inputs or name in problem.outputs:
            if not problem.has(name):
                return "None"
            nested = name in STEPS and token_major(problem)
            return f"{name}.flatten(0, 1)" if nested else name
        if name in ("workspace", "span", "less"):
            return name
        if name == "skip":
            return "0"
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
        made = dict(zip(self.problem.outputs, outs, strict=True))
        names = tensors_of(self.problem)
        entering = given[names["initial"]]
        final, transition = made.get(names["final"]), made.get("transition")
        if transition is not None:
            transition.zero_().diagonal(dim1=-2, dim2=-1).fill_(1.0)
        if final is None or self.problem.in_place:
            return
        if entering is None:
            final.zero_()
        else:
            final.copy_(entering)

    def _repair(self, error: ValueError | None, call: Any, values: list[Any]) -> None:
        """Call a function with copies of the tensors that it cannot take as they are.

        That are those whose address, or of an output a stride, is no multiple of 16 bytes, and
        those that are negated when they are read. error: what a call without copies was refused
        with; None where none was made.
        """
        copies: dict[Any, torch.Tensor] = {}
        back = []
        for at, (name, x) in enumerate(zip(self.arguments, values, strict=True)):
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
            self._refuse(error, call)
        call(*values)
        for x, copy in back:
            x.copy_(copy)

    def _refuse(self, error: ValueError, call: Any) -> NoReturn:
        found = re.search(r"argument #(\d+)", str(error))
        name = "a tensor"
        if found and call != self.cut:  # of a cut's kernels each has arguments of its own
            name = self.arguments[int(found[1])]
        raise RuntimeError(
            f"{self.problem.family}_frost: the kernel {self.signature.name} does not take {name}; "
            f"please report this: {error}"
        ) from error


class ForwardPlan(_Plan):
    """Whole sequences in one kernel, or segments in three."""

    def _shape(self) -> Shape | None:
        if "close" not in self.pieces:
            return None
        close: Any = self.pieces["close"]
        opening: Any = self.pieces["open"]
        return Shape(
            self.problem.sizes["HO"], opening.parts, close.parts, _sms(self.problem.index),
            "narrow" in self.pieces, self.n,
        )  # fmt: skip

    def cut(
        self, q, k, v, g, beta, a_log, dt_bias, cu_seqlens, initial, index, O, final, checkpoints,
        workspace, scale, span, less, skip,
    ) -> None:  # fmt: skip
        run = self.functions
        tokens = k, v, g, beta, a_log, dt_bias, cu_seqlens
        nothing = None, None, None, None, None
        # Of the last segment nothing is opened; from no state, no map of the first.
        skip = 3 if initial is None else 2
        cut = span, less
        run["open"](None, *tokens, *nothing, workspace, scale, *cut, skip)
        HO = self.problem.sizes["HO"]
        run["link"](g.shape[0], HO, cu_seqlens, initial, index, None, None, workspace, *cut)
        run["close"](q, *tokens, None, index, O, final, checkpoints, workspace, scale, *cut, 0)


class SummaryPlan(_Plan):
    """Segments, or whole sequences as one segment each, are opened; link joins them."""

    def _arguments(self) -> tuple[str, ...]:
        return ("k", "v", "g", "beta", "a_log", "dt_bias", "cu_seqlens", "initial_state",
                "final_state", "transition", "workspace", "span")  # fmt: skip

    def _shape(self) -> Shape:
        opening: Any = self.pieces["open"]
        return Shape(self.problem.sizes["HO"], opening.parts, 0, _sms(self.problem.index))

    def _few(self) -> int:
        return WHOLE  # there is no other way

    def choice(self, T: int, N: int) -> Choice:
        invariant = self.problem.options.batch_invariant
        best = AS_IT_IS if invariant else super().choice(T, N)
        return best if best.span else best._replace(span=WHOLE // C)

    def cut(
        self, k, v, g, beta, a_log, dt_bias, cu_seqlens, initial, final, transition, workspace, span
    ) -> None:  # fmt: skip
        tokens = None, k, v, g, beta, a_log, dt_bias, cu_seqlens
        self._cut(tokens, initial, final, transition, workspace, 1.0, span)

    def _cut(self, tokens, entering, leaving, transition, workspace, scale, span) -> None:
        run, g, cu_seqlens = self.functions, tokens[3], tokens[7]
        nothing = None, None, None, None, None
        skip = 1 if entering is None and transition is None else 0
        run["open"](*tokens, *nothing, workspace, scale, span, 0, skip)
        HO = self.problem.sizes["HO"]
        states = entering, None, leaving, transition
        run["link"](g.shape[0], HO, cu_seqlens, *states, workspace, span, 0)


class SummaryBackwardPlan(SummaryPlan):
    """The same from the end, for the gradient of the state."""

    def _arguments(self) -> tuple[str, ...]:
        return ("q", "k", "dO", "g", "beta", "a_log", "dt_bias", "cu_seqlens", "d_final_state",
                "d_initial_state", "transition", "workspace", "scale", "span")  # fmt: skip

    def cut(
        self, q, k, dO, g, beta, a_log, dt_bias, cu_seqlens, entering, leaving, transition,
        workspace, scale, span,
    ) -> None:  # fmt: skip
        tokens = q, k, dO, g, beta, a_log, dt_bias, cu_seqlens
        self._cut(tokens, entering, leaving, transition, workspace, scale, span)


PLANS = {
    "forward": ForwardPlan,
    "summary": SummaryPlan,
    "summary_backward": SummaryBackwardPlan,
}
