"""Checks of context parallelism that need several processes, spawned once a setting and world.

`outcomes(setting, world)` runs a setting's checks in that many processes and returns
{check: [one message per rank, "" where it held]}. Checks compare with one rank, which every
process computes for itself from the same draw. Settings: gloo on CPUs; NCCL on one GPU a rank, with
the reference in fp64 (so that only the exchange is in question), and with the kernels in bf16, a
family each, against the reference in fp64; the same kernels in processes that share one GPU, whose
exchange goes over gloo; and the kernels under Triton's interpreter, in fp32.

    python tests/parallel.py gloo 2 3          settings and worlds by hand
"""

from __future__ import annotations

import copy
import os
import socket
import tempfile
import time
import traceback
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import lagraph
from lagraph import ops
from lagraph.ops import context_parallel as cp

FAMILIES = ("gdn", "kda", "gdn2", "gdp", "mamba2")
F64 = torch.float64
H, HK, K, V, n = 2, 1, 8, 6, 2
PARAMS = ("A", "D", "dt_bias")
CU = (0, 7, 7, 61, 64, 96)  # an empty document, a long one, a short one
DRAWS = 8  # over which errors of parameters' gradients are taken


@dataclass(frozen=True)
class Setting:
    """Where and how the checks run.

    fused: the kernels instead of the reference in fp64. low: the dtype of checks that compare
    roundings. dims: K and V. output, gradient: errors that are always allowed. shared: all ranks
    have one GPU.
    """

    name: str
    backend: str = "gloo"
    kind: str = "cpu"
    families: tuple[str, ...] = FAMILIES
    fused: bool = False
    dtype: torch.dtype = F64
    low: torch.dtype = torch.float32
    dims: tuple[int, int] = (8, 6)
    output: float = 0.0
    gradient: float = 0.0
    shared: bool = False

    @property
    def device(self):
        if self.kind == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    @property
    def impl(self):
        return "fused" if self.fused else "reference"

    def of(self, *names):
        """Those of some families that the setting has, or its first."""
        return tuple(name for name in names if name in self.families) or self.families[:1]


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("gloo"),
        Setting("nccl", "nccl", "cuda", ("kda", "mamba2")),
        *(Setting(f"nccl-{family}", "nccl", "cuda", (family,), True, torch.bfloat16,
                  torch.bfloat16, (64, 64), 5e-3, 2e-2) for family in FAMILIES),
        *(Setting(f"gloo-gpu-{family}", "gloo", "cuda", (family,), True, torch.bfloat16,
                  torch.bfloat16, (64, 64), 5e-3, 2e-2, True) for family in FAMILIES),
        Setting("interpreted", families=("gdn", "mamba2"), dtype=torch.float32, dims=(16, 16),
                output=3e-5, gradient=3e-5),
    )
}  # fmt: skip
NOW = SETTINGS["gloo"]


