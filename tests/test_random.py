"""Random configurations of every family against the oracle, in all four directions.

hypothesis draws lengths, sizes, dtypes, gates and options from the whole support matrix and
shrinks what fails. The profile "ci" (the default) is derandomized; HYPOTHESIS_PROFILE=more looks
further.
"""

from __future__ import annotations

from types import MappingProxyType

import oracle
import pytest
from call import call
from cases import BF16, ENGINES, F16, F32, F64, STEP, Case, written
from draw import REGIMES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import FAMILIES
from table import param
from tolerance import check

LENGTHS = st.lists(st.sampled_from((0, 1, 2, 5, 17, 63, 64, 65, 70)), max_size=4).map(tuple)


@st.composite
def heads(draw, family):
    """(H, HK, HV): HK is H or HV, and the larger of H and HV is a multiple of the other."""
    few, times = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    if family == "mamba2":
        return few, few, few * times
    H, HV = draw(st.permutations((few, few * times)))
    return H, draw(st.sampled_from((H, HV))), HV


@st.composite
def options(draw, family):
    """Options that go together, and the optional ports that they allow."""
    chosen, params = {}, []
    if family == "mamba2":
        chosen["dt_softplus"] = draw(st.booleans())
        chosen["dt_min"] = draw(st.sampled_from((0.0, 0.01)))
        chosen["dt_max"] = draw(st.sampled_from((None, 0.5, 2.0)))
        params = draw(st.sets(st.sampled_from(("dt_bias", "d", "d channels", "z"))))
        params -= {"d"} if "d channels" in params else set()
    else:
        chosen["scale"] = draw(st.sampled_from((None, 1.0, -0.25)))
        chosen["use_qk_l2norm"] = draw(st.booleans())
        chosen["use_beta_sigmoid"] = draw(st.booleans())
        if chosen["use_beta_sigmoid"]:
            chosen["allow_neg_eigval"] = draw(st.booleans())
        form = draw(st.sampled_from(("log", "linear", "safe")))
        if form == "linear":
            chosen["gate_domain"] = "linear"
        if form == "safe":
            chosen["safe_gate"] = True
            params = draw(st.sets(st.sampled_from(("a_log", "dt_bias"))))
            if family in ("kda", "gdn2"):
                chosen["gate_lower_bound"] = draw(st.sampled_from((None, -1.5)))
        if family == "gdn2" and chosen["use_qk_l2norm"]:
            chosen["beta_guard"] = draw(st.booleans())
    if draw(st.booleans()):
        chosen["checkpoint_every_n_tokens"] = STEP[family] * draw(st.integers(1, 2))
    chosen["batch_invariant"] = draw(st.booleans())
    return MappingProxyType(chosen), tuple(sorted(params))


@st.composite
def cases(draw, family):
    """A case anywhere in the support matrix."""
    H, HK, HV = draw(heads(family))
    dtype = draw(st.sampled_from((F64, F32, BF16, F16)))
    narrow = st.sampled_from((None, F32, BF16, F16))
    chosen, params = draw(options(family))
    return Case(
        family, "random", lengths=draw(LENGTHS), H=H, HK=HK, HV=HV,
        K=draw(st.sampled_from((8, 16, 40))), V=draw(st.sampled_from((8, 16, 24))),
        n=draw(st.integers(1, 3)) if family == "gdp" else 1, dtype=dtype,
        gate=draw(st.sampled_from(REGIMES)), gate_dtype=draw(narrow),
        beta_dtype=draw(st.sampled_from((None, dtype))), state=draw(narrow), params=params,
        token_major=draw(st.booleans()), tail=draw(st.sampled_from((0, 0, 3))),
        d_final_state=draw(st.booleans()), options=chosen,
    )  # fmt: skip


@pytest.mark.parametrize("direction", oracle.DIRECTIONS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("engine", [param(engine) for engine in ENGINES])
def test_random(engine, family, direction):
    """Any configuration is as near to the truth as the contract says."""

    @settings(suppress_health_check=[HealthCheck.too_slow])
    @given(cases(family))
    def holds(case):
        fitted = engine.fit(case)
        if fitted is None:
            return
        x, chosen = fitted.draw(), fitted.call_options()
        want = oracle.run(family, direction, x, **chosen)
        placed = {name: t.to(engine.device) for name, t in x.items()}
        got = call(family, placed, direction, engine.plan(family, direction), **chosen)
        names = [n for n in want if n in got]
        check(
            {n: written(fitted, n, got[n]) for n in names},
            {n: written(fitted, n, want[n]) for n in names},
            fitted.dtype,
            engine.device,
        )

    holds()
