"""Which engine runs: support tables, verdicts in words, plan names, pins."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from types import MappingProxyType, SimpleNamespace

import fake
import pytest
import torch
from declared import NODES, fixed, ids, tensors

import lagraph
from lagraph import errors, infer, ops, plan, registry, select
from lagraph.__main__ import main
from lagraph.registry import EngineRow
from lagraph.select import PlanName, Preference

NODE = registry.node("gdn")


@pytest.fixture
def engines(monkeypatch):
    """Install fake engines before eager, in this order."""
    yield lambda *made, **rest: fake.install(monkeypatch, *made, **rest)
    monkeypatch.undo()
    fake.forget()


def problem(node=NODE, **changes):
    """A node's problem, K = 3 and V = 8, changed."""
    given = tensors(node)
    metas = plan.metas_of([given.get(name) for name in node.input_names])
    options = node.options(fixed(node))
    made = plan.problem_of(node, infer.bind(node, metas, options), options, metas)
    if "sizes" in changes:
        changes["sizes"] = MappingProxyType(dict(made.sizes) | changes["sizes"])
    if "io" in changes:
        io = changes.pop("io")
        changes["dtypes"] = MappingProxyType(dict(made.dtypes) | dict.fromkeys(("q", "k", "v"), io))
    if "layouts" in changes:
        changes["layouts"] = MappingProxyType(dict(made.layouts) | changes["layouts"])
    if "options" in changes:
        changes["options"] = SimpleNamespace(**vars(made.options) | changes["options"])
    return replace(made, **changes)


CUDA = {"device": "cuda", "arch": 90}
CPU_ONLY, GPU_ONLY = frozenset({"cpu"}), frozenset({"cuda"})
REASONS = {
    "everything": ({}, {}, None),
    "not on a CPU": ({"devices": GPU_ONLY}, {}, "runs on cuda, not on cpu"),
    "not on a GPU": ({"devices": CPU_ONLY}, CUDA, "runs on cpu, not on cuda"),
    "arch too old": ({"arch": (90, None)}, CUDA | {"arch": 80}, "needs sm90, this device is sm80"),
    "arch as low as it goes": ({"arch": (90, None)}, CUDA, None),
    "arch beyond": ({"arch": (90, 90)}, CUDA | {"arch": 100},
                    "is not proven beyond sm90, this device is sm100"),
    "arch newer, no end": ({"arch": (90, None)}, CUDA | {"arch": 120}, None),
    "arch does not count on a CPU": ({"arch": (90, None)}, {}, None),
    "dtype": ({"dtypes": (torch.bfloat16, torch.float16)}, {}, "takes bfloat16 or float16, not "
              "float32"),
    "dtype served": ({"dtypes": (torch.bfloat16,)}, {"io": torch.bfloat16}, None),
    "K": ({"dims": {"K": (64, 128)}}, {}, "K=3 not in {64, 128}"),
    "V": ({"dims": {"V": (64, 128)}}, {"sizes": {"V": 96}}, "V=96 not in {64, 128}"),
    "K served": ({"dims": {"K": (64, 128)}}, {"sizes": {"K": 128}}, None),
    "direction": ({"serves": frozenset({("gdn", "backward")})}, {}, "does not serve gdn forward"),
    "direction served": ({"serves": frozenset({("gdn", "forward")})}, {}, None),
    "strides": ({"layouts": 1}, {"layouts": {"v": 3}},
                "strides of v: call v.contiguous() first"),
    "strides served": ({"layouts": 1}, {"layouts": {"v": 1}}, None),
    "an option": ({"without": {"batch_invariant": "splits long sequences"}},
                  {"options": {"batch_invariant": True}},
                  "batch_invariant: splits long sequences"),
    "an option that is off": ({"without": {"batch_invariant": "splits long sequences"}}, {}, None),
    "an option of others": ({"without": {"beta_guard": "not built"}}, {}, None),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "changes", "reason"), REASONS.values(), ids=REASONS)
def test_a_support_table_says_why(fields, changes, reason):
    assert fake.table(**fields).reasons(problem(**changes)) == ([reason] if reason else [])


