"""The truth that every engine is measured against: the recurrences in fp64, one token at a time.

Written from the formulas alone and as plainly as possible; it shares no code with any engine.
Inputs and outputs go by the names of the node ports (`{"q": ..., "dO": ...}` in, `{"O": ...}`
out) and options by the names of the node attributes. Inputs are taken as they are, rounded to
their dtype, and widened to fp64; everything that comes back is fp64.

    GDN     S = a S;            S += beta (v - S k) k^T;                   o = scale S q
    KDA     S = S diag(a);      S += beta (v - S k) k^T;                   o = scale S q
    GDN-2   S = S diag(a);      S += (w . v - S (b . k)) k^T;              o = scale S q
    GDP     S = a S;            n times: S += beta_i (v_i - S k_i) k_i^T;  o = scale S q
    Mamba-2 S = exp(A dt') S + dt' x B^T;  y = S C + D x;  y *= z sigmoid(z)

S is [HO, V, K], one per sequence. Gradients are autograd's, through the very same loop.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import torch

FAMILIES = ("gdn", "kda", "gdn2", "gdp", "mamba2")

GRADIENTS = {
    "q": "dQ",
    "k": "dK",
    "v": "dV",
    "g": "dG",
    "beta": "dBeta",
    "w": "dW",
    "a": "dA",
    "d": "dD",
    "z": "dZ",
    "initial_state": "d_initial_state",
    "a_log": "d_a_log",
    "dt_bias": "d_dt_bias",
}

DEFAULTS = {
    "scale": None,
    "output_final_state": False,
    "use_qk_l2norm": False,
    "checkpoint_every_n_tokens": 0,
    "use_beta_sigmoid": False,
    "allow_neg_eigval": False,
    "beta_guard": False,
    "safe_gate": False,
    "gate_domain": "log",
    "gate_lower_bound": None,
    "num_householder": 1,
    "dt_softplus": True,
    "dt_min": 0.0,
    "dt_max": None,
    "output_pre_gate": False,
    "output_transition": False,
    "batch_invariant": False,
    "overwrite_initial_state": False,
}

_TOKENS = ("q", "k", "v", "g", "beta", "w", "z", "dO")


def forward(family, inputs, *, round_state_to=None, **options):
    """Outputs O, final_state, state_checkpoints and, for Mamba-2 with z, O_pre.

    final_state is [N, HO, V, K], or the whole pool after the call under state_indices. O is zero
    past cu_seqlens[-1]. state_checkpoints holds the rows in use, none of the allocated rest.
    round_state_to: dtype that the state is rounded to after every token, and its gradient too.
    """
    with torch.no_grad():
        return _forward(family, _widen(inputs), _options(options), _io(inputs), round_state_to)


def backward(family, inputs, *, round_state_to=None, **options):
    """Gradients of sum(O dO) + sum(final_state d_final_state), by gradient name.

    One of dO and d_final_state may be absent. An input that does not matter gets zeros.
    """
    x = _widen(inputs)
    leaves = {
        name: x[name].requires_grad_()
        for name in GRADIENTS
        if name in x and x[name].is_floating_point()
    }
    with torch.enable_grad():
        got = _forward(family, x, _options(options), _io(inputs), round_state_to)
        end = int(inputs["cu_seqlens"][-1])
        loss = sum(leaf.sum() * 0.0 for leaf in leaves.values())  # every input gets a gradient
        if "dO" in x:
            loss = loss + (got["O"][:end] * x["dO"][:end]).sum()
        if "d_final_state" in x:
            loss = loss + (got["final_state"] * x["d_final_state"]).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return {GRADIENTS[name]: grad for name, grad in zip(leaves, grads, strict=True)}


def summary(family, inputs, **options):
    """final_state X_H and transition M of each sequence: X_final = X_init @ M + X_H.

    M is what the recurrence without writes makes of the identity; for Mamba-2 it is the log2 of
    the decay product, [N, HO].
    """
    o = _options(options)
    with torch.no_grad():
        x = _widen(inputs)
        state = _forward(family, x, o, _io(inputs))["final_state"]
        return {"final_state": state, "transition": _transition(family, x, o, _io(inputs))}


def summary_backward(family, inputs, **options):
    """d_initial_state and transition M^T: X_dh0 = X_dht @ M^T + X_G.

    d_initial_state is X_dht @ M^T + X_G for the d_final_state that is given, or zero. It does not
    depend on what is written, so v, w, z, D are absent.
    """
    o = _options(options)
    x = {n: t for n, t in _widen(inputs).items() if n not in ("v", "w", "d", "z", "initial_state")}
    start = (
        x["dO"]
        .new_zeros(len(x["cu_seqlens"]) - 1, x["g"].shape[1], x["dO"].shape[-1], x["q"].shape[-1])
        .requires_grad_()
    )
    with torch.enable_grad():
        got = _forward(family, x | {"initial_state": start}, o, _io(inputs))
        end = int(x["cu_seqlens"][-1])
        loss = (got["O"][:end] * x["dO"][:end]).sum() + start.sum() * 0.0
        if "d_final_state" in x:
            loss = loss + (got["final_state"] * x["d_final_state"]).sum()
    (d_start,) = torch.autograd.grad(loss, start)
    transition = _transition(family, x, o, _io(inputs))
    if family != "mamba2":
        transition = transition.mT.contiguous()
    return {"d_initial_state": d_start, "transition": transition.detach()}


DIRECTIONS = {
    "forward": forward,
    "backward": backward,
    "summary": summary,
    "summary_backward": summary_backward,
}


def run(family, direction, inputs, **options):
    """One of the four directions."""
    return DIRECTIONS[direction](family, inputs, **options)


# The gates -----------------------------------------------------------------------------------


def softplus(x):
    """log(1 + exp(x)), at full precision everywhere."""
    return torch.logaddexp(x, torch.zeros_like(x))


def l2norm(x):
    """x * rsqrt(sum(x^2) + 1e-6)"""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def decay(family, x, o):
    """The decay a of every token: [T, HO], or [T, HO, K] for KDA and GDN-2.

    log: a = exp(g). linear: a = max(g, 1e-10). safe_gate: a = exp(g') with
    g' = -exp(a_log) softplus(g + dt_bias) for GDN and GDP,
    g' = L sigmoid(exp(a_log) (g + dt_bias)) for KDA and GDN-2, L = -5 unless given.
    """
    g = x["g"]
    if o.safe_gate:
        raw = g + x["dt_bias"] if "dt_bias" in x else g
        amplitude = x["a_log"].exp() if "a_log" in x else g.new_ones(g.shape[1])
        if family in ("kda", "gdn2"):
            bound = -5.0 if o.gate_lower_bound is None else o.gate_lower_bound
            return (bound * torch.sigmoid(amplitude[:, None] * raw)).exp()
        return (-amplitude * softplus(raw)).exp()
    if o.gate_domain == "linear":
        return g.clamp(min=1e-10)
    return g.exp()


def strength(beta, o):
    """beta, or sigmoid(beta), or 2 sigmoid(beta)."""
    if not o.use_beta_sigmoid:
        return beta
    return torch.sigmoid(beta) * (2.0 if o.allow_neg_eigval else 1.0)


def guard(b, k, a, io_dtype):
    """GDN-2's beta_guard: rows of b that would expand the state go to their key-weighted mean.

    b, a [T, HO, K]; k [T, HO, K], normalized. p = k^2, c2 = exp(-2 max log a), A0 = sum p,
    A1 = sum b p, A2 = sum b^2 p, mean = A1 / A0, R = max(A0 A2 - A1^2, 0),
    lim = max((c2 - 1) (1 - (1 - A1)^2 / c2), 0). If A0 > 1e-20 and R > lim:
    b <- mean + eta (b - mean), eta = clip(sqrt((1 - 1/32) lim / max(R, 1e-30)), 0, 1).
    16-bit io: the new row is rounded; if then R > lim + 4 eps (A0 A2 + A1^2), it is its mean.
    """
    p = k.square()
    c2 = a.log().amax(-1, keepdim=True).mul(-2.0).exp()
    a0 = p.sum(-1, keepdim=True)

    def moments(row):
        return (row * p).sum(-1, keepdim=True), (row.square() * p).sum(-1, keepdim=True)

    def excess(a1, a2):
        return (a0 * a2 - a1.square()).clamp(min=0.0)

    def limit(a1):
        return ((c2 - 1.0) * (1.0 - (1.0 - a1).square() / c2)).clamp(min=0.0)

    a1, a2 = moments(b)
    mean = a1 / a0
    r, lim = excess(a1, a2), limit(a1)
    eta = ((1.0 - 1.0 / 32.0) * lim / r.clamp(min=1e-30)).sqrt().clamp(0.0, 1.0)
    row = mean + eta * (b - mean)
    if io_dtype in (torch.float16, torch.bfloat16):
        eps = 2.0**-10 if io_dtype == torch.float16 else 2.0**-7
        row = row.to(io_dtype).to(b.dtype)
        a1, a2 = moments(row)
        broken = excess(a1, a2) > limit(a1) + 4.0 * eps * (a0 * a2 + a1.square())
        row = torch.where(broken, a1 / a0, row)
    return torch.where((a0 > 1e-20) & (r > lim), row, b)


# The recurrence ------------------------------------------------------------------------------


def _forward(family, x, o, io_dtype, round_state_to=None):
    """All outputs, in fp64 and differentiable."""
    cu = x["cu_seqlens"].tolist()
    steps = _delta_steps if family != "mamba2" else _mamba2_steps
    tokens, enter, update, read, sizes = steps(family, _trim(x, cu[-1], o), o, io_dtype)
    n, heads, v_dim, k_dim = sizes
    state, every = x.get("initial_state"), o.checkpoint_every_n_tokens
    rows = x["state_indices"].tolist() if "state_indices" in x else range(len(cu) - 1)
    zero = tokens.new_zeros(heads, v_dim, k_dim)

    outputs, finals, checkpoints = [], [], []
    for row, (first, last) in zip(rows, pairwise(cu), strict=True):
        if row < 0:  # padding
            outputs += [tokens.new_zeros(heads, v_dim)] * (last - first)
            continue
        S = zero if state is None else state[row]
        for step in range((last - first) * n):
            t, j = first + step // n, step % n
            if every and step % every == 0:
                checkpoints.append(S)
            if j == 0:
                S = enter(S, t)
            S = update(S, t * n + j)
            if j == n - 1:
                outputs.append(read(S, t))
                if round_state_to is not None:
                    S = _Rounded.apply(S, round_state_to)
        finals.append((row, S))

    total = len(x["g"])
    outputs += [tokens.new_zeros(heads, v_dim)] * (total - len(outputs))
    got = {"O": _stack(outputs, (heads, v_dim), tokens)}
    got["state_checkpoints"] = _stack(checkpoints, (heads, v_dim, k_dim), tokens)
    if "state_indices" in x:
        pool = state.clone()
        for row, S in finals:
            pool[row] = S
        got["final_state"] = pool
    else:
        got["final_state"] = _stack([S for _, S in finals], (heads, v_dim, k_dim), tokens)
    if family == "mamba2" and "z" in x:
        end = cu[-1]
        got["O_pre"] = got["O"]
        z = x["z"][:end]
        gated = got["O"][:end] * z * torch.sigmoid(z)
        got["O"] = torch.cat([gated, got["O"][end:]])
    return got


def _delta_steps(family, x, o, io_dtype):
    """The three steps of the delta-rule families, on per-head tokens."""
    n = o.num_householder if family == "gdp" else 1
    a = decay(family, x, o)
    heads = a.shape[1]
    k = _heads(x["k"].flatten(0, 1) if x["k"].dim() == 4 else x["k"], heads)
    k_dim = k.shape[-1]
    if o.use_qk_l2norm:
        k = l2norm(k)
    q = None
    if "q" in x:
        q = _heads(l2norm(x["q"]) if o.use_qk_l2norm else x["q"], heads)
        q = q * (k_dim**-0.5 if o.scale is None else o.scale)
    if "v" in x:
        v = _heads(x["v"].flatten(0, 1) if x["v"].dim() == 4 else x["v"], heads)
    else:
        v = k.new_zeros(*k.shape[:2], x["initial_state"].shape[-2])
    beta = strength(x["beta"], o)
    if family == "gdp" and beta.dim() == 3:
        beta = beta.flatten(0, 1)
    if o.beta_guard:
        # Straight through: the guard is recomputed in the backward, not differentiated.
        beta = beta + (guard(beta, k, a, io_dtype) - beta).detach()
    w = x.get("w")
    if w is None and family == "gdn2":
        w = torch.zeros_like(v)

    def enter(S, t):
        """S = a S, or S = S diag(a)."""
        return S * (a[t][:, None, :] if a.dim() == 3 else a[t][:, None, None])

    def delta(S, i):
        """S + beta (v - S k) k^T"""
        error = v[i] - _times(S, k[i])
        return S + beta[i][:, None, None] * _outer(error, k[i])

    def gdn2(S, i):
        """S + (w . v - S (b . k)) k^T"""
        return S + _outer(w[i] * v[i] - _times(S, beta[i] * k[i]), k[i])

    def read(S, t):
        """scale S q"""
        return S.new_zeros(heads, v.shape[-1]) if q is None else _times(S, q[t])

    update = gdn2 if family == "gdn2" else delta
    return v, enter, update, read, (n, heads, v.shape[-1], k_dim)


def _mamba2_steps(family, x, o, io_dtype):
    """The three steps of Mamba-2: q = C, k = B, v = x, g = dt, a = A, d = D."""
    dt = time_step(x, o)
    heads = dt.shape[1]
    C = _heads(x["q"], heads) if "q" in x else None
    B = _heads(x["k"], heads)
    inner = x["v"] if "v" in x else B.new_zeros(*B.shape[:2], x["initial_state"].shape[-2])
    inner = _heads(inner, heads)
    fade = (x["a"] * dt).exp()
    D = x.get("d")

    def enter(S, t):
        """S = exp(A dt') S"""
        return S * fade[t][:, None, None]

    def update(S, t):
        """S + dt' x B^T"""
        return S + _outer(dt[t][:, None] * inner[t], B[t])

    def read(S, t):
        """S C + D x"""
        if C is None:
            return S.new_zeros(heads, inner.shape[-1])
        y = _times(S, C[t])
        if D is None:
            return y
        return y + (D if D.dim() == 2 else D[:, None]) * inner[t]

    return inner, enter, update, read, (1, heads, inner.shape[-1], B.shape[-1])


def time_step(x, o):
    """dt' = clamp(softplus(dt + dt_bias), dt_min, dt_max)"""
    dt = x["g"] + x["dt_bias"] if "dt_bias" in x else x["g"]
    dt = softplus(dt) if o.dt_softplus else dt
    return dt.clamp(o.dt_min, float("inf") if o.dt_max is None else o.dt_max)


def _transition(family, x, o, io_dtype):
    """M: the recurrence run on the identity, with nothing written."""
    cu = x["cu_seqlens"].tolist()
    if family == "mamba2":
        trimmed = _trim(x, cu[-1], o)
        logs = trimmed["a"] * time_step(trimmed, o) / torch.tensor(2.0, dtype=torch.float64).log()
        parts = [logs[i:j].sum(0) for i, j in pairwise(cu)]
        return _stack(parts, (logs.shape[1],), logs)
    k_dim = x["k"].shape[-1]
    eye = torch.eye(k_dim, dtype=torch.float64).expand(len(cu) - 1, x["g"].shape[1], -1, -1)
    silent = {name: t for name, t in x.items() if name not in ("q", "v", "w")}
    return _forward(family, silent | {"initial_state": eye}, o, io_dtype)["final_state"]


# Small helpers -------------------------------------------------------------------------------


class _Rounded(torch.autograd.Function):
    """Round to a dtype, in both directions."""

    @staticmethod
    def forward(ctx, x, dtype):
        ctx.dtype = dtype
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad.to(ctx.dtype).to(grad.dtype), None


def _times(S, k):
    """S k for every head: [HO, V]."""
    return (S * k[:, None, :]).sum(-1)


def _outer(v, k):
    """v k^T for every head: [HO, V, K]."""
    return v[:, :, None] * k[:, None, :]


def _heads(x, heads):
    """Head j of HO uses head j // (HO // h) of h."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def _stack(parts, shape, like):
    return torch.stack(parts) if parts else like.new_zeros(0, *shape)


def _trim(x, end, o):
    """Without the rows past the last sequence's end, which nothing may read."""
    out = dict(x)
    total = len(x["g"])
    for name in _TOKENS:
        if name in x:
            rows = end * o.num_householder if len(x[name]) != total else end
            out[name] = x[name][:rows]
    return out


def _widen(inputs):
    """Fresh fp64 copies on the CPU; absent inputs (None) are left out."""
    return {
        name: t.detach().cpu().to(torch.float64) if t.is_floating_point() else t.detach().cpu()
        for name, t in inputs.items()
        if t is not None
    }


def _io(inputs):
    return (inputs["q"] if inputs.get("q") is not None else inputs["k"]).dtype


def _options(given):
    unknown = set(given) - set(DEFAULTS)
    if unknown:
        raise TypeError(f"unknown options {sorted(unknown)}")
    return SimpleNamespace(**{**DEFAULTS, **given})
