"""Answers that cannot be right, tables of other files: every problem at once, nothing written."""

import numpy as np
import pytest

from helpers.transfer.starting_tables import answered, invoke, table_text
from jax_attn.transfer import save_checkpoint

D, N, H = 16, 4, 4
HEADS = ("--num-heads", N, "--head-dim", H)
SHAPES = {
    f"h.{layer}.{name}": shape
    for layer in range(2)
    for name, shape in {
        "attn.query_key_value.weight": (3 * N * H, D),
        "attn.query_key_value.bias": (3 * N * H,),
        "attn.dense.weight": (D, N * H),
        "attn.dense.bias": (D,),
        "up.weight": (7, D),
    }.items()
}
SHAPES["wte.weight"] = (11, D)
ANSWER = "for each key/value head"
PACKED, UP, WTE = "h.0.attn.query_key_value", "h.1.up.weight", "wte.weight"


def turned(text):
    """The packed weight's answer, as a tensor with its axes the other way round has it."""
    return text.replace(", grouped, inward)", ", linear, grouped, inward)")


def fewer(text):
    """Its bias answered for two of the three."""
    whole = 'query_key_value.bias", ("h.{layer}.attn.q_proj.bias", '
    return text.replace(f'{whole}"h.{{layer}}.attn.k_proj.bias", ', whole)


def convolved(text):
    return text.replace('up.kernel", linear)', 'up.kernel", conv)')


def of_another_file(text):
    return text.replace('"h.{layer}.', '"layers.{layer}.').replace('"wte.', '"tokens.')


def also(line):
    return lambda text: text.replace("LAYOUT = Layout(\n", f"LAYOUT = Layout(\n    {line},\n")


TWICE = also('row("wte.weight", "other.kernel", linear)')
OVER = also('row("wte.weight", "h.0.attn.out_proj.bias")')
# What is changed in the answered table -> the keys and words of every problem.
MISTAKES = {
    "an answer of other axes": ([turned], [f"{PACKED}.weight", "h.1.attn.query_key_value.weight"]),
    "an answer of other parts": (
        [fewer],
        [f"'{PACKED}.bias'", "grouped gives 3 arrays, got 2 paths"],
    ),
    "a step for other axes": ([convolved], [UP, "conv expects at least 3 axes"]),
    "a table of another file": ([of_another_file], [*SHAPES]),
    "two rows for one key": ([TWICE], [f"doubly written: '{WTE}'"]),
    "two rows for one path": ([OVER], ["doubly written: 'h.0.attn.out_proj.bias'"]),
    "all at once": (
        [turned, convolved, TWICE],
        [f"{PACKED}.weight", UP, f"doubly written: '{WTE}'"],
    ),
}
# What a module is -> what is said of it.
MODULES = {
    "not there": (None, "No module named"),
    "no Python": ("LAYOUT = (", "SyntaxError"),
    "one that raises": ("raise KeyError('why')", "KeyError: 'why'"),
    "one of a step that is none": (
        "from jax_attn.transfer import tranposed",
        "ImportError: cannot import name 'tranposed'",
    ),
    "one without a table": ("TABLE = 3", "expected one of the Layouts []"),
}


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """The text of an answered table; `model.safetensors` is in the working directory."""
    rng = np.random.default_rng(0)
    arrays = {key: rng.standard_normal(shape).astype("f4") for key, shape in SHAPES.items()}
    monkeypatch.chdir(tmp_path)
    save_checkpoint(tmp_path / "model.safetensors", arrays)
    return answered(table_text("model.safetensors", tmp_path / "begun.py"), ANSWER)[0]


def ported(module):
    options = ("--to", "flax", "--layout", f"{module}:LAYOUT", *HEADS)
    return invoke("port", "model.safetensors", "made/out", *options)


def expect_refused(done, words, folder):
    assert done.exit_code == 2, done.output
    text = " ".join(done.stderr.split())
    assert [word for word in words if word not in text] == [], text
    assert not (folder / "made").exists()


def test_the_answered_table_is_right(begun, tmp_path):
    (tmp_path / "no_mistake.py").write_text(begun)
    assert ported("no_mistake").exit_code == 0


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_by_the_keys_it_concerns(name, begun, tmp_path):
    changes, words = MISTAKES[name]
    text = begun
    for change in changes:
        assert change(text) != text
        text = change(text)
    text = text.replace("import (", "import (\n    conv,\n    linear,")
    module = f"mistaken_{[*MISTAKES].index(name)}"
    (tmp_path / f"{module}.py").write_text(text)
    expect_refused(ported(module), words, tmp_path)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_that_is_no_table_is_refused(name, begun, tmp_path):
    text, words = MODULES[name]
    module = f"unusable_{[*MODULES].index(name)}"
    if text is not None:
        (tmp_path / f"{module}.py").write_text(text)
    expect_refused(ported(module), ["--layout", module, words], tmp_path)
