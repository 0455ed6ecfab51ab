"""Functions of torch's source that modules call in two places are functions of the file."""

import ast

import pytest
import torch
from torch import Tensor, nn

from helpers.translated import assert_computes
from jax_attn.translate import translate
from jax_attn.translate.proof import loaded

X = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0))


def rotate_half(x: Tensor) -> Tensor:
    first = x[..., : x.shape[-1] // 2]
    second = x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q_embed = q * cos + rotate_half(q) * sin
    k_embed = k * cos + rotate_half(k) * sin
    return q_embed, k_embed


def flat(x: Tensor) -> Tensor:
    *others, length, width = x.shape
    return x.reshape(*others, length * width)


def repeat(x: Tensor, times: int) -> Tensor:
    batch, heads, length, width = x.shape
    x = x[:, :, None].expand(batch, heads, times, length, width)
    return x.reshape(batch, heads * times, length, width)


def parts(x: Tensor, size: int) -> Tensor:
    batch, heads, length, width = x.shape
    return x.reshape(batch, heads, length, width // size, size).transpose(-1, -2)


def doubled(x: Tensor) -> Tensor:
    x.mul_(2)
    return torch.tanh(x)


def gated(linear: nn.Module, x: Tensor) -> Tensor:
    return torch.sigmoid(linear(x)) * x


def turned(x: Tensor) -> Tensor:
    """Reshape to two sizes that vary, in both orders."""
    batch, length, heads, width = x.shape
    y = torch.tanh(x.reshape(batch, length, heads * 2, width // 2))
    return y.transpose(0, 1).reshape(length, batch, heads, width)


def least(x: Tensor, other: Tensor) -> Tensor:
    return torch.minimum(x, other) * 2


def compared(x: Tensor) -> Tensor:
    return torch.tanh(x) * 2


class Rotates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k = apply_rotary(self.a(x), x, torch.cos(x), torch.sin(x))
        return q @ k.mT


class RotatesTwice(Rotates):
    def forward(self, x: Tensor) -> Tensor:
        q, k = apply_rotary(self.a(x), x, torch.cos(x), torch.sin(x))
        q, k = apply_rotary(q, k, torch.sin(x), torch.cos(x))
        return q @ k.mT


class Repeats(Rotates):
    def forward(self, x: Tensor) -> Tensor:
        return repeat(self.a(x), 2) * repeat(repeat(x, 1), 2)


class Turns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return turned(self.a(x)) @ turned(x).transpose(-1, -2)


class Parts(Rotates):
    def forward(self, x: Tensor) -> Tensor:
        return parts(self.a(x), 2).sum((-1, -2)) @ parts(x, 4).sum((-1, -2)).mT


class Doubles(Rotates):
    def forward(self, x: Tensor) -> Tensor:
        y, z = self.a(x), torch.tanh(x)
        return doubled(y) * doubled(z) + y * z


class Gates(Rotates):
    def forward(self, x: Tensor) -> Tensor:
        return gated(self.a, x) + gated(self.a, x * 2)


class ReadsItsWeight(Rotates):
    def forward(self, x: Tensor) -> Tensor:
        return least(x, self.a.weight[0]) + least(self.a(x), self.a.bias)


class Compares(Rotates):
    def forward(self, x: Tensor) -> Tensor:
        return compared(x) + (compared(self.a(x)) if kept["compared"] is compared else x)


class Flattens(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x):
        x = self.mix(x)[0, 0]
        return flat(x) + flat(2 * x)


kept = {"compared": compared}
ROWS = {
    "a function in a function": (Rotates(), ["rotate_half"]),
    "a function that calls another": (RotatesTwice(), ["rotate_half", "apply_rotary"]),
    "a number in the call": (Parts(), ["parts"]),
    "sizes behind others": (Flattens(), ["flat"]),
    "sizes that differ": (Repeats(), ["repeat"]),
    "a write into an argument": (Doubles(), []),
    "a module that is called": (Gates(), []),
    "a parameter as an argument": (ReadsItsWeight(), ["least"]),
    "a function that is compared": (Compares(), []),
}


FAST = ("a function that calls another", "a number in the call", "a write into an argument")


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=() if row in FAST else pytest.mark.slow) for row in ROWS]
)
def test_functions_that_are_called_twice_are_functions(row):
    reference, names = ROWS[row]
    found = translate(reference, (X,))
    tree = ast.parse(found.source)
    own = [each.name for each in tree.body if isinstance(each, ast.FunctionDef)]
    assert own == names
    assert_computes(loaded(found, reference), reference, X)


def test_sizes_that_vary_keep_their_order():
    reference = Turns()
    found = translate(reference, (X,), dynamic={"x": {0: "B", 1: "T"}})
    assert "reshape(length, batch, heads, width)" in found.source, found.source
    longer = torch.randn(5, 7, 5, 8)
    assert_computes(loaded(found, reference), reference, longer)
