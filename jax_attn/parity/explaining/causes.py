"""Find what explains a wrong region: run the reference with each common mistake of ports.

A cause is confirmed if the reference with this change computes the port's own numbers in the
region's wrong tensor, within rounding. Nothing is claimed that was not run.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import combinations, islice
from typing import Any, NamedTuple

import numpy as np
import torch

from jax_attn.parity.bugs.bug import PRODUCTS, Bug, OperatorCall
from jax_attn.parity.bugs.catalogue import bugs_of
from jax_attn.parity.bugs.cells import GATES, gate_orders
from jax_attn.parity.bugs.general import is_slight, nearest, scales
from jax_attn.parity.bugs.heads import fitted_base, fitted_order
from jax_attn.parity.bugs.masks import fitted_mask
from jax_attn.parity.bugs.planting import run_change
from jax_attn.parity.explaining.align import APART, Aligner, Order
from jax_attn.parity.explaining.cause import Cause
from jax_attn.parity.explaining.region import Region
from jax_attn.parity.explaining.taps.tap import Tap, ancestors, numbers_of
from jax_attn.parity.explaining.taps.tape import Tape
from jax_attn.parity.explaining.wirings import skips, wirings

MOST_TRIALS = 2000
"""The number of causes that are tried for one region."""
_OF_TORCHS_CELLS, _OF_GATES = "aten.unsafe_split", ("aten.sigmoid", "aten.tanh")
_CELL = 6
"""The number of operations between the gates' split and any tensor of a recurrent cell."""
_MOST_SITES = 48
"""The number of operations before a wrong tensor, the last first, whose bugs are tried."""
_WHOLE = 1e-6
"""Tolerance of a factor of one number that is a whole number."""
_PART = 0.5
"""The smallest share of an error for which a bug that explains only a part is reported."""


def find_causes(
    tape: Tape, aligner: Aligner, region: Region, tried: Callable[[], None]
) -> tuple[Cause, ...]:
    """Return the confirmed causes nearest the error, else the best one that explains half of it.

    At most `MOST_TRIALS` are tried, the likeliest first: those at the operations next to the error,
    and of wirings only if nothing else explains it. tried: called after each of them.
    """
    trials = _Trials(tape, aligner, region)
    found: list[_Tried] = []
    for kind in (trials.catalogued, trials.wirings):
        for trial in islice(kind(), MOST_TRIALS - len(found)):
            certain = [each for each in found if each.strength == _CERTAIN]
            if certain and trial.site != certain[0].cause.site.index:
                break  # no cause further away is reported
            found.append(trials.tried(trial))
            tried()
        if any(each.cause.confirmed for each in found):
            break
    strongest = max((each.strength for each in found), default=0)
    confirmed: dict[str, Cause] = {}
    for cause, strength in found:
        if cause.confirmed and strength == strongest:
            nearest = next(iter(confirmed.values()), cause)  # ignore equal causes further away
            if cause.site is nearest.site:
                alike = confirmed.get(cause.name, cause)  # such as another epsilon
                confirmed[cause.name] = max(alike, cause, key=lambda each: each.explained)
    wrong = region.first_wrong.theirs.index
    partly = [t.cause for t in found if t.cause.explained >= _PART and t.cause.site.index <= wrong]
    return tuple(confirmed.values()) or tuple(
        sorted(partly, key=lambda cause: -cause.explained)[:1]
    )


class _Trial(NamedTuple):
    """A bug to try. site: the tap at which it is reported. changes: where it is planted."""

    site: int
    bug: Bug
    changes: Mapping[int, Bug]


class _Tried(NamedTuple):
    """A cause that was run, with its strength, which ranks confirmed causes.

    strength: 2 if the changed reference computes the port's first wrong tensor as it is, 1 with
    axes of the same size exchanged or by a factor near 1, 0 if only the tensor after it, as a
    softmax drops a constant.
    """

    cause: Cause
    strength: int


_CERTAIN, _LIKELY = 2, 1
_FEW = 0.05
"""The largest share of a tensor's numbers that may round to the other neighbour."""


_STEPS = (
    ("rotary", {"cat", "neg"}),
    ("softmax", {"_softmax"}),
    ("norm", {"native_layer_norm"}),
    ("norm", {"rsqrt"}),
    ("activation", {"gelu"}),
    ("activation", {"silu"}),
    ("activation", {"relu"}),
    ("activation", {"tanh"}),
    ("activation", {"sigmoid"}),
    ("activation", {"erf"}),
)
"""(name of a step, operations by which it is recognized)."""


