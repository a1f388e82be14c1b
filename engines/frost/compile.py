"""From a signature to a function: this process's dictionary, then the disk, then the compiler.

`cute.compile` caches nothing by itself. What it makes is always written to an object file and
loaded from there: the loaded function is the cheaper one to call, needs no compiler, and can be
called even where the compiler took the machine for another architecture.

A key holds all that the machine code depends on: the signature, the text of the kernels, the
packages' versions, the architecture, and the CPU, since the half that runs on the host is compiled
for the CPU it is compiled on.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import tempfile
import threading
from dataclasses import fields
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lagraph.engines.frost.cache import CACHE

if TYPE_CHECKING:
    from collections.abc import Callable

    from lagraph.engines.frost.signature import Signature

__all__ = ["function", "key", "options", "prepare", "ready"]

FORMAT = 1  # of the files; a new one forgets all old ones
KERNELS = Path(__file__).parent / "kernels"
PACKAGES = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "apache-tvm-ffi",
)
PLAIN = (int, float, str, bool, type(None))

_FUNCTIONS: dict[tuple[Signature, int], Callable[..., Any]] = {}
_LOCKS: dict[tuple[Signature, int], threading.Lock] = {}
# The compiler is not for threads: two at once end the process. Loading is.
_COMPILER = threading.Lock()


def function(signature: Signature, arch: int = 90) -> Callable[..., Any]:
    """The compiled function of a signature for an architecture (90 for SM90).

    Compiled or loaded once in a process; first calls from several threads wait for one another
    only where they want the same. An error of the compiler is raised, and not remembered.
    """
    wanted = signature, arch
    found = _FUNCTIONS.get(wanted)
    if found is not None:
        return found
    with _LOCKS.setdefault(wanted, threading.Lock()):
        found = _FUNCTIONS.get(wanted)
        if found is None:
            found = _FUNCTIONS[wanted] = _make(signature, arch)
    return found


def prepare(signature: Signature, arch: int = 90) -> bool:
    """Put a signature's object file on the disk, without loading it; whether it is there then."""
    name = key(signature, arch)
    with CACHE.lock(name):
        return CACHE.find(name) is not None or _keep(name, _compiled(signature, arch))


def ready(signature: Signature, arch: int = 90) -> bool:
    """Whether a function needs no compiler any more."""
    return (signature, arch) in _FUNCTIONS or CACHE.find(key(signature, arch)) is not None


def options(arch: int) -> str:
    """What `Signature.build` is given for an architecture."""
    # The architecture is named: a machine without a GPU would compile for another one.
    return f"--gpu-arch sm_{arch}a --enable-tvm-ffi"


def _make(signature: Signature, arch: int) -> Callable[..., Any]:
    name = key(signature, arch)
    found = _from_disk(signature, name)
    if found is not None:
        return found
    with CACHE.lock(name):
        found = _from_disk(signature, name)  # another process made it in the meantime
        if found is None:
            data = _compiled(signature, arch)
            _keep(name, data)
            with tempfile.TemporaryDirectory(prefix="lagraph-") as work:
                path = Path(work, "kernel.o")
                path.write_bytes(data)
                found = _load(path, signature.name)
    return found


def _from_disk(signature: Signature, name: str) -> Callable[..., Any] | None:
    path = CACHE.find(name)
    if path is None:
        return None
    try:
        return _load(path, signature.name)
    except Exception:  # the loader's errors have no common base; a broken file is made anew
        CACHE.drop(name)
        return None


def _load(path: Path, name: str) -> Callable[..., Any]:
    """The function of an object file. Its content is in memory then: the file may go."""
    from cutlass.cute.runtime import load_module

    return load_module(str(path), enable_tvm_ffi=True)[name]


def _compiled(signature: Signature, arch: int) -> bytes:
    """The object file of a signature, by the compiler."""
    with _COMPILER, tempfile.TemporaryDirectory(prefix="lagraph-") as work:
        path = Path(work, "kernel.o")
        signature.build(options(arch)).export_to_c(str(path), function_name=signature.name)
        return path.read_bytes()


def _keep(name: str, data: bytes) -> bool:
    """Put an object on the disk, unless kernels were edited since they were imported: it may be of
    the text before or after. Whether it is there."""
    return _text() == _IMPORTED and CACHE.put(name, data) is not None


# Keys -----------------------------------------------------------------------------------------


def key(signature: Signature, arch: int) -> str:
    """The name of a signature's object file: readable, and with a digest of what it depends on."""
    kind = type(signature)
    values = {field.name: getattr(signature, field.name) for field in fields(signature)}
    for name, value in values.items():
        if type(value) not in PLAIN:
            raise TypeError(f"{kind.__name__}.{name}: expected a plain value, got {value!r}")
    text = json.dumps(
        [FORMAT, kind.__module__, kind.__qualname__, values, signature.name, options(arch),
         _IMPORTED, _outside(kind.__module__), _versions(), _host()]
    )  # fmt: skip
    return f"{signature.name[:80]}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def _text() -> str:
    """A digest of the text of all kernels."""
    return _digest(*sorted(KERNELS.rglob("*.py")))


def _digest(*paths: Path) -> str:
    found = hashlib.sha256()
    for path in paths:
        found.update(str(path.relative_to(path.parents[1])).encode() + b"\0")
        found.update(path.read_bytes() + b"\0")
    return found.hexdigest()


@cache
def _outside(module: str) -> str:
    """A digest of a signature's module, where it is not one of the kernels."""
    own = getattr(sys.modules.get(module), "__file__", None)
    return "" if own is None or KERNELS in Path(own).parents else _digest(Path(own))


@cache
def _versions() -> tuple[str, ...]:
    """The compiler's packages."""
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            found.append(f"{package} none")
    return tuple(found)


@cache
def _host() -> str:
    """The class of this machine's CPU: what it is, and which instructions it has."""
    found = f"{platform.system()} {platform.machine()}"
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return f"{found} {platform.processor()}"
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return f"{found} {' '.join(sorted(value.split()))}"
    return found


# Read before a kernel is imported, which plans do.
_IMPORTED = _text()
