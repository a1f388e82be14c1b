"""`torch.compile(fullgraph=True, dynamic=True)` of every operator: equal, no recompile over T.

The first T and N differ from every static dimension: Dynamo takes sizes that are equal at first for
one symbol, whatever they mean, and would compile once more when they part.
"""

from __future__ import annotations

import shutil

import pytest
import torch
from declared import NODES, SIZES, all_optional, calls, fixed, flat, ids, needed_by, tensors
from torch._dynamo.testing import CompileCounterWithBackend, EagerAndRecordGraphs

from lagraph import errors, ops, registry

FORWARDS = [node for node in NODES if node.direction == "forward"]
PUBLIC = [node for node in NODES if node.direction != "backward"]
forwards = pytest.mark.parametrize("node", FORWARDS, ids=ids)
LENGTHS = ((30, 5), (19, 6), (45, 2), (8, 3), (3, 8))  # T and N, none 0 or 1
POOL = ("initial_state", "state_indices")


@pytest.fixture(autouse=True)
def reset():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function):
    """The function compiled, and how many graphs its first call and its later calls made.

    Where a default is a float (dt_min), Dynamo starts again once, within the first call.
    """
    counter = CompileCounterWithBackend("aot_eager")
    made = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    seen = []

    def call(*args):
        out = made(*args)
        seen.append(counter.frame_count)
        return out

    return call, lambda: (seen[0] in (1, 2), seen[-1] - seen[0])


def inputs(node, T, N, names=(), options=None):
    given = tensors(node, names, sizes=SIZES | {"T": T, "N": N}, options=options)
    given["cu_seqlens"] = torch.linspace(0, T, N + 1).to(torch.int32)
    if "state_indices" in given:
        given["state_indices"] = torch.arange(N, dtype=torch.int32).flip(0)
    return given


def everything(node):
    """Every port that can be given at once, and the options it needs."""
    names = all_optional(node)
    options = fixed(node) | needed_by(node, names)
    if node.direction == "forward":
        options["output_final_state"] = True
    return names, options


def leaves_of(given, node):
    return {
        port.name: given[port.name].clone().requires_grad_()
        for port in node.inputs
        if port.name in given and given[port.name].is_floating_point()
    }


def loss_of(out):
    return sum((x * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for x in out[:2])


@pytest.mark.parametrize("node", PUBLIC, ids=ids)
def test_no_gradient_over_several_lengths(node):
    names, options = everything(node)
    call, count = compiled(lambda given: calls(node)(given, **options))
    for T, N in LENGTHS:
        given = inputs(node, T, N, names, options)
        for a, b in zip(flat(call(given)), flat(calls(node)(given, **options)), strict=True):
            rows = N if a.shape != b.shape or a.shape[0] not in (T, N) else a.shape[0]
            assert a.shape == b.shape
            assert torch.equal(a[:rows], b[:rows])
    assert count() == (True, 0), "compiled again for another length"


@forwards
def test_forward_and_backward_over_several_lengths(node):
    names, options = everything(node)
    call, count = compiled(lambda given: calls(node)(given, **options)[:2])
    for T, N in LENGTHS[:3]:
        given = inputs(node, T, N, names, options)
        results = []
        for run in (call, lambda given: calls(node)(given, **options)[:2]):
            leaves = leaves_of(given, node)
            out = run(given | leaves)
            grads = torch.autograd.grad(loss_of(out), leaves.values())
            results.append((*out, *grads))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)
    assert count() == (True, 0), "compiled again for another length"


def test_lengths_of_zero_and_one_may_specialize_and_are_right():
    node = registry.node("gdn")
    call, count = compiled(lambda given: calls(node)(given, output_final_state=True))
    for T, N in ((30, 5), (1, 1), (0, 6), (0, 1), (9, 3), (12, 2), (1, 1), (1, 5), (40, 1)):
        given = inputs(node, T, N)
        for a, b in zip(call(given), calls(node)(given, output_final_state=True), strict=True):
            assert torch.equal(a, b)
    assert count() == (True, 5), "one graph for each of T in 0, 1, more with N in 1, more"


@forwards
def test_checkpoints_have_a_dynamic_number_of_rows(node):
    every = node.family.checkpoint_step
    options = fixed(node) | {"checkpoint_every_n_tokens": every}
    call, count = compiled(lambda given: calls(node)(given, **options)[2])
    for T in (every + 8, 2 * every + 8, 3 * every):
        given = inputs(node, T, 5)
        found, wanted = call(given), calls(node)(given, **options)[2]
        assert found.shape == wanted.shape
        assert torch.equal(found[:5], wanted[:5])
    assert count() == (True, 0)


