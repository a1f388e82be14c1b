"""Context parallelism: plans, the algebra on summaries, staged operators, and recipes over gloo
and NCCL.

What needs several processes is in `parallel.py`; every world of a setting is spawned once, and each
of its checks is a test here.
"""

from __future__ import annotations

import importlib.util
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

ROOT = Path(__file__).resolve().parent.parent
Plan = cp.ContextParallelPlan
every_family = pytest.mark.parametrize("family", FAMILIES)

PAGE_CU = (0, 40, 232, 384)
PAGE_TABLE = [[(0, 96), (288, 384)], [(96, 192), (192, 288)]]


# Ranks ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spawned():
    """Outcomes by setting and world, spawned when first asked for."""
    known = {}

    def of(setting, world):
        if (setting, world) not in known:
            known[setting, world] = parallel.outcomes(setting, world)
        return known[setting, world]

    return of


GPUS = torch.cuda.device_count()
WORLDS = {name: (max(GPUS, 2),) for name in parallel.SETTINGS}
WORLDS |= {"gloo": (2, 3, 4), "interpreted": (2,)}
WORLDS |= {name: (2,) for name, setting in parallel.SETTINGS.items() if setting.shared}


def gpus(setting):
    """Marks of a setting's tests: how many GPUs they need."""
    setting = parallel.SETTINGS[setting]
    if setting.kind == "cpu":
        return ()
    needed = pytest.mark.skipif(GPUS < 2 and not setting.shared, reason="needs two GPUs")
    return pytest.mark.gpu, needed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "world", "check"),
    [
        pytest.param(setting, world, name, marks=gpus(setting),
                     id=f"{setting}-{world}-{name.removeprefix('check_')}")
        for setting, worlds in WORLDS.items()
        for world in worlds
        for name in parallel.checks(setting, world)
    ],
)  # fmt: skip
def test_ranks(spawned, setting, world, check):
    """See `parallel`."""
    failed = {rank: text for rank, text in enumerate(spawned(setting, world)[check]) if text}
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
    return torchrun(ranks, "examples/context_parallel_training.py", *args)


