"""The pytest plugin: fixture and marker `parity`, `--parity-report` and `--parity-explain`.

pytest loads the plugin wherever this package is installed, even for suites that never use it, so
nothing heavy is imported before a test asks for it.
"""

import difflib
import inspect
import os
import unittest
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from jax_attn import environment, pytest_report
from jax_attn.dtypes import DTYPES
from jax_attn.parity.run import TRANSFORMS

if TYPE_CHECKING:
    from jax_attn.parity import Result

MARKER = (
    'parity(dtype="float32", gradients=True, transforms=("eager", "jit"), seed=0, strict=False, '
    "parameters=None): default arguments of the fixture `parity`; a list of dtypes runs the test "
    "once in each."
)
NEVER_CALLED = "the fixture `parity` was never called, so nothing was compared"
_PROBLEMS = pytest.StashKey[list[str]]()
_PARITY = pytest.StashKey["Parity"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("parity").addoption(
        "--parity-report",
        metavar="DIR",
        help="write result.json, summary.md and index.html with every parity check into DIR",
    )
    parser.getgroup("parity").addoption(
        "--all-tensors",
        action="store_true",
        help="list every tensor of a parity check that does not pass, not only the worst ten",
    )
    parser.getgroup("parity").addoption(
        "--parity-explain",
        action="store_true",
        help="explain each parity check that fails: its first wrong tensor, and the cause",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)
    config.stash[_PROBLEMS] = []
    if not hasattr(config, "workerinput"):  # an xdist worker sends its results to the controller
        config.pluginmanager.register(pytest_report.SessionRun(config), "jax_attn_report")


# --- the marker -------------------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    test = metafunc.definition
    problems = list(_mark_problems(test, metafunc.fixturenames))
    dtype = _marked_words(test).get("dtype")
    if problems:
        metafunc.config.stash[_PROBLEMS] += [f"{test.nodeid}: {p}" for p in problems]
    elif dtype is not None and "parity" in metafunc.fixturenames:
        metafunc.parametrize("parity", _listed(dtype), indirect=True)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Report all wrong marks of a file as one error of its collection."""
    report = yield
    problems = collector.config.stash[_PROBLEMS]
    for test in report.result or ():
        # pytest_generate_tests is not called for the methods of a unittest.TestCase.
        if isinstance(test, pytest.Function) and issubclass(test.cls or object, unittest.TestCase):
            problems += [f"{test.nodeid}: {p}" for p in _unittest_problems(test)]
    if problems:
        report.outcome, report.result = "failed", []
        report.longrepr = "\n".join(["@pytest.mark.parity is used wrongly:", *problems])
        problems.clear()
    return report


def _unittest_problems(test: pytest.Function) -> Iterator[str]:
    """Yield everything that is wrong with the marks on a method of a unittest.TestCase."""
    yield from _mark_problems(test, test.fixturenames)
    dtype = _marked_words(test).get("dtype")
    if "parity" in test.fixturenames and isinstance(dtype, list | tuple):
        yield f"dtype: expected one, because a unittest.TestCase cannot be repeated, got {dtype!r}"


def _marked_words(test: pytest.Item) -> dict[str, Any]:
    """Return the keywords of all `parity` marks on a test; the closest mark wins."""
    words: dict[str, Any] = {}
    for mark in reversed(list(test.iter_markers("parity"))):
        words |= mark.kwargs
    return words


def _mark_problems(test: pytest.Item, fixtures: Collection[str]) -> Iterator[str]:
    """Yield everything that is wrong with the marks on a test."""
    if "parity" not in fixtures and any(mark.name == "parity" for mark in test.own_markers):
        yield "expected a test that takes the fixture `parity`, but this one does not"
    for mark in test.iter_markers("parity"):
        if mark.args:
            yield f"expected keywords only, got {', '.join(map(repr, mark.args))}"
    for word, value in _marked_words(test).items():
        if word not in _WORDS:
            nearest = difflib.get_close_matches(word, _WORDS, 1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            yield f"unknown keyword {word!r}: expected some of {', '.join(_WORDS)}{hint}"
            continue
        fits, expected = _WORDS[word]
        if not fits(value):
            yield f"{word}: expected {expected}, got {value!r}"


def _listed(dtype: Any) -> Any:
    return [dtype] if isinstance(dtype, str) else dtype


def _are_names(value: Any) -> bool:
    names = _listed(value)
    return isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)


def _are_some_of(known: tuple[str, ...], values: Any) -> bool:
    if not isinstance(values, list | tuple) or not values:
        return False
    return all(value in known for value in values) and len(set(values)) == len(values)


_WORDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "dtype": (
        lambda value: _are_some_of(DTYPES, _listed(value)),
        f"one of {', '.join(DTYPES)}, or a list of some, each once",
    ),
    "gradients": (lambda value: isinstance(value, bool), "True or False"),
    "transforms": (
        lambda value: _are_some_of(TRANSFORMS, value),
        f"a list of some of {', '.join(TRANSFORMS)}, each once",
    ),
    "seed": (lambda value: type(value) is int and value >= 0, "an integer, 0 or more"),
    "strict": (lambda value: isinstance(value, bool), "True or False"),
    "parameters": (
        lambda value: value is None or _are_names(value),
        "a pattern of parameters' names, or a list of patterns",
    ),
}
"""Keyword of the marker → (whether a value is valid, a description of valid values)."""


# --- the fixture ------------------------------------------------------------------------------


class Parity:
    """`jax_attn.parity.check` that fails the test, with the whole report, unless it passes.

    dtype: the dtype in which to build both modules: the marker's for this test, or float32.
    """

    def __init__(self, item: pytest.Item, words: dict[str, Any]):
        self.dtype: str = words.get("dtype", "float32")
        self.checks = 0
        self.test_passed = False
        self._item, self._words = item, words
        self._unsent: list[Result] = []
        self.last: Result | None = None

    def __call__(
        self,
        reference: Any,
        port: Any,
        inputs: Any = None,
        *,
        expect_digest: str | None = None,
        **arguments: Any,
    ) -> "Result":
        """Run `check` with the marker's keywords, which the call may override; return the `Result`.

        Without inputs, `reference` is a `Golden`, or the folder of one, relative to the test's
        file. It has a dtype of its own, so the marker need not name it. expect_digest: of a folder,
        as for `load_golden`.

        Raises ParityError if the verdict is FAIL or INCONCLUSIVE, ValueError if the dtype is not
        the marker's, and whatever `check` raises for arguments that cannot be checked.
        """
        __tracebackhide__ = True
        from jax_attn.parity import check

        arguments = self._words | arguments
        if inputs is None and isinstance(reference, str | os.PathLike):
            golden = partial(self._check_folder, expect_digest)
            return self._checked(golden, reference, port, None, **arguments)
        if expect_digest is not None:
            raise TypeError(f"expect_digest: expected None without a folder, got {expect_digest!r}")
        if inputs is not None:
            self._expect_torch()
            arguments = {"dtype": self.dtype, **arguments}
        return self._checked(check, reference, port, inputs, **arguments)

    def _check_folder(
        self, expect_digest: str | None, folder: Any, port: Any, inputs: None, **arguments: Any
    ) -> "Result":
        from jax_attn.parity import check, load_golden

        golden = load_golden(self._item.path.parent / folder, expect_digest=expect_digest)
        return check(golden, port, inputs, **arguments)

    def training(self, reference: Any, port: Any, batches: Any, **arguments: Any) -> "Result":
        """Run `check_training` in the same way; it takes only the dtype from the marker."""
        __tracebackhide__ = True
        from jax_attn.parity import check_training

        self._expect_torch()
        arguments = {"dtype": self.dtype, **arguments}
        return self._checked(check_training, reference, port, batches, **arguments)

    def _expect_torch(self) -> None:
        """Fail the test if torch, which runs the reference, is not installed."""
        __tracebackhide__ = True
        if not environment.present("torch"):
            install = environment.install_line("torch")
            absent = f"torch is not installed, but is needed as the reference: {install}"
            self.record_not_run(self.dtype, absent)
            pytest.fail(absent, pytrace=False)

    def _checked(
        self, check: Callable[..., "Result"], reference: Any, port: Any, data: Any, **arguments: Any
    ) -> "Result":
        __tracebackhide__ = True
        from jax_attn.parity import ParityError

        dtype = arguments.get("dtype", self.dtype)
        try:
            if dtype != self._words.get("dtype", dtype):
                raise ValueError(f"dtype: expected the marker's, {self.dtype}, got {dtype!r}")
            result = check(reference, port, data, **arguments)
        except Exception as error:
            why = f"the check did not run: {type(error).__name__}: {error}"
            self.record_not_run(dtype, why)
            raise
        if self._item.config.getoption("--parity-explain"):
            result = result.explained()
        try:
            all_tensors = self._item.config.getoption("--all-tensors")
            return self._record(result).raise_for_status(all_tensors=all_tensors)
        except ParityError as error:
            if result.verdict == "INCONCLUSIVE":
                error.add_note("INCONCLUSIVE is not a pass: neither agreement nor error was shown")
            raise error.with_traceback(None) from None

    def record_not_run(self, dtype: str, why: str) -> None:
        self._record(pytest_report.not_run(dtype, why))

    def _record(self, result: "Result") -> "Result":
        """Name the result after the test, and keep it for the run's report and for JUnit."""
        self.checks += 1
        nodeid = self._item.nodeid
        result = replace(result, name=nodeid if self.checks == 1 else f"{nodeid} ({self.checks})")
        self._unsent.append(result)
        self.last = result
        self._item.user_properties += pytest_report.junit_properties(result, self.checks)
        return result

    def send(self, report: pytest.TestReport) -> None:
        """Attach the results since the last report to this one."""
        pytest_report.send(report, self._unsent)
        self._unsent = []


@pytest.fixture
def parity(request: pytest.FixtureRequest) -> Parity:
    """Provide `jax_attn.parity.check` that fails the test, with the whole report, unless it passes.

        @pytest.mark.parity(dtype=["float32", "bfloat16"])
        def test_port(parity):
            reference, port = build(parity.dtype)
            parity(reference, port, (x,), layout=LAYOUT)

    A call returns the `Result`. `parity("folder", port, …)` judges by a golden reference, which
    needs no torch. `parity.training(reference, port, batches, …)` is `check_training`
    in the marker's dtype. A test that takes the fixture and never calls it fails. If another
    fixture also takes it, and may check during its teardown, pytest has already reported the test
    as passed by then, and adds an error of its teardown.
    """
    item = request.node
    dtype_of_test = {"dtype": request.param} if hasattr(request, "param") else {}
    checker = item.stash[_PARITY] = Parity(item, _marked_words(item) | dtype_of_test)
    return checker


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach a test's results to its own report, which also carries them out of xdist workers."""
    checker = item.stash.get(_PARITY, None)
    if checker is None:
        return (yield)
    report = yield
    if report.when == "call":
        checker.test_passed = report.passed
    # A fixture that takes this one may check during its teardown: only then is it known.
    last = "teardown" if _may_check_late(item) else "call"
    if report.when == last and report.passed and checker.test_passed and not checker.checks:
        checker.record_not_run(checker.dtype, NEVER_CALLED)
        report.outcome, report.longrepr = "failed", f"INCONCLUSIVE: {NEVER_CALLED}"
        report.user_properties = list(item.user_properties)
    elif report.when == "call":
        _name_worst_tensor(report, checker.last)
    checker.send(report)
    return report


def _may_check_late(item: pytest.Item) -> bool:
    """Return whether another fixture takes `parity` and may check during its teardown."""
    definitions = getattr(item, "_fixtureinfo").name2fixturedefs.values()  # noqa: B009
    return any(
        "parity" in fixture.argnames
        and ("request" in fixture.argnames or inspect.isgeneratorfunction(fixture.func))
        for fixtures in definitions
        for fixture in fixtures
    )


def _name_worst_tensor(report: pytest.TestReport, result: "Result | None") -> None:
    """Make a failed test's line in pytest's summary name the deciding tensor, or the reason."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if result is None or crash is None or "ParityError" not in crash.message:
        return
    crash.message = f"{result.verdict}: {result.gist}"
