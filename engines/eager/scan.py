"""Drivers of the four directions: varlen batches, states and their pools, checkpoints, gradients.

Everything runs tile by tile (see `table`), so that memory beyond inputs and outputs is that of a
tile; the backward holds a few, and the state that enters each. It records a tile under autograd
from that state, and carries the state's gradient to the tile before.
"""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from lagraph.engines.eager.chunk import Update, run_chunks
from lagraph.engines.eager.steps import FAMILIES
from lagraph.engines.eager.table import Block, Tile, blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from lagraph.problem import Problem

__all__ = ["Scanner"]

# Token inputs, and the lane that gathers each.
LANES = {"q": "reads", "k": "keys", "v": "keys", "g": "decays", "beta": "keys", "w": "keys",
         "z": "reads"}  # fmt: skip
PARAMS = ("a_log", "dt_bias", "a", "d")
GRADS = {"q": "dQ", "k": "dK", "v": "dV", "g": "dG", "beta": "dBeta", "w": "dW", "z": "dZ",
         "a_log": "d_a_log", "dt_bias": "d_dt_bias", "a": "dA", "d": "dD"}  # fmt: skip
# Numbers that a tile's largest tensors hold: enough to keep the cores busy, within the caches.
TILE_NUMBERS = 1 << 21
# Tiles that the backward keeps recorded at a time.
HELD_TILES = 8


