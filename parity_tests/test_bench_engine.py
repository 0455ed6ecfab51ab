"""The bench's engine without a framework: workloads, rounds, workers, memory, one session."""

import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from bench_stand_in import DEFAULTS, Fake

from jax_attn.bench import measure, memory, workloads
from jax_attn.bench.implementations import IMPLEMENTATIONS, Implementation
from jax_attn.bench.measure import Plan, Session
from jax_attn.bench.measured import TURN_SECONDS, Measured
from jax_attn.bench.record import Record, Status, Workload
from jax_attn.bench.rounds import Limits, interleaved
from jax_attn.bench.verdict import Agreement
from jax_attn.bench.worker import (
    AbsentError,
    LostError,
    RefusedError,
    Worker,
    WorkerError,
    usable_cores,
)
from jax_attn.parity.compare import Verdict

CORE = Workload("core", False, 1, 257, 263, 4, 2, 5, is_causal=True)
LAYER = Workload("layer", True, 2, 5, 5, 4, 1, 3, D=12)

# --- workloads ------------------------------------------------------------------------------------


def test_every_preset_has_workloads_and_no_name_stands_for_two():
    every = [w for preset in workloads.PRESETS.values() for w in preset]
    assert all(workloads.PRESETS.values())
    assert len({w.name for w in every}) == len(set(every))


def test_presets_that_share_a_workload_measure_it_once():
    found = workloads.chosen(("seeds", "targets"), "bfloat16")
    assert len(found) == len(set(found)) == 12
    assert {w.dtype for w in found} == {"bfloat16"}


def test_a_workload_can_be_asked_for_by_its_own_name_and_is_there_once():
    (one,) = workloads.chosen(("longest/32768", "longest/32768"))
    assert (one.name, one.T, one.is_causal) == ("longest/32768", 32768, False)
    assert workloads.chosen(("long/2048", "long")) == workloads.PRESETS["long"]


@pytest.mark.parametrize("preset", ["long", "longest"])
def test_each_length_is_measured_full_and_causal_one_after_the_other(preset):
    found = workloads.PRESETS[preset]
    pairs = list(zip(found[::2], found[1::2], strict=True))
    assert all(f"{full.name}/causal" == causal.name for full, causal in pairs)
    assert all((full.is_causal, causal.is_causal) == (False, True) for full, causal in pairs)
    assert all(full.T == causal.T for full, causal in pairs)


def test_arrays_are_the_same_for_everyone_and_others_for_another_seed():
    one, two, other = (workloads.arrays(LAYER, seed) for seed in (0, 0, 1))
    assert one.keys() == {"x", "cotangent"} | {
        f"{p}_proj.{kind}" for p in ("q", "k", "v", "out") for kind in ("weight", "bias")
    }
    assert all(np.array_equal(one[name], two[name]) for name in one)
    assert not any(np.array_equal(one[name], other[name]) for name in one)
    assert {a.dtype for a in one.values()} == {np.dtype("float32")}


def test_sampled_rows_hold_the_ends_and_the_cotangent_nothing_else():
    rows = workloads.sampled_rows(CORE)
    assert (rows[0], rows[-1], len(set(rows))) == (0, CORE.T - 1, 128)
    kept = workloads.sampled_cotangent(CORE, workloads.arrays(CORE)["cotangent"])
    assert np.array_equal(np.flatnonzero(kept.any(axis=(0, 2, 3))), rows)
    assert len(workloads.sampled_rows(LAYER)) == LAYER.T


def test_longer_sequences_are_judged_on_fewer_rows():
    counts = [len(workloads.sampled_rows(replace(CORE, T=S, S=S))) for S in (1024, 8192, 2**20)]
    assert counts == [128, 122, 16]


# --- rounds ---------------------------------------------------------------------------------------


def simulated(durations, limits, failing=None):
    """(found, order of turns) of clocked turns that take `durations` seconds."""
    now, order, found = [0.0], [], {}

    def turn(name):
        def take():
            now[0] += durations[name]
            order.append(name)
            return None if failing == (name, order.count(name)) else durations[name]

        return take

    turns = {name: turn(name) for name in durations}
    for _ in interleaved(turns, found, "anchor", limits, 0, lambda: now[0]):
        pass
    return found, order


def test_each_round_has_everyone_once_in_an_order_of_its_own():
    names = ["anchor", "b", "c", "d"]
    found, order = simulated(dict.fromkeys(names, 1.0), Limits(7, 7, 100.0))
    rounds = [tuple(order[i : i + 4]) for i in range(0, len(order), 4)]
    assert [sorted(r) for r in rounds] == [names] * 7
    assert len(set(rounds)) > 3
    assert {len(s) for s in found.values()} == {7}


