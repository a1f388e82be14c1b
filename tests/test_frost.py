"""The ground of the frost engine: compiling, caching, launching, selection; and on a GPU, a toy.

Nothing here needs a GPU, but what is marked so. A compiler is stood in for where only its calls
matter; the real one compiles `toy.py` for SM90, in processes of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import fake
import pytest
import test_engines
import torch
from call import paired
from cases import CASES, Case, Engine
from table import pending

import lagraph
from lagraph import doc, errors, infer, registry, select
from lagraph.desc import layout_class
from lagraph.engines.frost import cache, compile, launch, pieces, schedule, support
from lagraph.engines.frost.cache import Cache
from lagraph.engines.frost.signature import Signature
from lagraph.plan import metas_of, problem_of

HERE = Path(__file__).parent
REPORT = HERE.parent / "benchmarks" / "compile.py"
BF16, F32 = torch.bfloat16, torch.float32
INPUTS = registry.node("gdn").input_names


def has_compiler():
    row = next(row for row in registry.ENGINES if row.name == "frost")
    return not select.missing(row)


hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs SM90",
)
needs_compiler = pytest.mark.skipif(not has_compiler(), reason="needs the CuTe DSL and TVM-FFI")


def python(*arguments, **environment):
    """A process of its own that succeeds: its standard output."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=HERE, capture_output=True, text=True,
        check=False, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


# The disk ---------------------------------------------------------------------------------------


def test_what_is_put_is_found(tmp_path):
    disk = Cache(tmp_path / "a" / "b")
    assert disk.find("x") is None
    path = disk.put("x", b"code")
    assert path == disk.find("x") == tmp_path / "a" / "b" / "x.o"
    assert path.read_bytes().startswith(b"code")
    assert path.parent.stat().st_mode & 0o077 == 0, "others may not put code there"
    assert [p.name for p in path.parent.iterdir()] == ["x.o"], "nothing temporary is left"


DAMAGE = {
    "cut short": lambda data: data[:-1],
    "cut to half": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "a bit of the code": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "a bit of the digest": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "more at its end": lambda data: data + b"x",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_removed(tmp_path, damage):
    disk = Cache(tmp_path)
    path = disk.put("x", bytes(range(256)) * 4)
    path.write_bytes(damage(path.read_bytes()))
    assert disk.find("x") is None
    assert not path.exists()


def test_a_folder_that_cannot_be_made_warns_once(tmp_path):
    (tmp_path / "file").write_text("no folder")
    disk = Cache(tmp_path / "file" / "cache")
    with pytest.warns(RuntimeWarning, match=r"are not kept in .*LAGRAPH_CACHE_DIR"):
        assert disk.put("x", b"code") is None
    assert disk.put("x", b"code") is None
    assert disk.find("x") is None
    with disk.lock("x"):
        pass


def test_without_a_folder_nothing_is_kept():
    disk = Cache(None)
    assert disk.put("x", b"code") is None
    assert disk.find("x") is None
    with disk.lock("x"):
        pass


def test_the_least_recently_used_make_room(tmp_path):
    disk = Cache(tmp_path, limit=3500)
    for age, name in enumerate("abc"):
        path = disk.put(name, b"x" * 1000)
        os.utime(path, (1000 + age, 1000 + age))
    assert disk.find("a")  # used now, so that b is the oldest
    disk.put("d", b"x" * 1000)
    assert {p.stem for p in tmp_path.iterdir()} == {"a", "c", "d"}
    disk.put("huge", b"x" * 9000)  # alone above the limit: it is wanted all the same
    assert {p.stem for p in tmp_path.iterdir()} == {"huge"}


def test_old_temporary_files_are_removed(tmp_path):
    for name, age in (
        ("old.part", 2 * cache.STALE),
        ("old.lock", 2 * cache.STALE),
        ("new.part", 0),
    ):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    Cache(tmp_path).put("x", b"code")
    assert {p.name for p in tmp_path.iterdir()} == {"x.o", "new.part"}


def test_a_lock_lets_one_in_at_a_time(tmp_path):
    inside, most = [], []

    def enter():
        with Cache(tmp_path).lock("x"):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.02)
            inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 6
    if cache.fcntl is not None:
        assert max(most) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_lock_is_waited_for_only_so_long(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "PATIENCE", 0.1)
    with Cache(tmp_path).lock("x"):
        start = time.monotonic()
        with Cache(tmp_path).lock("x"):
            assert 0.1 <= time.monotonic() - start < 5 or cache.fcntl is None


def test_without_file_locks_it_works(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "fcntl", None)
    disk = Cache(tmp_path)
    with disk.lock("x"):
        disk.put("x", b"code")
    assert disk.find("x")


PLACES = {
    "named": ("~/some where", "/tmp/x", "/tmp/me/some where"),
    "off": ("", "/tmp/x", "None"),
    "the user's": (None, "/tmp/mine", "/tmp/mine/lagraph"),
    "home": (None, "", "/tmp/me/.cache/lagraph"),
    "home, unset": (None, None, "/tmp/me/.cache/lagraph"),
}


@pytest.mark.parametrize(("named", "user", "folder"), PLACES.values(), ids=PLACES)
def test_where_the_files_are(monkeypatch, named, user, folder):
    monkeypatch.setenv("HOME", "/tmp/me")
    monkeypatch.setattr(cache, "_NAMED", named)
    monkeypatch.setattr(cache, "_USER", user)
    assert str(cache._folder()) == folder


def test_the_environment_is_read_at_import():
    code = "from lagraph.engines.frost.cache import CACHE; print(CACHE.folder)"
    assert python("-c", code, LAGRAPH_CACHE_DIR="/tmp/mine").strip() == "/tmp/mine"


# Compiling --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stub(Signature):
    """A signature whose compiler writes its name, and counts."""

    arguments = ("q",)
    size: int = 1
    kind: str = ""

    def build(self, options):
        BUILDS.append((self, options))
        return BUILDER[0](self)


class Built:
    """What a compiler makes."""

    def __init__(self, signature):
        self.signature = signature

    def export_to_c(self, path, function_name):
        assert function_name == self.signature.name
        Path(path).write_bytes(f"object of {function_name}".encode())


BUILDS, BUILDER, LOADS = [], [Built], []


@pytest.fixture
def kernels(monkeypatch, tmp_path):
    """A folder that passes for the kernels' own."""
    (tmp_path / "kernels" / "lib").mkdir(parents=True)
    (tmp_path / "kernels" / "forward.py").write_text("x = 1")
    (tmp_path / "kernels" / "lib" / "gate.py").write_text("y = 1")
    monkeypatch.setattr(compile, "KERNELS", tmp_path / "kernels")
    monkeypatch.setattr(compile, "_IMPORTED", compile._text())
    return tmp_path / "kernels"


