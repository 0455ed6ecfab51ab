"""The pytest plugin in processes of its own: what it imports, and under xdist.

A real check of it is that of docs/guides/pytest.md.
"""

import importlib.metadata
import json
import subprocess
import sys

import pytest
import torch  # noqa: F401  the example's reference

from helpers.pytest_runs import NAMES, OPTIONS, STAND_IN, THREE, verdicts

pytest_plugins = ["pytester"]

HEAVY = {"jax", "flax", "torch", "numpy", "click", "rich"}


@pytest.fixture
def run(pytester, monkeypatch):
    """Runs the test files there in a process with this plugin, and xdist, and no other."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)

    def run(*options):
        plugins = "-p", "jax_attn", *(("-p", "xdist") if "-n" in options else ())
        return pytester.runpytest_subprocess(*OPTIONS, *plugins, *options)

    return run


# --- what it imports --------------------------------------------------------------------------


def test_the_entry_point_imports_nothing_heavy():
    (entry,) = importlib.metadata.entry_points(group="pytest11", name="jax_attn")
    code = f"import sys, {entry.module}; print(*({HEAVY} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


# a test -> which of the heavy ones are loaded when it has run; the second shows that some can be.
LOADS = {
    "def test_it(): pass": set(),
    "def test_it(parity): parity('PASS', None, ())": {"numpy", "rich"},
}


@pytest.mark.slow
@pytest.mark.parametrize("source", LOADS, ids=["no check", "a check by the stand-in"])
def test_a_run_imports_what_its_checks_need(pytester, run, source):
    told = f"""
import sys
def pytest_unconfigure():
    print("loaded", *({HEAVY} & set(sys.modules)))
"""
    pytester.makeconftest(told + (STAND_IN if "PASS" in source else ""))
    pytester.makepyfile(test_it="import pytest\n" + source)
    result = run()
    result.assert_outcomes(passed=1)
    (loaded,) = (line for line in result.outlines if line.startswith("loaded"))
    assert set(loaded.split()[1:]) == LOADS[source]


# --- under xdist ------------------------------------------------------------------------------


HOW = {
    "alone": (),
    "workers": ("-n", "2"),
    "a file to a worker": ("-n", "2", "--dist", "loadfile"),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
def test_the_report_is_the_same_however_the_tests_are_dealt(pytester, run, how):
    pytester.makeconftest(STAND_IN)
    other = """
def test_other(parity):
    parity("PASS", None, ())
"""
    pytester.makepyfile(test_it="import pytest\n" + THREE, test_other=other)
    report = pytester.path / "report"
    result = run(*HOW[how], "--parity-report", report)
    result.assert_outcomes(passed=3, failed=2)
    result.stdout.fnmatch_lines([f"parity: 4 pass, 1 fail, 1 inconclusive; report in {report}"])
    assert verdicts(report) == NAMES | {"test_other.py::test_other": "PASS"}
    environment = json.loads((report / "result.json").read_text())["environment"]
    workers = environment["worker"]["several"] if HOW[how] else [environment["worker"]]
    assert environment["python"] == "3"
    assert sorted(workers) == (["gw0", "gw1"] if HOW[how] else ["none"])


CRASH = """
import os

def test_before(parity):
    parity("PASS", None, ())

def test_crash(parity):
    parity("PASS", None, ())
    os._exit(1)

def test_after(parity):
    parity("PASS", None, ())
"""


@pytest.mark.slow
def test_a_worker_that_crashes_loses_one_tests_checks_and_the_report_says_so(pytester, run):
    pytester.makeconftest(STAND_IN)
    pytester.makepyfile(test_it="import pytest\n" + THREE, test_two=CRASH)
    result = run("-n", "2", "--parity-report", "report", "--junitxml=junit.xml")
    result.assert_outcomes(passed=4, failed=3)
    result.stdout.fnmatch_lines(["parity: 5 pass, 1 fail, 2 inconclusive; report in report"])
    report = pytester.path / "report"
    crashed = {
        "test_two.py::test_before": "PASS",
        "test_two.py::test_crash": "INCONCLUSIVE",
        "test_two.py::test_after": "PASS",
    }
    assert verdicts(report) == NAMES | crashed
    _, its_own = (
        (report / "summary.md").read_text().split("INCONCLUSIVE test_two.py::test_crash\n\n")
    )
    assert its_own.startswith("- the test did not end: its process crashed or was stopped")
    assert 'name="parity_verdict" value="FAIL"' in (pytester.path / "junit.xml").read_text()


@pytest.mark.slow
def test_wrong_marks_are_told_by_the_workers_too(pytester, run):
    pytester.makepyfile("""
        import pytest

        @pytest.mark.parity(atol=1)
        def test_it(parity):
            pass
    """)
    result = run("-n", "2")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["@pytest.mark.parity is used wrongly:", "*keyword 'atol'*"])
