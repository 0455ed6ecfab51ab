"""Planted bugs: each is killed by the row made to catch it, and attention without one is right."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from helpers.parity.oracle_problem import cotangents, problem, with_extra_keys
from jax_attn.parity.judge.compare import Verdict
from jax_attn.selfcheck import process_pool
from jax_attn.selfcheck.matrix.cases import Case
from jax_attn.selfcheck.matrix.designs import PORTED_DESIGNS
from jax_attn.selfcheck.matrix.preparation import Preparation
from jax_attn.selfcheck.matrix.rows import matrix
from jax_attn.selfcheck.oracle import Solution, solve
from jax_attn.selfcheck.power import mutable_attention
from jax_attn.selfcheck.power.catalogue import BUGS, WEAK
from jax_attn.selfcheck.power.kill_report import (
    Kill,
    passes,
    summary_lines,
    survivors,
    without_their_row,
)
from jax_attn.selfcheck.power.mutable_attention import STEPS
from jax_attn.selfcheck.power.trials import claimed, doubts, is_seen, run_with, try_bug


def own_row(name: str) -> Case:
    """The smallest of the rows that the bug names as made to catch it."""
    meant = (*BUGS[name].meant, "float32")
    rows = [c for c in matrix() if (c.design, c.mask, c.dtype) == meant]
    rows = [c for c in rows if name in claimed(row(c))]
    return min(rows, key=lambda c: (c.size.work, c.name))


def row(case: Case) -> Preparation:
    return prepared(replace(case, transform="jit"))


@cache
def prepared(case: Case) -> Preparation:
    return Preparation(PORTED_DESIGNS[case.design], case)


def test_there_are_at_least_40_and_each_plants_in_steps_that_there_are():
    assert len(BUGS) >= 40
    for bug in BUGS.values():
        assert bug.plants
        assert bug.plants.keys() <= STEPS.keys()


def pytest_generate_tests(metafunc):
    """Those of two designs' rows; --long and `jax-attn power` try all."""
    if "name" in metafunc.fixturenames:
        few = [name for name, bug in BUGS.items() if bug.meant[0] in ("plain_mha", "gqa")]
        metafunc.parametrize("name", BUGS if metafunc.config.getoption("--long") else few)


@pytest.mark.parametrize("bug", BUGS)
def test_each_has_a_row_made_to_catch_it(bug):
    assert bug in claimed(row(own_row(bug)))


@pytest.mark.slow
def test_a_planted_bug_is_killed_by_its_own_row(name):
    assert try_bug(row(own_row(name)), name).verdict is Verdict.FAIL


def arrays(found: Solution) -> dict[str, np.ndarray]:
    named = {"output": found.output, "weights": found.weights, "bias": found.bias_grad}
    return named | found.input_grads | found.weight_grads


def kept() -> np.ndarray:
    return (np.random.default_rng(5).random((2, 4, 3, 5)) < 0.75) / 0.75


@pytest.mark.parametrize(
    "changes", [{}, {"kept": kept()}, {"after": ()}, {"softcap": None}, {"add_zero_attn": True}]
)
def test_with_nothing_planted_it_gives_what_the_oracle_gives(changes):
    posed = problem(**changes)
    if posed.add_zero_attn:
        posed = with_extra_keys(posed)
    if "after" in changes:
        weights = {k: w for k, w in posed.weights.items() if "norm" not in k}
        posed = replace(posed, weights=weights)
    ends = cotangents(extra_columns=posed.extra_columns)
    want = arrays(solve(posed, *ends))
    got = arrays(mutable_attention.solve(posed, *ends, plants={}))
    assert got.keys() == want.keys()
    for name, a in want.items():
        # Two float64 programs of some dozens of roundings each, on sums of up to 100 terms.
        assert np.abs(got[name] - a).max() <= 2.0**-52 * 100 * 24 * max(np.abs(a).max(), 1), name


@pytest.mark.slow
def test_a_row_where_nothing_is_planted_kills_nothing(monkeypatch):
    """The kill matrix can fail."""
    name = "biases dropped"
    monkeypatch.setitem(BUGS, name, replace(BUGS[name], plants={}))
    (found,) = [kill for kill in process_pool.kill_block([own_row(name)]) if kill.bug == name]
    assert survivors([found]) == [found]
    assert "SURVIVED: 'biases dropped' in torch_mha-" in "\n".join(
        summary_lines([found], [name], WEAK, whole=False)
    )


def test_a_bug_that_verify_does_not_try_may_not_come_near_a_budget():
    kill = Kill("biases dropped", "case", "gqa", meant=False, killed=True, tensor="", times=9.0)
    assert not passes([kill], [kill.bug], WEAK, whole=False)
    assert "NEAR: 'biases dropped' in case" in "\n".join(summary_lines([kill], [], WEAK, False))
    assert passes([replace(kill, times=11.0)], [kill.bug], WEAK, whole=False)
    assert passes([replace(kill, bug="no scale")], ["no scale"], WEAK, whole=False)
    assert BUGS.keys() >= WEAK


@pytest.mark.parametrize(
    ("planted", "tried"), [("no scale", True), ("query and key swapped", False)]
)
def test_a_row_tries_the_bugs_that_are_hard_to_see(monkeypatch, planted, tried):
    """One that plants nothing is seen by no row: its doubt tells that it was tried."""
    case = own_row("no scale")
    assert doubts(row(case)) == ()
    monkeypatch.setitem(BUGS, planted, replace(BUGS[planted], plants={}))
    assert planted in claimed(row(case))
    assert any(repr(planted) in doubt for doubt in doubts(row(case))) == tried


@pytest.mark.parametrize(
    ("planted", "in_outputs"), [("no scale", True), ("gradient stopped at the keys", False)]
)
def test_a_bug_is_seen_in_the_outputs_or_else_in_the_gradients(planted, in_outputs):
    made_for_it = row(own_row(planted))
    outputs = run_with(made_for_it, planted, gradients=False)
    assert outputs.kinds["output"]
    assert not any(outputs.kinds[kind] for kind in outputs.kinds if kind != "output")
    assert made_for_it.prepared.would_fail(outputs) == in_outputs
    assert is_seen(made_for_it, planted)


def test_a_bug_that_was_not_tried_on_its_own_row_is_told():
    case = next(c for c in matrix() if c.name.startswith("gqa/no_bias-bfloat16-none"))
    found = try_bug(row(case), "no scale")
    kill = Kill.of("no scale", BUGS["no scale"].meant, case, found)
    assert kill.killed
    assert without_their_row([kill], ["no scale"]) == ["no scale"]
    assert passes([kill], ["no scale"], WEAK, whole=False)
    assert not passes([kill], ["no scale"], WEAK, whole=True)
