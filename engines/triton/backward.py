"""Plans of the two backward directions.

The backward keeps nothing of the forward but its inputs (and checkpoints, where their cadence is a
multiple of the chunk). Its stages, each one launch:

    factor     what the chunk recurrence needs, as in the forward
    states     chunk-entry states S and written values U
    reverse    the serial pass back: dS after every chunk, the gradient Y of what was written, and
               the gradient of the initial state
    gradient   all other gradients, token-parallel
    fold       sums over head groups, and the unit norm: where there are such
    total      sums of parameter gradients over chunks: one a parameter
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from lagraph.engines.triton.config import SMALL_SHARED
from lagraph.engines.triton.kernels.gradient import (
    beta_key_kernel,
    gradient_head_kernel,
    gradient_key_kernel,
    products_key_kernel,
)
from lagraph.engines.triton.kernels.reduce import fold_kernel, total_kernel
from lagraph.engines.triton.kernels.reverse import reverse_kernel
from lagraph.engines.triton.kernels.scan import span_decay_kernel
from lagraph.engines.triton.kernels.states import states_kernel
from lagraph.engines.triton.launch import ALIGN, Scratch, _Plan, _strides

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lagraph.problem import Problem

__all__ = ["BackwardPlan", "SummaryBackwardPlan"]

FOLD_ROWS = 16
TOTAL_TILE = (64, 32)  # rows, columns
PARAMETERS = {"d_a_log": "a_log", "d_dt_bias": "dt_bias", "dA": "a", "dD": "d"}


@dataclass(frozen=True, slots=True)
class Tiles:
    """Launch shapes of the backward's own kernels."""

    block_k: int
    block_v: int
    warps: int
    stages: int
    registers: int | None


def choose(problem: Problem, knobs: Mapping[str, int | str]) -> Tiles:
    """Tiles of the gradient kernels."""
    size = problem.sizes
    wide = problem.io_dtype.itemsize == 4
    small = wide or problem.arch in SMALL_SHARED
    key_gate = problem.traits.gate == "key"
    # Chunks of 32 rows feed two warps.
    warps, block_k = 4 if wide else 2, 16 if key_gate else 32
    return Tiles(
        block_k=min(size["K"], int(knobs.get("gradient_k", block_k))),
        block_v=min(size["V"], int(knobs.get("gradient_v", 32 if small else 64))),
        warps=int(knobs.get("gradient_warps", warps)),
        stages=int(knobs.get("gradient_stages", 1 if small else 2)),
        registers=int(knobs.get("gradient_registers", 0)) or None,
    )


