"""The weights of a port in this process."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from flax import nnx

from jax_attn.parity.run.inputs_and_runs import Arrays
from jax_attn.transfer import Layout, Problem, flatten, plan
from jax_attn.transfer.nnx.variables import carried


@dataclass(frozen=True)
class HeldWeights:
    """The weights that a module holds, as `AskedWeights` of this process."""

    module: nnx.Module
    layout: Layout

    @cached_property
    def arrays(self) -> Arrays:
        """Every parameter, and the other Variables that the table names, by dotted path."""
        return {path: np.asarray(a) for path, a in carried(self.module, self.layout).items()}

    @property
    def parameters(self) -> frozenset[str]:
        """The dotted paths of the parameters."""
        return frozenset(flatten(self.module))

    def to_torch(self, arrays: Arrays) -> Arrays:
        """Return arrays by torch's keys. Raises TransferError."""
        return self.layout.to_torch(arrays)

    def misfits(self, state: Arrays) -> tuple[Problem, ...]:
        """Return why a load of `state`, tensors or their digests, would fail."""
        return tuple(plan(self.module, state, self.layout).problems)
