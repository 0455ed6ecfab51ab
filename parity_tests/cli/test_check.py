"""`jax-attn check`: a user's pair from a file; what it prints and writes, refuses and watches."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch  # noqa: F401  # the reference
from click.testing import CliRunner

from helpers.pair_file import PAIRS
from helpers.schema_problems import problems
from jax_attn.cli import main
from jax_attn.cli.checking.watch import moved, runs
from jax_attn.parity.pair.errors import PairError
from jax_attn.parity.pair.read import called, function
from jax_attn.transfer import save_checkpoint

QUICK = ("--transforms", "eager")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(PAIRS)
    (tmp_path / "raising.py").write_text("def __getattr__(name):\n    raise KeyError(name)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def check(function: str, *options: str):
    named = function if ":" in function else f"mine.py:{function}"
    return CliRunner().invoke(main, ["check", named, *options], catch_exceptions=False)


VERDICTS = {
    "PASS": ("right", QUICK, 0),
    "FAIL": ("wrong", QUICK, 1),
    "INCONCLUSIVE": ("doubtful", QUICK, 4),
    "INCONCLUSIVE by its notes": ("right", (*QUICK, "--no-gradients", "--strict"), 4),
    "PASS of a pair of their own": ("own", QUICK, 0),
    "PASS in the dtype of the option": ("in_dtype", (*QUICK, "--dtype", "bfloat16"), 0),
    "PASS of a training": ("training", ("--training", "--steps", "2"), 0),
}


@pytest.mark.parametrize("row", VERDICTS)
def test_each_verdict_has_its_status(row):
    function, options, status = VERDICTS[row]
    done = check(function, *options, "--json")
    assert done.exit_code == status, done.output
    document = json.loads(done.stdout)
    assert [*problems(document, "check")] == []
    assert document["verdict"] == row.split()[0]
    assert bool(document["reasons"]) is bool(document["next"]) is (status != 0)
    if "--dtype" in options:
        assert document["dtype"] == "bfloat16"
    if "--no-gradients" in options:
        assert {t["kind"] for t in document["tensors"].values()} == {"output"}


@pytest.fixture(scope="module")
def explained(tmp_path_factory):
    """A failed check with everything asked for: its outcome, its JSON and its report."""
    folder = tmp_path_factory.mktemp("explained")
    (folder / "mine.py").write_text(PAIRS)
    before = [*sys.path]
    options = (*QUICK, "--explain", "--json", "--report", str(folder / "report"))
    done = check(f"{folder}/mine.py:wrong", *options)
    sys.path[:] = before
    return done, json.loads(done.stdout), folder / "report"


def test_an_explanation_names_places_of_both_sides_and_the_cause(explained):
    done, document, _ = explained
    assert done.exit_code == 1
    assert [*problems(document, "check")] == []
    (region,) = document["explanation"]["regions"]
    sources = {side: region["first_wrong"][side]["source"] for side in ("ours", "theirs")}
    assert all(source.startswith("mine.py:") for source in sources.values())
    assert region["causes"][0]["name"].startswith("scale")
    (step,) = document["next"]
    assert step["change"] == "port"
    assert sources["ours"] in step["sentence"]


def test_the_report_has_the_same_json_and_the_cause_before_the_tensors(explained):
    _, document, report = explained
    assert json.loads((report / "result.json").read_text()) == document
    sentence = document["explanation"]["sentence"]
    summary = (report / "summary.md").read_text()
    assert summary.index(sentence) < summary.index("over budget")
    page = (report / "index.html").read_text()
    assert page.index("<h4>Cause</h4>") < page.index("<h4>Tensors</h4>")


def test_without_an_explanation_the_next_step_is_the_command_that_finds_one():
    done = check("wrong", *QUICK, "--seed", "3", "--parameters", "linear.*")
    line = "jax-attn check mine.py:wrong --transforms eager --seed 3 --parameters 'linear.*'"
    assert f"{line} --explain" in " ".join(done.stdout.split())


REFUSED = {
    "no file": ("absent.py:make", (), 2, "absent.py: expected a Python file"),
    "no function": ("mine.py:rigth", (), 2, "expected one of the functions ['right'"),
    "no colon": ("mine.py:", (), 2, "expected FILE.py:FUNCTION"),
    "it raises": ("raises", (), 2, "KeyError: 'no such weight'"),
    "it returns nothing": ("nothing", (), 2, "a parity.TrainingPair, got NoneType"),
    "an extra is missing": ("needs_transformers", (), 3, "pip install"),
    "a package is missing": ("needs_another", (), 3, "install the package that provides it"),
    "the port raises": ("fails_forward", QUICK, 2, "in failing"),
    "the reference exits": ("leaves_forward", QUICK, 2, "SystemExit: 0"),
    "it leaves": ("leaves", (), 2, "made nothing"),
    "memory runs out": ("needs_too_much", (), 3, "in needs_too_much"),
    "the port leaves": ("leaves_port", QUICK, 2, "gave nothing"),
    "the reference leaves": ("leaves_reference", QUICK, 2, "gave nothing"),
    "looking it up raises": ("raising.py:make", (), 2, "KeyError: 'make'"),
    "no signature": ("builtins:dict", ("--dtype", "float32"), 2, "got dict"),
    "a pair of their own": ("own_without_fields", (), 2, "got Own: 'Own' object has no attribute"),
    "uninitialized": ("lazy", QUICK, 2, "linear.weight and linear.bias uninitialized"),
    "no optimizer": ("no_optimizer", ("--training",), 2, "optimizer: expected it to make a torch"),
    "another type": ("wrong_type", (), 2, "layout: expected a Layout, got str"),
    "another dtype": ("right", ("--dtype", "float16"), 2, "expected float16, got torch.float32"),
    "no such parameter": ("right", ("--parameters", "q.*"), 2, "nearest: linear.weight"),
    "a training": ("training", (), 2, "check it with --training"),
    "no training": ("right", ("--training",), 2, "check it without --training"),
    "no such transform": ("right", ("--transforms", "eager,pmap"), 2, "got pmap"),
    "steps of a pair": ("right", ("--steps", "3"), 2, "--steps: goes with --training"),
    "a seed of a training": (
        "training",
        ("--training", "--seed", "3", "--no-gradients"),
        2,
        "--gradients: goes without --training\n--seed: goes without --training",
    ),
    "a wait for nothing": ("right", ("--timeout", "1800"), 2, "--timeout: goes with --expect"),
    "a wait without end": ("right", ("--timeout", "inf"), 2, "'inf' is not a valid int"),
    "watched JSON": ("right", ("--watch", "--json"), 2, "--json: goes without --watch"),
    "a report without a name": ("right", ("--report", ""), 2, "got an empty one"),
    "a report in a file": ("right", ("--report", "mine.py/x"), 2, "Not a directory"),
}


@pytest.mark.parametrize("row", REFUSED)
def test_what_cannot_be_checked_is_said_with_the_users_lines_alone(row):
    function, options, status, message = REFUSED[row]
    done = check(function, *options)
    assert (done.exit_code, done.stdout) == (status, "")
    assert message in done.stderr
    assert "/jax_attn/" not in done.stderr
    assert "site-packages" not in done.stderr


def test_a_missing_torch_is_named_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr("jax_attn.cli.status.present", lambda module: module != "torch")
    done = check("right")
    assert done.exit_code == 3
    assert "pip install 'torch>=2.10'" in done.stderr


def test_keras_on_its_default_backend_is_told_the_variable(tmp_path, monkeypatch):
    package = tmp_path / "apart" / "keras"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import tensorflow")
    (package.parent / "mine.py").write_text("import keras")
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    done = check("apart/mine.py:make")
    assert done.exit_code == 3
    assert "set KERAS_BACKEND=jax" in done.stderr


def test_verify_names_the_command_where_it_has_no_model(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "another", "num_attention_heads": 2}')
    save_checkpoint(tmp_path / "model.safetensors", {"weight": np.ones((2, 3), np.float32)})
    done = CliRunner().invoke(main, ["verify", str(tmp_path), "--model"])
    assert done.exit_code == 2
    assert "jax-attn check FILE.py:FUNCTION" in done.stderr


def test_what_the_user_prints_is_no_data():
    done = check("noisy", *QUICK, "--json")
    assert json.loads(done.stdout)["verdict"] == "PASS"
    assert "made by the user" in done.stderr


def test_an_interrupted_explanation_keeps_the_verdict(monkeypatch):
    def interrupted(result):
        raise KeyboardInterrupt

    monkeypatch.setattr("jax_attn.parity.judge.result.Result.explained", interrupted)
    done = check("wrong", *QUICK, "--explain", "--json")
    assert (done.exit_code, json.loads(done.stdout)["verdict"]) == (130, "FAIL")


@pytest.mark.slow
def test_in_a_process_of_its_own(folder):
    command = [sys.executable, "-m", "jax_attn", "check", "mine.py:noisy", *QUICK, "--json"]
    done = subprocess.run(command, capture_output=True, cwd=folder, env=os.environ, text=True)
    assert (done.returncode, json.loads(done.stdout)["verdict"]) == (0, "PASS"), done.stderr
    assert "made by the user" in done.stderr
    assert "and by a process of theirs" in done.stderr


# --- watching -------------------------------------------------------------------------------------


class Edits:
    """Stands in for waiting: each wait makes the next edit of a file, or ends the watch."""

    def __init__(self, *edits):
        self.edits = [*edits]

    def __call__(self, seconds):
        if not self.edits:
            raise KeyboardInterrupt
        file, text = self.edits.pop(0)
        second = file.stat().st_mtime_ns // 10**9 if file.exists() else 0
        file.write_text(text)
        os.utime(file, ns=(0, second * 10**9 + len(self.edits)))  # in the second of the last save


def test_a_file_and_what_it_imports_are_read_again_when_they_change(folder, monkeypatch):
    mine, helper = folder / "mine.py", folder / "helper_of_mine.py"
    helper.write_text("number = 1\n")
    mine.write_text("def make():\n    import helper_of_mine\n    return helper_of_mine.number\n")
    edits = Edits(
        (helper, "number = 2\n"),
        (helper, "number = broken\n"),
        (helper, "number = 3\n"),
        (mine, "def make():\n    return 4\n"),
        (folder / "another.py", "pass\n"),
    )

    def made():
        try:
            return called("mine.py:make", function("mine.py:make"))
        except PairError:
            return None

    monkeypatch.setattr(sys, "dont_write_bytecode", False)  # put back after the test
    seen = runs("mine.py:make", made, edits)
    assert [next(seen) for _ in range(5)] == [1, 2, None, 3, 4]
    with pytest.raises(KeyboardInterrupt):
        next(seen)


def test_files_that_another_process_imports_are_watched_too(folder, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)  # put back after the test
    other, further = folder / "apart" / "another.py", set()
    other.parent.mkdir()
    other.write_text("first")

    def read():
        further.add(other)
        return other.read_text()

    seen = runs("mine.py:make", read, Edits((other, "second")), further)
    assert [next(seen), next(seen)] == ["first", "second"]


def test_what_moved_since_the_last_run_is_said(folder, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    text = PAIRS.replace("1.125 * module(x)", "module(x)")
    monkeypatch.setattr("time.sleep", Edits((folder / "mine.py", text)))
    done = check("wrong", *QUICK, "--watch")
    assert done.exit_code == 130
    first, second = done.stdout.split("verdict: FAIL → PASS")
    assert "over budget" in first
    assert "eager output: FAIL at" in second
    assert "nothing moved" not in second


def test_equal_results_have_not_moved():
    from jax_attn import parity

    pair = called("mine.py:right", function("mine.py:right"))
    options = pair.options | {"transforms": ("eager",)}
    one, other = (parity.check(pair.reference, pair.port, pair.inputs, **options) for _ in "ab")
    assert moved(one, other) == []
    strict = one.strict()
    assert all(line.startswith(("verdict", "resolved", "new")) for line in moved(one, strict))
