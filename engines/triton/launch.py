"""Plans: which kernels run for a problem, on what scratch, with which arguments.

A plan binds everything static when it is made. `run` looks at the strides and addresses of the call
once, lays out the scratch, and launches. A launch is described by a method `_<name>_launch`: its
kernel, the names of its tensors and sizes, its fixed numbers and its constants. That is read once
for each layout of the call's tensors, and kept as a `bound.Site`. No tensor value is read on the
host.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lagraph.engines.triton.bound import LIMIT, Kernel, direct, loose, stream_of
from lagraph.engines.triton.config import choose, schedule, work_of
from lagraph.engines.triton.kernels.factor import (
    factor_head_kernel,
    factor_key_kernel,
    factor_near_kernel,
)
from lagraph.engines.triton.kernels.index import ROWS as _ROWS
from lagraph.engines.triton.kernels.scan import scan_kernel, span_decay_kernel
from lagraph.engines.triton.kernels.segment import link_kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lagraph.engines.triton.bound import Site
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
# Layouts kept by a plan; some callers' strides depend on T.
LAYOUTS = 256


@dataclass(frozen=True, slots=True)
class Scratch:
    """One array of the workspace: its elements for every one of `unit`, and their dtype.

    Launches name it "@name". unit: "slots" (chunks), "T" or "segments", of a call's sizes.
    """

    name: str
    elements: int
    dtype: torch.dtype
    unit: str = "slots"

    def nbytes(self, count: int) -> int:
        """Bytes set aside: whole lines, so that what follows is aligned."""
        return -(-count * self.elements * self.dtype.itemsize // ALIGN) * ALIGN


class Extent(NamedTuple):
    """What follows from T and N: sizes by name, where scratch begins, and bytes of all of it."""

    sizes: dict[str, Any]
    offsets: tuple[tuple[str, int], ...]
    nbytes: int


class Layout:
    """Strides of a call's tensors by name, and its launches.

    kinds: which tensors are absent, and which are not aligned. copies: whether parameters are not
    dense.
    """

    __slots__ = ("copies", "kinds", "sites", "strides", "substeps")

    def __init__(
        self, strides: dict[str, Any], kinds: Any, substeps: int, copies: bool = False
    ) -> None:
        self.strides, self.kinds, self.substeps, self.copies = strides, kinds, substeps, copies
        self.sites: dict[Any, Site] = {}

    def has(self, name: str) -> bool:
        return self.strides.get(name) is not None

    def lead(self, count: int, name: str) -> tuple[int, ...]:
        """Strides of the leading axes, zeros for an absent tensor."""
        found = self.strides.get(name)
        return (0,) * count if found is None else found[:count]

    def steps(self, name: str, rank: int) -> tuple[int, int, int]:
        """Strides of token, sub-token and head of a tensor whose expanded form has this rank."""
        found = self.strides.get(name)
        if found is None:
            return 0, 0, 0
        if len(found) > rank:
            return found[:3]
        return found[0] * self.substeps, found[0], found[1]

    def skip(self, name: str) -> tuple[int, int]:
        """Strides of D [H] or [H, P]."""
        found = self.strides.get(name)
        if found is None:
            return 0, 0
        return found if len(found) == 2 else (found[0], 0)


class Call:
    """One run of a plan.

    env: what launches read, by name: sizes, and tensors and scratch as addresses; in an ordinary
    run as tensors. stream: None in an ordinary run. tensors: makes all tensors by name.
    """

    __slots__ = ("env", "layout", "stream", "tensors")

    def __init__(
        self,
        env: dict[str, Any],
        layout: Layout,
        stream: int | None,
        tensors: Callable[[], dict[str, Any]],
    ) -> None:
        self.env, self.layout, self.stream, self.tensors = env, layout, stream, tensors


class Ports(NamedTuple):
    """The serial pass's tensors beside its inputs, by name; "" where there is none."""

    out: str = ""
    pre: str = ""
    final: str = ""
    checkpoints: str = ""
    z: str = ""


