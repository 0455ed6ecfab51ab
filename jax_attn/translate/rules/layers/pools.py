"""Write pools, padding and windows, with the axes that torch has."""

import math
from collections.abc import Sequence
from typing import Any

from jax_attn.translate.rules.calls import call, known, number, refused, spread
from jax_attn.translate.rules.rule import Array, Rule, VaryingSize

Windows = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], list[tuple[int, int]]]
"""The kernel, stride and dilation by axis, and what a window meets on each side."""


def _over(rank: int, each: Sequence[Any], other: Any) -> str:
    """Write values of the last axes after those of the axes before them."""
    return str((other,) * (rank - len(each)) + tuple(each))


def _windows(
    self: Array,
    out: Array,
    kernel: tuple[int, ...],
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: bool,
) -> Windows:
    """Return the kernel, stride and dilation by axis, and what a window meets on each side."""
    axes = len(kernel)
    stride = spread(stride, axes, "stride") if stride else kernel
    sides = spread(padding, axes, "padding")
    dilation = spread(dilation, axes, "dilation")
    pads = [(side, side) for side in sides]
    if ceil_mode:
        sizes = known(self.shape[-axes:], "a size pooled with ceil_mode")
        ends = known(out.shape[-axes:], "a size pooled with ceil_mode")
        # The last window may reach beyond the padding.
        pads = [
            (side, max(side, (end - 1) * step + by * (width - 1) + 1 - size - side))
            for side, end, step, by, width, size in zip(
                sides, ends, stride, dilation, kernel, sizes, strict=True
            )
        ]
    return kernel, stride, dilation, pads


def _reduced(
    rank: int,
    initial: str,
    function: str,
    windows: Windows,
    operand: str = "self",
) -> str:
    kernel, stride, dilation, pads = windows
    return call(
        "jax.lax.reduce_window",
        operand,
        initial,
        f"jax.lax.{function}",
        _over(rank, kernel, 1),
        _over(rank, stride, 1),
        _over(rank, pads, (0, 0)) if any(map(any, pads)) else "'VALID'",
        window_dilation=_over(rank, dilation, 1) if any(d > 1 for d in dilation) else None,
    )


def max_pool(axes: int, *, with_indices: bool = False) -> Any:
    """Make the rule of a maximum pool over the last axes."""

    def rule(
        self: Array,
        out: Any,
        kernel_size: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        ceil_mode: bool,
    ) -> str | tuple[str, str]:
        result = out[0] if with_indices else out
        kernel = spread(kernel_size, axes)
        windows = _windows(self, result, kernel, stride, padding, dilation, ceil_mode)
        written = ", ".join(map(str, windows))
        if any(by > 1 for by in windows[2]):
            return f"dilated_max_pool(self, {written})" + ("" if with_indices else "[0]")
        if not self.is_floating:
            raise NotImplementedError("a maximum pool of integers")
        pooled = _reduced(self.rank, "-jnp.inf", "max", windows)
        return (pooled, f"max_pool_indices(self, {written})") if with_indices else pooled

    return rule


def avg_pool(axes: int) -> Any:
    """Make the rule of an average pool over the last axes."""

    def rule(
        self: Array,
        out: Array,
        kernel_size: Any,
        stride: Any,
        padding: Any,
        ceil_mode: bool,
        count_include_pad: bool,
        divisor_override: int | None = None,
    ) -> str:
        if not self.is_floating:
            raise NotImplementedError("an average pool of integers")
        kernel = spread(kernel_size, axes)
        windows = _windows(self, out, kernel, stride, padding, 1, ceil_mode)
        sums = _reduced(self.rank, "0.0", "add", windows)
        sides = spread(padding, axes)
        if divisor_override is not None:
            return f"{sums} / {divisor_override}"
        beyond = [(0, high - side) for side, (_, high) in zip(sides, windows[3], strict=True)]
        full = not any(map(any, beyond)) if count_include_pad else not any(map(any, windows[3]))
        if full:
            return f"{sums} / {math.prod(kernel)}"
        ones, pads = "jnp.ones_like(self)", windows[3]
        if count_include_pad and any(sides):
            inside = _over(self.rank, [(side, side) for side in sides], (0, 0))
            ones, pads = f"jnp.pad({ones}, {inside}, constant_values=1)", beyond
        counts = _reduced(self.rank, "0.0", "add", (*windows[:3], pads), ones)
        return f"{sums} / {counts}"

    return rule


def adaptive_avg_pool(self: Array, out: Array, output_size: Any) -> str:
    axes = len(output_size)
    sizes, ends = self.shape[-axes:], out.shape[-axes:]
    if ends == sizes:
        return "self"
    if all(end == 1 for end in ends):
        return f"self.mean({-1 if axes == 1 else tuple(range(-axes, 0))}, keepdims=True)"
    if kernel := _even(sizes, ends):
        parts = ", ".join(f"{end}, {width}" for end, width in zip(ends, kernel, strict=True))
        over = tuple(range(1 - 2 * axes, 0, 2))
        return f"self.reshape(*self.shape[:-{axes}], {parts}).mean({over if axes > 1 else -1})"
    return f"adaptive_avg_pool(self, {_targets(out, axes)})"


