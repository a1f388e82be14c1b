"""The operators as torch sees them: autograd, modes, transforms, caches, views, threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import fake
import pytest
import torch
from declared import (
    NODES,
    SIZES,
    all_optional,
    calls,
    fixed,
    flat,
    ids,
    needed_by,
    option_names,
    tensors,
)
from torch.utils.checkpoint import checkpoint

import lagraph
from lagraph import errors, ops, plan, registry

FORWARDS = [node for node in NODES if node.direction == "forward"]
forwards = pytest.mark.parametrize("node", FORWARDS, ids=ids)
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
POOL = ("initial_state", "state_indices")


def everything(node, dtype=F32, **more):
    """All ports that can be given at once, and options that make every output exist."""
    names = all_optional(node)
    options = fixed(node) | needed_by(node, names) | more
    given = tensors(node, names, dtype=dtype, options=options)
    return given, options


def grown(given, node):
    """Leaves of every input that has a gradient, and the inputs with these in their places."""
    leaves = {
        port.name: given[port.name].detach().clone().requires_grad_()
        for port in node.inputs
        if port.name in given and given[port.name].is_floating_point()
    }
    return leaves, given | leaves


def gradients(node, given, options, loss):
    leaves, inputs = grown(given, node)
    out = calls(node)(inputs, **options)
    return dict(zip(leaves, torch.autograd.grad(loss(out), leaves.values()), strict=True))


def both(out):
    """A loss of the output and of the final state, with weights that differ everywhere."""
    total = 0.0
    for x in out[:2]:
        weight = torch.linspace(-1, 1, x.numel(), dtype=F64).reshape(x.shape)
        total = total + (x.double() * weight).sum()
    return total


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.fixture
def fresh():
    """No plans, before and after."""
    fake.forget()
    yield
    fake.forget()


# opcheck ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [False, True], ids=["required", "everything"])
@pytest.mark.parametrize("node", NODES, ids=ids)
def test_opcheck(node, full):
    given, options = everything(node) if full else (tensors(node), fixed(node))
    if full and "output_final_state" in option_names(node):
        options |= {"output_final_state": True}
    if node.direction == "forward":
        given = grown(given, node)[1]
    ports = [port.name for port in node.inputs if port.role != "pool"]
    text = plan.request(node, options).text
    op = getattr(torch.ops.lagraph, node.op).default
    torch.library.opcheck(op, (*(given.get(name) for name in ports), text))


@pytest.mark.parametrize("form", ["pool", "overwrite"])
@forwards
def test_opcheck_in_place(node, form):
    options = fixed(node) | {"output_final_state": True}
    if form == "overwrite":
        options["overwrite_initial_state"] = True
    given = tensors(node, POOL if form == "pool" else POOL[:1])
    text = plan.request(node, options).text
    op = getattr(torch.ops.lagraph, f"{node.op}_inplace").default
    torch.library.opcheck(op, (*(given.get(name) for name in node.input_names), text))


def test_every_operator_is_registered_once():
    names = [node.op for node in NODES] + [f"{node.op}_inplace" for node in FORWARDS]
    assert len(names) == 25
    for name in names:
        schema = getattr(torch.ops.lagraph, name).default._schema
        assert schema.arguments[-1].name == "options"
        assert not any(argument.has_default_value() for argument in schema.arguments)
        mutated = [a.name for a in schema.arguments if a.is_write]
        assert mutated == (["initial_state"] if name.endswith("_inplace") else [])


# Gradients --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, F64, BF16], ids=str)
@forwards
def test_every_input_has_a_gradient_of_its_own_dtype_and_shape(node, dtype):
    given, options = everything(node, dtype, output_final_state=True)
    leaves, inputs = grown(given, node)
    both(calls(node)(inputs, **options)).backward()
    assert {"q", "k", "v", "g", "initial_state"} <= leaves.keys()
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        assert (leaf.grad.dtype, leaf.grad.shape) == (leaf.dtype, leaf.shape), name
        assert leaf.grad.isfinite().all(), name
        assert leaf.grad.abs().sum() > 0, name


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_gradients_take_the_dtype_of_each_input(dtype):
    node = registry.node("gdn")
    given = tensors(node, ("initial_state", "a_log", "dt_bias"), dtype=BF16)
    for name in ("g", "initial_state", "a_log", "dt_bias"):
        given[name] = given[name].to(dtype)
    leaves, inputs = grown(given, node)
    o, state = ops.gated_delta_net(**inputs, safe_gate=True, output_final_state=True)
    assert (o.dtype, state.dtype) == (BF16, dtype)
    both((o, state)).backward()
    assert {name: leaf.grad.dtype for name, leaf in leaves.items()} == {
        name: leaf.dtype for name, leaf in leaves.items()
    }


@forwards
def test_an_input_that_does_not_matter_gets_zeros(node):
    given, options = everything(node, output_final_state=True)
    found = gradients(node, given, options, lambda out: out[1].double().sum())
    for name in {"q", "d", "z"} & found.keys():
        assert torch.equal(found[name], torch.zeros_like(given[name])), name
    for name in {"k", "v", "g", "initial_state"} & found.keys():
        assert found[name].abs().sum() > 0, name


@forwards
def test_gradients_of_nothing_are_zeros(node):
    """T = 0: only the states have a way through."""
    options = fixed(node) | {"output_final_state": True}
    given = tensors(node, ("initial_state",), sizes=SIZES | {"T": 0})
    given["cu_seqlens"] = torch.zeros(3, dtype=torch.int32)
    found = gradients(node, given, options, lambda out: out[0].sum() + out[1].double().sum())
    for name, grad in found.items():
        want = torch.ones_like if name == "initial_state" else torch.zeros_like
        assert torch.equal(grad, want(given[name])), name


@forwards
def test_only_what_asks_for_a_gradient_gets_one(node):
    given, options = everything(node, output_final_state=True)
    wanted = gradients(node, given, options, both)
    for name in wanted:
        leaf = given[name].clone().requires_grad_()
        (grad,) = torch.autograd.grad(both(calls(node)(given | {name: leaf}, **options)), leaf)
        assert torch.equal(grad, wanted[name]), name


@forwards
def test_a_backward_may_run_twice(node):
    given, options = everything(node, output_final_state=True)
    leaves, inputs = grown(given, node)
    loss = both(calls(node)(inputs, **options))
    first = torch.autograd.grad(loss, leaves.values(), retain_graph=True)
    second = torch.autograd.grad(loss, leaves.values())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@forwards
def test_checkpoints_and_missing_final_states_carry_no_gradient(node):
    options = fixed(node) | {"checkpoint_every_n_tokens": node.family.checkpoint_step}
    o, state, rows = calls(node)(grown(tensors(node), node)[1], **options)
    assert o.requires_grad
    assert not rows.requires_grad
    assert not state.requires_grad
    assert state.numel() == 0


def test_summaries_are_not_differentiable():
    for name in ("gdn_summary", "gdn_summary_bwd"):
        node = registry.node(name)
        out = calls(node)(grown(tensors(node), node)[1], output_transition=True)
        assert not any(x.requires_grad for x in flat(out))


@forwards
def test_checkpoints_do_not_change_the_gradients(node):
    """The backward reads them instead of recomputing."""
    given, options = everything(node, output_final_state=True)
    every = options.pop("checkpoint_every_n_tokens", None) or node.family.checkpoint_step
    wanted = gradients(node, given, options, both)
    for dtype in (None, torch.float32):
        more = {"checkpoint_every_n_tokens": every, "checkpoint_dtype": dtype}
        found = gradients(node, given, options | more, both)
        for name, grad in found.items():
            torch.testing.assert_close(grad, wanted[name], rtol=1e-4, atol=1e-5, msg=name)


COTANGENTS = {
    "expanded from sum()": (lambda o: o.sum(), lambda o: (o * torch.ones_like(o)).sum()),
    "transposed": (
        lambda o: (o.transpose(0, 2) * _count(o)).sum(),
        lambda o: (o * _count(o).transpose(0, 2).contiguous()).sum(),
    ),
    "sliced": (lambda o: o[:, ::2].sum() * 2, lambda o: (o * _even(o) * 2).sum()),
    "a column": (lambda o: o[..., 1].sum(), lambda o: (o * _one(o)).sum()),
    "concatenated": (
        lambda o: (torch.cat([o, 2 * o], 1) * _ramp(o)).sum(),
        lambda o: (o * (_ramp(o)[:, : o.shape[1]] + 2 * _ramp(o)[:, o.shape[1] :])).sum(),
    ),
    "contiguous after a transpose": (
        lambda o: (o.transpose(1, 2).contiguous() * 3).sum(), lambda o: (o * 3).sum(),
    ),
}  # fmt: skip


def _count(o):
    return torch.arange(o.numel(), dtype=o.dtype).view(o.transpose(0, 2).shape)


def _even(o):
    mask = torch.zeros_like(o)
    mask[:, ::2] = 1
    return mask


def _one(o):
    mask = torch.zeros_like(o)
    mask[..., 1] = 1
    return mask


def _ramp(o):
    shape = (o.shape[0], 2 * o.shape[1], *o.shape[2:])
    return torch.linspace(-1, 1, 2 * o.numel(), dtype=o.dtype).view(shape)


@pytest.mark.parametrize("of", [0, 1], ids=["O", "final_state"])
@pytest.mark.parametrize(("loss", "plain"), COTANGENTS.values(), ids=COTANGENTS)
@forwards
def test_incoming_gradients_of_any_layout(node, loss, plain, of):
    given, options = everything(node, F64, output_final_state=True)
    found = gradients(node, given, options, lambda out: loss(out[of]))
    wanted = gradients(node, given, options, lambda out: plain(out[of]))
    for name, grad in found.items():
        torch.testing.assert_close(grad, wanted[name], rtol=1e-12, atol=1e-12, msg=name)


def _wide(x):
    """A column slice of a wider buffer."""
    return torch.cat([x, torch.full_like(x, 99)], -1)[..., : x.shape[-1]]


def _spread(x):
    """Every other element of the innermost axis."""
    return torch.stack([x, torch.full_like(x, 99)], -1)[..., 0]


def _permuted(x):
    """Strides in the opposite order."""
    return x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))


LAYOUTS = {"column slice": _wide, "every other element": _spread, "permuted": _permuted}


@pytest.mark.parametrize("view", LAYOUTS.values(), ids=LAYOUTS)
@forwards
def test_inputs_of_any_layout(node, view):
    given, options = everything(node, F64, output_final_state=True)
    wanted = gradients(node, given, options, both)
    leaves, _ = grown(given, node)
    views = {name: view(leaf) for name, leaf in leaves.items()}
    offsets = {"cu_seqlens": view(given["cu_seqlens"])}
    found = torch.autograd.grad(
        both(calls(node)(given | views | offsets, **options)), leaves.values()
    )
    same(dict(zip(leaves, found, strict=True)), wanted)


@pytest.mark.parametrize("node", [n for n in NODES if "summary" in n.direction], ids=ids)
def test_summaries_of_any_layout(node):
    given, options = everything(node, F64)
    wanted = flat(calls(node)(given, **options))
    for view in LAYOUTS.values():
        found = flat(calls(node)({name: view(x) for name, x in given.items()}, **options))
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


# Modes ------------------------------------------------------------------------------------------


@forwards
def test_inference_mode(node):
    given, options = everything(node, output_final_state=True)
    wanted = calls(node)(given, **options)
    with torch.inference_mode():
        found = calls(node)(given, **options)
        inside = calls(node)({name: x.clone() for name, x in given.items()}, **options)
    for a, b, c in zip(wanted[:2], found[:2], inside[:2], strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
        assert b.is_inference()


@pytest.mark.parametrize("pool_made", ["inside", "outside"])
@forwards
def test_in_place_under_inference_mode(node, pool_made):
    given = tensors(node, POOL)
    wanted = given["initial_state"].clone()
    o, _ = calls(node)(given | {"initial_state": wanted}, **fixed(node), output_final_state=True)
    with torch.inference_mode():
        pool = given["initial_state"].clone() if pool_made == "inside" else given["initial_state"]
        found, state = calls(node)(
            given | {"initial_state": pool}, **fixed(node), output_final_state=True
        )
    assert torch.equal(found, o)
    assert torch.equal(pool, wanted)
    assert state is pool


@pytest.mark.parametrize("direction", ["forward", "summary", "summary_backward"])
@pytest.mark.parametrize("family", registry.FAMILIES)
def test_autocast_casts_the_token_tensors_alone(family, direction):
    node = registry.family(family).node(direction)
    given, options = everything(node)
    if direction == "forward":
        options["output_final_state"] = True
    io = {port.name for port in node.inputs if port.dtype == "io"}
    if family == "mamba2" and direction == "forward":
        assert {"q", "k", "v", "z"} <= io
    cast = {name: x.to(BF16) if name in io else x for name, x in given.items()}
    wanted = flat(calls(node)(cast, **options))
    with torch.autocast("cpu", dtype=BF16):
        found = flat(calls(node)(given, **options))
        with torch.autocast("cpu", enabled=False):
            plain = flat(calls(node)(given, **options))
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype is b.dtype
        assert torch.equal(a[: SIZES["N"]], b[: SIZES["N"]])
    full = flat(calls(node)(given, **options))
    assert all(torch.equal(a[:2], b[:2]) for a, b in zip(plain, full, strict=True))
    if direction == "forward":
        assert (found[0].dtype, found[1].dtype) == (BF16, F32)


@forwards
def test_gradients_under_autocast_come_back_in_fp32(node):
    given, options = everything(node, output_final_state=True)
    io = {port.name for port in node.inputs if port.dtype == "io"}
    cast = {name: x.to(BF16) if name in io else x for name, x in given.items()}
    wanted = gradients(node, cast, options, both)
    leaves, inputs = grown(given, node)
    with torch.autocast("cpu", dtype=BF16):
        loss = both(calls(node)(inputs, **options))
    found = dict(zip(leaves, torch.autograd.grad(loss, leaves.values()), strict=True))
    for name, grad in found.items():
        assert grad.dtype is F32, name
        assert torch.equal(grad, wanted[name].float()), name


MIXES = {
    "q fp32 with k and v bf16": {"k": BF16, "v": BF16},
    "v fp16 with q and k bf16": {"q": BF16, "k": BF16, "v": F16},
    "q, k and v fp16": {"q": F16, "k": F16, "v": F16},
}


@pytest.mark.parametrize("dtypes", MIXES.values(), ids=MIXES)
def test_autocast_evens_out_mixed_token_tensors(dtypes):
    given = tensors(registry.node("gdn"))
    given |= {name: given[name].to(dtype) for name, dtype in dtypes.items()}
    with torch.autocast("cpu", dtype=BF16):
        o, _ = ops.gated_delta_net(**given)
    assert o.dtype is BF16
    if len(set(dtypes.values())) > 1 or len(dtypes) < 3:
        with pytest.raises(errors.DtypeMismatch, match=r"gated_delta_net\.[kv]: expected"):
            ops.gated_delta_net(**given)


def test_autocast_leaves_fp64_alone():
    given = tensors(registry.node("kda"), dtype=F64)
    with torch.autocast("cpu", dtype=BF16):
        o, _ = ops.kimi_delta_attention(**given)
    assert o.dtype is F64


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@forwards
def test_activation_checkpointing(node, reentrant):
    given, options = everything(node, output_final_state=True)
    wanted = gradients(node, given, options, both)
    leaves, inputs = grown(given, node)
    names = list(inputs)

    def body(*values):
        return calls(node)(dict(zip(names, values, strict=True)), **options)[:2]

    out = checkpoint(body, *inputs.values(), use_reentrant=reentrant)
    both(out).backward()
    same({name: leaf.grad for name, leaf in leaves.items()}, wanted)


def test_saved_tensor_hooks_see_what_is_saved():
    node = registry.node("mamba2")
    given, options = everything(node, output_final_state=True)
    wanted, packed = gradients(node, given, options, both), []

    def pack(x):
        packed.append(x.shape)
        return x.clone()

    leaves, inputs = grown(given, node)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = calls(node)(inputs, **options)
    assert len(packed) >= len(inputs), "inputs, checkpoints and the output before the gate"
    found = torch.autograd.grad(both(out), leaves.values())
    same(dict(zip(leaves, found, strict=True)), wanted)


# Transforms and derivatives that are not defined ------------------------------------------------


def simple(node):
    """The forward as a function of q alone."""
    given = tensors(node)
    return given["q"], lambda q: calls(node)(given | {"q": q}, **fixed(node))[0]


@forwards
def test_vmap_is_refused(node):
    q, f = simple(node)
    with pytest.raises(errors.NotDifferentiable, match=f"{node.op}: vmap is not supported. Pack"):
        torch.func.vmap(f)(torch.stack([q, q]))


@pytest.mark.parametrize("node", [n for n in NODES if "summary" in n.direction], ids=ids)
def test_vmap_of_a_summary_is_refused(node):
    given = tensors(node)
    with pytest.raises(errors.NotDifferentiable, match="vmap is not supported"):
        torch.func.vmap(lambda k: flat(calls(node)(given | {"k": k, "q": k}, **fixed(node)))[0])(
            torch.stack([given["k"]] * 2)
        )


TRANSFORMS = {
    "grad": lambda f, q: torch.func.grad(lambda x: f(x).sum())(q),
    "vjp": lambda f, q: torch.func.vjp(f, q),
    "jacrev": lambda f, q: torch.func.jacrev(f)(q),
    "jvp": lambda f, q: torch.func.jvp(f, (q,), (q,)),
    "jacfwd": lambda f, q: torch.func.jacfwd(f)(q),
    "hessian": lambda f, q: torch.func.hessian(lambda x: f(x).sum())(q),
    "forward mode": lambda f, q: _dual(f, q),
    "forward mode over reverse": lambda f, q: _dual(f, q, reverse=True),
}


def _dual(f, q, reverse=False):
    from torch.autograd import forward_ad

    with forward_ad.dual_level():
        return f(forward_ad.make_dual(q.clone().requires_grad_(reverse), q))


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@forwards
def test_transforms_are_refused_never_wrong(node, transform):
    q, f = simple(node)
    with pytest.raises(errors.NotDifferentiable, match=f"{node.op}: .* not supported"):
        transform(f, q)
    assert f(q).isfinite().all(), "the next good call works"


@forwards
def test_second_derivatives_are_refused_and_the_first_stay_right(node):
    given, options = everything(node, output_final_state=True)
    wanted = gradients(node, given, options, both)
    leaves, inputs = grown(given, node)
    loss = both(calls(node)(inputs, **options))
    first = torch.autograd.grad(loss, leaves.values(), create_graph=True)
    same(dict(zip(leaves, (x.detach() for x in first), strict=True)), wanted)
    with pytest.raises(errors.NotDifferentiable, match=f"{node.op}: not differentiable twice"):
        torch.autograd.grad(sum(x.double().pow(2).sum() for x in first), leaves["k"])


def test_batched_cotangents_equal_a_loop():
    """`is_grads_batched` runs the backward once for each, and is right."""
    q, f = simple(registry.node("gdn"))
    q.requires_grad_()
    o = f(q)
    batch = torch.randn(3, *o.shape)
    (got,) = torch.autograd.grad(o, q, batch, is_grads_batched=True, retain_graph=True)
    want = [torch.autograd.grad(o, q, d, retain_graph=True)[0] for d in batch]
    torch.testing.assert_close(got, torch.stack(want))


# States in place --------------------------------------------------------------------------------


@forwards
def test_pools_are_advanced_in_place(node):
    given = tensors(node, POOL)
    pool, rows = given["initial_state"], given["state_indices"].long()
    kept, version, pointer = pool.clone(), pool._version, pool.data_ptr()
    o, state = calls(node)(given, **fixed(node), output_final_state=True)
    plain = {name: x for name, x in given.items() if name != "state_indices"}
    want_o, want = calls(node)(
        plain | {"initial_state": kept[rows]}, **fixed(node), output_final_state=True
    )
    assert state is pool
    assert pool.data_ptr() == pointer
    assert pool._version > version, "autograd must see the write"
    assert torch.equal(o, want_o)
    assert torch.equal(pool[rows], want)
    others = [i for i in range(SIZES["P"]) if i not in rows]
    assert torch.equal(pool[others], kept[others])


@forwards
def test_pools_are_read_only_without_final_states(node):
    given = tensors(node, POOL)
    kept = given["initial_state"].clone()
    _, state = calls(node)(given, **fixed(node))
    assert torch.equal(given["initial_state"], kept)
    assert state.numel() == 0


@forwards
def test_padding_gives_zeros_and_touches_nothing(node):
    given = tensors(node, POOL)
    given["state_indices"] = torch.tensor([-1, 2], dtype=torch.int32)
    kept = given["initial_state"].clone()
    o, _ = calls(node)(given, **fixed(node), output_final_state=True)
    first = given["cu_seqlens"][1]
    assert torch.equal(o[:first], torch.zeros_like(o[:first]))
    assert torch.equal(given["initial_state"][[0, 1, 3, 4]], kept[[0, 1, 3, 4]])


@pytest.mark.parametrize("final", [False, True], ids=["alone", "with output_final_state"])
@forwards
def test_overwriting_returns_the_callers_buffer(node, final):
    given = tensors(node, ("initial_state",))
    start, version = given["initial_state"], given["initial_state"]._version
    want = calls(node)(given | {"initial_state": start.clone()}, **fixed(node),
                       output_final_state=True)  # fmt: skip
    o, state = calls(node)(
        given, **fixed(node), overwrite_initial_state=True, output_final_state=final
    )
    assert state is start
    assert start._version > version
    assert torch.equal(start, want[1])
    assert torch.equal(o, want[0])


class Silent(fake.Engine):
    """An engine whose writes torch does not see, as a kernel's."""

    def plan(self, problem, knobs):
        return self

    def workspace_size(self, T, N):
        return 0

    def run(self, ins, outs, workspace=None):
        pass


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("form", ["pool", "overwrite"])
@forwards
def test_autograd_is_told_of_a_kernels_write(node, form, monkeypatch):
    fake.install(monkeypatch, Silent("silent"))
    options = fixed(node) | {"output_final_state": True, "overwrite_initial_state": form != "pool"}
    given = tensors(node, POOL if form == "pool" else POOL[:1])
    version = given["initial_state"]._version
    calls(node)(given, **options)
    assert given["initial_state"]._version > version


