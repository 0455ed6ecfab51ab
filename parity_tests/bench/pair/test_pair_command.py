"""`jax-attn bench --pair`: the user's own file, which every process runs for itself."""

import json
import sys

import pytest
from click.testing import CliRunner

from jax_attn.bench.engine.compare_speed import Here, settings_kept
from jax_attn.bench.engine.plan import BenchPlan
from jax_attn.bench.engine.rounds import Limits
from jax_attn.bench.engine.session import Session
from jax_attn.bench.implementations import EAGER
from jax_attn.bench.pair.made import made
from jax_attn.bench.record import Record, Status
from jax_attn.cli import main
from jax_attn.parity.pair.errors import PairError

PAIR = """
from dataclasses import replace

import numpy as np
import torch
from flax import nnx
from jax_attn.parity import Pair
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
    inputs = {"x": np.ones((3, 5), np.float32)}
    calls = {"reference_call": called_torch, "port_call": called}
    return Pair(reference, port, inputs, layout=TABLE, **calls)


def called_torch(module, x):
    return module(x)


def called(module, x):
    return module(x)


def unseeded():
    x = np.random.standard_normal((3, 5)).astype(np.float32)
    return replace(make(), inputs={"x": x})


def at_length(length):
    import beside

    return replace(make(), inputs=beside.inputs(length))


def wrong_at_11(length):
    x = np.ones((length, 5), np.float32)
    call = lambda module, x: module(x) + (len(x) == 11)
    return replace(make(), inputs={"x": x}, port_call=call)


def fails_when_called():
    return replace(make(), reference_call=failing)


def failing(module, x):
    raise ValueError("the adapter's own")


def raises():
    return inner()


def inner():
    raise KeyError("no such weight")


def other():
    return 1, 2


def wrong_kinds():
    return Pair("reference", Port(), {"x": [1.0]}, layout="a table")
"""


BESIDE = """
import numpy as np


def inputs(length):
    return {"x": np.ones((length, 5), np.float32)}
"""
WAYS = (EAGER, "jax.jit")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where the user's files are, the working folder."""
    (tmp_path / "mine.py").write_text(PAIR)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def command(named: str, *options: str):
    return CliRunner().invoke(main, ["bench", "--pair", named, *options])


def planned(function: str, *modes: str, **options) -> BenchPlan:
    """Of a run whose processes are all this one."""
    options |= {"pair": f"mine.py:{function}", "modes": modes, "limits": Limits.of(2)}
    return BenchPlan(WAYS, 1, baseline=EAGER, alone=False, **options)


def run_here(function: str, **options) -> Record:
    with settings_kept(), Session(planned(function, "forward", **options), Here) as session:
        list(session.run())
        return session.record()


@pytest.mark.slow
def test_a_pair_is_judged_timed_and_drawn_at_each_length(folder, monkeypatch):
    """In processes of their own, from a folder that is not the file's."""
    (folder / "beside.py").write_text(BESIDE)
    monkeypatch.chdir("/")
    named, report = f"{folder}/mine.py:at_length", folder / "report"
    options = ["--lengths", "3,11", "--mode", "forward", "--rounds", "5", "--json"]
    result = command(named, *options, "--implementation", "jax.jit", "--report", str(report))
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    rows = {(r["workload"]["length"], r["implementation"]): r for r in record["rows"]}
    assert {*rows} == {(length, way) for length in (3, 11) for way in WAYS}
    assert all(len(row["seconds"]) == 5 for row in rows.values())
    assert rows[3, "jax.jit"]["verdict"] == "PASS"
    assert rows[11, "jax.jit"]["workload"]["inputs"] == "x float32[11, 5]"
    assert rows[3, "jax.jit"]["warm_compile_s"] > 0
    page = (report / "index.html").read_text()
    assert f"{named}, length 11, forward" in page
    assert "http" not in page.replace("http://www.w3.org", "")


@pytest.mark.slow
def test_each_length_is_judged():
    rows = {
        (r.workload.length, r.implementation): r
        for r in run_here("wrong_at_11", lengths=(3, 11)).rows
    }
    assert {row.status for (length, _), row in rows.items() if length == 3} == {Status.MEASURED}
    assert {row.status for (length, _), row in rows.items() if length == 11} == {Status.EXCLUDED}
    assert (rows[3, "jax.jit"].verdict, rows[11, "jax.jit"].verdict) == ("PASS", "FAIL")


@pytest.mark.slow
def test_one_that_is_made_otherwise_each_time_is_not_timed():
    for row in run_here("unseeded").rows:
        assert row.status is Status.FAILED
        assert "got different ones for input x; seed the random numbers" in row.reason


WRONG = {
    "fails_when_called": ("in failing", 'ValueError("the adapter\'s own")'),
    "other": ("expected (reference, port, inputs), a parity.Pair", "got 2 values"),
    "wrong_kinds": (
        "reference: expected a torch.nn.Module, got str",
        "inputs['x']: expected a NumPy array, got <class 'list'>",
        "layout: expected a Layout, got str",
    ),
}


@pytest.mark.parametrize("function", WRONG)
def test_what_is_wrong_with_it_is_told(function):
    with pytest.raises(PairError) as told:
        run_here(function)
    for text in WRONG[function]:
        assert text in str(told.value)
    assert "/jax_attn/" not in str(told.value)


@pytest.mark.slow
def test_the_command_tells_it_and_leaves_2():
    result = command("mine.py:raises")
    assert result.exit_code == 2
    assert "--pair: mine.py:raises raises" in result.output
    assert "no such weight" in result.output
    assert "/jax_attn/" not in result.output


def test_modes_that_it_has_not_are_told():
    expected = "expected modes among forward, forward.backward, training-step, got decode"
    session = Session(planned("make", "decode"), Here)
    with settings_kept(), session, pytest.raises(PairError, match=expected):
        list(session.run())


def test_a_function_that_takes_no_length_is_told():
    with pytest.raises(PairError, match="expected an argument `length`, which --lengths gives"):
        made("mine.py:make", (3,))
