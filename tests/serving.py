"""Convolution, decoding and the token scan against their truths, on any device.

`test_conv.py` and `test_decode.py` run these on the CPU's reference and on a GPU's kernels,
`interpreted_serving.py` on the kernels in Triton's interpreter. Truth is fp64: torch's own
convolution, sequence by sequence, and the recurrences of `oracle.py`.
"""

from __future__ import annotations

from itertools import pairwise

import batch
import oracle
import torch
import torch.nn.functional as F
from draw import draw
from table import to
from tolerance import check, check_bitwise

from lagraph import registry
from lagraph.ops.accept import accept_states
from lagraph.ops.conv import causal_conv1d, causal_conv1d_decode, paged_causal_conv1d
from lagraph.ops.decode import (
    recurrent_gdn2_decode,
    recurrent_gdn_decode,
    recurrent_gdp_decode,
    recurrent_kda_decode,
    recurrent_mamba2_decode,
)

F32, F64 = torch.float32, torch.float64
NAN = float("nan")


# Convolution ------------------------------------------------------------------------------------


def conv_truth(x, weight, offsets, history, activation):
    """Outputs of the packed rows [T, C], and final histories [N, W - 1, C]; x is [T, C]."""
    W = weight.shape[1]
    outs, ends = [], []
    for i, (a, b) in enumerate(pairwise(offsets)):
        before = x.new_zeros(W - 1, x.shape[1]) if history is None else history[i]
        rows = torch.cat([before, x[a:b]])
        ends.append(rows[len(rows) - (W - 1) :])
        if b > a:
            y = F.conv1d(rows.T[None], weight[:, None], groups=len(weight))[0].T
            outs.append(
                y if activation is None else F.silu(y) if activation == "silu" else y.tanh()
            )
    ends = torch.stack(ends) if ends else x.new_zeros(0, W - 1, x.shape[1])
    return torch.cat(outs) if outs else x[:0], ends


def wide(*tensors):
    """Fresh fp64 leaves on the CPU."""
    return [None if t is None else t.detach().cpu().to(F64).requires_grad_() for t in tensors]


def laid_out(kind, x):
    """x [B, T, C] with the same values in another layout; rows around it are NaN."""
    B, T, C = x.shape
    if kind == "columns":  # of a fused projection, as a token stride and an offset
        big = x.new_full((B, T, C + 24), NAN)
        big[:, :, 16 : C + 16] = x
        return big[:, :, 16 : C + 16]
    if kind == "time first":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if kind == "expanded":
        return x[:1].expand(B, T, C)
    return x


