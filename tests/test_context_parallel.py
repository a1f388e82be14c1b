"""Context parallelism: plans, the algebra on summaries, staged operators, and recipes over gloo.

What needs several processes is in `parallel.py`; every world is spawned once, and each of its
checks is a test here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import combinations, pairwise
from pathlib import Path

import parallel
import pytest
import torch
import torch.distributed as dist
from parallel import F64, FAMILIES, H, K, V, close, draw, options

import lagraph
from lagraph import ops
from lagraph.ops import context_parallel as cp
from lagraph.ops import exchange
from lagraph.ops.staged import Prepared

Plan = cp.ContextParallelPlan
every_family = pytest.mark.parametrize("family", FAMILIES)

PAGE_CU = (0, 40, 232, 384)
PAGE_TABLE = [[(0, 96), (288, 384)], [(96, 192), (192, 288)]]


# Ranks ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spawned():
    """Outcomes by world, spawned when first asked for."""
    known = {}

    def of(world):
        if world not in known:
            known[world] = parallel.outcomes(world)
        return known[world]

    return of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "check"), [(world, name) for world in (2, 3, 4) for name in parallel.checks(world)]
)
def test_ranks(spawned, world, check):
    """See `parallel`."""
    failed = {rank: text for rank, text in enumerate(spawned(world)[check]) if text}
    assert not failed, "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())


@pytest.mark.slow
def test_the_example_agrees_with_one_rank():
    """Under torchrun, two ranks; it fails by itself where they disagree."""
    shown = run_example(2, "--family", "kda", "--partition", "zigzag", "--steps", "2")
    assert re.search(r"on 2 rank\(s\).*\n.*\nagainst one rank: losses differ by", shown)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["gdn", "kda"])
@pytest.mark.parametrize("partition", ["contiguous", "zigzag", "documents"])
def test_the_example_on_gpus(family, partition):
    """NCCL; two ranks where there are two GPUs."""
    ranks = min(2, torch.cuda.device_count())
    run_example(ranks, "--cuda", "--family", family, "--partition", partition)


def run_example(ranks, *args):
    """Standard output of the example on a number of ranks."""
    path = Path(__file__).resolve().parent.parent / "examples" / "context_parallel_training.py"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone",
         "--nproc-per-node", str(ranks), str(path), *args],
        capture_output=True, text=True, check=False, cwd="/",
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


# Plans ---------------------------------------------------------------------------------------


def test_the_example_of_the_page():
    a, b = (Plan.from_fragments(PAGE_CU, PAGE_TABLE, rank) for rank in (0, 1))
    assert a.cu_seqlens == (0, 40, 96, 192)
    assert b.cu_seqlens == (0, 96, 136, 192)
    # s1 = A -> C -> D, s2 = D -> B, where A, B are rank 0's fragments and C, D rank 1's.
    assert a.predecessors == ((), ((1, 1),))
    assert a.successors == (((1, 1), (1, 0)), ())
    assert b.predecessors == (((0, 0),), ((0, 0), (1, 0)))
    assert b.successors == (((1, 1),), ((0, 1),))
    assert (a.terminal, b.terminal) == ((0, 2), (1,))
    assert (a.starts, b.starts) == ((0, 1), (2,))
    assert a.subsequences[1] == cp.Subsequence(1, 40, 96)
    assert a.subsequences[1].length == 56
    routing = a.routing("cpu")
    assert routing.forward_bounds.tolist() == [[40, 96], [0, 0]]
    assert routing.reverse_bounds.tolist() == [[0, 0], [96, 192]]
    assert routing.entry_sources.tolist() == [2, 2, 1]
    assert routing.exit_sources.tolist() == [2, 0, 2]
    assert routing.predecessors.tolist() == [[4, 4, 4], [3, 4, 4]]
    assert routing.terminal.tolist() == [True, False, True]
    ids = a.global_token_ids("cpu")
    assert ids.tolist() == [*range(96), *range(288, 384)]
    assert not routing.aligned
    same = cp.ContextParallelRouting.from_fragments(PAGE_CU, PAGE_TABLE, 0, "cpu")
    assert torch.equal(same.successors, routing.successors)


@pytest.mark.parametrize(
    ("table", "word"),
    [
        ([[(0, 4)], [(5, 10)]], r"nobody for tokens \[4, 5\)"),
        ([[(0, 6)], [(5, 10)]], "token 5 twice"),
        ([[(0, 5)], [(5, 9)]], r"nobody for tokens \[9, 10\)"),
        ([[(1, 5)], [(5, 10)]], r"nobody for tokens \[0, 1\)"),
        ([[(0, 5), (0, 5)], [(5, 10)]], "token 0 twice"),
        ([[(0, 11)]], "inside"),
        ([[(6, 5)], [(0, 10)]], "start <= stop"),
        ([], "one row for each rank"),
        ([[], []], r"nobody for tokens \[0, 10\)"),
    ],
)
def test_fragments_tile_the_stream_exactly_once(table, word):
    with pytest.raises(lagraph.RuleBroken, match=word):
        Plan.from_fragments((0, 3, 10), table, 0)


def test_other_bad_plans():
    for offsets in ((), (1, 5), (0, 5, 3)):
        with pytest.raises(lagraph.RuleBroken, match="cu_seqlens_global"):
            Plan.from_fragments(offsets, [[(0, 5)]], 0)
    for rank in (-1, 2, True):
        with pytest.raises(lagraph.InvalidOption, match="cp_rank"):
            Plan.from_fragments((0, 4), [[(0, 2)], [(2, 4)]], rank)
    plan = Plan.from_fragments(PAGE_CU, PAGE_TABLE, 0)
    for caps in ({"slots": 1}, {"max_subsequences": 2}, {"conv_history": -1}, {"slots": 2.5}):
        with pytest.raises(lagraph.InvalidOption, match=next(iter(caps))):
            plan.routing("cpu", **caps)


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("tokens", [0, 1, 3, 64, 101])
def test_fragment_tables_tile(world, tokens):
    cu = (0, tokens // 5, tokens // 3, tokens)
    contiguous = cp.contiguous_fragments(tokens, world)
    for table in (contiguous, cp.zigzag_fragments(tokens, world),
                  cp.document_aligned_fragments(cu, world)):  # fmt: skip
        assert len(table) == world
        plans = [Plan.from_fragments(cu, table, rank) for rank in range(world)]
        ids = torch.cat([plan.global_token_ids("cpu") for plan in plans])
        assert ids.sort().values.tolist() == list(range(tokens))
        # Every sequence ends and starts once.
        lengths = [b > a for a, b in pairwise(cu)]
        assert sum(len(plan.terminal) for plan in plans) == sum(lengths)
        assert sum(len(plan.starts) for plan in plans) == sum(lengths)
    assert plans[0].chain == 0  # the last of them is aligned
    sizes = [stop - start for ((start, stop),) in contiguous]
    assert max(sizes) - min(sizes) <= 1


def test_documents_are_spread_longest_first():
    assert cp.document_aligned_fragments((0, 3, 10, 11, 50), 2) == [[(11, 50)], [(0, 11)]]
    for call in (lambda: cp.contiguous_fragments(-1, 2), lambda: cp.zigzag_fragments(4, 0),
                 lambda: cp.document_aligned_fragments((), 1)):  # fmt: skip
        with pytest.raises(lagraph.InvalidOption):
            call()


def test_caps_fix_every_shape():
    """Whatever the layout; and copy_ refuses what is not of the same make."""
    caps = {"slots": 3, "max_subsequences": 7, "conv_history": 3}
    layouts = [
        (PAGE_CU, PAGE_TABLE),
        ((0, 384), cp.contiguous_fragments(384, 2)),
        ((0, 192, 384), [[(192, 384)], [(0, 192)]]),
        ((0, 1, 2, 3, 384), cp.zigzag_fragments(384, 2)),
    ]
    made = [Plan.from_fragments(*layout, 1).routing("cpu", **caps) for layout in layouts]
    for a, b in combinations(made, 2):
        for name, x in vars(a).items():
            y = getattr(b, name)
            if isinstance(x, torch.Tensor):
                assert (x.shape, x.dtype) == (y.shape, y.dtype), name
            elif name != "aligned":
                assert x == y, name
    held = made[0].copy_(made[3])
    assert held is made[0]
    assert torch.equal(held.cu_seqlens, made[3].cu_seqlens)
    plain = Plan.from_fragments(*layouts[0], 1).routing("cpu")
    other = Plan.from_fragments(*layouts[0], 1).routing("cpu", **{**caps, "slots": 4})
    for wrong in (plain, other):
        with pytest.raises(lagraph.RuleBroken, match="copy_"):
            held.copy_(wrong)
    with pytest.raises(lagraph.RuleBroken, match="capped"):
        plain.copy_(plain)
    with pytest.raises(lagraph.ShapeMismatch, match="tail_sources"):
        held.copy_(
            Plan.from_fragments(*layouts[0], 1).routing("cpu", **{**caps, "conv_history": 2})
        )


def test_the_rule_that_chooses_an_exchange():
    def routing(world, **caps):
        table = cp.contiguous_fragments(4 * world, world)
        return Plan.from_fragments((0, 4 * world), table, 0).routing("cpu", **caps)

    small, large, capped = routing(8), routing(64), routing(64, slots=1)
    assert exchange.choose_exchange(small) == "all_gather"
    assert exchange.choose_exchange(large) == "doubling"  # 63 > 4 * 6
    assert exchange.choose_exchange(capped) == "all_gather"
    assert exchange.choose_exchange(small, "doubling") == "doubling"
    with pytest.raises(lagraph.RuleBroken, match="caps"):
        exchange.choose_exchange(capped, "doubling")


# The algebra ---------------------------------------------------------------------------------


def prepared(family, x, cu=None, **more):
    offsets = None if cu is None else torch.tensor(cu, dtype=torch.int32)
    return getattr(cp, f"chunk_{family}_prepare")(
        **x, cu_seqlens=offsets, **options(family), **more
    )


def bounds(*rows):
    return torch.tensor(rows, dtype=torch.int32).view(-1, 2)


@every_family
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_summaries_compose_to_that_of_the_whole(family, dtype):
    """Any three ranges, in any order of merging; and a state goes through them."""
    decay = {"log2_decay": family == "mamba2"}
    x, *_ = draw(family, (0, 90), dtype)
    span = prepared(family, x)
    a, b, c, whole = (span.state_summaries(bounds(r))[0] for r in
                      ((0, 7), (7, 64), (64, 90), (0, 90)))  # fmt: skip
    assert whole.dtype is dtype
    assert whole.shape == (H, V + (1 if family == "mamba2" else K), K)
    bound = 1e-5 if dtype is torch.float32 else 1e-13
    compose = cp.compose_summaries
    left = compose(compose(a, b, **decay), c, **decay)
    right = compose(a, compose(b, c, **decay), **decay)
    close(left, whole, bound, "left")
    close(right, whole, bound, "right")
    neutral = cp.neutral_summary(H, V, K, device="cpu", dtype=dtype, **decay)
    assert torch.equal(compose(neutral, a, **decay), a)
    assert torch.equal(compose(a, neutral, **decay), a)
    state = torch.randn(H, V, K, dtype=dtype)
    assert torch.equal(cp.merge_state(state, neutral), state)
    _, last = span.run(state[None], output_final_state=True)
    close(cp.merge_state(state, whole), last[0], bound, "merged")
    chained = cp.merge_state(cp.merge_state(cp.merge_state(state, a), b), c)
    close(chained, last[0], bound, "chained")


@every_family
def test_the_algebra_is_differentiable(family):
    decay = {"log2_decay": family == "mamba2"}
    rows = V + (1 if family == "mamba2" else K)
    r = torch.Generator().manual_seed(2)
    make = lambda *shape: torch.randn(*shape, generator=r, dtype=F64, requires_grad=True)  # noqa: E731
    state, first, then = make(3, 1, V, K), make(1, H, rows, K), make(H, rows, K)
    assert torch.autograd.gradcheck(lambda s, a: cp.merge_state(s, a, **decay), (state, first))
    assert torch.autograd.gradcheck(lambda a, b: cp.compose_summaries(a, b, **decay), (first, then))


def test_the_algebra_ignores_the_callers_matmul_precision():
    state, summary = torch.randn(2, 64, 64), torch.randn(2, 128, 64)
    wanted = cp.merge_state(state, summary)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert torch.equal(cp.merge_state(state, summary), wanted)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(cp.merge_state(state, summary), wanted)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_one_key_channel_is_ambiguous_and_settled_by_the_flag():
    state, summary = torch.full((1, 2, 1), 3.0), torch.tensor([[[1.0], [1.0], [2.0]]])
    assert cp.merge_state(state, summary).flatten().tolist() == [7.0, 7.0]
    assert cp.merge_state(state, summary, log2_decay=True).flatten().tolist() == [13.0, 13.0]


def test_summaries_that_do_not_fit():
    state, good = torch.zeros(2, V, K), torch.zeros(2, V + K, K)
    with pytest.raises(lagraph.ShapeMismatch, match="summary"):
        cp.merge_state(state, good[:, 1:])
    with pytest.raises(lagraph.ShapeMismatch, match="state"):
        cp.merge_state(state[..., 1:], good)
    with pytest.raises(lagraph.ShapeMismatch, match="then"):
        cp.compose_summaries(good, good[..., 1:])


# Staged operators ------------------------------------------------------------------------------


@every_family
def test_summaries_of_ranges(family):
    """Rows in any order, empty ones among them, equal the summary of the slice alone."""
    cu = (0, 50, 50, 96)
    x, _, d_o, _ = draw(family, cu)
    span = prepared(family, x, cu)
    rows = [(64, 96), (0, 0), (0, 16), (32, 50), (70, 70)]
    found = span.state_summaries(bounds(*rows))
    given = {} if family == "mamba2" else {"scale": span.scale}
    span.run(None)  # Mamba-2 saves its output before the gate there
    back = getattr(cp, f"chunk_{family}_prepare_backward")
    reverse = back(span.saved, d_o, None, **given, **options(family)).state_grad_summaries(
        bounds(*rows)
    )
    log2 = family == "mamba2"
    for (a, b), row, grad in zip(rows, found, reverse, strict=True):
        part = {n: t if n in parallel.PARAMS else t[:, a:b] for n, t in x.items()}
        alone = prepared(family, part)
        close(row, alone.state_summaries(bounds((0, b - a)))[0], 1e-13, "forward")
        if a == b:
            assert torch.equal(row, cp.neutral_summary(H, V, K, device="cpu", dtype=F64,
                                                       log2_decay=log2))  # fmt: skip
        # d_entry = d_exit @ R + C, against the gradient itself.
        state, d_exit = torch.randn(1, H, V, K, dtype=F64), torch.randn(1, H, V, K, dtype=F64)
        alone.run(state)
        *_, d_entry = back(alone.saved, d_o[:, a:b], state, **given, **options(family)).run(d_exit)
        close(cp.merge_state(d_exit, grad[None]), d_entry, 1e-12, "reverse")
    assert span.state_summaries(bounds()).shape[0] == 0


@every_family
def test_staged_runs_have_the_bits_of_the_function(family):
    x, state, d_o, d_s = draw(family, dtype=torch.float32)
    want_o, want_s, want_g, want_i = parallel.one_rank(family, parallel.CU, x, state, d_o, d_s)
    span = prepared(family, x, parallel.CU)
    assert isinstance(span, Prepared)
    o, last = span.run(state, output_final_state=True)
    assert torch.equal(o, want_o)
    assert torch.equal(last, want_s)
    assert span.run(state)[1] is None
    given = {} if family == "mamba2" else {"scale": span.scale}
    *got, d_state = getattr(cp, f"chunk_{family}_prepare_backward")(
        span.saved, d_o, state, **given, **options(family)
    ).run(d_s)
    assert torch.equal(d_state, want_i)
    for name, grad in zip(span.saved._fields, got, strict=False):
        if name in x:
            assert torch.equal(grad, want_g[name]), name
    if family != "mamba2":
        assert span.scale == K**-0.5
        assert prepared(family, x, parallel.CU, scale=0.5).scale == 0.5


def test_bad_ranges_and_spans_are_refused():
    x, *_ = draw("gdn")
    span = prepared("gdn", x)
    for rows in (((0, 97),), ((5, 3),), ((0, 10), (9, 12)), ((-1, 4),)):
        with pytest.raises(lagraph.RuleBroken, match="bounds"):
            span.state_summaries(bounds(*rows))
    with pytest.raises(lagraph.ShapeMismatch, match="span"):
        prepared("gdn", {name: torch.cat([t, t]) for name, t in x.items()})
    with pytest.raises(lagraph.DtypeMismatch, match=r"chunk_gdn_prepare\.k"):
        prepared("gdn", {**x, "k": x["k"].float()})
    with pytest.raises(TypeError, match="scael"):
        cp.chunk_gdn_prepare(**x, scael=1.0)


# Public reports --------------------------------------------------------------------------------


@every_family
@pytest.mark.parametrize(("cu", "tokens"), [((0, 1, 3), 3), ((0,), 0), ((0, 0), 0)])
def test_b71_fewer_tokens_than_ranks(family, cu, tokens):
    """3 tokens over 4 ranks, and none: empty ranks send the identity, and what the ranks combine
    to is the run on one."""
    world = 4
    x, _, d_o, d_s = draw(family, cu)
    want_o, want_s, *_ = parallel.one_rank(family, cu, x, None, d_o, d_s)
    table = cp.contiguous_fragments(tokens, world)
    decay = {"log2_decay": family == "mamba2"}
    plans = [Plan.from_fragments(cu, table, rank) for rank in range(world)]
    spans, slots = [], []
    for plan in plans:
        ids, routing = plan.global_token_ids("cpu"), plan.routing("cpu")
        mine = {n: t if n in parallel.PARAMS else t[:, ids] for n, t in x.items()}
        spans.append((prepared(family, mine, routing.cu_seqlens.tolist()), routing, ids))
        slots.append(cp.summary_slots(spans[-1][0], routing, **decay))
        if not len(ids):  # what it sends, if it is asked for
            slots[-1] = spans[-1][0].state_summaries(routing.forward_bounds)
            neutral = cp.neutral_summary(H, V, K, device="cpu", dtype=F64, **decay)
            assert torch.equal(slots[-1][0], neutral)
    finals = 0
    for span, routing, ids in spans:
        entry = cp.compose_entry_states(torch.stack(slots), routing, **decay)
        o, last = span.run(entry, output_final_state=True)
        close(o, want_o[:, ids], 1e-13, "output")
        at = routing.sequences[routing.terminal]
        close(last[routing.terminal], want_s[at], 1e-13, "final states")
        finals += len(at)
    assert finals == sum(b > a for a, b in pairwise(cu))


def test_the_namespaces():
    assert cp.__all__ == sorted(cp.__all__)
    assert all(hasattr(cp, name) for name in cp.__all__)
    assert ops.context_parallel is cp


# GPUs ------------------------------------------------------------------------------------------


@pytest.fixture
def nccl():
    """A group of this process alone."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.gpu
