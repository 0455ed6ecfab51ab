"""The linear map around attention: torch.nn.Linear's numbers, kernels with named head axes."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.lax import PrecisionLike

# U(±1/√fan_in): torch.nn.Linear's, which torch reaches as kaiming_uniform_ with a = √5.
torch_linear_init = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


def torch_bias_init(fan_in: int) -> nnx.Initializer:
    """torch.nn.Linear's bias, U(±1/√fan_in); the bias's own shape does not tell fan_in."""

    def init(key: Any, shape: Any, dtype: Any = jnp.float32, out_sharding: Any = None) -> jax.Array:
        del out_sharding  # nothing here is sharded
        return jax.random.uniform(key, shape, dtype, -(fan_in**-0.5), fan_in**-0.5)

    return init


def normal(
    rngs: nnx.Rngs, shape: tuple[int, ...], deviation: float, dtype: np.dtype
) -> nnx.Param[jax.Array]:
    """A parameter drawn from N(0, deviation²)."""
    return nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * deviation)


def project(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    axes: int,
    precision: PrecisionLike = None,
) -> jax.Array:
    """x·kernel + bias over the last `axes` axes of x and the first of kernel; x's dtype throughout.

    bias: the shape of kernel's other axes, or None.
    """
    # As a matrix: XLA would copy a kernel of more axes in each of its two transposed products.
    fan_in, out_axes = math.prod(kernel.shape[:axes]), kernel.shape[axes:]
    matrix = kernel.reshape(fan_in, math.prod(out_axes))
    rows = x.shape[: x.ndim - axes]
    y = jnp.dot(x.reshape(*rows, fan_in), matrix, precision=precision).reshape(*rows, *out_axes)
    if bias is None:
        return y
    # At least in float32, because of its transpose: the gradient of a bias is a sum over all
    # rows, which XLA:CPU makes in the dtype of this addition, rounding to it at every step.
    wide = jnp.float64 if y.dtype == jnp.float64 else jnp.float32
    return (y.astype(wide) + bias.astype(wide)).astype(y.dtype)


class Projection(nnx.Module):
    """(…, *in_axes) → (…, *out_axes): `kernel` (*in_axes, *out_axes), `bias` out_axes or None.

    dtype: what is computed in and returned; what input and kernel promote to when None.
    kernel_init sees the kernel as a matrix, so that its fan_in is the product of in_axes;
    bias_init: torch.nn.Linear's when None.
    """

    def __init__(
        self,
        in_axes: tuple[int, ...],
        out_axes: tuple[int, ...],
        *,
        use_bias: bool,
        dtype: np.dtype | None,
        param_dtype: np.dtype,
        precision: PrecisionLike,
        kernel_init: nnx.Initializer,
        bias_init: nnx.Initializer | None,
        rngs: nnx.Rngs,
    ):
        fan_in, fan_out = math.prod(in_axes), math.prod(out_axes)
        bias_init = torch_bias_init(fan_in) if bias_init is None else bias_init
        matrix = kernel_init(rngs.params(), (fan_in, fan_out), param_dtype)
        self.kernel = nnx.Param(matrix.reshape(*in_axes, *out_axes))
        self.bias = nnx.data(None)
        if use_bias:
            self.bias = nnx.Param(bias_init(rngs.params(), out_axes, param_dtype))
        self.axes, self.dtype, self.precision = len(in_axes), dtype, precision

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.kernel[...]
        dtype = jnp.promote_types(x.dtype, kernel.dtype) if self.dtype is None else self.dtype
        bias = None if self.bias is None else self.bias[...].astype(dtype)
        return project(x.astype(dtype), kernel.astype(dtype), bias, self.axes, self.precision)
