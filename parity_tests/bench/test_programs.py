"""Nobody is timed for wrong numbers: what the bench's programs compute, and what its judge sees.

Each call with a cache is the same one, in place.
"""

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
from jax_attn.bench.workload import BACKWARD, DECODE, FORWARD, Workload
from jax_attn.parity.judge.compare import TensorReport, Verdict

os.environ["KERAS_BACKEND"] = "jax"  # as the bench's workers have it; read when keras loads


def cached(name, T, S, K) -> Workload:
    return Workload(name, False, 2, T, S, 6, K, 5, is_causal=True, room=53)


CORE = Workload("core", False, 2, 257, 263, 4, 2, 5, is_causal=True)  # judged on 128 rows
MULTI_HEAD = Workload("multi-head", True, 2, 7, 7, 3, 3, 5, D=15, is_causal=True)
GROUPED = Workload("grouped", True, 2, 7, 7, 4, 2, 3, D=12)
MULTI_QUERY = Workload("multi-query", True, 2, 7, 7, 3, 1, 5, D=15, is_causal=True)
STEP, PROMPT, CHUNK = (
    cached("step", 1, 37, 2),
    cached("prompt", 23, 23, 1),
    cached("chunk", 7, 37, 6),
)
WITH_CACHE = ("sdpa", "torch eager", "jax.nn", "jax-attn")


@pytest.fixture(autouse=True)
def settings():
    with settings_kept():
        yield


@pytest.fixture
def planted(monkeypatch):
    """A function that has "planted" stand for a wrong program."""

    def plant(builder: str, framework: str = "torch") -> str:
        path = f"helpers.bench.planted_programs:{builder}"
        row = Implementation("planted", framework, path, cached=path)
        monkeypatch.setitem(IMPLEMENTATIONS, "planted", row)
        return "planted"

    return plant


def built(name: str, workload: Workload) -> Runner:
    runner = Runner(name, "cpu", 1)
    runner.load()
    fields = runner.build(workload, 0)
    if name != "planted":
        assert fields["kernel"], "what runs is named"
        nbytes = 2 * 4 * workload.B * workload.room * workload.K * workload.H
        assert (fields["cache_bytes"] or 0) == nbytes
    return runner


@cache
def judge_of(workload: Workload) -> Judge:
    """A judge that knows what torch's fused attention gives."""
    judge, sdpa = Judge(), built("sdpa", workload)
    judge.prepare(workload, 0, workload.modes)
    for mode in workload.modes:
        judge.take_own(mode, sdpa.tensors(mode))
    return judge


def judged(name: str, workload: Workload, mode: str = "") -> dict:
    mode = mode or workload.modes[0]
    return judge_of(workload).judge(mode, built(name, workload).tensors(mode))


# --- what agrees ----------------------------------------------------------------------------------

# torchax may be there and not import; what torch.compile has the C++ compiler make of `torch
# eager` takes 10 s a row.
SLOW = ("torchax", "torch.compile")
SAME_LAYER = ("jax-attn dense", "jax-attn blocked")  # as "jax-attn"'s, around another kernel
HERE = [
    name
    for name in OF_PRESETS
    for row in [IMPLEMENTATIONS[name]]
    if name not in SLOW and "cpu" in row.devices and not row.absent
]


def available(*cases: tuple[Workload, str]) -> list:
    """Each implementation in the workload and mode of each case that it has a program for."""
    return [
        pytest.param(name, w, mode, id=f"{name}-{w.name}")
        for name in HERE
        for w, mode in cases
        if not IMPLEMENTATIONS[name].lacks(w) and not (w.layer and name in SAME_LAYER)
    ]


CASES = [
    *available((MULTI_HEAD, BACKWARD), (CORE, FORWARD), (GROUPED, FORWARD)),
    *available(*((w, w.modes[0]) for w in (STEP, PROMPT, CHUNK))),
    pytest.param("torch eager", MULTI_QUERY, BACKWARD, id="the published multi-query code"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "workload", "mode"), CASES)
def test_every_implementation_agrees(name, workload, mode):
    try:
        found = judged(name, workload, mode)
    except UnsuitedError as error:
        assert "as many key/value heads" in str(error)  # noqa: PT017
        return
    assert (found["verdict"], found["reason"]) == ("PASS", "")
    # Within budget, as the verdict says; and not the reference compared with itself.
    assert found["error"] > 0
    assert found["reference_error"] > 0


def test_what_has_no_cache_says_so():
    lacking = {n: IMPLEMENTATIONS[n].lacks(STEP) for n in OF_PRESETS if n not in WITH_CACHE}
    assert set(lacking.values()) == {"has no program for attention with a cache"}
    assert not any(IMPLEMENTATIONS[name].lacks(STEP) for name in WITH_CACHE)


# --- what does not --------------------------------------------------------------------------------

WRONG = {
    "scale off by 1%": ("scale_off", CORE, FORWARD, "output"),
    "causal ignored": ("causal_ignored", CORE, FORWARD, "output"),
    "key's gradient lost": ("key_gradient_lost", CORE, BACKWARD, "grad input key"),
    "the last token forgotten": ("last_forgotten", STEP, "", "output"),
    "a stale tail": ("stale_tail", STEP, "", "output"),
    "a chunk's causal corner top-left": ("corner_top_left", CHUNK, "", "output"),
}


@pytest.mark.slow
@pytest.mark.parametrize("row", WRONG)
def test_wrong_numbers_fail_and_the_tensor_is_named(planted, row):
    builder, workload, mode, label = WRONG[row]
    found = judged(planted(builder), workload, mode)
    assert found["verdict"] == "FAIL"
    assert f"{label}: error over budget" in found["reason"]


