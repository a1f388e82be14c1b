"""The Triton engine's two backward directions against the fp64 oracle, in Triton's interpreter.

The interpreter is chosen when Triton is imported, so the whole table runs in one process of its
own; it prints one line of errors a case, which the tests here read. It multiplies bf16 wrongly and
hides tf32: what is checked is the algebra, in fp32 and fp16, on shapes that are ragged, empty and
grouped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

F16, F32 = torch.float16, torch.float32
HERE = Path(__file__).resolve().parent

NORMED = {"use_qk_l2norm": True, "use_beta_sigmoid": True}
BOUNDED = {"safe_gate": True}
GATED = ("a_log", "dt_bias")

# name: (family, arguments of `draw`, options of the node)
CASES = {
    "gdn": ("gdn", {"lengths": (21, 0, 17), "state": F32}, {}),
    "gdn groups": ("gdn", {"lengths": (20, 3), "H": 1, "HV": 2, "tail": 2},
                   {**NORMED, "allow_neg_eigval": True}),
    "gdn value groups": ("gdn", {"lengths": (18,), "H": 2, "HK": 2, "HV": 1}, {}),
    "gdn safe": ("gdn", {"lengths": (20,), "params": GATED}, BOUNDED),
    "gdn linear": ("gdn", {"lengths": (20,), "gate": "mixed"}, {"gate_domain": "linear"}),
    "gdn checkpoints": ("gdn", {"lengths": (40, 5), "state": F32},
                        {"checkpoint_every_n_tokens": 32}),
    "gdn fp16": ("gdn", {"lengths": (21,), "dtype": F16}, {}),
    "gdn deep": ("gdn", {"lengths": (20,), "gate": "deep"}, {}),
    "kda": ("kda", {"lengths": (21, 0, 37), "state": F32}, {}),
    "kda mixed": ("kda", {"lengths": (40, 17), "gate": "mixed"}, {}),
    "kda deep": ("kda", {"lengths": (20,), "gate": "deep", "K": 32}, {}),
    "kda safe": ("kda", {"lengths": (20,), "H": 1, "HV": 2, "params": GATED},
                 {**NORMED, **BOUNDED}),
    "kda linear": ("kda", {"lengths": (20,), "gate": "mixed"}, {"gate_domain": "linear"}),
    "kda checkpoints": ("kda", {"lengths": (70,), "H": 1}, {"checkpoint_every_n_tokens": 64}),
    "gdn2": ("gdn2", {"lengths": (21, 0, 17), "state": F32}, {}),
    "gdn2 safe": ("gdn2", {"lengths": (20,), "H": 2, "HV": 1, "params": GATED},
                  {**NORMED, **BOUNDED}),
    "gdn2 guard": ("gdn2", {"lengths": (20,), "gate": "mixed"},
                   {**NORMED, "beta_guard": True}),
    "gdp": ("gdp", {"lengths": (21, 0, 9), "n": 2, "state": F32}, {"num_householder": 2}),
    "gdp tokens": ("gdp", {"lengths": (13, 5), "n": 3, "token_major": True},
                   {**NORMED, "num_householder": 3}),
    "mamba2": ("mamba2", {"lengths": (21, 0, 17), "state": F32}, {}),
    "mamba2 gated": ("mamba2", {"lengths": (20, 5), "H": 1, "HV": 2,
                                "params": ("d", "z", "dt_bias")}, {}),
    "mamba2 channels": ("mamba2", {"lengths": (20,), "params": ("d channels",)},
                        {"dt_min": 0.1, "dt_max": 0.5, "dt_softplus": False}),
    "kda mixed channels": ("kda", {"lengths": (40, 17), "gate": "mixed", "K": 64}, {}),
    "mamba2 group": ("mamba2", {"lengths": (70, 0, 33), "H": 1, "HV": 4, "dtype": F16, "tail": 2,
                                "params": ("d", "z", "dt_bias"), "state": F32}, {}),
    "mamba2 groups": ("mamba2", {"lengths": (70, 5), "H": 2, "HV": 6, "dtype": F16, "state": F32,
                                 "params": ("d channels", "z")},
                      {"checkpoint_every_n_tokens": 64}),
    "mamba2 parts": ("mamba2", {"lengths": (37,), "H": 1, "HV": 42, "params": ("d",)},
                     {"dt_min": 0.1, "dt_max": 0.5, "dt_softplus": False}),
    "mamba2 chunks": ("mamba2", {"lengths": (150, 0, 70), "state": F32, "dtype": F16}, {}),
    "mamba2 rows": ("mamba2", {"lengths": (150, 66), "state": F32, "dtype": F16},
                    {"checkpoint_every_n_tokens": 64}),
    "gdn wide": ("gdn", {"lengths": (70, 33), "K": 128, "V": 128, "H": 1, "HV": 2, "dtype": F16},
                 {}),
    "gdn slices": ("gdn", {"lengths": (40,), "K": 64, "V": 256, "dtype": F16}, {}),
}  # fmt: skip
# What is not the default.
GROUPED = {"gradient_heads": 20}
KNOBS = {f"mamba2 {what}": GROUPED for what in ("group", "groups", "parts")}
DIRECTIONS = ("backward", "summary_backward")
LIMIT = {F32: 1e-4, F16: 5e-3}

TRAITS = {
    "gdn": {"gate": "head"},
    "kda": {"gate": "key"},
    "gdn2": {"gate": "key", "erase": "key", "write": "value"},
    "gdp": {"gate": "head", "substeps": True},
    "mamba2": {"gate": "head", "delta": False, "erase": None, "write": None},
}
COMMON = "q k v g beta cu_seqlens dO state_checkpoints initial_state d_final_state a_log dt_bias"
INPUTS = {
    "backward": {
        "gdn2": COMMON.replace("beta", "beta w"),
        "mamba2": "q k v g a cu_seqlens dO state_checkpoints initial_state d_final_state dt_bias "
        "d z O_pre",
    },
    "summary_backward": {"mamba2": "q k g a cu_seqlens dO d_final_state dt_bias"},
}
OTHERWISE = {
    "backward": COMMON,
    "summary_backward": "q k g beta cu_seqlens dO d_final_state a_log dt_bias",
}
DEFAULTS = {
    "use_qk_l2norm": False, "use_beta_sigmoid": False, "allow_neg_eigval": False,
    "safe_gate": False, "gate_domain": "log", "gate_lower_bound": -5.0, "beta_guard": False,
    "checkpoint_every_n_tokens": 0, "dt_softplus": True, "dt_min": 0.0, "dt_max": float("inf"),
    "batch_invariant": False,
}  # fmt: skip


def run(name, direction):
    """Relative L2 error of every output of a case; needs the interpreter."""
    import oracle
    from draw import draw

    from lagraph.engines.triton.engine import ENGINE
    from lagraph.problem import Problem, Traits

    family, sizes, options = CASES[name]
    x = draw(family, **{"dtype": F32, **sizes}, options=options)
    lengths, tokens, heads = sizes["lengths"], len(x["g"]), x["g"].shape[1]
    K, V = x["q"].shape[-1], x["v"].shape[-1]
    want = oracle.run(family, direction, x, **options)
    if every := options.get("checkpoint_every_n_tokens"):
        rows = oracle.forward(family, x, **options)["state_checkpoints"]
        x["state_checkpoints"] = rows.to(x["q"].dtype)
    shapes = {gradient: x[of] for of, gradient in oracle.GRADIENTS.items() if of in x}
    got = {gradient: torch.full_like(like, float("nan")) for gradient, like in shapes.items()}
    if direction == "summary_backward":
        full = (len(lengths), heads)
        got["d_initial_state"] = torch.full((*full, V, K), float("nan"))
        extra = () if family == "mamba2" else (K, K)
        got["transition"] = torch.full((*full, *extra), float("nan"))
    outputs = tuple(want) if direction == "summary_backward" else tuple(got)
    ports = INPUTS[direction].get(family, OTHERWISE[direction]).split()
    problem = Problem(
        family,
        direction,
        Traits(**TRAITS[family]),
        {
            "H": x["q"].shape[1], "HK": x["k"].shape[-2], "HV": x["v"].shape[-2], "HO": heads,
            "K": K, "V": V, **({"n": sizes["n"]} if family == "gdp" else {}),
        },
        tuple(ports),
        outputs,
        {port: x[port].dtype for port in ports if port in x},
        SimpleNamespace(**{
            **DEFAULTS, **options, "checkpoint_every_n_tokens": every or 0,
            "scale": K**-0.5 if family != "mamba2" else 1.0,
        }),
        ranks={port: x[port].dim() for port in ports if port in x},
        device="cuda",
        arch=90,
    )  # fmt: skip
    plan = ENGINE.plan(problem, KNOBS.get(name, {}))
    plan.run([x.get(port) for port in ports], [got[output] for output in outputs])
    errors = {}
    for output, truth in want.items():
        value = got[output].double()
        if len(value) in (tokens, tokens * sizes.get("n", 1)) and output in (
            "dQ", "dK", "dV", "dG", "dBeta", "dW", "dZ"
        ):  # fmt: skip
            end = sum(lengths) * len(value) // tokens
            value, truth = value[:end], truth[:end]
        size = truth.norm().item()
        error = (value - truth).norm().item()
        errors[output] = error / size if size > 0.0 else error
    return errors


@pytest.fixture(scope="module")
def table():
    """Errors of every case and direction, from one process that interprets."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
    got = subprocess.run(
        [sys.executable, str(Path(__file__).resolve())],
        cwd=HERE, env=env, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    rows = [json.loads(line) for line in got.stdout.splitlines() if line.startswith("{")]
    return {(row["case"], row["direction"]): row for row in rows}, got.stderr[-2000:]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", CASES)
def test_against_the_oracle(table, name, direction):
    """Every gradient is within the bound of its dtype, and none is missing."""
    pytest.importorskip("triton")
    rows, log = table
    assert (name, direction) in rows, log
    row = rows[name, direction]
    assert "error" not in row, row
    limit = LIMIT[CASES[name][1].get("dtype", F32)]
    bad = {output: error for output, error in row["errors"].items() if not error <= limit}
    assert not bad, f"relative errors {bad}, allowed {limit:.0e}"


def main():
    """Prints one line of JSON for every case and direction."""
    from quicken import quicken
    from tensorfloat import cut

    torch.set_num_threads(1)
    quicken()
    cut()
    for name in CASES:
        for direction in DIRECTIONS:
            row = {"case": name, "direction": direction}
            try:
                row["errors"] = run(name, direction)
            except Exception as error:
                row["error"] = repr(error)[:500]
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