def enter(setting):
    """Let this process's checks run in a setting."""
    global NOW, K, V
    NOW = setting
    K, V = setting.dims
    if setting.name == "interpreted":
        os.environ |= {"TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
        import interpreted
        from quicken import quicken
        from tensorfloat import cut

        from lagraph.ops import staged

        def call(self, direction, ports, options=MappingProxyType({})):
            node = self.node(direction)
            x = {name: ports[name] for name in node.input_names if ports.get(name) is not None}
            made = interpreted.run(self.family, direction, x, **{**self.options, **options})
            return tuple(made.get(name, x["g"].new_empty(0)) for name in node.output_names)

        staged.Local.call = call
        quicken()
        cut()
    if setting.shared:
        through_the_host()


# Gloo with tensors of a GPU -------------------------------------------------------------------


class Copied:
    """A transfer on the host under way, and what its results are copied back to."""

    def __init__(self, work, back=()):
        self.work, self.back = work, back

    def wait(self, *timeout):
        self.work.wait(*timeout)
        for target, host in self.back:
            target.copy_(host)


def through_the_host():
    """Let this process's collectives take a GPU's tensors: gloo has few of them, and no messages.

    A rank copies what it sends when it begins, and what it gets when it waits, as NCCL would let
    it see either. Only what the checks and the library call is here.
    """
    from lagraph.ops import exchange

    gather, reduce, batch = exchange._all_gather, dist.all_reduce, dist.batch_isend_irecv

    def all_gather(out, rows, group=None, async_op=False):
        host = torch.empty(out.shape, dtype=out.dtype)
        work = Copied(gather(host, rows.cpu(), group=group, async_op=True), [(out, host)])
        return work if async_op else work.wait()

    def all_reduce(x, op=dist.ReduceOp.SUM, group=None):
        host = x.cpu()
        reduce(host, op, group=group)
        x.copy_(host)

    def batch_isend_irecv(messages):
        under_way = []
        for m in messages:
            receives = m.op is dist.irecv
            host = torch.empty_like(m.tensor, device="cpu") if receives else m.tensor.cpu()
            copy = dist.P2POp(m.op, host, group=m.group, tag=m.tag, group_peer=m.group_peer)
            back = [(m.tensor, host)] if receives else []
            under_way += [Copied(work, back) for work in batch([copy])]
        return under_way

    exchange._all_gather, dist.all_reduce = all_gather, all_reduce
    dist.batch_isend_irecv = batch_isend_irecv


# Draws and references -------------------------------------------------------------------------


def draw(family, cu=CU, dtype=None, seed=0, gated=True):
    """Arguments of a family's functions on the global stream, and the seeds of its gradients."""
    r = torch.Generator().manual_seed(seed)
    T, N = cu[-1], len(cu) - 1

    def randn(*shape):
        return torch.randn(*shape, generator=r, dtype=F64)

    def rand(*shape):
        return torch.rand(*shape, generator=r, dtype=F64)

    def key(*shape):
        return F.normalize(randn(*shape), dim=-1)

    if family == "mamba2":
        x = {"x": randn(1, T, H, V), "dt": randn(1, T, H), "A": -rand(H), "B": key(1, T, HK, K),
             "C": randn(1, T, HK, K), "D": randn(H), "dt_bias": randn(H)}  # fmt: skip
        if gated:
            x["z"] = randn(1, T, H, V)
    else:
        many = (n,) if family == "gdp" else ()
        wide = (K,) if family in ("kda", "gdn2") else ()
        erase = (K,) if family == "gdn2" else ()
        x = {"q": randn(1, T, HK, K), "k": key(1, T, *many, HK, K), "v": randn(1, T, *many, H, V),
             "gate": -0.2 * rand(1, T, H, *wide), "beta": rand(1, T, *many, H, *erase)}  # fmt: skip
        if family == "gdn2":
            x["w"] = rand(1, T, H, V)
    dtype = dtype or NOW.dtype
    wide = torch.promote_types(dtype, torch.float32)  # gates, strengths and states
    narrow = ("q", "k", "v", "w", "x", "B", "C", "z")
    x = {name: t.to(NOW.device, dtype if name in narrow else wide) for name, t in x.items()}
    state, d_o, d_s = randn(N, H, V, K), randn(1, T, H, V), randn(N, H, V, K)
    return (x, state.to(NOW.device, wide), d_o.to(NOW.device, dtype), d_s.to(NOW.device, wide))


def widened(x):
    """Tensors in fp64; None as it is."""
    if isinstance(x, dict):
        return {name: widened(t) for name, t in x.items()}
    return None if x is None else x.double()


def offsets(cu):
    return torch.tensor(cu, dtype=torch.int32, device=NOW.device)


def route(plan, **more):
    """A plan's routing and its tokens, on the device."""
    return plan.routing(NOW.device, **more), plan.global_token_ids(NOW.device)


def options(family):
    return {"num_householder": n} if family == "gdp" else {}


def invariant(family, x, state, cu):
    """The registered operator with batch_invariant, batch first."""
    form = ops.form.FORMS[family]
    given = {form.ports.get(name, name): t if name in PARAMS else t[0] for name, t in x.items()}
    out, last = form.operator(
        **given, cu_seqlens=cu, initial_state=state, output_final_state=True,
        batch_invariant=True, plan_name=f"{family}_{'triton' if NOW.fused else 'eager'}",
        **options(family),
    )  # fmt: skip
    return out[None], last


def one_rank(family, cu, x, state, d_o, d_s, same_bits=False, impl="reference"):
    """Outputs, final states and gradients of the unsharded function: the reference's in fp64 where
    the setting is of kernels, unless they are asked for."""
    if NOW.fused and not same_bits and impl == "reference":
        x, state, d_o, d_s = map(widened, (x, state, d_o, d_s))
    x = {name: t.clone().requires_grad_() for name, t in x.items()}
    state = None if state is None else state.clone().requires_grad_()
    if same_bits:
        o, last = invariant(family, x, state, offsets(cu))
    else:
        function = getattr(ops, f"chunk_{family}")
        first, others = list(x.values())[:5], dict(list(x.items())[5:])
        if "w" in others:
            first.append(others.pop("w"))
        o, last = function(*first, initial_state=state, cu_seqlens=offsets(cu), impl=impl,
                           output_final_state=True, **others, **options(family))  # fmt: skip
    torch.autograd.backward([o, last], [d_o.to(o), d_s.to(last)])
    grads = {name: t.grad for name, t in x.items()}
    return o.detach(), last.detach(), grads, None if state is None else state.grad


def placed(states, routing):
    """Global states [N, ...] on the segments of a span; there may be none."""
    return states[routing.sequences] if len(states) else states.new_zeros(
        len(routing.sequences), *states.shape[1:]
    )  # fmt: skip


def many_ranks(family, routing, ids, group, x, state, d_o, d_s, **call):
    """The same of this rank's share."""
    mine = {
        name: (t.clone() if name in PARAMS else t[:, ids]).requires_grad_() for name, t in x.items()
    }
    start = None if state is None else placed(state, routing).requires_grad_()
    o, last = getattr(cp, f"context_parallel_{family}")(
        **mine,
        routing=routing,
        group=group,
        initial_state=start,
        **{"impl": NOW.impl, **options(family), **call},
    )
    seed = torch.where(routing.terminal[:, None, None, None], placed(d_s, routing), 0)
    torch.autograd.backward([o, last], [d_o[:, ids].to(o), seed.to(last)])
    grads = {name: t.grad for name, t in mine.items()}
    for name in PARAMS:
        if name in grads:
            dist.all_reduce(grads[name], group=group)
    return o.detach(), last.detach(), grads, None if start is None else start.grad


def close(got, wanted, bound, what, slack=0.0):
    """Relative L2 error below a bound, and the same bits for a bound of 0.

    slack: an absolute error that is allowed beside.
    """
    assert got.shape == wanted.shape, (what, got.shape, wanted.shape)
    assert got.isfinite().all(), what
    if bound == 0:
        assert torch.equal(got, wanted), f"{what}: bits differ by {(got - wanted).abs().max()}"
    elif got.numel():
        bound = max(bound, NOW.gradient if "gradient" in what else NOW.output)
        # A rank may hold few tokens: an absolute term of the same size.
        error = float((got.double() - wanted.double()).norm())
        size = float(wanted.norm())
        assert error <= bound * (size + 1.0) + slack, f"{what}: {error} of {size}, slack {slack}"


def compare(family, table, rank, group, *, cu=CU, dtype=None, bound=1e-11, with_state=True,
            same_bits=False, caps=None, **call):  # fmt: skip
    """A recipe on a table against one rank, everything it returns."""
    x, state, d_o, d_s = draw(family, cu, dtype)
    state = state if with_state else None
    plan = cp.ContextParallelPlan.from_fragments(cu, table, rank)
    routing, ids = route(plan, **(caps or {}))
    want_o, want_s, want_g, want_i = one_rank(family, cu, x, state, d_o, d_s, same_bits)
    own_g = want_g
    if NOW.fused and not same_bits and any(name in PARAMS for name in x):
        # A parameter's gradient is a sum over all tokens that cancels: what the kernels make of it
        # on one rank says how well it can be known. See check_accuracy_is_that_of_one_rank.
        _, _, own_g, _ = one_rank(family, cu, x, state, d_o, d_s, impl=NOW.impl)
    o, last, grads, d_state = many_ranks(family, routing, ids, group, x, state, d_o, d_s, **call)
    close(o, want_o[:, ids], bound, f"{family} output")
    at, ends = routing.sequences, routing.terminal
    close(last[ends], want_s[at[ends]], bound, f"{family} final states")
    for name, grad in grads.items():
        wanted = want_g[name] if name in PARAMS else want_g[name][:, ids]
        # Shares of parameters are summed over ranks in another order.
        loose = bound or (1e-5 if name in PARAMS else 0)
        slack = 2.0 * float((own_g[name].double() - want_g[name]).norm()) if name in PARAMS else 0.0
        close(grad, wanted, loose, f"{family} gradient of {name}", slack)
    if d_state is not None:
        starts = routing.starts
        close(d_state[starts], want_i[at[starts]], bound, f"{family} gradient of initial states")
        assert not d_state[~starts].any()
    return routing


def scattered(world):
    """Cuts anywhere, fragments out of order, two pieces of the long document on one rank, an
    empty fragment, and a last rank with one token only."""
    if world == 2:
        return [[(60, 96), (3, 20), (25, 25)], [(20, 60), (0, 3)]]
    if world == 3:
        return [[(0, 9), (30, 44)], [(9, 30), (45, 96), (12, 12)], [(44, 45)]]
    table = [[(9, 21), (33, 57)], [], [(57, 96), (0, 9), (21, 32)], [(32, 33), (96, 96)]]
    return table + [[] for _ in range(world - 4)]


# Checks: each is called with (rank, world, group) ---------------------------------------------


def check_every_family(rank, world, group):
    for family in NOW.families:
        compare(family, scattered(world), rank, group)


def check_contiguous_and_zigzag(rank, world, group):
    for family in NOW.of("gdn", "kda", "mamba2"):
        compare(family, cp.contiguous_fragments(96, world), rank, group, with_state=False)
        compare(family, cp.zigzag_fragments(96, world), rank, group)


def check_one_long_document(rank, world, group):
    """The usual case, and one with fewer tokens than ranks."""
    for family in NOW.families:
        compare(family, cp.contiguous_fragments(130, world), rank, group, cu=(0, 130))
        compare(family, cp.contiguous_fragments(world - 1, world), rank, group, cu=(0, world - 1))


def check_losses_of_outputs_alone(rank, world, group):
    """No gradient of final states, no initial state: only biases are sent where they suffice."""
    cu = (0, 60, 96)
    for family in NOW.families:
        x, _, d_o, d_s = draw(family, cu)
        _, _, wanted, _ = one_rank(family, cu, x, None, d_o, torch.zeros_like(d_s))
        for table, kind in (
            (cp.contiguous_fragments(96, world), "all_gather"),
            (cp.contiguous_fragments(96, world), "doubling"),
            (scattered(world), "all_gather"),
            (scattered(world), "doubling"),
        ):
            plan = cp.ContextParallelPlan.from_fragments(cu, table, rank)
            routing, ids = route(plan)
            if rank == 0 and len(table[0]) == 1:
                assert routing.forward_need == "bias"
                assert routing.reverse_need == "none"
            mine = {
                name: (t.clone() if name in PARAMS else t[:, ids]).requires_grad_()
                for name, t in x.items()
            }
            o, _ = getattr(cp, f"context_parallel_{family}")(
                **mine,
                routing=routing,
                group=group,
                exchange=kind,
                impl=NOW.impl,
                **options(family),
            )
            o.backward(d_o[:, ids])
            for name, t in mine.items():
                if name not in PARAMS:
                    close(t.grad, wanted[name][:, ids], 1e-11, f"{family} {kind} {name}")


def check_no_tokens_at_all(rank, world, group):
    table = cp.contiguous_fragments(0, world)
    for family in NOW.families:
        compare(family, table, rank, group, cu=(0,))
        compare(family, table, rank, group, cu=(0, 0, 0), caps={"max_subsequences": 2})


def check_doubling_equals_all_gather(rank, world, group):
    """Against one rank, and against each other, on a chain of many fragments."""
    pieces = [cut for (cut,) in cp.contiguous_fragments(90, 4 * world)]
    table = [pieces[r::world] for r in range(world)]
    table[0] = table[0][::-1]  # not in token order
    cu = (0, 2, 85, 90)
    plan = cp.ContextParallelPlan.from_fragments(cu, table, rank)
    assert plan.chain >= 3 * world
    routing, ids = route(plan)
    for family in NOW.families:
        x, state, d_o, d_s = draw(family, cu)
        results = [
            many_ranks(family, routing, ids, group, x, state, d_o, d_s, exchange=kind)
            for kind in ("all_gather", "doubling")
        ]
        for a, b in zip(*results, strict=True):
            for name in a if isinstance(a, dict) else ("",):
                first, second = (a[name], b[name]) if name else (a, b)
                close(first, second, 1e-12, f"{family} {name}")
        compare(family, table, rank, group, cu=cu, exchange="doubling")
    compare(NOW.of("kda")[0], scattered(world), rank, group, exchange="doubling")


def check_documents_have_the_same_bits(rank, world, group):
    """fp32, against the unsharded operator with batch_invariant; also through an exchange."""
    cu = (0, 40, 41, 75, 140, 160)
    table = cp.document_aligned_fragments(cu, world)
    shifted = table[1:] + table[:1]
    for family in NOW.families:
        for owned in (table, shifted):
            for with_state in (True, False):
                routing = compare(
                    family, owned, rank, group, cu=cu, dtype=NOW.low, bound=0,
                    with_state=with_state, same_bits=True,
                )  # fmt: skip
                assert routing.aligned
                assert not routing.exchanges
        compare(family, table, rank, group, cu=cu, dtype=NOW.low, bound=0, same_bits=True,
                caps={"slots": 5})  # fmt: skip


def check_accuracy_is_that_of_one_rank(rank, world, group):
    """Errors against fp64, of the shards together and of one rank: whole, and in pieces.

    Those of a parameter are a few numbers, which cancel more in one draw than in another: of
    several draws together.
    """
    cu, table = (0, 30, 256), cp.zigzag_fragments(256, world)
    plan = cp.ContextParallelPlan.from_fragments(cu, table, rank)
    routing, ids = route(plan)
    for family in NOW.families:
        totals = {}
        for seed in range(DRAWS if family == "mamba2" else 1):
            x, state, d_o, d_s = draw(family, cu, NOW.low, seed)
            true_o, _, true_g, _ = one_rank(family, cu, *map(widened, (x, state, d_o, d_s)))
            one_o, _, one_g, _ = one_rank(family, cu, x, state, d_o, d_s, impl=NOW.impl)
            for pieces in (1, 4):
                with grains_of(16):
                    o, _, grads, _ = many_ranks(
                        family, routing, ids, group, x, state, d_o, d_s, pieces=pieces
                    )
                found = [("output", o, one_o[:, ids], true_o[:, ids])]
                for name, grad in grads.items():
                    at = slice(None) if name in PARAMS else (slice(None), ids)
                    found.append((name, grad, one_g[name][at], true_g[name][at]))
                for name, mine, one, true in found:
                    squares = [(mine - true).square().sum(), (one - true).square().sum(),
                               true.square().sum()]  # fmt: skip
                    part = torch.stack([square.double() for square in squares])
                    totals[name, pieces] = totals.get((name, pieces), 0.0) + part
        for (name, pieces), errors in totals.items():
            dist.all_reduce(errors, group=group)
            sharded, single, size = errors.sqrt().tolist()
            most = 2.0 if name in PARAMS else 1.5
            assert sharded <= most * single + 1e-7 * size, (
                family, name, pieces, sharded, single, size,
            )  # fmt: skip


def check_the_staged_halves_by_hand(rank, world, group):
    """prepare, summaries, an own collective, run; and backwards: what the recipe does."""
    plan = cp.ContextParallelPlan.from_fragments(CU, scattered(world), rank)
    routing, ids = route(plan)
    from lagraph.ops.exchange import gather_slots

    for family in NOW.families:
        x, _, d_o, d_s = draw(family)
        want = many_ranks(family, routing, ids, group, x, None, d_o, d_s)
        mine = {name: t if name in PARAMS else t[:, ids] for name, t in x.items()}
        decay = {"log2_decay": family == "mamba2"}
        prepared = getattr(cp, f"chunk_{family}_prepare")(
            **mine, cu_seqlens=routing.cu_seqlens, impl=NOW.impl, **options(family)
        )
        slots = cp.summary_slots(prepared, routing, **decay)
        entry = cp.compose_entry_states(gather_slots(slots, group), routing, **decay)
        o, last = prepared.run(entry, output_final_state=True)
        close(o, want[0], 1e-14, f"{family} output")
        close(last, want[1], 1e-14, f"{family} states")
        d_last = torch.where(routing.terminal[:, None, None, None], d_s[routing.sequences], 0)
        given = {} if family == "mamba2" else {"scale": prepared.scale}
        grads = getattr(cp, f"chunk_{family}_prepare_backward")(
            prepared.saved, d_o[:, ids], entry, impl=NOW.impl, **given, **options(family)
        )
        slots = cp.grad_summary_slots(grads, d_last, routing, **decay)
        d_exit = cp.compose_exit_cotangents(gather_slots(slots, group), d_last, routing, **decay)
        *got, d_entry = grads.run(d_exit)
        assert d_entry.shape == entry.shape
        for name, grad in zip(prepared.saved._fields, got, strict=False):
            if name in mine and name not in PARAMS:
                # The recipe takes the forward's transitions, transposed.
                close(grad, want[2][name], 1e-13, f"{family} gradient of {name}")


def check_layouts_of_the_same_caps(rank, world, group):
    """One routing object takes other layouts' values in place, as a replay would find them."""
    caps = {"slots": 3, "max_subsequences": 6}
    cu_a, cu_b = (0, 10, 12 * world), (0, 12 * world - 5, 12 * world - 1, 12 * world)
    tables = [cp.contiguous_fragments(12 * world, world), cp.zigzag_fragments(12 * world, world)]
    tables.append(tables[0][::-1])
    held = None
    for cu, table in ((cu_a, tables[0]), (cu_b, tables[1]), (cu_b, tables[2]), (cu_a, tables[1])):
        plan = cp.ContextParallelPlan.from_fragments(cu, table, rank)
        made, ids = route(plan, **caps)
        held = made if held is None else held.copy_(made)
        (family,) = NOW.of("gdn")
        x, state, d_o, d_s = draw(family, cu)
        o, last, grads, _ = many_ranks(family, held, ids, group, x, state, d_o, d_s)
        want_o, want_s, want_g, _ = one_rank(family, cu, x, state, d_o, d_s)
        close(o, want_o[:, ids], 1e-11, "output")
        close(last[held.terminal], want_s[held.sequences[held.terminal]], 1e-11, "final states")
        name = "B" if family == "mamba2" else "k"
        close(grads[name], want_g[name][:, ids], 1e-11, "gradient of keys")


def check_convolution_history(rank, world, group):
    """The short convolution over shards is that of the whole, its gradients too."""
    C, W = 5, 4
    r = torch.Generator().manual_seed(1)
    x, weight, d_y = (torch.randn(*s, generator=r, dtype=F64).to(NOW.device)
                      for s in ((1, 96, C), (C, W), (1, 96, C)))  # fmt: skip
    conv = partial(ops.causal_conv1d, impl="reference")
    whole, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = conv(whole, w, cu_seqlens=offsets(CU))
    y.backward(d_y)
    pieces = [cut for (cut,) in cp.contiguous_fragments(96, 24 * world)]  # shorter than the window
    for table in (scattered(world), cp.zigzag_fragments(96, world), [pieces[i::world] for i in
                  range(world)]):  # fmt: skip
        plan = cp.ContextParallelPlan.from_fragments(CU, table, rank)
        routing, ids = route(plan, conv_history=W - 1, max_subsequences=60)
        mine, own = x[:, ids].requires_grad_(), weight.clone().requires_grad_()
        history = cp.context_parallel_conv_history(mine, routing, group)
        got = conv(mine, own, cu_seqlens=routing.cu_seqlens, initial_state=history)
        got.backward(d_y[:, ids])
        close(got, y[:, ids], 1e-12, "convolution")
        close(mine.grad, whole.grad[:, ids], 1e-12, "gradient of x")
        dist.all_reduce(own.grad, group=group)
        close(own.grad, w.grad, 1e-12, "gradient of the weight")
        assert cp.context_parallel_conv_history(mine, route(plan)[0], group) is None


def check_refusals(rank, world, group):
    """A wrong rank, group or span raises on every rank before anything is sent."""
    x, *_ = draw("gdn")
    table = cp.contiguous_fragments(96, world)

    def call(row, table, span, **more):
        routing, _ = route(cp.ContextParallelPlan.from_fragments(CU, table, row))
        return cp.context_parallel_gdn(**span, routing=routing, group=group, impl=NOW.impl, **more)

    _, ids = route(cp.ContextParallelPlan.from_fragments(CU, table, rank))
    mine = {name: t[:, ids] for name, t in x.items()}
    rest = [cut for row in table[1:] for cut in row]
    for wrong, kind, word in (
        (lambda: call((rank + 1) % world, table, mine), lagraph.RuleBroken, "group"),
        (lambda: call(rank, [*table, []], mine), lagraph.RuleBroken, "group"),
        (lambda: call(0, [[*table[0], *rest]], mine), lagraph.RuleBroken, "group"),
        (lambda: call(rank, table, x), lagraph.ShapeMismatch, "span"),
        (lambda: call(rank, table, mine, exchange="ring"), lagraph.InvalidOption, "exchange"),
        (lambda: call(rank, table, {**mine, "k": mine["k"].float()}), lagraph.DtypeMismatch, "k"),
        (lambda: call(rank, table, mine, pieces=0), lagraph.InvalidOption, "pieces"),
        (lambda: call(rank, table, mine, pieces=2.5), lagraph.InvalidOption, "pieces"),
        (lambda: call(rank, table, mine, initial_state=mine["v"].new_zeros(9, H, V, K)),
         lagraph.ShapeMismatch, "initial_state"),
    ):  # fmt: skip
        with pytest.raises(kind, match=word) as caught:
            wrong()
        assert "context_parallel" in str(caught.value)
    if NOW.kind == "cpu":
        routing, _ = route(cp.ContextParallelPlan.from_fragments(CU, table, rank))
        with pytest.raises(lagraph.PlanNotOffered, match=r"context_parallel_gdn.*CUDA"):
            cp.context_parallel_gdn(**mine, routing=routing, group=group, impl="fused")
    compare("gdn", table, rank, group)  # the next good call works


def check_autocast(rank, world, group):
    """Tokens are cast as by the operators; gates and states are not."""
    cu, table = (0, 96), cp.contiguous_fragments(96, world)
    plan = cp.ContextParallelPlan.from_fragments(cu, table, rank)
    routing, ids = route(plan)
    x, _, d_o, _ = draw("gdn", cu, torch.float32)
    want, *_ = one_rank("gdn", cu, *draw("gdn", cu))
    mine = {name: t[:, ids].requires_grad_() for name, t in x.items()}
    with torch.autocast(NOW.kind, dtype=torch.bfloat16):
        o, last = cp.context_parallel_gdn(**mine, routing=routing, group=group, impl="reference")
    assert o.dtype is torch.bfloat16
    assert last.dtype is torch.float32
    o.backward(d_o[:, ids].bfloat16())
    assert all(t.grad.dtype is torch.float32 for t in mine.values())
    free, *_ = one_rank("gdn", cu, draw("gdn", cu)[0], None, *draw("gdn", cu)[2:])
    error = float((o.double() - free[:, ids]).norm() / free[:, ids].norm())
    assert error < 2e-2, error
    assert want.shape == free.shape


def check_no_gradient_no_backward(rank, world, group):
    """Under no_grad nothing is kept; a second derivative is refused."""
    cu, table = (0, 96), cp.contiguous_fragments(96, world)
    plan = cp.ContextParallelPlan.from_fragments(cu, table, rank)
    routing, ids = route(plan)
    x, *_ = draw("kda", cu)
    mine = {name: t[:, ids].requires_grad_() for name, t in x.items()}
    with torch.no_grad():
        o, _ = cp.context_parallel_kda(**mine, routing=routing, group=group, impl=NOW.impl)
    assert not o.requires_grad
    o, _ = cp.context_parallel_kda(**mine, routing=routing, group=group, impl=NOW.impl)
    (grad,) = torch.autograd.grad(o.sum(), mine["q"], create_graph=True)
    with pytest.raises(lagraph.NotDifferentiable, match="not differentiable twice"):
        grad.sum().backward()


class Layer(torch.nn.Module):
    """A residual layer around the recipe."""

    def __init__(self, width=8, heads=2, dim=4):
        super().__init__()
        self.heads, self.dim = heads, dim
        self.qkv = torch.nn.Linear(width, 3 * heads * dim)
        self.gates = torch.nn.Linear(width, 2 * heads)
        self.out = torch.nn.Linear(heads * dim, width)

    def forward(self, x, run):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, self.dim)).unbind(2)
        g, b = self.gates(x).chunk(2, -1)
        o, _ = run(q, F.normalize(k, dim=-1), v, F.logsigmoid(g), b.sigmoid())
        return x + self.out(o.flatten(2))


