"""`.ci/run`, with stand-ins for all that it runs: what it runs, and that it tells every failure."""

import os
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from jax_attn.selfcheck.matrix import rows

ROOT = Path(__file__).parents[1]
GATE = ROOT / ".ci" / "run"
pytestmark = pytest.mark.skipif(not GATE.exists(), reason="the gate is not part of what is packed")
# Notes what it is called with, and fails if $FAILING has its name and first words; of Python, only
# `-m venv` does something: it makes an environment that has these stand-ins.
STAND_IN = """#!/bin/sh
name=$(basename "$0")
case "$name $*" in
python*"-m venv"*) mkdir -p "$3/bin"; echo "deactivate() { :; }" >"$3/bin/activate"; exit 0 ;;
"python3"*"-c "*) exit 0 ;;
esac
echo "$name $*" >>"$CALLS"
echo "output of $name"
case ",$FAILING," in *",$name $1,"*) exit 7 ;; esac
"""
NAMES = ("python", "python3.11", "python3.13", "pip", "pytest", "ruff", "mypy", "lint-imports")
NAMES += ("sphinx-build", "jax-attn")


@pytest.fixture
def gate(tmp_path):
    """Runs the gate; the lines of its output, its status, and what it called."""
    (tmp_path / "stand_ins").mkdir()
    for name in NAMES:
        path = tmp_path / "stand_ins" / name
        path.write_text(STAND_IN)
        path.chmod(0o755)
    repository = tmp_path / "repository"
    (repository / ".ci").mkdir(parents=True)
    shutil.copy(GATE, repository / ".ci")
    shutil.copy(ROOT / "README.md", repository)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "a"]):
        subprocess.run([*git, *words], cwd=repository, check=True)

    def run(*arguments, failing=""):
        calls = tmp_path / "calls"
        path = f"{tmp_path / 'stand_ins'}{os.pathsep}{os.environ['PATH']}"
        environment = os.environ | {"PATH": path, "CALLS": str(calls), "FAILING": failing}
        done = subprocess.run(
            ["bash", repository / ".ci" / "run", *arguments],
            capture_output=True,
            text=True,
            env=environment,
        )
        assert not (repository / ".venv-ci").exists()
        called = calls.read_text().splitlines() if calls.exists() else []
        return done.stdout.splitlines(), done.returncode, called

    return run


def test_every_stage_is_run_and_timed(gate):
    said, status, called = gate()
    assert status == 0
    assert said[-1].startswith("== all: ")
    readme = [call for call in called if call.startswith(("pip install .[", "jax-attn", "pytest"))]
    assert readme == [
        "pip install .[torch]",
        "jax-attn verify",
        "pip install .[dev]",
        "pytest -n auto -m ",
        "jax-attn power --dtype float32",
        "jax-attn calibrate --configurations 200",
        "pytest -n auto",
    ]
    others = ("ruff check .", "ruff format --check .", "mypy ", "lint-imports ")
    others += ("python .ci/rest_of_matrix.py 1",)
    assert all(called.count(call) == 1 for call in others)
    assert [call for call in called if call.startswith("sphinx-build -W ")]
    assert {"output of mypy", "output of sphinx-build", "output of pytest"} <= set(said)
    begun = {line for line in said if line.startswith("== ") and ": " not in line}
    timed = {line.rpartition(": ")[0] for line in said if re.match("== .*: [0-9]+ s", line)}
    assert begun <= timed
    assert len(timed) == 16


def test_the_rows_that_the_main_command_left_out_are_all_others():
    script = runpy.run_path(str(ROOT / ".ci" / "rest_of_matrix.py"))
    measured, emulated = script["left_out"]()
    assert not {*measured, *emulated} & {*rows.default(), *rows.emulated_by_default()}
    assert {*measured, *rows.default()} == {*rows.matrix()}
    assert {*emulated, *rows.emulated_by_default()} == {*rows.emulated()}


def test_three_commits_in_a_row_have_every_row_once():
    script = runpy.run_path(str(ROOT / ".ci" / "rest_of_matrix.py"))
    parts = [script["left_out"](number) for number in (1257, 1258, 1259)]
    for every, *found in zip(script["left_out"](), *parts, strict=True):
        assert sorted(case.name for part in found for case in part) == sorted(
            case.name for case in every
        )
        assert max(map(len, found)) - min(map(len, found)) <= 9
        of = [{case.preparation for case in part} for part in found]
        assert len(set().union(*of)) == sum(map(len, of))


def test_all_failures_are_told_at_once_and_nothing_is_left_out(gate):
    _, _, every = gate()
    failing = ("pytest -n", "ruff format", "sphinx-build -W", "jax-attn power")
    said, status, called = gate(failing=",".join(failing))
    assert status == 1
    assert len(called) == 2 * len(every)
    told = [line.removeprefix("FAILED: ") for line in said if line.startswith("FAILED: ")]
    assert [name.partition(",")[0] for name in told] == [
        "tests",
        "format",
        "power",
        "docs",
        "what needs no torch",
    ]


@pytest.mark.parametrize("name", ["ruff check", "mypy ", "lint-imports ", "jax-attn verify"])
def test_each_failure_counts(gate, name):
    said, status, _ = gate(failing=name)
    assert status == 1
    assert sum(line.startswith("FAILED: ") for line in said) == 1


def test_with_a_revision_the_slow_tests_are_those_of_changed_rooms(gate):
    _, status, called = gate("HEAD")
    assert status == 0
    assert "pytest -n auto --slow-since=HEAD" in called
    said, status, called = gate("HEAD~7")
    assert (said, status) == (["no git revision: HEAD~7"], 2)
