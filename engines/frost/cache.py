"""Compiled kernels on disk: object files by key, shared by processes.

`LAGRAPH_CACHE_DIR`, read at import, names the folder; set but empty, it turns the disk off. The
default is lagraph/ in the user's cache folder. A file ends with a digest of itself, so that one
that was cut short is not loaded but made anew, and is put in place by renaming, so that nobody
sees half of one. Where the folder cannot be written, all goes on without it, with one warning.

The files are machine code, and are run: the folder is made for its user alone.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
import time
import warnings
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

try:
    import fcntl
except ImportError:  # not a POSIX system: processes may compile the same kernel twice
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CACHE", "Cache"]

LIMIT = 512 << 20  # bytes: thousands of kernels
MAGIC = b"lagraph1"
TRAILER = len(MAGIC) + hashlib.sha256().digest_size
PATIENCE = 300.0  # seconds to wait for another process that compiles; then do it oneself
STALE = 3600.0  # seconds after which a temporary file is nobody's any more

_NAMED = os.environ.get("LAGRAPH_CACHE_DIR")
_USER = os.environ.get("XDG_CACHE_HOME")


def _folder() -> Path | None:
    """Where the environment puts the files; None without a disk."""
    if _NAMED is not None:
        return Path(_NAMED).expanduser().absolute() if _NAMED else None
    with suppress(RuntimeError):  # a user without a home
        return (Path(_USER) if _USER else Path.home() / ".cache") / "lagraph"
    return None


class Cache:
    """One folder. folder: None keeps nothing. limit: bytes, of which the least recently used go."""

    def __init__(self, folder: Path | None, limit: int = LIMIT) -> None:
        self.folder, self.limit = folder, limit
        self._warned = False
        self._guard = threading.Lock()

    def path(self, key: str) -> Path | None:
        """Where a key's file is, or would be."""
        return None if self.folder is None else self.folder / f"{key}.o"

    def find(self, key: str) -> Path | None:
        """The file of a key, whole; None where there is none. A damaged one is removed."""
        path = self.path(key)
        if path is None:
            return None
        try:
            data = path.read_bytes()
        except OSError:
            return None
        if data[-TRAILER:] != _trailer(data[:-TRAILER]):
            self.drop(key)
            return None
        with suppress(OSError):
            os.utime(path)  # it was used
        return path

    def drop(self, key: str) -> None:
        """Forget a key."""
        path = self.path(key)
        if path is not None:
            with suppress(OSError):
                path.unlink()

    def put(self, key: str, data: bytes) -> Path | None:
        """Keep an object file, and make room; None where the disk does not take it."""
        path = self.path(key)
        if path is None:
            return None
        try:
            _make(path.parent)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data + _trailer(data))
                os.replace(name, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(name)
                raise
        except OSError as error:
            self._warn(error)
            return None
        self._trim(path)
        return path

    @contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """One process, and one thread, at a time; without a lock where the folder has none.

        Waits `PATIENCE` seconds at most: whoever comes second then compiles too, which is only
        wasteful.
        """
        path, end, handle = self.path(key), time.monotonic() + PATIENCE, None
        file = None if path is None or fcntl is None else path.with_suffix(".lock")
        while file is not None:
            handle = self._open(file)
            if handle is None or not _wait(handle, end) or _names(file, handle):
                break
            os.close(handle)  # of a file that was removed meanwhile: others lock its successor
        if file is None or handle is None:
            yield
            return
        try:
            yield
        finally:
            # Removed before it is released, so that no file is left behind.
            with suppress(OSError):
                file.unlink()
            os.close(handle)

    def _open(self, path: Path) -> int | None:
        try:
            _make(path.parent)
            return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            self._warn(error)
            return None

    def _trim(self, kept: Path) -> None:
        """Remove the least recently used files beyond the limit, and old temporary ones."""
        found = []
        with suppress(OSError):
            for entry in os.scandir(kept.parent):
                with suppress(OSError):  # another process may be faster
                    about = entry.stat()
                    old = time.time() - about.st_mtime > STALE
                    if entry.name.endswith(".o"):
                        found.append((about.st_mtime, about.st_size, entry.path))
                    elif old and entry.name.endswith((".part", ".lock")):
                        os.unlink(entry.path)
        total = sum(size for _, size, _ in found)
        for _, size, name in sorted(found):
            if total <= self.limit:
                return
            if name != str(kept):
                with suppress(OSError):
                    os.unlink(name)
                total -= size

    def _warn(self, error: OSError) -> None:
        with self._guard:
            if self._warned:
                return
            self._warned = True
        warnings.warn(
            f"compiled kernels are not kept in {self.folder}: {error}. Every process compiles "
            f"them anew; set LAGRAPH_CACHE_DIR to a folder that can be written.",
            RuntimeWarning,
            stacklevel=2,
        )


def _trailer(data: bytes) -> bytes:
    return MAGIC + hashlib.sha256(data).digest()


def _make(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _names(path: Path, handle: int) -> bool:
    """Whether a path is that of an open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except OSError:
        return False


def _wait(handle: int, end: float) -> bool:
    """Take the lock of an open file; False where it was not to be had in time, or there is none."""
    while time.monotonic() < end:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:  # a file system without locks
            return False
        else:
            return True
    return False


CACHE = Cache(_folder())