class _Trials:
    def __init__(self, tape: Tape, aligner: Aligner, region: Region):
        self._tape, self._aligner, self._region = tape, aligner, region
        self._targets = {
            pair.theirs.index: pair.ours for pair in (region.first_wrong, region.after)
        }
        self._known: dict[int, set[int]] = {}
        self._values = {i: aligner.taps[i].value for i in self._targets}
        self._before = _nearest(self._orders(self._values))

    def catalogued(self) -> Iterator[_Trial]:
        """Yield every bug at each single site, then each bug at all its sites together."""
        by_name: dict[str, dict[int, Bug]] = defaultdict(dict)
        tried: set[int] = set()  # operators of which another result is a site
        yield from self._gate_orders()
        for site in self._sites:
            call = self._tape.call(site)
            if call is not None and (n := self._tape.operator(site)[0]) in tried:
                continue
            tried |= set() if call is None else {n}
            bugs = () if call is None else run_change(call, lambda call: tuple(bugs_of(call)))
            for bug in (*self._fitted(site), *bugs):
                if bug.value is None:
                    by_name[bug.name].setdefault(site, bug)
                yield _Trial(site, bug, {site: bug})
            if call is not None:
                others = self._others(site)
                for bug in run_change(call, partial(_listed, skips, others)):
                    yield _Trial(site, bug, {site: bug})
        for everywhere in by_name.values():
            if len(everywhere) > 1:
                site, bug = next(iter(everywhere.items()))
                yield _Trial(site, bug, everywhere)

    def wirings(self) -> Iterator[_Trial]:
        """Yield another tensor in place of each one that the reference reads."""
        yield from self._swaps()
        for site in self._sites:
            others = [tap for _, tap in self._others(site)]
            if (call := self._tape.call(site)) is not None:
                for bug in run_change(call, partial(_listed, wirings, others)):
                    yield _Trial(site, bug, {site: bug})

    @cached_property
    def _sites(self) -> list[int]:
        """The reference's operations between what matched and the wrong tensor, the last first."""
        taps, wrong = self._aligner.taps, self._region.first_wrong.theirs
        found: set[int] = set()
        left = list(self._targets)
        while left:
            index = left.pop()
            of_pass = taps[index].place.is_backward == wrong.place.is_backward
            stops = index in self._matched
            if index in found or stops or taps[index].is_leaf or not of_pass:
                continue
            found.add(index)
            left += taps[index].parents
        return sorted(found, reverse=True)[:_MOST_SITES]

    def _others(self, site: int) -> list[tuple[str | None, Tap]]:
        """Return the right tensors that the port reads, each with the step between it and a site.

        The step is None if it has no name.
        """
        taps = self._aligner.taps
        before = ancestors(taps, [site])
        found = []
        for pair in self._region.last_matched:
            of = pair.theirs.index
            between = (i for i in before - {of} if of in self._ancestors(i))
            ops = {taps[i].op.removeprefix("aten.") for i in between}
            steps = (step for step, shown in _STEPS if shown <= ops)
            step = None if ops & PRODUCTS else next(steps, None)  # a product ends a step
            found.append((step, pair.theirs))
        return found

    def _ancestors(self, index: int) -> set[int]:
        if index not in self._known:
            self._known[index] = ancestors(self._aligner.taps, [index])
        return self._known[index]

    def _gate_orders(self) -> Iterator[_Trial]:
        """Yield other orders of the parts into which a recurrent cell's gates are split."""
        sites = self._gates()
        calls = {i: self._tape.call(i) for i in sites}
        orders = {i: gate_orders(call) for i, call in calls.items() if call is not None}
        for bugs in zip(*orders.values(), strict=False):
            yield _Trial(sites[0], bugs[0], dict(zip(sites, bugs, strict=True)))
        for site in sites if len(sites) > 1 else ():
            for bug in orders[site]:
                yield _Trial(site, bug, {site: bug})

    def _gates(self) -> list[int]:
        """Return a part of each split that the wrong tensors and right ones near them read."""
        taps, gates = self._aligner.taps, {f"aten.{name}" for name in GATES}
        found: dict[int, int] = {}
        pairs = (*self._region.last_matched, self._region.first_wrong)
        level = {pair.theirs.index for pair in pairs}
        for _ in range(_CELL):
            for i in sorted(level):
                if taps[i].op in gates and self._tape.computes(i):
                    found.setdefault(self._tape.operator(i)[0], i)
            level = {p for i in level if taps[i].op not in gates for p in taps[i].parents}
        return [i for of, i in found.items() if self._is_cell(of, taps[i].op)]

    def _is_cell(self, operator: int, op: str) -> bool:
        """Return whether an operator splits a cell's gates: it is torch's, or they are bounded."""
        taps, tape = self._aligner.taps, self._tape
        parts = {t.index for t in taps if tape.computes(t.index)}
        parts = {i for i in parts if tape.operator(i)[0] == operator}
        readers = {tap.op for tap in taps if not parts.isdisjoint(tap.parents)}
        return op == _OF_TORCHS_CELLS or not readers.isdisjoint(_OF_GATES)

    def _swaps(self) -> Iterator[_Trial]:
        """Exchange each pair of tensors that the port reads."""
        matched = [pair.theirs for pair in self._region.last_matched if not pair.theirs.is_leaf]
        for a, b in combinations(matched, 2):
            both = a.index, b.index
            if a.shape == b.shape and self._tape.computes(*both):
                says = f"the results of {a} and {b} exchanged"
                of_a, of_b = (
                    Bug("packed order (exchanged)", says, partial(_in_place, k, other))
                    for (_, k), other in zip(map(self._tape.operator, both), (b, a), strict=True)
                )
                if self._tape.made[a.index] == self._tape.made[b.index]:
                    k, m = (self._tape.operator(tap)[1] for tap in both)
                    one = Bug(of_a.name, says, partial(_exchanged, k, m))
                    yield _Trial(a.index, one, {a.index: one})
                else:
                    yield _Trial(a.index, of_a, {a.index: of_a, b.index: of_b})

    def _fitted(self, site: int) -> Iterator[Bug]:
        """Yield bugs fitted to the port's own numbers: a base, an order, a mask, a scale."""
        wrong = self._region.first_wrong
        if site != wrong.theirs.index:
            return
        yield from fitted_base(*map(torch.from_numpy, (wrong.ours.numbers, wrong.expected)))
        sizes = {n for tap in self._aligner.taps for n in tap.shape}
        yield from fitted_order(wrong.ours.numbers, wrong.theirs.numbers, sizes)
        yield from fitted_mask(wrong.ours.numbers, wrong.expected, wrong.theirs.shape)
        ours, expected = wrong.ours.numbers, wrong.expected
        finite = np.isfinite(ours) & np.isfinite(expected)
        ours, expected = ours[finite], expected[finite]
        if (square := float(expected @ expected)) > 0:
            factor = float(ours @ expected) / square
            # One number, such as a loss, is a multiple of any other.
            is_whole = math.isclose(factor, round(factor), rel_tol=_WHOLE, abs_tol=_WHOLE)
            if expected.size > 1 or is_whole or nearest(factor, sizes):
                is_backward = wrong.theirs.place.is_backward
                yield from scales(wrong.theirs.op, factor, is_backward, sizes)

    def tried(self, trial: _Trial) -> _Tried:
        """Run the reference with a bug; return how near it comes to the port."""
        bug, held = trial.bug, self._matched
        values = self._tape.play(trial.changes, held, [*self._targets])
        fit = values and all(values[i].size == self._values[i].size for i in self._targets)
        orders = self._orders(values, bug.unit) if values and fit else None
        distances = _nearest(orders) if orders else self._before
        shares = (
            1 - d / before for d, before in zip(distances, self._before, strict=True) if before
        )
        cause = Cause(
            bug.name,
            self._aligner.taps[trial.site],
            bug.says,
            bug.value,
            min(distances) <= APART,
            float(np.clip(np.nan_to_num(max(shares, default=0.0)), 0.0, 1.0)),
        )
        given = {is_plain for d, is_plain in orders[0] if d <= APART} if orders else set()
        best = _LIKELY if is_slight(bug) else _CERTAIN
        return _Tried(cause, best if True in given else len(given))

    @cached_property
    def _matched(self) -> list[int]:
        """The tensors that are right on both sides, except the targets themselves."""
        matched = (pair.theirs.index for pair in self._region.last_matched)
        return [i for i in matched if i not in self._targets]

    def _orders(
        self, values: Mapping[int, np.ndarray], unit: float = 0.0
    ) -> list[list[tuple[float, bool]]]:
        """Return the distance of each wrong tensor from the reference's, in units of rounding.

        For each order of its axes there is the distance, and whether that order is plain.

        unit: as in `Bug`.
        """
        return [
            [
                (_nearly(o, ours.numbers, unit) if is_rounded else o.distance, o.is_plain)
                for o in self._aligner.orders(i, ours.numbers, numbers_of(values[i]))
            ]
            for i, ours in self._targets.items()
            for is_rounded in [unit and not np.array_equal(values[i], self._values[i])]
        ]


