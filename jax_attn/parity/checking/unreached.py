"""Parameters that the inputs of a check do not reach, so that a wrong one would not show."""

from collections.abc import Iterator, Mapping

import numpy as np

from jax_attn.parity.judge.budget import Budget
from jax_attn.parity.judge.compare import rms
from jax_attn.parity.judge.finding import Finding, StandingNote
from jax_attn.parity.judge.text import quoted


def unreached(
    gradients: Mapping[str, np.ndarray], budgets: Mapping[str, Budget]
) -> tuple[Finding, ...]:
    """Return notes on parameters whose gradient is zero, on these inputs or on any (key biases).

    gradients: the oracle's gradients by name. For parameters with three or more axes, such as
    stacked experts, slices along the first axis are examined too.
    """
    notes: list[Finding] = []
    if zero := [name for whole, g in gradients.items() for name in _zero_parts(whole, g)]:
        it, gradient = ("them", "gradients are") if len(zero) > 1 else ("it", "gradient is")
        sentence = (
            f"no input reaches {quoted(zero)}: the {gradient} zero everywhere, so a port with "
            f"other numbers there may pass; to detect it, use inputs that are routed to {it}, "
            "or several keys if a softmax has only one"
        )
        notes.append(Finding("unreached-weights", sentence))
    if idle := [name for name, g in gradients.items() if g.any() and rms(g) <= budgets[name].zero]:
        sentence = (
            f"the gradient of {quoted(idle)} is zero up to rounding: no output depends on it, as "
            "for a bias of keys"
        )
        notes.append(StandingNote("zero-gradient", sentence))
    return tuple(notes)


def _zero_parts(name: str, gradient: np.ndarray) -> Iterator[str]:
    """Yield the parameter, or its slices, if their gradient is exactly zero."""
    if not gradient.size:
        return
    if not gradient.any():
        yield name
    elif gradient.ndim >= 3:
        yield from (f"{name}[{i}]" for i, part in enumerate(gradient) if not part.any())
