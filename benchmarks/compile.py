"""Compiles an engine's kernels for GPUs that need not be here: registers, spills, shared memory.

    python benchmarks/compile.py [--arch 80 90 100 120] [--only gdn,kda] [--quick] [--sass]
    python benchmarks/compile.py --engine frost [--only forward]

Triton: every plan is made and run as usual, but each launch only compiles, for the architecture
named. Frost: the signatures that its kernel modules list in `SIGNATURES`, for SM90. One line a
kernel; the exit status is 1 where one spills more than `--spills` bytes or needs more shared memory
than the architecture has. Nothing runs, so this works without a GPU; it replaces Triton's driver,
and names an architecture to CuTe before that is imported, so it wants a process of its own.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from lagraph import infer, registry
from lagraph.plan import problem_of

# Shared memory that one block can use, in bytes.
SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


class Target:
    """The part of a Triton driver that compiling asks for."""

    def __init__(self, arch: int) -> None:
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.target.arch  # Triton keeps kernels by device

    def get_current_stream(self, device=None):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


@dataclass(frozen=True)
class Sample:
    """One plan to compile: a family, its sizes and dtype, and options."""

    family: str
    H: int = 2
    HV: int = 2
    K: int = 128
    V: int = 128
    n: int = 1
    dtype: torch.dtype = BF16
    direction: str = "forward"
    state: bool = True
    options: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        extra = "".join(f" {name}" for name, value in self.options if value)
        kind = "" if self.direction == "forward" else f" {self.direction}"
        return f"{self.family}{kind} {self.H}/{self.HV} {self.K}x{self.V} {dtype}{extra}"


NORM = (("use_qk_l2norm", True), ("use_beta_sigmoid", True))
QUICK = (
    Sample("gdn", 2, 8),
    Sample("kda"),
    Sample("gdn2", options=(("use_qk_l2norm", True), ("beta_guard", True))),
    Sample("gdp", n=2),
    Sample("mamba2", 1, 8, V=64),
)
BACK = tuple(replace(s, direction="backward") for s in QUICK)
SAMPLES = (
    *QUICK,
    *BACK,
    *(
        replace(s, dtype=dtype, K=size, V=size)
        for s in QUICK
        for dtype, size in ((F16, 128), (F32, 128), (BF16, 256), (F32, 256), (BF16, 64), (BF16, 16))
    ),
    *(replace(s, dtype=F32) for s in BACK),
    *(replace(s, direction="summary", state=False) for s in QUICK),
    *(replace(s, direction="summary_backward", state=False) for s in QUICK),
    *(replace(s, options=NORM) for s in QUICK[:2]),
)


def inputs_of(sample: Sample, T: int = 256) -> tuple[object, dict[str, torch.Tensor], object]:
    """The node of a sample, ordinary inputs by port name, and its options."""
    family = registry.family(sample.family)
    node = family.node(sample.direction)
    options = dict(sample.options)
    if any(a.name == "num_householder" for a in node.attrs):
        options["num_householder"] = sample.n
    if any(a.name == "output_final_state" for a in node.attrs):
        options["output_final_state"] = True
    H, HV, K, V, n = sample.H, sample.HV, sample.K, sample.V, sample.n
    HO = max(H, HV)
    key = family.traits.gate == "key"
    shapes = {
        "q": (T, H, K), "k": (T * n, H, K), "v": (T * n, HV, V),
        "g": (T, HO, K) if key else (T, HO), "w": (T, HO, V), "a": (HO,), "d": (HO,),
        "beta": (T * n, HO, K) if family.traits.erase == "key" else (T * n, HO),
        "cu_seqlens": (3,), "dO": (T, HO, V), "initial_state": (2, HO, V, K),
        "d_final_state": (2, HO, V, K),
    }  # fmt: skip
    x = {}
    for port in node.inputs:
        if port.name not in shapes or (port.name == "initial_state" and not sample.state):
            continue
        dtype = {"io": sample.dtype, "index": torch.int32}.get(port.dtype, F32)
        x[port.name] = torch.zeros(shapes[port.name], dtype=dtype)
    return node, x, node.options({k: v for k, v in options.items() if k in _names(node)})


def _names(node) -> set[str]:
    return {attr.name for attr in node.attrs}


def compiled(sample: Sample, arch: int, knobs: dict[str, int]):
    """(kernel name, compiled kernel) of every launch of a sample's plan."""
    driver.set_active(Target(arch))
    node, x, options = inputs_of(sample)
    metas = [
        infer.Meta(x[name].shape, x[name].dtype) if name in x else None for name in node.input_names
    ]
    bound = infer.bind(node, metas, options)
    problem = problem_of(node, bound, options, metas)
    problem = replace(problem, device="cuda", arch=arch)
    found = []

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = real(self, *args, grid=grid, warmup=True, **kwargs)
        found.append((self.fn.__name__, kernel, kwargs.get("num_warps", 4)))

    real = JITFunction.run
    JITFunction.run = compile_only
    try:
        engine = registry.load("lagraph.engines.triton.engine:ENGINE")
        outs = [
            torch.empty(bound.outputs[name][0], dtype=bound.outputs[name][1])
            if name in bound.outputs
            else None
            for name in node.output_names
        ]
        engine.plan(problem, knobs).run([x.get(name) for name in node.input_names], outs)
    finally:
        JITFunction.run = real
    return found


