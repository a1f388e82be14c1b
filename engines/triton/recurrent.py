"""Launches of the recurrent kernels: the scan over tokens, and a few tokens of many sequences.

Nothing here checks its arguments (the operators do), and nothing reads a tensor's values.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lagraph.engines.triton.bound import Bound, Launcher
from lagraph.engines.triton.conv import device_of, power_of_2
from lagraph.engines.triton.kernels.recurrent import (
    accept_kernel,
    decode_gate_kernel,
    decode_head_kernel,
    decode_key_kernel,
    recurrent_kernel,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lagraph.problem import Traits

__all__ = ["Launch", "accept", "decode", "decode_tensors", "recurrent_scan"]

_SCAN, _ACCEPT = Launcher(recurrent_kernel), Launcher(accept_kernel)
_DECODE_HEAD, _DECODE_GATE = Launcher(decode_head_kernel), Launcher(decode_gate_kernel)
_DECODE_KEY = Launcher(decode_key_kernel)
# Stands in for an unbounded dt_max: larger than any step, and exact in fp32.
UNBOUNDED = 3.0e38
SCAN_TILE = 1024  # elements of the state in a scan's warp
# Of decode, for K = 128: rows of the state in a program. Its one warp meets no barrier, of which
# there are a dozen with more, one for every small sum.
DECODE_ROWS = 8
# Of a 16-bit pool: half the bytes, and as many instructions, of which a program's first 400 do not
# depend on its rows. As many registers as leave nine programs on a multiprocessor, 72 KB on the
# way; 200 would leave ten, and spill in some.
DECODE_ROWS_16BIT, REGISTERS_16BIT = 32, 224
# Of a batch, all heads: with fewer, some of an H200's 528 schedulers would have no program of 32
# rows, and what counts is how long a program takes.
FEW_ROWS = 528 * DECODE_ROWS_16BIT
ACCEPT_BLOCK = 4096  # elements of a program
UNIT = 8  # elements that strides of vectors are multiples of, wherever possible


def _dense(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()


def _lead(start: int, stop: int, x: torch.Tensor | None) -> tuple[int, ...]:
    """Strides of these axes, zeros for an absent tensor."""
    return (0,) * (stop - start) if x is None else x.stride()[start:stop]


def _skip(d: torch.Tensor | None) -> tuple[int, int]:
    """Strides of D [H] or [H, P]."""
    return (0, 0) if d is None else (d.stride(0), d.stride(1) if d.dim() == 2 else 0)


def _tile(K: int, V: int, elements: int, block_v: int | None) -> tuple[int, int]:
    """BK and BV of a tile with about this many elements."""
    block_k = max(power_of_2(K), 16)
    if block_v is None:
        block_v = max(elements // block_k, 4)
    return block_k, min(block_v, power_of_2(V))


def recurrent_scan(
    traits: Traits,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    *,
    w: torch.Tensor | None = None,
    a: torch.Tensor | None = None,
    d: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    a_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    state_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    final_state: torch.Tensor | None = None,
    states: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    scale: float | None = None,
    gate: str = "log",
    lower: float = -5.0,
    norm: bool = False,
    sigmoid: bool = False,
    double: bool = False,
    guard: bool = False,
    dt_softplus: bool = True,
    dt_min: float = 0.0,
    dt_max: float | None = None,
    first_slot: int = 1,
    block_v: int | None = None,
    warps: int | None = None,
) -> torch.Tensor:
    """Run a family's recurrence token by token; returns the outputs [B, T, HO, V] in q's dtype.

    Args:
        traits: The family's traits.
        q, k, v: [B, T, H, K], [B, T, HK, K], [B, T, HV, V]; Mamba-2's C, B, x. With several updates
            a token, k and v are [B, T, n, heads, size]. fp16, bf16 or fp32, innermost contiguous.
        g: [B, T, HO], or [B, T, HO, K] under a gate per key channel, in the form that `gate` names:
            "log", "linear", "softplus" or "bounded"; Mamba-2's raw dt.
        beta: [B, T, HO] ([B, T, n, HO]); per key channel [B, T, HO, K]. Not for Mamba-2.
        cu_seqlens: [N + 1] offsets of packed sequences (B = 1); without, every row is a sequence.
        w, z: [B, T, HO, V]. a, a_log: [HO]. dt_bias: [HO] or [HO, K]. d: [HO] or [HO, V].
        initial_state: [N, HO, V, K] in fp32, bf16 or fp16, or a pool [P, HO, V, K] whose rows
            `state_indices` [N] select; rows below `first_slot` or past the pool are padding.
        has_initial_state: [N] bool; where False the state starts from zero and is not read.
        final_state: Written where given, as initial_state; may be initial_state itself.
        states: [B, T, HO, V, K], any float dtype, dense: written with the state after every token.
        out: Where to write the outputs, dense.
        norm, sigmoid, double, guard: Unit norm of q and k; strengths from logits; in (0, 2);
            GDN-2's beta_guard.
        block_v, warps: Launch shape, for tuning.
    """
    B, T, H, K = q.shape
    V, HO = v.shape[-1], g.shape[2]
    n = k.shape[2] if k.dim() == 5 else 1
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if out is None:
        out = torch.empty((B, T, HO, V), dtype=q.dtype, device=q.device)
    if N == 0:
        return out
    pool = initial_state if initial_state is not None else final_state
    block_k, block_v = _tile(K, V, SCAN_TILE, block_v)
    kind = gate if traits.delta else "ssd"

    def steps(x: torch.Tensor | None, rank: int, several: bool = False) -> tuple[int, ...]:
        """Strides of batch (none where sequences are packed), token, update if several, head."""
        if x is None:
            return (0,) * (4 if several else 3)
        batch = 0 if cu_seqlens is not None else x.stride(0)
        if not several:
            return batch, x.stride(1), x.stride(2)
        update = (x.stride(2), x.stride(3)) if x.dim() == rank + 1 else (0, x.stride(2))
        return batch, x.stride(1), *update

    beta_rank = 4 if traits.erase == "key" else 3
    with device_of(q):
        _SCAN(
            N * HO * -(-V // block_v),
            (q, k, v, g, beta, w, _dense(a), d, z, _dense(a_log), _dense(dt_bias), cu_seqlens,
             initial_state, state_indices, has_initial_state, out, final_state, states),
            (T, pool.shape[0] if pool is not None else 0),
            (K**-0.5 if scale is None and traits.delta else 1.0 if scale is None else float(scale),
             float(lower), float(dt_min), UNBOUNDED if dt_max in (None, inf) else float(dt_max),
             *_lead(0, 1, cu_seqlens), *_lead(0, 1, state_indices), *_lead(0, 1, has_initial_state),
             *steps(q, 4), *steps(k, 4, True), *steps(v, 4, True), *steps(g, 3),
             *steps(beta, beta_rank, True), *steps(w, 4), *steps(z, 4), *_skip(d),
             *_lead(0, 1, initial_state), *_lead(0, 1, final_state)),
            {"H": H, "HK": k.shape[-2], "HV": v.shape[-2], "HO": HO, "K": K, "V": V, "NS": n,
             "BK": block_k, "BV": block_v, "PAD": first_slot, "GATE": kind,
             "KEY_GATE": traits.gate == "key", "DELTA": traits.delta,
             "ERASE_KEY": traits.erase == "key", "NORM": norm, "SIGMOID": sigmoid,
             "DOUBLE": double, "GUARD": guard, "SOFTPLUS": dt_softplus,
             "num_warps": warps or max(block_k * block_v // SCAN_TILE, 1)},
        )  # fmt: skip
    return out


class Launch(NamedTuple):
    """A launch, the tensors that it was bound to, and its sizes."""

    bound: Bound
    tensors: tuple[torch.Tensor | None, ...]
    sizes: tuple[int, ...]

    def run(self) -> Launch:
        """Launch on these tensors."""
        first: Any = self.tensors[0]
        if self.bound.programs:
            with device_of(first):
                self.bound(self.tensors, self.sizes)
        return self


def decode(
    traits: Traits,
    packed: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None,
    pool: torch.Tensor,
    state_indices: torch.Tensor,
    out: torch.Tensor,
    *,
    w: torch.Tensor | None = None,
    a: torch.Tensor | None = None,
    d: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    a_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    states: torch.Tensor | None = None,
    heads: int,
    substeps: int = 1,
    scale: float = 1.0,
    gate: str = "softplus",
    lower: float = -5.0,
    double: bool = False,
    guard: bool = False,
    dt_softplus: bool = True,
    dt_min: float = 0.0,
    dt_max: float | None = None,
    block_v: int | None = None,
    warps: int | None = None,
    registers: int | None = None,
    bind_only: bool = False,
) -> Launch:
    """T tokens of N sequences, for one: advance pool rows in place and write `out`.

    Returns the launch, for more of the kind: it takes the `decode_tensors` of any tensors like
    these. bind_only: nothing is launched now.

    Args:
        packed: [N, width] rows, [Q | K | V] or [x | B | C], heads rows contiguous; `heads` counts
            the heads of K; keys and values of several updates stand one after the other. Of
            several tokens [N, T, width].
        g, beta, w, z: raw gate, strength logits, write strength, output gate: [1, N, ...], or
            [N, T, ...], beta with an axis n where there are several updates.
        pool: [P, HO, V, K] with dense rows, fp32, bf16 or fp16.
        out: Dense [1, N, HO, V] or [N, T, HO, V].
        states: Dense [N, T, HO, V, K], to be written with the state after every token; the pool is
            only read then.
        block_v, warps, registers: Launch shape, for tuning; 0 registers: as many as it takes.
    """
    several = packed.dim() == 3
    N = packed.shape[0]
    _, HO, V, K = pool.shape
    block_k = max(power_of_2(K), 16)
    few = N * HO * V < FEW_ROWS
    rows = DECODE_ROWS_16BIT if pool.element_size() == 2 and not few else DECODE_ROWS
    if block_v is None:
        block_v = max(rows * 128 // block_k, 4)
    block_v = min(block_v, power_of_2(V))
    if warps is None:
        warps = max(min(block_k * block_v // (rows * 128), 8), 1)

    # As many as it takes without spilling; left alone, some families take a third more.
    limit = None
    if pool.element_size() == 2:
        if K == 128 and V % block_v == 0 and block_v == 32 * warps and not guard:
            limit = REGISTERS_16BIT
    elif traits.delta and K == 128 and block_k * block_v <= 1024 * warps and substeps <= 2:
        limit = 80 if substeps == 1 and traits.gate == "head" else 96
    if registers is not None:
        limit = registers or None

    def steps(x: torch.Tensor | None, several_updates: bool = False) -> tuple[int, ...]:
        """Strides of sequence, token, update if asked for, and head. One token's row stride is
        both of the first: they then agree with several tokens' in what they are multiples of."""
        if x is None:
            return (0,) * (4 if several_updates else 3)
        strides = x.stride()
        lead = strides[:2] if several else (strides[1], strides[1])
        if not several_updates:
            return *lead, strides[2]
        updates = traits.erase == "head" and x.dim() == 4
        return *lead, *((strides[2], strides[3]) if updates else (0, strides[2]))

    s_x = packed.stride()[:2] if several else (packed.stride(0),) * 2
    s_g, s_b, s_w, s_z = steps(g), steps(beta, True), steps(w), steps(z)
    key_gate, erase_key = traits.gate == "key", traits.erase == "key"
    # Vectors of 16 bytes, where all of them lie so.
    rows_of = [*s_x, *s_w, *s_z, pool.stride(0)]
    rows_of += [*s_g] if key_gate else []
    rows_of += [*s_b] if erase_key else []
    unit = 1 if any(stride % UNIT for stride in rows_of) else UNIT

    def counted(strides: Sequence[int], vector: bool = True) -> tuple[int, ...]:
        return tuple([stride // unit for stride in strides]) if vector else tuple(strides)

    tensors = decode_tensors(
        packed, g, beta, w, a, a_log, dt_bias, d, z, pool, state_indices, has_initial_state, out,
        states,
    )  # fmt: skip
    launcher = _DECODE_KEY if erase_key else _DECODE_GATE if key_gate else _DECODE_HEAD
    bound = launcher.bind(
        N * HO * -(-V // block_v),
        tensors,
        (float(scale), float(lower), float(dt_min),
         UNBOUNDED if dt_max in (None, inf) else float(dt_max),
         *counted(s_x), *counted(s_g, key_gate), *counted(s_b, erase_key), *counted(s_w),
         *counted(s_z), *_skip(d), *counted([pool.stride(0)]), *_lead(0, 1, state_indices),
         *_lead(0, 1, has_initial_state)),
        {"HK": heads, "HO": HO, "K": K, "V": V, "NS": substeps, "BK": block_k, "BV": block_v,
         "UNIT": unit, "PAD": 1, "GATE": gate if traits.delta else "ssd",
         "KEY_GATE": key_gate, "DELTA": traits.delta, "ERASE_KEY": erase_key,
         "NORM": traits.delta, "SIGMOID": traits.delta, "DOUBLE": double, "GUARD": guard,
         "SOFTPLUS": dt_softplus,
         "num_warps": warps, "maxnreg": limit},
    )  # fmt: skip
    tokens = packed.shape[1] if several else 1
    launch = Launch(bound, tensors, (pool.shape[0], tokens, int(states is not None)))
    return launch if bind_only else launch.run()


def decode_tensors(
    packed: torch.Tensor, gate: torch.Tensor, beta: torch.Tensor | None, w: torch.Tensor | None,
    a: torch.Tensor | None, a_log: torch.Tensor | None, dt_bias: torch.Tensor | None,
    d: torch.Tensor | None, z: torch.Tensor | None, pool: torch.Tensor, index: torch.Tensor,
    has: torch.Tensor | None, out: torch.Tensor, states: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """The kernel's tensors in its order, from the operator's in its own. The pool stands in for
    absent states: whether they are written is no other kernel."""
    return (
        packed, gate, beta, w, a, d, z, a_log, dt_bias, pool, index, has, out,
        pool if states is None else states,
    )  # fmt: skip


def accept(
    pool: torch.Tensor, index: torch.Tensor, states: torch.Tensor, count: torch.Tensor,
    cu_seqlens: torch.Tensor | None, *, bind_only: bool = False,
) -> Launch:  # fmt: skip
    """Put of `states`, dense [N, T, ...] or packed, the one after the last accepted token of every
    sequence into its slot of the pool [P, ...], whose slots are dense. Returns the launch.
    """
    size = pool[0].numel()
    block = min(ACCEPT_BLOCK, max(power_of_2(size), 128))
    tensors = (pool, index, states, count, cu_seqlens)
    bound = _ACCEPT.bind(
        index.shape[0] * -(-size // block),
        tensors,
        (pool.stride(0), index.stride(0), count.stride(0), *_lead(0, 1, cu_seqlens)),
        {"SIZE": size, "BLOCK": block, "PAD": 1, "num_warps": 4},
    )
    launch = Launch(bound, tensors, (pool.shape[0], states.shape[1]))
    return launch if bind_only else launch.run()
