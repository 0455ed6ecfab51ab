"""Hold what a module has beside its parameters, and what a partial translation calls."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array


def not_translated(operator: str, place: str, /, **arguments: object) -> Array:
    """Raise NotImplementedError; write what this operator of torch computes in place of the call.

    place: its line in torch's source. arguments: those of the operator, by torch's names.
    """
    raise NotImplementedError(f"{operator} has no translation, {place}")


class Buffer(nnx.Variable[Array]):
    """An array that is saved with the weights and not trained."""


class BatchNorm(nnx.Module):
    """Normalize each channel, which is axis 1.

    `train()` takes the statistics of the batch, and keeps their running means; `eval()` takes
    those. As in torch, the variance that is kept is unbiased.
    """

    def __init__(self, channels: int, eps: float = 1e-5, momentum: float = 0.1, *, rngs: nnx.Rngs):
        self.weight = nnx.Param(jnp.ones(channels))
        self.bias = nnx.Param(jnp.zeros(channels))
        self.running_mean = Buffer(jnp.zeros(channels))
        self.running_var = Buffer(jnp.ones(channels))
        self.eps = eps
        self.momentum = momentum
        self.use_running_average = True

    def __call__(self, x: Array) -> Array:
        axes = (0, *range(2, x.ndim))
        if self.use_running_average:
            mean, variance = self.running_mean[...], self.running_var[...]
        else:
            mean, variance = x.mean(axes), x.var(axes)
            count = x.size // x.shape[1]
            self._keep(self.running_mean, mean)
            self._keep(self.running_var, variance * count / (count - 1))
        x = jax.nn.standardize(
            x,
            axes,
            mean=jnp.expand_dims(mean, axes),
            variance=jnp.expand_dims(variance, axes),
            epsilon=self.eps,
        )
        return x * jnp.expand_dims(self.weight[...], axes) + jnp.expand_dims(self.bias[...], axes)

    def _keep(self, running: Buffer, value: Array) -> None:
        value = jax.lax.stop_gradient(value)
        running[...] = (1 - self.momentum) * running[...] + self.momentum * value
