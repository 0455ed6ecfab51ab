"""Copies of a torch module for runs: what a call changes in one, no other sees."""

import copy
from functools import cached_property

import torch


class ModuleCopies:
    """Copies of `module`, as it is and in float64."""

    def __init__(self, module: torch.nn.Module):
        self._as_it_is, self._wide = _Alike(module, is_wide=False), _Alike(module, is_wide=True)

    def as_it_is(self) -> torch.nn.Module:
        """A copy in the module's own dtypes."""
        return self._as_it_is.one()

    def wide(self) -> torch.nn.Module:
        """A copy in float64, made where no mode is: it would widen a buffer half copied."""
        return self._wide.one()


class _Alike:
    """Copies in the same dtypes.

    A reference is run some thirty times. Each copy has its own buffers and attributes, which a call
    may change; parameters, the larger part, are copied once for all.
    """

    def __init__(self, module: torch.nn.Module, *, is_wide: bool):
        self._module, self._is_wide = module, is_wide
        self._is_first = True

    def one(self) -> torch.nn.Module:
        if not self._is_first and not self._are_only_read:
            return self._copied()
        self._is_first = False
        return copy.deepcopy(self._shared, {id(p): p for p in self._shared.parameters()})

    def _copied(self) -> torch.nn.Module:
        copied = copy.deepcopy(self._module)
        return copied.double() if self._is_wide else copied

    @cached_property
    def _shared(self) -> torch.nn.Module:
        """What has the parameters that copies share; never run itself."""
        return self._copied()

    @cached_property
    def _are_only_read(self) -> bool:
        """Whether the first run left them alone: an embedding with a largest norm does not."""
        each = zip(self._module.parameters(), self._shared.parameters(), strict=True)
        return all(torch.equal(given.to(shared), shared) for given, shared in each)
