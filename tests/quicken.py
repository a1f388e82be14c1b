"""Triton's interpreter, with less done twice: what it computes stays what it is.

A launch replaces the functions of `triton.language` by interpreted ones, and so does every call of
one kernel function by another, which finds all of them replaced already: a third of the time of
our kernels. Here that is done once a launch. Where the interpreter has other names, nothing is.
"""

from __future__ import annotations

__all__ = ["quicken"]


def quicken() -> None:
    """For this process, in which Triton interprets."""
    from triton.runtime import interpreter

    wanted = ("_patch_lang", "GridExecutor", "tl")
    if not all(hasattr(interpreter, name) for name in wanted):
        return
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    languages = (interpreter.tl, interpreter.tl.core)
    patched = set()  # by the launch that runs: which of the two a function sees
    seen = {}  # by a function's globals, which live as long as this process

    def patch_once(fn):
        key = seen.get(id(fn.__globals__))
        if key is None:
            values = list(fn.__globals__.values())
            key = tuple(any(value is lang for value in values) for lang in languages)
            seen[id(fn.__globals__)] = key
        if key in patched:
            return None  # only a launch's own, the first, is restored
        patched.add(key)
        return patch(fn)

    def launch_once(self, *args, **kwargs):
        patched.clear()
        try:
            return launch(self, *args, **kwargs)
        finally:
            patched.clear()

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_once
