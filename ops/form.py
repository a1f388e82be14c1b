"""How the batch-first functions of a family become one call of its packed operator.

A `Form` says how a family's functions name and shape their arguments; `forward` does the rest, for
training, prefill, scans and pools alike. The hot path checks what the operator cannot see through
packed rows; once a call fails, `explain` goes over all of it in the caller's names and shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from lagraph import infer, registry
from lagraph.desc import dtype_name
from lagraph.errors import (
    DeviceMismatch,
    DtypeMismatch,
    InvalidNode,
    InvalidOption,
    NotDifferentiable,
    NotSupported,
    PlanNotOffered,
    RuleBroken,
    ShapeMismatch,
)
from lagraph.ops.argument import apart, boolean, check_layout, readable
from lagraph.ops.dense import offsets, rows
from lagraph.ops.kinds import Impl, engine_of, pin_of
from lagraph.ops.register import register
from lagraph.ops.scan import DTYPES, KEY_DIM, every_state, scan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["FORMS", "Call", "Form", "forward", "require_inference", "write_rows"]

# Tensors per head, among the options of Mamba-2.
PARAMS = {"A": "H", "D": "H | H V", "dt_bias": "H"}
NARROW = (torch.bfloat16, torch.float16)
CHECKED = 4096  # makes of calls that are known to be good


@dataclass(frozen=True, eq=False)
class Form:
    """A family's arguments.

    axes: token arguments in order, with their axes; the first names the others' B and T.
    io: those that share one dtype. ports: what the operator calls them, where it differs.
    floats: gates, which may have any floating dtype; strengths likewise, but the operator takes
    fp32 or the token dtype alone.
    """

    family: str
    axes: Mapping[str, str]
    io: tuple[str, ...] = ("q", "k", "v")
    ports: Mapping[str, str] = field(default_factory=lambda: {"gate": "g"})
    floats: tuple[str, ...] = ("gate",)
    strengths: tuple[str, ...] = ("beta",)
    operator: Callable[..., Any] = field(init=False)

    def __post_init__(self) -> None:
        family = registry.family(self.family)
        object.__setattr__(self, "operator", register(family)[family.op])


_QKV = {"q": "B T HK K", "k": "B T HK K", "v": "B T H V"}

FORMS = {
    form.family: form
    for form in (
        Form("gdn", _QKV | {"gate": "B T H", "beta": "B T H"}),
        Form("kda", _QKV | {"gate": "B T H K", "beta": "B T H"}),
        Form(
            "gdn2", _QKV | {"gate": "B T H K", "beta": "B T H K", "w": "B T H V"},
            io=("q", "k", "v", "w"),
        ),
        Form(
            "gdp",
            {
                "q": "B T HK K", "k": "B T*n HK K | B T n HK K", "v": "B T*n H V | B T n H V",
                "gate": "B T H", "beta": "B T*n H | B T n H",
            },
        ),
        Form(
            "mamba2",
            {"x": "B T H V", "dt": "B T H", "B": "B T G K", "C": "B T G K", "z": "B T H V"},
            io=("x", "B", "C", "z"), ports={}, floats=("dt",), strengths=(),
        ),
    )
}  # fmt: skip


@dataclass(slots=True)
class Call:
    """One call of a function.

    name: the function's; tokens: its token arguments by name, None where one is absent.
    state: initial states, or with slots the pool that they are rows of. fresh: has_initial_state.
    options: what else the operator takes, by its names. final: return the final states.
    scan: the function consumes tokens in order, fused for inference only. paged: it has no impl.
    states: where to write the state after every token; a pool is only read then.
    """

    form: Form
    name: str
    tokens: Mapping[str, torch.Tensor | None]
    state: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    options: dict[str, Any]
    final: bool = False
    impl: Impl | str = Impl.AUTO
    kernel_options: Mapping[str, Any] | None = None
    slots: torch.Tensor | None = None
    fresh: torch.Tensor | None = None
    scan: bool = False
    paged: bool = False
    states: torch.Tensor | None = None

    @property
    def state_name(self) -> str:
        return "state_cache" if self.paged else "initial_state"


def forward(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output [B, T, ...] and the final states, None unless wanted. Pools are advanced."""
    if torch.compiler.is_compiling():
        return _run(call)
    try:
        return _run(call)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        explain(call)
        _renamed(call, error)


