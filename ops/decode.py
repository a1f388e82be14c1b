"""Decoding over a paged pool of states, with everything around the recurrence fused in.

Each function takes the packed rows that leave the short convolution and raw projections, and does
what a layer does with them: it slices q, k and v, normalizes q and k, maps the raw gate to a decay
and the raw strength to (0, 1), advances the selected slots in place, and returns the output
[1, B, H, V]. One sequence is one row; B rows are one kernel launch on CUDA.

Several tokens of every sequence, as speculative decoding verifies them, are rows [B, T, width]
beside projections [B, T, ...], and give [B, T, H, V], in one launch, too. With `states`
[B, T, H, V, K] the state after every token is written there, and the pool is only read:
`accept_states` puts into it the state after the last token that was accepted.

    state_cache [num_slots, H, V, K], fp32, bf16 or fp16 (reference: fp64, too); the update runs in
    fp32 and is rounded when it is stored. Slots may lie apart; each [H, V, K] is dense.
    state_indices [B]: positive ones differ and select a slot; others are padding, whose output is
    zero and which touch nothing.
    has_initial_state [B]: False starts from zero, whatever the slot holds, and overwrites it.

Safe to capture in a CUDA graph: pass `out`, and change indices between replays. For inference only.
`recurrent_gdn_decode` and `recurrent_kda_decode` have Attention Gym's signatures; the other three
follow them.
"""

from __future__ import annotations

from functools import lru_cache
from operator import index
from typing import TYPE_CHECKING, Any

import torch

from lagraph import registry
from lagraph.errors import InvalidOption, RuleBroken, ShapeMismatch
from lagraph.ops.argument import (
    FLOATS,
    INTS,
    apart,
    boolean,
    check_slots,
    need,
    number,
    only_tensors,
    options_of,
    options_text,
    register_in_place,
    serve,
    wants_kernels,
)
from lagraph.ops.step import Step, Steps, key_of

if TYPE_CHECKING:
    from torch import Tensor

    from lagraph.ops.kinds import Impl

__all__ = [
    "recurrent_gdn2_decode",
    "recurrent_gdn_decode",
    "recurrent_gdp_decode",
    "recurrent_kda_decode",
    "recurrent_mamba2_decode",
]

KERNEL = "lagraph.engines.triton.recurrent"
REFERENCE = "lagraph.engines.eager.decode:decode"
ARGS = (
    "packed", "gate", "beta", "w", "A", "A_log", "dt_bias", "D", "z", "state_cache",
    "state_indices", "has_initial_state", "out", "states",
)  # fmt: skip
PARAMETERS = ("A", "A_log", "dt_bias")
# What the functions call the operator's first arguments.
DELTA_NAMES = {"packed": "packed_qkv", "gate": "raw_gate", "beta": "raw_beta"}
NAMES = {"mamba2": {"packed": "packed_xbc", "gate": "dt"}}
_SEEN: set[Any] = set()
SEEN = 4096


