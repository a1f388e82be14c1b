"""Host cost of a warm call with an engine that does nothing: told in microseconds.

The bounds are generous, since CI machines are busy; `benchmarks/host.py` measures with care.
"""

from __future__ import annotations

import timeit

import fake
import pytest
import torch
from declared import tensors

import lagraph
from lagraph import ops, plan, registry


class Nothing(fake.Engine):
    """Runs without a record and without a write."""

    def plan(self, problem, knobs):
        return self

    def workspace_size(self, T, N):
        return 0

    def run(self, ins, outs, workspace=None):
        pass


@pytest.fixture(autouse=True)
def null(monkeypatch):
    fake.install(monkeypatch, Nothing("null"))
    yield
    monkeypatch.undo()
    fake.forget()


def microseconds(call, number=300, repeat=7):
    call()
    return min(timeit.repeat(call, number=number, repeat=repeat)) / number * 1e6


def told(what, took, bound):
    print(f"{what}: {took:.1f} us (bound {bound})")
    assert took < bound, what


NODE = registry.node("gdn")


@pytest.mark.parametrize(
    ("mode", "bound"),
    [(torch.no_grad, 100), (torch.inference_mode, 100), (torch.enable_grad, 300)],
    ids=["no gradient", "inference mode", "gradient recorded"],
)
def test_a_warm_operator_call(mode, bound):
    x = tensors(NODE)
    for name in ("q", "k", "v", "g", "beta"):
        x[name].requires_grad_()
    with mode():
        told(
            "gated_delta_net",
            microseconds(lambda: ops.gated_delta_net(**x, output_final_state=True)),
            bound,
        )
    assert len(plan.runner("gdn").plans) == 1


def test_a_warm_call_and_its_backward():
    x = tensors(NODE)
    leaves = [x[name].requires_grad_() for name in ("q", "k", "v", "g", "beta")]

    def both():
        o, _ = ops.gated_delta_net(**x)
        torch.autograd.backward(o, o.detach(), inputs=leaves)

    told("gated_delta_net and its backward", microseconds(both), 800)


@pytest.mark.parametrize("key", ["tensor", "name", "uid"])
def test_a_warm_execute(key):
    x = tensors(NODE)
    graph = lagraph.Graph(device="cpu")
    ports = {
        name: graph.tensor([None, *value.shape[1:]], data_type=value.dtype, name=name)
        for name, value in x.items()
    }
    o, *_ = graph.gdn(**ports)
    o.set_output(True)
    graph.build()
    assert graph.plan_name == "gdn_null"
    read = {"tensor": lambda t: t, "name": lambda t: t.name, "uid": lambda t: t.uid}[key]
    pack = {read(ports[name]): value for name, value in x.items()} | {read(o): torch.empty(6, 4, 8)}
    with torch.no_grad():
        told(f"Graph.execute by {key}", microseconds(lambda: graph.execute(pack)), 150)


def test_no_cost_grows_with_t_or_n():
    """Nothing but the offsets, which are read on a CPU, depends on the lengths."""
    x = tensors(NODE)
    seen = len(plan.runner("gdn").plans)
    for T in (10, 100, 1000):
        y = {
            name: value.new_zeros(T, *value.shape[1:]) if name != "cu_seqlens" else value
            for name, value in x.items()
        }
        ops.gated_delta_net(**y)
        seen = seen or 1
        assert len(plan.runner("gdn").plans) == seen
