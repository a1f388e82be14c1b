"""FLA's functions on our operators: `from fla.ops.kda import chunk_kda` becomes
`from lagraph.integrations.fla import chunk_kda`.

Names, order and defaults are those of flash-linear-attention 0.6: tokens [B, T, H, D] or packed
[1, T, H, D] with cu_seqlens, log decays, None for a final state that nobody asked for. q, k and v
share bf16, fp16, fp32 or fp64 (FLA's chunk functions refuse fp32); all of it runs on a CPU, too.
Chunk functions are differentiable once; fused_recurrent ones on a CPU only (FLA's never).

States are [N, H, K, V] there and [N, H, V, K] here. A final state comes back as a transposed view,
which costs nothing; handed in again, it costs nothing either. A contiguous initial state
[N, H, K, V] is copied once. With state_v_first=True states pass as they are.

Taken without effect, since nothing here needs them: cu_seqlens_cpu, chunk_indices, chunk_size,
disable_recompute, use_graph, max_num_seqs. Refused: cp_context, return_intermediate_states,
head_first, transpose_state_layout, gv.

Raises: ShapeMismatch, DtypeMismatch, DeviceMismatch, RuleBroken for a bad argument; InvalidOption
for one that is unknown, or gone from FLA; NotSupported for one that FLA serves and this module does
not; NoEngine or PlanNotOffered on CUDA where no GPU kernels serve the call.
"""

from __future__ import annotations

from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

import lagraph
from lagraph import registry
from lagraph.errors import DtypeMismatch, InvalidOption, NotSupported, RuleBroken, ShapeMismatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = [
    "chunk_gated_delta_product",
    "chunk_gated_delta_rule",
    "chunk_gdn2",
    "chunk_kda",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_kda",
]

# Loaded now: a compiler that traces a call could not follow the import.
offsets = registry.load("lagraph.ops.dense:offsets")
engine_of = registry.load("lagraph.ops.kinds:engine_of")
pin_of = registry.load("lagraph.ops.kinds:pin_of")

Result = tuple["Tensor", "Tensor | None"]
Function = TypeVar("Function", bound="Callable[..., Any]")

# Arguments that FLA had, or serves elsewhere, and what to do instead.
GONE = {
    "head_first": "Inputs are [B, T, H, D]: drop it, and call x.transpose(1, 2) on head-first ones",
    "transpose_state_layout": "It is called state_v_first now",
}


# Arguments that are tensors, where they are given.
TENSORS = frozenset({"q", "k", "v", "g", "gk", "beta", "b", "w", "initial_state", "cu_seqlens",
                     "A_log", "dt_bias"})  # fmt: skip


def _named(function: Function) -> Function:
    """Say what to do about an unknown argument; Python's own TypeError would only name it."""
    order = tuple(signature(function).parameters)
    known = frozenset(order)

    @wraps(function)
    def _call(*args: Any, **given: Any) -> Any:
        for name in given:
            if name not in known:
                _refuse(function.__name__, name, given[name], known)
        for name, x in (*zip(order, args), *given.items()):
            if name in TENSORS and x is not None and not isinstance(x, torch.Tensor):
                raise DtypeMismatch(
                    function.__name__, name, expected="a torch.Tensor", got=type(x).__name__,
                    mend=f"Pass torch.as_tensor({name})",
                )  # fmt: skip
        return function(*args, **{n: x for n, x in given.items() if n not in GONE})

    def _refuse(op: str, name: str, value: Any, known: frozenset[str]) -> None:
        if name == "head_first" and not value:
            return  # the layout that there is
        near = get_close_matches(name, known, 1)
        raise InvalidOption(
            op, name, expected="an argument of this function", got=repr(value)[:40],
            mend=GONE.get(name) or (f"Did you mean {near[0]}" if near else "Drop it"),
        )  # fmt: skip

    return cast("Function", _call)


# What all of them do ------------------------------------------------------------------------------


