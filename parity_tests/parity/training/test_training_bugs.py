"""Planted bugs of training: each fails in the case that is meant for it, which passes right."""

import pytest
import torch  # noqa: F401

from jax_attn.parity.bugs.catalogue import BUGS
from jax_attn.parity.judge.compare import Verdict
from jax_attn.parity.training.bugs import (
    BESIDE,
    ENCODER_CASES,
    ENCODER_MUTANTS,
    TRAINING_MUTANTS,
    encoder_judged,
    tried,
)
from jax_attn.parity.training.cases import TRAINING_CASES


def dealt(names: dict, of) -> list[str]:
    """Of each kind the first."""
    return list({of(name): name for name in reversed(names)}.values())


def pytest_generate_tests(metafunc):
    """A bug of every other kind of case; --long and `verify --power` try all."""
    if "name" in metafunc.fixturenames:
        kinds = dealt(TRAINING_MUTANTS, lambda name: TRAINING_MUTANTS[name].case.split(",")[0])
        few = [*kinds, *ENCODER_MUTANTS][::2]
        names = BESIDE if metafunc.config.getoption("--long") else few
        metafunc.parametrize("name", names)


def test_a_planted_bug_fails_in_its_case(name):
    (kill,) = tried([name])
    assert kill.killed, kill
    assert kill.case == BESIDE[name]
    assert kill.tensor
    assert kill.times > 1


def test_no_name_stands_twice():
    assert not BESIDE.keys() & BUGS.keys()
    assert len(BESIDE) == len(TRAINING_MUTANTS) + len(ENCODER_MUTANTS)


def test_every_case_has_a_wrong_optimizer_and_passes_right():
    """The latter in test_training, one by one."""
    assert {mutant.case for mutant in TRAINING_MUTANTS.values()} == TRAINING_CASES.keys()


@pytest.mark.parametrize("case", ENCODER_CASES)
def test_the_right_encoder_passes(case):
    result = encoder_judged(case)
    assert result.verdict is Verdict.PASS, str(result)
