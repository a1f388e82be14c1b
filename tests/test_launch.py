"""The Triton engine's bound launches: they hand over what Triton's own call would.

Without a GPU, all of Triton's host code runs but two things: nothing is compiled, and where a
launcher would call into C, what it was given is written down. So what the two ways hand over is
compared at the last line of Python, for every family and direction.
"""

from __future__ import annotations

import threading
from collections import namedtuple
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from call import call, gradients
from cases import BF16, F32, STEP, Case
from oracle import DIRECTIONS, FAMILIES
from table import to
from tolerance import check_bitwise

from lagraph import infer, registry
from lagraph.plan import problem_of

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("kernels are interpreted", allow_module_level=True)

from lagraph.engines.triton import backward, bound, conv, launch, recurrent, transform  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
DEVICE = 1009  # Triton keeps kernels by device: these are nobody else's
STREAM = 77
PLANS = {
    "forward": launch.ForwardPlan,
    "backward": backward.BackwardPlan,
    "summary": launch.SummaryPlan,
    "summary_backward": backward.SummaryBackwardPlan,
}
TRANSFORMED = {"safe_gate": True, "use_qk_l2norm": True, "use_beta_sigmoid": True}
families = pytest.mark.parametrize("family", FAMILIES)
directions = pytest.mark.parametrize("direction", DIRECTIONS)


class Utils:
    """What Triton asks of a driver's C module; `handed` holds what was launched."""

    def __init__(self):
        self.handed = []

    def launch(self, *args):
        self.handed.append(args)

    def load_binary(self, name, kernel, shared, device):
        return object(), kernel, 64, 0, 1024  # the kernel is its own handle

    def unload_module(self, module):
        pass

    def get_device_properties(self, device):
        return {"max_shared_mem": 1 << 30}

    def build_signature_metadata(self, signature):
        return tuple(signature)


class Driver:
    """A driver for sm90 with no device."""

    def __init__(self, launcher):
        self.utils, self.launcher_cls = Utils(), launcher

    def get_current_target(self):
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return DEVICE

    def get_current_stream(self, device):
        return STREAM


class Nothing(triton.compiler.CompiledKernel):
    """A compiled kernel without code; its handle tells it from all others."""

    def __init__(self):
        pass

    def __del__(self):
        pass


def compile_nothing(source, target=None, options=None, **rest):
    fields = {
        "num_warps": options["num_warps"], "num_ctas": 1, "shared": 0, "target": target,
        "warp_size": 32, "global_scratch_size": 0, "global_scratch_align": 1,
        "profile_scratch_size": 0, "profile_scratch_align": 1, "launch_cooperative_grid": False,
        "launch_pdl": False, "tensordesc_meta": None, "instrumentation_mode": "",
    }  # fmt: skip
    made = Nothing()
    made.metadata = namedtuple("Metadata", fields)(**fields)
    made.packed_metadata = options["num_warps"], 1, 0
    made.src, made.name, made.hash = source, source.fn.__name__, ""
    made.metadata_group, made.kernel = {}, id(made)
    made.module = made._module_pid = made.function = made._run = None
    return made


@pytest.fixture
def machine(monkeypatch):
    """What launches hand over, on the CPU: a list of them; and bound launches are possible."""
    from triton.backends.nvidia import driver as nvidia

    driver = Driver(nvidia.CudaLauncher)
    if hasattr(nvidia, "compile_module_from_src"):  # one C module a kernel
        monkeypatch.setattr(
            nvidia, "compile_module_from_src",
            lambda **_: SimpleNamespace(launch=driver.utils.launch),
        )  # fmt: skip
        monkeypatch.setattr(nvidia, "library_dirs", list)
    else:
        monkeypatch.setattr(nvidia, "PyKernelArg", lambda nested_tuple, type: type)
        for name in ("ARG_CONSTEXPR", "ARG_KERNEL"):
            monkeypatch.setattr(nvidia, name, name)
    monkeypatch.setattr("triton.compiler.compile", compile_nothing)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version not in bound.FLAT + bound.PACKED:
        pytest.skip(f"how Triton {triton.__version__} launches is not known")
    monkeypatch.setattr(bound, "FORM", "flat" if version in bound.FLAT else "packed")
    monkeypatch.setattr(bound, "WHY", "")
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for module in (launch, bound):
        monkeypatch.setattr(module, "stream_of", lambda x: STREAM)
    yield driver.utils.handed
    for fn in kernels():
        fn.device_caches.pop(DEVICE, None)


