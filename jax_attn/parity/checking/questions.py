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


def _weights(prepared: Prepared) -> Weights:
    """Return the names and numbers of the reference's weights."""
    return Weights.of(prepared.reference.module)


QUESTIONS = {
    "weights": Question(_weights),
    "input doubts": Question(input_doubts),
    "conventions": Question(conventions),
    "canaries": Question(try_canaries, by_budget=True),
    "small features": Question(small_features, by_budget=True),
    "read numbers": Question(read_numbers),
    "frequencies": Question(of_reference),
    "integers left out": Question(integers_left_out),
    "other integers": Question(other_integers, by_budget=True),
    "other inputs": Question(other_inputs, by_budget=True),
}
"""Name -> question; probes ask by name, since their second halves work where there is no torch."""
