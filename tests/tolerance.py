"""How far from the fp64 truth a result may be, and the only comparison that tests use.

Relative L2 error on ordinary data: see OUTPUT and GRADIENT. A tensor is judged by the coarser of
the token dtype and its own dtype (a bf16 gate gets a bf16 gradient in an fp32 call).
"""

from __future__ import annotations

import torch

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

# token dtype -> relative L2 error; fp32 differs between devices
OUTPUT = {BF16: 5e-3, F16: 1e-3, F32: {"cpu": 1e-5, "cuda": 1e-4}, F64: 1e-12}
GRADIENT = {BF16: 2e-2, F16: 5e-3, F32: {"cpu": 1e-4, "cuda": 1e-3}, F64: 1e-10}


def is_gradient(name):
    """Whether an output of a node is a gradient: dQ, dBeta, d_initial_state, ..."""
    return name.startswith("d") and name != "dO"


def tolerance(name, io_dtype, own_dtype=None, device="cpu"):
    """The largest relative L2 error of an output, given its node name."""
    table = GRADIENT if is_gradient(name) else OUTPUT

    def bound(dtype):
        value = table[dtype]
        return value[device] if isinstance(value, dict) else value

    return max(bound(io_dtype), bound(own_dtype or io_dtype))


def distance(got, want, name=""):
    """||got - want||, and the ||want|| that it is judged against, in fp64; 1 where want is zero.

    A transition [N, HO, K, K] is a product of contractions that starts from the identity, and what
    it leaves of a state is added to what the span wrote: it is judged against no less than a tenth
    of the identity.
    """
    got, want = got.detach().cpu().to(F64), want.detach().cpu().to(F64)
    error, size = (got - want).norm().item(), want.norm().item()
    if name == "transition" and want.dim() == 4:
        identity = (want.numel() / want.shape[-1]) ** 0.5
        size = max(size, 0.1 * identity)
    return error, size or 1.0


def relative_error(got, want):
    """||got - want|| / ||want||"""
    error, size = distance(got, want)
    return error / size


def half_step(dtype):
    """Half of the smallest number that a dtype holds: what storing a still smaller one costs."""
    limits = torch.finfo(dtype)
    return 0.5 * limits.smallest_normal * limits.eps


def coarser_step(*dtypes):
    """Half of the smallest number of the dtype that holds the least small ones."""
    return max(half_step(dtype) for dtype in dtypes)


def same_shape_and_finite(name, got, want):
    """Shapes agree, and got is finite wherever want is; NaN and Inf are never averaged away."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    bad = ~torch.isfinite(got.detach().cpu().to(F64)) & torch.isfinite(want.cpu())
    assert not bad.any(), (
        f"{name}: {int(bad.sum())} of {got.numel()} elements are not finite, "
        f"the first at {bad.nonzero()[0].tolist()}"
    )


def check(got, want, io_dtype, device=None, names=None):
    """Every output of `want` (fp64, by node name) is met by `got`.

    names: compare only these. Empty tensors only need the right shape.
    """
    for name in names or want:
        assert name in got, f"{name} is missing; there are {sorted(got)}"
        value, truth = got[name], want[name]
        same_shape_and_finite(name, value, truth)
        if truth.numel() == 0:
            continue
        bound = tolerance(name, io_dtype, value.dtype, device or value.device.type)
        error, size = distance(value, truth, name)
        allowed = bound * size + coarser_step(io_dtype, value.dtype) * truth.numel() ** 0.5
        assert error <= allowed, (
            f"{name}: relative L2 error {error / size:.2e}, allowed {bound:.0e}"
        )


def check_hostile(got, want, rounded, io_dtype, names=None, engine=None, slack=1.0):
    """The bound on hostile data: finite, and no worse than twice the rounded-state recurrence.

    max|got - want| <= 2 max|rounded - want| + eps(io) max|want|, plus what storing so small a
    number costs; the eager engine in fp32: relative L2 error at most 1e-2. slack: how many times
    that is let pass, `hostile_slack`.
    """
    eps = torch.finfo(io_dtype).eps
    for name in names or want:
        value, truth = got[name], want[name]
        same_shape_and_finite(name, value, truth)
        if truth.numel() == 0:
            continue
        if io_dtype == F32 and engine == "eager":
            error, bound = relative_error(value, truth), 1e-2
        else:
            error = (value.detach().cpu().to(F64) - truth).abs().max().item()
            bound = 2.0 * (rounded[name] - truth).abs().max().item()
            bound += eps * truth.abs().max().item()
            bound += coarser_step(io_dtype, value.dtype)
            bound *= slack
        assert error <= bound, f"{name}: error {error:.2e} on hostile data, allowed {bound:.2e}"


def hostile_slack(engine, io_dtype, kind, *, backward=False):
    """Of the bound on hostile data, what an engine of the GPU is known to need: docs/engines.md."""
    if engine != "triton":
        return 1.0
    if io_dtype == F32:  # k k^T of a chunk in fp32 is no better
        return 25.0 if kind == "beta 2" else 3.0
    return 1.6 if backward else 1.0


def check_bitwise(got, want, names=None):
    """Every bit agrees (NaN with NaN too)."""
    for name in names or want:
        assert got[name].dtype == want[name].dtype, name
        assert torch.equal(_bits(got[name]), _bits(want[name])), f"{name} differs in its bits"


def _bits(x):
    view = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.detach().contiguous().view(view).cpu()
