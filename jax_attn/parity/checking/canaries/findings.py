"""Findings of canaries: bugs that the inputs of a check would not reveal.

Doubts name bugs that would pass unseen; notes, cases that were not tried or are minor.
"""

from collections.abc import Sequence

from jax_attn.parity.judge.finding import BLIND, Finding, StandingNote
from jax_attn.parity.judge.text import quoted

FINE = ("float32", "float64")
"""The precisions whose rounding does not hide every small part of a number, such as an epsilon."""


def doubt(kind: str, bug: str, reason: str, remedy: str) -> Finding:
    """Say that these inputs would not reveal a bug, why, and which would."""
    why = f"{BLIND}they would not reveal {bug}, because {reason}"
    return Finding(kind, f"{why}; to reveal it, use {remedy}")


def not_tried(bug: str) -> StandingNote:
    """Say that the reference raises an error if a bug is planted in it."""
    return StandingNote(
        "bug-not-tried",
        f"whether these inputs would reveal {bug} was not checked: the reference raises an error "
        "if this bug is planted in it",
    )


def inside(paths: Sequence[str | None]) -> str:
    """Return " in" and the first two paths of modules; "" if there are only empty paths."""
    named = [path for path in dict.fromkeys(paths) if path]
    return f" in {quoted(named, 2)}" if named else ""