class _BackPlan(_Plan):
    """The factor stage without its folded strength, and the reverse pass."""

    fold = False

    def __init__(self, problem: Problem, knobs: Mapping[str, int | str]) -> None:
        every = getattr(problem.options, "checkpoint_every_n_tokens", 0) or 0
        # Chunks need not divide the checkpoints' cadence here.
        options = SimpleNamespace(**{**vars(problem.options), "checkpoint_every_n_tokens": 0})
        # At most 32 steps a chunk: two blocks of 16 leave few levels of pairs, and the gradient
        # kernels' products stay too small for wgmma, which Triton 3.6 gets wrong in them.
        size = problem.sizes
        most = 16 if problem.io_dtype.itemsize == 4 and max(size["K"], size["V"]) > 128 else 32
        knobs = {**knobs, "chunk": min(int(knobs.get("chunk", most)), most)}
        if problem.io_dtype.itemsize == 2:
            narrow = {"block_k": 16} if problem.traits.gate == "key" else {}
            knobs = {"factor_warps": 1 if narrow else 2, **narrow, **knobs}
        super().__init__(replace(problem, options=options), knobs)
        self.every = every
        self.erase_key = problem.traits.erase == "key"
        self.norm = bool(getattr(options, "use_qk_l2norm", False))
        self.activation = {
            "SIGMOID": bool(getattr(options, "use_beta_sigmoid", False)),
            "DOUBLE": bool(getattr(options, "allow_neg_eigval", False)),
        }
        # Arrays with a row per token: elements a token.
        self.rows: list[Scratch] = []

    def workspace_size(self, T: int, N: int) -> int:
        slots = self.slots(T, N)
        total = sum(item.nbytes(slots) for item in self.scratch)
        return total + sum(item.nbytes(T) for item in self.rows)

    def carve_all(self, workspace: torch.Tensor | None, T: int, N: int, like: torch.Tensor) -> Any:
        if workspace is None:
            size = self.workspace_size(T, N)
            workspace = torch.empty(size, dtype=torch.uint8, device=like.device)
        slots = self.slots(T, N)
        views, at = {}, 0
        for items, count in ((self.scratch, slots), (self.rows, T)):
            for item in items:
                size = count * item.elements * item.dtype.itemsize
                views[item.name] = workspace[at : at + size].view(item.dtype)
                at += -(-size // ALIGN) * ALIGN
        return views

    def reverse(
        self,
        x: dict[str, Any],
        ws: dict[str, Any],
        T: int,
        N: int,
        first: torch.Tensor | None,
        *,
        identity: bool = False,
        states: torch.Tensor | None = None,
        values: torch.Tensor | None = None,
    ) -> None:
        """The serial pass back, writing the gradient of the first state; with `identity` that is
        the transposed transition."""
        config = self.config
        q, k, e, beta, cu = x["q"], x["k"], None, x.get("beta"), x["cu_seqlens"]
        s_kt, s_ks, s_kh = (0, 0, 0) if self.key_gate else self.steps(k, 3)
        s_qt, s_qh = (0, 0) if self.key_gate else (q.stride(0), q.stride(1))
        if self.key_gate:
            q, k, e = ws["query"], ws["key"], ws["erase"]
        dout, z = (None, None) if identity else (x["dO"], x.get("z"))
        last = None if identity else x.get("d_final_state")
        width = self.K if identity else self.V
        block_v = min(config.block_v, width)
        s_beta = (0, 0, 0) if self.erase_key else self.steps(beta, 2)
        reverse_kernel[(N * self.HO * (width // block_v),)](
            q, k, e, beta, ws.get("rows"), ws.get("decay"), ws.get("inverse"), ws["scores"],
            dout, z, last, states, values, first, cu, N, T, cu.stride(0),
            s_qt, s_qh, s_kt, s_ks, s_kh, *s_beta, *_strides(2, dout), *_strides(2, z),
            *_strides(3, last), *_strides(3, first),
            V=width, NS=self.substeps, K=self.K, C=config.chunk, CQ=config.queries, BV=block_v,
            **self.heads, KEY_GATE=self.key_gate, DELTA=self.delta, ERASE_KEY=self.erase_key,
            IDENTITY=identity, **self.activation, PREC=config.precision,
            num_warps=config.scan_warps, num_stages=config.scan_stages,
            maxnreg=config.serial_registers,
        )  # fmt: skip


class SummaryBackwardPlan(_BackPlan):
    """Factors, the reverse pass without writes, and its transition."""

    def run(self, ins: Sequence[Any], outs: Sequence[Any], workspace: Any = None) -> None:
        x = self.inputs(ins)
        y = dict(zip(self.problem.outputs, outs, strict=True))
        T, N = x["g"].shape[0], x["cu_seqlens"].shape[0] - 1
        if N == 0:
            return
        if x.get("k") is None:  # Mamba-2's keys do not matter to it
            x["k"] = x["q"]
        ws = self.carve_all(workspace, T, N, x["g"])
        self.factor(x, ws, self.slots(T, N), T, N)
        self.reverse(x, ws, T, N, y["d_initial_state"])
        transition, cu = y.get("transition"), x["cu_seqlens"]
        if transition is None:
            return
        if self.delta:
            self.reverse(x, ws, T, N, transition, identity=True)
        else:
            span_decay_kernel[(N * self.HO,)](
                ws["rows"], cu, transition, N, T, cu.stride(0),
                HO=self.HO, NS=self.substeps, C=self.config.chunk,
            )  # fmt: skip


class BackwardPlan(_BackPlan):
    """All gradients of a node."""

    def __init__(self, problem: Problem, knobs: Mapping[str, int | str]) -> None:
        super().__init__(problem, knobs)
        self.tiles = choose(problem, knobs)
        size, n, c = problem.sizes, self.substeps, self.config.chunk
        self.HV = size.get("HV", self.HO)
        heads, io = self.HO, self.io
        self.scratch.append(Scratch("states", heads * self.V * self.K, io))
        self.scratch.append(Scratch("dstates", heads * self.V * self.K, io))
        if self.delta:
            self.scratch.append(Scratch("values", heads * c * self.V, io))
        self.scratch.append(Scratch("dvalues", heads * c * self.V, io))
        # Partial sums a chunk: one, or one a K-block.
        self.partials = self.K // self.tiles.block_k if self.key_gate else 1
        if self.key_gate:
            self.scratch.append(Scratch("sums", heads * 2 * c, torch.float32))
            if not self.erase_key:
                self.scratch.append(Scratch("erased", heads * self.partials * c, torch.float32))
        # Parameters that are present and wanted: elements.
        self.parameters = {
            name: heads * self._width(name) for name, of in PARAMETERS.items() if problem.has(of)
        }
        for name, elements in self.parameters.items():
            self.scratch.append(Scratch(name, elements * self._rows(name), torch.float32))
        # What one program cannot finish: (output, input, heads, dim, substeps, norm).
        self.folds = []
        for out, of, count, dim, subs, norm in (
            ("dQ", "q", self.heads["H"], self.K, 1, self.norm),
            ("dK", "k", self.heads["HK"], self.K, n, self.norm),
            ("dV", "v", self.HV, self.V, n, False),
        ):
            if norm or count != heads:
                self.folds.append((out, of, count, dim, subs, norm))
                self.rows.append(Scratch(out, subs * heads * dim, io))
        self.make_pre = problem.has("z") and not problem.has("O_pre")
        if self.make_pre:
            self.rows.append(Scratch("O_pre", heads * self.V, io))

    def _rows(self, name: str) -> int:
        """Rows of partial sums a chunk of a parameter."""
        return self.partials if name == "d_a_log" else 1

    def _width(self, name: str) -> int:
        """Elements a head of a parameter."""
        if name == "d_dt_bias" and self.key_gate:
            return self.K
        return self.V if name == "dD" and self.problem.ranks.get("d") == 2 else 1

    def run(self, ins: Sequence[Any], outs: Sequence[Any], workspace: Any = None) -> None:
        x = self.inputs(ins)
        y = dict(zip(self.problem.outputs, outs, strict=True))
        T, N = x["g"].shape[0], x["cu_seqlens"].shape[0] - 1
        if N == 0:
            for name in self.parameters:
                if y[name] is not None:
                    y[name].zero_()
            return
        if x["dO"] is None:
            x["dO"] = x["q"].new_zeros(T, self.HO, self.V)
        slots = self.slots(T, N)
        ws = self.carve_all(workspace, T, N, x["g"])
        self.factor(x, ws, slots, T, N)
        self.states(x, ws, T, N)
        if self.make_pre:
            x["O_pre"] = ws["O_pre"].view(T, self.HO, self.V)
            self.scan({**x, "z": None}, ws, T, N, out=x["O_pre"])
        self.reverse(
            x, ws, T, N, y.get("d_initial_state"), states=ws["dstates"], values=ws["dvalues"]
        )
        parts = dict(y)
        for out, _, _, dim, subs, _ in self.folds:
            parts[out] = ws[out].view(T * subs, self.HO, dim)
        parts |= {name: ws[name] if y[name] is not None else None for name in self.parameters}
        (self.gradient_key if self.key_gate else self.gradient_head)(x, ws, parts, slots, T, N)
        for out, of, count, dim, subs, norm in self.folds:
            self.fold_heads(parts[out], x[of], y[out], count, dim, subs, norm)
        rows, columns = TOTAL_TILE
        for name, elements in self.parameters.items():
            if (total := y[name]) is not None:
                total_kernel[(-(-elements // columns),)](
                    ws[name], total, slots * self._rows(name), elements, B=columns, R=rows
                )

    def fold_heads(
        self, part: Any, x: Any, out: Any, count: int, dim: int, subs: int, norm: bool
    ) -> None:
        rows = part.shape[0]
        if rows == 0:
            return
        s_x = self.steps(x, 3) if subs > 1 else (x.stride(0), 0, x.stride(1))
        s_out = self.steps(out, 3) if subs > 1 else (out.stride(0), 0, out.stride(1))
        fold_kernel[(-(-rows // FOLD_ROWS) * count,)](
            part, x, out, rows, *s_x, *s_out,
            HX=count, HO=self.HO, D=dim, NS=subs, R=FOLD_ROWS, NORM=norm, num_warps=4,
        )  # fmt: skip

    def states(self, x: dict[str, Any], ws: dict[str, Any], T: int, N: int) -> None:
        config = self.config
        k, e, v, w, beta, cu = x["k"], None, x["v"], x.get("w"), x.get("beta"), x["cu_seqlens"]
        s_k = (0, 0, 0) if self.key_gate else self.steps(k, 3)
        if self.key_gate:
            k, e = ws["key"], ws["erase"]
        h0, rows = x.get("initial_state"), x.get("state_checkpoints")
        every = self.every
        if rows is not None and not (every and every % config.chunk == 0 and rows.is_contiguous()):
            rows = None
        spans = N if rows is None else T * self.substeps // every + N
        block_v = min(config.block_v, self.V)
        s_beta = (0, 0, 0) if self.erase_key else self.steps(beta, 2)
        states_kernel[(spans * self.HO * (self.V // block_v),)](
            k, e, v, w, beta, ws.get("rows"), ws.get("decay"), ws.get("inverse"), h0, rows,
            ws["states"], ws.get("values"), cu, N, T, cu.stride(0),
            *s_k, *self.steps(v, 3), *_strides(2, w), *s_beta, *_strides(3, h0),
            HK=self.heads["HK"], HV=self.HV, HO=self.HO, K=self.K, V=self.V, NS=self.substeps,
            C=config.chunk, BV=block_v, KEY_GATE=self.key_gate, DELTA=self.delta,
            ERASE_KEY=self.erase_key, **self.activation, EVERY=every if rows is not None else 1,
            PREC=config.precision, num_warps=config.scan_warps, num_stages=config.scan_stages,
            maxnreg=config.serial_registers,
        )  # fmt: skip

    def gradient_head(
        self, x: dict[str, Any], ws: dict[str, Any], y: dict[str, Any], slots: int, T: int, N: int
    ) -> None:
        config, tiles, options = self.config, self.tiles, self.problem.options
        q, k, v, g, beta, d, z = (x.get(name) for name in ("q", "k", "v", "g", "beta", "d", "z"))
        pre, dout, cu = x.get("O_pre") if z is not None else None, x["dO"], x["cu_seqlens"]
        wide_d = d is not None and d.dim() == 2
        s_d = (0, 0) if d is None else (d.stride(0), d.stride(1) if wide_d else 0)
        partial_d = ws.get("dD")  # written whenever there is a D
        gradient_head_kernel[(slots * self.HO,)](
            q, k, v, g, beta, x.get("a_log"), x.get("dt_bias"), x.get("a"), d, z, pre, dout,
            ws["rows"], ws["scores"], ws.get("inverse"),
            ws.get("values"), ws["dvalues"], ws["states"], ws["dstates"],
            y["dQ"], y["dK"], y["dV"], y["dG"], y.get("dBeta"), y.get("dZ"),
            y.get("d_a_log"), y.get("d_dt_bias"), y.get("dA"), partial_d, cu,
            N, T, self.scale, self.lower, self.dt_min, self.dt_max, cu.stride(0),
            *_strides(2, q), *self.steps(k, 3), *self.steps(v, 3), *_strides(2, g),
            *self.steps(beta, 2), *s_d, *_strides(2, z), *_strides(2, pre), *_strides(2, dout),
            *_strides(2, y["dQ"]), *self.steps(y["dK"], 3), *self.steps(y["dV"], 3),
            *_strides(2, y["dG"]), *self.steps(y.get("dBeta"), 2), *_strides(2, y.get("dZ")),
            HV=self.HV, K=self.K, V=self.V, NS=self.substeps, C=config.chunk, CQ=config.queries,
            **self.heads, BK=tiles.block_k, BV=tiles.block_v, GATE=self.gate_kind,
            DELTA=self.delta, NORM=self.norm, **self.activation,
            SOFTPLUS=bool(getattr(options, "dt_softplus", False)), D_CHANNEL=wide_d,
            PREC=config.precision, num_warps=tiles.warps, num_stages=tiles.stages,
            maxnreg=tiles.registers,
        )  # fmt: skip

    def gradient_key(
        self, x: dict[str, Any], ws: dict[str, Any], y: dict[str, Any], slots: int, T: int, N: int
    ) -> None:
        config, tiles = self.config, self.tiles
        q, k, v, w, g, beta = (x.get(name) for name in ("q", "k", "v", "w", "g", "beta"))
        dout, cu, grid = x["dO"], x["cu_seqlens"], slots * self.HO
        shape = {"HO": self.HO, "C": config.chunk, **self.activation}
        tall = {"HV": self.HV, "V": self.V, "BV": tiles.block_v, "ERASE_KEY": self.erase_key}
        products_key_kernel[(grid,)](
            v, w, beta, dout, ws["scores"], ws["inverse"], ws["values"], ws["dvalues"],
            y["dV"], y.get("dW"), ws["sums"], cu, N, T, cu.stride(0),
            *_strides(2, v), *_strides(2, w), *_strides(2, beta), *_strides(2, dout),
            *_strides(2, y["dV"]), *_strides(2, y.get("dW")),
            **shape, **tall, PREC=config.precision, num_warps=4, num_stages=tiles.stages,
        )  # fmt: skip
        gradient_key_kernel[(grid * self.partials,)](
            q, k, v, g, beta, x.get("a_log"), x.get("dt_bias"), dout,
            ws["gates"], ws["scores"], ws["inverse"], ws["values"], ws["dvalues"],
            ws["states"], ws["dstates"], ws["sums"], y["dQ"], y["dK"], y["dG"], y["dBeta"],
            ws.get("erased"), y.get("d_a_log"), y.get("d_dt_bias"), cu, N, T,
            self.scale, self.lower, cu.stride(0),
            *_strides(2, q), *_strides(2, k), *_strides(2, v), *_strides(2, g),
            *_strides(2, beta), *_strides(2, dout), *_strides(2, y["dQ"]), *_strides(2, y["dK"]),
            *_strides(2, y["dG"]), *_strides(2, y["dBeta"]),
            H=self.heads["H"], HK=self.heads["HK"], K=self.K, BK=tiles.block_k,
            **shape, **tall, GATE=self.gate_kind,
            GUARD=bool(getattr(self.problem.options, "beta_guard", False)), NORM=self.norm,
            PREC=config.precision, num_warps=tiles.warps, num_stages=tiles.stages,
            maxnreg=tiles.registers,
        )  # fmt: skip
        if not self.erase_key:
            beta_key_kernel[(grid,)](
                beta, ws["sums"], ws["erased"], y["dBeta"], cu, N, T, cu.stride(0),
                *_strides(2, beta), *_strides(2, y["dBeta"]),
                NK=self.partials, **shape, num_warps=1,
            )  # fmt: skip
