"""What a port wrote is loaded into any module whose paths and shapes are the same."""

import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from flax import nnx

from jax_attn.cli import main
from jax_attn.transfer import TransferError, load_flax, save_checkpoint

TABLE = """
from jax_attn.transfer import Layout, linear, row

LAYOUT = Layout(row("up.weight", "up.kernel", linear), row("up.bias", "up.bias"))
"""


@pytest.fixture
def ported(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    arrays = {"up.weight": rng.standard_normal((7, 5)), "up.bias": rng.standard_normal(7)}
    arrays = {key: a.astype(np.float32) for key, a in arrays.items()}
    save_checkpoint(tmp_path / "model.safetensors", arrays)
    (tmp_path / "up_table.py").write_text(TABLE)
    monkeypatch.chdir(tmp_path)
    port("model.safetensors", "flax", "flax")
    return tmp_path / "flax", arrays


def port(source, target, side):
    options = "--layout up_table:LAYOUT --num-heads 1 --head-dim 5 --to"
    result = CliRunner().invoke(main, ["port", source, target, *options.split(), side])
    assert result.exit_code == 0, result.output


class Model(nnx.Module):
    def __init__(self, width=7, *, rngs):
        self.up = nnx.Linear(5, width, rngs=rngs)


@pytest.mark.parametrize("abstract", [False, True])
def test_every_parameter_is_written(ported, abstract):
    folder, arrays = ported
    make = lambda: Model(rngs=nnx.Rngs(0))  # noqa: E731
    model = nnx.eval_shape(make) if abstract else make()
    load_flax(model, folder)
    assert jnp.array_equal(model.up.kernel[...], arrays["up.weight"].T)
    assert jnp.array_equal(model.up.bias[...], arrays["up.bias"])


def test_what_does_not_fit_is_told_at_once_and_nothing_written(ported):
    folder, _ = ported
    model = Model(6, rngs=nnx.Rngs(0))
    before = model.up.kernel[...]
    with pytest.raises(TransferError) as told:
        load_flax(model, folder)
    assert {p.name for p in told.value.problems} == {"up.kernel", "up.bias"}
    assert jnp.array_equal(model.up.kernel[...], before)


def test_the_torch_side_is_refused(ported, tmp_path):
    folder, _ = ported
    port(str(folder), "back", "torch")
    with pytest.raises(TransferError, match="expected the Flax side"):
        load_flax(Model(rngs=nnx.Rngs(0)), tmp_path / "back")