def resources(kernel) -> dict[str, int]:
    """Registers and spilled bytes a thread, from the assembler's own report."""
    folder = Path(triton.__file__).parent / "backends/nvidia/bin"
    binaries = [path for path in (folder / "ptxas", folder / "ptxas-blackwell") if path.exists()]
    target = re.search(r"\.target ([^\s,]+)", kernel.asm["ptx"])[1]
    with tempfile.TemporaryDirectory() as work:
        source = Path(work, "kernel.ptx")
        source.write_text(kernel.asm["ptx"])
        for binary in binaries:  # the first may be too old for the PTX
            done = subprocess.run(
                [binary, "-v", f"--gpu-name={target}", str(source), "-o", str(Path(work, "o"))],
                capture_output=True, text=True,
            )  # fmt: skip
            if done.returncode == 0:
                break
        else:
            raise RuntimeError(f"{target}: {done.stdout}{done.stderr}")
    report = done.stderr
    number = {
        "registers": r"Used (\d+) registers",
        "spilled": r"(\d+) bytes spill stores",
        "reloaded": r"(\d+) bytes spill loads",
    }
    found = {name: re.search(pattern, report) for name, pattern in number.items()}
    return {name: int(match[1]) if match else 0 for name, match in found.items()}


def sass(kernel) -> tuple[int, int]:
    """Instructions in the machine code, and barriers among them."""
    binary = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run([binary, "-c", file.name], capture_output=True, text=True).stdout
    lines = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", text, re.M)
    return len(lines), sum("BAR." in line for line in lines)


# The frost engine -----------------------------------------------------------------------------

# The launch's configuration in the host code: threads (fields 1.0 to 1.2) and shared bytes (2).
CONFIG = "struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>"


def signatures(module: str) -> list:
    """What the modules of frost's kernels list, or a module that is named."""
    if module:
        name, _, attribute = module.partition(":")
        return list(getattr(importlib.import_module(name), attribute or "SIGNATURES"))
    kernels = importlib.import_module("lagraph.engines.frost.kernels")
    found = []
    for item in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
        if not item.ispkg:
            found += getattr(importlib.import_module(item.name), "SIGNATURES", ())
    return found


def assembled(signature, arch: int) -> list[dict[str, int]]:
    """The resources of every kernel that a signature launches, by the assembler and the host code.

    Raises where the assembler said nothing: a report that is not there must not pass.
    """
    from lagraph.engines.frost.compile import options

    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        function = signature.build(f"{options(arch)} remarks{{ptx}}")
    report, code = said.getvalue(), str(function.ir_module)
    numbers = {
        "registers": r"Used (\d+) registers",
        "spilled": r"(\d+) bytes spill stores",
        "reloaded": r"(\d+) bytes spill loads",
    }
    columns = {name: list(map(int, re.findall(text, report))) for name, text in numbers.items()}
    columns["shared"], threads = _stored(code, "0, 2"), [_stored(code, f"0, 1, {i}") for i in "012"]
    columns["threads"] = [x * y * z for x, y, z in zip(*threads)]
    if not columns["registers"] or len({len(column) for column in columns.values()}) != 1:
        raise RuntimeError(f"{signature}: no report of the assembler for every launch:\n{report}")
    return [dict(zip(columns, row)) for row in zip(*columns.values())]


