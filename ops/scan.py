"""The token scan as registered operators: the fused form of `recurrent_*`.

Three of them: one returns outputs and final states, one advances a pool, and one writes the state
after every token, fused or not, and only reads a pool. All take batches [B, T, ...] by their
strides, are for inference, and expect checked arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._C import _AutoDispatchBelowAutograd as below_autograd

from lagraph import registry
from lagraph.errors import NotDifferentiable
from lagraph.ops.argument import needs_gradient, plain
from lagraph.ops.mode import busy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["DTYPES", "KEY_DIM", "every_state", "scan"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KEY_DIM = 256  # the largest K

_TOKENS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor? beta, Tensor? w, Tensor? z, Tensor? a, "
    "Tensor? d, Tensor? dt_bias, Tensor? cu_seqlens"
)
_OPTIONS = "str family, float? scale, bool dt_softplus, float dt_min, float? dt_max"


def scan(
    family: str,
    tokens: Mapping[str, Any],
    options: Mapping[str, Any],
    cu_seqlens: torch.Tensor | None,
    state: torch.Tensor | None,
    slots: torch.Tensor | None,
    fresh: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [B, T, H, V], and the final states in fp32, or under slots the pool.

    tokens by the operators' names; of options, those that the family has.
    """
    args, rest = _prepared(family, tokens, options, cu_seqlens)
    if slots is not None and state is not None:
        return _call("token_scan_inplace", *args, state, slots, fresh, *rest), state
    dense = None if state is None else state.contiguous()
    out, last = _call("token_scan", *args, dense, *rest)
    return out, last


