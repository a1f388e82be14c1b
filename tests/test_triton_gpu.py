"""What only a GPU can show of the Triton engine: captures, streams, threads, sizes, waiting.

The numbers of every family, option and dtype are in `test_engines.py`, reports of others' bugs in
`test_reports.py` (a device that is not the current one: B87 there). Tests named `large` take tens
of gigabytes: run them alone (`-k large`, in one process). `smoke` compiles one plan a family and
direction.
"""

from __future__ import annotations

import threading

import pytest
import torch
from call import arguments, call, gradients, op
from cases import BF16, F32, Case
from draw import l2, offsets
from oracle import DIRECTIONS, FAMILIES, GRADIENTS
from table import to
from tolerance import check, check_bitwise, relative_error, tolerance

pytestmark = pytest.mark.gpu

FULL = {"output_final_state": True}
families = pytest.mark.parametrize("family", FAMILIES)
backwards = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])


def plan(family, direction="forward"):
    return f"{family}_summary_triton" if "summary" in direction else f"{family}_triton"


def case_of(family, lengths, **fields):
    """A bf16 case with 64 channels, all parameters, and every gate regime mixed."""
    mamba2 = family == "mamba2"
    given = {
        "H": 1, "HV": 4, "K": 64, "V": 64, "dtype": BF16, "gate": "mixed",
        "n": 2 if family == "gdp" else 1,
        "params": ("d", "z", "dt_bias") if mamba2 else ("a_log", "dt_bias"),
        "options": {} if mamba2 else {"safe_gate": True},
    }  # fmt: skip
    return Case(family, "", lengths=lengths, **(given | fields))


def run(family, x, backward, **options):
    """Outputs, and gradients where wanted, by node name."""
    options = FULL | options
    if backward:
        return gradients(family, x, plan(family), **options)
    with torch.no_grad():
        return call(family, x, "forward", plan(family), **options)


def soil(byte):
    """Fill what the allocator hands out next, small blocks and large ones, with a byte."""
    torch.cuda.synchronize()
    blocks = [
        torch.full((size,), byte, dtype=torch.uint8, device="cuda")
        for size, count in ((500, 400), (4096, 400), (1 << 16, 200), (1 << 20, 40), (1 << 27, 8))
        for _ in range(count)
    ]
    torch.cuda.synchronize()
    del blocks


@pytest.mark.parametrize("direction", DIRECTIONS)
@families
def test_smoke(family, direction):
    """One plan a family and direction is as near to the truth as the contract says."""
    case = Case(family, "", lengths=(150, 0, 65), K=64, V=64, dtype=BF16, n=1)
    x = to("cuda", case.draw())
    got = call(family, x, direction, plan(family, direction), **case.call_options())
    want = case.truth(direction)
    names = [name for name in want if name not in ("O_pre", "state_checkpoints")]
    check(got, want, BF16, names=names)


# Captured graphs, compiled models ------------------------------------------------------------


@backwards
@families
def test_capture(family, backward):
    """A captured call replays with other contents and other lengths inside the same capacity."""
    tokens = 400
    first = case_of(family, (200, 130, 70))
    options = first.call_options()
    x = to("cuda", first.draw())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run(family, x, backward, **options)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = run(family, x, backward, **options)
    for seed, lengths in enumerate(
        [(200, 130, 70), (1, 0, 399), (0, 0, 400), (64, 65, 3), (0, 0, 0)]
    ):
        other = case_of(family, lengths, tail=tokens - sum(lengths))
        fresh = to("cuda", other.draw())
        for name, t in x.items():
            t.copy_(fresh[name])
            if name in ("initial_state", "d_final_state", "a", "d", "a_log", "dt_bias"):
                t.mul_(1.0 + 0.1 * seed)
        for t in held.values():
            t.fill_(float("nan"))
        graph.replay()
        end = sum(lengths)
        want = run(family, {name: t.clone() for name, t in x.items()}, backward, **options)
        for name, value in want.items():
            n = value.shape[0] // tokens
            stop = end * n if n else None  # of rows past the end nothing is said
            check_bitwise({name: held[name][:stop]}, {name: value[:stop]})


