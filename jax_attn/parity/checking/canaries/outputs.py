"""Find what outputs cannot show by themselves: small features, and outputs that a port keeps."""

import numpy as np

from jax_attn.parity.bugs.planting import run_planted
from jax_attn.parity.bugs.tensors import with_inputs
from jax_attn.parity.checking.canaries.findings import FINE
from jax_attn.parity.checking.canaries.masks import is_mask
from jax_attn.parity.checking.other_inputs import OtherInputs
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.compare import POWER, Verdict
from jax_attn.parity.judge.finding import Finding, findings

# --- features too small for their errors to show --------------------------------------------------


def small_features(prepared: Prepared) -> tuple[Finding, ...]:
    """Note outputs in which some features, along the last axis, may err by a tenth of their size.

    Sums that mix features carry roundings of large ones to small ones, so the budget of the whole
    allows for them. In a coarse dtype many features are like that, so it gets no note.
    """
    notes = []
    outputs = prepared.exact.kinds["output"] if prepared.dtype in FINE else {}
    for name, want in outputs.items():
        budget = prepared.budgets["output"][name]
        if want.ndim < 2 or not want.size or not np.isfinite(want).all():
            continue
        axes, features = tuple(range(want.ndim - 1)), want.shape[-1]
        unseen = (POWER * np.abs(want) <= budget.element).all(axes)
        small = unseen & (np.sqrt(np.square(want).mean(axes)) > budget.zero)
        if not 0 < small.sum() < features:
            continue  # if all are small, the output has no power, and the comparison reports it
        wrong = np.where(small, (1 - POWER) * want, want)
        if prepared.judge_one("output", name, "planted", wrong).verdict is Verdict.FAIL:
            continue
        notes.append(
            f"{int(small.sum())} of the {features} features of output {name!r}, along its last "
            f"axis, are so much smaller than the others that an error of {POWER:.0%} in them would "
            "pass; to show it, use a reference_call and port_call that return them under a "
            "name of their own"
        )
    return findings("small-features", notes)


# --- a port that returns its first outputs again --------------------------------------------------


def other_inputs(prepared: Prepared) -> OtherInputs | None:
    """Flip every input except masks; return None if the outputs stay or the reference fails."""
    reference = prepared.reference
    others = {
        name: np.flip(a)
        for name, a in reference.inputs.by_name.items()
        if not is_mask(reference, name, a)
    }
    reference = with_inputs(reference, others)
    planted = run_planted(reference)
    if planted is None or not prepared.would_fail(planted):
        return None
    return OtherInputs(reference.inputs, planted.kinds["output"])
