"""Gates and write strengths, as numbers of one token."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

__all__ = ["LOG2E", "finite_power", "log2_decay", "strength", "sums"]

LOG2E = 1.4426950408889634
FLOOR = 1e-10  # of linear decays
MOST = 126.0  # of exponents


@cute.jit
def finite_power(exponent):
    """2^exponent, kept finite: what positive gates grow is zero times a strength of zero."""
    return cute.math.exp2(cutlass.min(exponent, Float32(MOST)), fastmath=True)


@cute.jit
def softplus(x):
    """log(1 + exp(x)) without overflow."""
    small = cute.math.exp2(-cutlass.max(x, -x) * LOG2E, fastmath=True)
    return cutlass.max(x, Float32(0.0)) + cute.math.log2(1.0 + small, fastmath=True) / LOG2E


@cute.jit
def log2_decay(g, amplitude, bias, kind: cutlass.Constexpr):
    """log2 of a token's decay. softplus: that of the log decay -amplitude softplus(g + bias)."""
    if cutlass.const_expr(kind == "log"):
        return g * LOG2E
    if cutlass.const_expr(kind == "linear"):
        return cute.math.log2(cutlass.max(g, Float32(FLOOR)))
    return -amplitude * softplus(g + bias) * LOG2E


@cute.jit
def strength(beta, sigmoid: cutlass.Constexpr, double: cutlass.Constexpr):
    """A token's write strength."""
    if cutlass.const_expr(sigmoid):
        beta = cute.arch.rcp_approx(1.0 + cute.math.exp2(-beta * LOG2E))
        if cutlass.const_expr(double):
            beta = 2.0 * beta
    return beta


@cute.jit
def sums(first, second, lane):
    """Inclusive sums over a warp's 64 numbers, two a lane."""
    total = first + second
    for i in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(total, 1 << i)
        if lane >= (1 << i):
            total += below
    return total - second, total