@pytest.mark.filterwarnings("ignore:TensorFloat32")  # inductor's advice
@families
def test_compiled_without_a_break(family):
    """torch.compile(fullgraph=True) gives the eager bits, forward and backward."""
    torch._dynamo.reset()
    case = case_of(family, (100, 33))
    x = to("cuda", case.draw())
    given = arguments(family, "forward", x, plan(family), **case.call_options())
    want = run(family, x, True, **case.call_options())
    leaves = {name: t.requires_grad_() for name, t in given.items()
              if isinstance(t, torch.Tensor) and t.is_floating_point()}  # fmt: skip

    def model(given):
        return op(family)(**given)

    backend = "inductor" if family == "gdn" else "aot_eager"
    got = torch.compile(model, backend=backend, fullgraph=True)(given | leaves)
    check_bitwise({"O": got[0], "final_state": got[1]}, want, ("O", "final_state"))
    ends = (x["dO"], x["d_final_state"].to(got[1].dtype))
    grads = torch.autograd.grad(got[:2], list(leaves.values()), ends)
    turned = {"C": "q", "B": "k", "x": "v", "dt": "g", "A": "a", "D": "d"}
    for name, grad in zip(leaves, grads, strict=True):
        gradient = GRADIENTS[turned.get(name, name) if family == "mamba2" else name]
        check_bitwise({gradient: grad}, want, (gradient,))


# Streams, threads, waiting -------------------------------------------------------------------


