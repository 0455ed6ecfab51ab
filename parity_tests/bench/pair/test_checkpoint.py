"""`jax-attn bench CHECKPOINT`: a model in transformers and in ours, a prompt, a step, training."""

import json

import jax
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from flax import nnx

from helpers.attention.meshes import assert_near, moved
from helpers.families.whole_models import LAYERS, D
from jax_attn import models
from jax_attn.bench.engine.compare_speed import settings_kept
from jax_attn.bench.engine.runner import Runner
from jax_attn.bench.pair.checkpoint import LENGTH, pair_of_checkpoint
from jax_attn.bench.workload import (
    CACHED,
    DECODE,
    PAIR_MODES,
    PREFILL,
    STEP,
    PairWorkload,
)
from jax_attn.cli import main
from jax_attn.parity.pair.errors import PairError

T = 7


@pytest.fixture
def folders(small):
    return lambda name: small(name).folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "mistral"])
def test_each_step_reads_the_same_token_behind_the_prompt(name, folders):
    """In float64, beside a pass over the prompt and that token."""
    pair = pair_of_checkpoint(folders(name), (T,))
    torch_call, port_call = pair.reference_call, pair.port_call
    of_torch, of_port = pair.cached
    tokens = pair.inputs["tokens"]
    whole = np.concatenate([tokens, tokens[:, :1]], axis=1)

    def steps(port):
        out, cache = of_port.prefill(port, tokens=tokens)
        first, cache = of_port.step(port, cache, tokens=tokens[:, :1])
        second, _ = of_port.step(port, cache, tokens=tokens[:, :1])
        assert np.array_equal(first, second)
        return [out[:, -1], first[:, 0]]

    def steps_of_torch(module):
        prompt = torch.tensor(tokens)
        out, cache = of_torch.prefill(module, tokens=prompt)
        for _ in range(2):
            step, cache = of_torch.step(module, cache, tokens=prompt[:, :1])
        return [out[:, -1].numpy(), step[:, 0].numpy()]

    with jax.enable_x64(True), torch.no_grad():
        port, near = (models.load(folders(name), dtype=np.float64) for _ in range(2))
        by_port, near = (port_call(m, whole)[:, -2:] for m in (port, moved(near)))
        reference = pair.reference.double()
        by_torch = torch_call(reference, torch.tensor(whole))[:, -2:].numpy()
        moves = np.asarray(near - by_port)
        for found, wanted in (
            (steps(port), by_port),
            (steps_of_torch(reference), by_torch),
        ):
            assert_near(
                np.stack(found, axis=1),
                wanted,
                wanted + moves,
                additions=LAYERS * (8 * D + T + 1) + D,
            )


@pytest.mark.slow
def test_the_modes_are_those_that_the_model_has(folders):
    gpt2, bert = (pair_of_checkpoint(folders(name), ()) for name in ("gpt2", "bert"))
    assert (gpt2.modes, gpt2.usual_modes) == ((*PAIR_MODES, *CACHED), (*CACHED, STEP))
    assert bert.modes == bert.usual_modes == PAIR_MODES
    # Of a table of 23 positions, the last is left for a step.
    assert gpt2.lengths == (22,)
    assert LENGTH > 22


