"""Findings of canaries: bugs that the inputs of a check would not reveal."""

from typing import NamedTuple

from jax_attn.parity.judge.finding import Finding

FINE = ("float32", "float64")
"""The precisions whose rounding does not hide every small part of a number, such as an epsilon."""
DRAWN = "inputs drawn at random, and several keys"
NO_KEY = "the hidden keys would not change the outputs"
SOME_HIDDEN = "a mask that hides some keys, whose scores and values differ from the others'"


class DoubtsAndNotes(NamedTuple):
    """Doubts name bugs that would pass unseen; notes, cases that were not tried or are minor."""

    doubts: tuple[Finding, ...]
    notes: tuple[Finding, ...]


def doubt(kind: str, bug: str, reason: str, remedy: str) -> Finding:
    why = f"blind inputs: they would not reveal {bug}, because {reason}"
    return Finding(kind, f"{why}; to reveal it, use {remedy}")
