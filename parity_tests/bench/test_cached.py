"""Attention with a cache in the bench: prefill and decode, each call the same one, in place."""

import os
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

from helpers.bench.engine_process import compilations
from jax_attn.bench.engine.compare_speed import settings_kept
from jax_attn.bench.engine.judge import Judge
from jax_attn.bench.engine.runner import Runner
from jax_attn.bench.implementations import IMPLEMENTATIONS, OF_PRESETS, Implementation
from jax_attn.bench.presets import PRESETS
from jax_attn.bench.workload import DECODE, MODES, PREFILL, Workload

os.environ["KERAS_BACKEND"] = "jax"  # as the bench's workers have it; read when keras loads


def cached(name, T, S, room, K, B=2) -> Workload:
    return Workload(name, False, B, T, S, 6, K, 5, is_causal=True, room=room)


STEP = cached("step", 1, 37, 53, 2)
PROMPT = cached("prompt", 23, 23, 53, 1)
CHUNK = cached("chunk", 7, 37, 53, 6)
HAVE = ("sdpa", "torch eager", "jax.nn", "jax-attn")


@pytest.fixture(autouse=True)
def settings():
    with settings_kept():
        yield


# --- workloads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("workload", [STEP, PROMPT, CHUNK], ids=lambda w: w.name)
def test_work_is_two_products_by_every_key_that_a_token_sees(workload):
    w = workload
    seen = sum(w.filled + t + 1 for t in range(w.T))
    assert w.filled + w.T == w.S
    assert w.pairs == seen
    assert w.flops(*w.modes) == 2 * 2 * w.B * w.N * seen * w.H
    assert w.cached_bytes == 2 * 4 * w.B * w.S * w.K * w.H
    assert replace(w, dtype="bfloat16").cached_bytes == w.cached_bytes // 2


def test_a_workload_has_its_modes_and_no_others():
    assert [w.modes for w in (STEP, PROMPT, CHUNK)] == [(DECODE,), (PREFILL,), (PREFILL,)]
    assert replace(STEP, room=0).modes == MODES
    for preset in (DECODE, PREFILL):
        assert {w.modes for w in PRESETS[preset]} == {(preset,)}


def test_decode_has_what_its_targets_compare():
    named = {w.name: w for w in PRESETS[DECODE]}
    for B in (1, 8):
        heads, one = named[f"decode/{B}x8192"], named[f"decode/{B}x8192/mqa"]
        assert (heads.B, heads.S, heads.N, heads.K, heads.H) == (B, 8192, 16, 16, 64)
        assert replace(heads, name=one.name, K=1) == one
    little, much = named["decode/512of512"], named["decode/512of32768"]
    assert (little.S, little.room, much.room) == (512, 512, 32768)
    assert replace(little, name=much.name, room=much.room) == much


# --- numbers --------------------------------------------------------------------------------------


def built(name: str, workload: Workload) -> Runner:
    runner = Runner(name, "cpu", 1)
    runner.load()
    fields = runner.build(workload, 0)
    if name != "planted":
        room = 2 * 4 * workload.B * workload.room * workload.K * workload.H
        assert fields["kernel"], "what runs is named"
        assert fields["cache_bytes"] == room
    return runner


@cache
def judge_of(workload: Workload) -> Judge:
    judge, (mode,) = Judge(), workload.modes
    judge.prepare(workload, 0, (mode,))
    judge.take_own(mode, built("sdpa", workload).tensors(mode))
    return judge


def verdict(name: str, workload: Workload):
    (mode,) = workload.modes
    return judge_of(workload).judge(mode, built(name, workload).tensors(mode))


@pytest.mark.slow
@pytest.mark.parametrize("workload", [STEP, PROMPT, CHUNK], ids=lambda w: w.name)
@pytest.mark.parametrize("name", HAVE)
def test_every_implementation_with_a_cache_agrees(name, workload):
    judged = verdict(name, workload)
    assert (judged["verdict"], judged["reason"], judged["tensor"]) == ("PASS", "", "output")
    assert judged["error"] > 0  # within budget, as the verdict says, and not compared with itself


def test_what_has_no_cache_says_so():
    lacking = {n: IMPLEMENTATIONS[n].lacks(STEP) for n in OF_PRESETS if n not in HAVE}
    assert set(lacking.values()) == {"has no program for attention with a cache"}
    assert not any(IMPLEMENTATIONS[name].lacks(STEP) for name in HAVE)


def planted(monkeypatch, builder: str, framework: str) -> None:
    row = Implementation("planted", framework, cached=f"helpers.bench.bench_stand_in:{builder}")
    monkeypatch.setitem(IMPLEMENTATIONS, "planted", row)


WRONG = {
    "the last token forgotten": ("last_forgotten", STEP),
    "a stale tail": ("stale_tail", STEP),
    "a chunk's causal corner top-left": ("corner_top_left", CHUNK),
}


@pytest.mark.slow
@pytest.mark.parametrize("row", WRONG)
def test_wrong_numbers_fail(monkeypatch, row):
    builder, workload = WRONG[row]
    planted(monkeypatch, builder, "torch")
    judged = verdict("planted", workload)
    assert judged["verdict"] == "FAIL"
    assert judged["reason"].startswith("output: error over budget")


# --- each call ------------------------------------------------------------------------------------


def outputs(name: str, workload: Workload, calls: int = 3) -> list[np.ndarray]:
    runner, (mode,) = built(name, workload), workload.modes
    return [runner.tensors(mode)["output"]["output"] for _ in range(calls)]


@pytest.mark.slow
@pytest.mark.parametrize("name", HAVE)
def test_every_call_is_the_same_one(name):
    first, *others = outputs(name, STEP)
    assert all(np.array_equal(other, first) for other in others)


def test_calls_that_differ_are_seen(monkeypatch):
    planted(monkeypatch, "grows", "jax")
    first, *others = outputs("planted", STEP)
    assert not any(np.array_equal(other, first) for other in others)


def moved(runner) -> list[bool]:
    """Of each array of the cache, whether it lies elsewhere after a call."""

    def places():
        runner.call(DECODE)
        cache = runner.engine.state["cache"]
        return [array.unsafe_buffer_pointer() for array in jax.tree.leaves(cache)]

    before, after = places(), places()
    return [one != other for one, other in zip(before, after, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["jax.nn", "jax-attn"])
def test_there_is_one_cache_and_it_stays_where_it_is(name):
    runner = built(name, STEP)
    assert not any(moved(runner))
    donating = runner.engine.calls[DECODE]
    copying = jax.jit(lambda cache, leaves: runner.program.call(cache, *leaves))
    runner.engine.calls[DECODE] = donating._replace(jitted=copying)
    assert all(moved(runner)), "what is not donated is seen"


def test_no_step_compiles_anything_anew():
    runner = built("jax-attn", STEP)
    with compilations() as events:
        runner.compile(DECODE)
        assert len(events) == 1
        runner.turn(DECODE)
        assert len(events) == 1