def check_conv(
    device, dtype, *, W=4, C=24, lengths=(5, 0, 17, 1), batch=None, tail=3, layout="", history=True,
    final=True, activation="silu", index=torch.int32, seed=0, **options,
):  # fmt: skip
    """Forward and all gradients; dense with a batch of `batch` rows of lengths[0], else packed."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=rng, dtype=F64).to(dtype).to(device)

    if batch is None:
        offsets = [0, *torch.tensor(lengths).cumsum(0).tolist()] if lengths else [0]
        x = normal(1, offsets[-1] + tail, C)
        x[:, offsets[-1] :] = NAN
        cu = torch.tensor(offsets, dtype=index, device=device)
    else:
        T = lengths[0]
        offsets, cu = [T * i for i in range(batch + 1)], None
        x = normal(batch, T, C)
    N, end = len(offsets) - 1, offsets[-1]
    x = laid_out(layout, x)
    weight = normal(C, W) * W**-0.5
    state = normal(N, W - 1, C) if history else None
    dy = normal(*x.shape)
    d_state = normal(N, W - 1, C)

    leaves = [t for t in (x, weight, state) if t is not None]
    for leaf in leaves:
        leaf.requires_grad_()
    got = causal_conv1d(
        x, weight, activation=activation, cu_seqlens=cu, initial_state=state,
        return_final_state=final, **options,
    )  # fmt: skip
    y, ends = got if final else (got, None)
    assert y.shape == x.shape
    assert y.is_contiguous()
    assert y.dtype == dtype
    grads = torch.autograd.grad(
        [y, ends] if final else [y], leaves, [dy, d_state] if final else [dy]
    )

    x64, w64, s64 = wide(x, weight, state)
    flat = x64.reshape(-1, C)
    y64, ends64 = conv_truth(flat, w64, offsets, s64, activation)
    loss = (y64 * dy.cpu().to(F64).reshape(-1, C)[:end]).sum()
    if final:
        loss = loss + (ends64 * d_state.cpu().to(F64)).sum()
    for leaf in (x64, w64, s64):  # every input gets a gradient
        loss = loss + (0.0 if leaf is None else 0.0 * leaf[leaf == leaf].sum())
    want = torch.autograd.grad(loss, [t for t in (x64, w64, s64) if t is not None])

    names = ["dx", "dweight", "dstate"][: len(leaves)]
    got = dict(zip(names, grads, strict=True)) | {"y": y}
    want = dict(zip(names, want, strict=True)) | {"y": y64}
    for name in ("y", "dx"):
        got[name] = got[name].detach().reshape(-1, C)[:end]
        want[name] = want[name].detach().reshape(-1, C)[:end]
    if final:
        got["final"], want["final"] = ends, ends64.detach()
        assert torch.equal(ends.detach().cpu().to(F64), ends64.detach()), "histories are copies"
    check(got, want, dtype, where(device))


def where(device):
    """The device whose tolerances hold: the interpreter's kernels are a GPU's."""
    import lagraph.ops.conv as module

    return "cuda" if getattr(module, "INTERPRETED", False) else torch.device(device).type


def pool_of(values, gap):
    """A pool of these slots with `gap` NaN elements after each, all its memory, and a copy."""
    flat = values.flatten(1)
    big = flat.new_full((len(flat), flat.shape[1] + gap), NAN)
    big[:, : flat.shape[1]] = flat
    inner = torch.empty(values.shape[1:], device="meta").stride()
    view = big.as_strided(values.shape, (big.stride(0), *inner))
    return view, big, big.clone()


def untouched(big, before, slots):
    """Every bit outside these slots is what it was, and so are the gaps."""
    others = [i for i in range(len(big)) if i not in slots]
    check_bitwise({"pool": big[others]}, {"pool": before[others]})
    for slot in slots:
        gone = torch.isnan(before[slot]) & ~torch.isnan(big[slot])
        size = before.shape[1]
        assert not gone[size:].any()


def check_paged(
    device, dtype, *, W=4, C=24, lengths=(5, 0, 17, 1, 0, 2, 3), batch=None, fresh=True, gap=40,
    activation="silu", seed=0,
):  # fmt: skip
    """Prefill through a pool: padding, fresh slots full of NaN, gaps, resumed and empty rows."""
    rng = torch.Generator().manual_seed(seed)
    N = len(lengths) if batch is None else batch
    index = [3, 5, -1, 1, 7, 0, 6][:N]
    new = [i in (0, 4, 6) for i in range(N)] if fresh else [False] * N
    values = torch.randn(9, W - 1, C, generator=rng, dtype=F64).to(dtype)
    for slot, is_new in zip(index, new, strict=True):
        if is_new:
            values[slot] = NAN
    values[0] = values[2] = NAN  # nobody's
    pool, big, before = pool_of(values.to(device), gap)
    if batch is None:
        offsets = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        x = torch.randn(1, offsets[-1] + 2, C, generator=rng, dtype=F64).to(dtype).to(device)
        x[:, offsets[-1] :] = NAN
        cu = torch.tensor(offsets, dtype=torch.int32, device=device)
    else:
        T = lengths[0]
        offsets, cu = [T * i for i in range(N + 1)], None
        x = torch.randn(N, T, C, generator=rng, dtype=F64).to(dtype).to(device)
    x = laid_out("columns", x)
    weight = torch.randn(C, W, generator=rng, dtype=F64).to(dtype).to(device)
    y = paged_causal_conv1d(
        x, weight, pool, torch.tensor(index, dtype=torch.int32, device=device),
        activation=activation, cu_seqlens=cu,
        has_initial_state=torch.tensor([not n for n in new], device=device) if fresh else None,
    )  # fmt: skip
    history = torch.stack([
        values[max(i, 0)].to(F64) if i > 0 and not n else torch.zeros(W - 1, C, dtype=F64)
        for i, n in zip(index, new, strict=True)
    ])  # fmt: skip
    flat = x.cpu().to(F64).reshape(-1, C)
    want, ends = conv_truth(flat, weight.cpu().to(F64), offsets, history, activation)
    got = y.cpu().reshape(-1, C)[: offsets[-1]]
    for i, (a, b) in enumerate(pairwise(offsets)):
        if index[i] <= 0:
            assert torch.equal(got[a:b], torch.zeros_like(got[a:b])), "padding is exactly zero"
            want[a:b] = 0.0
    check({"y": got}, {"y": want}, dtype, where(device))
    used = [i for i in index if i > 0]
    for i, slot in enumerate(index):
        if slot > 0:
            assert torch.equal(pool[slot].cpu().to(F64), ends[i]), f"slot {slot}"
    untouched(big, before, used)


def check_conv_decode(device, dtype, *, W=4, C=24, index=True, fresh=True, activation="silu"):
    """One token a sequence: against the truth, padding and fresh slots included."""
    rng = torch.Generator().manual_seed(1)
    N = 5
    slots = [4, -1, 2, 0, 6] if index else list(range(N))
    new = [False, True, True, False, False] if fresh else [False] * N
    values = torch.randn(8, W - 1, C, generator=rng, dtype=F64).to(dtype)
    for slot, is_new in zip(slots, new, strict=True):
        if is_new:
            values[slot] = NAN
    pool, big, before = pool_of(values.to(device), 8)
    x = torch.randn(N, C, generator=rng, dtype=F64).to(dtype).to(device)
    x = laid_out("columns", x[:, None])[:, 0]
    weight = torch.randn(C, W, generator=rng, dtype=F64).to(dtype).to(device)
    y = causal_conv1d_decode(
        x, weight, pool, activation=activation,
        state_indices=torch.tensor(slots, dtype=torch.int32, device=device) if index else None,
        has_initial_state=torch.tensor([not n for n in new], device=device) if fresh else None,
    )  # fmt: skip
    live = [not index or slot > 0 for slot in slots]
    history = torch.stack([
        values[s].to(F64) if ok and not n else torch.zeros(W - 1, C, dtype=F64)
        for s, n, ok in zip(slots, new, live, strict=True)
    ])  # fmt: skip
    offsets = list(range(N + 1))
    want, ends = conv_truth(
        x.cpu().to(F64), weight.cpu().to(F64), offsets, history, activation
    )  # fmt: skip
    for i in range(N):
        if not live[i]:
            assert torch.equal(y[i].cpu(), torch.zeros(C, dtype=dtype))
            want[i] = 0.0
    check({"y": y}, {"y": want}, dtype, where(device))
    for i, slot in enumerate(slots):
        if live[i]:
            assert torch.equal(pool[slot].cpu().to(F64), ends[i]), f"slot {slot}"
    untouched(big, before, [s for s, ok in zip(slots, live, strict=True) if ok])


# Decode -----------------------------------------------------------------------------------------

DECODE = {
    "gdn": recurrent_gdn_decode,
    "kda": recurrent_kda_decode,
    "gdn2": recurrent_gdn2_decode,
    "gdp": recurrent_gdp_decode,
    "mamba2": recurrent_mamba2_decode,
}
# How a family's gates and strengths come to decode, in the oracle's options.
RAW = {"use_qk_l2norm": True, "use_beta_sigmoid": True, "safe_gate": True}
OPTIONS = {
    "gdn": RAW,
    "kda": RAW | {"gate_lower_bound": -5.0},
    "gdn2": RAW | {"gate_lower_bound": -5.0},
    "gdp": RAW | {"num_householder": 2},
    "mamba2": {},
}


def decode_inputs(family, device, dtype, *, B=5, H=4, HK=2, K=16, V=16, n=2, gate=None, seed=0):
    """A one-token draw of B sequences by node names, and the function's tensors, on the device."""
    n = n if family == "gdp" else 1
    delta = family != "mamba2"
    params = ("a_log", "dt_bias") if delta else ("dt_bias", "d", "z")
    x = draw(
        family, lengths=(1,) * B, H=HK, HK=HK, HV=H, K=K, V=V, n=n, dtype=dtype,
        gate_dtype=gate or dtype, beta_dtype=gate or dtype, params=params,
        options=OPTIONS[family], token_major=True, seed=seed,
    )  # fmt: skip
    flat = {key: x[key].flatten(1) for key in ("q", "k", "v")}
    order = "qkv" if delta else "vkq"
    args = [torch.cat([flat[key] for key in order], dim=1), x["g"][None]]
    if delta:
        args += [x["beta"][None]]
        args += [x["w"][None]] if family == "gdn2" else []
        args += [x["a_log"], x["dt_bias"]]
        extra = {}
    else:
        args += [x["a"], x["dt_bias"]]
        extra = {"D": x["d"].to(device), "z": x["z"][None].to(device)}
    return x, [t.to(device) for t in args], extra


