"""Interleaved rounds: in each, everyone once, in a fresh order, one at a time."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Limits:
    """How many rounds: `most`, but a slow one leaves after `least` once `seconds` are spent.

    A call of 0.1 s is timed 21 times, one of a second seven times.
    """

    least: int = 7
    most: int = 21
    seconds: float = 2.5

    @classmethod
    def of(cls, rounds: int | None) -> "Limits":
        """Just as many as asked for; the usual unless asked."""
        return cls() if rounds is None else cls(rounds, rounds)


def interleaved(
    turns: Mapping[str, Callable[[], float | None]],
    found: dict[str, list[float]],
    anchor: str,
    limits: Limits,
    seed: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[int]:
    """Fill `found` with one number a round for each name; yields the rounds done.

    A turn that gives None has failed, and its name leaves. The anchor, to whose times the
    others' are compared, stays as long as anybody does: the i-th number of each name is of the
    i-th round, in which the anchor has one too. What is found stays, should the caller stop.
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
                found.setdefault(name, []).append(seconds)
        yield done
        allowed = limits.seconds if done >= limits.least else np.inf
        going = [name for name in going if spent[name] < allowed]
        if not going:
            return
        if anchor in turns and anchor not in going and np.isfinite(spent[anchor]):
            going.append(anchor)
