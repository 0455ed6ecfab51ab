"""Where a JSON document departs from `jax_attn.report.schema`."""

from collections.abc import Iterator
from typing import Any

from jax_attn.report.schema import OBJECTS

KINDS = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
    "any": object,
}


def problems(value: Any, of: str, where: str = "$") -> Iterator[str]:
    """A line for each value of another type, each key that is missing and each unknown one."""
    if of.endswith(" or null"):
        if value is not None:
            yield from problems(value, of.removesuffix(" or null"), where)
    elif of.startswith("list of "):
        assert isinstance(value, list), where
        for i, each in enumerate(value):
            yield from problems(each, of.removeprefix("list of "), f"{where}[{i}]")
    elif of.startswith("map of "):
        assert isinstance(value, dict), where
        for name, each in value.items():
            yield from problems(each, of.removeprefix("map of "), f"{where}.{name}")
    elif of in OBJECTS:
        keys = OBJECTS[of]
        yield from (f"{where}: unknown key {key}" for key in value.keys() - keys.keys())
        for key, it in keys.items():
            if key in value:
                yield from problems(value[key], it.type, f"{where}.{key}")
            elif not it.is_optional:
                yield f"{where}: no key {key}"
    elif not isinstance(value, KINDS[of]):
        yield f"{where}: expected {of}, got {value!r}"
