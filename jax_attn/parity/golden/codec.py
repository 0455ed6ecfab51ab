"""Objects of known types as plain data and named arrays, and back; nothing else is ever made."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jax_attn.parity.judge.finding import Finding, StandingNote

_TYPE = "$"
"""The key that tells a typed object from a mapping."""
_FINDINGS: dict[str, type[Finding]] = {"Finding": Finding, "StandingNote": StandingNote}

Types = Mapping[str, type]
"""Name -> dataclass or NamedTuple; an object of any other type is refused."""


def fields_of(kind: type) -> tuple[str, ...]:
    """Return the names of the fields of a dataclass or NamedTuple."""
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    return kind._fields  # type: ignore[attr-defined]


class TreeEncoder:
    """Writes objects as data for JSON, and collects their arrays by name.

    An array that occurs twice is collected once. Raises TypeError for an object of another type.
    """

    def __init__(self, types: Types) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self._names = {kind: name for name, kind in types.items()}
        self._by_id: dict[int, tuple[str, np.ndarray]] = {}

    def encode(self, value: Any, path: str = "") -> Any:
        """Return `value` as data for JSON. path: the name of its place, for its arrays."""
        if isinstance(value, np.ndarray):
            kind = "complex" if value.dtype.kind == "c" else "array"
            return {_TYPE: kind, "name": self._name(value, path)}
        if isinstance(value, Finding):
            return {_TYPE: type(value).__name__, "kind": value.kind, "sentence": str(value)}
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {_TYPE: "float", "text": repr(value)}
        if type(value) in self._names:
            named = {name: getattr(value, name) for name in fields_of(type(value))}
            return {_TYPE: self._names[type(value)], **self._each(named, path)}
        if isinstance(value, tuple):
            return [self.encode(item, f"{path}/{i}") for i, item in enumerate(value)]
        if isinstance(value, frozenset):
            return {_TYPE: "set", "items": sorted(value)}
        if isinstance(value, Mapping):
            return {_TYPE: "mapping", "items": [*map(list, self._each(value, path).items())]}
        raise TypeError(f"a golden reference cannot hold {type(value).__name__} at {path}")

    def _each(self, named: Mapping[str, Any], path: str) -> dict[str, Any]:
        return {name: self.encode(item, f"{path}/{name}") for name, item in named.items()}

    def _name(self, array: np.ndarray, path: str) -> str:
        if id(array) in self._by_id:
            return self._by_id[id(array)][0]
        name = path.lstrip("/")
        while name in self.arrays:
            name += "'"
        self.arrays[name] = _in_pairs(array) if array.dtype.kind == "c" else array
        self._by_id[id(array)] = name, array  # held, so that its id is not given to another
        return name


def _in_pairs(array: np.ndarray) -> np.ndarray:
    """Return a complex array (…) as real and imaginary parts (…, 2): files hold no complex ones."""
    return np.ascontiguousarray(array)[..., None].view(array.real.dtype).reshape(*array.shape, 2)


def _of_pairs(pairs: np.ndarray) -> np.ndarray:
    """Return the complex array (…) of real and imaginary parts (…, 2)."""
    return np.ascontiguousarray(pairs).view(f"c{2 * pairs.itemsize}")[..., 0]


def decode(data: Any, arrays: Mapping[str, np.ndarray], types: Types) -> Any:
    """Return the object that a `TreeEncoder` wrote as `data` and `arrays`.

    Fields that are missing keep their defaults. Raises ValueError, LookupError or TypeError for
    anything that a `TreeEncoder` does not write.
    """

    def each(named: Mapping[str, Any]) -> dict[str, Any]:
        return {name: decode(item, arrays, types) for name, item in named.items()}

    if isinstance(data, list):
        return tuple(decode(item, arrays, types) for item in data)
    if not isinstance(data, dict):
        return data
    fields = dict(data)
    kind = fields.pop(_TYPE)
    if kind == "array":
        return arrays[fields["name"]]
    if kind == "complex":
        return _of_pairs(arrays[fields["name"]])
    if kind == "float":
        return float(fields["text"])
    if kind == "set":
        return frozenset(fields["items"])
    if kind == "mapping":
        return each(dict(fields["items"]))
    if kind in _FINDINGS:
        return _FINDINGS[kind](**fields)
    return types[kind](**each(fields))
