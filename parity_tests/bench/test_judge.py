"""Nobody is timed for wrong numbers: what the bench's judge passes, and what it does not."""

import math
import os
import weakref
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

from helpers.bench.engine_process import compilations
from jax_attn.bench.arrays import seeded_arrays
from jax_attn.bench.engine.compare_speed import settings_kept
from jax_attn.bench.engine.judge import Judge, errors, worst
from jax_attn.bench.engine.runner import Runner
from jax_attn.bench.implementations import IMPLEMENTATIONS, OF_PRESETS, Implementation
from jax_attn.bench.programs.program import UnsuitedError
from jax_attn.bench.workload import MODES, Workload
from jax_attn.parity.judge.compare import TensorReport, Verdict

os.environ["KERAS_BACKEND"] = "jax"  # as the bench's workers have it; read when keras loads

CORE = Workload("core", False, 2, 257, 263, 4, 2, 5, is_causal=True)  # judged on 128 rows
MULTI_HEAD = Workload("multi-head", True, 2, 7, 7, 3, 3, 5, D=15, is_causal=True)
GROUPED = Workload("grouped", True, 2, 7, 7, 4, 2, 3, D=12)
MULTI_QUERY = Workload("multi-query", True, 2, 7, 7, 3, 1, 5, D=15, is_causal=True)
BACKWARD = MODES[1]


@pytest.fixture(autouse=True)
def settings():
    with settings_kept():
        yield


@cache
def judge_of(workload: Workload) -> Judge:
    """A judge that knows what torch's fused attention gives."""
    judge = Judge()
    judge.prepare(workload, 0, MODES)
    for mode in MODES:
        judge.take_own(mode, tensors("sdpa", workload, mode))
    return judge


def tensors(name: str, workload: Workload, mode: str):
    runner = Runner(name, "cpu", 1)
    runner.load()
    built = runner.build(workload, 0)
    assert built["kernel"] or name == "planted", "what runs is named"
    return runner.tensors(mode)


# torchax may be there and not import; what torch.compile has the C++ compiler make of `torch
# eager` takes 10 s a row.
SLOW = ("torchax", "torch.compile")
SAME_LAYER = ("jax-attn dense", "jax-attn blocked")  # as "jax-attn"'s, around another kernel
HERE = {
    name: row
    for name, row in IMPLEMENTATIONS.items()
    if name in {*OF_PRESETS} - {*SLOW} and "cpu" in row.devices and not row.absent
}


def available(*workloads: Workload) -> list:
    """(implementation, workload) of every pair that has a builder here."""
    return [
        pytest.param(name, w, id=f"{name}-{w.name}")
        for name, implementation in HERE.items()
        for w in workloads
        if implementation.builder(w) and not (w.layer and name in SAME_LAYER)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "workload"), available(MULTI_HEAD))
def test_every_implementation_of_a_layer_agrees_forward_and_backward(name, workload):
    judged = judge_of(workload).judge(BACKWARD, tensors(name, workload, BACKWARD))
    assert (judged["verdict"], judged["reason"]) == ("PASS", "")
    # Within budget, as the verdict says; and not the reference compared with itself.
    assert judged["error"] > 0
    assert judged["reference_error"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "workload"), available(CORE, GROUPED))
def test_and_of_grouped_queries(name, workload):
    try:
        outputs = tensors(name, workload, "forward")
    except UnsuitedError as error:
        assert "as many key/value heads" in str(error)  # noqa: PT017
        return
    assert judge_of(workload).judge("forward", outputs)["verdict"] == "PASS"


@pytest.mark.slow
def test_and_the_published_multi_query_code():
    outputs = tensors("torch eager", MULTI_QUERY, BACKWARD)
    assert judge_of(MULTI_QUERY).judge(BACKWARD, outputs)["verdict"] == "PASS"


def planted(monkeypatch, builder: str) -> None:
    row = Implementation("planted", "torch", f"helpers.bench.bench_stand_in:{builder}")
    monkeypatch.setitem(IMPLEMENTATIONS, "planted", row)


WRONG = {
    "scale off by 1%": ("scale_off", "forward", "output"),
    "causal ignored": ("causal_ignored", "forward", "output"),
    "key's gradient lost": ("key_gradient_lost", BACKWARD, "grad input key"),
}


@pytest.mark.slow
@pytest.mark.parametrize("row", WRONG)
def test_wrong_numbers_fail_and_the_tensor_is_named(monkeypatch, row):
    builder, mode, label = WRONG[row]
    planted(monkeypatch, builder)
    judged = judge_of(CORE).judge(mode, tensors("planted", CORE, mode))
    assert judged["verdict"] == "FAIL"
    assert f"{label}: error over budget" in judged["reason"]


def test_a_wrong_gradient_alone_leaves_the_output_right(monkeypatch):
    planted(monkeypatch, "key_gradient_lost")
    outputs = tensors("planted", CORE, "forward")
    assert judge_of(CORE).judge("forward", outputs)["verdict"] == "PASS"


