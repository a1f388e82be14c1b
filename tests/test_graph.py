"""The graph: declaring, checking, planning, executing, keeping."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
import torch
from declared import NODES, SIZES, all_optional, calls, fixed, flat, graph_of, needed_by, tensors

import lagraph
from lagraph import errors, ops, registry

FLOAT, INT32 = lagraph.data_type.FLOAT, lagraph.data_type.INT32
H, K, V = 2, 4, 8


def inputs(T=7, lengths=(3, 0, 4), dtype=torch.float32, seed=0):
    """GDN's tensors by port name."""
    rng = torch.Generator().manual_seed(seed)
    return {
        "q": torch.randn(T, H, K, generator=rng).to(dtype),
        "k": torch.nn.functional.normalize(torch.randn(T, H, K, generator=rng), dim=-1).to(dtype),
        "v": torch.randn(T, H, V, generator=rng).to(dtype),
        "g": -torch.rand(T, H, generator=rng),
        "beta": torch.rand(T, H, generator=rng),
        "cu_seqlens": torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32),
    }


DIMS = {"q": [H, K], "k": [H, K], "v": [H, V], "g": [H], "beta": [H]}


def declared(graph, T=None, N=None, **changes):
    """GDN's tensors in a graph; T and N open unless given."""
    made = {name: graph.tensor([T, *dim], name=name) for name, dim in DIMS.items()}
    made["cu_seqlens"] = graph.tensor(
        [None if N is None else N + 1], data_type=INT32, name="cu_seqlens"
    )
    return made | changes


def gdn(T=None, N=None, name="", **options):
    """A graph with one GDN node, its input tensors and its outputs."""
    graph = lagraph.Graph(io_data_type=FLOAT, device="cpu")
    ports = declared(graph, T, N)
    outputs = graph.gdn(**ports, name=name, **options)
    return graph, ports, outputs


def built(T=None, N=None, **options):
    graph, ports, outputs = gdn(T, N, **options)
    for out in outputs:
        if out is not None:
            out.set_output(True)
    graph.build()
    return graph, ports, outputs


def o_of(x):
    return torch.full((x["q"].shape[0], H, V), float("nan"))


# Tensors ----------------------------------------------------------------------------------------


def test_a_tensor_has_setters_that_return_it_and_getters():
    graph = lagraph.Graph()
    t = graph.tensor([2, 3], stride=[6, 2], data_type=torch.float16, name="a", uid=9)
    assert (t.get_name(), t.get_uid(), t.get_dim(), t.get_stride()) == ("a", 9, [2, 3], [6, 2])
    assert t.get_data_type() is lagraph.data_type.HALF
    assert not t.get_is_virtual()
    assert t.set_name("b").set_uid(4).set_dim([5, 3]).set_stride((3, 1)) is t
    assert t.set_data_type(lagraph.data_type.BFLOAT16).set_is_virtual(True) is t
    assert (t.name, t.uid, t.dim, t.stride) == ("b", 4, (5, 3), (3, 1))
    assert (t.data_type, t.is_virtual) == (lagraph.data_type.BFLOAT16, True)
    assert not t.set_output(True).get_is_virtual()
    assert repr(t) == "<Tensor 'b' uid=4 dim=[5, 3] bfloat16>"


@pytest.mark.parametrize(
    ("dim", "stride"),
    [([2, 3, 4], [12, 4, 1]), ([None, 3, 4], [12, 4, 1]), ([None], [1]), ([2, 0, 4], [4, 4, 1])],
    ids=str,
)
def test_strides_default_to_dense(dim, stride):
    assert lagraph.Graph().tensor(dim).get_stride() == stride


def test_a_data_type_is_taken_in_every_spelling():
    graph = lagraph.Graph()
    for spelling in (torch.bfloat16, lagraph.data_type.BFLOAT16, "bfloat16", "torch.bfloat16",
                     "BFLOAT16"):  # fmt: skip
        assert graph.tensor([1], data_type=spelling).data_type is lagraph.data_type.BFLOAT16
    assert graph.tensor([1]).data_type is lagraph.data_type.NOT_SET


@pytest.mark.parametrize(
    "template",
    [
        pytest.param(torch.zeros(4, 6, dtype=torch.float16)[:, ::2], id="torch"),
        pytest.param(np.zeros((4, 6), dtype=np.float16)[:, ::2], id="numpy"),
    ],
)
def test_tensor_like_follows_a_producer(template):
    t = lagraph.Graph().tensor_like(template, name="t")
    assert (t.get_dim(), t.get_stride()) == ([4, 3], [6, 2])
    assert t.get_data_type() is lagraph.data_type.HALF


def test_tensor_like_follows_a_graph_tensor():
    graph = lagraph.Graph()
    a = graph.tensor([None, 2], data_type=torch.float32, name="a")
    b = graph.tensor_like(a, name="b")
    assert (b.get_dim(), b.data_type, b.name) == ([None, 2], FLOAT, "b")
    assert b.uid != a.uid


def test_uids_are_unique_and_given_ones_win():
    graph = lagraph.Graph()
    a, b = graph.tensor([1], name="a"), graph.tensor([1], name="b", uid=1)
    assert (a.uid, b.uid) == (2, 1)
    c = graph.tensor([1], name="c", uid=-1)  # cuDNN's "not set"
    assert len({a.uid, b.uid, c.uid}) == 3
    with pytest.raises(errors.GraphError, match="uid 1 already belongs to tensor 'b'"):
        graph.tensor([1], uid=1)
    with pytest.raises(errors.GraphError, match="uid 1 already belongs"):
        a.set_uid(1)
    assert a.uid == 2


