"""Canaries of soft caps: each tanh with twice its cap, which arguments far below do not show."""

from collections.abc import Iterator
from functools import partial

import torch

from jax_attn.parity.bugs.bug import Bug, OperatorCall
from jax_attn.parity.bugs.planting import Planted, run_planted
from jax_attn.parity.bugs.softmax import FORWARD
from jax_attn.parity.checking.canaries.findings import doubt, inside, not_tried
from jax_attn.parity.checking.canaries.seen import is_seen, settings
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.finding import Finding, Findings

# The number of layers in which a wrong tanh is tried by itself.
ALONE = 8
# tanh reduces an argument this large by 8 %: if that is not seen, its size is not the reason.
_BENT = 0.5
Kind = tuple[str, int]
"""The class of a module and the index of a tanh in its call: the same in every layer."""


def _kind(call: OperatorCall) -> Kind:
    return call.module, call.site.nth if call.site else 0


def _path(call: OperatorCall) -> str:
    return (call.site and call.site.path) or ""


class Tanhs:
    """The kinds of tanh met: the paths of their modules, and the largest argument of each."""

    operators = ("tanh",)

    def __init__(self) -> None:
        self.paths: dict[Kind, list[str]] = {}
        self.largest: dict[Kind, float] = {}

    def look(self, call: OperatorCall) -> None:
        kind, x = _kind(call), call.args[0]
        largest = float(x[x.isfinite()].abs().amax()) if x.isfinite().any() else 0.0
        self.paths.setdefault(kind, []).append(_path(call))
        self.largest[kind] = max(largest, self.largest.get(kind, 0.0))


# --- twice the cap --------------------------------------------------------------------------------


def _twice_the_cap(kind: Kind, path: str | None = None) -> Planted:
    """Return a mode that plants a tanh with twice its cap, in one kind of tanh.

    path: of the only module where it is wrong; None means all."""

    def bug_of(call: OperatorCall) -> Bug | None:
        if call.name == "tanh_backward":
            is_wrong = call.args[1].data_ptr() in call.memory
            return _BACKWARD if is_wrong else None
        is_wrong = _kind(call) == kind and path in (None, _path(call))
        return _FORWARD if is_wrong else None

    return Planted(("tanh", "tanh_backward"), bug_of)


def _forward(call: OperatorCall) -> torch.Tensor:
    wrong = 2 * torch.tanh(call.args[0] / 2)
    call.memory[wrong.data_ptr()] = wrong  # keeping it keeps its address unique
    return wrong


_SAYS = "a tanh with twice its cap"
_FORWARD = Bug("softcap", _SAYS, _forward)
_BACKWARD = Bug("softcap", _SAYS, lambda call: call.with_args(call.args[0], call.args[1] / 2))


def try_softcaps(prepared: Prepared, tanhs: Tanhs) -> Findings:
    """Doubt a cap of the scores, or note another tanh, if these inputs do not show its effect."""
    doubts: list[Finding] = []
    notes: list[Finding] = []
    for kind, paths in tanhs.paths.items():
        seen = is_seen(prepared, partial(_twice_the_cap, kind))
        if seen is None:
            notes.append(not_tried(f"a wrong tanh{inside(paths)}"))
        elif seen:
            notes += _of_one(prepared, kind, list(dict.fromkeys(paths)))
        if seen is not False:
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
    return Findings(doubts=tuple(doubts), notes=tuple(notes))


def _of_one(prepared: Prepared, kind: Kind, paths: list[str]) -> Iterator[Finding]:
    """Note the layers in which a wrong tanh would pass, though one in all layers would not."""
    tried = paths[:ALONE] if len(paths) > 1 else []
    unseen = [
        path for path in tried if is_seen(prepared, partial(_twice_the_cap, kind, path)) is False
    ]
    if unseen:
        yield Finding(
            "tanh",
            f"a port without the tanh{inside(unseen)} alone would pass, though one without all of "
            f"its kind would not; to show it, use arguments of about 1 there",
        )


def _is_softcap(prepared: Prepared, kind: Kind) -> bool:
    """Return whether a softmax depends on this tanh, or the reference's settings name a cap."""
    reached = False

    def bug_of(call: OperatorCall) -> Bug | None:
        nonlocal reached
        if call.name == "tanh":
            return _LOST if _kind(call) == kind else None
        reached |= bool(call.args[0].isnan().any())
        return None

    run_planted(prepared.reference, Planted(("tanh", *FORWARD), bug_of))
    return reached or any(
        "softcap" in name.replace("_", "") and value
        for named in settings(prepared.reference.module)
        for name, value in named.items()
    )


_LOST = Bug("NaN", "a tanh that is NaN", lambda call: torch.full_like(call.args[0], torch.nan))
"""Not a bug of ports: it marks everything computed from the tanh."""
