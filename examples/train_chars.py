"""Train a small character model with Gated DeltaNet layers on the Book of Genesis, on a CPU.

    python examples/train_chars.py            about a minute on two cores
    python examples/train_chars.py --quick    a few seconds, to see that it runs

Shows the operator in a real layer: projections, a short convolution, the safe gate, a gated norm.
Training packs several pieces of the text into one ragged batch; sampling carries the state from
character to character.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lagraph.ops import gated_delta_net

if TYPE_CHECKING:
    from collections.abc import Iterable

TEXT = Path(__file__).parent / "data" / "genesis.txt"


class GatedDeltaLayer(nn.Module):
    """The token mixer: q, k, v through a causal convolution, then GDN, then a gated norm."""

    def __init__(self, width: int, heads: int, taps: int = 4) -> None:
        super().__init__()
        self.heads, self.dim, self.taps = heads, width // heads, taps
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.conv = nn.Parameter(torch.randn(3 * width, 1, taps) / math.sqrt(taps))
        self.gates = nn.Linear(width, 2 * heads)
        self.a_log = nn.Parameter(torch.rand(heads).mul(4).add(0.1).log())
        self.dt_bias = nn.Parameter(torch.full((heads,), -3.0))
        self.norm = nn.RMSNorm(self.dim)
        self.z = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(
        self, x: Tensor, cu_seqlens: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """x [N, L, width], equal pieces; state: (last inputs of the convolution, S)."""
        pieces, length, width = x.shape
        raw = self.qkv(x)
        past = raw.new_zeros(pieces, self.taps - 1, 3 * width) if state is None else state[0]
        raw = torch.cat([past, raw], 1)
        mixed = F.silu(F.conv1d(raw.mT, self.conv, groups=3 * width)).mT
        q, k, v = mixed.reshape(pieces * length, 3, self.heads, self.dim).unbind(1)
        beta, g = self.gates(x).reshape(pieces * length, 2, self.heads).unbind(1)
        o, final = gated_delta_net(
            q, k, v, g, beta, cu_seqlens,
            initial_state=None if state is None else state[1],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            safe_gate=True, a_log=self.a_log, dt_bias=self.dt_bias,
        )  # fmt: skip
        o = self.norm(o).reshape(pieces, length, width) * F.silu(self.z(x))
        return self.out(o), (raw[:, 1 - self.taps :], final)


class Block(nn.Module):
    """Pre-norm residual block: the mixer, then a gated feed-forward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.mixer = GatedDeltaLayer(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, cu_seqlens: Tensor, state=None) -> tuple[Tensor, tuple]:
        """x [N, L, width]."""
        mixed, state = self.mixer(self.norm1(x), cu_seqlens, state)
        x = x + mixed
        a, b = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(a) * b), state


class CharModel(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, symbols: int, width: int = 128, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(symbols, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, symbols)

    def forward(self, tokens: Tensor, states: list | None = None) -> tuple[Tensor, list]:
        """tokens [N, L]; returns logits [N, L, symbols] and every block's state."""
        pieces, length = tokens.shape
        cu_seqlens = torch.arange(pieces + 1, dtype=torch.int32) * length
        x, kept = self.embed(tokens), []
        for i, block in enumerate(self.blocks):
            x, state = block(x, cu_seqlens, None if states is None else states[i])
            kept.append(state)
        return self.head(self.norm(x)), kept


def progress(steps: int) -> Iterable[int]:
    """A progress bar where tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return range(steps)
    return tqdm(range(steps), unit="step", ncols=80)


@torch.no_grad()
def sample(model: CharModel, symbols: str, start: str, length: int, seed: int = 0) -> str:
    """Write on from `start`, one character a call, carrying the state."""
    generator = torch.Generator().manual_seed(seed)
    text, states = start, None
    tokens = torch.tensor([[symbols.index(c) for c in start]])
    for _ in range(length):
        logits, states = model(tokens, states)
        chances = (logits[0, -1] / 0.7).softmax(-1)
        tokens = torch.multinomial(chances, 1, generator=generator)[None]
        text += symbols[int(tokens)]
    return text


def curve(losses: list[float], rows: int = 8) -> str:
    """The loss as a bar chart in text."""
    size = max(len(losses) // rows, 1)
    lines = []
    for at in range(0, len(losses), size):
        mean = sum(losses[at : at + size]) / len(losses[at : at + size])
        lines.append(f"  step {at:4d}  {mean:5.2f}  {'#' * round(mean * 12)}")
    return "\n".join(lines)


def main() -> None:
    """Train, show the loss, write a little."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--quick", action="store_true", help="a few steps of a tiny model")
    chosen = parser.parse_args()
    steps, pieces, length = (6, 4, 64) if chosen.quick else (chosen.steps, 8, 128)

    torch.manual_seed(0)
    text = TEXT.read_text(encoding="utf-8")
    symbols = "".join(sorted(set(text)))
    data = torch.tensor([symbols.index(c) for c in text])
    model = CharModel(len(symbols), **({"width": 32, "depth": 1} if chosen.quick else {}))
    count = sum(p.numel() for p in model.parameters())
    print(f"{len(text)} characters, {len(symbols)} symbols, {count} parameters")

    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    losses: list[float] = []
    began = time.perf_counter()
    bar = progress(steps)
    for _ in bar:
        starts = torch.randint(len(data) - length - 1, (pieces,))
        window = data[starts[:, None] + torch.arange(length + 1)]
        logits, _ = model(window[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if hasattr(bar, "set_postfix"):
            bar.set_postfix(loss=f"{losses[-1]:.2f}")
    print(f"{steps} steps in {time.perf_counter() - began:.0f} s; loss (nats per character):")
    print(curve(losses))
    print("\n" + sample(model, symbols, "And God said", 60 if chosen.quick else 400))


if __name__ == "__main__":
    main()
