"""Runs of pytest inside a test: a stand-in for `check`, tests that use it, what they leave."""

import json

# A run in this process forgets, at its end, every module that was not there before it, and parts of
# NumPy cannot be loaded twice.
import jax_attn.parity.judge.result  # noqa: F401

STAND_IN = """
import os, pytest, jax_attn.parity
from jax_attn import environment
from jax_attn.parity.judge.compare import TensorReport, Verdict
from jax_attn.parity.judge.finding import Finding
from jax_attn.parity.judge.result import Result

def check(reference, port, inputs, *, dtype="float32", **arguments):
    assert not isinstance(inputs, list)
    return checked(reference, dtype, arguments)

def check_training(reference, port, batches, *, dtype="float32", **arguments):
    assert isinstance(batches, list)
    return checked(reference, dtype, arguments)

def checked(reference, dtype, arguments):
    if reference == "TypeError":
        raise TypeError("port: expected a Module, got str\\ninputs: expected a tuple")
    print("called with", dtype, arguments)
    verdict = Verdict(reference)
    reasons = () if verdict == "PASS" else (Finding("over-budget", "planted reason"),)
    tensor = TensorReport("output", "y", "jit", verdict, reasons, (2, 3), 0.25, 1.0, 1.0, 1.0)
    tensors = arguments.get("tensors", 1) * (tensor,)
    explainer = arguments.get("explainer")
    notes = (Finding("no-padding", "a note"),)
    return Result(dtype, "cpu", tensors, notes=notes, explainer=explainer)

@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setitem(vars(jax_attn.parity), "check", check)
    monkeypatch.setitem(vars(jax_attn.parity), "check_training", check_training)
    here = {"python": "3", "worker": os.environ.get("PYTEST_XDIST_WORKER", "none")}
    monkeypatch.setattr(environment, "describe", lambda: here)
    # The stand-in needs no torch, and a test may say that there is none.
    monkeypatch.setattr(environment, "present", lambda module: module != os.environ.get("ABSENT"))
"""
OPTIONS = ("-W", "error", "--strict-markers", "-p", "no:cacheprovider")

THREE = """
@pytest.mark.parity(dtype=["float32", "bfloat16"])
def test_port(parity):
    parity("PASS", None, ())

@pytest.mark.parametrize("way", ["a|b"])
def test_other(parity, way):
    parity("FAIL", None, ())

def test_doubtful(parity):
    parity("PASS", None, ())
    parity("TypeError", None, ())
"""
NAMES = {
    "test_it.py::test_doubtful": "PASS",
    "test_it.py::test_doubtful (2)": "INCONCLUSIVE",
    "test_it.py::test_other[a|b]": "FAIL",
    "test_it.py::test_port[bfloat16]": "PASS",
    "test_it.py::test_port[float32]": "PASS",
}


def verdicts(directory) -> dict[str, str]:
    """name -> verdict of every check written there."""
    cases = json.loads((directory / "result.json").read_text())["cases"]
    return {case["name"]: case["verdict"] for case in cases}