def check_decode(
    family, device, dtype, pool_dtype=F32, *, B=5, H=4, HK=2, K=16, V=16, n=2, fresh=True, gap=0,
    out=True, options=None, call=None, gate=None,
):  # fmt: skip
    """One token: outputs, states, padding, slots full of NaN, and the rest of the pool."""
    x, args, extra = decode_inputs(
        family, device, dtype, B=B, H=H, HK=HK, K=K, V=V, n=n, gate=gate
    )  # fmt: skip
    index = [(3, -1, 5, 0, 2)[i] if i < 5 else i + 1 for i in range(B)]
    new = [i % 4 == 2 for i in range(B)] if fresh else [False] * B
    rng = torch.Generator().manual_seed(7)
    values = torch.randn(max(index) + 2, H, V, K, generator=rng, dtype=F64).to(pool_dtype)
    for slot, is_new in zip(index, new, strict=True):
        if is_new and slot > 0:
            values[slot] = NAN
    values[0] = values[1] = NAN
    pool, big, before = pool_of(values.to(device), gap)
    buffer = torch.full((1, B, H, V), NAN, dtype=dtype, device=device) if out else None
    got = DECODE[family](
        *args, pool, torch.tensor(index, dtype=torch.int32, device=device), **extra, out=buffer,
        has_initial_state=torch.tensor([not n for n in new], device=device) if fresh else None,
        **(call or {}),
    )  # fmt: skip
    assert got is buffer or not out
    start = torch.stack([
        values[i].to(F64) if i > 0 and not n else torch.zeros(H, V, K, dtype=F64)
        for i, n in zip(index, new, strict=True)
    ])  # fmt: skip
    want = oracle.forward(
        family, x | {"initial_state": start}, output_final_state=True,
        **(OPTIONS[family] | (options or {})),
    )  # fmt: skip
    live = torch.tensor([i > 0 for i in index])
    assert torch.equal(got[0].cpu()[~live], torch.zeros_like(got[0].cpu()[~live]))
    used = [i for i in index if i > 0]
    named = {"O": got[0].cpu()[live], "final_state": pool[used].cpu()}
    truth = {"O": want["O"][live], "final_state": want["final_state"][live]}
    for name, t in truth.items():
        check({name: named[name]}, {name: t}, dtype if name == "O" else F32, where(device))
    untouched(big, before, used)


