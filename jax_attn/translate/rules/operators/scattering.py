"""Write operators that put elements along one axis, by an index of each."""

from typing import Any

from jax_attn.translate.rules.calls import expect_axes, number
from jax_attn.translate.rules.rule import Array, Rule


def cut(name: str, value: Array, index: Array, dim: int | None) -> str:
    """Slice `value` to the sizes of `index`, which may be smaller."""
    sizes = [
        ":" if axis == dim or ours == theirs else f":index.shape[{axis}]"
        for axis, (ours, theirs) in enumerate(zip(value.shape, index.shape, strict=True))
    ]
    while sizes and sizes[-1] == ":":
        sizes.pop()
    return f"{name}[{', '.join(sizes)}]" if sizes else name


def _places(self: Array, dim: int, index: Array) -> str:
    expect_axes("scatter", self, index)
    return "index" if self.rank == 1 else f"along(index, axis={dim})"


def _put(self: Array, dim: int, index: Array, method: str, source: str, first: str = "") -> str:
    at = f".at[{_places(self, dim, index)}]"
    return f"self{at + first if first else ''}{at}.{method}({source})"


_REDUCE = {
    "add": "add",
    "sum": "add",
    "multiply": "multiply",
    "prod": "multiply",
    "amax": "max",
    "amin": "min",
}
_SCATTERS = {"mean": "scatter_mean", "amax": "scatter_max", "amin": "scatter_min"}


def scatter(self: Array, dim: int, index: Array, src: Array) -> str:
    return _put(self, dim, index, "set", cut("src", src, index, None))


def scatter_value(self: Array, dim: int, index: Array, value: Any) -> str:
    return _put(self, dim, index, "set", number(value, self.dtype))


def scatter_with(self: Array, dim: int, index: Array, src: Array, reduce: str) -> str:
    return scatter_reduce(self, dim, index, src, reduce, True)


def scatter_value_with(self: Array, dim: int, index: Array, value: Any, reduce: str) -> str:
    if self.is_floating and reduce == "multiply":
        raise NotImplementedError("JAX has no gradient of a product by indices")
    return _put(self, dim, index, _REDUCE[reduce], number(value, self.dtype))


def scatter_add(self: Array, dim: int, index: Array, src: Array) -> str:
    return _put(self, dim, index, "add", cut("src", src, index, None))


def scatter_reduce(
    self: Array, dim: int, index: Array, src: Array, reduce: str, include_self: bool
) -> str:
    source = cut("src", src, index, None)
    if self.is_floating and reduce in _SCATTERS:
        places = _places(self, dim, index)
        return f"{_SCATTERS[reduce]}(self, {places}, {source}, include_self={include_self})"
    if reduce not in _REDUCE or (self.is_floating and _REDUCE[reduce] == "multiply"):
        raise NotImplementedError(f"JAX has no gradient of the {reduce} by indices")
    if not include_self and _REDUCE[reduce] != "add":
        raise NotImplementedError(f"scatter_reduce by {reduce} without the values replaced")
    return _put(self, dim, index, _REDUCE[reduce], source, first="" if include_self else ".set(0)")


SCATTERING: dict[str, Rule] = {
    "aten.scatter.src": scatter,
    "aten.scatter.value": scatter_value,
    "aten.scatter.reduce": scatter_with,
    "aten.scatter.value_reduce": scatter_value_with,
    "aten.scatter_add.default": scatter_add,
    "aten.scatter_reduce.two": scatter_reduce,
}
