"""Interleaved rounds: each runs every implementation once, one at a time, in a fresh order."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Limits:
    """How many rounds: `most`; a slow implementation leaves after `least` and `seconds` spent.

    A call of 0.1 s is timed 21 times, one of a second seven times.
    """

    least: int = 7
    most: int = 21
    seconds: float = 2.5

    @classmethod
    def of(cls, rounds: int | None) -> "Limits":
        """Exactly so many rounds, or the default."""
        return cls() if rounds is None else cls(rounds, rounds)


def interleaved(
    turns: Mapping[str, Callable[[], float | None]],
    times: dict[str, list[float]],
    anchor: str,
    limits: Limits,
    seed: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[int]:
    """Fill `times` with one number a round for each name; yields the number of rounds done.

    A turn that returns None has failed, and its name leaves. The anchor, with whose times the
    others are compared, stays as long as any other: the i-th number of each name belongs to the
    i-th round, and the anchor has one too. `times` stays valid if the caller stops early.
    """
    rng = np.random.default_rng(seed)
    spent = dict.fromkeys(turns, 0.0)
    going = list(turns)
    for done in range(1, limits.most + 1):
        for i in rng.permutation(len(going)):
            name = going[i]
            started = clock()
            seconds = turns[name]()
            spent[name] += clock() - started
            if seconds is None:
                spent[name] = np.inf
            else:
                times.setdefault(name, []).append(seconds)
        yield done
        allowed = limits.seconds if done >= limits.least else np.inf
        going = [name for name in going if spent[name] < allowed]
        if not going:
            return
        if anchor in turns and anchor not in going and np.isfinite(spent[anchor]):
            going.append(anchor)