def _check(op: str, tokens: dict[str, tuple[Tensor, int]], cu: Tensor | None, steps: int) -> None:
    """Ranks, and that B and T agree: packed rows would not show it. tokens: (x, its rank)."""
    q, _ = tokens["q"]
    for name, (x, rank) in tokens.items():
        if x is None:
            raise RuleBroken(op, name, expected="a torch.Tensor", got="None", mend=f"Pass {name}")
        n = steps if name in ("k", "v", "beta") else 1
        wanted = [q.shape[0], q.shape[1] * n] if q.dim() == 4 else ["B", "T"]
        if x.dim() != rank or list(x.shape[:2]) != wanted:
            raise ShapeMismatch(
                op, name, expected=f"{rank} axes, the first two {wanted}", got=str(list(x.shape)),
                because="q gives [B, T]" if q.dim() == 4 else "",
                mend=f"Give {name} the shape [B, T{' * n' if n > 1 else ''}, H"
                f"{', D' if rank == 4 else ''}]",
            )  # fmt: skip
    if cu is not None and q.shape[0] != 1:
        raise RuleBroken(
            op, "cu_seqlens", expected="packed tokens [1, T, H, D]", got=f"B = {q.shape[0]}",
            mend="Flatten the batch: x.flatten(0, 1)[None]",
        )  # fmt: skip


def _decline(op: str, cp_context: object, intermediate: bool = False) -> None:
    """What FLA serves and this module does not."""
    if cp_context is not None:
        raise NotSupported(
            f"{op}: cp_context is FLA's own object. Pass cu_seqlens, or use "
            f"lagraph.ops.context_parallel for sequences that span ranks."
        )
    if intermediate:
        raise NotSupported(
            f"{op}: return_intermediate_states: not here. Call the packed operator of lagraph.ops "
            f"with checkpoint_every_n_tokens=64."
        )


def _turn(op: str, state: Tensor | None, heads: int, K: int, V: int, v_first: bool) -> Any:
    """An initial state as [N, H, V, K]: copied where it is a contiguous [N, H, K, V]."""
    if state is None:
        return None
    wanted = (heads, V, K) if v_first else (heads, K, V)
    if state.dim() != 4 or tuple(state.shape[1:]) != wanted:
        raise ShapeMismatch(
            op, "initial_state", expected=f"[N, {', '.join(map(str, wanted))}]",
            got=str(list(state.shape)), mend=f"Pass state_v_first={not v_first}, or turn it: .mT",
        )  # fmt: skip
    return (state if v_first else state.mT).contiguous()


def _back(state: Tensor, v_first: bool, wanted: bool) -> Tensor | None:
    """A final state in FLA's layout, a view."""
    return (state if v_first else state.mT) if wanted else None


def _bias(dt_bias: Tensor | None, heads: int, K: int) -> Tensor | None:
    """FLA keeps KDA's dt_bias flat [H * K]."""
    return dt_bias if dt_bias is None else dt_bias.reshape(heads, K)


def _need_rate(op: str, A_log: Tensor | None) -> Tensor:
    if A_log is None:
        raise RuleBroken(
            op, "A_log", expected="[H] with use_gate_in_kernel=True", got="None", mend="Pass A_log"
        )
    return A_log


def _channel_gate(
    op: str, g: Tensor, in_kernel: bool, A_log: Tensor | None, dt_bias: Tensor | None,
    lower_bound: float | None,
) -> tuple[Tensor, dict[str, Any]]:  # fmt: skip
    """g [B, T, H, K] and the operator's gate options.

    Bounded gates are transformed in the kernel; the unbounded softplus before it.
    """
    if not in_kernel:
        return g, {}
    heads, K = g.shape[2:]
    bias = _bias(dt_bias, heads, K)
    if lower_bound is not None:
        bounded = {"safe_gate": True, "gate_lower_bound": float(lower_bound), "a_log": A_log}
        return g, bounded | {"dt_bias": bias}
    rate = _need_rate(op, A_log)
    bias = rate.new_zeros(heads, K) if bias is None else bias
    return lagraph.ops.gate_transform(g, rate, bias, kind="softplus"), {}


