"""Binding a node's letters to tensors, checking every rule, and inferring the outputs.

The same code serves real tensors, fake tensors with symbolic sizes, and graph descriptors whose T
or N is open (None).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lagraph.desc import DYNAMIC, dtype_name
from lagraph.errors import DeviceMismatch, DtypeMismatch, RuleBroken, ShapeMismatch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lagraph.node import Node, Options, Port

__all__ = [
    "Bound",
    "Meta",
    "bind",
    "check_offsets",
    "check_slots",
    "checkpoint_rows",
    "dim_of",
    "shape_text",
]

VALIDATE = os.environ.get("LAGRAPH_VALIDATE", "0") not in ("", "0")

IO = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
NARROW = (torch.float32, torch.bfloat16, torch.float16)
INDEX = (torch.int32, torch.int64)
OPEN = DYNAMIC | {"N+1", "T*n", "P", "R"}


class Meta(NamedTuple):
    """Shape (None for an open dim), dtype and device of one input."""

    shape: Sequence[Any]
    dtype: torch.dtype
    device: torch.device | None = None


class Bound(NamedTuple):
    """What binding yields: sizes by letter, and shape and dtype of every output that exists."""

    sizes: dict[str, Any]
    outputs: dict[str, tuple[tuple[Any, ...], torch.dtype]]
    io: torch.dtype


def checkpoint_rows(tokens: Any, sequences: Any, every: int) -> Any:
    """Rows that are allocated for the checkpoints of `tokens` (GDP: sub-tokens)."""
    if tokens is None or sequences is None:
        return None
    return torch.sym_max(tokens // every + sequences, 1)


def shape_text(shape: str) -> str:
    """A port's shape for a reader: "[T, H, K]", or alternatives."""
    return " or ".join(f"[{', '.join(part.split())}]" for part in shape.split("|"))


def dim_of(letter: str, sizes: Mapping[str, Any]) -> Any:
    """Size of one shape letter; None while it is open."""
    if letter == "N+1":
        return None if sizes["N"] is None else sizes["N"] + 1
    if letter == "T*n":
        return None if sizes["T"] is None else sizes["T"] * sizes["n"]
    return sizes[letter]


class _Binder:
    """Letters bound so far, and which port bound each."""

    def __init__(self, node: Node, label: str, op_names: bool) -> None:
        self.node, self.label, self.op_names = node, label, op_names
        self.sizes: dict[str, Any] = {}
        self.source: dict[str, str] = {}

    def name(self, port: str) -> str:
        return self.node.shown(port, self.op_names)

    def set(self, letter: str, size: Any, port: str) -> None:
        if letter == "HO" and "HO" not in self.sizes and {"H", "HV"} <= self.sizes.keys():
            self.sizes["HO"] = max(self.sizes["H"], self.sizes["HV"])
            self.source["HO"] = f"max(H of {self.source['H']}, HV of {self.source['HV']})"
        known = self.sizes.get(letter)
        if known is None:
            if size is not None or letter not in self.sizes:
                self.sizes[letter], self.source[letter] = size, self.name(port)
        elif size is not None and size != known:
            self.refuse(port, letter, known, size)

    def refuse(self, port: str, letter: str, known: Any, size: Any) -> None:
        source = self.source.get(letter.split("+")[0].split("*")[0], "")
        raise ShapeMismatch(
            self.label,
            self.name(port),
            expected=f"dim {letter} " + (known if isinstance(known, str) else f"= {known}"),
            got=str(size),
            because=f"{source} gives {letter}={known}" if source else "",
            mend=f"Give {self.name(port)} the shape {shape_text(self.node.port[port].shape)}",
        )


def _letters(binder: _Binder, port: Port, shape: Sequence[Any], pool: bool) -> tuple[str, ...]:
    letters = port.shapes.get(len(shape))
    if letters is None:
        raise ShapeMismatch(
            binder.label,
            binder.name(port.name),
            expected=shape_text(port.shape),
            got=f"rank {len(shape)}, shape {list(shape)}",
            mend="View the tensor in that shape",
        )
    if pool and port.role == "state":
        letters = ("P", *letters[1:])
    return letters