class Model(torch.nn.Module):
    """Two of them; checkpointed, if asked for."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))
        self.checkpointed = checkpointed

    def forward(self, x, run):
        for layer in self.layers:
            if self.checkpointed:
                x = torch.utils.checkpoint.checkpoint(layer, x, run, use_reentrant=False)
            else:
                x = layer(x, run)
        return x


def check_activation_checkpointing_and_fsdp(rank, world, group):
    """2 x 2 ranks of a device mesh: FSDP2 over all of them, context parallel over pairs."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh(NOW.kind, (2, 2), mesh_dim_names=("dp", "cp"))
    inner = mesh.get_group("cp")
    cu, T = (0, 21, 50), 50
    table = cp.zigzag_fragments(T, 2)
    plan = cp.ContextParallelPlan.from_fragments(cu, table, mesh.get_local_rank("cp"))
    routing, ids = route(plan)
    recipe = partial(cp.context_parallel_gdn, routing=routing, group=inner, impl="reference")

    def alone(*tokens):
        return ops.chunk_gdn(*tokens, cu_seqlens=offsets(cu), impl="reference")

    torch.manual_seed(0)
    reference = Model().double().to(NOW.device)
    batches = torch.randn(2, 1, T, 8, dtype=F64).to(NOW.device)  # one for each data-parallel row
    for batch in batches:  # FSDP takes means over ranks: two rows of two
        (reference(batch, alone).square().sum() / 4).backward()
    mine = batches[mesh.get_local_rank("dp")][:, ids]
    wanted = {name: p.grad for name, p in reference.named_parameters()}
    for checkpointed in (False, True):
        model = copy.deepcopy(reference)
        model.zero_grad()
        model.checkpointed = checkpointed
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp", "cp"]._flatten(f"all{int(checkpointed)}"))
        fully_shard(model, mesh=mesh[f"all{int(checkpointed)}"])
        model(mine, recipe).square().sum().backward()
        for name, p in model.named_parameters():
            close(p.grad.full_tensor(), wanted[name], 1e-11, f"{checkpointed} {name}")


