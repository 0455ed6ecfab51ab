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
    """Notes on parameters whose gradient is zero, on these inputs or on any (the bias of keys).

    gradients: the oracle's, by name. Parameters of three or more axes, such as stacked experts, are
    looked at slice by slice along the first axis, too.
    """
    notes: list[Finding] = []
    if zero := [name for whole, g in gradients.items() for name in _zero_parts(whole, g)]:
        it, gradient = ("them", "gradients are") if len(zero) > 1 else ("it", "gradient is")
        sentence = (
            f"no input reaches {quoted(zero)}: the {gradient} zero everywhere, so a port with "
            f"other numbers there may pass; to show it, use inputs that are routed to {it}, "
            "or several keys where a softmax has one"
        )
        notes.append(Finding("unreached-weights", sentence))
    if idle := [name for name, g in gradients.items() if g.any() and rms(g) <= budgets[name].zero]:
        sentence = (
            f"the gradient of {quoted(idle)} is zero but for rounding: no output "
            "depends on it, as none does on the bias of keys"
        )
        notes.append(StandingNote("zero-gradient", sentence))
    return tuple(notes)


def _zero_parts(name: str, gradient: np.ndarray) -> Iterator[str]:
    """The parameter, or those of its slices, whose gradient is exactly zero."""
    if not gradient.size:
        return
    if not gradient.any():
        yield name
    elif gradient.ndim >= 3:
        yield from (f"{name}[{i}]" for i, part in enumerate(gradient) if not part.any())
