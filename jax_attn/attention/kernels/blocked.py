"""Attention tile by tile: no T×S array, forward or backward, on any backend.

In the forward pass the softmax is computed online (Milakov & Gimelshein, 2018; Rabe & Staats,
2021): each row of tiles keeps its running maximum, sum and weighted mean. In the backward pass each
tile's weights are recomputed from the saved maximum and sum (Dao et al., "FlashAttention-2", 2023,
who save the log-sum-exp instead: if a constant such as −1e9 hides all of a row, a float32
log-sum-exp has no room for the log of the sum).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_attn.attention.call import Call
from jax_attn.attention.kernels import dense, forward_mode, partial_softmax
from jax_attn.attention.kernels.forward_mode import Floats
from jax_attn.attention.kernels.mesh import auto
from jax_attn.attention.kernels.mesh.auto import Outputs
from jax_attn.attention.kernels.scores import masked, scores
from jax_attn.attention.kernels.tile import Tile, Tiles
from jax_attn.attention.kernels.tile_sizes import tile_sizes
from jax_attn.attention.meshes import within_shard_map

Tree = TypeVar("Tree")
Running = TypeVar("Running", bound=tuple)
# With fewer queries or scores a head dense may be faster: measured on XLA:CPU, batch 1 to 64, full
# and causal. At 64×64 blocked was 1.1 to 1.5 times as fast forward and 0.7 to 1.3 times as fast
# with the backward pass; from 128×128 up it was always faster.
FEW_QUERIES, FEW_SCORES = 32, 128 * 128
# On other devices, tiles in sequence leave most of the device idle: use them there only for calls
# whose scores would hardly fit in memory. Not measured.
MANY_BYTES = 2**30


def refusals(call: Call) -> list[str]:
    """Say why the call cannot be divided into tiles."""
    unknown = call.unknown_sizes("B", "T", "S", "N", "K")
    problems = [f"tiles need known sizes, not {unknown}"] if unknown else []
    return problems + call.mask.unread(*Tile.MASK)


def drawbacks(call: Call, platform: str) -> list[str]:
    """Say why dense is preferable for the call on the platform: cpu, cuda or tpu."""
    if platform != "cpu":
        size = call.B * call.N * call.T * call.S * jnp.dtype(call.softmax_dtype).itemsize
        fit = f"dense is preferred on {platform} while its scores fit in 1 GiB"
        return [f"{fit}, here {size / 2**20:.0f} MiB"] if size <= MANY_BYTES else []
    if call.T < FEW_QUERIES:
        return [f"dense is as fast for fewer than {FEW_QUERIES} queries, here {call.T}"]
    if call.T * call.S < FEW_SCORES:
        return [f"dense may be faster below {FEW_SCORES} scores a head, here {call.T}·{call.S}"]
    return []


def attention(call: Call, tiles: Tiles | None = None) -> jax.Array:
    """Compute softmax(scale·QKᵀ)·V with all options of the call, by default in its `tile_sizes`."""
    if call.dropout is not None and call.dropout.rate in (0, 1):
        if call.dropout.rate:
            return jnp.zeros((*call.query.shape[:3], call.Hv), call.query.dtype)
        call = dataclasses.replace(call, dropout=None)
    if call.B == 0:
        return dense.attention(call)  # there are no tiles
    out, *sums = with_sums(call.without_extra_keys(), tiles)
    if call.has_extra_keys:
        attended = partial_softmax.of_sums(call, out, *sums)
        out = attended.merged(partial_softmax.of_extra_keys(call)).mean()
    return out.astype(call.query.dtype)


def with_sums(call: Call, tiles: Tiles | None = None) -> Outputs:
    """Return what `dense.with_sums` returns, for a call without extra keys and with B ≥ 1."""
    tiles = tile_sizes(call) if tiles is None else tiles.within(call)
    return _attention(tiles, varying(call, call))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attention(tiles: Tiles, call: Call) -> Outputs:
    return _forward(tiles, call)


@_attention.defjvp
def _attention_jvp(tiles: Tiles, primals: tuple[Call], tangents: tuple[Call]) -> tuple:
    """Compute dense's tangent, with its memory, in forward mode; work tile by tile in reverse."""
    outputs = _attention(tiles, *primals)
    push = functools.partial(forward_mode.pushed, dense.with_sums)
    pull = functools.partial(_gradients, tiles)
    return outputs, forward_mode.tangent(push, pull, *primals, outputs, tangents[0].floats)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gradients(tiles: Tiles, call: Call, outputs: Outputs, d_outputs: Outputs) -> Floats:
    return _backward(tiles, call, outputs, d_outputs)


