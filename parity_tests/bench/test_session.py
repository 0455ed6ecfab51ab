"""A run of the bench: who is judged, timed and told of, and why not. Without a framework."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from helpers.bench.bench_stand_in import DEFAULTS, Fake
from jax_attn.bench.engine import plan, processes
from jax_attn.bench.engine import session as session_module
from jax_attn.bench.engine.plan import BenchPlan
from jax_attn.bench.engine.rounds import Limits
from jax_attn.bench.engine.session import Session
from jax_attn.bench.engine.worker import AbsentError, LostError, RefusedError, WorkerError
from jax_attn.bench.implementations import IMPLEMENTATIONS, OF_PRESETS, Implementation
from jax_attn.bench.record import Record, Status
from jax_attn.bench.workload import PairWorkload, Workload

CORE = Workload("core", False, 1, 257, 263, 4, 2, 5, is_causal=True)
LAYER = Workload("layer", True, 2, 5, 5, 4, 1, 3, D=12)
PRODUCTS = ("products by jax", "products by torch")


TABLE = {
    name: Implementation(name, framework, "m:core", "m:layer")
    for name, framework in (("sdpa", "torch"), ("peer", "jax"), ("ours", "jax"))
}


def agreed(verdict="PASS", *reasons):
    fields = {"tensor": "output", "error": 2e-7, "reference_error": 1e-7}
    return {"verdict": verdict, "reason": "; ".join(reasons)} | fields


@pytest.fixture
def session(monkeypatch):
    """A function: answers -> the rows of a run with fake workers, by (mode, name)."""
    monkeypatch.setattr(session_module, "session_environment", lambda: {"packages": {}})
    monkeypatch.setitem(DEFAULTS, "judge", agreed())
    times = iter(range(1, 10**6))
    monkeypatch.setitem(DEFAULTS, "turn", lambda *_: (1.0 + 1e-6 * next(times), 0.5))

    def run(answers=None, table=None, stop_at="", workloads=(LAYER,), **options):
        monkeypatch.setattr(Fake, "answers", answers or {})
        for module in (plan, processes, session_module):
            monkeypatch.setattr(module, "IMPLEMENTATIONS", TABLE | (table or {}))
        options = {"implementations": ("peer", "ours"), "limits": Limits(5, 5)} | options
        with Session(BenchPlan(threads=1, workloads=workloads, **options), Fake) as made:
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
    assert row.ratio.side == 0
    assert record.settings["judged_rows"] == {"layer": "10 of 10"}
    assert record.roofline["float32"] == max(record.settings["matrix_product_flops_per_s"].values())
    assert Record.from_json(record.to_json()).rows == record.rows


def test_what_fails_its_verdict_is_excluded_and_never_timed(session):
    def judged(mode, tensors):
        return agreed("FAIL", "output: wrong") if tensors == "wrong" else agreed()

    answers = {("peer", "tensors"): "wrong", ("judge", "judge"): judged}
    _, rows = session(answers | {("peer", "turn"): RefusedError("timed")})
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
        "has no program for a layer",
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
    _, rows = session({("peer", "turn"): lambda *_: next(left, lost)})
    row = rows["forward", "peer"]
    assert (row.status, row.seconds, row.reason) == (Status.FAILED, (), str(lost))
    assert row.ratio is None
    later = rows["forward+backward", "peer"]
    assert (later.status, later.seconds) == (Status.NOT_RUN, ())


def test_where_the_baseline_is_lost_the_others_have_times_and_no_ratio(session):
    calls = iter(range(100))
    lost = LostError("turn: its process was killed")

    def turn(*_):
        return lost if next(calls) == 2 else (1.0, 0.5)

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
    lacking = {name for name in OF_PRESETS if IMPLEMENTATIONS[name].lacks(CORE)}
    assert lacking == {"nn.MultiheadAttention", "equinox"}
    without_layer = {name for name in OF_PRESETS if IMPLEMENTATIONS[name].lacks(LAYER)}
    assert without_layer == {"sdpa flash", "sdpa cudnn", "sdpa efficient", "flash-attn"}


def test_how_long_dispatch_takes_is_kept_where_the_device_is_another(session):
    _, rows = session(device="gpu")
    row = rows["forward", "ours"]
    assert (row.dispatch, row.dispatch_s) == ((0.5,) * 5, 0.5)
    _, rows = session()
    assert (rows["forward", "ours"].dispatch, rows["forward", "ours"].dispatch_s) == ((), None)


def test_on_a_gpu_processes_of_jax_are_started_once_for_each_workload(session, monkeypatch):
    """The peak of JAX's allocator cannot be reset; that of torch's can."""
    monkeypatch.setattr(Fake, "started", [])
    session(device="gpu", workloads=(LAYER, replace(LAYER, name="other")))
    names = [worker.name for worker in Fake.started]
    assert sorted(names) == sorted(["judge", *PRODUCTS, "sdpa", *2 * ["ours", "peer"]])


def test_who_has_no_program_for_any_workload_has_a_row_and_no_process(session):
    step, asked = replace(CORE, T=1, room=263), []
    table = {name: replace(TABLE[name], cached="m:cached") for name in ("sdpa", "ours")}
    answers = {("peer", "load"): lambda: asked.append("peer")}
    _, rows = session(answers, table, workloads=(step,))
    assert set(rows) == {("decode", name) for name in ("sdpa", "peer", "ours")}
    row = rows["decode", "peer"]
    assert (row.status, row.reason) == (Status.NOT_RUN, "has no program for attention with a cache")
    assert len(rows["decode", "ours"].seconds) == 5
    assert asked == []
    session(answers)
    assert asked == ["peer"], "whoever has one is started"


def test_a_way_whose_process_is_lost_starts_again_at_the_next_length(monkeypatch):
    monkeypatch.setattr(session_module, "session_environment", lambda: {"packages": {}})
    lengths = [PairWorkload(f"length {n}", "x", "float32", (("forward", 1),), n) for n in (3, 5)]
    verdicts = ("forward",), dict.fromkeys(lengths, agreed())
    left = iter([LostError("turn: its process was killed")])
    answers = {("judge", "judged"): verdicts, ("judge", "load"): {}}
    answers |= {("jax.jit", "turn"): lambda *_: next(left, (1.0, 0.5)), ("jax.jit", "build"): {}}
    monkeypatch.setattr(Fake, "answers", answers | {("torch eager", "build"): {}})
    options = {"baseline": "torch eager", "limits": Limits(5, 5), "pair": "mine.py:make"}
    with Session(BenchPlan(("jax.jit",), 1, **options), Fake) as made:
        list(made.run())
        rows = {(r.workload.length, r.implementation): r for r in made.record().rows}
    found = {key: (row.status, row.verdict, len(row.seconds)) for key, row in rows.items()}
    assert found == {
        (3, "torch eager"): (Status.MEASURED, None, 5),
        (3, "jax.jit"): (Status.FAILED, "PASS", 0),
        (5, "torch eager"): (Status.MEASURED, None, 5),
        (5, "jax.jit"): (Status.MEASURED, "PASS", 5),
    }


def test_no_row_of_the_table_names_a_builder_that_is_not_there():
    for implementation in IMPLEMENTATIONS.values():
        i = implementation
        for builder in filter(None, (i.core, i.layer, i.cached, i.pair)):
            module, _, name = builder.partition(":")
            source = Path(find_spec(module).origin).read_text()
            assert f"\ndef {name}(" in source
