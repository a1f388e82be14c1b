"""Long sequences in segments: the prediction that decides, and the kernels in the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lagraph.engines.triton.config import GAIN, SHORTEST, Tile, Work, schedule

pytest.importorskip("triton")

FEW, MANY = Tile(64, 4, 3, 1), Tile(128, 8, 3, 1)


def work(heads, sms=132, segment=None, few=FEW, many=MANY, **fields):
    given = {"K": 128, "V": 128, "delta": True, "weight": 1.0, "slow": 1.0}
    return Work(heads=heads, sms=sms, segment=segment, few=few, many=many, **given | fields)


@pytest.mark.slow
def test_interpreted():
    """Cut sequences agree with the oracle: a process that interprets from the start."""
    command = [sys.executable, "-m", "pytest", "-q", "-o", "filterwarnings=default",
               "-p", "no:cacheprovider", "interpreted_segments.py"]  # fmt: skip
    extra = {"TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True,
                          check=False, env={**os.environ, **extra})  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


@pytest.mark.parametrize(
    ("heads", "chunks", "sequences", "cut"),
    [(32, 64, 8, False), (64, 16, 8, False), (32, 512, 1, True), (8, 512, 1, True),
     (8, 512, 8, False), (64, 512, 1, False), (8, 48, 1, False), (8, 64, 1, True),
     (1, 1 << 14, 1, True)],
)  # fmt: skip
def test_cut_where_few_slices_leave_sms_idle(heads, chunks, sequences, cut):
    assert bool(schedule(work(heads), chunks, sequences).span) == cut


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("resident", [1, 2])
def test_a_cut_is_a_cut(delta, resident):
    """First segments are the longest, none is too short, all chunks are in one, and it pays."""
    tile = FEW._replace(resident=resident)
    for heads in (1, 2, 3, 8, 20, 31, 64, 131):
        for chunks in (1, 15, 48, 49, 64, 77, 512, 1000, 20000):
            made = work(heads, delta=delta, few=tile)
            got = schedule(made, chunks, 1)
            whole = schedule(made._replace(segment=0), chunks, 1)
            assert (whole.lead, whole.span) == (0, 0)
            if got.span:
                assert got.lead >= got.span >= SHORTEST
                assert got.lead + got.span < chunks
                assert got.time < GAIN * whole.time
            else:
                assert got == whole


def test_slices_are_narrow_while_all_run_at_once():
    for heads, sequences, tile in ((66, 1, FEW), (33, 2, FEW), (67, 1, MANY), (32, 8, MANY)):
        assert schedule(work(heads, segment=0), 64, sequences).tile == tile


def test_a_knob_decides():
    assert schedule(work(64, segment=16), 8, 9)[1:3] == (16, 16)
    assert schedule(work(8, segment=0), 512, 1).span == 0