def check_pieces(rank, world, group):
    """Spans cut into pieces: as one rank, whatever the number, the table and the exchange."""
    with grains_of(4):
        for family in NOW.families:
            compare(family, scattered(world), rank, group, pieces=3)
            compare(family, cp.contiguous_fragments(130, world), rank, group, cu=(0, 130),
                    with_state=False, pieces=4)  # fmt: skip
        (family,) = NOW.of("kda")
        for table in (scattered(world), cp.zigzag_fragments(96, world)):
            for call in ({"pieces": 2}, {"pieces": 5, "exchange": "doubling"}, {"pieces": 96}):
                compare(family, table, rank, group, **call)
            compare(family, table, rank, group, pieces=3, caps={"slots": 4})
        compare(family, cp.contiguous_fragments(1, world), rank, group, cu=(0, 1), pieces=3)


def check_pieces_of_kernels(rank, world, group):
    """Few of them, as an interpreter is slow."""
    with grains_of(16):
        for family in NOW.families:
            compare(family, scattered(world), rank, group, pieces=2)
        (family,) = NOW.of("gdn")
        compare(family, cp.zigzag_fragments(96, world), rank, group, pieces=2, caps={"slots": 3},
                with_state=False)  # fmt: skip


def check_pieces_of_the_same_caps(rank, world, group):
    """Their tables take another layout's values in place, too."""
    caps, T = {"slots": 3, "max_subsequences": 6}, 24 * world
    (family,) = NOW.of("mamba2")
    tables = [cp.contiguous_fragments(T, world), cp.zigzag_fragments(T, world)]
    tables.append(tables[0][::-1])
    held = None
    with grains_of(4):
        for cu, table in (
            ((0, 10, T), tables[0]), ((0, T - 5, T - 1, T), tables[1]), ((0, T), tables[2]),
            ((0, 3, 4, 20, T), tables[1]),
        ):  # fmt: skip
            plan = cp.ContextParallelPlan.from_fragments(cu, table, rank)
            made, ids = route(plan, **caps)
            before = held and dict(vars(held.pieces(4)))
            held = made if held is None else held.copy_(made)
            assert before is None or all(vars(held.pieces(4))[k] is x for k, x in before.items())
            x, state, d_o, d_s = draw(family, cu)
            o, last, grads, _ = many_ranks(
                family, held, ids, group, x, state, d_o, d_s, pieces=4
            )  # fmt: skip
            want_o, want_s, want_g, _ = one_rank(family, cu, x, state, d_o, d_s)
            close(o, want_o[:, ids], 1e-11, "output")
            close(last[held.terminal], want_s[held.sequences[held.terminal]], 1e-11, "states")
            for name, grad in grads.items():
                want = want_g[name] if name in PARAMS else want_g[name][:, ids]
                close(grad, want, 1e-11, f"gradient of {name}")


