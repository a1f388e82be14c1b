"""What people pass by mistake, to every argument of every public function: refused by name.

The table is made from the signatures: each argument of `lagraph.ops` gets values that its
annotation does not allow. An error is ours, and names the function and the argument (where two
tensors disagree, one of the two).
"""

from __future__ import annotations

import inspect

import pytest
import torch

import lagraph
from lagraph import ops

B, T, HK, H, K, V, C, W = 2, 4, 2, 4, 8, 6, 8, 4
TYPES = {"GateTransform", "Impl", "KernelOptions", "ReplayState", "SplitOptions"}
OPERATORS = {
    "gdn": "gated_delta_net", "kda": "kimi_delta_attention", "gdn2": "gated_delta_net_v2",
    "gdp": "gated_delta_product", "mamba2": "mamba2",
}  # fmt: skip


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def tokens(family, rand, batch=B):
    """A batch by the functions' names."""
    if family == "mamba2":
        few = {n: rand(batch, T, HK, K) for n in "BC"}
        return {"x": rand(batch, T, H, V), "dt": rand(batch, T, H), "A": -rand(H), **few,
                "D": rand(H), "dt_bias": rand(H), "z": rand(batch, T, H, V)}  # fmt: skip
    n = (2,) if family == "gdp" else ()
    key = (K,) if family in ("kda", "gdn2") else ()
    x = {
        "q": rand(batch, T, HK, K), "k": rand(batch, T, *n, HK, K), "v": rand(batch, T, *n, H, V),
        "gate": -rand(batch, T, H, *key),
        "beta": rand(batch, T, *n, H, *(key if family == "gdn2" else ())),
    }  # fmt: skip
    more = {"gdn2": {"w": rand(batch, T, H, V)}, "gdp": {"num_householder": 2}}
    return x | more.get(family, {})


def good_calls():
    """A call of every function, by name, that works."""
    generator = torch.Generator().manual_seed(0)

    def rand(*shape):
        return torch.rand(*shape, generator=generator)

    some = {"has_initial_state": torch.tensor([True, False]), "state_indices": i32(1, 2)}
    calls = {}
    for family, operator in OPERATORS.items():
        x = tokens(family, rand)
        calls[f"chunk_{family}"] = x | {"initial_state": rand(B, H, V, K)}
        calls[f"recurrent_{family}"] = x | some | {
            "initial_state": rand(5, H, V, K), "states": rand(B, T, H, V, K)
        }  # fmt: skip
        calls[f"paged_chunk_{family}"] = x | some | {"state_cache": rand(5, H, V, K)}
        flat = {
            "g" if n == "gate" else n: t[0] if isinstance(t, torch.Tensor) and t.dim() > 1 else t
            for n, t in tokens(family, rand, 1).items()
        }
        flat |= {
            "cu_seqlens": i32(0, 2, 4), "initial_state": rand(2, H, V, K),
            "d_final_state": rand(2, H, V, K), "dO": rand(T, H, V), "dy": rand(T, H, V),
        }  # fmt: skip
        for name in (operator, f"{operator}_summary", f"{operator}_summary_bwd"):
            known = inspect.signature(getattr(ops, name)).parameters
            calls[name] = {n: t for n, t in flat.items() if n in known}
        n = 2 if family == "gdp" else 1
        key = (K,) if family in ("kda", "gdn2") else ()
        beta = {"gdp": (2, H), "gdn2": (H, K)}.get(family, (H,))
        pool = some | {"state_cache": rand(5, H, V, K), "out": torch.empty(1, B, H, V)}
        calls[f"recurrent_{family}_decode"] = pool | {
            "packed_qkv": rand(B, (1 + n) * HK * K + n * H * V), "raw_gate": rand(1, B, H, *key),
            "raw_beta": rand(1, B, *beta), "A_log": rand(H), "dt_bias": rand(H, *key),
        }  # fmt: skip
    calls["recurrent_gdn2_decode"]["w"] = rand(1, B, H, V)
    calls["recurrent_mamba2_decode"] = some | {
        "packed_xbc": rand(B, H * V + 2 * HK * K), "dt": rand(1, B, H), "A": -rand(H),
        "dt_bias": rand(H), "D": rand(H), "z": rand(1, B, H, V), "state_cache": rand(5, H, V, K),
        "out": torch.empty(1, B, H, V),
    }  # fmt: skip
    mask = torch.tensor([True, True, False, False])
    return calls | {
        "gate_transform": {"raw_gate": rand(B, T, H), "A_log": rand(H), "dt_bias": rand(H),
                           "kind": "softplus"},
        "bound_gate": {"raw_gate": rand(B, T, H, K), "A_log": rand(H), "dt_bias": rand(H, K)},
        "causal_conv1d": {"x": rand(1, T, C), "weight": rand(C, W), "cu_seqlens": i32(0, 2, 4),
                          "initial_state": rand(2, W - 1, C)},
        "paged_causal_conv1d": {"x": rand(B, T, C), "weight": rand(C, W), **some,
                                "state_cache": rand(5, W - 1, C), "states": rand(B, T, W - 1, C)},
        "causal_conv1d_decode": {"x": rand(B, C), "weight": rand(C, W), **some,
                                 "state": rand(5, W - 1, C)},
        "active_token_mask": {"x": rand(1, T, C), "cu_seqlens": i32(0, 2)},
        "mask_inactive_tokens": {"x": rand(1, T, C), "active_mask": mask},
        "mask_inactive_token_gradients": {"x": rand(1, T, C), "active_mask": mask},
        "accept_states": {"state_cache": rand(5, H, V, K), "state_indices": i32(1, 2),
                          "states": rand(B, T, H, V, K), "num_accepted_tokens": i32(1, 2)},
        "register_activation": {"name": "misused", "forward": torch.tanh, "derivative": torch.tanh},
        "ShortConvConfig": {"threads": 128, "channels_per_thread": 8, "times_per_block": 0},
    }  # fmt: skip


