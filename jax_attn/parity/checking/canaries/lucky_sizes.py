"""Sizes at which two different operators give the same: SAME for a given padding, pools that round
sizes up or down, nearest neighbours counted from an edge or from a middle.

The notes are standing ones: a model may run at no other size. No size stands in a side, so that a
call at which it acts speaks for those of other sizes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jax_attn.parity.checking.canaries.side import Side, Sides

Sizes = Sequence[int]
_OTHER = (
    "inputs of an odd and an even size, such as parity.suggest_inputs(reference, sets=2) makes for "
    "one check"
)


def _convolution(
    x: Any, weight: Any, _: Any, stride: Sizes, padding: Sizes, dilation: Sizes, transposed: bool,
    *__: Any,
) -> Sides:  # fmt: skip
    sizes, kernel = x.shape[2:], weight.shape[2:]
    if transposed or max(stride) == 1 or not any(padding):
        return
    axes = [
        *zip(sizes, kernel, *(_each(a, sizes) for a in (stride, padding, dilation)), strict=True)
    ]
    near = [_is_same(n + more, *rest) for n, *rest in axes for more in range(rest[1])]
    if any(near) and not all(near):
        operator = f"padding={_spelled(padding)} in place of SAME, of a convolution of stride "
        side = Side(f"{operator}{_spelled(stride)},", _OTHER, standing=True, anywhere=True)
        yield side, not all(_is_same(*one) for one in axes)


def _is_same(n: int, kernel: int, stride: int, padding: int, dilation: int) -> bool:
    """Return whether SAME pads an axis as given: as many results, and as much before the first."""
    reach = (kernel - 1) * dilation + 1
    out = -(-n // stride)
    total = max((out - 1) * stride + reach - n, 0)
    return (n + 2 * padding - reach) // stride + 1 == out and total // 2 == padding


def _pool(
    operator: str,
    at: int,
    x: Any,
    kernel: Sizes,
    stride: Sizes = (),
    padding: Any = 0,
    *others: Any,
) -> Sides:
    """at: the place of `ceil_mode` among the arguments after the padding."""
    sizes = x.shape[-2:]
    windows, steps, pads = (_each(a, sizes) for a in (kernel, stride or kernel, padding))
    dilation = others[0] if at and others else 1
    if max(steps) == 1 or max(_each(dilation, sizes)) > 1:
        return
    left = [n + 2 * p - k for n, k, p in zip(sizes, windows, pads, strict=True)]
    if any(left):  # else one window holds everything
        mode = bool(others[at]) if len(others) > at else False
        operator = f"ceil_mode={mode} of {operator}({_spelled(windows)})"
        side = Side(operator, _OTHER, standing=True, anywhere=True)
        yield side, any(rest % step for rest, step in zip(left, steps, strict=True))


def _adaptive(operator: str, x: Any, out: Sizes) -> Sides:
    sizes = x.shape[-len(out) :]
    if any(m > 1 for m in out):
        operator = f"the uneven windows of {operator}({_spelled(out)})"
        side = Side(operator, _OTHER, standing=True, anywhere=True)
        yield side, any(n % m for n, m in zip(sizes, out, strict=True))


def _nearest(operator: str, x: Any, out: Sizes | None, *scales: Any) -> Sides:
    if out is None or any(scales):
        return  # the same for every size, if the scale is whole
    sizes = x.shape[-len(out) :]
    where = [
        [(i * n // m, (2 * i + 1) * n // (2 * m)) for i in range(m)]
        for n, m in zip(sizes, out, strict=True)
    ]
    other = "nearest-exact" if operator == "nearest" else "nearest"
    side = Side(
        f"{operator} in place of {other}",
        "sizes of which one is no multiple",
        standing=True,
        anywhere=True,
    )
    yield side, any(a != b for axis in where for a, b in axis)


def _to_reals(x: Any, axes: Sizes, norm: int, size: int) -> Sides:
    """Yield irfft's number of results, which is even if it is left out."""
    if size > 1:
        side = Side("the odd n of an irfft", _OTHER, standing=True, anywhere=True)
        yield side, size % 2 == 1


def _each(given: Any, sizes: Sizes) -> list[int]:
    """Return one number for each axis, of which a call may give one for all."""
    numbers = [given] if isinstance(given, int) else [*given]
    return numbers * len(sizes) if len(numbers) == 1 else numbers


def _spelled(sizes: Sizes) -> str:
    return " x ".join(map(str, dict.fromkeys(sizes) if len({*sizes}) == 1 else sizes))


LUCKY_SIZES: dict[str, Callable[..., Sides]] = {
    "_adaptive_avg_pool2d": partial(_adaptive, "adaptive_avg_pool2d"),
    "_adaptive_avg_pool3d": partial(_adaptive, "adaptive_avg_pool3d"),
    "_fft_c2r": _to_reals,
    "_upsample_nearest_exact1d": partial(_nearest, "nearest-exact"),
    "_upsample_nearest_exact2d": partial(_nearest, "nearest-exact"),
    "adaptive_max_pool2d": partial(_adaptive, "adaptive_max_pool2d"),
    "avg_pool2d": partial(_pool, "avg_pool2d", 0),
    "convolution": _convolution,
    "max_pool2d_with_indices": partial(_pool, "max_pool2d", 1),
    "upsample_nearest1d": partial(_nearest, "nearest"),
    "upsample_nearest2d": partial(_nearest, "nearest"),
}
"""Operator -> the sides of its calls, which act at other sizes."""
