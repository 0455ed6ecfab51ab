"""Within a shard_map: what differs from device to device."""

import functools
from typing import TypeVar

import jax
import jax.numpy as jnp

Tree = TypeVar("Tree")


def varying(tree: Tree, like: object) -> Tree:
    """The tree's floats, differing along every axis along which any array in `like` does.

    What goes round a loop must say so from the start; and of what is the same on every device,
    the gradients of all of them are then added up. Adding a zero made of `like` says it in every
    version of JAX. Outside a shard_map the tree as it is.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return tree
    arrays = map(_data, map(jnp.asarray, jax.tree.leaves(like)))
    zeros = [(data != data).ravel()[0].astype(jnp.int32) * 0 for data in arrays]
    zero = functools.reduce(jnp.add, zeros)

    def cast(x: jax.Array) -> jax.Array:
        return x + zero.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, tree)


def _data(x: jax.Array) -> jax.Array:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
