"""Our functions in the place of those that layers of the `transformers` package call.

    from lagraph.integrations import transformers as door
    door.patch()                  # all models below; those that exist already, too
    model.generate(...)
    door.unpatch()

What the functions of a model's module do is then done by `lagraph.ops`: the fused kernels for CUDA
tensors, the reference elsewhere. Layers, weights and caches stay the package's own.

| layer | functions | models |
|---|---|---|
| gated delta rule | chunks, single tokens | `qwen3_next`, `qwen3_5`, `qwen3_5_moe`, `qwen4_exp`, `olmo_hybrid`, `lara_mini` |
| Kimi delta attention | chunks, single tokens | `kimi_linear`, `glm5_next`, `bailing_hybrid` |
| Mamba-2 | chunk scan, state update | `mamba2`, `bamba`, `falcon_h1`, `granitemoehybrid`, `nemotron_h`, `zamba2` |

The convolution of all of them is replaced, too, and its one-token update. Not here: Mamba-1 (`mamba`,
`falcon_mamba`, `jamba`, `zamba`), and models that have the convolution alone.

Beyond what the package's fallbacks serve: packed sequences, where the model is called with
`cu_seq_lens_q`; `seq_idx` alone is refused, since making offsets of it would wait for the device.

What it costs. Delta-rule states are [B, H, K, V] in the package's cache, which keeps them as the
transposed views that it is given: they are read back without a copy. Convolution histories are
[B, C, W] there: an update copies one. Mamba-2's state update writes its state back, once.

Needs the package's 5.x layout: functions of the module that the layer's `forward` looks up by name.
"""  # noqa: E501 (a table's row)

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from importlib import import_module
from inspect import unwrap
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

import lagraph
from lagraph.errors import InvalidOption, MissingBackend, NotSupported
from lagraph.integrations import fla

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    Functions = Mapping[str, Callable[..., Any]]

__all__ = ["MODELS", "Model", "patch", "patched", "unpatch"]


def patch(*models: str) -> tuple[str, ...]:
    """Put our functions in place; of models that have them already, nothing changes.

    Args:
        models: Names out of `MODELS`; if none is given, all that this version of the package has.

    Returns:
        Names of the models whose functions are ours now.

    Raises:
        InvalidOption: A name that is not known.
        MissingBackend: The package is not installed, or its version has no such functions, or its
            layers do not call them: of a model that was named, or of all of them. Nothing is
            changed then.
    """
    with _LOCK:
        found, lacking = [], ""
        for name in _names("patch", models):
            try:
                module = _module(name)
            except MissingBackend as error:
                if models:
                    raise
                lacking = lacking or str(error)
                continue
            found += [(module, at, function) for at, function in MODELS[name].functions.items()]
        if not found:
            raise MissingBackend(lacking)
        for module, at, function in found:
            if getattr(module, at) is not function:
                _ORIGINALS[module.__name__, at] = getattr(module, at)
                setattr(module, at, function)
    return patched()


def unpatch(*models: str) -> None:
    """Put the package's functions back; a function that somebody else has replaced since stays.

    Args:
        models: Names out of `MODELS`; all of them if none is given. Those that were never patched
            are left alone.

    Raises:
        InvalidOption: A name that is not known.
    """
    with _LOCK:
        for name in _names("unpatch", models):
            model = MODELS[name]
            for at, function in model.functions.items():
                original = _ORIGINALS.pop((model.module, at), None)
                if original is None:
                    continue
                module = import_module(model.module)
                if getattr(module, at) is function:
                    setattr(module, at, original)


def patched() -> tuple[str, ...]:
    """Names of the models whose functions are ours now."""
    return tuple(
        name for name, model in MODELS.items()
        if any((model.module, at) in _ORIGINALS for at in model.functions)
    )  # fmt: skip


def _names(op: str, models: tuple[str, ...]) -> tuple[str, ...]:
    for name in models:
        if name not in MODELS:
            raise InvalidOption(
                op, "models", expected=f"names out of {', '.join(MODELS)}", got=repr(name),
                mend="Pass none for all of them",
            )  # fmt: skip
    return models or tuple(MODELS)


