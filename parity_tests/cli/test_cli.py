"""The command line: what it prints, writes, refuses, and with which status it leaves."""

import dataclasses
import json

import numpy as np
import pytest
import torch  # noqa: F401  # `verify` needs it
from click.testing import CliRunner

from jax_attn.attention import dispatch
from jax_attn.attention.kernels import blocked
from jax_attn.cli import main
from jax_attn.parity.judge.budget import Budget
from jax_attn.parity.judge.compare import judge
from jax_attn.parity.judge.result import Result
from jax_attn.selfcheck.matrix import on_mesh
from jax_attn.selfcheck.matrix.designs import PORTED_DESIGNS
from jax_attn.selfcheck.matrix.rows import default, matrix
from jax_attn.selfcheck.power.catalogue import BUGS

ROW, *_ = [c.name for c in default() if (c.design, c.transform) == ("plain_mha", "jit")]
NOT_BY_DEFAULT, *_ = [c.name for c in matrix() if c not in default()]
SLIDING, *_ = [c.name for c in default() if (c.design, c.mask) == ("gqa", "sliding")]
ONE = ("--backend", "cpu", "-k", ROW)
BUDGET = Budget(np.full(3, 1e-6, np.float32), 1e-6, 1e-8, 1e-5, 1e-12)


def run(*args: str):
    return CliRunner().invoke(main, args, catch_exceptions=False)


@pytest.fixture(scope="module")
def verified(tmp_path_factory):
    """One small run: its outcome, its JSON, and its report directory."""
    report = tmp_path_factory.mktemp("report") / "new" / "deep"
    outcome = run("verify", *ONE, "--json", "--report", str(report))
    return outcome, json.loads(outcome.stdout), report


def test_a_passing_run_leaves_0_and_data_alone_on_stdout(verified):
    outcome, document, _ = verified
    assert outcome.exit_code == 0
    assert document["schema"] == "jax-attn.run/1"
    assert document["summary"]["pass"] == len(document["cases"]) > 0
    assert (document["summary"]["fail"], document["summary"]["inconclusive"]) == (0, 0)
    assert document["compiled"] == []


def test_a_case_says_what_it_is_and_how_each_tensor_compares(verified):
    _, document, _ = verified
    case = document["cases"][0]
    assert {"name", "design", "dtype", "backend", "level", "transform", "verdict"} <= case.keys()
    assert (case["design"], case["backend"], case["level"]) == ("plain_mha", "cpu", "measured")
    assert {"output", "grad input x", "grad query.weight"} <= case["tensors"].keys()
    output = case["tensors"]["output"]
    assert output["verdict"] == "PASS"
    assert 0 < output["fraction"] <= 1
    assert output["error"] > 0
    assert output["ratio"] == output["error"] / output["reference_error"]


def test_the_environment_is_told(verified):
    _, document, _ = verified
    environment = document["environment"]
    assert {"jax", "flax", "torch", "numpy"} <= environment["packages"].keys()
    assert environment["devices"]
    assert "jax_default_matmul_precision" in environment


def test_the_report_is_written_whole(verified):
    _, document, report = verified
    assert sorted(p.name for p in report.iterdir()) == ["index.html", "result.json", "summary.md"]
    assert json.loads((report / "result.json").read_text()) == document
    summary = (report / "summary.md").read_text()
    assert all(case["name"] in summary for case in document["cases"])


def test_the_table_names_each_case_and_the_accuracy_is_summed_up():
    outcome = run("verify", *ONE)
    assert outcome.exit_code == 0
    assert "plain_mha-float32-none" in outcome.stdout
    assert "0 fail, 0 inconclusive" in outcome.stdout
    assert "float32 error over torch's own, overall: median" in outcome.stdout


def planted(monkeypatch, **change) -> None:
    one = dataclasses.replace(PORTED_DESIGNS["plain_mha"], **change)
    monkeypatch.setitem(PORTED_DESIGNS, "plain_mha", one)