@pytest.mark.parametrize("grad", [False, True], ids=["no gradient", "gradient"])
def test_scale_is_a_number_of_the_graph(grad):
    """A float argument: one graph for each value, with the value in the operator's text."""
    given = tensors(registry.node("gdn"))
    given["q"].requires_grad_(grad)
    graphs = EagerAndRecordGraphs()
    call = torch.compile(
        lambda given, scale: ops.gated_delta_net(**given, scale=scale)[0],
        backend=graphs, fullgraph=True, dynamic=True,
    )  # fmt: skip
    for scale in (0.5, 0.25, 0.5):
        assert torch.equal(call(given, scale), ops.gated_delta_net(**given, scale=scale)[0])
    texts = [
        node.args[-1]
        for graph in graphs.graphs
        for node in graph.graph.nodes
        if "lagraph.gated_delta_net" in str(node.target)
    ]
    assert texts == ['{"scale":0.5}', '{"scale":0.25}']


def test_integer_options_are_constants_of_the_graph():
    node = registry.node("gdp")
    given = tensors(node)
    call, _ = compiled(lambda given, n: calls(node)(given, num_householder=n)[0])
    assert torch.equal(call(given, 2), calls(node)(given, num_householder=2)[0])
    flat_rows = tensors(node, sizes=SIZES | {"n": 3})
    assert torch.equal(call(flat_rows, 3), calls(node)(flat_rows, num_householder=3)[0])


@pytest.mark.parametrize("mode", ["plain", "inference mode"])
@forwards
def test_pools_that_are_views_are_written_through(node, mode):
    """Two calls in a row on a pool that is a view; the base holds what eager leaves there."""
    pool = tensors(node, POOL)["initial_state"]
    big = torch.stack([pool, 2 * pool])
    given = {k: x for k, x in inputs(node, 8, 2, POOL).items() if k != "initial_state"}
    shape = pool.shape

    def step(given, big):
        cache = big[0].view(shape)
        a, _ = calls(node)(given | {"initial_state": cache}, **fixed(node), output_final_state=True)
        b, _ = calls(node)(given | {"initial_state": cache}, **fixed(node), output_final_state=True)
        return a, b, big.sum()

    call, count = compiled(step)
    ours, theirs = big.clone(), big.clone()
    with torch.inference_mode(mode == "inference mode"):
        found, wanted = call(given, ours), step(given, theirs)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, big), "the pool was not advanced"
    assert torch.equal(ours[1], big[1])
    assert count() == (True, 0)


@pytest.mark.parametrize("made", ["inside", "outside"])
def test_pools_made_in_and_out_of_inference_mode(made):
    node = registry.node("gdn")
    given = inputs(node, 8, 2, POOL)
    wanted = given["initial_state"].clone()
    calls(node)(given | {"initial_state": wanted}, output_final_state=True)
    call, _ = compiled(lambda given: calls(node)(given, output_final_state=True)[0])
    with torch.inference_mode():
        pool = given["initial_state"].clone() if made == "inside" else given["initial_state"]
        call(given | {"initial_state": pool})
    assert torch.equal(pool, wanted)


@forwards
def test_overwriting_compiles(node):
    given = inputs(node, 8, 2, ("initial_state",))
    wanted = given["initial_state"].clone()
    calls(node)(given | {"initial_state": wanted}, **fixed(node), overwrite_initial_state=True)
    call, _ = compiled(
        lambda given: calls(node)(given, **fixed(node), overwrite_initial_state=True)
    )
    call(given)
    assert torch.equal(given["initial_state"], wanted)


def test_autocast_compiles():
    node = registry.node("gdn")
    given = inputs(node, 8, 2)

    def body(given):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return ops.gated_delta_net(**given)[0]

    call, _ = compiled(body)
    leaves, ours = leaves_of(given, node), leaves_of(given, node)
    found, wanted = call(given | ours), body(given | leaves)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, wanted)
    found.float().square().sum().backward()
    wanted.float().square().sum().backward()
    for name in leaves:
        assert torch.equal(ours[name].grad, leaves[name].grad), name


def test_a_bad_call_says_what_is_wrong_when_compiled():
    given = inputs(registry.node("gdn"), 8, 2)
    call, _ = compiled(lambda given: ops.gated_delta_net(**given)[0])
    with pytest.raises(Exception, match=r"gated_delta_net\.k: expected dim T") as caught:
        call(given | {"k": given["k"][:5]})
    chain, error = [], caught.value
    while error is not None:
        chain.append(type(error))
        error = error.__cause__ or error.__context__
    assert errors.ShapeMismatch in chain
    assert torch.equal(call(given), ops.gated_delta_net(**given)[0])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_inductor_fuses_around_an_operator():
    node = registry.node("gdn")

    def body(given):
        gates = torch.nn.functional.logsigmoid(given["g"])
        return ops.gated_delta_net(**given | {"g": gates})[0].tanh()

    call = torch.compile(body, backend="inductor", fullgraph=True, dynamic=True)
    for T, N in LENGTHS[:2]:
        given = inputs(node, T, N)
        leaves, ours = leaves_of(given, node), leaves_of(given, node)
        found, wanted = call(given | ours), body(given | leaves)
        torch.testing.assert_close(found, wanted)
        found.sum().backward()
        wanted.sum().backward()
        for name in leaves:
            torch.testing.assert_close(ours[name].grad, leaves[name].grad, msg=name)
