"""evidence/scripts/gpu.py: steps that end in time, and what is kept of them."""

import itertools
import json
import signal
import subprocess
import sys
import time

import gpu
import pytest
from gpu import STEPS, Run, Step

from jax_attn.bench.presets import PRESETS
from jax_attn.cli import main

SLEEPS = "import time; print('begun', flush=True); time.sleep(60)"
# It writes what it has when it is interrupted.
KEEPS = f"try:\n {SLEEPS}\nexcept KeyboardInterrupt:\n open(r'{{into}}/kept', 'w').close()"
GIVEN = {
    "works": Step((sys.executable, "-c", "print('{on}')"), 50, on_cpu=()),
    "is long": Step((sys.executable, "-c", KEEPS), 3, on_cpu=()),
    "fails": Step((sys.executable, "-c", "raise SystemExit(4)"), 50, on_cpu=()),
    "needs a GPU": Step((sys.executable, "-c", ""), 50),
}


def kept(folder):
    return json.loads((folder / "steps.json").read_text())


@pytest.mark.slow
def test_each_step_ends_and_what_it_has_is_kept(tmp_path):
    Run("cpu", tmp_path, deadline=1e9, clock=lambda: 0.0).all(GIVEN, GIVEN)
    found = kept(tmp_path)
    assert {name: step["ended"] for name, step in found["steps"].items()} == {
        "works": "status 0",
        "is long": "interrupted, status 0",
        "fails": "status 4",
        "needs a GPU": "not run: it needs a GPU",
    }
    assert (tmp_path / "works" / "printed.txt").read_text() == "cpu\n"
    assert (tmp_path / "is-long" / "kept").exists()
    assert found["environment"]["packages"]["jax"]


def test_no_step_is_begun_when_the_time_is_up(tmp_path):
    Run("cpu", tmp_path, deadline=5.0, clock=lambda: 0.0).all(GIVEN, ["works"])
    assert kept(tmp_path)["steps"] == {"works": {"ended": "not run: the time was up"}}


@pytest.mark.slow
def test_a_step_heeds_where_the_script_itself_does_not(tmp_path):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        line = [sys.executable, "-c", KEEPS.format(into=tmp_path)]
        ended = gpu.ended_by(gpu.started(line, tmp_path / "printed"), 3)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == "interrupted, status 0"
    assert (tmp_path / "kept").exists()


@pytest.mark.slow
def test_a_step_that_does_not_heed_is_killed(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "TO_WRITE_SECONDS", 1)
    ignores = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); {SLEEPS}"
    process = gpu.started([sys.executable, "-c", ignores], tmp_path / "printed")
    assert gpu.ended_by(process, 3) == "killed"


def test_steps_that_judge_run_beside_one_another_on_a_gpu(tmp_path):
    # Each ends only when the other has begun.
    meets = "import pathlib, time\n(p := pathlib.Path(r'{{into}}')).joinpath('here').touch()\n"
    meets += "while not (p.parent / '{0}' / 'here').exists(): time.sleep(.01)"
    other = {"verify": "tests", "tests": "verify"}
    steps = {n: Step((sys.executable, "-c", meets.format(o)), 50) for n, o in other.items()}
    Run("gpu", tmp_path, deadline=time.monotonic() + 50).all(steps, steps)
    found = kept(tmp_path)["steps"]
    assert {n: (s["ended"], s["beside"]) for n, s in found.items()} == {
        "verify": ("status 0", ["tests"]),
        "tests": ("status 0", ["verify"]),
    }


@pytest.mark.parametrize("on", ["gpu", "cpu"])
@pytest.mark.parametrize("name", [n for n, s in STEPS.items() if s.command[1:3] == gpu.CLI[1:]])
def test_the_commands_are_ones_that_there_are(name, on, tmp_path):
    words = STEPS[name].line(on, tmp_path)[3:]
    group = main.get_command(None, words[0])
    context = group.make_context(words[0], words[1:], resilient_parsing=False)
    presets = [word for before, word in itertools.pairwise(words) if before == "--preset"]
    known = {w.name for preset in PRESETS.values() for w in preset} | {*PRESETS}
    assert context.params
    assert {*presets} <= known


def test_a_step_that_is_not_there_is_named():
    line = [sys.executable, gpu.__file__, "verify", "nothing"]
    found = subprocess.run(line, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert "got nothing" in found.stderr
