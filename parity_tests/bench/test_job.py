"""The steps of `jax-attn bench`: what is kept, shown and returned, however the run ends."""

import os
import signal
import threading
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from rich.progress import Progress

from helpers.bench.bench_record import small
from jax_attn.bench.engine.session import Session
from jax_attn.bench.record import Record, Status
from jax_attn.cli import main
from jax_attn.cli.bench_job import show
from jax_attn.cli.common.progress import counted

assert torch  # what is measured here is measured against it


def run(*args: str):
    return CliRunner().invoke(main, ["bench", *args], catch_exceptions=False)


@pytest.mark.slow
@pytest.mark.parametrize(("drawn", "line"), [([], "drawn: nothing"), (["a.svg"], "drawn: a.svg")])
def test_each_plot_is_named_and_so_is_that_there_is_none(
    drawn, line, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr("jax_attn.bench.results.plot.draw", lambda record, folder: drawn)
    show(small(), "--json", tmp_path, None, None)
    assert capsys.readouterr().err.startswith(line)


@pytest.fixture
def ended(monkeypatch):
    """A function: a run that gives this record, interrupted or not."""

    def planted(record, *options, interrupt=False, by=KeyboardInterrupt):
        def steps(self):
            yield "started"
            if interrupt:
                raise by

        monkeypatch.setattr(Session, "run", steps)
        monkeypatch.setattr(
            Session, "record", lambda self, interrupted: replace(record, interrupted=interrupted)
        )
        return run("--implementation", "sdpa", *options)

    return planted


LEAVES = {
    "all agree": (small, 0),
    "one is excluded": (lambda: small(Status.EXCLUDED, "FAIL"), 1),
    "one fails": (lambda: small(Status.FAILED), 1),
    "one disagrees and is timed": (lambda: small(None, "FAIL"), 1),
    "one cannot be judged": (lambda: small(None, "INCONCLUSIVE"), 4),
    "the baseline has no time": (lambda: small(ratio=None), 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("row", LEAVES)
def test_the_exit_status_tells_the_verdicts(ended, row):
    record, status = LEAVES[row]
    outcome = ended(record())
    assert outcome.exit_code == status
    assert "sdpa" in outcome.stdout


@pytest.mark.slow
def test_ctrl_c_leaves_130_and_prints_what_was_measured(ended):
    outcome = ended(small(), interrupt=True)
    assert outcome.exit_code == 130
    assert "interrupted" in outcome.stderr
    assert "interrupted" in outcome.stdout
    assert "jax-attn" in outcome.stdout


@pytest.mark.slow
def test_an_error_keeps_and_prints_what_was_measured_and_is_raised_again(ended, tmp_path):
    kept = tmp_path / "kept.json"
    with pytest.raises(ZeroDivisionError, match="planted"):
        ended(small(), "--output", str(kept), interrupt=True, by=ZeroDivisionError("planted"))
    assert Record.read(kept).interrupted


@pytest.mark.slow
def test_rounds_under_way_are_closed_before_the_record_is_taken(monkeypatch):
    """Ctrl-C may come while the run waits between two of its steps."""
    closed = []

    def steps(self):
        try:
            yield "started"
            yield "not reached"
        finally:
            closed.append("steps")

    def counted(steps, total):
        yield next(steps)
        raise KeyboardInterrupt

    def record(self, interrupted):
        closed.append("record")
        return small()

    monkeypatch.setattr(Session, "run", steps)
    monkeypatch.setattr(Session, "record", record)
    monkeypatch.setattr("jax_attn.cli.common.progress.counted", counted)
    run("--implementation", "sdpa")
    assert closed == ["steps", "record"]


@pytest.mark.slow
def test_ctrl_c_while_the_tpu_compiler_works_keeps_the_record(ended, monkeypatch):
    def figures(workloads, modes):
        yield {"level": "compiled", "missing": "the first"}
        raise KeyboardInterrupt

    monkeypatch.setattr("jax_attn.bench.engine.tpu_compiler.compiled_for_tpu", figures)
    outcome = ended(replace(small(), compiled=()), "--tpu", "--json")
    assert outcome.exit_code == 130
    record = Record.from_json(outcome.stdout)
    assert (record.rows, len(record.compiled)) == (small().rows, 1)


@pytest.mark.slow
def test_the_tpu_compiler_is_asked_only_where_that_is_wanted(ended, monkeypatch):
    def figures(workloads, modes):
        return ({"level": "compiled", "missing": f"{workloads[0].name}, {', '.join(modes)}"},)

    monkeypatch.setattr("jax_attn.bench.engine.tpu_compiler.compiled_for_tpu", figures)
    bare, all_modes = replace(small(), compiled=()), "bert/128, forward, forward+backward"
    assert all_modes in ended(bare, "--tpu").stdout
    assert "bert/128, forward\n" in ended(bare, "--tpu", "--mode", "forward").stdout
    assert all_modes not in ended(bare).stdout
    assert all_modes not in ended(bare, "--tpu", interrupt=True).stdout


@pytest.mark.slow
def test_a_second_ctrl_c_loses_nothing(ended, monkeypatch):
    def show(*_):
        os.kill(os.getpid(), signal.SIGINT)
        print("shown")

    monkeypatch.setattr("jax_attn.cli.bench_job.show", show)
    before = signal.getsignal(signal.SIGINT)
    assert "shown" in ended(small(), interrupt=True).stdout
    assert signal.getsignal(signal.SIGINT) is before


def test_the_progress_bar_is_drawn_after_each_step_and_by_no_thread_of_its_own(monkeypatch):
    drawn, before = [], threading.active_count()
    monkeypatch.setattr(Progress, "refresh", lambda self: drawn.append(self.tasks[0].completed))
    for _ in counted(["one", "two"], 3):
        assert threading.active_count() == before
    assert drawn[:3] == [0, 1, 2]


@pytest.mark.slow
def test_a_busy_machine_is_told(ended, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (999.0, 0.0, 0.0))
    assert "Warning: the machine is busy: load 999.0" in ended(small()).stderr
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert "busy" not in ended(small()).stderr
