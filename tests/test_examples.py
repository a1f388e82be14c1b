"""Every example runs from another folder, in a process of its own, and says what it should.

What the larger ones offer to import, and their own checks, are tested in this process.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from tolerance import relative_error

import lagraph

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

# What each example is run with and what its output must show.
RUNS = {
    "graph_gdn": ([], ["gdn_eager: serves", r"lengths \[17\]: O \[17, 4, 64\]", "same graph True"]),
    "pin_plan": ([], [r"ran gdn_eager\[chunk=32\]", r"chunk=7\] is refused: .*chunk is one of"]),
    "op_autograd": ([], ["gradient of beta", "in two pieces"]),
    "mirror_graph": ([], ["plan gdn_", r"final_state \[3, 4, 128, 128\]"]),
    "mirror_ops": ([], [r"gated_delta_net \[4096, 16, 128\]", r"mamba2 \[4096, 16, 64\]"]),
    "train_chars": (["--quick"], [r"step +0 +\d\.\d\d", "And God said"]),
    "context_parallel_training": ([], [r"gdn on 1 rank", r"losses differ by 0\.0e\+00"]),
    "delta_rule_training": (["--steps", "6", "--packed", "--backend", "reference"],
                            [r"kda, backend reference on cpu", r"cu_seqlens \[0, \d+",
                             r"differ by \d\.\de-0[5-9]"]),
    "zero_drift_decode": (["--tokens", "64"], ["kda +replayed chunk +float32 +yes",
                                               "kda +ReplayState +float32 +yes"]),
    "serving": (["--requests", "5", "--slots", "2", "--budget", "16"],
                [r"(?m)^ +4 .* yes ", r"\d+ written in .* tokens per second"]),
}  # fmt: skip


@cache
def run(name, *args, **environment):
    """The example's standard output; two tests may read one run."""
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", str(EXAMPLES / f"{name}.py"), *args],
        capture_output=True, text=True, check=False, cwd="/", env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(RUNS)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_example(name):
    args, shown = RUNS[name]
    out = run(name, *args)
    for pattern in shown:
        assert re.search(pattern, out), f"{pattern!r} is not in:\n{out}"


@pytest.mark.slow
def test_two_pieces_agree_with_the_whole():
    """`op_autograd` carries the state over a cut; its own figures say how well."""
    out = run("op_autograd")
    differences = [float(text) for text in re.findall(r"by (\d\.\de[+-]\d+)", out)]
    assert len(differences) == 2
    assert max(differences) < 1e-5


@pytest.mark.slow
def test_training_learns():
    """A uniform guess costs 4.1 nats; 40 steps go far below."""
    out = run("train_chars", "--steps", "40")
    losses = [float(text) for text in re.findall(r"step +\d+ +(\d\.\d\d)", out)]
    assert losses[0] > 3.0
    assert losses[-1] < 2.3
    assert all(later < earlier for earlier, later in zip(losses, losses[2:], strict=False))


@pytest.mark.slow
def test_training_needs_no_progress_bar(tmp_path):
    """Without tqdm the loop is the same."""
    (tmp_path / "tqdm.py").write_text("raise ImportError('hidden')\n", encoding="utf-8")
    assert "And God said" in run("train_chars", "--quick", PYTHONPATH=str(tmp_path))


def test_the_text_is_public_domain_and_said_so():
    data = EXAMPLES / "data"
    assert {path.name for path in data.iterdir()} == {"NOTICE.md", "genesis.txt"}
    assert "public domain" in (data / "NOTICE.md").read_text("utf-8")
    assert 50_000 < (data / "genesis.txt").stat().st_size < 200_000


@pytest.mark.parametrize("name", RUNS)
def test_an_example_says_how_to_run_it(name):
    text = (EXAMPLES / f"{name}.py").read_text("utf-8")
    assert f"python examples/{name}.py" in text.split('"""')[1]
    assert len(re.findall(r"^def main\(.*\) -> None:$", text, re.M)) == 1


# What the larger examples are made of -----------------------------------------------------------


