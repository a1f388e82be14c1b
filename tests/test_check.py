"""The check of the Triton compiler: when it runs, how often, and what it says; on a CPU.

That the probe's kernel computes what it is compared with runs in Triton's interpreter, in a
process of its own; on a GPU every plan of `test_engines.py` goes through the check.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from lagraph.engines.triton import check
from lagraph.errors import MissingBackend, NotSupported

HERE = Path(__file__).parent


class Probe:
    """Stands in for the device: counts its runs."""

    def __init__(self, error=0.0):
        self.error, self.runs = error, []

    def __call__(self, index):
        self.runs.append(index)
        return self.error


def problem(index=0, arch=90):
    return SimpleNamespace(family="gdn", index=index, arch=arch)


@pytest.fixture(autouse=True)
def affected_device(monkeypatch):
    """An SM90 device under a Triton that miscompiles; nothing is remembered."""
    monkeypatch.setattr(check, "_VERDICTS", {})
    monkeypatch.setattr(check, "_runs_here", lambda problem: True)
    monkeypatch.setattr("triton.__version__", "3.6.0")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


@pytest.mark.parametrize(
    ("version", "arch", "is_hit"),
    [
        ("3.3.1", 90, False), ("3.4.0", 90, True), ("3.6.0", 90, True), ("3.7.0", 90, True),
        ("3.7.1", 90, False), ("3.9.0", 90, False), ("3.6.0+git1234abcd", 90, True),
        ("3.6.0", 80, False), ("3.6.0", 100, False), ("3.6.0", 120, False),
    ],
)  # fmt: skip
def test_affected(version, arch, is_hit):
    assert check.affected(version, arch) is is_hit


def test_once_for_each_device():
    probe = Probe()
    for index in (0, 0, 1, 0, 1):
        check.check_compiler(problem(index), probe)
    assert probe.runs == [0, 1]


@pytest.mark.parametrize("error", [0.6, float("inf"), float("nan")])
def test_a_wrong_product_refuses_every_plan(error):
    probe = Probe(error)
    for _ in range(3):
        with pytest.raises(MissingBackend, match=r"gdn_triton: .*Triton 3\.6\.0.*3\.7\.1 or newer"):
            check.check_compiler(problem(), probe)
    assert probe.runs == [0]
    check.check_compiler(problem(index=1), Probe())  # another device is judged for itself


def test_not_affected_runs_nothing(monkeypatch):
    monkeypatch.setattr("triton.__version__", "3.7.1")
    probe = Probe(1.0)
    check.check_compiler(problem(), probe)
    monkeypatch.setattr("triton.__version__", "3.6.0")
    check.check_compiler(problem(index=1, arch=80), probe)
    assert probe.runs == []


def test_compiling_for_elsewhere_does_not_pass_for_a_check(monkeypatch):
    """A plan that is only compiled leaves the device itself unchecked."""
    check.check_compiler(problem(arch=80), Probe(1.0))
    with pytest.raises(MissingBackend):
        check.check_compiler(problem(arch=90), Probe(1.0))


def test_a_capture_is_refused_and_forgotten(monkeypatch):
    probe = Probe()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(NotSupported, match="before the capture"):
        check.check_compiler(problem(), probe)
    assert probe.runs == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    check.check_compiler(problem(), probe)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    check.check_compiler(problem(), probe)  # checked: captures are nobody's business
    assert probe.runs == [0]


def test_a_probe_that_fails_is_run_again():
    def broken(index):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        check.check_compiler(problem(), broken)
    probe = Probe()
    check.check_compiler(problem(), probe)
    assert probe.runs == [0]


def test_threads_run_one_probe():
    started, go = threading.Barrier(9), threading.Event()
    probe = Probe()

    def slow(index):
        go.wait(5)
        return probe(index)

    def first():
        started.wait()
        check.check_compiler(problem(), slow)

    threads = [threading.Thread(target=first) for _ in range(8)]
    for thread in threads:
        thread.start()
    started.wait()
    go.set()
    for thread in threads:
        thread.join()
    assert probe.runs == [0]


def test_nothing_runs_without_a_gpu(monkeypatch):
    """Without the stand-ins: on a machine without a GPU no probe is run."""
    monkeypatch.undo()
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert not check._runs_here(problem())


INTERPRETED = """
import torch
from lagraph.engines.triton import check
tiles = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(0)).half() / 4
found = check.deviation(tiles)
assert found < 1e-3, found
right = check.expected
check.expected = lambda a, b, c: right(a, b, c).mT  # what a transposed accumulator would do
assert check.deviation(tiles) > check.BOUND
"""


def test_the_probe_computes_what_it_is_compared_with():
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], cwd=HERE, capture_output=True, text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
