"""Run a port with some of its tensors replaced, and compare it with the reference's tensors."""

from collections.abc import Collection, Mapping
from functools import cached_property

import numpy as np

from jax_attn.parity.explaining.align import Aligner
from jax_attn.parity.explaining.taps.jax_replay import JaxReplay
from jax_attn.parity.explaining.taps.jax_taps import TappedProgram


class ReplacedRun:
    """One run of the port, with some tensors replaced, compared with the reference's tensors.

    before: a run with fewer replaced tensors; taps that the others do not change are known from it.

    Attributes:
      taps: the tensors of the run. graph: those of the run without replaced tensors, whose indices
        and parents are the same.
    """

    def __init__(
        self,
        program: TappedProgram,
        aligner: Aligner,
        wanted: Collection[str],
        replaced: Mapping[int, np.ndarray],
        before: "ReplacedRun | None" = None,
    ):
        self.graph = program.base.taps
        of_before: JaxReplay | None = None if before is None else before.taps
        self.taps: JaxReplay = JaxReplay(program.base, replaced, of_before)
        self.outputs = {i: name for name in wanted for i in program.outputs[name]}
        self.replaced = replaced
        self._aligner, self._before = aligner, before
        self._same: dict[int, list[int]] = {}

    @cached_property
    def changed(self) -> set[int]:
        """The taps that follow from tensors that are replaced here and not before."""
        changed = set(self.replaced) - set(self._before.replaced if self._before else ())
        for tap in self.graph:
            if changed.intersection(tap.parents):
                changed.add(tap.index)
        return changed

    def same(self, index: int) -> list[int]:
        """Return the reference's taps that are the same tensor as a tap."""
        if self._before is not None and index not in self.changed:
            return self._before.same(index)
        if index not in self._same:
            self._same[index] = self._aligner.partners(self.taps[index])
        return self._same[index]

    @cached_property
    def wrong(self) -> list[int]:
        """The taps that make an output wrong, in order; no tap between them and it is right."""
        wrong: set[int] = set()
        left = list(self.outputs)
        while left:
            index = left.pop()
            if index not in wrong and not self._is_right(index):
                wrong.add(index)
                left += self.graph[index].parents
        told = {
            i
            for i in wrong
            if self.taps[i].tells or (self.taps[i].has_nan and self.graph[i].parents)
        }
        return sorted(told | wrong.intersection(self.outputs))

    def _is_right(self, index: int) -> bool:
        """Return whether a tap is one of the reference's; an output must be that of its name."""
        if index not in self.outputs:
            return bool(self.same(index))
        same, results = self.same(index), self.results(index)
        tap = self.taps[index]
        if tap.value.size == 1:  # a loss, which is only compared with the output of its name
            return any(self._aligner.is_near(i, tap.numbers) for i in results)
        return bool(results.intersection(same))

    def results(self, index: int) -> set[int]:
        """Return the reference's taps that an output may be."""
        return self._aligner.results(self.outputs[index])
