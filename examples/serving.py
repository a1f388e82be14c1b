"""A tiny server with continuous batching: requests arrive, prefill, decode and leave.

    python examples/serving.py                a few seconds, on a CPU or a GPU
    python examples/serving.py --requests 6 --slots 2

A model of random weights, two layers of short convolution and Gated DeltaNet, keeps what it knows
of every request in one row, a slot, of two pools per layer: histories of the convolution and
states. In every round of the loop

1. requests that have arrived get a free slot; its old contents are never looked at,
2. prompts are read, packed in one row: a budget of tokens a round, so that a long prompt is cut and
   goes on in the next one,
3. all requests whose prompt is read get one token, in one call per operator. The batch has a fixed
   size, its free rows index -1: what a CUDA graph would need,
4. requests that are done leave, and their slots are free.

At the end every request runs alone, without packing, cutting or neighbours, in pools of its own,
and has to write the same tokens.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from lagraph.ops import (
    causal_conv1d_decode,
    gate_transform,
    paged_causal_conv1d,
    paged_chunk_gdn,
    recurrent_gdn_decode,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

SYMBOLS, WIDTH, HEADS, HK, DIM, TAPS, LAYERS = 256, 64, 4, 2, 32, 4, 2
CHANNELS = (2 * HK + HEADS) * DIM  # q, k and v of the convolution


def unit(x: Tensor) -> Tensor:
    """x / |x| over the last axis, as the decode kernels and use_qk_l2norm_in_kernel have it."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Pools:
    """Histories and states of every layer, a row for each request; row 0 is nobody's."""

    def __init__(self, slots: int, device: torch.device) -> None:
        # Garbage, to show that a fresh slot is not read.
        self.histories = [
            torch.full((slots + 1, TAPS - 1, CHANNELS), float("nan"), device=device)
            for _ in range(LAYERS)
        ]
        self.states = [
            torch.full((slots + 1, HEADS, DIM, DIM), float("nan"), device=device)
            for _ in range(LAYERS)
        ]


