"""Write normalizations of activations and weights, and what bilinear layers compute."""

from typing import Any

from jax_attn.translate.rules.calls import affine, call, trailing
from jax_attn.translate.rules.rule import Array, Rule


def _last(count: int) -> str:
    """Write the last axes as an axis argument."""
    return "-1" if count == 1 else str(tuple(range(-count, 0)))


def _standardized(input: str, axis: str | None = None) -> str:
    return call("jax.nn.standardize", input, axis, epsilon="eps", algorithm="'stable'")


def _statistics(axes: str, keepdims: bool | None = None) -> tuple[str, str]:
    """Write the mean and the reciprocal deviation, through which torch sends no gradient."""
    constant = "jax.lax.stop_gradient(input)"
    variance = call(f"{constant}.var", axes, keepdims=keepdims)
    return call(f"{constant}.mean", axes, keepdims=keepdims), f"jax.lax.rsqrt({variance} + eps)"


def layer_norm(normalized_shape: Any, weight: Any, bias: Any) -> str:
    count = len(normalized_shape)
    return affine(_standardized("input", None if count == 1 else _last(count)), weight, bias)


def native_layer_norm(normalized_shape: Any, weight: Any, bias: Any) -> tuple[str, ...]:
    axes = _last(len(normalized_shape))
    return (
        layer_norm(normalized_shape, weight, bias),
        *_statistics(axes, keepdims=True),
    )


def _root(normalized_shape: Any, eps: Any) -> str:
    small = "jnp.finfo(input.dtype).eps" if eps is None else "eps"
    axes = _last(len(normalized_shape))
    return f"jax.lax.rsqrt(jnp.mean(jnp.square(input), {axes}, keepdims=True) + {small})"


def rms_norm(normalized_shape: Any, weight: Any, eps: Any) -> str:
    return affine(f"input * {_root(normalized_shape, eps)}", weight, None)


def fused_rms_norm(
    input: Array, normalized_shape: Any, weight: Any, eps: Any, out: Any
) -> tuple[str, ...]:
    root = _root(normalized_shape, eps)
    if out[1].dtype != input.dtype:
        root += f".astype(jnp.{out[1].dtype})"
    return rms_norm(normalized_shape, weight, eps), root


def group_norm(input: Array, weight: Any, bias: Any) -> str:
    grouped = _standardized("input.reshape(input.shape[0], num_groups, -1)")
    return affine(f"{grouped}.reshape(input.shape)", weight, bias, input.rank - 2)


def native_group_norm(input: Array, weight: Any, bias: Any) -> tuple[str, ...]:
    grouped = "input.reshape(input.shape[0], group, -1)"
    normed = f"{_standardized(grouped)}.reshape(input.shape)"
    return (
        affine(normed, weight, bias, input.rank - 2),
        f"{grouped}.mean(-1)",
        f"jax.lax.rsqrt({grouped}.var(-1) + eps)",
    )


def instance_norm(
    input: Array, weight: Any, bias: Any, running_mean: Any, use_input_stats: bool
) -> str:
    if not use_input_stats:
        return batch_norm(input, weight, bias, running_mean, False)
    if running_mean is not None:
        raise NotImplementedError("an instance norm that updates its running statistics")
    count = input.rank - 2
    return affine(_standardized("input", _last(count)), weight, bias, count)


def _but(dim: int, rank: int) -> str:
    """Write every axis but one."""
    axes = tuple(axis for axis in range(rank) if axis != dim)
    return str(axes[0] if len(axes) == 1 else axes)


def _by_running(input: Array, weight: Any, bias: Any) -> str:
    count = input.rank - 2
    normed = call(
        "jax.nn.standardize",
        "input",
        mean=trailing("running_mean", count),
        variance=trailing("running_var", count),
        epsilon="eps",
    )
    return affine(normed, weight, bias, count)


def _by_batch(input: Array, weight: Any, bias: Any) -> tuple[str, str, str]:
    axes = _but(1, input.rank)
    return (
        affine(_standardized("input", axes), weight, bias, input.rank - 2),
        *_statistics(axes),
    )


def batch_norm(input: Array, weight: Any, bias: Any, running_mean: Any, training: bool) -> str:
    if not training:
        return _by_running(input, weight, bias)
    if running_mean is not None:
        raise NotImplementedError("a batch norm that updates its running statistics in place")
    return _by_batch(input, weight, bias)[0]


def batch_norm_functional(input: Array, weight: Any, bias: Any, training: bool) -> tuple[str, ...]:
    if not training:
        return *batch_norm_eval(input, weight, bias), "running_mean", "running_var"
    axes = _but(1, input.rank)
    return (
        *_by_batch(input, weight, bias),
        f"(1 - momentum) * running_mean + momentum * jax.lax.stop_gradient(input).mean({axes})",
        # torch normalizes by the biased variance and keeps the unbiased one.
        "(1 - momentum) * running_var"
        f" + momentum * jax.lax.stop_gradient(input).var({axes}, ddof=1)",
    )


def batch_norm_eval(input: Array, weight: Any, bias: Any) -> tuple[str, ...]:
    return _by_running(input, weight, bias), *["jnp.zeros(0, dtype=input.dtype)"] * 2


def weight_norm(v: Array, dim: int) -> str:
    return f"v * (g / {_norm(v, dim)})"


def weight_norm_interface(v: Array, dim: int) -> tuple[str, str]:
    return weight_norm(v, dim), _norm(v, dim)


def _norm(v: Array, dim: int) -> str:
    axes = f"{_but(dim, v.rank)}, keepdims=True" if dim != -1 else ""
    return f"jnp.sqrt(jnp.square(v).sum({axes}))"


def trilinear(
    i1: Array, i2: Array, i3: Array, expand1: Any, expand2: Any, expand3: Any, sumdim: Any
) -> str:
    """Write the sum of products of tensors, each without the axes that it is expanded by."""
    rank = i1.rank + len(expand1)
    letters = "abcdefghijklmnopqrstuvwxyz"[:rank]
    names = [
        "".join(letters[axis] for axis in range(rank) if axis not in axes)
        for axes in (expand1, expand2, expand3, sumdim)
    ]
    return f"jnp.einsum('{','.join(names[:3])}->{names[3]}', i1, i2, i3)"


NORMS: dict[str, Rule] = {
    "aten.layer_norm.default": layer_norm,
    "aten.native_layer_norm.default": native_layer_norm,
    "aten.rms_norm.default": rms_norm,
    "aten._fused_rms_norm.default": fused_rms_norm,
    "aten.group_norm.default": group_norm,
    "aten.native_group_norm.default": native_group_norm,
    "aten.instance_norm.default": instance_norm,
    "aten.batch_norm.default": batch_norm,
    "aten._native_batch_norm_legit_functional.default": batch_norm_functional,
    "aten._native_batch_norm_legit_no_training.default": batch_norm_eval,
    "aten._native_batch_norm_legit.no_stats": _by_batch,
    "aten._trilinear.default": trilinear,
    "aten._weight_norm.default": weight_norm,
    "aten._weight_norm_interface.default": weight_norm_interface,
}
