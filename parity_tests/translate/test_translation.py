"""Translations of small modules: each is built from its source alone, loaded and proved."""

import ast
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from helpers import small_modules as small
from jax_attn.translate import Translation, prove, translate

DRAW = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return DRAW.standard_normal(shape).astype(np.float32)


class Row(NamedTuple):
    """make: the module. inputs: its inputs. outputs: their names. dynamic: axes that vary."""

    make: Callable[[], nn.Module]
    inputs: Any
    outputs: set[str] = {"output"}  # noqa: RUF012  # never changed
    dynamic: Any = None


IDS = DRAW.integers(0, 13, (3, 5))
BT = {0: "B", 1: "T"}
ROWS = {
    "a stack": Row(small.stack, (normal(2, 5),)),
    "a module called twice": Row(small.CalledTwice, {"x": normal(2, 5, 6)}),
    "a convolution and a batch norm": Row(small.Convolved, {"pixels": normal(2, 3, 5, 7)}),
    "a tied embedding": Row(small.Tied, {"ids": IDS}),
    "a loop over layers": Row(small.Looped, {"x": normal(3, 5)}),
    "no parameters": Row(lambda: nn.SmoothL1Loss(), (normal(3, 5), normal(3, 5))),
    "buffers": Row(small.Buffered, {"x": normal(3, 5)}),
    "tuples": Row(small.SeveralOutputs, {"x": normal(2, 5)}, {"0", "1.0", "1.1"}),
    "a dict": Row(small.NamedOutputs, {"x": normal(2, 5)}, {"logits", "hidden"}),
    "sizes that vary": Row(
        small.Masked, {"ids": IDS, "weights": normal(3, 5)}, dynamic={"ids": BT, "weights": BT}
    ),
    "sizes that vary by position": Row(
        small.CalledTwice, (normal(3, 5, 6),), dynamic={"x": {1: "T"}}
    ),
}


def translated(row: Row) -> tuple[nn.Module, Translation]:
    torch.manual_seed(0)
    reference = small.settled(row.make())
    return reference, translate(reference, row.inputs, dynamic=row.dynamic)


def expect_own_source(translation: Translation) -> None:
    tree = ast.parse(translation.source)
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        for name in (
            [each.name for each in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= {"math", "jax", "flax"}
    assert tree.body[-1].name == translation.name


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_outputs_and_every_gradient_are_those_of_torch(name):
    row = ROWS[name]
    reference, translation = translated(row)
    result = prove(translation, reference, row.inputs, dynamic=row.dynamic)
    assert result.verdict == "PASS", f"{result}\n{translation.source}"
    compared = {tensor.label for tensor in result.tensors}
    parameters = {f"grad {name}" for name, _ in reference.named_parameters()}
    assert row.outputs | parameters <= compared
    expect_own_source(translation)
    if row.dynamic is not None:
        on = {tensor.transform.rpartition(" ")[2] for tensor in result.tensors}
        assert on == {"inputs[0]", "inputs[1]", "inputs[2]"}


@pytest.mark.parametrize("name", ["a module called twice", "tuples", "sizes that vary"])
def test_the_source_is_a_class_beside_imports_of_jax_and_flax_alone(name):
    expect_own_source(translated(ROWS[name])[1])


@pytest.mark.slow
def test_a_wrong_translation_fails():
    row = ROWS["a loop over layers"]
    reference, translation = translated(row)
    wrong = Translation(
        translation.source.replace("approximate=False", "approximate=True"),
        translation.layout,
        translation.name,
    )
    assert wrong.source != translation.source
    assert prove(wrong, reference, row.inputs).verdict == "FAIL"


REFUSED = {
    "an input that there is not": ({"y": {0: "B"}}, "y: dynamic names no tensor"),
    "an axis that there is not": ({"ids": {2: "S"}}, "ids, axis 2, size 'S'"),
    "two sizes of one name": ({"ids": {0: "B", 1: "B"}}, "ids, axis 1, size 'B'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sizes_that_do_not_fit_the_inputs_are_refused(name):
    dynamic, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        translated(ROWS["sizes that vary"]._replace(dynamic=dynamic))


def test_what_is_no_torch_module_is_refused():
    with pytest.raises(TypeError, match="got int"):
        translate(3, ())  # type: ignore[arg-type]
