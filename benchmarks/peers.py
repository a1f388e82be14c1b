"""The libraries that `compare.py` runs beside ours: one adapter each, in the table PEERS.

An adapter takes a `Batch` and returns a call without arguments, which gives the outputs
[T, HO, V] and the final states [N, HO, V, K] (None where they were not asked for). All that a user
would do once is done before the call: importing, views, offsets in the dtype that is wanted (one
tensor for all calls, so that what a library caches by it counts), decays where logs are not taken.
Every library is called as its own documentation says; what it lacks, the table does not offer.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LIBRARIES", "PEERS", "Batch", "Peer", "Result", "version"]

# FLA would hand its GDN to FlashQLA where that is installed; here each is timed for itself.
os.environ.setdefault("FLA_FLASH_QLA", "0")

Result = tuple[torch.Tensor, "torch.Tensor | None"]


@dataclass(frozen=True)
class Batch:
    """One case's inputs: x by node port name, packed [T, heads, ...]; all sequences as long.

    state: whether final states are wanted.
    """

    family: str
    lengths: tuple[int, ...]
    n: int
    x: dict[str, torch.Tensor]
    cu: torch.Tensor
    cu64: torch.Tensor
    state: bool

    def packed(self, *names: str) -> list[torch.Tensor]:
        """Inputs as [1, T, heads, ...] views."""
        return [self.x[name][None] for name in names]


@dataclass(frozen=True)
class Peer:
    """One way to call one library: its column in the table, and for whom it is.

    lone: it takes one sequence only.
    """

    name: str
    family: str
    prepare: Callable[[Batch], Callable[[], Result]]
    backward: bool = True
    lone: bool = False

    def serves(self, batch: Batch, backward: bool) -> bool:
        """Whether the library offers this at all."""
        fits = not self.lone or len(batch.lengths) == 1
        return self.family == batch.family and fits and (self.backward or not backward)


def _first(result: Result, turn: bool = False) -> Result:
    """The one row of a [1, T, ...] output, and the state as [N, HO, V, K].

    Squeezed, not indexed: an index's gradient is a copy into zeros, which is not the library's.
    """
    o, state = result[:2]
    return o.squeeze(0), state.mT if turn and state is not None else state


def fla_gdn(b: Batch) -> Callable[[], Result]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    args = b.packed("q", "k", "v", "g", "beta")
    return lambda: _first(
        chunk_gated_delta_rule(*args, cu_seqlens=b.cu64, output_final_state=b.state), turn=True
    )


def fla_kda(b: Batch) -> Callable[[], Result]:
    from fla.ops.kda import chunk_kda

    args = b.packed("q", "k", "v", "g", "beta")
    return lambda: _first(
        chunk_kda(*args, cu_seqlens=b.cu64, output_final_state=b.state), turn=True
    )


def fla_gdn2(b: Batch) -> Callable[[], Result]:
    from fla.ops.gdn2 import chunk_gdn2

    args = b.packed("q", "k", "v", "g", "beta", "w")
    return lambda: _first(
        chunk_gdn2(*args, cu_seqlens=b.cu64, output_final_state=b.state), turn=True
    )


def fla_gdp(b: Batch) -> Callable[[], Result]:
    from fla.ops.gated_delta_product import chunk_gated_delta_product

    args = b.packed("q", "k", "v", "g", "beta")
    return lambda: _first(
        chunk_gated_delta_product(
            *args, num_householder=b.n, cu_seqlens=b.cu64, output_final_state=b.state
        ),
        turn=True,
    )


def gym_gdn(b: Batch) -> Callable[[], Result]:
    from attn_gym.linear import chunk_gdn

    args = b.packed("q", "k", "v", "g", "beta")
    return lambda: _first(chunk_gdn(*args, cu_seqlens=b.cu, output_final_state=b.state))


def gym_kda(b: Batch) -> Callable[[], Result]:
    from attn_gym.linear import chunk_kda

    args = b.packed("q", "k", "v", "g", "beta")
    return lambda: _first(chunk_kda(*args, cu_seqlens=b.cu, output_final_state=b.state))


def flash_qla(b: Batch) -> Callable[[], Result]:
    from flash_qla import chunk_gated_delta_rule

    q, k, v, g, beta = b.packed("q", "k", "v", "g", "beta")
    return lambda: _first(
        chunk_gated_delta_rule(
            q=q, k=k, v=v, g=g, beta=beta, cu_seqlens=b.cu, output_final_state=b.state
        ),
        turn=True,
    )


def _flashinfer(b: Batch) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, float]:
    """Inputs, buffers for the results, and scale; its kernels want decays, not their logs."""
    q, k, v, g, beta = (b.x[name] for name in ("q", "k", "v", "g", "beta"))
    heads, width = v.shape[1:]
    state = torch.empty(len(b.lengths), heads, width, q.shape[2], device=q.device)
    return [q, k, v, g.exp(), beta], torch.empty_like(v), state, q.shape[2] ** -0.5


def flashinfer(b: Batch) -> Callable[[], Result]:
    from flashinfer.gdn_kernels.delta_rule_dsl.delta_rule_sm90 import delta_rule_prefill_dsl_sm90

    (q, k, v, decay, beta), o, state, scale = _flashinfer(b)

    def call() -> Result:
        delta_rule_prefill_dsl_sm90(o, state, q, k, v, None, decay, beta, b.cu64, scale)
        return o, state

    return call


def flashinfer_cp(b: Batch) -> Callable[[], Result]:
    from flashinfer.gdn_kernels.delta_rule_dsl.delta_rule_cp_sm90 import cp_delta_rule_dsl_sm90

    (q, k, v, decay, beta), o, state, scale = _flashinfer(b)

    def call() -> Result:
        cp_delta_rule_dsl_sm90(
            o, state, q, k, v, decay, beta, b.cu64, scale, max_seqlen=max(b.lengths)
        )
        return o, state

    return call


def cudnn_kda(plan: str) -> Callable[[Batch], Callable[[], Result]]:
    """An adapter for one of cuDNN Frontend's SM90 engines."""

    def prepare(b: Batch) -> Callable[[], Result]:
        from cudnn.linear_attention.ops import kimi_delta_attention

        args = [b.x[name] for name in ("q", "k", "v", "g", "beta")]
        more = {"output_final_state": b.state, "plan_name": plan}
        return lambda: kimi_delta_attention(*args, b.cu, **more)[:2]

    return prepare


