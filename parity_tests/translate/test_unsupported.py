"""What cannot be translated is told at once, each with its line in torch's source."""

import pytest
import torch
from torch import nn

from helpers.traced_trees import X, tree
from jax_attn.translate import TranslationError, Unsupported
from jax_attn.translate.tracing.unsupported import unsupported


def kinds(found):
    return [problem.kind for problem in found]


class Cache:
    pass


class Cached(nn.Module):
    def forward(self, x, past=None):
        return x


def test_cache_as_an_input_is_refused():
    with pytest.raises(TranslationError) as caught:
        tree(Cached(), x=X, past=Cache())
    (problem,) = caught.value.problems
    assert (problem.kind, problem.operator) == ("input", "past")


def test_input_that_forward_does_not_take_is_refused():
    with pytest.raises(TranslationError) as caught:
        tree(Cached(), x=X, future=X)
    assert kinds(caught.value.problems) == ["input"]


@pytest.mark.parametrize(
    ("file", "shown"),
    [
        ("/home/me/lib/python3.11/site-packages/torch/nn/functional.py", "torch/nn/functional.py"),
        ("/usr/lib/python3/dist-packages/timm/layers/mlp.py", "timm/layers/mlp.py"),
        ("/home/me/model.py", "/home/me/model.py"),
    ],
)
def test_a_line_of_an_installed_package_is_told_by_its_module(file, shown):
    problem = Unsupported("size", "x, axis 1", "is fixed", file, 7, "return x")
    assert (problem.source, problem.file) == (shown, file)
    assert str(problem).endswith(f"\n    {shown}:7: return x")


class Untranslatable(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("position", torch.zeros((), dtype=torch.long))
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        self.position.add_(1)  # buffer
        positive = x[x > 0]  # data-dependent size
        places = x.nonzero()  # data-dependent size
        noise = nn.functional.dropout(x, 0.1)  # random
        drawn = torch.rand(3)  # random
        kept = self.drop(x) + nn.functional.dropout(x, 0.0)
        found = torch.special.bessel_j0(x)  # operator
        return positive.sum() + places.sum() + noise + drawn[:, None] + kept + found


@pytest.mark.slow
def test_all_that_cannot_be_translated_is_told_with_its_line():
    # What a dropout leaves in eval mode is a clone.
    known = ["aten.sum.default", "aten.add.Tensor", "aten.clone.default"]
    found = unsupported(tree(Untranslatable(), X), known)
    for problem in found:
        assert problem.file == __file__
        if problem.kind != "operator":
            assert problem.text.endswith(f"# {problem.kind}")
    assert kinds(found).count("data-dependent size") == 2
    assert kinds(found).count("random") == 2
    assert kinds(found).count("buffer") == 1
    operators = {problem.operator for problem in found if problem.kind == "operator"}
    assert "aten.special_bessel_j0.default" in operators
    assert "aten.sum.default" not in operators
    assert not any("dropout" in operator for operator in operators)