@contextmanager
def grains_of(tokens):
    """Let pieces be multiples of so few tokens."""
    from lagraph.ops import pieces

    before, pieces.GRAIN = pieces.GRAIN, tokens
    try:
        yield
    finally:
        pieces.GRAIN = before


def check_who_waits(rank, world, group):
    """A rank that needs no other's state runs before theirs have come; in reverse likewise."""
    plan = cp.ContextParallelPlan.from_fragments((0, 96), cp.contiguous_fragments(96, world), rank)
    routing, ids = route(plan)
    assert routing.forward_waits == (rank > 0)
    assert routing.reverse_waits == (rank < world - 1)
    (family,) = NOW.of("gdn")
    x, _, d_o, _ = draw(family, (0, 96))
    mine = {n: (t.clone() if n in PARAMS else t[:, ids]).requires_grad_() for n, t in x.items()}
    seen = []

    def noted(name, function):
        def wrapped(*args, **kwargs):
            seen.append(name)
            return function(*args, **kwargs)

        return wrapped

    from lagraph.ops import exchange, staged

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "_all_gather", noted("sent", exchange._all_gather))
        for kind in (staged.Prepared, staged.PreparedGradient):
            patch.setattr(kind, "run", noted("run", kind.run))
        patch.setattr(exchange.Exchange, "folds", noted("came", exchange.Exchange.folds))
        patch.setattr(exchange.Exchange, "wait", noted("came", exchange.Exchange.wait))
        o, _ = getattr(cp, f"context_parallel_{family}")(
            **mine, routing=routing, group=group, impl=NOW.impl, **options(family)
        )
        forward, seen[:] = list(seen), []
        o.backward(d_o[:, ids])
    early, late = ["sent", "run", "came"], ["sent", "came", "run", "came"]
    assert forward == (late if routing.forward_waits else early)
    assert seen == (late if routing.reverse_waits else early)


