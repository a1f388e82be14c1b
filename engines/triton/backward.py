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
from lagraph.engines.triton.kernels.states import states_kernel
from lagraph.engines.triton.launch import Launch, Layout, Ports, Scratch, _Plan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lagraph.engines.triton.launch import Call
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
        # What the serial passes read of a head's strengths where no row factors hold them.
        self.strength = "beta" if self.key_gate and not self.erase_key else ""
        self.norm = bool(getattr(options, "use_qk_l2norm", False))
        self.activation = {
            "SIGMOID": bool(getattr(options, "use_beta_sigmoid", False)),
            "DOUBLE": bool(getattr(options, "allow_neg_eigval", False)),
        }

    def reverse(
        self, call: Call, first: str, *, identity: bool = False, states: str = "", values: str = ""
    ) -> None:
        """The serial pass back, writing the gradient of the first state; with `identity` that is
        the transposed transition."""
        width = self.K if identity else self.V
        programs = call.env["N"] * self.HO * (width // min(self.config.block_v, width))
        self.launch(call, programs, "reverse", first, identity, states, values)

    def _reverse_launch(
        self, at: Layout, first: str, identity: bool, states: str, values: str
    ) -> Launch:
        config, beta = self.config, self.strength
        q, k, e, s_q, s_k = "q", self.key, "", at.lead(2, "q"), at.steps(self.key, 3)
        if self.key_gate:
            q, k, e, s_q, s_k = "@query", "@key", "@erase", (0, 0), (0, 0, 0)
        dout, z, last = ("", "", "") if identity else ("dO", "z", "d_final_state")
        width = self.K if identity else self.V
        names = (
            q, k, e, beta, "@rows", "@decay", "@inverse", "@scores", dout, z, last, states,
            values, first, "cu_seqlens", "T",
        )  # fmt: skip
        statics = (
            *at.lead(1, "cu_seqlens"), *s_q, *s_k, *at.lead(2, beta), *at.lead(2, dout),
            *at.lead(2, z), *at.lead(3, last), *at.lead(3, first),
        )  # fmt: skip
        constants = {
            "V": width, "NS": self.substeps, "K": self.K, "C": config.chunk,
            "CQ": config.queries, "BV": min(config.block_v, width), **self.heads,
            "KEY_GATE": self.key_gate, "DELTA": self.delta, "ERASE_KEY": self.erase_key,
            "IDENTITY": identity, **self.activation, "SPLIT": self.split,
            "PREC": config.precision,
            "num_warps": config.scan_warps, "num_stages": config.scan_stages,
            "maxnreg": config.serial_registers,
        }  # fmt: skip
        return reverse_kernel, names, statics, constants


class SummaryBackwardPlan(_BackPlan):
    """Factors, the reverse pass without writes, and its transition."""

    def run(self, ins: Sequence[Any], outs: Sequence[Any], workspace: Any = None) -> None:
        call = self.begin(ins, outs, workspace)
        if call is None:
            return
        self.factor(call)
        self.reverse(call, "d_initial_state")
        if not call.layout.has("transition"):
            return
        if self.delta:
            self.reverse(call, "transition", identity=True)
        else:
            self.launch(call, call.env["N"] * self.HO, "span_decay")


class BackwardPlan(_BackPlan):
    """All gradients of a node."""

    splits = True

    def __init__(self, problem: Problem, knobs: Mapping[str, int | str]) -> None:
        super().__init__(problem, knobs)
        self.tiles = choose(problem, knobs)
        size, n, c = problem.sizes, self.substeps, self.config.chunk
        self.HV = size.get("HV", self.HO)
        # Whether operands are in two parts, for every launch over chunks.
        self.shares = ((False,), (True,), (False, True))[self.split]
        heads, io = self.HO, self.io
        self.scratch.append(Scratch("states", heads * self.V * self.K, io))
        self.scratch.append(Scratch("dstates", heads * self.V * self.K, io))
        if self.delta:
            self.scratch.append(Scratch("values", self.parts * heads * c * self.V, io))
        self.scratch.append(Scratch("dvalues", self.parts * heads * c * self.V, io))
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
                self._stand_in(out, subs, dim)
        self.made_pre = problem.has("z") and not problem.has("O_pre")
        if self.made_pre:
            self._stand_in("O_pre", 1, self.V)
        self.at_dout, self.at_query = self.names.index("dO"), self.names.index("q")

    def _stand_in(self, name: str, subs: int, dim: int) -> None:
        """Scratch [T * subs, HO, dim] in the place of a tensor."""
        self.scratch.append(Scratch(name, subs * self.HO * dim, self.io, "T"))
        self.scratch_strides[f"@{name}"] = (self.HO * dim, dim, 1)

    def _rows(self, name: str) -> int:
        """Rows of partial sums a chunk of a parameter."""
        return self.partials if name == "d_a_log" else 1

    def _width(self, name: str) -> int:
        """Elements a head of a parameter."""
        if name == "d_dt_bias" and self.key_gate:
            return self.K
        return self.V if name == "dD" and self.problem.ranks.get("d") == 2 else 1

    def run(self, ins: Sequence[Any], outs: Sequence[Any], workspace: Any = None) -> None:
        if ins[self.at_dout] is None:
            ins = list(ins)
            q: Any = ins[self.at_query]
            ins[self.at_dout] = q.new_zeros(q.shape[0], self.HO, self.V)
        call = self.begin(ins, outs, workspace)
        if call is None:
            for name, out in zip(self.problem.outputs, outs, strict=True):
                if out is not None and name in self.parameters:
                    out.zero_()
            return
        env, layout = call.env, call.layout
        slots = env["slots"]
        self.factor(call)
        self.states(call)
        if self.made_pre:
            self.scan(call, Ports(out="@O_pre"))
        self.reverse(call, "d_initial_state", states="@dstates", values="@dvalues")
        if self.key_gate:
            self.gradient_key(call)
        else:
            for part in self.shares:
                self.launch(call, slots * self.HO, "gradient_head", part)
        for fold in self.folds:
            _, _, count, _, subs, _ = fold
            env["rows"] = rows = env["T"] * subs
            if rows:
                self.launch(call, -(-rows // FOLD_ROWS) * count, "fold", *fold)
        for name, elements in self.parameters.items():
            if layout.has(name):
                env["rows"] = slots * self._rows(name)
                self.launch(call, -(-elements // TOTAL_TILE[1]), "total", name, elements)

    def _fold_launch(
        self, at: Layout, out: str, of: str, count: int, dim: int, subs: int, norm: bool
    ) -> Launch:
        def strides(name: str) -> tuple[int, ...]:
            if subs > 1:
                return at.steps(name, 3)
            row, head = at.lead(2, name)
            return row, 0, head

        constants = {
            "HX": count, "HO": self.HO, "D": dim, "NS": subs, "R": FOLD_ROWS, "NORM": norm,
            "num_warps": 4,
        }  # fmt: skip
        return fold_kernel, (f"@{out}", of, out, "rows"), strides(of) + strides(out), constants

    def _total_launch(self, at: Layout, name: str, elements: int) -> Launch:
        rows, columns = TOTAL_TILE
        return total_kernel, (f"@{name}", name, "rows"), (elements,), {"B": columns, "R": rows}

    def part(self, at: Layout, name: str) -> str:
        """Where the gradient kernels write an output or, of a parameter, its partial sums."""
        if name in self.parameters:
            return f"@{name}" if at.has(name) else ""
        return f"@{name}" if at.has(f"@{name}") else name

    def states(self, call: Call) -> None:
        rows = self._dense_rows(call.layout)
        spans = call.env["N"]
        if rows:
            spans += call.env["T"] * self.substeps // self.every
        block_v = min(self.config.block_v, self.V)
        self.launch(call, spans * self.HO * (self.V // block_v), "states", rows)

    def _dense_rows(self, at: Layout) -> bool:
        """Whether checkpoints may be read: on chunks' edges, and without gaps."""
        if not self.every or self.every % self.config.chunk or not at.has("state_checkpoints"):
            return False
        head = self.V * self.K
        return at.strides["state_checkpoints"] == (self.HO * head, head, self.K, 1)

    def _states_launch(self, at: Layout, rows: bool) -> Launch:
        config, beta = self.config, self.strength
        k, e, s_k = self.key, "", at.steps(self.key, 3)
        if self.key_gate:
            k, e, s_k = "@key", "@erase", (0, 0, 0)
        names = (
            k, e, "v", "w", beta, "@rows", "@decay", "@inverse", "initial_state",
            "state_checkpoints" if rows else "", "@states", "@values", "cu_seqlens", "N", "T",
        )  # fmt: skip
        statics = (
            *at.lead(1, "cu_seqlens"), *s_k, *at.steps("v", 3), *at.lead(2, "w"),
            *at.lead(2, beta), *at.lead(3, "initial_state"),
        )  # fmt: skip
        constants = {
            "HK": self.heads["HK"], "HV": self.HV, "HO": self.HO, "K": self.K, "V": self.V,
            "NS": self.substeps, "C": config.chunk, "BV": min(config.block_v, self.V),
            "KEY_GATE": self.key_gate, "DELTA": self.delta, "ERASE_KEY": self.erase_key,
            **self.activation, "EVERY": self.every if rows else 1, "SPLIT": self.split,
            "PREC": config.precision,
            "num_warps": config.scan_warps, "num_stages": config.scan_stages,
            "maxnreg": config.serial_registers,
        }  # fmt: skip
        return states_kernel, names, statics, constants

    def _gradient_head_launch(self, at: Layout, part: bool) -> Launch:
        config, tiles, options = self.config, self.tiles, self.problem.options
        pre = "" if not at.has("z") else "@O_pre" if self.made_pre else "O_pre"
        dq, dk, dv = (self.part(at, name) for name in ("dQ", "dK", "dV"))
        names = (
            "q", "k", "v", "g", "beta", "a_log", "dt_bias", "a", "d", "z", pre, "dO", "@rows",
            "@scores", "@inverse", "@values", "@dvalues", "@states", "@dstates", dq, dk, dv, "dG",
            "dBeta", "dZ", self.part(at, "d_a_log"), self.part(at, "d_dt_bias"),
            self.part(at, "dA"), "@dD",  # the last is written whenever there is a D
            "cu_seqlens", "N", "T",
        )  # fmt: skip
        statics = (
            self.scale, self.lower, self.dt_min, self.dt_max, *at.lead(1, "cu_seqlens"),
            *at.lead(2, "q"), *at.steps("k", 3), *at.steps("v", 3), *at.lead(2, "g"),
            *at.steps("beta", 2), *at.skip("d"), *at.lead(2, "z"), *at.lead(2, pre),
            *at.lead(2, "dO"), *at.lead(2, dq), *at.steps(dk, 3), *at.steps(dv, 3),
            *at.lead(2, "dG"), *at.steps("dBeta", 2), *at.lead(2, "dZ"),
        )  # fmt: skip
        constants = {
            "HV": self.HV, "K": self.K, "V": self.V, "NS": self.substeps, "C": config.chunk,
            "CQ": config.queries, **self.heads, "BK": tiles.block_k, "BV": tiles.block_v,
            "GATE": self.gate_kind, "DELTA": self.delta, "NORM": self.norm, **self.activation,
            "SOFTPLUS": bool(getattr(options, "dt_softplus", False)),
            "D_CHANNEL": at.has("d") and len(at.strides["d"]) == 2, "SPLIT": self.split,
            "PART": part, "PREC": config.precision,
            "num_warps": tiles.warps, "num_stages": tiles.stages, "maxnreg": tiles.registers,
        }  # fmt: skip
        return gradient_head_kernel, names, statics, constants

    def gradient_key(self, call: Call) -> None:
        programs = call.env["slots"] * self.HO
        for part in self.shares:
            self.launch(call, programs, "products_key", part)
        for part in self.shares:
            self.launch(call, programs * self.partials, "gradient_key", part)
        if not self.erase_key:
            self.launch(call, programs, "beta_key")

    def _products_key_launch(self, at: Layout, part: bool) -> Launch:
        dv = self.part(at, "dV")
        names = (
            "v", "w", "beta", "dO", "@scores", "@inverse", "@values", "@dvalues", dv, "dW",
            "@sums", "cu_seqlens", "N", "T",
        )  # fmt: skip
        tensors = ("v", "w", "beta", "dO", dv, "dW")
        statics = at.lead(1, "cu_seqlens") + self._leads(at, tensors)
        constants = {
            **self._tall, "SPLIT": self.split, "PART": part,
            "PREC": self.config.precision, "num_warps": 4,
            "num_stages": self.tiles.stages,
        }  # fmt: skip
        return products_key_kernel, names, statics, constants

    def _gradient_key_launch(self, at: Layout, part: bool) -> Launch:
        tiles, (dq, dk) = self.tiles, (self.part(at, name) for name in ("dQ", "dK"))
        names = (
            "q", "k", "v", "g", "beta", "a_log", "dt_bias", "dO", "@gates", "@scores", "@inverse",
            "@values", "@dvalues", "@states", "@dstates", "@sums", dq, dk, "dG", "dBeta",
            "@erased", self.part(at, "d_a_log"), self.part(at, "d_dt_bias"), "cu_seqlens",
            "N", "T",
        )  # fmt: skip
        tensors = ("q", "k", "v", "g", "beta", "dO", dq, dk, "dG", "dBeta")
        statics = (
            self.scale, self.lower, *at.lead(1, "cu_seqlens"), *self._leads(at, tensors)
        )  # fmt: skip
        constants = {
            "H": self.heads["H"], "HK": self.heads["HK"], "K": self.K, "BK": tiles.block_k,
            **self._tall, "GATE": self.gate_kind,
            "GUARD": bool(getattr(self.problem.options, "beta_guard", False)), "NORM": self.norm,
            "SPLIT": self.split, "PART": part, "PREC": self.config.precision,
            "num_warps": tiles.warps, "num_stages": tiles.stages, "maxnreg": tiles.registers,
        }  # fmt: skip
        return gradient_key_kernel, names, statics, constants

    def _beta_key_launch(self, at: Layout) -> Launch:
        names = "beta", "@sums", "@erased", "dBeta", "cu_seqlens", "N", "T"
        statics = at.lead(1, "cu_seqlens") + self._leads(at, ("beta", "dBeta"))
        constants = {"NK": self.partials, **self._shape, "num_warps": 1}
        return beta_key_kernel, names, statics, constants

    @property
    def _shape(self) -> dict[str, Any]:
        """Constants that the kernels of a per-key gate share."""
        return {"HO": self.HO, "C": self.config.chunk, **self.activation}

    @property
    def _tall(self) -> dict[str, Any]:
        tall = {"HV": self.HV, "V": self.V, "BV": self.tiles.block_v, "ERASE_KEY": self.erase_key}
        return self._shape | tall

    @staticmethod
    def _leads(at: Layout, names: Sequence[str]) -> tuple[int, ...]:
        """Strides of token and head of each."""
        return tuple(stride for name in names for stride in at.lead(2, name))