@pytest.fixture
def stubs(kernels, tmp_path, monkeypatch):
    """The compiler and the loader stood in for, and an empty disk and memory; builds so far."""

    def load(path, name):
        data = Path(path).read_bytes()
        assert data.startswith(f"object of {name}".encode())
        LOADS.append(name)
        return lambda *args: (name, args)

    BUILDS.clear(), LOADS.clear()
    BUILDER[0] = Built
    monkeypatch.setattr(compile, "_load", load)
    monkeypatch.setattr(compile, "_FUNCTIONS", {})
    monkeypatch.setattr(compile, "_LOCKS", {})
    monkeypatch.setattr(compile, "CACHE", Cache(tmp_path / "cache"))
    return BUILDS


def forget(monkeypatch):
    """As a new process."""
    monkeypatch.setattr(compile, "_FUNCTIONS", {})


def test_compiled_once_then_from_the_disk(stubs, monkeypatch):
    first = compile.function(Stub())
    assert compile.function(Stub()) is first
    assert stubs == [(Stub(), "--gpu-arch sm_90a --enable-tvm-ffi")]
    forget(monkeypatch)
    assert compile.function(Stub())(1) == ("stub", (1,))
    assert len(stubs) == 1
    compile.function(Stub(size=2))
    assert len(stubs) == 2


