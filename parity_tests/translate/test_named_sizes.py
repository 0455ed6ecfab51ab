"""Sizes that vary: their names, and those that the export fixes, each with its line."""

import pytest
import torch
from torch import nn

from helpers.traced_trees import tree
from jax_attn.translate import TranslationError


class Attends(nn.Module):
    def forward(self, x, mask):
        batch, length = x.shape[:2]
        scores = x.reshape(batch * length, -1) @ x.new_ones(x.shape[2], length // 2)
        return scores.view(batch, length, -1) * mask[:, :, None]


@pytest.mark.slow
def test_sizes_are_written_in_their_names():
    dynamic = {"x": {0: "B", 1: "T"}, "mask": {0: "B", 1: "T"}}
    found = tree(Attends(), dynamic=dynamic, x=torch.randn(3, 11, 5), mask=torch.ones(3, 11))
    assert sorted(set(found.sizes.names.values())) == ["B", "T"]
    written = {
        found.sizes.written(size) for node in found.root.nodes() for size in node.meta["val"].shape
    }
    assert written == {"B", "T", "B * T", "T // 2", "5", "1"}
    assert not found.sizes.fixed


class Loop(nn.Module):
    def forward(self, x):
        return sum(x[:, step] * step for step in range(x.shape[1]))  # HERE


class Unbound(nn.Module):
    def forward(self, x):
        first, *others = x.unbind(1)  # HERE
        return first + sum(others)


class Square(nn.Module):
    def forward(self, x):
        return x @ x  # HERE


class Long(nn.Module):
    def forward(self, x):
        return x * 2 if x.shape[1] > 6 else x  # HERE


class Rows(nn.Module):
    def forward(self, x):
        return torch.stack([row * 2 for row in x])  # HERE


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Loop, Unbound, Square, Long, Rows])
def test_size_that_the_export_fixes_is_refused_with_its_line(kind):
    with pytest.raises(TranslationError) as caught:
        tree(kind(), torch.randn(7, 7), dynamic={"x": {0: "B", 1: "T"}})
    (problem,) = caught.value.problems
    assert problem.kind == "size"
    assert "# HERE" in problem.text


class Checked(nn.Module):
    def forward(self, x):
        if x.shape[1] > 40:  # HERE
            raise ValueError("too long")
        return x * 2


class Halves(nn.Module):
    def forward(self, x):
        return x.view(x.shape[0], x.shape[1] // 2, 2)  # HERE


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Checked, Halves])
def test_size_that_torch_itself_refuses_is_told(kind):
    found = tree(kind(), torch.randn(3, 10), dynamic={"x": {0: "B", 1: "T"}})
    assert found.sizes.limits
    assert all("# HERE" in problem.text for problem in found.sizes.limits)


def test_sizes_that_are_wrong_are_told_at_once():
    with pytest.raises(TranslationError) as caught:
        tree(
            Attends(),
            dynamic={"x": {0: "B", 1: "T", 5: "Z"}, "mask": {0: "T"}, "y": {0: "B"}},
            x=torch.randn(1, 11, 5),
            mask=torch.ones(1, 11),
        )
    assert [each.kind for each in caught.value.problems] == ["size"] * 4
