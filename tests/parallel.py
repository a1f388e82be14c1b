"""Checks of context parallelism that need several processes: gloo ranks, spawned once per world.

`outcomes(world)` runs the checks of a world in that many processes and returns
{check: [one message per rank, "" where it held]}. Checks compare with one rank, which every
process computes for itself from the same draw.
"""

from __future__ import annotations

import copy
import os
import socket
import tempfile
import traceback
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path

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


# Draws and references -------------------------------------------------------------------------


def draw(family, cu=CU, dtype=F64, seed=0, gated=True):
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
    x = {name: t.to(dtype) for name, t in x.items()}
    state, d_o, d_s = randn(N, H, V, K), randn(1, T, H, V), randn(N, H, V, K)
    return x, state.to(dtype), d_o.to(dtype), d_s.to(dtype)


def options(family):
    return {"num_householder": n} if family == "gdp" else {}


def invariant(family, x, state, cu):
    """The registered operator with batch_invariant, batch first."""
    form = ops.form.FORMS[family]
    given = {form.ports.get(name, name): t if name in PARAMS else t[0] for name, t in x.items()}
    out, last = form.operator(
        **given, cu_seqlens=cu, initial_state=state, output_final_state=True,
        batch_invariant=True, **options(family),
    )  # fmt: skip
    return out[None], last


def one_rank(family, cu, x, state, d_o, d_s, same_bits=False):
    """Outputs, final states and gradients of the unsharded function."""
    x = {name: t.clone().requires_grad_() for name, t in x.items()}
    state = None if state is None else state.clone().requires_grad_()
    offsets = torch.tensor(cu, dtype=torch.int32)
    if same_bits:
        o, last = invariant(family, x, state, offsets)
    else:
        function = getattr(ops, f"chunk_{family}")
        first, others = list(x.values())[:5], dict(list(x.items())[5:])
        if "w" in others:
            first.append(others.pop("w"))
        o, last = function(*first, initial_state=state, cu_seqlens=offsets,
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
        **mine, routing=routing, group=group, initial_state=start, **options(family), **call
    )
    seed = torch.where(routing.terminal[:, None, None, None], placed(d_s, routing), 0)
    torch.autograd.backward([o, last], [d_o[:, ids].to(o), seed.to(last)])
    grads = {name: t.grad for name, t in mine.items()}
    for name in PARAMS:
        if name in grads:
            dist.all_reduce(grads[name], group=group)
    return o.detach(), last.detach(), grads, None if start is None else start.grad


def close(got, wanted, bound, what):
    """Relative L2 error below a bound, and the same bits for a bound of 0."""
    assert got.shape == wanted.shape, (what, got.shape, wanted.shape)
    assert got.isfinite().all(), what
    if bound == 0:
        assert torch.equal(got, wanted), f"{what}: bits differ by {(got - wanted).abs().max()}"
    elif got.numel():
        # A rank may hold few tokens: an absolute term of the same size.
        error = float((got - wanted).norm())
        assert error <= bound * (float(wanted.norm()) + 1.0), f"{what}: {error}"


def compare(family, table, rank, group, *, cu=CU, dtype=F64, bound=1e-11, with_state=True,
            same_bits=False, caps=None, **call):  # fmt: skip
    """A recipe on a table against one rank, everything it returns."""
    x, state, d_o, d_s = draw(family, cu, dtype)
    state = state if with_state else None
    plan = cp.ContextParallelPlan.from_fragments(cu, table, rank)
    routing, ids = plan.routing("cpu", **(caps or {})), plan.global_token_ids("cpu")
    want_o, want_s, want_g, want_i = one_rank(family, cu, x, state, d_o, d_s, same_bits)
    o, last, grads, d_state = many_ranks(family, routing, ids, group, x, state, d_o, d_s, **call)
    close(o, want_o[:, ids], bound, f"{family} output")
    at, ends = routing.sequences, routing.terminal
    close(last[ends], want_s[at[ends]], bound, f"{family} final states")
    for name, grad in grads.items():
        wanted = want_g[name] if name in PARAMS else want_g[name][:, ids]
        # Shares of parameters are summed over ranks in another order.
        loose = bound or (1e-5 if name in PARAMS else 0)
        close(grad, wanted, loose, f"{family} gradient of {name}")
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
    return [[(9, 21), (33, 57)], [], [(57, 96), (0, 9), (21, 32)], [(32, 33), (96, 96)]]


# Checks: each is called with (rank, world, group) ---------------------------------------------


def check_every_family(rank, world, group):
    for family in FAMILIES:
        compare(family, scattered(world), rank, group)