@pytest.mark.slow
def test_a_wrong_gradient_alone_leaves_the_output_right(planted):
    assert judged(planted("key_gradient_lost"), CORE)["verdict"] == "PASS"


@pytest.mark.slow
def test_one_wrong_row_among_those_judged_is_seen():
    output = built("sdpa", CORE).tensors(FORWARD)["output"]["output"].copy()
    output[-1, -1] *= 1.001
    found = judge_of(CORE).judge(FORWARD, {"output": {"output": output}})
    assert found["verdict"] == "FAIL"


def test_what_has_not_its_tensors_is_an_error():
    with pytest.raises(ValueError, match=r"expected \['key', 'query', 'value'\], got \['query'\]"):
        judge_of(CORE).judge(BACKWARD, {"gradient of input": {"query": np.zeros(1)}})


PLANTED = {
    "a row that is not judged is not finite": (
        "one_row_lost",
        FORWARD,
        "output: expected finite numbers, got 10 others",
    ),
    "another dtype": ("in_bfloat16", FORWARD, "output: expected float32, got bfloat16"),
    "a gradient that is not finite": (
        "key_gradient_infinite",
        BACKWARD,
        "grad key: expected finite numbers, got",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("row", PLANTED)
def test_tensors_are_looked_at_whole(planted, row):
    builder, mode, message = PLANTED[row]
    with pytest.raises(ValueError, match=message):
        built(planted(builder), CORE).tensors(mode)


# --- the error that is told -----------------------------------------------------------------------


def report(name, error, own, scale=1.0):
    options = {"kind": "gradient of parameter", "transform": BACKWARD, "shape": (1,)}
    options |= {"verdict": Verdict.PASS, "reasons": ()}
    return TensorReport(name=name, error=error, reference_error=own, scale=scale, **options)


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


# --- what is compiled -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "workload", "mode"),
    [
        ("jax-attn dense", MULTI_HEAD, FORWARD),
        ("jax-attn dense", MULTI_HEAD, BACKWARD),
        ("jax-attn", STEP, DECODE),
    ],
)
def test_no_call_after_compiling_compiles_anything_anew(name, workload, mode):
    runner = built(name, workload)
    assert jax.config.jax_enable_compilation_cache is False
    with compilations() as events:
        runner.compile(mode)
        assert len(events) == 1
        runner.first_call(mode)
        runner.turn(mode)
        assert len(events) == 1


@pytest.mark.slow
def test_scores_that_would_not_fit_are_not_written(monkeypatch):
    runner = built("torch eager", CORE)
    need = 4 * CORE.B * CORE.N * CORE.T * CORE.S * 2
    monkeypatch.setattr(runner.engine, "available", lambda: 2 * need)
    assert runner.compile(FORWARD) == (None, None)
    monkeypatch.setattr(runner.engine, "available", lambda: 2 * need - 1)
    with pytest.raises(UnsuitedError, match="writes every score"):
        runner.compile(FORWARD)


def folded(jitted, *arguments) -> bool:
    """Whether an array is a constant of the program: one of many numbers stands there so."""
    text = jitted.lower(*arguments).as_text()
    return "dense_resource" in text or 'dense<"0x' in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n for n in ("jax-attn", "jax.nn", "flax nnx", "equinox", "keras") if n in HERE]
)
def test_weights_and_inputs_are_arguments_of_what_jax_compiles(name):
    runner = built(name, MULTI_HEAD)
    leaves = runner.engine.state["leaves"]
    assert len(leaves) == 1 + 8
    assert not folded(runner.engine.calls[FORWARD].jitted, leaves)
    x, *weights = leaves
    assert folded(jax.jit(lambda x: runner.program.call(x, *weights)), x), "the check sees it"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sdpa", "jax-attn dense"])
def test_nothing_of_the_last_workload_is_held_while_the_next_is_made(monkeypatch, name):
    runner = built(name, CORE)
    runner.tensors(FORWARD)
    last = weakref.ref(runner.program)
    arrays = seeded_arrays(GROUPED, 0)
    seeded = "jax_attn.bench.engine.runner.seeded_arrays"
    monkeypatch.setattr(seeded, lambda *_: pytest.fail("held") if last() else arrays)
    runner.build(GROUPED, 0)


# --- each call with a cache -----------------------------------------------------------------------


def outputs(name: str) -> list[np.ndarray]:
    runner = built(name, STEP)
    return [runner.tensors(DECODE)["output"]["output"] for _ in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_CACHE)
def test_every_call_is_the_same_one(name):
    first, *others = outputs(name)
    assert all(np.array_equal(other, first) for other in others)


@pytest.mark.slow
def test_calls_that_differ_are_seen(planted):
    first, *others = outputs(planted("grows", "jax"))
    assert not any(np.array_equal(other, first) for other in others)


def moved(runner) -> list[bool]:
    """Of each array of the cache, whether it lies elsewhere after a call."""

    def places():
        runner.call(DECODE)
        arrays = jax.tree.leaves(runner.engine.state["cache"])
        return [array.unsafe_buffer_pointer() for array in arrays]

    before, after = places(), places()
    return [one != other for one, other in zip(before, after, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["jax.nn", "jax-attn"])
def test_there_is_one_cache_and_it_stays_where_it_is(name):
    runner = built(name, STEP)
    assert not any(moved(runner))
    copying = jax.jit(lambda cache, leaves: runner.program.call(cache, *leaves))
    runner.engine.calls[DECODE] = runner.engine.calls[DECODE]._replace(jitted=copying)
    assert all(moved(runner)), "what is not donated is seen"