def torchrun(ranks, script, *args):
    """Standard output of a script on a number of ranks."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone",
         "--nproc-per-node", str(ranks), str(ROOT / script), *args],
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
    for offsets in (5, None, (0, 2.5, 5), "05", torch.tensor([0.0, 5.0])):
        with pytest.raises(lagraph.InvalidOption, match=r"cu_seqlens_global: .*integers"):
            Plan.from_fragments(offsets, [[(0, 5)]], 0)
    for table in (3, [3], [[3]], None, [[(0, 2.5), (2.5, 5)]], [[("0", "5")]]):
        with pytest.raises(lagraph.InvalidOption, match=r"fragments: .*integers"):
            Plan.from_fragments((0, 5), table, 0)
    for rank in (-1, 2, True, 0.5, None, "0"):
        with pytest.raises(lagraph.InvalidOption, match="cp_rank"):
            Plan.from_fragments((0, 4), [[(0, 2)], [(2, 4)]], rank)
    for good in (torch.tensor([0, 4]), torch.tensor([0, 4]).numpy()):
        assert Plan.from_fragments(good, [[(0, 2)], [(2, 4)]], 1).cu_seqlens == (0, 2)
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


@pytest.mark.parametrize("bad", [7.5, -1, True, None, "7", [7], torch.tensor(7.0)])
def test_helpers_refuse_what_is_no_number(bad):
    for name in ("contiguous_fragments", "zigzag_fragments"):
        with pytest.raises(lagraph.InvalidOption, match=rf"{name}\.total_tokens: .*integer >= 0"):
            getattr(cp, name)(bad, 2)
        with pytest.raises(lagraph.InvalidOption, match=rf"{name}\.world: .*an integer >= 1, got"):
            getattr(cp, name)(7, bad)
    with pytest.raises(lagraph.InvalidOption, match=r"document_aligned_fragments\.world"):
        cp.document_aligned_fragments((0, 7), bad)
    with pytest.raises(TypeError, match="Give the sizes"):
        cp.neutral_summary(2, bad, 4, device="cpu")


def test_helpers_take_any_integers():
    import numpy

    assert cp.contiguous_fragments(numpy.int64(7), torch.tensor(2)) == [[(0, 3)], [(3, 7)]]
    assert cp.document_aligned_fragments(torch.tensor([0, 3, 7]), 2) == [[(3, 7)], [(0, 3)]]
    for wrong in ((), (1, 4), (0, 4, 3)):
        with pytest.raises(lagraph.RuleBroken, match=r"document_aligned_fragments\.cu_seqlens"):
            cp.document_aligned_fragments(wrong, 1)
    for wrong in (7, (0, 3.5), None):
        with pytest.raises(lagraph.InvalidOption, match="a sequence of integers"):
            cp.document_aligned_fragments(wrong, 1)


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
            elif name != "aligned" and not name.startswith("_"):
                assert x == y, name
        for count in (1, 2, 7):
            same_make(a.pieces(count), b.pieces(count))
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


def same_make(a, b):
    """Tables of the same shapes and host values."""
    for name, x in vars(a).items():
        y = getattr(b, name)
        if isinstance(x, torch.Tensor):
            assert (x.shape, x.dtype) == (y.shape, y.dtype), name
        elif hasattr(x, "bounds"):
            same_make(x, y)
        else:
            assert x == y, name


def test_pieces_of_the_example_of_the_page():
    """Rank 0 of the page: A s0 | A s1 | B s2 at 0, 40, 96, 192; cut once each into pieces of 64."""
    routing = Plan.from_fragments(PAGE_CU, PAGE_TABLE, 0).routing("cpu")
    assert routing.forward_waits  # B s2 continues D's
    assert routing.reverse_waits
    whole = routing.pieces(1)
    assert whole.whole
    assert whole.cu_seqlens.tolist() == [0, 40, 96, 192]
    assert whole.forward.bounds.tolist() == [[40, 96]]  # A s1, for C
    assert whole.reverse.bounds.tolist() == [[96, 192]]  # B s2, for D
    assert (whole.forward.need, whole.reverse.need) == ("bias", "bias")  # one starts, one ends
    assert whole.forward.spans == ((32, 96),)  # 8 tokens before it, for the sake of alignment
    assert whole.forward.offsets.tolist() == [0, 8, 64]
    made = routing.pieces(2)
    assert made is routing.pieces(2)
    assert made.cu_seqlens.tolist() == [0, 40, 96, 192]  # no segment is longer than half
    made = routing.pieces(3)
    assert made.cu_seqlens.tolist() == [0, 40, 96, 160, 192]
    assert made.last.tolist() == [0, 1, 3]
    assert made.first.tolist() == [0, 1, 2]
    assert made.forward.bounds.tolist() == [[40, 96], [96, 160]]
    assert made.forward.need == "map"  # the state from D goes through
    assert made.forward.links.tolist() == [1, 2]  # its first piece, the identity
    assert made.forward.through.tolist() == [2]
    assert (made.forward.head.tolist(), made.forward.tail.tolist()) == ([1, 1], [0, 2])
    assert made.entry.tolist() == [0, 1, 2, 3]  # the last from the link after three segments
    assert made.exit.tolist() == [0, 1, 3, 2]
    assert made.reverse.bounds.tolist() == [[96, 160], [160, 192]]
    assert made.reverse.links.tolist() == [1, 2]
    assert (made.reverse.head.tolist(), made.reverse.tail.tolist()) == ([1, 0], [2, 0])
    assert made.moves.tolist() == [1, 2]  # s2 ends in its last piece: nothing comes through it


def test_steps_of_the_scan_over_pieces():
    """Every link is composed from the start of its segment: indices instead of maps."""
    routing = Plan.from_fragments((0, 900, 1000), [[(0, 200), (300, 1000)], [(200, 300)]], 0)
    rows = routing.routing("cpu").pieces(15).forward
    segments = rows.through.tolist()
    made = [[i] for i in range(len(segments))] + [[]]
    for step in rows.steps.tolist():
        made = [made[before] + mine for before, mine in zip(step, made, strict=True)]
    assert made[-1] == []
    assert [ids[0] for ids in made[:-1]] == [segments.index(s) for s in segments]
    assert all(ids == list(range(ids[0], ids[-1] + 1)) for ids in made[:-1])
    assert [ids[-1] for ids in made[:-1]] == list(range(len(segments)))
    assert len(rows.steps) == 4  # up to 9 links in one segment
    assert max(len(ids) for ids in made) == 9


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_pieces_tile_the_span(count):
    for cu, table in (
        (PAGE_CU, PAGE_TABLE), ((0, 5000), cp.contiguous_fragments(5000, 3)),
        ((0, 1, 700, 3000), cp.zigzag_fragments(3000, 2)), ((0,), [[], []]),
    ):  # fmt: skip
        for rank, caps in ((r, c) for r in range(len(table)) for c in ({}, {"slots": 4})):
            routing = Plan.from_fragments(cu, table, rank).routing("cpu", **caps)
            made = routing.pieces(count)
            edges = made.cu_seqlens.tolist()
            assert edges == sorted(edges)
            assert (edges[0], edges[-1]) == (0, routing.tokens)
            assert set(routing.cu_seqlens.tolist()) <= set(edges)
            most = -(-routing.tokens // count)
            assert all(b - a < most + 64 for a, b in pairwise(edges))
            used = len({*edges}) - 1
            assert used <= len(routing.sequences) + count - 1
            starts = [edges[p] for p in made.first.tolist()]
            assert starts == routing.cu_seqlens.tolist()[:-1]


def test_rows_with_much_between_them_are_joined():
    """Rows are the halves of documents that somebody waits for."""
    cu, table = (0, 640, 1280, 1920), [[(0, 1600)], [(1600, 1920)]]
    routing = Plan.from_fragments(cu, table, 0).routing("cpu")
    rows = routing.pieces(4).forward  # of at most 400 tokens
    assert rows.bounds.tolist() == [[0, 320], [640, 960], [1280, 1600]]
    assert rows.spans == ((0, 320), (640, 960), (1280, 1600))
    assert rows.dense
    assert rows.offsets.tolist() == [0, 320, 640, 960]
    assert rows.feed.tolist() == [0, 1, 2]
    capped = Plan.from_fragments(cu, table, 0).routing("cpu", slots=1).pieces(4).forward
    assert capped.spans == ((0, 1600),)
    assert not capped.dense
    # Neighbours are one range, and few tokens between rows are walked.
    near = Plan.from_fragments((0, 1280, 1300, 1920), [[(0, 1920)], []], 0).routing("cpu")
    assert near.pieces(6).forward.spans == ((0, 960), (1300, 1620))
    assert near.pieces(12).forward.spans == ((0, 1876),)


def test_a_choice_of_pieces():
    from types import SimpleNamespace

    from lagraph.ops import recipe

    def choose(heads, values, cu, table, rank=0, device="cuda", decay=False, **caps):
        made = Plan.from_fragments(cu, table, rank).routing("cpu", **caps)
        at = SimpleNamespace(device=torch.device(device, 0))
        made = SimpleNamespace(
            cu_seqlens=at, exchanges=made.exchanges, capped=made.capped, tokens=made.tokens,
            balanced=made.balanced,
        )  # fmt: skip
        return recipe.choose_pieces(made, heads, values, decay)

    def long(tokens):
        return (0, 2 * tokens), cp.contiguous_fragments(2 * tokens, 2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "_processors", lambda device: 132)
        for rank in (0, 1):
            assert choose(16, 128, *long(1 << 17), rank) == 8
            assert choose(64, 128, *long(1 << 17), rank) == 2
            assert choose(16, 64, *long(1 << 17), rank, decay=True) == 16
        assert choose(16, 64, *long(1100)) == 2  # not shorter than 512 tokens
        assert choose(16, 64, *long(0)) == 1
        assert choose(256, 128, *long(1 << 17)) == 1
        assert choose(16, 128, *long(1 << 17), slots=1) == 8
        assert choose(16, 128, *long(1 << 17), device="cpu") == 1
        # Documents that fill the device by themselves stay whole; on two ranks they no longer do.
        cu = benchmark().documents(1 << 20)
        half = cu[-1] // 2
        one = [[(0, half), (half, cu[-1])]]
        assert choose(16, 128, cu, one) == 1
        for rank in (0, 1):
            assert choose(16, 128, cu, cp.contiguous_fragments(cu[-1], 2), rank) >= 8
        assert choose(16, 128, cu, cp.document_aligned_fragments(cu, 2)) == 1  # exchanges nothing
        many = list(range(0, 1 << 17, 1 << 10))
        assert choose(16, 128, many, cp.contiguous_fragments(many[-1], 2)) == 1


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


def test_the_cost_model_is_that_of_the_docs():
    """The page's table is what the benchmark prints, and its bytes are what the library says."""
    bench, page = benchmark(), ROOT / "docs" / "context_parallel.md"
    text = page.read_text(encoding="utf-8")
    assert bench.model_table() in text
    first = bench.crossover(16, 128, 128, bench.MEASURED)
    assert f"less time from {first} ranks on" in text
    assert bench.crossover(16, 128, 128, bench.NETWORK) == first
    for ranks in (2, 3, 4, 7, 8, 64):
        cost = bench.model(ranks, 16, 128, 64, 1e-5, 1e9)
        table = cp.contiguous_fragments(ranks * 4, ranks)
        routings = [
            Plan.from_fragments((0, 4 * ranks), table, rank).routing("cpu") for rank in range(ranks)
        ]
        for kind, said in (("all_gather", cost.gather_bytes), ("doubling", cost.doubling_bytes)):
            most = max(exchange.received_bytes(r, 16, 64, 128, exchange=kind) for r in routings)
            assert most == said, (ranks, kind)
    slow = bench.model(8, 16, 128, 128, 1.0, 1e30)
    assert (slow.gather_seconds, slow.doubling_seconds) == (7.0, 3.0)
    fast = bench.model(8, 1, 128, 128, 0.0, 1.0)
    assert (fast.gather_seconds, fast.doubling_seconds) == (7 * 131072, 2 * 131072 + 65536)


