"""Write attention and the products of experts."""

from typing import Any

from jax_attn.translate.rules.calls import call
from jax_attn.translate.rules.rule import Array, Rule


def attention(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> str:
    """Write one call of `jax.nn.dot_product_attention`, on (B, T, N, H)."""
    if query.rank not in (3, 4) or dropout_p or not _one_call(query, key, value, enable_gqa):
        return _products(query, key, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    axes = "0, 1" if query.rank == 3 else "1, 2"
    attended = call(
        "jax.nn.dot_product_attention",
        *(f"{each}.swapaxes({axes})" for each in ("query", "key", "value")),
        **_mask(attn_mask),
        scale=None if scale is None else "scale",
        is_causal=True if is_causal else None,
    )
    if attn_mask is not None and attn_mask.dtype == "bool":
        # A row whose keys are all masked is 0 in torch, and the mean of the values in JAX.
        some = "attn_mask.any(-1, keepdims=True).swapaxes(-3, -2)"
        if attn_mask.rank == 2:
            some = "attn_mask.any(-1)[:, None, None]"
        attended = f"jnp.where({some}, {attended}, 0)"
    return f"{attended}.swapaxes({axes})"


def _mask(attn_mask: Array | None) -> dict[str, str]:
    if attn_mask is None:
        return {}
    return {"mask" if attn_mask.dtype == "bool" else "bias": "attn_mask"}


def _one_call(query: Array, key: Array, value: Array, enable_gqa: bool) -> bool:
    """Return whether JAX takes these shapes: it broadcasts no operand, and Hv is H."""
    heads = enable_gqa and query.rank == 4 and key.shape[1] == value.shape[1]
    same = len(query.shape) - 2 - int(heads)
    return (
        query.shape[:same] == key.shape[:same] == value.shape[:same]
        and query.shape[-1] == value.shape[-1]
    )


def _products(
    query: Array,
    key: Array,
    attn_mask: Array | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> str:
    key_, value_ = "key", "value"
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        repeats = "query.shape[-3] // {0}.shape[-3]"
        key_, value_ = (f"{x}.repeat({repeats.format(x)}, axis=-3)" for x in ("key", "value"))
    by = "/ query.shape[-1] ** 0.5" if scale is None else "* scale"
    scores = f"query @ {key_}.swapaxes(-1, -2) {by}"
    if is_causal:
        mask = "jnp.tri(query.shape[-2], key.shape[-2], dtype=bool)"
        scores = f"jnp.where({mask}, {scores}, -jnp.inf)"
    if attn_mask is not None and attn_mask.dtype == "bool":
        scores = f"jnp.where(attn_mask, {scores}, jnp.finfo(query.dtype).min)"
    elif attn_mask is not None:
        scores += " + attn_mask"
    weights = f"jax.nn.softmax({scores})"
    attended = f"{f'dropout({weights})' if dropout_p else weights} @ {value_}"
    if attn_mask is not None and attn_mask.dtype == "bool":
        return f"jnp.where(attn_mask.any(-1, keepdims=True), {attended}, 0)"
    return attended


def grouped_mm(self: Array, mat2: Array, offs: Any, bias: Any, out_dtype: Any) -> str:
    if bias is not None or out_dtype is not None:
        raise NotImplementedError("grouped_mm with a bias or another dtype")
    if self.rank == 3 and mat2.rank == 3:
        return "self @ mat2"
    if self.rank == 2 and mat2.rank == 3:
        return "jax.lax.ragged_dot(self, mat2, jnp.diff(offs, prepend=0))"
    raise NotImplementedError("grouped_mm whose groups are columns")


ATTENTION: dict[str, Rule] = {
    "aten.scaled_dot_product_attention.default": attention,
    "aten._grouped_mm.default": grouped_mm,
    "transformers.grouped_mm_fallback.default": (
        "jax.lax.ragged_dot(input, weight, jnp.diff(offs, prepend=0))"
    ),
}
