"""Local halves of a context-parallel call: prepare, summarize ranges, run; the backward likewise.

    prepared = chunk_gdn_prepare(q, k, v, gate, beta, cu_seqlens=cu_seqlens)
    summaries = prepared.state_summaries(bounds)          # [bias; transition] of every range
    ...                                                   # exchange, compose entry states
    output, final_state = prepared.run(initial_state, output_final_state=True)

    grads = chunk_gdn_prepare_backward(
        prepared.saved, d_output, initial_state, scale=prepared.scale
    )
    reverse = grads.state_grad_summaries(bounds)          # d_entry = d_exit @ R + C
    ...                                                   # exchange, compose exit cotangents
    dq, dk, dv, dgate, dbeta, d_initial_state = grads.run(d_final_state)

The caller owns autograd. Nothing is cast: q, k, v share a dtype; states and summaries are fp32
(fp64 with fp64 tokens). Tensors are a span [1, T, ...]; without cu_seqlens it is one sequence.

What is computed twice: the engines' plans are whole passes, so that preparing costs nothing, and a
summary computes its chunks' factors and then walks the states; `run` computes both again, for the
ranges that were summarized. In the backward the summary recomputes the factors and walks the
gradient of the state once, `run` does all of its own work. Tokens between ranges of one call are
walked, too. `range_summaries` and `range_grad_summaries`, which the recipes use, leave out what
nobody needs: transitions where only biases are folded, all transitions of the backward, since they
are the forward's, transposed, and tokens outside the ranges (those between them by a copy of the
ranges, where there are more than a few; with caps they stay).

Every `chunk_*_prepare` takes impl and kernel_options as `chunk_*` does, and batch_invariant: each
sequence's bits then depend on that sequence alone. Its `_backward` has to be given the same.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from lagraph import infer, plan, registry
from lagraph.errors import RuleBroken, ShapeMismatch
from lagraph.ops.algebra import pack
from lagraph.ops.dense import offsets
from lagraph.ops.form import FORMS, Call, explain
from lagraph.ops.kinds import Impl, engine_of, pin_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from lagraph.ops.kinds import KernelOptions
    from lagraph.ops.pieces import Part, Rows

__all__ = [
    "Prepared",
    "PreparedGradient",
    "PreparedForward",
    "PreparedBackward",
    "StagedOp",
    "chunk_gdn2_prepare",
    "chunk_gdn2_prepare_backward",
    "chunk_gdn_prepare",
    "chunk_gdn_prepare_backward",
    "chunk_gdp_prepare",
    "chunk_gdp_prepare_backward",
    "chunk_kda_prepare",
    "chunk_kda_prepare_backward",
    "chunk_mamba2_prepare",
    "chunk_mamba2_prepare_backward",
]

# Tensor arguments of every family in order, by the functions' names.
TENSORS = {family: tuple(form.axes) for family, form in FORMS.items()}
TENSORS["mamba2"] = ("x", "dt", "A", "B", "C", "D", "dt_bias", "z")
SAVED: dict[str, Any] = {
    family: namedtuple(f"{family.upper()}Saved", [*names, "cu_seqlens", "pre_gate"])
    for family, names in TENSORS.items()
}


class PreparedForward(Protocol):
    """What a staged forward offers."""

    @property
    def saved(self) -> Any:
        """NamedTuple of the tensors (or None) that prepare_backward wants; read it after `run`."""

    @property
    def scale(self) -> Any:
        """The resolved query scale; the backward must reuse it."""

    def state_summaries(self, bounds: Tensor) -> Tensor:
        """One summary per [start, stop) row of bounds; an empty row is the identity."""

    def run(
        self, initial_state: Tensor | None = None, *, output_final_state: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The local forward from one entry state per span segment."""


class PreparedBackward(Protocol):
    """What a staged backward offers."""

    def state_grad_summaries(self, bounds: Tensor) -> Tensor:
        """One reverse map [C; R] per row of bounds: d_entry = d_exit @ R + C."""

    def run(self, d_final_state: Tensor | None = None) -> tuple[Any, ...]:
        """Gradients of the tensors in order, then of the entry states."""


