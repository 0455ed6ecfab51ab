"""Marks arrays as differing from device to device within a shard_map."""

import functools
from typing import TypeVar

import jax
import jax.numpy as jnp

Tree = TypeVar("Tree")


def varying(tree: Tree, like: object) -> Tree:
    """The tree's floats, differing along every axis along which any array in `like` does.

    A loop's carry must be marked from the start; and the gradients of an array that is the same on
    every device are then summed over the devices. Adding a zero made of `like` marks it in every
    version of JAX. Outside a shard_map the tree is returned as it is.
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
