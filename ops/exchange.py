"""Exchange of summaries between ranks, and what becomes of them.

`Exchange.folds` gives each fragment of this rank the fold of all slots before it in its sequence
(after it, in the reverse direction), from the zero state. Two ways, equal but for the order of
roundings:

all_gather   one padded all-gather of every rank's slots, then each rank folds its chains. A rank
             receives (world - 1) slots summaries. Where no chain has more than one link, biases
             are all that is folded, and all that is sent.
doubling     a scan over fragments in token order: in step s a fragment passes the map of the last
             2^s fragments to the one 2^s further. ceil(log2(chain + 1)) steps, in each of which a
             rank receives at most `slots` summaries. Its messages are those of one layout.

`start_folds` begins the exchange and returns at once: what is computed before `Exchange.folds`
overlaps the all-gather, or the first round of doubling.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from lagraph.errors import InvalidOption, RuleBroken
from lagraph.ops.algebra import composed, merged, neutral_summary, split

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import Tensor

    from lagraph.ops.layout import ContextParallelRouting

__all__ = [
    "Exchange",
    "choose_exchange",
    "compose_conv_histories",
    "compose_entry_states",
    "compose_exit_cotangents",
    "context_parallel_conv_history",
    "fold_slots",
    "gather_slots",
    "received_bytes",
    "start_folds",
]

# Doubling is taken where it has a rank receive less than this part of what all-gather would. Its
# rounds are point-to-point and follow each other, so that few ranks gain nothing by it.
ADVANTAGE = 4
EXCHANGES = ("auto", "all_gather", "doubling")
# Newer PyTorch has another name for it, and warns of this one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def choose_exchange(routing: ContextParallelRouting, exchange: str = "auto") -> str:
    """The exchange of a call: doubling where world - 1 > 4 ceil(log2(chain + 1)), else all-gather.

    A routing with caps always takes all-gather: the messages of doubling belong to one layout.
    Raises InvalidOption, RuleBroken.
    """
    if exchange not in EXCHANGES:
        raise InvalidOption(
            "context_parallel", "exchange", expected=f"one of {', '.join(EXCHANGES)}",
            got=repr(exchange), mend="Leave it out",
        )  # fmt: skip
    if exchange == "doubling" and routing.capped:
        raise RuleBroken(
            "context_parallel", "exchange", expected="'all_gather' for a routing with caps",
            got="'doubling'", mend="Build the routing without caps, or leave exchange out",
        )  # fmt: skip
    if exchange != "auto":
        return exchange
    far = routing.world - 1 > ADVANTAGE * routing.chain.bit_length()
    return "doubling" if far and not routing.capped else "all_gather"


def start_folds(
    rows: Tensor,
    routing: ContextParallelRouting,
    group: dist.ProcessGroup,
    *,
    log2_decay: bool = False,
    reverse: bool = False,
    exchange: str = "auto",
) -> Exchange:
    """Begin the exchange of this rank's fragments' chains, folded from zero: [slots, H, V, K].

    rows: this rank's slots [slots, H, V + K, K] ([slots, H, V + 1, K] for Mamba-2). Every rank has
    to begin, and to call `wait` or `folds` after.
    """
    if choose_exchange(routing, exchange) == "doubling":
        return Exchange(_doubling(rows, routing, group, log2_decay, reverse))
    return Exchange(_gathering(rows, routing, group, log2_decay, reverse))


class Exchange:
    """An exchange under way: steps that end in waits, and the folds at last."""

    def __init__(self, steps: Generator[None, None, Tensor]) -> None:
        self._steps = steps
        self._folds: Tensor | None = None
        self._advance()

    def _advance(self) -> bool:
        try:
            next(self._steps)
        except StopIteration as end:
            self._folds = end.value
        return self._folds is None

    def folds(self) -> Tensor:
        """[slots, H, V, K]: this rank's fragments' chains, folded from zero."""
        while self._folds is None:
            self._advance()
        return self._folds

    # Other ranks need all rounds of this one, and its buffers have to outlive them.
    wait = folds


def received_bytes(
    routing: ContextParallelRouting,
    heads: int,
    value_dim: int,
    key_dim: int,
    *,
    log2_decay: bool = False,
    exchange: str = "auto",
    itemsize: int = 4,
    reverse: bool = False,
) -> int:
    """Bytes that this rank receives in one direction of a step."""
    if not routing.exchanges or routing.world == 1:
        return 0
    rows = value_dim + (1 if log2_decay else key_dim)
    if choose_exchange(routing, exchange) == "all_gather":
        sent = value_dim if _biases(routing) else rows
        return (routing.world - 1) * routing.slots * sent * heads * key_dim * itemsize
    order = routing.order[::-1] if reverse else routing.order
    received, step = 0, 1
    while step <= routing.chain:
        came = sum(to[0] == routing.cp_rank != by[0] for by, to in zip(order, order[step:]))
        received += came * (value_dim if 2 * step > routing.chain else rows)
        step *= 2
    return received * heads * key_dim * itemsize


def _biases(routing: ContextParallelRouting) -> bool:
    """Whether no fold applies a transition: one predecessor at most, and its state is known."""
    return not routing.capped and routing.chain <= 1


def _gathering(
    rows: Tensor,
    routing: ContextParallelRouting,
    group: dist.ProcessGroup,
    log2_decay: bool,
    reverse: bool,
) -> Generator[None, None, Tensor]:
    """The all-gather; one rank alone has nothing to wait for."""
    sources = routing.successors if reverse else routing.predecessors
    values = rows.shape[-2] - (1 if log2_decay else rows.shape[-1])
    if _biases(routing):
        rows = rows[..., :values, :]
    if routing.world == 1:
        gathered = rows[None]
    else:
        sent = rows.contiguous()
        gathered = sent.new_empty(routing.world * len(sent), *sent.shape[1:])
        work = _all_gather(gathered, sent, group=group, async_op=True)
        yield
        work.wait()
        gathered = gathered.unflatten(0, (routing.world, len(sent)))
    if _biases(routing):
        table = gathered.flatten(0, 1)
        table = torch.cat([table, torch.zeros_like(table[:1])])
        if not routing.chain:
            return table.new_zeros(len(sources), *table.shape[1:])
        return table.index_select(0, sources[:, 0])
    return fold_slots(gathered, sources[:, : routing.chain], log2_decay=log2_decay)


def gather_slots(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank's [slots, ...] as [world, slots, ...]."""
    world = dist.get_world_size(group)
    out = rows.new_empty(world * rows.shape[0], *rows.shape[1:])
    _all_gather(out, rows.contiguous(), group=group)
    return out.unflatten(0, (world, rows.shape[0]))


