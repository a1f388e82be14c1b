"""Gates: from what the caller passes to a decay in the log2 domain, and its derivative.

KIND names the form of the raw gate x:
    log       g = x                                    decay exp(x)
    linear    g = log(max(x, 1e-10))                   decay max(x, 1e-10)
    softplus  g = -exp(a_log) softplus(x + bias)
    bounded   g = lower sigmoid(exp(a_log) (x + bias))
    ssd       g = a dt,  dt = clamp(softplus(x + bias) or x + bias, dt_min, dt_max)
All of it runs in fp32. Values are log2 of the decay, so that kernels need exp2 only.
"""

import triton
import triton.language as tl

__all__ = ["MOST", "amplitude", "growth", "log2_decay", "sigmoid", "softplus", "step_size"]

LOG2E = tl.constexpr(1.4426950408889634)
# Largest exponent that factors of positive gates keep: a zero times them stays a zero.
MOST = tl.constexpr(127.0)


@triton.jit
def softplus(b_x):
    """log(1 + exp(x)) with full relative accuracy on both sides, and no overflow."""
    b_u = tl.exp2(-tl.abs(b_x) * LOG2E)
    b_w = 1.0 + b_u
    # log1p(u): the rounding of 1 + u cancels in the ratio.
    b_l = tl.where(b_w == 1.0, b_u, tl.log(b_w) * (b_u / tl.maximum(b_w - 1.0, 1e-30)))
    return tl.maximum(b_x, 0.0) + b_l


@triton.jit
def sigmoid(b_x):
    b_u = tl.exp2(-tl.abs(b_x) * LOG2E)
    return tl.where(b_x >= 0, 1.0, b_u) / (1.0 + b_u)


@triton.jit
def growth(b_x):
    """2^x, but finite."""
    return tl.exp2(tl.minimum(b_x, MOST))


@triton.jit
def amplitude(p_alog, i_h):
    """exp(a_log), kept finite so that a raw gate of zero stays a zero."""
    if p_alog is None:
        amp = 1.0
    else:
        amp = tl.minimum(tl.exp2(tl.load(p_alog + i_h).to(tl.float32) * LOG2E), 3e38)
    return amp


@triton.jit
def step_size(b_x, dt_min, dt_max, SOFTPLUS: tl.constexpr):
    """Mamba-2's dt from its biased logits."""
    b_dt = softplus(b_x) if SOFTPLUS else b_x
    return tl.minimum(tl.maximum(b_dt, dt_min), dt_max)


@triton.jit
def log2_decay(b_x, amp, lower, KIND: tl.constexpr):
    """log2 of the decay for a raw gate to which the bias has been added."""
    if KIND == "linear":
        b_g = tl.log2(tl.maximum(b_x, 1e-10))
    elif KIND == "softplus":
        b_g = -amp * softplus(b_x) * LOG2E
    elif KIND == "bounded":
        b_g = lower * sigmoid(amp * b_x) * LOG2E
    else:
        b_g = b_x * LOG2E
    return b_g
