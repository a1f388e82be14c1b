"""Plans of the two backward directions.

The backward keeps nothing of the forward but its inputs (and checkpoints, where their cadence is a
multiple of the chunk). Its stages, each one launch:

    factor     what the chunk recurrence needs, as in the forward
    serial     forward, chunk-entry states S and written values U; and back, dS after every chunk,
               the gradient Y of what was written, and the gradient of the initial state
    gradient   all other gradients, token-parallel; where heads of Mamba-2 share q and k in three
               launches: products of their chunks, dq and dk, steps
    fold       sums over head groups, and the unit norm: where there are such
    total      sums of parameter gradients over chunks: one a parameter
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from lagraph.engines.triton.config import SMALL_SHARED
from lagraph.engines.triton.kernels.channel import (
    beta_key_kernel,
    gradient_key_kernel,
    products_key_kernel,
)
from lagraph.engines.triton.kernels.gradient import gradient_head_kernel
from lagraph.engines.triton.kernels.group import (
    gradient_group_kernel,
    products_group_kernel,
    step_group_kernel,
)
from lagraph.engines.triton.kernels.reduce import fold_kernel, total_kernel
from lagraph.engines.triton.kernels.reverse import reverse_kernel
from lagraph.engines.triton.kernels.serial import serial_kernel
from lagraph.engines.triton.launch import Launch, Layout, Ports, Scratch, _Plan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lagraph.engines.triton.launch import Call
    from lagraph.problem import Problem

__all__ = ["BackwardPlan", "SummaryBackwardPlan"]

FOLD_ROWS = 16
# Heads that share q and k and are served by one program, at most; 0 for a program each. Mamba-2's
# backward on an H200 (4 x 8192, 80 heads, one group): 2.49 ms at 20, 2.53 at 80, 2.63 at 10, 4.18
# at 0.
GROUP_HEADS = 20
TOTAL_TILE = (64, 32)  # rows, columns
PARAMETERS = {"d_a_log": "a_log", "d_dt_bias": "dt_bias", "dA": "a", "dD": "d"}


@dataclass(frozen=True, slots=True)
class Tiles:
    """Launch shapes of the backward's own kernels."""

    block_k: int
    block_v: int
    block_q: int
    warps: int
    stages: int
    registers: int | None


def choose(problem: Problem, knobs: Mapping[str, int | str], chunk: int) -> Tiles:
    """Tiles of the gradient kernels."""
    size, key_gate = problem.sizes, problem.traits.gate == "key"
    wide = problem.io_dtype.itemsize == 4
    small = wide or problem.arch in SMALL_SHARED
    # Chunks of 32 rows feed two warps; no more than two must serve 64.
    warps, stages = 4 if wide else 2, 1 if small else 2
    block_k, block_v = 16 if wide else 32, 32 if small else 64
    # Under a gate a key channel, 32 of them are too many for the registers of some.
    guard = bool(getattr(problem.options, "beta_guard", False))
    if key_gate and (small or problem.arch < 90 or problem.io_dtype == torch.float16 or guard):
        block_k = 16
    # Where tiles [C, V] stay on chip, states alone are loaded, a K-block ahead. They, and the
    # registers of four programs, fill an SM.
    if not (small or key_gate) and size["V"] <= 128:
        block_v, stages = 128, 3
        block_k = 16 if size["V"] == 128 or chunk > 32 else 32
    return Tiles(
        block_k=min(size["K"], int(knobs.get("gradient_k", block_k))),
        block_v=min(size["V"], int(knobs.get("gradient_v", block_v))),
        block_q=min(size["K"], int(knobs.get("gradient_q", 32 if wide else 64))),
        warps=int(knobs.get("gradient_warps", warps)),
        stages=int(knobs.get("gradient_stages", stages)),
        registers=int(knobs.get("gradient_registers", 0)) or None,
    )


@dataclass(frozen=True, slots=True)
class Joint:
    """Launch shapes where heads share q and k, without delta rule.

    heads: that one program serves; rows: of M at once.
    """

    heads: int
    rows: int
    block_k: int
    warps: int
    stages: int
    registers: int | None
    products_warps: int
    products_stages: int
    products_registers: int | None