LEAVING = {
    "a slow one leaves when its time is spent": (
        {"anchor": 0.1, "slow": 2.0, "quick": 0.1},
        Limits(3, 9, 7.0),
        {"anchor": 9, "slow": 4, "quick": 9},
    ),
    "but not before the least": (
        {"anchor": 0.1, "slow": 50.0},
        Limits(5, 9, 7.0),
        {"anchor": 9, "slow": 5},
    ),
    "the anchor stays while anybody does": (
        {"anchor": 50.0, "quick": 0.1},
        Limits(3, 9, 7.0),
        {"anchor": 9, "quick": 9},
    ),
    "and leaves with the last": (
        {"anchor": 50.0, "slow": 50.0},
        Limits(3, 9, 7.0),
        {"anchor": 3, "slow": 3},
    ),
}


@pytest.mark.parametrize("row", LEAVING)
def test_who_leaves_the_rounds(row):
    durations, limits, expected = LEAVING[row]
    found, _ = simulated(durations, limits)
    assert {name: len(s) for name, s in found.items()} == expected


def test_one_that_fails_leaves_and_keeps_what_it_had():
    found, order = simulated({"anchor": 1.0, "b": 1.0}, Limits(5, 5, 100.0), failing=("b", 3))
    assert (len(found["b"]), order.count("b"), len(found["anchor"])) == (2, 3, 5)


def test_rounds_asked_for_are_just_as_many():
    assert Limits.of(3) == Limits(3, 3)
    assert Limits.of(None) == Limits()


# --- workers --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def worker():
    made = Worker("stand-in", "bench_stand_in:StandIn", threads=1)
    yield made
    made.close()


def test_a_worker_answers_and_what_it_prints_goes_nowhere(worker, capfd):
    arrays = {"a": np.arange(3)}
    (back,) = worker.ask("echo", arrays)
    assert np.array_equal(back["a"], arrays["a"])
    assert capfd.readouterr() == ("", "")


def test_a_worker_has_the_threads_it_is_given_and_as_many_cores(worker):
    can_be_kept_to_some = hasattr(os, "sched_getaffinity")  # Linux alone has it
    assert worker.ask("threads") == ("1", 1 if can_be_kept_to_some else os.cpu_count())
    assert usable_cores() >= 1


def test_a_worker_tells_what_went_wrong_and_lives(worker):
    with pytest.raises(AbsentError, match="does not import: it is planted"):
        worker.ask("load")
    with pytest.raises(RefusedError, match="not for this workload"):
        worker.ask("refuse")
    with pytest.raises(WorkerError, match=r"^fail: ArithmeticError: planted$"):
        worker.ask("fail")
    assert worker.ask("echo", 1) == (1,)


def test_a_process_that_dies_is_told_with_its_last_words():
    worker = Worker("stand-in", "bench_stand_in:StandIn", threads=1)
    try:
        with pytest.raises(LostError, match="die: its process ended with status 7: last words"):
            worker.ask("die")
    finally:
        worker.close()


# --- a turn ---------------------------------------------------------------------------------------

COLD = {
    # (seconds, until it returned) of the first call, of a later one: of the turn
    "a short call is counted from the second on": ((0.1, 0.02), (0.01, 0.001), (0.01, 0.001)),
    "a long call has no second": ((0.3, 0.02), (0.01, 0.001), (0.3, 0.02)),
}


@pytest.mark.parametrize("row", COLD)
def test_the_cold_call_of_a_turn_counts_only_where_that_does_not_show(row):
    first, later, turn = COLD[row]
    measured = Measured("jax-attn", "cpu", 1)
    asked = []

    class Engine:
        def turn(self, mode, seconds):
            asked.append(seconds)
            return later if len(asked) > 1 else first

    measured.engine = Engine()
    assert measured.turn("forward") == turn
    assert asked == [0.0, TURN_SECONDS][: len(asked)]


# --- memory ---------------------------------------------------------------------------------------


def test_the_peak_of_a_call_counts_what_it_frees_and_every_time():
    size = 24 * 2**20

    def call():
        np.ones(size, np.uint8)  # freed before the call ends

    # The test's own heap moves by less than a tenth of it.
    for _ in range(3):
        assert 0.9 * size < memory.peak_during(call) < 1.2 * size
    assert memory.peak_during(lambda: None) < 0.1 * size


def test_where_linux_does_not_tell_psutil_samples(monkeypatch):
    pytest.importorskip("psutil")
    monkeypatch.setattr(memory, "_resets", lambda: False)
    size = 64 * 2**20
    assert 0.9 * size < memory.peak_during(lambda: np.ones(size, np.uint8)) < 1.5 * size


