"""List the modules of torch that NNX has: how each is made, called, and how its tensors cross."""

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from jax_attn import transfer
from jax_attn.translate.tracing.source.source_lines import source_of


@dataclass(frozen=True)
class Tensor:
    """Hold a tensor of a leaf: its name in NNX, the step that carries it, and its expression.

    The expression reads it in torch's layout; `self` stands for NNX's array.
    """

    name: str
    step: Any = None
    in_torch: str = "self"


@dataclass(frozen=True)
class KnownLayer:
    """Say how NNX makes and calls a module.

    Attributes:
      made: the constructor's call, as a template without `rngs`; None where NNX cannot make it.
      called: the call of a module with an input of this rank, as a template of `module` and `x`.
      tensors: each tensor of torch's module, by its name.
    """

    made: Callable[[Any], str | None]
    called: Callable[[Any, int], str] = lambda module, rank: "module(x)"
    tensors: dict[str, Tensor] = field(default_factory=dict)


def _options(**options: tuple[Any, Any]) -> str:
    """Write the keyword arguments that are not at their defaults."""
    return "".join(
        f", {name}={value!r}" for name, (value, default) in options.items() if value != default
    )


def _linear(module: nn.Linear) -> str:
    use_bias = module.bias is not None
    options = _options(use_bias=(use_bias, True))
    return f"nnx.Linear({module.in_features}, {module.out_features}{options})"


def _embedding(module: nn.Embedding) -> str | None:
    if module.padding_idx is not None or module.max_norm is not None or module.scale_grad_by_freq:
        return None
    return f"nnx.Embed({module.num_embeddings}, {module.embedding_dim})"


def _layer_norm(module: nn.LayerNorm) -> str | None:
    if len(module.normalized_shape) != 1:
        return None
    options = _options(
        epsilon=(module.eps, 1e-6),
        use_bias=(module.bias is not None, True),
        use_scale=(module.weight is not None, True),
    )
    return f"nnx.LayerNorm({module.normalized_shape[0]}{options}, use_fast_variance=False)"


def _conv(module: Any) -> str | None:
    if module.padding_mode != "zeros" or module.transposed:
        return None
    padding = module.padding
    if isinstance(padding, tuple):
        padding = tuple((size, size) for size in padding)
    else:
        padding = padding.upper()
    ones = (1,) * len(module.kernel_size)
    options = _options(
        strides=(tuple(module.stride), ones),
        kernel_dilation=(tuple(module.dilation), ones),
        feature_group_count=(module.groups, 1),
        use_bias=(module.bias is not None, True),
    )
    return (
        f"nnx.Conv({module.in_channels}, {module.out_channels}, {tuple(module.kernel_size)!r}, "
        f"padding={padding!r}{options})"
    )


def _batch_norm(module: Any) -> str | None:
    if module.momentum is None or module.running_mean is None or module.weight is None:
        return None
    options = _options(eps=(module.eps, 1e-5), momentum=(module.momentum, 0.1))
    return f"BatchNorm({module.num_features}{options})"


def _conv_called(module: Any, rank: int) -> str:
    channels = rank - len(module.kernel_size) - 1
    return f"jnp.moveaxis(module(jnp.moveaxis(x, {channels}, -1)), -1, {channels})"


def dropout(rate: float) -> str:
    return f"nnx.Dropout({rate}, deterministic=True)"


_BIAS = Tensor("bias")
_CONV = KnownLayer(
    _conv,
    _conv_called,
    {
        "weight": Tensor("kernel", transfer.conv, "jnp.moveaxis(self, (-1, -2), (0, 1))"),
        "bias": _BIAS,
    },
)

_BATCH_NORM = KnownLayer(
    _batch_norm,
    tensors={name: Tensor(name) for name in ("weight", "bias", "running_mean", "running_var")},
)

_LINEAR = KnownLayer(
    _linear, tensors={"weight": Tensor("kernel", transfer.linear, "self.T"), "bias": _BIAS}
)

LEAVES: dict[type[nn.Module], KnownLayer] = {
    nn.Linear: _LINEAR,
    # The projection in nn.MultiheadAttention.
    nn.modules.linear.NonDynamicallyQuantizableLinear: _LINEAR,
    nn.Embedding: KnownLayer(_embedding, tensors={"weight": Tensor("embedding")}),
    nn.LayerNorm: KnownLayer(_layer_norm, tensors={"weight": Tensor("scale"), "bias": _BIAS}),
    nn.BatchNorm1d: _BATCH_NORM,
    nn.BatchNorm2d: _BATCH_NORM,
    nn.BatchNorm3d: _BATCH_NORM,
    nn.Dropout: KnownLayer(lambda module: dropout(module.p) if module.p else None),
    nn.Conv1d: _CONV,
    nn.Conv2d: _CONV,
    nn.Conv3d: _CONV,
}


def leaf(module: torch.nn.Module) -> KnownLayer | None:
    """Return how NNX has a module, or None where it has not: then its source is written."""
    found = LEAVES.get(type(module))
    if found is None or not _is_plain(module, found) or found.made(module) is None:
        return None
    return found


def _is_plain(module: nn.Module, layer: KnownLayer) -> bool:
    """Return whether a module does what its class does.

    Its forward may be another function, its parameters may be made anew in each call, as by
    `weight_norm`, and a hook may change what it is given or returns.
    """
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    is_of_class = (
        "forward" not in vars(module) and module._parameters.keys() <= layer.tensors.keys()
    )
    return is_of_class and not any(map(_returns, hooks))


def _returns(hook: Callable[..., Any]) -> bool:
    """Return whether a hook may return a value; one that never does only looks on."""
    if not inspect.isfunction(hook):
        return True
    source = source_of(hook)
    returns = (node for node in ast.walk(source) if isinstance(node, ast.Return))
    return not isinstance(source, ast.FunctionDef) or any(each.value for each in returns)
