"""Inputs: the fixed pattern of the golden numbers, random draws, and hostile data.

A draw is a dict by node port name (Mamba-2: q = C, k = B, v = x, g = dt, a = A, d = D). Keys and
queries are unit vectors unless the call normalizes them itself; gates follow a regime:

    slow    decays near 0.95 per token          strong  about exp(-5) per token
    zero    g = 0: nothing is forgotten         deep    exp(-20) per token
    mixed   any of these, token by token and channel by channel
"""

from __future__ import annotations

import torch

REGIMES = ("slow", "strong", "zero", "deep", "mixed")
HOSTILE = ("repeated keys", "correlated keys", "zero keys", "beta 1", "beta 2", "deep gates")

F64 = torch.float64


def P(shape, seed, dtype=F64):
    """The fixed pattern: element i is ((31 j^2 + 17 j + 101 seed + 5) mod 1009) / 504.5 - 1,
    j = i mod 1009."""
    count = 1
    for size in shape:
        count *= size
    j = torch.arange(count, dtype=torch.int64) % 1009
    value = ((31 * j * j + 17 * j + 101 * seed + 5) % 1009).to(F64) / 504.5 - 1.0
    return value.reshape(shape).to(dtype)


def l2(x):
    """Unit norm on the last dimension."""
    return x / x.norm(dim=-1, keepdim=True)


def offsets(lengths, dtype=torch.int32):
    """cu_seqlens of packed sequences."""
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(dtype)


def log_gates(regime, shape, generator):
    """Log decays g <= 0 of a regime."""
    u = torch.rand(shape, generator=generator, dtype=F64)
    if regime == "slow":
        return -0.1 * u
    if regime == "strong":
        return -5.0 * (0.5 + u)
    if regime == "zero":
        return torch.zeros(shape, dtype=F64)
    if regime == "deep":
        return torch.full(shape, -20.0, dtype=F64)
    if regime == "mixed":
        choices = torch.tensor([0.0, -0.01, -1.0, -5.0, -20.0], dtype=F64)
        return choices[torch.randint(5, shape, generator=generator)] * (0.5 + 0.5 * u)
    raise ValueError(f"unknown gate regime {regime!r}")


def raw_gates(regime, shape, generator, rising):
    """Raw gates of safe_gate, or Mamba-2's dt: a larger one forgets more (`rising` is +1)."""
    noise = torch.randn(shape, generator=generator, dtype=F64)
    center, spread = {
        "slow": (-3.0, 0.5),
        "strong": (3.0, 0.5),
        "zero": (-30.0, 0.0),
        "deep": (12.0, 0.5),
        "mixed": (0.0, 4.0),
    }[regime]
    return rising * (center + spread * noise)


