"""Every error that lagraph raises on purpose.

    LagraphError
    ├── InvalidNode (ValueError)              the node or call breaks a rule
    │   ├── ShapeMismatch                     a dimension disagrees with the declaration
    │   ├── DtypeMismatch (TypeError)         a dtype the port does not take
    │   ├── DeviceMismatch                    tensors on different devices
    │   ├── InvalidOption (TypeError)         an option unknown, or of a wrong type or value
    │   └── RuleBroken                        options or tensors that exclude or need each other
    ├── GraphError (RuntimeError)             calls in the wrong order, a frozen graph changed
    ├── NotSupported (NotImplementedError)    valid, but nothing serves it
    │   ├── NoEngine                          every engine declines; the message lists why
    │   ├── PlanNotOffered                    the pinned plan is unknown or declines
    │   └── NotDifferentiable                 second derivatives, vmap, inference-only forms
    └── MissingBackend (ImportError)          a package that an engine needs is absent or too old

A message names the op, the argument, what was expected, what was got, and the mend.
"""

from __future__ import annotations

__all__ = [
    "DeviceMismatch",
    "DtypeMismatch",
    "GraphError",
    "InvalidNode",
    "InvalidOption",
    "LagraphError",
    "MissingBackend",
    "NoEngine",
    "NotDifferentiable",
    "NotSupported",
    "PlanNotOffered",
    "RuleBroken",
    "ShapeMismatch",
]


class LagraphError(Exception):
    """Base of all errors that lagraph raises on purpose."""


class InvalidNode(LagraphError, ValueError):
    """A node, a descriptor or a call breaks a rule.

    Attributes: op and argument name what is wrong ("gated_delta_net", "v"); expected, got and
    mend are the parts of the message.
    """

    def __init__(
        self, op: str, argument: str, *, expected: str, got: str, mend: str = "", because: str = ""
    ) -> None:
        self.op, self.argument = op, argument
        self.expected, self.got, self.mend, self.because = expected, got, mend, because
        where = f"{op}.{argument}" if argument else op
        text = f"{where}: expected {expected}, got {got}"
        if because:
            text += f"; {because}"
        super().__init__(f"{text}. {mend}." if mend else f"{text}.")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.op, self.argument, self.expected, self.got, self.mend,
                          self.because)  # fmt: skip


def _rebuild(
    kind: type[InvalidNode], op: str, argument: str, expected: str, got: str, mend: str, why: str
) -> InvalidNode:
    return kind(op, argument, expected=expected, got=got, mend=mend, because=why)


class ShapeMismatch(InvalidNode):
    """A rank or a dimension disagrees with the port's shape or with another port."""


class DtypeMismatch(InvalidNode, TypeError):
    """A port was given a dtype it does not take."""


class DeviceMismatch(InvalidNode):
    """The tensors of one call are not all on one device."""


class InvalidOption(InvalidNode, TypeError):
    """An option is unknown, or its value has a wrong type or range."""


class RuleBroken(InvalidNode):
    """Options or tensors need or exclude each other."""


class GraphError(LagraphError, RuntimeError):
    """A graph method was called in the wrong order, or a built graph was changed."""


class NotSupported(LagraphError, NotImplementedError):
    """The request is valid, but nothing here serves it."""


class NoEngine(NotSupported):
    """Every engine declines the problem; the message gives each one's reason."""


class PlanNotOffered(NotSupported):
    """The pinned plan does not exist, or its engine declines the problem."""


class NotDifferentiable(NotSupported):
    """A derivative or a transform that is not defined for this operator."""


class MissingBackend(LagraphError, ImportError):
    """A package that the chosen engine needs is not installed, or is too old."""
