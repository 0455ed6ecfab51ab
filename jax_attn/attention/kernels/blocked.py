"""Attention tile by tile: no T×S array, forward or backward, on any backend.

Forward, the softmax is taken online (Milakov & Gimelshein, 2018; Rabe & Staats, 2021): each
row of tiles keeps its running maximum, sum and weighted mean. Backward, each tile's weights are
computed again from the saved maximum and sum (Dao et al., "FlashAttention-2", 2023, but for the
log-sum-exp, which they save in place of the two: where a constant such as −1e9 hides all of a row,
its float32 has no room for the log of the sum).
"""

import dataclasses
import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn.attention.call import Call
from jax_attn.attention.kernels import dense, forward_mode, partial_softmax
from jax_attn.attention.kernels.forward_mode import Floats
from jax_attn.attention.kernels.scores import scores
from jax_attn.attention.kernels.tile import Tile, Tiles

Tree = TypeVar("Tree")
# As `with_sums` returns them.
Outputs = tuple[jax.Array, jax.Array, jax.Array]

# Fewer queries or scores a head than these and dense is as fast or faster: measured on XLA:CPU,
# batch 1 to 64. From 128×128 up blocked was 1.1 to 8 times as fast forward; with the backward
# pass as fast as dense, within a quarter, up to some 300×300, and faster above.
FEW_QUERIES, FEW_SCORES = 32, 128 * 128
# On other devices one tile after another leaves most of them idle: there it is for calls whose
# scores would not reasonably fit. Not measured.
MANY_BYTES = 2**30


def refusals(call: Call) -> list[str]:
    """Why the call cannot be cut into tiles."""
    unknown = call.unknown_sizes("B", "T", "S", "N", "K")
    problems = [f"tiles are cut of known sizes, not of {unknown}"] if unknown else []
    return problems + call.mask.unread(*Tile.MASK)


def drawbacks(call: Call, platform: str) -> list[str]:
    """Why dense is to be preferred for the call on the platform: cpu, cuda or tpu."""
    if platform != "cpu":
        size = call.B * call.N * call.T * call.S * jnp.dtype(call.softmax_dtype).itemsize
        fit = f"dense is preferred on {platform} while its scores fit in 1 GiB"
        return [f"{fit}, here {size / 2**20:.0f} MiB"] if size <= MANY_BYTES else []
    if call.T < FEW_QUERIES:
        return [f"dense is as fast for fewer than {FEW_QUERIES} queries, here {call.T}"]
    if call.T * call.S < FEW_SCORES:
        return [f"dense is faster below {FEW_SCORES} scores a head, here {call.T}·{call.S}"]
    return []


def attention(call: Call, tiles: Tiles | None = None) -> jax.Array:
    """softmax(scale·QKᵀ)·V with all that the call asks for; by its `tile_sizes` unless given."""
    if call.dropout is not None and call.dropout.rate in (0, 1):
        if call.dropout.rate:
            return jnp.zeros((*call.query.shape[:3], call.Hv), call.query.dtype)
        call = dataclasses.replace(call, dropout=None)
    if call.B == 0:
        return dense.attention(call)  # there is no tile to cut
    out, *sums = with_sums(call.without_extra_keys(), tiles)
    if call.has_extra_keys:
        attended = partial_softmax.of_sums(call, out, *sums)
        out = attended.merged(partial_softmax.of_extra_keys(call)).mean()
    return out.astype(call.query.dtype)


def with_sums(call: Call, tiles: Tiles | None = None) -> Outputs:
    """As `dense.with_sums`, of a call without extra keys whose B is 1 or more."""
    sizes = tile_sizes(call) if tiles is None else tiles.within(call)
    return _attention(sizes, varying(call, call))


# Measured on XLA:CPU, two threads, H = 64, 512 to 4096 queries: a tile's products must be large
# enough for the threads to pay, so that fewer than 512 rows a head run at half the speed, while
# 256 to 1024 keys make no difference. But XLA:CPU adds up a product's terms in one chain: with
# 1024 keys in a tile the error is 1.66 times that of torch's kernel, with 512 1.30, with 256 1.08.
ROWS, KEYS = 4096, 256
# Where a band's edge cuts tiles, half of their scores count for nothing.
QUERIES, QUERIES_IN_BAND = 1024, 512


