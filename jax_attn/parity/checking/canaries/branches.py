"""Branches of the reference that never act in a run: a clamp that no number exceeds, a nan_to_num
without a NaN, a choice that always takes one side. A port without them would pass.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch

from jax_attn.parity.bugs.bug import HIDES, OperatorCall, Site
from jax_attn.parity.checking.canaries.findings import inside
from jax_attn.parity.checking.canaries.knees import KNEES
from jax_attn.parity.checking.canaries.lucky_sizes import LUCKY_SIZES
from jax_attn.parity.checking.canaries.side import Side, Sides, constant
from jax_attn.parity.judge.finding import Finding, Findings, StandingNote
from jax_attn.parity.judge.text import joined
from jax_attn.parity.run.modes.lines import calling_line

# A bound this close to zero keeps a divisor or the argument of a root positive despite rounding.
_GUARD = 1e-3
# A bound this large only keeps a number finite; it is not part of the computation.
_FINITE = 1e30


# --- the sides of each operator -------------------------------------------------------------------


def _bounded(operator: str, x: Any, low: Any = None, high: Any = None) -> Sides:
    """Yield a clamp's sides, as far as they can matter: beyond each bound, and between them."""
    between, inside = [], torch.ones_like(x, dtype=torch.bool)
    for word, bound, beyond, within in (
        ("min", low, torch.lt, torch.gt),
        ("max", high, torch.gt, torch.lt),
    ):
        number = None if bound is None else constant(bound)
        if number is None or not abs(number) < _FINITE:
            continue
        between.append(f"{'above' if word == 'min' else 'below'} {number:g}")
        inside = inside & within(x, bound)
        if word == "min" and number == 0 and not x.is_floating_point():
            continue  # a count or an index: it is not negative
        guards = abs(number) <= _GUARD and operator != "relu"
        what = f"a number {'below' if word == 'min' else 'above'} {number:g}"
        if not x.is_floating_point():
            what += " (longer sequences, if it is a distance)"
        label = operator if operator == "relu" else f"{operator}({word}={number:g})"
        reached = not x.is_floating_point() and bool((x == bound).any())
        yield Side(label, what, guards, standing=reached), bool(beyond(x, bound).any())
    if between and x.is_floating_point():
        what = f"a number {' and '.join(between)}"
        yield Side(f"the argument of {operator}", what), bool(inside.any())


def _clamp(x: Any, low: Any = None, high: Any = None, **named: Any) -> Sides:
    return _bounded("clamp", x, named.get("min", low), named.get("max", high))


def _larger(x: Any, y: Any) -> Sides:
    return _chosen("maximum", x, y, low=True)


def _smaller(x: Any, y: Any) -> Sides:
    return _chosen("minimum", x, y, low=False)


def _chosen(operator: str, x: Any, y: Any, *, low: bool) -> Sides:
    """Yield the sides of a choice between two tensors; if one is constant, it is a bound."""
    if constant(x) is not None:
        x, y = y, x
    if constant(y) is not None:
        yield from _bounded(operator, x, *((y, None) if low else (None, y)))
        return
    for nth, taken in (("first", x > y), ("second", x < y)):
        taken = taken if low else ~taken & (x != y)
        size = "larger" if (nth == "first") == low else "smaller"
        what = f"an element where the first argument is the {size} one"
        yield Side(f"the {nth} argument of {operator}", what), bool(taken.any())


def _nan_to_num(x: Any, *_: Any, **__: Any) -> Sides:
    what = "a number that is not finite, such as a query with every key hidden may give"
    yield Side("nan_to_num", what), not bool(x.isfinite().all())


def _where(condition: Any, x: Any = None, y: Any = None, **named: Any) -> Sides:
    for nth, value, taken in (
        ("first", x, condition),
        ("second", named.get("other", y), ~condition),
    ):
        if value is not None:
            what = f"an element where its condition is {nth == 'first'}"
            chosen = Side(f"the {nth} argument of where", what)
            hiding = Side("a mask's where", "a key that it hides")
            yield hiding if _hides(value) else chosen, bool(taken.any())


