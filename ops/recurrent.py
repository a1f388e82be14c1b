"""Functions that carry a state from call to call: inference prefill, decoding, correctness checks.

Batch first, as in `lagraph.ops.chunk`: shapes, dtypes, cu_seqlens and errors are said there. With
state_indices, initial_state is a pool [num_slots, H, V, K] in fp32, bf16 or fp16 (fp64 with fp64
tokens), advanced in place:

    state_indices [N], int32 or int64: sequence i reads and writes slot state_indices[i], one of its
        own in [1, num_slots). An index <= 0 is padding: zero output, nothing read or written.
    has_initial_state [N], bool: where False, the slot is taken to be fresh: whatever it holds, NaN
        too, the sequence starts from zero and overwrites it, an empty sequence as well.
    Slots may lie apart by any stride, each a dense [H, V, K]. No other slot changes by a bit.
    On a CPU wrong indices raise; on a GPU they are not looked at: one beyond the pool is padding,
        and sequences that share a slot race.

states [B, T, H, V, K], dense, fp32, bf16 or fp16 (fp64 with fp64 tokens): for tokens that may turn
    out wrong, as in speculative decoding. Written with the state after every token, while a pool
    is only read; `accept_states` then puts the state after the last good token into it. Rows of
    padding and past cu_seqlens[-1] are not written. For inference.

Fused, a scan takes its tokens in order, K up to 256, in bf16, fp16 or fp32. It is for inference: a
tensor that requires a gradient is refused. Its bits depend on the sequence alone. The reference is
the chunk recurrence in PyTorch, differentiable but for pools.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lagraph.ops.argument import boolean
from lagraph.ops.form import FORMS, Call, forward
from lagraph.ops.kinds import Impl

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["recurrent_gdn", "recurrent_gdn2", "recurrent_gdp", "recurrent_kda", "recurrent_mamba2"]


def recurrent_gdn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    output_final_state: bool = False,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    autotune: bool = True,
    impl: Impl | str = Impl.AUTO,
    states: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule, its tokens in order: `chunk_gdn` for decoding and inference prefill.

    Pools, gradients and engines: see `lagraph.ops.recurrent`.

    Args:
        q: Queries [B, T, HK, K].
        k: Keys [B, T, HK, K].
        v: Values [B, T, H, V].
        gate: Natural log of the decay [B, T, H].
        beta: Write strength [B, T, H].
        initial_state: [N, H, V, K], or the pool [num_slots, H, V, K]; zero if absent.
        cu_seqlens: Offsets [N + 1] of packed sequences, with B = 1.
        scale: Factor of the queries; K^-0.5 if absent.
        output_final_state: Return the final states, too; not with a pool.
        state_indices: Slot of every sequence [N].
        has_initial_state: Whether the slot holds a state [N], bool; all do if absent.
        autotune: Taken for compatibility: nothing is benchmarked in a call.
        impl: "auto" (fused on CUDA, else reference), "fused" or "reference"; see `Impl`.
        states: Where to write the states after every token [B, T, H, V, K]; a pool is only read.

    Returns:
        The output [B, T, H, V], and the final states [N, H, V, K] or None.
    """
    boolean("recurrent_gdn", "autotune", autotune)
    return forward(
        Call(
            FORMS["gdn"], "recurrent_gdn", {"q": q, "k": k, "v": v, "gate": gate, "beta": beta},
            initial_state, cu_seqlens, {"scale": scale}, output_final_state,
            impl, None, state_indices, has_initial_state, scan=True,
            states=states,
        )
    )  # fmt: skip


def recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    output_final_state: bool = False,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    autotune: bool = True,
    impl: Impl | str = Impl.AUTO,
    states: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Kimi delta attention, its tokens in order: `chunk_kda` for decoding and inference prefill.

    Pools, gradients and engines: see `lagraph.ops.recurrent`.

    Args:
        q: Queries [B, T, HK, K].
        k: Keys [B, T, HK, K].
        v: Values [B, T, H, V].
        gate: Natural log of the decay [B, T, H, K].
        beta: Write strength [B, T, H].
        initial_state: [N, H, V, K], or the pool [num_slots, H, V, K]; zero if absent.
        cu_seqlens: Offsets [N + 1] of packed sequences, with B = 1.
        scale: Factor of the queries; K^-0.5 if absent.
        output_final_state: Return the final states, too; not with a pool.
        state_indices: Slot of every sequence [N].
        has_initial_state: Whether the slot holds a state [N], bool; all do if absent.
        autotune: Taken for compatibility: nothing is benchmarked in a call.
        impl: "auto" (fused on CUDA, else reference), "fused" or "reference"; see `Impl`.
        states: Where to write the states after every token [B, T, H, V, K]; a pool is only read.

    Returns:
        The output [B, T, H, V], and the final states [N, H, V, K] or None.
    """
    boolean("recurrent_kda", "autotune", autotune)
    return forward(
        Call(
            FORMS["kda"], "recurrent_kda", {"q": q, "k": k, "v": v, "gate": gate, "beta": beta},
            initial_state, cu_seqlens, {"scale": scale}, output_final_state,
            impl, None, state_indices, has_initial_state, scan=True,
            states=states,
        )
    )  # fmt: skip


def recurrent_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    w: Tensor,
    initial_state: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    output_final_state: bool = False,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    impl: Impl | str = Impl.AUTO,
    states: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet-2, its tokens in order: `chunk_gdn2` for decoding and inference prefill.

    Pools, gradients and engines: see `lagraph.ops.recurrent`.

    Args:
        q: Queries [B, T, HK, K].
        k: Keys [B, T, HK, K].
        v: Values [B, T, H, V].
        gate: Natural log of the decay [B, T, H, K].
        beta: Erase strength [B, T, H, K].
        w: Write strength [B, T, H, V], in the dtype of q.
        initial_state: [N, H, V, K], or the pool [num_slots, H, V, K]; zero if absent.
        cu_seqlens: Offsets [N + 1] of packed sequences, with B = 1.
        scale: Factor of the queries; K^-0.5 if absent.
        output_final_state: Return the final states, too; not with a pool.
        state_indices: Slot of every sequence [N].
        has_initial_state: Whether the slot holds a state [N], bool; all do if absent.
        impl: "auto" (fused on CUDA, else reference), "fused" or "reference"; see `Impl`.
        states: Where to write the states after every token [B, T, H, V, K]; a pool is only read.

    Returns:
        The output [B, T, H, V], and the final states [N, H, V, K] or None.
    """
    tokens: dict[str, Tensor | None] = {"q": q, "k": k, "v": v, "gate": gate, "beta": beta, "w": w}
    return forward(
        Call(
            FORMS["gdn2"], "recurrent_gdn2", tokens,
            initial_state, cu_seqlens, {"scale": scale}, output_final_state,
            impl, None, state_indices, has_initial_state, scan=True,
            states=states,
        )
    )  # fmt: skip


