"""The checks of a pytest run: sent with the tests' reports, gathered, and written once.

This is a part of the plugin, so nothing heavy is imported before there is a result.
"""

import functools
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jax_attn import environment
from jax_attn.report import files

if TYPE_CHECKING:
    from jax_attn.parity import Result

_ATTRIBUTE = "jax_attn_parity"
UNFINISHED = "the test did not end: its process crashed or was stopped, and its checks are lost"


# --- in the process that runs a test ----------------------------------------------------------


def not_run(dtype: str, why: str) -> "Result":
    """Return an INCONCLUSIVE result for a check that was not made."""
    from jax_attn.parity import Result
    from jax_attn.parity.judge.finding import findings

    one_line = "; ".join(why.splitlines())
    return Result(str(dtype), "none", (), doubts=findings("not-run", [one_line]), level="not run")


def junit_properties(result: "Result", count: int) -> list[tuple[str, str]]:
    """Return a check as JUnit properties; from the test's second check on, names end in `count`."""
    from jax_attn.parity.judge.text import number

    worst = result.worst
    values = {
        "verdict": str(result.verdict),
        "worst_tensor": "–" if worst is None else f"{worst.transform} {worst.label}",
        "error_over_budget": number(None if worst is None else worst.fraction),
        "backend": result.backend,
        "dtype": result.dtype,
        "level": result.level,
    }
    which = "" if count == 1 else f"_{count}"
    return [(f"parity_{name}{which}", value) for name, value in values.items()]


def send(report: pytest.TestReport, results: Sequence["Result"]) -> None:
    """Attach results to a phase's report; an empty list shows that the test takes the fixture."""
    # xdist carries only plain types, in a report that arrives even if its worker crashes later.
    setattr(report, _ATTRIBUTE, pickle.dumps((_environment() if results else None, results)))


@functools.cache
def _environment() -> dict[str, Any]:
    return environment.describe()


# --- in the process that started the run ------------------------------------------------------


class SessionRun:
    """A plugin that gathers every check of a run, and writes and counts them at its end.

    Raises UsageError if the report cannot be written into the given directory.
    """

    def __init__(self, config: pytest.Config):
        self.results: dict[str, list[Result]] = {}
        self.environments: list[dict[str, Any]] = []
        self.begun: set[str] = set()
        self.option = config.getoption("--parity-report")
        self.directory: Path | None = None
        if self.option is None or config.option.collectonly:
            return
        self.directory = config.invocation_params.dir / self.option
        if why := files.why_not_writable(self.directory, files.RESULT_FILES):
            raise pytest.UsageError(
                f"--parity-report: expected a directory to write to, got {self.option}: {why}"
            )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        sent = getattr(report, _ATTRIBUTE, None)
        if sent is None:
            return
        if report.when == "teardown":
            self.begun.discard(report.nodeid)
        else:
            self.begun.add(report.nodeid)
        environment, results = pickle.loads(sent)
        self.results.setdefault(report.nodeid, []).extend(results)
        if environment is not None and environment not in self.environments:
            self.environments.append(environment)

    def pytest_sessionfinish(self) -> None:
        for test in self.begun:
            lost = not_run("none", UNFINISHED)
            self.results[test].append(replace(lost, name=test))
        if self.directory is None:
            return
        from jax_attn.report.result_files import result_files

        texts = result_files(self.in_order(), merged(self.environments))
        files.write(self.directory, texts)

    def in_order(self) -> "list[Result]":
        """Return the results sorted by test, whatever the worker, and in order within a test."""
        return [result for test in sorted(self.results) for result in self.results[test]]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        count = [str(result.verdict) for result in self.in_order()].count
        if not self.results and self.directory is None:
            return
        counts = ", ".join(f"{count(v)} {v.lower()}" for v in ("PASS", "FAIL", "INCONCLUSIVE"))
        where = f"; report in {self.option}" if self.directory is not None else ""
        terminalreporter.write_line(f"parity: {counts}{where}")


def merged(environments: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the environments of a run's processes; a key with different values keeps them all."""
    values: dict[str, list[Any]] = {}
    for key, value in (pair for one in environments for pair in one.items()):
        if value not in values.setdefault(key, []):
            values[key].append(value)
    return {key: v[0] if len(v) == 1 else {"several": v} for key, v in values.items()}
