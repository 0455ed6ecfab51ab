"""Attention of the next tokens to themselves and to all tokens in a cache."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn.attention import checks, meshes
from jax_attn.attention.call import Call
from jax_attn.attention.kernels import blocked, partial_softmax
from jax_attn.attention.kernels.blocked import FEW_SCORES
from jax_attn.attention.kernels.mesh import explicit
from jax_attn.attention.kernels.mesh.shards import OUTPUT, PLACES, Shards, letters_of_cache
from jax_attn.attention.kernels.page_writers import place_by_place, token_by_token
from jax_attn.attention.kernels.partial_softmax import PartialSoftmax, finite
from jax_attn.attention.kernels.scores import masked, products, scores
from jax_attn.attention.kv_cache import KVCache
from jax_attn.attention.mask import Band, Mask
from jax_attn.attention.meshes import MeshAxes
from jax_attn.attention.position_bias import KeySlopes

# The keys (B, K, H, P) and values (B, K, P, Hv) of a page.
Page = tuple[jax.Array, jax.Array]


def refusals(call: Call, cache: object) -> list[str]:
    """List every reason why the call's tokens cannot follow those in the cache."""
    if not isinstance(cache, KVCache):
        return [f"cache: expected a KVCache, got {checks.summary(cache)}"]
    problems = []
    if call.position_bias is not None and call.has_extra_keys:
        name = "alibi" if isinstance(call.position_bias, KeySlopes) else "distances"
        problems.append(f"{name}: expected None beside extra keys, which have no position")
    k, v = cache.keys[0], cache.values[0]
    have = {"B": k.shape[0], "K": k.shape[1], "H": k.shape[2], "Hv": v.shape[3]}
    want = {"B": call.B, "K": call.K, "H": call.H, "Hv": call.value.shape[3]}
    if have != want:
        problems.append(f"cache: expected {want} as in the call, got {have}")
    mask = call.mask
    expected = "mask: expected only lengths and a band with a cache"
    problems += [f"{expected}: {reason}" for reason in mask.unread("lo", "hi", "kv_lengths")]
    if mask.hi is not None and not (isinstance(mask.hi, int) and mask.hi == 0):
        problems.append(f"mask: expected a band that ends at the query itself, got hi = {mask.hi}")
    if problems or isinstance(cache.filled, jax.core.Tracer):
        return problems
    lengths = call.T if mask.kv_lengths is None else mask.kv_lengths
    if isinstance(lengths, jax.core.Tracer):
        return problems
    lengths, filled = (np.asarray(x, np.int64) for x in (lengths, cache.filled))
    if lengths.min() < 0 or lengths.max() > call.T:
        return [f"mask: expected lengths of 0 to {call.T}, got {lengths.tolist()}"]
    most = int((filled + lengths).max())
    if most > _capacity(cache, ()):
        problems.append(
            f"cache: expected at most {cache.length} tokens a row, got {most}: "
            f"it holds {filled.tolist()} and the call adds {lengths.tolist()}"
        )
    return problems


