"""flax's own NNX layers against torch's: with torch's settings, and as they are by default."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from flax import nnx

from gallery.port import Port, Subject
from helpers.parity.flax_layers import ROWS, C, D, by_channels_last
from helpers.parity.flax_layers import Pair as Layers
from helpers.parity.functions import PortFunction
from jax_attn.parity import Pair

DEFAULTS: dict[str, Layers] = {
    f"{of}, default epsilon": ROWS[of]._replace(port=port)
    for of, port in (
        ("LayerNorm", partial(nnx.LayerNorm, D)),
        ("GroupNorm", partial(nnx.GroupNorm, C, 2)),
        ("InstanceNorm", partial(nnx.InstanceNorm, C)),
    )
}
"""The layer with the sizes alone, as `nnx.LayerNorm(D, rngs=rngs)` is written."""
FAR = 30.0
"""A mean of so many standard deviations, where the difference of two squares loses digits."""


def _far(fast: bool) -> Layers:
    words = {} if fast else {"use_fast_variance": False}
    return ROWS["LayerNorm"]._replace(port=partial(nnx.LayerNorm, D, epsilon=1e-5, **words))


def _subject(layers: Layers, shift: float, dtype: str) -> Subject:
    reference, port = layers.made(dtype)
    inputs = tuple(x + shift if x.dtype.kind == "f" else x for x in layers.inputs())
    return Subject(
        Pair(reference, port, inputs, layout=layers.layout, port_call=layers.call, dtype=dtype)
    )


def _port(name: str, layers: Layers, shift: float = 0.0) -> Port:
    return Port(f"flax {name}", "flax", partial(_subject, layers, shift), layers.dtypes[:2])


# --- training mode: batch statistics, and the running ones that a call leaves ---------------------


def _in_training(momentum: float, dtype: str) -> Subject:
    layers = ROWS["BatchNorm"]
    words = {"use_running_average": False, "epsilon": 1e-5, "momentum": momentum}
    reference, port = layers._replace(port=lambda **w: nnx.BatchNorm(C, **words, **w)).made(dtype)
    return Subject(
        Pair(
            reference.train(),
            port,
            layers.inputs(),
            layout=layers.layout,
            port_call=by_channels_last,
            dtype=dtype,
        )
    )


def _pool(reference: Callable[[], torch.nn.Module], pool: Callable[..., Any]) -> Layers:
    return ROWS["avg_pool"]._replace(reference=reference, port=lambda **_: PortFunction(pool))


PORTS = (
    *(_port(name, layers) for name, layers in ROWS.items()),
    *(_port(name, layers) for name, layers in DEFAULTS.items()),
    _port("LayerNorm, mean of 30 deviations", _far(True), FAR),
    _port("LayerNorm, mean of 30 deviations, use_fast_variance=False", _far(False), FAR),
    Port("flax BatchNorm, training, momentum 0.9", "flax", partial(_in_training, 0.9), ["float32"]),
    Port("flax BatchNorm, training, defaults", "flax", partial(_in_training, 0.99), ["float32"]),
    _port(
        "avg_pool, padded",
        _pool(
            lambda: torch.nn.AvgPool2d(3, 2, padding=1),
            lambda x: nnx.avg_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1))),
        ),
    ),
    _port(
        "max_pool, padded",
        _pool(
            lambda: torch.nn.MaxPool2d(3, 2, padding=1),
            lambda x: nnx.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1))),
        ),
    ),
)
