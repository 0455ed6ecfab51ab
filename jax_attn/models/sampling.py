"""Choose each row's next token: change the logits as transformers does, then draw.

The steps and their order are those of transformers' `generate`: the penalty for repetition,
temperature, top-k, top-p, min-p. Every number is traced, so another one compiles nothing.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jax_attn.attention import checks
from jax_attn.attention.annotations import AnyArray


class Sampling(NamedTuple):
    """Numbers that change the logits; a step whose number is None is left out.

    Without a temperature the likeliest token is chosen, and only the penalty can change which.
    """

    temperature: Any = None
    top_k: Any = None
    top_p: Any = None
    min_p: Any = None
    repetition_penalty: Any = None


def problems(sampling: Sampling) -> list[str]:
    """Say which numbers are outside their range; unknown ones are not checked."""
    ranges = {
        "temperature": (lambda x: x > 0, "a number above 0, or 0 for the likeliest token"),
        "top_p": (lambda x: 0 < x <= 1, "a number above 0 and at most 1"),
        "min_p": (lambda x: 0 <= x <= 1, "a number of 0 to 1"),
        "repetition_penalty": (lambda x: x > 0, "a number above 0"),
    }
    found = []
    for name, (is_right, expected) in ranges.items():
        x = getattr(sampling, name)
        if x is None or isinstance(x, jax.core.Tracer):
            continue
        if not (checks.is_real(x) and is_right(np.float32(x))):  # as the program has it
            found.append(f"{name}: expected {expected}, got {checks.summary(x)}")
    if sampling.top_k is not None and not isinstance(sampling.top_k, jax.core.Tracer):
        found += checks.count_problems(top_k=sampling.top_k)
    if sampling.temperature is None:
        idle = [name for name in ("top_k", "top_p", "min_p") if getattr(sampling, name) is not None]
        found += [f"{name}: expected a temperature beside it, got none" for name in idle]
    return found


def settled(sampling: Sampling, vocab_size: int) -> Sampling:
    """Return the same numbers, of which nothing is wrong, each in the one type that is compiled."""

    def number(name: str, x: Any) -> Any:
        if x is None or isinstance(x, jax.core.Tracer):
            return x
        return min(int(x), vocab_size) if name == "top_k" else float(x)

    return Sampling(*map(number, Sampling._fields, sampling))


def changed(
    logits_BV: Float[Array, "B V"], seen_BV: Bool[AnyArray, "B V"] | None, sampling: Sampling
) -> Float[Array, "B V"]:
    """Return the logits, at least in float32, from which a token is drawn; −∞ for what cannot be.

    seen_BV: the tokens that a row has already, which the penalty for repetition needs. Tokens of
    equal logits are kept or left out together. If there is a temperature, the largest logit of a
    row becomes 0, so that none overflows however low the temperature is.
    """
    x_BV = logits_BV.astype(jnp.promote_types(logits_BV.dtype, jnp.float32))
    if (penalty := sampling.repetition_penalty) is not None:
        assert seen_BV is not None
        x_BV = jnp.where(seen_BV, jnp.where(x_BV < 0, x_BV * penalty, x_BV / penalty), x_BV)
    if sampling.temperature is None:
        return x_BV
    x_BV = (x_BV - x_BV.max(axis=-1, keepdims=True)) / sampling.temperature
    if sampling.top_k is not None:
        x_BV = _without(x_BV, _least(x_BV, jnp.ones_like(x_BV), sampling.top_k))
    if sampling.top_p is not None:
        least_B1 = _least(x_BV, jax.nn.softmax(x_BV, axis=-1), sampling.top_p)
        # Rounded, the larger ones of a tiny probability may weigh 1.
        x_BV = _without(x_BV, jnp.where(sampling.top_p < 1, least_B1, -jnp.inf))
    if sampling.min_p is not None:
        x_BV = _without(x_BV, jnp.log(sampling.min_p))
    return x_BV


def chosen(
    logits_BV: Float[Array, "B V"],
    seen_BV: Bool[AnyArray, "B V"] | None,
    sampling: Sampling,
    key: jax.Array | None,
) -> Int[Array, " B"]:
    """Draw each row's next token, or take the likeliest one; on a tie the first, as torch does."""
    logits_BV = changed(logits_BV, seen_BV, sampling)
    if sampling.temperature is None:
        return jnp.argmax(logits_BV, axis=-1)
    assert key is not None
    return jax.random.categorical(key, logits_BV, axis=-1)


def _without(x_BV: jax.Array, least_B1: jax.Array) -> jax.Array:
    return jnp.where(x_BV < least_B1, -jnp.inf, x_BV)


def _least(x_BV: jax.Array, weight_BV: jax.Array, bound: Any) -> jax.Array:
    """Return the smallest logit (B, 1) whose larger ones weigh less than `bound` together.

    It is found bit by bit, because XLA:CPU takes ten times as long to sort a vocabulary.
    """
    bits = 8 * x_BV.dtype.itemsize
    rank_BV = _in_order(jax.lax.bitcast_convert_type(x_BV, f"int{bits}"))

    def halved(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low_B1, high_B1 = ends
        middle_B1 = (low_B1 & high_B1) + ((low_B1 ^ high_B1) >> 1)  # their sum could overflow
        larger_BV = jnp.where(rank_BV > middle_B1, weight_BV, 0)
        is_above_B1 = larger_BV.sum(axis=-1, keepdims=True) < bound
        low_B1 = jnp.where(is_above_B1, low_B1, middle_B1 + 1)
        return low_B1, jnp.where(is_above_B1, middle_B1, high_B1)

    ends = rank_BV.min(axis=-1, keepdims=True), rank_BV.max(axis=-1, keepdims=True)
    low_B1, _ = jax.lax.fori_loop(0, bits, halved, ends)
    low_B1 = jnp.minimum(low_B1, ends[1])  # of rows whose bound is too small for any
    return jax.lax.bitcast_convert_type(_in_order(low_B1), x_BV.dtype)


def _in_order(number: jax.Array) -> jax.Array:
    """Return a float's bits as an integer that is larger for a larger float, or the other way."""
    return number ^ ((number >> (jnp.iinfo(number.dtype).bits - 1)) & jnp.iinfo(number.dtype).max)
