"""A starting table carries models of no known family, once its questions are answered."""

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np
import pytest

from helpers.transfer.starting_tables import (
    ANSWERS,
    MODELS,
    answered,
    heads_of,
    invoke,
    model_of,
    table_text,
)
from jax_attn.transfer import load_checkpoint, save_checkpoint
from jax_attn.transfer.arrays import same_bits


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_an_unknown_model_is_carried_both_ways(name, tmp_path, monkeypatch):
    source = tmp_path / "model"
    model_of(name).save_pretrained(source)
    begun = table_text(source, tmp_path / "begun.py")
    text, edited = answered(begun, ANSWERS.get(name, ""))
    assert edited <= 10, begun
    assert ("# Question" in begun) == (name in ANSWERS)
    monkeypatch.chdir(tmp_path)
    module = f"table_{name.lower()}"
    (tmp_path / f"{module}.py").write_text(text)
    heads = heads_of(text)
    flax, back = tmp_path / "made" / "flax", tmp_path / "back"
    there = invoke("port", source, flax, "--to", "flax", "--layout", f"{module}:LAYOUT", *heads)
    assert there.exit_code == 0, there.output
    again = invoke("port", flax, back, "--to", "torch", "--layout", f"{module}:LAYOUT", *heads)
    assert again.exit_code == 0, again.output
    with load_checkpoint(source) as first, load_checkpoint(back) as second:
        assert {*first} - {*second} <= {*first.tied()}
        for key in second:
            assert same_bits(first[key], second[key]), key


def test_questions_that_are_not_answered_are_refused_all_at_once(tmp_path, monkeypatch):
    save_checkpoint(
        tmp_path / "model.safetensors",
        {
            "a.query_key_value.weight": np.zeros((48, 16), np.float32),
            "a.query_key_value.bias": np.zeros(48, np.float32),
            "square.weight": np.zeros((16, 16), np.float32),
            "square.bias": np.zeros(16, np.float32),
        },
    )
    text = table_text(tmp_path / "model.safetensors", tmp_path / "unanswered.py")
    assert text.count("# Question") == 1  # the packed one's bias tells how all matrices lie
    assert text.count("    # - ") == 3  # whoever answers knows the heads, which no config names
    monkeypatch.chdir(tmp_path)
    sizes = ("--num-heads", 4, "--head-dim", 4)
    layout = ("--to", "flax", "--layout", "unanswered:LAYOUT")
    result = invoke("port", tmp_path / "model.safetensors", tmp_path / "out", *layout, *sizes)
    assert result.exit_code == 2
    for key in ("a.query_key_value.weight", "a.query_key_value.bias"):
        assert f"'{key}': question 1 of the table is unanswered" in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def table_of(arrays, tmp_path):
    (tmp_path / "begun.py").unlink(missing_ok=True)
    save_checkpoint(tmp_path / "model.safetensors", arrays)
    return table_text(tmp_path / "model.safetensors", tmp_path / "begun.py")


ROWS = {
    "a linear layer": ("up.weight", (7, 5), 'row("up.weight", "up.kernel", linear)'),
    "a norm": ("ln.weight", (5,), 'row("ln.weight", "ln.scale")'),
    "a table": ("wte.weight", (9, 5), 'row("wte.weight", "wte.embedding")'),
    "a convolution": ("conv.weight", (7, 5, 2), 'row("conv.weight", "conv.kernel", conv)'),
    "a parameter of its own": ("cls_token", (1, 1, 5), 'row("cls_token", "cls_token")'),
}


@pytest.mark.parametrize("name", ROWS)
def test_names_and_shapes_settle(name, tmp_path):
    key, shape, expected = ROWS[name]
    assert expected in table_of({key: np.zeros(shape, np.float32)}, tmp_path)


def test_a_bias_tells_which_axis_of_a_matrix_is_its_input(tmp_path):
    arrays = {"c.weight": (5, 7), "c.bias": (7,), "d.weight": (5, 5), "d.bias": (5,)}
    text = table_of({key: np.zeros(s, np.float32) for key, s in arrays.items()}, tmp_path)
    assert 'row("c.weight", "c.kernel"),' in text
    assert 'row("d.weight", "d.kernel"),' in text  # as the file's other matrices
    alone = table_of({k: np.zeros(s, np.float32) for k, s in [*arrays.items()][2:]}, tmp_path)
    assert "# Question 1: which axis of d is its input?" in alone


def test_layers_are_one_row_and_whole_numbers_are_passed_over(tmp_path):
    arrays = {f"h.{i}.up.weight": np.zeros((7, 5), np.float32) for i in range(3)}
    arrays |= {f"h.{i}.ids": np.arange(3) for i in range(3)}
    text = table_of(arrays, tmp_path)
    assert 'row("h.{layer}.up.weight", "h.{layer}.up.kernel", linear)' in text
    assert 'ignored("h.{layer}.ids", ' in text


def test_a_name_from_a_file_does_not_become_code(tmp_path):
    key = 'x")]; import os; print(os.name) #\n.weight'
    text = table_of({key: np.zeros(5, np.float32)}, tmp_path)
    names = {}
    exec(compile(text, "table", "exec"), names)
    assert names["LAYOUT"].torch_keys() == [key]


def test_a_file_that_is_there_is_kept(tmp_path):
    save_checkpoint(tmp_path / "model.safetensors", {"a.weight": np.zeros(3, np.float32)})
    (tmp_path / "mine.py").write_text("answers")
    result = invoke("inspect", tmp_path / "model.safetensors", "--table", tmp_path / "mine.py")
    assert result.exit_code == 2
    assert "expected a file that does not exist yet" in result.output
    assert (tmp_path / "mine.py").read_text() == "answers"
