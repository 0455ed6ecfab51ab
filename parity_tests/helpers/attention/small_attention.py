"""A small attention module whose axes all differ, its inputs, and what it is by definition."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from helpers.attention import attention_definition as definition
from jax_attn.nn import GroupedQueryAttention

B, T, S, N, K, H, D, KDIM, VDIM = 2, 5, 7, 6, 3, 11, 13, 17, 19


def numpy_weights(seed=1):
    """Options of a module whose weights NumPy draws: jax's own draws compile, shape by shape."""
    rng = np.random.default_rng(seed)

    def init(key, shape, dtype):
        return jnp.asarray(rng.uniform(-0.25, 0.25, shape).astype(dtype))

    return {"kernel_init": init, "bias_init": init, "rngs": nnx.Rngs(seed)}


def build(**options):
    options = {"head_dim": H, "kdim": KDIM, "vdim": VDIM, **numpy_weights(), **options}
    return GroupedQueryAttention(D, N, K, **options)


def inputs(seed=2, dtype="float32"):
    rng = np.random.default_rng(seed)
    shapes = (B, T, D), (B, S, KDIM), (B, S, VDIM)
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


def by_definition(module, query, key, value, keep=None, out_keep=None, **options):
    """Output, weights and their budgets, from the module's parameters in float64.

    The budget: attention's own for its inputs, which the projections have put off by
    (√fan_in + 2)·u of their magnitude; then out_proj's of its.
    """
    dtype = str(module.q_proj.kernel.dtype)
    u = definition.ROUNDOFF[dtype]

    def project(name, x, features, size=np.asarray, shifted=True):
        linear = getattr(module, name)
        kernel = size(np.asarray(linear.kernel[...], np.float64)).reshape(x.shape[-1], -1)
        out = (size(x) @ kernel).reshape(*x.shape[:-1], *features)
        if linear.bias is None or not shifted:
            return out
        return out + size(np.asarray(linear.bias[...], np.float64))

    plan = ("q_proj", query, (N, H)), ("k_proj", key, (K, H)), ("v_proj", value, (K, H))
    plan = [(name, np.asarray(x, np.float64), features) for name, x, features in plan]
    q, k, v = (project(*step) for step in plan)
    off = max(np.sqrt(x.shape[-1]) + 2 for _, x, _ in plan)
    worst = [project(*step, size=np.abs).max() for step in plan]
    options = {**options, "keep": keep, "rate": module.dropout_rate if keep is not None else 0.0}
    attended, weights = definition.attend(q, k, v, **options)
    budget, weights_budget = definition.forward_budget(dtype, q, k, v, **options)
    scale = H**-0.5 if module.scale is None else module.scale
    # |q|·|k| summed over H, each off by off·u: a score is off by that, a weight by twice that.
    drift = 4 * off * u * scale * H * worst[0] * worst[1]
    budget = budget + drift * definition.attend(q, k, np.abs(v), **options)[0] + off * u * worst[2]
    out = project("out_proj", attended.reshape(B, T, N * H), (D,))
    budget = budget.reshape(B, T, N * H)
    out_budget = project("out_proj", budget, (D,), size=np.abs, shifted=False)
    magnitude = project("out_proj", np.abs(attended).reshape(B, T, N * H), (D,), size=np.abs)
    out_budget = out_budget + (np.sqrt(N * H) + 3) * u * magnitude
    if out_keep is not None:
        kept = out_keep / (1 - module.out_dropout_rate)
        # What is dropped is exactly 0, but a budget has to be above that.
        out, out_budget = out * kept, out_budget * kept + 1e-30
    return out, out_budget, weights, weights_budget + drift * weights
