"""Pools of states: recurrent_* with state_indices, paged_chunk_*, and KDA's replay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import batch
import oracle
import pytest
import torch
from batch import extra, function
from cases import BF16, F16, F32, F64
from draw import P, draw
from oracle import FAMILIES
from table import grid, param, to
from tolerance import check, check_bitwise

from lagraph import errors, ops

pytestmark = pytest.mark.usefixtures("poison")

NAN = float("nan")
KINDS = ("recurrent", "paged_chunk")


def every(families=FAMILIES, kinds=KINDS):
    """Engines that these functions run on by themselves, with families and kinds."""
    rows = grid(*((f"{k}-{f}", f, k) for f in families for k in kinds))
    chosen = [row for row in rows if row.values[0].id in ("eager-cpu", "triton-cuda")]
    return pytest.mark.parametrize(("engine", "family", "kind"), chosen)


def inputs(engine, family, lengths, **fields):
    """Packed inputs of some sequences, on the engine's head dims."""
    K, V = engine.sizes or (8, 6)
    fields = {"K": K, "V": V, "dtype": F32, "n": 2 if family == "gdp" else 1} | fields
    return to(engine.device, draw(family, lengths=lengths, d_final_state=False, **fields))


def make_pool(x, slots, dtype=F32, family="gdn"):
    """[slots, H, V, K], all rows different."""
    heads, V, K = x["dO"].shape[1], x["dO"].shape[2], x["q"].shape[2]
    return P((slots, heads, V, K), 6, dtype).to(x["q"].device)


def run(kind, family, x, pool, slots, lead=None, **options):
    """Output, packed; the pool is advanced."""
    given = batch.tokens(family, x, lead) | extra(family) | options
    slots = torch.tensor(slots, dtype=torch.int32, device=pool.device)
    with torch.no_grad():
        if kind == "paged_chunk":
            o = function(kind, family)(**given, state_cache=pool, state_indices=slots)
        else:
            o, last = function(kind, family)(**given, initial_state=pool, state_indices=slots)
            assert last is None
    return o.flatten(0, 1)


def flags(pool, *values):
    return torch.tensor(values, dtype=torch.bool, device=pool.device)


def expected(family, x, pool, slots, fresh=()):
    """The oracle's output and pool: slots <= 0 are padding, fresh ones start from zero."""
    start = pool.detach().cpu().clone()
    for i in fresh:
        if slots[i] > 0:
            start[slots[i]] = 0.0
    indices = torch.tensor([slot if slot > 0 else -1 for slot in slots])
    given = to("cpu", x) | {"initial_state": start, "state_indices": indices}
    return oracle.forward(family, given, output_final_state=True, **extra(family))


# What a call does ----------------------------------------------------------------------------


@every()
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_selected_slots_are_advanced(engine, family, kind, dtype):
    """In place, in the pool's dtype; padding is zero, and every other slot keeps its bits."""
    lengths, slots = (5, 3, 0, 9, 4), [4, 0, 2, -7, 1]
    x = inputs(engine, family, lengths)
    pool = make_pool(x, 7, dtype)
    before = pool.clone()
    want = expected(family, x, pool, slots)
    o = run(kind, family, x, pool, slots)
    check({"O": o, "final_state": pool}, want, F32, names=("O", "final_state"))
    assert not o[5:8].any()
    assert not o[8:17].any()
    check_bitwise({"pool": pool[[0, 2, 3, 5, 6]]}, {"pool": before[[0, 2, 3, 5, 6]]})
    assert not torch.equal(pool[1], before[1])


@every()
def test_dense_batches(engine, family, kind):
    """One slot for each of B sequences; one token each is a step."""
    for length in (1, 7):
        x = inputs(engine, family, (length,) * 3)
        pool, slots = make_pool(x, 5), [2, -1, 4]
        want = expected(family, x, pool, slots)
        o = run(kind, family, x, pool, slots, lead=3)
        check({"O": o, "final_state": pool}, want, F32, names=("O", "final_state"))


