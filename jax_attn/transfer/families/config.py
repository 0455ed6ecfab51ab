"""Reading a config.json: what is there, what it may be called, and what is wrong with it."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from jax_attn.transfer.problems import Problem, TransferError

_MISSING = object()


def number(config: Mapping[str, Any], *names: str, default: Any = _MISSING, least: int = 1) -> Any:
    """The whole number ≥ least that the first of `names` there gives; None counts as not there.

    Raises TransferError where none is there and there is no default, and for anything else.
    """

    def is_count(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= least

    return _read(config, names, default, f"a whole number ≥ {least}", is_count)


def real(config: Mapping[str, Any], *names: str, default: Any = _MISSING) -> Any:
    """Likewise a finite number above 0."""
    return _read(config, names, default, "a number above 0", _is_real)


def flag(config: Mapping[str, Any], *names: str, default: Any = _MISSING) -> Any:
    """Likewise true or false."""
    return _read(config, names, default, "true or false", lambda value: isinstance(value, bool))


def share(config: Mapping[str, Any], width: str, heads: str) -> tuple[int, int, int]:
    """(D, N, H) where N heads share a width D: each has H = D / N features of it.

    Raises TransferError, also where they cannot.
    """
    D, N = number(config, width), number(config, heads)
    if D % N:
        raise refuse(heads, N, f"a divisor of {width} = {D}")
    return D, N, D // N


def kv_heads(config: Mapping[str, Any], name: str, heads: str) -> int:
    """K, how many key/value heads `name` gives; as many as there are query heads where it is not
    there. Raises TransferError, also where K does not divide N.
    """
    N = number(config, heads)
    K = number(config, name, default=N)
    if N % K:
        raise refuse(name, K, f"a divisor of {heads} = {N}")
    return K


def refuse(name: str, value: Any, expected: str) -> TransferError:
    """The error for a value that has no place here."""
    text = f"expected {expected}, got {value!r}"
    return TransferError("reading the config", [Problem("file", f"config.json {name}", text)])


def _read(
    config: Mapping[str, Any],
    names: tuple[str, ...],
    default: Any,
    expected: str,
    fits: Callable[[Any], bool],
) -> Any:
    for name in names:
        value = config.get(name)
        if value is not None:
            if not fits(value):
                raise refuse(name, value, expected)
            return value
    if default is _MISSING:
        raise refuse(" or ".join(names), None, expected)
    return default


def _is_real(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value <= sys.float_info.max  # JSON has longer whole numbers
