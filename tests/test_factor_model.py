"""Frost's scores of a chunk, G and P, by the text of its kernel run in Python.

The functions of `kernels/factor.py` that make them out of products run on arrays of 128 lanes, with
accumulators as wgmma hands them out: no compiler and no GPU.
"""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_inverse_model import Number, Vector

from lagraph.engines.frost import launch

SOURCE = Path(launch.__file__).parent / "kernels" / "factor.py"
USED = (
    "key_factors", "query_factor", "asked_factors", "column_factors", "chosen", "keep", "mask",
    "key_norms",
)  # fmt: skip
C = 64
TID = np.arange(128)
LANE, WARP = TID % 32, TID // 32
# Rows and columns of the 32 numbers of an accumulator [64, 64], by lane.
ROWS = [16 * WARP + LANE // 4 + 8 * (i % 4 // 2) for i in range(32)]
COLUMNS = [8 * (i // 4) + 2 * (LANE % 4) + i % 2 + 0 * LANE for i in range(32)]


class Tensor:
    """Numbers in shared memory; None takes a mode whole, and then they are a row of numbers."""

    def __init__(self, data):
        self.data = data

    def __getitem__(self, at):
        if at[0] is not None:
            return self.data[at].view(Number)
        if len(at) == 3:  # the block is one a lane
            return self.data[:, at[1] + 0 * TID, at[2]]
        return np.repeat(self.data[:, at[1]][:, None], 128, 1)

    def __setitem__(self, at, value):
        self.data[at] = value


def pair(row, lane, group):
    """Two numbers a lane of a row, which is [64, lanes]."""
    at = 8 * group + 2 * (lane % 4)
    return tuple(row[at + e, TID].view(Number) for e in range(2))


def rounded(value, low, rest, at):
    low[at] = value
    if rest is not None:
        rest[at] = value - low[at].astype(np.float32)


class Leaves:
    """Blocks of 8 on the diagonal: [block, row, column]."""

    def __init__(self):
        self.data = np.full((8, 8, 8), np.nan, np.float32)


class Leaf:
    def __init__(self, leaves, index):
        self.data, self.index = leaves.data, index

    def __setitem__(self, at, value):
        self.data[self.index, at[0], at[1]] = value


def functions():
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    found = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in USED]
    assert {node.name for node in found} == set(USED)
    for node in found:
        node.decorator_list = []
        for argument in node.args.args:
            argument.annotation = None
    power = lambda x: np.exp2(np.minimum(x, 126.0)).astype(np.float32).view(Number)  # noqa: E731
    names = {
        "cutlass": SimpleNamespace(range_constexpr=range, const_expr=lambda x: x),
        "cute": SimpleNamespace(size=len), "Float32": np.float32,
        "gate": SimpleNamespace(finite_power=power), "inverse": SimpleNamespace(leaf=Leaf),
        "product": SimpleNamespace(pair=pair, rounded=rounded),
        "choose": lambda test, yes, no: np.where(test, yes, no).astype(np.float32).view(Number),
    }  # fmt: skip
    tree = ast.fix_missing_locations(Vector().visit(ast.Module(found, [])))
    exec(compile(tree, str(SOURCE), "exec"), names)
    return SimpleNamespace(**names)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_scores(n, norm, split):
    """-G left of blocks of 8 on the diagonal, those with strengths, and P, as their formulas."""
    rng, factor = np.random.default_rng(5), functions()
    queries, turn = C // n, 1
    sig = SimpleNamespace(n=n, norm=norm, split=split, queries=queries, io=np.float16)
    decay = np.where(np.arange(C) % n == 0, -rng.random(C), 0.0)
    b = np.cumsum(decay).astype(np.float32)
    strengths, key = rng.random(C).astype(np.float32), rng.random(C).astype(np.float32) + 0.5
    asked, scale = rng.random(C).astype(np.float32) + 0.5, np.float32(0.3)
    powers = np.full((C, 4, 2), np.nan, np.float32)
    for block in range(1, 4):
        powers[:, block, turn] = np.exp2(np.minimum(b[16 * block] - b, 126.0))
    numbers = SimpleNamespace(
        sums=Tensor(np.stack([b * np.nan, b], 1)), powers=Tensor(powers),
        strengths=Tensor(np.stack([b * np.nan, strengths], 1)),
        norms=Tensor(np.stack([key, asked], 1)),
    )  # fmt: skip
    scores = rng.standard_normal((2, C, C)).astype(np.float32)
    kk, qk = ([s[r, c].view(Number) for r, c in zip(ROWS, COLUMNS, strict=True)] for s in scores)

    def registers():
        return np.full((32, 128), np.nan, np.float16), np.full((32, 128), np.nan, np.float16)

    # G
    (joined, rest), leaves = registers(), Leaves()
    T, T_rest = (np.zeros((C, C, 1), np.float16) for _ in range(2))
    mine = factor.key_factors(sig, numbers, turn, WARP * 16 + LANE // 4)
    columns = factor.column_factors(sig, numbers, turn, LANE, WARP, 1)
    factor.keep(
        sig, kk, joined, rest if split else None, SimpleNamespace(T=T, T_rest=T_rest), leaves,
        mine, columns, 0, LANE, WARP, WARP,
    )  # fmt: skip
    for i in range(24):
        written = i // 8 < WARP  # as `put` does
        row, column = ROWS[i][written], COLUMNS[i][written]
        T[row, column, 0] = joined[i, written]
        T_rest[row, column, 0] = rest[i, written]
    keys = key if norm else np.ones(C)
    G = np.tril(scores[0] * np.exp2(b[:, None] - b[None]) * keys[:, None] * keys[None], -1)
    same = np.arange(C)[:, None] // 8 == np.arange(C)[None] // 8
    got = T[..., 0].astype(np.float32) + (T_rest[..., 0] if split else 0)
    close = dict(rtol=1e-6 if split else 1e-3, atol=1e-6 if split else 1e-4)
    np.testing.assert_allclose(got, np.where(same, 0.0, -G), **close)
    for block in range(8):
        part = slice(8 * block, 8 * block + 8)
        want = strengths[part, None] * G[part, part]
        np.testing.assert_allclose(np.tril(leaves.data[block], -1), want, rtol=1e-5, atol=1e-6)

    # P
    (joined, rest), (ending, ending_rest) = registers(), registers()
    mine = factor.asked_factors(sig, numbers, scale, turn, LANE, WARP)
    columns = factor.column_factors(sig, numbers, turn, LANE, WARP, n)
    extra = (rest, ending_rest) if split else (None, None)
    factor.mask(sig, qk, joined, extra[0], ending, extra[1], mine, columns, LANE, WARP)
    P, P_rest = (np.zeros((C, C), np.float16) for _ in range(2))
    real = queries // 16 > WARP
    for i in range(8 * (4 - n)):
        written = (i // 8 < WARP * n) & real
        row, column = ROWS[i][written], COLUMNS[i][written]
        P[row, column], P_rest[row, column] = joined[i, written], rest[i, written]
    for i in range(8 * n):
        row, column = ROWS[i][real], COLUMNS[i][real] + 16 * n * WARP[real]
        P[row, column], P_rest[row, column] = ending[i, real], ending_rest[i, real]
    last = n * np.arange(queries) + n - 1
    want = scale * scores[1][:queries] * np.exp2(b[last][:, None] - b[None]) * keys[None]
    want *= (asked[:queries] if norm else np.ones(queries))[:, None]
    want[np.arange(C)[None] > last[:, None]] = 0.0
    got = P[:queries].astype(np.float32) + (P_rest[:queries] if split else 0)
    np.testing.assert_allclose(got, want, **close)
