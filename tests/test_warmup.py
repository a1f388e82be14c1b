"""`lagraph.warmup`: what it builds, what it has other processes compile, what it runs once."""

from __future__ import annotations

import functools
import importlib
import os
import time
from pathlib import Path

import fake
import pytest
import torch
from declared import NODES, all_optional, fixed, ids, needed_by, tensors

import lagraph
from lagraph import errors, ops, plan, registry
from lagraph.desc import layout_class
from lagraph.warmup import Job

warmup = importlib.import_module("lagraph.warmup")  # the package has the function by that name
BF16 = torch.bfloat16


def gdn(T=None, N=None, K=16, H=2, dtype=torch.float32, state=False, **where):
    """A graph of GDN with T and N open, or declared; it is not built."""
    graph = lagraph.Graph(io_data_type=dtype, **where)
    q, k, v = (graph.tensor([T, H, K], name=name) for name in "qkv")
    g, beta = (graph.tensor([T, H], data_type=torch.float32, name=name) for name in ("g", "beta"))
    offsets = graph.tensor([None if N is None else N + 1], data_type=torch.int32, name="offsets")
    h = graph.tensor([N, H, K, K], data_type=torch.float32, name="h") if state else None
    out, *_ = graph.gdn(q, k, v, g, beta, offsets, h, output_final_state=state)
    out.set_output(True).set_name("O")
    return graph


def lines(capsys):
    return capsys.readouterr().err.splitlines()


# What is done with what --------------------------------------------------------------------------


def test_a_graph_for_a_cpu_is_built_quickly(capsys):
    graph = gdn(device="cpu")
    start = time.perf_counter()
    (done,) = lagraph.warmup([graph])
    assert time.perf_counter() - start < 5
    assert (done.plan, done.done) == ("gdn_eager", "built, nothing to compile")
    assert graph.plan_name == "gdn_eager"
    assert len(lines(capsys)) == 1
    (again,) = lagraph.warmup(graph, progress=False)
    assert again.done == "was built, nothing to compile"
    assert lines(capsys) == []
    q, g = torch.randn(4, 2, 16), torch.zeros(4, 2)
    out = torch.full((4, 2, 16), float("nan"))
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    graph.execute({"q": q, "k": q, "v": q, "g": g, "beta": g + 1, "offsets": offsets, "O": out})
    assert not out.isnan().any()


def test_a_pin_is_kept():
    graph = gdn(device="cpu")
    graph.create_execution_plans()
    graph.select_plan("gdn_eager[chunk=32]")
    assert lagraph.warmup(graph, progress=False)[0].plan == "gdn_eager[chunk=32]"
    assert graph.plan_name == "gdn_eager[chunk=32]"


def test_plans_and_calls():
    graph = gdn(device="cpu")
    graph.build()
    calls = []
    done = lagraph.warmup(
        [graph._executor.plan, functools.partial(calls.append, 1), lambda: calls.append(2)],
        progress=False,
    )
    assert calls == [1, 2]
    assert [row.done for row in done] == ["was built, nothing to compile", *["called once"] * 2]
    assert lagraph.warmup([]) == ()


def test_a_call_of_an_operator():
    q, g = torch.randn(4, 2, 16), torch.zeros(4, 2)
    offsets = torch.tensor([0, 4])
    call = functools.partial(ops.gated_delta_net, q, q, q, g, g, offsets)
    (done,) = lagraph.warmup(call, progress=False)
    assert (done.plan, done.done) == ("gated_delta_net", "called once")
    assert done.seconds > 0


WRONG = {
    "no graph": (([1],), {}, "expected graphs, plans, or calls without arguments, got int"),
    "a negative number": (([],), {"workers": -1}, "a number of processes, or None, got -1"),
    "no number": (([],), {"workers": True}, "got True"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "options", "text"), WRONG.values(), ids=WRONG)
def test_wrong_arguments(arguments, options, text):
    with pytest.raises(errors.InvalidOption, match=text):
        lagraph.warmup(*arguments, **options)


def test_a_graph_that_nothing_serves_stops_all_before_anything_is_built():
    good, bad = gdn(device="cpu"), gdn(sm_version=75, dtype=BF16)
    with pytest.raises(errors.NoEngine):
        lagraph.warmup([good, bad], progress=False)
    assert good.plan_name is None


def test_a_graph_for_a_gpu_that_is_not_here_is_built():
    graph = gdn(sm_version=80, dtype=BF16)
    (done,) = lagraph.warmup(graph, progress=False)
    if not torch.cuda.is_available():
        assert (done.plan, done.done) == ("gdn_triton", "built, not run: no sm80 here")


# Inputs to run on --------------------------------------------------------------------------------


def everything(node):
    names = all_optional(node)
    return names, fixed(node) | needed_by(node, names)