def load(name):
    """An example as a module; its dataclasses look themselves up among the modules."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


variants = pytest.mark.parametrize("variant", ["gdn", "kda"])


def attention(variant, **options):
    torch.manual_seed(0)
    return load("delta_rule_training").DeltaRuleAttention(48, 2, 16, variant=variant, **options)


@pytest.mark.slow
@pytest.mark.parametrize("args", [[], ["--variant", "gdn", "--packed"]], ids=["kda", "gdn packed"])
def test_the_toy_task_is_learned(args):
    """A guess costs 2.71 nats; recall of the prompt needs what the state holds."""
    out = run("delta_rule_training", "--steps", "90", *args)
    losses = [float(text) for text in re.findall(r"^ *\d+ +(\d\.\d\d) ", out, re.M)]
    assert losses[0] > 2.4
    assert losses[-1] < 1.6


@variants
def test_the_module_goes_on_from_its_states(variant):
    """As Attention Gym's page has it, backward through both calls included."""
    module = attention(variant)
    hidden = torch.randn(2, 90, 48, requires_grad=True)
    whole = module(hidden, return_final_state=True)
    first = module(hidden[:, :33], return_final_state=True)
    second = module(
        hidden[:, 33:],
        first.final_state,
        initial_conv_state=first.final_conv_state,
        return_final_state=True,
    )
    joined = torch.cat([first.output, second.output], 1)
    torch.testing.assert_close(joined, whole.output, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(second.final_state, whole.final_state, rtol=1e-4, atol=1e-5)
    assert torch.equal(second.final_conv_state, whole.final_conv_state)
    (got,) = torch.autograd.grad(joined.square().sum(), hidden)
    (want,) = torch.autograd.grad(whole.output.square().sum(), hidden)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)
    plain = module(hidden)
    assert plain.final_state is None
    assert plain.final_conv_state is None


@variants
def test_packed_sequences_are_kept_apart(variant):
    module = attention(variant)
    hidden, cu = torch.randn(1, 60, 48), torch.tensor([0, 25, 25, 60])
    packed = module(hidden, cu_seqlens=cu, return_final_state=True)
    assert packed.final_state.shape == (3, 2, 16, 16)
    alone = [module(hidden[:, a:b]).output for a, b in ((0, 25), (25, 60))]
    torch.testing.assert_close(packed.output, torch.cat(alone, 1), rtol=1e-4, atol=1e-5)


@variants
def test_room_to_spare_may_hold_anything(variant):
    """NaN behind the last sequence reaches neither outputs nor parameters."""
    module = attention(variant, mask_inactive_capacity=True)
    hidden, cu = torch.randn(1, 40, 48), torch.tensor([0, 25, 40])
    room = torch.full((1, 64, 48), float("nan"))
    room[:, :40] = hidden
    want = module(hidden, cu_seqlens=cu).output
    want.square().sum().backward()
    grads = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    got = module(room, cu_seqlens=cu).output
    seed = torch.full_like(got, float("nan"))
    seed[:, :40] = 2 * got[:, :40].detach()
    got.backward(seed)
    torch.testing.assert_close(got[:, :40], want, rtol=1e-4, atol=1e-5)
    for p, grad in zip(module.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=1e-3, atol=1e-5)


@pytest.mark.gpu
@variants
def test_a_captured_step_replays_with_other_tokens(variant):
    """Forward and backward in one graph with room for 96 tokens and 4 sequences: what lies past the
    end is NaN at every replay, and gets into nothing."""
    module = attention(variant, backend="fused", mask_inactive_capacity=True).cuda()
    params = list(module.parameters())
    hidden, seed = torch.empty(2, 1, 96, 48, device="cuda")
    cu = torch.zeros(5, dtype=torch.int32, device="cuda")

    def fill(*ends):
        for buffer in (hidden, seed):
            buffer.fill_(float("nan"))
            buffer[:, : ends[-1]].normal_()
        cu.copy_(torch.tensor([0, *ends]))

    def step(hidden=hidden, cu=cu, seed=seed):
        out = module(hidden, cu_seqlens=cu, return_final_state=True)
        return out, torch.autograd.grad(out.output, params, seed)

    fill(30, 30, 71, 96)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, grads = step()
    for ends in ((30, 30, 71, 96), (7, 7, 7, 7), (1, 20, 40, 41), (64, 96, 96, 96)):
        fill(*ends)
        graph.replay()
        exact = slice(0, ends[-1])
        want, wanted = step(hidden[:, exact].clone(), cu, seed[:, exact].clone())
        assert relative_error(out.output[:, exact], want.output) < 2e-3
        assert relative_error(out.final_state, want.final_state) < 2e-3
        # Of a product with other rows beside them: cuBLAS may sum in another order.
        torch.testing.assert_close(
            out.final_conv_state, want.final_conv_state, rtol=1e-4, atol=1e-5
        )
        for got, grad in zip(grads, wanted, strict=True):
            assert relative_error(got, grad) < 1e-2