def test_a_failing_case_leaves_1_and_says_where(monkeypatch):
    planted(monkeypatch, port_call=lambda kind: lambda m, x: {"output": m(x, is_causal=True)})
    outcome = run("verify", *ONE)
    assert outcome.exit_code == 1
    assert "worst: " in outcome.stdout


def test_a_case_that_shows_nothing_leaves_4(monkeypatch):
    harmless = dataclasses.replace(BUGS["no scale"], plants={})
    monkeypatch.setitem(BUGS, "no scale", harmless)
    outcome = run("verify", *ONE)
    assert outcome.exit_code == 4
    assert "blind" in outcome.stdout


USAGE = {
    "unknown design": (("--design", "flash"), "--design: expected one of weights_mha"),
    "unknown dtype": (("--dtype", "int8"), "--dtype: expected one of float32"),
    "unknown kernel": (
        ("--implementation", "flash"),
        "--implementation: expected one of cudnn, splash, blocked, dense, got flash",
    ),
    "unknown backend": (("--backend", "npu"), "'npu' is not one of"),
    "nothing left": (("--backend", "cpu", "-k", "no such case"), "no case matches"),
    "nothing left by default": (
        ("--backend", "cpu", "-k", NOT_BY_DEFAULT),
        "no case matches --design, --dtype and -k among the default rows",
    ),
    "a mesh of a checkpoint": (
        ("x.safetensors", "--mesh", "data=2"),
        "--mesh: goes with the built-in cases, not with CHECKPOINT",
    ),
    "a mesh of other axes": (
        ("--mesh", "data=2,rows=4"),
        "expected sizes from 1 up of data, heads or both, such as data=2,heads=4, got rows=4",
    ),
    "a mesh of no size": (("--mesh", "data"), "such as data=2,heads=4, got data"),
    "a mesh's axis twice": (("--mesh", "data=2,data=4"), "got data more than once"),
    "a mesh that does not divide": (
        ("--mesh", "data=3,heads=1"),
        "--mesh: data: expected a number of devices that divides 4 rows, got 3",
    ),
    "no case on a mesh": (("--mesh", "data=2", "-k", "nothing"), "no case matches"),
    "all of a checkpoint": (("x.safetensors", "--all"), "--all: goes with the built-in cases"),
    "heads without a checkpoint": (
        ("--num-heads", "8"),
        "--num-heads: goes with CHECKPOINT, not with the built-in cases",
    ),
    "filters with a checkpoint": (
        ("x.safetensors", "--design", "gqa", "-k", "mha"),
        "--design: goes with the built-in cases or --power, not with CHECKPOINT\n"
        "-k: goes with the built-in cases or --power or --calibrate, not with CHECKPOINT",
    ),
    "a backend with a checkpoint": (
        ("x.safetensors", "--backend", "cpu"),
        "--backend: goes with the built-in cases, not with CHECKPOINT",
    ),
    "what is drawn, with nothing drawn": (
        (*ONE, "--configurations", "10000", "--seed", "0"),
        "--configurations: goes with --calibrate, not with the built-in cases\n"
        "--seed: goes with --calibrate, not with the built-in cases",
    ),
    "report is a file": (("--report", __file__), "is a file"),
    "report lies in a file": (
        (*ONE, "--report", f"{__file__}/new/deep"),
        f"--report: expected a directory to write to, got {__file__}/new/deep: Not a directory",
    ),
}


@pytest.mark.parametrize("row", USAGE)
def test_wrong_usage_leaves_2_and_names_the_option(row):
    args, message = USAGE[row]
    outcome = run("verify", *args)
    assert outcome.exit_code == 2
    assert message in outcome.stderr
    assert outcome.stdout == ""


@pytest.mark.parametrize(
    ("args", "name"), [(ONE, "summary.md"), (("--power", *ONE[2:]), "power.json")]
)
def test_a_report_that_cannot_be_written_is_told_before_the_work(tmp_path, args, name):
    (tmp_path / name).mkdir()
    outcome = run("verify", *args, "--report", str(tmp_path))
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert outcome.stderr.endswith(f"got {tmp_path}: {name}: a directory\n")