def kernels():
    """Every kernel of the engine."""
    from importlib import import_module
    from pkgutil import iter_modules

    from lagraph.engines.triton import kernels as package

    for info in iter_modules(package.__path__):
        module = import_module(f"{package.__name__}.{info.name}")
        for value in vars(module).values():
            if isinstance(value, triton.runtime.jit.JITFunction):
                yield value


@pytest.fixture
def ordinary(monkeypatch):
    """Names of the kernels that were launched by Triton's own call."""
    seen, run = [], triton.runtime.jit.JITFunction.run

    def watched(self, *args, **kwargs):
        seen.append(self.__name__)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", watched)
    return seen


def case_of(family, lengths=(70, 0, 33), **fields):
    given = {
        "H": 2, "K": 32, "V": 16, "dtype": BF16, "n": 2 if family == "gdp" else 1,
        "params": ("d", "z", "dt_bias") if family == "mamba2" else ("a_log", "dt_bias"),
        "options": {} if family == "mamba2" else TRANSFORMED,
    }  # fmt: skip
    return Case(family, "", lengths=lengths, **(given | fields))


def tensors_of(case, direction, change=None):
    """Problem, inputs and outputs of a case."""
    node = registry.family(case.family).node(direction)
    x = case.draw()
    if change is not None:
        change(x)
    options = case.call_options() | {"output_transition": True}
    names = {attr.name for attr in node.attrs}
    options = node.options({name: value for name, value in options.items() if name in names})
    ins = [x.get(name) for name in node.input_names]
    metas = [None if t is None else infer.Meta(t.shape, t.dtype) for t in ins]
    found = infer.bind(node, metas, options)
    problem = replace(problem_of(node, found, options, metas), device="cuda", arch=90)
    outs = [
        torch.zeros(found.outputs[name][0], dtype=found.outputs[name][1])
        if name in found.outputs
        else None
        for name in node.output_names
    ]
    return problem, ins, outs


def plan_of(case, direction, **knobs):
    problem, ins, outs = tensors_of(case, direction)
    return PLANS[direction](problem, knobs), ins, outs


def plainly(handed):
    """What reaches the device of a launch: pointers as numbers, absent arguments as zeros; neither
    hooks nor the names of what was launched."""

    def value(x):
        return x.data_ptr() if isinstance(x, torch.Tensor) else 0 if x is None else x

    if bound.FORM == "packed":
        *first, _, _, _, scratch, profile, kinds, types, args = handed
        return (*first, scratch, profile, kinds, types, *map(value, args))
    *first, scratch, profile, packed, _, _, _ = handed[:13]
    return (*first, scratch, profile, packed, *map(value, handed[13:]))


def launches(plan, machine, ins, outs, workspace=None):
    """What one run hands over."""
    machine.clear()
    if workspace is None:
        size = plan.workspace_size(sizes_of(plan, ins)[0], sizes_of(plan, ins)[1])
        workspace = torch.zeros(size, dtype=torch.uint8)
    plan.run(ins, outs, workspace)
    return [plainly(handed) for handed in machine]


def sizes_of(plan, ins):
    x = dict(zip(plan.problem.inputs, ins, strict=True))
    return x["g"].shape[0], x["cu_seqlens"].shape[0] - 1


def compare(plan, machine, ordinary, ins, outs, monkeypatch):
    """A second bound run hands over what an ordinary one does, and is no ordinary one."""
    ordinary.clear()
    workspace = torch.zeros(plan.workspace_size(*sizes_of(plan, ins)), dtype=torch.uint8)
    monkeypatch.setattr(bound, "ENABLED", False)
    want = launches(plan, machine, ins, outs, workspace)
    assert want
    assert len(ordinary) == len(want)
    monkeypatch.setattr(bound, "ENABLED", True)
    assert launches(plan, machine, ins, outs, workspace) == want
    ordinary.clear()
    assert launches(plan, machine, ins, outs, workspace) == want
    assert not ordinary


# Plans --------------------------------------------------------------------------------------


