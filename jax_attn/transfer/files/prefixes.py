"""Tensors under other keys: a prefix stripped, or the prefixes of wrappers recognised."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from jax_attn.transfer.arrays import LazyMapping, Spec, Tensors, describe, read
from jax_attn.transfer.problems import Problem, nearest
from jax_attn.transfer.table.reasons import WRAPPERS

T = TypeVar("T", bound=Mapping[str, Any])


class Renamed(LazyMapping[Any]):
    """A mapping under other keys, as lazy as the original. keys: new to old."""

    def __init__(self, tensors: Tensors, keys: Mapping[str, str]) -> None:
        super().__init__(keys)
        self._tensors, self._keys = tensors, dict(keys)
        self.path = getattr(tensors, "path", None)

    def __getitem__(self, key: str) -> Any:
        return self._tensors[self._keys[key]]

    def describe(self, key: str) -> Spec:
        """Return shape and dtype name of one tensor, without reading it if that is possible."""
        lazy = getattr(self._tensors, "describe", None)
        return lazy(self._keys[key]) if lazy else describe(self[key])

    def mapped(self, key: str) -> Any:
        """Return one tensor for immediate use, uncopied if that is possible."""
        return read(self._tensors, self._keys[key])


def stripped(tensors: T, prefix: str) -> tuple["T | Renamed", list[Problem]]:
    """Remove `prefix` from the keys that begin with it; return the same tensors and the problems.

    prefix: with or without the trailing dot; "" for none.
    """
    if not prefix:
        return tensors, []
    dotted = f"{prefix.removesuffix('.')}."
    if not any(key.startswith(dotted) for key in tensors):
        firsts = {f"{key.partition('.')[0]}." for key in tensors}
        text = "expected keys that begin with this prefix, but there are none"
        return tensors, [Problem("missing", dotted, text, nearest(dotted, firsts))]
    names = [key.removeprefix(dotted) for key in tensors]
    problems = [
        Problem("doubly written", name, f"{name!r} and {dotted + name!r} both exist")
        for name, count in Counter(names).items()
        if count > 1
    ]
    return Renamed(tensors, dict(zip(names, tensors, strict=True))), problems


def unwrapped(tensors: T, known: Iterable[str] = ()) -> tuple["T | Renamed", list[Problem]]:
    """Remove the prefixes of wrappers; return the same tensors, and a problem if there were any.

    It is a problem because the caller did not ask for it. known: patterns of a table's keys; a
    prefix that begins one of them belongs to the table.
    """
    own = {pattern.partition(".")[0] for pattern in known}
    names, prefix = {key: key for key in tensors}, ""
    authors: list[str] = []
    while wrappers := [
        wrapper
        for wrapper in WRAPPERS
        if wrapper not in own and any(name.startswith(f"{wrapper}.") for name in names.values())
    ]:
        prefix += f"{wrappers[0]}."
        authors.append(WRAPPERS[wrappers[0]])
        names = {key: name.removeprefix(f"{wrappers[0]}.") for key, name in names.items()}
    if not prefix:
        return tensors, []
    count = sum(key != name for key, name in names.items())
    text = f"{' and '.join(authors)} added this prefix to {count} of {len(names)} keys"
    view = Renamed(tensors, {name: key for key, name in names.items()})
    hint = f"strip it: jax-attn port IN OUT --to flax --strip {prefix}; models.load reads OUT"
    return view, [Problem("unexpected", prefix, text, hint)]
