"""`jax-attn capture` and `check --golden`: a reference on one machine, its port on another."""

import json
import sys

import pytest
import torch  # the reference
from click.testing import CliRunner

from helpers.pair_file import PAIRS
from jax_attn.cli import main
from jax_attn.parity import load_golden

PORTS = """
import numpy as np
from mine import TABLE, Port, right

from jax_attn import parity


def port():
    return right().port


def with_table():
    return parity.Pair(None, port(), None, layout=TABLE)


def wrong():
    return parity.Pair(None, port(), None, port_call=lambda module, x: 1.125 * module(x))


def other_weights():
    return parity.Pair(None, Port(), None, layout=TABLE)


def other_inputs():
    return parity.Pair(None, port(), {"x": np.ones((3, 5), np.float32)})


def whole():
    return right()
"""
JUDGED = ("--golden", "golden", "--transforms", "eager")


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """A folder with both files and a golden reference, and the digest that was printed."""
    folder, before = tmp_path_factory.mktemp("captured"), [*sys.path]
    (folder / "mine.py").write_text(PAIRS)
    (folder / "ports.py").write_text(PORTS)
    done = run("capture", f"{folder}/mine.py:right", str(folder / "golden"))
    assert done.exit_code == 0, done.output
    sys.path[:] = before
    return folder, done.stdout.strip()


@pytest.fixture(autouse=True)
def here(captured, monkeypatch):
    monkeypatch.chdir(captured[0])
    monkeypatch.setattr(sys, "path", [*sys.path])


def run(*words: str):
    return CliRunner().invoke(main, words, catch_exceptions=False)


def test_the_digest_is_printed_and_a_folder_is_not_written_twice(captured):
    _, digest = captured
    assert load_golden("golden", expect_digest=digest).seed == 0
    again = run("capture", "mine.py:right", "golden")
    assert again.exit_code == 2
    assert "nothing is overwritten" in again.stderr


VERDICTS = {
    # the function -> the exit status, and a kind of finding
    "with_table": (0, "golden-reference"),
    "port": (0, "weights-not-compared"),
    "whole": (0, "golden-reference"),
    "wrong": (1, "over-budget"),
    "other_weights": (1, "weights-differ"),
}


@pytest.mark.slow
@pytest.mark.parametrize("function", VERDICTS)
def test_a_port_is_judged_by_what_its_function_returns(function, captured):
    status, kind = VERDICTS[function]
    # With a digest, the port runs in a process of its own, which the tests of that room judge.
    digest = ("--expect-digest", captured[1]) if function == "wrong" else ()
    options = (*JUDGED, *digest, "--json")
    done = run("check", f"ports.py:{function}", *options)
    assert done.exit_code == status, done.output
    document = json.loads(done.stdout)
    assert kind in {found["kind"] for found in document["findings"]}
    if kind == "over-budget":
        (step,) = document["next"]
        assert "where the reference is" in step["sentence"]


REFUSED = {
    "another digest": (("ports.py:port", *JUDGED, "--expect-digest", "0" * 64), "with digest 000"),
    "no folder": (("ports.py:port", "--golden", "nowhere"), "no such folder"),
    "another seed": (("ports.py:port", *JUDGED, "--seed", "1"), "seed: expected the golden"),
    "no gradients": (("ports.py:port", *JUDGED, "--no-gradients"), "gradients: expected the gold"),
    "another dtype": (("ports.py:port", *JUDGED, "--dtype", "bfloat16"), "dtype: expected the gol"),
    "other inputs": (("ports.py:other_inputs", *JUDGED), "inputs: expected the golden"),
    "explained": (("ports.py:port", *JUDGED, "--explain"), "capture it with --taps"),
    "a training": (("ports.py:port", *JUDGED, "--training"), "--training: goes without --golden"),
    "a report among it": (
        ("ports.py:port", *JUDGED, "--report", "golden/x"),
        "outside of --golden",
    ),
    "half a digest": (("ports.py:port", *JUDGED, "--expect-digest", ""), "64 hexadecimal digits"),
    "a digest alone": (("mine.py:right", "--expect-digest", "0"), "goes with --golden"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_judged_is_refused(name):
    words, message = REFUSED[name]
    done = run("check", *words)
    assert done.exit_code == 2, done.output
    assert message in done.stderr


def test_an_explanation_by_taps_names_a_place(tmp_path):
    golden = str(tmp_path / "golden")
    digest = run("capture", "mine.py:right", golden, "--taps").stdout.strip()
    words = ("--golden", golden, "--transforms", "jit", "--explain")
    done = run("check", "ports.py:wrong", *words)
    assert done.exit_code == 1, done.output
    assert "The port first differs forward at" in done.stdout
    assert "not looked for" in done.stdout
    refused = run("check", "ports.py:wrong", *words, "--expect-digest", digest)
    assert (refused.exit_code, "--explain: goes without" in refused.stderr) == (2, True)


def test_what_cannot_be_captured_is_refused(tmp_path):
    for function, message in {"training": "expected a Pair", "raises": "no such weight"}.items():
        done = run("capture", f"mine.py:{function}", str(tmp_path / "golden"))
        assert done.exit_code == 2, done.output
        assert message in done.stderr
    assert [*tmp_path.iterdir()] == []


def test_options_are_captured(tmp_path):
    options = ("--dtype", "bfloat16", "--seed", "3", "--no-gradients")
    done = run("capture", "mine.py:in_dtype", str(tmp_path / "golden"), *options)
    assert done.exit_code == 0, done.output
    golden = load_golden(tmp_path / "golden")
    assert (golden.dtype, golden.seed, golden.gradients) == ("bfloat16", 3, False)
    assert golden.captured["torch"] == torch.__version__