def test_threads_compile_a_signature_once(stubs):
    start = threading.Barrier(8)
    BUILDER[0] = lambda signature: (time.sleep(0.05), Built(signature))[1]
    found = []

    def call(size):
        start.wait()
        found.append(compile.function(Stub(size)))

    threads = [threading.Thread(target=call, args=(at % 2,)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(signature.size for signature, _ in stubs) == [0, 1]
    assert len(set(map(id, found))) == 2


def test_the_compiler_is_not_entered_twice(stubs):
    """Two threads in it end the process."""
    inside, most = [], []

    def slow(signature):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.03)
        inside.pop()
        return Built(signature)

    BUILDER[0] = slow
    threads = [threading.Thread(target=compile.function, args=(Stub(at),)) for at in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 5


def test_a_compilation_holds_up_nobody_who_needs_none(stubs, monkeypatch):
    compile.function(Stub(1))
    forget(monkeypatch)
    entered, go = threading.Event(), threading.Event()

    def waits(signature):
        entered.set()
        assert go.wait(10)
        return Built(signature)

    BUILDER[0] = waits
    slow = threading.Thread(target=compile.function, args=(Stub(2),))
    slow.start()
    assert entered.wait(10)
    assert compile.function(Stub(1))()[0] == "stub"  # from the disk, and then from memory
    assert compile.function(Stub(1))()[0] == "stub"
    assert not go.is_set()
    go.set()
    slow.join()


def test_an_error_is_not_remembered(stubs):
    def broken(signature):
        raise RuntimeError("no such layout")

    BUILDER[0] = broken
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no such layout"):
            compile.function(Stub())
    BUILDER[0] = Built
    assert compile.function(Stub())()[0] == "stub"
    assert len(stubs) == 3


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_object_is_compiled_anew(stubs, monkeypatch, damage):
    compile.function(Stub())
    (path,) = compile.CACHE.folder.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    forget(monkeypatch)
    assert compile.function(Stub())()[0] == "stub"
    assert len(stubs) == 2
    forget(monkeypatch)
    compile.function(Stub())
    assert len(stubs) == 2, "the new one was kept"


def test_an_object_that_does_not_load_is_compiled_anew(stubs, monkeypatch):
    compile.function(Stub())
    forget(monkeypatch)
    load, calls = compile._load, []

    def first_fails(path, name):
        calls.append(path)
        if len(calls) == 1:
            raise RuntimeError("was not recognized as a valid object file")
        return load(path, name)

    monkeypatch.setattr(compile, "_load", first_fails)
    assert compile.function(Stub())()[0] == "stub"
    assert len(stubs) == 2


def test_without_a_disk_it_works(stubs, monkeypatch, tmp_path):
    monkeypatch.setattr(compile, "CACHE", Cache(None))
    assert compile.function(Stub())()[0] == "stub"
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(compile, "CACHE", Cache(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="are not kept"):
        assert compile.function(Stub(2))()[0] == "stub_size2"
    assert not compile.prepare(Stub(3))


def test_prepared_is_on_the_disk_and_not_loaded(stubs):
    assert not compile.ready(Stub())
    assert compile.prepare(Stub())
    assert compile.prepare(Stub())
    assert compile.ready(Stub())
    assert (len(stubs), LOADS) == (1, [])
    compile.function(Stub())
    assert (len(stubs), LOADS) == (1, ["stub"])


def test_what_a_key_depends_on(monkeypatch):
    base = compile.key(Stub(), 90)
    assert base == compile.key(Stub(size=1, kind=""), 90)
    assert base.startswith("stub-")
    found = {base, compile.key(Stub(size=2), 90), compile.key(Stub(kind="x"), 90)}
    found.add(compile.key(Stub(), 100))
    found.add(compile.key(replace(Stub(), kind=1), 90))  # 1 is not "1"
    found.add(compile.key(replace(Stub(), kind="1"), 90))
    for name in ("_host", "_versions"):
        with monkeypatch.context() as patch:
            patch.setattr(compile, name, lambda: "another")
            found.add(compile.key(Stub(), 90))
    assert len(found) == 8


CHANGES = {
    "a kernel": lambda folder: (folder / "forward.py").write_text("x = 2"),
    "a helper": lambda folder: (folder / "lib" / "gate.py").write_text("y = 2"),
    "a new file": lambda folder: (folder / "new.py").write_text(""),
    "a moved file": lambda folder: (folder / "lib" / "gate.py").rename(folder / "gate.py"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_key_depends_on_the_text_of_every_kernel(kernels, monkeypatch, change):
    before = compile.key(Stub(), 90)
    change(kernels)
    monkeypatch.setattr(compile, "_IMPORTED", compile._text())  # as a new process
    assert compile.key(Stub(), 90) != before


def test_a_kernel_that_is_edited_meanwhile_is_not_kept(stubs, kernels):
    """Nobody knows which text the compiler saw."""

    def edited(signature):
        (kernels / "forward.py").write_text("x = 2")
        return Built(signature)

    BUILDER[0] = edited
    assert compile.function(Stub())()[0] == "stub"
    assert not compile.prepare(Stub(2))
    assert list(compile.CACHE.folder.glob("*.o")) == []


def test_a_signature_holds_plain_values():
    with pytest.raises(TypeError, match=r"Stub\.kind: expected a plain value, got \(1, 2\)"):
        compile.key(Stub(kind=(1, 2)), 90)


def test_the_name_is_an_identifier_made_of_what_differs():
    assert Stub().name == "stub"
    assert Stub(size=-3, kind="a.b c").name == "stub_size_3_kinda_b_c"
    assert re.fullmatch(r"[a-z_]\w*", Stub(size=-3, kind="é/ü\n").name)


CHILD = """
import sys
from dataclasses import dataclass
from pathlib import Path
from lagraph.engines.frost import compile
from test_frost import Built, Stub

class Slow(Built):
    def export_to_c(self, path, function_name):
        import time
        with open(sys.argv[1], "a") as log:
            log.write("built\\n")
        time.sleep(0.5)
        super().export_to_c(path, function_name)

import test_frost
test_frost.BUILDER[0] = Slow
compile._load = lambda path, name: Path(path).read_bytes()
print("got", compile.function(Stub()).startswith(b"object of stub"))
"""


@pytest.mark.skipif(cache.fcntl is None, reason="needs file locks")
def test_processes_compile_a_signature_once(tmp_path):
    log = tmp_path / "log"
    command = [sys.executable, "-c", CHILD, str(log)]
    environment = {**os.environ, "LAGRAPH_CACHE_DIR": str(tmp_path / "cache")}
    children = [
        subprocess.Popen(command, cwd=HERE, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [child.communicate()[0] for child in children] == ["got True\n"] * 3
    assert log.read_text() == "built\n"


REAL = """
import os, sys, time
os.environ.pop("CUTE_DSL_ARCH", None)
import toy, torch
from lagraph.engines.frost import compile
signature = toy.Scale()
was_there = compile.ready(signature)
start = time.perf_counter()
call = compile.function(signature)
print(was_there, f"{1e3 * (time.perf_counter() - start):.0f} ms")
q, g = torch.zeros(4, 2, 128, dtype=torch.bfloat16), torch.zeros(4, 2)
odd = torch.zeros(4 * 2 * 128 + 1, dtype=torch.bfloat16)[1:].view(4, 2, 128)
for x in (q, odd):
    try:
        call(x, q, q, g, g, torch.zeros(2, dtype=torch.int32), None, q, None, None, 1.0)
    except ValueError as error:
        print(error)
"""


@pytest.mark.slow
@needs_compiler
def test_compiled_without_a_gpu_and_loaded_elsewhere(tmp_path):
    """The object that one process compiles for SM90 is a function in another, which checks what it
    is given; no variable names the architecture."""
    for there in ("False", "True"):
        said = python("-c", REAL, LAGRAPH_CACHE_DIR=str(tmp_path)).splitlines()
        assert said[0].startswith(f"{there} "), said
        assert "Mismatched Tensor on argument #0" in said[1]
        assert "expected device_type=cuda" in said[1]
        assert "Misaligned Tensor data on argument #0" in said[2], "the words that launch reads"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
@needs_compiler
def test_the_report_counts_registers_and_fails_on_spills():
    """On kernels of which one spills and the others do not."""
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, str(REPORT), "--engine", "frost", "--signatures"]
    good, bad = (
        subprocess.run([*command, name], capture_output=True, text=True, env=environment)
        for name in ("toy", "toy:HUNGRY")
    )
    assert good.returncode == 0, good.stderr
    lines = good.stdout.splitlines()[1:]
    assert len(lines) == 2
    for line in lines:
        assert re.search(r" 128 threads +\d+ registers +0 B spilled +0\.0 KB shared", line), line
    assert bad.returncode == 1, bad.stderr
    assert re.search(r"1024 threads +64 registers +[1-9]\d* B spilled .*OVER", bad.stdout)


@pytest.mark.slow
@needs_compiler
def test_every_kernel_compiles_for_sm90_without_spills():
    """Each signature that the kernels list, but for an address that is put away before the loop;
    the lines say what each takes."""
    lines = python(REPORT, "--engine", "frost").splitlines()[1:]
    print(*lines, sep="\n")
    if not lines:
        pytest.skip("no kernel lists SIGNATURES")
    for line in lines:  # that none spills more than it declares, the exit status says
        spilled = int(re.search(r" \d+ registers +(\d+) B spilled", line)[1])
        assert spilled <= 8 or re.search("paired|split", line), line


# Launching ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recorded(Signature):
    """The arguments of a forward, and the facts that it depends on."""

    arguments = (
        "q", "k", "v", "g", "beta", "a_log", "dt_bias", "cu_seqlens", "initial_state",
        "state_indices", "O", "final_state", "state_checkpoints", "workspace", "scale", "every",
    )  # fmt: skip
    family: str
    dtype: str
    K: int
    V: int
    n: int
    gate: str
    norm: bool
    sigmoid: bool
    double: bool
    g: str
    beta: str
    a_log: str
    bias: str
    offsets: str
    initial: str
    index: str
    final: str
    checkpoints: str
    token_major: bool
    every: int
    invariant: bool
    rows: int


SEEN = []


def record(*values):
    SEEN.append(dict(zip(Recorded.arguments, values, strict=True)))


@pytest.fixture
def recorded(monkeypatch):
    """Plans whose function records its arguments; what it was called with so far."""
    SEEN.clear()
    for family in ("gdn", "gdp"):
        monkeypatch.setitem(support.KERNELS, (family, "forward"), f"{__name__}:Recorded")
    monkeypatch.setattr(compile, "function", lambda signature, arch: record)
    return SEEN


def given(T=6, N=2, H=2, K=64, V=64, n=1, dtype=BF16, **more):
    """Ordinary inputs of GDN, or of GDP where n > 1."""
    found = {
        "q": torch.randn(T, H, K, dtype=dtype), "k": torch.randn(T * n, H, K, dtype=dtype),
        "v": torch.randn(T * n, H, V, dtype=dtype), "g": torch.zeros(T, H),
        "beta": torch.ones(T * n, H),
        "cu_seqlens": torch.linspace(0, T, N + 1).to(torch.int32),
    }  # fmt: skip
    return found | more


def described(x, family="gdn", direction="forward", arch=90, **options):
    """The problem of inputs, as it would be on a GPU."""
    node = registry.family(family).node(direction)
    ins = [x.get(name) for name in node.input_names]
    metas, chosen = metas_of(ins), node.options(options)
    bound = infer.bind(node, metas, chosen)
    layouts = [0 if t is None else layout_class(t) for t in ins]
    problem = problem_of(node, bound, chosen, metas, layouts)
    return replace(problem, device="cuda", arch=arch), ins, bound


def fresh(problem, bound):
    """Outputs as the core allocates them, of NaN."""
    return [
        torch.full(bound.outputs[name][0], float("nan"), dtype=bound.outputs[name][1])
        if problem.has(name) else None for name in problem.outputs
    ]  # fmt: skip


def run(x, family="gdn", outs=None, **options):
    """A plan made and run; what the kernel was given, and the outputs."""
    problem, ins, bound = described(x, family, **options)
    plan = launch.ForwardPlan(problem, {})
    outs = fresh(problem, bound) if outs is None else outs
    plan.run(ins, outs, None)
    return (SEEN.pop() if SEEN else None), outs


def test_tensors_are_passed_as_they_are(recorded):
    x = given(initial_state=torch.randn(2, 2, 64, 64), a_log=torch.zeros(2), dt_bias=torch.ones(2))
    got, outs = run(x, output_final_state=True, safe_gate=True, scale=0.25)
    for name, value in x.items():
        assert got[name] is value, name
    assert (got["O"], got["final_state"]) == (outs[0], outs[1])
    assert (got["scale"], got["every"]) == (0.25, 0)
    assert got["state_indices"] is got["state_checkpoints"] is got["workspace"] is None


def test_what_is_absent_is_none(recorded):
    got, _ = run(given())
    absent = {name for name, value in got.items() if value is None}
    assert absent == {
        "a_log", "dt_bias", "initial_state", "state_indices", "final_state", "state_checkpoints",
        "workspace",
    }  # fmt: skip
    assert got["scale"] == 64**-0.5


FACTS = {
    "plain": ({}, {}, {"gate": "log", "final": "", "initial": "", "n": 1, "rows": 64}),
    "options": (
        {}, {"use_qk_l2norm": True, "use_beta_sigmoid": True, "allow_neg_eigval": True,
             "batch_invariant": True, "gate_domain": "linear"},
        {"norm": True, "sigmoid": True, "double": True, "invariant": True, "gate": "linear"},
    ),
    "softplus": ({"a_log": torch.zeros(2, dtype=BF16)}, {"safe_gate": True},
                 {"gate": "softplus", "a_log": "bfloat16", "bias": ""}),
    "state": ({"initial_state": torch.zeros(2, 2, 64, 64, dtype=BF16)},
              {"output_final_state": True}, {"initial": "bfloat16", "final": "bfloat16"}),
    "new state": ({}, {"output_final_state": True}, {"initial": "", "final": "float32"}),
    "pool": ({"initial_state": torch.zeros(5, 2, 64, 64), "state_indices": torch.arange(2)},
             {"output_final_state": True},
             {"initial": "float32", "final": "float32", "index": "int64", "offsets": "int32"}),
    "checkpoints": ({}, {"checkpoint_every_n_tokens": 32},
                    {"checkpoints": "bfloat16", "every": 32}),
    "dtypes": ({"g": torch.zeros(6, 2, dtype=torch.float16), "beta": torch.ones(6, 2, dtype=BF16)},
               {}, {"g": "float16", "beta": "bfloat16", "dtype": "bfloat16"}),
}  # fmt: skip


@pytest.mark.parametrize(("more", "options", "facts"), FACTS.values(), ids=FACTS)
def test_the_signature_says_what_a_call_is(recorded, more, options, facts):
    problem, _, _ = described(given(**more), **options)
    signature = pieces.signature_of(problem, {})
    assert {name: getattr(signature, name) for name in facts} == facts


def test_the_signature_has_neither_lengths_nor_head_counts(recorded):
    one = pieces.signature_of(described(given(T=6, N=2, H=2))[0], {})
    two = pieces.signature_of(described(given(T=64, N=1, H=3))[0], {})
    assert one == two
    assert compile.key(one, 90) == compile.key(two, 90)


def test_products_expanded_and_token_major(recorded):
    x = given(n=3)
    problem, _, _ = described(x, "gdp", num_householder=3)
    flat = pieces.signature_of(problem, {})
    for name in ("k", "v", "beta"):
        x[name] = x[name].view(6, 3, *x[name].shape[1:])
    problem, _, _ = described(x, "gdp", num_householder=3)
    nested = pieces.signature_of(problem, {})
    assert (flat.family, flat.n, flat.token_major) == ("gdp", 3, False)
    assert nested == replace(flat, token_major=True)
    got, _ = run(x, "gdp", num_householder=3)
    assert got["k"].shape == (18, 2, 64)
    assert got["k"].data_ptr() == x["k"].data_ptr(), "a view"


def test_a_knob_sets_a_field(recorded):
    problem, _, _ = described(given(V=128, K=128))
    assert pieces.signature_of(problem, {}).rows == 128
    assert pieces.signature_of(problem, {"rows": 64}).rows == 64


@dataclass(frozen=True)
class Misspelt(Recorded):
    qk_norm: bool = False


@dataclass(frozen=True)
class Forgets(Recorded):
    arguments = tuple(name for name in Recorded.arguments if name != "beta")


@dataclass(frozen=True)
class Invents(Recorded):
    arguments = (*Recorded.arguments, "scales")


BROKEN = {
    "a field that is no fact": (Misspelt, "no fact of a problem and no knob is called .*qk_norm"),
    "an input that is ignored": (Forgets, r"Forgets\.arguments: \['beta'\] are not among"),
    "an argument that is nothing": (Invents, r"Invents\.arguments: .* got 'scales'"),
}


@pytest.mark.parametrize(("kind", "text"), BROKEN.values(), ids=BROKEN)
def test_a_kernel_that_breaks_the_contract_makes_no_plan(recorded, monkeypatch, kind, text):
    monkeypatch.setitem(support.KERNELS, ("gdn", "forward"), f"{__name__}:{kind.__name__}")
    with pytest.raises(TypeError, match=text):
        launch.ForwardPlan(described(given())[0], {})


# Sequences that are cut --------------------------------------------------------------------------


@pytest.fixture
def phases(monkeypatch):
    """Plans of the real signatures, whose functions record what they are called with."""
    called = []

    def function(signature, arch):
        def call(*values):
            called.append((signature, dict(zip(signature.arguments, values, strict=True))))

        return call

    monkeypatch.setattr(compile, "function", function)
    return called


def planned(x, called, family="gdn", direction="forward", knobs=None, **options):
    """What a plan calls: its signature and arguments, each."""
    problem, ins, bound = described(x, family, direction, **options)
    plan = launch.plan(problem, knobs or {})
    outs = fresh(problem, bound)
    called.clear()
    plan.run(ins, outs, None)
    return plan, outs, called


def many(T, **more):
    return given(T=T, N=1, H=2, **more)


@needs_compiler
def test_a_long_sequence_is_opened_linked_and_closed(phases):
    state = torch.zeros(1, 2, 64, 64)
    x = many(6000, initial_state=state)
    plan, outs, calls = planned(x, phases, output_final_state=True)
    (opening, a), (link, b), (closing, c) = calls
    assert (opening.phase, closing.phase, type(link).__name__) == ("open", "close", "Link")
    assert a["q"] is a["O"] is a["initial_state"] is a["final_state"] is None
    assert (a["skip"], c["skip"]) == (2, 0), "nothing of the last segment, a map of the first"
    assert b["initial_state"] is x["initial_state"]
    assert (b["T"], b["HO"]) == (6000, 2)
    assert c["initial_state"] is None, "it starts from the workspace"
    assert (c["O"], c["final_state"]) == (outs[0], outs[1])
    assert a["span"] == b["span"] == c["span"] > 0
    assert a["span"] % 64 == 0
    assert a["workspace"] is b["workspace"] is c["workspace"]
    slots = 6000 // a["span"] + (2 if a["less"] else 1)
    assert a["workspace"].numel() == plan.workspace_size(6000, 1) == slots * 2 * 128 * 64 * 4


@needs_compiler
@pytest.mark.parametrize(
    ("N", "options", "paired"),
    [(70, {}, True), (2, {}, False), (70, {"batch_invariant": True}, False)],
)
def test_an_sm_has_two_small_states_where_there_are_many(phases, N, options, paired):
    """132 SMs and two heads: 66 sequences fill them."""
    _, _, ((kernel, _),) = planned(given(T=140, N=N, H=2), phases, **options)
    assert (kernel.phase, kernel.paired, kernel.per_sm) == ("whole", paired, 1 + paired)


@needs_compiler
@pytest.mark.parametrize(("options", "knobs", "split"), [
    ({}, {}, False), ({}, {"split": 1}, True),
    ({"allow_neg_eigval": True, "use_beta_sigmoid": True}, {}, True),
    ({"allow_neg_eigval": True, "use_beta_sigmoid": True}, {"split": 0}, False),
])  # fmt: skip
def test_strengths_up_to_two_take_two_parts(phases, options, knobs, split):
    for T, kernels in ((6, 1), (6000, 3)):
        _, _, calls = planned(many(T), phases, knobs=knobs, **options)
        assert len(calls) == kernels
        assert all(kernel.split is split for kernel, _ in calls if hasattr(kernel, "split"))


@needs_compiler
def test_from_no_state_the_first_map_is_not_asked_for(phases):
    _, _, calls = planned(many(6000), phases)
    assert calls[0][1]["skip"] == 3
    assert not calls[1][0].initial


WHOLE = {
    "a short one": (many(640), {}),
    "as many as there are SMs": (given(T=6000, N=80, H=2), {}),
    "a batch-invariant call": (many(6000), {"batch_invariant": True}),
}


@needs_compiler
@pytest.mark.parametrize(("x", "options"), WHOLE.values(), ids=WHOLE)
def test_left_whole(phases, x, options):
    plan, _, calls = planned(x, phases, **options)
    ((signature, got),) = calls
    assert signature.phase == "whole"
    assert got["workspace"] is None
    assert plan.workspace_size(x["q"].shape[0], x["cu_seqlens"].numel() - 1) == 0


@needs_compiler
def test_few_short_sequences_have_narrow_ctas(phases):
    x = given(T=128, N=2, H=16, K=128, V=128)
    _, _, ((signature, _),) = planned(x, phases)
    assert (signature.rows, signature.phase) == (64, "whole")
    _, _, ((signature, _),) = planned(x, phases, knobs={"rows": 128})
    assert signature.rows == 128, "a pin is obeyed"
    _, _, ((signature, _),) = planned(x, phases, batch_invariant=True)
    assert signature.rows == 128, "whatever the batch"


@needs_compiler
@pytest.mark.parametrize("segment", [1, 8])
def test_a_knob_cuts(phases, segment):
    _, _, calls = planned(given(), phases, knobs={"segment": segment})
    assert {call["span"] for _, call in calls} == {64 * segment}


@needs_compiler
def test_a_knob_that_batch_invariance_forbids_is_refused(phases):
    problem = described(given(), batch_invariant=True)[0]
    with pytest.raises(errors.PlanNotOffered, match="segment=2 cuts sequences, which batch_inv"):
        launch.plan(problem, {"segment": 2})
    assert launch.plan(problem, {"segment": 0})


@needs_compiler
def test_a_summary_is_opened_and_linked(phases):
    x = many(6000)
    del x["q"]
    plan, outs, ((opening, a), (link, b)) = planned(x, phases, direction="summary")
    assert (opening.phase, link.carries, link.transition) == ("open", False, "")
    assert a["skip"] == 1
    assert b["final_state"] is outs[0]
    _, outs, calls = planned(x, phases, direction="summary", output_transition=True)
    assert calls[0][1]["skip"] == 0
    assert calls[1][1]["transition"] is outs[1]
    plan, _, calls = planned(x, phases, direction="summary", batch_invariant=True)
    assert calls[0][1]["span"] > 6000, "whole"
    assert plan.workspace_size(6000, 1) == 2 * 128 * 64 * 4


@needs_compiler
def test_the_backward_of_a_summary_goes_from_the_end(phases):
    x = many(6000)
    del x["v"]
    x |= {"dO": torch.zeros(6000, 2, 64, dtype=BF16), "d_final_state": torch.zeros(1, 2, 64, 64)}
    plan, outs, ((first, a), (link, b)) = planned(
        x, phases, direction="summary_backward", scale=0.5
    )
    assert (first.phase, link.reverse, link.carries) == ("retreat", True, False)
    assert (a["q"], a["k"], a["v"]) == (x["q"], x["k"], x["dO"])
    assert (a["scale"], a["skip"]) == (0.5, 0)
    assert (b["initial_state"], b["final_state"]) == (x["d_final_state"], outs[0])
    assert plan.workspace_size(6000, 1) == a["workspace"].numel()


@needs_compiler
@pytest.mark.parametrize("direction", ["forward", "summary"])
def test_a_cta_has_no_more_rows_than_there_are(phases, direction):
    x = given(K=128)
    if direction == "summary":
        del x["q"]
    _, _, calls = planned(x, phases, direction=direction, knobs={"rows": 128})
    assert (calls[0][0].V, calls[0][0].rows) == (64, 64)
    assert calls[0][0].parts == (1 if direction == "forward" else 3)


@needs_compiler
@pytest.mark.parametrize(
    ("knobs", "options"), [({"segment": 0}, {}), ({}, {"batch_invariant": True})]
)
def test_a_workspace_that_is_not_needed_is_not_passed_on(phases, knobs, options):
    problem, ins, bound = described(given(), **options)
    plan = launch.plan(problem, knobs)
    plan.run(ins, fresh(problem, bound), torch.empty(0, dtype=torch.uint8))
    assert phases[-1][1]["workspace"] is None


@needs_compiler
def test_without_tokens_the_map_is_the_unit(phases):
    x = given(T=0, N=2)
    del x["q"]
    _, outs, calls = planned(x, phases, direction="summary", output_transition=True)
    assert not calls
    assert torch.equal(outs[1], torch.eye(64).expand(2, 2, 64, 64))
    assert not outs[0].any()


@needs_compiler
def test_all_that_a_plan_may_call_is_compiled_ahead(phases, monkeypatch, tmp_path):
    from lagraph.engines.frost.engine import ENGINE

    monkeypatch.setattr(compile, "CACHE", Cache(tmp_path))
    monkeypatch.setattr(cache, "CACHE", compile.CACHE)
    monkeypatch.setattr(compile, "ready", lambda signature, arch: False)
    problem = described(many(64, K=128, V=128))[0]
    names = {job.label for job in ENGINE.jobs(problem, {})}
    assert names == {signature.name for signature in pieces.pieces(problem, {}).values()}
    assert len(names) == 5


def test_the_model_cuts_what_leaves_sms_idle():
    """What was measured to be faster, and bounds on what is chosen."""
    few, many = schedule.Shape(8, 2, 1, 132, True), schedule.Shape(256, 2, 1, 132, True)
    assert schedule.choose(few, 512, 1).span in range(16, 65)
    assert schedule.choose(many, 512, 1)[:3] == (False, 0, 0)
    middle = schedule.Shape(32, 2, 1, 132, True)
    assert schedule.choose(middle, 512, 1).less, "the last but one is half as long"
    for heads in (1, 8, 32, 64, 100, 131):
        for chunks in (1, 3, 10, 100, 1000, 20000):
            found = schedule.choose(schedule.Shape(heads, 2, 1, 132, True), chunks, 1)
            assert found.span == 0 or 4 <= found.span <= chunks
            assert not (found.span and found.narrow)
            assert 0 <= found.less < max(found.span, 1)


def test_without_sequences_nothing_is_launched(recorded):
    x = given(N=0, T=4)
    x["cu_seqlens"] = torch.zeros(1, dtype=torch.int32)
    assert run(x, output_final_state=True)[0] is None


def test_without_tokens_states_pass_through(recorded):
    x = given(T=0, N=2)
    _, outs = run(x, output_final_state=True)
    assert not outs[1].any()
    state = torch.randn(2, 2, 64, 64, dtype=BF16)
    got, outs = run(x | {"initial_state": state}, output_final_state=True)
    assert got is None
    assert torch.equal(outs[1], state)
    assert run(x | {"initial_state": state})[0] is None


def test_without_tokens_a_pool_is_left_alone(recorded):
    pool = torch.randn(5, 2, 64, 64)
    before = pool.clone()
    x = given(T=0, initial_state=pool, state_indices=torch.tensor([3, -1], dtype=torch.int32))
    outs = [torch.empty(0, 2, 64, dtype=BF16), pool, None]
    assert run(x, outs=outs, output_final_state=True)[0] is None
    assert torch.equal(pool, before)


def shifted(x):
    """The same numbers, one element behind an aligned address."""
    room = torch.zeros(x.numel() + 64, dtype=x.dtype)
    start = -(room.data_ptr() % 16) % 16 // x.element_size() + 1
    out = room[start : start + x.numel()].view(x.shape)
    assert out.data_ptr() % 16
    return out.copy_(x)


def strict(*values):
    """As the compiled function does, refuse what is not aligned; else scale q into O."""
    got = dict(zip(Recorded.arguments, values, strict=True))
    for at, (name, x) in enumerate(got.items()):
        if name in ("q", "k", "v", "O", "initial_state", "final_state") and x is not None:
            if x.data_ptr() % 16:
                raise ValueError(f"Misaligned Tensor data on argument #{at} when calling: ...")
            assert not x.is_neg()
    assert got["O"].stride(0) * 2 % 16 == 0
    got["O"].copy_(got["q"] * 2)
    if got["final_state"] is not None:
        got["final_state"].copy_(0 if got["initial_state"] is None else got["initial_state"] + 1)
    SEEN.append(got)


@pytest.fixture
def strictly(recorded, monkeypatch):
    monkeypatch.setattr(compile, "function", lambda signature, arch: strict)


def test_an_address_that_is_not_aligned_goes_through_a_copy(strictly):
    x = given()
    x["q"], x["v"] = shifted(x["q"]), shifted(x["v"])
    got, outs = run(x)
    assert torch.equal(outs[0], x["q"] * 2)
    assert got["q"] is not x["q"]
    assert torch.equal(got["v"], x["v"])
    assert got["k"] is x["k"]
    assert got["g"] is x["g"]


def test_an_output_that_is_not_aligned_is_filled_all_the_same(strictly):
    x = given()
    out = shifted(torch.zeros(6, 2, 64, dtype=BF16))
    run(x, outs=[out, None, None])
    assert torch.equal(out, x["q"] * 2)


def test_a_strided_output_is_filled(strictly):
    x = given()
    wide = torch.zeros(6, 2, 65, dtype=BF16)
    run(x, outs=[wide[..., :64], None, None])
    assert torch.equal(wide[..., :64], x["q"] * 2)
    assert not wide[..., 64].any()
    even = torch.zeros(6, 2, 128, dtype=BF16)[..., :64]
    got, _ = run(x, outs=[even, None, None])
    assert got["O"] is even, "strides that are multiples of 16 bytes are taken as they are"


def test_a_state_in_place_stays_one_tensor(strictly):
    state = shifted(torch.randn(2, 2, 64, 64))
    before = state.clone()
    x = given(initial_state=state)
    out = torch.zeros(6, 2, 64, dtype=BF16)
    got, _ = run(x, outs=[out, state, None], overwrite_initial_state=True)
    assert got["initial_state"] is got["final_state"]
    assert torch.equal(state, before + 1)


@pytest.mark.parametrize("name", ["q", "g", "initial_state"])
def test_a_negated_view_is_read_as_it_reads(strictly, name):
    x = given(initial_state=torch.randn(2, 2, 64, 64))
    x[name] = torch._neg_view(x[name])
    got, outs = run(x, output_final_state=True)
    assert not got[name].is_neg()
    assert torch.equal(got[name], x[name])
    assert torch.equal(outs[0], x["q"] * 2)
    assert torch.equal(outs[1], x["initial_state"] + 1)


def test_what_a_kernel_refuses_is_reported(recorded, monkeypatch):
    def refuse(*values):
        raise ValueError("Mismatched Tensor on argument #3 when calling: `launch(...)`")

    monkeypatch.setattr(compile, "function", lambda signature, arch: refuse)
    with pytest.raises(RuntimeError, match=r"gdn_frost: the kernel recorded\w* does not take g;"):
        run(given())


def test_a_warm_run_is_cheap(recorded):
    """Microseconds of the plan itself; the aim is 2, the bound is for busy machines."""
    problem, ins, bound = described(given(initial_state=torch.zeros(2, 2, 64, 64)),
                                    output_final_state=True)  # fmt: skip
    made = launch.ForwardPlan(problem, {})
    outs = fresh(problem, bound)
    made.run.__globals__["function"] = lambda *values: None
    best = 1e9
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(2000):
            made.run(ins, outs)
        best = min(best, (time.perf_counter() - start) / 2000 * 1e6)
    print(f"a warm run: {best:.2f} us without the launch")
    assert best < 15


# Selection ----------------------------------------------------------------------------------------


def reasons(x=None, family="gdn", direction="forward", arch=90, **options):
    return support.SUPPORT.reasons(described(x or given(), family, direction, arch, **options)[0])


def test_served_on_sm90_alone():
    assert reasons() == []
    assert reasons(arch=80) == ["needs sm90, this device is sm80"]
    for arch in (100, 120):
        assert reasons(arch=arch) == [f"is not proven beyond sm90, this device is sm{arch}"]


DECLINES = {
    "K": (given(K=96), "K=96 not in {64, 128}"),
    "V": (given(V=256), "V=256 not in {64, 128}"),
    "dtype": (given(dtype=F32), "takes bfloat16 or float16, not float32"),
    "strides of 2 bytes": (given(q=torch.zeros(6, 2, 65, dtype=BF16)[..., :64]),
                           "strides of q are no multiples of 16 bytes: call q.contiguous() first"),
    "innermost strides": (given(v=torch.zeros(6, 2, 64, 2, dtype=BF16)[..., 0]),
                          "strides of v: call v.contiguous() first"),
}  # fmt: skip


@pytest.mark.parametrize(("x", "reason"), DECLINES.values(), ids=DECLINES)
def test_what_it_declines(x, reason):
    assert reasons(x) == [reason]


def test_strides_that_it_takes():
    wide = torch.zeros(6, 3, 2, 64, dtype=BF16)
    x = given(q=wide[:, 0], k=wide[:, 1], v=wide[:, 2], g=torch.zeros(2, 6).T,
              beta=torch.zeros(6, 4)[:, ::2])  # fmt: skip
    assert reasons(x) == []
    x = given(n=2)
    for name in ("k", "v"):
        x[name] = x[name].view(6, 2, 2, 64)
    x["beta"] = torch.zeros(6, 2, 2, 2)[..., 0]
    why = reasons(x, "gdp", num_householder=2)
    assert not any("beta" in reason for reason in why)


# What the engine does not do yet: tests of these are skipped for it, see `table.pending`.
SERVED = {
    (family, direction)
    for family in ("gdn", "gdp")
    for direction in ("forward", "summary", "summary_backward")
}


def test_what_is_missing_is_known():
    assert not support.SUPPORT.without
    assert support.SUPPORT.multiples == {"checkpoint_every_n_tokens": 64}
    assert support.SUPPORT.dims["n"] == (2, 4)
    assert support.SUPPORT.serves == frozenset(support.KERNELS) == SERVED


def test_tests_are_skipped_for_what_is_missing_and_for_nothing_else(monkeypatch):
    monkeypatch.setattr(select, "missing", lambda row: ())

    def refusal(problem, pin="gdn_frost"):
        with pytest.raises(errors.PlanNotOffered) as caught:
            select.select(problem, pin)
        return caught.value

    problem = described(given())[0]
    wanting = described(given(), checkpoint_every_n_tokens=16)[0]
    assert pending(refusal(replace(problem, direction="backward")))
    assert pending(refusal(wanting))
    assert pending(refusal(replace(wanting, direction="backward"), "gdn_frost[rows=64]"))
    thirds = described(given(n=3), "gdp", num_householder=3)[0]
    assert pending(refusal(thirds, "gdp_frost"))
    everywhere = described(given(), checkpoint_every_n_tokens=128)[0]
    assert select.select(everywhere, "gdn_frost").base == "gdn_frost"
    assert not pending(refusal(described(given(K=96))[0]))
    assert not pending(refusal(replace(wanting, arch=80)))
    assert not pending(refusal(replace(problem, device="cpu", direction="backward")))
    assert not pending(refusal(described(given(K=96))[0], "gdn_triton"))
    assert not pending(refusal(problem, "gdn_frost[rows=65]"))


def test_a_forward_alone_is_tested_with_the_backward_of_another():
    assert paired("gdn", "gdn_frost") == "gdn_frost,gdn_triton"
    assert paired("gdn", "gdn_frost[rows=64]") == "gdn_frost[rows=64],gdn_triton"
    for plan in (None, "gdn_triton", "gdn_frost,gdn_eager"):
        assert paired("gdn", plan) == plan


def test_a_preference_is_listed_in_the_docs(monkeypatch):
    assert "| `frost` | cuda | never |" in doc.plan_table() or support.PREFER
    row = select.Preference("gdn", "forward", "few heads", "1.2 times, H200, at abc123")
    monkeypatch.setattr(support, "SUPPORT", replace(support.SUPPORT, prefer=(row,)))
    text = doc.plan_table()
    assert "| `frost` | cuda | cuda, where preferred |" in text
    assert "| `frost` | gdn forward | few heads | 1.2 times, H200, at abc123 |" in text


def test_preferences_hold_measurements():
    for row in support.PREFER:
        assert (row.family, row.direction) in support.KERNELS
        assert row.where
        assert re.search(r"\d\.\d+ \(\d", row.measured), "a preference has its measurement with it"


PREFERRED = {
    "gdn": (True, "gdn", given(), {}),
    "gdp": (True, "gdp", given(n=2), {"num_householder": 2}),
    "strengths up to 2": (False, "gdn", given(),
                          {"allow_neg_eigval": True, "use_beta_sigmoid": True}),
    "invariant": (False, "gdn", given(), {"batch_invariant": True}),
    "invariant, many heads": (True, "gdn", given(H=support.MANY), {"batch_invariant": True}),
    "preferred, not served": (False, "gdn", given(K=32), {}),
}  # fmt: skip


@pytest.mark.parametrize(("chosen", "family", "x", "options"), PREFERRED.values(), ids=PREFERRED)
def test_it_is_chosen_where_it_is_preferred(monkeypatch, chosen, family, x, options):
    """And may be pinned wherever it serves."""
    monkeypatch.setattr(select, "missing", lambda row: ())
    problem = described(x, family, **options)[0]
    assert select.select(problem).base == f"{family}_{'frost' if chosen else 'triton'}"
    told = next(v for v in select.verdicts(problem) if v.engine == "frost")
    if told.ok:
        assert str(told) == f"{family}_frost: serves{'' if chosen else ' when pinned'}"
        assert select.select(problem, f"{family}_frost[rows=64]").knobs == (("rows", 64),)


def test_a_preference_is_of_a_family_a_direction_and_what_it_says():
    def few(problem):
        return problem.sizes["HO"] < 4

    row = select.Preference("gdn", "forward", "few heads", "1.2 times on an H200", few)
    preferring = replace(support.SUPPORT, prefer=(row,))
    problem = described(given())[0]
    assert preferring.chosen(problem)
    assert not preferring.chosen(described(given(H=4))[0])
    assert not preferring.chosen(replace(problem, direction="summary"))
    assert not preferring.chosen(replace(problem, family="kda"))
    assert not preferring.chosen(replace(problem, device="cpu"))


def test_packages_that_are_missing_decline_with_versions(monkeypatch):
    row = next(row for row in registry.ENGINES if row.name == "frost")
    select.missing.cache_clear()
    monkeypatch.setattr(select.metadata, "version", lambda name: "0.1.2")
    try:
        assert select.missing(row) == (
            "needs nvidia-cutlass-dsl >= 4.8.1, found 0.1.2",
            "needs apache-tvm-ffi >= 0.1.12, found 0.1.2",
        )
    finally:
        select.missing.cache_clear()


# On a GPU -----------------------------------------------------------------------------------------


@pytest.fixture
def toys(monkeypatch, tmp_path):
    """GDN's forward by the toy: O = scale q."""
    pytest.importorskip("cutlass")
    monkeypatch.setitem(support.KERNELS, ("gdn", "forward"), "toy:Scale")
    monkeypatch.setattr(compile, "CACHE", Cache(tmp_path))
    monkeypatch.setattr(cache, "CACHE", compile.CACHE)
    fake.forget()
    yield tmp_path
    fake.forget()


def on_gpu(**more):
    x = given(T=37, K=128, V=128, **more)
    return {name: t.cuda() for name, t in x.items()}


def pinned(x, **options):
    return lagraph.ops.gated_delta_net(**x, plan_name="gdn_frost[rows=64]", **options)


@pytest.mark.gpu
@hopper
def test_a_toy_runs_from_the_compiler_and_from_the_disk(toys, monkeypatch):
    x = on_gpu()
    for _ in range(2):
        out, _ = pinned(x, scale=1.01)
        want = x["q"].float() * 1.01**64
        assert ((out.float() - want).norm() / want.norm()).item() < 1e-2
        assert len(list(toys.iterdir())) == 1
        fake.forget()
        forget(monkeypatch)


@pytest.mark.gpu
@hopper
def test_a_toy_is_captured(toys):
    x = on_gpu()
    pinned(x, scale=1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = pinned(x, scale=1.0)
    x["q"].fill_(3)
    graph.replay()
    torch.cuda.synchronize()
    assert (out == 3).all()


@pytest.mark.gpu
@hopper
def test_a_toy_takes_what_is_not_aligned(toys):
    x = on_gpu()
    room = torch.zeros(x["q"].numel() + 1, dtype=BF16, device="cuda")
    odd = room[1:].view(x["q"].shape).copy_(x["q"])
    out, _ = pinned(x | {"q": odd}, scale=1.0)
    assert torch.equal(out, x["q"])
    wide = torch.zeros(37, 3, 2, 128, dtype=BF16, device="cuda")
    wide[:, 1] = x["q"]
    out, _ = pinned(x | {"q": wide[:, 1]}, scale=1.0)
    assert torch.equal(out, x["q"])


@pytest.mark.gpu
@hopper
def test_a_toy_on_a_stream(toys):
    x = on_gpu()
    pinned(x, scale=1.0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x["q"].fill_(5)
        out, _ = pinned(x, scale=1.0)
    torch.cuda.current_stream().wait_stream(stream)
    assert (out == 5).all()


# The kernel on a GPU ----------------------------------------------------------------------------


def tokens_on_gpu(lengths, H, HO, K, V):
    """Inputs of a GDN call, bf16, slow gates; offsets last."""
    T, rng = sum(lengths), torch.Generator(device="cuda").manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, generator=rng, device="cuda")

    q, k = (torch.nn.functional.normalize(draw(T, H, K), dim=-1).to(BF16) for _ in range(2))
    g = -0.1 * torch.nn.functional.softplus(draw(T, HO))
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    return q, k, draw(T, HO, V).to(BF16), g, draw(T, HO).sigmoid(), offsets


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize(
    "lengths", [(1, 63, 64, 65, 0, 200, 0, 517), (4096,)], ids=["ragged", "one"]
)
@pytest.mark.parametrize(
    ("K", "V", "knobs"),
    [(128, 128, ""), (128, 128, "[rows=64]"), (128, 128, "[segment=0]"), (128, 128, "[segment=2]"),
     (128, 64, ""), (64, 64, "")],
)  # fmt: skip
def test_launches_repeat_each_other(lengths, K, V, knobs):
    """A tile that is given back too early shows in some launches, where loads are fast."""
    *x, offsets = tokens_on_gpu(lengths, 2, 4, K, V)
    first = None
    for _ in range(60):
        out, final = lagraph.ops.gated_delta_net(
            *x, cu_seqlens=offsets, output_final_state=True, plan_name=f"gdn_frost{knobs}"
        )
        first = first or (out, final)
        assert torch.equal(out, first[0])
        assert torch.equal(final, first[1])


CUT = Engine("frost[segment=1]", "cuda", (BF16, torch.float16), (64, 128))
# Every case of the two families, as the engine serves it.
SERVED_CASES = [
    fitted for case in CASES
    if case.family in ("gdn", "gdp") and not case.options.get("batch_invariant")
    and (fitted := CUT.fit(case)) is not None
]  # fmt: skip


@pytest.mark.gpu
@hopper
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("direction", ["forward", "summary", "summary_backward"])
@pytest.mark.parametrize("case", SERVED_CASES, ids=lambda case: case.id)
def test_cut_after_every_chunk(case, direction):
    test_engines.test_against_the_oracle(CUT, case, direction)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("family", ["gdn", "gdp"])
@pytest.mark.parametrize(("span", "less"), [(2, 1), (3, 1), (3, 2), (8, 4)])
def test_a_last_segment_but_one_that_is_shorter(monkeypatch, family, span, less):
    monkeypatch.setattr(launch, "choose", lambda *shape: schedule.Choice(False, span, less, 0.0))
    fake.forget()
    n = 2 if family == "gdp" else 1
    lengths = (517 // n, 0, 64, 130, 1, 63, 3)
    case = Case(family, "", lengths=lengths, H=1, n=n, K=128, V=128, dtype=BF16)
    try:
        test_engines.test_against_the_oracle(replace(CUT, name="frost"), case, "forward")
    finally:
        fake.forget()


@pytest.mark.gpu
@hopper
def test_a_cut_call_is_captured_and_replayed_with_other_offsets():
    *x, offsets = tokens_on_gpu((4000, 96), 2, 4, 128, 128)
    call = partial(lagraph.ops.gated_delta_net, *x, cu_seqlens=offsets, output_final_state=True,
                   plan_name="gdn_frost[segment=4]")  # fmt: skip
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, final = call()
    for ends in ((0, 4000, 4096), (0, 1, 2500), (0, 0, 4096)):
        offsets.copy_(torch.tensor(ends))
        graph.replay()
        want, last = call()
        assert torch.equal(out[: ends[-1]], want[: ends[-1]])
        assert torch.equal(final, last)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("sequences", [1, 4])
def test_operators_and_functions_choose_it(sequences):
    *x, offsets = tokens_on_gpu((192,) * sequences, 16, 32, 128, 128)
    call = partial(lagraph.ops.gated_delta_net, *x, cu_seqlens=offsets)
    want, _ = call(plan_name="gdn_frost")
    other, _ = call(plan_name="gdn_triton")
    assert not torch.equal(other, want), "bits tell the two apart"
    assert torch.equal(call()[0], want)
    out, _ = lagraph.ops.chunk_gdn(*(t.unflatten(0, (sequences, 192)) for t in x))
    assert torch.equal(out.flatten(0, 1), want)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_one_token_of_a_row_of_any_width(name):
    """A row of 392 bytes, whose stride no check sees where there is one token."""
    *x, _ = tokens_on_gpu((1,), 2, 2, 128, 128)
    offsets = torch.tensor([0, 1], device="cuda", dtype=torch.int32)
    want, _ = lagraph.ops.gated_delta_net(*x, cu_seqlens=offsets, plan_name="gdn_frost")
    at = "qkv".index(name)
    wide = torch.randn(5, 2 * 128 + 4, device="cuda").to(BF16)
    wide[2, :256] = x[at].flatten()
    x[at] = wide[2:3, :256].view(1, 2, 128)
    out, _ = lagraph.ops.gated_delta_net(*x, cu_seqlens=offsets, plan_name="gdn_frost")
    assert torch.equal(out, want)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("name", ["k", "v"])
def test_heads_that_are_one_tensor(name):
    """A stride of 0."""
    *x, offsets = tokens_on_gpu((200,), 4, 4, 128, 128)
    at = "qkv".index(name)
    x[at] = x[at][:, :1].expand(-1, 4, -1)
    out, _ = lagraph.ops.gated_delta_net(*x, cu_seqlens=offsets, plan_name="gdn_frost")
    x[at] = x[at].contiguous()
    want, _ = lagraph.ops.gated_delta_net(*x, cu_seqlens=offsets, plan_name="gdn_frost")
    assert torch.equal(out, want)