def test_every_reason_is_given_at_once():
    table = fake.table(dims={"K": (64,), "V": (64,)}, dtypes=(torch.float16,))
    assert len(table.reasons(problem())) == 3


# Packages ---------------------------------------------------------------------------------------

VERSIONS = {
    "newer": ("4.10.0", None),
    "equal": ("4.8.1", None),
    "longer": ("4.8.1.post2", None),
    "older": ("4.8.0", "needs some-dsl >= 4.8.1, found 4.8.0"),
    "older by number, not by letter": ("4.7.11", "needs some-dsl >= 4.8.1, found 4.7.11"),
    "absent": (None, "needs some-dsl >= 4.8.1, which is not installed"),
}


@pytest.mark.parametrize(("found", "reason"), VERSIONS.values(), ids=VERSIONS)
def test_a_missing_or_old_package_declines_with_both_versions(engines, monkeypatch, found, reason):
    def version(name):
        assert name == "some-dsl"
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(select.metadata, "version", version)
    engines(fake.Engine("fast"), requires={"fast": (("some-dsl", "4.8.1"),)})
    verdict = select.verdicts(problem())[0]
    assert (verdict.ok, verdict.reasons) == (reason is None, (reason,) if reason else ())
    if reason:
        assert select.select(problem()).base == "gdn_eager"
        with pytest.raises(errors.PlanNotOffered, match=f"plan gdn_fast declines .*{reason}"):
            select.select(problem(), "gdn_fast")
        with pytest.raises(errors.MissingBackend, match=reason):
            select.build(problem(), PlanName("gdn_fast"))


def test_the_engines_of_this_library_name_real_packages():
    for row in registry.ENGINES:
        assert isinstance(row, EngineRow)
        for package, version in row.requires:
            assert select._version(version), package


# Ranking and pins -------------------------------------------------------------------------------


def test_the_first_engine_that_serves_is_chosen(engines):
    engines(fake.Engine("first", dims={"K": (64,)}), fake.Engine("second"))
    assert select.select(problem()).base == "gdn_second"
    found = select.verdicts(problem())
    assert [v.plan for v in found if v.ok and v.default] == ["gdn_second", "gdn_eager"]
    assert select.select(problem(sizes={"K": 64})).base == "gdn_first"


def test_a_verdict_reads_as_a_sentence(engines):
    engines(fake.Engine("fast", dims={"K": (64,)}))
    assert [str(v) for v in select.verdicts(problem())] == [
        "gdn_fast: K=3 not in {64}", "gdn_eager: serves",
    ]  # fmt: skip
    assert str(select.verdicts(problem(**CUDA))[1]) == "gdn_eager: serves when pinned"


@pytest.mark.parametrize("node", NODES, ids=ids)
def test_plans_are_named_after_family_and_engine(node):
    middle = "_summary" if "summary" in node.direction else ""
    assert select.select(problem(node)).base == f"{node.family.name}{middle}_eager"
    assert select.plan_of(problem(node), "frost") == f"{node.plan_prefix}_frost"


def test_on_a_gpu_nothing_slow_runs_unless_pinned(engines):
    engines(fake.Engine("fast", dims={"K": (64,)}))
    where = problem(**CUDA)
    with pytest.raises(errors.NoEngine) as caught:
        select.select(where)
    text = str(caught.value)
    assert isinstance(caught.value, NotImplementedError)
    assert text.startswith("no engine for gdn forward on sm90: gdn_fast: K=3 not in {64}; ")
    assert "gdn_eager: only when pinned" in text
    assert 'Pass plan_name="gdn_eager"' in text
    assert select.select(where, "gdn_eager").base == "gdn_eager"


def test_where_nothing_can_run_no_pin_is_advised(engines):
    engines(fake.Engine("fast", dims={"K": (64,)}), eager=False)
    with pytest.raises(errors.NoEngine) as caught:
        select.select(problem())
    assert "plan_name" not in str(caught.value)


def test_a_pin_is_obeyed_before_the_ranking(engines):
    engines(fake.Engine("fast"))
    assert select.select(problem()).base == "gdn_fast"
    assert select.select(problem(), "gdn_eager").base == "gdn_eager"


