"""The Triton engine without a GPU: interpreted on the CPU, and compiled for GPUs elsewhere.

Both need processes of their own: the interpreter is switched on before Triton is imported, and
compiling replaces Triton's driver. What runs on a GPU is in `test_engines.py`, marked gpu.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent


def spawn(*command, **environment):
    """A Python process in this folder; its output, where it fails."""
    done = subprocess.run(
        [sys.executable, *command], cwd=HERE, capture_output=True, text=True,
        env={**os.environ, "TRITON_DEFAULT_FP_FUSION": "1", **environment},
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


@pytest.mark.slow
def test_interpreted():
    spawn(
        "-m", "pytest", "-q", "-o", "filterwarnings=default", "-p", "no:cacheprovider",
        "interpreted.py", TRITON_INTERPRET="1",
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["80", "90", "120"])
def test_compiles(arch, tmp_path):
    """One plan a family for an architecture, without large spills or too much shared memory."""
    script = HERE.parent / "benchmarks" / "compile.py"
    spawn(str(script), "--quick", "--arch", arch, TRITON_CACHE_DIR=str(tmp_path))
