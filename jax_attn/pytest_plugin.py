"""The pytest plugin: fixture and marker `parity`, option `--parity-report`.

pytest loads it wherever this package is installed, for suites too that never use it: nothing
heavy is imported before a test asks for it.
"""

import difflib
import functools
import unittest
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from jax_attn import pytest_report

MARKER = (
    'parity(dtype="float32", gradients=True, transforms=("eager", "jit"), seed=0): what the '
    "fixture `parity` checks in; several dtypes, in a list, make as many tests."
)
NEVER_CALLED = "the fixture `parity` was never called, so nothing was compared"
_PROBLEMS = pytest.StashKey[list[str]]()
_PARITY = pytest.StashKey["Parity"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("parity").addoption(
        "--parity-report",
        metavar="DIR",
        help="write result.json and summary.md of every parity check of the run into DIR",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)
    config.stash[_PROBLEMS] = []
    if not hasattr(config, "workerinput"):  # a worker of xdist sends its part to the controller
        config.pluginmanager.register(pytest_report.Run.of(config), "jax_attn_report")


# --- the marker -------------------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    test = metafunc.definition
    words = _marked(test)
    problems = list(_problems(test, words, metafunc.fixturenames))
    if problems:
        metafunc.config.stash[_PROBLEMS] += [f"{test.nodeid}: {p}" for p in problems]
    elif "dtype" in words and "parity" in metafunc.fixturenames:
        metafunc.parametrize("parity", _listed(words["dtype"]), indirect=True)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    """A file's wrong marks are one error of its collection, all of them told."""
    report = yield
    problems = collector.config.stash[_PROBLEMS]
    problems += [f"{t.nodeid}: {p}" for t in _of_unittest(report.result) for p in _unfit(t)]
    if problems:
        report.outcome, report.result = "failed", []
        report.longrepr = "\n".join(["@pytest.mark.parity is used wrongly:", *problems])
        problems.clear()
    return report


def _of_unittest(collected: Sequence[pytest.Item | pytest.Collector]) -> list[pytest.Function]:
    """Those that pytest_generate_tests is not called for."""
    functions = [item for item in collected if isinstance(item, pytest.Function)]
    return [item for item in functions if issubclass(item.cls or object, unittest.TestCase)]


def _unfit(test: pytest.Function) -> Iterator[str]:
    """Everything that is wrong with the marks on a method of a unittest.TestCase."""
    words = _marked(test)
    yield from _problems(test, words, test.fixturenames)
    if "parity" in test.fixturenames and isinstance(words.get("dtype"), list | tuple):
        yield f"dtype: expected one, as a unittest.TestCase's test is one, got {words['dtype']!r}"


def _marked(node: pytest.Item) -> dict[str, Any]:
    """The words of every `parity` mark on a test; of two that are the same, the nearer's."""
    marks = reversed(list(node.iter_markers("parity")))
    return functools.reduce(lambda words, mark: words | mark.kwargs, marks, {})


def _problems(test: pytest.Item, words: dict[str, Any], fixtures) -> Iterator[str]:
    """Everything that is wrong with the marks on a test."""
    marks = list(test.iter_markers("parity"))
    if not marks:
        return
    if "parity" not in fixtures and any(mark.name == "parity" for mark in test.own_markers):
        yield "expected a test that takes the fixture `parity`, and this one does not"
    for mark in marks:
        if mark.args:
            yield f"expected keywords only, got {', '.join(map(repr, mark.args))}"
    known = _known_words()
    for word, value in words.items():
        if word not in known:
            near = difflib.get_close_matches(word, known, 1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            yield f"unknown word {word!r}: expected some of {', '.join(known)}{meant}"
        elif not known[word][0](value):
            yield f"{word}: expected {known[word][1]}, got {value!r}"


def _known_words() -> dict[str, tuple[Callable[[Any], bool], str]]:
    """Each word of the marker: whether a value will do, and what would."""
    from jax_attn.dtypes import DTYPES
    from jax_attn.parity.run import TRANSFORMS

    def some_of(known: tuple[str, ...], value: Any) -> bool:
        if not isinstance(value, list | tuple) or not value:
            return False
        return all(x in known for x in value) and len(set(value)) == len(value)

    dtypes = f"one of {', '.join(DTYPES)}, or a list of some, each once"
    transforms = f"a list of some of {', '.join(TRANSFORMS)}, each once"
    return {
        "dtype": (lambda value: some_of(DTYPES, _listed(value)), dtypes),
        "gradients": (lambda value: isinstance(value, bool), "True or False"),
        "transforms": (functools.partial(some_of, TRANSFORMS), transforms),
        "seed": (lambda value: type(value) is int and value >= 0, "an integer, 0 or more"),
    }


def _listed(dtype: Any) -> Any:
    return [dtype] if isinstance(dtype, str) else dtype


# --- the fixture ------------------------------------------------------------------------------


class Parity:
    """`jax_attn.parity.check` that fails the test, with the whole report, unless it passes.

    dtype: the one to build both modules in: the marker's for this test, float32 without one.
    """

    def __init__(self, item: pytest.Item, words: dict[str, Any]):
        self.dtype = words.get("dtype", "float32")
        self.unsent: list = []
        self.made = 0
        self.passed = False
        self._item, self._words = item, words

    def __call__(self, reference, port, inputs, **arguments):
        """`check` with the marker's words, unless the call has its own; returns the `Result`.

        Raises ParityError where the verdict is FAIL or INCONCLUSIVE; what `check` raises for
        arguments that cannot be checked; ValueError for a dtype that is not the marker's.
        """
        __tracebackhide__ = True
        from jax_attn.parity import check

        return self._checked(check, reference, port, inputs, **self._words | arguments)

    def training(self, reference, port, batches, **arguments):
        """Likewise of `check_training`; of the marker's words it takes the dtype alone."""
        __tracebackhide__ = True
        from jax_attn.parity import check_training

        return self._checked(check_training, reference, port, batches, **arguments)

    def _checked(self, checking, reference, port, data, **arguments):
        __tracebackhide__ = True
        from jax_attn.parity import ParityError

        arguments = {"dtype": self.dtype, **arguments}
        try:
            if arguments["dtype"] != self._words.get("dtype", arguments["dtype"]):
                raise ValueError(
                    f"dtype: expected the marker's, {self.dtype}, got {arguments['dtype']!r}"
                )
            result = checking(reference, port, data, **arguments)
        except Exception as error:
            said = f"the check was not made: {type(error).__name__}: {error}"
            self.record(pytest_report.not_run(arguments["dtype"], said))
            raise
        try:
            return self.record(result).raise_for_status()
        except ParityError as error:
            if result.verdict == "INCONCLUSIVE":
                error.add_note("INCONCLUSIVE is no pass: nothing was shown either way")
            raise error.with_traceback(None) from None

    def record(self, result):
        """The result under the test's name; for the run's report and for JUnit."""
        self.made += 1
        name = self._item.nodeid if self.made == 1 else f"{self._item.nodeid} ({self.made})"
        result = replace(result, name=name)
        self.unsent.append(result)
        self._item.user_properties += pytest_report.properties(result, self.made)
        return result


@pytest.fixture
def parity(request: pytest.FixtureRequest) -> Parity:
    """`jax_attn.parity.check` that fails the test, with the whole report, unless it passes.

        @pytest.mark.parity(dtype=["float32", "bfloat16"])
        def test_port(parity):
            reference, port = build(parity.dtype)
            parity(reference, port, (x,), layout=LAYOUT)

    Returns the `Result`. `parity.training(reference, port, batches, …)` is `check_training`, in
    the marker's dtype. A test that takes the fixture and never calls it ends in an error.
    """
    from jax_attn.environment import install_line, present

    item = request.node
    of_this_test = {"dtype": request.param} if hasattr(request, "param") else {}
    made = item.stash[_PARITY] = Parity(item, _marked(item) | of_this_test)
    if not present("torch"):
        absent = f"torch is not installed, and is the reference: {install_line('torch')}"
        made.record(pytest_report.not_run(made.dtype, absent))
        pytest.fail(absent, pytrace=False)
    return made


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    """What a test has checked travels with its own report, out of a worker of xdist too."""
    made = item.stash.get(_PARITY, None)
    # Known at the end of the teardown only: a fixture may check there.
    idle = call.when == "teardown" and made is not None and made.passed and not made.made
    if idle:
        made.record(pytest_report.not_run(made.dtype, NEVER_CALLED))
    report = yield
    if made is None:
        return report
    if report.when == "call":
        made.passed = report.passed
    if idle and report.passed:
        report.outcome, report.longrepr = "failed", f"INCONCLUSIVE: {NEVER_CALLED}"
    pytest_report.send(report, made.unsent)
    made.unsent = []
    return report
