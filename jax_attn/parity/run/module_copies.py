"""Copies of a torch module for runs: what a call changes in one, no other sees."""

import copy
from functools import cached_property

import torch


class ModuleCopies:
    """Copies of `module`, as it is and in float64.

    A reference is run some thirty times in float64. Of these copies each has its own buffers and
    attributes, which a call may change; parameters, the larger part, are copied once for all.
    """

    def __init__(self, module: torch.nn.Module):
        self.module = module
        self._is_first = True

    def as_it_is(self) -> torch.nn.Module:
        return copy.deepcopy(self.module)

    def wide(self) -> torch.nn.Module:
        """A copy in float64, made where no mode is: it would widen a buffer half copied."""
        if not self._is_first and not self._are_only_read:
            return self._widened()
        self._is_first = False
        return copy.deepcopy(self._shared, {id(p): p for p in self._shared.parameters()})

    def _widened(self) -> torch.nn.Module:
        return copy.deepcopy(self.module).double()

    @cached_property
    def _shared(self) -> torch.nn.Module:
        """What has the parameters that copies share; never run itself."""
        return self._widened()

    @cached_property
    def _are_only_read(self) -> bool:
        """Whether the first run left them alone: an embedding with a largest norm does not."""
        return not self._others()

    def _others(self) -> list[str]:
        """Return the names of shared parameters that hold other numbers than the module's own."""
        shared = dict(self._shared.named_parameters())
        return [
            name
            for name, given in self.module.named_parameters()
            if not torch.equal(given.double(), shared[name])
        ]

    def expect_unwritten(self) -> None:
        """Raise RuntimeError if a run wrote to the parameters that all runs after it share."""
        if self._is_first or not self._are_only_read or not (names := self._others()):
            return
        raise RuntimeError(
            f"reference: a run changed the shared parameters {', '.join(names)}, so the numbers of "
            "all later runs are those of another module; please report this with the reference"
        )