# The scan ---------------------------------------------------------------------------------------


def check_scan(family, device, dtype, *, pool_dtype=F32, dense=False, options=None, n=2):
    """Several tokens a sequence through a pool, with the state after every token."""
    scan = registry.load("lagraph.engines.triton.recurrent:recurrent_scan")
    delta = family != "mamba2"
    n = n if family == "gdp" else 1
    chosen = OPTIONS[family] | ({"num_householder": n} if family == "gdp" else {}) | (options or {})
    lengths = (4, 4, 4) if dense else (3, 0, 6, 1, 2)
    N, H = len(lengths), 4
    x = draw(
        family, lengths=lengths, H=2, HK=2, HV=H, K=16, V=32, n=n, dtype=dtype, options=chosen,
        params=("a_log", "dt_bias") if delta else ("dt_bias", "d channels", "z"), token_major=True,
        tail=0 if dense else 2,
    )  # fmt: skip
    index = [2, 4, -1, 5, 1][:N]
    new = [False, True, False, True, False][:N]
    rng = torch.Generator().manual_seed(3)
    values = torch.randn(7, H, 32, 16, generator=rng, dtype=F64).to(pool_dtype)
    for slot, is_new in zip(index, new, strict=True):
        if is_new:
            values[slot] = NAN
    pool, big, before = pool_of(values.to(device), 24)
    T = sum(lengths) + (0 if dense else 2)
    shape = (N, lengths[0]) if dense else (1, T)

    def batched(name):
        return None if name not in x else x[name].to(device).unflatten(0, shape)

    states = torch.full((*shape, H, 32, 16), NAN, device=device)
    more = {"w": batched("w")} if family == "gdn2" else {}
    if delta:
        kind = "bounded" if family in ("kda", "gdn2") else "softplus"
        more |= {
            "gate": kind, "norm": True, "sigmoid": True, "a_log": x["a_log"].to(device),
            "guard": chosen.get("beta_guard", False),
            "double": chosen.get("allow_neg_eigval", False),
        }  # fmt: skip
    else:
        more |= {"a": x["a"].to(device), "d": x["d"].to(device), "z": batched("z")}
    out = scan(
        registry.family(family).traits, batched("q"), batched("k"), batched("v"), batched("g"),
        batched("beta"), None if dense else x["cu_seqlens"].to(device), initial_state=pool,
        state_indices=torch.tensor(index, dtype=torch.int32, device=device), final_state=pool,
        has_initial_state=torch.tensor([not n for n in new], device=device), states=states,
        dt_bias=x["dt_bias"].to(device), **more,
    )  # fmt: skip
    start = torch.stack([
        values[i].to(F64) if i > 0 and not n else torch.zeros(H, 32, 16, dtype=F64)
        for i, n in zip(index, new, strict=True)
    ])  # fmt: skip
    want = oracle.forward(family, x | {"initial_state": start}, output_final_state=True, **chosen)
    offsets = x["cu_seqlens"].tolist()
    o, rows = out.flatten(0, 1).cpu(), states.flatten(0, 1).cpu()
    named, truth = {"O": o[: offsets[-1]]}, {"O": want["O"][: offsets[-1]].clone()}
    for i, (a, b) in enumerate(pairwise(offsets)):
        if index[i] <= 0:
            assert torch.equal(o[a:b], torch.zeros_like(o[a:b]))
            truth["O"][a:b] = 0.0
            continue
        named[f"state {i}"] = pool[index[i]].cpu()
        truth[f"state {i}"] = want["final_state"][i]
        for t in range(a, b):
            named[f"state {i} after {t - a}"] = rows[t]
            cut = {
                key: v[a : t + 1] if len(v) == offsets[-1] + (0 if dense else 2) else v
                for key, v in x.items()
            } | {
                "cu_seqlens": torch.tensor([0, t + 1 - a]),
                "initial_state": start[i : i + 1],
            }
            truth[f"state {i} after {t - a}"] = oracle.forward(
                family, cut, output_final_state=True, **chosen
            )["final_state"][0]
    for name, t in truth.items():
        io = dtype if name == "O" else F32
        check({name: named[name]}, {name: t}, io, where(device))
    untouched(big, before, [i for i in index if i > 0])