@variants
def test_the_module_is_one_graph(variant):
    module = attention(variant)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(1, 30, 48)
    cu = torch.tensor([0, 11, 30])
    torch.testing.assert_close(compiled(x, cu_seqlens=cu).output, module(x, cu_seqlens=cu).output)


def test_backends_are_what_they_say():
    x = torch.randn(1, 20, 48)
    want = attention("kda")(x).output
    assert torch.equal(attention("kda", backend="reference")(x).output, want)
    with pytest.raises(lagraph.NotSupported):
        attention("kda", backend="fused")(x)


@variants
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_zero_drift_from_raw_rows(variant, dtype):
    """Rows are normalized one token at a time in decode: the same bits, near zero, too."""
    module = load("zero_drift_decode")
    q, k, v, gate, beta = module.inputs(variant, 64, dtype, torch.device("cpu"))
    q, k = 5 * q, (k * torch.logspace(-6, 1, 64)[None, :, None, None]).to(dtype)
    core = module.chunk_kda if variant == "kda" else module.chunk_gdn
    trained, _ = core(module.unit(q), module.unit(k), v, gate, beta)
    decoder = module.ReplayDecoder(core, [q, k, v, gate, beta])
    steps = []
    for t in range(64):
        now = [x[:, t : t + 1] for x in (q, k, v, gate, beta)]
        steps.append(decoder.step([module.unit(now[0]), module.unit(now[1]), *now[2:]]))
    assert torch.equal(torch.cat(steps, 1), trained)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_zero_drift_on_a_gpu(dtype):
    """The script itself: it fails where a decode has other bits than training."""
    load("zero_drift_decode").main(["--tokens", "128", "--dtype", dtype])


@pytest.mark.gpu
def test_serving_on_a_gpu():
    """Every request writes what it writes alone; the script fails otherwise."""
    load("serving").main(["--requests", "5", "--slots", "2", "--budget", "16"])


def test_zero_drift_notices_a_bit(monkeypatch, capsys):
    """Its check fails where a decode is off by one rounding."""
    module = load("zero_drift_decode")
    exact = module.by_buffer

    def off(core, x):
        o = exact(core, x)
        o[0, -1, 0, 0] = torch.nextafter(o[0, -1, 0, 0], torch.tensor(9.0))
        return o

    monkeypatch.setattr(module, "by_buffer", off)
    with pytest.raises(SystemExit, match="gdn, replayed chunk; kda, replayed chunk"):
        module.main(["--tokens", "64"])
    assert "no " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        module.main(["--tokens", "65"])


def test_serving_notices_a_slot_that_was_read(monkeypatch, capsys):
    """Its check fails where a fresh slot is taken for a resumed one."""
    module = load("serving")
    prefill = module.Model.prefill

    def stale(self, tokens, cu_seqlens, slots, resumed, pools):
        if len(pools.states[0]) > 2:  # the server's, not the lone request's
            resumed = torch.ones_like(resumed)
        return prefill(self, tokens, cu_seqlens, slots, resumed, pools)

    args = ["--requests", "3", "--slots", "2"]
    module.main(args)
    assert " NO " not in capsys.readouterr().out
    monkeypatch.setattr(module.Model, "prefill", stale)
    with pytest.raises(SystemExit, match="differ from their run alone"):
        module.main(args)
    assert " NO " in capsys.readouterr().out