def _packed(
    family: str, operator: Callable[..., Any], tokens: dict[str, Tensor], cu: Tensor | None,
    state: Tensor | None, v_first: bool, final: bool, options: dict[str, Any],
) -> Result:  # fmt: skip
    """One call of a packed operator on batches [B, T, ...]."""
    q = tokens["q"]
    batch, length = q.shape[:2]
    if cu is None:
        cu = offsets(batch, length, q)
    for name in ("beta", "w"):  # the operators want fp32, or the tokens' dtype
        x = tokens.get(name)
        if x is not None and x.dtype not in (q.dtype, torch.float32):
            tokens[name] = x.float()
    if "w" in tokens:
        tokens["w"] = tokens["w"].to(q.dtype)
    o, last = operator(
        **{name: x.flatten(0, 1) for name, x in tokens.items()}, cu_seqlens=cu,
        initial_state=state, output_final_state=final,
        plan_name=pin_of(family, engine_of(operator.__name__, "auto", q)), **options,
    )  # fmt: skip
    return o.unflatten(0, (batch, length)), _back(last, v_first, final)


def _sigmoid(op: str, beta: Tensor, sigmoid: bool, double: bool) -> Tensor:
    """beta after its activation, in fp32 or wider."""
    if double and not sigmoid:
        raise RuleBroken(
            op, "allow_neg_eigval", expected="use_beta_sigmoid_in_kernel=True beside it",
            got="False", mend="Set both, or double beta yourself",
        )  # fmt: skip
    if not sigmoid:
        return beta
    beta = beta if beta.dtype is torch.float64 else beta.float()
    return beta.sigmoid() * (2.0 if double else 1.0)


def _unit(x: Tensor) -> Tensor:
    """x / |x| in fp32, as the kernels have it."""
    x = x.float() if x.dtype is not torch.float64 else x
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _in_order(
    function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor,
    state: Tensor | None, v_first: bool, final: bool, norm: bool, scale: float | None,
    cu: Tensor | None,
) -> Result:  # fmt: skip
    """A recurrent_* function; normalized rows stay in fp32, and so do the values then."""
    dtype = q.dtype
    if norm:
        q, k = _unit(q), _unit(k)
        v = v.to(q.dtype)
    o, last = function(
        q, k, v, gate, beta, state, cu_seqlens=cu, scale=scale, output_final_state=final
    )
    return o.to(dtype), None if last is None else _back(last, v_first, final)


# FLA's functions ----------------------------------------------------------------------------------


@_named
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
) -> Result:
    """GDN, chunk-parallel; errors, states and arguments without effect: see the module.

    Args:
        q, k: Queries and keys [B, T, H, K].
        v: Values [B, T, HV, V]; H divides HV.
        g: Log decay [B, T, HV]; with use_gate_in_kernel raw, and then
            -exp(A_log) softplus(g + dt_bias).
        beta: Write strength [B, T, HV]; logits with use_beta_sigmoid_in_kernel.
        scale: Factor of the queries; K^-0.5 if absent.
        initial_state: [N, HV, K, V], or [N, HV, V, K] with state_v_first.
        output_final_state: Return the final states, too.
        use_qk_l2norm_in_kernel: Normalize q and k.
        allow_neg_eigval: beta = 2 sigmoid(beta).
        cu_seqlens: Offsets [N + 1] of packed sequences, int32 or int64, with B = 1.
        A_log, dt_bias: [HV].

    Returns:
        The output [B, T, HV, V], and the final states in the layout of initial_state or None.
    """
    op = "chunk_gated_delta_rule"
    _decline(op, cp_context)
    _check(op, {"q": (q, 4), "k": (k, 4), "v": (v, 4), "g": (g, 3), "beta": (beta, 3)},
           cu_seqlens, 1)  # fmt: skip
    options: dict[str, Any] = {
        "scale": scale, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval,
    }  # fmt: skip
    if use_gate_in_kernel:
        options |= {"safe_gate": True, "a_log": _need_rate(op, A_log), "dt_bias": dt_bias}
    state = _turn(op, initial_state, v.shape[2], q.shape[3], v.shape[3], state_v_first)
    tokens = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    return _packed("gdn", lagraph.ops.gated_delta_net, tokens, cu_seqlens, state, state_v_first,
                   output_final_state, options)  # fmt: skip


