"""Variants of any operation: another scale, another precision, another operand."""

from collections.abc import Callable, Collection, Iterator, Sequence
from fractions import Fraction
from functools import partial
from itertools import islice, permutations
from math import isclose, sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jax_attn.parity.explaining.taps.tap import Tap
from jax_attn.parity.explaining.variants.activations import ACTIVATIONS
from jax_attn.parity.explaining.variants.variant import (
    PRODUCTS,
    Call,
    Change,
    Variant,
    arguments,
    float_tensors,
    is_number,
    result,
    rounded,
)
from jax_attn.parity.explaining.views import views

_NARROW = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


_MOST_ORDERS = 4


def precisions(call: Call) -> Iterator[Variant]:
    """Yield results rounded to a narrower dtype and, for a product, rounded operands too."""
    for name, dtype in _NARROW.items():
        narrow, unit = partial(rounded, dtype=dtype), torch.finfo(dtype).eps
        says = f"a result rounded to {name}"
        yield Variant(f"precision ({name})", says, result(narrow), name, unit)
        if call.name in PRODUCTS:
            says = f"operands and a result rounded to {name}"
            change = partial(_product_of_rounded, narrow)
            yield Variant(f"precision ({name})", says, change, name, unit)


def _product_of_rounded(narrow: Callable[[Tensor], Tensor], call: Call) -> Tensor:
    places = float_tensors(call.args)[-2:]
    args = [narrow(x) if i in places else x for i, x in enumerate(call.args)]
    return narrow(call.with_args(*args))


def scales(op: str, factor: float, is_backward: bool, sizes: Collection[int]) -> Iterator[Variant]:
    """Yield the result times a factor that was fitted to the port's numbers."""
    if isclose(factor, 1.0, rel_tol=1e-12):
        return
    near = nearest(factor, sizes)
    shown = f"{factor:.6g}"
    shown += f" ({near})" if near not in ("", shown) else ""
    name, says = "scale", f"the result of {op} {shown} times as large"
    if is_backward:
        name = {0.0: "gradient (stopped)", 2.0: "gradient (doubled)"}.get(
            round(factor, 9), "gradient (scaled)"
        )
        says = "no gradient" if factor == 0 else f"a gradient that is {shown} times as large"
    yield Variant(name, says, result(lambda x: x * factor), near or factor)


def factors(call: Call) -> Iterator[Variant]:
    """Yield a call without its multiplication or division by a number."""
    by = call.args[1]
    if is_number(by) and float(by) != 1.0:
        does = "multiplication" if call.name == "mul" else "division"
        says = f"no {does} by {float(by):.6g}"
        yield Variant("scale (left out)", says, lambda call: call.args[0].clone())


def nearest(factor: float, sizes: Collection[int]) -> str:
    """Return a factor as a power of a size or a fraction, within rounding; "" if it is neither."""
    fraction = Fraction(factor).limit_denominator(64)
    if fraction.denominator < 4 and isclose(factor, float(fraction), rel_tol=1e-6):
        return "" if fraction.denominator == 1 else str(fraction)
    sizes = sorted({n for n in sizes if n > 1})
    for n in sizes:
        for power, spelled in ((1, f"{n}"), (0.5, f"√{n}"), (-0.5, f"1/√{n}"), (-1, f"1/{n}")):
            if isclose(factor, n**power, rel_tol=1e-5):
                return spelled
    for n, m in permutations(sizes, 2):
        if isclose(factor, sqrt(n / m), rel_tol=1e-5):
            return f"√({n}/{m})"
    return str(fraction) if isclose(factor, float(fraction), rel_tol=1e-6) else ""


def skips(call: Call, others: Sequence[tuple[str | None, Tap]]) -> Iterator[Variant]:
    """Yield results with a step left out, in which its input replaces its result.

    For a step that is an activation, also yield other activations. others: (the step between a
    tensor and the result, or None if it has no name; the tensor).
    """
    right = _first(call.result())
    for step, tap in others:
        if step is None:
            continue
        for other in _seen_as(tap, right):
            yield Variant(f"{step} (left out)", f"no {step}", _always(other))
            if step == "activation":
                yield from _of_other_activations(other, call.name)


def _of_other_activations(x: Tensor, own: str) -> Iterator[Variant]:
    """Yield other activations if the reference writes out its own. own: its last operation."""
    for name, function in ACTIVATIONS.items():
        if name not in ("none", own):
            says = f"the activation {name} in place of its own"
            yield Variant(f"activation ({name})", says, _always(function(x)))


def wirings(call: Call, others: Sequence[Tap]) -> Iterator[Variant]:
    """Yield other tensors in place of an operand, or of the result."""
    for tap in others:
        for i in float_tensors(call.args):
            operand = call.args[i]
            for other in _seen_as(tap, operand):
                if torch.equal(other, operand):
                    continue
                name, says = _WIRINGS.get(call.name, "order"), _named(tap)
                if torch.equal(other.flatten().sort()[0], operand.flatten().sort()[0]):
                    name, says = "transposed (axes exchanged)", f"{says}, its axes exchanged,"
                says = f"{says} in place of operand {i + 1}"
                yield Variant(name, says, arguments({i: other}))
        for other in _seen_as(tap, _first(call.result())):
            says = f"{_named(tap)} in place of its own result"
            yield Variant("order", says, _always(other))


def _named(tap: Tap) -> str:
    return str(tap) if tap.is_leaf else f"the result of {tap}"


def _always(x: Tensor) -> Change:
    return result(lambda right: x)


def _first(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


_WIRINGS = {"add": "residual (from another tensor)", "bmm": "packed order"}


def _seen_as(tap: Tap, x: Tensor) -> Iterator[Tensor]:
    """Yield a tap in the shape of a tensor of the same size, in several orders of its axes."""
    if tap.value.size == x.numel() > 1:
        for view in islice(views(tap.shape, x.shape), _MOST_ORDERS):
            yield torch.from_numpy(np.ascontiguousarray(view.of(tap.value)))