def check_parts_that_need_nothing_run_first(rank, world, group):
    """Spans of which a part waits: the same results, and what needs nothing runs before."""
    from lagraph.ops import exchange, recipe, staged

    order = []

    def noted(name, function):
        def wrapped(self, *args, **kwargs):
            order.append(name if name == "came" else self._tokens)
            return function(self, *args, **kwargs)

        return wrapped

    tables = [cp.zigzag_fragments(96, world), cp.contiguous_fragments(96, world), scattered(world)]
    with pytest.MonkeyPatch.context() as patch, grains_of(4):
        patch.setattr(recipe, "OVERLAP", 0)
        patch.setattr(staged.Prepared, "run", noted("run", staged.Prepared.run))
        patch.setattr(exchange.Exchange, "folds", noted("came", exchange.Exchange.folds))
        for family in NOW.families:
            for table, pieces, with_state in zip(tables, (1, 3, 2), (False, True, True)):
                order.clear()
                routing = compare(family, table, rank, group, pieces=pieces, with_state=with_state)
                parts = routing.pieces(pieces).forward.parts
                if routing.forward_waits and len(parts) in (2, 3):
                    tokens = [[p.stop - p.start for p in parts if p.waits == w] for w in (0, 1)]
                    if 8 * sum(tokens[0]) >= routing.tokens:
                        assert order[: len(parts) + 1] == [*tokens[0], "came", *tokens[1]]