@_named
def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: object = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
) -> Result:
    """KDA, chunk-parallel: `chunk_gated_delta_rule` with a decay for every key channel.

    Args:
        g: Log decay [B, T, HV, K]; with use_gate_in_kernel raw, and then
            -exp(A_log) softplus(g + dt_bias), or with lower_bound
            lower_bound sigmoid(exp(A_log) (g + dt_bias)), where A_log may be absent.
        safe_gate: Asks for a lower_bound; gates need no bound here.
        A_log: [HV]. dt_bias: [HV * K] or [HV, K].
        q, k, v, beta, scale, initial_state, ...: As `chunk_gated_delta_rule` has them.

    Returns:
        The output [B, T, HV, V], and the final states in the layout of initial_state or None.
    """
    op = "chunk_kda"
    _decline(op, cp_context, return_intermediate_states)
    _check(op, {"q": (q, 4), "k": (k, 4), "v": (v, 4), "g": (g, 4), "beta": (beta, 3)},
           cu_seqlens, 1)  # fmt: skip
    _bounded(op, safe_gate and use_gate_in_kernel, lower_bound)
    g, options = _channel_gate(op, g, use_gate_in_kernel, A_log, dt_bias, lower_bound)
    options |= {
        "scale": scale, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval,
    }  # fmt: skip
    state = _turn(op, initial_state, v.shape[2], q.shape[3], v.shape[3], state_v_first)
    tokens = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    return _packed("kda", lagraph.ops.kimi_delta_attention, tokens, cu_seqlens, state,
                   state_v_first, output_final_state, options)  # fmt: skip


