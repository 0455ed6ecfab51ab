"""The table of weights between a reference and its translation."""

from typing import Any

from jax_attn import transfer
from jax_attn.translate.module.places import FilePlaces


def layout(places: FilePlaces) -> transfer.Layout:
    """Return the table between the reference's tensors and those of the file."""
    rows: dict[str, Any] = {}
    tensors = places.reference.state_dict(keep_vars=True)
    by_id = {id(tensor): name for name, tensor in tensors.items() if name in places.tensors}
    for name, tensor in tensors.items():
        if name in places.tensors:
            continue
        first = by_id.get(id(tensor))
        rows[name] = (
            transfer.ignored(name, "not used by the outputs")
            if first is None
            else transfer.tied(name, first)
        )
    pairs: dict[str, list[tuple[str, str, Any]]] = {}
    for name in places.tensors:
        if name not in tensors:
            continue
        if not places.is_carried(name):
            rows[name] = transfer.ignored(name, "integers that the source writes")
            continue
        path, _, tensor = name.rpartition(".")
        held = places.leaf_at(path)
        step = held.tensors[tensor].step if held is not None else None
        steps = (step,) if step is not None else ()
        pairs.setdefault(_blank(name), []).append((name, places.target(name), steps))
    for group in pairs.values():
        patterns = {_pattern(name, target): steps for name, target, steps in group}
        if len(patterns) == 1 and len(group) > 1:
            (((key, target), steps),) = patterns.items()
            rows[key] = transfer.row(key, target, *steps)
        else:
            rows |= {name: transfer.row(name, target, *steps) for name, target, steps in group}
    return transfer.Layout(*rows.values())


def _blank(name: str) -> str:
    """Return a name without its integers."""
    return ".".join("" if part.isdigit() else part for part in name.split("."))


def _pattern(key: str, path: str) -> tuple[str, str]:
    """Write the integers that a key and a path share as names in braces."""
    theirs, ours = key.split("."), path.split(".")
    if [part for part in theirs if part.isdigit()] != [part for part in ours if part.isdigit()]:
        return key, path

    def filled(parts: list[str]) -> str:
        names = iter(("{layer}", "{part}", "{piece}", "{item}", "{member}"))
        return ".".join(next(names) if part.isdigit() else part for part in parts)

    return filled(theirs), filled(ours)
