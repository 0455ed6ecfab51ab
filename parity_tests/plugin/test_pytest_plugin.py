"""The pytest plugin: fixture and report, each in a run of pytest of its own.

`check` is mostly a stand-in that says what it is told, `parity("FAIL", …)`, and keeps what it was
called with: what the fixture makes of a result is tested here, `check` itself in test_check.py.
"""

import json
import xml.etree.ElementTree as ElementTree

import pytest

from helpers.pytest_runs import NAMES, THREE, verdicts

pytest_plugins = ["pytester"]


# --- the fixture ------------------------------------------------------------------------------

ONE = """
def test_port(parity):
    {}
"""
# what the test does -> whether it passes, and what is printed.
CALLS = {
    "pass": (
        'assert parity("PASS", None, ()).verdict == "PASS"',
        True,
        ["parity: 1 pass, 0 fail*"],
    ),
    "fail": (
        'parity("FAIL", None, ())',
        False,
        [
            "E*FAIL  test_it.py::test_port  float32*",
            "E*- jit y: planted*",
            "*jit*y*FAIL*0.25*",
            "FAILED test_it.py::test_port - FAIL: jit y, 0.25 of its budget",
        ],
    ),
    "inconclusive": (
        'parity("INCONCLUSIVE", None, ())',
        False,
        [
            "E*INCONCLUSIVE  test_it.py::test_port*",
            "E*INCONCLUSIVE is not a pass*",
            "FAILED test_it.py::test_port - INCONCLUSIVE: jit y, 0.25 of its budget",
        ],
    ),
    "cannot be checked": ('parity("TypeError", None, ())', False, ["E*TypeError: port: expected*"]),
    "training": (
        'parity("PASS", None, ()); parity.training("FAIL", None, [], steps=3)',
        False,
        ["called with float32 {'steps': 3}", "parity: 1 pass, 1 fail, 0 inconclusive"],
    ),
    "the second fails": (
        'parity("PASS", None, ()); parity("FAIL", None, ())',
        False,
        ["E*FAIL  test_it.py::test_port (2)  float32*", "parity: 1 pass, 1 fail, 0 inc*"],
    ),
}


@pytest.mark.parametrize("row", CALLS)
def test_a_test_passes_only_where_everything_passes(run, row):
    body, passes, printed = CALLS[row]
    result = run(ONE.format(body))
    result.assert_outcomes(passed=int(passes), failed=int(not passes))
    result.stdout.fnmatch_lines(printed)


def test_the_trace_of_a_failure_ends_at_the_users_line(run):
    assert "pytest_plugin.py" not in run(ONE.format('parity("FAIL", None, ())')).stdout.str()


# the body of a fixture between the test and `parity` -> outcomes, and what is printed.
FIXTURES = {
    'return parity("PASS", None, ())': ({"passed": 1}, "parity: 1 pass, 0 fail, 0 inconclusive"),
    'yield; parity("PASS", None, ())': ({"passed": 1}, "parity: 1 pass, 0 fail, 0 inconclusive"),
    # It might check when it is torn down, and does not.
    "yield": ({"passed": 1, "errors": 1}, "*INCONCLUSIVE: the fixture `parity` was never called*"),
    # It only hands it on: no reason to wait.
    "return parity": ({"failed": 1}, "*INCONCLUSIVE: the fixture `parity` was never called*"),
}


@pytest.mark.parametrize("body", FIXTURES)
def test_a_check_in_another_fixture_counts_once(run, body):
    outcomes, printed = FIXTURES[body]
    result = run(f"""
@pytest.fixture
def another(parity):
    {body}

def test_port(another):
    pass
""")
    result.assert_outcomes(**outcomes)
    result.stdout.fnmatch_lines([printed])


def test_a_test_that_never_calls_it_fails(run, pytester):
    result = run(ONE.format("pass"), "--parity-report", "report", "--junitxml=junit.xml")
    result.assert_outcomes(failed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*INCONCLUSIVE: the fixture `parity` was never called*"])
    assert verdicts(pytester.path / "report") == {"test_it.py::test_port": "INCONCLUSIVE"}
    properties = junit_properties(pytester.path / "junit.xml")["test_port"]
    assert ("parity_verdict", "INCONCLUSIVE") in properties


@pytest.mark.parametrize("option", [(), ("--all-tensors",)])
def test_the_worst_tensors_are_listed_or_all(run, option):
    result = run(ONE.format('parity("FAIL", None, (), tensors=12)'), *option)
    rows = [line for line in result.outlines if line.startswith("E ") and " 0.25 " in line]
    assert len(rows) == (12 if option else 10)
    assert ("… and 2 more: fail; --all-tensors, or " in result.stdout.str()) != bool(option)


def test_a_check_that_fails_is_explained_where_that_is_asked_for(run):
    explanation = '__import__("jax_attn").parity.Explanation'
    given = f'parity("FAIL", None, (), explainer=lambda result: {explanation}(result, ()))'
    said = "no tensor inside the port could be told"
    assert said not in run(ONE.format(given)).stdout.str()
    lines = ["*explained:", f"*{said}*"]
    run(ONE.format(given), "--parity-explain").stdout.fnmatch_lines(lines)


@pytest.mark.parametrize("body", ["raise KeyError('x')", "pytest.skip('x')", "pytest.xfail('x')"])
def test_one_that_did_not_pass_is_told_nothing_more(run, body):
    result = run(ONE.format(body))
    assert result.parseoutcomes().keys().isdisjoint({"error", "errors", "passed"})
    result.stdout.no_fnmatch_line("*never called*")


def test_training_is_checked_in_the_markers_dtype(run):
    result = run(
        """
@pytest.mark.parity(dtype=["bfloat16"], seed=2)
def test_port(parity):
    assert parity.training("PASS", None, [], steps=3).dtype == "bfloat16"
    with pytest.raises(ValueError, match="dtype: expected the marker's, bfloat16"):
        parity.training("PASS", None, [], dtype="float32")
""",
        "-s",
    )
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*called with bfloat16 {'steps': 3}"])


def test_without_torch_a_test_fails_with_the_line_that_installs_it(run, monkeypatch):
    monkeypatch.setenv("ABSENT", "torch")
    result = run(ONE.format('parity("PASS", None, ())'))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["torch is not installed*pip install*", "parity: 0 pass, 0 fail, 1 inconclusive"]
    )


