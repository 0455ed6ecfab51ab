"""The two halves of a check: what is asked of a reference, and how often.

That no judgement of a port needs more is shown by golden references, which hold nothing else.
"""

import pytest
import torch

from helpers.parity.small_pairs import PAIRS
from jax_attn.parity import Verdict, check
from jax_attn.parity.checking import preparing
from jax_attn.parity.checking.probes import QUESTIONS_ASKED
from jax_attn.parity.checking.questions import QUESTIONS
from jax_attn.parity.run.inputs_and_runs import Inputs, float_dtype


@pytest.fixture
def asked(monkeypatch):
    """The names of the questions that checks ask, in order."""
    asked = []

    def counted(name):
        ask = QUESTIONS[name].ask
        return QUESTIONS[name]._replace(ask=lambda prepared: asked.append(name) or ask(prepared))

    monkeypatch.setattr(preparing, "QUESTIONS", {name: counted(name) for name in QUESTIONS})
    return asked


def test_every_question_that_is_asked_has_an_answer():
    assert {*QUESTIONS_ASKED} == {*QUESTIONS}


@pytest.mark.slow
def test_a_narrow_dtype_that_is_judged_again_is_asked_once_of_what_no_budget_changes(asked):
    pair = PAIRS["narrow"]()
    options = {**pair.options, "transforms": ("jit",)}
    assert check(pair.reference, pair.ports["a slope below"], pair.inputs, **options).failures == ()
    by_budget = {name for name, question in QUESTIONS.items() if question.by_budget}
    of_ports_that_pass = {"other integers", "other inputs"}
    assert {name: asked.count(name) for name in asked} == {
        name: 2 if name in by_budget else 1 for name in QUESTIONS if name not in of_ports_that_pass
    }


@pytest.mark.slow
def test_other_inputs_are_asked_for_only_by_a_port_that_runs_eagerly(asked):
    pair = PAIRS["attention"]()
    for transform, times in (("jit", 0), ("eager", 1)):
        options = {**pair.options, "transforms": (transform,)}
        check(pair.reference, pair.ports["right"], pair.inputs, **options)
        assert asked.count("other inputs") == times


@pytest.mark.slow
def test_what_is_asked_of_a_reference_is_asked_once(asked):
    """Two ports are judged by one prepared reference, which need not be complete."""
    torch.manual_seed(0)
    pair = PAIRS["attention"]()
    given, call = Inputs.of(pair.inputs, float_dtype("float32")), pair.options["reference_call"]
    prepared = preparing.prepare_module(pair.reference, given, call, "float32", True, 0, None)
    verdicts = [
        check(prepared, port, layout=pair.options["layout"], transforms=("eager",)).verdict
        for port in pair.ports.values()
    ]
    assert verdicts == [Verdict.PASS, Verdict.FAIL]
    assert {*map(asked.count, asked)} == {1}