def check_contiguous_and_zigzag(rank, world, group):
    for family in ("gdn", "kda", "mamba2"):
        compare(family, cp.contiguous_fragments(96, world), rank, group, with_state=False)
        compare(family, cp.zigzag_fragments(96, world), rank, group)


def check_one_long_document(rank, world, group):
    """The usual case, and one with fewer tokens than ranks."""
    for family in FAMILIES:
        compare(family, cp.contiguous_fragments(130, world), rank, group, cu=(0, 130))
        compare(family, cp.contiguous_fragments(world - 1, world), rank, group, cu=(0, world - 1))


def check_losses_of_outputs_alone(rank, world, group):
    """No gradient of final states, no initial state: only biases are sent where they suffice."""
    cu = (0, 60, 96)
    for family in FAMILIES:
        x, _, d_o, d_s = draw(family, cu)
        _, _, wanted, _ = one_rank(family, cu, x, None, d_o, torch.zeros_like(d_s))
        for table, kind in (
            (cp.contiguous_fragments(96, world), "all_gather"),
            (cp.contiguous_fragments(96, world), "doubling"),
            (scattered(world), "all_gather"),
            (scattered(world), "doubling"),
        ):
            plan = cp.ContextParallelPlan.from_fragments(cu, table, rank)
            routing, ids = plan.routing("cpu"), plan.global_token_ids("cpu")
            if rank == 0 and len(table[0]) == 1:
                assert routing.forward_need == "bias"
                assert routing.reverse_need == "none"
            mine = {
                name: (t.clone() if name in PARAMS else t[:, ids]).requires_grad_()
                for name, t in x.items()
            }
            o, _ = getattr(cp, f"context_parallel_{family}")(
                **mine, routing=routing, group=group, exchange=kind, **options(family)
            )
            o.backward(d_o[:, ids])
            for name, t in mine.items():
                if name not in PARAMS:
                    close(t.grad, wanted[name][:, ids], 1e-11, f"{family} {kind} {name}")


def check_no_tokens_at_all(rank, world, group):
    table = cp.contiguous_fragments(0, world)
    for family in FAMILIES:
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
    routing, ids = plan.routing("cpu"), plan.global_token_ids("cpu")
    for family in FAMILIES:
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
    compare("kda", scattered(world), rank, group, exchange="doubling")


def check_documents_have_the_same_bits(rank, world, group):
    """fp32, against the unsharded operator with batch_invariant; also through an exchange."""
    cu = (0, 40, 41, 75, 140, 160)
    table = cp.document_aligned_fragments(cu, world)
    shifted = table[1:] + table[:1]
    for family in FAMILIES:
        for owned in (table, shifted):
            for with_state in (True, False):
                routing = compare(
                    family, owned, rank, group, cu=cu, dtype=torch.float32, bound=0,
                    with_state=with_state, same_bits=True,
                )  # fmt: skip
                assert routing.aligned
                assert not routing.exchanges
        compare(family, table, rank, group, cu=cu, dtype=torch.float32, bound=0, same_bits=True,
                caps={"slots": 5})  # fmt: skip


def check_accuracy_is_that_of_one_rank(rank, world, group):
    """fp32 errors against fp64, of the shards together and of one rank."""
    cu, table = (0, 30, 256), cp.zigzag_fragments(256, world)
    plan = cp.ContextParallelPlan.from_fragments(cu, table, rank)
    routing, ids = plan.routing("cpu"), plan.global_token_ids("cpu")
    for family in FAMILIES:
        x, state, d_o, d_s = draw(family, cu, torch.float32)
        wide = [{k: t.double() for k, t in x.items()}, state.double(), d_o.double(), d_s.double()]
        true_o, _, true_g, _ = one_rank(family, cu, *wide)
        one_o, _, one_g, _ = one_rank(family, cu, x, state, d_o, d_s)
        o, _, grads, _ = many_ranks(family, routing, ids, group, x, state, d_o, d_s)
        pairs = [("output", o, one_o[:, ids], true_o[:, ids])]
        pairs += [(k, g, one_g[k][:, ids], true_g[k][:, ids])
                  for k, g in grads.items() if k not in PARAMS]  # fmt: skip
        for name, mine, one, true in pairs:
            errors = torch.stack([(mine - true).square().sum(), (one - true).square().sum(),
                                  true.square().sum()]).double()  # fmt: skip
            dist.all_reduce(errors, group=group)
            sharded, single, size = errors.sqrt().tolist()
            assert sharded <= 1.5 * single + 1e-7 * size, (family, name, sharded, single, size)


