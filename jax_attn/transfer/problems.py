"""Problems of a transfer: gathered as `Problem`s, raised once as `TransferError`."""

import difflib
import itertools
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

PROBLEMS_SHOWN = 30
"""Largest number of problems that a message lists."""


class Problem(NamedTuple):
    """One reason why a transfer is impossible.

    Attributes:
      kind: "missing", "unexpected", "ambiguous", "doubly written", "wrong shape", "wrong dtype",
        "not finite", "unwritten", "refused", "unreadable" or "file".
      name: the torch key, Flax path or file that it concerns.
      text: what was expected and what was found.
      hint: how to fix it, if that is known.
    """

    kind: str
    name: str
    text: str
    hint: str = ""

    def __str__(self) -> str:
        mend = f"\n      {self.hint}" if self.hint else ""
        return f"{self.kind}: {self.name!r}: {self.text}{mend}"


class TransferError(ValueError):
    """Failure of a transfer, with every problem in `problems`; nothing has been written."""

    def __init__(self, doing: str, problems: Iterable[Problem]) -> None:
        self.doing = doing
        self.problems = list(problems)
        super().__init__(doing, self.problems)

    def __str__(self) -> str:
        count = len(self.problems)
        heading = f"{self.doing}: {count} problem{'s' * (count != 1)}"
        return "\n".join([heading, *listed(self.problems)])


def file_error(path: str | os.PathLike[str], text: str, hint: str = "") -> TransferError:
    """Return the error about one file as a whole."""
    return TransferError(f"checkpoint {path}", [Problem("file", str(path), text, hint)])


def listed(problems: Sequence[Problem]) -> list[str]:
    """Return the first `PROBLEMS_SHOWN` problems, a line or two each, and the number of others."""
    shown = problems[:PROBLEMS_SHOWN]
    # A hint that consecutive problems share is shown once, after the last of them.
    once = [
        problem._replace(hint="") if after and problem.hint == after.hint else problem
        for problem, after in itertools.zip_longest(shown, shown[1:])
    ]
    lines = [f"  - {problem}" for problem in once]
    rest = len(problems) - PROBLEMS_SHOWN
    return lines if rest <= 0 else [*lines, f"  … and {rest} more, in .problems"]


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Return 'nearest: a, b', the names closest to `name`; empty if none is close."""
    close = difflib.get_close_matches(name, list(candidates), n=3, cutoff=0.6)
    return f"nearest: {', '.join(map(printable, close))}" if close else ""


def printable(name: str) -> str:
    """Return a name from a file with characters that would control a terminal escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)


def grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format left-aligned columns under `head`."""
    table = [tuple(head), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)
    return "\n".join(lines)
