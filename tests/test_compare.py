"""`benchmarks/compare.py` without a GPU: its dry run, its gate, its floors and its files."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import oracle
import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))
import compare  # noqa: E402
import peers  # noqa: E402
import roofline  # noqa: E402
import truth  # noqa: E402

DRY = {case.family: case for case in compare.DRY}


def test_dry_run(tmp_path, capsys):
    """Every family and direction is checked, timed, written, read again and drawn."""
    path = tmp_path / "rows.csv"
    assert (
        compare.main(["--dry-run", "--gates", "slow", "--csv", str(path), "--commit", "abc"]) == 0
    )
    told = capsys.readouterr().out
    for family in compare.OPS:
        assert f"\n{family} fwd  " in told
        assert f"\n{family} f+b  " in told
    rows, place = compare.read(path)
    assert place["commit"] == "abc"
    assert place["torch"] == torch.__version__
    assert len(rows) == len(compare.DRY) * len(compare.DIRECTIONS)
    assert all(row.ours and math.isfinite(row.ms) and row.error < 1e-4 for row in rows)
    picture = tmp_path / "rows.svg"
    assert compare.main(["--plot", str(path), str(picture)]) == 0
    text = list(ElementTree.parse(picture).getroot().itertext())
    assert any("gdn2 f+b, 2x96" in line for line in text)
    assert any("lagraph eager" in line for line in text)
    page = tmp_path / "rows.md"
    assert compare.main(["--report", str(path), str(page)]) == 0
    told = page.read_text()
    assert "commit abc" in told
    assert "| mamba2 f+b | 2x96 1/2 | slow | lagraph eager " in told


def test_json(capsys):
    import json

    assert compare.main(["--dry-run", "--only", "kda", "--direction", "fwd", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["gates"] for row in rows] == ["slow", "strong"]
    assert {row["system"] for row in rows} == {"eager"}


def comparison(monkeypatch, *adapters):
    """A dry run over peers that are made up."""
    made = tuple(peers.Peer(name, "gdn", prepare) for name, prepare in adapters)
    monkeypatch.setattr(compare, "PEERS", made)
    return compare.Comparison("cpu", torch.float32, ["eager"], None, quick=True)


def test_peers_are_judged(monkeypatch, capsys):
    """A peer that is right is timed; one that is wrong, fails or is absent is left out and told."""
    eager = compare.ours("eager")

    def wrong(b):
        call = eager(b)

        def changed():
            o, state = call()
            return o * 1.01, state

        return changed

    def absent(b):
        import no_such_library  # noqa: F401

    def broken(b):
        raise RuntimeError("no kernel\nfor this")

    run = comparison(
        monkeypatch, ("right", eager), ("wrong", wrong), ("absent", absent), ("broken", broken)
    )
    for direction in compare.DIRECTIONS:
        run.run(DRY["gdn"], direction, "slow")
    notes = {row.system: row.note for row in run.rows}
    assert not notes["eager"]
    assert not notes["right"]
    assert notes["wrong"].startswith("wrong: ")
    assert notes["absent"].startswith("absent: ModuleNotFoundError")
    assert notes["broken"] == "failed: RuntimeError: no kernel for this"
    assert {row.system for row in run.rows if math.isfinite(row.ms)} == {"eager", "right"}
    line = compare.table(run.rows).splitlines()[1]
    assert "wrong" in line
    assert "absent" in line


def test_ours_may_decline(capsys):
    """A plan that does not serve says why, and nothing is timed in its stead."""
    assert compare.main(["--dry-run", "--only", "gdn", "--plans", "triton"]) == 0
    told = capsys.readouterr().out
    assert "declines: PlanNotOffered" in told
    assert "runs on cuda, not on cpu" in told


def test_wrong_results_of_ours_fail_the_run(monkeypatch):
    monkeypatch.setattr(compare, "tolerance", lambda *args: 1e-12)
    assert compare.main(["--dry-run", "--only", "gdn", "--direction", "fwd"]) == 1


@pytest.mark.parametrize("word", ["gates", "peers"])
def test_unknown_names_are_refused(word):
    with pytest.raises(SystemExit):
        compare.main(["--dry-run", f"--{word}", "nonesuch"])


def as_oracle(case, batch, d_out):
    """The oracle's results in the terms of the gate."""
    x = {name: t.detach() for name, t in batch.x.items()} | {"cu_seqlens": batch.cu}
    options = {"output_final_state": True}
    if case.family == "gdp":
        options["num_householder"] = case.n
    got = oracle.run(case.family, "forward", x, **options)
    got = {name: got[name] for name in ("O", "final_state")}
    if d_out is not None:
        grads = oracle.run(case.family, "backward", x | {"dO": d_out}, **options)
        got |= {name: t for name, t in grads.items() if name in truth.GRADIENTS.values()}
    return got


@pytest.mark.parametrize("direction", compare.DIRECTIONS)
@pytest.mark.parametrize("gates", compare.GATES)
@pytest.mark.parametrize("family", compare.OPS)
def test_the_gate_agrees_with_the_oracle(family, gates, direction):
    """Windows of long sequences, cut out, give what the whole gives; an error in any shows."""
    length = 300
    case = replace(DRY[family], length=length, K=8, V=4, H=2, HV=4)
    run = compare.Comparison("cpu", torch.float32, [], [])
    batch, d_out = run.prepare(case, direction, gates)
    if gates == "slow":
        batch.x["a" if family == "mamba2" else "g"].data *= 4.0  # windows shorter than the whole
    plain = {name: t.detach() for name, t in batch.x.items()}
    checked = truth.Truth(family, plain, case.lengths, case.n, d_out)
    assert checked.windows[0].size < length
    got = as_oracle(case, batch, d_out)
    assert set(got) == set(checked.expected)
    assert max(checked.errors(got).values()) < 1e-4
    for name, value in got.items():
        spoilt = value.clone()
        spoilt[-1, -1] *= 3.0
        assert checked.errors({name: spoilt})[name] > 1e-4, name
        spoilt[-1, -1] = math.nan
        assert checked.errors({name: spoilt})[name] == math.inf


def test_floor():
    """The figures that the docstring gives, and what dominates where."""
    one = roofline.Sizes("gdn", 1, 1, 1, 1, 128, 128)
    assert roofline.forward_floor(one).operations == 163_840
    assert roofline.backward_floor(one).operations == 442_368
    twice = roofline.Sizes("gdp", 1, 1, 1, 1, 128, 128, n=2)
    assert 1.5 < roofline.forward_floor(twice).operations / 163_840 < 2.0
    full = roofline.Sizes("kda", 8192, 1, 64, 64, 128, 128)
    found = roofline.floor(full, backward=False)
    moved = 8192 * 64 * (4 * 128 * 2 + 128 * 4 + 4) + 64 * 128 * 128 * 4
    assert found.bytes == moved
    assert found.ms == pytest.approx(moved / 4.24e12 * 1e3)
    grouped = replace(full, family="gdn", H=16)
    assert roofline.floor(grouped, False).ms == pytest.approx(8192 * 64 * 163_840 / 795e12 * 1e3)
    both = roofline.floor(full, True)
    assert both.ms == pytest.approx(found.ms + roofline.backward_floor(full).ms)


def test_every_published_shape_is_there():
    """The shapes that the adapters serve: some library beside ours in every case."""
    for case in compare.CASES:
        cu = torch.zeros(case.sequences + 1)
        batch = peers.Batch(case.family, case.lengths, case.n, {}, cu, cu, True)
        for direction in case.table:
            assert any(peer.serves(batch, direction == "f+b") for peer in peers.PEERS), case