def check_the_staged_halves_by_hand(rank, world, group):
    """prepare, summaries, an own collective, run; and backwards: what the recipe does."""
    plan = cp.ContextParallelPlan.from_fragments(CU, scattered(world), rank)
    routing, ids = plan.routing("cpu"), plan.global_token_ids("cpu")
    from lagraph.ops.exchange import gather_slots

    for family in FAMILIES:
        x, _, d_o, d_s = draw(family)
        want = many_ranks(family, routing, ids, group, x, None, d_o, d_s)
        mine = {name: t if name in PARAMS else t[:, ids] for name, t in x.items()}
        decay = {"log2_decay": family == "mamba2"}
        prepared = getattr(cp, f"chunk_{family}_prepare")(
            **mine, cu_seqlens=routing.cu_seqlens, **options(family)
        )
        slots = cp.summary_slots(prepared, routing, **decay)
        entry = cp.compose_entry_states(gather_slots(slots, group), routing, **decay)
        o, last = prepared.run(entry, output_final_state=True)
        close(o, want[0], 0, f"{family} output")
        close(last, want[1], 0, f"{family} states")
        d_last = torch.where(routing.terminal[:, None, None, None], d_s[routing.sequences], 0)
        given = {} if family == "mamba2" else {"scale": prepared.scale}
        grads = getattr(cp, f"chunk_{family}_prepare_backward")(
            prepared.saved, d_o[:, ids], entry, **given, **options(family)
        )
        slots = cp.grad_summary_slots(grads, d_last, routing, **decay)
        d_exit = cp.compose_exit_cotangents(gather_slots(slots, group), d_last, routing, **decay)
        *got, d_entry = grads.run(d_exit)
        assert d_entry.shape == entry.shape
        for name, grad in zip(prepared.saved._fields, got, strict=False):
            if name in mine and name not in PARAMS:
                close(grad, want[2][name], 0, f"{family} gradient of {name}")


def check_layouts_of_the_same_caps(rank, world, group):
    """One routing object takes other layouts' values in place, as a replay would find them."""
    caps = {"slots": 3, "max_subsequences": 6}
    cu_a, cu_b = (0, 10, 12 * world), (0, 12 * world - 5, 12 * world - 1, 12 * world)
    tables = [cp.contiguous_fragments(12 * world, world), cp.zigzag_fragments(12 * world, world)]
    tables.append(tables[0][::-1])
    held = None
    for cu, table in ((cu_a, tables[0]), (cu_b, tables[1]), (cu_b, tables[2]), (cu_a, tables[1])):
        plan = cp.ContextParallelPlan.from_fragments(cu, table, rank)
        made, ids = plan.routing("cpu", **caps), plan.global_token_ids("cpu")
        held = made if held is None else held.copy_(made)
        x, state, d_o, d_s = draw("gdn", cu)
        o, last, grads, _ = many_ranks("gdn", held, ids, group, x, state, d_o, d_s)
        want_o, want_s, want_g, _ = one_rank("gdn", cu, x, state, d_o, d_s)
        close(o, want_o[:, ids], 1e-11, "output")
        close(last[held.terminal], want_s[held.sequences[held.terminal]], 1e-11, "final states")
        close(grads["k"], want_g["k"][:, ids], 1e-11, "gradient of k")


def check_convolution_history(rank, world, group):
    """The short convolution over shards is that of the whole, its gradients too."""
    C, W = 5, 4
    r = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(*s, generator=r, dtype=F64) for s in ((1, 96, C), (C, W)))
    d_y = torch.randn(1, 96, C, generator=r, dtype=F64)
    whole, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = ops.causal_conv1d(whole, w, cu_seqlens=torch.tensor(CU, dtype=torch.int32))
    y.backward(d_y)
    pieces = [cut for (cut,) in cp.contiguous_fragments(96, 24 * world)]  # shorter than the window
    for table in (scattered(world), cp.zigzag_fragments(96, world), [pieces[i::world] for i in
                  range(world)]):  # fmt: skip
        plan = cp.ContextParallelPlan.from_fragments(CU, table, rank)
        ids = plan.global_token_ids("cpu")
        routing = plan.routing("cpu", conv_history=W - 1, max_subsequences=60)
        mine, own = x[:, ids].requires_grad_(), weight.clone().requires_grad_()
        history = cp.context_parallel_conv_history(mine, routing, group)
        got = ops.causal_conv1d(mine, own, cu_seqlens=routing.cu_seqlens, initial_state=history)
        got.backward(d_y[:, ids])
        close(got, y[:, ids], 1e-12, "convolution")
        close(mine.grad, whole.grad[:, ids], 1e-12, "gradient of x")
        dist.all_reduce(own.grad, group=group)
        close(own.grad, w.grad, 1e-12, "gradient of the weight")
        assert cp.context_parallel_conv_history(mine, plan.routing("cpu"), group) is None


