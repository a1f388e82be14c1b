"""Command line: `python -m lagraph support`, `describe NODE`, `docs [--check]`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lagraph import doc, infer, names, registry, select
from lagraph.plan import problem_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lagraph.node import Node

__all__ = ["GENERATED", "main", "support"]

GENERATED = {
    "ops/__init__.pyi": doc.ops_stub,
    "docs/nodes.md": doc.node_tables,
    "docs/support.md": doc.plan_table,
}
_SAMPLE = {"T": 64, "N": 1, "H": 2, "HK": 2, "HV": 2, "HO": 2, "K": 128, "V": 128, "n": 2}


def sample_verdicts(node: Node, device: torch.device) -> tuple[select.Verdict, ...]:
    """Every engine's verdict on an ordinary bf16 call: K = V = 128 (Mamba-2: V = 64)."""
    sizes = _SAMPLE | ({"V": 64} if node.family.name == "mamba2" else {})
    metas: list[infer.Meta | None] = []
    for port in node.inputs:
        if port.optional:
            metas.append(None)
            continue
        letters = next(iter(port.shapes.values()))
        shape = tuple(infer.dim_of(letter, sizes) for letter in letters)
        dtype = {"io": torch.bfloat16, "index": torch.int32}.get(port.dtype, torch.float32)
        metas.append(infer.Meta(shape, dtype, device))
    given = {"num_householder": 2} if any(a.name == "num_householder" for a in node.attrs) else {}
    options = node.options(given)
    bound = infer.bind(node, metas, options)
    return select.verdicts(problem_of(node, bound, options, metas))


def support() -> str:
    """Engines on this machine: what runs, what declines and why."""
    devices = [torch.device("cpu")]
    lines = [f"torch {torch.__version__}"]
    for index in range(torch.cuda.device_count()):
        devices.append(torch.device("cuda", index))
        major, minor = torch.cuda.get_device_capability(index)
        lines.append(f"cuda:{index}: {torch.cuda.get_device_name(index)}, sm{major * 10 + minor}")
    for row in registry.ENGINES:
        lines += ["", f"{row.name}: {registry.load(row.table).summary}"]
        lines += [f"  {reason}" for reason in select.missing(row)]
    lines += ["", "An ordinary bf16 call of each node (K = V = 128; Mamba-2: V = 64):"]
    for device in devices:
        for node in registry.nodes().values():
            found = sample_verdicts(node, device)
            chosen = next((v.plan for v in found if v.ok and v.default), "nothing unless pinned")
            lines.append(f"  {device!s:7}  {node.type:19}  runs {chosen}")
            lines += [f"           {'':19}  {verdict}" for verdict in found
                      if not (verdict.ok and verdict.default)]  # fmt: skip
    return "\n".join(lines)


def docs(root: Path, check: bool) -> int:
    """Write the generated files, or say which are stale."""
    stale = 0
    for name, make in GENERATED.items():
        path, text = root / name, make().rstrip() + "\n"
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        if check:
            print(f"stale: {name}. Run python -m lagraph docs.")
        else:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {name}")
    return stale if check else 0


def _known_as(name: str, node: Node) -> str:
    """What another name of a node is here."""
    last = name.rpartition(".")[2]
    if last in doc.written_ops()[1]:
        return f"{last} runs {node.type}; help(lagraph.ops.{last}) has its own arguments.\n"
    return f"{name} is {node.type} here.\n"


def _unknown(name: str) -> str:
    """What to say about a name that means no node."""
    last = name.rpartition(".")[2]
    if last in doc.written_ops()[1]:
        return f"{name!r} is no node; help(lagraph.ops.{last}) describes the function"
    near = names.nearest(name)
    hint = f"did you mean {' or '.join(near)}?" if near else "nothing is spelled like it."
    return f"no node {name!r}: {hint} Nodes are {', '.join(registry.nodes())}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the result is the exit status."""
    parser = argparse.ArgumentParser(prog="python -m lagraph", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("support", help="engines on this machine: what runs, what declines and why")
    one = commands.add_parser("describe", help="ports, options and outputs of a node")
    one.add_argument(
        "node", help="gdn_bwd, gated_delta_net, chunk_gdn, chunk_gated_delta_rule, ..."
    )
    text = commands.add_parser("docs", help="write the generated files of a checkout")
    text.add_argument("--check", action="store_true", help="only say which are stale")
    text.add_argument("--root", type=Path, default=Path.cwd(), help="the checkout")
    chosen = parser.parse_args(arguments)
    if chosen.command == "support":
        print(support())
    elif chosen.command == "describe":
        node = names.node_of(chosen.node)
        if node is None:
            parser.error(_unknown(chosen.node))
        if chosen.node.upper() != node.type:
            print(_known_as(chosen.node, node))
        print(doc.describe(node))
    else:
        return docs(chosen.root, chosen.check)
    return 0


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    sys.exit(status)