def test_a_line_is_fitted():
    bench = benchmark()
    a, b = bench.line([(x, 3.0 + 0.5 * x) for x in (1, 2, 4, 8)])
    assert (a, b) == pytest.approx((3.0, 0.5))
    assert bench.line([(1, 1.0), (2, 2.2), (4, 4.8)])[0] == 0.0  # no negative latency
    gathered = bench.model(8, 16, 128, 128, 1.0, 1e30, gather_latency=2.0)
    assert (gathered.gather_seconds, gathered.doubling_seconds) == (14.0, 3.0)
    # The first link is a state; two windows and what comes before, but in the first round.
    made = bench.model(8, 16, 128, 128, 0.0, 1e30, fold=1.0, compose=10.0, host_send=100.0,
                       host_gather=7.0, host_fold=1.0, host_compose=10.0)  # fmt: skip
    assert (made.gather_seconds, made.doubling_seconds) == pytest.approx((6.0, 31.0))
    assert (made.gather_host, made.doubling_host) == (13.0, 331.0)


def test_the_figures_of_the_docs():
    """Tables are of the rows that were measured, and so is what the page says of them."""
    bench, page = benchmark(), ROOT / "docs" / "context_parallel.md"
    text = page.read_text(encoding="utf-8")
    folder = ROOT / "benchmarks" / "results"
    rows = bench.read_rows(str(folder / "h200_context_parallel.csv"))
    shown = (folder / "h200_context_parallel.md").read_text(encoding="utf-8")
    assert shown == bench.report(str(folder / "h200_context_parallel.csv"))
    assert '--8<-- "benchmarks/results/h200_context_parallel.md"' in text
    plain = {(r.shape, r.family): r for r in rows
             if (r.fragments, r.exchange) == ("contiguous", "all_gather")}  # fmt: skip
    for (shape, family), row in plain.items():
        assert row.bound == 1.0  # the fewest bytes
        if shape != "ragged":
            line = f"| {row.tokens} | {family} | {row.speedup:.2f} | {row.over_cut:.2f} |"
            assert line in text
    for by, other in zip(rows[::2], rows[1::2], strict=True):
        assert (by.exchange, other.exchange) == ("all_gather", "doubling")
        assert by.exchange_ms < other.exchange_ms


