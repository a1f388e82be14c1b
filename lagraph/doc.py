"""Text made from the declarations: signatures, docstrings, tables, stubs."""

from __future__ import annotations

import ast
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from lagraph import infer, registry
from lagraph.names import FORMS
from lagraph.problem import DIRECTIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lagraph.node import Attr, Family, Node, Output, Port

__all__ = [
    "builder_docstring",
    "describe",
    "node_tables",
    "op_docstring",
    "op_stub",
    "ops_stub",
    "plan_table",
    "signature",
    "written_ops",
]

_DTYPES = {
    "io": "bf16, fp16, fp32 or fp64; one dtype for all token tensors",
    "beta": "fp32 or the token dtype",
    "float": "fp32, bf16 or fp16 (fp64 too with fp64 tokens)",
    "index": "int32 or int64",
    "rows": "the token dtype or fp32",
}
_EXTRA = {
    "plan_name": ("str | None", "Run this plan and no other, or two with a comma between: the "
                  "forward's and the backward's."),
    "checkpoint_dtype": ("torch.dtype | None", "Dtype of the checkpoints: None is the token dtype, "
                         "or torch.float32."),
}  # fmt: skip
_VERB = {
    "forward": "{title}.",
    "backward": "Gradients of {title}.",
    "summary": "{title} over a span: its end state and its map from first to last state.",
    "summary_backward": "The summary of {title} for the state's gradient.",
}


def type_name(kind: Any) -> str:
    """A type as it is written in a signature."""
    if getattr(kind, "__origin__", None) is not None and "Literal" in str(kind):
        return f"Literal[{', '.join(map(repr, get_args(kind)))}]"
    return getattr(kind, "__name__", "") if isinstance(kind, type) else str(kind)


def _options(node: Node) -> dict[str, Attr]:
    return {attr.op_name: attr for attr in node.attrs}


def _ports(node: Node) -> dict[str, Port]:
    return {port.op_name: port for port in node.inputs}


def signature(node: Node) -> str:
    """Arguments of the node's operator, as they stand between the parentheses."""
    return ", ".join(arguments(node))


def builder_docstring(node: Node) -> str:
    """The docstring of a node's builder."""
    lines = [
        f"Add {node.type}: {_VERB[node.direction].format(title=node.family.title)}",
        "",
        "Args:",
    ]
    for port in node.inputs:
        maybe = ", optional" if port.optional else ""
        lines.append(_wrap(
            f"{port.name} (Tensor{maybe}): {shape_text(port)}, {_DTYPES[port.dtype]}. {port.doc}", 4
        ))  # fmt: skip
    for attr in node.attrs:
        default = "" if attr.default is ... else f", default {attr.default!r}"
        lines.append(_wrap(f"{attr.name} ({type_name(attr.type)}{default}): {attr.doc}", 4))
    lines.append("    name (str): Name of the node, prefix of its outputs' names.")
    lines.append("    compute_data_type: FLOAT, or DOUBLE.")
    names = ", ".join(node.output_names)
    lines += ["", "Returns:", f"    [{names}], None where an output is absent."]
    return "\n".join(lines)


def arguments(node: Node, typed: bool = False) -> list[str]:
    """Arguments of the node's operator with their defaults, and their types if `typed`."""
    ports, options = _ports(node), _options(node)
    parts = []
    for name in node.family.op_order[node.direction]:
        if name == "*":
            parts.append("*")
        elif name in ports:
            kind = "Tensor | None" if ports[name].optional else "Tensor"
            default = " = None" if ports[name].optional else ""
            parts.append(f"{name}: {kind}{default}" if typed else name + default.replace(" ", ""))
        else:
            kind, default = _option_type(options.get(name), name)
            if typed:
                parts.append(f"{name}: {kind}" + (f" = {default}" if default else ""))
            else:
                parts.append(f"{name}={default}" if default else name)
    return parts


def _option_type(attr: Attr | None, name: str) -> tuple[str, str]:
    if attr is None:
        return _EXTRA[name][0], "None"
    return type_name(attr.type), "" if attr.default is ... else repr(attr.default)


def shape_text(item: Port | Output) -> str:
    """Shape of a port or an output: "[T, H, K]", or alternatives."""
    return infer.shape_text(item.shape)


def _wrap(text: str, indent: int) -> str:
    return textwrap.fill(
        text, 96, initial_indent=" " * indent, subsequent_indent=" " * (indent + 4)
    )


def returns(node: Node) -> list[tuple[str, str]]:
    """The operator's results, by name, with what each is."""
    rows = []
    for out in node.outputs:
        if out.name == "O_pre":
            continue
        when = f" (with {out.condition})" if out.condition else ""
        rows.append((out.name, f"{shape_text(out)}. {out.doc.rstrip('.')}{when}."))
    return rows