@_gradients.defjvp
def _gradients_jvp(
    tiles: Tiles, primals: tuple[Call, Outputs, Outputs], tangents: tuple[Call, Outputs, Outputs]
) -> tuple[Floats, Floats]:
    """Compute second derivatives by dense, with its memory."""
    seconds = forward_mode.pulled_tangent(dense.with_sums, primals, tangents)
    return _gradients(tiles, *primals), seconds


# Eager calls would compile their loops each time: JAX caches a loop by its functions, which are new
# objects in each call.
_compiled = functools.partial(jax.jit, static_argnums=0, inline=True)


@_compiled
def _forward(tiles: Tiles, call: Call) -> Outputs:
    return auto.outputs(functools.partial(_outputs_by_tiles, tiles), call)


@_compiled
def _backward(tiles: Tiles, call: Call, outputs: Outputs, d_outputs: Outputs) -> Floats:
    """Return the cotangents of query, key, value and bias."""
    run = functools.partial(_gradients_by_tiles, tiles)
    grads = auto.gradients(run, call, outputs, d_outputs)
    return jax.tree.map(lambda x, grad: grad.astype(x.dtype), call.floats, grads)


def _outputs_by_tiles(tiles: Tiles, call: Call) -> Outputs:
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
        empty_KR = sum_KR == 0
        sum_KR = jnp.where(empty_KR, 1, sum_KR)
        max_KR = jnp.where(empty_KR, jnp.inf, max_KR)
        out, maximum, total = outputs
        out = row.put_queries(out, out_KRH / sum_KR[..., None])
        return out, row.put_rows(maximum, max_KR), row.put_rows(total, sum_KR)

    out = jnp.zeros((call.B, call.T, call.N, call.Hv), dtype)
    zeros_BNT = jnp.zeros((call.B, call.N, call.T), dtype)
    outputs = varying((out, zeros_BNT, zeros_BNT), call)
    return lax.fori_loop(0, tiles.groups(call) * tiles.rows(call), row, outputs)


def _gradients_by_tiles(tiles: Tiles, call: Call, outputs: Outputs, d_outputs: Outputs) -> Floats:
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
        # A query that the previous tile has, too, counts only there: here it has no weights.
        max_KR = jnp.where(row.own(), row.rows(maximum), jnp.inf)
        # Rows without weights get no gradient, whatever their cotangents: 0·∞ would be NaN.
        has_weights_KR = max_KR < jnp.inf
        # Divide the weights by their sum here, once a row, and not once a score.
        d_out_KRH = row.queries(d_out) / row.rows(total)[..., None]
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


def varying(tree: Tree, like: object) -> Tree:
    """Return the tree's floats, varying along every mesh axis along which any array in `like` does.

    A loop's carry must vary so from the start; then the gradients of an array that is equal on all
    devices are summed over the devices. Adding a zero computed from `like` works in every version
    of JAX. Outside a shard_map the tree is returned unchanged.
    """
    if not within_shard_map():
        return tree

    def data(x: jax.Array) -> jax.Array:
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    arrays = map(jnp.asarray, jax.tree.leaves(like))
    zeros = [(x != x).ravel()[0].astype(jnp.int32) * 0 for x in map(data, arrays)]
    zero = functools.reduce(jnp.add, zeros)

    def cast(x: jax.Array) -> jax.Array:
        return x + zero.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, tree)
