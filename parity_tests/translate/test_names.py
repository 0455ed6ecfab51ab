"""The names of a written file are those of torch's source, not those of operators."""

import ast
import inspect
import re
import sys

import pytest
import small_transformers
import torch
from torch import nn

from jax_attn.translate import translate
from jax_attn.translate.rules.table import RULES

OPERATORS = {name.split(".")[1] for name in RULES}


def invented(source, reference):
    """Return the variables of a file, and those that torch's source does not have."""
    files = {sys.modules[type(each).__module__] for each in reference.modules()}
    files |= {sys.modules[name] for name in ("transformers.masking_utils",) if name in sys.modules}
    words = {word for file in files for word in re.findall(r"\w+", inspect.getsource(file))}
    stored = [
        node.id
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    return stored, [name for name in stored if name not in words]


def judged(source, reference):
    stored, others = invented(source, reference)
    with_numbers = [name for name in others if re.search(r"\d", name)]
    of_operators = [name for name in others if name.removeprefix("new_") in OPERATORS]
    return with_numbers, len(of_operators) / len(stored), of_operators


class Plain(nn.Module):
    """Has values without a name, of which some are read twice or passed on."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(5, 10), nn.Linear(5, 5)

    def forward(self, hidden):
        gate, value = self.up(hidden * 2).chunk(2, dim=-1)
        hidden = self.gated(torch.tanh(gate), value) + hidden
        hidden.mul_(2)
        return self.down(hidden) + hidden

    @staticmethod
    def gated(gate, value):
        first, second = (gate * value).unbind(0)
        return torch.stack([second * first, first * second * second])


def test_names_are_those_of_the_source():
    plain = Plain()
    source = translate(plain, (torch.randn(2, 3, 5),)).source
    with_numbers, share, names = judged(source, plain)
    assert not with_numbers
    assert share == 0, names


def test_names_of_operators_and_numbers_are_seen():
    source = "def f(x):\n    mul = x * 2\n    gate = mul + x\n    y_7 = mul * gate\n    return y_7"
    assert judged(source, nn.Linear(5, 5)) == (["y_7"], 1 / 3, ["mul"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["falcon", "mixtral", "modernbert", "swin", "t5", "wav2vec2"])
def test_names_of_a_model_are_those_of_its_source(name):
    small = small_transformers.build(small_transformers.types()[name])
    source = translate(small.model, small.inputs).source
    with_numbers, share, names = judged(source, small.model)
    assert not with_numbers
    assert share <= 0.1, names
