"""Launches whose arguments are bound beforehand.

Triton's own call, `kernel[grid](...)`, binds its arguments, derives from them what to specialize
on, makes a key and looks the compiled kernel up: 40 to 60 us of the host at every launch. Here that
happens once for each kind of arguments. A `Site` is a launch of which all is fixed but pointers and
a few sizes; from the second time on it hands these to the compiled kernel's launcher directly.

What is compiled is always Triton's own choice: a site's first launch is the ordinary call, which
returns the kernel. It may be reused wherever Triton would choose the same one: where dtypes, absent
arguments, the alignment of pointers and the class of every fixed number (one, a multiple of 16,
wider than 32 bits) agree. A site's key holds these. T, N and other sizes that change from call to
call are in no key: kernels name them in `do_not_specialize`.

The direct way relies on how Triton's launchers are called, which is no public interface. Where the
installed version is not one of those known here, in the interpreter, while a launch hook is set or
a debugging mode is on, every launch is the ordinary call: slower, and the same.
"""

from __future__ import annotations

from functools import reduce
from inspect import signature
from operator import or_
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["LIMIT", "Bound", "Kernel", "Launcher", "Site", "direct", "loose", "stream_of"]

# False: every launch is the ordinary call. For comparison.
ENABLED = True
# How launchers are called, by version: with the kernel's arguments at the end, or in a tuple.
FLAT, PACKED = ((3, 6),), ((3, 7), (3, 8), (3, 9))
CALL = ("gridX", "gridY", "gridZ", "stream", "function")
# A size that needs more bits is another type of argument.
LIMIT = 1 << 31
# The most sites kept by exact strides; some callers' strides depend on T.
SITES = 512


def _form() -> tuple[str, str]:
    """How the installed Triton's launchers are called, and why that is not known."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    form = "flat" if version in FLAT else "packed" if version in PACKED else ""
    if not form:
        return "", f"Triton {triton.__version__} is not one whose launchers are known"
    if knobs.runtime.interpret:
        return "", "kernels are interpreted"
    try:
        from triton.backends.nvidia.driver import CudaLauncher

        found = tuple(signature(CudaLauncher.__call__).parameters)[1:6]
        if found != CALL:
            return "", f"expected launchers to take {CALL}, got {found}"
        _quiet()
        torch._C._cuda_getCurrentRawStream  # noqa: B018
    except (ImportError, AttributeError) as error:
        return "", str(error)
    return form, ""


def _quiet() -> bool:
    """Whether nothing wants to see launches, or to have kernels compiled in another way."""
    runtime = knobs.runtime
    return not (
        getattr(runtime.launch_enter_hook, "calls", True)
        or getattr(runtime.launch_exit_hook, "calls", True)
        or runtime.debug
        or knobs.compilation.instrumentation_mode
        or runtime.add_stages_inspection_hook is not None
    )


# Why the ordinary call is always taken: "" where it is not.
FORM, WHY = _form()


def direct(x: torch.Tensor) -> bool:
    """Whether launches on this tensor's device may go past Triton's own call now."""
    return ENABLED and not WHY and x.is_cuda and _quiet()


def stream_of(x: torch.Tensor) -> int:
    """The current stream of a tensor's device, as launchers take it."""
    return torch._C._cuda_getCurrentRawStream(x.get_device())


def loose(pointers: Sequence[int], base: int = 0) -> Any:
    """0 where all pointers are multiples of 16, as nearly always; else which of them are not."""
    if reduce(or_, pointers, base) & 15:
        return tuple([pointer & 15 > 0 for pointer in (*pointers, base)])
    return 0


def _class(value: Any) -> Any:
    """What Triton specializes on in a number that is an argument."""
    if isinstance(value, int):
        return value == 1, value % 16 == 0, -LIMIT <= value < LIMIT, value >> 63
    return type(value)


class Kernel:
    """A jit function with its constants and options, and the kernels that it was compiled to."""

    __slots__ = ("constants", "fn", "found", "hooks")

    def __init__(self, fn: Any, constants: dict[str, Any]) -> None:
        self.fn, self.constants = fn, constants
        self.hooks = getattr(fn, "pre_run_hooks", ())
        self.found: dict[Any, Any] = {}  # key -> CompiledKernel

    def site(self, kinds: Any, statics: tuple[Any, ...], read: Any = None) -> Site:
        """The launch with these fixed numbers, on arguments of these dtypes and alignments.

        read: what a caller wants to find again at the site.
        """
        key = kinds, tuple([_class(value) for value in statics])
        return Site(self, key, statics, read)


class Site:
    """One launch. `go(programs, stream, args)`: the direct call with addresses and sizes, None
    where the kernel is not known yet or cannot be called directly."""

    __slots__ = ("go", "hooks", "kernel", "key", "read", "statics")

    def __init__(self, kernel: Kernel, key: Any, statics: tuple[Any, ...], read: Any) -> None:
        self.kernel, self.key, self.statics, self.read = kernel, key, statics, read
        self.hooks = kernel.hooks
        found = kernel.found.get(key)
        self.go = None if found is None else _caller(found, self._tail())

    def ordinary(self, programs: int, args: Sequence[Any]) -> Any:
        """Triton's own call, on tensors and sizes; returns the compiled kernel."""
        kernel = self.kernel
        return kernel.fn[(programs,)](*args, *self.statics, **kernel.constants)

    def first(self, programs: int, args: Sequence[Any]) -> None:
        """The ordinary call, whose kernel is kept for the next time."""
        made = self.ordinary(programs, args)
        if callable_directly(made, len(args) + len(self.statics)):
            made = self.kernel.found.setdefault(self.key, made)
            self.go = _caller(made, self._tail())

    def _tail(self) -> tuple[Any, ...]:
        """The arguments after those of a call: fixed numbers, and constants in their order."""
        fn, constants = self.kernel.fn, self.kernel.constants
        named = [param for param in fn.params if param.is_constexpr]
        return *self.statics, *(constants.get(param.name, param.default) for param in named)


