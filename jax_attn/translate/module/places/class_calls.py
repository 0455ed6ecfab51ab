"""Find what the calls of one class pass and return: the same places, in all of them."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.fx import Node

from jax_attn.translate.rules.written import TAKEN
from jax_attn.translate.tracing.calls import ModuleCall
from jax_attn.translate.tracing.export.marks import named_leaves
from jax_attn.translate.tracing.problems import Unsupported

_BETWEEN = "\0"
"""What separates keys and indices in a place: no key contains it, as one may contain `_`."""


def _leaves(call: ModuleCall) -> Iterator[tuple[str, Any]]:
    return named_leaves("", call.returned, _BETWEEN)


def _places(call: ModuleCall) -> dict[Node, str]:
    """Return the first place of each value in what forward returns."""
    found: dict[Node, str] = {}
    for place, leaf in _leaves(call):
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
    ordered = dict.fromkeys(place for call in calls for place, _ in _leaves(call) if place in read)
    longest = max(calls, key=lambda call: len(list(_leaves(call))))
    order = [place for place, _ in named_leaves("", longest.returned)]
    return sorted(ordered, key=lambda place: order.index(place) if place in order else len(order))


def outputs(call: ModuleCall, places: Sequence[str] | None) -> list[Node | None]:
    """Return the values of one call in these places; None where it has none."""
    if places is None:
        return list(call.results)
    known = {*call.nodes(), *call.given.values()}
    leaves = dict(_leaves(call))
    return [
        leaf if isinstance(leaf := leaves.get(place), Node) and leaf in known else None
        for place in places
    ]


def position(call: ModuleCall, place: int, places: Sequence[str] | None) -> int | None:
    """Return which element of the returned tuple an output is, or None if it is none of them."""
    if places is None or not isinstance(call.returned, (list, tuple)):
        return None
    index = places[place].split(_BETWEEN)[1]
    return int(index) if index.isdigit() else None


_CHOICES = (str, bool, int, type(None))


def choices(calls: Mapping[str, Sequence[ModuleCall]]) -> dict[type[nn.Module], list[str]]:
    """Return the arguments, by class, that differ between calls of one module and are no tensors.

    Args:
      calls: the calls of each module, by its path.
    """
    found: dict[type[nn.Module], list[str]] = {}
    for first, *others in calls.values():
        kind = type(first.module)
        for name in inspect.signature(kind.forward).parameters:
            values = [choice(call, name) for call in (first, *others)]
            if len(set(map(repr, values))) > 1 and all(type(each) in _CHOICES for each in values):
                names = found.setdefault(kind, [])
                names += [name] if name not in names else []
    return found


def ordered(names: Iterable[str], forward: Callable[..., Any]) -> list[str]:
    """Order the names of what calls are given as the arguments of forward."""
    order = list(inspect.signature(forward).parameters)

    def place(name: str) -> tuple[int, str]:
        if name in order:
            return order.index(name), ""
        base, _, index = name.rpartition("_")
        return (order.index(base), index) if base in order else (len(order), name)

    return sorted(names, key=place)


def choice(call: ModuleCall, name: str) -> Any:
    """Return what a call passes as an argument of forward, or the default."""
    default = inspect.signature(type(call.module).forward).parameters[name].default
    return call.arguments.get(name, default)


def taken_by_file(call: ModuleCall) -> list[str]:
    """Return what the file's own module takes: what the reference does, used or not."""
    parameters = inspect.signature(type(call.module).forward).parameters
    return [
        f"*{argument}" if _is_rest(parameters.get(argument)) else argument
        for argument, tree in call.arguments.items()
        if tree in _EMPTY or any(isinstance(leaf, Node) for _, leaf in named_leaves(argument, tree))
    ]


def unfit_arguments(call: ModuleCall) -> list[Unsupported]:
    """Refuse arguments of the reference whose names mean something else in the file."""
    reason = "the file needs this name; rename this argument of forward"
    return [Unsupported("input", name, reason) for name in call.arguments if name in TAKEN]


_EMPTY: tuple[Any, ...] = ([], (), {})


def _is_rest(parameter: inspect.Parameter | None) -> bool:
    """Return whether a parameter is `*args`; what `**kwargs` takes has no parameter."""
    return parameter is not None and parameter.kind is inspect.Parameter.VAR_POSITIONAL