def test_a_pin_that_declines_is_refused_never_replaced(engines):
    engines(fake.Engine("fast", dims={"K": (64,)}))
    with pytest.raises(errors.PlanNotOffered) as caught:
        select.select(problem(), "gdn_fast")
    assert str(caught.value) == "plan gdn_fast declines gdn forward on cpu: K=3 not in {64}."
    assert isinstance(caught.value, NotImplementedError)


@pytest.mark.parametrize("name", ["gdn_fats", "kda_fast", "gdn_summary_fast", "fast"])
def test_an_unknown_plan_lists_the_plans(engines, name):
    engines(fake.Engine("fast"))
    with pytest.raises(errors.PlanNotOffered, match=rf"no plan '{name}' for gdn forward on cpu. "
                       r"Plans are: gdn_fast, gdn_eager\."):  # fmt: skip
        select.select(problem(), name)


# Plan names -------------------------------------------------------------------------------------

NAMES = {
    "gdn_triton": ("gdn_triton", ()),
    " gdn_triton ": ("gdn_triton", ()),
    "gdn_triton[]": ("gdn_triton", ()),
    "gdn_triton[chunk=64]": ("gdn_triton", (("chunk", 64),)),
    "gdn_triton[ stages = 3 , chunk = 64 ]": ("gdn_triton", (("chunk", 64), ("stages", 3))),
    "kda_summary_frost[a=-1]": ("kda_summary_frost", (("a", -1),)),
}


@pytest.mark.parametrize(("text", "wanted"), NAMES.items(), ids=NAMES)
def test_a_plan_name_is_parsed(text, wanted):
    found = PlanName.parse(text)
    assert (found.base, found.knobs) == wanted
    assert PlanName.parse(str(found)) == found


@pytest.mark.parametrize(
    "text",
    ["", "gdn triton", "gdn_triton[chunk]", "gdn_triton[chunk=]", "gdn_triton[chunk=x]",
     "gdn_triton[=3]", "gdn_triton[chunk=64", "gdn_triton]", "gdn_triton[a=1][b=2]",
     "gdn_triton[a=1,a=2]", "GDN_TRITON", "gdn_triton[chunk=1.5]"],
)  # fmt: skip
def test_what_is_no_plan_name_is_refused(text):
    with pytest.raises(errors.PlanNotOffered, match=r"expected <family>_<engine> with optional"):
        PlanName.parse(text)


def test_knobs_reach_the_engine(engines):
    engines(fake.Engine("fast", knobs={"chunk": (16, 64), "stages": (2, 3)}))
    x = tensors(NODE)
    ops.gated_delta_net(**x, plan_name="gdn_fast[stages=3,chunk=16]")
    assert [(name, knobs) for name, _, knobs in fake.RUNS] == [("fast", {"chunk": 16, "stages": 3})]


KNOBS = {
    "unknown": ("gdn_fast[width=2]", "no knob 'width'. Knobs of gdn_fast: chunk, stages"),
    "beyond": ("gdn_fast[chunk=32]", r"chunk is one of \[16, 64\], got 32"),
    "where there are none": ("gdn_plain[chunk=16]", "no knob 'chunk'. Knobs of gdn_plain: none"),
}


@pytest.mark.parametrize(("name", "what"), KNOBS.values(), ids=KNOBS)
def test_bad_knobs_are_refused(engines, name, what):
    engines(fake.Engine("fast", knobs={"chunk": (16, 64), "stages": (2, 3)}), fake.Engine("plain"))
    with pytest.raises(errors.PlanNotOffered, match=what):
        select.select(problem(), name)


# Pins of both directions ------------------------------------------------------------------------


def leaves():
    x = tensors(NODE)
    return x | {"q": x["q"].requires_grad_()}


def ran():
    return [(name, made.direction) for name, made, _ in fake.RUNS]


FORWARD_ONLY = frozenset({("gdn", "forward"), ("gdn", "summary"), ("gdn", "summary_backward")})