def join(
    problem: Problem, knobs: Mapping[str, int | str], tiles: Tiles, chunk: int
) -> Joint | None:
    """How gradients of heads add up on chip; None where each has q and k of its own."""
    size, most = problem.sizes, int(knobs.get("gradient_heads", GROUP_HEADS))
    heads, keys = size["HO"], size.get("H", size["HO"])
    alike = keys == size.get("HK", heads) and size.get("HV", heads) == heads
    wide, group = problem.io_dtype.itemsize == 4, heads // keys
    fits = size["V"] <= (64 if wide else 128)  # wider slices of all of V spill
    if problem.traits.delta or not (alike and fits) or group == 1 or most < 1:
        return None
    # Two warps, and 32 rows of M: no tile for wgmma, as below. Registers of five programs.
    few = 0 if wide else 200
    return Joint(
        heads=max(h for h in range(1, min(group, most) + 1) if group % h == 0),
        rows=min(chunk, int(knobs.get("group_rows", 32))),
        block_k=min(size["K"], int(knobs.get("group_k", 16 if wide else 32))),
        warps=int(knobs.get("group_warps", 2)),
        stages=int(knobs.get("group_stages", tiles.stages)),
        registers=int(knobs.get("group_registers", few)) or None,
        products_warps=int(knobs.get("products_warps", 2)),
        products_stages=int(knobs.get("products_stages", tiles.stages)),
        products_registers=int(knobs.get("products_registers", few)) or None,
    )