@_named
def chunk_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
) -> Result:
    """GDN-2, chunk-parallel: KDA that erases by key channel and writes by value channel.

    Args:
        g: Log decay [B, T, H, K], or raw: see `chunk_kda`.
        b: Erase strength [B, T, H, K].
        w: Write strength [B, T, H, V]; rounded to the dtype of q.
        q, k, v, scale, initial_state, ...: As `chunk_kda` has them.

    Returns:
        The output [B, T, H, V], and the final states in the layout of initial_state or None.
    """
    op = "chunk_gdn2"
    _decline(op, None, return_intermediate_states)
    _check(op, {"q": (q, 4), "k": (k, 4), "v": (v, 4), "g": (g, 4), "b": (b, 4), "w": (w, 4)},
           cu_seqlens, 1)  # fmt: skip
    _bounded(op, safe_gate and use_gate_in_kernel, lower_bound)
    g, options = _channel_gate(op, g, use_gate_in_kernel, A_log, dt_bias, lower_bound)
    options |= {"scale": scale, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
    state = _turn(op, initial_state, v.shape[2], q.shape[3], v.shape[3], state_v_first)
    tokens = {"q": q, "k": k, "v": v, "g": g, "beta": b, "w": w}
    return _packed("gdn2", lagraph.ops.gated_delta_net_v2, tokens, cu_seqlens, state,
                   state_v_first, output_final_state, options)  # fmt: skip


@_named
def chunk_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    num_householder: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> Result:
    """GDP, chunk-parallel: num_householder updates for each token.

    Args:
        q: Queries [B, T, H, K].
        k, v, beta: [B, T * n, H, K], [B, T * n, H, V] and [B, T * n, H], n updates for each token.
        g: Log decay [B, T, H], once for each token; none if None.
        num_householder: n.
        cu_seqlens: Offsets [N + 1] in tokens.
        scale, initial_state, ...: As `chunk_gated_delta_rule` has them.

    Returns:
        The output [B, T, H, V], and the final states [N, H, K, V] or None.
    """
    op = "chunk_gated_delta_product"
    if not isinstance(num_householder, int) or num_householder < 1:
        raise InvalidOption(
            op, "num_householder", expected="an integer >= 1", got=repr(num_householder),
            mend="Pass the number of updates for each token",
        )  # fmt: skip
    ranks = {"q": (q, 4), "k": (k, 4), "v": (v, 4), "beta": (beta, 3)}
    if g is not None:
        ranks["g"] = g, 3
    _check(op, ranks, cu_seqlens, num_householder)
    if g is None:
        g = torch.zeros(*q.shape[:2], v.shape[2], device=q.device)
    tokens = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    options = {
        "scale": scale, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "num_householder": num_householder,
    }  # fmt: skip
    state = _turn(op, initial_state, v.shape[2], q.shape[3], v.shape[3], False)
    return _packed("gdp", lagraph.ops.gated_delta_product, tokens, cu_seqlens, state, False,
                   output_final_state, options)  # fmt: skip


@_named
def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """GDN, its tokens in order, for decoding; on CUDA for inference only.

    Args:
        g: Log decay [B, T, HV], or raw with use_gate_in_kernel; none if absent.
        gk: Log decay by key channel [B, T, HV, K]; added to g, and the rule is KDA's then.
        gv: Decay by value channel: refused.
        beta: Write strength [B, T, HV]; 1 if absent. FLA's [B, T, HV, V] is refused.
        q, k, v, scale, initial_state, ...: As `chunk_gated_delta_rule` has them.

    Returns:
        The output [B, T, HV, V], and the final states in the layout of initial_state or None.
    """
    op = "fused_recurrent_gated_delta_rule"
    if gv is not None:
        raise NotSupported(
            f"{op}: gv: no family decays its state by value channel. Pass g or gk instead."
        )
    tokens = {"q": (q, 4), "k": (k, 4), "v": (v, 4)}
    for name, x, rank in (("g", g, 3), ("gk", gk, 4), ("beta", beta, 3)):
        if x is not None:
            tokens[name] = x, rank
    _check(op, tokens, cu_seqlens, 1)
    shape = *q.shape[:2], v.shape[2]
    if beta is None:
        beta = torch.ones(shape, device=q.device)
    if use_gate_in_kernel:
        if g is None:
            raise RuleBroken(
                op, "g", expected="the raw gate with use_gate_in_kernel=True", got="None",
                mend="Pass g",
            )  # fmt: skip
        rate = _need_rate(op, A_log)
        bias = torch.zeros_like(rate) if dt_bias is None else dt_bias
        g = lagraph.ops.gate_transform(g, rate, bias, kind="softplus")
    if g is None and gk is None:
        g = torch.zeros(shape, device=q.device)
    beta = _sigmoid(op, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    state = _turn(op, initial_state, v.shape[2], q.shape[3], v.shape[3], state_v_first)
    run: Callable[..., Any] = lagraph.ops.recurrent_gdn
    gate: Any = g
    if gk is not None:
        run, gate = lagraph.ops.recurrent_kda, gk if g is None else gk + g[..., None]
    return _in_order(run, q, k, v, gate, beta, state, state_v_first, output_final_state,
                     use_qk_l2norm_in_kernel, scale, cu_seqlens)  # fmt: skip


@_named
def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """KDA, its tokens in order, for decoding; on CUDA for inference only.

    Args:
        q, k, v, g, beta, A_log, dt_bias, lower_bound, ...: As `chunk_kda` has them. FLA's
            beta [B, T, HV, V] is refused.

    Returns:
        The output [B, T, HV, V], and the final states in the layout of initial_state or None.
    """
    op = "fused_recurrent_kda"
    _check(op, {"q": (q, 4), "k": (k, 4), "v": (v, 4), "g": (g, 4), "beta": (beta, 3)},
           cu_seqlens, 1)  # fmt: skip
    if use_gate_in_kernel:
        heads, K = g.shape[2:]
        if lower_bound is None or A_log is not None:
            rate = _need_rate(op, A_log)
        else:
            rate = torch.zeros(heads, device=g.device)
        bias = _bias(dt_bias, heads, K)
        bias = rate.new_zeros(heads, K) if bias is None else bias
        kind = "softplus" if lower_bound is None else "bounded"
        g = lagraph.ops.gate_transform(g, rate, bias, kind=kind, lower_bound=lower_bound)
    beta = _sigmoid(op, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    state = _turn(op, initial_state, v.shape[2], q.shape[3], v.shape[3], state_v_first)
    return _in_order(lagraph.ops.recurrent_kda, q, k, v, g, beta, state, state_v_first,
                     output_final_state, use_qk_l2norm_in_kernel, scale, cu_seqlens)  # fmt: skip


def _bounded(op: str, wanted: bool, lower_bound: float | None) -> None:
    if wanted and lower_bound is None:
        raise RuleBroken(
            op, "lower_bound", expected="a number beside safe_gate=True", got="None",
            mend="Pass lower_bound=-5.0, or drop safe_gate",
        )  # fmt: skip
