"""What calls of one module pass that is no tensor and tells them apart, such as a kind of layer."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from jax_attn.translate.tracing.calls import ModuleCall

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
