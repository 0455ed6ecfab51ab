"""Ctrl-C and SIGTERM: 130 and 143, as a shell has them, one line, and nothing half-written."""

import json
import os
import subprocess
import sys

import pytest
import torch  # noqa: F401  verify and bench ask for it
from click.testing import CliRunner

from helpers.transfer.torch_checkpoints import bert, saved, tensors
from jax_attn import transfer
from jax_attn.bench.engine.session import Session
from jax_attn.cli import main
from jax_attn.cli.verifying.outcome import Outcome
from jax_attn.parity.judge.result import NotRun
from jax_attn.selfcheck import process_pool
from jax_attn.selfcheck.matrix.cases import Case
from jax_attn.selfcheck.matrix.rows import default
from jax_attn.selfcheck.matrix.run_rows import refusal, run_cases

WHERE = {
    "inspect": (transfer, "load_checkpoint", ("inspect", "SOURCE")),
    "port": (transfer, "load_checkpoint", ("port", "SOURCE", "OUT", "--to", "flax")),
    "verify": (process_pool, "run", ("verify", "--backend", "cpu", "-k", "plain_mha")),
    "verify a checkpoint": (transfer, "load_checkpoint", ("verify", "--attention", "SOURCE")),
    "bench": (Session, "__enter__", ("bench", "--output", "OUT")),
}


def interrupt(*_, **__):
    raise KeyboardInterrupt


@pytest.fixture
def source(tmp_path):
    config = {"model_type": "bert", "hidden_size": 30, "num_attention_heads": 6}
    return saved(tmp_path, tensors(bert()), config)


@pytest.mark.parametrize("command", WHERE)
def test_an_interrupted_command_leaves_130_and_one_line(tmp_path, source, monkeypatch, command):
    owner, name, arguments = WHERE[command]
    monkeypatch.setattr(owner, name, interrupt)
    paths = {"SOURCE": str(source), "OUT": str(tmp_path / "out")}
    done = CliRunner().invoke(main, [paths.get(word, word) for word in arguments])
    assert done.exit_code == 130, done.output
    said = [line for line in done.stderr.splitlines() if not line.startswith("Warning: ")]
    assert said == ["interrupted"]
    assert done.stdout == ""
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.slow
def test_verify_interrupted_keeps_the_rows_that_are_judged(tmp_path, monkeypatch):
    case = next(row for row in default() if row.family == "plain_mha" and row.transform == "jit")

    def two_rows(work, processes):
        yield work[0], run_cases([case], doubts=lambda row: ())
        raise KeyboardInterrupt

    monkeypatch.setattr(process_pool, "run", two_rows)
    arguments = ["verify", "--backend", "cpu", "--design", "plain_mha", "--report", str(tmp_path)]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 130, done.output
    assert done.stderr.splitlines()[-1] == "interrupted"
    planned = len([row for row in default() if row.family == "plain_mha"])
    part = f"INTERRUPTED: 1 of {planned} cases are judged; this is a part of the run"
    assert part in done.stdout
    document = json.loads((tmp_path / "result.json").read_text())
    assert not document["complete"]
    assert [row["name"] for row in document["cases"]] == [case.name]
    assert part in (tmp_path / "summary.md").read_text()


@pytest.mark.slow
def test_rows_that_a_kernel_refuses_make_no_part_of_a_run(tmp_path):
    judged, refused = (Case("plain_mha", "float32", "none", "seed001", t) for t in ("jit", "vmap"))

    def items():
        yield from run_cases([judged], doubts=lambda row: ())
        yield refusal(refused, "cpu", "no such device")

    outcome = Outcome([judged.name, refused.name], shown=False).collect(items())
    status = outcome.present(report=tmp_path, as_json=False, all_tensors=False)
    assert status == 0
    assert json.loads((tmp_path / "result.json").read_text())["complete"]
    assert "INTERRUPTED" not in (tmp_path / "summary.md").read_text()


@pytest.mark.slow
def test_what_is_only_compiled_is_one_line_unless_a_compiler_refuses_it(tmp_path, capfd):
    case = Case("plain_mha", "float32", "none", "seed001", "jit")

    def said(*levels):
        def items():
            yield from run_cases([case], doubts=lambda row: ())
            for level in levels:
                yield NotRun("gqa", "forward", "float32", "prime", level, "cuda", "WHY")

        outcome = Outcome([case.name], shown=False).collect(items())
        outcome.present(report=tmp_path, as_json=False, all_tensors=False)
        return capfd.readouterr().out

    many = said(*40 * ["lowered"], "not compiled")
    (line,) = [line for line in many.splitlines() if "lowered" in line]
    assert line.startswith("not run, listed in the report: 40 lowered")
    assert "WHY" not in many
    assert len(json.loads((tmp_path / "result.json").read_text())["compiled"]) == 41
    assert "WHY" in said("failed")


