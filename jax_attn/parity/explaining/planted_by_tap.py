"""Plant bugs in a tapped run of the reference, each at the call that computes a tap."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from jax_attn.parity.bugs.bug import Bug, OperatorCall
from jax_attn.parity.bugs.catalogue import bugs_of
from jax_attn.parity.bugs.planting import planting, unchanged
from jax_attn.parity.explaining.taps.tap import Tap
from jax_attn.parity.explaining.taps.tapping import Tapping
from jax_attn.parity.explaining.wirings import skips, wirings
from jax_attn.parity.run.modes.constants import tensors_of
from jax_attn.parity.run.modes.float64_mode import Unperturbed

_COPIES = {"aten._to_copy", "aten.clone"}
Others = Callable[[int], Sequence[tuple[str | None, Tap]]]
"""Maps a site to tensors that the port may read instead, each with the step between them."""


class Reached(BaseException):
    """The requested tensor has been computed."""


class _PartsToo(Unperturbed):
    """Float64 mode that computes splits, as of queries, keys and values, like other results."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket.__name__ == "split":
            return self.compute(func, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)


class PlantedByTap(Tapping, _PartsToo):
    """Float64 mode in which some calls are changed, by the index of the tap that each computes."""

    def begin(
        self,
        parameters: Mapping[str, torch.Tensor],
        last: int,
        changes: Mapping[int, Bug],
        held: Mapping[int, Tap],
    ) -> None:
        """Prepare for a run.

        last: the tap at which to stop. held: tap -> the tap whose numbers it takes, because they
        are right on both sides.
        """
        self.tap({name: x.numpy() for name, x in parameters.items()}, None)
        self._parameters, self._last = parameters, last
        self._changes, self._held = changes, held
        self._memory: dict[str, torch.Tensor] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self.taps) > self._last:
            raise Reached
        return result

    def compute(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        call = OperatorCall(
            func.overloadpacket.__name__,
            unchanged(super().compute, func),
            args,
            kwargs,
            self._leaves(args),
            self._parameters,
            torch._C._current_graph_task_id() != -1,
            self._memory,
        )
        result = call.result()
        here = range(len(self.taps), len(self.taps) + len(tensors_of(result)))
        return self.changed(here, call, result) if here else result

    def changed(self, here: range, call: OperatorCall, result: Any) -> Any:
        """Return the result that replaces a call's own. here: the indices of its taps."""
        if (bug := next((self._changes[i] for i in here if i in self._changes), None)) is not None:
            with planting(call):
                changed = bug.change(call)
            is_one = isinstance(result, torch.Tensor) and result.shape == changed.shape
            return _laid_out(changed, result) if is_one else changed
        if (held := self._held.get(here[0])) is not None and isinstance(result, torch.Tensor):
            return _laid_out(torch.from_numpy(held.value).reshape(result.shape), result)
        return result

    def _leaves(self, args: tuple) -> tuple[str, ...]:
        """Return for each argument the parameter that it is, or is a copy of, or ""."""
        names = []
        for x in args:
            index = self.known(x) if isinstance(x, torch.Tensor) else None
            tap = None if index is None else self.taps[index]
            while tap is not None and tap.op in _COPIES and tap.parents:
                tap = self.taps[tap.parents[0]]
            names.append(tap.place.module if tap and tap.op == "parameter" else "")
        return tuple(names)


def _laid_out(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Copy with the strides of another tensor, since a module may choose operations by strides."""
    return torch.empty_like(like, dtype=x.dtype).copy_(x)


class Scout(PlantedByTap):
    """An unchanged run that collects the bugs of the calls at given sites."""

    def look(self, sites: Sequence[int], others: Others) -> None:
        """Set the sites. others: maps a site to tensors that the port may read instead."""
        self._sites, self._others = frozenset(sites), others
        self.bugs: dict[int, tuple[Bug, ...]] = {}
        self.skips: dict[int, tuple[Bug, ...]] = {}
        self.wirings: dict[int, tuple[Bug, ...]] = {}

    def changed(self, here: range, call: OperatorCall, result: Any) -> Any:
        if (site := next((i for i in reversed(here) if i in self._sites), None)) is not None:
            others = self._others(site)
            with planting(call):
                self.bugs[site] = tuple(bugs_of(call))
                self.skips[site] = tuple(skips(call, others))
                self.wirings[site] = tuple(wirings(call, [tap for _, tap in others]))
        return super().changed(here, call, result)
