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
pieces: how many equal parts the span is cut into, so that they run side by side; None chooses by
    layout, heads and device, and cuts on GPUs alone. See `lagraph.ops.pieces`.

A table that cuts no sequence (`routing.aligned`) turns `batch_invariant` on, so that all results
have the bits of the unsharded operator with that option; without caps it communicates nothing, and
cuts nothing. Otherwise a call computes: summaries of the ranges that somebody waits for, here or on
another rank; the exchange; a pass from the composed entry states. The backward likewise, with the
transitions of the forward's summaries. A rank that needs nothing of others runs while its summaries
travel; one that needs something for a part of its span runs the rest before, where the exchange is
large enough. See `lagraph.ops.staged` for what is computed twice.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from lagraph.errors import DtypeMismatch, InvalidOption, NotDifferentiable, RuleBroken
from lagraph.ops.algebra import composed, merge_state, merged, neutral_summary, split
from lagraph.ops.exchange import choose_exchange, scatter_folds, start_folds
from lagraph.ops.form import FORMS
from lagraph.ops.fragments import whole
from lagraph.ops.kinds import Impl, engine_of
from lagraph.ops.layout import ContextParallelRouting
from lagraph.ops.staged import (
    TENSORS,
    Prepared,
    PreparedGradient,
    StagedOp,
    check,
    fed,
    slot_summaries,
    stages,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch.distributed as dist
    from torch import Tensor

    from lagraph.ops.kinds import KernelOptions
    from lagraph.ops.pieces import Pieces, Rows
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
    pieces: int | None = None,
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
        pieces: Parts that the span is cut into; None is one, whatever the device.

    Returns:
        The span's output, and the state after every segment [max_subsequences, H, V, K].

    Raises:
        RuleBroken, ShapeMismatch, DeviceMismatch: The routing is another group's, rank's, span's.
    """
    routing.validate(q, group, "context_parallel_chunk")
    count = _count("context_parallel_chunk", pieces)
    tensors = (q, k, v, gate, beta, *more)
    return _apply(stages, tensors, routing, group, initial_state, exchange, count)


def _apply(
    stages: StagedOp,
    tensors: tuple[Tensor | None, ...],
    routing: ContextParallelRouting,
    group: dist.ProcessGroup,
    initial_state: Tensor | None,
    exchange: str,
    pieces: int,
) -> tuple[Tensor, Tensor]:
    chosen = choose_exchange(routing, exchange)
    # Casts have been made: what runs inside sees no autocast, in either direction.
    with torch.autocast(routing.cu_seqlens.device.type, enabled=False):
        out: tuple[Tensor, Tensor] = _Recipe.apply(
            stages, routing, group, chosen, pieces, initial_state, *tensors
        )
    return out


# Pieces: see `lagraph.ops.pieces` ---------------------------------------------------------------

SLICE = 64  # rows of the state that one program of a serial pass holds
SHORTEST = 512  # tokens of a piece, at least, where the number of them is chosen


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _count(op: str, pieces: int | None) -> int:
    if pieces is None:
        return 1
    return whole(op, "pieces", pieces, 1, "Leave it out: it is chosen by heads and device")


def choose_pieces(
    routing: ContextParallelRouting, heads: int, value_dim: int, log2_decay: bool = False
) -> int:
    """As many as balance this layout, where two programs run on every processor. With caps, as many
    as fill the device once. 1 on a CPU, and where nothing is exchanged."""
    device = routing.cu_seqlens.device
    if device.type != "cuda" or not routing.exchanges:
        return 1
    width = 2 * _processors(device) // (heads * max(value_dim // SLICE, 1))
    if routing.capped:
        return max(min(width, routing.tokens // SHORTEST), 1)
    return routing.balanced(width, SHORTEST, log2_decay)


def _chained(table: Tensor, rows: Rows, decay: bool) -> tuple[Tensor, Tensor]:
    """The maps of links [L + 1, ...], each from its segment's start, and of slots [slots, ...]."""
    keys = table.shape[-1]
    values = table.shape[-2] - (1 if decay else keys)
    last = neutral_summary(
        table.shape[1], values, keys, device=table.device, dtype=table.dtype, log2_decay=decay
    )
    table = torch.cat([table, last[None]])
    links, slots = table.index_select(0, rows.links), table.index_select(0, rows.tail)
    if len(rows.links) == 1:  # nothing is cut
        return links, slots
    for step in rows.steps.unbind(0):
        links = composed(links.index_select(0, step), links, values, decay)
    return links, composed(links.index_select(0, rows.head), slots, values, decay)


# Bytes that a rank has to receive for its pass to be made in parts. It takes a launch more of every
# kernel, on fewer programs each, and joins all outputs by copies: what 1 ms of a 50 GB/s port pays.
OVERLAP = 48 << 20


def _apart(
    handle: Any, rows: Rows, routing: ContextParallelRouting, slots: Tensor, kind: str
) -> bool:
    """Whether what waits for others is run apart from what does not. Known on the host, since the
    layout is; a doubling's rounds follow each other, so that only the first would be hidden."""
    own = isinstance(handle, (Prepared, PreparedGradient))
    if not own or len(rows.parts) not in (2, 3) or kind != "all_gather":
        return False
    received = (routing.world - 1) * slots.numel() * slots.element_size()
    early = sum(part.stop - part.start for part in rows.parts if not part.waits)
    return received >= OVERLAP and 8 * early >= routing.tokens


def _between(
    states: Tensor, flowing: Tensor, links: Tensor, rows: Rows, at: Tensor, decay: bool
) -> Tensor:
    """States of all pieces: those [segments, ...] of segments, and what links make of the states
    that flow into them from other ranks."""
    begin, values = flowing.index_select(0, rows.through), flowing.shape[-2]
    cuts = merged(begin, links[:-1, ..., :values, :], links[:-1, ..., values:, :], decay)
    return torch.cat([states, cuts]).index_select(0, at)


def _through(
    handle: Any,
    maps: Tensor,
    known: Tensor | None,
    pieces: Pieces,
    routing: ContextParallelRouting,
    group: dist.ProcessGroup,
    kind: str,
    decay: bool,
    reverse: bool,
    run: Callable[[Any, Tensor | None], Any],
) -> tuple[Any, Tensor | None]:
    """Exchange the maps of a direction's ranges and run from the states that follow; those, too.

    known: states [segments, ...] that are this rank's own: initial ones, or cotangents of last
    ones. Their way through the piece that they enter first is in that piece's map.
    """
    rows, at = (pieces.reverse, pieces.exit) if reverse else (pieces.forward, pieces.entry)
    sources = routing.exit_sources if reverse else routing.entry_sources
    links, slots = _chained(maps, rows, decay)
    begun = start_folds(
        slots, routing, group, log2_decay=decay, reverse=reverse, exchange=kind
    )  # fmt: skip

    def states(folded: Tensor | None) -> Tensor | None:
        """Of all pieces, with what others send, or before it is known."""
        flowing = None if folded is None else scatter_folds(folded, sources)
        if pieces.whole:
            return known if flowing is None else flowing if known is None else known + flowing
        if flowing is None:
            values = maps.shape[-2] - (1 if decay else maps.shape[-1])
            flowing = maps.new_zeros(len(sources), maps.shape[1], values, maps.shape[-1])
        return _between(flowing if known is None else known + flowing, flowing, links, rows, at,
                        decay)  # fmt: skip

    waits = routing.reverse_waits if reverse else routing.forward_waits
    if not (waits and _apart(handle, rows, routing, slots, kind)):
        found = states(begun.folds() if waits else None)
        made = run(handle, found)
    else:
        early, late, done = states(None), None, {}
        for part in sorted(rows.parts, key=lambda part: part.waits):
            if part.waits and late is None:
                late = states(begun.folds())
            found = late if part.waits else early
            some = handle.part(part)
            done[part] = some, run(some, None if found is None else found[part.first : part.last])
        made, found = handle.join([done[part] for part in rows.parts]), late
    begun.wait()
    return made, found


def _range_rows(
    handle: PreparedForward, rows: Rows, initial_state: Tensor | None, decay: bool
) -> Tensor:
    """The forward's summaries of ranges, initial states folded in."""
    if isinstance(handle, Prepared):
        return handle.range_summaries(rows, initial_state)
    found = handle.state_summaries(rows.bounds)
    if initial_state is None:
        return found
    return _with_bias(found, fed(initial_state, rows.fed), decay)


def _range_grad_rows(
    handle: PreparedBackward, rows: Rows, d_final: Tensor | None, moves: Tensor | None, decay: bool
) -> Tensor:
    """The backward's, the loss folded in."""
    if isinstance(handle, PreparedGradient):
        return handle.range_grad_summaries(rows, d_final, moves)
    found = handle.state_grad_summaries(rows.bounds)
    return found if d_final is None else _with_bias(found, fed(d_final, rows.fed), decay)


class _Recipe(torch.autograd.Function):
    """Summaries, exchange, local pass; and the same backwards."""

    @staticmethod
    def forward(
        ctx: Any,
        stages: StagedOp,
        routing: ContextParallelRouting,
        group: dist.ProcessGroup,
        exchange: str,
        count: int,
        initial_state: Tensor | None,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        decay = stages.log2_decay
        pieces = routing.pieces(count) if routing.exchanges else None
        offsets = routing.cu_seqlens if pieces is None else pieces.cu_seqlens
        prepared = stages.prepare(*tensors, cu_seqlens=offsets)
        entry, moves = initial_state, None
        if pieces is not None:
            rows = _range_rows(prepared, pieces.forward, initial_state, decay)
            if pieces.reverse.need == "map" and isinstance(prepared, Prepared):
                values = rows.shape[-2] - (1 if decay else rows.shape[-1])
                moves = rows[..., values:, :]
            known = initial_state
            if known is not None:
                known = torch.where(_column(routing.starts), known, torch.zeros_like(known))
            (out, final), entry = _through(
                prepared, rows, known, pieces, routing, group, exchange, decay, False,
                lambda some, start: some.run(start, output_final_state=True),
            )  # fmt: skip
        else:
            out, final = prepared.run(initial_state, output_final_state=True)
        saved = prepared.saved
        ctx.save_for_backward(entry, moves, *saved)
        ctx.rebuild, ctx.scale = type(saved), prepared.scale
        ctx.stages, ctx.routing, ctx.group, ctx.exchange = stages, routing, group, exchange
        ctx.pieces, ctx.stateful = pieces, initial_state is not None
        ctx.set_materialize_grads(False)
        if final is None:
            raise RuleBroken(
                "context_parallel_chunk", "stages", expected="final states from run", got="None",
                mend="Return them for output_final_state=True",
            )  # fmt: skip
        if pieces is not None and not pieces.whole:
            final = final.index_select(0, pieces.last)
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
        entry, moves, *saved = tensors
        stages, routing, pieces = ctx.stages, ctx.routing, ctx.pieces
        decay = stages.log2_decay
        # Mamba-2 has no scale.
        scale = {} if ctx.scale is None else {"scale": ctx.scale}
        grads = stages.prepare_backward(ctx.rebuild(*saved), d_out, entry, **scale)
        if pieces is not None:
            if moves is not None:
                moves = torch.cat([moves, torch.zeros_like(moves[:1])])
                moves = moves.index_select(0, pieces.moves)
            rows = _range_grad_rows(grads, pieces.reverse, d_final, moves, decay)
            (*given, d_entry), _ = _through(
                grads, rows, d_final, pieces, routing, ctx.group, ctx.exchange, decay, True,
                lambda some, leaving: some.run(leaving),
            )  # fmt: skip
        else:
            *given, d_entry = grads.run(d_final)
        d_initial = None
        if ctx.stateful and ctx.needs_input_grad[5]:
            if pieces is not None and not pieces.whole:
                d_entry = d_entry.index_select(0, pieces.first)
            d_initial = torch.where(_column(routing.starts), d_entry, torch.zeros_like(d_entry))
        needs = ctx.needs_input_grad[6:]
        return (None, None, None, None, None, d_initial,
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
    pieces: int | None,
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
    count = _count(name, pieces)
    engine = engine_of(name, impl, span, kernel_options, family != "gdn")
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
    if pieces is None and engine != "eager":
        values, gates = (tensors["x" if family == "mamba2" else "v"],
                         tensors["dt" if family == "mamba2" else "gate"])  # fmt: skip
        count = choose_pieces(routing, gates.shape[2], values.shape[-1], family == "mamba2")  # type: ignore[union-attr]
    bound: dict[str, Any] = {n: x for n, x in options.items() if n != "scale"}
    bound |= {"impl": impl, "kernel_options": kernel_options, "batch_invariant": routing.aligned}
    return _apply(
        stages(family, options.get("scale"), bound), tuple(tensors[n] for n in TENSORS[family]),
        routing, group, None if initial_state is None else initial_state.to(wide), exchange,
        count,
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
    pieces: int | None = None,
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
        pieces: Equal parts that the span is cut into; chosen by layout, heads and device if absent.

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
        kernel_options, pieces,
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
    pieces: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`chunk_kda` over this rank's span; arguments as `context_parallel_gdn` has them.

    autotune and fastmath are taken and change nothing, as in `chunk_kda`.
    """
    tensors: dict[str, Tensor | None] = {"q": q, "k": k, "v": v, "gate": gate, "beta": beta}
    return _family(
        "kda", tensors, routing, group, initial_state, exchange, {"scale": scale}, impl,
        kernel_options, pieces,
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
    pieces: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`chunk_gdn2` over this rank's span; other arguments as `context_parallel_gdn` has them."""
    tensors: dict[str, Tensor | None] = {
        "q": q, "k": k, "v": v, "gate": gate, "beta": beta, "w": w,
    }  # fmt: skip
    return _family(
        "gdn2", tensors, routing, group, initial_state, exchange, {"scale": scale}, impl,
        kernel_options, pieces,
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
    pieces: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`chunk_gdp` over this rank's span, T in tokens; see `context_parallel_gdn`."""
    tensors: dict[str, Tensor | None] = {"q": q, "k": k, "v": v, "gate": gate, "beta": beta}
    return _family(
        "gdp", tensors, routing, group, initial_state, exchange,
        {"scale": scale, "num_householder": num_householder}, impl, kernel_options,
        pieces,
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
    pieces: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`chunk_mamba2` over this rank's span; other arguments as `context_parallel_gdn` has them.

    Gradients of A, D and dt_bias are this rank's share; sum them over the group.
    """
    tensors: dict[str, Tensor | None] = {
        "x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "dt_bias": dt_bias, "z": z,
    }  # fmt: skip
    options = {"dt_softplus": dt_softplus, "dt_min": dt_min, "dt_max": dt_max}
    return _family(
        "mamba2", tensors, routing, group, initial_state, exchange, options, impl, kernel_options,
        pieces,
    )  # fmt: skip