@directions
@families
def test_the_same_is_handed_over(family, direction, machine, ordinary, monkeypatch):
    for case in (
        case_of(family),
        case_of(family, H=1, HV=2, dtype=F32, params=(), options={}, gate="slow", state=None),
        case_of(
            family,
            lengths=(300,),
            H=1,
            K=16,
            options=case_of(family).options | {"checkpoint_every_n_tokens": STEP[family]},
        ),
        case_of(family, lengths=()),
    ):
        plan, ins, outs = plan_of(case, direction)
        if case.lengths:
            compare(plan, machine, ordinary, ins, outs, monkeypatch)
        else:
            assert launches(plan, machine, ins, outs) == []


def test_segments(machine, ordinary, monkeypatch):
    plan, ins, outs = plan_of(case_of("gdn", (300,)), "forward", chunk=16, segment=4)
    compare(plan, machine, ordinary, ins, outs, monkeypatch)
    assert len(machine) == 4


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_lengths_compile_nothing_and_bind_nothing(direction, machine, ordinary):
    """Other T and N are other numbers of the same launches."""
    plan, ins, outs = plan_of(case_of("gdn"), direction)
    launches(plan, machine, ins, outs)
    found = {key: dict(kernel.found) for key, kernel in plan.kernels.items()}
    ordinary.clear()
    for lengths in ((1,), (64, 64), (15, 16, 17, 1), (127,), (0, 0, 5)):
        case = case_of("gdn", lengths)
        _, ins, outs = plan_of(case, direction)
        for handed in launches(plan, machine, ins, outs)[:2]:
            assert sum(lengths) in handed
            assert len(lengths) in handed
    assert not ordinary
    assert found == {key: kernel.found for key, kernel in plan.kernels.items()}
    assert len(plan.layouts) == 1


def test_strides_that_depend_on_T(machine, ordinary, monkeypatch):
    """Head-major queries: a layout for each T, and a kernel for each class of stride."""
    made = set()
    plan = None
    for T in (64, 65, 80, 33, 128, 129):
        case = case_of("gdn", (T,), H=2, K=16)  # strides of 16 T are multiples of 16

        def head_major(x):
            x["q"] = x["q"].transpose(0, 1).contiguous().transpose(0, 1)
            g = torch.empty(2, x["g"].shape[0]).copy_(x["g"].t())
            x["g"] = g.t()

        problem, ins, outs = tensors_of(case, "forward", head_major)
        plan = plan or launch.ForwardPlan(problem, {})
        before = len(ordinary)
        got = launches(plan, machine, ins, outs)
        q = ins[0]
        assert all(any(n == T * 16 for n in handed) for handed in got if q.data_ptr() in handed)
        made.add((T, len(ordinary) > before))
    # The gates' stride is T: 65, 33 and 129 are alike, and so are 64, 80 and 128.
    assert made == {(64, True), (65, True), (80, False), (33, False), (128, False), (129, False)}
    assert len(plan.layouts) == 6
    monkeypatch.setattr(launch, "LAYOUTS", 6)
    _, ins, outs = tensors_of(case_of("gdn", (70,), K=16), "forward")
    launches(plan, machine, ins, outs)
    assert len(plan.layouts) == 1


def test_pointers_off_16_bytes(machine, ordinary, monkeypatch):
    """Triton compiles another kernel where a pointer is not aligned, and so it is launched."""
    plan, ins, outs = plan_of(case_of("gdn"), "forward")
    aligned = launches(plan, machine, ins, outs)
    at = plan.names.index("cu_seqlens")
    other = torch.zeros(len(ins[at]) + 1, dtype=ins[at].dtype)[1:].copy_(ins[at])
    assert other.data_ptr() % 16
    ins[at] = other
    compare(plan, machine, ordinary, ins, outs, monkeypatch)
    function = 4
    off = launches(plan, machine, ins, outs)
    assert {a[function] for a in aligned}.isdisjoint({a[function] for a in off})
    work = torch.zeros(plan.workspace_size(*sizes_of(plan, ins)) + 8, dtype=torch.uint8)[8:]
    assert not {a[function] for a in launches(plan, machine, ins, outs, work)} & {
        a[function] for a in (*aligned, *off)
    }


