"""The docs: generated files are fresh, examples on a page run, links and the nav are whole."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lagraph.__main__ import GENERATED, main

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
# A block may be preceded by <!-- not run: reason --> or by <!-- tree: what to do with it -->.
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>not run|tree): (?P<note>[^\n]+?) -->\n\s*)?^```python\n(?P<code>.*?)^```",
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)


class Block(NamedTuple):
    """A python block of a page: its code, its mark and the mark's text."""

    code: str
    mark: str
    note: str


def blocks(page: Path) -> list[Block]:
    """A page's python blocks; lines before a block stand empty, so that tracebacks fit."""
    text = page.read_text(encoding="utf-8")
    return [
        Block("\n" * text.count("\n", 0, found.start("code")) + found["code"],
              found["mark"] or "", found["note"] or "")
        for found in BLOCK.finditer(text)
    ]  # fmt: skip


@pytest.mark.parametrize("name", GENERATED)
def test_generated_file_is_fresh(name: str) -> None:
    """What `python -m lagraph docs` would write is what stands there."""
    assert (ROOT / name).read_text(encoding="utf-8") == GENERATED[name]().rstrip() + "\n"


def test_docs_command_sees_a_stale_file(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """--check fails on a tree without the files, writing makes it pass."""
    for name in GENERATED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    assert main(["docs", "--check", "--root", str(tmp_path)]) == len(GENERATED)
    assert main(["docs", "--root", str(tmp_path)]) == 0
    assert main(["docs", "--check", "--root", str(tmp_path)]) == 0
    assert "stale" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_page_examples_run(page: Path) -> None:
    """The python blocks of a page run one after the other in one namespace."""
    scope: dict[str, object] = {"__name__": "page"}
    for block in blocks(page):
        if not block.mark:
            exec(compile(block.code, str(page), "exec"), scope)


def test_the_serving_page_normalizes_alike() -> None:
    """Its prefill and its decode agree on rows near zero, where `F.normalize` would not."""
    import torch

    first = next(block for block in blocks(ROOT / "docs" / "serving.md") if not block.mark)
    scope: dict[str, Any] = {"__name__": "page"}
    exec(compile(first.code, "serving.md", "exec"), scope)
    rows, gates, betas = 1e-3 * torch.randn(1, 9, scope["C"]), *torch.randn(2, 1, 9, scope["H"])
    rows[:, :, -scope["H"] * scope["V"] :] *= 1e3  # values as ever
    fresh, one, two = torch.tensor([False]), torch.tensor([1]), torch.tensor([2])
    whole = scope["prefill"](rows, gates, betas, None, one, fresh)
    parts = [scope["prefill"](rows[:, :5], gates[:, :5], betas[:, :5], None, two, fresh)]
    parts += [
        scope["decode"](rows[0, t : t + 1], gates[:, t : t + 1], betas[:, t : t + 1], two)
        for t in range(5, 9)
    ]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_block_is_seen(page: Path) -> None:
    """No python block escapes the pattern, and no mark stands without its block."""
    text, found = page.read_text(encoding="utf-8"), blocks(page)
    assert len(found) == len(re.findall(r"^\s*```\s*(?:python|py)\b", text, re.MULTILINE))
    assert sum(bool(b.mark) for b in found) == len(re.findall(r"<!-- (?:not run|tree):", text))


def test_adding_a_variant(tmp_path: Path) -> None:
    """The page's walk-through, followed on a copy of the tree, gives a variant that works."""
    package = tmp_path / "lagraph"
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "lagraph", package, ignore=skip)
    for folder in ("engines", "nodes", "ops"):
        shutil.copytree(ROOT / folder, package / folder, ignore=skip)

    def inside(name: str) -> Path:
        return package / name.removeprefix("lagraph/")

    script = ""
    for block in blocks(ROOT / "docs" / "adding_a_variant.md"):
        assert block.mark == "tree"
        code = block.code.lstrip("\n")
        if block.note.startswith("write "):
            inside(block.note.removeprefix("write ")).write_text(code, encoding="utf-8")
        elif block.note == "run":
            script = code
        else:
            where, rest = block.note.split(maxsplit=1)
            anchor, name = (part.strip() for part in rest.rsplit(" in ", 1))
            path = inside(name)
            text = path.read_text(encoding="utf-8")
            assert text.count(anchor) == 1
            at = text.index(anchor)
            if where == "after":
                at = text.index("\n", at) + 1
            path.write_text(text[:at] + code + text[at:], encoding="utf-8")
    check = f"import lagraph; assert lagraph.__file__.startswith({str(tmp_path)!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", check + script], capture_output=True, text=True, check=False,
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "runs longhorn_eager" in done.stdout


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as mkdocs makes them."""
    return {
        re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())
        for heading in HEADING.findall(page.read_text(encoding="utf-8"))
    }


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    """Relative links, images and anchors exist."""
    for link, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        target = page.parent / link if link else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), anchor


def test_nav_has_every_page() -> None:
    """mkdocs.yml names each page once, and no page is left out."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = re.findall(r":\s+(\S+\.md)$", text, re.MULTILINE)
    assert sorted(named) == sorted(page.name for page in PAGES[1:])
    assert "not_in_nav" not in text