def every_state(
    family: str,
    tokens: Mapping[str, Any],
    options: Mapping[str, Any],
    cu_seqlens: torch.Tensor | None,
    state: torch.Tensor | None,
    slots: torch.Tensor | None,
    fresh: torch.Tensor | None,
    states: torch.Tensor,
    fused: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs, and final states (empty under slots); writes `states` [B, T, H, V, K]."""
    args, rest = _prepared(family, tokens, options, cu_seqlens)
    if state is not None and slots is None:
        state = state.contiguous()
    given = (*args, state, slots, fresh, states, *rest, fused)
    out, last = _call("token_states", *given)
    return out, last


def _prepared(
    family: str, tokens: Mapping[str, Any], options: Mapping[str, Any],
    cu_seqlens: torch.Tensor | None,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:  # fmt: skip
    """The operators' tokens and options."""
    x = dict(tokens)
    if family == "mamba2":
        x = {"q": x["C"], "k": x["B"], "v": x["x"], "g": x["dt"], "z": x.get("z")}
    steps = options.get("num_householder", 1)
    for name in ("k", "v", "beta"):  # expanded: n rows for each token
        if steps > 1 and x[name].shape[1] != x["q"].shape[1]:
            x[name] = x[name].unflatten(1, (-1, steps))
    x = {name: t if t is None or t.stride(-1) == 1 else t.contiguous() for name, t in x.items()}
    args = (
        *(x.get(name) for name in ("q", "k", "v", "g", "beta", "w", "z")),
        options.get("A"), options.get("D"), options.get("dt_bias"), cu_seqlens,
    )  # fmt: skip
    rest = (
        family, options.get("scale"), options.get("dt_softplus", True), options.get("dt_min", 0.0),
        options.get("dt_max"),
    )  # fmt: skip
    return args, rest


def _launch(
    args: tuple[Any, ...], state: Any, slots: Any, fresh: Any, final: Any, rest: tuple[Any, ...],
    states: Any = None,
) -> torch.Tensor:  # fmt: skip
    q, k, v, g, beta, w, z, a, d, dt_bias, cu = args
    family, scale, softplus, dt_min, dt_max = rest
    run = registry.load("lagraph.engines.triton.recurrent:recurrent_scan")
    out: torch.Tensor = run(
        registry.family(family).traits, q, k, v, g, beta, cu, w=w, a=a, d=d, z=z, dt_bias=dt_bias,
        initial_state=state, state_indices=slots, has_initial_state=fresh, final_state=final,
        states=states, scale=scale, dt_softplus=softplus, dt_min=dt_min, dt_max=dt_max,
    )  # fmt: skip
    return out


def _run(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, state, rest = args[:11], args[11], args[12:]
    final = _final(tokens)
    return _launch(tokens, state, None, None, final, rest), final


def _run_inplace(*args: Any) -> torch.Tensor:
    tokens, (pool, slots, fresh), rest = args[:11], args[11:14], args[14:]
    out = _launch(tokens, pool, slots, fresh, pool, rest)
    if not pool.is_inference():
        torch.autograd.graph.increment_version(pool)
    return out


def _run_states(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, (state, slots, fresh, states) = args[:11], args[11:15]
    rest, fused = args[15:-1], args[-1]
    last = _last(tokens, slots)
    if fused:
        final = last if slots is None else None
        out = _launch(tokens, state, slots, fresh, final, rest, states)
    else:
        family, *numbers = rest
        x = dict(zip(("q", "k", "v", "g", "beta", "w", "z"), tokens))
        names = ("A", "D", "dt_bias", "scale", "dt_softplus", "dt_min", "dt_max")
        options = dict(zip(names, (*tokens[7:10], *numbers)))
        run = registry.load("lagraph.engines.eager.recurrent:scan")
        out = run(family, x, options, tokens[10], state, slots, fresh, last, states)
    if not states.is_inference():
        torch.autograd.graph.increment_version(states)
    return out, last


def _final(tokens: tuple[Any, ...]) -> torch.Tensor:
    """Room for the final states."""
    q, v, g, cu = tokens[0], tokens[2], tokens[3], tokens[10]
    count = q.shape[0] if cu is None else cu.shape[0] - 1
    shape = (count, g.shape[2], v.shape[-1], q.shape[-1])
    return torch.empty(shape, dtype=_wide(q), device=q.device)


def _wide(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype is torch.float64 else torch.float32


def _last(tokens: tuple[Any, ...], slots: Any) -> torch.Tensor:
    """Room for the final states; none under slots."""
    if slots is None:
        return _final(tokens)
    return torch.empty(0, dtype=_wide(tokens[0]), device=tokens[0].device)


def _output(*args: Any) -> torch.Tensor:
    q, v, g = args[0], args[2], args[3]
    return torch.empty((*g.shape[:3], v.shape[-1]), dtype=q.dtype, device=q.device)


def _fake(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _output(*args), _final(args[:11])


def _fake_states(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _output(*args), _last(args[:11], args[12])


_KERNELS: dict[str, Callable[..., Any]] = {}


def _call(name: str, *args: Any) -> Any:
    """Run an operator; plain eager calls spare themselves the crossing of its boundary."""
    if torch.compiler.is_compiling() or not plain(args) or busy():
        return getattr(torch.ops.lagraph, name)(*args)
    _refuse_gradient(name, args)
    return _KERNELS[name](*args)


def _refuse_gradient(name: str, args: tuple[Any, ...]) -> None:
    if needs_gradient(args):
        raise NotDifferentiable(
            f"{name}: for inference only. Call it under torch.no_grad(), or take a chunk_* "
            f"function."
        )


def _inference(name: str) -> Callable[..., Any]:
    """The kernel under the Autograd key."""

    def run(*args: Any) -> Any:
        _refuse_gradient(name, args)
        with below_autograd():
            return getattr(torch.ops.lagraph, name)(*args)

    return run


def _refuse_vmap(info: Any, in_dims: Any, *args: Any) -> Any:
    raise NotDifferentiable(
        "token_scan: vmap is not supported. Put the axis into B, or pack it along T."
    )


_LIB = torch.library.Library("lagraph", "FRAGMENT")
for _name, _state, _options, _returns, _kernel, _shapes in (
    ("token_scan", "Tensor? initial_state", _OPTIONS, "(Tensor, Tensor)", _run, _fake),
    ("token_scan_inplace", "Tensor(a!) pool, Tensor state_indices, Tensor? has_initial_state",
     _OPTIONS, "Tensor", _run_inplace, _output),
    ("token_states",
     "Tensor? initial_state, Tensor? state_indices, Tensor? has_initial_state, Tensor(a!) states",
     f"{_OPTIONS}, bool fused", "(Tensor, Tensor)", _run_states, _fake_states),
):  # fmt: skip
    _KERNELS[_name] = _kernel
    _LIB.define(f"{_name}({_TOKENS}, {_state}, {_options}) -> {_returns}")
    _LIB.impl(_name, _kernel, "CompositeExplicitAutograd")
    _LIB.impl(_name, _inference(_name), "Autograd")
    torch.library.register_fake(f"lagraph::{_name}", _shapes, lib=_LIB)
    torch.library.register_vmap(f"lagraph::{_name}", _refuse_vmap, lib=_LIB)
