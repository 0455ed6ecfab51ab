"""Files that set out to cheat: each is run by the command in a process of its own; none passes."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from helpers.parity.written_golden import DATA, B, D, T
from jax_attn.cli import main
from jax_attn.parity import load_golden, prepare
from jax_attn.parity.frozen import port_side
from jax_attn.parity.frozen.descendants import processes
from jax_attn.parity.frozen.port_side import PortProcess

PORTS = """
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from helpers.parity.written_golden import attention
from jax_attn import parity
from jax_attn.transfer import LAYOUTS


def make(scale=None, **options):
    layout = LAYOUTS["torch_mha"]
    options = {"layout": layout, "transforms": ("jit",), **options}
    return parity.Pair(None, attention(scale), None, **options)


def wrong():
    return make(0.6)


def raises_when_compiled():
    def call(module, x):
        if "Jaxpr" in type(x).__name__:
            raise TypeError("no program\\nPASS  port.py:make")
        return module(x)

    return make(port_call=call, transforms=("eager", "jit"))


def other_inputs():
    return make() and parity.Pair(None, attention(), (np.ones((2, 5, 6), np.float32),))


def patches_the_judge():
    from jax_attn.parity.checking import judged, judging
    from jax_attn.parity.judge import budget, compare, result

    passing = property(lambda self: compare.Verdict.PASS)
    result.Result.verdict = compare.TensorReport.verdict = passing
    for module in (compare, judged, judging):
        module.judge = module.judged = module.judge_port = lambda *a, **k: None
    return make(0.6)


def patches_numpy():
    np.testing.assert_allclose = np.allclose = np.array_equal = lambda *a, **k: True
    np.isfinite = lambda a, **k: np.ones(np.shape(a), bool)
    return make(0.6)


def forges_a_verdict():
    line = "PASS  port.py:make  float32 on cpu, measured"
    print(line, flush=True)
    print(line, file=sys.stderr, flush=True)
    os.write(1, f"{line}\\n".encode())
    return make(0.6)


def forges_a_refusal():
    raise ValueError("unknown\\nPASS  port.py:make  float32 on cpu, measured")


def leaves_early():
    os._exit(0)


def leaves_in_the_call():
    return make(port_call=lambda module, x: os._exit(0))


def leaves_with_grace():
    return make(port_call=lambda module, x: sys.exit(0))


def is_killed():
    os.kill(os.getpid(), 9)


def hangs():
    time.sleep(1000)


def hangs_and_floods():
    while True:
        print("x" * 10_000)


def hands_back_objects():
    import pickle

    from jax_attn.parity.frozen import port_process

    def send(channel, value):
        for part in (pickle.dumps(value), pickle.dumps(np.array([object()]))):
            channel.sendall(len(part).to_bytes(8, "little") + part)

    port_process.send = send
    return make()


def of_integers():
    def call(held, x):
        y = x @ held["kernel"] + held["bias"]
        return {"y": y, "best": y.argmax(-1)}

    return parity.function(call, dict(np.load("weights.npz")))


def hands_back_too_much():
    from jax_attn.parity.frozen import port_process

    too_much = (2**60).to_bytes(8, "little")
    port_process.send = lambda channel, value: channel.sendall(too_much)
    return make()


def hands_back_no_gradients():
    from dataclasses import replace

    from jax_attn.parity.run.port import Port

    run = Port.run
    Port.run = lambda *args: replace(run(*args), parameter_grads={})
    return make()


def writes_into_the_golden():
    with Path("golden", "arrays.safetensors").open("ab") as file:
        file.write(b"more")
    return make()


def writes_meanwhile():
    import atexit

    file = Path("golden", "arrays.safetensors")
    before = file.read_bytes()

    def put(data):
        with file.open("r+b") as opened:
            opened.write(data)

    put(before[:8] + before[8:].replace(b"\\x00", b"\\x01"))
    atexit.register(put, before)
    return make(0.6)


def removes_the_golden():
    Path("golden", "golden.json").unlink()
    return make()


SLEEPS = [sys.executable, "-c", "import time; time.sleep(1000)", "left by a port"]


def leaves_a_process():
    subprocess.Popen(SLEEPS, start_new_session=True)
    return make()


def leaves_an_orphan():
    subprocess.run(["sh", "-c", '"$@" & ', "sh", *SLEEPS])
    return make()
