"""Resizing images, and sampling them by a grid."""

from typing import Any

from jax_attn.translate.rules.calls import call
from jax_attn.translate.rules.rule import Array, Rule, VaryingSize


def _factors(axes: int, scales: Any) -> list[float | None]:
    return list(scales) if scales else [None] * axes


def _sizes(name: str, out: Array, axes: int, scales: Any) -> list[str]:
    """Write the sizes of the result, from what the operator names where they vary."""
    written = []
    for i, size in enumerate(out.shape[-axes:]):
        if not isinstance(size, VaryingSize):
            written.append(str(size))
        elif scales:
            written.append(f"int({name}.shape[{i - axes}] * {scales[i]!r})")
        else:
            written.append(f"output_size[{i}]")
    return written


def _exact(image: Array, out: Array, axes: int, scales: Any) -> bool:
    """Return whether the scales are the ratios of the sizes, as JAX has them."""
    if not scales or all(scale is None for scale in scales):
        return True
    have, get = image.shape[-axes:], out.shape[-axes:]
    return all(
        scale is None
        or float(scale).is_integer()
        or (isinstance(h, int) and isinstance(g, int) and h * scale == g)
        for scale, h, g in zip(scales, have, get, strict=True)
    )


def _nearest(name: str, image: Array, out: Array, axes: int, scales: Any, exact: bool) -> str:
    factors = []
    for h, g, scale in zip(
        image.shape[-axes:], out.shape[-axes:], _factors(axes, scales), strict=True
    ):
        if isinstance(h, int) and isinstance(g, int) and g % h == 0 and scale in (None, g / h):
            factors.append(g // h)
        elif isinstance(h, VaryingSize) and scale is not None and float(scale).is_integer():
            factors.append(int(scale))
    if len(factors) == axes:
        # Both ways to round agree where each element is repeated.
        return name + "".join(
            f".repeat({factor}, axis={i - axes})" for i, factor in enumerate(factors) if factor != 1
        )
    sizes = _tuple(_sizes(name, out, axes, scales))
    if exact and _exact(image, out, axes, scales):
        lead = f"*{name}.shape[:-{axes}]"
        return f"jax.image.resize({name}, ({lead}, {sizes[1:-1].rstrip(',')}), 'nearest')"
    return call(
        "upsample_nearest",
        name,
        sizes,
        scales=_tuple([repr(s) for s in scales]) if scales and any(scales) else None,
        exact=True if exact else None,
    )


def _tuple(each: list[str]) -> str:
    return f"({', '.join(each)}{',' if len(each) == 1 else ''})"


def _smooth(
    name: str,
    image: Array,
    out: Array,
    axes: int,
    align_corners: bool,
    scales: Any,
    method: str,
    antialias: bool,
) -> str:
    sizes = _sizes(name, out, axes, scales)
    plain = not align_corners and _exact(image, out, axes, scales)
    if plain and (antialias or method == "linear"):
        return call(
            "jax.image.resize",
            name,
            f"(*{name}.shape[:-{axes}], {', '.join(sizes)})",
            f"'{method}'",
            antialias=None if antialias else False,
        )
    if antialias:
        raise NotImplementedError("an antialiased resize with align_corners or scales of its own")
    return call(
        "resize",
        name,
        _tuple(sizes),
        method=None if method == "linear" else f"'{method}'",
        align_corners=True if align_corners else None,
        scales=_tuple([repr(s) for s in scales])
        if scales and any(scales) and not align_corners
        else None,
    )


def nearest_vec(exact: bool) -> Any:
    def rule(input: Array, out: Array, scale_factors: Any) -> str:
        return _nearest("input", input, out, input.rank - 2, scale_factors, exact)

    return rule


def smooth_vec(method: str, antialias: bool = False) -> Any:
    def rule(input: Array, out: Array, align_corners: bool, scale_factors: Any) -> str:
        return _smooth(
            "input", input, out, input.rank - 2, align_corners, scale_factors, method, antialias
        )

    return rule


def nearest(axes: int, exact: bool) -> Any:
    """Make the rule of an overload with a scale an axis, each an argument of its own."""
    if axes == 1:
        return lambda self, out, scales: _nearest("self", self, out, 1, _given(scales), exact)
    if axes == 2:
        return lambda self, out, scales_h, scales_w: _nearest(
            "self", self, out, 2, _given(scales_h, scales_w), exact
        )
    return lambda self, out, scales_d, scales_h, scales_w: _nearest(
        "self", self, out, 3, _given(scales_d, scales_h, scales_w), exact
    )


def smooth(axes: int, method: str, antialias: bool = False) -> Any:
    """Make the rule of an overload with a scale an axis, each an argument of its own."""

    def written(self: Array, out: Array, align_corners: bool, scales: Any) -> str:
        return _smooth("self", self, out, axes, align_corners, scales, method, antialias)

    if axes == 1:
        return lambda self, out, align_corners, scales: written(
            self, out, align_corners, _given(scales)
        )
    if axes == 2:
        return lambda self, out, align_corners, scales_h, scales_w: written(
            self, out, align_corners, _given(scales_h, scales_w)
        )
    return lambda self, out, align_corners, scales_d, scales_h, scales_w: written(
        self, out, align_corners, _given(scales_d, scales_h, scales_w)
    )


def _given(*scales: float | None) -> list[float | None] | None:
    return list(scales) if any(scales) else None


def grid_sample(interpolation_mode: int, padding_mode: int, align_corners: bool) -> str:
    if interpolation_mode == 2:
        raise NotImplementedError("grid_sample by bicubic interpolation")
    return call(
        "grid_sample",
        "input",
        "grid",
        nearest=True if interpolation_mode == 1 else None,
        padding=("None", "'border'", "'reflection'")[padding_mode] if padding_mode else None,
        align_corners=True if align_corners else None,
    )


def affine_grid(size: Any, align_corners: bool) -> str:
    sizes = f"({', '.join(f'size[{i}]' for i in range(2, len(size)))})"
    return call("affine_grid", "theta", sizes, align_corners=True if align_corners else None)


RESIZING: dict[str, Rule] = {
    **{f"aten.upsample_nearest{n}d.vec": nearest_vec(False) for n in (1, 2, 3)},
    **{f"aten._upsample_nearest_exact{n}d.vec": nearest_vec(True) for n in (1, 2, 3)},
    **{f"aten.upsample_nearest{n}d.default": nearest(n, False) for n in (1, 2, 3)},
    **{f"aten._upsample_nearest_exact{n}d.default": nearest(n, True) for n in (1, 2, 3)},
    "aten.upsample_linear1d.vec": smooth_vec("linear"),
    "aten.upsample_bilinear2d.vec": smooth_vec("linear"),
    "aten.upsample_trilinear3d.vec": smooth_vec("linear"),
    "aten.upsample_bicubic2d.vec": smooth_vec("cubic"),
    "aten._upsample_bilinear2d_aa.vec": smooth_vec("linear", antialias=True),
    "aten._upsample_bicubic2d_aa.vec": smooth_vec("cubic", antialias=True),
    "aten.upsample_linear1d.default": smooth(1, "linear"),
    "aten.upsample_bilinear2d.default": smooth(2, "linear"),
    "aten.upsample_trilinear3d.default": smooth(3, "linear"),
    "aten.upsample_bicubic2d.default": smooth(2, "cubic"),
    "aten._upsample_bilinear2d_aa.default": smooth(2, "linear", antialias=True),
    "aten._upsample_bicubic2d_aa.default": smooth(2, "cubic", antialias=True),
    "aten.grid_sampler.default": grid_sample,
    "aten.grid_sampler_2d.default": grid_sample,
    "aten.grid_sampler_3d.default": grid_sample,
    "aten.affine_grid_generator.default": affine_grid,
}
