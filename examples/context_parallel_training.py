"""Train a small model on one long stream, cut over all ranks, and check it against one rank.

    torchrun --nproc-per-node 4 examples/context_parallel_training.py            CPU, gloo
    torchrun --nproc-per-node 2 examples/context_parallel_training.py --cuda     GPUs, NCCL
    python examples/context_parallel_training.py                                 one rank

Every layer has a short convolution and a recurrence, both over sequences that do not fit on one
rank. Each rank holds its span of the packed stream; states and the convolution's history travel.
--partition contiguous, zigzag or documents; --family gdn or kda. Without --cuda it runs in fp64,
where shards and one rank agree to the last few bits.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lagraph.ops import causal_conv1d, chunk_gdn, chunk_kda
from lagraph.ops.context_parallel import (
    ContextParallelPlan,
    context_parallel_conv_history,
    context_parallel_gdn,
    context_parallel_kda,
    contiguous_fragments,
    document_aligned_fragments,
    zigzag_fragments,
)

if TYPE_CHECKING:
    from collections.abc import Callable

DOCUMENTS = (0, 37, 700, 701, 1024)  # offsets of the packed documents
TAPS = 4


class Layer(nn.Module):
    """q, k, v through a causal convolution, a recurrence, an output projection."""

    def __init__(self, family: str, width: int, heads: int, dim: int) -> None:
        super().__init__()
        self.heads, self.dim, self.channels = heads, dim, family == "kda"
        self.qkv = nn.Linear(width, 3 * heads * dim, bias=False)
        self.taps = nn.Parameter(torch.randn(3 * heads * dim, TAPS) / TAPS)
        self.gate = nn.Linear(width, heads * (dim if self.channels else 1))
        self.beta = nn.Linear(width, heads)
        self.out = nn.Linear(heads * dim, width, bias=False)

    def forward(self, x: Tensor, mix: Callable[..., Tensor], conv: Callable[..., Tensor]) -> Tensor:
        """x [1, T, width], this rank's span."""
        mixed = conv(self.qkv(x), self.taps).unflatten(-1, (3, self.heads, self.dim))
        q, k, v = mixed.unbind(2)
        gate = F.logsigmoid(self.gate(x).float() if x.dtype is not torch.float64 else self.gate(x))
        if self.channels:
            gate = gate.unflatten(-1, (self.heads, self.dim))
        o = mix(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, gate, self.beta(x).sigmoid())
        return x + self.out(o.flatten(2))


class Model(nn.Module):
    """Predicts the next token of every document."""

    def __init__(self, family: str, dim: int, symbols: int = 64, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(symbols, width)
        self.layers = nn.ModuleList(Layer(family, width, 2, dim) for _ in range(2))
        self.head = nn.Linear(width, symbols)

    def forward(self, tokens: Tensor, targets: Tensor, mix: Callable, conv: Callable) -> Tensor:
        """The loss summed over this rank's tokens; targets of -100 do not count."""
        x = self.embed(tokens)[None]
        for layer in self.layers:
            x = layer(x, mix, conv)
        return F.cross_entropy(self.head(x)[0], targets, reduction="sum")


def stream(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens of the packed documents, each a walk of its own stride; and their next tokens."""
    lengths = torch.tensor(DOCUMENTS).diff()
    strides = torch.randint(1, 8, (len(lengths),), generator=generator).repeat_interleave(lengths)
    tokens = strides.cumsum(0) % 64
    targets = tokens.roll(-1)
    targets[torch.tensor(DOCUMENTS[1:]) - 1] = -100
    return tokens, targets


def train(model: Model, steps: int, data: Callable, mix: Callable, conv: Callable, group) -> list:
    """Losses; gradients are summed over the group, as every rank holds a part of the tokens."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), []
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens, targets, total = data(*stream(generator))
        optimizer.zero_grad()
        loss = model(tokens, targets, mix, conv) / total
        loss.backward()
        value = loss.detach().double()
        if group is not None:
            for p in model.parameters():
                dist.all_reduce(p.grad, group=group)
            dist.all_reduce(value, group=group)
        optimizer.step()
        losses.append(float(value))
    return losses


def main() -> None:
    """Train on shards and, on every rank, on the whole; compare losses and weights."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--family", choices=("gdn", "kda"), default="gdn")
    parser.add_argument("--partition", default="contiguous",
                        choices=("contiguous", "zigzag", "documents"))  # fmt: skip
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()

    if "RANK" not in os.environ:  # no torchrun: a group of one
        store = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    else:
        store = {}
    device = torch.device("cpu")
    if args.cuda:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        store["device_id"] = device  # connects at once, to the right GPU
    dist.init_process_group("nccl" if args.cuda else "gloo", **store)
    group = dist.group.WORLD
    rank, world = dist.get_rank(), dist.get_world_size()
    dtype, dim = (torch.float32, 64) if args.cuda else (torch.float64, 16)

    # Who owns what; the rest of the program does not depend on it.
    tables = {
        "contiguous": lambda: contiguous_fragments(DOCUMENTS[-1], world),
        "zigzag": lambda: zigzag_fragments(DOCUMENTS[-1], world),
        "documents": lambda: document_aligned_fragments(DOCUMENTS, world),
    }
    plan = ContextParallelPlan.from_fragments(DOCUMENTS, tables[args.partition](), rank)
    ids, routing = plan.global_token_ids("cpu"), plan.routing(device, conv_history=TAPS - 1)

    recipe = {"gdn": context_parallel_gdn, "kda": context_parallel_kda}[args.family]
    whole = {"gdn": chunk_gdn, "kda": chunk_kda}[args.family]
    offsets = torch.tensor(DOCUMENTS, dtype=torch.int32, device=device)

    def shared_mix(*tokens: Tensor) -> Tensor:
        return recipe(*tokens, routing=routing, group=group)[0]

    def shared_conv(x: Tensor, taps: Tensor) -> Tensor:
        history = context_parallel_conv_history(x, routing, group)
        return causal_conv1d(x, taps, activation="silu", cu_seqlens=routing.cu_seqlens,
                             initial_state=history)  # fmt: skip

    def my_part(tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, int]:
        counted = int((targets != -100).sum())
        return tokens[ids].to(device), targets[ids].to(device), counted

    def everything(tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, int]:
        return tokens.to(device), targets.to(device), int((targets != -100).sum())

    def fresh() -> Model:
        torch.manual_seed(0)
        return Model(args.family, dim).to(device, dtype)

    sharded, alone = fresh(), fresh()
    losses = train(sharded, args.steps, my_part, shared_mix, shared_conv, group)
    wanted = train(
        alone, args.steps, everything, lambda *t: whole(*t, cu_seqlens=offsets)[0],
        partial(causal_conv1d, activation="silu", cu_seqlens=offsets), None,
    )  # fmt: skip
    drift = max(
        float((a - b).detach().norm() / b.detach().norm())
        for a, b in zip(sharded.parameters(), alone.parameters(), strict=True)
    )
    off = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
    bound = 1e-4 if dtype is torch.float32 else 1e-10
    if rank == 0:
        print(f"{args.family} on {world} rank(s), {args.partition}: "
              f"{len(plan.subsequences)} segments here, longest chain {plan.chain}")  # fmt: skip
        print("losses", " ".join(f"{loss:.4f}" for loss in losses))
        print(f"against one rank: losses differ by {off:.1e}, weights by {drift:.1e}")
    dist.destroy_process_group()
    if not (off < bound and drift < bound):
        raise SystemExit(f"rank {rank}: shards and one rank disagree: {off:.1e}, {drift:.1e}")


if __name__ == "__main__":
    main()
