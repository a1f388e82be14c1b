"""Triton's interpreter, made to multiply fp32 in tf32 as the hardware does.

It multiplies fp32 operands as they are, whatever precision a product asks for. Tensor cores read
the upper 19 bits of an operand of a tf32 product and cut the rest off, towards zero. (bf16 and tf32
in several passes are left alone: they keep fp32 but for a few bits.)
"""

from __future__ import annotations

__all__ = ["cut"]


def cut() -> None:
    """For this process, in which Triton interprets. Does nothing where the interpreter has other
    names."""
    import numpy as np
    from triton.runtime import interpreter

    builder = getattr(interpreter, "InterpreterBuilder", None)
    product = getattr(builder, "create_dot", None)
    if product is None or not hasattr(interpreter, "TensorHandle"):
        return

    def shorter(x):
        if x.data.dtype != np.float32:
            return x
        bits = np.ascontiguousarray(x.data).view(np.uint32) & np.uint32(0xFFFFE000)
        return interpreter.TensorHandle(bits.view(np.float32), x.dtype)

    def create_dot(self, a, b, d, precision, *rest):
        if str(precision).rsplit(".", maxsplit=1)[-1] == "TF32":
            a, b = shorter(a), shorter(b)
        return product(self, a, b, d, precision, *rest)

    builder.create_dot = create_dot
