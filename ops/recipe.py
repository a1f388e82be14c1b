"""One sequence over many ranks: the recipes with autograd.

Every rank has its span, laid out as `plan.subsequences`, and calls the same function. What all
recipes share:

Tensors: a span [1, T, ...], as the family's `chunk_*` takes it. Gradients of parameters (Mamba-2's
    A, D, dt_bias) are this rank's share: sum them over the ranks, as data parallelism does.
initial_state [max_subsequences, H, V, K]: one row per segment; those of segments that start their
    sequence (`routing.starts`) are its initial state, no other is read and their gradient is zero.
    Global states are placed with `states[routing.sequences]`.
Final states [max_subsequences, H, V, K]: one per segment, in fp32 (fp64 with fp64 tokens). Those at
    `routing.terminal` are the sequences' true final states; a gradient may enter at any of them.
group: a process group of exactly the plan's ranks, in order; `mesh.get_group(...)` of a device
    mesh, say. Every rank has to call, and to run the backward, the same number of times, even with
    an empty span; otherwise the others wait.
exchange: "all_gather", "doubling", or "auto": see `choose_exchange`.

A table that cuts no sequence (`routing.aligned`) turns `batch_invariant` on, so that all results
have the bits of the unsharded operator with that option; without caps it communicates nothing.
Otherwise a call computes: the summaries of the ranges that others wait for, the exchange, and a
pass from the composed entry states; the backward likewise. See `lagraph.ops.staged` for what is
computed twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lagraph.errors import DtypeMismatch, InvalidOption, NotDifferentiable, RuleBroken
from lagraph.ops.algebra import merge_state, split
from lagraph.ops.exchange import choose_exchange, exchange_folds, scatter_folds
from lagraph.ops.form import FORMS
from lagraph.ops.kinds import Impl, engine_of
from lagraph.ops.layout import ContextParallelRouting
from lagraph.ops.staged import TENSORS, StagedOp, check, slot_summaries, stages

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch.distributed as dist
    from torch import Tensor

    from lagraph.ops.kinds import KernelOptions
    from lagraph.ops.staged import PreparedBackward, PreparedForward

__all__ = [
    "context_parallel_chunk",
    "context_parallel_gdn",
    "context_parallel_gdn2",
    "context_parallel_gdp",
    "context_parallel_kda",
    "context_parallel_mamba2",
    "grad_summary_slots",
    "summary_slots",
]


def summary_slots(
    prepared: PreparedForward,
    routing: ContextParallelRouting,
    initial_state: Tensor | None = None,
    *,
    log2_decay: bool = False,
) -> Tensor:
    """This rank's forward slots [slots, H, V + K, K]: each fragment's last subsequence.

    Where that starts its sequence, the initial state is folded into the bias. Fragments whose last
    subsequence ends its sequence send what nobody folds.
    """
    # An initial state goes through the transition.
    need = routing.forward_need if initial_state is None else "map"
    rows = slot_summaries(prepared, routing.forward_bounds, need)
    if initial_state is None:
        return rows
    sources = routing.forward_sources
    live = routing.starts.index_select(0, sources).view(-1, 1, 1, 1)
    state = initial_state.index_select(0, sources)
    return _with_bias(rows, torch.where(live, state, torch.zeros_like(state)), log2_decay)


def grad_summary_slots(
    grads: PreparedBackward,
    d_final_state: Tensor | None,
    routing: ContextParallelRouting,
    *,
    log2_decay: bool = False,
) -> Tensor:
    """This rank's reverse slots: each fragment's first subsequence, with the loss folded in.

    Ranks before want all that flows into that subsequence's entry state, so the bias sent is
    d_final_state @ R + C.
    """
    need = routing.reverse_need if d_final_state is None else "map"
    rows = slot_summaries(grads, routing.reverse_bounds, need)
    if d_final_state is None:
        return rows
    state = d_final_state.index_select(0, routing.reverse_sources)
    return _with_bias(rows, state, log2_decay)


def _with_bias(rows: Tensor, state: Tensor, log2_decay: bool) -> Tensor:
    """Rows whose bias is what they make of a state."""
    values = state.shape[-2]
    _, transition, _ = split("context_parallel", rows, values, log2_decay)
    return torch.cat([merge_state(state, rows, log2_decay=log2_decay), transition], -2)


def context_parallel_chunk(
    stages: StagedOp,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    *more: Tensor | None,
    routing: ContextParallelRouting,
    group: dist.ProcessGroup,
    initial_state: Tensor | None = None,
    exchange: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Run a staged operator over this rank's span, states exchanged between ranks.

    See the module for what all recipes share; `context_parallel_gdn` and its siblings bind the
    stages of their families.

    Args:
        stages: The operator's entry points, options bound.
        q: The first tensor that they take (queries; Mamba-2's x); k, v, gate, beta and more follow
            in their order.
        routing: This layout, from `plan.routing(device)`.
        group: The plan's ranks.
        initial_state: [max_subsequences, H, V, K]; zero if absent.
        exchange: "auto", "all_gather" or "doubling".

    Returns:
        The span's output, and the state after every segment [max_subsequences, H, V, K].

    Raises:
        RuleBroken, ShapeMismatch, DeviceMismatch: The routing is another group's, rank's, span's.
    """
    routing.validate(q, group, "context_parallel_chunk")
    return _apply(stages, (q, k, v, gate, beta, *more), routing, group, initial_state, exchange)