# Several tokens a step, and the state after every one ---------------------------------------------


def after_every_token(family, x, start, **options):
    """The states [rows, H, V, K] that the oracle has after every token, and its outputs."""
    ends = x["cu_seqlens"].tolist()
    want = oracle.forward(family, x | {"initial_state": start}, output_final_state=True, **options)
    states = torch.full((ends[-1], *start.shape[1:]), NAN, dtype=F64)
    tokens = ("q", "k", "v", "g", "beta", "w", "z")
    for i, (a, b) in enumerate(pairwise(ends)):
        for t in range(a, b):
            cut = dict(x)
            for name in set(tokens).intersection(x):
                n = len(x[name]) // len(x["q"])  # rows of a token
                cut[name] = x[name][a * n : (t + 1) * n]
            cut |= {"cu_seqlens": torch.tensor([0, t + 1 - a]), "initial_state": start[i : i + 1]}
            got = oracle.forward(family, cut, output_final_state=True, **options)
            states[t] = got["final_state"][0]
    return want, states


def check_several(
    family, device, dtype, pool_dtype=F32, kept=F32, *, T=3, K=16, V=32, H=4, HK=2, n=2,
    options=None, call=None,
):  # fmt: skip
    """T rows a sequence through decode: without `states` the pool is advanced, with it read."""
    n = n if family == "gdp" else 1
    chosen = OPTIONS[family] | ({"num_householder": n} if family == "gdp" else {}) | (options or {})
    index, new = [3, -1, 5, 1], [False, False, True, False]
    B, delta = len(index), family != "mamba2"
    params = ("a_log", "dt_bias") if delta else ("dt_bias", "d", "z")
    x = draw(
        family, lengths=(T,) * B, H=HK, HK=HK, HV=H, K=K, V=V, n=n, dtype=dtype, gate_dtype=dtype,
        beta_dtype=dtype, params=params, options=chosen, token_major=True,
    )  # fmt: skip
    parts = [x[name].flatten(1) for name in ("qkv" if delta else "vkq")]
    given = [torch.cat(parts, 1), x["g"], *([x["beta"]] if delta else [])]
    given += [x["w"]] if family == "gdn2" else []
    given, tokens = [t.unflatten(0, (B, T)) for t in given], len(given)
    given += [x[name] for name in (("a_log", "dt_bias") if delta else ("a", "dt_bias"))]
    # Rows that are a slice of a wider buffer, as a projection leaves them.
    given[0] = laid_out("columns", given[0])
    given = [t.to(device) for t in given]
    extra = {} if delta else {"D": x["d"].to(device), "z": x["z"].unflatten(0, (B, T)).to(device)}
    rng = torch.Generator().manual_seed(5)
    values = torch.randn(7, H, V, K, generator=rng, dtype=F64).to(pool_dtype)
    values[5] = values[0] = values[2] = NAN
    slots = torch.tensor(index, dtype=torch.int32, device=device)
    has = torch.tensor([not fresh for fresh in new], device=device)
    more = extra | {"has_initial_state": has} | (call or {})
    start = torch.stack([
        values[i].to(F64) if i > 0 and not fresh else torch.zeros(H, V, K, dtype=F64)
        for i, fresh in zip(index, new, strict=True)
    ])  # fmt: skip
    want, truth = after_every_token(family, x, start, **chosen)
    live = torch.tensor([i > 0 for i in index])

    pool, big, before = pool_of(values.to(device), 24)
    out = torch.full((B, T, H, V), NAN, dtype=dtype, device=device)
    assert DECODE[family](*given, pool, slots, **more, out=out) is out
    states = torch.full((B, T, H, V, K), NAN, dtype=kept, device=device)
    other, other_big, _ = pool_of(values.to(device), 24)
    again = DECODE[family](*given, other, slots, **more, states=states)
    check_bitwise({"pool": other_big}, {"pool": before})
    if kept == pool_dtype or where(device) == "cpu":
        check_bitwise({"O": again}, {"O": out})
    else:  # another kernel: the dtypes that it stores are compiled into it
        check({"O": again[live]}, {"O": out[live].cpu().to(F64)}, dtype, where(device))
    # One at a time: not another bit from the kernels, so that a step back leaves no trace.
    if pool_dtype == F32 and where(device) == "cuda":
        single, single_big, _ = pool_of(values.to(device), 24)
        for t in range(T):
            rows = [given[0][:, t], *(x[:, t][None] for x in given[1:tokens])]
            ones = {"has_initial_state": has if t == 0 else torch.ones_like(has)}
            if not delta:
                ones |= {"D": extra["D"], "z": extra["z"][:, t][None]}
            o = DECODE[family](*rows, *given[len(rows) :], single, slots, **ones, **(call or {}))
            check_bitwise({"O": o[0]}, {"O": out[:, t]})
        check_bitwise({"pool": single_big}, {"pool": big})

    o, rows = out.cpu(), states.cpu()
    assert not o[~live].any(), "padding is exactly zero"
    assert torch.isnan(rows[~live]).all(), "states of padding are not written"
    check({"O": o[live]}, {"O": want["O"].unflatten(0, (B, T))[live]}, dtype, where(device))
    check({"state": rows[live]}, {"state": truth.unflatten(0, (B, T))[live]}, F32, where(device))
    used = [i for i in index if i > 0]
    check({"state": pool[used].cpu()}, {"state": want["final_state"][live]}, F32, where(device))
    untouched(big, before, used)

    # Rolled back: the state after the last accepted token, and none where nothing was.
    accepted = torch.tensor([2, 1, T, 0], device=device)
    accept_states(other, slots, states, accepted)
    assert torch.equal(other[3], states[0, 1].to(pool_dtype))
    assert torch.equal(other[5], states[2, T - 1].to(pool_dtype))
    untouched(other_big, before, [3, 5])