def op_docstring(node: Node) -> str:
    """The docstring of a node's operator."""
    family = node.family
    lines = [
        _VERB[node.direction].format(title=family.title),
        "",
        _wrap(family.equation, 4).strip(),
    ]
    lines += ["", "Args:"]
    ports, options = _ports(node), _options(node)
    for name in family.op_order[node.direction]:
        if name in ports:
            port = ports[name]
            maybe = ", optional" if port.optional else ""
            text = f"{name} (Tensor{maybe}): {shape_text(port)}, {_DTYPES[port.dtype]}. {port.doc}"
        elif name == "*":
            continue
        elif name in options:
            kind, default = _option_type(options[name], name)
            text = f"{name} ({kind}{', default ' + default if default else ''}): "
            text += options[name].doc
        else:
            text = f"{name} ({_EXTRA[name][0]}, default None): {_EXTRA[name][1]}"
        lines.append(_wrap(text, 4))
    lines += ["", "Returns:"]
    lines += [_wrap(f"{name}: {text}", 4) for name, text in returns(node)]
    if node.direction == "forward":
        lines.append(_wrap(
            "final_state is empty unless asked for, and the caller's buffer under "
            "overwrite_initial_state or state_indices; state_checkpoints is returned only with "
            "checkpoint_every_n_tokens > 0.", 4,
        ))  # fmt: skip
    lines += ["", "Raises:"]
    lines += ["    ShapeMismatch, DtypeMismatch, DeviceMismatch, InvalidOption: a bad argument."]
    lines += [_wrap(f"RuleBroken: {rule.name} does not hold.", 4) for rule in node.rules]
    lines.append("    NoEngine, PlanNotOffered: nothing, or not the pinned plan, serves the call.")
    lines += ["", "Notes:"]
    notes = [
        *family.notes,
        "Head j of HO reads query head j // (HO // H), key head j // (HO // HK) and value head "
        "j // (HO // HV).",
        "Empty sequences pass their state through; rows past cu_seqlens[-1] are not read, and "
        "unspecified in what is returned.",
        "Once differentiable." if node.direction == "forward" else "Not differentiable.",
    ]
    lines += [_wrap(note, 4) for note in notes]
    lines += ["", f"Source: {family.source}."]
    return "\n".join(lines)


def op_stub(node: Node) -> str:
    """The operator's typed signature, as in a stub file."""
    results = {
        "forward": "tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]",
        "summary": "tuple[Tensor, Tensor]",
        "summary_backward": "Tensor | tuple[Tensor, Tensor]",
    }[node.direction]
    lines = "".join(f"    {part},\n" for part in arguments(node, typed=True))
    return f"def {node.op}(\n{lines}) -> {results}: ...\n"


def ops_stub() -> str:
    """Text of `ops/__init__.pyi`."""
    nodes = [
        fam.node(direction)
        for fam in registry.families()
        for direction in DIRECTIONS
        if direction != "backward"
    ]
    modules, written = written_ops()
    names = sorted([*written, *(node.op for node in nodes)])
    head = '"""Generated by `python -m lagraph docs`; do not edit."""\n\n'
    head += "from typing import Literal\n\nimport torch\nfrom torch import Tensor\n\n"
    head += "".join(f"from lagraph.ops import {name} as {name}\n" for name in modules)
    head += "".join(f"from {module} import {name} as {name}\n" for name, module in written.items())
    head += "\n__all__ = [\n" + "".join(f'    "{name}",\n' for name in names) + "]\n\n"
    return head + "\n".join(op_stub(node) for node in nodes)


def written_ops() -> tuple[list[str], dict[str, str]]:
    """Modules of `lagraph.ops` that are names of it, and the module of every name that is not
    made from a declaration: its public imports, read, since the core imports no operators."""
    spec = find_spec("lagraph.ops")
    text = Path(spec.origin).read_text("utf-8") if spec is not None and spec.origin else ""
    modules: list[str] = []
    names: dict[str, str] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom):
            found = [alias.name for alias in node.names if alias.asname is None]
            if node.module == "lagraph.ops":
                modules += found
            elif (node.module or "").startswith("lagraph.ops."):
                names |= dict.fromkeys(found, node.module or "")
    return modules, names


def functions(family: Family) -> list[str]:
    """The family's functions on batches, by name."""
    written = written_ops()[1]
    made = (form.format(family.name) for form in FORMS[1:])
    return [name for name in made if name in written]