def _masked_fill(x: Any, mask: Any, value: Any) -> Sides:
    if _hides(value):
        yield Side("masked_fill", "a key that it hides"), bool(mask.any())
    else:
        what = "an element where its mask is True"
        yield Side(f"masked_fill({constant(value):g})", what), bool(mask.any())


def _index_put(x: Any, indices: Any, *others: Any, **named: Any) -> Sides:
    yield from KNEES["index_put"](x, indices, *others, **named)
    masks = [index for index in indices if index is not None and index.dtype is torch.bool]
    if masks:
        what = "an element where its mask is True"
        yield Side("an assignment to what a mask selects", what), bool(masks[0].any())


def _threshold(x: Any, bound: float, _: Any) -> Sides:
    yield Side(f"threshold({bound:g})", f"a number of {bound:g} or less"), bool((x <= bound).any())


def _shrunk(operator: str, x: Any, width: float = 0.5) -> Sides:
    what = f"a number between -{width:g} and {width:g}"
    yield Side(f"{operator}({width:g})", what), bool((x.abs() <= width).any())


def _remainder(x: Any, divisor: Any) -> Sides:
    number = constant(divisor)
    if number is not None and isinstance(x, torch.Tensor):
        what = f"a number below 0, or of {number:g} or more"
        what += "" if x.is_floating_point() else " (longer sequences, if it is a position)"
        acts = bool((torch.remainder(x, number) != x).any())
        yield Side(f"remainder({number:g})", what), acts
        if acts:
            yield _below(f"remainder({number:g})", x)


def _fmod(x: Any, divisor: Any) -> Sides:
    number = constant(divisor)
    if number is not None:
        what = f"a number of {abs(number):g} or more, or -{abs(number):g} or less"
        yield Side(f"fmod({number:g})", what), bool((x.abs() >= abs(number)).any())
        yield _below(f"fmod({number:g})", x)


def _below(operator: str, x: torch.Tensor) -> tuple[Side, bool]:
    """Return the side on which remainder and fmod differ."""
    side = Side(f"the sign of {operator}", "a number below 0", standing=not x.is_floating_point())
    return side, bool((x < 0).any())


def _stepped(operator: str, x: Any, *bounds: Any, **named: Any) -> Sides:
    """Yield the side of a step function; it acts if numbers fall on more than one step."""
    if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel() > 1:
        steps = getattr(torch, operator)(x, *bounds, **named)
        what = "numbers that it takes to several steps"
        yield Side(operator, what), bool(steps.min() != steps.max())
        if operator == "trunc":
            yield Side("trunc in place of floor", "a number below 0"), bool((x < 0).any())


def _bent(operator: str, x: Any) -> Sides:
    yield Side(operator, "a number below 0"), bool((x < 0).any())


def _sign(x: Any) -> Sides:
    yield from _bent("sign", x)
    yield Side("sign", "a number above 0"), bool((x > 0).any())


def _masked_scatter(x: Any, mask: Any, _: Any) -> Sides:
    yield Side("masked_scatter", "an element where its mask is True"), bool(mask.any())


