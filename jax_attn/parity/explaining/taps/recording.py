"""Record the operations of one run, and write those that compute one result as Python."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

Name = Callable[[Any], str]
"""Maps a value to its Python expression."""


class UnwrittenError(Exception):
    """An operation or a value cannot be written as Python."""


class Operation(NamedTuple):
    """One operation of a run.

    call: writes the call, given the names of its operands. decides: whether none of its results is
    floating-point, as for a mask or positions. comment: the place of the operation.
    """

    call: Callable[[Name], str]
    decides: bool
    comment: str


class Recording:
    """The operations of one run, in order."""

    def __init__(self, key: Callable[[Any], Hashable]):
        """Start empty. key: identifies a value, and stays the same if the value is written to."""
        self._key = key
        self._operations: list[Operation] = []
        self._results: dict[Hashable, list[tuple[int, str]]] = defaultdict(list)
        self._kept: list[Any] = []  # if a value were freed, its key could be used again

    def add(self, operation: Operation, results: Sequence[Any], *, is_one: bool = True) -> None:
        """Add an operation.

        results: its results, with None for one that is not a tensor. is_one: whether it returns its
        result itself, and not a tuple.
        """
        index = len(self._operations)
        self._operations.append(operation)
        for n, x in enumerate(results):
            if x is not None:
                self._results[self._key(x)].append((index, "" if is_one else f"[{n}]"))
        self._kept += results

    def written(
        self, result: Any, is_given: Callable[[Any], str | None], unmade: Name
    ) -> list[str]:
        """Return the lines of a function that returns `result`.

        is_given: returns the name of a value that the function receives, else None. unmade: returns
        the name of a value that no operation makes, or whose operation cannot be written.

        Raises UnwrittenError if the operation of a floating-point result cannot be written.
        """
        left: set[int] = set()

        def named(x: Any, before: int) -> str:
            if (name := is_given(x)) is not None:
                return name
            made = [(i, part) for i, part in self._results.get(self._key(x), ()) if i < before]
            if not made or not self._is_written(made[-1][0]):
                return unmade(x)
            index, part = made[-1]
            left.add(index)
            return f"v{index}{part}"

        lines = [f"return {named(result, len(self._operations))}"]
        while left:
            index = max(left)
            left.remove(index)
            call, _, comment = self._operations[index]
            line = f"v{index} = {call(partial(named, before=index))}"
            lines.append(f"{line}  # {comment}" if comment else line)
        return lines[::-1]

    def _is_written(self, index: int) -> bool:
        call, decides, _ = self._operations[index]
        try:
            call(lambda x: "")
        except UnwrittenError:
            if decides:
                return False
            raise
        return True


def written(x: Any, leaf: Callable[[Any], str | None]) -> str:
    """Write an argument as Python: what `leaf` writes, else numbers, strings and lists of these.

    Raises UnwrittenError for any other value.
    """
    if (text := leaf(x)) is not None:
        return text
    if isinstance(x, list):
        return f"[{', '.join(written(part, leaf) for part in x)}]"
    if isinstance(x, tuple):
        parts = ", ".join(written(part, leaf) for part in x)
        return f"({parts},)" if len(x) == 1 else f"({parts})"
    if x is None or isinstance(x, bool | str):
        return repr(x)
    if isinstance(x, int | np.integer):
        return str(int(x))
    if isinstance(x, float):
        return repr(x) if np.isfinite(x) else f"float({str(x)!r})"
    raise UnwrittenError