def test_one_name_pins_both_directions(engines):
    engines(fake.Engine("slow", default_on=frozenset()))
    o, _ = ops.gated_delta_net(**leaves(), plan_name="gdn_slow")
    o.sum().backward()
    assert ran() == [("slow", "forward"), ("slow", "backward")]


def test_a_pin_that_cannot_serve_the_backward_is_refused_at_the_forward_call(engines):
    engines(fake.Engine("half", serves=FORWARD_ONLY))
    with pytest.raises(errors.PlanNotOffered, match="plan gdn_half declines gdn backward on cpu: "
                       "does not serve gdn backward"):  # fmt: skip
        ops.gated_delta_net(**leaves(), plan_name="gdn_half")
    assert ran() == []
    with torch.no_grad():
        ops.gated_delta_net(**leaves(), plan_name="gdn_half")
    ops.gated_delta_net(**tensors(NODE), plan_name="gdn_half")
    assert ran() == [("half", "forward")] * 2


@pytest.mark.parametrize("comma", [",", " , "], ids=["tight", "spaced"])
def test_a_pair_pins_the_directions_apart(engines, comma):
    engines(fake.Engine("half", serves=FORWARD_ONLY), fake.Engine("other"))
    o, _ = ops.gated_delta_net(**leaves(), plan_name=f"gdn_half{comma}gdn_other")
    o.sum().backward()
    assert ran() == [("half", "forward"), ("other", "backward")]


def test_knobs_of_a_pair_stay_with_their_plan(engines):
    knobs = {"a": (1, 2), "b": (1, 2)}
    engines(fake.Engine("one", knobs=knobs), fake.Engine("two", knobs=knobs))
    o, _ = ops.gated_delta_net(**leaves(), plan_name="gdn_one[a=1,b=2],gdn_two[b=1,a=2]")
    o.sum().backward()
    assert [made[2] for made in fake.RUNS] == [{"a": 1, "b": 2}, {"a": 2, "b": 1}]


def test_a_pair_whose_second_name_declines_is_refused_at_the_forward_call(engines):
    engines(fake.Engine("half", serves=FORWARD_ONLY))
    with pytest.raises(errors.PlanNotOffered, match="gdn_half declines gdn backward"):
        ops.gated_delta_net(**leaves(), plan_name="gdn_eager,gdn_half")
    assert ran() == []


def test_more_than_a_pair_is_refused():
    with pytest.raises(errors.RuleBroken, match=r"gated_delta_net\.plan_name: expected one plan"):
        ops.gated_delta_net(**tensors(NODE), plan_name="gdn_eager,gdn_eager,gdn_eager")


def test_a_summary_has_one_direction_to_pin():
    x = tensors(registry.node("gdn_summary"))
    ops.gated_delta_net_summary(**x, plan_name="gdn_summary_eager")
    with pytest.raises(errors.RuleBroken, match=r"gated_delta_net_summary\.plan_name"):
        ops.gated_delta_net_summary(**x, plan_name="gdn_summary_eager,gdn_summary_eager")
    with pytest.raises(errors.PlanNotOffered, match=r"Plans are: .*gdn_summary_eager\."):
        ops.gated_delta_net_summary(**x, plan_name="gdn_eager")


@pytest.mark.parametrize("name", [3, True, ["gdn_eager"], b"gdn_eager"], ids=repr)
def test_a_pin_is_a_name(name):
    with pytest.raises(errors.InvalidOption, match=r"gated_delta_net\.plan_name: expected a plan"):
        ops.gated_delta_net(**tensors(NODE), plan_name=name)


# What is said is what runs ----------------------------------------------------------------------


def graph(node=NODE):
    made = lagraph.Graph(device="cpu")
    given = tensors(node)
    getattr(made, node.name)(**{n: made.tensor_like(x, name=n) for n, x in given.items()},
                             **fixed(node))  # fmt: skip
    return made, given