class Handle:
    """A staged handle with nothing but what the protocol asks for."""

    def __init__(self, made, *names):
        for name in names:
            setattr(self, name, getattr(made, name))
        if "saved" not in names:
            return
        self.run = self._run
        self._made = made

    def _run(self, *args, **kwargs):
        out = self._made.run(*args, **kwargs)
        self.saved = self._made.saved
        return out


def check_stages_of_others(rank, world, group):
    """`context_parallel_chunk` with entry points that are not this library's."""
    for family in NOW.families:
        forward = getattr(cp, f"chunk_{family}_prepare")
        back = getattr(cp, f"chunk_{family}_prepare_backward")
        chosen = {"impl": NOW.impl, **options(family)}

        def prepare(*args, forward=forward, chosen=chosen, **kwargs):
            made = forward(*args, **chosen, **kwargs)
            return Handle(made, "saved", "scale", "state_summaries")

        def prepare_backward(*args, back=back, chosen=chosen, **kwargs):
            return Handle(back(*args, **chosen, **kwargs), "state_grad_summaries", "run")

        stages = cp.StagedOp(prepare, prepare_backward, family == "mamba2")
        x, state, d_o, d_s = draw(family)
        for pieces in (1, 3):
            routing, ids = route(cp.ContextParallelPlan.from_fragments(CU, scattered(world), rank))
            want = many_ranks(family, routing, ids, group, x, state, d_o, d_s, pieces=pieces)
            mine = {
                name: (t.clone() if name in PARAMS else t[:, ids]).requires_grad_()
                for name, t in x.items()
            }
            start = placed(state, routing).requires_grad_()
            with grains_of(4):
                o, last = cp.context_parallel_chunk(
                    stages, *mine.values(), routing=routing, group=group, initial_state=start,
                    pieces=pieces,
                )  # fmt: skip
            seed = torch.where(routing.terminal[:, None, None, None], placed(d_s, routing), 0)
            torch.autograd.backward([o, last], [d_o[:, ids].to(o), seed.to(last)])
            close(o, want[0], 1e-12, f"{family} output")
            close(last, want[1], 1e-12, f"{family} states")
            close(start.grad, want[3], 1e-12, f"{family} gradient of states")
            for name, t in mine.items():
                if name not in PARAMS:
                    close(t.grad, want[2][name], 1e-12, f"{family} gradient of {name}")


def check_what_is_received(rank, world, group):
    """As many bytes as are said: counted at the collectives."""
    from lagraph.ops import exchange

    counted = []

    def gather(out, rows, group=None, async_op=False):
        counted.append(out.nbytes - rows.nbytes)
        return real(out, rows, group=group, async_op=async_op)

    def batch(messages):
        counted.append(sum(m.tensor.nbytes for m in messages if m.op is dist.irecv))
        return actual(messages)

    real, actual = exchange._all_gather, dist.batch_isend_irecv
    (family,) = NOW.of("kda")
    x, state, d_o, d_s = draw(family)
    tables = (scattered(world), cp.contiguous_fragments(96, world), cp.zigzag_fragments(96, world))
    for table, kind in ((t, k) for t in tables for k in ("all_gather", "doubling")):
        routing, ids = route(cp.ContextParallelPlan.from_fragments(CU, table, rank))
        counted.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exchange, "_all_gather", gather)
            patch.setattr(dist, "batch_isend_irecv", batch)
            many_ranks(family, routing, ids, group, x, state, d_o, d_s, exchange=kind)
        said = sum(
            exchange.received_bytes(routing, H, V, K, log2_decay=family == "mamba2", exchange=kind,
                                    itemsize=8 if NOW.dtype is F64 else 4, reverse=reverse)
            for reverse in (False, True)
        )  # fmt: skip
        assert sum(counted) == said, (kind, counted, said)


def check_no_wait_for_the_device(rank, world, group):
    """No host read on the path, in either direction, once plans are made."""
    cu, table = (0, 300, 512), cp.zigzag_fragments(512, world)
    routing, ids = route(cp.ContextParallelPlan.from_fragments(cu, table, rank))
    (family,) = NOW.families
    x, state, d_o, _ = draw(family, cu)
    for kind in ("all_gather", "doubling"):
        for strict in (False, True):
            leaves = {n: (t if n in PARAMS else t[:, ids]).clone().requires_grad_()
                      for n, t in x.items()}  # fmt: skip
            start = placed(state, routing)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if strict else "default")
            try:
                o, last = getattr(cp, f"context_parallel_{family}")(
                    **leaves, routing=routing, group=group, initial_state=start, exchange=kind,
                    pieces=2, **options(family),
                )  # fmt: skip
                torch.autograd.grad([o, last], list(leaves.values()), [d_o[:, ids], start])
            finally:
                torch.cuda.set_sync_debug_mode("default")


def check_a_captured_call_replays_other_layouts(rank, world, group):
    """Forward and backward in one CUDA graph, exchange included."""
    for pieces in (1, 3):
        captured(NOW.families[0], rank, world, group, pieces)


