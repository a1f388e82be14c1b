"""Chunk-parallel functions, for training and prefill: one for each family, batch first.

All take dense batches [B, T, ...] or packed ones [1, T, ...] with cu_seqlens, and return the
output with the final states, or with None. What they share:

Shapes: q, k [B, T, HK, K] and v [B, T, H, V], where HK divides H: each block of H // HK value heads
    shares a query/key head. A state is [N, H, V, K], N the number of sequences.
Dtypes: q, k, v share bf16, fp16, fp32 or fp64, and the output has it; gates and strengths may have
    any other floating dtype; initial_state is fp32, bf16 or fp16 (fp64 with fp64 tokens). The
    recurrence runs in fp32 (fp64 with fp64 tokens) and final states come back in that.
cu_seqlens [N + 1]: offsets that start at 0, never fall and may end before T. Sequences may be
    empty: their states pass through. Rows past the end are not read; outputs and gradients there
    are unspecified, see `mask_inactive_tokens` and `mask_inactive_token_gradients`.
Gradients: in every floating input, once; in the input's own dtype and shape.
Raises: ShapeMismatch, DtypeMismatch, DeviceMismatch, InvalidOption, RuleBroken for a bad argument;
    NoEngine or PlanNotOffered where the implementation does not serve the call; NotDifferentiable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lagraph.ops.argument import boolean
from lagraph.ops.form import FORMS, Call, forward
from lagraph.ops.kinds import Impl

if TYPE_CHECKING:
    from torch import Tensor

    from lagraph.ops.kinds import KernelOptions, SplitOptions

__all__ = ["chunk_gdn", "chunk_gdn2", "chunk_gdp", "chunk_kda", "chunk_mamba2"]


def chunk_gdn(
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
    impl: Impl | str = Impl.AUTO,
    kernel_options: SplitOptions | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule, chunk-parallel: S = exp(gate) S; S += beta (v - S k) k^T; o = scale S q.

    Shapes, dtypes and errors: see `lagraph.ops.chunk`.

    Args:
        q: Queries [B, T, HK, K].
        k: Keys [B, T, HK, K].
        v: Values [B, T, H, V].
        gate: Natural log of the decay [B, T, H].
        beta: Write strength [B, T, H].
        initial_state: [N, H, V, K]; zero if absent.
        cu_seqlens: Offsets [N + 1] of packed sequences, with B = 1.
        scale: Factor of the queries; K^-0.5 if absent.
        output_final_state: Return the final states, too.
        impl: "auto" (fused on CUDA, else reference), "fused" or "reference"; see `Impl`.
        kernel_options: Of fused execution; see `SplitOptions`.

    Returns:
        The output [B, T, H, V], and the final states [N, H, V, K] or None.
    """
    return forward(
        Call(
            FORMS["gdn"], "chunk_gdn", {"q": q, "k": k, "v": v, "gate": gate, "beta": beta},
            initial_state, cu_seqlens, {"scale": scale},
            output_final_state, impl, kernel_options,
        )
    )  # fmt: skip


