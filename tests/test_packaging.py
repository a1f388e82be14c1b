"""What is built: the package list, the sdist, the wheel and an installed copy; and the lint ban.

Everything is built from a copy, so that no earlier build is picked up and none is left behind.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
SETUP = CONFIG["tool"]["setuptools"]
FOLDERS = {"lagraph": "lagraph", "lagraph.engines": "engines", "lagraph.nodes": "nodes",
           "lagraph.ops": "ops"}  # fmt: skip
IGNORED = (".*", "build", "dist", "site", "*.egg-info", "__pycache__", "shared")


def tree():
    """Files of the package, by their path in an installed copy, with their path here."""
    files = {}
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".pyi") or path.name == "py.typed":
                inner = path.relative_to(ROOT / folder).as_posix()
                files[f"{package.replace('.', '/')}/{inner}"] = path.relative_to(ROOT).as_posix()
    return files


def run(*command, cwd="/", **environment):
    """Standard output of a command that succeeds, run away from the checkout."""
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | environment
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=cwd, env=variables
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, and the wheel that is built from it."""
    place = tmp_path_factory.mktemp("built")
    source = place / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*IGNORED))
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(place), str(source),
        cwd=place)  # fmt: skip
    (sdist,) = place.glob("lagraph-*.tar.gz")
    (wheel,) = place.glob("lagraph-*-none-any.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """A folder with the wheel installed in it."""
    site = tmp_path_factory.mktemp("site")
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target",
        str(site), str(built[1]))  # fmt: skip
    return site


def test_the_package_list_is_the_tree():
    folders = {name.rpartition("/")[0].replace("/", ".") for name in tree()}
    assert sorted(folders) == SETUP["packages"]
    assert SETUP["package-dir"] == FOLDERS
    for package in SETUP["packages"]:
        assert f"{package.replace('.', '/')}/__init__.py" in tree(), f"{package}: no __init__.py"


@pytest.mark.slow
def test_the_sdist_has_every_file(built):
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert set(tree().values()) <= names
    assert {"pyproject.toml", "README.md", "LICENSE"} <= names


@pytest.mark.slow
def test_the_wheel_has_the_package_and_nothing_else(built):
    with zipfile.ZipFile(built[1]) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith("/METADATA"))
    files = [name for name in names if ".dist-info/" not in name]
    assert sorted(files) == sorted(tree())
    assert any(name.endswith("LICENSE") for name in names)
    for wanted in ("torch>=2.9", "pydantic>=2"):
        assert f"Requires-Dist: {wanted}" in metadata
    for optional in ("triton", "nvidia-cutlass-dsl", "apache-tvm-ffi"):
        pattern = rf'Requires-Dist: {optional}>=\S+ ?; platform_system == "Linux"'
        assert re.search(pattern, metadata.replace("'", '"')), optional


@pytest.mark.slow
def test_an_installed_wheel_is_whole(installed):
    """A fresh process outside the checkout finds every part in the installed copy."""
    code = (
        "import json, lagraph, lagraph.engines, lagraph.nodes, lagraph.ops\n"
        "parts = (lagraph, lagraph.engines, lagraph.nodes, lagraph.ops)\n"
        "print(json.dumps([part.__file__ for part in parts]))"
    )
    found = json.loads(run(sys.executable, "-c", code, PYTHONPATH=str(installed)))
    wanted = [installed / package.replace(".", "/") / "__init__.py" for package in FOLDERS]
    assert [Path(name) for name in found] == wanted
    support = run(sys.executable, "-m", "lagraph", "support", PYTHONPATH=str(installed))
    assert "eager" in support


@pytest.mark.slow
def test_the_quickstart_runs_on_an_installed_wheel(installed):
    """The README's Python, all of it, as it stands there."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert len(blocks) >= 2
    shown = (
        "import lagraph.ops\n"
        "print(lagraph.__file__, o.shape == (T, H, V), final_state is not None)\n"
        "print((out - o).abs().max() < 1e-5, all(t.grad.isfinite().all() for t in (q, k, v)))"
    )
    out = run(sys.executable, "-c", "\n".join([*blocks, shown]), PYTHONPATH=str(installed))
    first, second = out.splitlines()[-2:]
    assert first == f"{installed}/lagraph/__init__.py True True"
    assert second == "tensor(True) True"


@pytest.mark.slow
def test_an_editable_install_is_the_checkout():
    """Away from the root, without it in the path, the parts come from here."""
    found = importlib.metadata.distributions(name="lagraph")  # the build folder's record, too
    records = [json.loads(dist.read_text("direct_url.json") or "{}") for dist in found]
    if not any(record.get("dir_info", {}).get("editable") for record in records):
        pytest.skip("lagraph is not installed as editable")
    code = (
        "import lagraph, lagraph.engines, lagraph.nodes, lagraph.ops\n"
        "for part in (lagraph, lagraph.engines, lagraph.nodes, lagraph.ops): print(part.__file__)"
    )
    found = run(sys.executable, "-c", code).splitlines()
    assert found == [str(ROOT / folder / "__init__.py") for folder in FOLDERS.values()]


@pytest.mark.parametrize("folder", ["engines", "nodes", "ops"])
@pytest.mark.parametrize("code", ["import {0}\n", "from {0} import x\n", "import {0}.x\n"])
def test_lint_bans_the_bare_folders(folder, code):
    pytest.importorskip("ruff")

    def lint(text):
        return subprocess.run(
            [sys.executable, "-m", "ruff", "check", "--no-cache", "--select", "TID251",
             "--output-format", "concise", "--stdin-filename", "lagraph/snippet.py", "-"],
            input=text, capture_output=True, text=True, check=False, cwd=ROOT,
        )  # fmt: skip

    refused = lint(code.format(folder))
    assert refused.returncode == 1
    assert f"import lagraph.{folder}: a bare import" in refused.stdout
    assert lint(code.format(f"lagraph.{folder}")).returncode == 0


def test_the_tested_versions_meet_the_requirements():
    """Every requirement but Triton, which torch pins, has a line at its lower bound or above."""
    pinned = dict(
        re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / "constraints.txt").read_text("utf-8"), re.M)
    )
    for text in CONFIG["project"]["dependencies"]:
        if text.startswith("triton"):
            continue
        name, lowest = re.match(r"([\w-]+)>=([\d.]+)", text).groups()
        assert [*map(int, pinned[name].strip(".").split("."))] >= [*map(int, lowest.split("."))]
