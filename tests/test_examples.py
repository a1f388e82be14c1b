"""Every example runs from another folder, in a process of its own, and says what it should."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

# What each example is run with and what its output must show.
RUNS = {
    "graph_gdn": ([], ["gdn_eager: serves", r"lengths \[17\]: O \[17, 4, 64\]", "same graph True"]),
    "pin_plan": ([], [r"ran gdn_eager\[chunk=32\]", r"chunk=7\] is refused: .*chunk is one of"]),
    "op_autograd": ([], ["gradient of beta", "in two pieces"]),
    "mirror_graph": ([], ["plan gdn_", r"final_state \[3, 4, 128, 128\]"]),
    "mirror_ops": ([], [r"gated_delta_net \[4096, 16, 128\]", r"mamba2 \[4096, 16, 64\]"]),
    "train_chars": (["--quick"], [r"step +0 +\d\.\d\d", "And God said"]),
}


def run(name, *args, **environment):
    """The example's standard output."""
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", str(EXAMPLES / f"{name}.py"), *args],
        capture_output=True, text=True, check=False, cwd="/", env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(RUNS)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_example(name):
    args, shown = RUNS[name]
    out = run(name, *args)
    for pattern in shown:
        assert re.search(pattern, out), f"{pattern!r} is not in:\n{out}"


@pytest.mark.slow
def test_two_pieces_agree_with_the_whole():
    """`op_autograd` carries the state over a cut; its own figures say how well."""
    out = run("op_autograd")
    differences = [float(text) for text in re.findall(r"by (\d\.\de[+-]\d+)", out)]
    assert len(differences) == 2
    assert max(differences) < 1e-5


@pytest.mark.slow
def test_training_learns():
    """A uniform guess costs 4.1 nats; 40 steps go far below."""
    out = run("train_chars", "--steps", "40")
    losses = [float(text) for text in re.findall(r"step +\d+ +(\d\.\d\d)", out)]
    assert losses[0] > 3.0
    assert losses[-1] < 2.3
    assert all(later < earlier for earlier, later in zip(losses, losses[2:], strict=False))


@pytest.mark.slow
def test_training_needs_no_progress_bar(tmp_path):
    """Without tqdm the loop is the same."""
    (tmp_path / "tqdm.py").write_text("raise ImportError('hidden')\n", encoding="utf-8")
    assert "And God said" in run("train_chars", "--quick", PYTHONPATH=str(tmp_path))


def test_the_text_is_public_domain_and_said_so():
    data = EXAMPLES / "data"
    assert {path.name for path in data.iterdir()} == {"NOTICE.md", "genesis.txt"}
    assert "public domain" in (data / "NOTICE.md").read_text("utf-8")
    assert 50_000 < (data / "genesis.txt").stat().st_size < 200_000


@pytest.mark.parametrize("name", RUNS)
def test_an_example_says_how_to_run_it(name):
    text = (EXAMPLES / f"{name}.py").read_text("utf-8")
    assert f"python examples/{name}.py" in text.split('"""')[1]
    assert text.count("def main() -> None:") == 1