def recurrent_gdp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    *,
    num_householder: int,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    output_final_state: bool = False,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    impl: Impl | str = Impl.AUTO,
    states: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaProduct, its tokens in order: `chunk_gdp` for decoding and inference prefill.

    Pools, gradients and engines: see `lagraph.ops.recurrent`.

    Args:
        q: Queries [B, T, HK, K].
        k: Keys [B, T, n, HK, K] or [B, T * n, HK, K].
        v: Values [B, T, n, H, V] or [B, T * n, H, V].
        gate: Natural log of the decay [B, T, H].
        beta: Write strength [B, T, n, H] or [B, T * n, H].
        initial_state: [N, H, V, K], or the pool [num_slots, H, V, K]; zero if absent.
        num_householder: Updates for each token, n.
        cu_seqlens: Offsets [N + 1] of packed sequences, with B = 1.
        scale: Factor of the queries; K^-0.5 if absent.
        output_final_state: Return the final states, too; not with a pool.
        state_indices: Slot of every sequence [N].
        has_initial_state: Whether the slot holds a state [N], bool; all do if absent.
        impl: "auto" (fused on CUDA, else reference), "fused" or "reference"; see `Impl`.
        states: Where to write the states after every token [B, T, H, V, K]; a pool is only read.

    Returns:
        The output [B, T, H, V], and the final states [N, H, V, K] or None.
    """
    return forward(
        Call(
            FORMS["gdp"], "recurrent_gdp", {"q": q, "k": k, "v": v, "gate": gate, "beta": beta},
            initial_state, cu_seqlens, {"scale": scale, "num_householder": num_householder},
            output_final_state, impl, None, state_indices, has_initial_state, scan=True,
            states=states,
        )
    )  # fmt: skip


def recurrent_mamba2(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    initial_state: Tensor | None = None,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    z: Tensor | None = None,
    dt_softplus: bool = True,
    dt_min: float = 0.0,
    dt_max: float | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    impl: Impl | str = Impl.AUTO,
    states: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Mamba-2, its tokens in order: `chunk_mamba2` for decoding and inference prefill.

    Pools, gradients and engines: see `lagraph.ops.recurrent`.

    Args:
        x: Inputs [B, T, H, V].
        dt: Raw step sizes [B, T, H].
        A: Decay rates [H], < 0.
        B: Input maps [B, T, G, K].
        C: Output maps [B, T, G, K].
        initial_state: [N, H, V, K], or the pool [num_slots, H, V, K]; zero if absent.
        D, dt_bias, z, dt_softplus, dt_min, dt_max: As `chunk_mamba2` has them.
        cu_seqlens: Offsets [N + 1] of packed sequences, with B = 1.
        output_final_state: Return the final states, too; not with a pool.
        state_indices: Slot of every sequence [N].
        has_initial_state: Whether the slot holds a state [N], bool; all do if absent.
        impl: "auto" (fused on CUDA, else reference), "fused" or "reference"; see `Impl`.
        states: Where to write the states after every token [B, T, H, V, K]; a pool is only read.

    Returns:
        The output [B, T, H, V], and the final states [N, H, V, K] or None.
    """
    options: dict[str, Any] = {
        "A": A, "D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_min": dt_min,
        "dt_max": dt_max,
    }  # fmt: skip
    tokens: dict[str, Tensor | None] = {"x": x, "dt": dt, "B": B, "C": C, "z": z}
    return forward(
        Call(
            FORMS["mamba2"], "recurrent_mamba2", tokens,
            initial_state, cu_seqlens, options, output_final_state,
            impl, None, state_indices, has_initial_state, scan=True,
            states=states,
        )
    )  # fmt: skip