def _run(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    form, tokens = call.form, call.tokens
    io = next(iter(tokens.values()))
    if io is None or _disagree(call):
        explain(call)
        raise RuntimeError(f"{call.name}: checks disagree; please report this")
    engine = engine_of(
        call.name, call.impl, io, call.kernel_options, form.family != "gdn", not call.paged
    )
    if call.states is not None or (call.scan and engine != "eager"):
        return _scan(call, io, engine != "eager")
    batch, length = io.shape[0], io.shape[1]
    given: dict[str, Any] = {}
    for name, x in tokens.items():
        if x is not None:
            if name in form.strengths:
                x = _strength(x, io)
            elif name in form.floats and x.dtype is torch.float64 and io.dtype is not torch.float64:
                x = x.float()
            given[form.ports.get(name, name)] = rows(x)
    cu = offsets(batch, length, io) if call.cu_seqlens is None else call.cu_seqlens
    state, slots, final = call.state, call.slots, call.final
    if slots is not None:
        params = {n: x for n, x in call.options.items() if isinstance(x, torch.Tensor)}
        wanted = {**tokens, **params, call.state_name: state}
        require_inference(call.name, wanted, "Call under torch.no_grad().")
        if call.fresh is not None:
            if not slots.is_cuda and not torch.compiler.is_compiling():
                explain(call)  # before anything is written
            clear_rows(state, slots, call.fresh)
        # Slot 0 is padding here and a row there: without it, it falls among the negative ones.
        state, slots, final = state[1:], slots.clamp(min=0) - 1, True  # type: ignore[index]
    elif state is not None and state.dtype in _narrow(io.dtype):
        state = state.to(torch.float64 if io.dtype is torch.float64 else torch.float32)
    out, last = form.operator(
        **given, cu_seqlens=cu, initial_state=state, output_final_state=final, state_indices=slots,
        plan_name=pin_of(form.family, engine, call.kernel_options), **call.options,
    )  # fmt: skip
    return out.view(batch, length, *out.shape[1:]), last if call.final else None


_CHECKED: set[Any] = set()


def _scan(call: Call, io: torch.Tensor, fused: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The scan, which takes batches as they are and checks nothing itself."""
    form = call.form
    mend = f"Take chunk_{form.family} for training, or impl='reference'."
    if call.states is not None:
        mend = "Call under torch.no_grad(), or drop states."
    params = {name: x for name, x in call.options.items() if isinstance(x, torch.Tensor)}
    require_inference(call.name, {**call.tokens, **params, call.state_name: call.state}, mend)
    tokens: dict[str, Any] = dict(call.tokens)
    if torch.is_autocast_enabled(io.device.type):
        dtype = torch.get_autocast_dtype(io.device.type)
        for name in form.io:
            tokens[name] = None if tokens[name] is None else tokens[name].to(dtype)
        io = tokens[next(iter(tokens))]
    _check_scan(call, io, fused)
    for name in (*form.floats, *form.strengths):
        if tokens[name].dtype is torch.float64 and io.dtype is not torch.float64:
            tokens[name] = tokens[name].float()
    named = {form.ports.get(name, name): x for name, x in tokens.items()}
    args = (form.family, named, call.options, call.cu_seqlens, call.state, call.slots, call.fresh)
    out, last = scan(*args) if call.states is None else every_state(*args, call.states, fused)
    return out, last if call.final else None


def _check_scan(call: Call, io: torch.Tensor, fused: bool) -> None:
    """What the operators of other calls check; once for tensors of the same make."""
    if torch.compiler.is_compiling() or infer.VALIDATE or not fused:
        explain(call)
    else:
        tensors = (
            *call.tokens.values(), call.state, call.cu_seqlens, call.slots, call.fresh, call.states
        )  # fmt: skip
        key = (
            call.name, io.dtype, call.final, call.states is None or call.states.is_contiguous(),
            *(None if x is None else (x.shape, x.dtype, x.device) for x in tensors),
            *((x.shape, x.dtype, x.device) if isinstance(x, torch.Tensor) else x
              for x in call.options.values()),
        )  # fmt: skip
        if key not in _CHECKED:
            explain(call)
            if len(_CHECKED) >= CHECKED:
                _CHECKED.clear()
            _CHECKED.add(key)
    keys = call.tokens["B" if call.form.family == "mamba2" else "k"].shape[-1]  # type: ignore[union-attr]
    if fused and (io.dtype not in DTYPES or keys > KEY_DIM):
        raise PlanNotOffered(
            f"the scan takes K up to {KEY_DIM} in bfloat16, float16 or float32, got K={keys} in "
            f"{dtype_name(io.dtype)}."
        )


def _disagree(call: Call) -> bool:
    """What packed rows hide from the operator, or it would take although the page does not."""
    tokens = call.tokens
    first = next(iter(tokens.values()))
    batch, length = first.shape[0], first.shape[1]  # type: ignore[union-attr]
    if call.cu_seqlens is not None and batch != 1:
        return True
    many = call.form.family == "gdp"
    for name, x in tokens.items():
        if x is None:
            continue
        if x.shape[0] != batch:
            return True
        if x.shape[1] != length and not (many and name in ("k", "v", "beta")):
            return True
    q, k, v = tokens.get("q"), tokens.get("k"), tokens.get("v")
    if q is not None and k is not None and v is not None:
        heads = q.shape[2]
        if k.shape[-2] != heads or heads == 0 or v.shape[-2] % heads != 0:
            return True
    if call.slots is not None:
        return call.final or not (_dense_rows(call.state) and _is_mask(call))
    return call.paged or call.fresh is not None


def _narrow(io: torch.dtype) -> tuple[torch.dtype, ...]:
    """State dtypes that a call with such tokens widens."""
    return infer.NARROW if io is torch.float64 else NARROW


def _is_mask(call: Call) -> bool:
    """Whether has_initial_state is absent, or a flag for every slot index."""
    fresh, slots = call.fresh, call.slots
    if fresh is None or slots is None:
        return True
    return fresh.dtype is torch.bool and fresh.dim() == 1 and fresh.shape == slots.shape


def _strength(x: torch.Tensor, io: torch.Tensor) -> torch.Tensor:
    """fp32 unless it has the token dtype already; autocast would give that another."""
    if x.dtype is torch.float32 or x.dtype not in infer.IO:
        return x
    if x.dtype is io.dtype and not torch._C._is_any_autocast_enabled():
        return x
    return x if x.dtype is io.dtype is torch.float64 else x.float()


def _dense_rows(pool: torch.Tensor | None) -> bool:
    """Whether the rows of a pool [P, H, V, K] are dense and apart from each other."""
    if pool is None or pool.dim() != 4:
        return False
    size = 1
    for at in (3, 2, 1):
        if pool.shape[at] != 1 and pool.stride(at) != size:
            return False
        size *= pool.shape[at]
    return pool.shape[0] <= 1 or pool.stride(0) >= size


# Rows of pools --------------------------------------------------------------------------------


def clear_rows(pool: torch.Tensor | None, slots: torch.Tensor, keep: torch.Tensor) -> None:
    """Zero pool[slots[i]] where keep[i] is False and slots[i] is no padding.

    No host read: rows that keep their values are sent to row 0, which is put back afterwards. It
    is padding here, so that no call reads it in between.
    """
    if pool is None or pool.shape[0] == 0 or slots.shape[0] == 0:
        return
    at = torch.where((slots > 0) & (slots < pool.shape[0]) & ~keep, slots, 0).long()
    null = pool[0].clone()
    pool.index_fill_(0, at, 0.0)
    pool[0].copy_(null)


def write_rows(
    pool: torch.Tensor, slots: torch.Tensor, live: torch.Tensor, source: torch.Tensor
) -> None:
    """pool[slots[i]] = source[i] where live[i] and slots[i] is no padding; see `clear_rows`."""
    if pool.shape[0] == 0 or slots.shape[0] == 0:
        return
    at = torch.where((slots > 0) & (slots < pool.shape[0]) & live, slots, 0).long()
    null = pool[0].clone()
    pool.index_copy_(0, at, source)
    pool[0].copy_(null)


def require_inference(name: str, tensors: Mapping[str, torch.Tensor | None], mend: str) -> None:
    """Raise `NotDifferentiable` where a tensor asks for a gradient."""
    if not torch.is_grad_enabled():
        return
    for argument, x in tensors.items():
        if x is not None and x.requires_grad:
            raise NotDifferentiable(
                f"{name}: for inference only, and {argument} requires a gradient. {mend}"
            )


# Failed calls ---------------------------------------------------------------------------------


def _renamed(call: Call, error: Exception) -> NoReturn:
    """Raise what the operator raised, under the function's name and its argument's."""
    if str(error).startswith(call.name):
        raise error
    if isinstance(error, InvalidNode):
        names = {port: name for name, port in call.form.ports.items()}
        names["initial_state"] = call.state_name
        raise type(error)(
            call.name, names.get(error.argument, error.argument), expected=error.expected,
            got=error.got, mend=error.mend, because=error.because,
        ) from error  # fmt: skip
    if isinstance(error, NotDifferentiable):
        raise type(error)(f"{call.name}: {error}") from error
    if isinstance(error, NotSupported):
        mend = "" if call.paged else " Pass impl='reference' to run it in PyTorch."
        raise type(error)(f"{call.name}: {error}{mend}") from error
    raise error


def explain(call: Call) -> None:
    """Raise the first rule of the function that a call breaks; return if there is none."""
    form, name = call.form, call.name
    tensors: dict[str, Any] = {n: x for n, x in call.tokens.items() if x is not None or n != "z"}
    others = {
        call.state_name: call.state, "cu_seqlens": call.cu_seqlens, "state_indices": call.slots,
        "has_initial_state": call.fresh, "states": call.states,
    }  # fmt: skip
    for argument, x in {**tensors, **others}.items():
        if isinstance(x, torch.Tensor):
            check_layout(name, argument, x)
            continue
        needed = call.paged and argument in (call.state_name, "state_indices")
        if x is None and argument in others and not needed:
            continue
        raise DtypeMismatch(
            name, argument, expected="a torch.Tensor", got=type(x).__name__, mend=f"Pass {argument}"
        )
    first = next(iter(tensors))
    _check_dtypes(call, tensors, first)
    device = tensors[first].device
    for argument, x in {**tensors, **others}.items():
        if x is not None and x.device != device:
            raise DeviceMismatch(
                name, argument, expected=f"device {device}, as {first}", got=str(x.device),
                mend=f"Move it with {argument}.to({str(device)!r})",
            )  # fmt: skip
    _check_options(call)
    sizes: dict[str, Any] = {}
    source: dict[str, str] = {}
    if "num_householder" in call.options:
        sizes["n"], source["n"] = call.options["num_householder"], "num_householder"
    for argument, x in tensors.items():
        _bind(call, sizes, source, argument, form.axes[argument], x)
    for argument, axes in PARAMS.items():
        if isinstance(call.options.get(argument), torch.Tensor):
            _bind(call, sizes, source, argument, axes, call.options[argument])
    few, heads = ("G" if "G" in sizes else "HK"), sizes["H"]
    if sizes[few] == 0 or heads == 0 or heads % sizes[few] != 0:
        raise ShapeMismatch(
            name, source["H"], expected=f"a number of heads H that {few} divides",
            got=f"H={heads} with {few}={sizes[few]} of {source[few]}",
            mend="Give each query head the same number of value heads",
        )  # fmt: skip
    _check_sequences(call, sizes, source, first)
    if call.states is not None:
        _check_states(call, sizes, source)


def _check_states(call: Call, sizes: dict[str, Any], source: dict[str, str]) -> None:
    """The buffer of the states after every token."""
    x: Any = call.states
    _bind(call, sizes, source, "states", "B T H V K", x)
    if not x.is_contiguous():
        raise RuleBroken(
            call.name, "states", expected="a contiguous buffer", got=f"strides {list(x.stride())}",
            mend="Allocate it as torch.empty(B, T, H, V, K)",
        )  # fmt: skip
    if torch.compiler.is_compiling():
        return
    for argument, other in {**call.tokens, call.state_name: call.state}.items():
        if other is not None:
            apart(call.name, "states", x, argument, other)


def _check_options(call: Call) -> None:
    """Numbers and flags; parameters but for their shapes."""
    boolean(call.name, "output_final_state", call.final)
    wrong = {
        "scale": (lambda x: x is None or _is_number(x), "a finite number"),
        "num_householder": (lambda x: type(x) is int and x >= 1, "an integer >= 1"),
        "dt_softplus": (lambda x: isinstance(x, bool), "True or False"),
        "dt_min": (lambda x: _is_number(x) and x >= 0, "a finite number >= 0"),
        "dt_max": (
            lambda x: x is None or (_is_number(x, True) and x >= call.options["dt_min"]),
            "None or a number >= dt_min",
        ),
    }  # fmt: skip
    for argument, x in call.options.items():
        if argument in wrong and not wrong[argument][0](x):
            raise InvalidOption(
                call.name, argument, expected=wrong[argument][1], got=repr(x),
                mend="Leave it out for the default" if argument != "num_householder" else "",
            )  # fmt: skip
        if argument not in PARAMS or (x is None and argument != "A"):
            continue
        first = next(t for t in call.tokens.values() if t is not None)
        if isinstance(x, torch.Tensor):
            check_layout(call.name, argument, x)
        if not isinstance(x, torch.Tensor) or x.dtype not in infer.IO:
            raise DtypeMismatch(
                call.name, argument, expected="a floating torch.Tensor",
                got=dtype_name(x.dtype) if isinstance(x, torch.Tensor) else type(x).__name__,
                mend=f"Pass {argument} in float32",
            )  # fmt: skip
        if x.device != first.device:
            raise DeviceMismatch(
                call.name, argument, expected=f"device {first.device}", got=str(x.device),
                mend=f"Move it with {argument}.to({str(first.device)!r})",
            )  # fmt: skip


def _is_number(x: object, infinite: bool = False) -> bool:
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        return False
    return abs(x) < float("inf") or (infinite and x == x)


def _check_dtypes(call: Call, tensors: Mapping[str, Any], first: str) -> None:
    io, name = tensors[first].dtype, call.name
    cast = torch._C._is_any_autocast_enabled()
    for argument, x in tensors.items():
        shared = argument in call.form.io
        if x.dtype in infer.IO and (not shared or cast or x.dtype is io):
            continue
        wanted = "a floating dtype" if not shared or argument == first else dtype_name(io)
        raise DtypeMismatch(
            name, argument, expected=wanted, got=dtype_name(x.dtype),
            because=f"{first} is {dtype_name(io)}" if shared and argument != first else "",
            mend=f"Convert it with {argument}.to(torch.{dtype_name(io)})"
            if io in infer.IO else "Take bfloat16, float16, float32 or float64",
        )  # fmt: skip
    wide = torch.float64 if io is torch.float64 else torch.float32
    allowed = (wide, *_narrow(io))
    for argument, x in ((call.state_name, call.state), ("states", call.states)):
        if x is not None and x.dtype not in allowed:
            raise DtypeMismatch(
                name, argument, expected=" or ".join(map(dtype_name, allowed)),
                got=dtype_name(x.dtype), because=f"{first} is {dtype_name(io)}",
                mend=f"Convert it with {argument}.to(torch.{dtype_name(wide)})",
            )  # fmt: skip
    for argument, x in (("cu_seqlens", call.cu_seqlens), ("state_indices", call.slots)):
        if x is not None and x.dtype not in infer.INDEX:
            raise DtypeMismatch(
                name, argument, expected="int32 or int64", got=dtype_name(x.dtype),
                mend=f"Convert it with {argument}.to(torch.int32)",
            )  # fmt: skip
    if call.fresh is not None and call.fresh.dtype is not torch.bool:
        raise DtypeMismatch(
            name, "has_initial_state", expected="bool", got=dtype_name(call.fresh.dtype),
            mend="Convert it with has_initial_state.bool()",
        )  # fmt: skip


def _bind(
    call: Call, sizes: dict[str, Any], source: dict[str, str], argument: str, axes: str, x: Any
) -> None:
    """Bind the letters of an argument's axes to its sizes, or raise `ShapeMismatch`."""
    shown = " or ".join(f"[{', '.join(part.split())}]" for part in axes.split("|"))
    letters = next((p.split() for p in axes.split("|") if len(p.split()) == x.dim()), None)
    if letters is None:
        raise ShapeMismatch(
            call.name, argument, expected=shown, got=f"shape {list(x.shape)}",
            mend="View the tensor in that shape",
        )  # fmt: skip
    for letter, size in zip(letters, x.shape, strict=True):
        known = sizes["T"] * sizes["n"] if letter == "T*n" else sizes.get(letter)
        if known is None:
            sizes[letter], source[letter] = size, argument
        elif known != size:
            raise ShapeMismatch(
                call.name, argument, expected=f"dim {letter} = {known}", got=str(size),
                because=f"{source.get(letter, source['T'])} gives {letter}={known}",
                mend=f"Give {argument} the shape {shown}",
            )  # fmt: skip


def _check_sequences(call: Call, sizes: dict[str, Any], source: dict[str, str], first: str) -> None:
    """Offsets, states and slots."""
    name, cu = call.name, call.cu_seqlens
    if cu is None:
        sizes["N"], source["N"] = sizes["B"], first
    else:
        if sizes["B"] != 1:
            raise RuleBroken(
                name, "cu_seqlens", expected="B = 1 beside cu_seqlens", got=f"B={sizes['B']}",
                mend="Pack the sequences along T of a batch of one, or drop cu_seqlens",
            )  # fmt: skip
        if cu.dim() != 1 or cu.shape[0] < 1:
            raise ShapeMismatch(
                name, "cu_seqlens", expected="[N+1]", got=f"shape {list(cu.shape)}",
                mend="Give the first token of every sequence, then the end",
            )  # fmt: skip
        sizes["N"], source["N"] = cu.shape[0] - 1, "cu_seqlens"
        if readable(cu):
            infer.check_offsets(cu.tolist(), sizes["T"], name)
    if call.state is not None:
        lead = "N" if call.slots is None else "num_slots"
        _bind(call, sizes, source, call.state_name, f"{lead} H V K", call.state)
    if call.slots is None:
        if call.fresh is not None:
            raise RuleBroken(
                name, "has_initial_state", expected="state_indices beside has_initial_state",
                got="none", mend="Drop it, or pass the pool and its state_indices",
            )  # fmt: skip
        return
    if call.state is None:
        raise RuleBroken(
            name, "state_indices", expected=f"{call.state_name}, the pool that it selects from",
            got="none", mend="Pass the pool, or drop state_indices",
        )  # fmt: skip
    if call.final:
        raise RuleBroken(
            name, "output_final_state", expected="False with state_indices", got="True",
            mend="Drop it: the pool holds the final states afterwards",
        )  # fmt: skip
    if not _dense_rows(call.state):
        raise RuleBroken(
            name, call.state_name, expected="slots [H, V, K] that are dense and do not overlap",
            got=f"strides {list(call.state.stride())}", mend="Only the stride of a slot is free",
        )  # fmt: skip
    _bind(call, sizes, source, "state_indices", "N", call.slots)
    if call.fresh is not None:
        _bind(call, sizes, source, "has_initial_state", "N", call.fresh)
    if readable(call.slots):
        used = [slot for slot in call.slots.tolist() if slot > 0]
        if len(set(used)) != len(used) or any(slot >= call.state.shape[0] for slot in used):
            raise RuleBroken(
                name, "state_indices",
                expected=f"distinct slots in [1, {call.state.shape[0]}), or <= 0 for padding",
                got=str(call.slots.tolist()[:16]), mend="Give every sequence a slot of its own",
            )  # fmt: skip