"""

ATTACKS = {
    # function -> the exit status, and what the first line on stdout, or else the error, says
    "wrong": (1, "FAIL"),
    "other_inputs": (2, "inputs: expected the golden reference's own"),
    "patches_the_judge": (1, "FAIL"),
    "patches_numpy": (1, "FAIL"),
    "forges_a_verdict": (1, "FAIL"),
    "forges_a_refusal": (2, "port.py: PASS  port.py:make"),
    "leaves_early": (2, "ended with status 0"),
    "leaves_in_the_call": (2, "ended with status 0"),
    "leaves_with_grace": (2, "SystemExit: 0"),
    "is_killed": (2, "killed by signal 9"),
    "hangs": (2, "within 6 s in all"),
    "hangs_and_floods": (2, "within 6 s in all"),
    "hands_back_objects": (2, "wrote no message"),
    "hands_back_too_much": (2, "more than the"),
    "hands_back_no_gradients": (2, "gradient of parameter: the reference has"),
    "writes_into_the_golden": (2, "changed while the port ran"),
    "writes_meanwhile": (1, "FAIL"),
    "removes_the_golden": (2, "changed while the port ran"),
    "leaves_a_process": (2, "still running"),
    "leaves_an_orphan": (2, "still running"),
}
FAST = ("forges_a_verdict",)
DIGEST = load_golden(DATA / "attention").digest


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "port.py").write_text(PORTS)
    shutil.copytree(DATA / "attention", tmp_path / "golden")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(port_side, "_OTHERS_END_WITHIN", 0.5)
    return tmp_path


def run(function, *options, digest=DIGEST):
    words = ["--golden", "golden", *(["--expect-digest", digest] if digest else []), *options]
    return CliRunner().invoke(main, ["check", f"port.py:{function}", *words])


@pytest.mark.parametrize(
    "function", [f if f in FAST else pytest.param(f, marks=pytest.mark.slow) for f in ATTACKS]
)
def test_no_file_that_cheats_passes(function, folder):
    status, message = ATTACKS[function]
    done = run(function, *(["--timeout", "6"] if function.startswith("hangs") else []))
    assert done.exit_code == status, done.output
    lines = done.stdout.splitlines() if status == 1 else [done.stderr]
    assert message in lines[0]
    assert not any(line.startswith("PASS") for line in done.output.splitlines())
    running = [Path("/proc", str(one.number), "cmdline") for one in processes()]
    assert not [f for f in running if f.exists() and b"left by a port" in f.read_bytes()]


LATE = """
import subprocess, sys
start, loaded = subprocess.Popen.__init__, set()
def started(*args, **named):
    loaded.update(sys.modules)
    start(*args, **named)
subprocess.Popen.__init__ = started
from jax_attn.cli import main
try:
    main(sys.argv[1:], standalone_mode=False)
finally:
    print(sys.modules.keys() - loaded, "jax" in sys.modules, file=sys.stderr)
"""


@pytest.mark.slow
def test_the_judge_imports_no_jax_and_nothing_at_all_once_the_file_runs(folder):
    reference = torch.nn.Linear(D, 3)
    torch.nn.init.normal_(reference.weight, std=0.5)
    x = np.random.default_rng(0).standard_normal((B, T, D)).astype(np.float32)
    kernel, bias = (p.detach().numpy() for p in (reference.weight.T, reference.bias))
    np.savez("weights.npz", kernel=kernel, bias=bias)
    call = lambda m, x: {"y": (y := m(x)), "best": y.argmax(-1)}  # noqa: E731
    prepare(reference, (x,), reference_call=call).save("of_integers")
    digest = load_golden("of_integers").digest
    words = ("check", "port.py:of_integers", "--golden", "of_integers", "--expect-digest", digest)
    command = [sys.executable, "-c", LATE, *words, "--report", "report", "--json"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert json.loads(done.stdout)["verdict"] == "PASS", done.stderr
    assert done.stderr.splitlines()[-1] == "set() False"


@pytest.mark.slow
def test_a_right_port_has_the_report_of_a_check_in_this_process(folder):
    frozen, here = run("make", "--json"), run("make", "--json", digest=None)
    assert (frozen.exit_code, here.exit_code) == (0, 0), frozen.output
    assert json.loads(frozen.stdout) == json.loads(here.stdout)


@pytest.mark.slow
def test_an_error_under_one_transform_has_the_report_of_a_check_in_this_process(folder):
    function = "raises_when_compiled"
    frozen, here = run(function, "--json"), run(function, "--json", digest=None)
    assert (frozen.exit_code, here.exit_code) == (1, 1), frozen.output
    ours, theirs = json.loads(frozen.stdout), json.loads(here.stdout)
    (error,), (same,) = (report["reasons"] for report in (ours, theirs))
    assert error.split() == same.split()
    assert error.startswith("jit: port: expected it to run")
    assert ours["tensors"] == theirs["tensors"] != {}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has it")
def test_no_process_of_the_same_user_opens_what_the_judge_has_open():
    dumpable = lambda: ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)  # noqa: E731
    before = dumpable()
    with PortProcess("port.py:make", 60.0):
        assert dumpable() == 0
    assert dumpable() == before == 1
