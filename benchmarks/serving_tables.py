"""The tables of the serving guide, made of what `serving.py --out` wrote.

    python benchmarks/serving_tables.py benchmarks/results/h200_serving.txt TARGET.md

Rows that were not measured are left out; a library that did not run is named as such.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import NamedTuple

__all__ = ["Row", "page", "read"]

FAMILIES = {"gdn": "GDN", "kda": "KDA", "gdn2": "GDN-2", "gdp": "GDP, n = 2", "mamba2": "Mamba-2"}
POOLS = {"float32": "fp32 pool", "bfloat16": "bf16 pool"}
OURS, PYTHON = "lagraph", "from Python"
LIBRARIES = {
    "attention gym": "Attention Gym", "fla": "FLA", "fla (scan only)": "FLA (scan only)",
    "flashinfer": "FlashInfer", "mamba_ssm": "mamba_ssm",
}  # fmt: skip
MEASURED = re.compile(r"(.{38}) (.{16}) +([\d.]+) us +\d+ GB/s +([\d.]+) %")
LACKING = re.compile(r"(.{38}) (.{16}) not run: ")


class Row(NamedTuple):
    """Microseconds and per cent of the copy rate; None where a library did not run."""

    what: str
    who: str
    time: float | None
    share: float | None


def read(text: str) -> tuple[str, list[Row]]:
    """The first line, which says where and of what, and the rows."""
    head, *lines = text.splitlines()
    rows = []
    for line in lines:
        if found := MEASURED.match(line):
            what, who, time, share = (part.strip() for part in found.groups())
            rows.append(Row(what, who, float(time), float(share)))
        elif found := LACKING.match(line):
            rows.append(Row(found[1].strip(), found[2].strip(), None, None))
    return head, rows


def told(time: float) -> str:
    return f"{time:.1f} us" if time < 20 else f"{time:.0f} us"


def others(rows: list[Row], what: str) -> str:
    """What other libraries took, the fastest first, and who did not run."""
    found = [row for row in rows if row.what == what and row.who not in (OURS, PYTHON)]
    found.sort(key=lambda row: (row.time is None, row.time))
    return ", ".join(
        f"{LIBRARIES.get(row.who, row.who)} {'not run' if row.time is None else told(row.time)}"
        for row in found
    )


def page(text: str) -> str:
    """The tables, as Markdown."""
    head, rows = read(text)
    mine = {(row.what, row.who): row for row in rows if row.time is not None}

    def cell(what: str, who: str = OURS, share: bool = False) -> str:
        row = mine.get((what, who))
        return "" if row is None else f"{row.share:.0f} %" if share else told(row.time or 0.0)

    lines = [
        f"{head}.", "",
        "| one token a request | batch 1 | the same, from Python | batch 8 | batch 128 | "
        "| other libraries, batch 128 |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    pools = [(f, p) for f in FAMILIES for p in POOLS]
    for family, pool in pools:
        one, eight, many = (f"decode {family} {pool} batch {B}" for B in (1, 8, 128))
        cells = [cell(one), cell(one, PYTHON), cell(eight), cell(many), cell(many, share=True)]
        if any(cells):
            cells = [f"{FAMILIES[family]}, {POOLS[pool]}", *cells, others(rows, many)]
            lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "", "| four tokens a request, with the state after each | batch 128 | | other libraries |",
        "|---|---|---|---|",
    ]  # fmt: skip
    for family, pool in pools:
        what = f"several {family} {pool} batch 128 x 4"
        if cell(what):
            cells = [f"{FAMILIES[family]}, {POOLS[pool]}", cell(what), cell(what, share=True)]
            lines.append(f"| {' | '.join([*cells, others(rows, what)])} |")
    for pool in POOLS:
        what = f"accept {pool} batch 128"
        if cell(what):
            cells = [f"`accept_states`, {POOLS[pool]}", cell(what), cell(what, share=True), ""]
            lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "", "| convolution, T = 16384, C = 8192, W = 4, bf16, silu | forward | | backward | |",
        "|---|---|---|---|---|",
    ]  # fmt: skip
    for who in (OURS, *LIBRARIES):
        for kind, name in (("dense", "one sequence"), ("packed 64", "64 sequences packed")):
            pair = [f"conv {kind} {direction}" for direction in ("forward", "backward")]
            cells = [made for what in pair for made in (cell(what, who), cell(what, who, True))]
            if any(cells):
                lines.append(f"| {' | '.join([f'{LIBRARIES.get(who, who)}, {name}', *cells])} |")
    what = "conv decode batch 128"
    if cell(what):
        one = [f"{OURS}, one token of each of 128", cell(what), cell(what, share=True), "", ""]
        lines.append(f"| {' | '.join(one)} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path, help="what serving.py --out wrote")
    parser.add_argument("page", type=Path, help="the Markdown to write")
    args = parser.parse_args(argv)
    args.page.write_text(page(args.rows.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
