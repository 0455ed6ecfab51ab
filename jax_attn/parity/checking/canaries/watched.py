"""Watch one float64 run of the reference: the arguments of its operators, by place."""

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from torch._ops import OpOverload

from jax_attn.parity.checking.canaries.places import Place, Placed
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.text import quoted
from jax_attn.parity.run.inputs_and_runs import Run
from jax_attn.parity.run.modes.constants import Kwargs
from jax_attn.parity.run.reference import Reference

_FORWARD: Mapping[str, np.ndarray] = MappingProxyType({})
"""The cotangents of a run without gradients."""


class Watcher(Protocol):
    """Looks at the arguments of operators. operators: their names, without a trailing "_"."""

    @property
    def operators(self) -> Collection[str]: ...

    def look(self, mode: Placed, place: Place, name: str, args: tuple, kwargs: Kwargs) -> None:
        """Look at the arguments of an operator that is about to be computed."""


class Watched(Placed):
    """Float64 that shows its operators to the watchers."""

    def __init__(self, watchers: Sequence[Watcher]):
        super().__init__()
        self._by_operator = {
            name: [w for w in watchers if name in w.operators]
            for watcher in watchers
            for name in watcher.operators
        }

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple = (), kwargs: Kwargs | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name.endswith("_") and not name.startswith("_"):
            name = name[:-1]
        if watchers := self._by_operator.get(name):
            place = self.place_met(name)
            for watcher in watchers:
                watcher.look(self, place, name, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)


def run_placed(
    reference: Reference, mode: Placed, cotangents: Mapping[str, np.ndarray] = _FORWARD
) -> Run | None:
    """Run the reference under a mode that knows its modules' names; return None on any error.

    cotangents: those of the outputs, for a run that also computes gradients.
    """
    call = reference.call or (lambda module, *args, **inputs: module(*args, **inputs))

    def named(module: torch.nn.Module, *args: Any, **inputs: Any) -> Any:
        mode.name_modules(module)
        return call(module, *args, **inputs)

    try:
        return reference.called(named).under(mode, cotangents)
    except Exception:
        return None


def is_seen(prepared: Prepared, planted: Callable[[], Placed]) -> bool:
    """Return whether a bug fails an output or, if gradients are compared, a gradient.

    Also True if the reference raises an error with the bug. planted: makes a mode that plants it,
    one for each run.
    """
    ways = (_FORWARD, prepared.cotangents) if prepared.gradients else (_FORWARD,)
    runs = (run_placed(prepared.reference, planted(), cotangents) for cotangents in ways)
    return any(run is None or prepared.would_fail(run) for run in runs)


def inside(paths: Sequence[str]) -> str:
    """Return " in" and the first two paths of modules; "" if there are only empty paths."""
    named = [path for path in dict.fromkeys(paths) if path]
    return f" in {quoted(named, 2)}" if named else ""
