"""Direct calls skip the boundary of an operator; what has to see operators still sees them."""

from __future__ import annotations

import pytest
import torch
from declared import NODES, all_optional, calls, fixed, flat, ids, needed_by, tensors
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lagraph import errors, ops, registry
from lagraph.ops import register

PUBLIC = [node for node in NODES if node.direction != "backward"]
FORWARDS = [node for node in NODES if node.direction == "forward"]
NODE = registry.node("gdn")
POOL = ("initial_state", "state_indices")


class Seen(TorchDispatchMode):
    """Names of our operators that a dispatch mode sees."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "lagraph":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    """Names of our operators that a function mode sees."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "namespace", "") == "lagraph":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def crossings(monkeypatch):
    """Operators whose boundary was crossed, told by their kernels' requests."""
    names, request = [], register.Operator.request

    def told(self, text):
        names.append(self.name)
        return request(self, text)

    monkeypatch.setattr(register.Operator, "request", told)
    return names


@pytest.mark.parametrize("node", PUBLIC, ids=ids)
def test_plain_calls_are_direct(node, crossings):
    """Without a gradient, and in both directions of one; a mode makes the call cross."""
    given, options = everything(node)
    calls(node)(given, **options)
    if node.direction == "forward":
        given["v"].requires_grad_()
        sum(x.sum() for x in calls(node)(given, **options)[:2]).backward()
    assert not crossings
    with Seen():
        calls(node)(given, **options)
    assert crossings[-1] == node.op


def everything(node):
    names = all_optional(node)
    options = fixed(node) | needed_by(node, names)
    if node.direction == "forward":
        options["output_final_state"] = True
    return tensors(node, names, options=options), options


@pytest.mark.parametrize("seen", [Seen, Called])
@pytest.mark.parametrize("node", PUBLIC, ids=ids)
def test_modes_see_operators_and_results_are_the_same(node, seen):
    given, options = everything(node)
    wanted = flat(calls(node)(given, **options))
    with seen() as found:
        got = flat(calls(node)(given, **options))
    assert found.names == [node.op]
    assert all(torch.equal(a, b) for a, b in zip(got[:2], wanted[:2], strict=True))


@pytest.mark.parametrize("node", FORWARDS, ids=ids)
def test_modes_see_both_directions_of_a_gradient(node):
    given, options = everything(node)
    given["q"].requires_grad_()
    direct = calls(node)(given, **options)
    with Seen() as found:
        crossed = calls(node)(given, **options)
        (a,) = torch.autograd.grad(crossed[0].sum() + crossed[1].sum(), given["q"])
    assert found.names == [node.op, node.family.node("backward").op]
    # A forward that was direct has a backward that modes see, and the other way round.
    with Seen() as found:
        (b,) = torch.autograd.grad(direct[0].sum() + direct[1].sum(), given["q"])
    assert found.names == [node.family.node("backward").op]
    with Seen():
        crossed = calls(node)(given, **options)
    (c,) = torch.autograd.grad(crossed[0].sum() + crossed[1].sum(), given["q"])
    assert torch.equal(a, b)
    assert torch.equal(a, c)


@pytest.mark.parametrize("node", FORWARDS, ids=ids)
def test_modes_see_writes(node):
    given = tensors(node, POOL)
    wanted = given["initial_state"].clone()
    calls(node)(given | {"initial_state": wanted}, **fixed(node), output_final_state=True)
    with Seen() as found:
        calls(node)(given, **fixed(node), output_final_state=True)
    assert found.names == [f"{node.op}_inplace"]
    assert torch.equal(given["initial_state"], wanted)


def test_a_profiler_sees_operators():
    given = tensors(NODE)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ops.gated_delta_net(**given)
    assert "lagraph::gated_delta_net" in {event.key for event in profile.key_averages()}


class Tagged(torch.Tensor):
    """A subclass that takes part in dispatch."""


def test_subclasses_cross_the_boundary():
    given = tensors(NODE)
    wanted = ops.gated_delta_net(**given)[0]
    found = ops.gated_delta_net(**given | {"q": given["q"].as_subclass(Tagged)})[0]
    assert type(found) is Tagged
    assert torch.equal(found, wanted)


def test_parameters_are_plain(crossings):
    given, options = everything(NODE)
    wanted = calls(NODE)(given, **options)
    given["a_log"] = torch.nn.Parameter(given["a_log"])
    crossings.clear()
    found = calls(NODE)(given, **options)
    found[0].sum().backward()
    assert torch.equal(found[0], wanted[0])
    assert given["a_log"].grad.abs().sum() > 0
    assert not crossings, "a parameter is no reason to cross"


def test_what_torch_func_leaves_behind_leads_nowhere():
    """A tensor that escaped from a transform is its value, and no part of a graph."""
    given, kept = tensors(NODE), []

    def leak(x):
        kept.append(x * 2)
        return kept[0].sum()

    torch.func.grad(leak)(given["q"])
    wanted = ops.gated_delta_net(**given | {"q": given["q"] * 2})[0]
    found = ops.gated_delta_net(**given | {"q": kept[0]})[0]
    assert torch.equal(found, wanted)
    assert not found.requires_grad
    given["k"].requires_grad_()
    for q in (kept[0], given["q"] * 2):
        ops.gated_delta_net(**given | {"q": q})[0].sum().backward()
    assert given["k"].grad.isfinite().all()


@pytest.mark.parametrize("name", ["q", "k", "g", "cu_seqlens"])
def test_a_meta_tensor_among_others_is_refused(name):
    """Its class of device is in the key: the plan of CPU tensors is not taken for it."""
    given = tensors(NODE)
    ops.gated_delta_net(**given)
    with pytest.raises(errors.DeviceMismatch, match="gated_delta_net"):
        ops.gated_delta_net(**given | {name: given[name].to("meta")})


def test_meta_tensors_give_shapes():
    given = {k: x.to("meta") for k, x in tensors(NODE).items()}
    o, _ = ops.gated_delta_net(**given)
    assert o.device.type == "meta"
    assert o.shape == given["v"].shape
