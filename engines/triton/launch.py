"""Plans: which kernels run for a problem, on what scratch, with which arguments.

A plan binds everything static when it is made; `run` reads shapes and strides of the call, carves
the scratch, and launches. No tensor value is read on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from math import inf
from typing import TYPE_CHECKING, Any

import torch

from lagraph.engines.triton.config import choose, schedule, work_of
from lagraph.engines.triton.kernels.factor import factor_head_kernel, factor_key_kernel
from lagraph.engines.triton.kernels.index import ROWS as _ROWS
from lagraph.engines.triton.kernels.scan import scan_kernel, span_decay_kernel
from lagraph.engines.triton.kernels.segment import link_kernel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lagraph.engines.triton.config import Schedule, Tile
    from lagraph.problem import Problem

__all__ = ["ForwardPlan", "SummaryPlan"]

ALIGN = 256
ROWS = _ROWS.value
# Stands in for an unbounded dt_max: larger than any step, and exact in fp32.
UNBOUNDED = 3.0e38
# SMs by architecture, where there is no device to ask: plans only compiled, or interpreted.
SMS = {80: 108, 86: 84, 87: 16, 89: 128, 90: 132, 100: 148, 120: 170}
LINK_ROWS = 16  # rows of the state that one program carries over segments
LINK_WARPS = 8


@dataclass(frozen=True, slots=True)
class Scratch:
    """One per-slot array of the workspace: its elements a slot, and their dtype."""

    name: str
    elements: int
    dtype: torch.dtype

    def nbytes(self, slots: int) -> int:
        return -(-slots * self.elements * self.dtype.itemsize // ALIGN) * ALIGN


def _processors(problem: Problem) -> int:
    """SMs of the problem's device."""
    if torch.cuda.is_available() and problem.index < torch.cuda.device_count():
        return torch.cuda.get_device_properties(problem.index).multi_processor_count
    return SMS.get(problem.arch, 132)


def _strides(rank: int, x: torch.Tensor | None) -> tuple[int, ...]:
    """Strides of the leading axes, zeros for an absent tensor."""
    return (0,) * rank if x is None else x.stride()[:rank]


