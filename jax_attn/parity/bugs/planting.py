"""Plant a bug in a reference: torch modes below its operators, and the runs under them.

Planting never writes to a tensor of the reference: a change that writes to an argument of its call
is an error. So is any other error of a change. An error of the reference, or of an operator that
refuses the wrong arguments, ends only the run: `run_planted` returns None.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import torch
from torch._ops import OpOverload

from jax_attn.parity.bugs.bug import Bug, OperatorCall, Site
from jax_attn.parity.run.inputs_and_runs import Run
from jax_attn.parity.run.modes.constants import Kwargs, storages
from jax_attn.parity.run.modes.float64_mode import Float64, not_in_place
from jax_attn.parity.run.modes.mode import Mode
from jax_attn.parity.run.modes.module_calls import ModuleCalls
from jax_attn.parity.run.reference import Reference

_T = TypeVar("_T")
_FORWARD: Mapping[str, np.ndarray] = MappingProxyType({})
"""The cotangents of a run without gradients."""
_KINDS = dict.fromkeys(("_softmax", "_safe_softmax", "_log_softmax"), "softmax")
"""Operator -> the kind under which its sites are counted, if that is not its own name."""


class OperatorRefusedError(Exception):
    """An operator refuses the arguments that a bug gives it."""


class _PlantingError(BaseException):
    """An error of ours, which no handler for errors of the reference may catch."""

    def __init__(self, cause: Exception):
        self.cause = cause


def run_planted(
    reference: Reference,
    mode: Float64 | None = None,
    cotangents: Mapping[str, np.ndarray] = _FORWARD,
) -> Run | None:
    """Run the reference under a mode; return None if it raises an error.

    mode: None for plain float64, where the bug is in the reference's inputs, tensors or call.
    cotangents: those of the outputs, for a run that also computes gradients.

    Raises the error of a planted change, if there is one.
    """
    try:
        return reference.under(mode or Float64(), cotangents)
    except _PlantingError as error:
        raise error.cause from None
    except Exception:
        return None


class _ReadOnly(Mode):
    """Refuses to write to the arguments of a call."""

    def __init__(self, call: OperatorCall):
        super().__init__()
        self._name = call.name
        self._storages = storages((call.args, call.kwargs))

    def dispatched(self, func: OpOverload, args: tuple, kwargs: Kwargs) -> Any:
        written = zip(func._schema.arguments, args, strict=False)
        to = [x for argument, x in written if argument.alias_info and argument.alias_info.is_write]
        if func._schema.is_mutable and self._storages & storages(to):
            raise RuntimeError(f"bugs: a change of {self._name} writes to an argument of its call")
        return func(*args, **kwargs)


@contextmanager
def planting(call: OperatorCall) -> Iterator[None]:
    """Run code of ours in the middle of a reference: its errors are raised to the caller."""
    try:
        with _ReadOnly(call):
            yield
    except OperatorRefusedError:
        raise
    except Exception as error:
        raise _PlantingError(error) from error


def run_change(call: OperatorCall, of: Callable[[OperatorCall], _T]) -> _T:
    """Return what a function of ours makes of a call outside any run. Raises its own errors."""
    try:
        with planting(call):
            return of(call)
    except _PlantingError as error:
        raise error.cause from None


def unchanged(compute: Callable[..., Any], func: OpOverload) -> Callable[..., Any]:
    """Return a function that runs an operator; any error is raised as OperatorRefusedError."""

    def right(*args: Any, **kwargs: Any) -> Any:
        try:
            return compute(func, args, kwargs)
        except Exception as error:
            raise OperatorRefusedError(f"{func.overloadpacket.__name__}: {error}") from error

    return right


class Placed(Float64):
    """Float64 that tracks the site of each operator.

    in_place: in-place forms of operators in which bugs are planted.
    """

    in_place: tuple[str, ...] = ("pow_", "rsqrt_", "sqrt_", "tanh_")

    def __init__(self) -> None:
        super().__init__()
        self._calls = ModuleCalls()

    def run_on(self, module: torch.nn.Module) -> None:
        self._calls.name_from(module)

    def __enter__(self) -> Self:
        self._calls.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._calls.__exit__(*raised)
        super().__exit__(*raised)

    def dispatched(self, func: OpOverload, args: tuple, kwargs: Kwargs) -> Any:
        if func.overloadpacket.__name__ in self.in_place:
            return args[0].copy_(self.compute(not_in_place(func), args, dict(kwargs)))
        return super().dispatched(func, args, kwargs)

    def met(self, name: str) -> tuple[Site, str]:
        """Count an operator that is about to be computed; return its site and its module's class.

        Call it once for each operator."""
        module = self._calls.module
        site = Site(self._calls.path, self._calls.count(_KINDS.get(name, name)))
        return site, "" if module is None else type(module).__name__


class Watcher(Protocol):
    """Looks at the arguments of operators. operators: their names, without a trailing "_"."""

    @property
    def operators(self) -> Collection[str]: ...

    def look(self, call: OperatorCall) -> None:
        """Look at a call of an operator that is about to be computed."""


class Watched(Placed):
    """Float64 that shows its operators to the watchers."""

    def __init__(self, *watchers: Watcher):
        super().__init__()
        self._by_operator = {
            name: [w for w in watchers if name in w.operators]
            for watcher in watchers
            for name in watcher.operators
        }

    def dispatched(self, func: OpOverload, args: tuple, kwargs: Kwargs) -> Any:
        name = func.overloadpacket.__name__
        if name.endswith("_") and not name.startswith("_"):
            name = name[:-1]
        if watchers := self._by_operator.get(name):
            site, module = self.met(name)
            call = OperatorCall(name, func, args, kwargs, site=site, module=module)
            for watcher in watchers:
                with planting(call):
                    watcher.look(call)
        return super().dispatched(func, args, kwargs)


class Effect(NamedTuple):
    """The effect of a planted bug at one site.

    value: the bug's. moved: by how much of its RMS it moves the result, at most in any call.
    """

    value: Any
    moved: float


class Planted(Placed):
    """Float64 in which some operators are computed as a wrong port computes them.

    count: the number of the operators computed. planted: the number of those with a bug. effects:
    for each site with a bug, in the order met, what it does there.
    """

    def __init__(
        self,
        operators: Collection[str],
        bug_of: Callable[[OperatorCall], Bug | None],
        at: Site | None = None,
    ):
        """operators: those that may have a bug. bug_of: the bug of a call; None if it has none. at:
        the only site that may have one; None for all."""
        super().__init__()
        self.operators, self._bug_of, self._at = operators, bug_of, at
        self.count, self.planted = 0, 0
        self.effects: dict[Site, Effect] = {}
        self._memory: dict[Any, torch.Tensor] = {}

    def compute(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        if name not in self.operators:
            return super().compute(func, args, kwargs)
        self.count += 1
        site, module = self.met(name)
        call = OperatorCall(
            name,
            unchanged(super().compute, func),
            args,
            kwargs,
            is_backward=torch._C._current_graph_task_id() != -1,
            memory=self._memory,
            site=site,
            module=module,
        )
        if self._at not in (None, site):
            return call.result()
        with planting(call):
            bug = self._bug_of(call)
            if bug is None:
                return call.result()
            wrong = bug.change(call)
            self.planted += 1
            moved = _moved(call.result(), wrong)
            before = self.effects[site].moved if site in self.effects else 0.0
            self.effects[site] = Effect(bug.value, max(before, moved))
            return wrong


def _moved(right: Any, wrong: Any) -> float:
    """Return how far results, or the first of several, are off, in units of their RMS."""
    a, b = (x if isinstance(x, torch.Tensor) else x[0] for x in (right, wrong))
    norm, off = (float(x.nan_to_num(0.0, 0.0, 0.0).norm()) for x in (a, b - a))
    return off / norm if norm > 0 else 0.0