@pytest.mark.parametrize("pin", [None, "gdn_one", "gdn_two"], ids=str)
def test_the_plan_that_is_named_is_the_plan_that_runs(engines, pin):
    engines(fake.Engine("one"), fake.Engine("two"))
    made, given = graph()
    made.create_execution_plans()
    count = made.get_execution_plan_count()
    assert [made.get_plan_name_at_index(i) for i in range(count)] == [
        "gdn_one", "gdn_two", "gdn_eager",
    ]  # fmt: skip
    if pin:
        made.select_plan(pin)
    made.build()
    made.execute(given)
    assert f"gdn_{fake.RUNS[-1][0]}" == made.plan_name == (pin or "gdn_one")
    ops.gated_delta_net(**given, plan_name=pin)
    assert f"gdn_{fake.RUNS[-1][0]}" == (pin or "gdn_one")


@pytest.mark.parametrize("preferred", [True, False])
def test_an_operator_and_a_graph_choose_by_preference(engines, preferred):
    row = Preference("gdn", "forward", "there", "measured", lambda problem: preferred)
    engines(fake.Engine("fast", prefer=(row,)))
    made, given = graph()
    made.build()
    assert made.plan_name == f"gdn_{'fast' if preferred else 'eager'}"
    words = "gdn_fast: serves" if preferred else "gdn_fast: serves when pinned"
    assert str(made.explain().verdicts[0]) == words
    ops.gated_delta_net(**given)
    assert ran() == [("fast", "forward")] * preferred
    ops.gated_delta_net(**given, plan_name="gdn_fast")
    assert ran()[-1] == ("fast", "forward")


def test_build_plans_skips_what_is_barred(engines):
    engines(fake.Engine("one"), fake.Engine("two"))
    made, _ = graph()
    made.deselect_engines(["one"])
    made.build()
    assert made.plan_name == "gdn_two"


def test_a_plan_that_is_only_served_when_pinned_comes_last(engines):
    engines(fake.Engine("shy", default_on=frozenset()))
    made, _ = graph()
    made.create_execution_plans()
    assert [made.get_plan_name_at_index(i) for i in range(2)] == ["gdn_eager", "gdn_shy"]
    made.build()
    assert made.plan_name == "gdn_eager"


def test_a_workspace_is_asked_for_checked_and_made(engines):
    engine = fake.Engine("hungry", bytes_per_token=10)
    engines(engine)
    made, given = graph()
    made.build()
    size = made.get_workspace_size()
    assert size == 60
    work = torch.empty(size, dtype=torch.uint8)
    made.execute(given, work)
    assert engine.workspaces[-1] is work
    made.execute(given)
    assert engine.workspaces[-1].numel() == size
    ops.gated_delta_net(**given)
    assert engine.workspaces[-1].numel() == size
    with pytest.raises(errors.ShapeMismatch, match=r"workspace: expected 60 bytes, got 59"):
        made.execute(given, work[:59])


def test_explain_lists_every_engine(engines):
    engines(fake.Engine("fast", dims={"K": (64,)}))
    made, _ = graph()
    assert str(made.explain()) == (
        "GDN: runs gdn_eager\n  gdn_fast: K=3 not in {64}\n  gdn_eager: serves"
    )


def test_the_command_line_says_what_runs_what_declines_and_why(engines, capsys):
    needs = (("no-such-package", "1.2"),)
    engines(fake.Engine("fast", summary="is fast"), requires={"fast": needs})
    assert main(["support"]) == 0
    told = capsys.readouterr().out
    assert "fast: is fast\n  needs no-such-package >= 1.2, which is not installed" in told
    for node in NODES:
        assert f"{node.type:19}  runs {node.plan_prefix}_eager" in told


@pytest.mark.parametrize("name", ["gdn_bwd", "MAMBA2"])
def test_the_command_line_describes_a_node(name, capsys):
    assert main(["describe", name]) == 0
    told = capsys.readouterr().out
    for item in (*registry.node(name).inputs, *registry.node(name).attrs):
        assert f"  {item.name}" in told
    assert "|" not in told.replace("float | None", "")


def test_the_command_line_lists_the_nodes_where_one_is_unknown(capsys):
    with pytest.raises(SystemExit):
        main(["describe", "gdn3"])
    said = capsys.readouterr().err
    assert "no node 'gdn3': did you mean gdn" in said
    assert "Nodes are gdn, gdn_bwd," in said