def bind(
    node: Node,
    metas: Sequence[Meta | None],
    options: Options,
    *,
    label: str = "",
    op_names: bool = False,
    checkpoint_dtype: torch.dtype | None = None,
) -> Bound:
    """Check shapes, dtypes, devices and rules of one call, and infer its outputs.

    metas are in the order of `node.inputs`, None for an absent port. Raises an `InvalidNode`.
    """
    label = label or node.name
    binder = _Binder(node, label, op_names)
    given = {p.name: m for p, m in zip(node.inputs, metas, strict=True) if m is not None}
    for port in node.inputs:
        if not port.optional and port.name not in given:
            raise RuleBroken(label, binder.name(port.name), expected="a tensor", got="None",
                             mend=f"Pass {binder.name(port.name)}")  # fmt: skip
    _check_devices(binder, given)
    io = _check_dtypes(binder, given)
    sizes = binder.sizes
    if hasattr(options, "num_householder"):
        sizes["n"], binder.source["n"] = options.num_householder, "num_householder"
    pool = "state_indices" in given
    shapes = {
        name: tuple(zip(_letters(binder, node.port[name], meta.shape, pool), meta.shape))
        for name, meta in given.items()
    }
    for name, dims in shapes.items():
        for letter, size in dims:
            if letter == "N+1":
                if size is not None and size < 1:
                    binder.refuse(name, letter, ">= 1", size)
                binder.set("N", None if size is None else size - 1, name)
    for name, dims in shapes.items():
        for letter, size in dims:
            if size is None and letter not in OPEN:
                raise ShapeMismatch(label, binder.name(name), expected=f"a size for dim {letter}",
                                    got="None", mend="Only T and N may be left open")  # fmt: skip
            if letter.isalpha():
                binder.set(letter, size, name)
    for name, dims in shapes.items():
        for letter, size in dims:
            known = dim_of(letter, sizes)
            if known is not None and size is not None and known != size:
                binder.refuse(name, letter, known, size)
    _check_heads(binder)

    def has(name: str) -> bool:
        return name in given

    # A summary lacks q or v: their heads are what the other counts leave for them.
    if "H" not in sizes:
        key_heads = sizes.get("HK", sizes["HO"])
        sizes["H"] = key_heads if sizes["HO"] in (key_heads, sizes["HV"]) else sizes["HO"]
    sizes.setdefault("HK", sizes["H"])
    sizes.setdefault("HV", sizes["HO"])
    node.check_rules(options, has, sizes, label, op_names)
    every = getattr(options, "checkpoint_every_n_tokens", 0)
    tokens = None if sizes["T"] is None else sizes["T"] * sizes.get("n", 1)
    rows = checkpoint_rows(tokens, sizes["N"], every) if every else None
    _check_rows(binder, given, every, rows)
    sizes["R"] = rows
    outputs = _outputs(node, options, given, sizes, io, has, checkpoint_dtype, label, op_names)
    return Bound(sizes, outputs, io)


def _check_rows(binder: _Binder, given: dict[str, Meta], every: int, rows: Any) -> None:
    if "state_checkpoints" not in given:
        return
    got = given["state_checkpoints"].shape[0]
    if not every:
        raise RuleBroken(
            binder.label,
            "state_checkpoints",
            expected="checkpoint_every_n_tokens > 0 beside state_checkpoints",
            got="0",
            mend="Pass the forward's checkpoint_every_n_tokens, or drop state_checkpoints",
        )
    if rows is not None and got is not None and got != rows:
        binder.source["R"] = "max(T // checkpoint_every_n_tokens + N, 1)"
        binder.refuse("state_checkpoints", "R", rows, got)


def _check_heads(binder: _Binder) -> None:
    sizes = binder.sizes
    for letter, size in sizes.items():
        if letter not in DYNAMIC and letter not in "PR" and size is not None and size < 1:
            raise ShapeMismatch(binder.label, binder.source[letter], expected=f"{letter} >= 1",
                                got=f"{letter}={size}", mend="Drop the empty tensor")  # fmt: skip
    for letter in ("H", "HK", "HV"):
        if letter in sizes and sizes["HO"] % sizes[letter] != 0:
            raise ShapeMismatch(
                binder.label,
                binder.source[letter],
                expected=f"a number of heads {letter} that divides HO={sizes['HO']}",
                got=f"{letter}={sizes[letter]}",
                mend="Every head count divides HO = max(H, HV)",
            )
    if {"H", "HV"} <= sizes.keys() and sizes["HO"] != max(sizes["H"], sizes["HV"]):
        binder.refuse("g", "HO", max(sizes["H"], sizes["HV"]), sizes["HO"])


