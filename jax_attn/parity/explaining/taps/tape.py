"""The operators of one float64 run of a reference, which can be run again with some changed.

Only what follows from a change is computed, from the tensors of the recorded run. A storage that an
operator writes to is copied before, so that each operator reads what it read then.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map_only

from jax_attn.parity.bugs.bug import Bug, OperatorCall
from jax_attn.parity.bugs.planting import OperatorRefusedError, run_change, unchanged
from jax_attn.parity.explaining.taps.tapping import Seen, seen
from jax_attn.parity.run.modes.constants import Kwargs, each
from jax_attn.parity.run.modes.decisions import decides
from jax_attn.parity.run.modes.float64_mode import Unperturbed, not_in_place


@dataclass(frozen=True, eq=False)
class Played:
    """An operator of the run.

    results: its results; None for one that is no tensor. is_one: whether it returns its result
    itself. leaves: for each argument, the parameter that it is, or "". origins: for each, the
    module that computes it, or "". writes: the arguments to
    which it writes.
    """

    func: OpOverload
    args: tuple
    kwargs: Kwargs
    results: tuple[Tensor | None, ...]
    is_one: bool
    leaves: tuple[str, ...]
    origins: tuple[str, ...]
    is_backward: bool
    writes: tuple[Tensor, ...]

    @cached_property
    def reads(self) -> frozenset[int]:
        """The storages of its arguments."""
        given = tree_leaves((self.args, self.kwargs))
        return frozenset(_storage(x) for x in given if isinstance(x, Tensor) and x.numel())

    @property
    def name(self) -> str:
        """The operator's name, the same for its in-place form."""
        name = self.func.overloadpacket.__name__
        return name[:-1] if self.writes and not name.startswith("_") else name


@dataclass(eq=False)
class Tape:
    """The operators of a run, in order.

    Attributes:
      played: the operators. made: tap -> the operator that computes it. tensors: the tensors of the
        taps. dtype: the dtype under test. parameters: every parameter by name, in float64.
    """

    dtype: torch.dtype = torch.float32
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    played: list[Played] = field(default_factory=list)
    made: dict[int, int] = field(default_factory=dict)
    tensors: dict[int, Tensor] = field(default_factory=dict)
    _before: dict[int, list[tuple[int, Tensor]]] = field(default_factory=lambda: defaultdict(list))

    def about_to(self, func: OpOverload, args: tuple, kwargs: Kwargs) -> tuple[Tensor, ...]:
        """Copy what an operator is about to write to; return its arguments that it writes to."""
        if not func._schema.is_mutable:
            return ()
        named = {a.name: x for a, x in zip(func._schema.arguments, args, strict=False)} | {**kwargs}
        written = tuple(
            named[a.name]
            for a in func._schema.arguments
            if a.alias_info and a.alias_info.is_write and isinstance(named.get(a.name), Tensor)
        )
        for x in written:
            self._before[_storage(x)].append((len(self.played), _flat(x).clone()))
        return written

    def add(self, played: Played, made: Mapping[int, Tensor]) -> None:
        """Add an operator. made: the taps that it computes, and their tensors."""
        self.made |= dict.fromkeys(made, len(self.played))
        self.tensors |= made
        self.played.append(played)

    def renumbered(self, number: Mapping[int, int]) -> "Tape":
        """Return the same tape for taps with other indices. number: old index -> new index."""
        made = {number[i]: n for i, n in self.made.items() if i in number}
        tensors = {number[i]: x for i, x in self.tensors.items() if i in number}
        return Tape(self.dtype, self.parameters, self.played, made, tensors, self._before)

    def operator(self, tap: int) -> tuple[int, int]:
        """Return the operator that computes a tap, and which of its results the tap is."""
        n, x = self.made[tap], self.tensors[tap]
        return n, next(k for k, each in enumerate(self.played[n].results) if each is x)

    def computes(self, *taps: int) -> bool:
        """Return whether operators compute taps, which are neither leaves nor views."""
        return all(tap in self.made and _computes(self.played[self.made[tap]]) for tap in taps)

    def call(self, tap: int) -> OperatorCall | None:
        """Return the call that computes a tap; None if there is none that can be changed."""
        return _Play(self).call(self.made[tap]) if self.computes(tap) else None

    def play(
        self, changes: Mapping[int, Bug], held: Sequence[int], wanted: Sequence[int]
    ) -> dict[int, np.ndarray] | None:
        """Run again with some calls changed; return the wanted taps, or None if that cannot be run.

        changes: tap -> the change of its call. held: taps that keep their value.
        """
        at = {self.made[tap]: bug for tap, bug in changes.items()}
        kept = {
            n for tap in held if tap in self.made and self.played[n := self.made[tap]].is_one
        } - at.keys()
        read = {tap: self.made[tap] for tap in wanted}
        play = _Play(self)
        found: dict[int, np.ndarray] = {}
        try:
            with torch.no_grad():
                for n in range(min(at), max(read.values()) + 1):
                    play.step(n, at.get(n), is_held=n in kept)
                    found |= {
                        tap: play.after(n, self.tensors[tap]) for tap in read if read[tap] == n
                    }
        except (OperatorRefusedError, _UnplayedError):
            return None
        for tap in read.keys() - found.keys():
            found[tap] = play.after(read[tap], self.tensors[tap])
        return found

    def content(self, x: Tensor, n: int) -> Tensor | None:
        """Return what the storage of `x` held before an operator; None if it holds it still."""
        copies = self._before.get(_storage(x), ())
        later = bisect_left(copies, n, key=lambda copy: copy[0])
        return copies[later][1] if later < len(copies) else None


