"""Copies of a torch module for its runs, so that no run sees what another has changed."""

import copy
from functools import cached_property

import torch


class ModuleCopies:
    """Copies of `module`, in its own dtype and in float64.

    A reference is run some thirty times in float64. Each of these copies has its own buffers and
    attributes, which a call may change; all share one copy of the parameters, the larger part.
    """

    def __init__(self, module: torch.nn.Module):
        self.module = module
        self._is_first = True

    def as_it_is(self) -> torch.nn.Module:
        return copy.deepcopy(self.module)

    def wide(self) -> torch.nn.Module:
        """Return a copy in float64; call it outside any mode, which would widen half-made ones."""
        if not self._is_first and not self._are_only_read:
            return self._widened()
        self._is_first = False
        return copy.deepcopy(self._shared, {id(p): p for p in self._shared.parameters()})

    def _widened(self) -> torch.nn.Module:
        wide = copy.deepcopy(self.module).double()
        for x in (*wide.parameters(), *wide.buffers()):
            if x.is_complex():  # torch leaves these as they are
                x.data = x.data.to(torch.complex128)
        return wide

    @cached_property
    def _shared(self) -> torch.nn.Module:
        """The module whose parameters the copies share; it is never run."""
        return self._widened()

    @cached_property
    def _are_only_read(self) -> bool:
        """True if the first run did not write to the parameters, as nn.Embedding(max_norm) does."""
        return not self._others()

    def _others(self) -> list[str]:
        """Return the names of shared parameters that hold other numbers than the module's own."""
        shared = dict(self._shared.named_parameters())
        return [
            name
            for name, given in self.module.named_parameters()
            if not torch.equal(given.to(shared[name].dtype), shared[name])
        ]

    def expect_unwritten(self) -> None:
        """Raise RuntimeError if a run wrote to the parameters that all later runs share."""
        if self._is_first or not self._are_only_read or not (names := self._others()):
            return
        raise RuntimeError(
            f"reference: a run changed the shared parameters {', '.join(names)}, so the numbers of "
            "all later runs are those of another module; please report this with the reference"
        )