@pytest.mark.parametrize("layout", range(4))
@pytest.mark.parametrize("full", [False, True], ids=["", "everything"])
@pytest.mark.parametrize("node", NODES, ids=ids)
def test_inputs_are_of_the_same_problem(node, full, layout):
    """Made for a problem, they bind to that very problem, in the stride class it names."""
    names, options = everything(node) if full else ((), fixed(node))
    given = tensors(node, names, options=options)
    ins = [given.get(name) for name in node.input_names]
    runner, req = plan.runner(node.name), plan.request(node, options)
    problem, _ = runner.problem(ins, req)
    wanted = {name: 0 if t.dim() == 1 else layout for name, t in given.items()}
    object.__setattr__(problem, "layouts", wanted)
    made = warmup.inputs_of(problem, {"T": 48, "N": 3}, torch.device("cpu"))
    again, _ = runner.problem([made.get(name) for name in node.input_names], req)
    assert dict(again.dtypes) == dict(problem.dtypes)
    assert dict(again.sizes) == dict(problem.sizes)
    assert dict(again.ranks) == dict(problem.ranks)
    for name, x in made.items():
        assert layout_class(x) == wanted[name], name
        if x.is_floating_point():
            assert not x.any()
    assert made["cu_seqlens"].tolist() == [0, 16, 32, 48]
    if "state_indices" in made:
        assert made["state_indices"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("node", NODES, ids=ids)
def test_a_plan_of_every_node_runs_on_them(node):
    """On a CPU, where warmup itself has no reason to."""
    names, options = everything(node)
    given = tensors(node, names, options=options)
    ins = [given.get(name) for name in node.input_names]
    made, _, _ = plan.runner(node.name).find(ins, plan.request(node, options))
    assert warmup._run(made, made.problem) == (warmup.TOKENS, warmup.SEQUENCES)


def test_a_graph_runs_with_what_it_declares_and_on_buffers_of_its_own():
    graph = gdn(T=32, N=4, device="cpu", state=True)
    graph.build()
    assert warmup._run(graph, graph._executor.plan.problem) == (32, 4)

    pool = torch.randn(7, 2, 16, 16)
    before = pool.clone()
    graph = lagraph.Graph(device="cpu")
    q, g = torch.randn(6, 2, 16), torch.zeros(6, 2)
    rows, offsets = torch.tensor([5, 1]), torch.tensor([0, 2, 6])
    out, *_ = graph.gdn(q, q, q, g, g + 1, offsets, pool, None, None, rows, output_final_state=True)
    out.set_output(True)
    graph.build()
    warmup._run(graph, graph._executor.plan.problem)
    assert torch.equal(pool, before)


# In other processes ------------------------------------------------------------------------------


def write(folder, name):
    """A job: leaves a file that says what its process saw."""
    print("what a compiler prints does not come between")
    path = Path(folder, f"{name}-{os.getpid()}")
    path.write_text(f"{os.environ.get('LAGRAPH_JOB', '')}")


def fail(folder, name):
    raise RuntimeError(f"cannot compile {name}")


def crash(folder, name):
    os._exit(3)


class Compiling(fake.Engine):
    """An engine with jobs: one for each plan, by its head count."""

    target, folder = "test_warmup:write", ""

    def jobs(self, problem, knobs):
        name = f"H{problem.sizes['H']}"
        environment = (("LAGRAPH_JOB", self.name),)
        return (Job(name, self.target, (str(self.folder), name), environment),)


@pytest.fixture
def compiling(monkeypatch, tmp_path):
    engine = Compiling("fast")
    engine.folder = tmp_path
    fake.install(monkeypatch, engine)
    yield engine
    monkeypatch.undo()
    fake.forget()


@pytest.mark.slow
def test_jobs_run_in_other_processes(compiling, tmp_path, capfd):
    graphs = [gdn(device="cpu", H=H) for H in (1, 2, 3, 2)]
    done = lagraph.warmup(graphs, workers=2)
    assert [row.plan for row in done] == ["gdn_fast"] * 4
    made = dict(path.name.split("-") for path in tmp_path.iterdir())
    assert sorted(made) == ["H1", "H2", "H3"], "equal graphs are one job"
    assert len(list(tmp_path.iterdir())) == 3
    assert str(os.getpid()) not in made.values()
    assert len(set(made.values())) <= 2
    assert {path.read_text() for path in tmp_path.iterdir()} == {"fast"}
    shown = capfd.readouterr()
    assert shown.out == ""
    assert [line.split()[1] for line in shown.err.splitlines()] == [f"{i}/7" for i in range(1, 8)]
    assert all(graph.plan_name == "gdn_fast" for graph in graphs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "why"),
    [("fail", r"RuntimeError: cannot compile H\d"), ("crash", r"process \d+ ended"),
     ("nowhere", "AttributeError")],
)  # fmt: skip
def test_what_fails_elsewhere_is_left_to_this_process(compiling, target, why, capsys):
    compiling.target = f"test_warmup:{target}"
    graphs = [gdn(device="cpu", H=H) for H in (1, 2)]
    with pytest.warns(RuntimeWarning, match=rf"was not compiled in another process: {why}") as told:
        done = lagraph.warmup(graphs, workers=2)
    assert len(told) == 2
    assert [row.done for row in done] == ["built, nothing to compile"] * 2
    assert len(lines(capsys)) == 4


