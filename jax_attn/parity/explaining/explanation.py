"""The result of `explain`, in words and as plain data."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Group
from rich.text import Text

from jax_attn.parity.explaining.cause import Cause
from jax_attn.parity.explaining.region import Region, TapPair, Wrong
from jax_attn.parity.explaining.taps.tap import Tap
from jax_attn.parity.judge.compare import BESIDE, Verdict
from jax_attn.parity.judge.result import Result
from jax_attn.parity.judge.text import STYLES, joined, number, plain

_SHOWN = 6
"""The number of right or unpaired tensors, and of wrong places on an axis, that a report lists."""


_TRANSFORMS = (
    ("eager", "jit", "it computes something else on concrete arrays than when it is traced"),
    ("jit", "eager", "its operations are right one by one, and not as XLA compiles them together"),
)
"""(transform under which the port is wrong, transform under which it is right, conclusion)."""

_OF_STATE = ("state after the call", "output of the second call")
"""The kinds of tensors that differ if only a state is wrong."""


def differs_on_the_mesh(result: Result) -> bool:
    """Return whether a port on a mesh fails the comparison with itself on one device."""
    fails = (t for t in result.tensors if t.verdict is Verdict.FAIL)
    return any(t.transform.endswith(BESIDE) for t in fails)


@dataclass(frozen=True)
class Explanation:
    """The places where a port first differs from its reference, with possible causes.

    Attributes:
      result: the `Result` of the check.
      regions: the places where an error originates, in the order of computation. Empty if the port
        passes, or if the wrong tensors could not be paired.
      stopped: why the search ended before it was complete: "interrupted", or after how much work;
        empty if it is complete. What it had found is in `regions`.
    """

    result: Result
    regions: tuple[Region, ...]
    stopped: str = field(default="", kw_only=True)

    @property
    def verdict(self) -> Verdict:
        """PASS, FAIL or INCONCLUSIVE, the verdict of the check."""
        return self.result.verdict

    @property
    def sentence(self) -> str:
        """The finding in one sentence."""
        if self.verdict is Verdict.PASS:
            return "No difference: every output and gradient lies within its budget."
        if differs_on_the_mesh(self.result):
            return (
                "The port computes something else on the mesh than on one device: a sum over "
                "devices is wrong, or a device has the wrong shard."
            )
        if not self.regions:
            if self.stopped:
                return f"The check is {self.verdict}, and the search for a place was {self._ended}."
            unknown = (
                f"The check is {self.verdict}, and no tensor inside the port could be told to be "
                "the first wrong one."
            )
            return self._only_under or self._only_state or unknown
        if (causes := self.regions[0].causes) and causes[0].confirmed:
            found = causes[0].sentence
            if (count := len(self.regions)) > 1:
                return f"At the first of {count} wrong places, {found[0].lower()}{found[1:]}"
            return found
        ours, theirs = self.regions[0].first_wrong.ours, self.regions[0].first_wrong.theirs
        way = "backward" if theirs.place.is_backward else "forward"
        more = len(self.regions) - 1
        also = f" It differs at {more} more place{'s' if more > 1 else ''}." if more else ""
        return f"The port first differs {way} at {ours}, where the reference has {theirs}.{also}"

    @property
    def repro(self) -> str:
        """A self-contained script of the first wrong place; "" if there is none."""
        return self.regions[0].repro if self.regions else ""

    @property
    def _only_under(self) -> str:
        """The sentence if the port is right under only one of eager and jit, else ""."""
        failed = {t.transform for t in self.result.tensors if t.verdict is Verdict.FAIL}
        passed = {t.transform for t in self.result.tensors} - failed
        for wrong, right, why in _TRANSFORMS:
            if wrong in failed and right in passed:
                return f"The port passes under {right} and fails under {wrong}: {why}."
        return ""

    @property
    def _only_state(self) -> str:
        """The sentence if outputs and gradients are right and the state after the call is not."""
        failed = [t for t in self.result.tensors if t.verdict is Verdict.FAIL]
        state = [t for t in failed if t.kind == "state after the call"]
        if not state or any(t.kind not in _OF_STATE for t in failed):
            return ""
        names = joined(list(dict.fromkeys(t.name for t in state)))
        return f"Outputs and gradients are right, and the state that a call leaves is not: {names}."

    @property
    def _ended(self) -> str:
        return self.stopped if self.stopped == "interrupted" else f"ended {self.stopped}"

    def __str__(self) -> str:
        return plain(self)

    def __rich__(self) -> Group:
        reasons = () if self.regions else self.result.reasons
        return Group(self._finding, *(Text(f"- {reason}") for reason in reasons))

    @property
    def text(self) -> str:
        """The finding as text, for a report that gives the reasons of the check itself."""
        return plain(self._finding)

    @property
    def _finding(self) -> Group:
        heading = Text.assemble((str(self.verdict), STYLES[self.verdict]), f"  {self.sentence}")
        lines = [Text(line) for region in self.regions for line in _lines(region)]
        if self.stopped:
            lines.append(
                Text(f"\n  The search was {self._ended}; there may be more places, and causes.")
            )
        return Group(heading, *lines)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON: the sentence, the verdict and every region."""
        return {
            "verdict": str(self.verdict),
            "sentence": self.sentence,
            "stopped": self.stopped,
            "regions": [
                {
                    "last_matched": [_pair(pair) for pair in region.last_matched],
                    "first_wrong": _pair(region.first_wrong),
                    "worst": dict(zip(_ELEMENT, region.first_wrong.worst, strict=True)),
                    "equations": [_tap(tap) for tap in region.equations],
                    "where": where(region.first_wrong),
                    "again": [_pair(pair) for pair in region.again],
                    "causes": [_cause(cause) for cause in region.causes],
                    "repro": region.repro,
                }
                for region in self.regions
            ],
        }


