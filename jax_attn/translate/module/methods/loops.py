"""Find calls of the modules of a list, one after another, that are one loop."""

from dataclasses import dataclass

from torch.fx import Node

from jax_attn.translate.module.methods.scope import MethodScope
from jax_attn.translate.tracing.calls import ModuleCall


@dataclass(frozen=True)
class Loop:
    """Hold calls that are one loop.

    Attributes:
      calls: the calls, in order.
      carried: the arguments that get an output of the call before, with the place of that output;
        all other arguments are the same in every call.
    """

    calls: list[ModuleCall]
    carried: dict[str, int]


def run_from(scope: MethodScope, place: int) -> Loop | None:
    """Return the longest loop that starts with an item."""
    first = scope.items[place]
    if not isinstance(first, ModuleCall) or first.function is not None:
        return None
    parent, _, index = first.path.rpartition(".")
    is_in_list = not scope.tree.attribute(scope.call.path, first.path).endswith("']")
    if not index.isdigit() or not is_in_list:
        return None
    calls = [first]
    for item in scope.items[place + 1 :]:
        if (
            not isinstance(item, ModuleCall)
            or item.path != f"{parent}.{int(index) + len(calls)}"
            or type(item.module) is not type(first.module)
            or scope.tree.choices(item) != scope.tree.choices(first)
        ):
            break
        calls.append(item)
    while len(calls) > 1:
        carried = _carried(scope, calls)
        if carried and _is_closed(scope, calls, carried):
            return Loop(calls, carried)
        calls.pop()
    return None


def _carried(scope: MethodScope, calls: list[ModuleCall]) -> dict[str, int] | None:
    """Return the arguments that get an output of the call before, if that is all that differs."""
    outputs = [scope.tree.outputs(call) for call in calls]
    carried: dict[str, int] = {}
    for name in {name: None for call in calls for name in call.given}:
        values = [call.given.get(name) for call in calls]
        passed = (
            place
            for place in range(len(outputs[0]))
            if all(
                value is not None and value is before[place]
                for value, before in zip(values[1:], outputs, strict=False)
            )
        )
        output = next(passed, None)
        if output is not None and output not in carried.values():
            carried[name] = output
        elif any(value is not values[0] for value in values):
            return None
    return carried


def _is_closed(scope: MethodScope, calls: list[ModuleCall], carried: dict[str, int]) -> bool:
    """Return whether nothing after the loop reads an output that the loop does not keep."""
    inside = set(map(id, calls))
    last = scope.tree.outputs(calls[-1])
    kept: set[Node | None] = {last[place] for place in carried.values()}
    return all(
        value in kept or all(user is not None and id(user) in inside for user in users)
        for call in calls[:-1]
        for value in call.results
        for users in (scope.users.get(value, []),)
    )