# --- a session ------------------------------------------------------------------------------------

TABLE = {
    name: Implementation(name, framework, "m:core", "m:layer")
    for name, framework in (("sdpa", "torch"), ("peer", "jax"), ("ours", "jax"))
}


def agreed(verdict="PASS", *reasons):
    return Agreement(Verdict(verdict), reasons, "output", 2e-7, 1e-7)


@pytest.fixture
def session(monkeypatch):
    """A function: answers -> the rows of a run with fake workers, by (mode, name)."""
    monkeypatch.setattr(measure, "IMPLEMENTATIONS", TABLE)
    monkeypatch.setattr(measure, "_environment", lambda: {"packages": {}})
    monkeypatch.setitem(DEFAULTS, "judge", agreed())
    times = iter(range(1, 10**6))
    monkeypatch.setitem(DEFAULTS, "turn", lambda *_: (1.0 + 1e-6 * next(times), 0.5))

    def run(answers=None, table=None, stop_at="", workload=LAYER, **options):
        monkeypatch.setattr(Fake, "answers", answers or {})
        monkeypatch.setattr(measure, "IMPLEMENTATIONS", TABLE | (table or {}))
        options = {"implementations": ("peer", "ours"), "limits": Limits(5, 5)} | options
        with Session(Plan((workload,), threads=1, **options), Fake) as made:
            for step in made.run():
                if stop_at and stop_at in step:
                    break
        record = made.record(bool(stop_at))
        return record, {(row.mode, row.implementation): row for row in record.rows}

    return run


def test_what_agrees_is_timed_over_the_baseline_and_the_reference_is_always_there(session):
    record, rows = session()
    assert [r.implementation for r in record.rows] == ["sdpa", "peer", "ours"] * 2
    row = rows["forward", "ours"]
    assert (row.status, row.verdict, row.kernel) == (Status.MEASURED, "PASS", "a kernel")
    assert (row.compile_s, row.first_call_s, row.compiler_bytes) == (0.5, 0.25, 1024)
    assert (row.peak_bytes, row.error_ratio, row.reason) == (4096, 2.0, "")
    assert row.cache_bytes == 512
    assert row.tensor == "output"
    assert len(row.seconds) == 5
    assert row.ratio.said == "no difference"
    assert record.settings["judged_rows"] == {"layer": "5 of 5"}
    assert record.roofline["float32"] == max(record.settings["matrix_product_flops_per_s"].values())
    assert Record.from_json(record.to_json()).rows == record.rows


def test_what_fails_its_verdict_is_excluded_and_never_timed(session):
    def judged(mode, tensors):
        return agreed("FAIL", "output: wrong") if tensors == "wrong" else agreed()

    answers = {("peer", "tensors"): "wrong", ("judge", "judge"): judged}
    # The yardstick's product is a turn too: it is another framework's here.
    table = {"peer": replace(TABLE["peer"], framework="torch")}
    _, rows = session(answers | {("peer", "turn"): RefusedError("timed")}, table)
    for mode in ("forward", "forward+backward"):
        row = rows[mode, "peer"]
        assert (row.status, row.verdict) == (Status.EXCLUDED, "FAIL")
        assert (row.reason, row.seconds) == ("output: wrong", ())
        assert rows[mode, "ours"].seconds


def test_what_cannot_be_judged_is_timed_and_says_so(session):
    doubt = agreed("INCONCLUSIVE", "no power")
    _, rows = session({("judge", "judge"): lambda *_: doubt})
    row = rows["forward", "ours"]
    assert (row.status, row.verdict, row.reason) == (Status.MEASURED, "INCONCLUSIVE", "no power")


UNTIMED = {
    "not installed": (
        {},
        {"peer": replace(TABLE["peer"], needs=("no_such_module",), install="pip install it")},
        Status.ABSENT,
        "no_such_module not installed: pip install it",
    ),
    "does not import": (
        {("peer", "load"): AbsentError("does not import: OSError: x")},
        {"peer": replace(TABLE["peer"], install="pip install it")},
        Status.ABSENT,
        "does not import: OSError: x; pip install it",
    ),
    "has no program for a layer": (
        {},
        {"peer": replace(TABLE["peer"], layer="")},
        Status.NOT_RUN,
        "has no layer",
    ),
    "cannot serve it": (
        {("peer", "build"): RefusedError("one head alone")},
        {},
        Status.NOT_RUN,
        "one head alone",
    ),
    "would not fit": (
        {("peer", "compile"): RefusedError("writes every score: 9 GiB")},
        {},
        Status.NOT_RUN,
        "writes every score: 9 GiB",
    ),
    "raises while it is built": (
        {("peer", "build"): WorkerError("build: ValueError: x")},
        {},
        Status.FAILED,
        "build: ValueError: x",
    ),
    "raises in its first call": (
        {("peer", "first_call"): WorkerError("first_call: ValueError: x")},
        {},
        Status.FAILED,
        "first_call: ValueError: x",
    ),
    "dies while it is loaded": (
        {("peer", "load"): LostError("load: its process was killed")},
        {},
        Status.FAILED,
        "load: its process was killed",
    ),
    "no reference": (
        {("judge", "prepare"): WorkerError("prepare: MemoryError: x")},
        {},
        Status.NOT_RUN,
        "no reference to judge by: prepare: MemoryError: x",
    ),
}


