"""`jax-attn bench`: what it prints, keeps, refuses, and with which status it leaves."""

import json
import os
import signal
import threading
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from rich.progress import Progress

from helpers.bench.bench_record import record as made_record
from jax_attn.bench.engine import rounds
from jax_attn.bench.engine.session import Session
from jax_attn.bench.implementations import OF_PRESETS
from jax_attn.bench.presets import PRESETS
from jax_attn.bench.record import Record, Status
from jax_attn.bench.workload import DECODE, MODES, Workload
from jax_attn.cli import main
from jax_attn.cli.bench_job import show
from jax_attn.cli.common.progress import counted

assert torch  # what is measured here is measured against it

TINY = Workload("tiny", False, 2, 13, 13, 4, 2, 8, is_causal=True)
STEP = Workload("step", False, 2, 1, 13, 4, 2, 8, is_causal=True, room=17)


def run(*args: str):
    return CliRunner().invoke(main, ["bench", *args], catch_exceptions=False)


@pytest.mark.slow
def test_a_real_run_judges_and_times_in_processes_of_their_own(monkeypatch, tmp_path):
    monkeypatch.setitem(PRESETS, "quick", (TINY, STEP))
    monkeypatch.setattr(rounds, "SIZE", 61)
    kept = tmp_path / "new" / "kept.json"
    only = ("--implementation", "jax-attn", "--threads", "1", "--rounds", "5")
    outcome = run(*only, "--json", "--output", str(kept))
    assert outcome.exit_code == 0, outcome.stderr
    record = Record.from_json(outcome.stdout)
    assert Record.read(kept) == record
    assert [p.name for p in kept.parent.iterdir()] == ["kept.json"]
    assert [(r.mode, r.implementation) for r in record.rows] == [
        (mode, name) for mode in (*MODES, DECODE) for name in ("sdpa", "jax-attn")
    ]
    for row in record.rows:
        assert (row.status, row.verdict, len(row.seconds)) == (Status.MEASURED, "PASS", 5)
        assert all(s > 0 for s in row.seconds)
        assert row.ratio.low <= row.ratio.median <= row.ratio.high
        assert row.peak_bytes is not None
    assert record.rows[1].kernel == "dense"
    assert record.rows[1].compile_s > 0
    step = record.rows[-1]
    assert (step.workload, step.kernel, step.cache_bytes) == (
        STEP,
        "attend",
        2 * 4 * 2 * 17 * 2 * 8,
    )
    assert json.loads(outcome.stdout)["rows"][-1]["tokens_per_s"] == 2 / step.median_s
    assert record.settings["threads"] == 1
    assert set(record.settings["matrix_product_flops_per_s"]) == {"torch", "jax"}
    assert record.environment["packages"]["torch"]


USAGE = {
    "unknown preset": (("--preset", "huge"), "--preset: expected one of quick"),
    "unknown names together": (
        ("--preset", "longest/32768", "--preset", "x/1", "--preset", "y/2"),
        "or a workload that --list names, got x/1, y/2",
    ),
    "unknown implementation": (("--implementation", "x"), "--implementation: expected one of sdpa"),
    "unknown baseline": (("--baseline", "x"), "--baseline: expected one of sdpa"),
    "unknown mode": (("--mode", "backward"), "'backward' is not one of"),
    "a mode that nothing chosen has": (
        ("--preset", "long", "--mode", "decode", "--mode", "forward"),
        "--mode: expected forward or forward+backward, which long has, got decode",
    ),
    "one that only a cache has not": (
        ("--preset", "decode", "--mode", "forward"),
        "--mode: expected decode, which decode has, got forward",
    ),
    "no rounds": (("--rounds", "0"), "x>=1"),
    "more threads than cores": (("--threads", "99999"), "--threads: expected at most"),
    "two forms of output": (("--json", "--markdown"), "expected one of them"),
    "a preset and a pair": (
        ("--pair", "mine.py:make", "--preset", "long"),
        "--preset: cannot be combined with --pair or a checkpoint",
    ),
    "an implementation that is no way": (
        ("--pair", "mine.py:make", "--implementation", "sdpa"),
        "--implementation: expected one of torch eager, torch.compile",
    ),
    "a baseline that is no way": (
        ("--pair", "mine.py:make", "--baseline", "sdpa"),
        "--baseline: expected one of torch eager, torch.compile",
    ),
    "a checkpoint that is not there": (
        ("nowhere/gpt2",),
        "CHECKPOINT: expected a folder or a file, got nowhere/gpt2; `hf download",
    ),
    "a checkpoint and a pair": (
        (".", "--pair", "mine.py:make"),
        "--pair: expected without a checkpoint, got .",
    ),
    "a length twice": (
        (".", "--lengths", "5,5"),
        "expected different whole numbers with commas between them",
    ),
    "no length": ((".", "--lengths", "5,0"), "expected lengths of at least 1, got '5,0'"),
    "lengths of presets": (("--lengths", "5"), "--lengths: needs --pair or a checkpoint"),
}


