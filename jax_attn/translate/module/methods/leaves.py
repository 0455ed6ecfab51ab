"""List the modules of torch that NNX has: how each is made, called, and how its tensors cross."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from jax_attn import transfer


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
      called: the call, as a template of `module` and `x`.
      tensors: each tensor of torch's module, by its name.
    """

    made: Callable[[Any], str | None]
    called: str = "module(x)"
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


def dropout(rate: float) -> str:
    return f"nnx.Dropout({rate}, deterministic=True)"


_BIAS = Tensor("bias")
_CONV = KnownLayer(
    _conv,
    "jnp.moveaxis(module(jnp.moveaxis(x, 1, -1)), -1, 1)",
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
    return found if found is not None and found.made(module) is not None else None
