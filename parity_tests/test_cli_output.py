"""What is printed where the terminal cannot hold it: other letters, or one line and a status."""

import os
import subprocess
import sys

import numpy as np
import pytest
from port_cases import LLAMA, llama, source_of

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


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_name_that_a_terminal_cannot_show_is_written_out(tmp_path, source, encoding):
    port = ("port", source, "out", "--to", "flax", "--ignore", ODD)
    done = run(tmp_path, *port, encoding=encoding)
    assert (done.returncode, (tmp_path / "out").is_dir()) == (0, True), done.stderr
    assert ENCODINGS[encoding] + b": passed over" in done.stdout
    refused = run(tmp_path, *port, encoding=encoding)
    assert (refused.returncode, b"Traceback" in refused.stderr) == (2, False)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that Linux has")
@pytest.mark.parametrize("command", [("inspect", "source"), ("inspect", "source", "--json")])
def test_a_full_output_is_one_line(tmp_path, source, command):
    with open("/dev/full", "w") as full:
        done = run(tmp_path, *command, stdout=full)
    assert (done.returncode, done.stderr.decode()) == (
        3,
        "Error: output cannot be written: No space left on device\n",
    )