def describe(node: Node) -> str:
    """What a node takes and gives, for a terminal."""
    family = node.family
    lines = [f"{node.type}: {_VERB[node.direction].format(title=family.title)}", ""]
    lines += [f"  {family.equation}", "", f"  builder  graph.{node.name}(...)"]
    if node.direction != "backward":
        lines.append(f"  op       lagraph.ops.{node.op}(...)")
    if node.direction == "forward" and functions(family):
        lines.append(f"  batches  lagraph.ops: {', '.join(functions(family))}")
    lines += ["", "Inputs"]
    rows = [
        (p.name + ("?" if p.optional else ""), shape_text(p), _DTYPES[p.dtype], p.doc)
        for p in node.inputs
    ]
    lines += _columns(rows)
    lines += ["", "Options"]
    lines += _columns([
        (a.name, type_name(a.type), "required" if a.default is ... else f"= {a.default!r}", a.doc)
        for a in node.attrs
    ])  # fmt: skip
    lines += ["", "Outputs"]
    lines += _columns([
        (o.name, shape_text(o), o.condition or "always", o.doc) for o in node.outputs
    ])  # fmt: skip
    lines += ["", "Rules"]
    lines += [f"  {rule.name}" for rule in node.rules] or ["  none"]
    lines += [f"  {note}" for note in family.notes]
    return "\n".join(lines)


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    if not rows:
        return ["  none"]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths)]
        lines.append("  " + "  ".join([*cells, row[-1]]).rstrip())
    return lines


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    lines += [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def node_tables() -> str:
    """Markdown of docs/nodes.md: every node's ports, options, outputs and rules."""
    parts = ["# Nodes", "", "Generated by `python -m lagraph docs` from the declarations in "
             "`nodes/`. T and N may be left open in a graph's tensors.", ""]  # fmt: skip
    for family in registry.families():
        parts += [f"## {family.title}", "", f"    {family.equation}", "", f"{family.source}.", ""]
        if functions(family):
            parts += [f"On batches: {', '.join(f'`{name}`' for name in functions(family))}.", ""]
        for node in family.nodes:
            operator = "" if node.direction == "backward" else f", operator `{node.op}`"
            parts += [f"### `{node.type}`", "", f"Builder `graph.{node.name}(...)`{operator}.", ""]
            parts += [_table(("input", "shape", "dtype", ""), [
                (f"`{p.name}`" + (" (optional)" if p.optional else ""), shape_text(p),
                 _DTYPES[p.dtype], p.doc) for p in node.inputs
            ]), ""]  # fmt: skip
            parts += [_table(("option", "type", "default", ""), [
                (f"`{a.name}`", type_name(a.type),
                 "required" if a.default is ... else f"`{a.default!r}`", a.doc)
                for a in node.attrs
            ]), ""]  # fmt: skip
            parts += [_table(("output", "shape", "exists", ""), [
                (f"`{o.name}`", shape_text(o),
                 f"with `{o.condition}`" if o.condition else "always", o.doc)
                for o in node.outputs
            ]), ""]  # fmt: skip
            if node.rules:
                parts += ["Rules: " + "; ".join(rule.name for rule in node.rules) + ".", ""]
    return "\n".join(parts)


def plan_table() -> str:
    """Markdown of docs/support.md: what each engine declares that it serves."""
    from lagraph.desc import dtype_name

    parts = ["# Support", "", "Generated by `python -m lagraph docs` from the engines' support "
             "tables.", ""]  # fmt: skip
    rows: list[tuple[str, ...]] = []
    preferences: list[tuple[str, ...]] = []
    notes = []
    for row in registry.ENGINES:
        table = registry.load(row.table)
        arch = f"sm{table.arch[0]} and newer" if table.arch else "any"
        if table.arch and table.arch[1]:
            low, high = table.arch
            arch = f"sm{low}" if low == high else f"sm{low} to sm{high}"
        default = ", ".join(sorted(table.default_on)) or "never"
        if table.prefer is not None:
            default = f"{default}, where preferred" if table.prefer else "never"
            preferences += [
                (f"`{row.name}`", f"{p.family} {p.direction}", p.where, p.measured)
                for p in table.prefer
            ]
        dims = "; ".join(f"{k} in {{{', '.join(map(str, v))}}}" for k, v in table.dims.items())
        knobs = "; ".join(f"{k} in {{{', '.join(map(str, v))}}}" for k, v in table.knobs.items())
        needs = ", ".join(f"{name} >= {version}" for name, version in row.requires)
        rows.append((
            f"`{row.name}`", ", ".join(sorted(table.devices)), default, arch,
            ", ".join(dtype_name(d) for d in table.dtypes), dims or "any", needs or "none",
            table.summary,
        ))  # fmt: skip
        notes.append(f"- `{row.name}`: {knobs or 'none'}")
    head = ("engine", "devices", "default on", "architecture", "token dtypes", "head dims",
            "packages", "")  # fmt: skip
    parts += [_table(head, rows), "", "Knobs of a plan name:", "", *notes, ""]
    if preferences:
        parts += ["Where an engine is preferred to those after it:", ""]
        parts += [_table(("engine", "node", "where", "measured"), preferences), ""]
    parts += ["Which families and directions each engine serves:", ""]
    rows = []
    for family in registry.families():
        for node in family.nodes:
            cells = []
            for row in registry.ENGINES:
                serves = registry.load(row.table).serves
                cells.append("yes" if serves is None or (family.name, node.direction) in serves
                             else "no")  # fmt: skip
            rows.append((f"`{node.type}`", *cells))
    parts += [_table(("node", *(row.name for row in registry.ENGINES)), rows), ""]
    return "\n".join(parts)