CALLS = good_calls()
OTHERS = (3, 2.5, "x", [1, 2], [1.0], (1,), {}, {"a": 1}, True, None, object())
# What an annotation allows of OTHERS; a bool is no number.
ALLOWED = {
    "Tensor": (), "bool": (bool,), "int": (int,), "float": (int, float), "None": (type(None),),
    "Impl": (), "str": (str,), "GateTransform": (), "torch.dtype": (), "ShortConvConfig": (),
    "Callable": (), "tuple": (), "Literal": (), "ReplayState": (),
}  # fmt: skip
# Values of the allowed types that are wrong all the same, and arguments with their own.
ALWAYS = {
    "impl": ("cuda", 3, None, [1], True, {}), "kind": ("linear", 3, None, [1]),
    "kernel_options": (3, 2.5, "x", [1], (1,), True, object(), {"a": 1}, {"backend": 1}),
    "replay_state": (3, "x", [1, 2], (1,) * 6, object(), {}),
    "gate_transform": ("log", 3, None), "gate_domain": ("x", 3, None),
    "scale": (float("nan"), float("inf")), "num_householder": (0, -1),
    "dt_min": (float("nan"), -1.0), "dt_max": (float("nan"),), "lower_bound": (1.0, float("nan")),
    "activation": ("x",), "plan_name": (3, [1], object()), "name": ("",),
    "threads": (3,), "channels_per_thread": (3,), "times_per_block": (3, -1),
    "checkpoint_every_n_tokens": (-1, 3),
}  # fmt: skip
ONLY = ("impl", "kind", "kernel_options", "replay_state", "gate_transform", "gate_domain",
        "plan_name")  # fmt: skip


# What the operators' arguments take; their signatures, made from declarations, do not say.
OPTIONAL = {"scale": "float | None", "gate_lower_bound": "float | None", "dt_max": "float | None"}


def annotation(parameter):
    if parameter.annotation is not parameter.empty:
        return str(parameter.annotation)
    if parameter.name == "num_householder":
        return "int"
    default = parameter.default
    return OPTIONAL.get(parameter.name, "Tensor" if default in (None, parameter.empty)
                        else type(default).__name__)  # fmt: skip


def wrong(name, parameter):
    """Values that are no good for an argument, whatever else the call has."""
    if parameter.name in ONLY:
        return ALWAYS[parameter.name]
    text = annotation(parameter)
    parts = [part.strip().split("[")[0].removeprefix("torch.") for part in text.split("|")]
    allowed = tuple(kind for part in parts for kind in ALLOWED.get(part, ()))
    if parameter.default is None:
        allowed += (type(None),)
    good = (x for x in OTHERS if isinstance(x, allowed))
    good = [x for x in good if not isinstance(x, bool) or bool in allowed]
    return (*(x for x in OTHERS if all(x is not y for y in good)),
            *ALWAYS.get(parameter.name, ()))  # fmt: skip


def wrong_tensors(x):
    """Variants of a good tensor that are none: dtype, rank, size, device, layout."""
    made = [x.to(torch.int8), x.to(torch.complex64), x[(..., *[None] * 3)], x.flatten()[0],
            x.to("meta"), x.to_sparse()]  # fmt: skip
    if x.is_floating_point():
        made.append(x.to(torch.float8_e4m3fn))
    return made if x.dtype is torch.int32 else [*made, x[..., :-1]]


def arguments():
    for name, given in CALLS.items():
        function = getattr(ops, name, None) or getattr(ops.kda, name)
        for parameter in inspect.signature(function).parameters.values():
            yield pytest.param(name, function, given, parameter, id=f"{name}-{parameter.name}")


def copied(given, **changes):
    return {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in given.items()} | changes


def test_every_function_is_in_the_table():
    assert set(ops.__all__) - TYPES == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_the_calls_are_good(name):
    (getattr(ops, name, None) or getattr(ops.kda, name))(**copied(CALLS[name]))


@pytest.mark.parametrize(("name", "function", "given", "parameter"), [*arguments()])
@pytest.mark.filterwarnings("ignore:.*[Ss]parse.*:UserWarning")
def test_wrong_values(name, function, given, parameter):
    """Ours, by name, whatever it is; nothing of it stays behind."""
    argument = parameter.name
    for value in wrong(name, parameter):
        with pytest.raises(lagraph.LagraphError) as caught:
            function(**copied(given, **{argument: value}))
        assert str(caught.value).startswith(name), f"{value!r}: {caught.value}"
        assert argument in str(caught.value), f"{value!r}: {caught.value}"
    if not isinstance(given.get(argument), torch.Tensor):
        return
    any_kind = name.endswith(("_mask", "_tokens", "_gradients")) and argument == "x"
    for value in wrong_tensors(given[argument]):
        strange = value.layout is not torch.strided or value.is_meta or value.dim() == 0
        if any_kind and not strange:
            continue  # masks take every dtype and shape [1, T, ...]
        with pytest.raises(lagraph.LagraphError) as caught:
            function(**copied(given, **{argument: value}))
        said = f"{value.dtype} {list(value.shape)} {value.device} {value.layout}: {caught.value}"
        assert str(caught.value).startswith(name), said
        named = [n for n in inspect.signature(function).parameters if n in str(caught.value)]
        assert named, said