def test_names_are_unique_and_made_up_where_missing():
    graph = lagraph.Graph()
    graph.tensor([1], name="tensor_1")
    made = [graph.tensor([1]).name for _ in range(3)]
    assert len({*made, "tensor_1"}) == 4
    with pytest.raises(errors.GraphError, match="'tensor_1' is taken"):
        graph.tensor([1], name="tensor_1")
    with pytest.raises(errors.GraphError, match="'tensor_1' is taken"):
        graph.tensor([1], name="b").set_name("tensor_1")


BAD_TENSORS = {
    "no dim": (lambda g: g.tensor(None), "dim"),
    "a number for dim": (lambda g: g.tensor(3), "dim"),
    "negative": (lambda g: g.tensor([-1, 2]), "dim"),
    "a fraction": (lambda g: g.tensor([1.5]), "dim"),
    "words": (lambda g: g.tensor(["two"]), "dim"),
    "stride of another rank": (lambda g: g.tensor([2, 3], [3]), "stride"),
    "uid of words": (lambda g: g.tensor([1], uid="x"), "uid"),
    "unknown data type": (lambda g: g.tensor([1], data_type="float7"), "data_type"),
    "data type without a name": (lambda g: g.tensor([1], data_type=torch.complex64), "data_type"),
    "set_dim": (lambda g: g.tensor([1]).set_dim([-2]), "dim"),
    "set_stride": (lambda g: g.tensor([1]).set_stride([1, 1]), "stride"),
    "set_data_type": (lambda g: g.tensor([1]).set_data_type(7), "data_type"),
}


