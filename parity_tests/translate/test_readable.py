"""What a person would not write twice, or by number: sizes, conditions, transposes, tables."""

import ast
import re

import pytest
import torch
from torch import Tensor, nn

from helpers.translated import assert_computes
from jax_attn.translate import translate
from jax_attn.translate.module.merging.merger import Condition
from jax_attn.translate.module.merging.written_parts import shared_end
from jax_attn.translate.module.methods.tidy import without_swaps
from jax_attn.translate.proof import loaded

X = torch.randn(2, 12, 6, generator=torch.Generator().manual_seed(0))


def lines(text: str) -> list[ast.stmt]:
    return ast.parse(text).body


def text_of(statements: list[ast.stmt]) -> list[str]:
    return [ast.unparse(ast.fix_missing_locations(each)) for each in statements]


# -- sizes in which instances differ


class Stage(nn.Module):
    """Halves the length and doubles the channels, as Swin's does."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.window = 2
        self.up = nn.Linear(channels, 2 * channels)

    def forward(self, x: Tensor, dimensions: tuple[int, int]) -> Tensor:
        height, width = dimensions
        batch, length, channels = x.shape
        x = x.view(batch, height, width, channels)
        x = x.view(batch, height // self.window, self.window * width, channels)
        x = self.up(x.view(batch, length, channels))
        return x[:, ::2]


class Stages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([Stage(6), Stage(12)])

    def forward(self, x: Tensor) -> Tensor:
        return self.stages[1](self.stages[0](x, (4, 3)), (2, 3))


class Attends(nn.Module):
    """Is called with two lengths, of itself and of another."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 6)

    def forward(self, x: Tensor, states: Tensor) -> Tensor:
        batch, length, width = x.shape
        queries = self.proj(x).view(batch, length, 2, width // 2).transpose(1, 2)
        keys = self.proj(states).view(batch, -1, 2, width // 2).transpose(1, 2)
        return (queries @ keys.mT @ keys).transpose(1, 2).reshape(batch, length, width)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Attends(), Attends()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.other(y, self.one(x, x))


class Caches(nn.Module):
    """Holds a large constant that no state dict has, as Levit's layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 6)
        self.held = {"table": torch.randn(12, 12)}

    def forward(self, x: Tensor) -> Tensor:
        return self.held["table"] @ self.proj(x)


ROWS = {
    "sizes of shapes and of other sizes": (
        Stages(),
        (X,),
        None,
        ("_, length, channels = x.shape", "self.height // 2", "def __init__(self, height, in_"),
    ),
    "one name for sizes that vary": (
        Pair(),
        (X, X[:, :5]),
        {"x": {0: "B", 1: "T"}, "y": {0: "B", 1: "S"}},
        ("B, length = x.shape[:2]", "nnx.Linear(6, 6, rngs=rngs)"),
    ),
    "a large constant": (Caches(), (X,), None, ("self.constant @ self.proj(x)",)),
}


SLOW = ("one name for sizes that vary",)


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=pytest.mark.slow if row in SLOW else ()) for row in ROWS]
)
def test_sizes_are_written_as_a_person_would(row):
    reference, inputs, dynamic, written = ROWS[row]
    found = translate(reference, inputs, dynamic=dynamic)
    text = re.sub(r"\s+", " ", found.source)
    for expected in written:
        assert expected in text, found.source
    kinds = {type(each).__name__ for each in reference.modules()} - {"Linear", "ModuleList"}
    classes = [each for each in ast.parse(found.source).body if isinstance(each, ast.ClassDef)]
    assert {each.name for each in classes} - {"Buffer"} == kinds
    assert_computes(loaded(found, reference), reference, *inputs)
    assert ("constant" in found.tables) == (row == "a large constant")


# -- statements that branches share

LONG = (
    "y = attention(query_states, key_states, value_states, bias={}, scale=self.scaling, "
    "dropout=self.attention_dropout)"
)
BRANCHES = {
    "a name": (["y = f(a, 2) + g(x)"], ["y = f(b, 2) + g(x)"], 1),
    "the last of several": ([LONG.format("a")], ["b = x + 1", LONG.format("b")], 1),
    "a short one of several": (["y = f(a)"], ["b = x + 1", "y = f(b)", "z = y"], 0),
    "a return": (["return f(a, 2) + g(x)"], ["return f(b, 2) + g(x)"], 1),
    "two parts": (["y = f(a, 2) + g(x)"], ["y = f(b, 2) + g(z)"], 0),
    "an operator": (["y = f(a) + g(x)"], ["y = f(a) - g(x)"], 0),
    "another target": (["y = f(a)"], ["z = f(a)"], 0),
    "what the condition reads": (["mask = x", LONG.format("a")], [LONG.format("b")], 0),
}


class Chosen(ast.NodeTransformer):
    """Take one side of each `a if condition else b`."""

    def __init__(self, holds: bool) -> None:
        self.holds = holds

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        return node.body if self.holds else node.orelse


@pytest.mark.parametrize("row", BRANCHES)
def test_only_what_differs_is_conditional(row):
    one, other, count = BRANCHES[row]
    then, otherwise = lines("\n".join(one)), lines("\n".join(other))
    condition = Condition(frozenset({0}), "mask is not None", "mask is None", (0,), "mask")
    after = text_of(shared_end(condition, then, otherwise))
    assert len(after) == count
    for value, branch, rest in ((True, one, then), (False, other, otherwise)):
        chosen = [Chosen(value).visit(each) for each in lines("\n".join(after))]
        assert text_of(rest) + text_of(chosen) == text_of(lines("\n".join(branch)))


# -- transposes

SWAPS = {
    "swapped back": (
        "q = f(x).swapaxes(1, 2)\nreturn g(q.swapaxes(1, 2), q.swapaxes(2, 1))",
        "q = f(x)\nreturn g(q, q)",
    ),
    "read as it is, too": ("q = f(x).swapaxes(1, 2)\nreturn g(q.swapaxes(1, 2), q)", None),
    "other axes": ("q = f(x).swapaxes(1, 2)\nreturn g(q.swapaxes(1, 3))", None),
    "assigned anew": (
        "q = f(x).swapaxes(1, 2)\nq = h(q.swapaxes(1, 2))\nreturn q",
        "q = f(x)\nq = h(q)\nreturn q",
    ),
    "in a loop": ("q = x.swapaxes(1, 2)\nfor f in l:\n    q = f(q.swapaxes(1, 2))\nreturn q", None),
}


@pytest.mark.parametrize("row", SWAPS)
def test_transposes_that_cancel_are_left_out(row):
    given, expected = SWAPS[row]
    found = "\n".join(text_of(without_swaps(lines(given.replace("return", "z =")))))
    assert found == (expected or given).replace("return", "z =")
