"""The correctness gate of `compare.py`: windows of a full-size run against an fp64 recurrence.

A token loop over 32768 tokens is too slow to check every timed run, and a smaller run would check
other kernels. But what a decaying recurrence does at a token depends on few tokens before it (and
its gradients on few after it), so three windows are enough to check the very run that is timed: the
start of the first sequence, the middle of a middle one, and the end of the last, each widened by so
many tokens that what lies beyond has decayed to exp(-DECAYED). One group of heads is checked: the
last query head and every output head that reads it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

__all__ = ["Truth", "Window", "error", "recurrence", "windows"]

DECAYED = 14.0
CHECKED = 64  # tokens checked in a window
HEADS = 16  # heads at once: under autograd a state is kept for every token

Tensors = dict[str, torch.Tensor]
GRADIENTS = {"q": "dQ", "k": "dK", "v": "dV", "g": "dG", "beta": "dBeta", "w": "dW"}


@dataclass(frozen=True)
class Window:
    """Tokens [start, start + size) of the packed axis, of which [low, high) are checked."""

    start: int
    size: int
    low: int
    high: int


def log_decay(family: str, x: Tensors) -> torch.Tensor:
    """Log decays: [T, HO], or [T, HO, K] for a gate per key."""
    if family == "mamba2":
        return x["a"] * torch.nn.functional.softplus(x["g"])
    return x["g"]


def windows(family: str, x: Tensors, lengths: tuple[int, ...]) -> list[Window]:
    """Three windows of one size; the whole sequences where they are short."""
    slowest = -log_decay(family, x).float().mean(0).max().item()
    margin = math.ceil(DECAYED / max(slowest, 1e-6) / CHECKED) * CHECKED
    size = min(min(lengths), CHECKED + 2 * margin)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    middle, last = len(lengths) // 2, len(lengths) - 1
    made = []
    for i, at in ((0, 0), (middle, (lengths[middle] - size) // 2), (last, lengths[last] - size)):
        low = 0 if at == 0 else margin
        high = size if at + size == lengths[i] else size - margin
        made.append(Window(starts[i] + at, size, low, high))
    return made


def recurrence(family: str, x: Tensors, n: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [B, L, HO, V] and last states [B, HO, V, K], one token after the other.

    x: fp64, [B, L, heads, ...], GDP's k, v and beta [B, L n, heads, ...]; a and d [heads].
    """
    batch, length, heads = x["g"].shape[:3]

    def rows(t: torch.Tensor) -> torch.Tensor:
        """[tokens, B HO, dim, 1], each head of HO with what it reads."""
        t = t if t.dim() == 4 else t[..., None]
        t = t.repeat_interleave(heads // t.shape[2], 2).transpose(0, 1)
        return t.reshape(t.shape[0], batch * heads, -1, 1)

    k, v, q = rows(x["k"]), rows(x["v"]), rows(x["q"])
    decay = rows(log_decay(family, x).exp()).mT
    if family == "mamba2":
        erase, write = None, v * rows(torch.nn.functional.softplus(x["g"]))
    else:
        beta = rows(x["beta"])
        erase = beta * k
        write = rows(x["w"]) * v if "w" in x else beta * v
        q = q * k.shape[2] ** -0.5
    state = v.new_zeros(batch * heads, v.shape[2], k.shape[2])
    outs = []
    for t in range(length):
        state = state * decay[t]
        for i in range(t * n, t * n + n):
            u = write[i] if erase is None else write[i] - torch.bmm(state, erase[i])
            state = torch.baddbmm(state, u, k[i].mT)
        outs.append(torch.bmm(state, q[t]))
    o = torch.stack(outs)[..., 0]
    if "d" in x:
        o = o + x["d"].repeat(batch)[:, None] * v[..., 0]
    o = o.reshape(length, batch, heads, -1).transpose(0, 1)
    return o, state.reshape(batch, heads, *state.shape[1:])


class Truth:
    """What is right in the windows of one batch, and how far a run is from it.

    x: inputs by node port name, packed; d_out: the gradient of the outputs, or None.
    """

    def __init__(
        self, family: str, x: Tensors, lengths: tuple[int, ...], n: int, d_out: torch.Tensor | None
    ) -> None:
        self.windows = windows(family, x, lengths)
        self.tokens, self.heads = x["g"].shape[:2]
        groups = x["q"].shape[1]
        self.group = self.heads // groups
        cut = {name: self._cut(name, t) for name, t in x.items() if name not in ("a", "d")}
        cut |= {name: t.double() for name, t in x.items() if name in ("a", "d")}
        self.expected: Tensors = {}
        blocks = range(0, self.group, HEADS)
        outs, states = [], []
        leaves = {name: cut[name].requires_grad_(d_out is not None) for name in GRADIENTS
                  if name in cut}  # fmt: skip
        for first in blocks:
            part = slice(first, first + HEADS)
            at = self.heads - self.group + first
            block = {
                name: t[at : at + HEADS] if t.dim() == 1 else _heads(t, part)
                for name, t in (cut | leaves).items()
            }
            with torch.set_grad_enabled(d_out is not None):
                o, state = recurrence(family, block, n)
                if d_out is not None:
                    torch.autograd.backward(o, self._cut("O", d_out)[:, :, part])
            outs.append(o.detach())
            states.append(state.detach())
        self.expected["O"] = torch.cat(outs, 2)
        self.expected["final_state"] = torch.cat(states, 1)
        if d_out is not None:
            self.expected |= {GRADIENTS[name]: t.grad for name, t in leaves.items()}

    def _cut(self, name: str, t: torch.Tensor) -> torch.Tensor:
        """A packed tensor in the windows and the last group of heads: fp64 [B, L, heads, ...]."""
        n = t.shape[0] // self.tokens
        parts = [t[w.start * n : (w.start + w.size) * n] for w in self.windows]
        heads = t.shape[1] * self.group // self.heads  # 1, or the group
        return torch.stack(parts)[:, :, t.shape[1] - max(heads, 1) :].double().detach()

    def errors(self, got: Tensors) -> dict[str, float]:
        """Relative L2 error of every result that is there, over the checked tokens."""
        found = {}
        for name, t in got.items():
            want = self.expected[name]
            if name == "final_state":
                found[name] = error(t[-1, self.heads - self.group :], want[-1])
                continue
            n = t.shape[0] // self.tokens
            have = self._cut(name, t)
            pairs = [
                (have[i, w.low * n : w.high * n], want[i, w.low * n : w.high * n])
                for i, w in enumerate(self.windows)
            ]
            found[name] = error(*(torch.cat(side) for side in zip(*pairs)))
        return found


def _heads(t: torch.Tensor, part: slice) -> torch.Tensor:
    """Some heads of a group; what the group shares is left whole."""
    return t if t.shape[2] == 1 else t[:, :, part]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want||; infinite where a number is not finite."""
    got, want = got.double(), want.double()
    if not bool(torch.isfinite(got).all()):
        return math.inf
    return ((got - want).norm() / want.norm().clamp(min=1e-30)).item()
