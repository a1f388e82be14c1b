"""Frost's inverse of a chunk's triangular matrix, by the text of its kernel run in Python.

`lib.inverse` finds its numbers in shared memory by a swizzle, and lanes hold matrices as
`ldmatrix`, `mma` and `stmatrix` hand them out. Here its source runs on arrays of 64 lanes, two
warps in step, with those three as PTX defines them: no compiler and no GPU.
"""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from lagraph.engines.frost import launch

SOURCE = Path(launch.__file__).parent / "kernels" / "lib" / "inverse.py"
LANES = np.arange(64)  # of two warps
GROUP, MEMBER = LANES % 32 // 4, LANES % 4
C, ROW = 64, 128


class Number(np.ndarray):
    """One number a lane."""

    def to(self, dtype):
        return np.asarray(self).astype(dtype).view(Number)


class Registers:
    """Some numbers a lane; a view of them shares `data`."""

    def __init__(self, data, shape=None):
        self.data, self.shape, self.iterator = data, shape, self
        self.element_type = data.dtype.type

    def fill(self, value):
        self.data[:] = value

    def __getitem__(self, i):
        return self.data[i].view(Number)

    def __setitem__(self, i, value):
        self.data[i] = value


class Shared:
    """A place in shared memory a lane: `at` counts numbers of `memory`."""

    def __init__(self, memory, at):
        self.memory, self.at = memory, at

    def __add__(self, more):
        return Shared(self.memory, self.at + more)

    def __getitem__(self, i):
        return self.memory[self.at + i].view(Number)

    def __setitem__(self, i, value):
        self.memory[self.at + i] = value


def _rows(shared, matrices):
    """Where the rows of a warp's matrices are: [warp, matrix, row], eight numbers each."""
    at = shared.at.reshape(2, 4, 8)[:, :matrices]
    assert (at % 8 == 0).all()  # 16 bytes
    return at[..., None] + np.arange(8)


def copy(atom, source, target):
    """`ldmatrix` and `stmatrix`, of one to four matrices of 8 by 8."""
    kind, turned, matrices = atom
    warp = np.arange(2).repeat(32)
    for m in range(matrices):
        for e in range(2):
            row, column = (2 * MEMBER + e, GROUP) if turned else (GROUP, 2 * MEMBER + e)
            if kind == "load":
                where = _rows(source, matrices)[warp, m, row, column]
                target.data[2 * m + e] = source.memory[where]
            else:
                where = _rows(target, matrices)[warp, m, row, column]
                target.memory[where] = source.data[2 * m + e]