@pytest.mark.slow
@pytest.mark.parametrize("way", ["torch eager", "jax.jit"])
def test_the_prompt_is_read_before_a_step_is_timed(way, folders):
    pair = pair_of_checkpoint(folders("gpt2"), (T, T + 1))
    one, other = (PairWorkload("a", "tokens", "float32", length=length) for length in (T, T + 1))
    with settings_kept():
        runner = Runner(way, "cpu", 1, (pair, ()))
        runner.load()
        for mode in (*CACHED, STEP):
            runner.build(one, 0)
            runner.compile(mode)
        assert "cache" in runner.engine.state, "a mode's place drops no other's cache"
        log, start = [], runner.engine.start
        runner.engine.start = lambda mode: log.append(mode) or start(mode)
        for timed in (runner.turn, runner.operations, runner.first_call, runner.peak):
            runner.build(other, 0)
            assert "cache" not in runner.engine.state
            log.clear()
            timed(DECODE)
            assert log[:2] == [PREFILL, DECODE]
            assert PREFILL not in log[1:]
            runner.build(one, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert, answers", "bert, for two sentences"])
def test_logits_are_compared_whatever_transformers_calls_them(name, folders):
    pair = pair_of_checkpoint(folders(name), (T,))
    with torch.no_grad():
        ours, theirs = (
            pair.call_port(pair.port, **pair.inputs),
            pair.call_reference(tokens=torch.tensor(pair.inputs["tokens"])),
        )
    assert ours.shape == tuple(theirs.shape)
    assert ours.shape[-1] == {"bert, answers": 2, "bert, for two sentences": 41}[name]


@pytest.mark.slow
def test_lengths_that_do_not_fit_are_refused(folders, tmp_path):
    with pytest.raises(PairError, match="at most 22 tokens and one more for a step, got 23"):
        pair_of_checkpoint(folders("gpt2"), (5, 23))
    # Nothing is read behind BERT's.
    assert pair_of_checkpoint(folders("bert"), (23,)).lengths == (23,)
    with pytest.raises(PairError, match="at most 23 tokens, got 24"):
        pair_of_checkpoint(folders("bert"), (24,))
    with pytest.raises(PairError, match=r"expected a config\.json beside the tensors, got none"):
        pair_of_checkpoint(tmp_path, ())
    with pytest.raises(PairError, match="expected a model of one stack, got an encoder-decoder"):
        pair_of_checkpoint(folders("mt5"), ())


@pytest.mark.slow
def test_the_command_judges_times_and_looks_into_both_sides(folders, tmp_path):
    given = ["--mode", "decode", "--mode", STEP, "--lengths", "3,5", "--rounds", "5", "--json"]
    given += ["--implementation", "torch eager", "--implementation", "jax.jit"]
    result = CliRunner().invoke(
        main, ["bench", str(folders("gpt2")), *given, "--report", str(tmp_path)]
    )
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    rows = {(r["workload"]["length"], r["mode"], r["implementation"]): r for r in record["rows"]}
    assert {*rows} == {
        (length, mode, way)
        for length in (3, 5)
        for mode in ("decode", STEP)
        for way in ("torch eager", "jax.jit")
    }
    assert all(len(row["seconds"]) == 5 for row in rows.values())
    ours, theirs = (rows[3, STEP, way] for way in ("jax.jit", "torch eager"))
    assert ours["verdict"] == "PASS"
    assert rows[5, STEP, "jax.jit"]["programs"] == 1
    assert ours["warm_compile_s"] > 0
    # Which are the longest differs from run to run.
    for row, start in ((ours, "layers.{layer}"), (theirs, "transformer.h.{layer}")):
        assert any(path.startswith(start) for path, *_ in row["operations"])
    decode = rows[3, "decode", "jax.jit"]
    assert decode["tokens_per_s"] > 0
    assert decode["programs"] == 1  # the prompt's is not counted
    params = nnx.state(models.load(folders("gpt2")), nnx.Param)
    del params["position_embedding"]  # a step reads a row of it; the tokens' is the head's, too
    params = jax.tree.leaves(params)
    cached = LAYERS * (2 * 4 * (3 + 1) * D + 4)  # of keys, values and a length, with room for one
    assert dict(decode["workload"]["read"])["decode"] == sum(p.nbytes for p in params) + cached
    assert record["settings"]["memory_bytes_per_s"].keys() == {"torch", "jax"}
    page = (tmp_path / "index.html").read_text()
    assert "length 5, decode" in page
    assert "layers.{layer}" in page
    assert json.loads((tmp_path / "result.json").read_text()) == record