def test_parameters_are_read_as_dense_and_signs_are_resolved(machine):
    plan, ins, outs = plan_of(case_of("gdn"), "forward")
    at = {name: place for place, name in enumerate(plan.names)}
    wide = torch.zeros(2, 2)
    wide[:, 0] = ins[at["a_log"]]
    ins[at["a_log"]] = wide[:, 0]
    ins[at["v"]] = torch._neg_view(ins[at["v"]])
    for _ in range(3):
        for handed in launches(plan, machine, ins, outs):
            assert wide.data_ptr() not in handed
            assert ins[at["v"]].data_ptr() not in handed


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_a_launch_hook_sees_every_launch(hook, machine, ordinary):
    """Profilers set them. In C they are called beside the launch: here they are handed over."""
    plan, ins, outs = plan_of(case_of("gdn"), "forward")
    for _ in range(2):
        launches(plan, machine, ins, outs)
    ordinary.clear()
    chain = getattr(triton.knobs.runtime, hook)
    chain.add(print)
    try:
        launches(plan, machine, ins, outs)
        assert ordinary == ["factor_head_kernel", "scan_kernel"]
        assert all(chain in handed for handed in machine)
    finally:
        chain.remove(print)
    ordinary.clear()
    launches(plan, machine, ins, outs)
    assert not ordinary


def test_a_hook_before_a_run_is_called(machine, ordinary):
    """`JITFunction.add_pre_run_hook`."""
    from lagraph.engines.triton.kernels.scan import scan_kernel

    plan, ins, outs = plan_of(case_of("gdn"), "forward")
    for _ in range(2):
        launches(plan, machine, ins, outs)
    ordinary.clear()
    seen = []
    scan_kernel.add_pre_run_hook(lambda *args, **kwargs: seen.append(kwargs["STAGE"]))
    try:
        launches(plan, machine, ins, outs)
    finally:
        scan_kernel.pre_run_hooks.clear()
    assert seen == ["whole"]
    assert ordinary == ["scan_kernel"]


@pytest.mark.parametrize("what", ["WHY", "ENABLED", "debug", "LIMIT"])
def test_the_ordinary_way(what, machine, ordinary, monkeypatch):
    """Of an unknown version, switched off, in a debugging mode, and where sizes need 64 bits."""
    plan, ins, outs = plan_of(case_of("gdn"), "forward")
    want = [launches(plan, machine, ins, outs) for _ in range(2)][1]
    ordinary.clear()
    if what == "debug":
        monkeypatch.setattr(triton.knobs.runtime, "debug", True)
    elif what == "LIMIT":
        monkeypatch.setattr(launch, "LIMIT", 103)
    else:
        monkeypatch.setattr(bound, what, {"WHY": "unknown", "ENABLED": False}[what])
    got = launches(plan, machine, ins, outs)
    assert len(ordinary) == len(got) == len(want)


def test_a_launcher_that_allocates_is_left_alone(machine, ordinary, monkeypatch):
    """Where a kernel wants scratch of its own, Triton's call provides it."""
    plan, ins, outs = plan_of(case_of("gdn"), "forward")

    def with_scratch(*args, **kwargs):
        made = compile_nothing(*args, **kwargs)
        made.metadata = made.metadata._replace(profile_scratch_size=8)
        return made

    monkeypatch.setattr("triton.compiler.compile", with_scratch)
    from triton.runtime import _allocation

    class Allocator:
        def get(self):
            return lambda size, align, stream: torch.zeros(size, dtype=torch.uint8)

    monkeypatch.setattr(_allocation, "_profile_allocator", Allocator())
    for _ in range(3):
        ordinary.clear()
        got = launches(plan, machine, ins, outs)
        assert ordinary == ["factor_head_kernel", "scan_kernel"]
        assert len(got) == 2


