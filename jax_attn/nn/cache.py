"""Keys and values of what a model has read so far, so that the next tokens cost one step each."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn.attention import Mask, checks
from jax_attn.attention.call import Call, checked_call
from jax_attn.attention.kernels import pages, parts
from jax_attn.attention.kernels.blocked import FEW_SCORES
from jax_attn.attention.kernels.pages import PageSizes


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "values", "filled"],
    meta_fields=["window", "page_sizes"],
)
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class KVCache:
    """What ``module(x, cache=cache)`` attends to beside x, and what it returns grown by x.

    A pytree of static shapes: it goes through jit, scan and donation. Make one with ``empty``.

    keys, values: the pages, (B, K, H, P) and (B, K, P, Hv), together ``length`` places a row.
    filled: (B,) int32, how many tokens each row has read. window: None, and token n lies in
    place n; or a number of tokens, and the places are a ring: token n lies in place n % window,
    and only the last ``window`` tokens can be attended to. page_sizes: how it is cut into pages.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    filled: jax.Array
    window: int | None = None
    page_sizes: PageSizes = pages.DEFAULT

    @staticmethod
    def empty(
        batch,
        length=None,
        *,
        num_kv_heads,
        head_dim,
        value_dim=None,
        window=None,
        dtype=jnp.float32,
        page_sizes: PageSizes = pages.DEFAULT,
    ) -> "KVCache":
        """A cache that holds nothing yet.

        Args:
          batch: B.
          length: the most tokens that a row can hold; or
          window: how many tokens back a token sees, itself among them, however many there are.
          num_kv_heads, head_dim: K and H.
          value_dim: Hv; H unless given.
          dtype: of keys and values.
          page_sizes: how the cache is cut into pages; as measured to be fast unless given.

        Raises ArgumentError.
        """
        sizes = {"batch": batch, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        sizes |= {
            name: size
            for name, size in (("length", length), ("window", window), ("value_dim", value_dim))
            if size is not None
        }
        problems = [
            f"{name}: expected an int ≥ 1, got {size!r}"
            for name, size in sizes.items()
            if not (checks.is_int(size) and size >= 1)
        ]
        if (length is None) == (window is None):
            problems.append(f"length, window: expected one of them, got {length!r} and {window!r}")
        problem = checks.dtype_problem("dtype", dtype)
        problems += [problem] if problem else []
        checks.raise_all("KVCache.empty", problems)
        value_dim = head_dim if value_dim is None else value_dim
        places = page_sizes.places(window if length is None else length)
        return KVCache(
            keys=tuple(jnp.zeros((batch, num_kv_heads, head_dim, n), dtype) for n in places),
            values=tuple(jnp.zeros((batch, num_kv_heads, n, value_dim), dtype) for n in places),
            filled=jnp.zeros(batch, jnp.int32),
            window=window,
            page_sizes=page_sizes,
        )

    @property
    def length(self) -> int:
        """How many places a row has."""
        return sum(value.shape[2] for value in self.values)

    @property
    def nbytes(self) -> int:
        """Of keys and values."""
        return sum(page.nbytes for page in (*self.keys, *self.values))

    def positions(self, T: int) -> jax.Array:
        """Where the next T tokens stand: (B, T) int32."""
        return self.filled[:, None] + jnp.arange(T, dtype=jnp.int32)

    def __repr__(self) -> str:
        B, K, H, _ = self.keys[0].shape
        places = f"length={self.length}" if self.window is None else f"window={self.window}"
        value = f"{self.keys[0].dtype} B={B} K={K} H={H} Hv={self.values[0].shape[3]}"
        return f"KVCache({places}, {value}, {self.nbytes / 2**20:.1f} MiB)"


def attend(
    query, key, value, cache: KVCache, mask: Mask | None = None, **options
) -> tuple[jax.Array, KVCache]:
    """Causal attention of the next tokens to all tokens so far, and the cache with them in it.

    Args:
      query (B, T, N, H), key (B, T, K, H), value (B, T, K, Hv): of the next tokens.
      cache: what was read before.
      mask: of the next tokens alone. Its lengths: how many of a row's T tokens are real; what
        the others give means nothing, and they are not kept. Its band: how far back a token sees
        (``Mask.window(left, 0)``). No other condition can be kept.
      options: scale, softcap, precision, as in ``dot_product_attention``.

    Returns:
      (B, T, N, Hv) in the query's dtype, and the cache. Where a row would hold more than fits:
      ArgumentError, or, as what is traced cannot raise, NaN in all of that row.

    Raises:
      ArgumentError: what is wrong with the arguments.
    """
    given = {"scale": None, "softcap": None, "precision": None} | options
    call, problems = checked_call(
        query, key, value, mask, is_causal=True, bias=None, dropout=None, **given
    )
    problems += [] if call is None else _problems(call, cache)
    checks.raise_all("attention with a cache", problems)
    return _attended(call.on_device(), cache)


# Compiled, as eagerly each of its branches would be compiled anew with every call.
@functools.partial(jax.jit, inline=True)
def _attended(call: Call, cache: KVCache) -> tuple[jax.Array, KVCache]:
    T, lo = call.T, _lowest(call.mask, cache)
    lengths = call.mask.kv_lengths
    lengths = jnp.full(call.B, T) if lengths is None else jnp.clip(lengths, 0, T)
    lengths = jnp.broadcast_to(lengths, call.B).astype(jnp.int32)

    own = dataclasses.replace(call, mask=dataclasses.replace(call.mask, lo=lo, hi=0))
    if T * T >= FEW_SCORES:
        part = parts.whole(own)
    else:
        allowed = jnp.broadcast_to(own.mask.materialize(T, T), (call.B, 1, T, T))[:, 0]
        k_BKHT, v_BKTH = call.key.transpose(0, 2, 3, 1), call.value.transpose(0, 2, 1, 3)
        part = parts.over(call, k_BKHT, v_BKTH, allowed)
    grown = _grown(cache, call.key, call.value, lengths)
    # Read where it was written: so XLA can write in place. But in a ring the later ones of several
    # tokens lie where the earlier ones' history was.
    lapped = cache.window is not None and T > 1
    history = cache if lapped else dataclasses.replace(grown, filled=cache.filled)
    lowest_BT = jnp.zeros((call.B, T), jnp.int32)
    if lo is not None:
        far_BT = cache.positions(T) + jnp.broadcast_to(lo, call.B)[:, None]
        lowest_BT = jnp.maximum(lowest_BT, far_BT)
    out = parts.divided(_with_history(part, call, history, lowest_BT, 0))
    room = jnp.where(cache.filled + lengths <= _most(cache), 1, jnp.nan)
    out = out * room[:, None, None, None].astype(out.dtype)
    return out.astype(call.query.dtype), grown


def _with_history(part: parts.Part, call: Call, cache: KVCache, lowest_BT, page: int) -> parts.Part:
    """The part, and all pages from this one on that hold something.

    lowest_BT: the first token, at least 0, that each query sees.
    """
    if page == len(cache.keys):
        return part
    start = sum(value.shape[2] for value in cache.values[:page])

    def more(part):
        place_P = start + jnp.arange(cache.values[page].shape[2], dtype=jnp.int32)
        kv = cache.keys[page], cache.values[page]
        found = _in_tiles(
            call, *kv, _tokens(cache, place_P), lowest_BT, cache.page_sizes.query_tile
        )
        return _with_history(parts.merged(part, found), call, cache, lowest_BT, page + 1)

    return jax.lax.cond((cache.filled > start).any(), more, lambda part: part, part)


def _in_tiles(call: Call, k_BKHP, v_BKPH, token_BP, lowest_BT, query_tile: int) -> parts.Part:
    """All queries to a page; each sees those of its tokens from the query's lowest on.

    Of many queries the scores of so many are written out at a time, forward and backward.
    """

    def over(q_BTNH, lowest_BT):
        allowed_BTP = token_BP[:, None] >= lowest_BT[..., None]
        return parts.over(dataclasses.replace(call, query=q_BTNH), k_BKHP, v_BKPH, allowed_BTP)

    tile = min(query_tile, call.T)
    if tile == call.T:
        return over(call.query, lowest_BT)

    def tiles(x_BT):
        padding = [(0, -call.T % tile) if axis == 1 else (0, 0) for axis in range(x_BT.ndim)]
        tiled = jnp.pad(x_BT, padding).reshape(call.B, -1, tile, *x_BT.shape[2:])
        return jnp.moveaxis(tiled, 1, 0)

    def joined(x):
        x_BKGT = jnp.moveaxis(x, 0, 3)
        return x_BKGT.reshape(*x_BKGT.shape[:3], -1, *x_BKGT.shape[5:])[:, :, :, : call.T]

    each = jax.lax.map(
        lambda given: jax.checkpoint(over)(*given), (tiles(call.query), tiles(lowest_BT))
    )
    return jax.tree.map(joined, each)


def _tokens(cache: KVCache, place_P: jax.Array) -> jax.Array:
    """Which token lies in each place, (B, P); below 0 where none does."""
    last = cache.filled[:, None] - 1
    if cache.window is None:
        return jnp.where(place_P <= last, place_P, -1)
    return last - (last - place_P) % cache.window


def _grown(cache: KVCache, key, value, lengths) -> KVCache:
    """The cache with the first `lengths` of these tokens; of those, a ring keeps the last."""
    grown = dataclasses.replace(cache, filled=cache.filled + lengths)
    keys, values, start = [], [], 0
    k_BKHT, v_BKTH = key.transpose(0, 2, 3, 1), value.transpose(0, 2, 1, 3)
    for k_BKHP, v_BKPH in zip(cache.keys, cache.values, strict=True):
        places_P = start + jnp.arange(v_BKPH.shape[2], dtype=jnp.int32)
        write = _writer(cache, grown, key.shape[1], places_P)
        keys.append(write(k_BKHP, k_BKHT.astype(k_BKHP.dtype), 3))
        values.append(write(v_BKPH, v_BKTH.astype(v_BKPH.dtype), 2))
        start += len(places_P)
    return dataclasses.replace(grown, keys=tuple(keys), values=tuple(values))


def _writer(cache: KVCache, grown: KVCache, T: int, places_P) -> Callable[..., jax.Array]:
    """(page, tokens, axis) -> the page of these places with those of the T tokens it is to hold."""
    if cache.page_sizes.few_tokens < T:
        step_BP = _tokens(grown, places_P) - cache.filled[:, None]
        return functools.partial(pages.place_by_place, step_BP=step_BP)
    token_BT = cache.positions(T)
    place_BT = token_BT if cache.window is None else token_BT % cache.window
    kept_BT = token_BT < grown.filled[:, None]
    at_BT = jnp.where(kept_BT, place_BT - places_P[0], -1)
    return functools.partial(pages.token_by_token, at_BT=at_BT)


def _lowest(mask: Mask, cache: KVCache):
    """How far from a query its first key may lie: the later of the mask's and the ring's."""
    if cache.window is None:
        return mask.lo
    ring = 1 - cache.window
    return ring if mask.lo is None else jnp.maximum(mask.lo, ring)


def _most(cache: KVCache) -> int:
    return cache.length if cache.window is None else np.iinfo(np.int32).max


def _problems(call: Call, cache) -> list[str]:
    if not isinstance(cache, KVCache):
        return [f"cache: expected a KVCache, got {checks.describe(cache)}"]
    problems = []
    k, v = cache.keys[0], cache.values[0]
    have = {"B": k.shape[0], "K": k.shape[1], "H": k.shape[2], "Hv": v.shape[3]}
    want = {"B": call.B, "K": call.K, "H": call.H, "Hv": call.value.shape[3]}
    if have != want:
        problems.append(f"cache: expected {want} as of the call, got {have}")
    mask = call.mask
    if mask.allowed is not None or mask.q_segments is not None:
        problems.append("mask: expected lengths and a band alone beside a cache, got an array")
    if mask.hi is not None and not (isinstance(mask.hi, int) and mask.hi == 0):
        problems.append(f"mask: expected a band that ends at the query itself, got hi = {mask.hi}")
    if problems or isinstance(cache.filled, jax.core.Tracer):
        return problems
    lengths = call.T if mask.kv_lengths is None else mask.kv_lengths
    if isinstance(lengths, jax.core.Tracer):
        return problems
    lengths, filled = np.asarray(lengths), np.asarray(cache.filled)
    if lengths.min() < 0 or lengths.max() > call.T:
        return [f"mask: expected lengths of 0 to {call.T}, got {lengths.tolist()}"]
    asked = int((filled + lengths).max())
    if asked > _most(cache):
        problems.append(
            f"cache: expected at most {cache.length} tokens a row, got {asked}: "
            f"{filled.tolist()} are there and {lengths.tolist()} more come"
        )
    return problems