def chunk_kda(
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
    fastmath: bool = True,
    autotune: bool = True,
    impl: Impl | str = Impl.AUTO,
    kernel_options: KernelOptions | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Kimi delta attention, chunk-parallel: `chunk_gdn` with a decay for every key channel.

    Shapes, dtypes and errors: see `lagraph.ops.chunk`. Gates need no lower bound here.

    Args:
        q: Queries [B, T, HK, K].
        k: Keys [B, T, HK, K].
        v: Values [B, T, H, V].
        gate: Natural log of the decay per token, not summed up [B, T, H, K].
        beta: Write strength [B, T, H].
        initial_state: [N, H, V, K]; zero if absent.
        cu_seqlens: Offsets [N + 1] of packed sequences, with B = 1.
        scale: Factor of the queries; K^-0.5 if absent.
        output_final_state: Return the final states, too.
        fastmath: Taken for compatibility: the exponentials are the same for either value.
        autotune: Taken for compatibility: nothing is benchmarked in a call.
        impl: "auto" (fused on CUDA, else reference), "fused" or "reference"; see `Impl`.
        kernel_options: Of fused execution; see `KernelOptions`.

    Returns:
        The output [B, T, H, V], and the final states [N, H, V, K] or None.
    """
    boolean("chunk_kda", "fastmath", fastmath)
    boolean("chunk_kda", "autotune", autotune)
    return forward(
        Call(
            FORMS["kda"], "chunk_kda", {"q": q, "k": k, "v": v, "gate": gate, "beta": beta},
            initial_state, cu_seqlens, {"scale": scale},
            output_final_state, impl, kernel_options,
        )
    )  # fmt: skip


def chunk_gdn2(
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
    impl: Impl | str = Impl.AUTO,
    kernel_options: KernelOptions | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet-2, chunk-parallel: KDA that erases by key channel and writes by value channel.

    Shapes, dtypes and errors: see `lagraph.ops.chunk`; other arguments as `chunk_kda` has them.

    Args:
        q: Queries [B, T, HK, K].
        k: Keys [B, T, HK, K].
        v: Values [B, T, H, V].
        gate: Natural log of the decay [B, T, H, K].
        beta: Erase strength [B, T, H, K].
        w: Write strength [B, T, H, V], in the dtype of q.
        initial_state: [N, H, V, K]; zero if absent.

    Returns:
        The output [B, T, H, V], and the final states [N, H, V, K] or None.
    """
    tokens = {"q": q, "k": k, "v": v, "gate": gate, "beta": beta, "w": w}
    return forward(
        Call(
            FORMS["gdn2"], "chunk_gdn2", tokens, initial_state, cu_seqlens, {"scale": scale},
            output_final_state, impl, kernel_options,
        )
    )  # fmt: skip


def chunk_gdp(
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
    impl: Impl | str = Impl.AUTO,
    kernel_options: KernelOptions | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaProduct, chunk-parallel: GDN with num_householder updates for each token.

    Shapes, dtypes and errors: see `lagraph.ops.chunk`; other arguments as `chunk_gdn` has them.

    Args:
        q: Queries [B, T, HK, K].
        k: Keys, token-major [B, T, n, HK, K], or expanded [B, T * n, HK, K].
        v: Values [B, T, n, H, V] or [B, T * n, H, V].
        gate: Natural log of the decay [B, T, H], one for each token.
        beta: Write strength [B, T, n, H] or [B, T * n, H].
        initial_state: [N, H, V, K]; zero if absent.
        num_householder: Updates for each token, n.
        cu_seqlens: Offsets [N + 1] in tokens.

    Returns:
        The output [B, T, H, V], and the final states [N, H, V, K] or None.
    """
    return forward(
        Call(
            FORMS["gdp"], "chunk_gdp", {"q": q, "k": k, "v": v, "gate": gate, "beta": beta},
            initial_state, cu_seqlens, {"scale": scale, "num_householder": num_householder},
            output_final_state, impl, kernel_options,
        )
    )  # fmt: skip


def chunk_mamba2(
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
    impl: Impl | str = Impl.AUTO,
    kernel_options: KernelOptions | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Mamba-2, chunk-parallel: S = exp(A dt') S + dt' x B^T; y = S C + D x; y *= z sigmoid(z).

    dt' = clamp(softplus(dt + dt_bias), dt_min, dt_max). Dtypes and errors: see
    `lagraph.ops.chunk`; other arguments as `chunk_gdn` has them.

    Args:
        x: Inputs [B, T, H, V].
        dt: Raw step sizes [B, T, H].
        A: Decay rates [H], < 0.
        B: Input maps [B, T, G, K]; G divides H.
        C: Output maps [B, T, G, K].
        initial_state: [N, H, V, K]; zero if absent.
        D: Skip [H] or [H, V].
        dt_bias: Added to dt [H].
        z: Output gate [B, T, H, V].
        dt_softplus: Whether dt' is a softplus.
        dt_min: Lower clamp of dt'.
        dt_max: Upper clamp of dt'; None means unbounded.

    Returns:
        The output [B, T, H, V], and the final states [N, H, V, K] or None.
    """
    options: dict[str, Any] = {
        "A": A, "D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_min": dt_min,
        "dt_max": dt_max,
    }  # fmt: skip
    return forward(
        Call(
            FORMS["mamba2"], "chunk_mamba2", {"x": x, "dt": dt, "B": B, "C": C, "z": z},
            initial_state, cu_seqlens, options,
            output_final_state, impl, kernel_options,
        )
    )  # fmt: skip
