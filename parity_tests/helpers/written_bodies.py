"""Forward methods that a translation can easily get wrong, and the module that has one."""

import collections
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

X = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
SEQUENCE = torch.randn(2, 7, 6, generator=torch.Generator().manual_seed(1))
Both = collections.namedtuple("Both", "hidden out")


class Body(nn.Module):
    """A module with one linear layer, `a`, further parts, and the forward of a row."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        self.a = nn.Linear(5, 5)
        for name, part in parts.items():
            setattr(self, name, part)


def body(forward: Callable[..., Any], **parts: nn.Module) -> nn.Module:
    return type("Written", (Body,), {"forward": forward})(**parts)


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 5)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.a(x) if y is None else self.a(x) * y


def block(function: Callable[[Tensor], Tensor]) -> nn.Module:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            return function(self.a(x))

    return Block()


def in_place(self, x):
    y = self.a(x)
    y[0] = 0
    y.mul_(2)
    return y


def without_gradient(self, x):
    with torch.no_grad():
        gate = self.a(x)
    return gate * x


def states(self, x):
    h, (a, c) = self.part(x[None])
    return h, a, c


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 5)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return torch.tanh(self.a(x)) * gate


def with_two_gates(self, x):
    """Give the layers of one list a gate of two kinds, as models with two kinds of masks do."""
    wide, narrow = torch.sigmoid(x), torch.cos(x)
    for i, layer in enumerate(self.parts):
        x = layer(x, narrow if i in (2, 3) else wide)
    return x


def looped(self, x):
    for layer in self.parts:
        x = torch.tanh(layer(x))
    return x


def residuals(self, x):
    before = x
    x = self.a(x)
    y = x
    x = torch.tanh(x)
    x = x * 2 + y
    z = x
    x = x * before
    return x + z, before, y


def lowest_bits(self, x):
    lowest = (x * 8).int() & torch.ones((), dtype=torch.bool)
    return lowest * self.a(x)


class Scaler(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean = x.mean(1, keepdim=True)
        x = torch.tanh(x - mean) * 2 + x
        x = torch.relu(x) - mean * x
        return x * x + mean, mean


class Holds(nn.Module):
    """Is so short that it is written where it is called, and has a child that is a class."""

    def __init__(self) -> None:
        super().__init__()
        self.scaler = Scaler()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.scaler(x)


def scaled(self, x):
    scaled, mean = self.part(x)
    return self.a(scaled) + mean


def names_of_the_file(self, x):
    jnp = self.a(x)
    nnx = jnp * 2
    jax = jnp + nnx
    return nn.functional.silu(jax) * jnp + nnx * jax


def called_before_its_argument_changes(self, x):
    found = []
    found.append(self.a(x))
    x = x + 1
    found.append(x * 2)
    return torch.cat(found) * torch.cat([x, x])


def gate(y):
    x = y + 1
    return nn.functional.threshold(x, 0.1, 0.0)


def with_a_helper_that_has_its_names(self, x):
    y = self.a(x)
    return gate(y) * x