def fold_slots(gathered: Tensor, sources: Tensor, *, log2_decay: bool = False) -> Tensor:
    """Apply gathered summaries to the zero state along each row's chain of slots.

    gathered: [world, slots, H, V + K, K]. sources: int64 [rows, L] flat indices in the order of
    application, padded with world * slots (the identity). Returns [rows, H, V, K]. The number of
    launches depends on L alone, so that a CUDA graph replays other tables.
    """
    heads, height, keys = gathered.shape[2:]
    values = height - (1 if log2_decay else keys)
    identity = neutral_summary(
        heads, values, keys, device=gathered.device, dtype=gathered.dtype, log2_decay=log2_decay
    )
    table = torch.cat([gathered.flatten(0, 1), identity[None]])
    links = sources.unbind(1)
    if not links:
        return gathered.new_zeros(sources.shape[0], heads, values, keys)
    # Of the zero state a map makes its bias.
    state = table[..., :values, :].index_select(0, links[0])
    for link in links[1:]:
        row = table.index_select(0, link)
        state = merged(state, row[..., :values, :], row[..., values:, :], log2_decay)
    return state


def scatter_folds(folded: Tensor, sources: Tensor) -> Tensor:
    """[slots, ...] folds on span segments; source `slots` selects zero."""
    return torch.cat([folded, torch.zeros_like(folded[:1])]).index_select(0, sources)


def compose_entry_states(
    gathered: Tensor, routing: ContextParallelRouting, *, log2_decay: bool = False
) -> Tensor:
    """Entry states [max_subsequences, H, V, K] of gathered forward slots [world, slots, ...]: zero
    for segments that start their sequence."""
    chains = routing.predecessors[:, : routing.chain]
    folded = fold_slots(gathered, chains, log2_decay=log2_decay)
    return scatter_folds(folded, routing.entry_sources)


def compose_exit_cotangents(
    gathered: Tensor,
    d_final_state: Tensor,
    routing: ContextParallelRouting,
    *,
    log2_decay: bool = False,
) -> Tensor:
    """Exit cotangents [max_subsequences, H, V, K]: the loss's own on every segment's exit state,
    d_final_state, and what flows back from other ranks."""
    chains = routing.successors[:, : routing.chain]
    folded = fold_slots(gathered, chains, log2_decay=log2_decay)
    return d_final_state + scatter_folds(folded, routing.exit_sources)