def test_threads_share_a_plan(machine, monkeypatch):
    """First runs at once: each thread's launches have its own pointers, and all its launches."""
    plan, ins, outs = plan_of(case_of("kda"), "backward")
    want = len(launches(plan, machine, ins, outs))
    fresh = PLANS["backward"](plan.problem, {})
    machine.clear()
    calls = [plan_of(case_of("kda"), "backward")[1:] for _ in range(4)]
    gate = threading.Barrier(len(calls))

    def work(ins, outs):
        gate.wait()
        for _ in range(20):
            fresh.run(ins, outs)

    threads = [threading.Thread(target=work, args=pair) for pair in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    at = fresh.names.index("cu_seqlens")
    for ins, _ in calls:
        mine = [h for h in machine if ins[at].data_ptr() in plainly(h)]
        others = [other[at].data_ptr() for other, _ in calls if other is not ins]
        assert not any(pointer in plainly(h) for h in mine for pointer in others)
        assert len(mine) > 0
    assert len(machine) == 4 * 20 * want


@directions
@families
def test_scratch_does_not_overlap(family, direction):
    """Arrays of the workspace are apart, aligned and inside it, at any T and N."""
    plan, _, _ = plan_of(case_of(family), direction, segment=4, chunk=16)
    for T, N in ((0, 1), (1, 1), (70, 3), (1000, 7), (4097, 1)):
        size = plan.workspace_size(T, N)
        base = torch.zeros(size, dtype=torch.uint8)
        views = plan._tensors([None] * len(plan.names), base, plan.extent(T, N))
        spans = sorted(
            (x.data_ptr() - base.data_ptr(), x.numel() * x.element_size(), name)
            for name, x in views.items()
            if x is not None and x.numel()
        )
        end = 0
        for start, length, name in spans:
            assert start >= end, name
            assert start % 256 == 0, name
            end = start + length
        assert end <= size
        assert spans


# Launches outside plans -----------------------------------------------------------------------


def draw(*shape, dtype=F32):
    return torch.randn(shape).to(dtype)


def op_calls():
    """Name and call of everything that is launched outside plans."""
    n, heads, size, width = 3, 2, 16, 4
    traits = {family: registry.family(family).traits for family in FAMILIES}
    pool = draw(5, heads, 16, size)
    index = torch.arange(n, dtype=torch.int32)
    token = draw(1, n, heads)
    x, weight = draw(2, 40, 64, dtype=BF16), draw(64, width)
    history = draw(2, width - 1, 64, dtype=BF16)
    q, v = draw(1, 20, heads, size, dtype=BF16), draw(1, 20, heads, 16, dtype=BF16)
    g, cu = draw(1, 20, heads), torch.tensor([0, 5, 20], dtype=torch.int32)
    raw, row = draw(2, 9, heads, size), draw(heads)
    yield "decode", lambda: recurrent.decode(
        traits["gdn"], draw(n, 3 * heads * size, dtype=BF16), token, token, pool, index,
        torch.zeros(1, n, heads, 16, dtype=BF16), a_log=row, dt_bias=row, heads=heads,
    )  # fmt: skip
    yield (
        "scan",
        lambda: recurrent.recurrent_scan(
            traits["gdn"], q, q, v, g, g, cu, final_state=torch.zeros(2, heads, 16, size)
        ),
    )
    yield (
        "mamba2",
        lambda: recurrent.recurrent_scan(
            traits["mamba2"], q, q, v, g, None, cu, a=row, d=row, dt_bias=row, dt_max=1.0
        ),
    )
    yield "conv", lambda: conv.forward(x, weight, None, history, history, conv.SILU)
    yield (
        "conv update",
        lambda: conv.advance(
            x[:, :1], weight, history, torch.empty_like(x[:, :1]), None, None, None, None
        ),
    )
    yield "conv backward", lambda: conv.backward(x, x, weight, None, history, None, conv.SILU)
    yield "gate", lambda: transform.forward(raw, row, draw(heads, size), -5.0)
    yield "gate backward", lambda: transform.backward(raw, row, draw(heads, size), raw, None)


OPS = dict(op_calls())


@pytest.mark.parametrize("name", OPS)
def test_ops_hand_over_the_same(name, machine, ordinary, monkeypatch):
    """All but the addresses of what they allocate."""
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: DEVICE)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICE)

    def handed():
        machine.clear()
        OPS[name]()
        made = [plainly(one) for one in machine]
        return [tuple(x if not isinstance(x, int) or x < 1 << 20 else "a" for x in one)
                for one in made], [one[4] for one in made]  # fmt: skip

    monkeypatch.setattr(bound, "ENABLED", False)
    want = handed()
    assert len(ordinary) == len(want[0]) > 0
    monkeypatch.setattr(bound, "ENABLED", True)
    for launcher in launchers():
        launcher.sites.clear()
        launcher.kernels.clear()
    assert handed() == want
    ordinary.clear()
    assert handed() == want
    assert not ordinary


def launchers():
    for module in (conv, recurrent, transform):
        yield from (value for value in vars(module).values() if isinstance(value, bound.Launcher))


