"""flax's own layers beside torch's: modules, tables, and how the port is called."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from helpers.parity.functions import PortFunction
from jax_attn.transfer import (
    Layout,
    conv,
    heads,
    heads_in,
    ignored,
    linear,
    load,
    packed,
    row,
)

B, T, C, D, H = 3, 11, 4, 6, 5


class Pair(NamedTuple):
    """Two layers. port: takes `rngs`, `dtype` and `param_dtype`. call: the port's, if its axes or
    its arguments are others. shapes: of the inputs; of none, they are ids.
    dtypes: those that both run on a CPU."""

    reference: Callable[[], torch.nn.Module]
    port: Callable[..., nnx.Module]
    layout: Layout | None = None
    call: Callable[..., Any] | None = None
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")

    def made(self, dtype: str) -> tuple[torch.nn.Module, nnx.Module]:
        torch.manual_seed(0)
        reference = self.reference().to(getattr(torch, dtype)).eval()
        with torch.no_grad():
            for name, x in reference.state_dict().items():
                if x.is_floating_point() and not name.endswith(getattr(reference, "unused", " ")):
                    torch.nn.init.uniform_(x, 0.5 if "var" in name else -0.8, 1.2)
        port = self.port(rngs=nnx.Rngs(0), dtype=dtype, param_dtype=dtype)
        if self.layout is not None:
            load(port, reference.state_dict(), self.layout)
        return reference, port

    def inputs(self) -> tuple[np.ndarray, ...]:
        rng = np.random.default_rng(0)
        drawn = tuple(rng.standard_normal(shape) for shape in self.shapes)
        return drawn or (rng.integers(0, 17, (B, T)),)


def by_channels_last(module: Any, x: Any) -> Any:
    """Call a port whose channels are last: (B, C, …) -> (B, C, …)."""
    axes = range(2, x.ndim)
    return module(x.transpose(0, *axes, 1)).transpose(0, x.ndim - 1, *range(1, x.ndim - 1))


def _pool(pool: Callable[..., Any], window: int) -> Callable[..., nnx.Module]:
    return lambda **_: PortFunction(lambda x: pool(x, (window, window), (2, 2)))


def _batch_norm(dtype: str, **words: Any) -> nnx.BatchNorm:
    """Make flax's layer, whose statistics are float32 in any dtype, with those of the dtype."""
    norm = nnx.BatchNorm(C, use_running_average=True, epsilon=1e-5, dtype=dtype, **words)
    for statistic in (norm.mean, norm.var):
        statistic.set_value(jnp.ones(C, dtype))
    return norm


class Recurrent(torch.nn.Module):
    """The outputs of a recurrent layer. unused: the bias that flax's cell does not have, as 0."""

    def __init__(self, layer: type, unused: str, **words: Any):
        super().__init__()
        self.layer = layer(C, H, batch_first=True, **words)
        self.unused = unused
        torch.nn.init.zeros_(getattr(self.layer, unused))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.MultiheadAttention(D, 2, batch_first=True)

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return self.layer(query, key, key, need_weights=False)[0]


def _rnn(cell: Callable[..., Any]) -> Callable[..., nnx.Module]:
    # The default, an orthogonal matrix, is not made in a narrow dtype.
    init = nnx.initializers.lecun_normal()
    return lambda **words: nnx.RNN(cell(C, H, recurrent_kernel_init=init, **words))


def _from_one(module: Any, x: Any) -> Any:
    return module(x, initial_carry=jnp.zeros((len(x), H), x.dtype))


def _from_two(module: Any, x: Any) -> Any:
    return module(x, initial_carry=(jnp.zeros((len(x), H), x.dtype),) * 2)


_CONV = Layout(row("bias", "bias"), row("weight", "kernel", conv))
_NORM = Layout(row("weight", "scale"), row("bias", "bias"))
_INPUT, _STATE = ("ii", "if_", "ig", "io"), ("hi", "hf", "hg", "ho")
_LSTM = Layout(
    row("layer.weight_ih_l0", [f"cell.{x}.kernel" for x in _INPUT], packed, linear),
    row("layer.weight_hh_l0", [f"cell.{x}.kernel" for x in _STATE], packed, linear),
    row("layer.bias_hh_l0", [f"cell.{x}.bias" for x in _STATE], packed),
    ignored("layer.bias_ih_l0", "flax has one bias"),
)
_OPTIMIZED = Layout(
    row("layer.weight_ih_l0", "cell.dense_i.kernel", linear),
    row("layer.weight_hh_l0", "cell.dense_h.kernel", linear),
    row("layer.bias_hh_l0", "cell.dense_h.bias"),
    ignored("layer.bias_ih_l0", "flax has one bias"),
)
_CELL = Layout(
    row("layer.weight_ih_l0", "cell.dense_i.kernel", linear),
    row("layer.weight_hh_l0", "cell.dense_h.kernel", linear),
    row("layer.bias_ih_l0", "cell.dense_i.bias"),
    ignored("layer.bias_hh_l0", "flax has one bias"),
)
_QKV = ("query", "key", "value")
_ATTENTION = Layout(
    row("layer.in_proj_weight", [f"{x}.kernel" for x in _QKV], packed, linear, heads),
    row("layer.in_proj_bias", [f"{x}.bias" for x in _QKV], packed, heads),
    row("layer.out_proj.weight", "out.kernel", linear, heads_in),
    row("layer.out_proj.bias", "out.bias"),
)
_RUNNING = (
    row("running_mean", "mean"),
    row("running_var", "var"),
    ignored("num_batches_tracked", "flax counts none"),
)

