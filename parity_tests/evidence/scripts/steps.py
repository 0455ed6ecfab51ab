"""What a decode step's time is spent on: the step by a call, in a scan, and its products alone.

    python parity_tests/evidence/scripts/steps.py

times, in interleaved rounds, one token of one row, 16 query heads of 64, float32, on as many
threads as there are cores: called with its cache donated, as `jax-attn bench` does; as one of
many steps of a `jax.lax.scan`, where no array is handed in or out; and in such a scan only the
two products with all keys and values, in one array each. A step's bound is the larger of its bytes
over the bandwidth of a sum over 512 MiB, and its floating-point operations over the rate of a
product of square matrices, both timed in the same rounds. Writes profile/steps.json.
"""

import statistics
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from measuring import in_turn, keep, seconds

from jax_attn.attention import KVCache, attend_with_cache

N, H = 16, 64
STEPS, ROUNDS = 32, 21
READ, SIZE = 512 * 2**20, 2048
# name -> key/value heads, tokens with the step's own, places
CACHES = {
    "512 of 512": (16, 512, 512),
    "512 of 32,768": (16, 512, 32768),
    "multi-head, 8192": (16, 8192, 8192),
    "multi-query, 8192": (1, 8192, 8192),
}


def filled(heads: int, tokens: int, places: int) -> KVCache:
    cache = KVCache.empty(1, places, num_kv_heads=heads, head_dim=H)
    return replace(cache, filled=cache.filled + tokens - 1)


def step(cache: KVCache) -> tuple[KVCache, jax.Array]:
    """The same step each time: `filled` goes back to what it was."""
    heads = cache.keys[0].shape[1]
    q, kv = jnp.ones((1, 1, N, H)), jnp.ones((1, 1, heads, H))
    out, grown = attend_with_cache(q, kv, kv, cache)
    return replace(grown, filled=cache.filled), out


def repeated(
    run: Callable[[KVCache], tuple[KVCache, jax.Array]], cache: KVCache, calls: int, steps: int
) -> Callable[[], float]:
    """Seconds of one of the steps that `run` makes, on the cache that the last run returned."""
    donating = jax.jit(run, donate_argnums=0)

    def advance() -> None:
        nonlocal cache
        for _ in range(calls):
            cache, _out = jax.block_until_ready(donating(cache))

    return lambda: seconds(advance) / (calls * steps)


def by_call(*size: int) -> Callable[[], float]:
    return repeated(step, filled(*size), calls=STEPS, steps=1)


def in_scan(*size: int) -> Callable[[], float]:
    def scan(cache: KVCache) -> tuple[KVCache, jax.Array]:
        return jax.lax.scan(lambda cache, _: step(cache), cache, length=STEPS)

    return repeated(scan, filled(*size), calls=1, steps=STEPS)


def products(heads: int, tokens: int, places: int) -> Callable[[], float]:
    """Seconds of the two products of a step."""
    q_BKGTH = jnp.zeros((1, heads, N // heads, 1, H))
    k_BKHS, v_BKSH = jnp.ones((1, heads, H, tokens)), jnp.ones((1, heads, tokens, H))

    @jax.jit
    def run(q_BKGTH: jax.Array, k_BKHS: jax.Array, v_BKSH: jax.Array) -> jax.Array:
        def both(q_BKGTH: jax.Array, _: None) -> tuple[jax.Array, None]:
            scores_BKGTS = jnp.einsum("BKGTH,BKHS->BKGTS", q_BKGTH, k_BKHS)
            return jnp.einsum("BKGTS,BKSH->BKGTH", scores_BKGTS, v_BKSH), None

        return jax.lax.scan(both, q_BKGTH, length=STEPS)[0]

    return lambda: seconds(lambda: jax.block_until_ready(run(q_BKGTH, k_BKHS, v_BKSH))) / STEPS


WAYS = {"a call": by_call, "in a scan": in_scan, "its products": products}


def read() -> Callable[[], float]:
    """Seconds of reading `READ` bytes."""
    x, total = jnp.ones(READ // 4), jax.jit(jnp.sum)
    return lambda: seconds(lambda: total(x).block_until_ready())


def multiplied() -> Callable[[], float]:
    """Seconds of a product of two `SIZE`² matrices."""
    x, product = jnp.ones((SIZE, SIZE)), jax.jit(jnp.matmul)
    return lambda: seconds(lambda: product(x, x).block_until_ready())


def measured() -> dict[str, dict]:
    """The medians: of the machine's rates, of each step by each way, and each step's bound."""
    runs = {(name, way): make(*CACHES[name]) for name in CACHES for way, make in WAYS.items()}
    taken = in_turn(runs | {"read": read(), "multiplied": multiplied()}, ROUNDS)
    median = {name: statistics.median(times) for name, times in taken.items()}
    rates = {"bytes": READ / median["read"], "FLOP": 2 * SIZE**3 / median["multiplied"]}

    def bound(heads: int, tokens: int, places: int) -> float:
        return max(2 * heads * tokens * H * 4 / rates["bytes"], 4 * N * tokens * H / rates["FLOP"])

    ways = {n: {way: 1e3 * median[n, way] for way in WAYS} for n in CACHES}
    bounds = {name: {"bound": 1e3 * bound(*size)} for name, size in CACHES.items()}
    steps = {name: ways[name] | bounds[name] for name in CACHES}
    return {"a second": rates, "milliseconds": steps}


if __name__ == "__main__":
    print(keep("steps", measured()))