class Scanner:
    """One call: a problem, its tensors by name, and the methods that fill the outputs."""

    def __init__(
        self,
        problem: Problem,
        chunk: int,
        ins: Mapping[str, torch.Tensor],
        outs: Mapping[str, torch.Tensor],
    ) -> None:
        self.problem, self.options, self.traits = problem, problem.options, problem.traits
        self.family = FAMILIES[problem.family]
        self.ins, self.outs, self.chunk = ins, outs, chunk
        self.device = ins["k"].device
        self.dtype = torch.float64 if problem.io_dtype == torch.float64 else torch.float32
        sizes = problem.sizes
        self.heads, self.keys, self.values = sizes["HO"], sizes["K"], sizes["V"]
        self.substeps = sizes.get("n", 1) if self.traits.substeps else 1
        self.params = {name: ins[name].to(self.dtype) for name in PARAMS if name in ins}
        self.tokens = tuple(name for name in LANES if name in ins)
        # One read of the device, for offsets and slots together.
        offsets = ins["cu_seqlens"].long()
        count = len(offsets) - 1
        slots = ins.get("state_indices")
        known = offsets if slots is None else torch.cat([offsets, slots.long()])
        values = known.tolist()
        self.spans = list(pairwise(values[: count + 1]))
        self.slots = list(range(count)) if slots is None else values[count + 1 :]
        self.active = [i for i in range(count) if self.slots[i] >= 0]

    # ---- pieces that the directions share

    def blocks(self) -> Iterator[Block]:
        """The call's sequences, in blocks."""
        every = getattr(self.options, "checkpoint_every_n_tokens", 0)
        numbers = self.chunk * (self.keys + self.values) + self.values * self.keys
        return blocks(
            self.spans,
            self.active,
            chunk=self.chunk,
            every=every if "state_checkpoints" in self.outs else 0,
            substeps=self.substeps,
            limit=max(TILE_NUMBERS // (self.heads * numbers), 1),
            apart=self.options.batch_invariant,
            device=self.device,
        )

    def rows(self, block: Block) -> torch.Tensor:
        """Rows of the states (or of the pool) that belong to the sequences of a block."""
        return torch.tensor([self.slots[i] for i in block.ids], device=self.device)

    def states(self, name: str, block: Block) -> torch.Tensor:
        """States [n, HO, V, K] of a block's sequences from input `name`, zero where absent."""
        if name in self.ins:
            return self.ins[name].index_select(0, self.rows(block)).to(self.dtype)
        shape = (len(block.ids), self.heads, self.values, self.keys)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def store(self, name: str, block: Block, s: torch.Tensor) -> None:
        """Write a block's states, or whatever else there is one of per sequence."""
        if name in self.outs:
            out = self.outs[name]
            out.index_copy_(0, self.rows(block), s.to(out))

    def gather(self, tile: Tile, *skip: str) -> dict[str, torch.Tensor]:
        """A tile's tokens by name, [B, heads, C, ...]."""
        return {
            name: getattr(tile, LANES[name]).gather(self.ins[name], self.dtype)
            for name in self.tokens
            if name not in skip
        }

    def update(
        self, tile: Tile, tensors: Mapping[str, torch.Tensor]
    ) -> tuple[SimpleNamespace, Update]:
        """What the family's step sees, and what it makes of it; slots without a row do nothing."""
        named = {name: tensors.get(name) for name in (*LANES, *PARAMS)}
        x = SimpleNamespace(**named, io_dtype=self.problem.io_dtype)
        norm = getattr(self.options, "use_qk_l2norm", False)
        x.q = _scaled(x.q, getattr(self.options, "scale", 1.0), norm)
        x.k = _scaled(x.k, 1.0, norm)
        heads = self.heads
        if self.traits.gate == "head":  # groups of heads share products
            heads = x.k.shape[1] if x.q is None else max(x.q.shape[1], x.k.shape[1])
        x.q, x.k, x.v = _expand(x.q, heads), _expand(x.k, heads), _expand(x.v, self.heads)
        if x.v is None:
            x.v = x.k.new_zeros(len(x.k), self.heads, x.k.shape[2], self.values)
        made = self.family.step(x, self.options)
        if (idle := tile.decays.mask(made.g)) is not None:
            made.g = made.g.masked_fill(idle if made.g.dim() == 3 else idle[..., None], 0.0)
        if (idle := tile.keys.mask(made.g)) is not None:
            idle = idle[..., None]
            made.write = made.write.masked_fill(idle, 0.0)
            if made.amount is not None:
                made.amount = made.amount.masked_fill(idle, 0.0)
            elif made.erase is not None:
                made.erase = made.erase.masked_fill(idle, 0.0)
        return x, made

    # ---- directions

    def forward(self) -> None:
        """O, O_pre, final_state, state_checkpoints."""
        before, dumps = self.outs.get("O_pre"), self.outs.get("state_checkpoints")
        for i in set(range(len(self.spans))).difference(self.active):
            for name in {"O", "O_pre"}.intersection(self.outs):
                self.outs[name][slice(*self.spans[i])] = 0
        for block in self.blocks():
            s = self.states("initial_state", block)
            for tile in map(block.tile, range(len(block))):
                x, made = self.update(tile, self.gather(tile) | self.params)
                y, entry, end = run_chunks(made, s[: tile.counts[0]], tile.counts)
                s[: tile.counts[0]] = end
                pre, y = self.family.readout(x, y)
                tile.reads.scatter(y, self.outs["O"])
                if before is not None:
                    tile.reads.scatter(pre, before)
                if dumps is not None and tile.dumps is not None:
                    chunks, rows = tile.dumps
                    dumps.index_copy_(0, rows, entry.index_select(0, chunks).to(dumps.dtype))
            self.store("final_state", block, s)

    def backward(self) -> None:
        """Gradients of every input."""
        totals = {n: torch.zeros_like(p) for n, p in self.params.items()}
        for block in self.blocks():
            ds = self.states("d_final_state", block)
            for tile, leaves, y, end in self.recorded(block):
                count = tile.counts[0]
                with torch.inference_mode(False):
                    dy = _silence(tile.reads.gather(self.ins["dO"], self.dtype), tile)
                    grads = torch.autograd.grad(
                        [y, end], list(leaves.values()), [dy, ds[:count]],
                        allow_unused=True, materialize_grads=True,
                    )  # fmt: skip
                grad = dict(zip(leaves, grads, strict=True))
                ds[:count] = grad["s"]
                for name in self.tokens:
                    if (out := self.outs.get(GRADS[name])) is not None:
                        getattr(tile, LANES[name]).scatter(grad[name], out)
                for name, total in totals.items():
                    total += grad[name]
            self.store("d_initial_state", block, ds)
        for name, total in totals.items():
            if (out := self.outs.get(GRADS[name])) is not None:
                out.copy_(total)

    def recorded(self, block: Block) -> Iterator[tuple[Tile, dict[str, torch.Tensor], Any, Any]]:
        """A block's tiles, last first: tile, leaves, outputs and end states, under autograd.

        The way to the last tile records as many as may be held; others are recorded once more.
        """
        held: dict[int, Any] = {}
        s, entries = self.states("initial_state", block), []
        for index in range(len(block)):
            entries.append(s)
            if index >= len(block) - HELD_TILES:
                held[index] = self.record(block.tile(index), s)
                s = held[index][3].detach()
            else:
                tile = block.tile(index)
                _, made = self.update(tile, self.gather(tile, "q", "z") | self.params)
                s = run_chunks(made, s[: tile.counts[0]], tile.counts)[2]
        for index in reversed(range(len(block))):
            entry = entries.pop()
            yield held.pop(index, None) or self.record(block.tile(index), entry)

    def record(
        self, tile: Tile, s: torch.Tensor
    ) -> tuple[Tile, dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        """Run a tile from states s [n, HO, V, K] under autograd, whatever mode the caller is in."""
        with torch.inference_mode(False):
            leaves = self.gather(tile) | {n: p.clone() for n, p in self.params.items()}
            leaves["s"] = s[: tile.counts[0]].clone()
            with torch.enable_grad():
                for leaf in leaves.values():
                    leaf.requires_grad_()
                x, made = self.update(tile, leaves)
                # Values of outputs matter only to a gate that multiplies them.
                y, _, end = run_chunks(made, leaves["s"], tile.counts, blank=x.z is None)
                _, y = self.family.readout(x, y)
        return tile, leaves, y, end

    def summary(self) -> None:
        """final_state and transition."""

        def ahead(tile: Tile, made: Update, s: torch.Tensor) -> torch.Tensor:
            return run_chunks(made, s, tile.counts)[2]

        self.summarize("initial_state", "final_state", ahead, 1)

    def summary_backward(self) -> None:
        """d_initial_state and transition. Writes do not matter to them, so they are zero."""

        def back(tile: Tile, made: Update, ds: torch.Tensor) -> torch.Tensor:
            dy = _silence(tile.reads.gather(self.ins["dO"], self.dtype), tile)
            dy = F.pad(dy, (0, ds.shape[2] - dy.shape[3]))
            with torch.enable_grad():
                s = torch.zeros(ds.shape, dtype=self.dtype, device=self.device).requires_grad_()
                y, _, end = run_chunks(made, s, tile.counts, blank=True)
            return torch.autograd.grad([y, end], [s], [dy, ds])[0]

        self.summarize("d_final_state", "d_initial_state", back, -1)

    def summarize(
        self,
        source: str,
        target: str,
        walk: Callable[[Tile, Update, torch.Tensor], torch.Tensor],
        direction: int,
    ) -> None:
        """Carry states from input `source` over every tile to output `target`.

        The transition is what becomes of an identity, as further rows of the same state.
        """
        extra = self.keys if self.traits.delta and "transition" in self.outs else 0
        eye = torch.eye(extra, dtype=self.dtype, device=self.device)
        for block in self.blocks():
            s = self.states(source, block)
            log2 = torch.zeros(s.shape[:2], dtype=self.dtype, device=self.device)
            if extra:
                s = torch.cat([s, eye.expand(*s.shape[:2], -1, -1)], 2)
            for index in range(len(block))[::direction]:
                tile = block.tile(index)
                with torch.inference_mode(False):
                    _, made = self.update(tile, self.gather(tile) | self.params)
                    made.write = F.pad(made.write, (0, extra))
                    end = walk(tile, made, s[: tile.counts[0]])
                s[: tile.counts[0]] = end
                if not self.traits.delta:
                    sums, at = made.g.sum(-1) / math.log(2.0), 0
                    for count in tile.counts:
                        log2[:count] += sums[at : at + count]
                        at += count
            self.store(target, block, s[:, :, : self.values])
            self.store("transition", block, s[:, :, self.values :] if extra else log2)


def _scaled(x: torch.Tensor | None, scale: float, norm: bool) -> torch.Tensor | None:
    """scale x, or scale x / |x|."""
    if x is None or (scale == 1.0 and not norm):
        return x
    if norm:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * (scale * (length.square() + 1e-6).rsqrt())
    return x * scale


def _expand(x: torch.Tensor | None, heads: int) -> torch.Tensor | None:
    """Heads of dim 1, each repeated to serve its group."""
    if x is None or x.shape[1] == heads:
        return x
    return x.repeat_interleave(heads // x.shape[1], 1)


def _silence(dout: torch.Tensor, tile: Tile) -> torch.Tensor:
    """Zero dO where a slot has no output."""
    idle = tile.reads.mask(dout)
    return dout if idle is None else dout.masked_fill(idle[..., None], 0.0)