# Compiled, because an eager call would compile each of its branches again.
@functools.partial(jax.jit, inline=True, static_argnames="axes")
def attention(call: Call, cache: KVCache, axes: MeshAxes = ()) -> tuple[jax.Array, KVCache]:
    """Return the output (B, T, N, Hv) in the query's dtype, and the cache with the new tokens.

    Rows that would hold more than fits are NaN. axes: the mesh axes along which this device has a
    part of each page.
    """
    if explicit.is_cut(call, cache):
        of_pages = jax.tree.unflatten(jax.tree.structure(cache), letters_of_cache(cache))
        out, grown = explicit.on_each_device(_on_part, (OUTPUT, of_pages), call, cache)
        return _cut_as(call.query, out), grown
    T, lo, lengths_B = call.T, _lowest(call.mask, cache), _lengths(call)

    own, token_BT = call.without_extra_keys(), cache.positions(T)
    own = dataclasses.replace(own, mask=dataclasses.replace(call.mask, lo=lo, hi=0))
    if T * T >= FEW_SCORES:
        bias = _bias(call, cache, token_BT, token_BT)
        biased = dataclasses.replace(own, bias=bias, position_bias=None)
        attended = partial_softmax.of_sums(biased, *blocked.with_sums(biased))
    else:
        allowed = jnp.broadcast_to(own.mask.materialize(T, T), (call.B, 1, T, T))[:, 0]
        k_BKHT, v_BKTH = call.key.transpose(0, 2, 3, 1), call.value.transpose(0, 2, 1, 3)
        bias = _bias(call, cache, token_BT, token_BT)
        attended = _over_page(call, k_BKHT, v_BKTH, bias, allowed)
    grown = _grown(cache, call, axes)
    # The history is read from the new cache, so that XLA can write in place. But in a ring, if
    # there are several tokens, the later ones overwrite history of the earlier ones.
    lapped = cache.window is not None and T > 1
    history = cache if lapped else dataclasses.replace(grown, filled=cache.filled)
    lowest_BT = jnp.zeros((call.B, T), jnp.int32)
    if lo is not None:
        far_BT = token_BT + jnp.broadcast_to(lo, call.B)[:, None]
        lowest_BT = jnp.maximum(lowest_BT, far_BT)
    if not axes:
        attended = _with_history(attended, call, history, lowest_BT)
    else:  # every device has the call's own keys: they count once
        nothing = attended.of_no_keys().varying(axes)
        seen = _with_history(nothing, call, history, lowest_BT, axes)
        attended = attended.merged(seen.summed(axes))
    if call.has_extra_keys:
        attended = attended.merged(partial_softmax.of_extra_keys(call))
    out = attended.mean()
    room = jnp.where(lengths_B <= _capacity(cache, axes) - cache.filled, 1, jnp.nan)
    out = out * room[:, None, None, None].astype(out.dtype)
    return out.astype(call.query.dtype), grown


