"""Modules with odd names, state, hooks and containers, to be translated."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from helpers.written_bodies import (
    X,
    body,
    looped,
)


def hooked() -> nn.Module:
    part = nn.Linear(5, 5)
    part.register_forward_hook(lambda module, inputs, output: output * 2)
    return body(lambda self, x: self.part(self.a(x)), part=part)


def patched() -> nn.Module:
    part = nn.Linear(5, 5)
    part.forward = lambda x: nn.functional.linear(x, part.weight) * 3
    return body(lambda self, x: self.part(self.a(x)), part=part)


def watched() -> nn.Module:
    def watch(module, inputs, output):
        watched.seen = output.shape

    made = body(lambda self, x: self.a(x))
    made.a.register_forward_hook(watch)
    return made


def weight_normed() -> nn.Module:
    part = nn.utils.weight_norm(nn.Linear(5, 5))
    return body(lambda self, x: self.part(self.a(x)), part=part)


def special_numbers() -> nn.Module:
    made = body(
        lambda self, x: torch.cat([self.none, torch.maximum(self.a(x) * self.bit, self.low)])
    )
    made.register_buffer("none", torch.zeros(0, 5))
    made.register_buffer("low", torch.full((5,), float("-inf")), persistent=False)
    made.register_buffer("bit", torch.tensor([[False], [True], [True]]))
    made.bit[0] = False
    return made


def state_of_other_dtypes() -> nn.Module:
    made = body(lambda self, x: self.a(x)[self.rows] * self.wide[0] + self.start.real)
    made.rows = nn.Parameter(torch.tensor([1, 2]), requires_grad=False)
    made.start = nn.Parameter(torch.randn(5, dtype=torch.complex64))
    made.register_buffer("wide", torch.randn(300, 5).bfloat16(), persistent=False)
    return made


def parameter_returned() -> nn.Module:
    made = body(lambda self, x: (self.a(x), self.kept))
    made.kept = nn.Parameter(torch.randn(5))
    return made


class WithAnArgumentOfThatName(nn.Module):
    """Has arguments with the names of a size, of the file's imports and of its functions."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 5)

    def forward(self, A: Tensor, B: Tensor, jnp: Tensor, clamp: Tensor) -> Tensor:
        rows = self.a(A).reshape(A.shape[0] * 5, 1).reshape(-1, 5)
        return torch.where(rows > 0, B, jnp.exp()) * clamp.clamp(0.1)


def in_a_loop_named_as_the_file(self, x):
    y = x * 2
    for jnp in self.parts:
        x = jnp(x, y)
    return torch.exp(x) * y


class Keys(nn.Module):
    """Takes and returns trees in which two paths read alike."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 5)

    def forward(self, xs: Any, xs_0: Tensor, more: Any) -> Any:
        y = self.a(xs[0]) + xs_0 * xs[1] + more["a-b"] * more["class"]
        return {"out": [y, y * 2], "out_0": y * 3}


def of_keys(self, x):
    found = self.part([x, x * 2], x * 3, {"a-b": x * 5, "class": x * 7})
    return found["out"][0] + found["out"][1] * 5 + found["out_0"] * 7


class OddNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add_module("up-1", nn.Linear(5, 5))
        self.register_parameter("0", nn.Parameter(torch.randn(5)))
        self.register_buffer("b 2", torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, "up-1")(x) * getattr(self, "0") + getattr(self, "b 2")


class Layers(nn.Sequential):
    """A list of layers with tensors of its own."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.bias = nn.Parameter(torch.randn(5))
        self.register_buffer("factor", torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor + self.bias


class Named(nn.ModuleDict):
    def __init__(self, modules: Any) -> None:
        super().__init__(modules)
        self.register_buffer("factor", torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return self["up"](x) * self.factor


class Config:
    def __init__(self, gate: bool) -> None:
        self.gate = gate


class Alike(nn.Module):
    """Has attributes that are a number in one copy and a parameter or a module in another."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.config, self.has_norm = Config(first), not first
        self.a, self.gate = nn.Linear(5, 5), nn.Linear(5, 5)
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.norm = nn.LayerNorm(5) if first else nn.Identity()
        self.scale = nn.Parameter(torch.randn(5)) if first else 0.7
        self.range, self.limit = 1.5 + first, float("inf") * first if first else 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.gate(self.norm(self.a(x))) * self.scale
        if self.config.gate:
            x = torch.sigmoid(x) * x
        if self.has_norm:
            x = torch.tanh(x)
        if self.limit > 0:
            x = torch.cos(x) + 1
        for layer in self.layers:
            x = layer(x)
        return x * self.range


class Scales(nn.Module):
    """Reads one attribute in two branches."""

    def __init__(self, is_first: bool, factor: float) -> None:
        super().__init__()
        self.a, self.is_first, self.factor = nn.Linear(5, 5), is_first, factor

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            return torch.tanh(self.a(x) * self.factor) * 3.3
        return torch.sigmoid(self.a(x)) + self.factor


def tied() -> nn.Module:
    """Return a module whose layers share weights and have biases of their own, and the reverse."""
    made = body(lambda self, ids: self.c(self.b(self.a(self.part(ids)))), part=nn.Embedding(5, 5))
    made.b, made.c = nn.Linear(5, 5), nn.Linear(5, 5)
    made.a.weight, made.c.bias = made.part.weight, made.b.bias
    return made


def with_factor(x, y):
    rows, _ = x.shape
    return x.reshape(rows, 5, 2).transpose(1, 2).reshape(rows, -1) * y


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 5)

    def forward(self, x: Tensor, more: Any) -> Tensor:
        return sum(more, self.a(x))


def reads_parameters(self, x):
    return x * self.part[0] + self.part[1]


def shared_list() -> nn.Module:
    made = body(looped)
    made.parts = nn.ModuleList([made.a, made.a, nn.Linear(5, 5)])
    return made


def buffers() -> nn.Module:
    made = body(
        lambda self, x: self.a(x).masked_fill(self.mask, 0.5)[:, self.order] + self.table[0, :3]
    )
    made.register_buffer("mask", torch.tensor([True, False, True, True, False]))
    made.register_buffer("order", torch.tensor([0, 2, 1]))
    made.register_buffer("table", torch.randn(20, 10), persistent=False)
    return made


def large_constant() -> nn.Module:
    made = body(lambda self, x: self.a(x) * self.constant + self.kept["table"].mean(0))
    made.constant, made.kept = nn.Parameter(torch.randn(5)), {"table": torch.randn(40, 5)}
    return made


class Sized(nn.Module):
    """A parameter and an argument of one name."""

    def __init__(self) -> None:
        super().__init__()
        self.size = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor, size: int) -> Tensor:
        return (x * self.size)[:, :size].sum(1, keepdim=True)


class Row(NamedTuple):
    module: Callable[[], nn.Module]
    inputs: Any = (X,)
    dynamic: Any = None


def attention(weights: bool) -> Callable[..., Any]:
    return lambda self, x: self.part(x, x, x) if weights else self.part(x, x, x)[0]
