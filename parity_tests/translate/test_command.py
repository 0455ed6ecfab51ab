"""`jax-attn translate`: the folder that it writes, its statuses, and what it refuses."""

import json
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

from helpers import documents
from helpers.schema_problems import problems
from jax_attn.cli import main
from jax_attn.transfer import load_checkpoint
from jax_attn.translate.rules.table import RULES

MINE = """
import numpy as np
import torch

from jax_attn import parity


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(5, 5) for _ in range(2)])
        self.register_buffer("scale", torch.randn(5))
        self.register_buffer("shift", torch.tensor([2.0, 3.0, 5.0, 7.0, 11.0]), persistent=False)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return {"x": x, "shifted": x + self.shift}


X = np.random.default_rng(0).standard_normal((2, 5)).astype(np.float32)


def right():
    print("made by the user")
    torch.manual_seed(0)
    return Net(), {"x": X}


def doubtful():
    x = X.copy()
    x[1, 2] = np.nan
    return Net(), {"x": x}


def pair():
    return parity.Pair(Net(), None, {"x": X})


def with_port():
    return parity.Pair(Net(), Net(), {"x": X}, strict=True)


def three():
    return Net(), None, {"x": X}


def no_module():
    return 3, {"x": X}


def several():
    return Net(), [{"x": X}]


def raises():
    raise KeyError("no such weight")


class Branching(Net):
    def forward(self, x):
        return x[x > 0] if x.sum() > 0 else x


def branching():
    return Branching(), {"x": X}


class Noisy(Net):
    def forward(self, x):
        return super().forward(x + torch.rand_like(x))


def noisy():
    return Noisy(), {"x": X}


class Dropping(Net):
    def forward(self, x):
        return super().forward(torch.nn.functional.dropout(x, 0.3, self.training))


def dropping():
    return Dropping(), {"x": X}


class Skipping(Net):
    def forward(self, x):
        skipped = self.training and torch.rand([]) < 0.3
        return {"x": x} if skipped else super().forward(x)


def skipping():
    return Skipping(), {"x": X}
"""
FILES = ["README.md", "model.py", "report.md", "weights.safetensors"]


def run(*words: str):
    return CliRunner().invoke(main, ["translate", *words], catch_exceptions=False)


@pytest.fixture(scope="module")
def translated(tmp_path_factory):
    """A folder with the user's file and a translation; and what the command printed."""
    folder, before = tmp_path_factory.mktemp("translated"), [*sys.path]
    (folder / "mine.py").write_text(MINE)
    done = run(f"{folder}/mine.py:right", str(folder / "out"), "--json")
    sys.path[:] = before
    return folder, done


@pytest.fixture(autouse=True)
def here(translated, monkeypatch):
    monkeypatch.chdir(translated[0])
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_a_translation_that_passes_leaves_0_and_data_alone_on_stdout(translated):
    folder, done = translated
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert [*problems(document, "check")] == []
    assert document["verdict"] == "PASS"
    named = ("x", "shifted", "grad input x", "grad layers.1.weight")
    assert {f"jit {name}" for name in named} <= document["tensors"].keys()
    assert done.stderr.splitlines()[-1] == f"PASS: {folder / 'out'} holds the translation"


def test_a_wrong_rule_leaves_1_and_is_explained(monkeypatch):
    monkeypatch.setitem(RULES, "aten.tanh.default", "jnp.tanh(1.01 * self)")
    done = run("mine.py:right", "wrong", "--json")
    document = json.loads(done.stdout)
    assert (done.exit_code, document["verdict"]) == (1, "FAIL")
    assert "1.01 times as large" in document["explanation"]["sentence"]
    assert "--explain" not in json.dumps(document["next"])


def test_the_folder_holds_source_weights_and_report(translated):
    out = translated[0] / "out"
    assert sorted(path.name for path in out.iterdir()) == FILES
    assert "PASS" in (out / "README.md").read_text()
    assert "PASS" in (out / "report.md").read_text()
    kept = {f"layers.{n}.{name}" for n in range(2) for name in ("kernel", "bias")}
    with load_checkpoint(out / "weights.safetensors") as weights:
        assert {*weights} == kept | {"scale"}  # the source itself holds the other buffer