def _module(name: str) -> Any:
    """A model's module, once it is known that its layer calls the functions."""
    model = MODELS[name]
    try:
        package = import_module("transformers")
    except ImportError as error:
        raise MissingBackend(
            f"patch: {name} needs transformers: {error}. Install transformers>=5."
        ) from error
    version = getattr(package, "__version__", "?")
    try:
        module = import_module(model.module)
    except ImportError as error:
        raise MissingBackend(
            f"patch: {name}: transformers {version} has no {model.module}: {error}. Install a "
            f"version that has the model."
        ) from error
    layer = getattr(module, model.layer, None)
    code = getattr(unwrap(layer.forward), "__code__", None) if layer is not None else None
    called = code.co_names if code is not None else ()
    lacking = [at for at in model.functions if not hasattr(module, at) or at not in called]
    if lacking:
        raise MissingBackend(
            f"patch: {name} of transformers {version}: {model.layer}.forward calls no function "
            f"{', '.join(lacking)} of its module. Install transformers>=5, or call lagraph.ops in "
            f"a layer of your own."
        )
    return module


# What the functions of transformers have in common ------------------------------------------------


def _offsets(op: str, rest: Mapping[str, Any]) -> Tensor | None:
    """Offsets of packed sequences, among the keywords that a model hands through."""
    cu: Tensor | None = rest.get("cu_seqlens")
    cu = rest.get("cu_seq_lens_q") if cu is None else cu
    if cu is None and rest.get("seq_idx") is not None:
        raise NotSupported(
            f"{op}: seq_idx alone would have to be read on the host. Call the model with "
            f"cu_seq_lens_q, the offsets of the packed sequences."
        )
    return cu


def _records(*tensors: Tensor | None) -> bool:
    """Whether a call on CUDA needs gradients, which the token scan does not have."""
    return torch.is_grad_enabled() and any(
        x is not None and x.is_cuda and x.requires_grad for x in tensors
    )


# The delta rules ----------------------------------------------------------------------------------


def _delta_rule(
    chunk_name: str, by_chunks: Callable[..., Any], token_name: str, by_tokens: Callable[..., Any]
) -> Functions:
    """A rule's functions by their names in a module: over a sequence, and token by token, or by
    chunks where gradients are due."""

    def _chunks(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **rest: Any,
    ) -> tuple[Tensor, Tensor | None]:
        out: tuple[Tensor, Tensor | None] = by_chunks(
            query, key, value, g, beta, initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=_offsets(chunk_name, rest),
        )  # fmt: skip
        return out

    def _tokens(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **rest: Any,
    ) -> tuple[Tensor, Tensor | None]:
        recorded = _records(query, key, value, g, beta, initial_state)
        out: tuple[Tensor, Tensor | None] = (by_chunks if recorded else by_tokens)(
            query, key, value, g=g, beta=beta, initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=_offsets(token_name, rest),
        )  # fmt: skip
        return out

    return {chunk_name: _chunks, token_name: _tokens}


# Mamba-2 ------------------------------------------------------------------------------------------


def _scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    z: Tensor | None = None,
    **rest: Any,
) -> Any:
    """Mamba-2 over a sequence: `chunk_mamba2`."""
    low, high = map(float, dt_limit)
    y, last = lagraph.ops.chunk_mamba2(
        hidden_states, dt, A, B, C, initial_states, D=D, dt_bias=dt_bias, z=z,
        dt_softplus=dt_softplus, dt_min=low, dt_max=None if math.isinf(high) else high,
        cu_seqlens=_offsets("mamba2_chunk_scan", rest), output_final_state=return_final_states,
    )  # fmt: skip
    return (y, last) if return_final_states else y


def _update(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **rest: Any,
) -> Tensor:
    """One token of Mamba-2, the state [B, H, P, N] advanced in place: `recurrent_mamba2`.

    dt [B, H, P], A [H, P, N], D and dt_bias [H, P] are expanded, as the layer makes them.
    """
    for name, x in (("dt", dt), ("A", A), ("dt_bias", dt_bias)):
        if x is not None and any(n > 1 and s for n, s in zip(x.shape[2:], x.stride()[2:])):
            raise NotSupported(
                f"mamba2_selective_state_update: {name} differs within a head. Pass one value a "
                f"head, expanded; lagraph has no other Mamba-2."
            )
    if D is not None and D.dim() == 2 and D.stride(1) == 0:
        D = D[:, 0]  # expanded: one value a head
    run: Any = lagraph.ops.recurrent_mamba2
    if _records(state, hidden_states, dt, A, B, C):
        run = lagraph.ops.chunk_mamba2
    y, last = run(
        hidden_states[:, None], dt[:, None, :, 0], A[:, 0, 0], B[:, None], C[:, None], state, D=D,
        dt_bias=None if dt_bias is None else dt_bias[:, 0],
        z=None if z is None else z[:, None], dt_softplus=dt_softplus, output_final_state=True,
    )  # fmt: skip
    state.copy_(last)
    out: Tensor = y[:, 0]
    return out


