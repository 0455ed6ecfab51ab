"""Epsilons of norms that do not show beside large activations: another default is put in each."""

import math
from typing import Any

import torch
from torch._ops import OpOverload

from jax_attn.parity.checking.canaries.findings import FINE, DoubtsAndNotes
from jax_attn.parity.checking.canaries.watched import inside, is_seen, run_placed
from jax_attn.parity.checking.places import Place, Placed
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.budget import PRECISIONS
from jax_attn.parity.run.modes.constants import Kwargs

# operator -> which of its arguments is the epsilon
_NORMS = {
    "_fused_rms_norm": 3,
    "native_batch_norm": 7,
    "native_group_norm": 7,
    "native_layer_norm": 4,
}
# The root of a sum whose second term is this small is a norm's, written out.
_LARGEST = 1e-3
_MARK = "_epsilon_added"
# The defaults of torch and of flax.
_TORCH, _FLAX = 1e-5, 1e-6
# What of a norm moves it by so many roundoffs is seen, downstream of it too.
_SEEN = 64


def _other(epsilon: float) -> float:
    """What a port has that leaves a default in place."""
    return _TORCH if epsilon <= _FLAX else _FLAX


def _root(name: str, args: tuple) -> bool:
    return name in ("rsqrt", "sqrt") or (name == "pow" and args[1] in (0.5, -0.5))


class _OtherEpsilons(Placed):
    """Float64 with another epsilon in every norm.

    norms: by place, the module's path, the epsilon, and the largest relative change of the norm's
    result that the other one makes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norms: dict[Place, tuple[str, float, float]] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple = (), kwargs: Kwargs | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        is_sum = func.overloadpacket.__name__ in ("add", "add_")
        if is_sum and isinstance(args[1], float) and 0 < args[1] <= _LARGEST:
            setattr(result, _MARK, args[1])
        return result

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
        wrong = super().compute(func, wrong_args, kwargs)
        self._note(epsilon, *(x[0] if isinstance(x, tuple) else x for x in (right, wrong)))
        return wrong

    def _note(self, epsilon: float, right: torch.Tensor, wrong: torch.Tensor) -> None:
        place = self.place_met("norm")
        rms = float(right.square().mean().sqrt())
        moved = float((wrong - right).square().mean().sqrt()) / rms if rms > 0 else 0.0
        _, _, before = self.norms.get(place, ("", 0.0, 0.0))
        self.norms[place] = self.name(place), epsilon, max(moved, before)


def try_epsilons(prepared: Prepared) -> DoubtsAndNotes:
    """Note the norms in which another default would not be seen."""
    mode = _OtherEpsilons()
    run = run_placed(prepared.reference, mode) if prepared.dtype in FINE else None
    if run is None or not mode.norms:
        return DoubtsAndNotes((), ())
    roundoff = PRECISIONS[prepared.dtype].store
    seen = prepared.would_fail(run) or is_seen(prepared, _OtherEpsilons)
    hidden: dict[float, list[tuple[str, float]]] = {}
    for path, epsilon, moved in mode.norms.values():
        if moved < roundoff or not seen:
            hidden.setdefault(epsilon, []).append((path, moved))
    return DoubtsAndNotes((), tuple(_note(e, norms, roundoff) for e, norms in hidden.items()))


def _note(epsilon: float, norms: list[tuple[str, float]], roundoff: float) -> str:
    """norms: paths, and by how much another epsilon moves each: half its part of the variance."""
    change = abs(_other(epsilon) - epsilon)
    where = inside([path for path, _ in norms])
    most = max(moved for _, moved in norms)
    have = f"an RMS of at least {math.sqrt(change / (2 * most)):.2g}" if most > 0 else "a huge RMS"
    need = math.sqrt(change / (2 * _SEEN * roundoff))
    return (
        f"a wrong epsilon of a norm{where} would pass: beside activations with "
        f"{have}, {_other(epsilon):g} in place of {epsilon:g} gives the same outputs; what would "
        f"show it: activations with an RMS of {need:.2g} or less, on which the outputs depend"
    )
