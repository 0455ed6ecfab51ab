"""Define what judging asks of a port, which may be in another process and answers by arrays."""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import ml_dtypes

from jax_attn.dtypes import DTYPES
from jax_attn.parity.judge.finding import StandingNote
from jax_attn.parity.run.inputs_and_runs import Arrays, Inputs, Run, holds

if TYPE_CHECKING:
    from jax_attn.transfer import Layout, Problem


PINNED = StandingNote("precision-pinned", 'matmul precision pinned to "highest"')
"""The note on a port whose products an accelerator computes in full precision."""


class PortFacts(NamedTuple):
    """Facts that judging must know of a port beside its numbers.

    is_on_mesh: whether it is placed on a mesh. is_cut: whether any array is sharded there. drawn,
    caches: the dotted paths of its random state, and of its `nnx.Cache`. narrow_rows: those of its
    arrays in a dtype narrower than float32, of which at most one axis is longer than 1.
    """

    is_on_mesh: bool
    is_cut: bool
    drawn: frozenset[str]
    caches: frozenset[str]
    narrow_rows: frozenset[str]


def checked_in(dtype: str) -> str:
    """Say how a port that computes in another dtype is checked."""
    return (
        f'to check a port that computes in {dtype}, pass dtype="{dtype}", with the reference and '
        f"the port's parameters converted to {dtype}"
    )


def refuse_mistyped(outputs: Mapping[str, Any], dtype: str) -> None:
    """Raise TypeError if outputs are coarser than `dtype`, and say how such a port is checked."""
    mistyped = {k: a.dtype for k, a in outputs.items() if not holds(a.dtype, dtype)}
    if not mistyped:
        return
    got = {k: d.name for k, d in mistyped.items()}
    problem = (
        f"port: expected outputs of dtype {dtype}, got {got}"
        f"; build the module with dtype and param_dtype {dtype}"
    )
    coarsest = max(mistyped.values(), key=lambda kept: float(ml_dtypes.finfo(kept).eps))
    raise TypeError(
        f"{problem}; {checked_in(coarsest.name)}" if coarsest.name in DTYPES else problem
    )


class AskedPort(Protocol):
    """A port on its inputs; `Port` is one in this process."""

    @property
    def facts(self) -> PortFacts: ...

    def full_precision(
        self, wanted: bool
    ) -> AbstractContextManager[tuple[str, tuple[StandingNote, ...]]]:
        """Run in full precision in this context; yield the platform and notes for a result."""

    def run(self, dtype: str, cotangents: Arrays, transform: str) -> Run:
        """Return outputs in `dtype` and, if there are cotangents, every gradient."""

    def tried(self, dtype: str, inputs: Inputs, transform: str) -> Run | str:
        """Return a forward run on other inputs; if it raises an error, a line that says so."""

    def computed_in(self) -> Mapping[str, int]:
        """Return how many floating-point results of a forward pass each dtype has."""

    def held(self, paths: Collection[str]) -> Arrays:
        """Return arrays of the module, by dotted path, as they are before any call."""

    def on_one_device(self) -> "AskedPort | None":
        """Return the same port on one device of its mesh, or None if it is not on a mesh."""


class AskedWeights(Protocol):
    """The weights of a port, and the table that pairs them with the reference's."""

    @property
    def layout(self) -> "Layout":
        """The table; its steps are applied by `to_torch` only."""

    @property
    def arrays(self) -> Arrays:
        """Every parameter, and the other Variables that the table names, by dotted path."""

    @property
    def parameters(self) -> frozenset[str]:
        """The dotted paths of the parameters."""

    def to_torch(self, arrays: Arrays) -> Arrays:
        """Return arrays by torch's keys, as `Layout.to_torch` does. Raises TransferError."""

    def misfits(self, state: Arrays) -> "tuple[Problem, ...]":
        """Return why a load of `state`, tensors or their digests, would fail."""
