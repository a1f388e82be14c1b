"""Decode, token by token, with the very bits that training had.

    python examples/zero_drift_decode.py                   a few seconds, on a CPU or a GPU
    python examples/zero_drift_decode.py --tokens 128 --dtype bfloat16

A recurrent step adds its numbers up in another order than a chunk of 64 tokens does, so that
decoding drifts away from what training computed, by a rounding here and there. Two ways around it,
both compared with training by torch.equal:

- GDN and KDA: keep the state after the last complete chunk of 64 and the tokens since, in a buffer
  of 64 rows. A step runs the training function on the buffer from that state, and takes its own
  row. What lies behind the row cannot reach it, and the shapes are those of a complete chunk.
- KDA, `ReplayState`: `paged_chunk_kda` keeps such a buffer for every slot of a pool, in place.

The price is up to 64 times the arithmetic of a step, and the memory of the kept tokens.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from lagraph.ops import (
    ReplayState,
    chunk_gdn,
    chunk_kda,
    paged_chunk_kda,
    recurrent_gdn,
    recurrent_kda,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CHUNK, HEADS, K, V = 64, 2, 32, 32


def unit(x: Tensor) -> Tensor:
    """x / |x| over the last axis, as the decode kernels and use_qk_l2norm_in_kernel have it."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def inputs(variant: str, tokens: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """q, k, v, gate, beta [1, T, ...]: what a layer hands to its core."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, tokens, *shape, generator=generator)

    q, k = (unit(normal(HEADS, K)) for _ in range(2))
    gate = -F.softplus(normal(HEADS, K) if variant == "kda" else normal(HEADS))
    x = [t.to(dtype) for t in (q, k, normal(HEADS, V))]
    return [t.to(device) for t in (*x, gate, normal(HEADS).sigmoid())]


class ReplayDecoder:
    """One sequence's decoder: the state after the last complete chunk, and the tokens since."""

    def __init__(self, core: Callable[..., tuple[Tensor, Tensor | None]], like: list[Tensor]):
        self.core, self.count = core, 0
        self.kept = [x.new_zeros(1, CHUNK, *x.shape[2:]) for x in like]
        self.state = like[0].new_zeros(1, HEADS, V, K, dtype=torch.float32)

    def step(self, token: list[Tensor]) -> Tensor:
        """q, k, v, gate, beta [1, 1, ...] to the output [1, 1, H, V]."""
        row = self.count % CHUNK
        for rows, x in zip(self.kept, token):
            rows[:, row] = x[:, 0]
        o, state = self.core(*self.kept, self.state, output_final_state=True)
        self.count += 1
        if row == CHUNK - 1:  # complete: the rows that follow overwrite the buffer
            self.state = state
            for rows in self.kept:
                rows.zero_()
        return o[:, row : row + 1]


def by_buffer(core: Callable[..., tuple[Tensor, Tensor | None]], x: list[Tensor]) -> Tensor:
    """Every token through a `ReplayDecoder`."""
    decoder = ReplayDecoder(core, x)
    return torch.cat([decoder.step([t[:, i : i + 1] for t in x]) for i in range(x[0].shape[1])], 1)


def by_pool(x: list[Tensor]) -> Tensor:
    """Every token through `paged_chunk_kda` with a `ReplayState`, in slot 2 of 3."""
    device = x[0].device
    count = torch.zeros(3, dtype=torch.int32, device=device)
    replay = ReplayState(*(t.new_zeros(3, CHUNK, *t.shape[2:]) for t in x), count)
    pool = torch.zeros(3, HEADS, V, K, device=device)
    slot = torch.tensor([2], dtype=torch.int32, device=device)
    steps = [
        paged_chunk_kda(*(t[:, i : i + 1] for t in x), pool, slot, replay_state=replay)
        for i in range(x[0].shape[1])
    ]
    return torch.cat(steps, 1)


def by_recurrence(function: Callable[..., tuple[Tensor, Tensor | None]], x: list[Tensor]) -> Tensor:
    """Every token through the recurrence: what drifts."""
    state, steps = None, []
    for i in range(x[0].shape[1]):
        o, state = function(*(t[:, i : i + 1] for t in x), state, output_final_state=True)
        steps.append(o)
    return torch.cat(steps, 1)


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> None:
    """Decode in every way, and compare with training."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=192, help="a multiple of 64")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    chosen = parser.parse_args(argv)
    if chosen.tokens < 1 or chosen.tokens % CHUNK:
        parser.error(f"--tokens is a multiple of {CHUNK}, the chunks that training has")

    torch.set_num_threads(1)  # tensors are small here: threads only wait for each other
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, chosen.dtype)
    gdn, kda = (inputs(variant, chosen.tokens, dtype, device) for variant in ("gdn", "kda"))
    rows: list[tuple[str, str, bool, list[Tensor], Callable, Callable]] = [
        ("gdn", "replayed chunk", True, gdn, chunk_gdn, lambda x: by_buffer(chunk_gdn, x)),
        ("kda", "replayed chunk", True, kda, chunk_kda, lambda x: by_buffer(chunk_kda, x)),
        ("kda", "ReplayState", True, kda, chunk_kda, by_pool),
        ("gdn", "recurrence", False, gdn, chunk_gdn, lambda x: by_recurrence(recurrent_gdn, x)),
        ("kda", "recurrence", False, kda, chunk_kda, lambda x: by_recurrence(recurrent_kda, x)),
    ]
    print(f"{chosen.tokens} tokens on {device}")
    print("variant  decode          dtype     same bits   largest difference   ms a token")
    failed = []
    for variant, way, must, x, training, decode in rows:
        trained, _ = training(*x)
        decode([t[:, :1] for t in x])  # what is done once is not timed
        began = time.perf_counter()
        decoded = decode(x)
        same = torch.equal(decoded, trained)
        took = (time.perf_counter() - began) * 1e3 / chosen.tokens
        off = float((decoded.float() - trained.float()).abs().max())
        name = str(x[0].dtype).removeprefix("torch.")
        print(f"{variant:<9}{way:<16}{name:<10}{'yes' if same else 'no':<12}{off:<21.1e}{took:.2f}")
        if must and not same:
            failed.append(f"{variant}, {way}")
    if failed:
        raise SystemExit(f"not bitwise equal to training: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