def test_no_process_for_a_single_job_or_where_none_is_wanted(compiling, tmp_path, monkeypatch):
    def forbidden(*arguments):
        raise AssertionError("no process")

    monkeypatch.setattr(warmup, "_spawn", forbidden)
    lagraph.warmup(gdn(device="cpu"), progress=False)
    lagraph.warmup([gdn(device="cpu", H=H) for H in (1, 2)], workers=0, progress=False)
    graph = gdn(device="cpu")
    graph.build()
    lagraph.warmup([graph, graph], progress=False)  # built: nothing is left
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_sent_is_left_to_this_process(compiling, capsys):
    """Arguments that do not pickle."""

    def jobs(problem, knobs):
        return (Job(f"H{problem.sizes['H']}", "test_warmup:write", (lambda: 0,)),)

    compiling.jobs = jobs
    with pytest.warns(RuntimeWarning, match="was not compiled in another process"):
        lagraph.warmup([gdn(device="cpu", H=H) for H in (1, 2)], workers=1)


def test_a_bar_is_drawn_on_a_terminal(monkeypatch):
    class Terminal:
        text = ""

        def isatty(self):
            return True

        def write(self, text):
            self.text += text

        def flush(self):
            pass

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    bar = warmup._Bar(2, True)
    bar.step("one")
    bar.step("two")
    bar.close()
    _, first, second = terminal.text.split("\r")
    assert f"[{'#' * 15}{'.' * 15}] 1/2" in first
    assert f"[{'#' * 30}] 2/2" in second
    assert second.endswith("\n")


# The frost engine --------------------------------------------------------------------------------


@pytest.mark.slow
def test_frost_kernels_are_compiled_by_other_processes(monkeypatch, tmp_path, capsys):
    """Of two graphs for an SM90 that is not here, into the disk; then built from there."""
    from lagraph import select
    from lagraph.engines.frost import cache, compile, support

    if select.missing(next(row for row in registry.ENGINES if row.name == "frost")):
        pytest.skip("needs the CuTe DSL and TVM-FFI")
    monkeypatch.setitem(support.KERNELS, ("gdn", "forward"), "toy:Scale")
    monkeypatch.setattr(cache, "CACHE", cache.Cache(tmp_path))
    monkeypatch.setattr(compile, "CACHE", cache.CACHE)
    monkeypatch.setattr(compile, "_FUNCTIONS", {})

    def graphs():
        for K, state in ((64, False), (128, False), (128, True)):
            graph = gdn(K=K, dtype=BF16, sm_version=90, state=state)
            graph.create_execution_plans()
            yield graph.select_plan("gdn_frost[rows=64]")

    built = []
    monkeypatch.setattr(compile, "_compiled", lambda *_: built.append(1))
    done = lagraph.warmup(graphs(), workers=2)
    assert [row.plan for row in done] == ["gdn_frost[rows=64]"] * 3
    assert built == [], "nothing was compiled here"
    assert len(list(tmp_path.iterdir())) == 3
    assert len(lines(capsys)) == 6
    monkeypatch.setattr(compile, "_FUNCTIONS", {})
    lagraph.warmup(graphs(), workers=2)
    assert len(lines(capsys)) == 3, "no job is left"


# On a GPU ----------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_triton_graph_is_run_once():
    """Its kernels are compiled then: no more is compiled by a run at the same sizes."""
    from triton.runtime.jit import JITFunction

    graph = gdn(T=192, N=3, K=32, dtype=BF16, device="cuda", state=True)
    graph.create_execution_plans()
    graph.select_plan("gdn_triton")
    (done,) = lagraph.warmup(graph, progress=False)
    assert done.done == "built, run once with T=192, N=3"
    compiled, real = [], JITFunction._do_compile

    def counted(self, *args, **kwargs):
        compiled.append(self)
        return real(self, *args, **kwargs)

    JITFunction._do_compile = counted
    try:
        q, g = (
            torch.randn(192, 2, 32, device="cuda", dtype=BF16),
            torch.zeros(192, 2, device="cuda"),
        )
        graph.execute({
            "q": q, "k": q, "v": q, "g": g, "beta": g + 1,
            "offsets": torch.tensor([0, 64, 128, 192], device="cuda", dtype=torch.int32),
            "h": torch.zeros(3, 2, 32, 32, device="cuda"),
            "O": torch.empty(192, 2, 32, device="cuda", dtype=BF16),
        })  # fmt: skip
    finally:
        JITFunction._do_compile = real
    assert compiled == []