def _cast(x: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Sides:
    """Yield the sides of a condition that is cast to a number, such as a factor of 0 or 1."""
    if x.dtype is torch.bool and dtype and dtype.is_floating_point:
        for value, taken in ((True, x), (False, ~x)):
            what = f"an element where the condition is {value}"
            yield Side("a condition taken as a number", what), bool(taken.any())


def _product(x: Any, y: Any) -> Sides:
    for condition, other in ((x, y), (y, x)):
        if _is_floating(other) and isinstance(condition, torch.Tensor):
            yield from _cast(condition, dtype=other.dtype)


def _is_floating(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _hides(value: Any) -> bool:
    number = constant(value)
    return number is not None and number <= HIDES


_STEPS = ("bucketize", "ceil", "floor", "round", "trunc")
_SIDES: dict[str, Callable[..., Sides]] = {
    **KNEES,
    **LUCKY_SIZES,
    **{name: partial(_stepped, name) for name in _STEPS},
    "_prelu_kernel": lambda x, _: _bent("prelu", x),
    "_to_copy": _cast,
    "abs": lambda x: _bent("abs", x) if x.is_floating_point() else iter(()),
    "clamp": _clamp,
    "clamp_max": lambda x, high: _bounded("clamp", x, None, high),
    "clamp_min": lambda x, low: _bounded("clamp", x, low),
    "celu": lambda x, *_: _bent("celu", x),
    "elu": lambda x, *_: _bent("elu", x),
    "fmod": _fmod,
    "hardshrink": lambda x, *width: _shrunk("hardshrink", x, *width),
    "hardsigmoid": lambda x: _bounded("hardsigmoid", x, -3.0, 3.0),
    "hardswish": lambda x: _bounded("hardswish", x, -3.0, 3.0),
    "hardtanh": lambda x, low=-1.0, high=1.0: _bounded("hardtanh", x, low, high),
    "index_put": _index_put,
    "leaky_relu": lambda x, *_: _bent("leaky_relu", x),
    "masked_fill": _masked_fill,
    "masked_scatter": _masked_scatter,
    "maximum": _larger,
    "minimum": _smaller,
    "mul": _product,
    "nan_to_num": _nan_to_num,
    "relu": lambda x: _bounded("relu", x, 0.0),
    "relu6": lambda x: _bounded("relu6", x, 0.0, 6.0),
    "remainder": _remainder,
    "sign": _sign,
    "softshrink": lambda x, *width: _shrunk("softshrink", x, *width),
    "threshold": _threshold,
    "where": _where,
}
OF_MASKS = ("_to_copy", "index_put", "masked_fill", "masked_scatter", "mul", "sum", "where")
"""Operators that a mask among the inputs makes act; the canaries of masks then show it."""


# --- which of them act ----------------------------------------------------------------------------


class Branches:
    """Records the sides of the branches met, and whether each acts anywhere."""

    def __init__(self, operators: Collection[str] = tuple(_SIDES)):
        self.operators = operators
        self.acts: dict[tuple[Site | None, Side], bool] = {}
        self._lines: dict[tuple[Site | None, Side], str] = {}

    def look(self, call: OperatorCall) -> None:
        if call.name == "where" and len(call.args) < 2:
            return  # the indices of what is true
        for side, acts in _SIDES[call.name](*call.args, **call.kwargs):
            key = None if side.anywhere else call.site, side
            if key not in self.acts:
                self._lines[key] = calling_line()
            self.acts[key] = self.acts.get(key, False) or acts

    def notes(self, *others: "Branches") -> Findings:
        """Note the sides that never act. others: branches in runs with other masks or inputs."""
        idle: dict[Side, list[tuple[str, str]]] = {}
        for key, acts in self.acts.items():
            site, side = key
            if not acts and not any(other.acts.get(key) for other in others):
                idle.setdefault(side, []).append(((site and site.path) or "", self._lines[key]))
        notes = [
            (StandingNote if side.standing else Finding)(
                "idle-branch",
                f"{side.operator}{_where_is(places)} never takes effect, so a port without it "
                f"would pass; to show it, use {side.what}",
            )
            for side, places in idle.items()
            if not side.guards
        ]
        guards = [f"{s.operator}{_where_is(places)}" for s, places in idle.items() if s.guards]
        if guards:
            zero = ", or a number below 0" if any("=0)" in guard for guard in guards) else ""
            sentence = (
                f"{joined(guards)} {'guard' if guards[1:] else 'guards'} against zero and never "
                f"{'take' if guards[1:] else 'takes'} effect, so a port without "
                f"{'them' if guards[1:] else 'it'} would pass; to show it, use a row of zeros, "
                f"or a query with every key hidden{zero}"
            )
            notes.append(Finding("idle-guard", sentence))
        return Findings(notes=tuple(notes))


def _where_is(places: list[tuple[str, str]]) -> str:
    lines = list(dict.fromkeys(line for _, line in places if line))
    return inside([path for path, _ in places]) + (f" ({lines[0]})" if len(lines) == 1 else "")
