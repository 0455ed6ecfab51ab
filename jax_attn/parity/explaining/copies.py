"""Tell operations that compute new numbers from those that only copy or move them."""

from collections.abc import Sequence

import numpy as np

from jax_attn.parity.explaining.taps.tap import Tap

_MOVES = frozenset(
    "broadcast_in_dim copy expand_dims reshape squeeze stop_gradient transpose".split()  # noqa: SIM905
)
"""Operations whose results hold the numbers of their operand."""


def computes(taps: Sequence[Tap], index: int) -> bool:
    """Return whether an operation computes new numbers; a conversion of integers does not."""
    tap = taps[index]
    is_of_integers = tap.op == "convert_element_type" and not tap.parents
    return copied(taps, index) is None and not is_of_integers


def copied(taps: Sequence[Tap], index: int) -> int | None:
    """Return the tap whose numbers an operation copies or moves; None if it computes others."""
    tap = taps[index]
    for p in tap.parents:
        if tap.op in _MOVES or np.array_equal(tap.value, taps[p].value, equal_nan=True):
            return p
    return None