# What a launch is made of: kernel, names of tensors and sizes, fixed numbers, constants.
Launch = tuple[Any, tuple[str, ...], tuple[Any, ...], dict[str, Any]]
# Parameters with a few numbers a head, which kernels read as dense.
DENSE = ("a_log", "dt_bias", "a")


def _processors(problem: Problem) -> int:
    """SMs of the problem's device."""
    if torch.cuda.is_available() and problem.index < torch.cuda.device_count():
        return torch.cuda.get_device_properties(problem.index).multi_processor_count
    return SMS.get(problem.arch, 132)


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
        self.key = "k" if problem.has("k") else "q"  # Mamba-2's keys do not always matter
        self.split = self.config.split if self.splits else 0
        self.parts = 2 if self.split else 1  # of an operand
        self.scratch = self._factor_scratch()
        # Constants of the kernels, put together once: a call only adds tensors and strides.
        self.factor_constants = self._factor_constants()
        self._scan_constants: dict[tuple[bool, str, Tile], dict[str, Any]] = {}
        work = work_of(problem, self.config, knobs, _processors(problem), cut=self.cuts)
        self._schedule = lru_cache(maxsize=1024)(partial(schedule, work))
        self.extent = lru_cache(maxsize=1024)(self._extent)
        # Tensors of a call in order, and where some of them are.
        self.names = (*problem.inputs, *problem.outputs)
        at = {name: place for place, name in enumerate(self.names)}
        self.at_gate, self.at_offsets = at["g"], at["cu_seqlens"]
        self.at_index, self.at_pool = at.get("state_indices", -1), at.get("initial_state", -1)
        self.scratch_strides: dict[str, tuple[int, ...]] = {}  # of scratch that stands for a tensor
        self.kernels: dict[Any, Kernel] = {}
        self.layouts: dict[Any, Layout] = {}

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
            scratch.append(Scratch("inverse", self.parts * heads * c * c, self.io))
            scratch.append(Scratch("solve", heads * c * c, torch.float32))
        if self.query:
            count = self.parts * heads * self.config.queries * c
            scratch.append(Scratch("scores", count, self.io))
        return scratch

    def schedule(self, T: int, N: int) -> Schedule:
        """How the serial pass runs at these shapes."""
        # Rounded, so that a server of many lengths soon knows all schedules.
        chunks = -(-T * self.substeps // (self.config.chunk * max(N, 1)))
        low = max(chunks.bit_length() - 5, 0)
        return self._schedule(-(-chunks >> low) << low, N)

    @cached_property
    def known(self) -> frozenset[str]:
        """Every name that a launch can read; others stand for absent tensors."""
        extent = self.extent(0, 1)
        return frozenset((*extent.sizes, *self.names, *dict(extent.offsets)))

    def _extent(self, T: int, N: int) -> Extent:
        """What launches read of a call's lengths: slots are chunks; segments the later ones, 0
        where sequences stay whole. P (rows of a pool) and rows are for others to set; "" is an
        absent tensor."""
        plan, steps = self.schedule(T, N), T * self.substeps
        chunk = self.config.chunk
        sizes = {
            "": None,
            "P": 0,
            "rows": 0,
            "T": T,
            "N": N,
            "slots": steps // chunk + N,
            "segments": steps // (plan.span * chunk) if plan.span else 0,
            "lead": plan.lead,
            "span": plan.span,
            "tile": plan.tile,
        }
        offsets, at = [], 0
        for item in self.scratch:
            offsets.append((f"@{item.name}", at))
            at += item.nbytes(sizes[item.unit])
        return Extent(sizes, tuple(offsets), at)

    def workspace_size(self, T: int, N: int) -> int:
        return self.extent(T, N).nbytes

    # Calls --------------------------------------------------------------------------------------

    def begin(
        self, ins: Sequence[torch.Tensor | None], outs: Sequence[Any], workspace: Any
    ) -> Call | None:
        """Look at a call's tensors; None where there are no sequences."""
        gate: Any = ins[self.at_gate]
        T, N = gate.shape[0], ins[self.at_offsets].shape[0] - 1  # type: ignore[union-attr]
        if N == 0:
            return None
        if True in [x is not None and x.is_neg() for x in ins]:
            # A kernel reads the memory, whatever its sign bit says.
            ins = [None if x is None else x.resolve_neg() for x in ins]
        extent = self.extent(T, N)
        if workspace is None:
            workspace = torch.empty(extent.nbytes, dtype=torch.uint8, device=gate.device)
        tensors = (*ins, *outs)
        env = extent.sizes.copy()
        if self.at_index >= 0 and tensors[self.at_index] is not None:
            env["P"] = tensors[self.at_pool].shape[0]
        strides = tuple([None if x is None else x.stride() for x in tensors])
        made = partial(self._tensors, tensors, workspace, extent)
        if direct(gate) and T * self.substeps < LIMIT:
            stream: int | None = stream_of(gate)
            pointers = [0 if x is None else x.data_ptr() for x in tensors]
            base = workspace.data_ptr()
            key = strides, loose(pointers, base)
            env.update(zip(self.names, pointers, strict=True))
            for name, offset in extent.offsets:
                env[name] = base + offset
        else:
            stream, key = None, (strides, None)
            env.update(made())
        layout = self.layouts.get(key) or self._layout(key, tensors)
        if layout.copies:
            return self.begin(self._dense(ins), outs, workspace)
        return Call(env, layout, stream, made)

    def _tensors(
        self, tensors: Sequence[Any], workspace: torch.Tensor, extent: Extent
    ) -> dict[str, Any]:
        """A call's tensors and views of its scratch, by name."""
        found = dict(zip(self.names, tensors, strict=True))
        for (name, at), item in zip(extent.offsets, self.scratch, strict=True):
            size = extent.sizes[item.unit] * item.elements * item.dtype.itemsize
            found[name] = workspace[at : at + size].view(item.dtype)
        return found

    def _layout(self, key: Any, tensors: Sequence[Any]) -> Layout:
        strides, aligned = key
        named = dict(zip(self.names, strides, strict=True))
        present = dict(zip(self.names, tensors, strict=True))
        copies = any(
            x is not None and not x.is_contiguous() for x in (present.get(n) for n in DENSE)
        )
        kinds = tuple([x is None for x in strides]), aligned
        if len(self.layouts) >= LAYOUTS:
            self.layouts.clear()
        made = Layout(named | self.scratch_strides, kinds, self.substeps, copies)
        return self.layouts.setdefault(key, made)

    def _dense(self, ins: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        return [
            x.contiguous() if x is not None and name in DENSE else x
            for name, x in zip(self.problem.inputs, ins, strict=True)
        ]

    def launch(self, call: Call, programs: int, *key: Any) -> None:
        """Launch what `_<name>_launch` describes; key: the name, and what the method takes."""
        site = call.layout.sites.get(key) or self._site(call.layout, key)
        if call.stream is None:
            site.ordinary(programs, site.read(call.env))
        elif site.go is None or site.hooks:
            site.first(programs, site.read(call.env | call.tensors()))
        else:
            site.go(programs, call.stream, site.read(call.env))

    def _site(self, layout: Layout, key: tuple[Any, ...]) -> Site:
        name, *rest = key
        fn, names, statics, constants = getattr(self, f"_{name}_launch")(layout, *rest)
        kernel = self.kernels.setdefault(key, Kernel(fn, constants))
        read = itemgetter(*(name if name in self.known else "" for name in names))
        return layout.sites.setdefault(key, kernel.site(layout.kinds, statics, read))

    # Stages -------------------------------------------------------------------------------------

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
            constants["REST"] = self.near
        else:
            constants |= {"HP": config.share, "NS": self.substeps, "CQ": config.queries}
            constants |= {
                "DELTA": self.delta,
                "SOFTPLUS": bool(getattr(options, "dt_softplus", False)),
            }
        return constants

    @property
    def near(self) -> bool:
        """Whether ordinary gates a key channel have a kernel of their own; the guard has none."""
        guard = getattr(self.problem.options, "beta_guard", False)
        return self.key_gate and not guard and self.config.near_warps > 0

    def factor(self, call: Call) -> None:
        programs = call.env["slots"] * (self.HO // self.config.share)
        if self.near:
            self.launch(call, programs, "near")
        self.launch(call, programs, "factor")

    def _near_launch(self, at: Layout) -> Launch:
        config, constants = self.config, self.factor_constants.copy()
        del constants["GUARD"], constants["REST"]
        constants |= {
            "BK": config.near_k,
            "KEEP": not self.fold,  # the backward reads the gates
            "BLOCKS": config.near_blocks and config.chunk <= 32,
            "num_warps": config.near_warps,
            "num_stages": 1,
            "maxnreg": config.near_registers,
        }
        _, names, statics, _ = self._factor_launch(at)
        return factor_near_kernel, names, statics, constants

    def _factor_launch(self, at: Layout) -> Launch:
        k, s_cu = self.key, at.lead(1, "cu_seqlens")
        names: tuple[str, ...]
        if self.key_gate:
            names = (
                "q", k, "g", "beta", "a_log", "dt_bias", "cu_seqlens", "@erase", "@query", "@key",
                "@decay", "@gates", "@solve", "@inverse", "@scores", "N", "T",
            )  # fmt: skip
            statics = (
                self.scale, self.lower, *s_cu, *at.lead(2, "q"), *at.lead(2, k),
                *at.lead(2, "g"), *at.lead(2, "beta"),
            )  # fmt: skip
            return factor_key_kernel, names, statics, self.factor_constants
        names = (
            "q", k, "g", "beta", "a_log", "dt_bias", "a", "cu_seqlens", "@rows", "@solve",
            "@inverse", "@scores", "N", "T",
        )  # fmt: skip
        statics = (
            self.scale, self.lower, self.dt_min, self.dt_max, *s_cu, *at.lead(2, "q"),
            *at.steps(k, 3), *at.lead(2, "g"), *at.steps("beta", 2),
        )  # fmt: skip
        return factor_head_kernel, names, statics, self.factor_constants

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
        self, call: Call, ports: Ports, *, identity: bool = False, stage: str = "whole"
    ) -> None:
        """The serial pass. With `identity` the state starts as the unit matrix and nothing is
        written to it: its end is the transition of the span. `stage` is for sequences that are
        cut, into as many later segments as there are slots: see `kernels.scan`."""
        env = call.env
        N, segments, tile = env["N"], env["segments"], env["tile"]
        width = self.K if identity else self.V
        block_v = min(tile.block_v, width)
        programs = N * self.HO * (width // block_v)
        if stage == "open":
            # Slices of the state and of the transition are equally wide.
            block_v = min(block_v, self.K) if self.delta else block_v
            outputs, moves = self.V // block_v, self.K // block_v if self.delta else 0
            programs = self.HO * (N * outputs + segments * (outputs + moves))
        elif stage == "close":
            programs = segments * self.HO * (self.V // block_v)
        self.launch(call, programs, "scan", ports, identity, stage, tile, block_v)

    def _scan_launch(
        self, at: Layout, ports: Ports, identity: bool, stage: str, tile: Tile, block_v: int
    ) -> Launch:
        out, pre, final, checkpoints, z = ports
        v, w, h0 = ("", "", "") if identity else ("v", "w", "initial_state")
        writes = at.has(out)
        q, k, e = "q" if writes else "", self.key, ""
        s_q, s_k = at.lead(2, q), at.steps(k, 3)
        if self.key_gate:
            q, k, e, s_q, s_k = "@query" if writes else "", "@key", "@erase", (0, 0), (0, 0, 0)
        cut = () if stage == "whole" else ("@enter", "@move")
        names = (
            q, k, e, v, w, "@rows", "@decay", "@inverse", "@solve", "@scores",
            "d" if writes else "", z if writes else "", h0, "state_indices", out, pre, final,
            checkpoints, *(cut or ("", "")), "cu_seqlens", "N", "T", "P", "lead", "span",
        )  # fmt: skip
        statics = (
            *at.lead(1, "cu_seqlens"), *at.lead(1, "state_indices"), *s_q, *s_k, *at.steps(v, 3),
            *at.lead(2, w), *at.skip("d"), *at.lead(2, z), *at.lead(3, h0), *at.lead(3, final),
            *at.lead(2, out), *at.lead(2, pre),
        )  # fmt: skip
        width = self.K if identity else self.V
        constants = self.scan_constants(identity, stage, tile)
        return scan_kernel, names, statics, {"V": width, "BV": block_v, **constants}

    def _span_decay_launch(self, at: Layout) -> Launch:
        names = "@rows", "cu_seqlens", "transition", "T"
        constants = {"HO": self.HO, "NS": self.substeps, "C": self.config.chunk}
        return span_decay_kernel, names, at.lead(1, "cu_seqlens"), constants


class ForwardPlan(_Plan):
    """Factors, then the serial pass with outputs: two launches, or four where it is cut."""

    splits = True
    cuts = True
    ports = Ports("O", "O_pre", "final_state", "state_checkpoints", "z")

    def __init__(self, problem: Problem, knobs: Mapping[str, int | str]) -> None:
        super().__init__(problem, knobs)
        move = self.HO * (self.K * self.K if self.delta else 1)
        # One slot a later segment: see `kernels.segment`.
        self.scratch += [
            Scratch("enter", self.HO * self.V * self.K, torch.float32, "segments"),
            Scratch("move", move, torch.float32, "segments"),
        ]

    def run(self, ins: Sequence[Any], outs: Sequence[Any], workspace: Any = None) -> None:
        call = self.begin(ins, outs, workspace)
        if call is None:
            return
        self.factor(call)
        if not call.env["segments"]:
            self.scan(call, self.ports)
            return
        self.scan(call, self.ports, stage="open")
        self.link(call)
        self.scan(call, self.ports, stage="close")

    def link(self, call: Call) -> None:
        """The states that enter the later segments."""
        self.launch(call, call.env["N"] * self.HO * (self.V // LINK_ROWS), "link")

    def _link_launch(self, at: Layout) -> Launch:
        names = "@enter", "@move", "cu_seqlens", "T", "lead", "span"
        constants = {
            "HO": self.HO,
            "K": self.K,
            "V": self.V,
            "NS": self.substeps,
            "C": self.config.chunk,
            "BV": LINK_ROWS,
            "DELTA": self.delta,
            "PREC": self.config.precision,
            "num_warps": LINK_WARPS,
            "num_stages": self.config.link_stages,
        }
        return link_kernel, names, at.lead(1, "cu_seqlens"), constants


class SummaryPlan(_Plan):
    """Factors without queries, the state's end, and the transition of the span."""

    splits = True

    def run(self, ins: Sequence[Any], outs: Sequence[Any], workspace: Any = None) -> None:
        call = self.begin(ins, outs, workspace)
        if call is None:
            return
        self.factor(call)
        self.scan(call, Ports(final="final_state"))
        if not call.layout.has("transition"):
            return
        if self.delta:
            self.scan(call, Ports(final="transition"), identity=True)
        else:
            self.launch(call, call.env["N"] * self.HO, "span_decay")