def _apply(
    stages: StagedOp,
    tensors: tuple[Tensor | None, ...],
    routing: ContextParallelRouting,
    group: dist.ProcessGroup,
    initial_state: Tensor | None,
    exchange: str,
) -> tuple[Tensor, Tensor]:
    chosen = choose_exchange(routing, exchange)
    # Casts have been made: what runs inside sees no autocast, in either direction.
    with torch.autocast(routing.cu_seqlens.device.type, enabled=False):
        out: tuple[Tensor, Tensor] = _Recipe.apply(
            stages, routing, group, chosen, initial_state, *tensors
        )
    return out


class _Recipe(torch.autograd.Function):
    """Summaries, exchange, local pass; and the same backwards."""

    @staticmethod
    def forward(
        ctx: Any,
        stages: StagedOp,
        routing: ContextParallelRouting,
        group: dist.ProcessGroup,
        exchange: str,
        initial_state: Tensor | None,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        decay = stages.log2_decay
        prepared = stages.prepare(*tensors, cu_seqlens=routing.cu_seqlens)
        entry = initial_state
        if routing.exchanges:
            rows = summary_slots(prepared, routing, initial_state, log2_decay=decay)
            folded = exchange_folds(rows, routing, group, log2_decay=decay, exchange=exchange)
            entry = scatter_folds(folded, routing.entry_sources)
            if initial_state is not None:
                entry = torch.where(_column(routing.starts), initial_state, entry)
        out, final = prepared.run(entry, output_final_state=True)
        saved = prepared.saved
        ctx.save_for_backward(entry, *saved)
        ctx.rebuild, ctx.scale, ctx.stateful = (
            type(saved),
            prepared.scale,
            initial_state is not None,
        )
        ctx.stages, ctx.routing, ctx.group, ctx.exchange = stages, routing, group, exchange
        ctx.set_materialize_grads(False)
        if final is None:
            raise RuleBroken(
                "context_parallel_chunk", "stages", expected="final states from run", got="None",
                mend="Return them for output_final_state=True",
            )  # fmt: skip
        return out, final

    @staticmethod
    def backward(ctx: Any, *grad: Tensor | None) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        with torch.no_grad():
            made = _Recipe.gradients(ctx, tensors, *grad)
        if not torch.is_grad_enabled():
            return made
        at = [i for i, x in enumerate(made) if x is not None]
        anchors = [x for x in (*tensors, *grad) if x is not None and x.requires_grad]
        held = list(made)
        for i, x in zip(at, _Once.apply(len(at), *(made[i] for i in at), *anchors), strict=True):
            held[i] = x
        return tuple(held)

    @staticmethod
    def gradients(
        ctx: Any, tensors: tuple[Any, ...], d_out: Tensor | None, d_final: Tensor | None
    ) -> tuple[Any, ...]:
        """Of all arguments of `forward`."""
        entry, *saved = tensors
        stages, routing = ctx.stages, ctx.routing
        # Mamba-2 has no scale.
        scale = {} if ctx.scale is None else {"scale": ctx.scale}
        grads = stages.prepare_backward(ctx.rebuild(*saved), d_out, entry, **scale)
        if routing.exchanges:
            rows = grad_summary_slots(grads, d_final, routing, log2_decay=stages.log2_decay)
            folded = exchange_folds(
                rows, routing, ctx.group, log2_decay=stages.log2_decay, reverse=True,
                exchange=ctx.exchange,
            )  # fmt: skip
            flowing = scatter_folds(folded, routing.exit_sources)
            d_final = flowing if d_final is None else d_final + flowing
        *given, d_entry = grads.run(d_final)
        d_initial = None
        if ctx.stateful and ctx.needs_input_grad[4]:
            d_initial = torch.where(_column(routing.starts), d_entry, torch.zeros_like(d_entry))
        needs = ctx.needs_input_grad[5:]
        return (None, None, None, None, d_initial,
                *(x if need else None for x, need in zip(given, needs, strict=True)))  # fmt: skip


class _Once(torch.autograd.Function):
    """Gradients that depend on the anchors, and refuse to be differentiated."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grad: Any) -> Any:
        raise NotDifferentiable(
            "context_parallel_chunk: not differentiable twice. Second derivatives are not defined "
            "for this operator; drop create_graph=True."
        )


def _column(mask: Tensor) -> Tensor:
    return mask.view(-1, 1, 1, 1)


def _family(
    family: str,
    tensors: dict[str, Tensor | None],
    routing: ContextParallelRouting,
    group: dist.ProcessGroup,
    initial_state: Tensor | None,
    exchange: str,
    options: Mapping[str, Any],
    impl: Impl | str,
    kernel_options: KernelOptions | None,
) -> tuple[Tensor, Tensor]:
    """Check, cast as the family's `chunk_*` does, and run the recipe."""
    name, form = f"context_parallel_{family}", FORMS[family]
    first = next(iter(form.axes))
    span = tensors[first]
    if not isinstance(span, torch.Tensor):
        raise DtypeMismatch(name, first, expected="a torch.Tensor", got=type(span).__name__,
                            mend=f"Pass {first}")  # fmt: skip
    # Before any communication: a rank that raises later leaves the others waiting.
    if not isinstance(routing, ContextParallelRouting):
        raise InvalidOption(
            name, "routing", expected="a ContextParallelRouting", got=type(routing).__name__,
            mend="Pass plan.routing(device)",
        )  # fmt: skip
    routing.validate(span, group, name)
    check(name, family, tensors, initial_state, routing.cu_seqlens, options)
    engine_of(name, impl, span, kernel_options, family != "gdn")
    kind = span.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        for n in form.io:
            x = tensors[n]
            if x is not None and x.dtype is not torch.float64:
                tensors[n] = x.to(dtype)
    io = tensors[first].dtype  # type: ignore[union-attr]
    wide = torch.float64 if io is torch.float64 else torch.float32
    for n in (*form.floats, *form.strengths):
        x = tensors[n]
        if x is not None and x.dtype not in (torch.float32, io):
            keep = n in form.floats and x.dtype is not torch.float64
            tensors[n] = x if keep else x.to(wide)
    bound: dict[str, Any] = {n: x for n, x in options.items() if n != "scale"}
    bound |= {"impl": impl, "kernel_options": kernel_options, "batch_invariant": routing.aligned}
    return _apply(
        stages(family, options.get("scale"), bound), tuple(tensors[n] for n in TENSORS[family]),
        routing, group, None if initial_state is None else initial_state.to(wide), exchange,
    )  # fmt: skip


def context_parallel_gdn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    *,
    routing: ContextParallelRouting,
    group: dist.ProcessGroup,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    exchange: str = "auto",
    impl: Impl | str = Impl.AUTO,
    kernel_options: KernelOptions | None = None,
) -> tuple[Tensor, Tensor]:
    """`chunk_gdn` over this rank's span; see `lagraph.ops.recipe` for what recipes share.

    Args:
        q: Queries [1, T, HK, K]; k, v, gate, beta as `chunk_gdn` has them.
        routing: This layout, from `plan.routing(device)`.
        group: The plan's ranks, in order.
        scale: Factor of the queries; K^-0.5 if absent.
        initial_state: [max_subsequences, H, V, K], read at `routing.starts`; zero if absent.
        exchange: "auto", "all_gather" or "doubling".
        impl: "auto" (fused on CUDA, else reference), "fused" or "reference".
        kernel_options: Of fused execution.

    Returns:
        The output [1, T, H, V] and the state after every segment [max_subsequences, H, V, K].

    Raises:
        RuleBroken, ShapeMismatch, DtypeMismatch, DeviceMismatch, InvalidOption: A bad argument, or
            a routing of another group, rank, span or device. Before anything is communicated.
        PlanNotOffered: The implementation does not serve the call.
    """
    tensors: dict[str, Tensor | None] = {"q": q, "k": k, "v": v, "gate": gate, "beta": beta}
    return _family(
        "gdn", tensors, routing, group, initial_state, exchange, {"scale": scale}, impl,
        kernel_options,
    )  # fmt: skip


