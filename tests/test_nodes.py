"""Ports, options, outputs and signatures against the reference list, `data/nodes.json`."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path

import pydantic
import pytest
import torch
from declared import NODES, all_optional, fixed, graph_of, ids, needed_by, tensors
from draw import draw

import lagraph
from lagraph import errors, ops, plan, registry
from lagraph.problem import DIRECTIONS

REFERENCE = json.loads((Path(__file__).parent / "data" / "nodes.json").read_text("utf-8"))


@pytest.fixture(params=NODES, ids=ids)
def node(request):
    return request.param


@pytest.fixture
def listed(node):
    return REFERENCE["nodes"][node.type]


def test_there_are_twenty_nodes_and_fifteen_ops():
    assert [node.type for node in NODES] == list(REFERENCE["nodes"])
    made = {node.op for node in NODES if node.direction != "backward"}
    assert sorted(made) == sorted(REFERENCE["ops"])
    assert len(NODES) == 20
    assert len(made) == 15
    assert made <= set(ops.__all__)


def test_ports_in_order_with_their_optionality(node, listed):
    assert [p.name + "?" * p.optional for p in node.inputs] == listed["inputs"]


def test_attributes_in_order(node, listed):
    assert [attr.name for attr in node.attrs] == listed["attributes"]


def test_outputs_in_order_with_their_conditions(node, listed):
    assert [[out.name, out.condition] for out in node.outputs] == listed["outputs"]


# What makes a condition of the reference hold: options, and ports to give.
HOLDS = {
    "output_final_state": ({"output_final_state": True}, ()),
    "checkpoint_every_n_tokens > 0": ({"checkpoint_every_n_tokens": 128}, ()),
    "output_transition": ({"output_transition": True}, ()),
    "output_pre_gate and z": ({"output_pre_gate": True}, ("z",)),
}


@pytest.mark.parametrize("node", NODES, ids=ids)
def test_an_output_exists_exactly_where_its_condition_holds(node):
    plain = {name for name, condition in REFERENCE["nodes"][node.type]["outputs"] if not condition}

    def outputs(options, ports):
        given = tensors(node, ports, options=options)
        _, made = graph_of(node, given, **fixed(node), **options)
        return {name for name, tensor in made.items() if tensor is not None}

    assert outputs({}, ()) == plain
    for name, condition in REFERENCE["nodes"][node.type]["outputs"]:
        if not condition:
            continue
        port = condition.removesuffix(" given")
        options, ports = HOLDS.get(condition, (needed_by(node, [port]), (port,)))
        assert outputs(options, ports) == plain | {name}
    if node.name == "mamba2":
        assert outputs({"output_pre_gate": True}, ()) == plain, "O_pre needs z as well"
        assert outputs({}, ("z",)) == plain, "O_pre needs the option as well"


def test_the_builder_has_the_listed_signature(node, listed):
    builder = getattr(lagraph.Graph, listed["builder"])
    parameters = list(inspect.signature(builder).parameters.values())
    keyword = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
    assert [p.name + "?" * (p.default is None) for p in positional] == (
        listed["inputs"] + [name + "?" for name in listed["attributes"]]
    )
    assert keyword == ["name", "compute_data_type"]
    assert builder.__doc__.startswith(f"Add {node.type}: ")


def test_builders_return_all_outputs_in_order_none_where_absent(node, listed):
    graph, outputs = graph_of(node, tensors(node), **fixed(node))
    assert list(outputs) == [name for name, _ in listed["outputs"]]
    for name, condition in listed["outputs"]:
        assert (outputs[name] is None) == bool(condition), name
        if not condition:
            assert outputs[name].name == f"{node.name}::{name}"
    given = graph.inspect()["nodes"][0]
    assert given["type"] == node.type


@pytest.mark.parametrize("name", sorted(REFERENCE["ops"]))
def test_op_signature(name):
    found = str(inspect.signature(getattr(ops, name))).strip("()")
    wanted = REFERENCE["ops"][name]
    if name in REFERENCE["added"]:
        wanted += ", " + REFERENCE["added"][name]
    assert found == wanted


@pytest.mark.parametrize("name", sorted(REFERENCE["ops"]))
def test_an_op_is_documented_under_its_own_name(name):
    function = getattr(ops, name)
    assert (function.__name__, function.__module__) == (name, "lagraph.ops")
    for parameter in inspect.signature(function).parameters:
        assert f"    {parameter} (" in function.__doc__, f"{parameter} is not described"


DEFAULTS = {"gate_domain": "log", "dt_softplus": True, "dt_min": 0.0}
NO_VALUE = ("scale", "gate_lower_bound", "dt_max")


def test_attribute_defaults(node):
    """Every other flag is false, every count 0; num_householder is required."""
    options = node.options(fixed(node))
    for attr in node.attrs:
        if attr.name == "num_householder":
            assert attr.default is ...
        elif attr.name in NO_VALUE:
            assert getattr(options, attr.name) is None, attr.name
        else:
            wanted = DEFAULTS.get(attr.name, 0 if attr.type is int else False)
            assert getattr(options, attr.name) == wanted, attr.name


def test_what_an_attribute_that_is_not_given_means(node):
    resolved = vars(node.resolve(node.options(fixed(node)), {"K": 64}))
    wanted = {"scale": 0.125, "gate_lower_bound": -5.0, "dt_max": float("inf")}
    assert {k: resolved[k] for k in wanted if k in resolved} == {
        k: v for k, v in wanted.items() if k in {attr.name for attr in node.attrs}
    }


def test_options_are_frozen(node):
    options = node.options(fixed(node))
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        options.batch_invariant = True


def test_an_unknown_option_is_refused_with_the_known_ones(node):
    with pytest.raises(errors.InvalidOption) as caught:
        node.options({**fixed(node), "batch_invarient": True})
    assert f"{node.name}.batch_invarient: expected a known option" in str(caught.value)
    assert "batch_invariant" in caught.value.mend


def test_declarations_are_frozen(node):
    for item, field in ((node.inputs[0], "name"), (node.attrs[0], "default"),
                        (node.outputs[0], "name"), (node.family.traits, "gate")):  # fmt: skip
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(item, field, None)
    for rule in node.rules:
        with pytest.raises(dataclasses.FrozenInstanceError):
            rule.name = ""


def test_tensor_descriptors_are_frozen_and_refuse_unknown_fields():
    desc = lagraph.TensorDesc(name="q", dim=(None, 2, 4), data_type="bfloat16")
    assert desc.data_type is torch.bfloat16
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        desc.name = "k"
    with pytest.raises(pydantic.ValidationError, match="Extra inputs"):
        lagraph.TensorDesc(name="q", dims=(1,))


@pytest.mark.parametrize("node", [n for n in NODES if n.direction == "backward"], ids=ids)
def test_every_gradient_follows_its_input(node):
    given = tensors(node, all_optional(node))
    options = needed_by(node, all_optional(node))
    _, outputs = graph_of(node, given, **fixed(node), **options)
    by_grad = {port.grad: port.name for port in node.inputs if port.grad}
    assert set(by_grad) == set(node.output_names)
    for grad, port in by_grad.items():
        assert outputs[grad].get_dim() == list(given[port].shape), grad
        assert outputs[grad].get_data_type().value is given[port].dtype, grad


def test_a_node_is_found_by_builder_name_and_by_type(node):
    assert registry.node(node.name) is registry.node(node.type) is node
    assert node.family.node(node.direction) is node
    assert node.direction in DIRECTIONS


@pytest.mark.parametrize("family", registry.FAMILIES)
def test_overwriting_means_nothing_to_a_backward(family):
    """The reference lists the option there, too: gradients and states keep their bits."""
    node = registry.node(f"{family}_bwd")
    x = draw(family, lengths=(5, 0, 7), n=2 if family == "gdp" else 1, dtype=torch.float32,
             state=torch.float32)  # fmt: skip
    ins, before = [x.get(name) for name in node.input_names], x["initial_state"].clone()
    given = {"num_householder": 2} if family == "gdp" else {}
    plain, asked = (
        plan.runner(node.name)(
            ins, plan.request(node, given | {"overwrite_initial_state": overwrite})
        )
        for overwrite in (False, True)
    )
    assert torch.equal(x["initial_state"], before)
    for a, b in zip(plain, asked, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)
    grads = dict(zip(node.output_names, asked, strict=True))
    assert grads["d_initial_state"].data_ptr() != x["initial_state"].data_ptr()