@every()
def test_fresh_slots_hold_anything(engine, family, kind):
    """has_initial_state False: NaN in the slot is not read, and an empty sequence clears it."""
    lengths, slots = (5, 0, 3, 0, 2, 2), [3, 1, 2, 4, 0, -1]
    x = inputs(engine, family, lengths)
    pool = make_pool(x, 6)
    pool[[1, 3]] = NAN
    pool[5] = NAN
    before = pool.clone()
    keep = flags(pool, False, False, True, True, False, False)
    want = expected(family, x, pool, slots, fresh=(0, 1, 4, 5))
    o = run(kind, family, x, pool, slots, has_initial_state=keep)
    got = {"O": o, "final_state": pool[1:5]}
    check(got, {"O": want["O"], "final_state": want["final_state"][1:5]}, F32, names=got)
    assert not pool[1].any()
    check_bitwise({"pool": pool[[0, 4, 5]]}, {"pool": before[[0, 4, 5]]})


@every()
def test_all_resumed_is_no_mask(engine, family, kind):
    x = inputs(engine, family, (5, 4))
    pool = make_pool(x, 4)
    other, keep = pool.clone(), flags(pool, True, True)
    a = run(kind, family, x, pool, [3, 1])
    b = run(kind, family, x, other, [3, 1], has_initial_state=keep)
    check_bitwise({"O": a, "pool": pool}, {"O": b, "pool": other})


@every()
def test_slots_that_lie_apart(engine, family, kind):
    """Padding between slots keeps its NaN; so does what lies past the last token."""
    x = inputs(engine, family, (3, 4), tail=5)
    dense = make_pool(x, 4)
    want = expected(family, x, dense, [3, 1])
    wide = torch.full((4, 3 * dense[0].numel()), NAN, device=dense.device)
    every_other = torch.full((8, *dense.shape[1:]), NAN, device=dense.device)
    for store, pool in (
        (wide, wide[:, : dense[0].numel()].view(dense.shape)),
        (every_other, every_other[::2]),
    ):
        pool.copy_(dense)
        gaps = torch.isnan(store)
        o = run(kind, family, x, pool, [3, 1], has_initial_state=flags(pool, True, True))
        got = {"O": o[:7], "final_state": pool}
        check(got, {"O": want["O"][:7], "final_state": want["final_state"]}, F32, names=got)
        assert torch.equal(torch.isnan(store), gaps)


@every()
def test_a_sequence_in_calls_is_the_sequence(engine, family, kind):
    """Prefill, then token by token over the pool: the same as all at once."""
    x = inputs(engine, family, (40,))
    whole = make_pool(x, 3)
    pool = whole.clone()
    want = run(kind, family, x, whole, [2])
    outputs = []
    for rows in (slice(0, 33), slice(33, 34), slice(34, 40)):
        part = {
            m: t.unflatten(0, (40, -1))[rows].flatten(0, 1) if m in batch.TOKENS else t
            for m, t in x.items()
        }
        part["cu_seqlens"] = torch.tensor([0, rows.stop - rows.start], dtype=torch.int32).to(
            pool.device
        )
        outputs.append(run(kind, family, part, pool, [2]))
    want = {"O": want.double().cpu(), "final_state": whole.double().cpu()}
    check({"O": torch.cat(outputs), "final_state": pool}, want, F32)


@every(("gdn", "kda"))
def test_int64_indices_and_no_sequences(engine, family, kind):
    x = inputs(engine, family, (5,))
    pool = make_pool(x, 3)
    other = pool.clone()
    a = run(kind, family, x, pool, [2])
    given = batch.tokens(family, x)
    index = torch.tensor([2], device=pool.device)
    if kind == "recurrent":
        b = function(kind, family)(**given, initial_state=other, state_indices=index)[0]
    else:
        b = function(kind, family)(**given, state_cache=other, state_indices=index)
    check_bitwise({"O": a, "pool": pool}, {"O": b[0], "pool": other})
    none = inputs(engine, family, ())
    assert run(kind, family, none, pool, []).shape[0] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_captured_with_slots_that_change(family, kind):
    """A graph replays with other slots, flags and offsets; nothing synchronizes."""
    x = to(
        "cuda",
        draw(
            family,
            lengths=(40, 20),
            n=2 if family == "gdp" else 1,
            K=64,
            V=64,
            dtype=BF16,
            d_final_state=False,
        ),
    )
    given = batch.tokens(family, x) | extra(family)
    index = torch.tensor([1, 2], dtype=torch.int32, device="cuda")
    keep = torch.tensor([True, True], device="cuda")
    name = "state_cache" if kind == "paged_chunk" else "initial_state"
    pool = make_pool(x, 6)

    def step(pool):
        got = function(kind, family)(**given, **{name: pool}, state_indices=index,
                                     has_initial_state=keep)  # fmt: skip
        return got if kind == "paged_chunk" else got[0]

    with torch.no_grad():
        step(pool.clone())
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                o = step(pool)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for slots, resume, cu in (
            ([1, 2], [True, False], [0, 40, 60]), ([5, 0], [False, True], [0, 7, 60]),
            ([-1, 3], [True, True], [0, 0, 11]),
        ):  # fmt: skip
            index.copy_(torch.tensor(slots, dtype=torch.int32))
            keep.copy_(torch.tensor(resume))
            given["cu_seqlens"].copy_(torch.tensor(cu, dtype=torch.int32))
            other = pool.clone()
            graph.replay()
            want = step(other)
            check_bitwise(
                {"O": o[:, : cu[-1]], "pool": pool}, {"O": want[:, : cu[-1]], "pool": other}
            )