def callable_directly(made: Any, given: int) -> bool:
    """Whether the launcher of what the ordinary call returned is one of those known here, and
    takes this many arguments before the constants."""
    if not isinstance(made, CompiledKernel) or not isinstance(made.src.fn, JITFunction):
        return False
    flags = [param.is_constexpr for param in made.src.fn.params]
    if any(flags[:given]) or not all(flags[given:]) or len(made.src.signature) != len(flags):
        return False
    run = made.run
    names = ["launch", "launch_cooperative_grid", "launch_pdl"]
    if FORM == "packed":
        names += ["arg_annotations", "kernel_signature"]
    return (
        all(hasattr(run, name) for name in names)
        # Memory that a launcher allocates, and what watches memory, is its own affair.
        and run.global_scratch_size == run.profile_scratch_size == 0
        and not getattr(run, "gsan_enabled", False)
    )


def _caller(made: Any, tail: tuple[Any, ...]) -> Callable[[int, int, tuple[Any, ...]], None]:
    """A function (programs, stream, args) that launches a compiled kernel."""
    run = made.run  # loads the binary, too
    launch, function = run.launch, made.function
    grid, pdl, packed = run.launch_cooperative_grid, run.launch_pdl, made.packed_metadata
    # In both forms: no scratch, no metadata for hooks, and no hooks.
    if FORM == "packed":
        rest = grid, pdl, packed, None, None, None, None, None
        kinds, types = run.arg_annotations, run.kernel_signature

        def go(programs: int, stream: int, args: tuple[Any, ...]) -> None:
            launch(programs, 1, 1, stream, function, *rest, kinds, types, (*args, *tail))

    else:
        rest = grid, pdl, None, None, packed, None, None, None

        def go(programs: int, stream: int, args: tuple[Any, ...]) -> None:
            launch(programs, 1, 1, stream, function, *rest, *args, *tail)

    return go


class Launcher:
    """Launches of a jit function outside plans: constants may differ from call to call."""

    __slots__ = ("fn", "kernels", "sites")

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self.kernels: dict[Any, Kernel] = {}
        self.sites: dict[Any, Site] = {}

    def __call__(
        self,
        programs: int,
        tensors: tuple[torch.Tensor | None, ...],
        sizes: tuple[int, ...],
        statics: tuple[Any, ...],
        constants: dict[str, Any],
    ) -> None:
        """Launch on the current device, which is that of the first tensor.

        tensors, sizes, statics: the arguments, in this order; sizes are those that the kernel
        does not specialize on, statics strides and other numbers.
        """
        Bound(self, programs, tensors, statics, constants)(tensors, sizes)

    def bind(
        self,
        programs: int,
        tensors: tuple[torch.Tensor | None, ...],
        statics: tuple[Any, ...],
        constants: dict[str, Any],
    ) -> Bound:
        """The launch on tensors like these, for a caller that will meet such ones again."""
        return Bound(self, programs, tensors, statics, constants)

    def _site(
        self, key: Any, kinds: Any, statics: tuple[Any, ...], constants: dict[str, Any]
    ) -> Site:
        kernel = self.kernels.setdefault(tuple(constants.items()), Kernel(self.fn, constants))
        if len(self.sites) >= SITES:
            self.sites.clear()
        return self.sites.setdefault(key, kernel.site(kinds, statics))


class Bound:
    """A launch of which only addresses and sizes vary; the rest was read from tensors once.

    Tensors of a call have to agree with those in device, dtypes and in which are absent; what
    depends on their strides is in the statics.
    """

    __slots__ = ("aligned", "constants", "device", "dtypes", "launcher", "programs", "statics")

    def __init__(
        self, launcher: Launcher, programs: int, tensors: tuple[torch.Tensor | None, ...],
        statics: tuple[Any, ...], constants: dict[str, Any],
    ) -> None:  # fmt: skip
        self.launcher, self.programs = launcher, programs
        self.statics, self.constants = statics, constants
        self.device = tensors[0].get_device() if tensors[0] is not None else -1
        self.dtypes = tuple([None if t is None else t.dtype for t in tensors])
        self.aligned: Site | None = None  # the launch where all addresses are multiples of 16

    def __call__(
        self, tensors: Sequence[torch.Tensor | None], sizes: tuple[int, ...],
        pointers: list[int] | None = None,
    ) -> None:  # fmt: skip
        """Launch on the current device, which is that of the first tensor.

        pointers: the tensors' addresses, 0 for absent ones, where the caller has them.
        """
        if not direct(tensors[0]) or max(sizes, default=0) >= LIMIT:
            launcher = self.launcher
            launcher.fn[(self.programs,)](*tensors, *sizes, *self.statics, **self.constants)
            return
        if pointers is None:
            pointers = [0 if t is None else t.data_ptr() for t in tensors]
        site = self.site(pointers)
        if site.go is None or site.hooks:
            site.first(self.programs, (*tensors, *sizes))
        else:
            site.go(self.programs, stream_of(tensors[0]), (*pointers, *sizes))

    def site(self, pointers: list[int]) -> Site:
        """The launch on these addresses."""
        off = loose(pointers)
        if self.aligned is not None and not off:
            return self.aligned
        kinds = self.device, off, self.dtypes
        key = kinds, self.statics, *self.constants.values()
        launcher = self.launcher
        site = launcher.sites.get(key)
        if site is None:
            site = launcher._site(key, kinds, self.statics, self.constants)
        if not off:
            self.aligned = site
        return site
