"""The docs: generated files are fresh, examples on a page run, links and the nav are whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lagraph.__main__ import GENERATED, main

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


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
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        exec(compile(block, str(page), "exec"), scope)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    """Relative links and images exist."""
    broken = [
        link for link in LINK.findall(page.read_text(encoding="utf-8"))
        if not (page.parent / link).exists()
    ]  # fmt: skip
    assert not broken


def test_nav_has_every_page() -> None:
    """mkdocs.yml names each page once."""
    named = re.findall(r":\s+(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(page.name for page in PAGES[1:])


@pytest.mark.parametrize("command", [["support"], ["describe", "gdn_bwd"], ["describe", "MAMBA2"]])
def test_commands_print(command: list[str], capsys: pytest.CaptureFixture) -> None:
    """`python -m lagraph support` and `describe`."""
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "gdn" in out.lower() or "mamba" in out.lower()
    assert "GDN_BWD" in out or command[-1] == "MAMBA2"
