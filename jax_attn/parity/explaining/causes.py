"""Find what explains a wrong region: run the reference with each common mistake of ports.

A cause is confirmed if the reference with this change computes the port's own numbers in the
region's wrong tensor, within rounding. Nothing is claimed that was not run.
"""

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

import numpy as np
import torch

from jax_attn.parity.bugs.bug import PRODUCTS, Bug, OperatorCall
from jax_attn.parity.bugs.general import scales
from jax_attn.parity.bugs.heads import fitted_base, fitted_order
from jax_attn.parity.bugs.masks import fitted_mask
from jax_attn.parity.bugs.planting import run_planted
from jax_attn.parity.explaining.align import APART, Aligner, Order
from jax_attn.parity.explaining.cause import Cause
from jax_attn.parity.explaining.planted_by_tap import PlantedByTap, Reached, Scout
from jax_attn.parity.explaining.region import Region
from jax_attn.parity.explaining.taps.tap import Tap, ancestors
from jax_attn.parity.run.inputs_and_runs import Arrays
from jax_attn.parity.run.reference import Reference

_MOST_SITES = 48
"""The number of operations before a wrong tensor, the last first, whose bugs are tried."""
_PART = 0.5
"""The smallest share of an error for which a bug that explains only a part is reported."""


def find_causes(
    reference: Reference, cotangents: Arrays, aligner: Aligner, region: Region, until: float
) -> tuple[Cause, ...]:
    """Return the confirmed causes nearest the error, else the best one that explains half of it.

    until: when to stop trying, in seconds of `time.monotonic`.
    """
    trials = _Trials(reference, cotangents, aligner, region)
    found: list[_Tried] = []
    for kind in (trials.catalogued, trials.wirings):
        for tried in kind():
            found.append(tried)
            if time.monotonic() > until:
                break
        if any(tried.cause.confirmed for tried in found):
            break
    strongest = max((tried.strength for tried in found), default=0)
    confirmed: dict[str, Cause] = {}
    for cause, strength in found:
        if cause.confirmed and strength == strongest:
            nearest = next(iter(confirmed.values()), cause)  # ignore equal causes further away
            if cause.site is nearest.site:
                confirmed.setdefault(cause.name, cause)
    wrong = region.first_wrong.theirs.index
    partly = [t.cause for t in found if t.cause.explained >= _PART and t.cause.site.index <= wrong]
    return tuple(confirmed.values()) or tuple(
        sorted(partly, key=lambda cause: -cause.explained)[:1]
    )


class _Tried(NamedTuple):
    """A cause that was run, with its strength, which ranks confirmed causes.

    strength: 2 if the changed reference computes the port's first wrong tensor as it is, 1 with
    axes of the same size exchanged, 0 if only the tensor after it, as a softmax drops a constant.
    """

    cause: Cause
    strength: int


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
)
"""(name of a step, operations by which it is recognized)."""


class _Trials:
    def __init__(self, reference: Reference, cotangents: Arrays, aligner: Aligner, region: Region):
        self._reference, self._cotangents = reference, cotangents
        self._aligner, self._region = aligner, region
        self._targets = {
            pair.theirs.index: pair.ours for pair in (region.first_wrong, region.after)
        }
        self._parameters = {
            name: p.detach().double() for name, p in reference.module.named_parameters()
        }
        self._known: dict[int, set[int]] = {}
        self._before = _nearest(self._orders(aligner.taps))

    def catalogued(self) -> Iterator[_Tried]:
        """Try every bug at each single site, then each bug at all its sites together."""
        by_name: dict[str, dict[int, Bug]] = defaultdict(dict)
        for site in self._sites:
            for bug in (*self._fitted(site), *self._scout.bugs.get(site, ())):
                if bug.value is None:
                    by_name[bug.name].setdefault(site, bug)
                yield self._tried(site, bug, {site: bug})
            for bug in self._scout.skips.get(site, ()):
                yield self._tried(site, bug, {site: bug})
        for bugs in by_name.values():
            if len(bugs) > 1:
                site, bug = next(iter(bugs.items()))
                yield self._tried(site, bug, bugs)

    def wirings(self) -> Iterator[_Tried]:
        """Try another tensor in place of each one that the reference reads."""
        yield from self._swaps()
        for site in self._sites:
            for bug in self._scout.wirings.get(site, ()):
                yield self._tried(site, bug, {site: bug})

    @cached_property
    def _scout(self) -> Scout:
        scout = Scout()
        scout.look(self._sites, self._others)
        self._run(scout, {}, {})
        return scout

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

    def _swaps(self) -> Iterator[_Tried]:
        """Try to exchange each pair of tensors that the port reads."""
        matched = [pair.theirs for pair in self._region.last_matched if not pair.theirs.is_leaf]
        for a, b in combinations(matched, 2):
            if a.shape == b.shape:
                says = f"the results of {a} and {b} exchanged"
                bug = Bug("packed order (exchanged)", says, OperatorCall.result)
                yield self._tried(a.index, bug, {}, {a.index: b, b.index: a})

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
            yield from scales(
                wrong.theirs.op,
                float(ours @ expected) / square,
                wrong.theirs.place.is_backward,
                sizes,
            )

    def _tried(
        self,
        site: int,
        bug: Bug,
        changes: Mapping[int, Bug],
        held: Mapping[int, Tap] | None = None,
    ) -> _Tried:
        mode = PlantedByTap()
        is_run = self._run(mode, changes, held or {})
        orders = self._orders(mode.taps, bug.unit) if is_run else None
        distances = _nearest(orders) if orders else self._before
        shares = (
            1 - d / before for d, before in zip(distances, self._before, strict=True) if before
        )
        cause = Cause(
            bug.name,
            self._aligner.taps[site],
            bug.says,
            bug.value,
            min(distances) <= APART,
            float(np.clip(np.nan_to_num(max(shares, default=0.0)), 0.0, 1.0)),
        )
        given = {is_plain for d, is_plain in orders[0] if d <= APART} if orders else set()
        return _Tried(cause, 2 if True in given else len(given))

    def _run(self, mode: PlantedByTap, changes: Mapping[int, Bug], held: Mapping[int, Tap]) -> bool:
        """Run up to the wrong tensors; return whether the same operations reached them."""
        mode.begin(self._parameters, max(self._targets), changes, {**self._matched, **held})
        with np.errstate(all="ignore"), contextlib.suppress(Reached):
            if run_planted(self._reference, mode, self._cotangents) is None:
                return False
        return len(mode.taps) > max(self._targets) and all(
            mode.taps[i].op == self._aligner.taps[i].op
            and mode.taps[i].value.size == self._aligner.taps[i].value.size
            for i in self._targets
        )

    @cached_property
    def _matched(self) -> dict[int, Tap]:
        """The tensors that are right on both sides, except the targets themselves."""
        pairs = self._region.last_matched
        return {p.theirs.index: p.theirs for p in pairs if p.theirs.index not in self._targets}

    def _orders(self, taps: Sequence[Tap], unit: float = 0.0) -> list[list[tuple[float, bool]]]:
        """Return the distance of each wrong tensor from the reference's, in units of rounding.

        For each order of its axes there is the distance, and whether that order is plain.

        unit: as in `Bug`.
        """
        return [
            [
                (_nearly(o, ours.numbers, unit) if is_rounded else o.distance, o.is_plain)
                for o in self._aligner.orders(i, ours.numbers, taps[i].numbers)
            ]
            for i, ours in self._targets.items()
            for is_rounded in [
                unit and not np.array_equal(taps[i].value, self._aligner.taps[i].value)
            ]
        ]


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
