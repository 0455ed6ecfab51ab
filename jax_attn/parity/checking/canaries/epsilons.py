"""Canaries of epsilons, whose effect large activations and large denominators hide.

Norms get another default epsilon; denominators get none.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload

from jax_attn.parity.checking.canaries.findings import FINE, DoubtsAndNotes
from jax_attn.parity.checking.canaries.places import Placed
from jax_attn.parity.checking.canaries.watched import inside, is_seen, run_placed
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.budget import PRECISIONS
from jax_attn.parity.judge.finding import Finding, StandingNote
from jax_attn.parity.run.modes.constants import Kwargs

# operator -> which of its arguments is the epsilon
_NORMS = {
    "_fused_rms_norm": 3,
    "native_batch_norm": 7,
    "native_group_norm": 7,
    "native_layer_norm": 4,
}
# The root of a sum with a second term this small belongs to a norm that is written out.
_LARGEST = 1e-3
_MARK = "_epsilon_added"
# operator -> which of its arguments is the denominator
_DIVISORS = {"div": 1, "reciprocal": 0}
# The defaults of torch and of flax.
_TORCH, _FLAX = 1e-5, 1e-6
# The number of norms tried one at a time: those whose result another epsilon changes least.
ALONE = 3
# A change of a norm's result by this many roundoffs is also seen downstream.
_SEEN = 64


def _other(epsilon: float) -> float:
    """Return another default epsilon: flax's, or torch's if `epsilon` is not above flax's."""
    return _TORCH if epsilon <= _FLAX else _FLAX


def _root(name: str, args: tuple) -> bool:
    return name in ("rsqrt", "sqrt") or (name == "pow" and args[1] in (0.5, -0.5))


Norm = tuple[str, int]
"""The path of a module, and the index of a norm in its call."""


class _Epsilons(Placed):
    """Float64 in which a sum keeps an epsilon that is its second term as an attribute."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple = (), kwargs: Kwargs | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        is_sum = func.overloadpacket.__name__ in ("add", "add_")
        if is_sum and isinstance(args[1], float) and 0 < args[1] <= _LARGEST:
            setattr(result, _MARK, args[1])
        return result


class _OtherEpsilons(_Epsilons):
    """Float64 with another epsilon in every norm, or in only one.

    norms: for each norm, its epsilon, and the largest relative change of its result by the other
    epsilon.
    """

    def __init__(self, alone: Norm | None = None) -> None:
        super().__init__()
        self._alone = alone
        self.norms: dict[Norm, tuple[float, float]] = {}

    def compute(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        right = super().compute(func, args, kwargs)
        name = func.overloadpacket.__name__
        if _root(name, args):
            epsilon = getattr(args[0], _MARK, None)
            wrong_args = (args[0] + (_other(epsilon) - epsilon), *args[1:]) if epsilon else ()
        else:
            at = _NORMS.get(name, len(args))
            epsilon = args[at] if at < len(args) else None
            wrong_args = (*args[:at], _other(epsilon), *args[at + 1 :]) if epsilon else ()
        if not epsilon:
            return right
        place = self.place_met("norm")
        norm = self.name(place), place.nth
        if self._alone not in (None, norm):
            return right
        wrong = super().compute(func, wrong_args, kwargs)
        self._note(norm, epsilon, *(x[0] if isinstance(x, tuple) else x for x in (right, wrong)))
        return wrong

    def _note(self, norm: Norm, epsilon: float, right: torch.Tensor, wrong: torch.Tensor) -> None:
        rms = float(right.square().mean().sqrt())
        moved = float((wrong - right).square().mean().sqrt()) / rms if rms > 0 else 0.0
        _, before = self.norms.get(norm, (epsilon, 0.0))
        self.norms[norm] = epsilon, max(moved, before)


class _NoEpsilons(_Epsilons):
    """Float64 without the epsilons of denominators. paths: epsilon -> the paths of its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: dict[float, list[str]] = {}

    def compute(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        at = _DIVISORS.get(name, len(args))
        if at < len(args) and (epsilon := getattr(args[at], _MARK, None)):
            self.paths.setdefault(epsilon, []).append(self.name(self.place_met(name)))
            args = (*args[:at], args[at] - epsilon, *args[at + 1 :])
        return super().compute(func, args, kwargs)


def try_epsilons(prepared: Prepared) -> DoubtsAndNotes:
    """Note norms whose other default epsilon, and denominators whose lack of one, is not seen."""
    if prepared.dtype not in FINE:
        return DoubtsAndNotes((), ())
    return DoubtsAndNotes((), (*_of_norms(prepared), *_of_denominators(prepared)))


def _of_norms(prepared: Prepared) -> Iterator[Finding]:
    mode = _OtherEpsilons()
    run = run_placed(prepared.reference, mode)
    if run is None or not mode.norms:
        return
    roundoff = PRECISIONS[prepared.dtype].store
    seen = prepared.would_fail(run) or is_seen(prepared, _OtherEpsilons)
    hidden: dict[float, list[tuple[str, float]]] = {}
    shown: dict[Norm, float] = {}
    for norm, (epsilon, moved) in mode.norms.items():
        if moved < roundoff or not seen:
            hidden.setdefault(epsilon, []).append((norm[0], moved))
        else:
            shown[norm] = moved
    yield from (_note(epsilon, norms, roundoff) for epsilon, norms in hidden.items())
    if len(mode.norms) > 1:
        yield from _of_one_norm(prepared, sorted(shown, key=shown.__getitem__))


def _of_one_norm(prepared: Prepared, norms: list[Norm]) -> Iterator[Finding]:
    """Try single norms. The notes are standing: in most models, other terms drown some norms."""
    tried = norms[:ALONE]
    unseen = [norm for norm in tried if not is_seen(prepared, partial(_OtherEpsilons, norm))]
    if len(norms) > ALONE:
        yield StandingNote(
            "few-tried",
            f"a wrong epsilon of one norm alone was tried in {ALONE} of {len(norms)}: those whose "
            "result it changes least",
        )
    if unseen:
        yield StandingNote(
            "epsilon-alone",
            f"a port with a wrong epsilon in one norm alone{inside([path for path, _ in unseen])} "
            "would pass, since rounding hides it; to show it, use smaller activations there",
        )


def _of_denominators(prepared: Prepared) -> Iterator[Finding]:
    """Try denominators. The notes are standing: inputs can rarely make one as small as epsilon."""
    mode = _NoEpsilons()
    run_placed(prepared.reference, mode)
    if not mode.paths or is_seen(prepared, _NoEpsilons):
        return
    for epsilon, paths in mode.paths.items():
        yield StandingNote(
            "epsilon-of-denominator",
            f"a port without the epsilon of {epsilon:g} in a denominator{inside(paths)} would "
            "pass: the denominators are too large for it to show",
        )


def _note(epsilon: float, norms: list[tuple[str, float]], roundoff: float) -> Finding:
    """Note norms whose epsilon is hidden.

    norms: paths, and the relative change by another epsilon: half its share of the variance."""
    change = abs(_other(epsilon) - epsilon)
    where = inside([path for path, _ in norms])
    most = max(moved for _, moved in norms)
    have = f"an RMS of at least {math.sqrt(change / (2 * most)):.2g}" if most > 0 else "a huge RMS"
    need = math.sqrt(change / (2 * _SEEN * roundoff))
    return Finding(
        "epsilon",
        f"a wrong epsilon of a norm{where} would pass: with activations of "
        f"{have}, {_other(epsilon):g} in place of {epsilon:g} gives the same outputs; to show "
        f"it, use activations with an RMS of {need:.2g} or less, on which the outputs depend",
    )
