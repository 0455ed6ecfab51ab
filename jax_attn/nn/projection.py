"""Linear layers of attention: initialised as torch.nn.Linear, kernels with named head axes."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.lax import PrecisionLike
from jax.sharding import AbstractMesh, NamedSharding

from jax_attn.attention import meshes
from jax_attn.attention.broadcasting import broadcasting

Names = tuple[str | meshes.MeshAxes | None, ...]
"""Each axis's name in a mesh: a mesh axis, or one of flax's logical axis rules."""

# U(±1/√fan_in), as torch.nn.Linear, which calls kaiming_uniform_ with a = √5.
torch_linear_init = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


def torch_bias_init(fan_in: int) -> nnx.Initializer:
    """Return torch.nn.Linear's bias initializer, U(±1/√fan_in).

    The bias's own shape does not determine fan_in.
    """

    def init(key: Any, shape: Any, dtype: Any = jnp.float32, out_sharding: Any = None) -> jax.Array:
        del out_sharding  # nothing here is sharded
        return jax.random.uniform(key, shape, dtype, -(fan_in**-0.5), fan_in**-0.5)

    return init


def normal(
    rngs: nnx.Rngs, shape: tuple[int, ...], deviation: float, dtype: np.dtype, names: Names
) -> nnx.Param[jax.Array]:
    """Return a parameter drawn from N(0, deviation²)."""
    return placed_param(jax.random.normal(rngs.params(), shape, dtype) * deviation, names)


@broadcasting
def project(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    axes: int,
    precision: PrecisionLike = None,
) -> jax.Array:
    """Return x·kernel + bias over x's last and kernel's first `axes` axes, all in x's dtype.

    bias: the shape of kernel's other axes, or None.
    """
    if (mesh := meshes.explicit_mesh((x, kernel))) is not None:
        y, bias = _product_in_mesh(mesh, x, kernel, bias, axes, precision)
    else:
        # As matrices: XLA would copy an operand of more axes in each transposed product. In a mesh
        # the rows keep their axes, because each may be sharded.
        fan_in, out_axes = math.prod(kernel.shape[:axes]), kernel.shape[axes:]
        matrix = kernel.reshape(fan_in, math.prod(out_axes))
        rows = x.shape[: x.ndim - axes]
        in_mesh = not jax.typeof(x).sharding.mesh.empty
        x = x.reshape(*(rows if in_mesh else (math.prod(rows),)), fan_in)
        y = jnp.dot(x, matrix, precision=precision).reshape(*rows, *out_axes)
    if bias is None:
        return y
    # At least float32, because of its transpose: the gradient of a bias is a sum over all rows,
    # which XLA:CPU computes in the dtype of this addition, rounding at every step.
    wide = jnp.float64 if y.dtype == jnp.float64 else jnp.float32
    return (y.astype(wide) + bias.astype(wide)).astype(y.dtype)


def _product_in_mesh(
    mesh: AbstractMesh,
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    axes: int,
    precision: PrecisionLike,
) -> tuple[jax.Array, jax.Array | None]:
    """Return x·kernel in a mesh of Explicit axes, and the bias resharded for adding to it.

    The kernel's first axes are resharded like x's last ones; its others keep their sharding, unless
    the same mesh axis shards x.
    """
    given, first = meshes.cuts(x), x.ndim - axes
    used = {name for each in given for name in each}
    out = [each if not used & {*each} else () for each in meshes.cuts(kernel)[axes:]]
    kernel = meshes.placed(kernel, mesh, meshes.spec([*given[first:], *out]))
    contracted = (tuple(range(first, x.ndim)), tuple(range(axes)))
    y = lax.dot_general(
        x,
        kernel,
        (contracted, ((), ())),
        precision=precision,
        out_sharding=NamedSharding(mesh, meshes.spec([*given[:first], *out])),
    )
    return y, None if bias is None else meshes.placed(bias, mesh, meshes.spec(out))


def placed_param(value: jax.Array, names: Names) -> nnx.Param[jax.Array]:
    """Return a parameter with these axis names; placed on the mesh if one is set."""
    if not any(names):
        return nnx.Param(value)
    is_in_mesh = not jax.sharding.get_abstract_mesh().empty
    return nnx.Param(value, out_sharding=names, eager_sharding=is_in_mesh)


class Projection(nnx.Module):
    """Linear map (…, *in_axes) → (…, *out_axes).

    `kernel` is (*in_axes, *out_axes), `bias` out_axes or None. names: for each axis of the kernel
    its name in a mesh, None if it is not sharded. dtype: dtype of computation and output; what
    input and kernel promote to if None. kernel_init sees the kernel as a matrix, so its fan_in is
    the product of in_axes; bias_init: torch.nn.Linear's if None.
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
        names: Names = (),
        rngs: nnx.Rngs,
    ):
        fan_in, fan_out = math.prod(in_axes), math.prod(out_axes)
        bias_init = torch_bias_init(fan_in) if bias_init is None else bias_init
        matrix = kernel_init(rngs.params(), (fan_in, fan_out), param_dtype)
        self.kernel = placed_param(matrix.reshape(*in_axes, *out_axes), names)
        self.bias = nnx.data(None)
        if use_bias:
            bias = bias_init(rngs.params(), out_axes, param_dtype)
            self.bias = placed_param(bias, names[len(in_axes) :])
        self.axes, self.dtype, self.precision = len(in_axes), dtype, precision

    @broadcasting
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.kernel[...]
        dtype = jnp.promote_types(x.dtype, kernel.dtype) if self.dtype is None else self.dtype
        bias = None if self.bias is None else self.bias[...].astype(dtype)
        return project(x.astype(dtype), kernel.astype(dtype), bias, self.axes, self.precision)