@pytest.mark.parametrize("row", UNTIMED)
def test_what_is_not_timed_says_why(session, row):
    answers, table, status, reason = UNTIMED[row]
    _, rows = session(answers, table)
    found = rows["forward", "peer"]
    assert (found.status, found.reason, found.seconds) == (status, reason, ())


def test_a_process_lost_in_its_turn_keeps_no_times_and_misses_the_next_mode(session):
    left = iter([(1.0, 0.5), (2.0, 0.5)])
    lost = LostError("turn: its process was killed")
    table = {"peer": replace(TABLE["peer"], framework="torch")}
    _, rows = session({("peer", "turn"): lambda *_: next(left, lost)}, table)
    row = rows["forward", "peer"]
    assert (row.status, row.seconds, row.reason) == (Status.FAILED, (), str(lost))
    assert row.ratio is None
    later = rows["forward+backward", "peer"]
    assert (later.status, later.seconds) == (Status.NOT_RUN, ())


def test_where_the_baseline_is_lost_the_others_have_times_and_no_ratio(session):
    calls = iter(range(100))
    lost = LostError("turn: its process was killed")

    def turn(*_):  # five of them are the yardstick's
        return lost if next(calls) == 7 else (1.0, 0.5)

    _, rows = session({("sdpa", "turn"): turn})
    assert (rows["forward", "sdpa"].status, rows["forward", "sdpa"].seconds) == (Status.FAILED, ())
    assert (len(rows["forward", "ours"].seconds), rows["forward", "ours"].ratio) == (5, None)


def test_an_interrupted_run_keeps_what_was_measured(session):
    record, rows = session(stop_at="forward, round 3")
    assert record.interrupted
    assert len(rows["forward", "ours"].seconds) == 3
    assert rows["forward+backward", "ours"].status is Status.NOT_RUN
    assert rows["forward+backward", "ours"].reason == "not timed"


def test_what_has_no_attention_alone_says_so_and_everyone_else_has_it():
    lacking = {n for n, i in IMPLEMENTATIONS.items() if i.lacks(CORE) == "has no attention alone"}
    assert lacking == {"nn.MultiheadAttention", "equinox"}
    without_layer = {n for n, i in IMPLEMENTATIONS.items() if i.lacks(LAYER) == "has no layer"}
    assert without_layer == {"sdpa flash", "sdpa cudnn", "sdpa efficient", "flash-attn"}


def test_how_long_dispatch_takes_is_kept_where_the_device_is_another(session):
    _, rows = session(device="gpu")
    row = rows["forward", "ours"]
    assert (row.dispatch, row.dispatch_s) == ((0.5,) * 5, 0.5)
    _, rows = session()
    assert (rows["forward", "ours"].dispatch, rows["forward", "ours"].dispatch_s) == ((), None)


def test_who_has_no_program_for_any_workload_has_a_row_and_no_process(session):
    step, asked = replace(CORE, T=1, room=263), []
    table = {name: replace(TABLE[name], cached="m:cached") for name in ("sdpa", "ours")}
    answers = {("peer", "load"): lambda: asked.append("peer")}
    _, rows = session(answers, table, workload=step)
    assert set(rows) == {("decode", name) for name in ("sdpa", "peer", "ours")}
    row = rows["decode", "peer"]
    assert (row.status, row.reason) == (Status.NOT_RUN, "has no attention alone with a cache")
    assert len(rows["decode", "ours"].seconds) == 5
    assert asked == []
    session(answers)
    assert asked == ["peer"], "whoever has one is started"


def test_no_row_of_the_table_names_a_builder_that_is_not_there():
    for implementation in IMPLEMENTATIONS.values():
        builders = implementation.core, implementation.layer, implementation.cached
        for builder in filter(None, builders):
            module, _, name = builder.partition(":")
            source = Path(find_spec(module).origin).read_text()
            assert f"\ndef {name}(" in source