def test_the_install_page_names_every_extra() -> None:
    """And its table names no other."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = project.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    table = page.partition("| extra | for |\n|---|---|\n")[2].partition("\n\n")[0]
    firsts = [row.split("|")[1] for row in table.splitlines()]
    named = [name for first in firsts for name in re.findall(r"`(\w+)`", first)]
    assert sorted(named) == sorted(re.findall(r"^(\w+) = ", section, re.MULTILINE))


@pytest.mark.parametrize("command", [["support"], ["describe", "gdn_bwd"], ["describe", "MAMBA2"]])
def test_commands_print(command: list[str], capsys: pytest.CaptureFixture) -> None:
    """`python -m lagraph support` and `describe`."""
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "gdn" in out.lower() or "mamba" in out.lower()
    assert "GDN_BWD" in out or command[-1] == "MAMBA2"


def test_a_reader_may_stop_early() -> None:
    """`python -m lagraph support | head` is no error."""
    command = [sys.executable, "-m", "lagraph", "describe", "gdn"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        run.stdout.close()
        assert run.wait(60) == 0
        assert run.stderr.read() == b""


SAID = {
    "GDN2_Summary": "GDN2_SUMMARY",
    "gated_delta_net": "GDN",
    "Gated-DeltaNet": "GDN",
    "gated_delta_net_v2_summary_bwd": "GDN2_SUMMARY_BWD",
    "lagraph.ops.kimi_delta_attention": "KDA",
    "kimi_delta_attention_bwd": "KDA_BWD",
    "mamba2_inplace": "MAMBA2",
    "gdn_triton[chunk=64]": "GDN",
    "gdp_summary_eager": "GDP_SUMMARY",
    "chunk_gated_delta_rule": "GDN",
    "fused_recurrent_kda": "KDA",
    "chunk_gdn2": "GDN2",
    "recurrent_gdn_decode": "GDN",
    "chunk_gdn_prepare_backward": "GDN_BWD",
    "mamba_chunk_scan_combined": "MAMBA2",
}


@pytest.mark.parametrize("name", SAID)
def test_describe_knows_a_node_by_its_other_names(name: str, capsys: pytest.CaptureFixture) -> None:
    """Operators, functions, plans, other libraries' names; and it says which node that is."""
    assert main(["describe", name]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert SAID[name] in first
    assert any(line.startswith(f"{SAID[name]}: ") for line in (first, *rest))


def test_every_function_of_a_family_has_its_node() -> None:
    """The operators, Attention Gym's functions and FLA's, in any case."""
    import lagraph.ops
    from lagraph import registry
    from lagraph.integrations import fla
    from lagraph.names import node_of

    for node in registry.nodes().values():
        for name in (node.name, node.type, node.op, node.op.upper()):
            assert node_of(name) is node, name
    for name in (*lagraph.ops.__all__, *lagraph.ops.context_parallel.__all__, *fla.__all__):
        words = [family for family in registry.FAMILIES if family in name.split("_")]
        if words:
            found = node_of(name)
            assert found is not None, name
            assert found.family.name == words[0], name


@pytest.mark.parametrize(
    ("name", "said"),
    [("gated_delt_net", "did you mean gated_delta_net or"), ("chunk_gdn3", "chunk_gdn"),
     ("chunk_gated_rule", "chunk_gated_delta_rule"), ("xyz", "nothing is spelled like it"),
     ("causal_conv1d", "help(lagraph.ops.causal_conv1d)")],
)  # fmt: skip
def test_describe_suggests_the_nearest_name(
    name: str, said: str, capsys: pytest.CaptureFixture
) -> None:
    """An unknown name is an error of the command line, with what may have been meant."""
    with pytest.raises(SystemExit) as stopped:
        main(["describe", name])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err
