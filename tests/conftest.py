"""Markers, and fixtures that several test files share."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)  # tensors are small here: threads only wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the same of processes that tests start

if os.environ.get("TRITON_INTERPRET") == "1":
    from quicken import quicken
    from tensorfloat import cut

    quicken()
    cut()

settings.register_profile("ci", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("more", deadline=None, max_examples=400)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


# The files that take longest begin first: one that begins last keeps a single process busy.
LONG = (
    "test_triton", "test_decode", "test_frost", "test_context_parallel", "test_triton_segments",
    "test_examples", "test_engines", "test_paged", "test_triton_backward", "test_integrations",
)  # fmt: skip


def pytest_configure(config):
    """pytest-xdist gives out files as they are collected, not those with the most tests first."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items):
    """Long files begin, and tests marked `gpu` need one."""
    rank = {name: i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(LONG)))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A test of what an engine does not do yet is skipped, with the engine's words."""
    from lagraph.errors import PlanNotOffered

    try:
        return (yield)
    except PlanNotOffered as error:
        from table import pending

        if pending(error):
            pytest.skip(str(error))
        raise


@pytest.fixture
def poison(monkeypatch):
    """Fresh memory holds NaN, so that an element nobody wrote or a row nobody may read shows."""

    def filled(allocate):
        def wrapper(*args, **kwargs):
            out = allocate(*args, **kwargs)
            if out.is_floating_point():
                with torch.no_grad():  # one that wants a gradient may be filled, too
                    out.fill_(float("nan"))
            return out

        return wrapper

    for owner, names in (
        (torch, ("empty", "empty_like", "empty_strided")),
        (torch.Tensor, ("new_empty", "new_empty_strided")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, filled(getattr(owner, name)))
