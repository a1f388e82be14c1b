"""Golden numbers: if one of these disagrees, a convention is wrong.

Every anchor is checked on the oracle, to the printed digits, and on the public ops in fp64.
P is the fixed pattern of `draw.P`; sums run over all elements.
"""

from __future__ import annotations

import oracle
import pytest
import torch
from call import call
from draw import P, l2

PRINTED = 6e-10  # nine printed digits

CU = torch.tensor([0, 3, 5], dtype=torch.int32)


def delta_inputs():
    """What A1 to A4 share."""
    return {
        "q": P((5, 1, 4), 1),
        "k": l2(P((5, 1, 4), 2)),
        "v": P((5, 2, 3), 3),
        "beta": torch.sigmoid(P((5, 2), 5)),
        "cu_seqlens": CU,
        "initial_state": P((2, 2, 3, 4), 6),
        "dO": P((5, 2, 3), 7),
        "d_final_state": P((2, 2, 3, 4), 8),
    }


def a1():
    return delta_inputs() | {"g": -P((5, 2), 4).abs()}, {"scale": 0.5}


def a2():
    return delta_inputs() | {"g": -P((5, 2, 4), 4).abs()}, {"scale": 0.5}


def a3():
    inputs, options = a2()
    inputs |= {"beta": torch.sigmoid(P((5, 2, 4), 9)), "w": torch.sigmoid(P((5, 2, 3), 10))}
    return inputs, options


def a4():
    inputs, options = a1()
    inputs |= {
        "k": l2(P((10, 1, 4), 2)),
        "v": P((10, 2, 3), 3),
        "beta": torch.sigmoid(P((10, 2), 5)),
    }
    return inputs, options | {"num_householder": 2}


def a5():
    inputs = {
        "v": P((5, 4, 3), 1),
        "g": P((5, 4), 2),
        "a": -P((4,), 3).exp(),
        "k": P((5, 2, 4), 4),
        "q": P((5, 2, 4), 5),
        "d": P((4,), 6),
        "dt_bias": P((4,), 7),
        "z": P((5, 4, 3), 8),
        "initial_state": P((1, 4, 3, 4), 9),
        "cu_seqlens": torch.tensor([0, 5], dtype=torch.int32),
        "dO": P((5, 4, 3), 10),
        "d_final_state": P((1, 4, 3, 4), 11),
    }
    return inputs, {}


# id -> family, inputs, sums of (O, O^2, S, S^2), {output: {index: value}}, loss or None
ANCHORS = {
    "A1": (
        "gdn", a1, (-1.501270405, 0.647124335, 2.580945952, 2.513040359),
        {
            "O": {
                (0, 0): [-0.315083238, 0.000366888, -0.095644711],
                (4, 1): [-0.042879927, 0.064039096, -0.002773678],
            },
            "final_state": {(1, 1, 2): [0.070581851, -0.031469801, -0.064286292, -0.027867621]},
            "dQ": {(2, 0, 1): -0.194796783},
            "dK": {(1, 0, 3): -0.067354399},
            "dV": {(0, 1, 2): 0.074894834},
            "dG": {(1, 0): -0.098218518, (4, 1): -0.133620627},
            "dBeta": {(3, 1): -0.161932957},
            "d_initial_state": {(0, 1, 2, 3): -0.009843117},
        },
        -0.877521782,
    ),
    "A2": (
        "kda", a2, (-1.491855713, 0.598951971, 2.741704824, 2.300859781),
        {
            "O": {(4, 1): [-0.060175901, 0.060994573, 0.009990814]},
            "dQ": {(2, 0, 1): -0.066911614},
            "dK": {(1, 0, 3): 0.029471086},
            "dV": {(0, 1, 2): 0.093396607},
            "dG": {(1, 0, 2): -0.461454251},
            "dBeta": {(3, 1): -0.266084629},
            "d_initial_state": {(0, 1, 2, 3): 0.004479105},
        },
        None,
    ),
    "A3": (
        "gdn2", a3, (-1.307686748, 0.673532580, 2.545231367, 2.733279824),
        {"O": {(4, 1): [-0.143361547, 0.127689549, 0.013507399]}},
        None,
    ),
    "A4": (
        "gdp", a4, (-0.617238193, 0.640531504, -0.609792363, 2.633770536),
        {"O": {(4, 1): [-0.042692181, -0.114150959, 0.032401372]}},
        None,
    ),
    "A5": (
        "mamba2", a5, (-5.164267251, 3.601817080, 0.343637115, 4.163086067),
        {
            "O": {(4, 3): [0.121887096, -0.009752215, -0.462808100]},
            "dV": {(2, 1, 0): 0.075049515},
            "dG": {(1, 3): 0.009451127},
            "dA": {(2,): 0.328139723},
            "dK": {(1, 1, 2): 0.255480737},
            "dQ": {(3, 0, 1): -0.506788731},
            "dD": {(1,): 0.640664236},
            "d_dt_bias": {(2,): 0.944034934},
            "dZ": {(4, 3, 2): -0.993068331},
            "d_initial_state": {(0, 0, 2, 3): -0.214364275},
        },
        None,
    ),
}  # fmt: skip


def by_oracle(family, inputs, options):
    return oracle.forward(family, inputs, **options) | oracle.backward(family, inputs, **options)


def by_ops(family, inputs, options):
    return call(family, inputs, "backward", **options)


def near(got, want):
    want = torch.tensor(want, dtype=torch.float64)
    torch.testing.assert_close(got.detach().to(torch.float64), want, rtol=0.0, atol=PRINTED)


@pytest.mark.parametrize("source", [by_oracle, by_ops])
@pytest.mark.parametrize("anchor", ANCHORS)
def test_anchor(anchor, source):
    family, make, sums, values, loss = ANCHORS[anchor]
    inputs, options = make()
    got = source(family, inputs, options)
    o, state = got["O"].detach(), got["final_state"].detach()
    for value, want in zip(
        (o.sum(), o.square().sum(), state.sum(), state.square().sum()), sums, strict=True
    ):
        near(value, want)
    for name, elements in values.items():
        for index, want in elements.items():
            near(got[name][index], want)
    if loss is not None:
        near((o * inputs["dO"]).sum() + (state * inputs["d_final_state"]).sum(), loss)


@pytest.mark.parametrize("source", [by_oracle, by_ops])
def test_a3_with_equal_gates_is_a2(source):
    """GDN-2 with erase = write = beta is KDA."""
    inputs, options = a2()
    want = source("kda", inputs, options)
    same = inputs | {
        "beta": inputs["beta"][..., None].expand(5, 2, 4).contiguous(),
        "w": inputs["beta"][..., None].expand(5, 2, 3).contiguous(),
    }
    got = source("gdn2", same, options)
    for name in ("O", "final_state", "dQ", "dK", "dV", "dG", "d_initial_state"):
        torch.testing.assert_close(got[name], want[name], rtol=1e-12, atol=1e-12)
    split = got["dBeta"].sum(-1) + got["dW"].sum(-1)
    torch.testing.assert_close(split, want["dBeta"], rtol=1e-12, atol=1e-12)


def test_pattern():
    """The first values of P((8,); 1)."""
    want = [-0.78989098, -0.69474727, -0.47670961, -0.135778,
            0.32804757, 0.9147671, -0.37561943, 0.45688801]  # fmt: skip
    torch.testing.assert_close(
        P((8,), 1), torch.tensor(want, dtype=torch.float64), rtol=0.0, atol=6e-9
    )
