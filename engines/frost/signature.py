"""What every frost kernel says of itself: its static signature.

A signature is a frozen dataclass of plain values (int, float, str, bool, None). Two calls that
share one share a compiled function; T, N and, where avoidable, head counts are in none. A tensor
that a call lacks is None, when its function is compiled and when it is called, and a field of the
signature says so. Kernels need not derive from the class here; they need its three names.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from typing import Any, ClassVar

__all__ = ["Signature"]


class Signature:
    """Base of the kernels' dataclasses.

    arguments: what the compiled function takes, in order and by name: inputs and outputs of the
    node, "workspace", and the scalars of `pieces.scalars`. The stream is not among them: it is
    torch's current one.
    """

    arguments: ClassVar[tuple[str, ...]] = ()

    @property
    def spills(self) -> int:
        """Bytes a thread that the kernel may spill: none, but where it was measured faster so."""
        return 0

    @property
    def name(self) -> str:
        """A C identifier: the class and the fields that differ from their defaults."""
        parts = [type(self).__name__.lower()]
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.default is not MISSING and value == field.default:
                continue
            parts.append(field.name if value is True else f"{field.name}{value}")
        return re.sub(r"\W", "_", "_".join(parts))

    def build(self, options: str) -> Any:
        """The compiled TVM-FFI function: `cute.compile` on fake tensors with these options."""
        raise NotImplementedError