_NN = torch.nn
_IMAGES = ((B, C, 9, 6),)
_TEXT = ((B, T, D),)
_STEPS = ((B, 3, C),)
_SMALL = ((2, C, 4, 3),)
ROWS = {
    "Linear": Pair(
        lambda: _NN.Linear(D, C),
        partial(nnx.Linear, D, C),
        Layout(row("weight", "kernel", linear), row("bias", "bias")),
        shapes=_TEXT,
    ),
    "Conv, 1-D": Pair(
        lambda: _NN.Conv1d(C, D, 3, padding=1),
        partial(nnx.Conv, C, D, (3,), padding=1),
        _CONV,
        by_channels_last,
        ((B, C, T),),
    ),
    **{
        f"Conv, {name}": Pair(
            partial(_NN.Conv2d, C, 2 * C, 3, **ours),
            partial(nnx.Conv, C, 2 * C, (3, 3), **theirs),
            _CONV,
            by_channels_last,
            _IMAGES,
        )
        for name, ours, theirs in (
            ("padded", {"padding": 1}, {"padding": 1}),
            ("strided", {"stride": 2, "padding": 1}, {"strides": 2, "padding": 1}),
            ("dilated", {"dilation": 2}, {"kernel_dilation": 2, "padding": "VALID"}),
            ("by groups", {"groups": 2}, {"feature_group_count": 2, "padding": "VALID"}),
        )
    },
    "Conv, 3-D": Pair(
        lambda: _NN.Conv3d(C, D, 2),
        partial(nnx.Conv, C, D, (2, 2, 2), padding="VALID"),
        _CONV,
        by_channels_last,
        ((B, C, 3, 5, 4),),
    ),
    "ConvTranspose, 1-D": Pair(
        lambda: _NN.ConvTranspose1d(C, D, 3),
        partial(nnx.ConvTranspose, C, D, (3,), padding="VALID", transpose_kernel=True),
        _CONV,
        by_channels_last,
        ((B, C, T),),
    ),
    "ConvTranspose, strided": Pair(
        lambda: _NN.ConvTranspose2d(C, D, 3, 2),
        partial(nnx.ConvTranspose, C, D, (3, 3), 2, padding="VALID", transpose_kernel=True),
        _CONV,
        by_channels_last,
        ((B, C, 4, 3),),
    ),
    "LayerNorm": Pair(
        lambda: _NN.LayerNorm(D), partial(nnx.LayerNorm, D, epsilon=1e-5), _NORM, shapes=_TEXT
    ),
    "RMSNorm": Pair(
        lambda: _NN.RMSNorm(D, eps=1e-6),
        partial(nnx.RMSNorm, D, epsilon=1e-6),
        Layout(row("weight", "scale")),
        shapes=_TEXT,
    ),
    "BatchNorm": Pair(
        lambda: _NN.BatchNorm2d(C), _batch_norm, Layout(_NORM, *_RUNNING), by_channels_last, _SMALL
    ),
    "GroupNorm": Pair(
        lambda: _NN.GroupNorm(2, C),
        partial(nnx.GroupNorm, C, 2, epsilon=1e-5),
        _NORM,
        by_channels_last,
        _IMAGES,
    ),
    "InstanceNorm": Pair(
        lambda: _NN.InstanceNorm2d(C, affine=True),
        partial(nnx.InstanceNorm, C, epsilon=1e-5),
        _NORM,
        by_channels_last,
        _IMAGES,
    ),
    "Embed": Pair(
        lambda: _NN.Embedding(17, D), partial(nnx.Embed, 17, D), Layout(row("weight", "embedding"))
    ),
    "LSTM": Pair(
        lambda: Recurrent(_NN.LSTM, "bias_ih_l0"), _rnn(nnx.LSTMCell), _LSTM, _from_two, _STEPS
    ),
    "LSTM, optimized": Pair(
        lambda: Recurrent(_NN.LSTM, "bias_ih_l0"),
        _rnn(nnx.OptimizedLSTMCell),
        _OPTIMIZED,
        _from_two,
        _STEPS,
    ),
    "GRU": Pair(
        lambda: Recurrent(_NN.GRU, "bias_hh_l0"), _rnn(nnx.GRUCell), _CELL, _from_one, _STEPS
    ),
    "RNN": Pair(
        lambda: Recurrent(_NN.RNN, "bias_hh_l0"), _rnn(nnx.SimpleCell), _CELL, _from_one, _STEPS
    ),
    "max_pool": Pair(
        lambda: _NN.MaxPool2d(3, 2), _pool(nnx.max_pool, 3), None, by_channels_last, _IMAGES
    ),
    "avg_pool": Pair(
        lambda: _NN.AvgPool2d(2, 2), _pool(nnx.avg_pool, 2), None, by_channels_last, _IMAGES
    ),
    "MultiHeadAttention": Pair(
        Attention,
        partial(nnx.MultiHeadAttention, 2, D, decode=False),
        _ATTENTION,
        shapes=((B, T, D), (B, 7, D)),
        dtypes=("float32", "bfloat16"),  # JAX's attention takes no float16 on a CPU
    ),
}