def check_states(family, device, dtype, *, dense=False, pool=None, kept=F32, impl="auto"):
    """`recurrent_*` with `states`: every state, and a pool that is only read."""
    lengths = (3, 3, 3) if dense else (3, 0, 4)
    n = 2 if family == "gdp" else 1
    x = draw(family, lengths=lengths, H=2, HV=4, K=12, V=20, n=n, dtype=dtype, state=F32,
             tail=0 if dense else 2)  # fmt: skip
    given = batch.tokens(family, to(device, x), 3 if dense else None) | batch.extra(family)
    shape = given["x" if family == "mamba2" else "q"].shape[:2]
    states = torch.full((*shape, 4, 20, 12), NAN, dtype=kept, device=device)
    start, index = x["initial_state"].to(F64), [2, -1, 4] if pool else [1, 2, 3]
    if pool:
        values = torch.randn(6, 4, 20, 12, generator=torch.Generator().manual_seed(2)).to(pool)
        store, big, before = pool_of(values.to(device), 8)
        start = torch.stack([values[max(i, 0)].to(F64) for i in index])
        given |= {"initial_state": store, "state_indices": torch.tensor(index).to(device)}
    else:
        given |= {"initial_state": x["initial_state"].to(device), "output_final_state": True}
    with torch.no_grad():
        o, last = batch.function("recurrent", family)(**given, states=states, impl=impl)
    want, truth = after_every_token(family, x, start, **batch.extra(family))
    ends, rows, o = x["cu_seqlens"].tolist(), states.flatten(0, 1).cpu(), o.flatten(0, 1).cpu()
    assert torch.isnan(rows[ends[-1] :]).all(), "rows past the end are not written"
    for i, (a, b) in enumerate(pairwise(ends)):
        if index[i] <= 0:
            assert torch.isnan(rows[a:b]).all()
            assert not o[a:b].any()
            truth[a:b] = want["O"][a:b] = rows[a:b] = 0.0
    got = {"O": o[: ends[-1]]}
    check(got, {"O": want["O"][: ends[-1]]}, dtype, where(device))
    check({"state": rows[: ends[-1]]}, {"state": truth}, F32, where(device))
    if pool:
        assert last is None
        check_bitwise({"pool": big}, {"pool": before})
    else:
        check({"final_state": last}, {"final_state": want["final_state"]}, F32, where(device))