# Compiled ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_compiled_over_lengths(family, kind):
    """fullgraph, on a pool that is a view, twice in a row; the base holds what eager leaves."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    name = "state_cache" if kind == "paged_chunk" else "initial_state"
    n = 2 if family == "gdp" else 1

    def step(given, big, index, keep):
        pool = big[0].view(4, 2, 6, 8)
        first = function(kind, family)(**given, **{name: pool}, state_indices=index,
                                       has_initial_state=keep, **extra(family))  # fmt: skip
        return first, function(kind, family)(**given, **{name: pool}, state_indices=index,
                                             **extra(family))  # fmt: skip

    compiled = torch.compile(step, backend=counter, fullgraph=True)
    counts = []
    index, keep = torch.tensor([3, 0], dtype=torch.int32), torch.tensor([False, True])
    for T in (20, 30, 40, 12):
        x = draw(family, lengths=(T - 3, 3), K=8, V=6, n=n, dtype=F32, d_final_state=False)
        big = P((2, 4 * 2 * 6 * 8), 6, F32)
        other = big.clone()
        with torch.no_grad():
            got = compiled(batch.tokens(family, x), big, index, keep)
            want = step(batch.tokens(family, x), other, index, keep)
        for a, b in zip(got, want, strict=True):
            a, b = (t if kind == "paged_chunk" else t[0] for t in (a, b))
            assert torch.equal(a, b)
        assert torch.equal(big, other)
        counts.append(counter.frame_count)
    assert counts[-1] == counts[1], "compiled again for another length"
    torch._dynamo.reset()


# Refused -------------------------------------------------------------------------------------


POOL = torch.ones(5, 2, 6, 8)
INDEX = torch.tensor([3, 1], dtype=torch.int32)
BAD = {
    "index beyond the pool": ({"slots": torch.tensor([3, 5])}, errors.RuleBroken, r"\[1, 5\)"),
    "slot used twice": ({"slots": torch.tensor([3, 3])}, errors.RuleBroken, "distinct"),
    "too few indices": ({"slots": torch.tensor([3])}, errors.ShapeMismatch, "state_indices.*N = 2"),
    "float indices": ({"slots": torch.tensor([3.0, 1.0])}, errors.DtypeMismatch, "state_indices"),
    "fp64 pool": ({"pool": POOL.double()}, errors.DtypeMismatch, "float64"),
    "pool of other heads": ({"pool": torch.ones(5, 3, 6, 8)}, errors.ShapeMismatch, "H = 2"),
    "K-major rows": ({"pool": POOL.mT.contiguous().mT}, errors.RuleBroken, "dense"),
    "one row for all slots": ({"pool": POOL[:1].expand(5, 2, 6, 8)}, errors.RuleBroken, "overlap"),
    "int flags": ({"keep": torch.tensor([1, 1])}, errors.DtypeMismatch, "has_initial_state.*bool"),
    "too few flags": (
        {"keep": torch.tensor([True])}, errors.ShapeMismatch, "has_initial_state.*N = 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", BAD)
def test_bad_pools(kind, what):
    """By name, with nothing written; flags or not."""
    changes, error, pattern = BAD[what]
    pool = changes.get("pool", POOL.clone())
    before = pool.clone()
    x = draw("gdn", lengths=(4, 3), K=8, V=6, dtype=F32)
    given = batch.tokens("gdn", x)
    name = "state_cache" if kind == "paged_chunk" else "initial_state"
    for keep in (changes.get("keep"), changes.get("keep", torch.tensor([False, True]))):
        if keep is None and "keep" in changes:
            continue
        with pytest.raises(error, match=rf"{kind}_gdn.*{pattern}"):
            function(kind, "gdn")(**given, **{name: pool}, has_initial_state=keep,
                                  state_indices=changes.get("slots", INDEX))  # fmt: skip
        assert torch.equal(pool, before)


def test_pools_exclude_final_states_and_gradients():
    x = draw("gdn", lengths=(4, 3), K=8, V=6, dtype=F32)
    given = batch.tokens("gdn", x)
    with pytest.raises(errors.RuleBroken, match="output_final_state"):
        ops.recurrent_gdn(**given, initial_state=POOL.clone(), state_indices=INDEX,
                          output_final_state=True)  # fmt: skip
    with pytest.raises(errors.RuleBroken, match="state_indices"):
        ops.recurrent_gdn(**given, state_indices=INDEX)
    with pytest.raises(errors.RuleBroken, match="has_initial_state"):
        ops.recurrent_gdn(**given, has_initial_state=torch.tensor([True, False]))
    given["q"].requires_grad_()
    with pytest.raises(errors.NotDifferentiable, match="paged_chunk_gdn"):
        ops.paged_chunk_gdn(**given, state_cache=POOL.clone(), state_indices=INDEX)
    with pytest.raises(errors.NotDifferentiable, match="recurrent_gdn"):
        ops.recurrent_gdn(**given, initial_state=POOL.clone(), state_indices=INDEX)
    for options in ({"split_forward": True}, {"backend": "cudnn", "split_forward": True}):
        with pytest.raises(errors.RuleBroken, match="split_forward"):
            ops.paged_chunk_gdn(**given, state_cache=POOL.clone(), state_indices=INDEX,
                                kernel_options=options)  # fmt: skip


# Replay --------------------------------------------------------------------------------------


def caches(x, slots, dtype):
    """An empty ReplayState."""
    K, V, heads = x["q"].shape[2], x["v"].shape[2], x["g"].shape[1]
    shapes = ((heads, K), (heads, K), (heads, V), (heads, K), (heads,))
    dtypes = (dtype,) * 3 + (F32,) * 2
    made = [torch.full((slots, 64, *shape), NAN, dtype=kind, device=x["q"].device)
            for shape, kind in zip(shapes, dtypes, strict=True)]  # fmt: skip
    return ops.ReplayState(*made, torch.zeros(slots, dtype=torch.int32, device=x["q"].device))


ON = [param(e) for e in (row.values[0] for row in grid(("", 0)))
      if e.id in ("eager-cpu", "triton-cuda")]  # fmt: skip


@pytest.mark.parametrize("engine", ON)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_replay_is_the_whole_sequence(engine, dtype):
    """However its tokens come: outputs, the state at the last complete chunk, the rest."""
    x = inputs(engine, "kda", (200,), dtype=dtype)
    full = ops.chunk_kda(**batch.tokens("kda", x))[0][0]
    pool = torch.full((5, 2, x["v"].shape[2], x["q"].shape[2]), NAN, device=full.device)
    kept, at, outputs = caches(x, 5, dtype), 0, []
    for step, count in enumerate((70, 1, 1, 50, 6, 0, 64, 8)):
        part = {m: t[at : at + count] for m, t in x.items() if m in batch.TOKENS}
        noise = {m: torch.full((3, *t.shape[1:]), NAN, dtype=t.dtype, device=t.device)
                 for m, t in part.items()}  # fmt: skip
        part = {m: torch.cat([noise[m], t])[None] for m, t in part.items()}
        index = torch.tensor([0, 3], dtype=torch.int32, device=full.device)
        cu = torch.tensor([0, 3, 3 + count], dtype=torch.int32, device=full.device)
        o = ops.paged_chunk_kda(
            **batch.named("kda", part), state_cache=pool, state_indices=index, cu_seqlens=cu,
            has_initial_state=flags(pool, False, step > 0), replay_state=kept,
        )  # fmt: skip
        at += count
        assert not o[0, :3].any()
        assert kept.count.tolist() == [0, 0, 0, at % 64, 0]
        outputs.append(o[0, 3:])
    check({"O": torch.cat(outputs)}, {"O": full.double().cpu()}, dtype)
    _, state = ops.chunk_kda(**{m: t[:, :192] for m, t in batch.tokens("kda", x, 1).items()},
                             output_final_state=True)  # fmt: skip
    check({"final_state": pool[3]}, {"final_state": state[0].double().cpu()}, dtype)
    assert torch.isnan(pool[[0, 1, 2, 4]]).all()
    assert torch.isnan(kept.q[[0, 1, 2, 4]]).all()


def test_replay_of_dense_single_tokens():
    """B rows of one token are steps, for slots of different counts."""
    engine = ON[0].values[0]
    x = inputs(engine, "kda", (66, 66, 66))
    full = ops.chunk_kda(**batch.tokens("kda", x, 3))[0]
    pool, kept = make_pool(x, 4), caches(x, 4, F32)
    kept = kept._replace(count=kept.count[:, None].clone())
    index = torch.tensor([2, 1, 3], dtype=torch.int32)
    rows = {m: t.unflatten(0, (3, 66)) for m, t in x.items() if m in batch.TOKENS}
    for at, count in ((0, 60), *((t, 1) for t in range(60, 66))):
        part = {m: t[:, at : at + count] for m, t in rows.items()}
        o = ops.paged_chunk_kda(
            **batch.named("kda", part), state_cache=pool, state_indices=index,
            has_initial_state=flags(pool, *[at > 0] * 3), replay_state=tuple(kept),
        )  # fmt: skip
        check({"O": o}, {"O": full[:, at : at + count].double()}, F32)
    assert kept.count.flatten().tolist() == [0, 2, 2, 2]


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_replay_compiled():
    torch._dynamo.reset()
    step = torch.compile(ops.paged_chunk_kda, backend="aot_eager", fullgraph=True)
    index, keep = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([False, True])
    x = draw("kda", lengths=(3, 50), K=8, V=6, dtype=F32)
    pools = [make_pool(x, 5) for _ in range(2)]
    kept = [caches(x, 5, F32) for _ in range(2)]
    for lengths in ((3, 50), (2, 20), (0, 9)):
        x = draw("kda", lengths=lengths, K=8, V=6, dtype=F32)
        got, want = (
            f(**batch.tokens("kda", x), state_cache=pool, state_indices=index,
              has_initial_state=keep, replay_state=cache)
            for f, pool, cache in zip((step, ops.paged_chunk_kda), pools, kept, strict=True)
        )  # fmt: skip
        assert torch.equal(got, want)
        check_bitwise(dict(enumerate([pools[0], *kept[0]])), dict(enumerate([pools[1], *kept[1]])))
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"q": torch.zeros(5, 32, 2, 8)}, errors.ShapeMismatch),
        ({"gate": torch.zeros(5, 64, 2)}, errors.ShapeMismatch),
        ({"v": torch.zeros(5, 64, 2, 6, dtype=F64)}, errors.DtypeMismatch),
        ({"beta": torch.zeros(5, 64, 2, dtype=BF16)}, errors.DtypeMismatch),
        ({"count": torch.zeros(5, dtype=torch.int64)}, errors.DtypeMismatch),
        ({"count": torch.zeros(4, dtype=torch.int32)}, errors.ShapeMismatch),
    ],
    ids=["q", "gate", "v", "beta", "count dtype", "count"],
)
def test_bad_caches(change, error):
    x = draw("kda", lengths=(4, 3), K=8, V=6, dtype=F32)
    pool = torch.ones(5, 2, 6, 8)
    with pytest.raises(error, match=rf"replay_state\.{next(iter(change))}"):
        ops.paged_chunk_kda(**batch.tokens("kda", x), state_cache=pool, state_indices=INDEX,
                            replay_state=caches(x, 5, F32)._replace(**change))  # fmt: skip
    assert (pool == 1).all()


# The scan's kernel without a GPU --------------------------------------------------------------


@pytest.mark.slow
def test_interpreted():
    """The fused recurrent_* in a process that interprets Triton."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-o", "filterwarnings=default", "-p",
         "no:cacheprovider", "interpreted_scan.py"],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1"},
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