CHOSEN = {
    # options: the workloads' names, and their modes
    (): ({"bert/128", "long/1024"}, set(MODES)),
    ("--mode", "decode"): ({w.name for w in PRESETS["decode"]}, {"decode"}),
    ("--mode", "decode", "--mode", "forward"): (
        {w.name for name in ("decode", "quick") for w in PRESETS[name]},
        {"decode", "forward"},
    ),
    ("--preset", "long/2048", "--preset", "prefill/2048", "--mode", "prefill"): (
        {"prefill/2048"},
        {"prefill"},
    ),
}


@pytest.fixture
def planned(monkeypatch):
    """A function: options → the plan of the run, which does not run."""

    def plan(*args):
        plans = []

        def steps(self):
            plans.append(self.plan)
            yield "not run"

        monkeypatch.setattr(Session, "run", steps)
        monkeypatch.setattr(Session, "record", lambda self, interrupted: small())
        monkeypatch.setattr("jax_attn.cli.bench.expect_gpu", lambda: None)
        run(*args)
        return plans[0]

    return plan


@pytest.mark.slow
@pytest.mark.parametrize("options", CHOSEN)
def test_modes_choose_among_what_workloads_have(planned, options):
    names, modes = CHOSEN[options]
    plan = planned(*options)
    assert {w.name for w in plan.workloads} == names
    assert {mode for w in plan.workloads for mode in plan.modes_of(w)} == modes


def test_what_is_of_interest_on_a_gpu_alone_is_measured_there_or_by_name(planned):
    gpu = {"sdpa flash", "sdpa cudnn", "sdpa efficient", "flash-attn"}
    assert set(planned().implementations) == set(OF_PRESETS) - gpu
    assert set(planned("--device", "gpu").implementations) == set(OF_PRESETS)
    assert planned("--implementation", "sdpa flash").implementations == ("sdpa flash",)


def test_where_nothing_can_be_written_is_told_before_the_run_all_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(Session, "run", lambda self: pytest.fail("it ran"))
    monkeypatch.setattr("jax_attn.cli.status.present", lambda name: True)
    file, taken = tmp_path / "file", tmp_path / "taken"
    file.touch()
    (taken / "index.html").mkdir(parents=True)
    into = file / "a"
    outcome = run("--output", f"{into}/b.json", "--plot", str(into), "--report", str(taken))
    assert outcome.exit_code == 2
    expected = "expected a directory to write to, got"
    for option in ("--output", "--plot"):
        assert f"{option}: {expected} {into}: Not a directory" in outcome.stderr
    assert f"--report: {expected} {taken}: index.html: a directory" in outcome.stderr
    assert [*taken.iterdir()] == [taken / "index.html"]