@pytest.mark.slow
def test_the_readme_loads_and_calls_it_without_torch_and_jax_attn(translated, monkeypatch):
    out = translated[0] / "out"
    (block,) = documents.blocks((out / "README.md").read_text())
    code = f"""import sys
sys.modules["torch"] = sys.modules["jax_attn"] = None
{block.code}
shapes = {{name: [*array.shape] for name, array in outputs.items()}}
print(shapes, *variables["scale"][...].tolist())
"""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=out, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    shapes, _, scale = done.stdout.partition("} ")
    assert shapes == "{'x': [2, 5], 'shifted': [2, 5]"
    with load_checkpoint(out / "weights.safetensors") as weights:
        assert [*map(float, scale.split())] == weights["scale"].tolist()


def test_a_folder_is_not_written_twice(translated):
    before = {path.name: path.stat().st_mtime_ns for path in (translated[0] / "out").iterdir()}
    again = run("mine.py:right", "out")
    assert again.exit_code == 2
    assert "nothing is overwritten" in again.stderr
    assert "made by the user" not in again.output
    assert before == {
        path.name: path.stat().st_mtime_ns for path in (translated[0] / "out").iterdir()
    }


@pytest.mark.slow
def test_a_verdict_other_than_pass_has_its_status_and_its_folder(tmp_path):
    done = run("mine.py:doubtful", str(tmp_path / "out"))
    assert done.exit_code == 4, done.output
    assert done.stdout.splitlines()[-1].startswith("INCONCLUSIVE: ")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == FILES
    assert "INCONCLUSIVE" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.slow
def test_a_pair_and_sizes_that_vary_are_taken(tmp_path):
    done = run("mine.py:pair", str(tmp_path / "out"), "--dynamic", "x=B,-")
    assert done.exit_code == 0, done.output
    assert "inputs[2]" in done.stdout
    assert "axis 0 of `x` is B" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.slow
def test_a_partial_translation_is_written_without_a_verdict(tmp_path):
    done = run("mine.py:noisy", str(tmp_path / "out"), "--partial", "--json")
    assert done.exit_code == 2, done.output
    (problem,) = json.loads(done.stdout)["unsupported"]
    assert (problem["kind"], problem["operator"]) == ("random", "aten.rand_like.default")
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == ["README.md", "model.py", "weights.safetensors"]
    readme = (tmp_path / "out" / "README.md").read_text()
    assert "torch.rand_like(x)" in readme
    assert "PASS" not in readme


@pytest.mark.slow
def test_training_mode_is_compared_or_its_absence_is_said(tmp_path):
    done = run("mine.py:dropping", str(tmp_path / "dropping"), "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert [*problems(document, "check")] == []
    assert {"jit, training x", "jit, training grad input x"} <= document["tensors"].keys()
    done = run("mine.py:skipping", str(tmp_path / "skipping"), "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert "training-left-out" in {each["kind"] for each in document["findings"]}
    assert not [name for name in document["tensors"] if "training" in name]
    line = 'return {"x": x} if skipped else super().forward(x)'
    readmes = [(tmp_path / name / "README.md").read_text() for name in ("dropping", "skipping")]
    assert [line in readme for readme in readmes] == [False, True]


@pytest.mark.slow
def test_a_folder_of_transformers_is_translated(tmp_path):
    import transformers as hf

    config = hf.CLIPTextConfig(
        hidden_size=12,
        intermediate_size=14,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=29,
        max_position_embeddings=17,
        bos_token_id=27,
        eos_token_id=28,
    )
    torch.manual_seed(0)
    hf.CLIPTextModel(config).save_pretrained(tmp_path / "in")
    done = run(str(tmp_path / "in"), str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == FILES
    assert "axis 1 of `input_ids` is T" in (tmp_path / "out" / "README.md").read_text()


REFUSED = {
    "a part of a function": (("right", "--part", "layers"), "--part needs a CHECKPOINT"),
    "a random operator": (("noisy",), "draws random numbers"),
    "a port": (("with_port",), "expected None, got a port"),
    "arguments of a check": (("with_port",), "takes no strict"),
    "three values": (("three",), "expected (torch module, inputs)"),
    "no module": (("no_module",), "expected a torch.nn.Module, got int"),
    "a list of inputs": (("several",), "expected a tuple or a dict of arrays, got list"),
    "an error of the file": (("raises",), "no such weight"),
    "a branch on numbers": (("branching",), "torch.export"),
    "an axis that there is not": (("right", "--dynamic", "x=B,-,T"), "x, axis 2"),
    "an input that there is not": (("right", "--dynamic", "y=B"), "y: dynamic names no tensor"),
    "axes without names": (("right", "--dynamic", "x=1"), "a name for each axis"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_translated_is_refused(name, tmp_path):
    (function, *options), message = REFUSED[name]
    done = run(f"mine.py:{function}", str(tmp_path / "out"), *options)
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert [*tmp_path.iterdir()] == []
