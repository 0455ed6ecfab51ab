"""`jax-attn verify --power`: the kill matrix, its exit status and its report."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from jax_attn.cli import main
from jax_attn.parity.mutants import MUTANTS
from jax_attn.parity.power import Kill, summary
from jax_attn.parity.training_mutants import BESIDE

ONE = ("verify", "--power", "--design", "plain_mha", "--dtype", "float32", "-k", "none-square")


def run(*args: str):
    return CliRunner().invoke(main, args)


def test_the_matrix_names_each_bug_its_own_row_and_by_how_much_it_is_over(tmp_path):
    outcome = run(*ONE, "--report", str(tmp_path))
    assert outcome.exit_code == 0, outcome.output
    (line,) = [x for x in outcome.stdout.splitlines() if x.startswith(" scale twice ")]
    assert "plain_mha-float32-none-square" in line
    assert "planted bugs killed by every row that claims them" in outcome.stdout
    assert "not tried, as no row here claims them: " in outcome.stdout
    found = json.loads((tmp_path / "power.json").read_text())
    assert found["summary"]["survived"] == 0
    assert found["summary"]["mutants"] == len(MUTANTS) + len(BESIDE)
    (kill,) = [kill for kill in found["kills"] if kill["mutant"] == "scale twice" and kill["meant"]]
    assert kill["killed"]
    assert kill["times"] > 1


def test_a_bug_that_survives_leaves_1_and_is_named(monkeypatch):
    monkeypatch.setitem(MUTANTS, "scale twice", replace(MUTANTS["scale twice"], plants={}))
    outcome = run(*ONE)
    assert outcome.exit_code == 1
    assert "SURVIVED: 'scale twice' in plain_mha-float32-none-square" in outcome.stdout


def test_what_is_infinitely_wrong_is_null_in_the_report(monkeypatch):
    """Of another shape, or nowhere finite."""
    kill = Kill("a", "case", "gqa", True, True, "output", float("inf"))
    assert summary([kill], ["a"])["weakest"]["times"] is None


def test_bugs_beside_the_matrix_are_tried_by_the_names_of_their_cases():
    outcome = run("verify", "--power", "-k", "training/SGD, maximize", "--json")
    assert outcome.exit_code == 0, outcome.output
    (kill,) = json.loads(outcome.stdout)["kills"]
    assert (kill["mutant"], kill["column"]) == ("SGD: maximize ignored", "training")
    assert kill["killed"]


USAGE = {
    "a checkpoint": (("x.safetensors",), "--power plants its bugs in the oracle"),
    "a kernel": (("--implementation", "blocked"), "--power plants its bugs in the oracle"),
    "a backend": (("--backend", "cpu"), "--power plants its bugs in the oracle"),
    "unknown design": (("--design", "flash"), "--design: expected one of weights_mha"),
    "nothing left": (("-k", "no such case"), "no case is left by"),
}


@pytest.mark.parametrize("row", USAGE)
def test_wrong_usage_leaves_2_and_says_why(row):
    args, message = USAGE[row]
    outcome = run("verify", "--power", *args)
    assert outcome.exit_code == 2
    assert message in outcome.stderr
    assert outcome.stdout == ""