def _doubling(
    rows: Tensor,
    routing: ContextParallelRouting,
    group: dist.ProcessGroup,
    log2_decay: bool,
    reverse: bool,
) -> Generator[None, None, Tensor]:
    """The scan. A fragment that lets nothing through is a map whose transition is zero."""
    resets = routing.reverse_resets if reverse else routing.forward_resets
    values = rows.shape[-2] - (1 if log2_decay else rows.shape[-1])
    bias, transition, _ = split("context_parallel", rows, values, log2_decay)
    closed = float("-inf") if log2_decay else 0.0
    transition = transition.masked_fill(resets.view(-1, 1, 1, 1), closed)
    windows = list(torch.cat([bias, transition], -2).unbind(0))
    # What lies before a fragment, as far as its window reaches; None where nothing has come yet.
    before: list[Tensor | None] = [None] * len(windows)
    order = routing.order[::-1] if reverse else routing.order
    me = routing.cp_rank
    _meet(group, rows)
    step = 1
    while step <= routing.chain:
        # Of what comes last, no transition is applied to anything.
        last = 2 * step > routing.chain
        outgoing = [x[..., :values, :] if last else x for x in windows]
        arrived: dict[int, Tensor] = {}
        messages: list[Any] = []
        for source in range(len(order) - step):
            (sender, slot), (receiver, target) = order[source], order[source + step]
            if sender == receiver == me:
                arrived[target] = outgoing[slot]
            elif sender == me:
                peer = dist.get_global_rank(group, receiver)
                messages.append(
                    dist.P2POp(dist.isend, outgoing[slot].contiguous(), peer, group, tag=source)
                )
            elif receiver == me:
                arrived[target] = torch.empty_like(outgoing[target]).contiguous()
                peer = dist.get_global_rank(group, sender)
                messages.append(dist.P2POp(dist.irecv, arrived[target], peer, group, tag=source))
        under_way = dist.batch_isend_irecv(messages) if messages else []
        yield
        for work in under_way:
            work.wait()
        for slot, first in arrived.items():
            later = before[slot]
            if later is None:
                before[slot] = first
            elif last:
                before[slot] = merged(
                    first, later[..., :values, :], later[..., values:, :], log2_decay
                )
            else:
                before[slot] = composed(first, later, values, log2_decay)
            if not last:
                windows[slot] = composed(first, windows[slot], values, log2_decay)
        step *= 2
    nothing = rows.new_zeros(rows.shape[1], values, rows.shape[-1])
    return torch.stack([nothing if x is None else x[..., :values, :] for x in before])


_MET: WeakSet[dist.ProcessGroup] = WeakSet()


def _meet(group: dist.ProcessGroup, like: Tensor) -> None:
    """NCCL connects a group on its first call, which all ranks have to make; in a round of
    doubling some have nothing to say."""
    if like.is_cuda and group not in _MET:
        dist.all_reduce(like.new_zeros(1), group=group)
        _MET.add(group)


# The short convolution ------------------------------------------------------------------------


def context_parallel_conv_history(
    qkv: Tensor, routing: ContextParallelRouting, group: dist.ProcessGroup
) -> Tensor | None:
    """Exchange the tails of fragments: `causal_conv1d`'s initial_state of this rank's span.

    Args:
        qkv: The span [1, T, C], before the convolution.
        routing: From `plan.routing(device, conv_history=W - 1)`.
        group: Exactly the plan's ranks, in order; every one of them has to call.

    Returns:
        [max_subsequences, W - 1, C]: the inputs before each segment, zero before its sequence's
        first. None where the routing has no conv_history. Gradients flow to the ranks that own
        the tokens, summed there in rank order.

    Raises:
        RuleBroken, ShapeMismatch, DeviceMismatch: See `ContextParallelRouting.validate`.
    """
    routing.validate(qkv, group, "context_parallel_conv_history")
    if routing.tail_sources.shape[1] == 0:
        return None
    tokens = torch.cat([qkv[0], qkv.new_zeros(1, qkv.shape[2])])
    tails = tokens[routing.tail_sources]
    gathered = _Gather.apply(tails, group) if routing.world > 1 else tails[None]
    return compose_conv_histories(gathered.flatten(0, 1), routing)


def compose_conv_histories(gathered_tails: Tensor, routing: ContextParallelRouting) -> Tensor:
    """[max_subsequences, history, C] out of every rank's tails [world * slots, history, C]."""
    rows = gathered_tails.flatten(0, 1)
    return torch.cat([rows, rows.new_zeros(1, rows.shape[1])])[routing.conv_sources]


class _Gather(torch.autograd.Function):
    """`gather_slots`, differentiable: every rank's gradient of a slot goes to its owner."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gather_slots(rows, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad: Tensor) -> tuple[Tensor, None]:
        sent = grad[0].contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=ctx.group)
        # One order of summation, in fp32 at least, whatever the collective would take.
        wide = torch.promote_types(sent.dtype, torch.float32)
        return received.sum(0, dtype=wide).to(sent.dtype), None