def check_conv_states(device, dtype, *, W=4, C=24, dense=False):
    """The convolution with `states`: outputs and pool against the call that advances it."""
    lengths = (3, 3, 3, 3) if dense else (2, 0, 5, 1)
    index, ends = [3, 1, -1, 5], [0, *torch.tensor(lengths).cumsum(0).tolist()]
    rng = torch.Generator().manual_seed(4)
    x = torch.randn(1, ends[-1] + (0 if dense else 2), C, generator=rng).to(dtype)
    x = x.view(4, 3, C) if dense else x
    x = laid_out("columns", x).to(device)
    weight = torch.randn(C, W, generator=rng).to(dtype).to(device)
    values = torch.randn(7, W - 1, C, generator=rng).to(dtype)
    values[5] = values[0] = NAN
    store, big, before = pool_of(values.to(device), 8)
    more = {
        "activation": "silu", "state_indices": torch.tensor(index, device=device),
        "has_initial_state": torch.tensor([True, True, True, False], device=device),
        "cu_seqlens": None if dense else torch.tensor(ends, device=device),
    }  # fmt: skip
    states = torch.full((*x.shape[:2], W - 1, C), NAN, dtype=dtype, device=device)
    y = paged_causal_conv1d(x, weight, store, states=states, **more)
    check_bitwise({"pool": big}, {"pool": before})
    advanced = values.clone().to(device)
    want = paged_causal_conv1d(x, weight, advanced, **more)
    y, want, rows = (t.flatten(0, 1)[: ends[-1]].cpu() for t in (y, want, states))
    check_bitwise({"y": y}, {"y": want})
    flat = x.flatten(0, 1).cpu()
    for i, (a, b) in enumerate(pairwise(ends)):
        if index[i] <= 0:
            assert torch.isnan(rows[a:b]).all()
            continue
        past = torch.zeros(W - 1, C) if i == 3 else values[index[i]]
        seen = torch.cat([past.to(dtype), flat[a:b]])
        for t in range(a, b):
            assert torch.equal(rows[t], seen[t - a + 1 : t - a + W])
    if not dense:
        assert torch.isnan(states[0, ends[-1] :]).all()
