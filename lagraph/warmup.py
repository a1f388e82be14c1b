"""Compiling ahead: what graphs need before their first call is as quick as the rest.

    lagraph.warmup([graph, backward_graph])

Graphs are planned and built. What an engine can compile elsewhere is compiled in other processes,
several at a time, into the engine's cache on disk, and loaded from there. Then, on a GPU that is
here, each plan runs once on inputs of zeros, since some kernels are compiled, and all are put on
the device, by their first launch.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import sys
import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lagraph import registry, select
from lagraph.errors import InvalidOption
from lagraph.graph import Graph
from lagraph.plan import Plan

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterable, Sequence
    from queue import SimpleQueue

    from lagraph.problem import Problem
    from lagraph.select import PlanName

__all__ = ["Job", "Warmed", "serve", "warmup"]

TOKENS, SEQUENCES = 256, 2  # of a run where a graph leaves them open
WORKERS = 8  # at most, by default: each is a process that imports a compiler


@dataclass(frozen=True, slots=True)
class Job:
    """A compilation that another process can do.

    target: "module:function"; args: what it is called with, picklable. environment: variables that
    the process sets before it imports anything.
    """

    label: str
    target: str
    args: tuple[Any, ...]
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Warmed:
    """What was done for one item: its plan, or the call's name; in words; and how long it took,
    without what other processes did."""

    plan: str
    done: str
    seconds: float


@dataclass(slots=True)
class Item:
    """One graph, plan or call, and the plan that it means; whether that exists already."""

    given: Any
    name: PlanName | None = None
    problem: Problem | None = None
    built: bool = True


def warmup(
    graphs: Graph | Plan | Callable[[], Any] | Iterable[Graph | Plan | Callable[[], Any]],
    *,
    progress: bool = True,
    workers: int | None = None,
) -> tuple[Warmed, ...]:
    """Compile ahead of the first call what graphs, plans or calls need.

    A graph that is not built is planned and built. A `frost` plan's kernels are compiled by other
    processes and kept in the engine's cache on disk. On a GPU that is here, every plan is then run
    once on inputs of its own, all zeros: the graph's buffers are not touched. That compiles a
    `triton` plan's kernels for the T and N that the graph declares, or else for 256 tokens in 2
    sequences; where other lengths choose another schedule, that one is compiled when it is first
    used. A plan for a CPU has nothing to compile. A graph planned for a GPU that is not here
    (`sm_version`) is built, and not run.

    Args:
        graphs: Graphs, built plans, or calls without arguments, which are made once as they are
            (`functools.partial(ops.gated_delta_net, q, k, v, g, beta, cu_seqlens)`); one or many.
        progress: Show a bar on standard error.
        workers: Processes that compile; None for as many as help, 0 to compile here.

    Returns:
        What was done for each, in order.

    Raises:
        NoEngine, PlanNotOffered: A graph that nothing serves; before anything is compiled.
        InvalidOption: Something else than a graph, a plan or a call, or a negative workers.
    """
    if workers is not None and (isinstance(workers, bool) or workers < 0):
        raise InvalidOption("warmup", "workers", expected="a number of processes, or None",
                            got=repr(workers), mend="Pass 0 to compile in this one")  # fmt: skip
    alone = isinstance(graphs, (Graph, Plan)) or callable(graphs)
    items = [_item(given) for given in ((graphs,) if alone else graphs)]  # type: ignore[union-attr]
    # Of equal graphs, one job.
    jobs = list(dict.fromkeys(job for item in items for job in _jobs(item)))
    bar = _Bar(len(jobs) + len(items), progress)
    try:
        # A single compilation takes less time here than a process takes to start.
        count = min(WORKERS, os.cpu_count() or 1) if workers is None else workers
        if count and (len(jobs) > 1 or workers) and sys.executable:
            _compile(jobs, count, bar)
        return tuple(_warm(item, bar) for item in items)
    finally:
        bar.close()


def _item(given: Any) -> Item:
    """What an item means. A graph is planned here, so that one that nothing serves raises."""
    if isinstance(given, Graph) and given._executor is None:
        problem, _ = given._described()
        if given._choice is None:
            given.create_execution_plans()
        choice = given._ranked()
        name = choice.plans[choice.candidates(given._barred)[0]]
        return Item(given, name, problem, built=False)
    if isinstance(given, (Graph, Plan)):
        plan: Plan = given._executor.plan if isinstance(given, Graph) else given  # type: ignore[union-attr]
        return Item(given, select.PlanName.parse(plan.name), plan.problem)
    if callable(given):
        return Item(given)
    raise InvalidOption("warmup", "graphs", expected="graphs, plans, or calls without arguments",
                        got=type(given).__name__, mend="Pass a list of graphs")  # fmt: skip


def _jobs(item: Item) -> tuple[Job, ...]:
    """What other processes can compile for an item."""
    if item.problem is None or item.name is None or item.built:
        return ()  # a plan that exists has its functions
    jobs = getattr(select.engine(item.problem, item.name), "jobs", None)
    return () if jobs is None else jobs(item.problem, dict(item.name.knobs))


def _warm(item: Item, bar: _Bar) -> Warmed:
    start = time.perf_counter()
    given, problem = item.given, item.problem
    if problem is None:
        called = getattr(given, "func", given)  # of a partial
        name, done = getattr(called, "__name__", type(called).__name__), "called once"
        given()
    else:
        name = str(item.name)
        done = "was built"
        if not item.built:
            given.build()
            done = "built"
        if problem.device == "cpu":
            done += ", nothing to compile"
        elif _is_here(problem):
            T, N = _run(given, problem)
            done += f", run once with T={T}, N={N}"
        else:
            done += f", not run: no sm{problem.arch} here"
    bar.step(name)
    return Warmed(name, done, time.perf_counter() - start)


# Running once -------------------------------------------------------------------------------------


def _is_here(problem: Problem) -> bool:
    if not torch.cuda.is_available() or problem.index >= torch.cuda.device_count():
        return False
    major, minor = torch.cuda.get_device_capability(problem.index)
    return major * 10 + minor == problem.arch


def _run(given: Graph | Plan, problem: Problem) -> tuple[int, int]:
    """Run a graph or a plan once on inputs of zeros, and wait for it."""
    device = torch.device(problem.device)
    if device.type == "cuda":
        device = torch.device("cuda", problem.index)
    executor = given._executor if isinstance(given, Graph) else None
    sizes = {"T": TOKENS, "N": SEQUENCES}
    if executor is not None:
        sizes |= executor.sizes
    if executor is not None and executor.pool_rows is not None:
        sizes["P"] = executor.pool_rows
    ins = inputs_of(problem, sizes, device)
    if executor is not None and isinstance(given, Graph):
        given.execute({tensor: ins[port] for port, tensor in executor.inputs.items()})
    elif isinstance(given, Plan):
        given.call([ins.get(name) for name in problem.inputs], sizes["T"], sizes["N"])
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return sizes["T"], sizes["N"]


def inputs_of(
    problem: Problem, sizes: dict[str, int], device: torch.device
) -> dict[str, torch.Tensor]:
    """Inputs of zeros for a problem, by port, in its stride classes; sequences of equal length."""
    node = registry.family(problem.family).node(problem.direction)
    T, N, n = sizes["T"], sizes["N"], problem.sizes.get("n", 1)
    every = getattr(problem.options, "checkpoint_every_n_tokens", 0) or 1
    rows = max(sizes.get("P", N), 1) if problem.has("state_indices") else N
    known = {
        **problem.sizes, "T": T, "N": N, "N+1": N + 1, "T*n": T * n, "P": rows,
        "R": max(T * n // every + N, 1),
    }  # fmt: skip
    found = {}
    for port in node.inputs:
        if not problem.has(port.name):
            continue
        first, *rest = port.shapes[problem.ranks[port.name]]
        if port.role == "state":
            first = "P"
        shape = [known[letter] for letter in (first, *rest)]
        dtype = problem.dtypes[port.name]
        made = _zeros(shape, dtype, device, problem.layouts.get(port.name, 0))
        if port.name == "cu_seqlens":
            made.copy_(torch.arange(N + 1) * T // max(N, 1))
        elif port.name == "state_indices":
            made.copy_(torch.arange(N) % rows)
        found[port.name] = made
    return found


def _zeros(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, layout: int
) -> torch.Tensor:
    """Zeros of a stride class of `lagraph.desc.layout_class`."""
    *outer, inner = shape
    if layout == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    if layout == 3:
        return torch.zeros((*shape, 2), dtype=dtype, device=device)[..., 0]
    step = 16 // dtype.itemsize
    wide = -(-inner // step) * step + (step if layout == 1 else 1)
    return torch.zeros((*outer, wide), dtype=dtype, device=device)[..., :inner]


# In other processes -------------------------------------------------------------------------------

# The parent's path, so that what it can import can be imported; and variables before all imports.
_BOOT = (
    "import json, os, sys; os.environ.update(json.loads(sys.argv[1])); "
    "sys.path[:] = json.loads(sys.argv[2]); from lagraph.warmup import serve; serve()"
)


def serve() -> None:
    """Do jobs that come in as lines, and answer each with a line: "" or what went wrong."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a compiler prints must not come between
    for line in sys.stdin.buffer:
        job: Job = pickle.loads(base64.b64decode(line))
        try:
            registry.load(job.target)(*job.args)
            answer = ""
        except Exception as error:  # the parent compiles it again, and raises what that raises
            answer = f"{type(error).__name__}: {error}"
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _compile(jobs: Sequence[Job], count: int, bar: _Bar) -> None:
    """Do jobs in this many processes; what fails there is left to be done here."""
    for environment in dict.fromkeys(job.environment for job in jobs):
        mine = [job for job in jobs if job.environment == environment]
        for failure in _share(mine, min(count, len(mine)), dict(environment), bar):
            warnings.warn(f"warmup: {failure}. It is compiled here.", RuntimeWarning, stacklevel=3)