def draw(
    family,
    *,
    lengths,
    H=2,
    HK=None,
    HV=None,
    K=16,
    V=16,
    n=1,
    dtype=F64,
    gate="slow",
    gate_dtype=None,
    beta_dtype=None,
    state=None,
    params=(),
    token_major=False,
    tail=0,
    index_dtype=torch.int32,
    options=None,
    d_final_state=True,
    seed=0,
):
    """Inputs of all four directions of one family.

    dtype: of the token tensors. gate_dtype, beta_dtype: fp32 unless given (fp64 where dtype is).
    state: dtype of initial_state, None for none. params: optional ports to draw, out of a_log,
    dt_bias, and for Mamba-2 d (one per head), "d channels" (one per channel), z. tail: rows past
    the end of the last sequence; they are NaN, since nothing may read them.
    """
    options = options or {}
    rng = torch.Generator().manual_seed(seed)
    HK, HV = HK or H, HV or H
    HO = max(H, HV)
    used = sum(lengths)
    total = used + tail
    wide = F64 if dtype == F64 else torch.float32
    gate_dtype, beta_dtype = gate_dtype or wide, beta_dtype or wide
    per_key = family in ("kda", "gdn2")

    def normal(*shape):
        return torch.randn(shape, generator=rng, dtype=F64)

    def vectors(rows, heads, size):
        x = normal(rows, heads, size)
        if options.get("use_qk_l2norm") or family == "mamba2":
            return x * (0.5 + torch.rand(rows, heads, 1, generator=rng, dtype=F64))
        return l2(x)

    def lasting(x, rows=total, keep=used):
        x = x[:rows]
        x[keep:] = float("nan")
        return x

    x = {
        "q": lasting(vectors(total, H, K)),
        "k": lasting(vectors(total * n, HK, K), total * n, used * n),
        "v": lasting(normal(total * n, HV, V), total * n, used * n),
        "dO": lasting(normal(total, HO, V)),
    }
    gates = (total, HO, K) if per_key else (total, HO)
    if family == "mamba2":
        x["q"], x["k"] = x["q"] * K**-0.5, x["k"] * K**-0.5
        x["g"] = lasting(raw_gates(gate, gates, rng, 1.0))
        if not options.get("dt_softplus", True):
            x["g"] = x["g"].abs() * 0.1 + 0.01
        x["a"] = -torch.exp(0.5 * normal(HO))
    elif options.get("safe_gate"):
        x["g"] = lasting(raw_gates(gate, gates, rng, 1.0))
    elif options.get("gate_domain") == "linear":
        x["g"] = log_gates(gate, gates, rng).exp()
        if gate == "mixed":
            x["g"][torch.rand(gates, generator=rng) < 0.1] = 0.0  # below the floor of 1e-10
        x["g"] = lasting(x["g"])
    else:
        x["g"] = lasting(log_gates(gate, gates, rng))

    if family != "mamba2":
        beta = normal(total * n, HO, K) if family == "gdn2" else normal(total * n, HO)
        x["beta"] = beta if options.get("use_beta_sigmoid") else torch.sigmoid(beta)
        x["beta"] = lasting(x["beta"], total * n, used * n)
    if family == "gdn2":
        x["w"] = lasting(torch.sigmoid(normal(total, HO, V)))
    if "a_log" in params:
        x["a_log"] = 0.3 * normal(HO)
    if "dt_bias" in params:
        x["dt_bias"] = 0.5 * (normal(HO, K) if per_key else normal(HO))
    if family == "mamba2":
        if "d" in params:
            x["d"] = normal(HO)
        if "d channels" in params:
            x["d"] = normal(HO, V)
        if "z" in params:
            x["z"] = lasting(normal(total, HO, V))
    if state is not None:
        x["initial_state"] = normal(len(lengths), HO, V, K)
    if d_final_state:
        x["d_final_state"] = normal(len(lengths), HO, V, K)
    if family == "gdp" and token_major:
        for name in ("k", "v", "beta"):
            x[name] = x[name].unflatten(0, (total, n))

    dtypes = {
        "g": gate_dtype,
        "beta": dtype if family == "gdn2" else beta_dtype,
        "initial_state": state,
        "d_final_state": state or wide,
        **dict.fromkeys(("a", "a_log", "dt_bias", "d"), wide),
    }
    x = {name: t.to(dtypes.get(name, dtype)) for name, t in x.items()}
    x["cu_seqlens"] = offsets(lengths, index_dtype)
    return x


def hostile(kind, family, *, lengths, K=16, V=16, dtype=torch.float32, gate="zero", seed=0):
    """A draw made to break fast algorithms: see HOSTILE for the kinds.

    Decay is off or slow, so that errors last; only "deep gates" forgets everything at once.
    """
    if kind == "deep gates":
        gate = "deep"
    x = draw(
        family, lengths=lengths, K=K, V=V, dtype=dtype, gate=gate, state=torch.float32, seed=seed
    )
    if family == "mamba2" and gate == "zero":  # dt = 0 would write nothing: A is off instead
        x["g"] = raw_gates("slow", x["g"].shape, torch.Generator().manual_seed(seed), 1.0).float()
        x["a"] = torch.full_like(x["a"], -1e-6)
    rng = torch.Generator().manual_seed(seed + 1)
    k = x["k"]
    common = l2(torch.randn(1, k.shape[1], K, generator=rng, dtype=F64))
    if kind == "repeated keys":
        x["k"] = common.expand(k.shape).to(dtype).clone()
    elif kind in ("correlated keys", "beta 1", "beta 2"):
        noise = torch.randn(k.shape, generator=rng, dtype=F64) * K**-0.5
        x["k"] = l2(common + 0.1 * noise).to(dtype)
    elif kind == "zero keys":
        x["k"][torch.rand(k.shape[:2], generator=rng) < 0.5] = 0.0
    if "beta" in x and kind != "deep gates":
        strength = {"beta 1": 1.0, "beta 2": 2.0}.get(kind, 0.95)
        x["beta"] = torch.full_like(x["beta"], strength)
        if "w" in x:
            x["w"] = torch.full_like(x["w"], strength)
    return x
