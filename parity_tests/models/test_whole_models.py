"""Whole models against transformers': every family, what each head gives, mistakes that fail."""

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from helpers.families.whole_models import (
    CASES,
    MISTAKES,
    ROUNDED,
    USUAL,
    SmallModel,
    assert_gradients,
    attention,
)
from jax_attn import models, transfer
from jax_attn.parity.judge.compare import Verdict
from jax_attn.transfer import TransferError
from jax_attn.transfer.table import resolve

# Which of two heads is meant, a config does not say.
OF_NO_CONFIG = ("bert, a class for each token",)


@pytest.fixture(scope="module", params=CASES)
def small(request, tmp_path_factory):
    return SmallModel(request.param, tmp_path_factory.mktemp("model"))


def test_outputs_agree_and_mistakes_fail(small):
    """By a mask, by lengths and by a cache, with padding on both sides; mistakes by a mask."""
    assert small.judged(small.pair.port) is Verdict.PASS
    mistakes = MISTAKES.get(small.name, {})
    found = {words: small.by_mask(small.mistaken(change)) for words, change in mistakes.items()}
    assert {words for words, verdict in found.items() if verdict is not Verdict.FAIL} == set()


@pytest.mark.parametrize("name", USUAL)
def test_gradients_of_every_parameter(name, tmp_path):
    """Of some cases; of all, and in bfloat16, in test_every_gradient.py."""
    assert_gradients(SmallModel(name, tmp_path).pair)


def test_falcons_slopes_are_rounded_as_transformers_rounds_them(tmp_path):
    """Its float32 is the one that ours is near; float64, which rounds none of them, is not."""
    small = SmallModel(ROUNDED, tmp_path)
    assert small.config
    given = small.pair.inputs
    tokens, mask = (torch.from_numpy(given[name]) for name in ("tokens", "mask"))
    ours = small.pair.port_outputs(small.pair.port, given["tokens"], given["mask"])["logits"]
    unrounded = small.mistaken(attention(bias=lambda a: a.bias._replace(rounded=False)))
    other = small.pair.port_outputs(unrounded, given["tokens"], given["mask"])["logits"]
    with torch.no_grad():
        theirs = small.pair.reference_outputs(small.pair.reference, tokens, mask)["logits"].numpy()
    assert np.abs(other - theirs).max() > 100 * np.abs(ours - theirs).max()
    result = small.pair.check()
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "casts to bfloat16 at modeling_falcon.py" in result.reasons[0]
    assert small.of("bfloat16").check().verdict is Verdict.PASS


def test_back_to_both_sides_bit_for_bit(small, tmp_path):
    """What is written for torch is the file that was read; what is written for Flax loads."""
    file = dict(transfer.load_checkpoint(small.folder)) if small.config else {}
    models.save(small.pair.port, tmp_path / "torch")
    models.save(small.pair.port, tmp_path / "flax", to="flax")
    written = dict(transfer.load_checkpoint(tmp_path / "torch"))
    passed_over = resolve.passed(small.pair.layout.passed_over, file)
    assert file.keys() - written.keys() <= passed_over.keys()
    for key, tensor in written.items():
        assert tensor.tobytes() == file[key].tobytes(), key
    again = models.load(tmp_path / "flax")
    for path, array in transfer.flatten(small.pair.port).items():
        assert np.asarray(array).tobytes() == np.asarray(transfer.flatten(again)[path]).tobytes()


def test_every_parameter_lies_where_it_is_asked_to(tmp_path):
    """By one sharding for all, and by a function of path and shape."""
    small = SmallModel("llama", tmp_path)
    assert small.config
    mesh = jax.make_mesh((1,), ("data",))
    everywhere, rows = (NamedSharding(mesh, P(*axes)) for axes in ((), ("data",)))
    asked = {}

    def by_path(path, shape):
        asked[path] = shape
        return rows if path.endswith("embedding") else everywhere

    for sharding in (everywhere, by_path):
        model = models.load(small.folder, sharding=sharding)
        for path, array in transfer.flatten(model).items():
            wanted = everywhere if sharding is everywhere else by_path(path, array.shape)
            assert array.sharding == wanted, path
    assert asked == {path: a.shape for path, a in transfer.flatten(small.pair.port).items()}


def test_untrained_models_have_the_same_parts(small):
    """Of a config alone: every parameter of the file, of the same shape."""
    if small.name in OF_NO_CONFIG:
        with pytest.raises(TransferError, match="architectures"):
            models.from_config(small.config, rngs=nnx.Rngs(0))
        return
    model = models.from_config(small.config, rngs=nnx.Rngs(0))
    loaded = transfer.flatten(small.pair.port)
    assert {p: a.shape for p, a in transfer.flatten(model).items()} == {
        path: array.shape for path, array in loaded.items()
    }