def context_parallel_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    *,
    routing: ContextParallelRouting,
    group: dist.ProcessGroup,
    scale: float | None = None,
    autotune: bool = True,
    fastmath: bool = True,
    initial_state: Tensor | None = None,
    exchange: str = "auto",
    impl: Impl | str = Impl.AUTO,
    kernel_options: KernelOptions | None = None,
) -> tuple[Tensor, Tensor]:
    """`chunk_kda` over this rank's span; arguments as `context_parallel_gdn` has them.

    autotune and fastmath are taken and change nothing, as in `chunk_kda`.
    """
    tensors: dict[str, Tensor | None] = {"q": q, "k": k, "v": v, "gate": gate, "beta": beta}
    return _family(
        "kda", tensors, routing, group, initial_state, exchange, {"scale": scale}, impl,
        kernel_options,
    )  # fmt: skip


def context_parallel_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    w: Tensor,
    *,
    routing: ContextParallelRouting,
    group: dist.ProcessGroup,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    exchange: str = "auto",
    impl: Impl | str = Impl.AUTO,
    kernel_options: KernelOptions | None = None,
) -> tuple[Tensor, Tensor]:
    """`chunk_gdn2` over this rank's span; other arguments as `context_parallel_gdn` has them."""
    tensors: dict[str, Tensor | None] = {
        "q": q, "k": k, "v": v, "gate": gate, "beta": beta, "w": w,
    }  # fmt: skip
    return _family(
        "gdn2", tensors, routing, group, initial_state, exchange, {"scale": scale}, impl,
        kernel_options,
    )  # fmt: skip


