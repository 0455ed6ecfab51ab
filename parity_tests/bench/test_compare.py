"""`jax-attn bench compare`: what is a regression, what is refused, and the status it leaves."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from helpers.bench import bench_record
from jax_attn.bench.record import Record, Status
from jax_attn.cli import main

WORKLOADS = bench_record.LONG[:1]
BEFORE = bench_record.record(WORKLOADS)


def again(slower=None, **changed) -> Record:
    """Another run on the same machine, other noise, other times for some."""
    return bench_record.record(WORKLOADS, slower, seed=1, **changed)


def with_rows(record: Record, change) -> Record:
    """change: row → row, or None to leave it out."""
    return replace(record, rows=tuple(filter(None, map(change, record.rows))))


def compare(*args: str):
    return CliRunner().invoke(main, ["bench", "compare", *args], catch_exceptions=False)


@pytest.fixture
def run(tmp_path):
    def compared(before, after, *options: str):
        files = {"before.json": before, "after.json": after}
        for name, record in files.items():
            text = record.to_json() if isinstance(record, Record) else record
            (tmp_path / name).write_text(text)
        paths = [str(tmp_path / name) for name in files]
        return compare(*paths, *options)

    return compared


EVERYONE = dict.fromkeys(bench_record.IMPLEMENTATIONS, 2.0)
FOUND = {
    # another run's times: (options, exit status, rows named as regressions)
    "nothing changed": ({}, (), 0, set()),
    "one row a tenth slower": ({"jax-attn": 1.1}, (), 1, {"jax-attn"}),
    "by less than asked": ({"jax-attn": 1.1}, ("--fail", "15%"), 0, set()),
    "by more than asked": ({"jax-attn": 1.1}, ("--fail", "7.5%"), 1, {"jax-attn"}),
    "one row faster": ({"jax-attn": 0.8}, (), 0, set()),
    "the whole machine slower": (EVERYONE, (), 0, set()),
    "one slower on a slower machine": (
        EVERYONE | {"keras": 2.4},
        (),
        1,
        {"keras"},
    ),
}


@pytest.mark.parametrize("row", FOUND)
def test_a_regression_is_slower_over_the_baseline_than_asked_and_beyond_noise(row, run):
    slower, options, status, named = FOUND[row]
    after = bench_record.record(WORKLOADS, slower, seed=1)
    outcome = run(BEFORE, after, "--json", *options)
    rows = json.loads(outcome.stdout)["rows"]
    assert outcome.exit_code == status
    assert {r["implementation"] for r in rows if r["regression"]} == named
    assert len(rows) == 2 * len(bench_record.IMPLEMENTATIONS)
    shown = run(BEFORE, after, *options)
    assert shown.exit_code == status
    assert shown.stdout.count("REGRESSION") == 2 * len(named), "forward and forward+backward"


def test_a_slowdown_within_the_noise_is_no_regression(run):
    """Twice as slow, by four rounds: their interval is open."""

    def few(row):
        return replace(row, seconds=row.seconds[:4])

    slower = with_rows(again({"jax-attn": 2.0}), few)
    assert run(with_rows(BEFORE, few), slower).exit_code == 0
    assert run(BEFORE, again({"jax-attn": 2.0})).exit_code == 1


def test_a_row_that_left_the_rounds_early_is_compared_over_those_it_was_in(run):
    def early(row):
        return replace(row, seconds=row.seconds[:6]) if row.implementation == "keras" else row

    after = with_rows(again({"keras": 1.2}), early)
    outcome = run(BEFORE, after, "--json")
    slow = [r for r in json.loads(outcome.stdout)["rows"] if r["regression"]]
    assert outcome.exit_code == 1
    assert {r["implementation"] for r in slow} == {"keras"}


def lost(status: Status):
    def change(row):
        if row.implementation != "jax-attn":
            return row
        return replace(row, status=status, reason="output: over budget", seconds=(), ratio=None)

    return change


def without(name: str):
    return lambda row: None if row.implementation == name else row


GONE = {
    "measured, then wrong": (
        BEFORE,
        with_rows(again(), lost(Status.EXCLUDED)),
        1,
        "excluded after",
    ),
    "measured, then failed": (BEFORE, with_rows(again(), lost(Status.FAILED)), 1, "failed after"),
    "measured, then not run": (
        BEFORE,
        with_rows(again(), lost(Status.NOT_RUN)),
        0,
        "not run after",
    ),
    "wrong, then measured": (with_rows(BEFORE, lost(Status.EXCLUDED)), again(), 0, "excluded befo"),
    "only before": (BEFORE, with_rows(again(), without("keras")), 0, "not in the run after"),
    "only after": (with_rows(BEFORE, without("keras")), again(), 0, "not in the run before"),
}


@pytest.mark.parametrize("row", GONE)
def test_rows_that_one_run_lacks_are_listed_and_wrong_or_failed_ones_fail(row, run):
    before, after, status, why = GONE[row]
    outcome = run(before, after)
    assert outcome.exit_code == status
    assert why in outcome.stdout
    listed = json.loads(run(before, after, "--json").stdout)["unpaired"]
    assert len(listed) == 2, "forward and forward+backward"
    assert all(why in item["why"] for item in listed)
    assert {item["failure"] for item in listed} == {status == 1}


def test_a_pair_is_compared_in_the_modes_of_both_runs(run):
    """What is counted for a run's own modes is no other pair."""
    every, forward = bench_record.pair(), bench_record.pair(modes=("forward",))
    outcome = run(every, forward)
    assert outcome.exit_code == 0
    assert "1 rows compared" in outcome.stdout


