"""Small torch modules of every shape that a translation must read, with their inputs."""

import torch
from torch import Tensor, nn


def turned(x: Tensor) -> Tensor:
    return torch.cat([-x[..., 2:], x[..., :2]], -1)


def turned_twice(x: Tensor) -> Tensor:
    return turned(x * 2) * turned(x)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.o_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = (
            proj(x).view(B, T, self.heads, -1).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, D))


class CalledTwice(nn.Module):
    """One attention that is called twice, with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(6, 3)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return self.norm(x + self.attention(x))


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, padding=1)
        self.norm = nn.BatchNorm2d(5)
        self.out = nn.Linear(5, 2)

    def forward(self, pixels: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(pixels)))
        return self.out(x.mean(dim=(2, 3)))


class Tied(nn.Module):
    """An output layer whose weight is that of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(ids))))


class Block(nn.Module):
    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * nn.functional.gelu(self.mlp(self.norm(x)))


class Looped(nn.Module):
    """A list of layers that differ in a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(5, 0.25), Block(5, 0.75), Block(5, 1.5)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Buffered(nn.Module):
    """Buffers that a file of weights holds, and that it does not hold; a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(5))
        self.register_buffer("scale", torch.randn(5))
        self.register_buffer("shift", torch.tensor([0.5, 2.0, 3.0, 5.0, 7.0]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * (x * self.scale + self.shift)


class SeveralOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        hidden = torch.tanh(self.a(x))
        return self.b(hidden), (hidden, hidden.sum(dim=-1))


class NamedOutputs(SeveralOutputs):
    def forward(self, x: Tensor) -> dict[str, Tensor | None]:  # type: ignore[override]
        logits, (hidden, _) = super().forward(x)
        return {"logits": logits, "hidden": hidden, "loss": None}


class Masked(nn.Module):
    """Two inputs with two sizes that they share."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.attention = Attention(6, 2)

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        return self.attention(self.embed(ids)) * weights[..., None]


def stack() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))


def settled(module: nn.Module) -> nn.Module:
    """Draw all parameters and statistics at random, so that none is at a neutral value."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    for name, buffer in module.named_buffers():
        if name.endswith("running_mean"):
            nn.init.normal_(buffer)
        elif name.endswith("running_var"):
            nn.init.uniform_(buffer, 0.5, 2.0)
    return module.eval()
