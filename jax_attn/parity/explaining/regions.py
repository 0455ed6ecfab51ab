"""Find where a port's error originates: between the last right tensors and the first wrong one.

A tensor of the port is wrong if it leads to a wrong output and neither it nor any tensor between
them equals one of the reference's. An operation that is split, fused or reordered also leaves
tensors without a partner, but right tensors follow from them.

Each finding is tested. A wrong tensor is replaced by the reference's value: if what follows is then
right, the two are the same tensor (`exit`). Then the inputs of that tensor are replaced: if it
stays wrong, the error originates there; if it is right, one of its inputs brought the error
(`births`).
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from jax_attn.parity.bugs.views import View
from jax_attn.parity.explaining.align import Aligner, difference
from jax_attn.parity.explaining.allowance import Allowance, SpentError
from jax_attn.parity.explaining.combinations import likeliest
from jax_attn.parity.explaining.copies import computes, copied
from jax_attn.parity.explaining.region import Found, Region, Replaced, TapPair, Wrong
from jax_attn.parity.explaining.replaced_run import ReplacedRun
from jax_attn.parity.explaining.taps.jax_taps import TappedProgram
from jax_attn.parity.explaining.taps.tap import Tap, ancestors

_MOST_REGIONS = 8
_MOST_CANDIDATES, _MOST_BEFORE = 8, 2
"""Limits of the reference's tensors, the nearest first, that are tried in place of a wrong one: of
other tensors, and of those from which it is computed."""
_FOLLOWING = 32
"""The number of wrong tensors after a replaced one among which one must become right. A softmax of
which the reference shows only its result has eight."""
_MOST_TOGETHER = 16
"""The number of combinations that are tried for the inputs of one operation."""

_Same = tuple[int, int]
"""A tap of the port, and the tap of the reference that it is or should be."""


class _Exit(NamedTuple):
    """The first wrong tap whose replacement repairs what follows.

    tap: the wrong tap. theirs: the reference's tap in its place, in this order of axes. after: a
    pair that follows.
    """

    tap: int
    theirs: int
    view: View
    after: _Same


def find_regions(
    program: TappedProgram, aligner: Aligner, wanted: Collection[str], allowance: Allowance
) -> Iterator[Found]:
    """Yield every place that makes an output in `wanted` wrong, in order.

    Each region is repaired before the next is searched for, wherever its equation comes again.
    Raises SpentError if the allowance is spent, after the last place, as wide as it is known.
    """
    replaced: Replaced = {}
    for _ in range(_MOST_REGIONS):
        view = ReplacedRun(program, aligner, wanted, replaced)
        if not view.wrong:
            return
        search = _Search(program, aligner, view, wanted, allowance)
        if (found := search.exit()) is None:
            return
        whole = search.region(found.tap, found.theirs, found.after)
        try:
            repaired, again = search.repaired(found)
            narrower = tuple(search.births(found.tap, found.theirs, found.after))
        except SpentError:
            yield Found(whole, (whole,))
            raise
        whole, *parts = (replace(each, again=again) for each in (whole, *narrower))
        yield Found(whole, tuple(parts))
        replaced |= repaired


def births(
    region: Region,
    program: TappedProgram,
    aligner: Aligner,
    wanted: Collection[str],
    index: Callable[[Tap], int],
    allowance: Allowance,
) -> Iterator[Region]:
    """Yield narrower regions in which a region's error originates, among finer tensors.

    aligner: of the reference's finer tensors. index: maps a tap of the region to its index there.
    """
    view = ReplacedRun(program, aligner, wanted, region.replaced)
    search = _Search(program, aligner, view, wanted, allowance)
    wrong, after = region.first_wrong, region.after
    last = after.ours.index, index(after.theirs)
    found = search.births(wrong.ours.index, index(wrong.theirs), last)
    return (replace(part, again=region.again) for part in found)


class _Search:
    """Search for the first wrong region of one view."""

    def __init__(
        self,
        program: TappedProgram,
        aligner: Aligner,
        view: ReplacedRun,
        wanted: Collection[str],
        allowance: Allowance,
    ):
        self._allowance = allowance
        self._program, self._aligner, self._view, self._wanted = program, aligner, view, wanted
        self._wrong = set(view.wrong)

    def exit(self) -> _Exit | None:
        """Find the first wrong tap whose replacement by the reference's value repairs what follows.

        Of several values, returns the one that leaves the fewest wrong tensors. Some values are
        used only if no better one follows. One is a value with axes of the same size exchanged,
        because exchanged scores would make a softmax over the queries right. Another is a tensor
        from which the wrong tap is computed, if wrong tensors remain after it, because the terms of
        a square would make a mean right.
        """
        waiting, left = None, _FOLLOWING
        for index in self._view.wrong:
            before = self._before(index)
            right = []
            for n, (theirs, value, view) in enumerate(self._candidates(index)):
                if after := self._right_after(index, theirs, value):
                    run = self._run({index: value})
                    leaves_wrong = theirs in before and not run.changed.isdisjoint(run.wrong)
                    waits = leaves_wrong or not view.is_plain
                    found = _Exit(index, theirs, view, after)
                    right.append((len(run.wrong), n, waits, found))
            if right:
                _, _, waits, found = min(right, key=lambda each: each[:2])
                if not waits:
                    return found
                waiting = waiting or found
            if waiting and not (left := left - 1):
                break
        return waiting

    def repaired(self, found: _Exit) -> tuple[Replaced, tuple[TapPair, ...]]:
        """Return the repair of a wrong tap, and of its equation elsewhere if it is wrong there too.

        A layer or a step of a scan that comes again errs again. Also returns those other places.
        """
        index, theirs, view, _ = found
        one = {index: view.of(self._aligner.taps[theirs].numbers)}
        pairs = self._alike(index, theirs)
        every = one | {i: view.of(self._aligner.taps[j].numbers) for i, j in pairs}
        if not pairs or len(self._run(every).wrong) >= len(self._run(one).wrong):
            return one, ()
        again = []
        for i, j in pairs:
            tap = self._run({k: value for k, value in every.items() if k != i}).taps[i]
            if j not in self._aligner.partners(tap):
                again.append(TapPair(tap, self._aligner.taps[j]))
        return every, tuple(again)

    def _alike(self, index: int, theirs: int) -> list[_Same]:
        """Pair the other taps of two equations, in order; none if the counts do not fit."""
        ours, like = self._program.base.of_equation(index), self._aligner.of_line(theirs)
        each, rest = divmod(len(like), len(ours))
        at, place = ours.index(index), like.index(theirs)
        if rest or not each or place // each != at:
            return []
        pairs = zip(ours, like[place % each :: each], strict=True)
        return [(i, j) for i, j in pairs if i > index]

    def births(self, index: int, theirs: int, after: _Same) -> Iterator[Region]:
        """Yield the regions in which the error of a wrong tap originates.

        theirs: the reference's tap that it should be. after: a pair that follows from it.
        """
        index = self._source(index)
        within = ancestors(self._aligner.taps, [theirs])
        for inputs in self._cuts(index):
            choices = [list(self._candidates(i, within - {theirs})) for i in inputs]
            for chosen in islice(likeliest(choices), _MOST_TOGETHER):
                given = dict(zip(inputs, (value for _, value, _ in chosen), strict=True))
                view = self._run(given)
                if theirs in view.same(index):
                    for i, (their_input, *_) in zip(inputs, chosen, strict=True):
                        yield from self.births(i, their_input, (index, theirs))
                    return
        yield self.region(index, theirs, after)

    def _source(self, index: int) -> int:
        """Return the first wrong tap of which a tap is a copy, with all its numbers and no more."""
        taps = self._view.taps
        source = copied(taps, index)
        if source in self._wrong and taps[source].value.size == taps[index].value.size:
            return self._source(source)
        return index

    def _cuts(self, index: int) -> Iterator[tuple[int, ...]]:
        """Yield sets of wrong taps that bring all of a tap's error: its inputs, then theirs."""
        cut = self._wrong_inputs([index])
        while cut:
            yield cut
            cut, before = self._wrong_inputs(cut), cut
            if cut == before:
                return

    def _wrong_inputs(self, of: Iterable[int]) -> tuple[int, ...]:
        found: set[int] = set()
        left = [parent for i in of for parent in self._view.graph[i].parents]
        seen: set[int] = set()
        while left:
            i = left.pop()
            if i in seen:
                continue
            seen.add(i)
            if i in self._wrong:
                found.add(i)
            elif not self._view.taps[i].tells:
                left += self._view.graph[i].parents
        return tuple(sorted(found))

    def _candidates(
        self, index: int, among: Iterable[int] | None = None
    ) -> Iterator[tuple[int, np.ndarray, View]]:
        """Yield the reference's taps that a wrong tap may be, in its shape, the nearest first.

        Also yields the order of axes. Only the first of a tap and its copies is used. Right tensors
        from which the wrong tap is computed have a limit: they are rarely what should be here.
        """
        numbers, read = self._view.taps[index].numbers, self._read(index)
        before, found = self._before(index), []
        following = self._aligner.following(read)
        if among is None:
            every = range(len(self._aligner.taps))
            among = self._view.results(index) if index in self._view.outputs else every
        for i in among:
            tap = self._aligner.taps[i]
            tells = tap.tells or (index in self._view.outputs and numbers.size == 1)  # a loss
            fits = tells and not tap.is_leaf and tap.value.size == numbers.size
            if not fits:
                continue
            if read and not tap.is_step and i not in following:
                continue
            for n, order in enumerate(self._aligner.orders(i, numbers)):
                found.append((difference(order.numbers, numbers), i, n, order))
        found.sort(key=lambda each: each[:3])
        seen: dict[bytes, set[int]] = defaultdict(set)
        left = {False: _MOST_CANDIDATES, True: _MOST_BEFORE}
        for _, theirs, _, order in found:
            same = seen[order.numbers.tobytes()]
            is_copy = same and same & ancestors(self._aligner.taps, [theirs])
            if left[theirs in before] and not is_copy:
                same.add(theirs)
                left[theirs in before] -= 1
                yield theirs, order.numbers, order.view

    def _equations(self, index: int) -> set[int]:
        """Return a wrong tap and all wrong taps from which it is computed, back to right ones."""
        found: set[int] = set()
        left = [index]
        while left:
            i = left.pop()
            if i not in found:
                found.add(i)
                left += [p for p in self._view.graph[i].parents if not self._known(p)]
        return {index} | found & self._wrong

    def _before(self, index: int) -> set[int]:
        """Return the reference's tensors from which a wrong tap is computed."""
        return {i for p in ancestors(self._view.graph, [index]) for i in self._known(p)}

    def _known(self, index: int) -> list[int]:
        return [] if index in self._wrong else self._view.same(index)

    def _read(self, index: int) -> set[int]:
        """Return the reference's tensors, without leaves, that a wrong tap's equations read."""
        taps, theirs = self._view.taps, self._aligner.taps
        inputs = {p for i in self._equations(index) for p in taps[i].parents} - self._wrong
        return {p for i in inputs for p in self._view.same(i) if not theirs[p].is_leaf}

    def _right_after(self, index: int, theirs: int, value: np.ndarray) -> _Same | None:
        """Return a pair that follows and is right once a tap has the reference's value, or None.

        Both must also be computed from the same other tensors, because the same operations follow
        in another layer.
        """
        view = self._run({index: value})
        if index in view.outputs:
            return (index, theirs) if theirs in view.results(index) else None
        following = sorted((view.changed & self._wrong) - {index})[:_FOLLOWING]
        # If both read one tensor in common, the port may read a wrong tensor in place of another.
        may_lack = set(view.graph[index].parents) if self._read_alike(index, theirs) else set()
        for i in following:
            same = view.same(i)
            if theirs in same:
                if not computes(view.taps, i):
                    continue  # it only copies the numbers, as the reference may, too
                return None  # the value maps to itself, as a softmax does when it is normalized
            beside = self._beside(view, i)
            for partner in same:
                of_partner = ancestors(self._aligner.taps, [partner])
                lacks = {b for b in beside if of_partner.isdisjoint(view.same(b))}
                if theirs in of_partner and lacks < beside and lacks <= may_lack:
                    return i, partner
        return None

    def _read_alike(self, index: int, theirs: int) -> bool:
        """Return whether two taps read one tensor directly; scores of other layers do not."""
        read = {p for i in self._view.taps[index].parents for p in self._known(i)}
        return not read.isdisjoint(self._aligner.taps[theirs].parents)

    def _beside(self, view: ReplacedRun, index: int) -> set[int]:
        """Return the right, unchanged tensors from which a changed tap is computed."""
        changed = ancestors(view.graph, [index]) & view.changed
        read = {p for i in changed for p in view.graph[i].parents} - view.changed
        return {p for p in read if view.same(p)}

    def _run(self, more: Replaced) -> ReplacedRun:
        self._allowance.spend()
        replaced = {**self._view.replaced, **more}
        return ReplacedRun(self._program, self._aligner, self._wanted, replaced, self._view)

    def region(self, index: int, theirs: int, after: _Same) -> Region:
        """Return the region that ends at a wrong tap; after: a pair that follows from it."""
        taps = self._view.taps
        equations = self._equations(index)
        inputs = {p for i in equations for p in taps[i].parents} - self._wrong
        inputs.add(index)  # it is right itself if the port leaves out the next step
        # A module that is called twice has each tensor twice: take the one that led here.
        led_here = ancestors(self._aligner.taps, [theirs, after[1]])
        pairs = (
            TapPair(taps[i], self._aligner.taps[min(partners, key=lambda p: p not in led_here)])
            for i in sorted(inputs)
            if (partners := self._view.same(i))
        )
        seen = self._aligner.orders(theirs, taps[index].numbers)
        nearest = min(seen, key=lambda order: difference(order.numbers, taps[index].numbers))
        wrong = Wrong(taps[index], self._aligner.taps[theirs], nearest.numbers, nearest.scale)
        computed = [i for i in sorted(equations) if i == index or computes(taps, i)]
        next_pair = TapPair(taps[after[0]], self._aligner.taps[after[1]])
        replaced = dict(self._view.replaced)
        return Region(
            tuple(pairs), wrong, tuple(taps[i] for i in computed), next_pair, replaced=replaced
        )
