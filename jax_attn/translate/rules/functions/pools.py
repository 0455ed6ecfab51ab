"""Convolutions, pools and windows that JAX has not."""

import jax.numpy as jnp
from jax import Array


def transposed_kernel(weight: Array, groups: int) -> Array:
    """Turn the kernel of a transposed convolution in groups into that of a convolution."""
    inputs, outputs, *sizes = weight.shape
    weight = weight.reshape(groups, inputs // groups, outputs, *sizes).swapaxes(1, 2)
    weight = weight.reshape(groups * outputs, inputs // groups, *sizes)
    return jnp.flip(weight, range(2, weight.ndim))