def check_refusals(rank, world, group):
    """A wrong rank, group or span raises on every rank before anything is sent."""
    x, *_ = draw("gdn")
    table = cp.contiguous_fragments(96, world)

    def call(row, table, span, **more):
        plan = cp.ContextParallelPlan.from_fragments(CU, table, row)
        where = more.pop("where", group)
        return cp.context_parallel_gdn(**span, routing=plan.routing("cpu"), group=where, **more)

    ids = cp.ContextParallelPlan.from_fragments(CU, table, rank).global_token_ids("cpu")
    mine = {name: t[:, ids] for name, t in x.items()}
    rest = [cut for row in table[1:] for cut in row]
    for wrong, kind, word in (
        (lambda: call((rank + 1) % world, table, mine), lagraph.RuleBroken, "group"),
        (lambda: call(rank, [*table, []], mine), lagraph.RuleBroken, "group"),
        (lambda: call(0, [[*table[0], *rest]], mine), lagraph.RuleBroken, "group"),
        (lambda: call(rank, table, x), lagraph.ShapeMismatch, "span"),
        (lambda: call(rank, table, mine, exchange="ring"), lagraph.InvalidOption, "exchange"),
        (lambda: call(rank, table, {**mine, "k": mine["k"].float()}), lagraph.DtypeMismatch, "k"),
        (lambda: call(rank, table, mine, impl="fused"), lagraph.PlanNotOffered, "CUDA"),
        (lambda: call(rank, table, mine, initial_state=torch.zeros(9, H, V, K, dtype=F64)),
         lagraph.ShapeMismatch, "initial_state"),
    ):  # fmt: skip
        with pytest.raises(kind, match=word) as caught:
            wrong()
        assert "context_parallel" in str(caught.value)
    compare("gdn", table, rank, group)  # the next good call works


def check_autocast(rank, world, group):
    """Tokens are cast as by the operators; gates and states are not."""
    cu, table = (0, 96), cp.contiguous_fragments(96, world)
    plan = cp.ContextParallelPlan.from_fragments(cu, table, rank)
    routing, ids = plan.routing("cpu"), plan.global_token_ids("cpu")
    x, _, d_o, _ = draw("gdn", cu, torch.float32)
    want, *_ = one_rank("gdn", cu, *draw("gdn", cu))
    mine = {name: t[:, ids].requires_grad_() for name, t in x.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, last = cp.context_parallel_gdn(**mine, routing=routing, group=group)
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
    routing, ids = plan.routing("cpu"), plan.global_token_ids("cpu")
    x, *_ = draw("kda", cu)
    mine = {name: t[:, ids].requires_grad_() for name, t in x.items()}
    with torch.no_grad():
        o, _ = cp.context_parallel_kda(**mine, routing=routing, group=group)
    assert not o.requires_grad
    o, _ = cp.context_parallel_kda(**mine, routing=routing, group=group)
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

    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    inner = mesh.get_group("cp")
    cu, T = (0, 21, 50), 50
    table = cp.zigzag_fragments(T, 2)
    plan = cp.ContextParallelPlan.from_fragments(cu, table, mesh.get_local_rank("cp"))
    routing, ids = plan.routing("cpu"), plan.global_token_ids("cpu")
    recipe = partial(cp.context_parallel_gdn, routing=routing, group=inner)
    offsets = torch.tensor(cu, dtype=torch.int32)

    def alone(*tokens):
        return ops.chunk_gdn(*tokens, cu_seqlens=offsets)

    torch.manual_seed(0)
    reference = Model().double()
    batches = torch.randn(2, 1, T, 8, dtype=F64)  # one for each data-parallel row
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


# Worlds of the checks that need not run in each.
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
    "check_activation_checkpointing_and_fsdp": (4,),
}
CHECKS = {name: check for name, check in globals().items() if name.startswith("check_")}


def checks(world):
    """The names of a world's checks."""
    return [name for name in CHECKS if world in ONLY.get(name, (world,))]


# Processes ------------------------------------------------------------------------------------


def _rank(rank, world, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of torch.distributed; the checks themselves raise
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=60))
    messages = {}
    for name in checks(world):
        try:
            CHECKS[name](rank, world, dist.group.WORLD)
            messages[name] = ""
        except Exception:
            messages[name] = traceback.format_exc()
            break  # the other ranks wait for this one: nothing after it means anything
    torch.save(messages, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def outcomes(world):
    """{check: messages of the ranks}; "" where it held."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (world, port, folder), nprocs=world)
        ranks = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(world)]
    return {
        name: [messages.get(name, "not reached: an earlier check failed") for messages in ranks]
        for name in checks(world)
    }


if __name__ == "__main__":
    import sys

    for world in map(int, sys.argv[1:] or ("2",)):
        for name, messages in outcomes(world).items():
            print(world, name, "ok" if not any(messages) else next(filter(None, messages)))