def test_a_backend_that_is_not_here_leaves_3_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr("jax_attn.cli.common.devices.available", lambda: {"cpu"})
    outcome = run("verify", "--backend", "gpu")
    assert outcome.exit_code == 3
    assert "pip install 'jax[cuda12]" in outcome.stderr


def test_a_missing_torch_leaves_3_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr("jax_attn.cli.status.present", lambda module: module != "torch")
    outcome = run("verify")
    assert outcome.exit_code == 3
    assert "pip install 'torch>=2.10'" in outcome.stderr


def test_without_a_tpu_its_rows_are_emulated_and_its_designs_are_not_cases():
    outcome = run("verify", "--backend", "tpu", "--design", "fused_mha", "--json")
    document = json.loads(outcome.stdout)
    assert outcome.exit_code == 0
    assert {(c["backend"], c["level"]) for c in document["cases"]} == {("tpu", "emulated")}
    assert document["summary"]["pass"] == len(document["cases"])
    assert {c["direction"] for c in document["compiled"]} == {"forward", "gradient"}
    assert {c["level"] for c in document["compiled"]} <= {"compiled", "lowered"}
    assert not any("verdict" in c for c in document["compiled"])


def test_doctor_tells_versions_devices_and_what_is_missing(monkeypatch):
    monkeypatch.setattr("jax_attn.cli.doctor.present", lambda module: module != "libtpu")
    text = run("doctor").stdout
    assert all(word in text for word in ("jax", "torch", "devices", "matmul_precision"))
    assert "missing extra tpu" in text
    assert "pip install 'jax[tpu]" in text
    document = json.loads(run("doctor", "--json").stdout)
    assert set(document["missing"]) == {"tpu"}


@pytest.mark.slow
def test_verify_insists_on_a_kernel_and_cuts_the_rows_into_several_tiles(monkeypatch):
    rows, one = [], blocked.attention

    def counted(call, tiles):
        rows.append(-(-call.T // tiles.T) * -(-call.S // tiles.S))
        return one(call, tiles)

    kernel = dataclasses.replace(dispatch.KERNELS["blocked"], run=counted)
    monkeypatch.setitem(dispatch.KERNELS, "blocked", kernel)
    on_cpu = "--backend", "cpu", "--implementation", "blocked"
    outcome = run("verify", *on_cpu, "-k", SLIDING, "--json")
    assert outcome.exit_code == 0
    (found,) = json.loads(outcome.stdout)["cases"]
    assert (found["implementation"], found["verdict"]) == ("blocked", "PASS")
    assert min(rows) > 1


def test_a_row_on_a_mesh(monkeypatch):
    """Eight CPU devices are there in these tests; from a terminal they are made.

    Verdicts on such rows are selfcheck/matrix/test_on_mesh.py's business.
    """

    def judged(preparation, row, backend, doubts):
        placed = on_mesh.OnMesh(preparation, row.mesh(backend)).placement
        tensors = (judge(*3 * (np.ones(3),), BUDGET, kind="output", name="y", transform="jit"),)
        return Result("float32", backend, tensors, name=row.name, details={"mesh": placed.words})

    monkeypatch.setattr(on_mesh, "_judged", judged)
    monkeypatch.setattr("jax_attn.selfcheck.power.trials.doubts", lambda preparation: ())
    done = run("verify", "--mesh", "data=2,heads=4", "-k", "mqa-float32-causal", "--json")
    document = json.loads(done.stdout)
    names = [case["name"] for case in document["cases"]]
    assert names == [f"mqa-float32-causal-parts-jit-{kind}" for kind in ("auto", "explicit")]
    assert [case["mesh"] for case in document["cases"]] == [
        "data=2, heads=4 (Auto)",
        "data=2, heads=4 (Explicit)",
    ]
    assert (done.exit_code, document["summary"]["pass"]) == (0, 2)


def test_more_devices_than_there_are():
    done = run("verify", "--mesh", "data=2,heads=8")
    assert done.exit_code == 3
    assert "--mesh needs 16 devices of kind cpu, and jax has 8" in done.stderr
