"""`jax-attn bench`: what it measures, lists and refuses."""

import json

import pytest
import torch
from click.testing import CliRunner

from helpers.bench.bench_record import small
from jax_attn.bench.engine import rounds
from jax_attn.bench.engine.session import Session
from jax_attn.bench.implementations import OF_PRESETS
from jax_attn.bench.presets import PRESETS
from jax_attn.bench.record import Record, Status
from jax_attn.bench.workload import DECODE, MODES, Workload
from jax_attn.cli import main

assert torch  # what is measured here is measured against it

TINY = Workload("tiny", False, 2, 13, 13, 4, 2, 8, is_causal=True)
STEP = Workload("step", False, 2, 1, 13, 4, 2, 8, is_causal=True, room=17)


def run(*args: str):
    return CliRunner().invoke(main, ["bench", *args], catch_exceptions=False)


@pytest.mark.slow
def test_a_real_run_judges_and_times_in_processes_of_their_own(monkeypatch, tmp_path):
    monkeypatch.setitem(PRESETS, "quick", (TINY, STEP))
    monkeypatch.setitem(rounds.SIZES, "cpu", 61)
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


@pytest.mark.slow
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