# The convolution of all ---------------------------------------------------------------------------

IN_KERNEL = {None: None, "silu": "silu", "swish": "silu"}


def _convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, **options: Any
) -> Tensor:
    """[B, C, T] to [B, C, T]; a bias comes between convolution and activation."""
    dtype, x = x.dtype, x.mT.to(weight.dtype)
    x = x if x.stride(-1) == 1 else x.contiguous()
    fused = bias is None and activation in IN_KERNEL
    name = IN_KERNEL[activation] if fused else None
    y: Any = lagraph.ops.causal_conv1d(x, weight, activation=name, **options)
    if not fused:
        y = y if bias is None else y + bias
        if IN_KERNEL.get(activation) == "silu":
            y = F.silu(y)
        elif activation is not None:
            y = import_module("transformers.activations").ACT2FN[activation](y)
    out: Tensor = y.mT.to(dtype)
    return out


def _conv(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **rest: Any,
) -> Tensor:
    """The convolution over a sequence: `causal_conv1d`."""
    cu = _offsets("causal_conv1d_fn", rest)
    return _convolve(hidden_states, weight, bias, activation, cu_seqlens=cu)


def _conv_update(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """The convolution of new tokens; conv_state [B, C, S], its last inputs, moves on in place."""
    size, width = conv_state.shape[-1], weight.shape[-1]
    history = conv_state[..., size - width + 1 :].mT.to(weight.dtype).contiguous()
    moved = torch.cat([conv_state, hidden_states], -1)[..., -size:]
    conv_state.copy_(moved)
    return _convolve(hidden_states, weight, bias, activation, initial_state=history)


# What is replaced ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A module of transformers, its layer, and what takes the place of which function."""

    module: str
    layer: str
    functions: Functions


_SHORT: Functions = {
    "causal_conv1d_fn": _conv,
    "causal_conv1d_update": _conv_update,
}
_GDN: Functions = {
    **_delta_rule(
        "torch_chunk_gated_delta_rule", fla.chunk_gated_delta_rule,
        "torch_recurrent_gated_delta_rule", fla.fused_recurrent_gated_delta_rule,
    ),
    **_SHORT,
}  # fmt: skip
_KDA: Functions = {
    **_delta_rule(
        "chunk_kimi_delta_attention", fla.chunk_kda,
        "recurrent_kimi_delta_attention", fla.fused_recurrent_kda,
    ),
    **_SHORT,
}  # fmt: skip
_MAMBA2: Functions = {
    "mamba2_chunk_scan": _scan,
    "mamba2_selective_state_update": _update,
    **_SHORT,
}
# The layer of every model, and what it calls.
_LAYERS: dict[str, tuple[str, Functions]] = {
    "qwen3_next": ("Qwen3NextGatedDeltaNet", _GDN),
    "qwen3_5": ("Qwen3_5GatedDeltaNet", _GDN),
    "qwen3_5_moe": ("Qwen3_5MoeGatedDeltaNet", _GDN),
    "qwen4_exp": ("Qwen4ExpTextGatedDeltaNet", _GDN),
    "olmo_hybrid": ("OlmoHybridGatedDeltaNet", _GDN),
    "lara_mini": ("LaraMiniGatedDeltaNet", _GDN),
    "kimi_linear": ("KimiLinearDeltaAttention", _KDA),
    "glm5_next": ("Glm5NextTextLinearAttention", _KDA),
    "bailing_hybrid": ("BailingHybridDeltaAttention", _KDA),
    "mamba2": ("Mamba2Mixer", _MAMBA2),
    "bamba": ("BambaMixer", _MAMBA2),
    "falcon_h1": ("FalconH1Mixer", _MAMBA2),
    "granitemoehybrid": ("GraniteMoeHybridMambaLayer", _MAMBA2),
    "nemotron_h": ("NemotronHMamba2Mixer", _MAMBA2),
    "zamba2": ("Zamba2MambaMixer", _MAMBA2),
}

MODELS: dict[str, Model] = {
    name: Model(f"transformers.models.{name}.modeling_{name}", layer, functions)
    for name, (layer, functions) in _LAYERS.items()
}

_ORIGINALS: dict[tuple[str, str], Any] = {}
_LOCK = threading.Lock()