class Model:
    """Random weights, and the two passes of a server: prompts, and one token for everybody."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator) * scale).to(device)

        self.embed = normal(SYMBOLS, WIDTH)
        self.layers = [
            {
                "rows": normal(WIDTH, CHANNELS, scale=WIDTH**-0.5),
                "gates": normal(WIDTH, 2 * HEADS, scale=WIDTH**-0.5),
                "taps": normal(CHANNELS, TAPS, scale=TAPS**-0.5),
                "A_log": normal(HEADS, scale=0.3),
                "dt_bias": normal(HEADS) - 2.0,
                "out": normal(HEADS * DIM, WIDTH, scale=(HEADS * DIM) ** -0.5),
            }
            for _ in range(LAYERS)
        ]

    def logits(self, x: Tensor) -> Tensor:
        """Hidden rows to logits."""
        return F.rms_norm(x, (WIDTH,)) @ self.embed.T * WIDTH**-0.5

    def prefill(
        self, tokens: Tensor, cu_seqlens: Tensor, slots: Tensor, resumed: Tensor, pools: Pools
    ) -> Tensor:
        """Packed pieces of prompts [T]; returns the logits after each piece [N, SYMBOLS]."""
        x = self.embed[tokens][None]
        for layer, histories, states in zip(self.layers, pools.histories, pools.states):
            normed = F.rms_norm(x, (WIDTH,))
            mixed = paged_causal_conv1d(
                normed @ layer["rows"], layer["taps"], histories, slots, activation="silu",
                cu_seqlens=cu_seqlens, has_initial_state=resumed,
            )  # fmt: skip
            q, k, v = mixed.split([HK * DIM, HK * DIM, HEADS * DIM], dim=-1)
            q, k = (unit(t.unflatten(-1, (HK, DIM))) for t in (q, k))
            raw_gate, raw_beta = (normed @ layer["gates"]).chunk(2, dim=-1)
            gate = gate_transform(raw_gate, layer["A_log"], layer["dt_bias"], kind="softplus")
            o = paged_chunk_gdn(
                q, k, v.unflatten(-1, (HEADS, DIM)), gate, raw_beta.sigmoid(), states, slots,
                cu_seqlens=cu_seqlens, has_initial_state=resumed,
            )  # fmt: skip
            x = x + o.flatten(2) @ layer["out"]
        return self.logits(x[0, cu_seqlens[1:] - 1])

    def decode(self, tokens: Tensor, slots: Tensor, pools: Pools) -> Tensor:
        """One token for each row [B]; rows with slot -1 are padding. Logits [B, SYMBOLS]."""
        x = self.embed[tokens]
        for layer, histories, states in zip(self.layers, pools.histories, pools.states):
            normed = F.rms_norm(x, (WIDTH,))
            mixed = causal_conv1d_decode(
                normed @ layer["rows"], layer["taps"], histories, activation="silu",
                state_indices=slots,
            )  # fmt: skip
            raw_gate, raw_beta = (normed @ layer["gates"])[None].chunk(2, dim=-1)
            o = recurrent_gdn_decode(
                mixed, raw_gate, raw_beta, layer["A_log"], layer["dt_bias"], states, slots
            )
            x = x + o[0].flatten(1) @ layer["out"]
        return self.logits(x)


@dataclass
class Request:
    """What is asked for, and how far it is."""

    name: int
    arrives: int
    prompt: Tensor
    wanted: int
    slot: int = 0
    read: int = 0
    starts: int = -1
    leaves: int = -1
    written: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    def take(self, logits: Tensor) -> None:
        """Choose the next token."""
        self.written.append(int(logits.argmax()))
        self.logits.append(logits)


def serve(
    model: Model, requests: Sequence[Request], slots: int, budget: int, device: torch.device
) -> int:
    """Run all requests; returns the rounds that it took."""
    pools, free = Pools(slots, device), deque(range(1, slots + 1))
    waiting, alive, now = deque(requests), [], 0
    while waiting or alive:
        while waiting and free and waiting[0].arrives <= now:
            request = waiting.popleft()
            request.slot, request.starts = free.popleft(), now
            alive.append(request)

        writing = [r for r in alive if r.read == len(r.prompt)]
        pieces, left = [], budget
        for request in alive:
            size = min(len(request.prompt) - request.read, left)
            if size:
                pieces.append((request, size))
                left -= size
        if pieces:
            tokens = torch.cat([r.prompt[r.read : r.read + size] for r, size in pieces])
            ends = torch.tensor([0, *(size for _, size in pieces)]).cumsum(0).to(torch.int32)
            at = torch.tensor([r.slot for r, _ in pieces], dtype=torch.int32)
            resumed = torch.tensor([r.read > 0 for r, _ in pieces])
            logits = model.prefill(*(x.to(device) for x in (tokens, ends, at, resumed)), pools)
            for (request, size), row in zip(pieces, logits):
                request.read += size
                if request.read == len(request.prompt):
                    request.take(row)

        if writing:
            batch = torch.zeros(slots, dtype=torch.int64)
            at = torch.full((slots,), -1, dtype=torch.int32)
            for row, request in enumerate(writing):
                batch[row], at[row] = request.written[-1], request.slot
            for request, row in zip(writing, model.decode(batch.to(device), at.to(device), pools)):
                request.take(row)

        for request in [r for r in alive if len(r.written) == r.wanted]:
            request.leaves = now
            alive.remove(request)
            free.append(request.slot)
        now += 1
    return now


def alone(model: Model, request: Request, device: torch.device) -> tuple[list[int], float]:
    """The request without a server: its tokens, and the largest difference of the logits."""
    pools, slot = Pools(1, device), torch.tensor([1], dtype=torch.int32, device=device)
    ends = torch.tensor([0, len(request.prompt)], dtype=torch.int32, device=device)
    fresh = torch.tensor([False], device=device)
    row = model.prefill(request.prompt.to(device), ends, slot, fresh, pools)[0]
    tokens, off = [], 0.0
    for served in request.logits:
        off = max(off, float((row - served).abs().max()))
        tokens.append(int(row.argmax()))
        row = model.decode(torch.tensor(tokens[-1:], device=device), slot, pools)[0]
    return tokens, off


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    """Serve, then check every request."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--slots", type=int, default=4, help="requests that are alive at once")
    parser.add_argument("--budget", type=int, default=48, help="prompt tokens a round")
    chosen = parser.parse_args(argv)

    torch.set_num_threads(1)  # tensors are small here: threads only wait for each other
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(1)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    requests, arrives = [], 0
    for name in range(chosen.requests):
        prompt = torch.randint(SYMBOLS, (number(3, 90),), generator=generator)
        requests.append(Request(name, arrives, prompt, number(4, 32)))
        arrives += number(0, 8)
    model = Model(device)
    serve(model, [Request(0, 0, requests[0].prompt, 2)], chosen.slots, chosen.budget, device)

    began = time.perf_counter()
    rounds = serve(model, requests, chosen.slots, chosen.budget, device)
    took = time.perf_counter() - began

    print("request  arrives  starts  leaves  slot  prompt  written  as alone  logits differ by")
    wrong = []
    for r in requests:
        tokens, off = alone(model, r, device)
        same = tokens == r.written and len(tokens) == r.wanted and off < 1e-3
        if not same:
            wrong.append(r.name)
        print(f"{r.name:7d}  {r.arrives:7d}  {r.starts:6d}  {r.leaves:6d}  {r.slot:4d}  "
              f"{len(r.prompt):6d}  {len(r.written):7d}  {'yes' if same else 'NO':>8}  "
              f"{off:16.1e}")  # fmt: skip
    read, written = (sum(n) for n in zip(*((len(r.prompt), len(r.written)) for r in requests)))
    print(f"{rounds} rounds on {device}: {read} tokens read, {written} written in {took:.2f} s, "
          f"{(read + written) / took:.0f} tokens per second")  # fmt: skip
    if wrong:
        raise SystemExit(f"requests {wrong} differ from their run alone")


if __name__ == "__main__":
    main()
