"""A test's rows in each dtype: those of every run, and those that --long adds."""

from collections.abc import Callable, Iterable
from typing import Any


def in_dtypes(
    names: str, usual: Iterable[Any], *, low: Iterable[Any] = (), long: Iterable[Any] = ()
) -> Callable:
    """Parametrize a test over names, as pytest has them, and "dtype".

    usual: a tuple of values, or one value, a row: all in float32. low: those in bfloat16, too.
    With --long all, and those of `long`, in both. Rows of a dict are its keys.
    """
    usual, low, every = [*usual], [*low], [*usual, *long]

    def of(with_long: bool) -> tuple[str, list[tuple]]:
        """What `metafunc.parametrize` takes; conftest.py gives it."""
        single, half = (every, every) if with_long else (usual, low)
        both = [(row, "float32") for row in single] + [(row, "bfloat16") for row in half]
        values = [(*(row if isinstance(row, tuple) else (row,)), dtype) for row, dtype in both]
        return f"{names}, dtype", values

    def decorate(test: Callable) -> Callable:
        test.in_dtypes = of
        return test

    return decorate