def _check_devices(binder: _Binder, given: dict[str, Meta]) -> None:
    devices = {name: meta.device for name, meta in given.items() if meta.device is not None}
    first = next(iter(devices), "")
    for name, device in devices.items():
        if device != devices[first]:
            raise DeviceMismatch(
                binder.label,
                binder.name(name),
                expected=f"device {devices[first]}, as {binder.name(first)}",
                got=str(device),
                mend=f"Move it with {binder.name(name)}.to({str(devices[first])!r})",
            )


def _allowed(rule: str, io: torch.dtype) -> tuple[torch.dtype, ...]:
    if rule == "io":
        return (io,)
    if rule in ("beta", "rows"):
        return tuple(dict.fromkeys((torch.float32, io)))
    if rule == "index":
        return INDEX
    return (*NARROW, torch.float64) if io is torch.float64 else NARROW


def _check_dtypes(binder: _Binder, given: dict[str, Meta]) -> torch.dtype:
    first = next(port for port in binder.node.inputs if port.dtype == "io")
    io = given[first.name].dtype
    for name, meta in given.items():
        rule = binder.node.port[name].dtype
        allowed = IO if name == first.name else _allowed(rule, io)
        if meta.dtype in allowed:
            continue
        shown = binder.name(name)
        wide = rule == "float" and meta.dtype is torch.float64
        raise DtypeMismatch(
            binder.label,
            shown,
            expected=" or ".join(map(dtype_name, allowed)),
            got=dtype_name(meta.dtype),
            because=f"{binder.name(first.name)} is {dtype_name(io)}"
            if rule in ("io", "beta", "rows") or wide
            else "",
            mend=f"Convert it with {shown}.to(torch.{dtype_name(allowed[0])})",
        )
    return io


def _outputs(
    node: Node,
    options: Options,
    given: dict[str, Meta],
    sizes: dict[str, Any],
    io: torch.dtype,
    has: Any,
    checkpoint_dtype: torch.dtype | None,
    label: str,
    op_names: bool,
) -> dict[str, tuple[tuple[Any, ...], torch.dtype]]:
    wide = torch.float64 if io is torch.float64 else torch.float32
    outputs: dict[str, tuple[tuple[Any, ...], torch.dtype]] = {}
    for out in node.present(options, has):
        if out.like:
            meta = given[out.like]
            outputs[out.name] = (tuple(meta.shape), meta.dtype)
            continue
        dtype = io if out.dtype == "io" else wide
        if out.dtype == "state" and "initial_state" in given:
            dtype = given["initial_state"].dtype
        if out.name == "state_checkpoints" and checkpoint_dtype is not None:
            if checkpoint_dtype not in (io, torch.float32):
                raise DtypeMismatch(
                    label,
                    "checkpoint_dtype" if op_names else "state_checkpoints",
                    expected=" or ".join(map(dtype_name, dict.fromkeys((io, torch.float32)))),
                    got=dtype_name(checkpoint_dtype),
                    mend="Take the token dtype or float32",
                )
            dtype = checkpoint_dtype
        if out.dtype == "state" and has("state_indices"):
            shape = tuple(given["initial_state"].shape)
        else:
            shape = tuple(dim_of(letter, sizes) for letter in out.shape.split())
        outputs[out.name] = (shape, dtype)
    return outputs


def check_offsets(offsets: list[int], tokens: int, label: str) -> None:
    """Raise unless the offsets start at 0, never fall, and end at or before `tokens`."""
    if offsets[0] != 0 or offsets[-1] > tokens or offsets != sorted(offsets):
        shown = offsets if len(offsets) <= 16 else f"{offsets[:8]} ... {offsets[-4:]}"
        raise RuleBroken(
            label,
            "cu_seqlens",
            expected=f"offsets that start at 0, never fall and end at or before T={tokens}",
            got=str(shown).replace("'", ""),
            mend="Build it as a cumulative sum of the sequence lengths, with a leading 0",
        )


def check_slots(slots: list[int], rows: int, label: str) -> None:
    """Raise unless the rows in use are inside the pool and differ."""
    used = [slot for slot in slots if slot >= 0]
    if len(set(used)) != len(used) or any(slot >= rows for slot in used):
        raise RuleBroken(
            label,
            "state_indices",
            expected=f"distinct rows below {rows}, or negative for padding",
            got=str(slots[:16]),
            mend="Give every sequence a row of its own",
        )