@backwards
def test_streams_and_threads(backward):
    """Many threads, each on a stream of its own and with its own family, get the serial results."""
    work = []
    for family in FAMILIES:
        for lengths in ((300, 20), (64, 64, 64)):
            case = case_of(family, lengths)
            x = to("cuda", case.draw())
            work.append((family, x, case.call_options()))
    want = [run(family, x, backward, **options) for family, x, options in work]
    torch.cuda.synchronize()
    failures = []

    def worker(at):
        family, x, options = work[at]
        stream = torch.cuda.Stream()
        try:
            for _ in range(10):
                with torch.cuda.stream(stream):
                    got = run(family, x, backward, **options)
                stream.synchronize()
                check_bitwise(got, want[at])
        except BaseException as why:  # told below, where it fails the test
            failures.append((family, why))

    threads = [threading.Thread(target=worker, args=(at,)) for at in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@backwards
@families
def test_a_warm_call_waits_for_nothing(family, backward):
    """No host synchronization once the plan is there; other lengths need no other plan."""
    options = case_of(family, (1,)).call_options()
    batches = [
        to("cuda", case_of(family, lengths).draw())
        for lengths in ((200, 56), (200, 56), (100, 5, 40), (513,), (1, 1, 1, 1))
    ]
    run(family, batches[0], backward, **options)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x in batches:
            run(family, x, backward, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# The same bits -------------------------------------------------------------------------------


@backwards
@families
def test_unwritten_memory_reaches_nothing(family, backward):
    """Whatever fresh memory holds (all bits set is NaN in every dtype), results have the same bits.

    Two runs on the same inputs: this is determinism, too, parameters' gradients included.
    """
    case = case_of(family, (200, 0, 1, 65, 700))
    x = to("cuda", case.draw())
    results = []
    for byte in (0, 255, 255):
        soil(byte)
        results.append(run(family, x, backward, **case.call_options()))
    check(results[0], case.truth("backward" if backward else "forward"), BF16,
          names=("dQ", "dK") if backward else ("O", "final_state"))  # fmt: skip
    for other in results[1:]:
        check_bitwise(other, results[0])


@backwards
@families
def test_batch_invariant_at_length(family, backward):
    """With batch_invariant a long sequence has the same bits alone and in a batch."""
    long, short = 4000, 100
    case = case_of(family, (long, short, short), gate="slow")
    x = to("cuda", case.draw())
    n = case.n
    alone = {}
    for name, t in x.items():
        rows = {sum(case.lengths): long, n * sum(case.lengths): n * long, 3: 1}
        kept = rows.get(t.shape[0]) if name not in ("a", "d", "a_log", "dt_bias") else None
        alone[name] = t[:kept].clone() if kept else t
    alone["cu_seqlens"] = offsets((long,)).to("cuda")
    options = case.call_options() | {"batch_invariant": True}
    batch = run(family, x, backward, **options)
    for name, value in run(family, alone, backward, **options).items():
        if name not in ("dA", "d_a_log", "dD", "d_dt_bias"):  # sums over the batch
            check_bitwise({name: value}, {name: batch[name][: value.shape[0]]})


# Sizes ---------------------------------------------------------------------------------------


def big(family, T, last, heads, K, V, backward):
    """Two sequences, T tokens and `last` more, with 16-bit gates; nothing is made twice."""
    rng = torch.Generator("cuda").manual_seed(0)
    total, n = T + last, 2 if family == "gdp" else 1
    shared = 1 if family == "mamba2" else heads

    def normal(*shape):
        return torch.empty(shape, dtype=BF16, device="cuda").normal_(generator=rng)

    def unit(*shape):  # near enough to unit vectors, in place
        return normal(*shape).mul_(shape[-1] ** -0.5)

    def uniform(low, high, *shape):
        return torch.empty(shape, dtype=BF16, device="cuda").uniform_(low, high, generator=rng)

    x = {"q": unit(total, shared, K), "k": unit(total * n, shared, K),
         "v": normal(total * n, heads, V)}  # fmt: skip
    per_key = family in ("kda", "gdn2")
    if family == "mamba2":
        x |= {"g": uniform(-1.0, 1.0, total, heads), "a": -torch.ones(heads, device="cuda")}
    else:
        x["g"] = uniform(-1.0, -0.4, *((total, heads, K) if per_key else (total, heads)))
        x["beta"] = uniform(0.1, 0.9, *((total, heads, K) if family == "gdn2"
                                        else (total * n, heads)))  # fmt: skip
    if family == "gdn2":
        x["w"] = uniform(0.1, 0.9, total, heads, V)
    if backward:
        x["dO"] = normal(total, heads, V)
    x["cu_seqlens"] = offsets((T, last)).to("cuda")
    return x, {"num_householder": n} if family == "gdp" else {}


def check_far_end(family, x, options, backward, last):
    """The last sequence as cut out alone, and the long one's end as from a late start."""
    got = run(family, x, backward, output_final_state=not backward, **options)
    total = x["g"].shape[0]
    warm = 128  # decays to nothing: gates are -0.4 and below, Mamba-2's about exp(-0.7) a token
    for start, end, kept in ((total - last, total, last), (total - last - 2 * warm, total - last,
                                                           warm)):  # fmt: skip
        part = {}
        for name, t in x.items():
            n = t.shape[0] // total
            part[name] = t[start * n : end * n].clone() if n else t
        part["cu_seqlens"] = offsets((end - start,)).to("cuda")
        want = run(family, part, backward, output_final_state=not backward, **options)
        for name, value in want.items():
            n = value.shape[0] // (end - start)
            if not n:  # states and parameters
                continue
            far = got[name][(end - kept) * n : end * n]
            assert torch.isfinite(far).all(), name
            error = relative_error(far, value[-kept * n :])
            assert error <= 2 * tolerance(name, BF16), (name, error)


def room(gigabytes):
    free, _ = torch.cuda.mem_get_info()
    if free + torch.cuda.memory_reserved() < gigabytes * 2**30:
        pytest.skip(f"needs {gigabytes} GB of free GPU memory")
    torch.cuda.empty_cache()


MANY = 2**18 + 192  # times 64 heads of 128 channels: beyond 2^31
HALF = 2**17 + 192  # the same for two sub-tokens, or for states of 128 x 128 a chunk


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "backward", "T", "K", "V", "gigabytes"),
    [
        ("gdn", False, MANY, 128, 128, 40),
        ("kda", False, MANY, 128, 16, 50),
        ("gdn2", False, MANY, 128, 16, 55),
        ("gdp", False, HALF, 128, 16, 40),
        ("mamba2", False, MANY, 16, 128, 40),
        ("gdn", True, MANY, 128, 16, 50),
        ("gdn", True, MANY, 16, 128, 50),
        ("gdn", True, HALF, 128, 128, 60),
        ("kda", True, MANY, 128, 16, 80),
        ("gdn2", True, MANY, 16, 128, 80),
        ("gdp", True, HALF, 128, 16, 60),
        ("mamba2", True, MANY, 16, 128, 60),
    ],
)
def test_large_offsets(family, backward, T, K, V, gigabytes):
    """Tensors of more than 2^31 elements: what lies at their end is right."""
    room(gigabytes)
    heads, last = 64, 130
    x, options = big(family, T, last, heads, K, V, backward)
    # q and k, values, or the chunks' states.
    n = 2 if family == "gdp" else 1
    assert max(T * n * heads * K, T * n * heads * V, T * heads * K * V // 64) > 2**31
    check_far_end(family, x, options, backward, last)


@backwards
@families
def test_large_strides(family, backward):
    """Rows so far apart that the last ones lie beyond 2^31 elements, in a buffer of 4.3 GB."""
    room(12)
    T, last, heads, K, V = 1000, 130, 2, 64, 64
    x, options = big(family, T, last, heads, K, V, backward)
    want = run(family, x, backward, output_final_state=not backward, **options)
    total = T + last
    rows = {name: t for name, t in x.items() if t.shape[0] % total == 0 and t.dtype == BF16}
    pitch = 2**31 // (total - 1) + 1024
    buffer = torch.full((pitch * total,), float("nan"), dtype=BF16, device="cuda")
    at, views = 0, {}
    for name, t in rows.items():
        n = t.shape[0] // total
        if n > 1:  # token-major: one row a token
            t = t.unflatten(0, (total, n))
        width = t[0].numel()
        view = buffer.as_strided(t.shape, (pitch, *torch.empty(t[0].shape).stride()), at)
        view.copy_(t)
        views[name] = view
        at += width
    assert at < 2**31 // (total - 1)
    assert (total - 1) * pitch > 2**31
    got = run(family, x | views, backward, output_final_state=not backward, **options)
    for name, value in want.items():
        found = got[name].reshape(value.shape)
        assert torch.isfinite(found).all(), name
        assert relative_error(found, value) <= tolerance(name, BF16), name


@pytest.mark.slow
@backwards
@families
def test_large_token_counts(family, backward):
    """2^20 tokens in one call: the end of the long sequence, and the short one after it."""
    room(40)
    x, options = big(family, 2**20, 130, 2, 64, 64, backward)
    check_far_end(family, x, options, backward, 130)


@pytest.mark.slow
@backwards
@families
def test_large_grids(family, backward):
    """More sequences than 65535: of one token each, which has a closed form."""
    room(20)
    N, heads, size = 70_001, 2, 16
    rng = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, device="cuda", generator=rng)

    x = {"q": l2(normal(N, heads, size)), "k": l2(normal(N, heads, size)),
         "v": normal(N, heads, size), "dO": normal(N, heads, size)}  # fmt: skip
    wide = (N, heads, size)
    x["g"] = -torch.rand(wide if family in ("kda", "gdn2") else wide[:2], device="cuda")
    if family == "mamba2":
        x["a"] = -torch.ones(heads, device="cuda")
    else:
        x["beta"] = torch.rand(wide if family == "gdn2" else wide[:2], device="cuda")
    if family == "gdn2":
        x["w"] = torch.rand(wide, device="cuda")
    x["cu_seqlens"] = torch.arange(N + 1, dtype=torch.int32, device="cuda")
    options = {"num_householder": 1} if family == "gdp" else {}
    got = run(family, x, backward, output_final_state=False, **options)

    leaves = {name: t.double().requires_grad_() for name, t in x.items() if name in GRADIENTS}
    q, k, v = (leaves[name] for name in ("q", "k", "v"))
    scores = (q * k).sum(-1, keepdim=True)
    if family == "mamba2":
        o = torch.nn.functional.softplus(leaves["g"])[..., None] * scores * v
    else:
        strength = leaves["w"] if family == "gdn2" else leaves["beta"][..., None]
        o = size**-0.5 * strength * scores * v
    want = {"O": o.detach()}
    if backward:
        names = [name for name in leaves if name in ("q", "k", "v", "w")]
        grads = torch.autograd.grad(o, [leaves[name] for name in names], x["dO"].double())
        want |= {GRADIENTS[name]: grad for name, grad in zip(names, grads, strict=True)}
    check(got, {name: t.cpu() for name, t in want.items()}, F32, "cuda")
