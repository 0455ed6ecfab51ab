"""What follows from where queries and keys are: how they turn, and what is added to scores."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Int

from jax_attn.attention.annotations import AnyArray
from jax_attn.attention.rotary import Rotary, position_problems, rotate

Positions = Int[AnyArray, "#B T"] | Int[AnyArray, " T"]


def placement_problems(
    query: jax.Array,
    key: jax.Array,
    positions: Positions | None,
    key_positions: Positions | None,
    *,
    alone: bool,
    rotary: Rotary | None,
) -> list[str]:
    """What is wrong with the positions of query (B, T, …) and key (B, S, …).

    alone: no key was given, so that the keys are where the queries are.
    """
    arguments = {"positions": positions, "key_positions": key_positions}
    present = [name for name, at in arguments.items() if at is not None]
    if rotary is None:
        return [f"{name}: expected None, as the module has no rotary" for name in present]
    if alone and key_positions is not None:
        return ["key_positions: expected None, as no key is given: its positions are the query's"]
    if not alone and len(present) == 1:
        (missing,) = arguments.keys() - present
        return [f"{missing}: expected together with {present[0]}, as a key is given"]
    problems = position_problems("positions", positions, *query.shape[:2])
    return problems + position_problems("key_positions", key_positions, *key.shape[:2])


def turned(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    positions: Positions | None,
    key_positions: Positions | None,
    *,
    alone: bool,
    rotary: Rotary,
) -> tuple[jax.Array, jax.Array]:
    """Queries and keys, each at its positions: those given, else 0 … T−1 and 0 … S−1."""
    q_at = jnp.arange(q_BTNH.shape[1]) if positions is None else jnp.asarray(positions)
    if alone:
        return rotate(q_BTNH, q_at, rotary), rotate(k_BSKH, q_at, rotary)
    k_at = jnp.arange(k_BSKH.shape[1]) if key_positions is None else jnp.asarray(key_positions)
    length = jnp.maximum(q_at.max(), k_at.max()) + 1
    return rotate(q_BTNH, q_at, rotary, length=length), rotate(k_BSKH, k_at, rotary, length=length)


def with_position_bias(
    bias: AnyArray | None, position_bias: Callable[[int, int], jax.Array] | None, T: int, S: int
) -> AnyArray | None:
    """The call's own bias and what the module's position_bias adds to it."""
    if position_bias is None:
        return bias
    own_NTS = position_bias(T, S)
    if bias is None:
        return own_NTS
    with jax.numpy_dtype_promotion("standard"):  # a learnt one has the parameters' dtype
        return bias + own_NTS
