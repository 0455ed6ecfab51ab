"""Ask a reference on its inputs what probes need, before any port is known: their first halves."""

from jax_attn.parity.checking.arguments import input_doubts
from jax_attn.parity.checking.canaries import try_canaries
from jax_attn.parity.checking.canaries.integers import integers_left_out, other_integers
from jax_attn.parity.checking.canaries.outputs import other_inputs, small_features
from jax_attn.parity.checking.conventions import conventions
from jax_attn.parity.checking.frequencies import of_reference
from jax_attn.parity.checking.prepared import Prepared, Question
from jax_attn.parity.checking.read_numbers import read_numbers
from jax_attn.parity.checking.weights import Weights
from jax_attn.parity.judge.finding import Findings


def _weights(prepared: Prepared) -> Weights:
    """Return the names and numbers of the reference's weights."""
    return Weights.of(prepared.reference.module)


def _canaries(prepared: Prepared) -> Findings:
    """Return doubts about bugs that these inputs would not reveal, and notes."""
    found = try_canaries(prepared, prepared.canaries)
    prepared.first.hidden.update(found.hidden)
    return Findings(doubts=found.doubts, notes=found.notes)


QUESTIONS = {
    "weights": Question(_weights),
    "input doubts": Question(input_doubts),
    "conventions": Question(conventions),
    "canaries": Question(_canaries, by_budget=True),
    "small features": Question(small_features, by_budget=True),
    "read numbers": Question(read_numbers),
    "frequencies": Question(of_reference),
    "integers left out": Question(integers_left_out),
    "other integers": Question(other_integers, by_budget=True),
    "other inputs": Question(other_inputs, by_budget=True),
}
"""Name -> question; probes ask by name, since their second halves work where there is no torch."""
