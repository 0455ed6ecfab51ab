"""A bound on the work of an explanation, which is known beforehand; no clock decides."""

from collections.abc import Callable

MOST_RUNS = 4000
"""The number of runs of the port, each with some tensors replaced, for one explanation."""


class SpentError(Exception):
    """The work that is allowed is done."""


class Allowance:
    """A bound on the number of runs.

    show: called with the number of runs so far. is_spent: whether more were wanted than allowed.
    """

    def __init__(self, most: int = MOST_RUNS):
        self._most, self.done, self.is_spent = most, 0, False
        self.show: Callable[[int], None] = lambda done: None

    def spend(self) -> None:
        """Count one more run. Raises SpentError if no more are allowed."""
        if self.done >= self._most:
            self.is_spent = True
            raise SpentError
        self.done += 1
        self.show(self.done)
