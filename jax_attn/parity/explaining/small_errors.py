"""Find what explains an error too small to be placed: other epsilons, run in the whole reference.

No tensor inside such a port is further from the reference's than correct code may be, but a result
is. Each norm's epsilon is tried, alone and in all norms together, and the results that fail are
compared with the port's.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from jax_attn.parity.bugs.bug import Bug
from jax_attn.parity.bugs.catalogue import CATALOGUE
from jax_attn.parity.bugs.layers import epsilons
from jax_attn.parity.bugs.planting import run_change
from jax_attn.parity.explaining.align import Aligner, Order, apart
from jax_attn.parity.explaining.cause import Cause
from jax_attn.parity.explaining.region import Region, TapPair, Wrong
from jax_attn.parity.explaining.taps.jax_taps import TappedProgram
from jax_attn.parity.explaining.taps.tap import Tap
from jax_attn.parity.explaining.taps.tape import Tape

_WITH_EPSILON = {f"aten.{name}" for name, of in CATALOGUE.items() if epsilons in of}
_MOST_SITES = 64
_LEFT, _FURTHER = 0.5, 1.25
"""The largest share of an error that a cause leaves. How many times as far off the reference must
be if it is only multiplied by the number that fits best."""


class _Result(NamedTuple):
    """A result that fails: the port's tensor, the reference's, and the order of its axes."""

    ours: Tap
    theirs: Tap
    order: Order

    def off(self, numbers: np.ndarray) -> float:
        """Return the distance of the port's numbers from others in the reference's place."""
        return apart(self.ours.numbers, self.order.view.of(numbers), self.order.scale)

    @property
    def scaled(self) -> np.ndarray:
        """The reference's numbers times the factor that brings them nearest to the port's."""
        ours, theirs, weight = self.ours.numbers, self.order.numbers, self.order.scale**-2.0
        finite = np.isfinite(ours) & np.isfinite(theirs)
        ours, theirs, weight = ours[finite], theirs[finite], weight[finite]
        square = float((weight * theirs) @ theirs)
        return self.theirs.value * (float((weight * ours) @ theirs) / square if square else 1.0)


def small_errors(
    program: TappedProgram, aligner: Aligner, tape: Tape, wanted: Collection[str]
) -> Iterator[Region]:
    """Yield the result that is furthest off, with the epsilon that explains most of the error.

    It is a confirmed cause unless a factor explains the error as well. Yields nothing if half of
    the error is left with every epsilon.
    """
    results = [found for name in wanted for found in _found(program, aligner, name)]
    before = _total([result.order.distance for result in results])
    tried: list[tuple[float, int, Bug | None]] = [
        (off, site, bug)
        for site, bug, changes in (_trials(aligner, tape) if results else ())
        if (values := tape.play(changes, (), [r.theirs.index for r in results])) is not None
        and math.isfinite(off := _total([r.off(values[r.theirs.index]) for r in results]))
    ]
    left, site, bug = min(tried, key=lambda each: each[0], default=(math.inf, 0, None))
    if bug is None or not left <= _LEFT * before:
        return
    confirmed = _total([result.off(result.scaled) for result in results]) > _FURTHER * left
    cause = Cause(bug.name, aligner.taps[site], bug.says, bug.value, confirmed, 1 - left / before)
    worst = max(results, key=lambda result: result.order.distance)
    wrong = Wrong(worst.ours, worst.theirs, worst.order.numbers, worst.order.scale)
    after = TapPair(worst.ours, worst.theirs)
    yield Region((), wrong, (worst.ours,), after, causes=(cause,), tried=True)


def _found(program: TappedProgram, aligner: Aligner, name: str) -> Iterator[_Result]:
    for index in program.outputs[name]:
        ours = program.base.taps[index]
        pairs = [
            _Result(ours, aligner.taps[i], order)
            for i in aligner.results(name)
            if aligner.taps[i].value.size == ours.value.size
            for order in aligner.orders(i, ours.numbers)
        ]
        nearest = min(pairs, key=lambda pair: pair.order.distance, default=None)
        if nearest is not None and math.isfinite(nearest.order.distance):
            yield nearest


def _trials(aligner: Aligner, tape: Tape) -> Iterator[tuple[int, Bug, Mapping[int, Bug]]]:
    """Yield (site, bug, where it is planted): each epsilon in one norm, then in all together."""
    every: dict[str, dict[int, Bug]] = defaultdict(dict)
    sites = {
        tape.operator(tap.index)[0]: tap.index
        for tap in reversed(aligner.taps)
        if tap.op in _WITH_EPSILON and not tap.place.is_backward and tape.computes(tap.index)
    }
    for site in sorted(sites.values())[:_MOST_SITES]:
        call = tape.call(site)
        for bug in () if call is None else run_change(call, lambda call: tuple(epsilons(call))):
            every[bug.says][site] = bug
            yield site, bug, {site: bug}
    for changes in every.values():
        if len(changes) > 1:
            site, bug = next(iter(changes.items()))
            yield site, bug, changes


def _total(distances: Collection[float]) -> float:
    return math.sqrt(sum(distance**2 for distance in distances))