def _on_part(shards: Shards, call: Call, cache: KVCache) -> tuple[jax.Array, KVCache]:
    """Run `attention` on one device of a mesh.

    If several devices read the same key/value heads, each caches all heads.
    """
    axes = shards.axes.get(PLACES, ())
    if not shards.share_heads:
        return attention(shards.here(call), cache, axes)

    def read(pages: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(shards.read_heads(call.N, page, 1) for page in pages)

    here = dataclasses.replace(cache, keys=read(cache.keys), values=read(cache.values))
    out, _ = attention(shards.here(call), here, axes)
    return out, _grown(cache, call, axes)


def _cut_as(query: jax.Array, out: jax.Array) -> jax.Array:
    """Return the output with heads sharded as the query's, as far as the cache's places allow."""
    mesh, axes = meshes.explicit_mesh(query), meshes.cuts(out)
    taken = {name for axis in axes for name in axis}
    left = tuple(name for name in meshes.cuts(query)[2] if name not in taken)
    if mesh is None or not left:
        return out
    axes[2] = (*axes[2], *left)
    return meshes.placed(out, mesh, meshes.spec(axes))


def _lengths(call: Call) -> jax.Array:
    """Return the number of real tokens in each row, (B,) int32."""
    lengths = call.T if call.mask.kv_lengths is None else call.mask.kv_lengths
    return jnp.broadcast_to(jnp.clip(lengths, 0, call.T), call.B).astype(jnp.int32)


def _with_history(
    attended: PartialSoftmax,
    call: Call,
    cache: KVCache,
    lowest_BT: jax.Array,
    axes: MeshAxes = (),
) -> PartialSoftmax:
    """Merge `attended` with attention to the non-empty pages.

    lowest_BT: the first token, ≥ 0, that each query sees. axes: as in `attention`.
    """

    def merged(page: int, attended: PartialSoftmax) -> PartialSoftmax:
        token_BP = _tokens(cache, _places(cache, page, axes))
        return attended.merged(_in_tiles(call, cache, page, token_BP, lowest_BT))

    for page in range(len(cache.keys)):
        is_reached = (cache.filled > _start(cache, page, axes)).any()
        read = _computed_again(functools.partial(merged, page))
        attended = jax.lax.cond(is_reached, read, lambda same: same, attended)
    return attended


# The backward pass runs a branch again. Whatever a branch kept for it would be an array of zeros in
# the other branch, and one array more for each step of a scan.
_computed_again = functools.partial(jax.checkpoint, prevent_cse=False)


def _start(cache: KVCache, page: int, axes: MeshAxes) -> int:
    """Return the first place of a page: the number of places before it, on all devices."""
    return _devices(axes) * sum(value.shape[2] for value in cache.values[:page])


def _places(cache: KVCache, page: int, axes: MeshAxes) -> jax.Array:
    """Return this device's places of a page, (P,) int32."""
    count, start = cache.values[page].shape[2], _start(cache, page, axes)
    first = jax.lax.axis_index(axes).astype(jnp.int32) * count if axes else 0
    return start + first + jnp.arange(count, dtype=jnp.int32)


def _devices(axes: MeshAxes) -> int:
    return math.prod(map(jax.lax.axis_size, axes))


def _in_tiles(
    call: Call, cache: KVCache, page: int, token_BP: jax.Array, lowest_BT: jax.Array
) -> PartialSoftmax:
    """Attend from all queries to a page; each query sees the page's tokens from its lowest on.

    The scores of at most `query_tile` queries are written out at a time, forward and backward.
    """

    def over(q_BTNH: jax.Array, lowest_BT: jax.Array, query_BT: jax.Array) -> PartialSoftmax:
        allowed_BTP = token_BP[:, None] >= lowest_BT[..., None]
        queries = dataclasses.replace(call, query=q_BTNH)
        bias = _bias(call, cache, query_BT, token_BP)
        return _over_page(queries, *cache.page(page), bias, allowed_BTP)

    tile, query_BT = min(cache.page_sizes.query_tile, call.T), cache.positions(call.T)
    if tile == call.T:
        return over(call.query, lowest_BT, query_BT)

    def tiles(x_BT: jax.Array) -> jax.Array:
        padding = [(0, -call.T % tile) if axis == 1 else (0, 0) for axis in range(x_BT.ndim)]
        tiled = jnp.pad(x_BT, padding).reshape(call.B, -1, tile, *x_BT.shape[2:])
        return jnp.moveaxis(tiled, 1, 0)

    def joined(x: jax.Array) -> jax.Array:
        x_BKGT = jnp.moveaxis(x, 0, 3)
        return x_BKGT.reshape(*x_BKGT.shape[:3], -1, *x_BKGT.shape[5:])[:, :, :, : call.T]

    each = jax.lax.map(
        lambda tile: jax.checkpoint(over)(*tile),
        tuple(map(tiles, (call.query, lowest_BT, query_BT))),
    )
    return jax.tree.map(joined, each)


def _tokens(cache: KVCache, place_P: jax.Array) -> jax.Array:
    """Return which token each place holds, (B, P); below 0 for an empty place."""
    last = cache.filled[:, None] - 1
    if cache.window is None:
        return jnp.where(place_P <= last, place_P, -1)
    return last - (last - place_P) % cache.window


def _grown(cache: KVCache, call: Call, axes: MeshAxes) -> KVCache:
    """Return the cache with the call's real tokens; a ring keeps the last of them."""
    grown = dataclasses.replace(cache, filled=cache.filled + _lengths(call))
    k_BKHT, v_BKTH = call.key.transpose(0, 2, 3, 1), call.value.transpose(0, 2, 1, 3)
    if cache.sharding is not None:  # shard new tokens as the pages: see KVCache.page
        at = jax.P(*cache.sharding[:2])
        k_BKHT, v_BKTH = meshes.kept(k_BKHT, at), meshes.kept(v_BKTH, at)
    k_BKHT, v_BKTH = k_BKHT.astype(cache.keys[0].dtype), v_BKTH.astype(cache.values[0].dtype)
    if axes:  # the devices sum the tokens' gradients here: in a branch only some of them would
        k_BKHT, v_BKTH = (jax.lax.pcast(x, axes, to="varying") for x in (k_BKHT, v_BKTH))

    def pages() -> Iterator[Page]:
        for n, page in enumerate(zip(cache.keys, cache.values, strict=True)):
            at, write = _writer(cache, grown, call.T, _places(cache, n, axes))

            def written(page: Page, at: jax.Array = at, write: Callable = write) -> Page:
                return write(at, page[0], k_BKHT, 3), write(at, page[1], v_BKTH, 2)

            # A write costs time even if it changes nothing.
            is_reached = (at >= 0).any()
            yield jax.lax.cond(is_reached, _computed_again(written), lambda same: same, page)

    keys, values = zip(*pages(), strict=True)
    return dataclasses.replace(grown, keys=keys, values=values)


def _writer(
    cache: KVCache, grown: KVCache, T: int, place_P: jax.Array
) -> tuple[jax.Array, Callable[[jax.Array, jax.Array, jax.Array, int], jax.Array]]:
    """Return (at, write) for the page of these places.

    write: (at, page, tokens, axis) → the page with its share of the T tokens. at: integers, all
    below 0 if it has no share.
    """
    # A loop over tokens indexes the batch axis: XLA's partitioner would gather the cache.
    if cache.page_sizes.few_tokens < T or meshes.in_auto_mesh(cache.filled):
        return _tokens(grown, place_P) - cache.filled[:, None], place_by_place
    token_BT = cache.positions(T)
    place_BT = token_BT if cache.window is None else token_BT % cache.window
    at_BT = place_BT - place_P[0]
    is_here_BT = (token_BT < grown.filled[:, None]) & (at_BT < place_P.size)
    return jnp.where(is_here_BT, at_BT, -1), token_by_token


def _lowest(mask: Mask, cache: KVCache) -> Band | None:
    """Return the nearer of the mask's and the ring's limits on how far back a key may lie."""
    if cache.window is None:
        return mask.lo
    ring = 1 - cache.window
    return ring if mask.lo is None else jnp.maximum(mask.lo, ring)


def _capacity(cache: KVCache, axes: MeshAxes) -> int:
    """Return how many tokens a row may read in all."""
    return _devices(axes) * cache.length if cache.window is None else np.iinfo(np.int32).max


def _bias(call: Call, cache: KVCache, query_BT: jax.Array, token_BS: jax.Array) -> jax.Array | None:
    """Return the bias (B, N, T or 1, S) of these tokens of each row for these queries.

    It counts from the call's first token, so that it is as exact in a long text as in a short one;
    but what is rounded is rounded by the position in the text.
    """
    if call.position_bias is None:
        return None
    first_B1 = 0 if call.position_bias.rounded else cache.filled[:, None]
    return call.position_bias.between(query_BT - first_B1, token_BS - first_B1)


def _over_page(
    call: Call,
    k_BKHS: jax.Array,
    v_BKSH: jax.Array,
    bias_BNTS: jax.Array | None,
    allowed_BTS: jax.Array,
) -> PartialSoftmax:
    """Attend from all the call's queries to these keys and values, writing out every score.

    Keys have their features before their places: a query row times such a matrix is the only
    product with a cached key that XLA:CPU does at the speed of memory.
    """
    dtype = call.softmax_dtype
    rows = (call.B, call.K, call.G, call.T)
    bias = None
    if bias_BNTS is not None:  # T may be 1
        bias = bias_BNTS.reshape(*rows[:3], *bias_BNTS.shape[2:])
    products_BKRS = products(call, "BKRH,BKHS->BKRS", k_BKHS)
    products_BKGTS = products_BKRS.reshape(*rows, -1)
    scores_BKGTS = masked(scores(call, products_BKGTS, bias), allowed_BTS[:, None, None])
    maximum = jax.lax.stop_gradient(scores_BKGTS.max(axis=-1))
    p_BKGTS = jnp.exp(scores_BKGTS - finite(maximum)[..., None])
    p_BKRS = p_BKGTS.reshape(products_BKRS.shape)
    weighted_BKRH = jnp.einsum(
        "BKRS,BKSH->BKRH", p_BKRS, v_BKSH.astype(dtype), precision=call.precision
    )
    return PartialSoftmax(maximum, p_BKGTS.sum(axis=-1), weighted_BKRH.reshape(*rows, -1))