def _share(jobs: Sequence[Job], workers: int, environment: dict[str, str], bar: _Bar) -> list[str]:
    """Do jobs that want the same variables; what failed, in words."""
    from concurrent.futures import ThreadPoolExecutor
    from queue import SimpleQueue

    queue: SimpleQueue[Job] = SimpleQueue()
    for job in jobs:
        queue.put(job)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(workers):
            processes.append(_spawn(environment))
        with ThreadPoolExecutor(workers) as pool:
            done = pool.map(lambda process: _feed(process, queue, bar), processes)
            failed = [failure for some in done for failure in some]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    while not queue.empty():  # every process has ended
        bar.step(queue.get().label)
    return failed


def _spawn(environment: dict[str, str]) -> subprocess.Popen[bytes]:
    import subprocess

    command = [sys.executable, "-c", _BOOT, json.dumps(environment), json.dumps(sys.path)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )


def _feed(process: subprocess.Popen[bytes], queue: SimpleQueue[Job], bar: _Bar) -> list[str]:
    """Give a process jobs until there are none; what failed, in words."""
    from queue import Empty

    failed: list[str] = []
    while process.stdin is not None and process.stdout is not None:
        try:
            job = queue.get_nowait()
        except Empty:
            break
        try:
            process.stdin.write(base64.b64encode(pickle.dumps(job)) + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except (OSError, pickle.PicklingError, AttributeError) as error:
            line, answer = b"", str(error)
        else:
            answer = json.loads(line) if line else f"process {process.pid} ended"
        if answer:
            failed.append(f"{job.label} was not compiled in another process: {answer}")
        bar.step(job.label)
        if not line:
            break
    return failed


class _Bar:
    """A bar on standard error; a line for every step where that is no terminal."""

    WIDTH = 30

    def __init__(self, total: int, shown: bool) -> None:
        self.total, self.count, self.start = total, 0, time.perf_counter()
        self.shown = shown and total > 0 and sys.stderr is not None
        self.live = self.shown and sys.stderr.isatty()

    def step(self, label: str) -> None:
        """One more is done."""
        self.count += 1
        if not self.shown:
            return
        took = time.perf_counter() - self.start
        if self.live:
            full = self.WIDTH * self.count // self.total
            bar = "#" * full + "." * (self.WIDTH - full)
            text = f"\rwarmup [{bar}] {self.count}/{self.total} {took:.0f} s  {label[:40]:40}"
        else:
            text = f"warmup {self.count}/{self.total} {took:.1f} s  {label}\n"
        sys.stderr.write(text)
        sys.stderr.flush()

    def close(self) -> None:
        """Leave the line."""
        if self.live:
            sys.stderr.write("\n")