def test_ops_know_kernels_by_class_of_strides(machine, ordinary, monkeypatch):
    """Rows of other lengths are launched directly, as long as their strides are alike."""
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: DEVICE)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICE)
    weight = draw(64, 4)
    monkeypatch.setattr(bound, "SITES", 4)
    for T in range(100, 120):
        conv.forward(draw(2, T, 64, dtype=BF16), weight, None, None, None, None)
        assert len(conv._FORWARD.sites) <= 4
    assert ordinary == ["conv_kernel"]


def test_a_key_tells_what_triton_specializes_on():
    kernel = bound.Kernel(None, {})
    keys = [kernel.site((), (value,)).key for value in (1, 16, 32, 3, 5, 1 << 31, -(1 << 33), 2.0)]
    assert keys[1] == keys[2]
    assert keys[3] == keys[4]
    assert len(set(keys)) == 6


def test_why():
    """A reason is given wherever bound launches are not served."""
    if bound.FORM:
        assert not bound.WHY
    else:
        assert bound.WHY


# On a GPU -------------------------------------------------------------------------------------


def on_gpu(family, direction, x, **options):
    kind = "_summary" if "summary" in direction else ""
    return call(family, x, direction, f"{family}{kind}_triton", **options)


@pytest.fixture
def served():
    assert bound.FORM, bound.WHY


@pytest.mark.gpu
@directions
@families
def test_bitwise(family, direction, served, monkeypatch):
    """Bound launches compute what ordinary ones do, to the bit, and are taken."""
    case = case_of(family, (150, 0, 65), K=64, V=64)
    x, options = to("cuda", case.draw()), case.call_options()
    monkeypatch.setattr(bound, "ENABLED", False)
    want = on_gpu(family, direction, x, **options)
    monkeypatch.setattr(bound, "ENABLED", True)
    on_gpu(family, direction, x, **options)
    seen, run = [], triton.runtime.jit.JITFunction.run
    monkeypatch.setattr(
        triton.runtime.jit.JITFunction, "run",
        lambda self, *args, **kwargs: (seen.append(self.__name__), run(self, *args, **kwargs))[1],
    )  # fmt: skip
    got = on_gpu(family, direction, x, **options)
    check_bitwise(got, want)
    assert not seen, "launched by Triton's own call"


@pytest.mark.gpu
@families
def test_other_lengths_are_launched_directly(family, served, monkeypatch):
    options = case_of(family).call_options()
    plan = f"{family}_triton"
    fields = {"K": 64, "V": 64}
    gradients(family, to("cuda", case_of(family, (70, 33), **fields).draw()), plan, **options)
    xs = [to("cuda", case_of(family, lengths, **fields).draw())
          for lengths in ((70, 34), (1, 100, 3), (15,))]  # fmt: skip
    seen, run = [], triton.runtime.jit.JITFunction.run
    monkeypatch.setattr(
        triton.runtime.jit.JITFunction, "run",
        lambda self, *args, **kwargs: (seen.append(self.__name__), run(self, *args, **kwargs))[1],
    )  # fmt: skip
    for x in xs:
        gradients(family, x, plan, **options)
    assert not seen


@pytest.mark.gpu
@families
def test_captured(family, served):
    """Bound launches are captured: a graph replays them on other contents."""
    case = case_of(family, (150, 65), K=64, V=64)
    x, options = to("cuda", case.draw()), case.call_options()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(2):
            on_gpu(family, "forward", x, **options)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        held = on_gpu(family, "forward", x, **options)
    x["v"].mul_(0.5)
    graph.replay()
    with torch.no_grad():
        check_bitwise(held, on_gpu(family, "forward", x, **options))


@pytest.mark.gpu
def test_threads_on_streams(served):
    """Each thread's launches go to its own stream."""
    case = case_of("gdn", (400, 65), K=64, V=64)
    x, options = to("cuda", case.draw()), case.call_options()
    with torch.no_grad():
        want = on_gpu("gdn", "forward", x, **options)
    torch.cuda.synchronize()
    wrong = []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            for _ in range(50):
                got = on_gpu("gdn", "forward", x, **options)
            torch.cuda.current_stream().synchronize()
            if not all(torch.equal(got[name], want[name]) for name in want):
                wrong.append(threading.get_ident())

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