def _listed(
    of: Callable[[OperatorCall, Any], Iterator[Bug]], others: Any, call: OperatorCall
) -> tuple[Bug, ...]:
    return tuple(of(call, others))


def _in_place(place: int, other: Tap, call: OperatorCall) -> Any:
    """Return a call's results with another tensor at a place."""
    right = call.result()
    results = [right] if isinstance(right, torch.Tensor) else list(right)
    results[place] = torch.from_numpy(other.value).reshape(results[place].shape)
    return results[0] if isinstance(right, torch.Tensor) else tuple(results)


def _exchanged(a: int, b: int, call: OperatorCall) -> tuple[torch.Tensor, ...]:
    results = list(call.result())
    results[a], results[b] = results[b], results[a]
    return tuple(results)


def _nearest(orders: Sequence[Sequence[tuple[float, bool]]]) -> list[float]:
    return [min((distance for distance, _ in each), default=math.inf) for each in orders]


def _nearly(order: Order, ours: np.ndarray, unit: float) -> float:
    """Return the distance without a few numbers, if these are rounded to an adjacent number."""
    with np.errstate(invalid="ignore"):
        off = np.where(ours == order.numbers, 0.0, np.abs(ours - order.numbers))
    is_far = ~(off <= APART * order.scale)
    step = np.where(np.isfinite(order.numbers), unit * np.abs(order.numbers), 0.0)
    to_the_next = off <= step + APART * order.scale
    if is_far.mean() > _FEW or not to_the_next.all():
        return order.distance
    return math.sqrt(np.mean(np.square((off / order.scale)[~is_far])))