class _UnplayedError(Exception):
    """A change has results of another shape, or an operator refuses them."""


class _Play:
    """One run of a part of a tape. Storages that differ from the recorded run are kept apart."""

    def __init__(self, tape: Tape):
        self._tape = tape
        self._mode = Unperturbed()
        self._mode.dtype = tape.dtype
        self._changed: dict[int, Tensor] = {}
        self._reshaped: dict[Seen, Tensor] = {}
        self._memory: dict[Any, Tensor] = {}

    def call(self, n: int) -> OperatorCall:
        """Return the call of an operator, with the arguments that it has in this run."""
        played = self._tape.played[n]
        func = not_in_place(played.func) if played.writes else played.func
        args, kwargs = each(
            lambda x: x.double() if x.is_floating_point() else x,
            self._given(n, (played.args, dict(played.kwargs))),
        )
        return OperatorCall(
            played.name,
            unchanged(self._computed, func),
            args,
            kwargs,
            played.leaves,
            self._tape.parameters,
            played.is_backward,
            self._memory,
            origins=played.origins,
        )

    def step(self, n: int, bug: Bug | None, *, is_held: bool) -> None:
        """Run an operator if what it reads has changed, or if it has a bug."""
        played = self._tape.played[n]
        if bug is not None and _computes(played):
            try:
                self._put(n, run_change(self.call(n), bug.change))
            except (RuntimeError, IndexError, ValueError) as error:  # of other shapes
                raise _UnplayedError from error
        elif self._changed.keys().isdisjoint(played.reads):
            return
        elif played.func.is_view:
            self._view(n)
        elif is_held:
            self._hold(n)
        elif played.writes:
            self._write(n)
        else:
            args, kwargs = self._given(n, (played.args, dict(played.kwargs)))
            result = self._run(played.func, args, kwargs)
            if decides(played.func, args, kwargs, sides=False):
                result = self._followed(n, result)
            self._put(n, result)

    def after(self, n: int, x: Tensor) -> np.ndarray:
        """Return a tensor as it is after an operator."""
        return self._now(x, n + 1).detach().numpy().astype(np.float64, copy=True)

    def _computed(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        return self._mode.dispatched(func, args, kwargs)

    def _run(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        try:
            return self._computed(func, args, kwargs)
        except Exception as error:
            raise _UnplayedError from error

    def _given(self, n: int, tree: Any) -> Any:
        return tree_map_only(Tensor, lambda x: self._now(x, n), tree)

    def _now(self, x: Tensor, n: int) -> Tensor:
        if not x.numel():
            return x.detach()
        if (other := self._reshaped.get(seen(x))) is not None:
            return other
        flat = self._changed.get(_storage(x))
        flat = self._tape.content(x, n) if flat is None else flat
        return x.detach() if flat is None else _seen_in(flat, x)

    def _hold(self, n: int) -> None:
        """Let the results of an operator be the recorded ones."""
        played = self._tape.played[n]
        for x in (*played.writes, *(x for x in played.results if x is not None)):
            if _storage(x) in self._changed:
                flat = self._tape.content(x, n + 1)
                recorded = _seen_in(_flat(x) if flat is None else flat, x)
                _seen_in(self._own(x, n), x).copy_(recorded)

    def _view(self, n: int) -> None:
        """View a tensor that has another shape than in the recorded run; others need not be."""
        played = self._tape.played[n]
        if self._reshaped and seen(played.args[0]) in self._reshaped:
            args, kwargs = self._given(n, (played.args, dict(played.kwargs)))
            self._put(n, self._run(played.func, args, kwargs))

    def _write(self, n: int) -> None:
        """Run an operator that writes to its arguments, on copies of them."""
        played = self._tape.played[n]
        for x in played.writes:
            self._own(x, n)
        args, kwargs = self._given(n, (played.args, dict(played.kwargs)))
        self._run(played.func, args, kwargs)

    def _own(self, x: Tensor, n: int) -> Tensor:
        """Return the storage of `x` as it is before an operator, to be written to."""
        if (at := _storage(x)) not in self._changed:
            flat = self._tape.content(x, n)
            self._changed[at] = (_flat(x) if flat is None else flat).clone()
        return self._changed[at]

    def _put(self, n: int, results: Any) -> None:
        """Let an operator have other results."""
        played = self._tape.played[n]
        given = [results] if isinstance(results, Tensor) else list(results)
        if played.is_one and len(given) != 1:
            raise _UnplayedError
        for x, other in zip(played.results, given, strict=False):
            if x is None or not x.numel():
                continue
            if not isinstance(other, Tensor):
                raise _UnplayedError
            if other.numel() != x.numel() or seen(x) in self._reshaped:
                self._reshaped[seen(x)] = other
                self._own(x, n + 1)  # so that its readers are run again
                continue
            try:
                _seen_in(self._own(x, n + 1), x).copy_(other.reshape(x.shape))
            except RuntimeError as error:  # a view that holds one number several times
                raise _UnplayedError from error

    def _followed(self, n: int, own: Any) -> Any:
        """Return a decision of this run; where it is that of float64, the one that was recorded."""
        played = self._tape.played[n]
        if not isinstance(own, Tensor):
            return own
        args, kwargs = _Play(self._tape)._given(n, (played.args, dict(played.kwargs)))
        taken, natural = played.results[0], self._run(played.func, args, kwargs)
        assert taken is not None
        return torch.where(own == natural, taken, own) if own.shape == taken.shape else own


def _computes(played: Played) -> bool:
    """Return whether an operator computes a result; a part that is cut out of a tensor counts."""
    if played.writes:  # some change a tensor's shape in place
        packet = getattr(torch.ops.aten, played.name, None)
        return played.func._overloadname in (packet.overloads() if packet else ())
    return not played.func.is_view or played.name in ("select", "split")


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _flat(x: Tensor) -> Tensor:
    """Return the whole storage of a tensor, as a tensor with one axis."""
    size = x.untyped_storage().nbytes() // x.element_size()
    return x.detach().as_strided((size,), (1,), 0)


def _seen_in(flat: Tensor, like: Tensor) -> Tensor:
    return flat.as_strided(like.shape, like.stride(), like.storage_offset())
