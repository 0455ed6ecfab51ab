"""JAX's ways to read tokens into a cache. Builders: (workload, arrays) -> `Program`.

Each call is a pure function of the cache, which the engine donates, and of the tokens' query, key
and value. It returns the cache with its old fill count, so that the next call repeats the same
step and overwrites the tokens that this one wrote.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn.attention import KVCache, attend_with_cache
from jax_attn.bench.programs.jax_programs import XLA
from jax_attn.bench.programs.program import Arrays, Program
from jax_attn.bench.workload import Workload


def ours(workload: Workload, arrays: Arrays) -> Program:
    w, past = workload, (arrays["past_key"], arrays["past_value"])
    cache = KVCache.empty(w.B, w.room, num_kv_heads=w.K, head_dim=w.H, dtype=w.dtype)
    if w.filled:
        cache = jax.jit(_read, donate_argnums=0)(cache, *past)

    def call(
        cache: KVCache, query: jax.Array, key: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, KVCache]:
        output, grown = attend_with_cache(query, key, value, cache)
        return output, replace(grown, filled=cache.filled)

    return Program(
        call, {}, kernel="attend", writes_scores=False, cache=cache, cache_bytes=cache.nbytes
    )


def _read(cache: KVCache, key: jax.Array, value: jax.Array) -> KVCache:
    """The cache with these tokens in it. Their output is unused, so the compiler drops it."""
    return attend_with_cache(key, key, value, cache)[1]


def jax_nn(workload: Workload, arrays: Arrays) -> Program:
    """Static arrays, written behind the filled part, with lengths as jax.nn documents them."""
    w = workload
    cache = {
        "key": _with_room(w, arrays["past_key"]),
        "value": _with_room(w, arrays["past_value"]),
        "filled": jnp.int32(w.filled),
    }

    def call(
        cache: dict[str, jax.Array], query: jax.Array, key: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        filled = cache["filled"]
        keys = jax.lax.dynamic_update_slice_in_dim(cache["key"], key, filled, 1)
        values = jax.lax.dynamic_update_slice_in_dim(cache["value"], value, filled, 1)
        lengths_B = jnp.full(w.B, filled + w.T)
        mask = None
        if w.T > 1:  # its own causal corner is top-left
            mask = jnp.arange(w.room) <= filled + jnp.arange(w.T)[:, None]
            mask = jnp.broadcast_to(mask, (w.B, w.N, w.T, w.room))
        output = jax.nn.dot_product_attention(
            query, keys, values, mask=mask, key_value_seq_lengths=lengths_B
        )
        return output, {"key": keys, "value": values, "filled": filled}

    nbytes = cache["key"].nbytes + cache["value"].nbytes
    return Program(call, {}, kernel=XLA, cache=cache, cache_bytes=nbytes)


def _with_room(w: Workload, past: np.ndarray) -> jax.Array:
    """(B, room, K, H) with these tokens first."""
    return jnp.zeros((w.B, w.room, w.K, w.H), w.dtype).at[:, : w.filled].set(past)