class StagedOp(NamedTuple):
    """A family's two entry points, its options bound, for `context_parallel_chunk`.

    log2_decay: whether its summaries are Mamba-2's.
    """

    prepare: Callable[..., PreparedForward]
    prepare_backward: Callable[..., PreparedBackward]
    log2_decay: bool = False


@dataclass(frozen=True)
class Local:
    """A family with its options bound: runs its nodes on ports by name."""

    family: str
    options: Mapping[str, Any]
    engine: str
    kernel_options: Mapping[str, Any] | None = None

    def node(self, direction: Any) -> Any:
        return registry.family(self.family).node(direction)

    def call(
        self,
        direction: str,
        ports: Mapping[str, Tensor | None],
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> Any:
        """Run a node; ports it does not take are left out. Outputs in the node's order."""
        node = self.node(direction)
        known = {attr.name for attr in node.attrs}
        chosen = {n: x for n, x in {**self.options, **options}.items() if n in known}
        prefix = node.plan_prefix if direction.startswith("summary") else self.family
        pin = pin_of(prefix, self.engine, self.kernel_options)
        made = plan.request(node, chosen, plan_name=pin)
        taken = [ports.get(p.name) for p in node.inputs if p.role != "pool"]
        return getattr(torch.ops.lagraph, node.op).default(*taken, made.text)

    def ports(self, tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """A function's arguments as a node's ports: packed rows."""
        form, node = FORMS[self.family], self.node("forward")
        port = {p.op_name: p.name for p in node.inputs}
        return {
            port[form.ports.get(name, name)]: x if x is None or name not in form.axes else x[0]
            for name, x in tensors.items()
        }

    def packed(self, state: Tensor, transition: Tensor, need: str) -> Tensor:
        """A summary's results, packed."""
        if need == "map":
            return pack(state, transition)
        rows = 1 if self.family == "mamba2" else state.shape[-1]
        return torch.nn.functional.pad(state, (0, 0, 0, rows))

    def window(
        self, direction: str, ports: Mapping[str, Tensor | None], rows: Rows, tokens: int
    ) -> dict[str, Tensor | None]:
        """What a summary reads of the tokens that rows are given, with their segments."""
        form = FORMS[self.family]
        port = {p.op_name: p.name for p in self.node("forward").inputs}
        names = {port[form.ports.get(name, name)] for name in form.axes} | {"dO"}
        read = set(self.node(direction).input_names)
        if "dO" in read:
            read.add("z")  # the gradient goes through it first
        cropped: dict[str, Tensor | None] = {}
        for name, x in ports.items():
            if name not in read:
                continue
            if x is not None and name in names and rows.spans != ((0, tokens),):
                steps = x.shape[0] // tokens  # GDP may have several rows a token
                made = [x[start * steps : stop * steps] for start, stop in rows.spans]
                x = made[0] if len(made) == 1 else torch.cat(made)
            cropped[name] = x
        return cropped | {"cu_seqlens": rows.offsets}

    def blank(self, ports: Mapping[str, Tensor | None], count: int) -> Tensor:
        """Zeros in the shape of `count` summaries."""
        k, v, g = ports["k"], ports["v"], ports["g"]
        io, keys = k.dtype, k.shape[-1]  # type: ignore[union-attr]
        rows = v.shape[-1] + (1 if self.family == "mamba2" else keys)  # type: ignore[union-attr]
        dtype = torch.float64 if io is torch.float64 else torch.float32
        return k.new_zeros(count, g.shape[1], rows, keys, dtype=dtype)  # type: ignore[union-attr]

    def ranges(
        self, ports: Mapping[str, Tensor | None], bounds: Tensor, tokens: int
    ) -> tuple[dict[str, Tensor | None], Tensor]:
        """Ports with the offsets of 2 R segments, every second of which is a range, and the
        positions of the ranges among them."""
        rows = bounds.long()
        if not rows.is_cuda or infer.VALIDATE:
            _check_bounds(rows.tolist(), tokens, self.family)
        order = torch.argsort(rows[:, 0], stable=True)
        # The last range stops what is walked; an empty one lies where it disturbs none.
        cuts = torch.cummax(rows.index_select(0, order).flatten(), 0).values
        cu = torch.cat([cuts.new_zeros(1), cuts]).to(torch.int32)
        return {**ports, "cu_seqlens": cu}, 2 * torch.argsort(order) + 1


class Prepared:
    """A span, ready for its summaries and its run: see the module."""

    def __init__(
        self, local: Local, tensors: Mapping[str, Tensor | None], cu_seqlens: Tensor | None
    ) -> None:
        first = next(iter(tensors.values()))
        self._local, self._tensors = local, dict(tensors)
        self._tokens: int = first.shape[1]  # type: ignore[union-attr]
        self._given = cu_seqlens
        cu = offsets(1, self._tokens, first) if cu_seqlens is None else cu_seqlens  # type: ignore[arg-type]
        self._ports = local.ports(tensors) | {"cu_seqlens": cu}
        self._pre: Tensor | None = None
        self.schedule = "auto"

    @property
    def saved(self) -> Any:
        """What the backward wants, as a NamedTuple; for Mamba-2 with z, read it after `run`."""
        return SAVED[self._local.family](**self._tensors, cu_seqlens=self._given,
                                         pre_gate=self._pre)  # fmt: skip

    @property
    def scale(self) -> float | None:
        """The query scale, resolved; None for Mamba-2, which has none."""
        if self._local.family == "mamba2":
            return None
        scale = self._local.options.get("scale")
        return float(self._tensors["q"].shape[-1] ** -0.5 if scale is None else scale)  # type: ignore[union-attr]

    def part(self, part: Part) -> Prepared:
        """The same of a part of the span."""
        cu = self._ports["cu_seqlens"][part.first : part.last + 1] - part.start  # type: ignore[index]
        return Prepared(self._local, _sliced(self._local, self._tensors, part, self._tokens), cu)

    def join(self, parts: list[tuple[Prepared, Any]]) -> tuple[Tensor, Tensor]:
        """Outputs and final states of the runs of all parts, as if the span had run at once."""
        outs, finals = zip(*(made for _, made in parts), strict=True)
        if parts[0][0]._pre is not None:
            self._pre = torch.cat([part._pre for part, _ in parts], 1)  # type: ignore[misc]
        return torch.cat(outs, 1), torch.cat(finals)

    def state_summaries(self, bounds: Tensor) -> Tensor:
        """[R, H, V + K, K] ([R, H, V + 1, K] for Mamba-2): one map per row of bounds.

        bounds: int32 [R, 2] ranges [start, stop) of the span, each within one segment and none
        overlapping another; start == stop is the identity. They are read on the device. On a CPU
        bad ones raise RuleBroken.
        """
        return self._summaries(bounds, "map")

    def _summaries(self, bounds: Tensor, need: str) -> Tensor:
        """Of what is needed: a "bias" has a transition of zeros, and for "none" all is zero."""
        if need == "none":
            return self._local.blank(self._ports, len(bounds))
        ports, at = self._local.ranges(self._ports, bounds, self._tokens)
        ports.pop("initial_state", None)
        made = self._local.call("summary", ports, {"output_transition": need == "map"})
        return self._local.packed(made[0], made[1], need).index_select(0, at)

    def range_summaries(self, rows: Rows, states: Tensor | None) -> Tensor:
        """The summaries of rows [R, ...], with what initial states [N, H, V, K] make of a range
        that they enter in its bias: see `lagraph.ops.pieces`."""
        if rows.need == "none":
            return self._local.blank(self._ports, 0)
        ports = self._local.window("summary", self._ports, rows, self._tokens)
        ports["initial_state"] = None if states is None else fed(states, rows.feed)
        made = self._local.call("summary", ports, {"output_transition": rows.need == "map"})
        return _picked(self._local.packed(made[0], made[1], rows.need), rows)

    def run(
        self, initial_state: Tensor | None = None, *, output_final_state: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The output [1, T, H, V] and the final states [N, H, V, K], from states [N, H, V, K]."""
        gated = self._tensors.get("z") is not None
        wanted = {"output_final_state": output_final_state, "output_pre_gate": gated}
        outs = self._local.call("forward", self._ports | {"initial_state": initial_state}, wanted)
        self._pre = outs[3][None] if gated else None
        return outs[0][None], outs[1] if output_final_state else None


class PreparedGradient:
    """A span's backward, ready for its reverse summaries and its run: see the module."""

    def __init__(
        self, local: Local, saved: Any, d_output: Tensor | None, initial_state: Tensor | None
    ) -> None:
        tensors = saved._asdict()
        cu, pre = tensors.pop("cu_seqlens"), tensors.pop("pre_gate")
        first = next(iter(tensors.values()))
        values = tensors["x" if local.family == "mamba2" else "v"]
        heads = tensors["dt" if local.family == "mamba2" else "gate"].shape[2]
        if d_output is None:
            d_output = first.new_zeros(*first.shape[:2], heads, values.shape[-1])
        self._local, self._tensors = local, tensors
        self._tokens: int = first.shape[1]
        self._ports = local.ports(tensors) | {
            "cu_seqlens": offsets(1, self._tokens, first) if cu is None else cu,
            "dO": d_output[0].contiguous(), "O_pre": None if pre is None else pre[0],
            "initial_state": initial_state,
        }  # fmt: skip

    def part(self, part: Part) -> PreparedGradient:
        """The same of a part of the span."""
        local, cu, state = self._local, self._ports["cu_seqlens"], self._ports["initial_state"]
        saved = _sliced(local, self._tensors, part, self._tokens)
        pre, d_output = self._ports["O_pre"], self._ports["dO"]
        rows = slice(part.start, part.stop)
        saved["cu_seqlens"] = cu[part.first : part.last + 1] - part.start  # type: ignore[index]
        saved["pre_gate"] = None if pre is None else pre[None, rows]
        made = SAVED[local.family](**saved)
        entry = None if state is None else state[part.first : part.last]
        return PreparedGradient(local, made, d_output[None, rows], entry)  # type: ignore[index]

    def join(self, parts: list[tuple[PreparedGradient, Any]]) -> tuple[Any, ...]:
        """Gradients of the runs of all parts, as if the span had run at once."""
        made: list[Tensor | None] = []
        axes = FORMS[self._local.family].axes
        found = zip(*(grads for _, grads in parts), strict=True)
        for name, (first, *rest) in zip([*self._tensors, ""], found, strict=True):
            if first is None:
                made.append(None)
            elif name in axes:
                made.append(torch.cat([first, *rest], 1))
            else:  # parameters are shared, states are not
                made.append(sum(rest, first) if name else torch.cat([first, *rest]))
        return tuple(made)

    def state_grad_summaries(self, bounds: Tensor) -> Tensor:
        """[R, H, V + K, K] reverse maps [C; R], d_entry = d_exit @ R + C, of every row of bounds.

        C is what the range's own d_output sends to its entry state. See
        `Prepared.state_summaries` for bounds.
        """
        return self._summaries(bounds, "map")

    def _summaries(self, bounds: Tensor, need: str) -> Tensor:
        """As those of `Prepared`."""
        if need == "none":
            return self._local.blank(self._ports, len(bounds))
        ports, at = self._local.ranges(self._ports, bounds, self._tokens)
        ports["dO"] = _ungated(ports["dO"], ports.get("z"))
        made = self._local.call("summary_backward", ports, {"output_transition": need == "map"})
        return self._local.packed(made[0], made[1], need).index_select(0, at)

    def range_grad_summaries(
        self, rows: Rows, d_final_state: Tensor | None, moves: Tensor | None
    ) -> Tensor:
        """The reverse maps of rows [R, ...], with what cotangents [N, H, V, K] of last states send
        through a range in its bias.

        moves: the transitions of the forward's summaries of the same ranges, packed, where any is
        needed; the reverse ones are those transposed.
        """
        if rows.need == "none":
            return self._local.blank(self._ports, 0)
        ports = self._local.window("summary_backward", self._ports, rows, self._tokens)
        ports["dO"] = _ungated(ports["dO"], ports.get("z"))
        if d_final_state is not None:
            ports["d_final_state"] = fed(d_final_state, rows.feed)
        made = self._local.call("summary_backward", ports, {"output_transition": False})
        if moves is None:
            return _picked(self._local.packed(made[0], made[1], "bias"), rows)
        moves = moves if self._local.family == "mamba2" else moves.mT
        return torch.cat([_picked(made[0], rows), moves], -2)

    def run(self, d_final_state: Tensor | None = None) -> tuple[Any, ...]:
        """Gradients of the tensors in order, None for absent ones, then that of the entry states.

        d_final_state: exit cotangents [N, H, V, K], zero if absent.
        """
        local, node = self._local, self._local.node("backward")
        outs = local.call("backward", self._ports | {"d_final_state": d_final_state})
        by_port = dict(zip((p.name for p in node.inputs if p.grad), outs, strict=True))
        form = FORMS[local.family]
        port = {p.op_name: p.name for p in node.inputs}
        made = []
        for name, x in self._tensors.items():
            grad = None if x is None else by_port[port[form.ports.get(name, name)]]
            made.append(grad[None] if grad is not None and name in form.axes else grad)
        state = self._ports["initial_state"]
        return (*made, None if state is None else by_port["initial_state"])


def fed(states: Tensor, feed: Tensor) -> Tensor:
    """States [N, ...] on the ranges that they enter; N selects zero."""
    return torch.cat([states, torch.zeros_like(states[:1])]).index_select(0, feed)


def _sliced(
    local: Local, tensors: Mapping[str, Tensor | None], part: Part, tokens: int
) -> dict[str, Tensor | None]:
    """A part's tokens of a function's arguments."""
    made = dict(tensors)
    for name in FORMS[local.family].axes:
        x = made[name]
        if x is not None:
            steps = x.shape[1] // tokens  # GDP may have several rows a token
            made[name] = x[:, part.start * steps : part.stop * steps]
    return made


def _picked(made: Tensor, rows: Rows) -> Tensor:
    """Segments without the gaps between rows."""
    return made if rows.dense else made.index_select(0, rows.at)


def _ungated(d_output: Tensor | None, z: Tensor | None) -> Tensor | None:
    """The gradient of Mamba-2's output before its gate: the state is read there."""
    if z is None or d_output is None:
        return d_output
    wide = torch.promote_types(z.dtype, torch.float32)
    return (d_output * torch.nn.functional.silu(z.to(wide))).to(z.dtype)


def slot_summaries(handle: PreparedForward | PreparedBackward, bounds: Tensor, need: str) -> Tensor:
    """The summaries of a rank's slots; the handles of this module leave out what nobody folds."""
    if isinstance(handle, (Prepared, PreparedGradient)):
        return handle._summaries(bounds, need)
    if hasattr(handle, "state_summaries"):
        return handle.state_summaries(bounds)
    return handle.state_grad_summaries(bounds)


def prepare(
    family: str,
    tensors: Mapping[str, Tensor | None],
    cu_seqlens: Tensor | None,
    options: Mapping[str, Any],
    impl: Impl | str = Impl.AUTO,
    kernel_options: KernelOptions | None = None,
    name: str = "",
) -> Prepared:
    """A checked span of any family. Raises as `chunk_*` does."""
    name = name or f"chunk_{family}_prepare"
    form = FORMS[family]
    check(name, family, tensors, None, cu_seqlens, options)
    first = tensors[next(iter(form.axes))]
    engine = engine_of(name, impl, first, kernel_options, family != "gdn")  # type: ignore[arg-type]
    return Prepared(Local(family, options, engine, kernel_options), tensors, cu_seqlens)


def check(
    name: str,
    family: str,
    tensors: Mapping[str, Tensor | None],
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    options: Mapping[str, Any],
) -> None:
    """Raise what is wrong with a span's arguments."""
    form = FORMS[family]
    tokens = {n: tensors[n] for n in form.axes}
    params = {n: x for n, x in tensors.items() if n not in form.axes}
    known = {n: x for n, x in options.items() if n != "batch_invariant"}
    first = next(iter(tokens))
    explain(Call(form, name, tokens, state, cu_seqlens, {**known, **params}))
    if tokens[first].shape[0] != 1:  # type: ignore[union-attr]
        raise ShapeMismatch(
            name, first, expected="a span [1, T, ...]", got=f"shape {list(tokens[first].shape)}",  # type: ignore[union-attr]
            mend="Pack the sequences along T, with cu_seqlens",
        )  # fmt: skip


def prepare_backward(
    family: str,
    saved: Any,
    d_output: Tensor | None,
    initial_state: Tensor | None,
    options: Mapping[str, Any],
    impl: Impl | str = Impl.AUTO,
    kernel_options: KernelOptions | None = None,
) -> PreparedGradient:
    """The backward of any family."""
    name = f"chunk_{family}_prepare_backward"
    engine = engine_of(name, impl, saved[0], kernel_options, family != "gdn")
    local = Local(family, options, engine, kernel_options)
    return PreparedGradient(local, saved, d_output, initial_state)


def _check_bounds(rows: list[list[int]], tokens: int, family: str) -> None:
    at = 0
    for start, stop in sorted(row for row in rows if row[0] != row[1]):
        if start < at or stop < start or stop > tokens:
            raise RuleBroken(
                f"chunk_{family}_prepare", "bounds",
                expected=f"ranges of [0, {tokens}) that do not overlap", got=str(rows[:16]),
                mend="Give rows (start, stop) of the span, each within one sequence",
            )  # fmt: skip
        at = stop


# Families -------------------------------------------------------------------------------------


def chunk_gdn_prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    impl: Impl | str = Impl.AUTO,
    kernel_options: KernelOptions | None = None,
    batch_invariant: bool = False,
) -> Prepared:
    """A span of GDN, ready for summaries and run; arguments as `chunk_gdn` has them, B = 1."""
    tensors = {"q": q, "k": k, "v": v, "gate": gate, "beta": beta}
    options = {"scale": scale, "batch_invariant": batch_invariant}
    return prepare("gdn", tensors, cu_seqlens, options, impl, kernel_options)


def chunk_gdn_prepare_backward(
    saved: Any,
    d_output: Tensor | None,
    initial_state: Tensor | None,
    *,
    scale: float,
    impl: Impl | str = Impl.AUTO,
    kernel_options: KernelOptions | None = None,
    batch_invariant: bool = False,
) -> PreparedGradient:
    """Its backward, from `prepared.saved`, the entry states of `run` and `prepared.scale`."""
    options = {"scale": scale, "batch_invariant": batch_invariant}
    return prepare_backward("gdn", saved, d_output, initial_state, options, impl, kernel_options)


def chunk_kda_prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    autotune: bool = True,
    fastmath: bool = True,
    impl: Impl | str = Impl.AUTO,
    kernel_options: KernelOptions | None = None,
    batch_invariant: bool = False,
) -> Prepared:
    """A span of KDA; autotune and fastmath are taken and change nothing, as in `chunk_kda`."""
    tensors = {"q": q, "k": k, "v": v, "gate": gate, "beta": beta}
    options = {"scale": scale, "batch_invariant": batch_invariant}
    return prepare("kda", tensors, cu_seqlens, options, impl, kernel_options)


def chunk_kda_prepare_backward(
    saved: Any,
    d_output: Tensor | None,
    initial_state: Tensor | None,
    *,
    scale: float,
    autotune: bool = True,
    fastmath: bool = True,
    schedule: str = "auto",
    impl: Impl | str = Impl.AUTO,
    kernel_options: KernelOptions | None = None,
    batch_invariant: bool = False,
) -> PreparedGradient:
    """Its backward; autotune, fastmath and schedule are taken and change nothing."""
    options = {"scale": scale, "batch_invariant": batch_invariant}
    return prepare_backward("kda", saved, d_output, initial_state, options, impl, kernel_options)


def chunk_gdn2_prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    w: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    impl: Impl | str = Impl.AUTO,
    kernel_options: KernelOptions | None = None,
    batch_invariant: bool = False,
) -> Prepared:
    """A span of GDN-2; arguments as `chunk_gdn2` has them, B = 1."""
    tensors = {"q": q, "k": k, "v": v, "gate": gate, "beta": beta, "w": w}
    options = {"scale": scale, "batch_invariant": batch_invariant}
    return prepare("gdn2", tensors, cu_seqlens, options, impl, kernel_options)