class _BackPlan(_Plan):
    """The factor stage without its folded strength, and the reverse pass."""

    fold = False

    def __init__(self, problem: Problem, knobs: Mapping[str, int | str]) -> None:
        every = getattr(problem.options, "checkpoint_every_n_tokens", 0) or 0
        # Chunks need not divide the checkpoints' cadence here.
        options = SimpleNamespace(**{**vars(problem.options), "checkpoint_every_n_tokens": 0})
        # At most 32 steps a chunk: two blocks of 16 leave few levels of pairs, and the gradient
        # kernels' products stay too small for wgmma, which Triton 3.6 gets wrong in them. Without
        # the delta rule 64, still for two warps, which have no wgmma: half the states to move.
        size = problem.sizes
        wide, large = problem.io_dtype.itemsize == 4, max(size["K"], size["V"]) > 128
        most = 16 if wide and large else 32
        lean = not wide and problem.arch not in SMALL_SHARED and size["K"] <= 128
        if not problem.traits.delta and lean and size["V"] <= 64:
            most = 64
        chunk = min(int(knobs.get("chunk", most)), most)
        knobs = {**knobs, "chunk": chunk}
        if 90 <= problem.arch < 100 and problem.traits.gate == "head" and not (wide or large):
            # Of tiles for wgmma one more is kept: two stages would load when all else is done.
            knobs = {"scan_stages": 3 if chunk <= 32 else 2, **knobs}
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

    def reverse(self, call: Call, first: str, *, identity: bool = False) -> None:
        """The serial pass back, writing the gradient of the first state; with `identity` that is
        the transposed transition."""
        width = self.K if identity else self.V
        programs = call.env["N"] * self.HO * (width // min(self.config.block_v, width))
        self.launch(call, programs, "reverse", first, identity)

    def _reverse_launch(self, at: Layout, first: str, identity: bool) -> Launch:
        q, k, e, s_q, s_k = self._operands(at)
        dout, z, last = ("", "", "") if identity else ("dO", "z", "d_final_state")
        names = (
            q, k, e, self.strength, "@rows", "@decay", "@inverse", "@scores", dout, z, last, "",
            "", first, "cu_seqlens", "T",
        )  # fmt: skip
        statics = (
            *at.lead(1, "cu_seqlens"), *s_q, *s_k, *at.lead(2, self.strength), *at.lead(2, dout),
            *at.lead(2, z), *at.lead(3, last), *at.lead(3, first),
        )  # fmt: skip
        constants = self._serial_constants(self.K if identity else self.V)
        return reverse_kernel, names, statics, {"IDENTITY": identity, **constants}

    def _operands(self, at: Layout) -> tuple[str, str, str, tuple[int, ...], tuple[int, ...]]:
        """Where the serial passes read q, k and e, and strides of q and k."""
        if self.key_gate:
            return "@query", "@key", "@erase", (0, 0), (0, 0, 0)
        return "q", self.key, "", at.lead(2, "q"), at.steps(self.key, 3)

    def _serial_constants(self, width: int) -> dict[str, Any]:
        config = self.config
        return {
            **self.heads, "K": self.K, "V": width, "NS": self.substeps, "C": config.chunk,
            "CQ": config.queries, "BV": min(config.block_v, width), "KEY_GATE": self.key_gate,
            "DELTA": self.delta, "ERASE_KEY": self.erase_key, **self.activation,
            "SPLIT": self.split, "PREC": config.precision, "num_warps": config.scan_warps,
            "num_stages": config.scan_stages, "maxnreg": config.serial_registers,
        }  # fmt: skip


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
        self.tiles = choose(problem, knobs, self.config.chunk)
        size, n, c = problem.sizes, self.substeps, self.config.chunk
        self.HV = size.get("HV", self.HO)
        # With wider states both serial passes in one kernel spill.
        self.together = int(knobs.get("together", max(size["K"], size["V"]) <= 128))
        # Whether operands are in two parts, for every launch over chunks.
        self.shares = ((False,), (True,), (False, True))[self.split]
        heads, io = self.HO, self.io
        self.scratch.append(Scratch("states", heads * self.V * self.K, io))
        self.scratch.append(Scratch("dstates", heads * self.V * self.K, io))
        if self.delta:
            self.scratch.append(Scratch("values", self.parts * heads * c * self.V, io))
        self.joint = join(problem, knobs, self.tiles, c)
        if self.joint:
            width = self.joint.block_k
            sums = heads * (self.K // width) * (2 * c + width)
            pairs = heads * (c // self.joint.rows) * 2 * c
            self.scratch.append(Scratch("summed", heads // self.joint.heads * c * c, io))
            self.scratch.append(Scratch("sums", sums, torch.float32))
            self.scratch.append(Scratch("pairs", pairs, torch.float32))
        else:
            self.scratch.append(Scratch("dvalues", self.parts * heads * c * self.V, io))
        # Partial sums a chunk: one, or one a K-block.
        self.partials = self.K // self.tiles.block_k if self.key_gate else 1
        if self.key_gate:
            self.scratch.append(Scratch("sums", heads * 2 * c, torch.float32))
            # Zeros and ones: the first of them is used.
            ones = io if io == torch.bfloat16 else torch.float32
            self.scratch.append(Scratch("ones", 2 * c * c, ones, "N"))
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
        parts = heads // self.joint.heads if self.joint else heads
        for out, of, count, made, dim, subs, norm in (
            ("dQ", "q", self.heads["H"], parts, self.K, 1, self.norm),
            ("dK", "k", self.heads["HK"], parts, self.K, n, self.norm),
            ("dV", "v", self.HV, heads, self.V, n, False),
        ):
            if norm or count != made:
                self.folds.append((out, of, count, made, dim, subs, norm))
                self._stand_in(out, made, subs, dim)
        self.made_pre = problem.has("z") and not problem.has("O_pre")
        if self.made_pre:
            self._stand_in("O_pre", heads, 1, self.V)
        self.at_dout, self.at_query = self.names.index("dO"), self.names.index("q")

    def _stand_in(self, name: str, heads: int, subs: int, dim: int) -> None:
        """Scratch [T * subs, heads, dim] in the place of a tensor."""
        self.scratch.append(Scratch(name, subs * heads * dim, self.io, "T"))
        self.scratch_strides[f"@{name}"] = (heads * dim, dim, 1)

    def _rows(self, name: str) -> int:
        """Rows of partial sums a chunk of a parameter."""
        if name == "dD" and self.joint:
            return self.config.chunk // self.joint.rows
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
        self.serial(call)
        if self.made_pre:
            self.scan(call, Ports(out="@O_pre"))
        if self.key_gate:
            self.gradient_key(call)
        elif self.joint:
            self.gradient_group(call, self.joint)
        else:
            for part in self.shares:
                self.launch(call, slots * self.HO, "gradient_head", part)
        for fold in self.folds:
            _, _, count, _, _, subs, _ = fold
            env["rows"] = rows = env["T"] * subs
            if rows:
                self.launch(call, -(-rows // FOLD_ROWS) * count, "fold", *fold)
        for name, elements in self.parameters.items():
            if layout.has(name):
                env["rows"] = slots * self._rows(name)
                self.launch(call, -(-elements // TOTAL_TILE[1]), "total", name, elements)

    def _fold_launch(
        self, at: Layout, out: str, of: str, count: int, made: int, dim: int, subs: int, norm: bool
    ) -> Launch:
        def strides(name: str) -> tuple[int, ...]:
            if subs > 1:
                return at.steps(name, 3)
            row, head = at.lead(2, name)
            return row, 0, head

        constants = {
            "HX": count, "HO": made, "D": dim, "NS": subs, "R": FOLD_ROWS, "NORM": norm,
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

    def serial(self, call: Call) -> None:
        """States and values of every chunk forward, and their gradients back, side by side."""
        rows, back = self._dense_rows(call.layout), call.env["N"]
        ahead = back + (call.env["T"] * self.substeps // self.every if rows else 0)
        slices = self.HO * (self.V // min(self.config.block_v, self.V))
        if self.together:
            self.launch(call, (ahead + back) * slices, "serial", rows, "both")
        else:
            self.launch(call, ahead * slices, "serial", rows, "states")
            self.launch(call, back * slices, "serial", rows, "reverse")

    def _dense_rows(self, at: Layout) -> bool:
        """Whether checkpoints may be read: on chunks' edges, and without gaps."""
        if not self.every or self.every % self.config.chunk or not at.has("state_checkpoints"):
            return False
        head = self.V * self.K
        return at.strides["state_checkpoints"] == (self.HO * head, head, self.K, 1)

    def _serial_launch(self, at: Layout, rows: bool, which: str) -> Launch:
        q, k, e, s_q, s_k = self._operands(at)
        writes = ("", "d", "dV") if self.joint else ("@dvalues", "", "")
        names = (
            k, e, "v", "w", self.strength, "@rows", "@decay", "@inverse", "initial_state",
            "state_checkpoints" if rows else "", "@states", "@values", "cu_seqlens", q, "@scores",
            "dO", "z", "d_final_state", "@dstates", *writes, "d_initial_state", "N", "T",
        )  # fmt: skip
        statics = (
            *at.lead(1, "cu_seqlens"), *s_k, *at.steps("v", 3), *at.lead(2, "w"),
            *at.lead(2, self.strength), *at.lead(3, "initial_state"), *s_q, *at.lead(2, "dO"),
            *at.lead(2, "z"), *at.lead(3, "d_final_state"), *at.lead(3, "d_initial_state"),
            *at.skip(writes[1]), *at.lead(2, writes[2]),
        )  # fmt: skip
        constants = {
            "HV": self.HV, "EVERY": self.every if rows else 1, "PASS": which,
            **self._serial_constants(self.V),
        }  # fmt: skip
        return serial_kernel, names, statics, constants

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
            "CQ": config.queries, **self.heads, "BK": tiles.block_k,
            # Two parts of everything would not fit on chip.
            "BV": min(tiles.block_v, 64) if part else tiles.block_v, "BQ": tiles.block_q,
            "STAGES": tiles.stages, "GATE": self.gate_kind, "DELTA": self.delta,
            "NORM": self.norm, **self.activation,
            "SOFTPLUS": bool(getattr(options, "dt_softplus", False)),
            "D_CHANNEL": at.has("d") and len(at.strides["d"]) == 2, "SPLIT": self.split,
            "PART": part, "PREC": config.precision,
            "num_warps": tiles.warps, "num_stages": tiles.stages, "maxnreg": tiles.registers,
        }  # fmt: skip
        return gradient_head_kernel, names, statics, constants

    def gradient_group(self, call: Call, joint: Joint) -> None:
        slots, programs = call.env["slots"], call.env["slots"] * self.HO // joint.heads
        chunk = self.config.chunk
        self.launch(call, programs * (chunk // joint.rows), "products_group", joint)
        self.launch(call, programs * 2 * (self.K // joint.block_k), "gradient_group", joint)
        self.launch(call, slots * self.HO, "step_group", joint)

    def _products_group_launch(self, at: Layout, joint: Joint) -> Launch:
        pre = "" if not at.has("z") else "@O_pre" if self.made_pre else "O_pre"
        names = (
            "q", "k", "v", "z", pre, "dO", "@rows", "@summed", "@pairs", "dZ",
            "@dD",  # written whenever there is a D
            "cu_seqlens", "N", "T",
        )  # fmt: skip
        tensors = ("q", "k", "v", "z", pre, "dO", "dZ")
        statics = (self.scale, *at.lead(1, "cu_seqlens"), *self._leads(at, tensors))
        constants = {
            **self._group(joint), "CR": joint.rows, "BQ": self.tiles.block_q,
            "STAGES": joint.products_stages,
            "D_CHANNEL": at.has("d") and len(at.strides["d"]) == 2,
            "num_warps": joint.products_warps, "num_stages": joint.products_stages,
            "maxnreg": joint.products_registers,
        }  # fmt: skip
        return products_group_kernel, names, statics, constants

    def _gradient_group_launch(self, at: Layout, joint: Joint) -> Launch:
        dq, dk = self.part(at, "dQ"), self.part(at, "dK")
        names = (
            "q", "k", "v", "z", "dO", "@rows", "@summed", "@states", "@dstates", dq, dk, "@sums",
            "cu_seqlens", "N", "T",
        )  # fmt: skip
        tensors = ("q", "k", "v", "z", "dO", dq, dk)
        statics = (self.scale, *at.lead(1, "cu_seqlens"), *self._leads(at, tensors))
        constants = {
            **self._group(joint), "BK": joint.block_k, "STAGES": joint.stages,
            "num_warps": joint.warps, "num_stages": joint.stages, "maxnreg": joint.registers,
        }  # fmt: skip
        return gradient_group_kernel, names, statics, constants

    def _group(self, joint: Joint) -> dict[str, Any]:
        return {
            "H": self.heads["H"], "HO": self.HO, "HP": joint.heads, "K": self.K, "V": self.V,
            "C": self.config.chunk, "PREC": self.config.precision,
        }  # fmt: skip

    def _step_group_launch(self, at: Layout, joint: Joint) -> Launch:
        names = (
            "g", "dt_bias", "a", "@rows", "@pairs", "@sums", "dG", self.part(at, "d_dt_bias"),
            self.part(at, "dA"), "cu_seqlens", "N", "T",
        )  # fmt: skip
        statics = (
            self.dt_min, self.dt_max, *at.lead(1, "cu_seqlens"), *self._leads(at, ("g", "dG")),
        )  # fmt: skip
        constants = {
            "HO": self.HO, "BK": joint.block_k, "C": self.config.chunk,
            "NK": self.K // joint.block_k, "NR": self.config.chunk // joint.rows,
            "SOFTPLUS": bool(getattr(self.problem.options, "dt_softplus", False)), "num_warps": 1,
        }  # fmt: skip
        return step_group_kernel, names, statics, constants

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
            "@sums", "@ones", "cu_seqlens", "N", "T",
        )  # fmt: skip
        tensors = ("v", "w", "beta", "dO", dv, "dW")
        statics = at.lead(1, "cu_seqlens") + self._leads(at, tensors)
        constants = {
            "HV": self.HV, **self._tall, "SPLIT": self.split, "PART": part,
            "PREC": self.config.precision, "num_warps": 4,
            "num_stages": self.tiles.stages,
        }  # fmt: skip
        return products_key_kernel, names, statics, constants

    def _gradient_key_launch(self, at: Layout, part: bool) -> Launch:
        tiles, (dq, dk) = self.tiles, (self.part(at, name) for name in ("dQ", "dK"))
        names = (
            "q", "k", "g", "beta", "a_log", "dt_bias", "dO", "@gates", "@scores", "@inverse",
            "@values", "@dvalues", "@states", "@dstates", "@sums", "@ones", dq, dk, "dG", "dBeta",
            "@erased", self.part(at, "d_a_log"), self.part(at, "d_dt_bias"), "cu_seqlens",
            "N", "T",
        )  # fmt: skip
        tensors = ("q", "k", "g", "beta", "dO", dq, dk, "dG", "dBeta")
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
        tall = {"V": self.V, "BV": self.tiles.block_v, "ERASE_KEY": self.erase_key}
        return self._shape | tall

    @staticmethod
    def _leads(at: Layout, names: Sequence[str]) -> tuple[int, ...]:
        """Strides of token and head of each."""
        return tuple(stride for name in names for stride in at.lead(2, name))
