"""A clock that tests set, and what the time left that is shown may differ by from the truth."""

import re
from types import SimpleNamespace

from jax_attn import progress

FACTOR = 1.5
"""What the time left that is shown may be wrong by."""


class Clock:
    """The clock of `jax_attn.progress`: it stands unless it is told to go on."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: self.now))


def shown(text: str) -> float | None:
    """The seconds left that a line says; None where it says none."""
    if match := re.search(r"about (\d+):(\d\d) left", text):
        return 60 * int(match[1]) + int(match[2])
    return None


def is_right(text: str, truth: float) -> bool:
    """Whether a line says the time left within `FACTOR`; whole seconds are shown."""
    if match := re.search(r"less than (\d+) s left", text):
        return truth < int(match[1])
    seconds = shown(text)
    return seconds is not None and truth / FACTOR - 1 <= seconds <= truth * FACTOR + 1
