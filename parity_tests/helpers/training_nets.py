"""Small torch modules that do in training mode what they do not do in eval mode."""

import random

import torch
from torch import nn
from torch.nn import functional

B, T, D, N = 5, 7, 6, 2
RATE, PATH_RATE = 0.3, 0.2


class Functional(nn.Module):
    """A rate of 0 and one that is left out in eval mode, as transformers passes it."""

    def __init__(self, rate=RATE):
        super().__init__()
        self.dropout = rate
        self.up, self.down = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        x = functional.dropout(self.up(x), self.dropout, self.training)
        x = functional.dropout(x, 0.0, self.training)
        return self.down(functional.dropout(x, self.dropout if self.training else 0.0))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.rate = nn.Linear(D, 3 * D), RATE

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, N, D // N).permute(2, 0, 3, 1, 4)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        rate = self.rate if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, mask, dropout_p=rate)
        return mixed.transpose(1, 2).reshape(x.shape)


class DropPath(nn.Module):
    """As timm has it."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        if self.rate == 0.0 or not self.training:
            return x
        kept = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - self.rate)
        return x * kept.div_(1 - self.rate)


def stochastic_depth(x, rate, training):
    """As transformers has it."""
    if not training:
        return x
    noise = (1 - rate) + torch.rand((x.shape[0], 1, 1), dtype=x.dtype)
    return x.div(1 - rate) * noise.floor_()


class StochasticDepth(nn.Module):
    """As torchvision has it."""

    def __init__(self, rate, mode):
        super().__init__()
        self.p, self.mode = rate, mode

    def forward(self, x):
        if not self.training:
            return x
        size = [x.shape[0] if self.mode == "row" else 1] + [1] * (x.ndim - 1)
        noise = torch.empty(size, dtype=x.dtype, device=x.device).bernoulli_(1 - self.p)
        return x * noise.div_(1 - self.p)


class Paths(nn.Module):
    def __init__(self, rate=PATH_RATE, mode="row"):
        super().__init__()
        self.one, self.path = nn.Linear(D, D), DropPath(rate)
        self.depth = StochasticDepth(RATE, mode)

    def forward(self, x):
        x = self.depth(x) + self.path(self.one(x))
        return x + stochastic_depth(x.sin(), PATH_RATE, self.training)


class Branch(nn.Module):
    """Other numbers and other operators, and dropout of channels by a layer that NNX lacks."""

    def __init__(self):
        super().__init__()
        self.one, self.channels = nn.Linear(D, D), nn.Dropout1d(RATE)

    def forward(self, x):
        x = self.channels(self.one(x)) * (2.0 if self.training else 3.0)
        x = x * torch.tensor([2.0, 3.0] if self.training else [0.5, 0.25]).repeat(D // 2)
        return x.tanh() if self.training else x.sin() + 1


class Noise(nn.Module):
    """What else is drawn."""

    def __init__(self):
        super().__init__()
        self.one, self.gate = nn.Linear(D, D), nn.Linear(D, 1)

    def forward(self, x):
        x = self.one(x)
        if self.training:
            x = x + 0.1 * torch.randn_like(x) + torch.empty_like(x).normal_(0.5, 0.25)
            x = x * torch.bernoulli(self.gate(x).sigmoid()) + torch.rand_like(x)
        return x + torch.randn(D) if self.training else x


class Net(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def hooked():
    """Return a net whose dropout has a hook, which no layer of the file has."""
    dropout = nn.Dropout(RATE)
    dropout.register_forward_hook(lambda module, inputs, output: output * 2)
    return nn.Sequential(nn.Linear(D, D), dropout, nn.Linear(D, D))


NETS = {
    "functional": lambda: Functional(),
    "attention": lambda: Attention(),
    "paths": lambda: Net(Paths(), Paths(0.1, "batch"), Paths(0.0)),
    "branch": lambda: Branch(),
    "noise": lambda: Noise(),
    "hook": lambda: Net(hooked()),
    "all": lambda: Net(Attention(), Paths(), Branch()),
}


class LayerDrop(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(D, D) for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            if self.training and self.drawn() < RATE:
                continue
            x = layer(x)
        return x

    def drawn(self):
        return torch.rand([])


class PythonDrop(LayerDrop):
    def drawn(self):
        return random.random()