def context_parallel_gdp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    *,
    num_householder: int,
    routing: ContextParallelRouting,
    group: dist.ProcessGroup,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    exchange: str = "auto",
    impl: Impl | str = Impl.AUTO,
    kernel_options: KernelOptions | None = None,
) -> tuple[Tensor, Tensor]:
    """`chunk_gdp` over this rank's span, T in tokens; see `context_parallel_gdn`."""
    tensors: dict[str, Tensor | None] = {"q": q, "k": k, "v": v, "gate": gate, "beta": beta}
    return _family(
        "gdp", tensors, routing, group, initial_state, exchange,
        {"scale": scale, "num_householder": num_householder}, impl, kernel_options,
    )  # fmt: skip


def context_parallel_mamba2(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    routing: ContextParallelRouting,
    group: dist.ProcessGroup,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    z: Tensor | None = None,
    dt_softplus: bool = True,
    dt_min: float = 0.0,
    dt_max: float | None = None,
    initial_state: Tensor | None = None,
    exchange: str = "auto",
    impl: Impl | str = Impl.AUTO,
    kernel_options: KernelOptions | None = None,
) -> tuple[Tensor, Tensor]:
    """`chunk_mamba2` over this rank's span; other arguments as `context_parallel_gdn` has them.

    Gradients of A, D and dt_bias are this rank's share; sum them over the group.
    """
    tensors: dict[str, Tensor | None] = {
        "x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "dt_bias": dt_bias, "z": z,
    }  # fmt: skip
    options = {"dt_softplus": dt_softplus, "dt_min": dt_min, "dt_max": dt_max}
    return _family(
        "mamba2", tensors, routing, group, initial_state, exchange, options, impl, kernel_options
    )
