"""What canaries find: bugs that the inputs of a check would not reveal."""

from typing import NamedTuple

FINE = ("float32", "float64")
"""The precisions whose rounding does not hide every small part of a number, such as an epsilon."""
DRAWN = "inputs drawn at random, and several keys"
NO_KEY = "the hidden keys would not change the outputs"
SOME_HIDDEN = "a mask that hides some keys, whose scores and values differ from the others'"


class DoubtsAndNotes(NamedTuple):
    """Bugs that would not be seen; what was not tried."""

    doubts: tuple[str, ...]
    notes: tuple[str, ...]


def doubt(bug: str, reason: str, remedy: str) -> str:
    why = f"blind inputs: they would not reveal {bug}, because {reason}"
    return f"{why}; to reveal it, use {remedy}"