def test_what_disagrees_now_fails_though_it_is_timed(run):
    """As with --untrusted."""
    before, after = bench_record.pair(), bench_record.pair(verdict="FAIL")
    outcome = run(before, after)
    assert outcome.exit_code == 1
    assert outcome.stdout.count("WRONG") == 3
    assert "3 now wrong or failed" in outcome.stdout
    rows = json.loads(run(before, after, "--json").stdout)["rows"]
    assert {row["implementation"] for row in rows if row["failure"]} == {"jax.jit"}
    assert run(after, after).exit_code == 0, "no more than before"


def test_without_its_baseline_nothing_is_compared_and_that_is_no_pass(run):
    outcome = run(BEFORE, with_rows(again(), without("sdpa")))
    assert outcome.exit_code == 4
    assert "its baseline, sdpa, has no time after" in outcome.stdout


def test_runs_of_other_workloads_have_nothing_to_compare(run):
    assert run(BEFORE, bench_record.record(bench_record.LONG[1:2])).exit_code == 4


def test_versions_may_differ_and_are_shown(run):
    packages = bench_record.ENVIRONMENT["packages"] | {"jax": "0.12.0"}
    newer = again(environment=bench_record.ENVIRONMENT | {"packages": packages})
    outcome = run(BEFORE, newer)
    assert outcome.exit_code == 0
    assert "jax 0.10.2 → 0.12.0" in outcome.stdout
    assert "flax 0.12.8" not in outcome.stdout, "only what differs"


def settings(**changed):
    return {"settings": bench_record.SETTINGS | changed}


def environment(**changed):
    return {"environment": bench_record.ENVIRONMENT | changed}


def half(row):
    return replace(row, workload=replace(row.workload, dtype="bfloat16"))


APART = {
    "processor": again(**environment(processor="Other CPU")),
    "cores": again(**environment(cores=4)),
    "devices": again(**environment(devices=["gpu: H100"])),
    "device": again(**settings(device="gpu")),
    "threads": again(**settings(threads=1)),
    "precision": again(**settings(precision="default")),
    "baseline": again(**settings(baseline="keras")),
    "dtypes": with_rows(again(), half),
}


@pytest.mark.parametrize("name", APART)
def test_other_machines_and_settings_never_form_a_ratio(name, run):
    outcome = run(BEFORE, APART[name])
    assert outcome.exit_code == 3
    assert outcome.stdout == ""
    assert outcome.stderr.startswith(f"Error: not comparable, {name}: ")
    assert outcome.stderr.count("\n") == 1


def test_every_difference_is_named_at_once(run):
    other = again(**environment(cores=4, processor="Other CPU"), **settings(threads=1))
    assert run(BEFORE, other).stderr.count("not comparable") == 3


def edited(**changed) -> str:
    return json.dumps(json.loads(BEFORE.to_json()) | changed)


NO_RECORD = {
    "no JSON": ("{", "expected JSON"),
    "another document": ("[]", "expected schema"),
    "another schema": (edited(schema="jax-attn bench 2"), "got 'jax-attn bench 2'"),
    "rows of something else": (edited(rows=[{"case": 1}]), "does not fit schema"),
    "no settings": (edited(settings={}), "expected both records to contain device"),
}


@pytest.mark.parametrize("row", NO_RECORD)
def test_what_is_no_record_leaves_2(row, run):
    text, message = NO_RECORD[row]
    for pair in ((text, BEFORE), (BEFORE, text)):
        outcome = run(*pair)
        assert outcome.exit_code == 2
        assert outcome.stdout == ""
        assert message in outcome.stderr


def test_a_file_that_is_not_there_leaves_2(tmp_path):
    outcome = compare(str(tmp_path / "a"), str(tmp_path / "b"))
    assert outcome.exit_code == 2
    assert "No such file" in outcome.stderr


@pytest.mark.parametrize("given", ["5", "-5%", "a lot", "5%%", ""])
def test_a_threshold_that_is_no_percentage_leaves_2(given, run):
    outcome = run(BEFORE, BEFORE, "--fail", given)
    assert outcome.exit_code == 2
    assert f"expected a percentage like 5%, got {given!r}" in outcome.stderr
