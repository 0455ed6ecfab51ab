"""Planted bugs of training: each fails in the case that is meant for it, which passes right."""

import pytest
import torch  # noqa: F401

from jax_attn.parity.compare import Verdict
from jax_attn.parity.training_cases import TRAINING_CASES
from jax_attn.parity.training_mutants import (
    ENCODER_CASES,
    ENCODER_MUTANTS,
    TRAINING_MUTANTS,
    Kill,
    encoder_judged,
    encoder_kills,
    training_kills,
)


@pytest.fixture(scope="module")
def kills() -> dict[str, Kill]:
    return {kill.mutant: kill for kill in (*training_kills(), *encoder_kills())}


def test_every_mutant_is_told_with_its_case_and_what_killed_it(kills):
    mutants = TRAINING_MUTANTS | ENCODER_MUTANTS
    assert {name: kill.case for name, kill in kills.items()} == {
        name: mutant.case for name, mutant in mutants.items()
    }
    assert all(kill.by for kill in kills.values())


@pytest.mark.parametrize("name", TRAINING_MUTANTS | ENCODER_MUTANTS)
def test_a_planted_bug_fails_in_its_case(name, kills):
    assert kills[name].killed, kills[name]


def test_every_wrong_optimizers_case_is_one_that_passes_right():
    """In test_training, one by one."""
    assert {mutant.case for mutant in TRAINING_MUTANTS.values()} <= TRAINING_CASES.keys()


@pytest.mark.parametrize("case", ENCODER_CASES)
def test_the_right_encoder_passes(case):
    result = encoder_judged(case)
    assert result.verdict is Verdict.PASS, str(result)
