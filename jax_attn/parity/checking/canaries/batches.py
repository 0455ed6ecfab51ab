"""A batch of one row: whether rows are mixed cannot be told."""

import numpy as np

from jax_attn.parity.checking.canaries.attention_facts import AttentionFacts
from jax_attn.parity.checking.canaries.findings import DoubtsAndNotes
from jax_attn.parity.checking.canaries.planted import named_inputs, run_planted, same, with_inputs
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.run.float64_mode import Float64

_NOTE = (
    "every input has a batch of one, so a port that mixes the rows of a batch would pass; what "
    "would show it: two rows that differ"
)


def try_batches(prepared: Prepared, facts: AttentionFacts) -> DoubtsAndNotes:
    """Note a batch of one, where the reference takes two rows and keeps them apart."""
    inputs = named_inputs(prepared.reference)
    if not facts.longest or any(a.shape[:1] != (1,) for a in inputs.values()):
        return DoubtsAndNotes((), ())
    two = {name: np.concatenate([a, np.flip(a)]) for name, a in inputs.items()}
    run = run_planted(with_inputs(prepared.reference, two), Float64())
    if run is None:
        return DoubtsAndNotes((), ())
    are_rows = all(
        got.shape == (2, *want.shape[1:]) and want.shape[:1] == (1,) and same(got[:1], want)
        for got, want in (
            (run.kinds["output"].get(name, want[:0]), want)
            for name, want in prepared.exact.kinds["output"].items()
        )
    )
    return DoubtsAndNotes((), (_NOTE,) if are_rows else ())
