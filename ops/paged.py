"""Chunk-parallel prefill over a paged pool of states, for inference: the pool is advanced in place.

Shapes, dtypes, cu_seqlens and errors: see `lagraph.ops.chunk`. The rules of state_cache,
state_indices and has_initial_state: see `lagraph.ops.recurrent`. On CUDA the kernels are the fused
ones, elsewhere the reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lagraph.ops.argument import boolean
from lagraph.ops.form import FORMS, Call, forward
from lagraph.ops.replay import replay

if TYPE_CHECKING:
    from torch import Tensor

    from lagraph.ops.kinds import KernelOptions, ReplayState, SplitOptions

__all__ = [
    "paged_chunk_gdn",
    "paged_chunk_gdn2",
    "paged_chunk_gdp",
    "paged_chunk_kda",
    "paged_chunk_mamba2",
]


def paged_chunk_gdn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    state_cache: Tensor,
    state_indices: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    scale: float | None = None,
    kernel_options: SplitOptions | None = None,
) -> Tensor:
    """Gated delta rule over a pool of states: `chunk_gdn` for inference prefill.

    Args:
        q: Queries [B, T, HK, K].
        k: Keys [B, T, HK, K].
        v: Values [B, T, H, V].
        gate: Natural log of the decay [B, T, H].
        beta: Write strength [B, T, H].
        state_cache: Pool [num_slots, H, V, K] in fp32, bf16 or fp16, advanced in place.
        state_indices: Slot of every sequence [N].
        cu_seqlens: Offsets [N + 1] of packed sequences, with B = 1.
        has_initial_state: Whether the slot holds a state [N], bool; all do if absent.
        scale: Factor of the queries; K^-0.5 if absent.
        kernel_options: Of fused execution, no split schedules; see `SplitOptions`.

    Returns:
        The output [B, T, H, V]; zero where a sequence is padding.
    """
    out, _ = forward(
        Call(
            FORMS["gdn"], "paged_chunk_gdn", {"q": q, "k": k, "v": v, "gate": gate, "beta": beta},
            state_cache, cu_seqlens, {"scale": scale}, kernel_options=kernel_options,
            slots=state_indices, fresh=has_initial_state, paged=True,
        )
    )  # fmt: skip
    return out


def paged_chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    state_cache: Tensor,
    state_indices: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    autotune: bool = True,
    kernel_options: KernelOptions | None = None,
    replay_state: ReplayState | None = None,
) -> Tensor:
    """Kimi delta attention over a pool of states: `chunk_kda` for inference prefill.

    Args:
        q: Queries [B, T, HK, K].
        k: Keys [B, T, HK, K].
        v: Values [B, T, H, V].
        gate: Natural log of the decay [B, T, H, K].
        beta: Write strength [B, T, H].
        state_cache: Pool [num_slots, H, V, K] in fp32, bf16 or fp16, advanced in place.
        state_indices: Slot of every sequence [N].
        cu_seqlens: Offsets [N + 1] of packed sequences, with B = 1.
        has_initial_state: Whether the slot holds a state [N], bool; all do if absent.
        autotune: Taken for compatibility: nothing is benchmarked in a call.
        kernel_options: Of fused execution, no split schedules; see `KernelOptions`.
        replay_state: The tokens of every slot since its last complete chunk, which the pool then
            leaves out: see `lagraph.ops.replay`. Both are advanced in place.

    Returns:
        The output [B, T, H, V]; zero where a sequence is padding.
    """
    boolean("paged_chunk_kda", "autotune", autotune)
    call = Call(
        FORMS["kda"], "paged_chunk_kda", {"q": q, "k": k, "v": v, "gate": gate, "beta": beta},
        state_cache, cu_seqlens, {}, kernel_options=kernel_options, slots=state_indices,
        fresh=has_initial_state, paged=True,
    )  # fmt: skip
    return forward(call)[0] if replay_state is None else replay(call, replay_state)


def paged_chunk_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    w: Tensor,
    state_cache: Tensor,
    state_indices: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    scale: float | None = None,
    kernel_options: KernelOptions | None = None,
) -> Tensor:
    """Gated DeltaNet-2 over a pool of states: `chunk_gdn2` for inference prefill.

    Args:
        q: Queries [B, T, HK, K].
        k: Keys [B, T, HK, K].
        v: Values [B, T, H, V].
        gate: Natural log of the decay [B, T, H, K].
        beta: Erase strength [B, T, H, K].
        w: Write strength [B, T, H, V], in the dtype of q.
        state_cache: Pool [num_slots, H, V, K] in fp32, bf16 or fp16, advanced in place.
        state_indices: Slot of every sequence [N].
        cu_seqlens: Offsets [N + 1] of packed sequences, with B = 1.
        has_initial_state: Whether the slot holds a state [N], bool; all do if absent.
        scale: Factor of the queries; K^-0.5 if absent.
        kernel_options: Of fused execution, no split schedules; see `KernelOptions`.

    Returns:
        The output [B, T, H, V]; zero where a sequence is padding.
    """
    tokens: dict[str, Tensor | None] = {"q": q, "k": k, "v": v, "gate": gate, "beta": beta, "w": w}
    out, _ = forward(
        Call(
            FORMS["gdn2"], "paged_chunk_gdn2", tokens,
            state_cache, cu_seqlens, {"scale": scale}, kernel_options=kernel_options,
            slots=state_indices, fresh=has_initial_state, paged=True,
        )
    )  # fmt: skip
    return out


def paged_chunk_gdp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    state_cache: Tensor,
    state_indices: Tensor,
    *,
    num_householder: int,
    cu_seqlens: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    scale: float | None = None,
    kernel_options: KernelOptions | None = None,
) -> Tensor:
    """Gated DeltaProduct over a pool of states: `chunk_gdp` for inference prefill.

    Args:
        q: Queries [B, T, HK, K].
        k: Keys [B, T, n, HK, K] or [B, T * n, HK, K].
        v: Values [B, T, n, H, V] or [B, T * n, H, V].
        gate: Natural log of the decay [B, T, H].
        beta: Write strength [B, T, n, H] or [B, T * n, H].
        state_cache: Pool [num_slots, H, V, K] in fp32, bf16 or fp16, advanced in place.
        state_indices: Slot of every sequence [N].
        num_householder: Updates for each token, n.
        cu_seqlens: Offsets [N + 1] of packed sequences, with B = 1.
        has_initial_state: Whether the slot holds a state [N], bool; all do if absent.
        scale: Factor of the queries; K^-0.5 if absent.
        kernel_options: Of fused execution, no split schedules; see `KernelOptions`.

    Returns:
        The output [B, T, H, V]; zero where a sequence is padding.
    """
    out, _ = forward(
        Call(
            FORMS["gdp"], "paged_chunk_gdp", {"q": q, "k": k, "v": v, "gate": gate, "beta": beta},
            state_cache, cu_seqlens, {"scale": scale, "num_householder": num_householder},
            kernel_options=kernel_options, slots=state_indices, fresh=has_initial_state, paged=True,
        )
    )  # fmt: skip
    return out


def paged_chunk_mamba2(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state_cache: Tensor,
    state_indices: Tensor,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    z: Tensor | None = None,
    dt_softplus: bool = True,
    dt_min: float = 0.0,
    dt_max: float | None = None,
    cu_seqlens: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    kernel_options: KernelOptions | None = None,
) -> Tensor:
    """Mamba-2 over a pool of states: `chunk_mamba2` for inference prefill.

    Args:
        x: Inputs [B, T, H, V].
        dt: Raw step sizes [B, T, H].
        A: Decay rates [H], < 0.
        B: Input maps [B, T, G, K].
        C: Output maps [B, T, G, K].
        state_cache: Pool [num_slots, H, V, K] in fp32, bf16 or fp16, advanced in place.
        state_indices: Slot of every sequence [N].
        D, dt_bias, z, dt_softplus, dt_min, dt_max: As `chunk_mamba2` has them.
        cu_seqlens: Offsets [N + 1] of packed sequences, with B = 1.
        has_initial_state: Whether the slot holds a state [N], bool; all do if absent.
        kernel_options: Of fused execution, no split schedules; see `KernelOptions`.

    Returns:
        The output [B, T, H, V]; zero where a sequence is padding.
    """
    options: dict[str, Any] = {
        "A": A, "D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_min": dt_min,
        "dt_max": dt_max,
    }  # fmt: skip
    tokens: dict[str, Tensor | None] = {"x": x, "dt": dt, "B": B, "C": C, "z": z}
    out, _ = forward(
        Call(
            FORMS["mamba2"], "paged_chunk_mamba2", tokens,
            state_cache, cu_seqlens, options, kernel_options=kernel_options,
            slots=state_indices, fresh=has_initial_state, paged=True,
        )
    )  # fmt: skip
    return out