def test_one_wrong_row_among_those_judged_is_seen():
    outputs = tensors("sdpa", CORE, "forward")
    output = outputs["output"]["output"].copy()
    output[-1, -1] *= 1.001
    judged = judge_of(CORE).judge("forward", {"output": {"output": output}})
    assert judged["verdict"] == "FAIL"


def test_what_has_not_its_tensors_is_an_error():
    with pytest.raises(ValueError, match=r"expected \['key', 'query', 'value'\], got \['query'\]"):
        judge_of(CORE).judge(BACKWARD, {"gradient of input": {"query": np.zeros(1)}})


def report(name, error, own, scale=1.0):
    options = {"kind": "gradient of parameter", "transform": BACKWARD, "shape": (1,)}
    return TensorReport(
        name=name,
        verdict=Verdict.PASS,
        reasons=(),
        error=error,
        reference_error=own,
        scale=scale,
        **options,
    )


def test_the_error_told_is_of_the_largest_multiple_of_torchs_own():
    large, worse = report("large", 9e-6, 8e-6), report("worse", 2e-7, 1e-7)
    assert worst([large, worse]) is worse
    assert worst([worse, large]) is worse
    alone = [report("a", 1e-6, None), report("b", 5e-7, None, scale=0.1)]
    assert worst(alone).name == "b", "of the largest relative one where torch has none"


def test_what_is_zero_in_theory_has_no_error():
    """It has no scale to divide by, and what the oracle's own rounding leaves is none."""
    zero, other = report("zero", 1e-9, 1e-12, scale=1e-12), report("other", 2e-7, 1e-7, scale=2.0)
    found = errors([replace(zero, projection=math.nan), replace(other, projection=0.0)])
    assert found == {"tensor": other.label, "error": 1e-7, "reference_error": 5e-8}
    assert errors([replace(zero, projection=math.nan)]) == {}


PLANTED = {
    "a row that is not judged is not finite": (
        "one_row_lost",
        "forward",
        "output: expected finite numbers, got 10 others",
    ),
    "another dtype": ("in_bfloat16", "forward", "output: expected float32, got bfloat16"),
    "a gradient that is not finite": (
        "key_gradient_infinite",
        BACKWARD,
        "grad key: expected finite numbers, got",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("row", PLANTED)
def test_tensors_are_looked_at_whole(monkeypatch, row):
    builder, mode, message = PLANTED[row]
    planted(monkeypatch, builder)
    with pytest.raises(ValueError, match=message):
        tensors("planted", CORE, mode)


@pytest.mark.parametrize("mode", MODES)
def test_the_first_call_after_compiling_compiles_nothing_anew(mode):
    runner = Runner("jax-attn dense", "cpu", 1)
    runner.load()
    runner.build(MULTI_HEAD, 0)
    with compilations() as events:
        runner.compile(mode)
        assert len(events) == 1
        runner.first_call(mode)
        assert len(events) == 1


def test_what_is_compiled_comes_from_no_cache():
    Runner("jax-attn", "cpu", 1).load()
    assert jax.config.jax_enable_compilation_cache is False


def test_scores_that_would_not_fit_are_not_written(monkeypatch):
    runner = Runner("torch eager", "cpu", 1)
    runner.load()
    runner.build(CORE, 0)
    need = 4 * CORE.B * CORE.N * CORE.T * CORE.S * 2
    monkeypatch.setattr(runner.engine, "available", lambda: 2 * need)
    assert runner.compile("forward") == (None, None)
    monkeypatch.setattr(runner.engine, "available", lambda: 2 * need - 1)
    with pytest.raises(UnsuitedError, match="writes every score"):
        runner.compile("forward")


def folded(jitted, *leaves) -> bool:
    """Whether an array is a constant of the program: one of many numbers stands there so."""
    text = jitted.lower(*leaves).as_text()
    return "dense_resource" in text or 'dense<"0x' in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n for n in ("jax-attn", "jax.nn", "flax nnx", "equinox", "keras") if n in HERE]
)
def test_weights_and_inputs_are_arguments_of_what_jax_compiles(name):
    runner = Runner(name, "cpu", 1)
    runner.load()
    runner.build(MULTI_HEAD, 0)
    leaves = runner.engine.state["leaves"]
    assert len(leaves) == 1 + 8
    assert not folded(runner.engine.calls["forward"].jitted, leaves)
    x, *weights = leaves
    assert folded(jax.jit(lambda x: runner.program.call(x, *weights)), x), "the check sees it"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sdpa", "jax-attn dense"])
def test_nothing_of_the_last_workload_is_held_while_the_next_is_made(monkeypatch, name):
    runner = Runner(name, "cpu", 1)
    runner.load()
    runner.build(CORE, 0)
    runner.tensors("forward")
    last = weakref.ref(runner.program)
    arrays = seeded_arrays(GROUPED, 0)
    seeded = "jax_attn.bench.engine.runner.seeded_arrays"
    monkeypatch.setattr(seeded, lambda *_: pytest.fail("held") if last() else arrays)
    runner.build(GROUPED, 0)
