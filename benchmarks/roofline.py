"""What the hardware allows: bytes and matrix work of a call, and a picture of how near one comes.

The floor of one direction is the larger of two times: every input read once and every output
written once at the memory's copy rate, and the matrix products of the fused chunk algorithm at the
rate of a large bf16 product. Forward + backward is the sum of two floors, since one pass follows
the other.

Matrix work, per token and output head, with chunks of C tokens (a product of [m, k] and [k, n]
counts 2 m k n; the halves of causal scores that are zero are counted, since tiles are dense):

    forward     scores K K^T and Q K^T            2 C K each
                S k, S q, and the state's update  2 K V each
                the inverse on values, scores on values       2 C V each
    backward    the forward's states again: scores, S k, the inverse, the update
                dS k, dO q, du k, dO S, dS v, du S            2 K V each
                scores Q K^T, and what they give to q and k (5)       2 C K each
                dO scores, du inverse, and their own gradients (4)    2 C V each

For K = V = 128 and C = 64 that is 164 kFLOP forward and 442 backward. Making the inverse is left
out. GDP does what belongs to keys and values for each of its n sub-tokens, what belongs to queries
once. Mamba-2 has no inverse and no S k, and its scores count once a group of heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["BANDWIDTH", "MATRIX", "Floor", "Sizes", "floor", "svg"]

# Measured on an H200: a device copy (bytes read and written), an 8192-cube bf16 product.
BANDWIDTH = 4.24e12
MATRIX = 795e12
CHUNK = 64


@dataclass(frozen=True)
class Sizes:
    """What the floor depends on; io and gate are bytes an element, the state is fp32."""

    family: str
    T: int
    N: int
    H: int
    HV: int
    K: int
    V: int
    n: int = 1
    io: int = 2
    gate: int = 4
    state: bool = True


@dataclass(frozen=True)
class Floor:
    """Bytes, matrix operations, and the least time in ms."""

    bytes: float
    operations: float
    ms: float

    def __add__(self, other: Floor) -> Floor:
        return Floor(
            self.bytes + other.bytes, self.operations + other.operations, self.ms + other.ms
        )


def _bound(moved: float, operations: float) -> Floor:
    return Floor(moved, operations, max(moved / BANDWIDTH, operations / MATRIX) * 1e3)


def inputs_bytes(s: Sizes) -> float:
    """Bytes of the inputs that have gradients."""
    heads, delta = max(s.H, s.HV), s.family != "mamba2"
    per_key = s.family in ("kda", "gdn2")
    moved = s.H * s.K * s.io  # q
    moved += s.n * (s.H * s.K + s.HV * s.V) * s.io  # k, v
    moved += heads * (s.K if per_key else 1) * s.gate  # g
    if s.family == "gdn2":
        moved += heads * (s.K + s.V) * s.io  # beta, w
    elif delta:
        moved += s.n * heads * s.gate  # beta
    return float(s.T * moved)


def forward_floor(s: Sizes) -> Floor:
    """One forward."""
    heads = max(s.H, s.HV)
    moved = inputs_bytes(s) + s.T * heads * s.V * s.io
    if s.state:
        moved += s.N * heads * s.K * s.V * 4
    ck, cv, kv = 2 * CHUNK * s.K, 2 * CHUNK * s.V, 2 * s.K * s.V
    if s.family == "mamba2":
        work = heads * (cv + 2 * kv) + s.H * ck
    else:
        work = heads * (s.n * (ck + 2 * kv + cv) + ck + kv + cv)
    return _bound(moved, float(s.T * work))


def backward_floor(s: Sizes) -> Floor:
    """One backward: inputs and dO read, gradients written."""
    heads = max(s.H, s.HV)
    moved = 2 * inputs_bytes(s) + s.T * heads * s.V * s.io
    ck, cv, kv = 2 * CHUNK * s.K, 2 * CHUNK * s.V, 2 * s.K * s.V
    if s.family == "mamba2":
        # State, dState, dx, dB, dC; scores on dO, and their gradient.
        work = heads * (5 * kv + 2 * cv) + s.H * 3 * ck
    else:
        keys = 6 * kv + 3 * ck + 3 * cv  # for every sub-token
        queries = 2 * kv + 3 * ck + 2 * cv  # for every token
        work = heads * (s.n * keys + queries)
    return _bound(moved, float(s.T * work))


def floor(s: Sizes, backward: bool) -> Floor:
    """The floor of a forward, or of a forward and its backward."""
    found = forward_floor(s)
    return found + backward_floor(s) if backward else found


# The picture ---------------------------------------------------------------------------------

WIDTH, LEFT, RIGHT, TOP = 960, 310, 150, 92
BAR, GAP, MOST = 15, 14, 16.0  # heights; bars end at MOST times the floor
STYLE = (
    ".p{fill:#fafafa}text{fill:#222}.s{font-size:12px;fill:#444}.ours{fill:#00796b}"
    ".peer{fill:#b0bec5}.axis{stroke:#cfd8dc}.floor{stroke:#c62828;stroke-width:2}"
    ".f{fill:#c62828}"
    "@media (prefers-color-scheme:dark){.p{fill:#20242b}text{fill:#eee}.s{fill:#ddd}"
    ".ours{fill:#26a69a}.peer{fill:#607d8b}.axis{stroke:#3a414b}.floor{stroke:#ef9a9a}"
    ".f{fill:#ef9a9a}}"
)


def svg(title: str, groups: Sequence[Mapping[str, object]]) -> str:
    """Bars: how many times the floor each system takes, a group of bars for each shape.

    groups: {"label", "floor" (ms), "bars": [(system, ms, is it ours)]}, drawn in their order.
    """
    scale = (WIDTH - LEFT - RIGHT) / MOST
    body, y = [], TOP
    for group in groups:
        bars, least = group["bars"], float(group["floor"])  # type: ignore[arg-type]
        middle = y + len(bars) * BAR / 2 + 4  # type: ignore[arg-type]
        body.append(f'<text x="14" y="{middle:.0f}">{escape(str(group["label"]))}</text>')
        for system, ms, ours in bars:  # type: ignore[attr-defined]
            times = ms / least
            length = min(times, MOST) * scale
            more = "" if times <= MOST else " →"
            kind = "ours" if ours else "peer"
            body.append(
                f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR - 3}">'
                f"<title>{escape(system)}: {ms:.3f} ms, {times:.1f} times the floor</title></rect>"
                f'<text class="s" x="{LEFT - 6}" y="{y + 10}" text-anchor="end">'
                f"{escape(system)}</text>"
                f'<text class="s" x="{LEFT + length + 5:.1f}" y="{y + 10}">'
                f"{ms:.3g} ms, {times:.1f}x{more}</text>"
            )
            y += BAR
        y += GAP
    bottom = y - GAP + 6
    ticks = []
    for times in (0, 2, 4, 8, 12, 16):
        x = LEFT + times * scale
        ticks.append(
            f'<line class="axis" x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{bottom}"/>'
            f'<text class="s" x="{x:.1f}" y="{TOP - 14}" text-anchor="middle">{times}x</text>'
        )
    x = LEFT + scale
    mark = (
        f'<line class="floor" x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{bottom}"/>'
        f'<text class="s f" x="{x:.1f}" y="{TOP - 30}" text-anchor="middle">floor</text>'
    )
    height = bottom + 16
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="sans-serif" font-size="14">\n<style>{STYLE}</style>\n'
        f'<rect class="p" width="{WIDTH}" height="{height}"/>\n'
        f'<text x="14" y="26">{escape(title)}</text>\n'
        f'<text class="s" x="14" y="44">Shorter is better: time over the least that the memory or '
        f"the matrix units allow.</text>\n" + "\n".join([*ticks, *body, mark]) + "\n</svg>\n"
    )