def _even(
    sizes: Sequence[int | VaryingSize], ends: Sequence[int | VaryingSize]
) -> tuple[int, ...] | None:
    """Return the widths of the windows if all are as wide and none overlap."""
    pairs = [
        (size, end)
        for size, end in zip(sizes, ends, strict=True)
        if isinstance(size, int) and isinstance(end, int) and size % end == 0
    ]
    return tuple(size // end for size, end in pairs) if len(pairs) == len(sizes) else None


def _targets(out: Array, axes: int) -> str:
    """Write the sizes of the result as the operator names them."""
    sizes = [
        f"output_size[{i}]" if isinstance(size, VaryingSize) else str(size)
        for i, size in enumerate(out.shape[-axes:])
    ]
    return f"({', '.join(sizes)},)" if axes == 1 else f"({', '.join(sizes)})"


def adaptive_max_pool(self: Array, out: Any, output_size: Any) -> str | tuple[str, str]:
    axes = len(output_size)
    sizes, ends = self.shape[-axes:], out[0].shape[-axes:]
    if kernel := _even(sizes, ends):
        windows = (kernel, kernel, (1,) * axes, [(0, 0)] * axes)
        return (
            _reduced(self.rank, "-jnp.inf", "max", windows),
            f"max_pool_indices(self, {kernel}, {kernel}, {windows[2]}, {windows[3]})",
        )
    return f"adaptive_max_pool(self, {_targets(out[0], axes)})"


def _widths(rank: int, pad: Any) -> str:
    """Write torch's pairs, last axis first, as one pair an axis."""
    pairs = [
        tuple(
            f"pad[{i}]" if isinstance(pad[i], VaryingSize) else str(pad[i])
            for i in (2 * n, 2 * n + 1)
        )
        for n in range(len(pad) // 2)
    ]
    each = [("0", "0")] * (rank - len(pairs)) + pairs[::-1]
    return (
        f"({', '.join(f'({low}, {high})' for low, high in each)})"
        if rank > 1
        else (f"({', '.join(each[0])})")
    )


def padded(self: Array, pad: Any, mode: str = "constant", value: Any = None) -> str:
    if not any(isinstance(n, VaryingSize) or n for n in pad):
        return "self"
    modes = {"constant": None, "reflect": "'reflect'", "replicate": "'edge'", "circular": "'wrap'"}
    negative = [isinstance(n, int) and n < 0 for n in pad]
    source = "self"
    if any(negative):
        if mode != "constant":
            raise NotImplementedError(f"negative padding in the mode {mode}")
        cuts = [
            (-pad[i] if negative[i] else None, pad[i + 1] if negative[i + 1] else None)
            for i in range(0, len(pad), 2)
        ][::-1]
        slices = [f"{low or ''}:{high or ''}" for low, high in cuts]
        source = f"self[{', '.join((['...'] if len(cuts) < self.rank else []) + slices)}]"
        pad = [0 if cut else n for n, cut in zip(pad, negative, strict=True)]
        if not any(isinstance(n, VaryingSize) or n for n in pad):
            return source
    filled = mode == "constant" and value not in (None, 0)
    return call(
        "jnp.pad",
        source,
        _widths(self.rank, pad),
        mode=modes[mode],
        constant_values=number(value, self.dtype) if filled else None,
    )


def pads(mode: str) -> Any:
    """Make the rule of a padding of one mode, whose argument is `padding`."""

    def rule(self: Array, padding: Any) -> str:
        return padded(self, padding, mode).replace("pad[", "padding[")

    return rule


def im2col(kernel_size: Any, dilation: Any, padding: Any, stride: Any, self: Array) -> str:
    dilated = spread(dilation, 2, "dilation")
    source = "self" if self.rank == 4 else "self[None]"
    patches = call(
        "jax.lax.conv_general_dilated_patches",
        source,
        str(spread(kernel_size, 2)),
        str(spread(stride, 2)),
        str(tuple((p, p) for p in spread(padding, 2))),
        rhs_dilation=None if dilated == (1, 1) else dilated,
        # The patches are a convolution, which would round them on an accelerator.
        precision="jax.lax.Precision.HIGHEST",
    )
    height, width = spread(kernel_size, 2)
    channels = known(self.shape[-3:-2], "the number of channels")[0] * height * width
    leading = "self.shape[0], " if self.rank == 4 else ""
    return f"{patches}.reshape({leading}{channels}, -1)"


def col2im(output_size: Any, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> str:
    each = (spread(n, 2) for n in (kernel_size, dilation, padding, stride))
    return f"col2im(self, output_size, {', '.join(map(str, each))})"


POOLS: dict[str, Rule] = {
    **{f"aten.max_pool{n}d.default": max_pool(n) for n in (1, 2, 3)},
    **{
        f"aten.max_pool{n}d_with_indices.default": max_pool(n, with_indices=True) for n in (1, 2, 3)
    },
    **{f"aten.avg_pool{n}d.default": avg_pool(n) for n in (1, 2, 3)},
    **{f"aten.adaptive_avg_pool{n}d.default": adaptive_avg_pool for n in (1, 2, 3)},
    **{f"aten._adaptive_avg_pool{n}d.default": adaptive_avg_pool for n in (2, 3)},
    **{f"aten.adaptive_max_pool{n}d.default": adaptive_max_pool for n in (1, 2, 3)},
    "aten.pad.default": padded,
    "aten.constant_pad_nd.default": padded,
    "aten._pad_circular.default": lambda self, pad: padded(self, pad, "circular"),
    **{f"aten.reflection_pad{n}d.default": pads("reflect") for n in (1, 2, 3)},
    **{f"aten.replication_pad{n}d.default": pads("replicate") for n in (1, 2, 3)},
    "aten.im2col.default": im2col,
    "aten.col2im.default": col2im,
    "aten.max_unpool2d.default": "max_unpool(self, indices, output_size)",
    "aten.fractional_max_pool2d.default": refused("it draws random numbers"),
    "aten.fractional_max_pool3d.default": refused("it draws random numbers"),
}
