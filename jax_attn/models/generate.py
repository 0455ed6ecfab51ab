"""Generation: a language model chooses tokens one by one and reads each in turn."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_attn.attention import KVCache, checks
from jax_attn.attention.annotations import AnyArray

Caches = tuple[KVCache, ...]
Read = Callable[
    [Int[AnyArray, "B T"], Int[AnyArray, " B"] | None, Caches],
    tuple[Float[Array, "B V"], Caches],
]
"""(tokens, lengths, caches) → logits after each row's last token, and the extended caches."""
Choose = Callable[[Float[Array, "B V"], Any], Int[AnyArray, " B"]]
"""(logits, key) → each row's next token. key: this step's; None if `generate` has none."""


def likeliest(logits_BV: Float[Array, "B V"], _: Any) -> Int[Array, " B"]:
    """Return the token with the largest logit; on a tie the first, as in torch and NumPy."""
    return jnp.argmax(logits_BV, axis=-1)


def continued(
    read: Read,
    tokens: Int[AnyArray, "B T"],
    lengths: Int[AnyArray, " B"] | None,
    caches: Caches,
    count: int,
    *,
    ends: Sequence[int],
    choose: Choose,
    key: jax.Array | None,
) -> Int[Array, "B count"]:
    """Return the `count` tokens that follow each row; an end token repeats, NaN logits give -1.

    Reading stops once every row has ended.
    """
    places = jnp.arange(count, dtype=jnp.int32)

    def chosen(i: Any, logits_BV: jax.Array) -> jax.Array:
        found = choose(logits_BV, None if key is None else jax.random.fold_in(key, i))
        if not checks.is_integer_array(found) or found.shape != logits_BV.shape[:1]:
            expected = f"integers of shape {logits_BV.shape[:1]}, a token for each row"
            text = f"choose: expected {expected}, got {checks.summary(found)}"
            checks.raise_all("generate", [text])
        is_number = ~jnp.isnan(logits_BV).any(axis=1)
        return jnp.where(is_number, jnp.asarray(found).astype(jnp.int32), -1)

    def goes_on(last_B: jax.Array) -> jax.Array:
        return jnp.all(last_B[:, None] != jnp.array(ends, jnp.int32), axis=1)

    def is_left(state: tuple) -> jax.Array:
        i, last_B, *_ = state
        return (i < count) & goes_on(last_B).any()

    def step(state: tuple) -> tuple:
        i, last_B, out, caches = state
        logits_BV, caches = read(last_B[:, None], None, caches)
        last_B = jnp.where(goes_on(last_B), chosen(i, logits_BV), last_B)
        # Not an indexed update, which would have to know how a mesh shards the rows.
        return i + 1, last_B, jnp.where(places == i, last_B[:, None], out), caches

    logits_BV, caches = read(tokens, lengths, caches)
    first_B = chosen(0, logits_BV)
    out = jnp.where(places == 0, first_B[:, None], 0)
    i, last_B, out, _ = jax.lax.while_loop(is_left, step, (jnp.int32(1), first_B, out, caches))
    return jnp.where(places < i, out, last_B[:, None])
