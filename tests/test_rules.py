"""One negative test per rule, per port and per option, derived from the declarations.

Every fault is tried three ways: at the operator, at a graph's builder (declared tensors), and at
`Graph.execute` (real buffers). Each must raise the right class, name op and argument, say what was
expected, what was got and how to mend it, and leave the next good call as it was.
"""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from declared import (
    NODES,
    SIZES,
    all_optional,
    calls,
    fixed,
    flat,
    graph_of,
    needed_by,
    shown,
    tensors,
)

from lagraph import doc, errors


@dataclass(frozen=True)
class Fault:
    """One thing wrong in an otherwise good call of a node.

    argument: node name of what is wrong. kind: the error's class. bad: the port's wrong tensor,
    made from the good one. optional: the optional ports that the call has. long: which shape
    ports with two have.
    """

    node: Any
    argument: str
    what: str
    kind: type
    bad: Any
    optional: tuple[str, ...] = ()
    long: bool = True


def _grown(x, dim):
    """x with one more row along a dim."""
    pad = x.narrow(dim, 0, 1)
    return torch.cat([x, pad], dim)


def _wrong_dtype(port, is_first):
    """A dtype that the port refuses beside fp32 tokens, and what it is."""
    if port.dtype == "index":
        return torch.float32
    if is_first:
        return torch.int64
    return {"io": torch.bfloat16, "beta": torch.float16, "rows": torch.float16}.get(
        port.dtype, torch.float64
    )


def _port_faults(node):
    pools = [p.name for p in node.inputs if p.role == "pool"]
    io = next(port for port in node.inputs if port.dtype == "io")
    forms = [(port, True) for port in node.inputs]
    forms += [(port, False) for port in node.inputs if len(port.shapes) > 1]
    for port, long in forms:
        pool = ("state_indices", "initial_state") if port.name in pools else ()
        optional = pool or tuple(all_optional(node))

        def fault(what, kind, bad, port=port, optional=optional, long=long):
            return Fault(node, port.name, what, kind, bad, optional, long)

        if not port.optional:
            yield fault("missing", errors.RuleBroken, lambda x: None)
        yield fault("not a tensor", errors.DtypeMismatch, lambda x: 3.0)
        yield fault("rank 0", errors.ShapeMismatch, lambda x: x.flatten()[0])
        yield fault("rank too high", errors.ShapeMismatch, lambda x: x[None, None])
        for dim in range((max if long else min)(port.shapes)):
            yield fault(f"dim {dim} too long", errors.ShapeMismatch,
                        lambda x, dim=dim: _grown(x, dim))  # fmt: skip
        dtype = _wrong_dtype(port, port is io)
        yield fault(f"dtype {str(dtype).removeprefix('torch.')}", errors.DtypeMismatch,
                    lambda x, dtype=dtype: x.to(dtype))  # fmt: skip
        yield fault("on another device", errors.DeviceMismatch, lambda x: x.to("meta"))


FAULTS = [fault for node in NODES for fault in _port_faults(node)]


def options_of(fault):
    return fixed(fault.node) | needed_by(fault.node, fault.optional)


@cache
def good_inputs(node, optional, long=True):
    """long: GDP's rows come token-major, D per channel: more dims to get wrong."""
    options = fixed(node) | needed_by(node, optional)
    return tensors(node, optional, long=long, options=options)


@cache
def good_results(node, optional, long=True):
    """What the good call returns."""
    options = fixed(node) | needed_by(node, optional)
    return calls(node)(good_inputs(node, optional, long), **options)


@cache
def good_graph(node, optional, long=True):
    """A function that executes the good call's built graph, and the output that it returns."""
    options = fixed(node) | needed_by(node, optional)
    graph, outputs = graph_of(node, good_inputs(node, optional, long), **options)
    first = next(out for out in outputs.values() if out is not None)
    first.set_output(True)
    graph.build()

    def execute(given):
        out = torch.full(first.get_dim(), float("nan"), dtype=first.get_data_type().value)
        graph.execute({**given, first: out})
        return out

    return execute, execute(good_inputs(node, optional, long))


def says(error, label, name, kind):
    """Check an error's class and message: op, argument, expected, got, mend."""
    text = str(error)
    assert isinstance(error, kind), text
    assert isinstance(error, ValueError)
    if kind in (errors.DtypeMismatch, errors.InvalidOption):
        assert isinstance(error, TypeError)
    assert (error.op, text.startswith(f"{label}.")) == (label, True), text
    assert error.expected, text
    assert error.got, text
    assert error.mend, text
    assert f"expected {error.expected}, got {error.got}" in text
    assert text.endswith(f"{error.mend}.")
    # A dimension that two ports share is blamed on the second; the first is named beside it.
    assert re.search(rf"\b{name}\b", f"{error.argument} {error.expected} {error.because}"), text


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(flat(a), flat(b), strict=True))