def _stored(code: str, field: str) -> list[int]:
    """What is stored to a field of every launch's configuration; a run-time value counts as 0."""
    place = rf"(%\d+) = llvm\.getelementptr %\d+\[{field}\][^\n]*{re.escape(CONFIG)}\n\s*"
    found = []
    for store in re.finditer(place + r"llvm\.store (%\w+), \1 :", code):
        # Of the definitions of that name, the one before: other functions have theirs.
        at = code.rfind(f"{store[2]} = ", 0, store.start())
        constant = re.match(r"%\w+ = llvm\.mlir\.constant\((\d+) :", code[at:])
        found.append(int(constant[1]) if constant else 0)
    return found


def frost(args: argparse.Namespace, words: list[str]) -> int:
    """One line a kernel of the frost engine; how many are over."""
    from importlib.metadata import version

    # Before CuTe is imported: it would take a machine without a GPU for another architecture.
    os.environ["CUTE_DSL_ARCH"] = f"sm_{args.arch[0]}a"
    print(f"CuTe DSL {version('nvidia-cutlass-dsl')}")
    bad = 0
    for signature in signatures(args.signatures):
        if words and not any(word in signature.name for word in words):
            continue
        start = time.perf_counter()
        kernels = assembled(signature, args.arch[0])
        took = time.perf_counter() - start
        for use in kernels:
            allowed = signature.spills if args.spills is None else args.spills
            over = use["spilled"] > allowed or use["shared"] > SHARED[args.arch[0]]
            bad += over
            print(
                f"sm_{args.arch[0]} {signature.name:60s} {use['threads']:4d} threads "
                f"{use['registers']:4d} registers {use['spilled']:5d} B spilled "
                f"{use['shared'] / 1024:6.1f} KB shared {took:5.1f} s{'  OVER' if over else ''}",
                flush=True,
            )
    return bad


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("triton", "frost"), default="triton")
    parser.add_argument("--arch", type=int, nargs="+", help="80 90 100 120; frost: 90")
    parser.add_argument("--only", default="", help="families or words of a sample, with commas")
    parser.add_argument("--quick", action="store_true", help="one sample a family")
    parser.add_argument("--sass", action="store_true", help="count instructions and barriers")
    parser.add_argument(
        "--spills", type=int, help="spilled bytes let pass: 512, or what a kernel says"
    )
    parser.add_argument("--knobs", default="", help="Triton: knob=value with commas")
    parser.add_argument("--signatures", default="", help="frost: another module[:tuple] of them")
    args = parser.parse_args(argv)
    is_frost = args.engine == "frost"
    args.arch = args.arch or ([90] if is_frost else [80, 90, 100, 120])
    if args.spills is None and not is_frost:
        args.spills = 512
    knobs = dict(part.split("=") for part in args.knobs.split(",") if part)
    knobs = {name: int(value) for name, value in knobs.items()}
    words = [word for word in args.only.split(",") if word]
    if is_frost:
        return int(frost(args, words) > 0)
    bad = 0
    print(f"Triton {triton.__version__}")
    for arch in args.arch:
        for sample in (*QUICK, *BACK[:2]) if args.quick else SAMPLES:
            if words and not any(word in str(sample) for word in words):
                continue
            for name, kernel, warps in compiled(sample, arch, knobs):
                use = resources(kernel)
                shared = kernel.metadata.shared
                over = use["spilled"] > args.spills or shared > SHARED.get(arch, 101376)
                bad += over
                extra = ""
                if args.sass:
                    extra = "  {:6d} instructions {:4d} barriers".format(*sass(kernel))
                print(
                    f"sm_{arch} {sample!s:44s} {name:20s} {warps:2d} warps "
                    f"{use['registers']:4d} registers {use['spilled']:5d} B spilled "
                    f"{shared / 1024:6.1f} KB shared{extra}{'  OVER' if over else ''}",
                    flush=True,
                )
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
