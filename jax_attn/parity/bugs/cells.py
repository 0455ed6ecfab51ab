"""Bugs of recurrent cells: the order of their gates."""

from collections.abc import Sequence
from functools import partial
from itertools import permutations

from torch import Tensor

from jax_attn.parity.bugs.bug import Bug, OperatorCall

GATES = ("unsafe_split", "split")
"""Operators that cut gates out of one product; torch's own cells use the first."""
_COUNTS = (3, 4)


def gate_orders(call: OperatorCall) -> list[Bug]:
    """Return the other orders of 3 or 4 parts of equal size, those that move fewest parts first."""
    parts: Sequence[Tensor] = call.result()
    if len(parts) not in _COUNTS or len({part.shape for part in parts}) > 1:
        return []
    own = tuple(range(len(parts)))
    orders = [order for order in permutations(own) if order != own]
    orders.sort(key=lambda order: sum(a != b for a, b in zip(order, own, strict=True)))
    return [_reordered(order) for order in orders]


def _reordered(order: tuple[int, ...]) -> Bug:
    shown = ", ".join(map(str, order))
    return Bug("gate order", f"its parts in the order {shown}", partial(_taken, order), shown)


def _taken(order: tuple[int, ...], call: OperatorCall) -> tuple[Tensor, ...]:
    parts = call.result()
    return tuple(parts[i] for i in order)
