"""Decisions that perturbed runs take either way, half of them each."""

import pytest
import torch

from jax_attn.parity.judge.budget import PRECISIONS
from jax_attn.parity.run.modes.decisions import Decision, Decisions, either
from jax_attn.parity.run.modes.perturbed_mode import Perturbed

_TOKENS, _NEAR = 997, 499


def _decision(*, constant: bool = False) -> Decision:
    """Two experts for each token; a run chose others for the first of the tokens."""
    taken = torch.tensor([0, 3]).expand(_TOKENS, 2)
    decision = Decision("topk", ("topk", ()), constant, taken)
    other = taken.clone()
    other[:_NEAR] = torch.tensor([0, 1])
    decision.compare(other)
    decision.compare(taken)  # a later run that decides as the reference does changes nothing
    return decision


@pytest.mark.parametrize(
    ("both", "constant", "part"),
    [(True, False, 0.5), (False, False, 0.0), (True, True, 0.0)],
    ids=["held", "not held", "about constants"],
)
def test_a_run_takes_either_decision_where_one_decided_otherwise(both, constant, part):
    decision = _decision(constant=constant)
    Decisions([decision]).hold(both=both)
    mode = Perturbed(PRECISIONS["bfloat16"], 1)
    went_on = either(mode.rounding.coins, decision, decision.taken)
    differs = (went_on != decision.taken).any(-1)
    assert not differs[_NEAR:].any()
    assert abs(differs[:_NEAR].double().mean().item() - part) < 0.1


@pytest.mark.parametrize("turns", [(1, 2), (2, 1)], ids=["in order", "the later one first"])
def test_what_is_held_is_of_the_later_run_whichever_ends_first(turns):
    taken = torch.tensor([[0, 3]])
    decision = Decision("topk", ("topk", ()), False, taken)
    for turn in turns:
        decision.compare(torch.tensor([[0, turn]]), turn)
    Decisions([decision]).hold(both=True)
    assert torch.equal(decision.held, torch.tensor([[0, 2]]))
