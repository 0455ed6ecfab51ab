"""`jax-attn bench --pair`: the user's own file, in processes of its own."""

import json
import sys

import pytest
import torch  # noqa: F401  (the pairs that are written below need it)
from click.testing import CliRunner

from jax_attn.cli import main

PAIR = """
import numpy as np
import torch
from flax import nnx
from jax_attn.transfer import Layout, linear, load, row


class Port(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(np.zeros((5, 7), np.float32))

    def __call__(self, x):
        return x @ self.kernel[...]


TABLE = Layout(row("weight", "kernel", linear))


def make():
    torch.manual_seed(0)
    reference, port = torch.nn.Linear(5, 7, bias=False), Port()
    load(port, reference.state_dict(), TABLE)
    return reference, port, {"x": np.ones((3, 5), np.float32)}, TABLE, (called_torch, called)


def called_torch(module, x):
    return module(x)


def called(module, x):
    return module(x)


def unseeded():
    reference, port, inputs, *rest = make()
    return reference, port, {"x": np.random.standard_normal((3, 5)).astype(np.float32)}, *rest


def at_length(length):
    reference, port, _, *rest = make()
    return reference, port, {"x": np.ones((length, 5), np.float32)}, *rest


def leaves():
    raise SystemExit(3)


def fails_when_called():
    reference, port, inputs, table, _ = make()
    return reference, port, inputs, table, (failing, called)


def failing(module, x):
    raise ValueError("the adapter's own")


def imports_late():
    import beside

    return beside.changed(*make())


def wrong():
    reference, port, *rest = make()
    port.kernel[...] = port.kernel[...] + 1
    return reference, port, *rest


def raises():
    return inner()


def inner():
    raise KeyError("no such weight")


def other():
    return 1, 2


def wrong_kinds():
    return "reference", Port(), {"x": [1.0]}, "a table"
"""


@pytest.fixture
def bench(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(PAIR)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(function, *options):
        given = ["--mode", "forward", "--rounds", "5", "--implementation", "jax.jit", "--json"]
        return CliRunner().invoke(
            main, ["bench", "--pair", f"mine.py:{function}", *given, *options]
        )

    return run


def test_a_pair_is_judged_and_timed(bench):
    result = bench("make")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    rows = {row["implementation"]: row for row in record["rows"]}
    assert {*rows} == {"torch eager", "jax.jit"}
    assert rows["jax.jit"]["verdict"] == "PASS"
    assert all(len(row["seconds"]) == 5 for row in rows.values())
    assert rows["jax.jit"]["workload"]["name"] == "mine.py:make"


def test_what_the_function_imports_lies_beside_its_file(bench, tmp_path, monkeypatch):
    (tmp_path / "beside.py").write_text("def changed(*pair):\n    return pair\n")
    monkeypatch.chdir("/")
    options = ["--mode", "forward", "--rounds", "1", "--implementation", "jax.jit"]
    named = f"{tmp_path}/mine.py:imports_late"
    result = CliRunner().invoke(main, ["bench", "--pair", named, *options])
    assert result.exit_code == 0, result.output


def test_an_untrusted_pair_is_timed_and_fails(bench):
    result = bench("wrong", "--untrusted")
    assert result.exit_code == 1
    assert all(row["seconds"] for row in json.loads(result.stdout)["rows"])


def test_each_length_is_timed_and_drawn_apart(bench, tmp_path):
    result = bench("at_length", "--lengths", "3,11", "--report", "report")
    assert result.exit_code == 0, result.output
    workloads = [row["workload"] for row in json.loads(result.stdout)["rows"]]
    assert [w["length"] for w in workloads] == [3, 3, 11, 11]
    assert workloads[2]["inputs"] == "x float32[11, 5]"
    page = (tmp_path / "report" / "index.html").read_text()
    assert "mine.py:at_length, length 11, forward" in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_a_function_that_takes_no_length_is_told(bench):
    result = bench("make", "--lengths", "3")
    assert result.exit_code == 2
    assert "mine.py:make: expected an argument `length`, which --lengths gives" in result.output


def test_one_that_is_made_otherwise_each_time_is_not_timed(bench):
    result = bench("unseeded")
    assert result.exit_code == 1
    (row, *_) = json.loads(result.stdout)["rows"]
    assert row["status"] == "failed"
    assert "got others for input x; seed what it draws" in row["reason"]


WRONG = {
    "raises": ('raise KeyError("no such weight")', "KeyError: 'no such weight'"),
    "leaves": ("raise SystemExit(3)", "mine.py:leaves raises"),
    "fails_when_called": ("in failing", 'ValueError("the adapter\'s own")'),
    "other": ("expected (torch module, NNX module, inputs[, layout", "got 2 values"),
    "wrong_kinds": (
        "reference: expected a torch.nn.Module, got str",
        "inputs['x']: expected a NumPy array, got list",
        "layout: expected a Layout or None, got str",
    ),
    "mak": ("expected one of the functions ['make', 'called_torch'", "got 'mak'"),
}


@pytest.mark.parametrize("function", WRONG)
def test_what_is_wrong_with_it_is_told(function, bench):
    result = bench(function)
    assert result.exit_code == 2
    for text in WRONG[function]:
        assert text in result.output, result.output
    assert "jax_attn" not in result.output.replace("jax_attn.transfer", "")


OPTIONS = {
    ("--preset", "long"): "--preset: cannot be combined with --pair or a checkpoint",
    ("--implementation", "sdpa"): "--implementation: expected one of torch eager, torch.compile",
    ("--baseline", "sdpa"): "--baseline: expected one of torch eager, torch.compile",
    ("--mode", "decode"): "expected modes of forward, forward+backward, training-step, got decode",
}


@pytest.mark.parametrize("options", OPTIONS)
def test_options_that_do_not_fit_are_refused(options, bench):
    result = bench("make", *options)
    assert result.exit_code == 2
    assert OPTIONS[options] in " ".join(result.output.split())


@pytest.mark.parametrize("named", ["mine.py", "absent.py:make", "no_such_module:make"])
def test_a_file_that_is_not_there_is_told(named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["bench", "--pair", named])
    assert result.exit_code == 2
    assert "--pair: " in result.output
    assert "Traceback" not in result.output