class _Plan:
    """What all directions share: sizes, options as kernel constants, and the factor stage."""

    # Whether the factor stage multiplies the write strength into the inverse.
    fold = True
    # Whether the plan's kernels take operands of the serial pass in two 16-bit parts: reflections
    # (beta near 2) amplify the rounding of single ones.
    splits = False
    # Whether the plan may cut long sequences into segments.
    cuts = False

    def __init__(self, problem: Problem, knobs: Mapping[str, int | str]) -> None:
        self.problem = problem
        self.config = choose(problem, knobs)
        size, traits, options = problem.sizes, problem.traits, problem.options
        self.heads = {name: size.get(name, size["HO"]) for name in ("H", "HK", "HO")}
        self.K, self.V, self.HO = size["K"], size["V"], size["HO"]
        self.substeps = size.get("n", 1)
        self.key_gate = traits.gate == "key"
        self.delta = traits.delta
        self.io = problem.io_dtype
        scale = getattr(options, "scale", None)
        self.scale = 1.0 if scale is None else float(scale)
        self.lower = float(getattr(options, "gate_lower_bound", None) or 0.0)
        self.dt_min = float(getattr(options, "dt_min", 0.0) or 0.0)
        dt_max = getattr(options, "dt_max", None)
        self.dt_max = UNBOUNDED if dt_max is None or dt_max == inf else float(dt_max)
        self.query = "q" in problem.inputs
        split = knobs.get("split", getattr(options, "allow_neg_eigval", False))
        self.split = self.splits and self.delta and self.io.itemsize == 2 and bool(split)
        self.scratch = self._factor_scratch()
        # Constants of the kernels, put together once: a call only adds tensors and strides.
        self.factor_constants = self._factor_constants()
        self._scan_constants: dict[tuple[bool, str, Tile], dict[str, Any]] = {}
        work = work_of(problem, self.config, knobs, _processors(problem), cut=self.cuts)
        self._schedule = lru_cache(maxsize=1024)(partial(schedule, work))

    # Scratch ------------------------------------------------------------------------------------

    def _factor_scratch(self) -> list[Scratch]:
        c, heads = self.config.chunk, self.HO
        scratch = []
        if self.key_gate:
            names = ("erase", "key", "query") if self.query else ("erase", "key")
            scratch += [Scratch(name, heads * c * self.K, self.io) for name in names]
            scratch.append(Scratch("decay", heads * self.K, torch.float32))
            # Cumulative gates, and four factors a block of 16 steps.
            scratch.append(Scratch("gates", heads * (c + c // 4) * self.K, torch.float32))
        else:
            scratch.append(Scratch("rows", heads * ROWS * c, torch.float32))
        if self.delta:
            parts = 2 if self.split else 1
            scratch.append(Scratch("inverse", parts * heads * c * c, self.io))
            scratch.append(Scratch("solve", heads * c * c, torch.float32))
        if self.query:
            scratch.append(Scratch("scores", heads * self.config.queries * c, self.io))
        return scratch

    def slots(self, T: int, N: int) -> int:
        return T * self.substeps // self.config.chunk + N

    def schedule(self, T: int, N: int) -> Schedule:
        """How the serial pass runs at these shapes."""
        # Rounded, so that a server of many lengths soon knows all schedules.
        chunks = -(-T * self.substeps // (self.config.chunk * max(N, 1)))
        low = max(chunks.bit_length() - 5, 0)
        return self._schedule(-(-chunks >> low) << low, N)

    def workspace_size(self, T: int, N: int) -> int:
        slots = self.slots(T, N)
        return sum(item.nbytes(slots) for item in self.scratch)

    def carve(
        self, workspace: torch.Tensor | None, slots: int, like: torch.Tensor
    ) -> dict[str, Any]:
        if workspace is None:
            total = sum(item.nbytes(slots) for item in self.scratch)
            workspace = torch.empty(total, dtype=torch.uint8, device=like.device)
        views: dict[str, Any] = {}
        at = 0
        for item in self.scratch:
            size = slots * item.elements * item.dtype.itemsize
            views[item.name] = workspace[at : at + size].view(item.dtype)
            at += item.nbytes(slots)
        return views

    # Stages -------------------------------------------------------------------------------------

    def inputs(self, ins: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
        x = dict(zip(self.problem.inputs, ins, strict=True))
        for name in ("a_log", "dt_bias", "a"):  # a few numbers a head, read as dense
            if x.get(name) is not None:
                x[name] = x[name].contiguous()
        for name, tensor in x.items():  # a kernel reads the memory, whatever its sign bit says
            if tensor is not None and tensor.is_neg():
                x[name] = tensor.resolve_neg()
        return x

    def steps(self, x: torch.Tensor | None, rank: int) -> tuple[int, int, int]:
        """Strides of token, sub-token and head of a tensor whose expanded form has this rank."""
        if x is None:
            return 0, 0, 0
        if x.dim() > rank:
            return x.stride(0), x.stride(1), x.stride(2)
        return x.stride(0) * self.substeps, x.stride(0), x.stride(1)

    @property
    def gate_kind(self) -> str:
        options = self.problem.options
        if not self.delta:
            return "ssd"
        if options.safe_gate:
            return "bounded" if self.key_gate else "softplus"
        return options.gate_domain

    def _factor_constants(self) -> dict[str, Any]:
        config, options = self.config, self.problem.options
        constants = {
            **self.heads,
            "K": self.K,
            "C": config.chunk,
            "BK": config.block_k,
            "GATE": self.gate_kind,
            "QUERY": self.query,
            "NORM": bool(getattr(options, "use_qk_l2norm", False)),
            "SIGMOID": bool(getattr(options, "use_beta_sigmoid", False)),
            "DOUBLE": bool(getattr(options, "allow_neg_eigval", False)),
            "SPLIT": self.split,
            "PREC": config.precision,
            "FOLD": self.fold,
            "num_warps": config.factor_warps,
            "num_stages": config.factor_stages,
            "maxnreg": config.factor_registers,
        }
        if self.key_gate:
            constants["ERASE_KEY"] = self.problem.traits.erase == "key"
            constants["GUARD"] = bool(getattr(options, "beta_guard", False))
        else:
            constants |= {"HP": config.share, "NS": self.substeps, "CQ": config.queries}
            constants |= {
                "DELTA": self.delta,
                "SOFTPLUS": bool(getattr(options, "dt_softplus", False)),
            }
        return constants

    def factor(self, x: dict[str, Any], ws: dict[str, Any], slots: int, T: int, N: int) -> None:
        q, k, g, beta, cu = x.get("q"), x["k"], x["g"], x.get("beta"), x["cu_seqlens"]
        s_qt, s_qh = (q.stride(0), q.stride(1)) if q is not None else (0, 0)
        s_kt, s_ks, s_kh = self.steps(k, 3)
        if self.key_gate:
            s_bt, s_bh = beta.stride(0), beta.stride(1)
            factor_key_kernel[(slots * self.HO,)](
                q, k, g, beta, x.get("a_log"), x.get("dt_bias"), cu,
                ws["erase"], ws.get("query"), ws["key"], ws["decay"], ws["gates"],
                ws["solve"], ws["inverse"],
                ws.get("scores"), N, T, self.scale, self.lower, cu.stride(0),
                s_qt, s_qh, s_kt, s_kh, g.stride(0), g.stride(1), s_bt, s_bh,
                **self.factor_constants,
            )  # fmt: skip
            return
        s_bt, s_bs, s_bh = self.steps(beta, 2)
        factor_head_kernel[(slots * (self.HO // self.config.share),)](
            q, k, g, beta, x.get("a_log"), x.get("dt_bias"), x.get("a"), cu,
            ws["rows"], ws.get("solve"), ws.get("inverse"), ws.get("scores"), N, T, self.scale,
            self.lower, self.dt_min, self.dt_max, cu.stride(0), s_qt, s_qh, s_kt, s_ks, s_kh,
            g.stride(0), g.stride(1), s_bt, s_bs, s_bh,
            **self.factor_constants,
        )  # fmt: skip

    def scan_constants(self, identity: bool, stage: str, tile: Tile) -> dict[str, Any]:
        """What does not change between launches of one kind."""
        found = self._scan_constants.get((identity, stage, tile))
        if found is None:
            config, options = self.config, self.problem.options
            found = self._scan_constants[identity, stage, tile] = {
                **self.heads,
                "HV": self.problem.sizes.get("HV", self.HO),
                "K": self.K,
                "NS": self.substeps,
                "C": config.chunk,
                "CQ": config.queries,
                "KEY_GATE": self.key_gate,
                "DELTA": self.delta,
                "IDENTITY": identity,
                "STAGE": stage,
                "SPLIT": self.split,
                "EVERY": getattr(options, "checkpoint_every_n_tokens", 0) or 1,
                "PREC": config.precision,
                "num_warps": tile.warps,
                "num_stages": tile.stages,
                "maxnreg": config.serial_registers,
            }
        return found

    def scan(
        self,
        x: dict[str, Any],
        ws: dict[str, Any],
        T: int,
        N: int,
        *,
        out: torch.Tensor | None = None,
        pre: torch.Tensor | None = None,
        final: torch.Tensor | None = None,
        checkpoints: torch.Tensor | None = None,
        identity: bool = False,
        stage: str = "whole",
        segments: int = 0,
    ) -> None:
        """The serial pass. With `identity` the state starts as the unit matrix and nothing is
        written to it: its end is the transition of the span. `stage` is for sequences that are
        cut, into as many later segments as there are slots: see `kernels.scan`."""
        plan = self.schedule(T, N)
        tile = plan.tile
        v = None if identity else x["v"]
        w = None if identity else x.get("w")
        h0 = None if identity else x.get("initial_state")
        width = self.K if identity else self.V
        q, k, e = x.get("q") if out is not None else None, x["k"], None
        if self.key_gate:
            q, k, e = ws.get("query") if out is not None else None, ws["key"], ws["erase"]
        d, z, index, cu = x.get("d"), x.get("z"), x.get("state_indices"), x["cu_seqlens"]
        s_kt, s_ks, s_kh = (0, 0, 0) if self.key_gate else self.steps(k, 3)
        s_qt, s_qh = (0, 0) if self.key_gate or q is None else (q.stride(0), q.stride(1))
        pool = h0 if h0 is not None else final
        block_v = min(tile.block_v, width)
        programs = N * self.HO * (width // block_v)
        if stage == "open":
            # Slices of the state and of the transition are equally wide.
            block_v = min(block_v, self.K) if self.delta else block_v
            outputs, moves = self.V // block_v, self.K // block_v if self.delta else 0
            programs = self.HO * (N * outputs + segments * (outputs + moves))
        elif stage == "close":
            programs = segments * self.HO * (self.V // block_v)
        s_d = (d.stride(0), d.stride(1) if d.dim() == 2 else 0) if d is not None else (0, 0)
        scan_kernel[(programs,)](
            q, k, e, v, w, ws.get("rows"), ws.get("decay"), ws.get("inverse"), ws.get("scores"),
            d if out is not None else None, z if out is not None else None,
            h0, index, out, pre, final, checkpoints, ws.get("enter"), ws.get("move"), cu,
            N, T, pool.shape[0] if pool is not None else 0, plan.lead, plan.span,
            cu.stride(0), index.stride(0) if index is not None else 0,
            s_qt, s_qh, s_kt, s_ks, s_kh, *self.steps(v, 3), *_strides(2, w), *s_d, *_strides(2, z),
            *_strides(3, h0), *_strides(3, final), *_strides(2, out), *_strides(2, pre),
            V=width, BV=block_v, **self.scan_constants(identity, stage, tile),
        )  # fmt: skip


class ForwardPlan(_Plan):
    """Factors, then the serial pass with outputs: two launches, or four where it is cut."""

    splits = True
    cuts = True

    def __init__(self, problem: Problem, knobs: Mapping[str, int | str]) -> None:
        super().__init__(problem, knobs)
        move = self.HO * (self.K * self.K if self.delta else 1)
        # One slot a later segment: see `kernels.segment`.
        self.segment_scratch = [
            Scratch("enter", self.HO * self.V * self.K, torch.float32),
            Scratch("move", move, torch.float32),
        ]

    def segments(self, T: int, N: int) -> int:
        """Slots of later segments: 0 where sequences stay whole."""
        span = self.schedule(T, N).span
        return T * self.substeps // (span * self.config.chunk) if span else 0

    def workspace_size(self, T: int, N: int) -> int:
        segments = self.segments(T, N)
        size = sum(item.nbytes(segments) for item in self.segment_scratch)
        return super().workspace_size(T, N) + size

    def run(self, ins: Sequence[Any], outs: Sequence[Any], workspace: Any = None) -> None:
        x = self.inputs(ins)
        y = dict(zip(self.problem.outputs, outs, strict=True))
        T, N = x["g"].shape[0], x["cu_seqlens"].shape[0] - 1
        if N == 0:
            return
        slots, segments = self.slots(T, N), self.segments(T, N)
        if workspace is None:
            size = self.workspace_size(T, N)
            workspace = torch.empty(size, dtype=torch.uint8, device=x["g"].device)
        ws = self.carve(workspace, slots, x["g"])
        self.factor(x, ws, slots, T, N)
        scan = partial(
            self.scan, x, ws, T, N, out=y["O"], pre=y.get("O_pre"), final=y.get("final_state"),
            checkpoints=y.get("state_checkpoints"), segments=segments,
        )  # fmt: skip
        if not segments:
            scan()
            return
        at = super().workspace_size(T, N)
        for item in self.segment_scratch:
            size = segments * item.elements * item.dtype.itemsize
            ws[item.name] = workspace[at : at + size].view(item.dtype)
            at += item.nbytes(segments)
        scan(stage="open")
        self.link(x, ws, T, N)
        scan(stage="close")

    def link(self, x: dict[str, Any], ws: dict[str, Any], T: int, N: int) -> None:
        """The states that enter the later segments."""
        plan, cu = self.schedule(T, N), x["cu_seqlens"]
        link_kernel[(N * self.HO * (self.V // LINK_ROWS),)](
            ws["enter"], ws["move"], cu, N, T, plan.lead, plan.span, cu.stride(0),
            HO=self.HO, K=self.K, V=self.V, NS=self.substeps, C=self.config.chunk, BV=LINK_ROWS,
            DELTA=self.delta, PREC=self.config.precision,
            num_warps=LINK_WARPS, num_stages=self.config.link_stages,
        )  # fmt: skip


class SummaryPlan(_Plan):
    """Factors without queries, the state's end, and the transition of the span."""

    splits = True

    def run(self, ins: Sequence[Any], outs: Sequence[Any], workspace: Any = None) -> None:
        x = self.inputs(ins)
        y = dict(zip(self.problem.outputs, outs, strict=True))
        T, N = x["g"].shape[0], x["cu_seqlens"].shape[0] - 1
        if N == 0:
            return
        slots = self.slots(T, N)
        ws = self.carve(workspace, slots, x["g"])
        self.factor(x, ws, slots, T, N)
        self.scan(x, ws, T, N, final=y["final_state"])
        transition, cu = y.get("transition"), x["cu_seqlens"]
        if transition is None:
            return
        if self.delta:
            self.scan(x, ws, T, N, final=transition, identity=True)
        else:
            span_decay_kernel[(N * self.HO,)](
                ws["rows"], cu, transition, N, T, cu.stride(0),
                HO=self.HO, NS=self.substeps, C=self.config.chunk,
            )  # fmt: skip
