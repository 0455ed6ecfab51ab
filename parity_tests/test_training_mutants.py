"""Planted bugs of training: each fails in the case that is meant for it, which passes right."""

import pytest
import torch  # noqa: F401

from jax_attn.parity.compare import Verdict
from jax_attn.parity.training_mutants import (
    ENCODER_CASES,
    ENCODER_MUTANTS,
    TRAINING_MUTANTS,
    Kill,
    encoder_judged,
    encoder_kills,
    judged,
    training_kills,
)


@pytest.mark.parametrize("name", TRAINING_MUTANTS)
def test_a_wrong_optimizer_fails_in_its_case(name):
    mutant = TRAINING_MUTANTS[name]
    assert Kill.of(name, mutant.case, judged(mutant.case, mutant.make())).killed


def test_the_kills_are_told_one_by_one():
    kills = training_kills()
    first = next(kills)
    assert (first.mutant, first.killed) == (next(iter(TRAINING_MUTANTS)), True)
    assert first.by
    kills.close()


@pytest.mark.parametrize("case", ENCODER_CASES)
def test_the_right_encoder_passes(case):
    result = encoder_judged(case)
    assert result.verdict is Verdict.PASS, str(result)


@pytest.mark.parametrize("name", ENCODER_MUTANTS)
def test_a_wrong_layer_beside_attention_fails_in_its_case(name):
    mutant = ENCODER_MUTANTS[name]
    assert Kill.of(name, mutant.case, encoder_judged(mutant.case, mutant)).killed


def test_the_encoders_kills_are_told_one_by_one():
    kills = encoder_kills()
    assert next(kills).killed
    kills.close()
