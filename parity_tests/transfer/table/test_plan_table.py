"""The printed plan: one line for all layers that are alike, and a line of its own for all else."""

import re

import pytest

from jax_attn.transfer import row, stacked
from jax_attn.transfer.table.plan_table import passed_over_lines, printed
from jax_attn.transfer.table.resolve import Move
from jax_attn.transfer.table.steps import linear


def move(key, path, shape=(3, 5)):
    return Move(row(key, path, linear), (shape,), (shape[::-1],))


def layers(numbers, key="h.{}.up.weight", path="layers.{}.mlp.up.kernel", **shape):
    return [move(key.format(i), path.format(i), **shape) for i in numbers]


def experts(layer, numbers, last=(3, 5)):
    keys = [f"h.{layer}.experts.{x}.up.weight" for x in numbers]
    one = row(keys, f"layers.{layer}.mlp.experts.up.kernel", stacked)
    return Move(one, ((3, 5),) * (len(keys) - 1) + (last,), ((len(keys), 3, 5),))


T5 = ("decoder.block.{}.layer.2.wo.weight", "decoder.layers.{}.mlp.down.kernel")
# name -> moves, the names in each line
LINES = {
    "alike": (layers(range(12)), [("h.{0..11}.up.weight", "layers.{0..11}.mlp.up.kernel")]),
    "two": (layers((0, 1)), [("h.{0..1}.up.weight", "layers.{0..1}.mlp.up.kernel")]),
    "one": (layers((7,)), [("h.7.up.weight", "layers.7.mlp.up.kernel")]),
    "with a gap, in any order": (
        layers((9, 3, 1, 2, 10, 5)),
        [("h.{1..3,5,9..10}.up.weight", "layers.{1..3,5,9..10}.mlp.up.kernel")],
    ),
    "another shape": (
        [*layers((0, 2)), *layers((1,), shape=(3, 7))],
        [
            ("h.{0,2}.up.weight", "layers.{0,2}.mlp.up.kernel"),
            ("h.1.up.weight", "layers.1.mlp.up.kernel"),
        ],
    ),
    "numbers of other things": (
        layers((0, 1), *T5),
        [(T5[0].format("{0..1}"), T5[1].format("{0..1}"))],
    ),
    "other numbers on the other side": (
        [move("h.0.weight", "layers.1.kernel"), move("h.1.weight", "layers.2.kernel")],
        [("h.0.weight", "layers.1.kernel"), ("h.1.weight", "layers.2.kernel")],
    ),
    "experts": (
        [experts(layer, range(8)) for layer in range(3)],
        [("h.{0..2}.experts.{0..7}.up.weight", "layers.{0..2}.mlp.experts.up.kernel")],
    ),
    "experts in another order": (
        [experts(0, (1, 0))],
        [
            (
                "h.0.experts.1.up.weight, h.0.experts.0.up.weight",
                "layers.0.mlp.experts.up.kernel",
            )
        ],
    ),
    "what steers a terminal": (
        [move("\x1b[31m\n.weight", "\x07.kernel")],
        [(r"\x1b[31m\n.weight", r"\x07.kernel")],
    ),
    "no number": (
        [move("a1.weight", "a1.kernel"), move("a2.weight", "a2.kernel")],
        [("a1.weight", "a1.kernel"), ("a2.weight", "a2.kernel")],
    ),
}


def lines_of(moves, dtype=lambda move: "float32"):
    head, *lines = (re.split(r"\s{2,}", line) for line in printed(moves, dtype).split("\n"))
    assert head == ["torch", "shape", "flax", "shape", "dtype", "steps"]
    return lines


@pytest.mark.parametrize("name", LINES)
def test_layers_that_are_alike_are_one_line(name):
    moves, expected = LINES[name]
    assert [(line[0], line[2]) for line in lines_of(moves)] == expected


def test_the_rest_of_a_line_is_that_of_each():
    assert lines_of(layers(range(4)))[0][1::2] == ["[3, 5]", "[5, 3]", "linear"]


def test_the_shape_of_experts_is_that_of_each():
    assert lines_of([experts(0, range(8))])[0][1] == "8 of [3, 5]"
    assert lines_of([experts(0, range(2), last=(3, 7))])[0][1] == "[3, 5], [3, 7]"


def test_another_dtype_or_step_is_another_line():
    other = Move(row("h.2.up.weight", "layers.2.mlp.up.kernel"), ((3, 5),), ((3, 5),))
    square = [*layers((0, 1)), other]
    assert len(lines_of(square)) == 2
    assert len(lines_of(square, lambda one: one.row.keys[0])) == 3


def test_names_that_are_passed_over_do_not_steer_a_terminal():
    assert passed_over_lines({"\x1b[31m.inv_freq": "computed"}) == [
        r"\x1b[31m.inv_freq: skipped: computed"
    ]