def tile_sizes(call: Call) -> Tiles:
    """How large the tiles of this call are."""
    banded = call.mask.lo is not None or call.mask.hi is not None
    T = _even(call.T, min(QUERIES_IN_BAND if banded else QUERIES, max(1, ROWS // call.G)))
    heads = [K for K in range(1, call.K + 1) if call.K % K == 0 and K * call.G * T <= ROWS]
    return Tiles(max(heads, default=1), T, _even(call.S, KEYS))


def _even(n: int, most: int) -> int:
    """At most `most`, and as few of them over n: tiles of equal size overlap least.

    In whole vectors of eight where there are several.
    """
    count = -(-n // most)
    size = -(-n // count)
    return n if count == 1 else min(most, -(-size // 8) * 8)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attention(sizes: Tiles, call: Call) -> Outputs:
    return _forward(sizes, call)


@_attention.defjvp
def _attention_jvp(sizes: Tiles, primals: tuple[Call], tangents: tuple[Call]) -> tuple:
    """In forward mode, dense's tangent, with its memory; in reverse, tile by tile."""
    outputs = _attention(sizes, *primals)
    push = functools.partial(forward_mode.pushed, dense.with_sums)
    pull = functools.partial(_gradients, sizes)
    return outputs, forward_mode.tangent(push, pull, *primals, outputs, tangents[0].floats)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gradients(sizes: Tiles, call: Call, outputs: Outputs, d_outputs: Outputs) -> Floats:
    return _backward(sizes, call, outputs, d_outputs)


@_gradients.defjvp
def _gradients_jvp(
    sizes: Tiles, primals: tuple[Call, Outputs, Outputs], tangents: tuple[Call, Outputs, Outputs]
) -> tuple[Floats, Floats]:
    """A second derivative is dense's, with its memory."""
    seconds = forward_mode.pulled_tangent(dense.with_sums, primals, tangents)
    return _gradients(sizes, *primals), seconds


# Eager calls would compile their loops anew each time: JAX knows a loop by its functions, which
# are made anew.
_compiled = functools.partial(jax.jit, static_argnums=0, inline=True)


@_compiled
def _forward(sizes: Tiles, call: Call) -> Outputs:
    dtype = call.softmax_dtype
    rows_KGT = (sizes.K, call.G, sizes.T)

    def row(n: jax.Array, outputs: Outputs) -> Outputs:
        row = Tile.row(call, sizes, n)
        q_KGTH = row.queries(call.query).astype(dtype)

        def column(j: jax.Array, running: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            max_KGT, sum_KGT, out_KGTH = running
            tile = row.column(j)
            scores_KGTS = scores(call, _products(tile, q_KGTH), *_additive(tile))
            new_KGT = jnp.maximum(max_KGT, scores_KGTS.max(axis=-1))
            # A row that has seen nothing yet has no maximum to subtract.
            base_KGT = jnp.where(new_KGT == -jnp.inf, 0, new_KGT)
            # Without the barrier XLA computes the exponentials twice: for the sum, and for V.
            p_KGTS = lax.optimization_barrier(jnp.exp(scores_KGTS - base_KGT[..., None]))
            kept_KGT = jnp.exp(max_KGT - base_KGT)
            sum_KGT = sum_KGT * kept_KGT + p_KGTS.sum(axis=-1)
            p_KGTS = _dropped(tile, p_KGTS)
            v_KSH = tile.keys(call.value).astype(dtype)
            more_KGTH = _dot("KGTS,KSH->KGTH", p_KGTS, v_KSH, call)
            return new_KGT, sum_KGT, out_KGTH * kept_KGT[..., None] + more_KGTH

        nothing = (
            jnp.full(rows_KGT, -jnp.inf, dtype),
            jnp.zeros(rows_KGT, dtype),
            jnp.zeros((*rows_KGT, call.Hv), dtype),
        )
        nothing = varying(nothing, call)
        max_KGT, sum_KGT, out_KGTH = lax.fori_loop(*row.reach(), column, nothing)
        empty_KGT = sum_KGT == 0
        sum_KGT = jnp.where(empty_KGT, 1, sum_KGT)
        max_KGT = jnp.where(empty_KGT, jnp.inf, max_KGT)
        out, maximum, total = outputs
        out = row.put_queries(out, out_KGTH / sum_KGT[..., None])
        return out, row.put_rows(maximum, max_KGT), row.put_rows(total, sum_KGT)

    out = jnp.zeros((call.B, call.T, call.N, call.Hv), dtype)
    zeros_BNT = jnp.zeros((call.B, call.N, call.T), dtype)
    outputs = varying((out, zeros_BNT, zeros_BNT), call)
    return lax.fori_loop(0, _rows(call, sizes), row, outputs)


@_compiled
def _backward(sizes: Tiles, call: Call, outputs: Outputs, d_outputs: Outputs) -> Floats:
    """The cotangents of query, key, value and bias."""
    dtype, (out, maximum, total), (d_out, _, d_total) = call.softmax_dtype, outputs, d_outputs
    mean_BNT = jnp.einsum("BTNH,BTNH->BNT", d_out, out, precision="highest")
    # The weights' division by their sum is done here, once a row, and not once a score.
    d_out = d_out / total.swapaxes(1, 2)[..., None]
    delta_BNT = mean_BNT / total - d_total

    def row(n: jax.Array, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        row = Tile.row(call, sizes, n)
        q_KGTH = row.queries(call.query).astype(dtype)
        d_out_KGTH = row.queries(d_out)
        # A query that another tile has, too, counts there alone: here it has no weights.
        max_KGT = jnp.where(row.own(), row.rows(maximum), jnp.inf)
        delta_KGT = row.rows(delta_BNT)

        def column(j: jax.Array, running: tuple[Any, ...]) -> tuple[Any, ...]:
            d_q_KGTH, d_key, d_value, d_bias = running
            tile = row.column(j)
            k_KSH = tile.keys(call.key).astype(dtype)
            v_KSH = tile.keys(call.value).astype(dtype)
            bias, allowed = _additive(tile)
            scores_KGTS, pull = jax.vjp(
                lambda products, bias: scores(call, products, bias, allowed),
                _products(tile, q_KGTH),
                bias,
            )
            p_KGTS = jnp.exp(scores_KGTS - max_KGT[..., None])
            d_p_KGTS = _dropped(tile, _dot("KGTH,KSH->KGTS", d_out_KGTH, v_KSH, call))
            d_scores = p_KGTS * (d_p_KGTS - delta_KGT[..., None])
            d_products, d_bias_tile = pull(d_scores)
            # The head dimension first: XLA:CPU multiplies by a transposed tile at half the speed.
            d_v_KHS = _dot("KGTH,KGTS->KHS", d_out_KGTH, _dropped(tile, p_KGTS), call)
            d_k_KHS = _dot("KGTH,KGTS->KHS", q_KGTH, d_products, call)
            d_q_KGTH += _dot("KGTS,KSH->KGTH", d_products, k_KSH, call)
            if d_bias is not None:
                d_bias = tile.add_scores(d_bias, d_bias_tile)
            return d_q_KGTH, tile.add_keys(d_key, d_k_KHS), tile.add_keys(d_value, d_v_KHS), d_bias

        d_query, *others = grads
        d_q_KGTH = varying(jnp.zeros_like(q_KGTH), call)
        d_q_KGTH, *others = lax.fori_loop(*row.reach(), column, (d_q_KGTH, *others))
        return row.put_queries(d_query, row.queries(d_query) + d_q_KGTH), *others

    zeros = tuple(None if x is None else jnp.zeros(x.shape, dtype) for x in call.floats.values())
    grads = lax.fori_loop(0, _rows(call, sizes), row, varying(zeros, call))
    pairs = zip(call.floats.items(), grads, strict=True)
    return {name: None if x is None else grad.astype(x.dtype) for (name, x), grad in pairs}


def _rows(call: Call, sizes: Tiles) -> int:
    return call.B * (call.K // sizes.K) * -(-call.T // sizes.T)


def _dot(letters: str, x: jax.Array, y: jax.Array, call: Call) -> jax.Array:
    return jnp.einsum(letters, x, y, precision=call.precision)


def _products(tile: Tile, q_KGTH: jax.Array) -> jax.Array:
    k_KSH = tile.keys(tile.call.key).astype(q_KGTH.dtype)
    return _dot("KGTH,KSH->KGTS", q_KGTH, k_KSH, tile.call)


def _additive(tile: Tile) -> tuple[jax.Array | None, jax.Array | None]:
    """The tile's bias and what it may attend to; None where there is none."""
    bias = tile.call.bias
    bias = None if bias is None else tile.scores(bias).astype(tile.call.softmax_dtype)
    return bias, tile.allowed()


def _dropped(tile: Tile, x_KGTS: jax.Array) -> jax.Array:
    """x with the tile's dropout, the same each time."""
    dropout = tile.call.dropout
    if dropout is None:
        return x_KGTS
    if dropout.keep is None:
        return dropout.where(dropout.drawn(*tile.places()), x_KGTS)
    return dropout.where(tile.scores(dropout.keep), x_KGTS)


def varying(tree: Tree, like: object) -> Tree:
    """The tree's floats, differing along every axis along which any array in `like` does.

    A loop's carry must be marked from the start; and the gradients of an array that is the same on
    every device are then summed over the devices. Adding a zero made of `like` marks it in every
    version of JAX. Outside a shard_map the tree is returned as it is.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return tree

    def data(x: jax.Array) -> jax.Array:
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    arrays = map(jnp.asarray, jax.tree.leaves(like))
    zeros = [(x != x).ravel()[0].astype(jnp.int32) * 0 for x in map(data, arrays)]
    zero = functools.reduce(jnp.add, zeros)

    def cast(x: jax.Array) -> jax.Array:
        return x + zero.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, tree)
