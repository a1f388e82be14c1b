"""One small case a kernel of the Triton engine, to be run under a memory checker.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize.py [WORD ...]
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/sanitize.py forward

Words choose cases by what is in their names. Every tensor is an allocation of its own, so that one
element too far is seen. Not a test itself: pytest does not collect it.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch
from call import call
from cases import BF16, F32, STEP, Case, written
from oracle import DIRECTIONS, FAMILIES
from table import to


def cases():
    """Name, case and directions: between them they launch every kernel."""
    for family in FAMILIES:
        mamba2 = family == "mamba2"
        n = 2 if family == "gdp" else 1
        params = ("d channels", "z", "dt_bias") if mamba2 else ("a_log", "dt_bias")
        options = {} if mamba2 else {"safe_gate": True, "use_qk_l2norm": True}
        if family == "gdn2":
            options["beta_guard"] = True
        grouped = {"H": 1, "HV": 2, "K": 64, "V": 64, "n": n}
        # Empty, one token, off a chunk's edge, rows past the end; parameters, norms and groups.
        yield "ragged", Case(
            family, "", lengths=(1, 0, 70, 33), tail=9, dtype=BF16, params=params,
            options=options, **grouped,
        ), DIRECTIONS  # fmt: skip
        yield "fp32", Case(
            family, "", lengths=(17, 64), dtype=F32, params=params, options=options,
            H=2, K=32, V=16, n=n,
        ), DIRECTIONS  # fmt: skip
        every = STEP[family]
        yield "checkpoints", Case(
            family, "", lengths=(every + 3, every), dtype=BF16, state=BF16,
            options={"checkpoint_every_n_tokens": every}, **grouped,
        ), ("forward", "backward")  # fmt: skip
        # One head over many chunks: what is split where the device would idle.
        yield (
            "long",
            Case(family, "", lengths=(2050,), dtype=BF16, H=1, K=64, V=64, n=n),
            DIRECTIONS,
        )


def pool(family):
    """A pool with padding, and rows that nobody may touch."""
    case = Case(family, "", lengths=(5, 9, 64), H=2, K=64, V=64, dtype=BF16, n=1)
    x = case.draw()
    x["initial_state"] = torch.randn(6, 2, 64, 64)
    x["state_indices"] = torch.tensor([4, -1, 0], dtype=torch.int32)
    return case, x


def main(words):
    chosen = []
    for what, case, directions in cases():
        chosen += [(f"{case.family} {direction} {what}", case, case.draw(), direction)
                   for direction in directions]  # fmt: skip
    for family in FAMILIES:
        case, x = pool(family)
        chosen.append((f"{family} forward pool", case, x, "forward"))
    bad = 0
    for name, case, x, direction in chosen:
        if not all(word in name for word in words):
            continue
        kind = "_summary" if "summary" in direction else ""
        plan = f"{case.family}{kind}_triton"
        got = call(case.family, to("cuda", x), direction, plan, **case.call_options())
        torch.cuda.synchronize()
        wrong = [key for key, value in got.items()
                 if not torch.isfinite(written(case, key, value)).all()]  # fmt: skip
        bad += bool(wrong)
        print(f"{name}: {'not finite: ' + ', '.join(wrong) if wrong else 'ran'}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
