"""One class for one of torch's: instances that differ share it, with conditions by its names."""

import ast
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from helpers.statement_counts import torch_statements, written_statements
from jax_attn.translate import prove, translate

X = torch.randn(2, 7, 6, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


# -- the patterns of published models


class Attention(nn.Module):
    """T5's: a bias in the first layer of each stack, and the states of another stack."""

    def __init__(self, has_bias: bool, is_decoder: bool) -> None:
        super().__init__()
        self.has_bias = has_bias
        self.is_decoder = is_decoder
        self.q = nn.Linear(6, 6)
        self.k = nn.Linear(6, 6)
        if has_bias:
            self.bias = nn.Linear(7, 7, bias=False)

    def forward(self, hidden: Tensor, states: Tensor | None = None, bias: Tensor | None = None):
        query = self.q(hidden)
        key = self.k(hidden if states is None else states)
        scores = query @ key.transpose(1, 2)
        if bias is None:
            distance = torch.arange(7.0)[None] - torch.arange(7.0)[:, None]
            if self.has_bias:
                distance = distance.abs() if not self.is_decoder else distance.clamp(max=0)
                bias = self.bias(distance)
            else:
                bias = torch.zeros(7, 7)
        weights = torch.sigmoid((scores + bias) / 12)
        return weights @ key / 7, bias


class Block(nn.Module):
    def __init__(self, has_bias: bool, is_decoder: bool) -> None:
        super().__init__()
        self.is_decoder = is_decoder
        self.attention = Attention(has_bias, is_decoder)
        if is_decoder:
            self.cross = Attention(False, is_decoder)

    def forward(self, hidden, bias=None, states=None, cross_bias=None):
        output, bias = self.attention(hidden, bias=bias)
        hidden = hidden + output
        if self.is_decoder:
            output, cross_bias = self.cross(hidden, states=states, bias=cross_bias)
            hidden = hidden + output
        return hidden, bias, cross_bias


class Stack(nn.Module):
    def __init__(self, is_decoder: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(index == 0, is_decoder) for index in range(3)])

    def forward(self, hidden, states=None):
        bias = cross_bias = None
        for block in self.blocks:
            hidden, bias, cross_bias = block(hidden, bias, states, cross_bias)
        return hidden


class Stacks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Stack(False)
        self.decoder = Stack(True)

    def forward(self, x):
        return self.decoder(torch.tanh(x), self.encoder(x))


class Shifted(nn.Module):
    """Swin's: every second layer shifts, with a mask; stages differ in width and are reduced."""

    def __init__(self, width: int, shift: int) -> None:
        super().__init__()
        self.shift = shift
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        shortcut = x
        x = self.norm(x)
        if self.shift > 0:
            mask = torch.arange(x.shape[1]) >= self.shift
            x = x.roll(-self.shift, 1) * mask[:, None]
        x = torch.relu(self.up(x))
        x = self.down(x)
        return shortcut + x


class Stage(nn.Module):
    def __init__(self, width: int, reduced: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Shifted(width, 0), Shifted(width, 2)])
        self.reduce = nn.Linear(width, 2 * width) if reduced else None

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        if self.reduce is not None:
            x = self.reduce(x)
        return x


class Stages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([Stage(6, True), Stage(12, False)])

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return x


class Norm(nn.Module):
    """ConvNeXt's: a norm of channels that come first or last, and convolutions with a stride."""

    def __init__(self, channels: int, order: str = "last") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.order = order

    def forward(self, features):
        if self.order == "first":
            features = features.permute(0, 2, 3, 1)
        features = features / (features.square().mean(-1, keepdim=True) + 0.1).sqrt() * self.weight
        return features.permute(0, 3, 1, 2) if self.order == "first" else features


class Convolution(nn.Module):
    def __init__(self, channels: int, out: int, stride: int, activation: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out, 3, stride, 1)
        self.norm = Norm(out, "first" if activation else "last")
        self.activation = nn.ReLU() if activation else nn.Identity()

    def forward(self, x):
        x = self.conv(x)
        if self.norm.order == "last":
            x = self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        else:
            x = self.norm(x)
        return self.activation(x)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            Convolution(3, 4, 2, True), Convolution(4, 4, 1, True), Convolution(4, 5, 1, False)
        )

    def forward(self, x):
        return self.layers(x)


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x, y=None):
        return self.a(x) if y is None else self.a(x) * y


class TwoWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Optional()

    def forward(self, x):
        return self.part(x) + self.part(x, x * 2)


class OfKinds(nn.Module):
    def __init__(self):
        super().__init__()
        self.near = nn.Linear(6, 6)
        self.far = nn.Linear(6, 6)

    def forward(self, x, kind="near"):
        x = torch.tanh(x)
        return getattr(self, kind)(x)


class Kinds(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = OfKinds()

    def forward(self, x):
        return self.part(x) * self.part(x, "far")


class Keeps(nn.Module):
    """Layers that all get the first one's input too, and a list of which not all are one loop."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6)

        def forward(self, x, first):
            return torch.tanh(self.a(x)) + first

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.Layer() for _ in range(4)])

    def forward(self, x):
        first = self.layers[0](x, x * 2)
        y = first
        for layer in self.layers[1:]:
            y = layer(y, first)
        return y


class Row(NamedTuple):
    module: Callable[[], nn.Module]
    inputs: tuple[Any, ...]
    classes: int
    written: tuple[str, ...]


ROWS = {
    "a bias in the first layer": Row(
        Stacks,
        (X,),
        4,
        (
            "if self.has_bias:",
            "if bias is None:",
            "for block in self.blocks:",
            "self.bias = nnx.Linear(7, 7, use_bias=False, rngs=rngs) if has_bias else None",
        ),
    ),
    "a shift in every second layer": Row(
        Stages, (X,), 3, ("if self.shift > 0:", "if self.reduce is not None:")
    ),
    "an order of axes and a stride": Row(
        Convolutions, (IMAGES,), 3, ("if self.order == 'first':", "strides=(strides, strides)")
    ),
    "a module called in two ways": Row(TwoWays, (X,), 2, ("if y is not None:",)),
    "a kind of layer passed by name": Row(
        Kinds, (X,), 2, ("if kind == 'near':", "self.part(x, 'far')")
    ),
    "a part of a list": Row(Keeps, (X,), 2, ("for layer in self.layers[2:]:",)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_instances_that_differ_share_a_class(name):
    row = ROWS[name]
    torch.manual_seed(0)
    reference = row.module().eval()
    for parameter in reference.parameters():
        nn.init.normal_(parameter, std=0.5)
    translation = translate(reference, row.inputs)
    tree = ast.parse(translation.source)
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    assert len(classes) == row.classes, classes
    text = re.sub(r"\s+", " ", translation.source).replace('"', "'")
    for expected in row.written:
        assert expected in text, translation.source
    assert written_statements(translation.source) <= 1.5 * torch_statements(reference)
    # Every output and gradient of every instance.
    assert prove(translation, reference, row.inputs).verdict == "PASS"
