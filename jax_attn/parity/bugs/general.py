"""Bugs of any operation: another scale, another precision."""

from collections.abc import Callable, Collection, Iterator
from fractions import Fraction
from functools import partial
from itertools import permutations
from math import isclose, sqrt

import torch
from torch import Tensor

from jax_attn.parity.bugs.bug import (
    PRODUCTS,
    Bug,
    OperatorCall,
    arguments,
    float_tensors,
    is_number,
    result,
    rounded,
)

_NARROW = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_SLIGHT = 1e-3


def precisions(call: OperatorCall) -> Iterator[Bug]:
    """Yield results rounded to a narrower dtype and, for a product, rounded operands too."""
    for name, dtype in _NARROW.items():
        narrow, unit = partial(rounded, dtype=dtype), torch.finfo(dtype).eps
        says = f"a result rounded to {name}"
        yield Bug(f"precision ({name})", says, result(narrow), name, unit)
        if call.name in PRODUCTS:
            says = f"operands and a result rounded to {name}"
            change = partial(_product_of_rounded, narrow)
            yield Bug(f"precision ({name})", says, change, name, unit)


def narrowed_parameters(call: OperatorCall) -> Iterator[Bug]:
    """Yield calls with a parameter rounded to a narrower dtype."""
    for i, name in enumerate(call.leaves):
        if name and isinstance(call.args[i], Tensor) and call.args[i].is_floating_point():
            for dtype, narrow in _NARROW.items():
                other = call.args[i].to(narrow).double()
                if not torch.equal(other, call.args[i]):
                    says = f"`{name}` rounded to {dtype}"
                    yield Bug(f"parameter (in {dtype})", says, arguments({i: other}))


def _product_of_rounded(narrow: Callable[[Tensor], Tensor], call: OperatorCall) -> Tensor:
    places = float_tensors(call.args)[-2:]
    args = [narrow(x) if i in places else x for i, x in enumerate(call.args)]
    return narrow(call.with_args(*args))


def scales(op: str, factor: float, is_backward: bool, sizes: Collection[int]) -> Iterator[Bug]:
    """Yield the result times a factor that was fitted to the port's numbers."""
    if isclose(factor, 1.0, rel_tol=1e-12):
        return
    near = nearest(factor, sizes)
    shown = f"{factor:.6g}" if f"{factor:.6g}" != "1" else f"{factor:.9g}"
    shown += f" ({near})" if near not in ("", shown) else ""
    name, says = "scale", f"the result of {op} {shown} times as large"
    if is_backward:
        name = {0.0: "gradient (stopped)", 2.0: "gradient (doubled)"}.get(
            round(factor, 9), "gradient (scaled)"
        )
        says = "no gradient" if factor == 0 else f"a gradient that is {shown} times as large"
    yield Bug(name, says, result(lambda x: x * factor), near or factor)


def is_slight(bug: Bug) -> bool:
    """Return whether a bug is a fitted factor so near 1 that it may stand for another, such as an
    epsilon, which is tried too."""
    return bug.name == "scale" and isinstance(bug.value, float) and abs(bug.value - 1) < _SLIGHT


def factors(call: OperatorCall) -> Iterator[Bug]:
    """Yield a call without its multiplication or division by a number."""
    by = call.args[1]
    if is_number(by) and float(by) != 1.0:
        does = "multiplication" if call.name == "mul" else "division"
        says = f"no {does} by {float(by):.6g}"
        yield Bug("scale (left out)", says, lambda call: call.args[0].clone())


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
