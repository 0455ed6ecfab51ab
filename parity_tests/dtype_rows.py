"""A test's rows in each dtype: those of every run, and those that --long adds."""

from collections.abc import Iterable, Sequence
from typing import Any


def rows(
    metafunc,
    test: str,
    names: Sequence[str],
    usual: Iterable[Any],
    *,
    low: Iterable[Any] = (),
    long: Iterable[Any] = (),
) -> None:
    """Parametrize `test` over names and "dtype", from within pytest_generate_tests.

    usual: a tuple of values, or one value, a row: all in float32. low: those in bfloat16, too.
    With --long all, and those of `long`, in both.
    """
    if metafunc.function.__name__ != test:
        return
    usual, low = [*usual], [*low]
    if metafunc.config.getoption("--long"):
        usual = low = [*usual, *long]
    both = [(row, "float32") for row in usual] + [(row, "bfloat16") for row in low]
    values = [(*(row if isinstance(row, tuple) else (row,)), dtype) for row, dtype in both]
    metafunc.parametrize((*names, "dtype"), values)
