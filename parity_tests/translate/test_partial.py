"""Partial translations: what has no translation raises at its place, and all of it is told."""

import errno

import jax.numpy as jnp
import pytest
import torch
from flax import nnx

from jax_attn.parity import Verdict
from jax_attn.transfer import TransferError
from jax_attn.translate import Translation, TranslationError, folder, prove, translate
from jax_attn.translate.proof import loaded
from jax_attn.translate.rules.table import RULES

X = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))


class Unruled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(5, 5)

    def forward(self, x):
        hidden = self.linear(x)
        return hidden, torch.tanh(hidden).sum(dim=1)


class Random(torch.nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


class Positive(torch.nn.Module):
    def forward(self, x):
        found = x[x > 0]
        return (2 * found).sum(), x + found.shape[0]


class Read(torch.nn.Module):
    def forward(self, x):
        return x * (x > 0).sum().item()


class Branch(torch.nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)) + 1


# name -> the module, the operator without a translation, the kind of the problem, its line
ROWS = {
    "no rule": (Unruled, "aten.tanh.default", "operator", "torch.tanh(hidden)"),
    "random": (Random, "aten.rand_like.default", "random", "torch.rand_like(x)"),
    "a size by values": (Positive, "aten.index.Tensor", "data-dependent size", "x[x > 0]"),
    "a number by values": (Read, "aten.item.default", "data-dependent size", ".item()"),
    "functions": (Branch, "cond", "operator", "torch.cond"),
}


@pytest.fixture(autouse=True)
def no_rule_of_tanh(monkeypatch):
    monkeypatch.delitem(RULES, "aten.tanh.default")


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_a_partial_translation_tells_all_that_it_lacks_and_raises_there(name):
    make, operator, kind, line = ROWS[name]
    with pytest.raises(TranslationError) as whole:
        translate(make(), (X,))
    translation = translate(make(), (X,), partial=True)
    assert translation.unsupported == whole.value.problems
    (problem,) = translation.unsupported
    assert (problem.operator, problem.kind) == (operator, kind)
    assert line in problem.text
    port = translation.build(nnx.Rngs(0))
    with pytest.raises(NotImplementedError):
        port(jnp.asarray(X.numpy()))


@pytest.mark.slow
def test_a_call_written_in_its_place_makes_it_whole():
    torch.manual_seed(0)
    reference = Unruled()
    translation = translate(reference, (X,), partial=True)
    line = 'return hidden, torch.tanh(hidden).sum(dim=1)"'
    start = translation.source.index("not_translated(", translation.source.index("class Unruled"))
    end = translation.source.index(")", translation.source.index("self=hidden", start)) + 1
    assert line in translation.source[start:end]
    source = translation.source[:start] + "jnp.tanh(hidden)" + translation.source[end:]
    mended = Translation(
        source.replace("from flax", "import jax.numpy as jnp\nfrom flax", 1),
        translation.layout,
        translation.name,
    )
    assert prove(mended, reference, (X,)).verdict is Verdict.PASS


class Inner(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(5, 5)

    def forward(self, x, rows):
        return self.linear(x).reshape(rows, -1, 5).sum(dim=1)


class SizeFromOutside(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return self.inner(x.reshape(-1, 5), x.shape[0])


@pytest.mark.slow
def test_a_size_that_no_tensor_of_a_module_tells_is_one_problem():
    inputs, dynamic = {"x": torch.ones(2, 3, 5)}, {"x": {0: "B", 1: "T"}}
    with pytest.raises(TranslationError) as refused:
        translate(SizeFromOutside(), inputs, dynamic=dynamic)
    assert {(each.kind, each.operator) for each in refused.value.problems} == {("size", "B")}
    partial = translate(SizeFromOutside(), inputs, dynamic=dynamic, partial=True)
    assert partial.unsupported == refused.value.problems
    assert not translate(SizeFromOutside(), inputs).unsupported


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(5))

    def forward(self, x):
        self.calls.add_(1)
        return torch.tanh(x) + self.calls


def test_what_no_call_stands_for_is_refused_in_part_too():
    with pytest.raises(TranslationError) as refused:
        translate(Counting(), (X,), partial=True)
    assert {problem.kind for problem in refused.value.problems} == {"operator", "buffer"}


@pytest.mark.parametrize("word", ["for", "None"])
def test_a_tensor_named_by_a_word_of_python_is_refused_by_name(word):
    module = torch.nn.ModuleDict({word: torch.nn.Linear(5, 5)})
    module.forward = lambda x: module[word](x)
    with pytest.raises(TranslationError) as refused:
        translate(module, {"x": X})
    names = [problem.operator for problem in refused.value.problems]
    assert names == [f"{word}.weight", f"{word}.bias"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no space left"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", ["weights.safetensors", "model.py"])
def test_a_folder_is_written_whole_or_not_at_all(error, at, tmp_path, monkeypatch):
    reference = Unruled()
    translation = translate(reference, (X,), partial=True)

    def fails(*_):
        raise error

    if at == "model.py":
        monkeypatch.setattr("pathlib.Path.write_text", fails)
    else:
        monkeypatch.setattr(folder, "save_checkpoint", fails)
    port = loaded(translation, reference)
    with pytest.raises(TransferError if isinstance(error, OSError) else KeyboardInterrupt):
        folder.write(tmp_path / "out", translation, port, (X,), None, reference="Unruled")
    assert [*tmp_path.iterdir()] == []
