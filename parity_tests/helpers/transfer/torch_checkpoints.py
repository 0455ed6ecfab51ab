"""Small checkpoints on disk, named as torch's modules are, and their attention verified."""

import json

import ml_dtypes  # noqa: F401  NumPy's bfloat16
import numpy as np
from click.testing import CliRunner

from jax_attn.cli import main
from jax_attn.transfer import save_checkpoint

D, N, K, H = 30, 6, 3, 5
PASS, FAIL, USAGE, INCONCLUSIVE = 0, 1, 2, 4


def verify(*args):
    return CliRunner(env={"COLUMNS": "100"}).invoke(main, ["verify", *map(str, args)])


def run(*args):
    return CliRunner().invoke(main, ["verify", "--attention", *map(str, args)])


def document(*args, status=PASS):
    done = run(*args, "--json")
    assert done.exit_code == status, done.output
    return json.loads(done.stdout)


def said(case, kind):
    """The sentences of a kind in a case of a report."""
    return [finding["sentence"] for finding in case["findings"] if finding["kind"] == kind]


def tensors(shapes, dtype="float32", seed=0):
    """Weights drawn so that attention is not uniform; biases half as large."""
    rng = np.random.default_rng(seed)
    return {
        key: (rng.standard_normal(s) * (0.5 if len(s) == 1 else 1.2 * s[-1] ** -0.5)).astype(dtype)
        for key, s in shapes.items()
    }


def linears(prefix, names, rows=(D, D, D, D), columns=(D, D, D, D), bias=True):
    made = {}
    for name, r, c in zip(names.split(), rows, columns, strict=True):
        made |= {f"{prefix}.{name}.weight": (r, c)}
        made |= {f"{prefix}.{name}.bias": (r,)} if bias else {}
    return made


def bert(layers=1):
    names = "self.query self.key self.value output.dense"
    shapes = [linears(f"encoder.layer.{i}.attention", names) for i in range(layers)]
    return {key: shape for layer in shapes for key, shape in layer.items()}


def llama(bias=False):
    rows = (D, K * H, K * H, D)
    return linears("layers.0.self_attn", "q_proj k_proj v_proj o_proj", rows, bias=bias)


def saved(folder, arrays, config=None):
    save_checkpoint(folder / "model.safetensors", arrays)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder / "model.safetensors"
