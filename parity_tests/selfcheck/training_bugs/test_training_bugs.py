"""Planted bugs of training: each fails in the case that is meant for it, which passes right."""

import pytest

from jax_attn.parity.judge.compare import Verdict
from jax_attn.selfcheck.power.catalogue import BUGS
from jax_attn.selfcheck.training_bugs import optimizer_bugs
from jax_attn.selfcheck.training_bugs.cases import TRAINING_CASES
from jax_attn.selfcheck.training_bugs.encoder import ENCODER_BUGS, ENCODER_CASES, judge_encoder
from jax_attn.selfcheck.training_bugs.optimizer_bugs import OPTIMIZER_BUGS
from jax_attn.selfcheck.training_bugs.trials import CASES_OF_BUGS, kills


def first_of_each(names: dict, kind) -> list[str]:
    return list({kind(name): name for name in reversed(names)}.values())


def pytest_generate_tests(metafunc):
    """A bug of every other kind of case; --long and `jax-attn power` try all."""
    if "name" in metafunc.fixturenames:
        cases = first_of_each(OPTIMIZER_BUGS, lambda name: OPTIMIZER_BUGS[name].case.split(",")[0])
        few = [*cases, *ENCODER_BUGS][::2]
        names = CASES_OF_BUGS if metafunc.config.getoption("--long") else few
        metafunc.parametrize("name", names)


@pytest.mark.slow
def test_a_planted_bug_fails_in_its_case(name):
    (kill,) = kills([name])
    assert kill.killed, kill
    assert kill.case == CASES_OF_BUGS[name]
    assert kill.tensor
    assert kill.times > 1


def test_no_name_stands_twice():
    assert not CASES_OF_BUGS.keys() & BUGS.keys()
    assert len(CASES_OF_BUGS) == len(OPTIMIZER_BUGS) + len(ENCODER_BUGS)


@pytest.mark.parametrize(
    ("planted", "field"),
    [("clip by value: left out", "clip_value"), ("accumulated: mean for sum", "accumulated")],
)
def test_a_bug_is_the_same_each_time_it_is_planted(planted, field, monkeypatch):
    monkeypatch.setattr(optimizer_bugs, "_like", lambda case, recipe: recipe)
    bug = OPTIMIZER_BUGS[planted]
    first, second = getattr(bug.make(), field), getattr(bug.make(), field)
    assert first == second != getattr(TRAINING_CASES[bug.case].recipe, field)


def test_every_case_has_a_wrong_optimizer_and_passes_right():
    """The latter in test_training, one by one."""
    assert {bug.case for bug in OPTIMIZER_BUGS.values()} == TRAINING_CASES.keys()


@pytest.mark.slow
@pytest.mark.parametrize("case", ENCODER_CASES)
def test_the_right_encoder_passes(case):
    result = judge_encoder(case)
    assert result.verdict is Verdict.PASS, str(result)
