"""Run a part of a JAX program again: only what follows from replaced tensors, and only if read."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, overload

import jax.numpy as jnp
import numpy as np

from jax_attn.parity.explaining.taps.jax_taps import JaxRun, wide
from jax_attn.parity.explaining.taps.tap import Tap


class JaxReplay(Sequence[Tap]):
    """The taps of a run, as they are if some are replaced; each is computed when it is read.

    A branch that the run took is taken again.
    """

    def __init__(
        self, run: JaxRun, replaced: Mapping[int, np.ndarray], before: "JaxReplay | None" = None
    ):
        """replaced: tap -> the value with which the run continues in its place. before: the taps
        with fewer replaced; what follows from none of the others is taken from it."""
        self._run, self._before = run, before
        known: Mapping[int, np.ndarray] = {} if before is None else before.replaced
        self.replaced: dict[int, np.ndarray] = {**known, **replaced}
        self._new = {i: a for i, a in replaced.items() if i not in known}
        self._values: dict[int, Any] = {}
        self._taps: dict[int, Tap] = {}

    def __len__(self) -> int:
        return len(self._run.taps)

    @overload
    def __getitem__(self, index: int) -> Tap: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tap]: ...
    def __getitem__(self, index: int | slice) -> Tap | list[Tap]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        slot = self._run.slots[index]
        if not self._changes(slot):
            return self._run.taps[index] if self._before is None else self._before[index]
        if index not in self._taps:
            tap, numbers = self._run.taps[index], wide(self.value(slot))
            self._taps[index] = Tap(index, tap.op, tap.place, numbers, tap.parents)
        return self._taps[index]

    def __iter__(self) -> Iterator[Tap]:
        return (self[i] for i in range(len(self)))

    @cached_property
    def _held(self) -> dict[int, Any]:
        """Slot -> the value that is given in its place."""
        slots = {self._run.slots[index]: array for index, array in self._new.items()}
        return {s: jnp.asarray(a, self._run.values[s].dtype) for s, a in slots.items()}

    @cached_property
    def _makers(self) -> dict[int, int]:
        """Slot whose value changes -> the step that computes it."""
        held = self._held if self._before is None else {**self._held, **self._before.held}
        makers: dict[int, int] = {}
        for n, step in enumerate(self._run.steps):
            if any(slot in makers or slot in self._held for slot in step.given):
                makers |= {slot: n for slot in step.results if slot not in held}
        return makers

    @property
    def held(self) -> dict[int, Any]:
        """The values that are given here and before, by slot."""
        return self._held if self._before is None else {**self._before.held, **self._held}

    def _changes(self, slot: int) -> bool:
        return slot in self._held or slot in self._makers

    def value(self, slot: int) -> Any:
        """Return the value of a slot; one that changes is computed from others, which may too."""
        left = [slot]
        while left:
            if self._is_known(at := left[-1]):
                left.pop()
                continue
            step = self._run.steps[self._makers[at]]
            if missing := [other for other in step.given if not self._is_known(other)]:
                left += missing
                continue
            results = step.compute(*map(self._read, step.given))
            for each, value in zip(step.results, results, strict=True):
                if each in self._makers:
                    self._values[each] = value
        return self._read(slot)

    def _is_known(self, slot: int) -> bool:
        return slot not in self._makers or slot in self._values

    def _read(self, slot: int) -> Any:
        if slot in self._held:
            return self._held[slot]
        if slot in self._values:
            return self._values[slot]
        return self._run.values[slot] if self._before is None else self._before.value(slot)