@pytest.mark.parametrize(("drawn", "line"), [([], "drawn: nothing"), (["a.svg"], "drawn: a.svg")])
def test_each_plot_is_named_and_so_is_that_there_is_none(
    drawn, line, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr("jax_attn.bench.results.plot.draw", lambda record, folder: drawn)
    show(small(), "--json", tmp_path, None, None)
    assert capsys.readouterr().err.startswith(line)


@pytest.mark.parametrize("row", USAGE)
def test_wrong_usage_leaves_2_and_names_the_option(row):
    args, message = USAGE[row]
    outcome = run(*args)
    assert outcome.exit_code == 2
    assert message in outcome.stderr
    assert outcome.stdout == ""


def test_the_list_names_presets_implementations_and_what_installs_the_absent(monkeypatch):
    monkeypatch.setattr("jax_attn.bench.implementations.present", lambda name: name != "torchax")
    outcome = run("--list")
    assert outcome.exit_code == 0
    assert all(name in outcome.stdout for name in (*PRESETS, "jax-attn blocked"))
    assert "torchax not installed: pip install torchax" in outcome.stdout


@pytest.mark.parametrize(("module", "args"), [("torch", ()), ("matplotlib", ("--plot", "x"))])
def test_what_is_missing_leaves_3_with_the_line_that_installs_it(monkeypatch, module, args):
    monkeypatch.setattr("jax_attn.cli.status.present", lambda name: name != module)
    outcome = run(*args)
    assert outcome.exit_code == 3
    assert f"{module} is not installed" in outcome.stderr
    assert "pip install" in outcome.stderr


def test_a_gpu_that_is_not_here_leaves_3(monkeypatch):
    monkeypatch.setattr("jax_attn.cli.common.devices.available", lambda: {"cpu"})
    outcome = run("--device", "gpu")
    assert outcome.exit_code == 3
    assert "pip install 'jax[cuda12]" in outcome.stderr


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


def small(status=None, verdict=None, **more):
    """A record of one workload; with `status`, `verdict` and more in its last row."""
    whole = made_record()
    rows = [r for r in whole.rows if r.workload == whole.rows[0].workload and r.seconds]
    changes = {k: v for k, v in (("status", status), ("verdict", verdict)) if v}
    return replace(whole, rows=(*rows[:-1], replace(rows[-1], **changes, **more)))


LEAVES = {
    "all agree": (small, 0),
    "one is excluded": (lambda: small(Status.EXCLUDED, "FAIL"), 1),
    "one fails": (lambda: small(Status.FAILED), 1),
    "one disagrees and is timed": (lambda: small(None, "FAIL"), 1),
    "one cannot be judged": (lambda: small(None, "INCONCLUSIVE"), 4),
    "the baseline has no time": (lambda: small(ratio=None), 4),
}


@pytest.mark.parametrize("row", LEAVES)
def test_the_exit_status_tells_the_verdicts(ended, row):
    record, status = LEAVES[row]
    outcome = ended(record())
    assert outcome.exit_code == status
    assert "sdpa" in outcome.stdout


def test_ctrl_c_leaves_130_and_prints_what_was_measured(ended):
    outcome = ended(small(), interrupt=True)
    assert outcome.exit_code == 130
    assert "interrupted" in outcome.stderr
    assert "interrupted" in outcome.stdout
    assert "jax-attn" in outcome.stdout


def test_an_error_keeps_and_prints_what_was_measured_and_is_raised_again(ended, tmp_path):
    kept = tmp_path / "kept.json"
    with pytest.raises(ZeroDivisionError, match="planted"):
        ended(small(), "--output", str(kept), interrupt=True, by=ZeroDivisionError("planted"))
    assert Record.read(kept).interrupted


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


def test_ctrl_c_while_the_tpu_compiler_works_keeps_the_record(ended, monkeypatch):
    def figures(workloads, modes):
        yield {"level": "compiled", "missing": "the first"}
        raise KeyboardInterrupt

    monkeypatch.setattr("jax_attn.bench.engine.tpu_compiler.compiled_for_tpu", figures)
    outcome = ended(replace(small(), compiled=()), "--tpu", "--json")
    assert outcome.exit_code == 130
    record = Record.from_json(outcome.stdout)
    assert (record.rows, len(record.compiled)) == (small().rows, 1)


def test_the_tpu_compiler_is_asked_only_where_that_is_wanted(ended, monkeypatch):
    def figures(workloads, modes):
        return ({"level": "compiled", "missing": f"{workloads[0].name}, {', '.join(modes)}"},)

    monkeypatch.setattr("jax_attn.bench.engine.tpu_compiler.compiled_for_tpu", figures)
    bare, all_modes = replace(small(), compiled=()), "bert/128, forward, forward+backward"
    assert all_modes in ended(bare, "--tpu").stdout
    assert "bert/128, forward\n" in ended(bare, "--tpu", "--mode", "forward").stdout
    assert all_modes not in ended(bare).stdout
    assert all_modes not in ended(bare, "--tpu", interrupt=True).stdout


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


def test_a_busy_machine_is_told(ended, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (999.0, 0.0, 0.0))
    assert "Warning: the machine is busy: load 999.0" in ended(small()).stderr
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert "busy" not in ended(small()).stderr