def chunk_gdn2_prepare_backward(
    saved: Any,
    d_output: Tensor | None,
    initial_state: Tensor | None,
    *,
    scale: float,
    impl: Impl | str = Impl.AUTO,
    kernel_options: KernelOptions | None = None,
    batch_invariant: bool = False,
) -> PreparedGradient:
    """Its backward; gradients are those of q, k, v, gate, beta, w and the entry states."""
    options = {"scale": scale, "batch_invariant": batch_invariant}
    return prepare_backward("gdn2", saved, d_output, initial_state, options, impl, kernel_options)


def chunk_gdp_prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    *,
    num_householder: int,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    impl: Impl | str = Impl.AUTO,
    kernel_options: KernelOptions | None = None,
    batch_invariant: bool = False,
) -> Prepared:
    """A span of GDP; arguments as `chunk_gdp` has them, B = 1. Bounds count tokens."""
    tensors = {"q": q, "k": k, "v": v, "gate": gate, "beta": beta}
    options = {"scale": scale, "num_householder": num_householder,
               "batch_invariant": batch_invariant}  # fmt: skip
    return prepare("gdp", tensors, cu_seqlens, options, impl, kernel_options)


def chunk_gdp_prepare_backward(
    saved: Any,
    d_output: Tensor | None,
    initial_state: Tensor | None,
    *,
    num_householder: int,
    scale: float,
    impl: Impl | str = Impl.AUTO,
    kernel_options: KernelOptions | None = None,
    batch_invariant: bool = False,
) -> PreparedGradient:
    """Its backward."""
    options = {"scale": scale, "num_householder": num_householder,
               "batch_invariant": batch_invariant}  # fmt: skip
    return prepare_backward("gdp", saved, d_output, initial_state, options, impl, kernel_options)