def mamba_ssm(b: Batch) -> Callable[[], Result]:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    rows = (len(b.lengths), b.lengths[0])  # dense: [N, T / N, heads, ...]
    C, B, x, dt = (b.x[name].unflatten(0, rows) for name in ("q", "k", "v", "g"))
    A, D = b.x["a"], b.x["d"]

    def call() -> Result:
        out = mamba_chunk_scan_combined(
            x, dt, A, B, C, chunk_size=256, D=D, dt_softplus=True, return_final_states=b.state
        )
        y, state = out if b.state else (out, None)
        return y.flatten(0, 1), state

    return call


PEERS = (
    Peer("fla", "gdn", fla_gdn),
    Peer("fla", "kda", fla_kda),
    Peer("fla", "gdn2", fla_gdn2),
    Peer("fla", "gdp", fla_gdp),
    Peer("gym", "gdn", gym_gdn),
    Peer("gym", "kda", gym_kda),
    Peer("qla", "gdn", flash_qla),
    Peer("finfer", "gdn", flashinfer, backward=False),
    Peer("finfer-cp", "gdn", flashinfer_cp, backward=False, lone=True),
    Peer("cudnn", "kda", cudnn_kda("kda_hopper_cuda")),
    Peer("cudnn-dsl", "kda", cudnn_kda("kda_hopper"), backward=False),
    Peer("mamba_ssm", "mamba2", mamba_ssm),
)

# What a column stands for: the library as it calls itself, and its package.
LIBRARIES = {
    "fla": ("FLA", "fla-core"),
    "gym": ("Attention Gym", "attn-gym"),
    "qla": ("FlashQLA", "flash-qla"),
    "finfer": ("FlashInfer", "flashinfer-python"),
    "finfer-cp": ("FlashInfer, CP", "flashinfer-python"),
    "cudnn": ("cuDNN FE, CUDA", "nvidia-cudnn-frontend"),
    "cudnn-dsl": ("cuDNN FE, DSL", "nvidia-cudnn-frontend"),
    "mamba_ssm": ("mamba_ssm", "mamba-ssm"),
}


def version(system: str) -> str:
    """The installed version of a column's library; empty where it is not known."""
    try:
        return metadata.version(LIBRARIES[system][1])
    except (KeyError, metadata.PackageNotFoundError):
        return ""