@every_family
def test_a_captured_call_replays_other_layouts(nccl, family):
    """Forward and backward in one CUDA graph; pieces of documents pass their states through the
    exchange with itself. Also the fused engine against one call on whole documents."""
    T, heads, dim = 512, 2, 64
    tables = [
        ((0, 300, T), [[(0, 100), (100, T)]]),
        ((0, T), [[(200, T), (0, 130), (130, 200)]]),
        ((0, 64, 70, T), [[(0, T)]]),
    ]
    caps = {"slots": 3, "max_subsequences": 5}
    r = torch.Generator("cuda").manual_seed(0)

    def randn(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, generator=r, device="cuda").to(dtype)

    def unit(x):
        return torch.nn.functional.normalize(x.float(), dim=-1).to(x.dtype)

    gates = -torch.rand(1, T, heads, generator=r, device="cuda")
    channels = -torch.rand(1, T, heads, dim, generator=r, device="cuda")
    q, k, v = randn(1, T, heads, dim), unit(randn(1, T, heads, dim)), randn(1, T, heads, dim)
    beta = torch.rand(1, T, heads, generator=r, device="cuda")
    x = {
        "gdn": lambda: [q, k, v, gates, beta],
        "kda": lambda: [q, k, v, channels, beta],
        "gdn2": lambda: [q, k, v, channels, -channels, v.sigmoid()],
        "gdp": lambda: [q, *(torch.stack([t, t.flip(1)], 2) for t in (k, v)), gates,
                        torch.stack([beta, beta.flip(1)], 2)],
        "mamba2": lambda: [v, gates, -torch.rand(heads, device="cuda"), k, q],
    }[family]()  # fmt: skip
    shared = {2} if family == "mamba2" else set()
    d_o, d_s = randn(1, T, heads, dim), randn(1, heads, dim, dim, dtype=torch.float32)

    held = Plan.from_fragments(*tables[0], 0).routing("cuda", **caps)
    leaves = [t.clone().requires_grad_() for t in x]
    seed_o, seed_s = d_o.clone(), torch.zeros(5, heads, dim, dim, device="cuda")

    def step():
        o, last = getattr(cp, f"context_parallel_{family}")(
            *leaves, routing=held, group=nccl, **options(family)
        )
        return o, last, torch.autograd.grad([o, last], leaves, [seed_o, seed_s])

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # The watchdog of NCCL has a thread of its own.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = step()
    for cu, table in tables:
        plan = Plan.from_fragments(cu, table, 0)
        ids = plan.global_token_ids("cuda")
        held.copy_(plan.routing("cuda", **caps))
        with torch.no_grad():
            for i, (leaf, t) in enumerate(zip(leaves, x, strict=True)):
                leaf.copy_(t if i in shared else t[:, ids])
            seed_o.copy_(d_o[:, ids])
            seed_s.copy_(torch.where(held.terminal.view(-1, 1, 1, 1), d_s, 0.0))
        graph.replay()
        torch.cuda.synchronize()
        whole = [t.clone().requires_grad_() for t in x]
        o, last = getattr(ops, f"chunk_{family}")(
            *whole, cu_seqlens=torch.tensor(cu, device="cuda", dtype=torch.int32),
            output_final_state=True, **options(family),
        )  # fmt: skip
        wanted = torch.autograd.grad([o, last], whole, [d_o, d_s.expand_as(last)])
        close(out[0].float(), o[:, ids].float(), 5e-3, "output")
        at = held.sequences[held.terminal]
        close(out[1][held.terminal], last[at], 5e-3, "final states")
        for i, (got, want) in enumerate(zip(out[2], wanted, strict=True)):
            want = want if i in shared else want[:, ids]
            close(got.float(), want.float(), 2e-2, f"gradient {i}")
