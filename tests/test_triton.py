"""The Triton engine without a GPU: interpreted on the CPU, and compiled for GPUs elsewhere.

Both need processes of their own: the interpreter is switched on before Triton is imported, and
compiling replaces Triton's driver. What runs on a GPU is in `test_engines.py`, marked gpu.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent
COMPILE = HERE.parent / "benchmarks" / "compile.py"
INTERPRET = ("-m", "pytest", "-q", "-o", "filterwarnings=default", "-p", "no:cacheprovider",
             "interpreted.py", "-k")  # fmt: skip

# What runs in a process of its own: arguments of Python. Two shares take about as long.
JOBS = {
    "interpreted kda and gdp": (*INTERPRET, "kda or gdp"),
    "interpreted gdn, gdn2 and mamba2": (*INTERPRET, "not (kda or gdp)"),
    "compiled for sm80": (str(COMPILE), "--quick", "--arch", "80"),
    "compiled for sm90": (str(COMPILE), "--quick", "--arch", "90"),
    "compiled for sm120": (str(COMPILE), "--quick", "--arch", "120"),
}


@pytest.fixture(scope="module")
def jobs(request, tmp_path_factory):
    """The processes of the tests that were chosen, two at a time; each on one thread."""

    def spawn(job):
        extra = {"OMP_NUM_THREADS": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
        extra["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
        if job.startswith("interpreted"):
            extra["TRITON_INTERPRET"] = "1"
        return subprocess.run([sys.executable, *JOBS[job]], cwd=HERE, capture_output=True,
                              text=True, check=False, env={**os.environ, **extra})  # fmt: skip

    wanted = {item.callspec.params["job"] for item in request.session.items
              if item.module is request.module}  # fmt: skip
    with ThreadPoolExecutor(2) as pool:
        yield {job: pool.submit(spawn, job) for job in JOBS if job in wanted}


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_in_a_process_of_its_own(jobs, job):
    """Interpreted results agree with the oracle; a plan of every family compiles for an
    architecture, without large spills or too much shared memory."""
    done = jobs[job].result()
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