def _check(*args: Any) -> None:
    """Shapes, dtypes and devices."""
    call = options_of(args[-1])
    op, family = call.op, call.family
    x = dict(zip(ARGS, args))
    called = NAMES.get(family, DELTA_NAMES)
    name = {key: called.get(key, key) for key in ARGS}
    delta = family != "mamba2"
    pool, packed = x["state_cache"], x["packed"]
    sizes: dict[str, Any] = {}
    several = packed.dim() == 3
    lead = "B T" if several else "1 B"
    need(op, name["packed"], packed, "B T width" if several else "B width", sizes, FLOATS)
    device, io = packed.device, packed.dtype
    states = FLOATS if io == torch.float64 else FLOATS[:3]
    need(op, "state_cache", pool, "num_slots H V K", sizes, states, device)
    H, V, K = sizes["H"], sizes["V"], sizes["K"]
    if K > 256:
        raise ShapeMismatch(
            op, "state_cache", expected="K at most 256", got=f"K = {K}", mend="Use smaller keys"
        )
    apart = pool.shape[0] < 2 or pool.stride(0) >= H * V * K
    if pool.numel() and not (apart and pool.stride()[1:] == (V * K, K, 1)):
        raise RuleBroken(
            op, "state_cache", expected="dense slots [H, V, K]; only slots may lie apart",
            got=f"strides {list(pool.stride())}", mend="Lay the pool out as [num_slots, H, V, K]",
        )  # fmt: skip
    if packed.stride(-1) != 1 and packed.shape[-1] != 1:
        raise RuleBroken(
            op, name["packed"], expected="contiguous rows", got=f"strides {list(packed.stride())}",
            mend=f"Call {name['packed']}.contiguous() first",
        )  # fmt: skip
    n = call.n
    width = sizes["width"]
    heads, left = _key_heads(width, call, H, V, K)
    if heads <= 0 or left or H % heads:
        form = "H*V + 2*G*K" if not delta else f"HK*K + {n}*HK*K + {n}*H*V"
        raise ShapeMismatch(
            op, name["packed"],
            expected=f"[B, {'T, ' if several else ''}{form}] with H = {H}, V = {V}, K = {K}, and "
            f"{'HK' if delta else 'G'} a divisor of H", got=f"width {width}",
            mend="Concatenate the sections of all heads one after the other",
        )  # fmt: skip
    key = family in ("kda", "gdn2")
    beta = {"gdn2": f"{lead} H K", "gdp": f"{lead} {n} H"}.get(family, f"{lead} H")
    for argument, shape in (
        ("gate", f"{lead} H K" if key else f"{lead} H"), ("beta", beta), ("w", f"{lead} H V"),
        ("A", "H"), ("A_log", "H"), ("dt_bias", "H K" if key else "H"), ("z", f"{lead} H V"),
    ):  # fmt: skip
        need(op, name[argument], x[argument], shape, sizes, FLOATS, device)
        last = x[argument]
        if last is not None and shape[-1] in "KV" and last.stride(-1) != 1 and last.shape[-1] != 1:
            raise RuleBroken(
                op, name[argument], expected="contiguous rows",
                got=f"strides {list(last.stride())}",
                mend=f"Call {name[argument]}.contiguous() first",
            )  # fmt: skip
    if x["D"] is not None:
        need(op, "D", x["D"], "H" if x["D"].dim() == 1 else "H V", sizes, FLOATS, device)
    need(op, "state_indices", x["state_indices"], "B", sizes, INTS, device)
    need(op, "has_initial_state", x["has_initial_state"], "B", sizes, (torch.bool,), device)
    need(op, "out", x["out"], f"{lead} H V", sizes, (io,), device)
    if x["states"] is not None and not several:
        raise RuleBroken(
            op, "states", expected=f"{name['packed']} [B, T, width] beside it",
            got=f"shape {list(packed.shape)}", mend="Give rows and projections their token axis",
        )  # fmt: skip
    need(op, "states", x["states"], "B T H V K", sizes, states, device)
    for argument, shape in (("out", f"{lead} H V"), ("states", "B T H V K")):
        buffer = x[argument]
        if buffer is not None and not buffer.is_contiguous():
            raise RuleBroken(
                op, argument, expected="a contiguous buffer",
                got=f"strides {list(buffer.stride())}",
                mend=f"Allocate it as torch.empty({', '.join(shape.split())})",
            )  # fmt: skip


def _key_heads(width: int, call: Any, H: int, V: int, K: int) -> tuple[int, int]:
    """Heads of K in a row of this width, and what is left of it."""
    per = 2 * K if call.family == "mamba2" else (1 + call.n) * K
    rest = width - call.n * H * V
    return rest // per, rest % per  # divmod is none of symbolic sizes


def _place(x: Tensor) -> Any:
    """A GPU's number, or another device."""
    number = x.get_device()
    return number if number >= 0 else x.device


def _fake(*args: Any) -> None:
    _check(*args)


def _run(*args: Any) -> None:
    call = options_of(args[-1])
    tensors = args[:-1]
    # A call like an earlier one needs no second look.
    key = (
        args[-1],
        *(None if x is None else (x.shape, x.stride(), x.dtype, _place(x)) for x in tensors),
    )
    if key not in _SEEN:
        _check(*args)
        if len(_SEEN) >= SEEN:
            _SEEN.clear()
        _SEEN.add(key)
    x = dict(zip(ARGS, tensors))
    pool = x["state_cache"]
    check_slots(call.op, x["state_indices"], pool.shape[0])
    if not wants_kernels(call.op, call.impl, x["packed"]):
        H, V, K = pool.shape[1:]
        heads, _ = _key_heads(x["packed"].shape[-1], call, H, V, K)
        registry.load(REFERENCE)(x, call, *_sections(x["packed"], call, heads, H, V, K))
        return
    for argument in PARAMETERS:
        if x[argument] is not None and not x[argument].is_contiguous():
            x[argument] = x[argument].contiguous()
    given, named = _arguments(x, call)
    registry.load(f"{KERNEL}:decode")(*given, **named)