@pytest.mark.slow
def test_each_row_is_printed_when_it_is_judged(monkeypatch, capfd):
    rows = [row for row in default() if row.name.startswith("plain_mha-float32")]
    shown: list[str] = []

    def watched(work, processes):
        for row in rows:
            shown.append(capfd.readouterr().out)
            yield work[0], run_cases([row], doubts=lambda row: ())

    monkeypatch.setattr(process_pool, "run", watched)
    with pytest.raises(SystemExit) as left:
        main(["verify", "--backend", "cpu", "-k", "plain_mha-float32"])
    assert left.value.code == 0
    assert [rows[0].name in text for text in shown] == [False, True]
    assert rows[1].name in capfd.readouterr().out


SIGNALS = {"SIGINT": (130, "interrupted"), "SIGTERM": (143, "terminated")}


@pytest.mark.slow
@pytest.mark.parametrize("signal", SIGNALS)
def test_a_signal_while_a_port_writes_leaves_nothing(tmp_path, signal):
    (tmp_path / "source").mkdir()
    saved(tmp_path / "source", tensors({"a.weight": (7, 3)}))
    (tmp_path / "one.py").write_text(
        "from jax_attn.transfer import LINEAR\nTABLE = LINEAR.under('a', 'a')"
    )
    code = (
        "import os, signal; from jax_attn.cli import main; "
        "from jax_attn.porting.port import carry_and_prove; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "  # a parent may ignore it
        f"carry_and_prove.prove = lambda *_: os.kill(os.getpid(), signal.{signal}); "
        "main(['port', 'source', 'out', '--to', 'flax', '--layout', 'one:TABLE'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    status, said = SIGNALS[signal]
    assert (done.returncode, done.stderr.split()) == (status, [said])
    left = {path.name for path in tmp_path.iterdir()}
    assert left - {"__pycache__"} == {"source", "one.py"}


WORKERS = """
import os, signal, time
from functools import partial
from jax_attn.selfcheck import process_pool
signal.signal(signal.SIGINT, signal.default_int_handler)
process_pool._WORTH_A_PROCESS = 1
sleep = partial(max, key=time.sleep)
quick, slow = (process_pool.Piece(sleep, ((seconds,),)) for seconds in (0, 60))
running = process_pool.run([quick, quick, slow], 2)  # one is at work, one waits for some
try:
    next(running), next(running), time.sleep(2), os.killpg(0, signal.SIGINT)
    time.sleep(60)
except KeyboardInterrupt:
    running.close()
    print("interrupted")
"""


@pytest.mark.slow
def test_workers_whom_ctrl_c_reaches_too_say_nothing_and_end():
    done = subprocess.run(
        [sys.executable, "-c", WORKERS],
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=30,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


def test_a_process_keeps_its_programs_in_a_folder_of_its_own(monkeypatch, tmp_path):
    """JAX would read what another one, or one that was killed, has written half."""
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(process_pool.signal, "signal", lambda *_: None)
    process_pool._begin(str(tmp_path))
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / str(os.getpid()))


SLOW = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.Signals[os.environ["SENT"]])
    time.sleep(float(os.environ["SECONDS"]))
finally:
    raise ImportError("as extension modules make of an exception")
"""
IMPORTING = {
    "verify": ["verify", "-k", "plain_mha"],
    "power": ["power"],
    "calibrate": ["calibrate"],
    "doctor": ["doctor"],
    "bench": ["bench"],
    "inspect": ["inspect", "model.safetensors"],
    "port": ["port", "model.safetensors", "out", "--to", "flax"],
}


def while_importing(tmp_path, signal, arguments, seconds):
    """What a command does that gets a signal while it imports NumPy, JAX or the like."""
    for name in ("numpy", "ml_dtypes", "jax", "torch"):
        (tmp_path / f"{name}.py").write_text(SLOW)
    (tmp_path / "model.safetensors").write_bytes(b"")
    code = (
        "import signal, sys; from jax_attn.__main__ import run; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"sys.argv[1:] = {arguments!r}; run()"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    told = {"PYTHONPATH": path, "SENT": signal, "SECONDS": str(seconds)}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, **told},
        timeout=30,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "signal"), [("port", "SIGTERM"), *((name, "SIGINT") for name in IMPORTING)]
)
def test_a_signal_within_an_import_is_told_as_any_other(tmp_path, command, signal):
    done = while_importing(tmp_path, signal, IMPORTING[command], seconds=0.1)
    status, said = SIGNALS[signal]
    assert (done.returncode, done.stderr, done.stdout) == (status, f"{said}\n", "")


@pytest.mark.slow
def test_an_import_that_goes_on_is_not_waited_for(tmp_path):
    done = while_importing(tmp_path, "SIGINT", IMPORTING["inspect"], seconds=25)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
