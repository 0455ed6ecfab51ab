"""Canaries of soft caps: each tanh with twice its cap, which arguments far below do not show."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload

from jax_attn.parity.checking.canaries.findings import DoubtsAndNotes, doubt
from jax_attn.parity.checking.canaries.places import Place, Placed
from jax_attn.parity.checking.canaries.planted import settings
from jax_attn.parity.checking.canaries.softmax_bugs import FORWARD
from jax_attn.parity.checking.canaries.watched import inside, is_seen, run_placed
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.finding import Finding
from jax_attn.parity.run.modes.constants import Kwargs

# The number of layers in which a wrong tanh is tried by itself.
ALONE = 8
# tanh reduces an argument this large by 8 %: if that is not seen, its size is not the reason.
_BENT = 0.5
Kind = tuple[str, int]
"""The class of a module and the index of a tanh in its call: the same in every layer."""


def _kind(place: Place) -> Kind:
    return type(place.module).__name__, place.nth


class Tanhs:
    """The kinds of tanh met: the paths of their modules, and the largest argument of each."""

    operators = ("tanh",)

    def __init__(self) -> None:
        self.paths: dict[Kind, list[str]] = {}
        self.largest: dict[Kind, float] = {}

    def look(self, mode: Placed, place: Place, name: str, args: tuple, kwargs: Kwargs) -> None:
        kind, x = _kind(place), args[0]
        largest = float(x[x.isfinite()].abs().amax()) if x.isfinite().any() else 0.0
        self.paths.setdefault(kind, []).append(mode.name(place))
        self.largest[kind] = max(largest, self.largest.get(kind, 0.0))


class _BuggyTanh(Placed):
    """Float64 with one kind of tanh wrong. reaches_softmax: whether a softmax received NaN."""

    def __init__(self, kind: Kind, path: str | None = None, *, lost: bool = False):
        """path: of the only module where it is wrong; None means all. lost: return NaN, which marks
        everything computed from it, instead of a tanh with twice the cap."""
        super().__init__()
        self._wrong, self._path, self._lost = kind, path, lost
        self._planted: dict[int, torch.Tensor] = {}
        """Wrong results by address; keeping them keeps the addresses unique until the gradients."""
        self.reaches_softmax = False

    def compute(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        if name == "tanh_backward" and args[1].data_ptr() in self._planted:
            args = (args[0], args[1] / 2)
        right = super().compute(func, args, kwargs)
        if name in FORWARD:
            self.reaches_softmax |= bool(args[0].isnan().any())
        if name not in Tanhs.operators:
            return right
        place = self.place_met(name)
        if _kind(place) != self._wrong or self._path not in (None, self.name(place)):
            return right
        if self._lost:
            return torch.full_like(right, torch.nan)
        wrong = 2 * torch.tanh(args[0] / 2)
        self._planted[wrong.data_ptr()] = wrong
        return wrong


def try_softcaps(prepared: Prepared, tanhs: Tanhs) -> DoubtsAndNotes:
    """Doubt a cap of the scores, or note another tanh, if these inputs do not show its effect."""
    doubts: list[Finding] = []
    notes: list[Finding] = []
    for kind, paths in tanhs.paths.items():
        if is_seen(prepared, partial(_BuggyTanh, kind)):
            notes += _of_one(prepared, kind, list(dict.fromkeys(paths)))
            continue
        tanh, largest = f"tanh{inside(paths)}", tanhs.largest[kind]
        fact = f"no argument of it is larger than {largest:.2g}"
        of_scores, of_others = "scores about as large as the cap", "arguments of about 1"
        if largest >= _BENT:
            fact = "its result changes no compared tensor by more than rounding"
            of_scores = of_others = "outputs that depend on it"
        if _is_softcap(prepared, kind):
            bug = f"a softcap (the {tanh}) that is left out or wrong"
            doubts.append(doubt("softcap", bug, fact, of_scores))
        else:
            passes = f"a port without the {tanh} would pass: {fact}; to show it, use {of_others}"
            notes.append(Finding("tanh", passes))
    return DoubtsAndNotes(tuple(doubts), tuple(notes))


def _of_one(prepared: Prepared, kind: Kind, paths: list[str]) -> Iterator[Finding]:
    """Note the layers in which a wrong tanh would pass, though one in all layers would not."""
    tried = paths[:ALONE] if len(paths) > 1 else []
    unseen = [path for path in tried if not is_seen(prepared, partial(_BuggyTanh, kind, path))]
    if unseen:
        yield Finding(
            "tanh",
            f"a port without the tanh{inside(unseen)} alone would pass, though one without all of "
            f"its kind would not; to show it, use arguments of about 1 there",
        )


def _is_softcap(prepared: Prepared, kind: Kind) -> bool:
    """Return whether a softmax depends on this tanh, or the reference's settings name a cap."""
    mode = _BuggyTanh(kind, lost=True)
    run_placed(prepared.reference, mode)
    return mode.reaches_softmax or any(
        "softcap" in name.replace("_", "") and value
        for named in settings(prepared.reference.module)
        for name, value in named.items()
    )