def _arguments(x: dict[str, Any], call: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the kernel's launch takes."""
    pool, mamba2 = x["state_cache"], call.family == "mamba2"
    H, V, K = pool.shape[1:]
    heads, _ = _key_heads(x["packed"].shape[-1], call, H, V, K)
    given = (
        registry.family(call.family).traits, x["packed"], x["gate"], x["beta"], pool,
        x["state_indices"], x["out"],
    )  # fmt: skip
    return given, {
        "w": x["w"], "a": x["A"], "d": x["D"], "z": x["z"], "a_log": x["A_log"],
        "dt_bias": x["dt_bias"], "has_initial_state": x["has_initial_state"],
        "states": x["states"], "heads": heads,
        "substeps": call.n,
        "scale": call.scale if call.scale is not None else 1.0 if mamba2 else K**-0.5,
        "gate": call.gate, "lower": call.lower, "double": call.double, "guard": call.guard,
        "dt_softplus": call.dt_softplus, "dt_min": call.dt_min, "dt_max": call.dt_max,
    }  # fmt: skip


def _sections(
    packed: Tensor, call: Any, heads: int, H: int, V: int, K: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q [..., heads, K], keys [..., n, heads, K] and values [..., n, H, V], views of the rows."""
    n = call.n
    if call.family == "mamba2":
        v, k, q = packed.split([H * V, heads * K, heads * K], dim=-1)
    else:
        q, k, v = packed.split([heads * K, n * heads * K, n * H * V], dim=-1)
    keys = k.unflatten(-1, (n, heads, K))
    return q.unflatten(-1, (heads, K)), keys, v.unflatten(-1, (n, H, V))


_decode = register_in_place(
    "recurrent_decode",
    "Tensor packed, Tensor gate, Tensor? beta, Tensor? w, Tensor? A, Tensor? A_log, "
    "Tensor? dt_bias, Tensor? D, Tensor? z, Tensor(a!) state_cache, Tensor state_indices, "
    "Tensor? has_initial_state, Tensor(b!) out, Tensor(c!)? states, str options",
    _run,
    _fake,
    writes=(9, 12, 13),
)


# Public functions ---------------------------------------------------------------------------------


def _options(op: str, family: str, impl: Any, **rest: Any) -> str:
    """The options' text; of options that were seen before, at once."""
    if not torch.compiler.is_compiling():
        try:
            return _known_options(op, family, impl, **rest)
        except TypeError:  # unhashable: the checks will say so
            pass
    return _checked_options(op, family, impl, **rest)


def _checked_options(
    op: str, family: str, impl: Any, *, n: int = 1, scale: Any = None, gate: Any = "softplus",
    lower: Any = -5.0, double: Any = False, guard: Any = False, dt_softplus: Any = True,
    dt_min: Any = 0.0, dt_max: Any = None,
) -> str:  # fmt: skip
    if gate not in ("bounded", "softplus"):
        gate_name = getattr(gate, "value", gate)
        if gate_name not in ("bounded", "softplus"):
            raise InvalidOption(
                op, "gate_transform", expected="'bounded' or 'softplus'", got=repr(gate),
                mend="Take one of the two",
            )  # fmt: skip
        gate = gate_name
    lower = number(op, "lower_bound", lower)
    if lower is not None and lower > 0:
        raise InvalidOption(
            op, "lower_bound", expected="a number <= 0", got=repr(lower), mend="Flip its sign"
        )
    low, high = number(op, "dt_min", dt_min), number(op, "dt_max", dt_max, none=True)
    if low is not None and low < 0:
        raise InvalidOption(
            op, "dt_min", expected="a finite number >= 0", got=repr(low), mend="Leave it 0"
        )
    if high is not None and low is not None and high < low:
        raise InvalidOption(
            op, "dt_max", expected=f"at least dt_min = {low}", got=repr(high), mend="Swap the two"
        )
    return options_text(
        ("op", op), ("family", family), ("impl", serve(op, impl)), ("n", n),
        ("scale", number(op, "scale", scale, none=True)),
        ("gate", str(getattr(gate, "value", gate))), ("lower", lower),
        ("double", boolean(op, "allow_neg_eigval", double)),
        ("guard", boolean(op, "beta_guard", guard)),
        ("dt_softplus", boolean(op, "dt_softplus", dt_softplus)), ("dt_min", low), ("dt_max", high),
    )  # fmt: skip


_known_options = lru_cache(maxsize=1024, typed=True)(_checked_options)


def _output(packed: Tensor, pool: Tensor) -> Tensor:
    """Room for the outputs: [1, B, H, V], or of several tokens [B, T, H, V]."""
    lead = packed.shape[:2] if packed.dim() == 3 else (1, packed.shape[0])
    return packed.new_empty((*lead, *pool.shape[1:3]))


def _call(
    op: str, family: str, names: str, required: int, packed: Any, gate: Any, beta: Any, w: Any,
    A: Any, A_log: Any, dt_bias: Any, D: Any, z: Any, pool: Any, index: Any, has: Any, out: Any,
    states: Any, options: str,
) -> Tensor:  # fmt: skip
    """Allocate the output unless it is given, and run."""
    given = [packed, gate, beta, w, A, A_log, dt_bias, D, z, pool, index, has, out, states]
    key = key_of(options, given)
    step = None if key is None else _STEPS.get(key)
    if step is not None:
        if out is None:
            given[12] = _output(packed, pool)
        if step.run(given):
            return given[12]
        given[12] = out
    shown = NAMES.get(family, DELTA_NAMES)
    by_name = {shown.get(key, key): x for key, x in zip(ARGS, given)}
    named = [by_name[name] for name in names.split()]
    only_tensors(op, names, named, required)
    buffers = {"out": out, "states": states}
    if out is None:
        if pool.dim() != 4:
            need(op, "state_cache", pool, "num_slots H V K", {}, FLOATS)
        out = _output(packed, pool)
    if not torch.compiler.is_compiling():
        for buffer, y in buffers.items():
            for name, x in zip(names.split(), named) if y is not None else ():
                if x is not None and x is not y:
                    apart(op, buffer, y, name, x)
    own = given[12] is None
    given[12] = out
    _decode(*given, options)
    if key is not None:
        _remember(key, options, given, own)
    return out


_STEPS = Steps()


def _remember(key: Any, options: str, given: list[Any], own: bool) -> None:
    """Keep the launch of a call that went well, for the next one like it. own: of the output."""
    call, x = options_of(options), dict(zip(ARGS, given))
    packed, pool = x["packed"], x["state_cache"]
    if not packed.shape[0] or not wants_kernels(call.op, call.impl, packed):
        return
    if any(x[n] is not None and not x[n].is_contiguous() for n in PARAMETERS):
        return
    args, named = _arguments(x, call)
    launch = registry.load(f"{KERNEL}:decode")(*args, **named, bind_only=True)
    at = {name: i for i, name in enumerate(ARGS) if x[name] is not None}
    places = registry.load(f"{KERNEL}:decode_tensors")(*(at.get(name) for name in ARGS))
    # What is new overlaps nothing.
    buffers = [at[name] for name in ("states", *(() if own else ("out",))) if name in at]
    others = [i for i in at.values() if not own or i != at["out"]]
    apart = [(i, j) for i in buffers for j in others if i != j]
    writes = [at[name] for name in ("state_cache", "states", *(() if own else ("out",)))
              if name in at]  # fmt: skip
    step = Step(
        call.op, launch.bound, places, launch.sizes, given, writes, apart, at["state_indices"],
        pool.shape[0],
    )  # fmt: skip
    _STEPS.keep(key, step)


def recurrent_gdn_decode(
    packed_qkv: Tensor,
    raw_gate: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state_cache: Tensor,
    state_indices: Tensor,
    *,
    has_initial_state: Tensor | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
    states: Tensor | None = None,
    allow_neg_eigval: bool = False,
    impl: Impl | str = "auto",
) -> Tensor:
    """One token of GDN: g = -exp(A_log) softplus(raw_gate + dt_bias), beta = sigmoid(raw_beta).

    Args:
        packed_qkv: [B, HK*K + HK*K + H*V], the sections [Q | K | V], head rows contiguous; HK
            divides H. fp16, bf16 or fp32 (reference: fp64, too). Several tokens: [B, T, ...].
        raw_gate, raw_beta: [1, B, H], any float dtype. Several tokens, of this and every other
            [1, B, ...]: [B, T, ...].
        A_log, dt_bias: [H].
        state_cache: Pool [num_slots, H, V, K], K at most 256, advanced in place.
        state_indices: [B] slots; not positive means padding.
        has_initial_state: [B] bool; False starts from zero.
        scale: Query scale; None means K ** -0.5.
        out: Contiguous [1, B, H, V] to write to, of packed_qkv's dtype; overlaps no input.
        states: Of several tokens: contiguous [B, T, H, V, K], fp32, bf16 or fp16, to write the
            state after every token to. The pool is only read then; rows of padding are not written.
        allow_neg_eigval: beta = 2 sigmoid(raw_beta).
        impl: "auto" (fused on CUDA, else reference), "fused" or "reference".

    Returns:
        The output [1, B, H, V]; `out` itself where given.

    Raises:
        ShapeMismatch, DtypeMismatch, DeviceMismatch, RuleBroken, InvalidOption: A broken rule.
        NotSupported: impl="fused" cannot serve. NotDifferentiable: An input requires a gradient.
    """
    op = "recurrent_gdn_decode"
    options = _options(op, "gdn", impl, scale=scale, double=allow_neg_eigval)
    names = "packed_qkv raw_gate raw_beta A_log dt_bias state_cache state_indices " \
        "has_initial_state out states"  # fmt: skip
    return _call(
        op, "gdn", names, 7, packed_qkv, raw_gate, raw_beta, None, None, A_log, dt_bias, None, None,
        state_cache, state_indices, has_initial_state, out, states, options,
    )  # fmt: skip


def recurrent_kda_decode(
    packed_qkv: Tensor,
    raw_gate: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state_cache: Tensor,
    state_indices: Tensor,
    *,
    has_initial_state: Tensor | None = None,
    gate_transform: str = "bounded",
    lower_bound: float = -5.0,
    scale: float | None = None,
    out: Tensor | None = None,
    states: Tensor | None = None,
    allow_neg_eigval: bool = False,
    impl: Impl | str = "auto",
) -> Tensor:
    """One token of KDA: a decay per key channel.

    Args:
        packed_qkv: [B, H * (2 K + V)], the sections [Q | K | V], head rows contiguous. Fewer heads
            of q and k are served as in `recurrent_gdn_decode`.
        raw_gate: [1, B, H, K], any float dtype.
        raw_beta: [1, B, H].
        A_log: [H]. dt_bias: [H, K].
        state_cache, state_indices, has_initial_state: See `recurrent_gdn_decode`.
        gate_transform: "bounded", g = lower_bound sigmoid(exp(A_log) (raw_gate + dt_bias)), or
            "softplus", g = -exp(A_log) softplus(raw_gate + dt_bias).
        lower_bound: Finite, not positive; used by "bounded" alone.
        scale, out, states, allow_neg_eigval, impl: See `recurrent_gdn_decode`.

    Returns:
        The output [1, B, H, V]; `out` itself where given.

    Raises:
        As `recurrent_gdn_decode`.
    """
    op = "recurrent_kda_decode"
    options = _options(
        op, "kda", impl, scale=scale, gate=gate_transform, lower=lower_bound,
        double=allow_neg_eigval,
    )  # fmt: skip
    names = "packed_qkv raw_gate raw_beta A_log dt_bias state_cache state_indices " \
        "has_initial_state out states"  # fmt: skip
    return _call(
        op, "kda", names, 7, packed_qkv, raw_gate, raw_beta, None, None, A_log, dt_bias, None, None,
        state_cache, state_indices, has_initial_state, out, states, options,
    )  # fmt: skip


def recurrent_gdn2_decode(
    packed_qkv: Tensor,
    raw_gate: Tensor,
    raw_beta: Tensor,
    w: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state_cache: Tensor,
    state_indices: Tensor,
    *,
    has_initial_state: Tensor | None = None,
    gate_transform: str = "bounded",
    lower_bound: float = -5.0,
    scale: float | None = None,
    out: Tensor | None = None,
    states: Tensor | None = None,
    allow_neg_eigval: bool = False,
    beta_guard: bool = False,
    impl: Impl | str = "auto",
) -> Tensor:
    """One token of GDN-2: KDA with an erase strength per key channel, and a write strength.

    Args:
        packed_qkv, raw_gate, A_log, dt_bias: See `recurrent_kda_decode`.
        raw_beta: Erase logits [1, B, H, K].
        w: Write strength [1, B, H, V], used as it is.
        state_cache, state_indices, has_initial_state: See `recurrent_gdn_decode`.
        gate_transform, lower_bound: See `recurrent_kda_decode`.
        scale, out, states, allow_neg_eigval, impl: See `recurrent_gdn_decode`.
        beta_guard: Pull rows of erase strengths that would expand the state to their mean.

    Returns:
        The output [1, B, H, V]; `out` itself where given.

    Raises:
        As `recurrent_gdn_decode`.
    """
    op = "recurrent_gdn2_decode"
    options = _options(
        op, "gdn2", impl, scale=scale, gate=gate_transform, lower=lower_bound,
        double=allow_neg_eigval, guard=beta_guard,
    )  # fmt: skip
    names = "packed_qkv raw_gate raw_beta w A_log dt_bias state_cache state_indices " \
        "has_initial_state out states"  # fmt: skip
    return _call(
        op, "gdn2", names, 8, packed_qkv, raw_gate, raw_beta, w, None, A_log, dt_bias, None,
        None, state_cache, state_indices, has_initial_state, out, states, options,
    )  # fmt: skip


def recurrent_gdp_decode(
    packed_qkv: Tensor,
    raw_gate: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state_cache: Tensor,
    state_indices: Tensor,
    *,
    has_initial_state: Tensor | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
    states: Tensor | None = None,
    allow_neg_eigval: bool = False,
    impl: Impl | str = "auto",
) -> Tensor:
    """One token of GDP: n Householder updates under one decay.

    Args:
        packed_qkv: [B, HK*K + n*HK*K + n*H*V]: Q, then the keys of update 0, 1, ..., then the
            values likewise.
        raw_beta: [1, B, n, H]; it gives n.
        raw_gate, A_log, dt_bias, state_cache, state_indices, has_initial_state, scale, out,
            states, allow_neg_eigval, impl: See `recurrent_gdn_decode`.

    Returns:
        The output [1, B, H, V]; `out` itself where given.

    Raises:
        As `recurrent_gdn_decode`.
    """
    op = "recurrent_gdp_decode"
    n = 1
    if isinstance(raw_beta, torch.Tensor):
        if raw_beta.dim() != 4 or raw_beta.shape[2] < 1:
            raise ShapeMismatch(
                op, "raw_beta", expected="[1, B, n, H] with n >= 1",
                got=f"shape {list(raw_beta.shape)}", mend="View the tensor in that shape",
            )  # fmt: skip
        n = index(raw_beta.shape[2])
    options = _options(op, "gdp", impl, n=n, scale=scale, double=allow_neg_eigval)
    names = "packed_qkv raw_gate raw_beta A_log dt_bias state_cache state_indices " \
        "has_initial_state out states"  # fmt: skip
    return _call(
        op, "gdp", names, 7, packed_qkv, raw_gate, raw_beta, None, None, A_log, dt_bias, None, None,
        state_cache, state_indices, has_initial_state, out, states, options,
    )  # fmt: skip


def recurrent_mamba2_decode(
    packed_xbc: Tensor,
    dt: Tensor,
    A: Tensor,
    dt_bias: Tensor | None,
    state_cache: Tensor,
    state_indices: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    dt_softplus: bool = True,
    dt_min: float = 0.0,
    dt_max: float | None = None,
    out: Tensor | None = None,
    states: Tensor | None = None,
    impl: Impl | str = "auto",
) -> Tensor:
    """One token of Mamba-2: S = exp(A dt') S + dt' x B^T, y = S C + D x, y *= z sigmoid(z).

    Args:
        packed_xbc: [B, H*P + G*N + G*N], the sections [x | B | C]; G divides H. There is no norm.
        dt: Raw steps [1, B, H]; dt' = clamp(softplus(dt + dt_bias), dt_min, dt_max).
        A: [H], negative. dt_bias: [H] or None.
        state_cache: Pool [num_slots, H, P, N].
        state_indices, has_initial_state, out, states, impl: See `recurrent_gdn_decode`.
        D: Skip from x, [H] or [H, P]. z: Output gate [1, B, H, P].
        dt_softplus, dt_min, dt_max: The step's map; dt_max None means unbounded.

    Returns:
        The output [1, B, H, P]; `out` itself where given.

    Raises:
        As `recurrent_gdn_decode`.
    """
    op = "recurrent_mamba2_decode"
    options = _options(
        op, "mamba2", impl, dt_softplus=dt_softplus, dt_min=dt_min, dt_max=dt_max
    )  # fmt: skip
    names = "packed_xbc dt A state_cache state_indices dt_bias D z has_initial_state out states"
    return _call(
        op, "mamba2", names, 5, packed_xbc, dt, None, None, A, None, dt_bias, D, z, state_cache,
        state_indices, has_initial_state, out, states, options,
    )  # fmt: skip