def chunk_mamba2_prepare(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    z: Tensor | None = None,
    *,
    dt_softplus: bool = True,
    dt_min: float = 0.0,
    dt_max: float | None = None,
    cu_seqlens: Tensor | None = None,
    impl: Impl | str = Impl.AUTO,
    kernel_options: KernelOptions | None = None,
    batch_invariant: bool = False,
) -> Prepared:
    """A span of Mamba-2; arguments as `chunk_mamba2` has them, B = 1. Its scale is None."""
    tensors = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "dt_bias": dt_bias, "z": z}
    options = {"dt_softplus": dt_softplus, "dt_min": dt_min, "dt_max": dt_max,
               "batch_invariant": batch_invariant}  # fmt: skip
    return prepare("mamba2", tensors, cu_seqlens, options, impl, kernel_options)


def chunk_mamba2_prepare_backward(
    saved: Any,
    d_output: Tensor | None,
    initial_state: Tensor | None,
    *,
    scale: None = None,
    dt_softplus: bool = True,
    dt_min: float = 0.0,
    dt_max: float | None = None,
    impl: Impl | str = Impl.AUTO,
    kernel_options: KernelOptions | None = None,
    batch_invariant: bool = False,
) -> PreparedGradient:
    """Its backward; gradients are those of x, dt, A, B, C, D, dt_bias, z and the entry states.

    Those of A, D and dt_bias are this span's share.
    """
    options = {"dt_softplus": dt_softplus, "dt_min": dt_min, "dt_max": dt_max,
               "batch_invariant": batch_invariant}  # fmt: skip
    return prepare_backward("mamba2", saved, d_output, initial_state, options, impl, kernel_options)


STAGES: dict[str, tuple[Callable[..., Prepared], Callable[..., PreparedGradient]]] = {
    "gdn": (chunk_gdn_prepare, chunk_gdn_prepare_backward),
    "kda": (chunk_kda_prepare, chunk_kda_prepare_backward),
    "gdn2": (chunk_gdn2_prepare, chunk_gdn2_prepare_backward),
    "gdp": (chunk_gdp_prepare, chunk_gdp_prepare_backward),
    "mamba2": (chunk_mamba2_prepare, chunk_mamba2_prepare_backward),
}


def stages(family: str, scale: float | None, options: Mapping[str, Any]) -> StagedOp:
    """A family's stages with options bound; the backward is given the forward's scale."""
    forward, backward = STAGES[family]
    given = {} if family == "mamba2" else {"scale": scale}
    return StagedOp(
        partial(forward, **given, **options), partial(backward, **options), family == "mamba2"
    )