_ELEMENT = ("index", "got", "expected")


def where(pair: Wrong) -> list[str]:
    """Describe along which axes only some places are wrong, or say that only the order differs."""
    wrong = pair.is_off
    found = ["the reference's numbers, in another order"] if pair.is_reordered else []
    for axis, size in enumerate(wrong.shape):
        others = tuple(n for n in range(wrong.ndim) if n != axis)
        places = np.flatnonzero(wrong.any(axis=others))
        if 0 < len(places) < size:
            found.append(
                f"axis {axis}: wrong only at {_places(places.tolist())} of 0 to {size - 1}"
            )
    return found


def _places(places: list[int]) -> str:
    first, last = places[0], places[-1]
    if len(places) > 2 and places == list(range(first, last + 1)):
        return f"{first} to {last}"
    shown = [str(n) for n in places[:_SHOWN]]
    more = len(places) - len(shown)
    return joined([*shown, f"{more} more"] if more else shown)


def _lines(region: Region) -> Iterator[str]:
    yield ""
    for pair in region.last_matched[:_SHOWN]:
        yield f"  right   {pair.ours}  =  {pair.theirs}"
    if (more := len(region.last_matched) - _SHOWN) > 0:
        yield f"          and {more} more"
    *unpaired, _ = region.equations
    if len(unpaired) > _SHOWN:
        yield f"  ?       {len(unpaired) - _SHOWN + 1} tensors, and then"
        unpaired = unpaired[1 - _SHOWN :]
    for tap in unpaired:
        yield f"  ?       {tap}"
    wrong = region.first_wrong
    yield f"  WRONG   {wrong.ours}  instead of  {wrong.theirs}"
    at, got, want = wrong.worst
    yield f"          furthest apart at {list(at)}: {number(got, 9)}, expected {number(want, 9)}"
    yield from (f"          {line}" for line in where(wrong))
    if region.again:
        named = dict.fromkeys(str(pair.theirs.place) for pair in region.again)
        shown = joined([place for place in named if place][:_SHOWN])
        count = len(region.again)
        and_at = f"          and so at {count} more place{'s' if count > 1 else ''}"
        yield f"{and_at}: {shown}" if shown else and_at
    for cause in region.causes:
        kind = "cause" if cause.confirmed else "hint "
        yield f"  {kind}   {cause.name}: {cause.sentence}"
    if not region.causes:
        none = "no known cause: nothing that was tried in the reference explains it"
        yield f"  cause   {none if region.tried else 'not looked for'}"


def _tap(tap: Tap) -> dict[str, Any]:
    return {
        "op": tap.op,
        "shape": list(tap.shape),
        **tap.place._asdict(),
    }


def _cause(cause: Cause) -> dict[str, Any]:
    return {
        "name": cause.name,
        "sentence": cause.sentence,
        "site": _tap(cause.site),
        "value": cause.value,
        "confirmed": cause.confirmed,
        "explained": cause.explained,
    }


def _pair(pair: TapPair) -> dict[str, Any]:
    return {"ours": _tap(pair.ours), "theirs": _tap(pair.theirs)}
