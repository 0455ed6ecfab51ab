"""What the calls of one class return: the same places of what forward returns, in all of them."""

from collections.abc import Sequence

from torch.fx import Node

from jax_attn.translate.tracing.calls import ModuleCall
from jax_attn.translate.tracing.marks import named_leaves


def _places(call: ModuleCall) -> dict[Node, str]:
    """Return the first place of each value in what forward returns."""
    found: dict[Node, str] = {}
    for place, leaf in named_leaves("", call.returned):
        if isinstance(leaf, Node):
            found.setdefault(leaf, place)
    return found


def returned_places(calls: Sequence[ModuleCall]) -> list[str] | None:
    """Return the places of what forward returns that some call's values are read from.

    None if values are read that forward does not return, such as what it writes into an argument.
    """
    read: set[str] = set()
    for call in calls:
        places = _places(call)
        if any(value not in places for value in call.results):
            return None
        read.update(places[value] for value in call.results)
    ordered = dict.fromkeys(
        place for call in calls for place, _ in named_leaves("", call.returned) if place in read
    )
    longest = max(calls, key=lambda call: len(list(named_leaves("", call.returned))))
    order = [place for place, _ in named_leaves("", longest.returned)]
    return sorted(ordered, key=lambda place: order.index(place) if place in order else len(order))


def outputs(call: ModuleCall, places: Sequence[str] | None) -> list[Node | None]:
    """Return the values of one call in these places; None where it has none."""
    if places is None:
        return list(call.results)
    known = {*call.nodes(), *call.given.values()}
    leaves = dict(named_leaves("", call.returned))
    return [
        leaf if isinstance(leaf := leaves.get(place), Node) and leaf in known else None
        for place in places
    ]


def position(call: ModuleCall, place: int, places: Sequence[str] | None) -> int | None:
    """Return which element of the returned tuple an output is, or None if it is none of them."""
    if places is None or not isinstance(call.returned, (list, tuple)):
        return None
    index = places[place].split("_")[1]
    return int(index) if index.isdigit() else None