def gemm(mma, out, a, b, _):
    """m16n8k16 for each eight columns of b."""
    for w in range(2):
        lanes = slice(32 * w, 32 * w + 32)
        g, t = GROUP[lanes], MEMBER[lanes]
        left = np.zeros((16, 16), np.float32)
        for i in range(8):
            left[g + 8 * (i // 2 % 2), 2 * t + i % 2 + 8 * (i // 4)] = a.data[i, lanes]
        for n in range(len(b.data) // 4):
            right = np.zeros((16, 8), np.float32)
            for i in range(4):
                right[2 * t + i % 2 + 8 * (i // 2), g] = b.data[4 * n + i, lanes]
            found = left @ right
            for i in range(4):
                out.data[4 * n + i, lanes] += found[g + 8 * (i // 2), 2 * t + i % 2]


def split(acc, low, rest):
    for i in range(len(acc.data)):
        low.data[i] = acc.data[i]
        if rest is not None:
            rest.data[i] = acc.data[i] - low.data[i].astype(np.float32)


class Vector(ast.NodeTransformer):
    """A choice by a run-time condition is one a lane."""

    def visit_IfExp(self, node):
        self.generic_visit(node)
        if isinstance(node.test, ast.Call):  # const_expr
            return node
        where = ast.Name("choose", ast.Load())
        return ast.copy_location(ast.Call(where, [node.test, node.body, node.orelse], []), node)


def kernel(memory):
    """The module's functions, on this shared memory of 16-bit numbers."""

    def make_ptr(dtype, address, space, assumed_align):
        assert (np.asarray(address) % assumed_align == 0).all()
        return Shared(memory, np.asarray(address) // 2)

    def make_tensor(start, layout):
        if isinstance(start, Registers):
            size = np.prod([np.prod(x) for x in layout]) if isinstance(layout, tuple) else layout
            return Registers(start.data[: int(size)], layout)
        return start

    def autovec_copy(source, target):
        for i in range(len(target.data)):
            target.data[i] = source[i]

    op = SimpleNamespace(
        MmaF16BF16Op=lambda *_: None,
        LdMatrix8x8x16bOp=lambda transpose, num_matrices: ("load", transpose, num_matrices),
        StMatrix8x8x16bOp=lambda transpose, num_matrices: ("store", transpose, num_matrices),
    )
    names = {
        "cutlass": SimpleNamespace(
            Constexpr=None, range_constexpr=range, const_expr=lambda x: x,
        ),
        "cute": SimpleNamespace(
            jit=lambda f: f, Tensor=None, copy=copy, gemm=gemm, make_ptr=make_ptr,
            make_tensor=make_tensor, autovec_copy=autovec_copy, assume=lambda x, divby: x,
            make_layout=lambda shape, stride=None: shape, make_tiled_mma=lambda op: op,
            make_copy_atom=lambda op, dtype: op, AddressSpace=SimpleNamespace(smem=None),
            make_rmem_tensor=lambda n, dtype: Registers(np.full((n, 64), np.nan, dtype)),
            arch=SimpleNamespace(sync_warp=lambda: None, barrier=lambda **_: None),
        ),
        "nvgpu": SimpleNamespace(warp=op), "product": SimpleNamespace(split=split),
        "Float32": np.float32, "Any": None, "NamedTuple": tuple,
        "choose": lambda test, yes, no: np.where(test, yes, no).astype(np.float32).view(Number),
    }  # fmt: skip
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    tree.body = [
        node for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.Assign) and "__all__" not in ast.unparse(node)
    ]  # fmt: skip
    names["Tools"] = lambda *fields: SimpleNamespace(
        **dict(zip(("mma", "plain", "turned", "pair", "out", "out_pair"), fields, strict=True))
    )
    exec(compile(ast.fix_missing_locations(Vector().visit(tree)), str(SOURCE), "exec"), names)
    return SimpleNamespace(**names)


def place(row, column):
    """Where a number of a tile is, in 16-bit numbers: the 128-byte swizzle."""
    return (ROW * row + 16 * (column // 8 ^ row % 8)) // 2 + column % 8


def chunk(kind, rng):
    """G, and strengths."""
    keys = rng.standard_normal((C, 32))
    if kind == "correlated keys":
        keys = keys[:1] + 0.1 * keys
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    decay = np.cumsum(-0.1 * rng.random(C))
    G = np.tril(keys @ keys.T * np.exp(decay[:, None] - decay[None]), -1)
    beta = np.ones(C) if kind == "correlated keys" else rng.random(C)
    if kind == "the last steps are none":
        G[50:], beta[50:] = 0.0, 0.0
    return G, beta


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kind", ["random keys", "correlated keys", "the last steps are none"])
def test_inverse(kind, parts):
    """T is what it says, left of the diagonal too, and nothing above it has been touched."""
    rng = np.random.default_rng(3)
    G, beta = chunk(kind, rng)
    base = 2048  # bytes: a multiple of 1024
    memory = np.zeros((base + 2 * C * ROW) // 2, np.float16)
    inverse = kernel(memory)
    blocks = np.full(inverse.LEAVES * inverse.NUMBERS + C, np.nan, np.float32)
    blocks[inverse.LEAVES * inverse.NUMBERS :] = beta
    rows, columns = np.tril_indices(C, -1)
    same = rows // inverse.LEAF == columns // inverse.LEAF
    for r, c in zip(rows[same], columns[same], strict=True):
        at = r // inverse.LEAF * inverse.NUMBERS
        blocks[at + r % inverse.LEAF + inverse.PITCH * (c % inverse.LEAF)] = beta[r] * G[r, c]
    blocks[np.isnan(blocks)] = 1e30  # finite: it is multiplied by nothing but discarded
    rest = -G.astype(np.float32)
    for p in range(parts):
        low = rest.astype(np.float16)
        here = base // 2 + p * C * ROW // 2 + place(rows[~same], columns[~same])
        memory[here] = low[rows[~same], columns[~same]]
        rest = rest - low
    addresses = [np.full(64, base + p * C * ROW) for p in range(parts)]
    inverse.invert(
        inverse.tools(np.float16), addresses, Shared(blocks, np.zeros(64, int)), np.float16,
        LANES // 32, LANES % 32, 6,
    )  # fmt: skip

    row, column = np.indices((C, C))
    tiles = [memory[base // 2 + p * C * ROW // 2 + place(row, column)] for p in range(parts)]
    got = sum(tile.astype(np.float64) for tile in tiles)
    want = np.linalg.inv(np.eye(C) + beta[:, None] * G) * beta[None]
    assert (got[column > row] == 0).all()
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert error < (3e-3 if parts == 1 else 3e-6)