def captured(family, rank, world, group, pieces):
    """One capture, replayed on layouts of the same caps, against the reference on whole documents.

    Fragments per rank are one to three, in and out of order; documents are cut anywhere.
    """
    span = 512
    T = span * world
    tables = [
        ((0, 300, T), cp.contiguous_fragments(T, world)),
        ((0, T), [[(T - 400 * (r + 1), T - 400 * r), (50 * r, 50 * r + 50),
                   (50 * world + 62 * r, 50 * world + 62 * r + 62)] for r in range(world)]),
        ((0, 64, 70, T), cp.zigzag_fragments(T, world)),
    ]  # fmt: skip
    caps = {"slots": 3, "max_subsequences": 6}

    def layout(cu, table):
        return route(cp.ContextParallelPlan.from_fragments(cu, table, rank), **caps)

    held, ids = layout(*tables[0])
    x, _, d_o, _ = draw(family, tables[0][0])
    leaves = [(t if n in PARAMS else t[:, ids]).clone().requires_grad_() for n, t in x.items()]
    seed_o, seed_s = d_o[:, ids].clone(), x["v" if "v" in x else "x"].new_zeros(
        6, H, V, K, dtype=torch.float32
    )  # fmt: skip

    def step():
        o, last = getattr(cp, f"context_parallel_{family}")(
            **dict(zip(x, leaves, strict=True)), routing=held, group=group, pieces=pieces,
            **options(family),
        )  # fmt: skip
        return o, last, torch.autograd.grad([o, last], leaves, [seed_o, seed_s])

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # The watchdog of NCCL has a thread of its own.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = step()
    for seed, (cu, table) in enumerate(tables):
        routing, ids = layout(cu, table)
        held.copy_(routing)
        x, _, d_o, d_s = draw(family, cu, seed=seed)
        ends = held.terminal.view(-1, 1, 1, 1)
        with torch.no_grad():
            for leaf, (n, t) in zip(leaves, x.items(), strict=True):
                leaf.copy_(t if n in PARAMS else t[:, ids])
            seed_o.copy_(d_o[:, ids])
            seed_s.copy_(torch.where(ends, d_s[held.sequences], 0.0))
        graph.replay()
        torch.cuda.synchronize()
        want_o, want_s, want_g, _ = one_rank(family, cu, x, None, d_o, d_s)
        close(out[0], want_o[:, ids], 5e-3, f"{seed} output")
        close(out[1][held.terminal], want_s[held.sequences[held.terminal]], 5e-3, f"{seed} states")
        for name, grad in zip(x, out[2], strict=True):
            total = grad.clone()
            if name in PARAMS and world > 1:
                dist.all_reduce(total, group=group)
            want = want_g[name] if name in PARAMS else want_g[name][:, ids]
            close(total, want, 2e-2, f"{seed} gradient of {name}")
    # Before the group goes: the graph holds its communicator.
    del graph
    torch.cuda.synchronize()


# Worlds of the checks that need not run in each, of gloo.
ONLY = {
    "check_contiguous_and_zigzag": (3,),
    "check_one_long_document": (2, 4),
    "check_no_tokens_at_all": (3,),
    "check_losses_of_outputs_alone": (2, 4),
    "check_doubling_equals_all_gather": (3, 4),
    "check_accuracy_is_that_of_one_rank": (2,),
    "check_the_staged_halves_by_hand": (2,),
    "check_layouts_of_the_same_caps": (2, 3),
    "check_autocast": (2,),
    "check_no_gradient_no_backward": (2,),
    "check_pieces": (2, 3),
    "check_pieces_of_the_same_caps": (2, 3),
    "check_who_waits": (2, 3),
    "check_stages_of_others": (2,),
    "check_parts_that_need_nothing_run_first": (2, 3),
    "check_what_is_received": (3, 4),
}
FOUR = "check_activation_checkpointing_and_fsdp"
# Checks that belong to captures and kernels, which want a GPU a rank (gloo waits on the host); and
# what a family's kernels have to show.
INTERPRETED = ("check_pieces_of_kernels",)
KERNELS = ("check_no_wait_for_the_device", "check_a_captured_call_replays_other_layouts")
FUSED = (
    "check_every_family", "check_one_long_document", "check_doubling_equals_all_gather",
    "check_documents_have_the_same_bits", "check_accuracy_is_that_of_one_rank", "check_pieces",
    *KERNELS,
)  # fmt: skip
CHECKS = {name: check for name, check in globals().items() if name.startswith("check_")}


def checks(setting, world):
    """The names of a world's checks."""
    setting = SETTINGS[setting]
    if setting.fused:
        return [name for name in FUSED if not (setting.shared and name in KERNELS)]
    if setting.name == "interpreted":
        return list(INTERPRETED)
    return [
        name for name in CHECKS
        if name not in (*KERNELS, *INTERPRETED) and (name != FOUR or world == 4)
        and (setting.kind == "cuda" or world in ONLY.get(name, (world,)))
    ]  # fmt: skip


# Processes ------------------------------------------------------------------------------------


def _rank(rank, setting, world, port, folder):
    setting = SETTINGS[setting]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of torch.distributed; the checks themselves raise
    bound = {}
    if setting.kind == "cuda":
        torch.cuda.set_device(0 if setting.shared else rank)
    if setting.backend == "nccl":
        bound["device_id"] = torch.device("cuda", rank)
    enter(setting)
    # Kernels are compiled in between; by ranks that share a GPU at about the same time.
    patience = timedelta(seconds=120 if setting.fused and not setting.shared else 60)
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0, timeout=patience)
    dist.init_process_group(setting.backend, store=store, rank=rank, world_size=world,
                            timeout=patience, **bound)  # fmt: skip
    messages = {}
    for name in checks(setting.name, world):
        begin = time.perf_counter()
        try:
            CHECKS[name](rank, world, dist.group.WORLD)
            messages[name] = ""
        except Exception:
            messages[name] = traceback.format_exc()
        torch.save(messages, Path(folder) / f"{rank}.pt")
        if os.environ.get("PARALLEL_TIMES") and (rank == 0 or messages[name]):
            took = f"{setting.name} {name} {time.perf_counter() - begin:.1f} s"
            print(took, *(f"rank {rank}: {messages[name]}" for _ in messages[name][:1]), flush=True)
        # Where one has failed, others may wait for it in vain: then nothing after means anything.
        store.set(f"{name} {rank}", "done")
        try:
            store.wait([f"{name} {other}" for other in range(world)], patience)
        except Exception:
            os._exit(1)
    dist.destroy_process_group()


def outcomes(setting, world):
    """{check: messages of the ranks}; "" where it held."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    lost = "not finished"
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.spawn(_rank, (setting, world, port, folder), nprocs=world)
        except torch.multiprocessing.ProcessExitedException as error:
            lost = f"not finished: an earlier check failed, or a process died ({error})"
        files = [Path(folder) / f"{rank}.pt" for rank in range(world)]
        ranks = [torch.load(file) if file.exists() else {} for file in files]
    return {
        name: [messages.get(name, lost) for messages in ranks] for name in checks(setting, world)
    }


if __name__ == "__main__":
    import sys

    name, *worlds = sys.argv[1:] or ["gloo", "2"]
    failed = 0
    for world in map(int, worlds or [torch.cuda.device_count()]):
        for check, messages in outcomes(name, world).items():
            failed += any(messages)
            shown = "ok" if not any(messages) else next(filter(None, messages))
            print(name, world, check, shown, flush=True)
    sys.exit(failed > 0)
