"""The table of cases that every engine is run through, in all four directions.

A `Case` says everything about a call: sizes, dtypes, gates, options. `CASES` lists them with
readable ids ("gdn-safe gate"); sizes are small, so that the whole table runs on two cores in a
minute or two. `fit` moves a case to the head dims and dtypes that an engine serves.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import oracle
import torch
from draw import REGIMES, draw
from oracle import FAMILIES

from lagraph import registry

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

RAGGED = (5, 0, 64, 1, 0, 33, 0)
MIXED = (70, 0, 13)  # the lengths of cases that vary something else


@dataclass(frozen=True, eq=False)
class Case:
    """One call. `what` tells cases of a family apart; for the other fields see `draw.draw`."""

    family: str
    what: str
    lengths: tuple[int, ...] = MIXED
    H: int = 2
    HK: int | None = None
    HV: int | None = None
    K: int = 16
    V: int = 24
    n: int = 1
    dtype: torch.dtype = F32
    gate: str = "slow"
    gate_dtype: torch.dtype | None = None
    beta_dtype: torch.dtype | None = None
    state: torch.dtype | None = F32
    params: tuple[str, ...] = ()
    token_major: bool = False
    tail: int = 0
    index_dtype: torch.dtype = torch.int32
    d_final_state: bool = True
    options: MappingProxyType[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def id(self) -> str:
        return f"{self.family}-{self.what}"

    @property
    def end(self) -> int:
        """Tokens that belong to a sequence; rows past it are unspecified."""
        return sum(self.lengths)

    def call_options(self) -> dict[str, Any]:
        """Options of the call, with what the other fields imply."""
        options = {"output_final_state": True, **self.options}
        if self.family == "gdp":
            options["num_householder"] = self.n
        return options

    def draw(self) -> dict[str, torch.Tensor]:
        """Its inputs, the same each time."""
        state = F64 if self.state is not None and self.dtype == F64 else self.state
        return draw(
            self.family, lengths=self.lengths, H=self.H, HK=self.HK, HV=self.HV, K=self.K,
            V=self.V, n=self.n, dtype=self.dtype, gate=self.gate, gate_dtype=self.gate_dtype,
            beta_dtype=self.beta_dtype, state=state, params=self.params,
            token_major=self.token_major, tail=self.tail, index_dtype=self.index_dtype,
            options=dict(self.options), d_final_state=self.d_final_state,
        )  # fmt: skip

    def truth(self, direction: str) -> dict[str, torch.Tensor]:
        """What the oracle says; computed once."""
        return _truth(self, direction)


@lru_cache(maxsize=512)
def _truth(case, direction):
    options = case.call_options()
    return oracle.run(case.family, direction, case.draw(), **options)


def written(case, name, tensor):
    """The part of an output or gradient that is specified: not what lies past the end."""
    if name in ("O", "O_pre", "dQ", "dG", "dZ", "dW"):
        return tensor[: case.end]
    if name in ("dK", "dV", "dBeta"):
        expanded = case.family == "gdp" and not case.token_major
        return tensor[: case.end * (case.n if expanded else 1)]
    if name == "state_checkpoints":
        every = case.options.get("checkpoint_every_n_tokens", 0)
        if not every:
            return tensor
        return tensor[: sum(-(-length * case.n // every) for length in case.lengths)]
    return tensor


# The engines that a case can be run on -------------------------------------------------------


@dataclass(frozen=True)
class Engine:
    """What an engine promises to serve, from the contract's page and not from its own table.

    sizes: head dims that stand in for those of a case, smaller first; None keeps the case's.
    """

    name: str
    device: str
    dtypes: tuple[torch.dtype, ...]
    sizes: tuple[int, int] | None = None

    @property
    def id(self) -> str:
        return f"{self.name}-{self.device}"

    def plan(self, family: str, direction: str = "forward") -> str:
        """The plan name that pins this engine."""
        kind = "_summary" if direction.startswith("summary") else ""
        return f"{family}{kind}_{self.name}"

    def split_plan(self, family: str) -> str:
        """The same with products in two parts, for strengths up to 2 without sigmoid."""
        split = {"triton": f"{family}_triton[split=2]"}
        split["frost"] = f"{family}_frost[split=1],{split['triton']}"
        return split.get(self.name, self.plan(family))

    def fit(self, case: Case) -> Case | None:
        """The case as this engine serves it; None where its dtype has no counterpart."""
        if self.sizes is None:
            return case if case.dtype in self.dtypes else None
        if case.dtype == F64:
            return None
        dtype = case.dtype if case.dtype in self.dtypes else BF16
        small, large = self.sizes
        return replace(
            case,
            K=small if case.K <= 16 else large,
            V=small if case.V <= 16 else large,
            dtype=dtype,
        )


EAGER = Engine("eager", "cpu", (F64, F32, BF16, F16))
PROMISED = (
    EAGER,
    Engine("eager", "cuda", (F64, F32, BF16, F16)),
    Engine("triton", "cuda", (F32, BF16, F16), (16, 32)),
    Engine("frost", "cuda", (BF16, F16), (64, 128)),
)
ENGINES = tuple(e for e in PROMISED if e.name in {row.name for row in registry.ENGINES})


# The table -----------------------------------------------------------------------------------


def _of(family, what, **fields):
    options = MappingProxyType(fields.pop("options", {}))
    if family == "gdp":
        fields.setdefault("n", 2)
    return Case(family, what, options=options, **fields)


def _lengths(family):
    """Every length class: nothing, one token, the edges of a chunk, ragged with empties."""
    yield _of(family, "no sequences", lengths=())
    yield _of(family, "no tokens", lengths=(0,))
    yield _of(family, "only empty sequences", lengths=(0, 0, 0))
    for length in (1, 2, 15, 16, 17, 63, 64, 65, 129):
        yield _of(family, f"T={length}", lengths=(length,))
    yield _of(family, "T=1000", lengths=(1000,), H=1, K=8, V=8)
    yield _of(family, "ragged", lengths=RAGGED)
    yield _of(family, "ragged, no state", lengths=RAGGED, state=None)
    yield _of(family, "many short", lengths=(1, 2, 3, 1, 1, 7, 1, 2))
    yield _of(family, "ends early", lengths=(7, 0, 60), tail=9)
    yield _of(family, "nothing but a tail", lengths=(0,), tail=5)
    yield _of(family, "int64 offsets", lengths=(3, 0, 70), index_dtype=torch.int64)


def _heads(family):
    """Grouped heads: HK = H or HV, more query heads or more value heads."""
    if family == "mamba2":
        yield _of(family, "one group", H=1, HV=4)
        yield _of(family, "two groups", H=2, HV=6)
        return
    yield _of(family, "grouped queries and keys", H=2, HK=2, HV=4)
    yield _of(family, "grouped queries", H=1, HK=3, HV=3)
    yield _of(family, "grouped keys and values", H=4, HK=2, HV=2)
    yield _of(family, "grouped values", H=4, HK=4, HV=1)
    yield _of(family, "one head", H=1)


def _dtypes(family):
    """Token, gate, beta and state dtypes, and that final_state follows initial_state."""
    for dtype in (F64, BF16, F16):
        name = str(dtype).removeprefix("torch.")
        yield _of(family, name, dtype=dtype)
        yield _of(family, f"{name}, no state", dtype=dtype, state=None)
    yield _of(family, "bf16 everywhere", dtype=BF16, gate_dtype=BF16, beta_dtype=BF16, state=BF16)
    yield _of(family, "fp16 gates", dtype=BF16, gate_dtype=F16)
    yield _of(family, "fp16 state", dtype=BF16, state=F16)
    yield _of(family, "bf16 gates and state, fp32 tokens", gate_dtype=BF16, state=BF16)


def _gates(family):
    """Every gate regime, in every form of the gate."""
    for regime in REGIMES:
        if regime != "slow":
            yield _of(family, f"{regime} gates", gate=regime)
        if family == "mamba2":
            yield _of(family, f"{regime} gates, dt_bias", gate=regime, params=("dt_bias",))
        else:
            yield _of(
                family, f"{regime} linear gates", gate=regime, options={"gate_domain": "linear"}
            )
            yield _of(
                family, f"{regime} safe gates", gate=regime, params=("a_log", "dt_bias"),
                options={"safe_gate": True},
            )  # fmt: skip
    yield _of(family, "mixed gates, fp64", gate="mixed", dtype=F64)
    yield _of(family, "mixed gates, bf16", gate="mixed", dtype=BF16)


def _delta_options(family):
    """The options of the delta-rule families, alone and together."""
    safe = {"safe_gate": True}
    neg = {"use_beta_sigmoid": True, "allow_neg_eigval": True}
    yield _of(family, "scale", options={"scale": -0.7})
    yield _of(family, "scale 0", options={"scale": 0.0})
    yield _of(family, "l2norm", options={"use_qk_l2norm": True})
    yield _of(family, "l2norm, fp64", dtype=F64, options={"use_qk_l2norm": True})
    yield _of(family, "beta sigmoid", options={"use_beta_sigmoid": True})
    yield _of(family, "negative eigenvalues", options=neg)
    yield _of(family, "safe gate, bare", options=safe)
    yield _of(family, "safe gate, a_log", params=("a_log",), options=safe)
    yield _of(family, "safe gate, dt_bias", params=("dt_bias",), options=safe)
    yield _of(family, "no d_final_state", d_final_state=False)
    if family in ("kda", "gdn2"):
        yield _of(
            family, "gate bound", gate="mixed", params=("a_log", "dt_bias"),
            options=safe | {"gate_lower_bound": -2.5},
        )  # fmt: skip
    yield _of(
        family, "everything", H=2, HK=2, HV=4, gate="mixed", params=("a_log", "dt_bias"),
        options=safe | neg | {"use_qk_l2norm": True, "scale": 0.3},
    )  # fmt: skip
    yield _of(
        family, "everything, bf16", H=2, HK=2, HV=4, gate="mixed", params=("a_log", "dt_bias"),
        dtype=BF16, gate_dtype=BF16, state=BF16,
        options=safe | neg | {"use_qk_l2norm": True, "scale": 0.3},
    )  # fmt: skip
    if family == "gdn2":
        norm = {"use_qk_l2norm": True, "beta_guard": True}
        for dtype in (F64, F32, BF16, F16):
            name = str(dtype).removeprefix("torch.")
            yield _of(family, f"guard, {name}", dtype=dtype, options=norm)
            yield _of(
                family, f"guard, negative eigenvalues, {name}", dtype=dtype, options=norm | neg
            )
        yield _of(family, "guard, gates 0", gate="zero", options=norm)
        yield _of(family, "guard, mixed gates", gate="mixed", options=norm)
        yield _of(
            family, "guard, linear gates", gate="mixed", options=norm | {"gate_domain": "linear"}
        )
        yield _of(
            family, "guard, safe gate", gate="mixed", params=("a_log", "dt_bias"),
            options=norm | safe,
        )  # fmt: skip
    if family == "gdp":
        for n in (1, 3, 4):
            yield _of(family, f"n={n}", n=n)
        yield _of(family, "n=3, ragged", n=3, lengths=RAGGED)
        yield _of(family, "token-major", n=3, token_major=True)
        yield _of(family, "token-major, n=1", n=1, token_major=True)
        yield _of(family, "token-major, grouped", n=2, H=2, HK=2, HV=4, token_major=True)
        yield _of(family, "token-major, ends early", n=2, token_major=True, tail=5)
        yield _of(
            family, "token-major, everything", n=2, token_major=True, gate="mixed",
            params=("a_log", "dt_bias"), options=safe | neg | {"use_qk_l2norm": True},
        )  # fmt: skip


def _mamba2_options(family):
    """The options of Mamba-2: dt transforms and clamps, D, z."""
    bias = ("dt_bias",)
    yield _of(family, "D", params=("d",))
    yield _of(family, "D per channel", params=("d channels",))
    yield _of(family, "z", params=("z",))
    yield _of(family, "z, bf16", params=("z",), dtype=BF16)
    yield _of(family, "D and z", params=("d", "z", "dt_bias"))
    yield _of(family, "D and z, ends early", params=("d channels", "z"), tail=5)
    yield _of(family, "D and z, bf16", params=("d channels", "z", "dt_bias"), dtype=BF16)
    yield _of(family, "D and z, fp64", params=("d", "z", "dt_bias"), dtype=F64)
    yield _of(family, "no softplus", options={"dt_softplus": False})
    yield _of(family, "no softplus, dt_bias", params=bias, options={"dt_softplus": False})
    yield _of(family, "dt_min", gate="mixed", params=bias, options={"dt_min": 0.1})
    yield _of(family, "dt_max", gate="mixed", params=bias, options={"dt_max": 0.5})
    yield _of(
        family, "everything", H=2, HV=4, gate="mixed", params=("d", "z", "dt_bias"),
        options={"dt_min": 0.01, "dt_max": 2.0},
    )  # fmt: skip
    yield _of(family, "no d_final_state", d_final_state=False)


STEP = {"gdn": 16, "kda": 16, "gdn2": 16, "gdp": 64, "mamba2": 128}  # of the checkpoint cadence


def _checkpoints(family):
    """Cadences of checkpoints, against lengths on, before and after the boundaries."""
    step = STEP[family]
    for times in (1, 3):
        every = step * times
        lengths = tuple(
            -(-length // (2 if family == "gdp" else 1))
            for length in (every, every - 1, 0, every + 1, 1, 2 * every)
        )
        for dtype in (F32, BF16) if times == 1 else (F32,):
            name = str(dtype).removeprefix("torch.")
            yield _of(
                family, f"checkpoints {every}, {name}", lengths=lengths, K=8, V=8, H=1,
                dtype=dtype, options={"checkpoint_every_n_tokens": every},
            )  # fmt: skip
    yield _of(
        family, "checkpoints, ends early", lengths=(step + 3, 5), tail=7, H=1,
        options={"checkpoint_every_n_tokens": step},
    )  # fmt: skip
    if family == "gdp":
        yield _of(
            family, "checkpoints inside a token", n=3, lengths=(50, 0, 70), H=1,
            options={"checkpoint_every_n_tokens": step},
        )  # fmt: skip


def _table():
    for family in FAMILIES:
        yield from _lengths(family)
        yield from _heads(family)
        yield from _dtypes(family)
        yield from _gates(family)
        yield from (_mamba2_options if family == "mamba2" else _delta_options)(family)
        yield from _checkpoints(family)
        yield _of(family, "batch invariant", lengths=RAGGED, options={"batch_invariant": True})


CASES = tuple(_table())