def at(level):
    """Every port with the faults that exist at a level, as parameters."""

    def exists(fault):
        node = fault.node
        if level == "operator" and node.direction == "backward":
            return fault.what != "not a tensor"  # no public function: torch checks its schema
        if level == "operator":
            return shown(node, fault.argument) in node.family.op_order[node.direction]
        return level == "execute" or fault.what != "on another device"

    ports = {}
    for fault in filter(exists, FAULTS):
        form = "" if fault.long else "-short"
        ports.setdefault(f"{fault.node.name}-{fault.argument}{form}", []).append(fault)
    return pytest.mark.parametrize("faults", list(ports.values()), ids=list(ports))


def error_of(fault, call):
    """The error that a faulty call raises."""
    try:
        call()
    except errors.LagraphError as error:
        return error
    pytest.fail(f"{fault.argument} {fault.what}: accepted")


def spoiled(fault):
    """The good inputs with the fault in them."""
    given = good_inputs(fault.node, fault.optional, fault.long)
    return given | {fault.argument: fault.bad(given[fault.argument])}


@at("operator")
def test_bad_tensors_are_refused_by_the_operator(faults):
    node, options = faults[0].node, options_of(faults[0])
    good = node, faults[0].optional, faults[0].long
    wanted = good_results(*good)  # warm: the faults meet plans that exist
    for fault in faults:
        error = error_of(fault, lambda fault=fault: calls(node)(spoiled(fault), **options))
        says(error, node.op, shown(node, fault.argument), fault.kind)
    after = calls(node)(good_inputs(*good), **options)
    assert same(after, wanted), "the next good call differs"


@at("builder")
def test_bad_tensors_are_refused_by_the_builder(faults):
    for fault in faults:
        error = error_of(
            fault,
            lambda fault=fault: graph_of(fault.node, spoiled(fault), **options_of(fault)),
        )
        says(error, fault.node.name, fault.argument, fault.kind)


@at("execute")
def test_bad_buffers_are_refused_by_execute(faults):
    node = faults[0].node
    good = node, faults[0].optional, faults[0].long
    execute, wanted = good_graph(*good)
    for fault in faults:
        error = error_of(fault, lambda fault=fault: execute(spoiled(fault)))
        if fault.what == "not a tensor":
            says(error, "execute", "variant_pack", fault.kind)
        else:
            says(error, node.name, fault.argument, fault.kind)
    assert same(execute(good_inputs(*good)), wanted), "the next good call differs"


# Rules -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Breach:
    """A call that breaks a rule: the rule's own sample, applied to a good call."""

    node: Any
    rule: Any

    @property
    def id(self):
        return f"{self.node.name}-{self.rule.name}".replace(" ", "-")

    @property
    def optional(self):
        added = self.rule.sample.get("add", ())
        return tuple(name for name in added if name not in self.rule.sample.get("drop", ()))

    @property
    def sizes(self):
        sizes = dict(SIZES, **self.rule.sample.get("sizes", {}))
        if "v" not in self.node.port:  # without v, q must be the one with fewer heads
            sizes["H"], sizes["HV"] = sizes["HV"], sizes["H"]
        return sizes | {"HO": max(sizes["H"], sizes["HV"])}

    def broken(self):
        options = fixed(self.node) | self.rule.sample.get("options", {})
        return tensors(self.node, self.optional, sizes=self.sizes), options


BREACHES = [Breach(node, rule) for node in NODES for rule in node.rules]
breaches = pytest.mark.parametrize("breach", BREACHES, ids=[b.id for b in BREACHES])


def test_every_rule_has_a_sample():
    assert len(BREACHES) > 100
    for breach in BREACHES:
        assert breach.rule.sample, breach.id


@breaches
def test_a_broken_rule_is_refused_by_the_operator(breach):
    node, (given, options) = breach.node, breach.broken()
    call = calls(node)
    wanted = good_results(node, ())
    with pytest.raises(errors.RuleBroken) as caught:
        call(given, **options)
    says(caught.value, node.op, shown(node, breach.rule.argument), errors.RuleBroken)
    for attr in node.attrs:  # an option goes by the operator's name for it
        if attr.op:
            assert attr.name not in str(caught.value).replace(attr.op, "")
    assert same(call(good_inputs(node, ()), **fixed(node)), wanted)


@breaches
def test_a_broken_rule_is_refused_by_the_builder(breach):
    given, options = breach.broken()
    with pytest.raises(errors.RuleBroken) as caught:
        graph_of(breach.node, given, **options)
    says(caught.value, breach.node.name, breach.rule.argument, errors.RuleBroken)


