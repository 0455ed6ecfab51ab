"""The loops over tiles, forward and backward, of a call on one device.

In the forward pass the softmax is computed online (Milakov & Gimelshein, 2018; Rabe & Staats,
2021): each row of tiles keeps its running maximum, sum and weighted mean. In the backward pass each
tile's weights are recomputed from the saved maximum and sum (Dao et al., "FlashAttention-2", 2023,
who save the log-sum-exp instead: if a constant such as −1e9 hides all of a row, a float32
log-sum-exp has no room for the log of the sum).
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_attn.attention.call import Call
from jax_attn.attention.kernels.forward_mode import Floats
from jax_attn.attention.kernels.scores import masked, no_maximum, or_one, scores
from jax_attn.attention.kernels.tile import Tile, Tiles
from jax_attn.attention.meshes import varying

Outputs = tuple[jax.Array, jax.Array, jax.Array]
Running = TypeVar("Running", bound=tuple)


def outputs(tiles: Tiles, call: Call) -> Outputs:
    """Return what `dense.with_sums` returns."""
    tiles = tiles.within(call)
    dtype, R = call.softmax_dtype, call.G * tiles.T

    def row(n: jax.Array, outputs: Outputs) -> Outputs:
        row = Tile.row(call, tiles, n)
        q_KRH = _scaled(row)

        def column(tile: Tile, running: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            max_KR, sum_KR, out_KRH = running
            k_KSH, v_KSH = (tile.keys(x).astype(dtype) for x in (call.key, call.value))
            products_KRS = _dot("KRH,KSH->KRS", q_KRH, k_KSH, call)
            bias = None if call.bias is None else tile.in_rows(tile.scores(call.bias))
            scores_KRS = masked(scores(call, products_KRS, bias), tile.allowed())
            new_KR = jnp.maximum(max_KR, scores_KRS.max(axis=-1))
            # A row that has seen no key yet has no maximum to subtract.
            base_KR = jnp.where(new_KR == -jnp.inf, 0, new_KR)
            # Without the barrier XLA computes the exponentials twice: for the sum, and for V.
            p_KRS = lax.optimization_barrier(jnp.exp(scores_KRS - base_KR[..., None]))
            kept_KR = jnp.exp(max_KR - base_KR)
            sum_KR = sum_KR * kept_KR + p_KRS.sum(axis=-1)
            more_KRH = _dot("KRS,KSH->KRH", _dropped(call, _kept(tile), p_KRS), v_KSH, call)
            return new_KR, sum_KR, out_KRH * kept_KR[..., None] + more_KRH

        nothing: tuple[jax.Array, ...] = (
            jnp.full((tiles.K, R), -jnp.inf, dtype),
            jnp.zeros((tiles.K, R), dtype),
            jnp.zeros((tiles.K, R, call.Hv), dtype),
        )
        max_KR, sum_KR, out_KRH = _over_columns(row, column, varying(nothing, call))
        max_KR = jnp.where(sum_KR == 0, no_maximum(dtype), max_KR)
        out, maximum, total = outputs
        out = row.put_queries(out, out_KRH / or_one(sum_KR)[..., None])
        return out, row.put_rows(maximum, max_KR), row.put_rows(total, sum_KR)

    out = jnp.zeros((call.B, call.T, call.N, call.Hv), dtype)
    zeros_BNT = jnp.zeros((call.B, call.N, call.T), dtype)
    outputs = varying((out, zeros_BNT, zeros_BNT), call)
    return lax.fori_loop(0, tiles.groups(call) * tiles.rows(call), row, outputs)


def gradients(tiles: Tiles, call: Call, outputs: Outputs, d_outputs: Outputs) -> Floats:
    """Return the cotangents of query, key, value and bias, in the softmax's dtype.

    A tile's products are computed as in the forward pass, so that they are bit-identical to those
    whose maximum and sum were saved, and the weights of a row add up to 1. The tiles of d_key and
    d_value have the head dimension first: XLA:CPU sums over the first axis of both factors at half
    the speed.
    """
    tiles = tiles.within(call)
    dtype, (out, maximum, total), (d_out, _, d_total) = call.softmax_dtype, outputs, d_outputs

    def row(n: jax.Array, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        row = Tile.row(call, tiles, n)
        # A query that the previous tile has, too, counts only there: here it has no weights. Rows
        # without weights get no gradient, whatever their cotangents: 0·∞ would be NaN.
        max_KR, sum_KR = row.rows(maximum), row.rows(total)
        has_weights_KR = row.own() & (sum_KR != 0)
        max_KR = jnp.where(has_weights_KR, max_KR, no_maximum(dtype))
        # Divide the weights by their sum here, once a row, and not once a score.
        d_out_KRH = row.queries(d_out) / or_one(sum_KR)[..., None]
        q_KRH, d_out_KRH = _scaled(row), jnp.where(has_weights_KR[..., None], d_out_KRH, 0)
        mean_KR = jnp.einsum("KRH,KRH->KR", d_out_KRH, row.queries(out), precision="highest")
        delta_KR = mean_KR - jnp.where(has_weights_KR, row.rows(d_total), 0)

        def column(tile: Tile, running: tuple[Any, ...]) -> tuple[Any, ...]:
            d_q_KRH, d_k_KHS, d_v_KHS, d_bias = running
            k_KSH, v_KSH = (tile.keys(x).astype(dtype) for x in (call.key, call.value))
            kept = _kept(tile)

            def unmasked(products_KRS: jax.Array, bias: jax.Array | None) -> jax.Array:
                return scores(call, products_KRS, None if bias is None else tile.in_rows(bias))

            products_KRS = _dot("KRH,KSH->KRS", q_KRH, k_KSH, call)
            bias = None if call.bias is None else tile.scores(call.bias).astype(dtype)
            scores_KRS, pull = jax.vjp(unmasked, products_KRS, bias)
            scores_KRS = masked(scores_KRS, allowed := tile.allowed())
            p_KRS = lax.optimization_barrier(jnp.exp(scores_KRS - max_KR[..., None]))
            d_p_KRS = _dropped(call, kept, _dot("KRH,KSH->KRS", d_out_KRH, v_KSH, call))
            d_scores_KRS = p_KRS * (d_p_KRS - delta_KR[..., None])
            d_products_KRS, d_bias_tile = pull(masked(d_scores_KRS, allowed, 0))
            d_products_KRS = lax.optimization_barrier(d_products_KRS)
            d_q_KRH += _dot("KRS,KSH->KRH", d_products_KRS, k_KSH, call)
            d_k_tile = _dot("KRH,KRS->KHS", q_KRH, d_products_KRS, call)
            d_v_tile = _dot("KRH,KRS->KHS", d_out_KRH, _dropped(call, kept, p_KRS), call)
            if d_bias is not None:
                d_bias = tile.add_scores(d_bias, d_bias_tile)
            return (
                d_q_KRH,
                tile.add_keys(d_k_KHS, d_k_tile),
                tile.add_keys(d_v_KHS, d_v_tile),
                d_bias,
            )

        d_query, *others = grads
        d_q_KRH = varying(jnp.zeros((tiles.K, call.G * tiles.T, call.H), dtype), call)
        d_q_KRH, *others = _over_columns(row, column, (d_q_KRH, *others))
        return row.put_queries(d_query, row.queries(d_query) + call.scale * d_q_KRH), *others

    def group(n: jax.Array, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        d_query, d_key, d_value, d_bias = grads
        first = n * tiles.rows(call)
        zeros = (jnp.zeros((tiles.K, H, call.S), dtype) for H in (call.H, call.Hv))
        running = (d_query, *varying(tuple(zeros), call), d_bias)
        d_query, d_k_KHS, d_v_KHS, d_bias = lax.fori_loop(
            first, first + tiles.rows(call), row, running
        )
        heads = Tile.row(call, tiles, first)
        return (
            d_query,
            heads.put_keys(d_key, d_k_KHS),
            heads.put_keys(d_value, d_v_KHS),
            d_bias,
        )

    zeros = tuple(None if x is None else jnp.zeros(x.shape, dtype) for x in call.floats.values())
    grads = lax.fori_loop(0, tiles.groups(call), group, varying(zeros, call))
    return dict(zip(call.floats, grads, strict=True))


def _over_columns(row: Tile, add: Callable[[Tile, Running], Running], running: Running) -> Running:
    """Apply `add` to every tile of a row; first to the whole ones, which need no mask."""
    columns = row.columns()
    for is_whole, first, end in ((True, 0, columns.whole), (False, columns.whole, columns.seen)):
        if isinstance(end, np.integer) and first == end:
            continue  # known to be empty: compile no loop

        def column(i: jax.Array, running: Running, is_whole: bool = is_whole) -> Running:
            j = i if isinstance(columns.order, np.ndarray) else columns.order[i]
            return add(row.column(j, is_whole), running)

        running = lax.fori_loop(first, end, column, running)
    return running


def _scaled(row: Tile) -> jax.Array:
    """Return the queries of a row of tiles, scaled once here and not in every tile."""
    return row.call.scale * row.queries(row.call.query).astype(row.call.softmax_dtype)


def _dot(letters: str, x: jax.Array, y: jax.Array, call: Call) -> jax.Array:
    return jnp.einsum(letters, x, y, precision=call.precision)


def _kept(tile: Tile) -> jax.Array | None:
    """Return what dropout keeps of the tile, the same each time; None for all of it."""
    dropout = tile.call.dropout
    if dropout is None:
        return None
    if dropout.keep is None:
        return dropout.drawn(*tile.places())
    return tile.in_rows(tile.scores(dropout.keep))


def _dropped(call: Call, kept: jax.Array | None, x: jax.Array) -> jax.Array:
    return x if call.dropout is None or kept is None else call.dropout.where(kept, x)
