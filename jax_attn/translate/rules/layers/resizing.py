"""Write how images are resized, and sampled by a grid."""

from collections.abc import Callable
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


def _resizing(written: Callable[[str, Array, Array, int, bool, Any], str]) -> Any:
    """Make the rule of all overloads, in which scales are one argument or one an axis."""

    def rule(
        out: Array,
        self: Array | None = None,
        input: Array | None = None,
        align_corners: bool = False,
        scale_factors: Any = None,
        scales: float | None = None,
        scales_d: float | None = None,
        scales_h: float | None = None,
        scales_w: float | None = None,
    ) -> str:
        if input is not None:
            return written("input", input, out, input.rank - 2, align_corners, scale_factors)
        assert self is not None
        axes = self.rank - 2
        own = [scales] if axes == 1 else [scales_d, scales_h, scales_w][-axes:]
        return written("self", self, out, axes, align_corners, own if any(own) else None)

    return rule


def nearest(exact: bool) -> Any:
    return _resizing(
        lambda name, image, out, axes, _, scales: _nearest(name, image, out, axes, scales, exact)
    )


def smooth(method: str, antialias: bool = False) -> Any:
    return _resizing(
        lambda name, image, out, axes, align_corners, scales: _smooth(
            name, image, out, axes, align_corners, scales, method, antialias
        )
    )


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
    f"aten.{name}.{overload}": rule
    for name, rule in {
        **{f"upsample_nearest{n}d": nearest(False) for n in (1, 2, 3)},
        **{f"_upsample_nearest_exact{n}d": nearest(True) for n in (1, 2, 3)},
        "upsample_linear1d": smooth("linear"),
        "upsample_bilinear2d": smooth("linear"),
        "upsample_trilinear3d": smooth("linear"),
        "upsample_bicubic2d": smooth("cubic"),
        "_upsample_bilinear2d_aa": smooth("linear", antialias=True),
        "_upsample_bicubic2d_aa": smooth("cubic", antialias=True),
    }.items()
    for overload in ("vec", "default")
} | {
    "aten.grid_sampler.default": grid_sample,
    "aten.grid_sampler_2d.default": grid_sample,
    "aten.grid_sampler_3d.default": grid_sample,
    "aten.affine_grid_generator.default": affine_grid,
}