# Options -----------------------------------------------------------------------------------------

_WRONG = {
    "bool": (1, "true", None),
    "int": (1.5, "16", True, -1),
    "float": ("0.5", [0.5], -1.0, float("nan")),
    "float | None": ("0.5", [0.5], torch.tensor(0.5)),
}
_MORE = {
    "gate_domain": ("lin", 1),
    "gate_lower_bound": (0.0, 1.0, float("-inf")),
    "scale": (float("inf"), float("nan")),
    "num_householder": (0,),
}
OPTIONS = [
    pytest.param(node, attr, id=f"{node.name}-{attr.name}") for node in NODES for attr in node.attrs
]


@pytest.mark.parametrize(("node", "attr"), OPTIONS)
def test_bad_values_of_an_option_are_refused(node, attr):
    given = tensors(node)
    wrong = (*_WRONG.get(doc.type_name(attr.type), ()), *_MORE.get(attr.name, ()))
    assert wrong
    has = node.direction != "backward" and attr.op_name in node.family.op_order[node.direction]
    for value in wrong:
        options = fixed(node) | {attr.name: value}
        if has:
            with pytest.raises(errors.InvalidOption) as caught:
                calls(node)(given, **options)
            says(caught.value, node.op, attr.op_name, errors.InvalidOption)
        if value is not None:  # to a builder, None means not given
            with pytest.raises(errors.InvalidOption) as caught:
                graph_of(node, given, **options)
            says(caught.value, node.name, attr.name, errors.InvalidOption)


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.name)
def test_a_misspelt_option_is_refused(node):
    given = tensors(node)
    if node.direction != "backward":
        with pytest.raises(TypeError, match="batch_invarient"):
            calls(node).function(*given.values(), batch_invarient=True)
    with pytest.raises(TypeError, match="batch_invarient"):
        graph_of(node, given, **fixed(node), batch_invarient=True)


def test_a_missing_number_of_updates_is_refused():
    node = next(n for n in NODES if n.name == "gdp")
    with pytest.raises(errors.InvalidOption, match="num_householder: expected a value"):
        graph_of(node, tensors(node))
    with pytest.raises(TypeError, match="num_householder"):
        calls(node)(tensors(node))


@pytest.mark.parametrize("name", sorted(errors.__all__))
def test_errors_survive_pickling(name):
    """They cross process boundaries, in test runners and launchers."""
    kind = getattr(errors, name)
    if issubclass(kind, errors.InvalidNode):
        error = kind("gdn", "q", expected="a", got="b", mend="C", because="d")
        assert str(error) == "gdn.q: expected a, got b; d. C."
    else:
        error = kind("what is wrong")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert str(back) == str(error)
    assert vars(back) == vars(error)


# Values and head counts --------------------------------------------------------------------------

BAD_OFFSETS = {
    "starts above 0": [1, 2, 6],
    "falls": [0, 4, 2],
    "ends beyond T": [0, 2, 7],
    "negative": [0, -1, 6],
    "starts below 0": [-1, 2, 6],
}
GOOD_OFFSETS = {"ends before T": [0, 2, 5], "empty sequences": [0, 0, 0], "T = N": [0, 6, 6]}


@pytest.mark.parametrize("values", BAD_OFFSETS.values(), ids=BAD_OFFSETS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("node", NODES, ids=lambda node: node.name)
def test_bad_offsets_are_refused_on_a_cpu(node, dtype, values):
    given = good_inputs(node, ()) | {"cu_seqlens": torch.tensor(values, dtype=dtype)}
    with pytest.raises(errors.RuleBroken) as caught:
        calls(node)(given, **fixed(node))
    says(caught.value, node.op, "cu_seqlens", errors.RuleBroken)
    assert str(values) in caught.value.got
    execute, _ = good_graph(node, ())
    if dtype is torch.int32:
        with pytest.raises(errors.RuleBroken) as caught:
            execute(given)
        says(caught.value, node.name, "cu_seqlens", errors.RuleBroken)


@pytest.mark.parametrize("values", GOOD_OFFSETS.values(), ids=GOOD_OFFSETS)
@pytest.mark.parametrize("node", NODES, ids=lambda node: node.name)
def test_unusual_offsets_are_served_in_both_dtypes(node, values):
    results = [
        flat(calls(node)(good_inputs(node, ()) | {"cu_seqlens": torch.tensor(values, dtype=dtype)},
                         **fixed(node)))
        for dtype in (torch.int32, torch.int64)
    ]  # fmt: skip
    end = values[-1] * (SIZES["n"] if node.family.traits.substeps else 1)
    for a, b in zip(*results, strict=True):
        rows = slice(0, values[-1]) if a.shape[:1] == (SIZES["T"],) else slice(0, end)
        assert torch.equal(a[rows], b[rows])


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.name)
def test_offsets_hold_at_least_the_leading_zero(node):
    """After a good call: no lengths are in a plan's key."""
    good_results(node, ())
    given = good_inputs(node, ()) | {"cu_seqlens": torch.zeros(0, dtype=torch.int32)}
    with pytest.raises(errors.ShapeMismatch, match=r"cu_seqlens: expected dim N\+1 >= 1, got 0"):
        calls(node)(given, **fixed(node))
    execute, _ = good_graph(node, ())
    with pytest.raises(errors.ShapeMismatch, match=r"cu_seqlens: expected dim N\+1 >= 1, got 0"):
        execute(given)


