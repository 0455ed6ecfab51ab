"""What is printed where the terminal cannot hold it: other letters, or one line and a status."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from helpers.transfer.port_cases import LLAMA, llama, source_of
from jax_attn.cli.status import Exit

ODD = "é\u2192\u6ce8"


@pytest.fixture
def source(tmp_path):
    return source_of(tmp_path, llama() | {ODD: np.ones(3, np.float32)}, LLAMA)


def run(cwd, *arguments, encoding="utf-8", stdout=subprocess.PIPE):
    return subprocess.run(
        [sys.executable, "-m", "jax_attn", *map(str, arguments)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        cwd=cwd,
        env=os.environ | {"PYTHONIOENCODING": encoding},
    )


ENCODINGS = {"latin-1": b"\xe9\\u2192\\u6ce8", "cp1252": b"\xe9\\u2192\\u6ce8"}
ENCODINGS |= {"utf-8": ODD.encode(), "ascii": ODD.encode()}  # click takes this for a mistake


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_name_that_a_terminal_cannot_show_is_written_out(tmp_path, source, encoding):
    port = ("port", source, "out", "--to", "flax", "--ignore", ODD)
    done = run(tmp_path, *port, encoding=encoding)
    assert (done.returncode, (tmp_path / "out").is_dir()) == (0, True), done.stderr
    assert ENCODINGS[encoding] + b": skipped" in done.stdout
    refused = run(tmp_path, *port, encoding=encoding)
    assert (refused.returncode, b"Traceback" in refused.stderr) == (2, False)


@pytest.mark.slow
def test_a_name_does_not_steer_the_terminal(tmp_path):
    key = "\x1b]0;owned\x07\x1b[31mx"
    source = source_of(tmp_path, llama() | {key: np.ones(3, np.float32)}, LLAMA)
    for arguments in (
        ("port", source, "out", "--to", "flax", "--ignore", key),
        ("port", source, "no", "--to", "flax", "--ignore", f"{key}y"),
    ):
        done = run(tmp_path, *arguments)
        assert rb"\x1b]0;owned\x07\x1b[31mx" in done.stdout + done.stderr
        assert b"\x1b" not in done.stdout + done.stderr
    (source / "config.json").write_text(json.dumps({"model_type": key}))
    done = run(tmp_path, "inspect", source)
    assert (done.returncode, b"\x1b" in done.stdout) == (0, False)
    assert rb"\x1b]0;owned" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", [("inspect", "source"), ("inspect", "source", "--json")])
def test_a_full_output_is_one_line(tmp_path, source, command):
    with open("/dev/full", "w") as full:
        done = run(tmp_path, *command, stdout=full)
    assert (done.returncode, done.stderr.decode()) == (
        3,
        "Error: output cannot be written: No space left on device\n",
    )


@pytest.mark.slow
def test_a_mistake_of_this_package_is_told_from_a_verdict(tmp_path):
    code = (
        "from jax_attn import cli; from jax_attn.__main__ import run; "
        "cli._Lazy.get_command = lambda *_: 1 / 0; run()"
    )
    ran = subprocess.run([sys.executable, "-c", code, "doctor"], stderr=subprocess.PIPE, text=True)
    assert (ran.returncode, ran.stderr.count("ZeroDivisionError")) == (Exit.CRASHED, 1)
