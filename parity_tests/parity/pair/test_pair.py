"""Pairs hold the arguments of checks; a user's function makes one, its errors are the user's."""

import inspect
import sys
from dataclasses import fields

import numpy as np
import pytest
import torch

from jax_attn import parity
from jax_attn.parity.pair.errors import MissingModuleError, PairError, told
from jax_attn.parity.pair.read import called, function, pair_of

FILE = """
import numpy as np
from jax_attn import parity

INPUTS = (np.ones(3, np.float32),)


def three():
    return "reference", "port", INPUTS


def whole():
    return parity.Pair("reference", "port", INPUTS, seed=5)


def training():
    return parity.TrainingPair("reference", "port", [], layout=1, optimizer=2, loss="mse")


def two():
    return 1, 2


def five():
    return 1, 2, 3, 4, 5


def none():
    pass


def raises():
    return inner()


def inner():
    raise KeyError("no such weight")


def needs_too_much():
    raise MemoryError("no room for 8 TB")


def leaves():
    raise SystemExit(3)


def from_another():
    try:
        inner()
    except KeyError as error:
        raise ValueError("the later one") from error


def forgets():
    import transformerz.models


def imports_local():
    import helper_of_mine

    return helper_of_mine.inputs
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def read_pair(named):
    return pair_of(named, called(named, function(named)))


SAME = {
    "check": (parity.Pair, parity.check),
    "training": (parity.TrainingPair, parity.check_training),
}


@pytest.mark.parametrize("name", SAME)
def test_a_pair_has_the_arguments_of_its_check(name):
    """With their defaults; only the dtype is the reference's where none is given.

    A check may leave out the inputs, if its reference is a golden one.
    """
    kind, check = SAME[name]
    of_check = inspect.signature(check).parameters
    of_pair = inspect.signature(kind).parameters
    assert list(of_pair) == list(of_check)
    assert [p.kind for p in of_pair.values()] == [p.kind for p in of_check.values()]
    others = {name: p.default for name, p in of_check.items() if name not in ("dtype", "inputs")}
    assert {name: of_pair[name].default for name in others} == others
    assert [f.name for f in fields(kind)] == list(of_check)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_the_dtype_is_the_references_unless_it_is_given(dtype):
    module = torch.nn.Linear(2, 3).to(getattr(torch, dtype))
    assert parity.Pair(module, None, ()).options["dtype"] == dtype
    assert parity.Pair(module, None, (), dtype="float16").options["dtype"] == "float16"
    assert parity.Pair("no module", None, ()).options["dtype"] == "float32"


def test_a_function_makes_a_pair_of_three_values_or_more():
    three, whole = read_pair("mine.py:three"), read_pair("mine.py:whole")
    assert (three.reference, three.port, three.options["seed"]) == ("reference", "port", None)
    assert np.array_equal(three.inputs[0], np.ones(3))
    assert whole.options["seed"] == 5
    assert read_pair("mine.py:training").options["loss"] == "mse"


WRONG = {
    "two": ("expected (reference, port, inputs), a parity.Pair", "got 2 values"),
    "five": ("got 5 values", "parity.Pair(reference, port, inputs, layout=…)"),
    "none": ("got NoneType",),
    "raises": ("mine.py:raises raises", "return inner()", "KeyError: 'no such weight'"),
    "leaves": ("mine.py:leaves raises", "SystemExit: 3"),
    "from_another": ("KeyError", "direct cause", "ValueError: the later one"),
    "forgets": ("import transformerz.models", "No module named 'transformerz'"),
    "thre": ("expected one of the functions ['three', 'whole'", "got 'thre'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_with_the_users_lines(name):
    with pytest.raises(PairError) as caught:
        read_pair(f"mine.py:{name}")
    assert all(text in str(caught.value) for text in WRONG[name]), str(caught.value)
    assert "/jax_attn/" not in str(caught.value)


def test_memory_that_runs_out_is_no_mistake_of_the_file():
    with pytest.raises(MemoryError) as caught:
        read_pair("mine.py:needs_too_much")
    assert "mine.py:needs_too_much raises" in str(caught.value)
    assert "no room for 8 TB" in str(caught.value)


def test_a_missing_package_is_named():
    with pytest.raises(MissingModuleError) as caught:
        read_pair("mine.py:forgets")
    assert caught.value.name == "transformerz"


NOT_THERE = {
    "mine.py": "expected FILE.py:FUNCTION or package.module:FUNCTION, got 'mine.py'",
    "absent.py:make": "absent.py: expected a Python file, but there is none",
    "no_such.module:make": "no_such.module: expected a module, but there is none",
}


@pytest.mark.parametrize("named", NOT_THERE)
def test_a_place_that_is_not_there(named):
    with pytest.raises(PairError) as caught:
        read_pair(named)
    assert NOT_THERE[named] in str(caught.value)
    assert not isinstance(caught.value, MissingModuleError)


def test_modules_beside_the_file_are_found_when_it_runs(folder, monkeypatch):
    (folder / "helper_of_mine.py").write_text("inputs = 7\n")
    monkeypatch.chdir("/")
    assert function(f"{folder}/mine.py:imports_local")() == 7


def test_an_error_of_the_check_itself_is_its_message():
    with pytest.raises(TypeError) as caught:
        parity.check(1, 2, ())
    assert "reference: expected a torch.nn.Module" in told(caught.value)
    assert "/jax_attn/" not in told(caught.value)