def test_long_offsets_are_cut_short_in_the_message():
    node = NODES[0]
    given = good_inputs(node, ()) | {"cu_seqlens": torch.arange(1, 50)}
    with pytest.raises(errors.RuleBroken, match=r"got \[1, 2, 3, .*\] \.\.\. \[.*49\]"):
        calls(node)(given)


FORWARDS = [node for node in NODES if node.direction == "forward"]
POOL = ("initial_state", "state_indices")


@pytest.mark.parametrize("slots", [[0, 0], [5, 0], [2, 2]], ids=["twice", "beyond", "same"])
@pytest.mark.parametrize("node", FORWARDS, ids=lambda node: node.name)
def test_bad_pool_rows_are_refused(node, slots):
    given = dict(good_inputs(node, POOL))
    before = given["initial_state"].clone()
    given["state_indices"] = torch.tensor(slots, dtype=torch.int32)
    with pytest.raises(errors.RuleBroken) as caught:
        calls(node)(given, **fixed(node), output_final_state=True)
    says(caught.value, node.op, "state_indices", errors.RuleBroken)
    assert torch.equal(given["initial_state"], before), "the pool was written all the same"


HEADS = {"HV not a multiple": (3, 3, 4), "H not a multiple": (4, 4, 3), "HK of neither": (2, 3, 4),
         "HK divides, but is neither": (4, 1, 2), "no key heads": (2, 0, 2)}  # fmt: skip
DELTA = [n for n in NODES if n.family.traits.delta and n.direction in ("forward", "backward")]


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("node", DELTA, ids=lambda node: node.name)
def test_head_counts_that_map_past_the_last_head_are_refused(node, heads):
    H, HK, HV = heads
    sizes = SIZES | {"H": H, "HK": HK, "HV": HV, "HO": max(H, HV)}
    for call in (
        lambda: calls(node)(tensors(node, sizes=sizes), **fixed(node)),
        lambda: graph_of(node, tensors(node, sizes=sizes), **fixed(node)),
    ):
        with pytest.raises(errors.InvalidNode) as caught:
            call()
        assert isinstance(caught.value, ValueError)
        assert len(set(re.findall(r"\d", str(caught.value))) & set(map(str, heads))) >= 1


SERVED_HEADS = {"equal": (2, 2, 2), "grouped queries": (4, 2, 2), "grouped keys": (2, 2, 4),
                "keys as values": (2, 4, 4), "one key head": (1, 1, 4)}  # fmt: skip


@pytest.mark.parametrize("heads", SERVED_HEADS.values(), ids=SERVED_HEADS)
@pytest.mark.parametrize("node", [n for n in NODES if n.family.traits.delta], ids=lambda n: n.name)
def test_documented_head_counts_are_served(node, heads):
    H, HK, HV = heads
    sizes = SIZES | {"H": H, "HK": HK, "HV": HV, "HO": max(H, HV)}
    results = flat(calls(node)(tensors(node, sizes=sizes), **fixed(node)))
    assert all(x.isfinite().all() for x in results)


@pytest.mark.parametrize(
    ("direction", "heads"),
    [("summary", (4, 1, 2)), ("summary_backward", (2, 1, 4))],
    ids=["summary", "summary_backward"],
)
def test_summaries_refuse_key_heads_that_no_call_could_have(direction, heads):
    """HK = 1 with four output heads, two of them told by v or q, is neither H nor HV."""
    node = next(n for n in NODES if n.family.name == "gdn" and n.direction == direction)
    H, HK, HV = heads
    sizes = SIZES | {"H": H, "HK": HK, "HV": HV, "HO": max(H, HV)}
    with pytest.raises(errors.RuleBroken, match=r"expected HK heads, HK = H or HV, got HK=1"):
        calls(node)(tensors(node, sizes=sizes))