def test_a_write_under_a_saved_state_is_noticed():
    node = registry.node("gdn")
    given = tensors(node, ("initial_state",))
    state = given["initial_state"]
    loss = (state * given["q"].new_ones(()).requires_grad_()).sum()
    calls(node)(given, overwrite_initial_state=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("form", ["pool", "overwrite"])
@forwards
def test_in_place_forms_are_for_inference(node, form):
    given = tensors(node, POOL if form == "pool" else POOL[:1])
    options = fixed(node) | ({"overwrite_initial_state": True} if form == "overwrite" else {})
    kept = given["initial_state"].clone()
    given["v"].requires_grad_()
    with pytest.raises(errors.NotDifferentiable, match=r"are for inference\. Call under"):
        calls(node)(given, **options)
    assert torch.equal(given["initial_state"], kept)
    with torch.no_grad():
        calls(node)(given, **options)


# Plans and their keys ---------------------------------------------------------------------------


def lengths(node, T, N):
    """Inputs of another T and N."""
    given = tensors(node, sizes=SIZES | {"T": T, "N": N})
    given["cu_seqlens"] = torch.linspace(0, T, N + 1).to(torch.int32)
    return given


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("node", NODES, ids=ids)
def test_one_plan_serves_every_t_and_n(node):
    runner = plan.runner(node.name)
    for T, N in ((6, 2), (7, 3), (1, 1), (0, 1), (30, 5), (64, 1)):
        calls(node)(lengths(node, T, N), **fixed(node))
        assert len(runner.plans) == 1, (T, N)


@pytest.mark.usefixtures("fresh")
def test_graphs_keep_one_plan_for_every_length():
    graph = lagraph.Graph(io_data_type=F32, device="cpu")
    node = registry.node("gdn")
    given = lengths(node, 6, 2)
    ports = {}
    for name, x in given.items():
        ports[name] = graph.tensor([None, *x.shape[1:]], data_type=x.dtype, name=name)
    graph.gdn(**ports)
    graph.build()
    for T, N in ((6, 2), (7, 3), (1, 1), (30, 5)):
        graph.execute(lengths(node, T, N))
    assert len(lagraph.graph._runner("gdn").plans) == 1


CHANGES = {
    "g bf16": lambda x: {"g": x["g"].to(BF16)},
    "g fp16": lambda x: {"g": x["g"].to(F16)},
    "beta bf16": lambda x: {"beta": x["beta"].to(BF16)},
    "state bf16": lambda x: {"initial_state": x["initial_state"].to(BF16)},
    "state fp16": lambda x: {"initial_state": x["initial_state"].to(F16)},
    "offsets int64": lambda x: {"cu_seqlens": x["cu_seqlens"].long()},
    "v strided": lambda x: {"v": _wide(x["v"])},
    "q strided within": lambda x: {"q": _spread(x["q"])},
    "offsets strided": lambda x: {"cu_seqlens": _spread(x["cu_seqlens"])},
    "no state": lambda x: {"initial_state": None},
    "one key head": lambda x: {"k": x["k"][:, :1], "q": x["q"][:, :1]},
}


@pytest.mark.usefixtures("fresh")
def test_each_dtype_and_layout_has_a_plan_of_its_own():
    """One process, one after the other and back: each result as in a process of its own."""
    node = registry.node("kda")
    given = tensors(node, ("initial_state",), dtype=BF16)
    alone = {}
    for name, change in CHANGES.items():
        fake.forget()
        alone[name] = ops.kimi_delta_attention(**given | change(given), output_final_state=True)
    fake.forget()
    runner = plan.runner("kda")
    plain = ops.kimi_delta_attention(**given, output_final_state=True)
    for count, (name, change) in enumerate(CHANGES.items(), 2):
        found = ops.kimi_delta_attention(**given | change(given), output_final_state=True)
        assert all(torch.equal(a, b) for a, b in zip(found, alone[name], strict=True)), name
        assert len(runner.plans) == count, name
        again = ops.kimi_delta_attention(**given, output_final_state=True)
        assert all(torch.equal(a, b) for a, b in zip(again, plain, strict=True)), name
        assert len(runner.plans) == count, name


@pytest.mark.usefixtures("fresh")
def test_plans_are_bounded(monkeypatch):
    monkeypatch.setattr(plan, "CAPACITY", 5)
    node = registry.node("gdn")
    runner, given = plan.runner("gdn"), tensors(node)
    first = ops.gated_delta_net(**given, scale=1.0)[0]
    for i in range(1, 20):
        ops.gated_delta_net(**given, scale=1.0 + i)
        assert len(runner.plans) <= 5
    assert torch.equal(ops.gated_delta_net(**given, scale=1.0)[0], first)


@pytest.mark.usefixtures("fresh")
def test_requests_are_bounded(monkeypatch):
    """A new scale at every step must not fill the memory."""
    monkeypatch.setattr(plan, "REQUESTS", 5)
    plan._REQUESTS.clear()
    given, operator = tensors(registry.node("gdn")), torch.ops.lagraph.gated_delta_net.default
    first = ops.gated_delta_net(**given, scale=1.0)[0]
    for i in range(12):
        ops.gated_delta_net(**given, scale=1.0 + i)
        assert len(plan._REQUESTS) <= 5
    inputs = [given.get(p.name) for p in registry.node("gdn").inputs if p.role != "pool"]
    assert torch.equal(operator(*inputs, '{"scale":1.0}')[0], first)
    # Another spelling of the same options is the same call.
    assert torch.equal(operator(*inputs, '{ "scale": 1.0, "safe_gate": false }')[0], first)


@pytest.mark.usefixtures("fresh")
def test_threads_may_race_to_the_first_call():
    node = registry.node("gdn")
    xs = [lengths(node, 8 + i, 2) for i in range(8)]
    barrier, found, failed = threading.Barrier(8), [None] * 8, []

    def work(i):
        barrier.wait()
        try:
            leaf = xs[i]["q"].clone().requires_grad_()
            o, _ = ops.gated_delta_net(**xs[i] | {"q": leaf})
            o.sum().backward()
            found[i] = (o.detach(), leaf.grad)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(plan.runner("gdn").plans) == 1
    for x, (o, grad) in zip(xs, found, strict=True):
        leaf = x["q"].clone().requires_grad_()
        want, _ = ops.gated_delta_net(**x | {"q": leaf})
        want.sum().backward()
        assert torch.equal(o, want)
        assert torch.equal(grad, leaf.grad)


def test_numpy_scalars_are_numbers_and_tensors_are_not():
    import numpy as np

    given = tensors(registry.node("gdn"))
    want = ops.gated_delta_net(**given, scale=0.5, checkpoint_every_n_tokens=16)
    got = ops.gated_delta_net(
        **given, scale=np.float32(0.5), checkpoint_every_n_tokens=np.int64(16),
        use_qk_l2norm_in_kernel=np.bool_(False),
    )  # fmt: skip
    assert torch.equal(got[0], want[0])
    with pytest.raises(errors.InvalidOption, match=r"scale: expected a plain Python value"):
        ops.gated_delta_net(**given, scale=torch.tensor(0.5))


def test_lagraph_validate_is_read_at_import():
    code = (
        "import importlib, os, lagraph.infer as infer\n"
        "seen = []\n"
        "for value in (None, '', '0', '1'):\n"
        "    os.environ.pop('LAGRAPH_VALIDATE', None)\n"
        "    if value is not None:\n"
        "        os.environ['LAGRAPH_VALIDATE'] = value\n"
        "    seen.append(importlib.reload(infer).VALIDATE)\n"
        "print(seen)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env=os.environ | {"LAGRAPH_VALIDATE": "1"},
    )  # fmt: skip
    assert done.stdout.strip() == "[False, False, False, True]"