def benchmark():
    """benchmarks/context_parallel.py as a module."""
    path = ROOT / "benchmarks" / "context_parallel.py"
    spec = importlib.util.spec_from_file_location("benchmark_context_parallel", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_benchmark_on_a_cpu(ranks, tmp_path):
    """Tiny; it compares with one rank by itself, and every row is there."""
    file = tmp_path / "rows.csv"
    done = torchrun(
        ranks, "benchmarks/context_parallel.py", "--cpu", "--quick", "--tokens", "300", "--heads",
        "1", "--repeats", "1", "--pieces", "2", "--csv", str(file),
    )  # fmt: skip
    assert "all agree with one rank" in done
    rows = file.read_text(encoding="utf-8").splitlines()
    assert len(rows) == 1 + 4 * (2 + 3 + 3)
    assert "speedup" in rows[0]
    if ranks > 1:
        fit = torchrun(ranks, "benchmarks/context_parallel.py", "--cpu", "--fit", "--repeats", "2")
        assert re.search(r"3 ranks.*latency.*bandwidth.*host_send.*fold.*compose", fit)
        assert re.search(r"\| gather \| 65536 \| .*\n.*largest relative error", fit, re.DOTALL)
        assert "| 1024 |" in fit


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
    for wrong in (None, 3.0, good.int()):
        for call, name in (
            (lambda x: cp.merge_state(x, good), r"merge_state\.state"),
            (lambda x: cp.merge_state(state, x), r"merge_state\.summary"),
            (lambda x: cp.compose_summaries(x, good), r"compose_summaries\.first"),
            (lambda x: cp.compose_summaries(good, x), r"compose_summaries\.then"),
        ):
            with pytest.raises(lagraph.DtypeMismatch, match=f"{name}: .*a floating torch.Tensor"):
                call(wrong)
    with pytest.raises(lagraph.ShapeMismatch, match=r"merge_state\.state"):
        cp.merge_state(torch.zeros(3), good)
    with pytest.raises(lagraph.DeviceMismatch, match=r"merge_state\.summary"):
        cp.merge_state(state, good.to("meta"))
    with pytest.raises(lagraph.DtypeMismatch, match="dtype"):
        cp.neutral_summary(2, 3, 4, device="cpu", dtype=torch.bfloat16)


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
def alone():
    """A group of this process alone, and the setting of a family's kernels."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield lambda family: parallel.enter(parallel.SETTINGS[f"nccl-{family}"])
    parallel.enter(parallel.SETTINGS["gloo"])
    dist.destroy_process_group()


@pytest.mark.gpu
@every_family
@pytest.mark.parametrize("pieces", [1, 3])
def test_a_captured_call_replays_other_layouts(alone, family, pieces):
    """On one GPU: forward and backward in one CUDA graph, pieces of documents on one rank."""
    alone(family)
    parallel.captured(family, 0, 1, dist.group.WORLD, pieces)
