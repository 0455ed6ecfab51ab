"""`jax-attn power`: the kill matrix, its exit status and its report."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from jax_attn.cli import main
from jax_attn.selfcheck import process_pool
from jax_attn.selfcheck.matrix.rows import default, matrix
from jax_attn.selfcheck.power.catalogue import BUGS
from jax_attn.selfcheck.power.kill_report import Kill, summary
from jax_attn.selfcheck.training_bugs.trials import CASES_OF_BUGS, selected

# Of several keys, where a scale shows.
ROW, *_ = [
    "-".join(c.preparation)
    for c in matrix()
    if (c.design, c.dtype) == ("plain_mha", "float32") and c.size.S > 1
]
ONE = ("power", "--design", "plain_mha", "--dtype", "float32", "-k", ROW)


def run(*args: str):
    return CliRunner().invoke(main, args)


@pytest.mark.slow
def test_the_matrix_names_each_bug_its_own_row_and_by_how_much_it_is_over(tmp_path):
    outcome = run(*ONE, "--report", str(tmp_path))
    assert outcome.exit_code == 0, outcome.output
    (line,) = [x for x in outcome.stdout.splitlines() if x.startswith(" scale twice ")]
    assert ROW in line
    assert "planted bugs killed by every case that claims them" in outcome.stdout
    found = json.loads((tmp_path / "power.json").read_text())
    tried = {kill["bug"] for kill in found["kills"]}
    others = len(BUGS) + len(CASES_OF_BUGS) - len(tried)
    assert f"{others} more bugs: no case here" in outcome.stdout
    assert found["summary"]["survived"] == 0
    assert found["summary"]["bugs"] == len(BUGS) + len(CASES_OF_BUGS)
    (kill,) = [kill for kill in found["kills"] if kill["bug"] == "scale twice" and kill["meant"]]
    assert kill["killed"]
    assert kill["times"] > 1


def test_a_bug_that_survives_leaves_1_and_is_named(monkeypatch):
    monkeypatch.setitem(BUGS, "scale twice", replace(BUGS["scale twice"], plants={}))
    outcome = run(*ONE)
    assert outcome.exit_code == 1
    assert f"SURVIVED: 'scale twice' in {ROW}" in outcome.stdout


LEFT_OUT = {"not tried": {}, "tried on another row": {"meant": False}}


@pytest.mark.parametrize("how", LEFT_OUT)
def test_a_bug_that_no_row_is_made_for_leaves_1_of_the_whole_matrix_and_is_named(monkeypatch, how):
    case = "-".join(default()[0].preparation)
    kill = Kill("", case, "gqa", meant=True, killed=True, tensor="output", times=20.0)
    kills = [replace(kill, bug=name) for name in [*BUGS, *CASES_OF_BUGS]]
    monkeypatch.setattr(process_pool, "run", lambda work, processes: [(work[0], kills)])
    assert run("power").exit_code == 0
    kills[3:4] = [replace(kills[3], **LEFT_OUT[how])] if LEFT_OUT[how] else []
    outcome = run("power")
    assert outcome.exit_code == 1
    assert f"NOT TRIED on a case designed for it: {[*BUGS][3]!r}" in outcome.stdout
    assert run("power", "--dtype", "float32").exit_code == 0


def test_a_bug_that_no_default_row_claims_leaves_1_of_the_whole_matrix_and_is_named(monkeypatch):
    kill = Kill("", "of --all", "gqa", meant=True, killed=True, tensor="output", times=20.0)
    kills = [replace(kill, bug=name) for name in [*BUGS, *CASES_OF_BUGS]]
    monkeypatch.setattr(process_pool, "run", lambda work, processes: [(work[0], kills)])
    outcome = run("power")
    assert outcome.exit_code == 1
    assert f"NOT TRIED on a default case: {[*BUGS][3]!r}; only `verify --all`" in outcome.stdout


def test_what_is_infinitely_wrong_is_null_in_the_report(monkeypatch):
    """Of another shape, or nowhere finite."""
    kill = Kill("a", "case", "gqa", True, True, "output", float("inf"))
    assert summary([kill], ["a"])["weakest"]["times"] is None


@pytest.mark.slow
def test_bugs_beside_the_matrix_are_tried_by_the_names_of_their_cases():
    outcome = run("power", "-k", "training/SGD, maximize", "--json")
    assert outcome.exit_code == 0, outcome.output
    (kill,) = json.loads(outcome.stdout)["kills"]
    assert (kill["bug"], kill["column"]) == ("SGD: maximize ignored", "training")
    assert kill["killed"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bugs_beside_the_matrix_are_of_the_dtype_that_is_asked_for(dtype):
    low = {name for name, case in CASES_OF_BUGS.items() if case.endswith("in bfloat16")}
    found = set(selected([dtype], ""))
    assert low
    assert found == (low if dtype == "bfloat16" else CASES_OF_BUGS.keys() - low)
    assert set(selected([], "")) == CASES_OF_BUGS.keys()


@pytest.mark.slow
def test_verify_power_is_another_spelling_of_it():
    outcome = run("verify", "--power", *ONE[1:])
    assert (outcome.exit_code, outcome.stdout) == (0, run(*ONE).stdout)


USAGE = {
    "unknown design": (("--design", "flash"), "--design: expected one of weights_mha"),
    "nothing left": (("-k", "no such case"), "no case matches"),
    "a backend": (("--backend", "cpu"), "No such option"),
}
USAGE_OF_VERIFY = {
    "a checkpoint": (("x.safetensors",), "expected one of CHECKPOINT, --power, got all of them"),
    "a kernel": (("--implementation", "blocked"), "--implementation: goes with the built-in cases"),
    "a backend": (("--backend", "cpu"), "--backend: goes with the built-in cases, not with --pow"),
    "what is drawn": (
        ("--configurations", "5", "--seed", "9"),
        "--configurations: goes with --calibrate, not with --power\n"
        "--seed: goes with --calibrate, not with --power",
    ),
}


@pytest.mark.parametrize("row", USAGE)
def test_wrong_usage_leaves_2_and_says_why(row):
    args, message = USAGE[row]
    refuses(("power", *args), message)


@pytest.mark.parametrize("row", USAGE_OF_VERIFY)
def test_wrong_usage_beside_verify_power_leaves_2_and_says_why(row):
    args, message = USAGE_OF_VERIFY[row]
    refuses(("verify", "--power", *args), message)


def refuses(args: tuple[str, ...], message: str) -> None:
    outcome = run(*args)
    assert outcome.exit_code == 2
    assert message in outcome.stderr
    assert outcome.stdout == ""
