"""Name every array that a module returns, the same on both sides."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def named_outputs(result: Any) -> Any:
    """Return {name: array} for what a module of torch or its translation returns.

    The name of an array inside dicts, tuples and classes with fields is its path, such as
    "hidden_states.0"; None is left out. An array alone is returned as it is.
    """
    found = dict(_named(result, ""))
    return result if [*found] == [""] else found


def called(module: Any, *args: Any, **inputs: Any) -> Any:
    """Call a module of either side, and name what it returns, as `parity.check` asks for it."""
    return named_outputs(module(*args, **inputs))


def _named(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if value is None:
        return
    if isinstance(value, Mapping):
        items = [*value.items()]
    elif isinstance(value, tuple | list):
        items = [*enumerate(value)]
    elif is_dataclass(value) and not isinstance(value, type):
        items = [(field.name, getattr(value, field.name)) for field in fields(value)]
    else:
        yield path, value
        return
    for key, each in items:
        yield from _named(each, f"{path}.{key}" if path else str(key))