BY_GOLDEN = """
import jax_attn.parity

{mark}
def test_port(parity, monkeypatch):
    def load_golden(folder, *, expect_digest):
        assert folder.is_absolute()
        print("read", folder.name, expect_digest)
        return folder.name

    monkeypatch.setitem(vars(jax_attn.parity), "load_golden", load_golden)
    parity("PASS", None, expect_digest="abc", strict=True)
"""


@pytest.mark.parametrize(
    ("mark", "called"),
    [
        ("", "float32 {'strict': True}"),  # the stand-in's own: no dtype is passed
        ("@pytest.mark.parity(dtype='bfloat16', seed=1)", "bfloat16 {'seed': 1, 'strict': True}"),
    ],
)
def test_a_golden_reference_needs_no_torch_and_no_dtype(mark, called, run, monkeypatch):
    monkeypatch.setenv("ABSENT", "torch")
    result = run(BY_GOLDEN.format(mark=mark), "-s")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*read PASS abc", f"called with {called}"])


def test_xdist_may_be_absent(run):
    run(ONE.format('parity("PASS", None, ())'), "-p", "no:xdist").assert_outcomes(passed=1)


def test_a_suite_without_checks_is_told_nothing(run):
    assert "parity:" not in run("def test_it(): pass").stdout.str()


# --- what is written --------------------------------------------------------------------------


def test_the_report_has_every_check_in_the_schema_of_verify(run, pytester):
    result = run(THREE, "--parity-report", "a/report")
    result.stdout.fnmatch_lines(["parity: 3 pass, 1 fail, 1 inconclusive; report in a/report"])
    report = pytester.path / "a" / "report"
    assert sorted(p.name for p in report.iterdir()) == ["index.html", "result.json", "summary.md"]
    document = json.loads((report / "result.json").read_text())
    keys = ["schema", "environment", "complete", "summary", "cases", "compiled"]
    assert list(document) == keys
    assert document["environment"] == {"python": "3"}
    assert document["summary"]["inconclusive"] == 1
    assert verdicts(report) == NAMES
    levels = ["measured", "not run", *3 * ["measured"]]
    assert [c["level"] for c in document["cases"]] == levels
    summary = (report / "summary.md").read_text()
    assert r"| test_it.py::test_other[a\|b] | cpu measured | FAIL | y | 0.25 |" in summary
    assert "port: expected a Module, got str; inputs: expected a tuple\n" in summary


@pytest.mark.slow
def test_a_run_that_is_stopped_writes_what_it_has(run, pytester):
    stopped = "def test_stopped(parity): pytest.exit('enough')"
    run(THREE + stopped, "--parity-report", "report")
    assert verdicts(pytester.path / "report") == {
        **NAMES,
        "test_it.py::test_stopped": "INCONCLUSIVE",
    }
    assert "did not end" in (pytester.path / "report" / "summary.md").read_text()


def test_no_check_is_a_report_of_none(run, pytester):
    result = run("def test_it(): pass", "--parity-report", "report")
    result.stdout.fnmatch_lines(["parity: 0 pass, 0 fail, 0 inconclusive; report in report"])
    assert verdicts(pytester.path / "report") == {}


@pytest.mark.parametrize(
    ("path", "got"),
    [("test_it.py", "test_it.py: File exists"), ("a", "a: summary.md: a directory")],
)
def test_a_report_that_cannot_be_written_is_told_first(run, pytester, path, got):
    (pytester.path / "a" / "summary.md").mkdir(parents=True)
    result = run(THREE, "--parity-report", path)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    expected = "ERROR: --parity-report: expected a directory to write to, got"
    result.stderr.fnmatch_lines([f"{expected} {got}"])


@pytest.mark.slow
def test_collecting_alone_leaves_a_report_as_it_is(run, pytester):
    run(THREE, "--parity-report", "report")
    result = run(THREE, "--parity-report", "report", "--collect-only")
    result.stdout.no_fnmatch_line("parity: *")
    assert verdicts(pytester.path / "report") == NAMES


def junit_properties(path) -> dict[str, list[tuple[str, str]]]:
    """Each test's properties, in order."""
    cases = ElementTree.parse(path).getroot().iter("testcase")
    return {
        case.get("name"): [(p.get("name"), p.get("value")) for p in case.iter("property")]
        for case in cases
    }


def test_junit_has_the_verdict_of_every_check(run, pytester):
    run(THREE, "--junitxml=junit.xml")
    properties = junit_properties(pytester.path / "junit.xml")
    assert properties["test_port[bfloat16]"] == [
        ("parity_verdict", "PASS"),
        ("parity_worst_tensor", "jit y"),
        ("parity_error_over_budget", "0.25"),
        ("parity_backend", "cpu"),
        ("parity_dtype", "bfloat16"),
        ("parity_level", "measured"),
    ]
    twice = dict(properties["test_doubtful"][6:])
    assert len(properties["test_doubtful"]) == 12
    assert (twice["parity_verdict_2"], twice["parity_level_2"]) == ("INCONCLUSIVE", "not run")