@pytest.mark.parametrize(("make", "field"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_a_bad_descriptor_is_refused(make, field):
    with pytest.raises(errors.InvalidOption, match=r"expected .*, got ") as caught:
        make(lagraph.Graph())
    assert (caught.value.op[:6], caught.value.argument) == ("tensor", field)
    assert caught.value.mend


def test_tensor_like_refuses_what_is_no_tensor():
    with pytest.raises(errors.DtypeMismatch, match=r"tensor_like\.template: expected a torch"):
        lagraph.Graph().tensor_like([1, 2])


@pytest.mark.parametrize("field", ["io_data_type", "intermediate_data_type", "compute_data_type"])
def test_a_graph_refuses_an_unknown_data_type(field):
    with pytest.raises(errors.InvalidOption, match=rf"Graph\.{field}: expected"):
        lagraph.Graph(**{field: "float7"})


def test_compute_is_never_narrower_than_fp32():
    with pytest.raises(errors.InvalidOption, match="compute_data_type: expected FLOAT or DOUBLE"):
        lagraph.Graph(compute_data_type=torch.float16)
    graph = lagraph.Graph(io_data_type=FLOAT, compute_data_type=FLOAT, device="cpu")
    with pytest.raises(errors.InvalidOption, match=r"gdn\.compute_data_type"):
        graph.gdn(**declared(graph), compute_data_type=torch.bfloat16)


def test_pygraph_takes_cudnns_positional_arguments():
    graph = lagraph.pygraph("mine", lagraph.data_type.HALF, FLOAT, FLOAT)
    assert graph.inspect()["context"] == {
        "io_data_type": "HALF", "intermediate_data_type": "FLOAT", "compute_data_type": "FLOAT",
    }  # fmt: skip
    assert graph.name == "mine"


# Adding a node ----------------------------------------------------------------------------------


def test_one_node_per_graph():
    graph, ports, _ = gdn()
    with pytest.raises(errors.GraphError, match="per graph: this one has GDN, cannot add KDA"):
        graph.kda(**ports)


def test_a_refused_node_leaves_the_graph_open():
    graph = lagraph.Graph(io_data_type=FLOAT, device="cpu")
    ports = declared(graph)
    with pytest.raises(errors.InvalidOption):
        graph.gdn(**ports, gate_domain="lin")
    with pytest.raises(errors.RuleBroken):
        graph.gdn(**ports, allow_neg_eigval=True)
    o, *_ = graph.gdn(**ports)
    graph.build()
    assert o.get_dim() == [None, H, V]


def test_a_tensor_of_another_graph_is_refused():
    graph, other = lagraph.Graph(io_data_type=FLOAT), lagraph.Graph(io_data_type=FLOAT)
    with pytest.raises(errors.GraphError, match=r"gdn\.q: tensor 'q' is of another graph"):
        graph.gdn(**declared(graph, q=declared(other)["q"]))


def test_outputs_are_named_after_the_node():
    _, _, (o, state, rows) = gdn(name="layer3", output_final_state=True)
    assert (o.name, state.name, rows) == ("layer3::O", "layer3::final_state", None)


def test_outputs_are_inferred_with_t_and_n_open():
    _, _, (o, state, rows) = gdn(output_final_state=True, checkpoint_every_n_tokens=16)
    assert o.get_dim() == [None, H, V]
    assert state.get_dim() == [None, H, V, K]
    assert rows.get_dim() == [None, H, V, K]
    assert {t.data_type for t in (o, state, rows)} == {FLOAT}
    _, _, (o, state, rows) = gdn(40, 3, output_final_state=True, checkpoint_every_n_tokens=16)
    assert (o.get_dim()[0], state.get_dim()[0], rows.get_dim()[0]) == (40, 3, 40 // 16 + 3)


def test_only_t_and_n_may_be_left_open():
    graph = lagraph.Graph(io_data_type=FLOAT)
    with pytest.raises(errors.ShapeMismatch, match=r"gdn\.q: expected a size for dim H, got None"):
        graph.gdn(**declared(graph, q=graph.tensor([None, None, K])))


def test_a_declared_output_is_checked():
    graph, _, (o, *_) = gdn()
    o.set_dim([None, H, V + 1])
    with pytest.raises(errors.ShapeMismatch, match=r"gdn\.O: expected \[None, 2, 8\]"):
        graph.validate()
    graph, _, (o, *_) = gdn()
    o.set_data_type(torch.float16)
    with pytest.raises(errors.DtypeMismatch, match=r"gdn\.O: expected float32, got float16"):
        graph.validate()


def test_a_given_output_dim_is_checked_at_execution():
    graph, _, (o, *_) = gdn()
    o.set_dim([7, H, V]).set_output(True)
    graph.build()
    x = inputs(7)
    graph.execute({**x, o: o_of(x)})
    x = inputs(8, (8,))
    with pytest.raises(errors.ShapeMismatch, match="expected T=7, as the graph declares"):
        graph.execute({**x, o: o_of(x)})


def test_checkpoints_take_the_data_type_of_their_tensor():
    graph = lagraph.Graph(io_data_type=torch.bfloat16, device="cpu")
    ports = declared(graph)
    for name in ("g", "beta"):
        ports[name].set_data_type(FLOAT)
    o, _, rows = graph.gdn(**ports, checkpoint_every_n_tokens=16)
    rows.set_data_type(FLOAT).set_output(True)
    o.set_output(True)
    graph.build()
    x = inputs(40, (40,), torch.bfloat16)
    got = torch.full((3, H, V, K), float("nan"))
    graph.execute({**x, o: o_of(x).bfloat16(), rows: got})
    wide, narrow = (
        ops.gated_delta_net(*x.values(), checkpoint_every_n_tokens=16, checkpoint_dtype=dtype)[2]
        for dtype in (torch.float32, None)
    )
    assert (wide.dtype, narrow.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(got, wide)
    assert torch.equal(got.bfloat16(), narrow)


# The order of calls -----------------------------------------------------------------------------

TOO_EARLY = {
    "validate": (lambda g: g.validate(), "no node"),
    "build": (lambda g: g.build(), "no node"),
    "execute": (lambda g: g.execute({}), "no node"),
    "serialize": (lambda g: g.serialize(), "no node"),
    "key": (lambda g: g.key(), "no node"),
    "explain": (lambda g: g.explain(), "no node"),
    "check_support": (lambda g: g.check_support(), "no node"),
    "get_workspace_size": (lambda g: g.get_workspace_size(), "not built"),
    "get_plan_name_at_index": (lambda g: g.get_plan_name_at_index(0), "no plans yet"),
    "select_plan": (lambda g: g.select_plan(0), "no plans yet"),
}


@pytest.mark.parametrize(("call", "what"), TOO_EARLY.values(), ids=TOO_EARLY)
def test_a_call_that_comes_too_early_says_what_is_missing(call, what):
    with pytest.raises(errors.GraphError, match=what):
        call(lagraph.Graph())


TOO_LATE = {
    "tensor": lambda g, t: g.tensor([1]),
    "tensor_like": lambda g, t: g.tensor_like(torch.zeros(1)),
    "builder": lambda g, t: g.gdn(*[t] * 6),
    "set_output": lambda g, t: t.set_output(True),
    "set_name": lambda g, t: t.set_name("new"),
    "set_uid": lambda g, t: t.set_uid(99),
    "set_dim": lambda g, t: t.set_dim([None, H, V]),
    "set_stride": lambda g, t: t.set_stride([H * V, V, 1]),
    "set_data_type": lambda g, t: t.set_data_type(FLOAT),
}


@pytest.mark.parametrize("call", TOO_LATE.values(), ids=TOO_LATE)
def test_a_planned_graph_is_frozen(call):
    graph, _, (o, *_) = gdn()
    graph.build_operation_graph()
    before = graph.inspect()
    with pytest.raises(errors.GraphError, match="the graph is planned"):
        call(graph, o)
    assert graph.inspect() == before


def test_planning_is_done_once_and_a_built_graph_keeps_its_plan():
    graph, *_ = built()
    with pytest.raises(errors.GraphError, match="plans exist already"):
        graph.create_execution_plans()
    with pytest.raises(errors.GraphError, match="its plan chosen"):
        graph.select_plan(0)
    with pytest.raises(errors.GraphError, match="its plan chosen"):
        graph.deselect_engines(["eager"])
    graph.validate()
    graph.build_operation_graph()


def test_each_step_of_build_may_be_called_alone():
    graph, _, (o, *_) = gdn()
    o.set_output(True)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([lagraph.heur_mode.A, lagraph.heur_mode.FALLBACK])
    assert graph.check_support() is None
    graph.build_plans(lagraph.build_plan_policy.ALL)
    assert graph.plan_name == "gdn_eager"


def test_execute_builds_a_graph_that_nobody_built():
    graph, _, (o, *_) = gdn()
    o.set_output(True)
    x = inputs()
    out = o_of(x)
    graph.execute({**x, o: out})
    assert torch.equal(out, ops.gated_delta_net(*x.values())[0])


def test_heuristics_are_members():
    graph, *_ = gdn()
    with pytest.raises(errors.InvalidOption, match="heuristics: expected members"):
        graph.create_execution_plans(["A"])


# Plans ------------------------------------------------------------------------------------------


def test_plans_are_listed():
    graph, *_ = gdn()
    assert graph.get_execution_plan_count() == 0
    assert graph.plan_name is None
    graph.create_execution_plans()
    names = [graph.get_plan_name_at_index(i) for i in range(graph.get_execution_plan_count())]
    assert names == ["gdn_eager"]
    for index in (-1, 1):
        with pytest.raises(errors.PlanNotOffered, match=rf"plan index {index} is outside"):
            graph.get_plan_name_at_index(index)


@pytest.mark.parametrize("pin", [0, "gdn_eager", "gdn_eager[chunk=16]"], ids=str)
def test_a_pin_is_obeyed(pin):
    graph, *_ = gdn()
    graph.create_execution_plans()
    assert graph.select_plan(pin) is graph
    graph.build()
    assert graph.plan_name == ("gdn_eager" if pin == 0 else pin)


BAD_PINS = {
    "unknown plan": ("gdn_fast", "no plan 'gdn_fast'.*Plans are: .*gdn_eager"),
    "unknown knob": ("gdn_eager[stages=2]", "no knob 'stages'. Knobs of gdn_eager: chunk"),
    "knob out of range": ("gdn_eager[chunk=7]", r"chunk is one of \[16, 32, 64, 128\], got 7"),
    "another family's": ("kda_eager", "no plan 'kda_eager'"),
    "no plan name": ("gdn eager", "expected <family>_<engine>"),
    "index beyond": (3, r"plan index 3 is outside"),
}


@pytest.mark.parametrize(("pin", "what"), BAD_PINS.values(), ids=BAD_PINS)
def test_a_bad_pin_is_refused(pin, what):
    graph, *_ = gdn()
    graph.create_execution_plans()
    with pytest.raises(errors.PlanNotOffered, match=what):
        graph.select_plan(pin)
    graph.build()
    assert graph.plan_name == "gdn_eager"


@pytest.mark.parametrize("pin", [None, True, 1.0], ids=str)
def test_a_pin_is_an_index_or_a_name(pin):
    graph, *_ = gdn()
    graph.create_execution_plans()
    with pytest.raises(errors.InvalidOption, match="expected an index or a plan's name"):
        graph.select_plan(pin)


@pytest.mark.parametrize("words", [["eager"], "eager", ("gdn_eager",)], ids=str)
def test_barred_engines_do_not_run(words):
    graph, *_ = gdn()
    graph.deselect_engines(words)
    for call in (graph.check_support, graph.build_plans, graph.build):
        with pytest.raises(errors.NoEngine, match="gdn_eager: barred by desel") as caught:
            call()
        assert "plan_name" not in str(caught.value), "a barred plan is no advice"


def test_a_pin_that_is_barred_is_refused():
    graph, *_ = gdn()
    graph.create_execution_plans()
    graph.deselect_engines(["eager"]).select_plan("gdn_eager")
    with pytest.raises(errors.PlanNotOffered, match="pinned by select_plan and barred by"):
        graph.build()


def test_barring_another_engine_changes_nothing():
    graph, *_ = gdn()
    graph.deselect_engines(["frost"])
    graph.build()
    assert graph.plan_name == "gdn_eager"


def test_explain_says_for_every_engine_why():
    graph, *_ = gdn()
    told = graph.explain()
    lines = str(told).splitlines()
    assert lines[0] == "GDN: runs gdn_eager"
    assert "  gdn_eager: serves" in lines
    assert len(lines) == 1 + len(registry.ENGINES)
    assert [v.engine for v in told.verdicts] == [row.name for row in registry.ENGINES]


def test_explain_for_a_gpu_that_is_not_here():
    graph = lagraph.Graph(io_data_type=torch.bfloat16, device="cuda", sm_version=900)
    ports = {n: graph.tensor([None, 4, 96], name=n) for n in "qkv"}
    gates = {n: graph.tensor([None, 4], data_type=FLOAT, name=n) for n in ("g", "beta")}
    graph.gdn(**ports, **gates, cu_seqlens=graph.tensor([None], data_type=INT32))
    lines = str(graph.explain()).splitlines()
    assert len(lines) == 1 + len(registry.ENGINES)
    assert "  gdn_eager: serves when pinned" in lines
    with pytest.raises(errors.NoEngine, match=r'on sm90: .*select_plan\("gdn_eager"\)'):
        graph.build()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_missing_is_said():
    graph = lagraph.Graph(io_data_type=FLOAT, device="cuda")
    graph.gdn(**declared(graph))
    with pytest.raises(errors.DeviceMismatch, match="expected a CUDA device, got none"):
        graph.build()


# Executing --------------------------------------------------------------------------------------


def test_one_built_graph_serves_every_length():
    graph, _, (o, state, _) = built(output_final_state=True)
    for T, lengths in ((7, (3, 0, 4)), (1, (1,)), (0, ()), (0, (0, 0)), (40, (17, 23)), (9, (4,))):
        x = inputs(T, lengths)
        want_o, want_state = ops.gated_delta_net(*x.values(), output_final_state=True)
        out, end = o_of(x), torch.full((len(lengths), H, V, K), float("nan"))
        graph.execute({**x, o: out, state: end})
        used = sum(lengths)
        assert torch.equal(out[:used], want_o[:used])
        assert torch.equal(end, want_state)


@pytest.mark.parametrize(
    ("T", "lengths", "what"),
    [(8, (3, 0, 5), "T=7"), (7, (7,), "N=3")],
    ids=["T", "N"],
)
def test_given_dims_are_checked(T, lengths, what):
    graph, _, (o, *_) = built(7, 3)
    x = inputs()
    graph.execute({**x, o: o_of(x)})
    bad = inputs(T, lengths)
    with pytest.raises(errors.ShapeMismatch, match=f"expected {what}, as the graph declares"):
        graph.execute({**bad, o: o_of(bad)})
    graph.execute({**x, o: o_of(x)})


def test_a_given_pool_size_is_checked_at_every_call():
    graph = lagraph.Graph(io_data_type=FLOAT, device="cpu")
    pool = graph.tensor([5, H, V, K], name="pool")
    rows = graph.tensor([None], data_type=INT32, name="rows")
    o, *_ = graph.gdn(**declared(graph), initial_state=pool, state_indices=rows)
    o.set_output(True)
    graph.build()
    x = inputs()
    pack = {**x, o: o_of(x), "rows": torch.tensor([1, -1, 4])}
    for size in (5, 6, 5):
        pack["pool"] = torch.zeros(size, H, V, K)
        pack["rows"] = torch.tensor([1, -1, 4], dtype=torch.int32)
        if size == 5:
            graph.execute(pack)
            continue
        with pytest.raises(errors.ShapeMismatch, match="expected a pool of 5 rows, got 6 rows"):
            graph.execute(pack)


@pytest.mark.parametrize("key", ["tensor", "name", "uid"])
def test_buffers_go_by_tensor_by_name_or_by_uid(key):
    graph, ports, (o, *_) = built()
    x = inputs()
    out = o_of(x)
    read = {"tensor": lambda t: t, "name": lambda t: t.name, "uid": lambda t: t.uid}[key]
    graph.execute({read(ports[name]): value for name, value in x.items()} | {read(o): out})
    assert torch.equal(out, ops.gated_delta_net(*x.values())[0])


def test_buffers_may_be_numpy_arrays():
    graph, _, (o, *_) = built()
    x = inputs()
    out = np.full((7, H, V), np.nan, dtype=np.float32)
    graph.execute({name: value.numpy() for name, value in x.items()} | {o: out})
    assert np.array_equal(out, ops.gated_delta_net(*x.values())[0].numpy())


class Producer:
    """Nothing but DLPack."""

    def __init__(self, tensor):
        self._tensor = tensor

    def __dlpack__(self, **options):
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._tensor.__dlpack_device__()


def test_buffers_may_be_any_dlpack_producer():
    graph, _, (o, *_) = built()
    x = inputs()
    out = o_of(x)
    graph.execute({name: Producer(value) for name, value in x.items()} | {o: Producer(out)})
    assert torch.equal(out, ops.gated_delta_net(*x.values())[0])


@pytest.mark.parametrize("kind", [torch.Tensor, np.ndarray, Producer], ids=lambda k: k.__name__)
def test_a_port_may_be_given_its_data_at_once(kind):
    wrap = {torch.Tensor: lambda t: t, np.ndarray: torch.Tensor.numpy, Producer: Producer}[kind]
    x = inputs()
    graph = lagraph.Graph()
    o, *_ = graph.gdn(**{name: wrap(value) for name, value in x.items()})
    o.set_output(True)
    graph.build()
    out = o_of(x)
    graph.execute({o: out})
    assert torch.equal(out, ops.gated_delta_net(*x.values())[0])
    # Data in the variant pack goes before data that was bound.
    other = inputs(seed=1)
    graph.execute({o: out} | {f"gdn::{name}": value for name, value in other.items()})
    assert torch.equal(out, ops.gated_delta_net(*other.values())[0])


def test_one_tensor_may_feed_two_ports():
    graph = lagraph.Graph(io_data_type=FLOAT, device="cpu")
    ports = declared(graph)
    ports["k"] = ports["q"]
    o, *_ = graph.gdn(**ports)
    o.set_output(True)
    graph.build()
    x = inputs()
    out = o_of(x)
    graph.execute({name: value for name, value in x.items() if name != "k"} | {o: out})
    assert torch.equal(out, ops.gated_delta_net(**{**x, "k": x["q"]})[0])


def test_a_virtual_output_needs_no_buffer():
    graph, _, (o, state, _) = gdn(output_final_state=True)
    o.set_output(True)
    assert state.is_virtual
    graph.build()
    x = inputs()
    out = o_of(x)
    graph.execute({**x, o: out})
    assert torch.equal(out, ops.gated_delta_net(*x.values())[0])


VIEWS = {
    "interleaved k and v": lambda x: {
        "k": torch.stack([x["k"], x["v"][..., :K]], 1)[:, 0],
        "v": torch.cat([x["k"], x["v"]], -1)[..., K:],
    },
    "fused qkv": lambda x: dict(zip("qkv", torch.cat(
        [x["q"], x["k"], x["v"]], -1).split([K, K, V], -1), strict=True)),
    "column of gates": lambda x: {"g": torch.cat([x["g"], x["beta"]], -1)[:, :H],
                                  "beta": torch.cat([x["g"], x["beta"]], -1)[:, H:]},
    "every other offset": lambda x: {"cu_seqlens": torch.stack(
        [x["cu_seqlens"], torch.full_like(x["cu_seqlens"], 99)], -1)[:, 0]},
    "transposed": lambda x: {"v": x["v"].transpose(1, 2).contiguous().transpose(1, 2)},
}  # fmt: skip


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("declare", ["declared", "open"])
def test_strided_views_equal_contiguous_tensors(view, declare):
    x = inputs()
    want = ops.gated_delta_net(*x.values())[0]
    views = x | view(x)
    assert not all(t.is_contiguous() for t in views.values())
    graph = lagraph.Graph(io_data_type=FLOAT, device="cpu")
    if declare == "declared":
        ports = {name: graph.tensor_like(value, name=name) for name, value in views.items()}
    else:
        ports = declared(graph)
    o, *_ = graph.gdn(**ports)
    o.set_output(True)
    graph.build()
    out = o_of(x)
    graph.execute({**views, o: out})
    assert torch.equal(out, want)
    assert torch.equal(ops.gated_delta_net(**views)[0], want)


def test_a_strided_output_is_filled_and_its_gaps_left_alone():
    graph, _, (o, *_) = built()
    x = inputs()
    wide = torch.full((7, H, 2 * V), 9.0)
    graph.execute({**x, o: wide[..., ::2]})
    assert torch.equal(wide[..., ::2], ops.gated_delta_net(*x.values())[0])
    assert torch.equal(wide[..., 1::2], torch.full((7, H, V), 9.0))


def test_execute_records_no_gradients():
    graph, _, (o, *_) = built()
    x = inputs()
    x["q"].requires_grad_()
    out = o_of(x)
    graph.execute({**x, o: out})
    assert not out.requires_grad


BAD_PACKS = {
    "a buffer is missing": (lambda x, o: x.pop("k"), errors.RuleBroken, "a buffer for tensor 'k'"),
    "an unknown name": (lambda x, o: x.update(Q=x["q"]), errors.GraphError, "'Q' names no tensor"),
    "an unknown uid": (lambda x, o: x.update({77: x["q"]}), errors.GraphError, "77 names no"),
    "no tensor": (lambda x, o: x.update(q=[1.0]), errors.DtypeMismatch, "got list"),
    "an output of another shape": (lambda x, o: x.update({o: torch.empty(6, H, V)}),
                                   errors.ShapeMismatch, r"gdn\.O: expected \[7, 2, 8\]"),
    "an output of another dtype": (lambda x, o: x.update({o: torch.empty(7, H, V).half()}),
                                   errors.DtypeMismatch, r"gdn\.O: expected float32"),
    "an output elsewhere": (lambda x, o: x.update({o: torch.empty(7, H, V, device="meta")}),
                            errors.DeviceMismatch, r"gdn\.O: expected cpu, got meta"),
}  # fmt: skip


@pytest.mark.parametrize(("spoil", "kind", "what"), BAD_PACKS.values(), ids=BAD_PACKS)
def test_a_bad_variant_pack_is_refused(spoil, kind, what):
    graph, _, (o, *_) = built()
    pack = {**inputs(), o: torch.zeros(7, H, V)}
    spoil(pack, o)
    with pytest.raises(kind, match=what):
        graph.execute(pack)
    x = inputs()
    out = o_of(x)
    graph.execute({**x, o: out})
    assert torch.equal(out, ops.gated_delta_net(*x.values())[0])


OTHERS = {
    "another dtype": (lambda x: {n: t.bfloat16() for n, t in x.items() if t.is_floating_point()},
                      errors.DtypeMismatch, r"gdn\.q: expected float32, got bfloat16"),
    "another K": (lambda x: {n: torch.cat([x[n], x[n]], -1) for n in "qk"},
                  errors.ShapeMismatch, r"gdn\.q: expected \[None, 2, 4\], got \[7, 2, 8\]"),
    "another dtype of a gate": (lambda x: {"g": x["g"].half()},
                                errors.DtypeMismatch, r"gdn\.g: expected float32, got float16"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "what"), OTHERS.values(), ids=OTHERS)
def test_buffers_that_agree_but_are_not_the_declared_ones_are_refused(change, kind, what):
    graph, *_ = built()
    x = inputs()
    other = x | change(x)
    ops.gated_delta_net(**other)  # a good call by itself
    for pack in (other, x, other):
        if pack is x:
            graph.execute(pack)
            continue
        with pytest.raises(kind, match=what):
            graph.execute(pack)


@pytest.mark.parametrize("pack", [None, [1]], ids=["None", "a list"])
def test_a_variant_pack_is_a_dict(pack):
    graph, *_ = built()
    with pytest.raises(errors.DtypeMismatch, match="expected a dict of buffers"):
        graph.execute(pack)


def test_tensors_that_the_node_does_not_use_may_be_in_the_pack():
    graph = lagraph.Graph(io_data_type=FLOAT, device="cpu")
    spare = graph.tensor([1], name="spare")
    o, *_ = graph.gdn(**declared(graph))
    o.set_output(True)
    graph.build()
    x = inputs()
    graph.execute({**x, o: o_of(x), spare: torch.zeros(1), None: torch.zeros(1)})


def test_a_workspace_and_a_handle_are_taken():
    graph, _, (o, *_) = built()
    with pytest.raises(errors.GraphError, match="T and N are open here"):
        graph.get_workspace_size()
    size = graph.get_workspace_size(T=7, N=3)
    assert size >= 0
    assert built(7, 3)[0].get_workspace_size() == size
    handle = lagraph.create_handle()
    lagraph.set_stream(handle, None)
    x = inputs()
    out = o_of(x)
    graph.execute({**x, o: out}, torch.empty(size, dtype=torch.uint8), handle=handle)
    lagraph.destroy_handle(handle)
    assert torch.equal(out, ops.gated_delta_net(*x.values())[0])


def test_threads_share_a_graph():
    """Eight at once, from the first call on, each with its own lengths."""
    graph, _, (o, *_) = built()
    xs = [inputs(5 + i, (5 + i,), seed=i) for i in range(8)]
    wants = [ops.gated_delta_net(*x.values())[0] for x in xs]
    barrier, wrong = threading.Barrier(8), []

    def work(x, want):
        barrier.wait()
        for _ in range(5):
            out = o_of(x)
            graph.execute({**x, o: out})
            if not torch.equal(out, want):
                wrong.append(x)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(xs, wants, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# States in place --------------------------------------------------------------------------------


def stateful(pool=False, overwrite=False, final=True):
    graph = lagraph.Graph(io_data_type=FLOAT, device="cpu")
    ports = declared(graph, initial_state=graph.tensor([None, H, V, K], name="state"))
    if pool:
        ports["state_indices"] = graph.tensor([None], data_type=INT32, name="rows")
    o, state, _ = graph.gdn(**ports, output_final_state=final, overwrite_initial_state=overwrite)
    o.set_output(True)
    graph.build()
    return graph, o, state


def test_a_final_state_has_a_buffer_of_its_own():
    graph, o, state = stateful()
    x, start = inputs(), torch.randn(3, H, V, K)
    kept, end = start.clone(), torch.empty_like(start)
    graph.execute({**x, o: o_of(x), "state": start, state: end})
    assert torch.equal(start, kept)
    assert torch.equal(end, ops.gated_delta_net(*x.values(), initial_state=start,
                                                output_final_state=True)[1])  # fmt: skip


@pytest.mark.parametrize("passes", ["no buffer", "the same buffer", "a view of it"])
def test_overwriting_writes_into_initial_state(passes):
    graph, o, state = stateful(overwrite=True)
    x, start = inputs(), torch.randn(3, H, V, K)
    want_o, want = ops.gated_delta_net(
        *x.values(), initial_state=start.clone(), output_final_state=True
    )
    out = o_of(x)
    given = {"no buffer": {}, "the same buffer": {state: start}, "a view of it": {state: start[:]}}
    graph.execute({**x, o: out, "state": start} | given[passes])
    assert torch.equal(out, want_o)
    assert torch.equal(start, want)


def test_overwriting_refuses_another_buffer():
    graph, o, state = stateful(overwrite=True)
    x, start = inputs(), torch.randn(3, H, V, K)
    kept = start.clone()
    with pytest.raises(errors.RuleBroken, match=r"gdn\.final_state: expected the buffer"):
        graph.execute({**x, o: o_of(x), "state": start, state: torch.empty_like(start)})
    assert torch.equal(start, kept)


def test_a_pool_is_advanced_in_place_and_other_rows_keep_every_bit():
    graph, o, state = stateful(pool=True)
    assert state.get_dim() == [None, H, V, K]
    x, pool = inputs(), torch.randn(6, H, V, K)
    kept, rows = pool.clone(), torch.tensor([4, -1, 2], dtype=torch.int32)
    out = o_of(x)
    graph.execute({**x, o: out, "state": pool, "rows": rows})
    start = torch.stack([kept[4], torch.zeros(H, V, K), kept[2]])
    want_o, want = ops.gated_delta_net(*x.values(), initial_state=start, output_final_state=True)
    assert torch.equal(out, want_o)  # the padded sequence is empty here
    assert torch.equal(pool[[4, 2]], want[[0, 2]])
    assert torch.equal(pool[[0, 1, 3, 5]], kept[[0, 1, 3, 5]])


def test_a_pool_is_left_alone_unless_final_states_are_wanted():
    graph, o, state = stateful(pool=True, final=False)
    assert state is None
    x, pool = inputs(), torch.randn(6, H, V, K)
    kept, rows = pool.clone(), torch.tensor([4, 0, 2], dtype=torch.int32)
    graph.execute({**x, o: o_of(x), "state": pool, "rows": rows})
    assert torch.equal(pool, kept)


# Keeping ----------------------------------------------------------------------------------------


def test_a_graph_and_its_plan_come_back_from_json():
    graph, ports, (o, _, rows) = gdn(
        name="layer", output_final_state=True, checkpoint_every_n_tokens=16, scale=0.25
    )
    ports["q"].set_uid(70)
    o.set_output(True).set_uid(71).set_name("y").set_stride([H * V, V, 1])
    rows.set_data_type(FLOAT)
    graph.create_execution_plans()
    graph.select_plan("gdn_eager[chunk=16]")
    graph.build()
    text = graph.serialize()
    json.loads(text)
    back = lagraph.Graph().deserialize(text)
    assert back.serialize() == text
    assert back.key() == graph.key()
    assert back.inspect() == graph.inspect()
    assert back.plan_name == "gdn_eager[chunk=16]"
    x = inputs(40, (40,))
    outs = [o_of(x), o_of(x)]
    graph.execute({**x, "y": outs[0]})
    back.execute({**x, 71: outs[1]})
    assert torch.equal(*outs)


def test_an_unbuilt_graph_comes_back_unbuilt():
    graph, *_ = gdn()
    back = lagraph.Graph().deserialize(graph.serialize())
    assert back.plan_name is None
    back.build()
    assert back.plan_name == "gdn_eager"


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.name)
def test_every_node_comes_back_from_json(node):
    optional = all_optional(node)
    options = fixed(node) | needed_by(node, optional)
    graph, _ = graph_of(node, tensors(node, optional, options=options), **options)
    graph.build()
    back = lagraph.Graph().deserialize(graph.serialize())
    assert back.serialize() == graph.serialize()
    assert back.key() == graph.key()


BAD_TEXTS = {
    "no json": ("graph", "not the text of serialize"),
    "no text": (None, "not the text of serialize"),
    "another format": ('{"lagraph": 2}', "format 2 is unknown; 1 is read"),
    "a list": ("[1]", "format None is unknown"),
}


@pytest.mark.parametrize(("text", "what"), BAD_TEXTS.values(), ids=BAD_TEXTS)
def test_a_bad_text_is_refused(text, what):
    with pytest.raises(errors.GraphError, match=what):
        lagraph.Graph().deserialize(text)


def test_deserialize_wants_an_empty_graph():
    graph, *_ = gdn()
    with pytest.raises(errors.GraphError, match="empty graph"):
        graph.deserialize(graph.serialize())


def keyed(T=None, N=None, change=None, **options):
    graph, ports, outputs = gdn(T, N, **options)
    if change is not None:
        change(ports, outputs)
    return graph.key()


def test_keys_are_equal_where_only_names_differ():
    plain = keyed()
    assert keyed() == plain
    assert keyed(name="layer") == plain
    assert keyed(change=lambda p, o: p["q"].set_name("Q").set_uid(50)) == plain
    assert keyed(scale=None) == plain
    assert keyed(output_final_state=False) == plain


KEYS = {
    "an option": {"use_qk_l2norm": True},
    "scale": {"scale": 0.5},
    "an output": {"output_final_state": True},
    "T given": {"T": 7},
    "N given": {"N": 3},
    "a gate's dtype": {"change": lambda p, o: p["g"].set_data_type(torch.bfloat16)},
    "strides": {"change": lambda p, o: p["v"].set_stride([2 * H * V, V, 1])},
}


@pytest.mark.parametrize("changes", KEYS.values(), ids=KEYS)
def test_keys_differ_where_the_problem_does(changes):
    assert keyed(**changes) != keyed()


def test_inspect_is_plain_data():
    graph, *_ = gdn(output_final_state=True, scale=0.5)
    seen = graph.inspect()
    json.dumps(seen)
    (node,) = seen["nodes"]
    assert node["params"] == {"output_final_state": True, "scale": 0.5}
    assert node["inputs"]["q"] == "q"
    assert node["outputs"] == {"O": "gdn::O", "final_state": "gdn::final_state"}
    assert seen["tensors"]["gdn::O"]["dim"] == [None, H, V]
    assert seen["plan"] is None
    graph.build()
    assert graph.inspect()["plan"] == "gdn_eager"
    assert repr(graph) == "<Graph 'graph' GDN built>"
    assert lagraph.Graph().inspect()["nodes"] == []


# All twenty builders ----------------------------------------------------------------------------


@pytest.mark.parametrize("optional", [False, True], ids=["required", "everything"])
@pytest.mark.parametrize("node", NODES, ids=lambda node: node.name)
def test_every_builder_runs_and_equals_the_operator(node, optional):
    names = all_optional(node) if optional else []
    options = fixed(node) | needed_by(node, names)
    switches = ("output_final_state", "output_transition", "output_pre_gate", "use_qk_l2norm")
    if optional:
        options |= {a.name: True for a in node.attrs if a.name in switches}
        if any(a.name == "checkpoint_every_n_tokens" for a in node.attrs):
            options["checkpoint_every_n_tokens"] = node.family.checkpoint_step
    given = tensors(node, names, options=options)
    if node.name == "mamba2_summary_bwd":
        given["k"] = given["q"]  # the operator has no B: C stands in, and neither matters
    graph, outputs = graph_of(node, given, **options)
    buffers = {}
    for name, out in outputs.items():
        if out is not None:
            out.set_output(True)
            fill = torch.full(out.get_dim(), float("nan"), dtype=out.get_data_type().value)
            buffers[name] = fill
    graph.build()
    graph.execute(given | {outputs[name]: buffer for name, buffer in buffers.items()})
    assert graph.plan_name == f"{node.plan_prefix}_eager"
    assert set(buffers) == set(node.output_names if optional else
                               [o.name for o in node.outputs if o.when is None])  # fmt: skip
    names = [name for name in node.output_names if name in buffers]
    # The registered operator on the same request: it returns all outputs, empty where absent.
    ports = [port.name for port in node.inputs if port.role != "pool"]
    text = lagraph.plan.request(node, options).text
    results = getattr(torch.ops.lagraph, node.op)(*(given.get(name) for name in ports), text)
    same = dict(zip(node.output_names, results, strict=True))
    for name in names:
        # Of the allocated checkpoints, only the first row of each sequence is in use.
        rows = slice(0, SIZES["N"]) if name == "state_checkpoints" else slice(None)
        assert torch.equal(buffers[name][rows], same[name][rows]), name
    if node.direction != "backward" and (optional or node.direction != "summary"):
        public = flat(calls(node)(given, **options))
        shared = [x for x in public if x.numel()]
        for name, x in zip([n for n in names if n != "O_pre"], shared, strict=True):
            assert torch.equal(x[: SIZES["N"]], buffers[name][: SIZES["N"]]), name
