"""`jax-attn port` and the config.json beside: as it was, but for the dtype that was asked for."""

import json

import pytest

from helpers.transfer.port_cases import ported
from helpers.transfer.torch_checkpoints import saved, tensors

CONFIG = {"model_type": "bert", "hidden_size": 30, "num_attention_heads": 6, "other": [1e-12, {}]}
OTHER = "float64"
SAID = {
    "now": ({"dtype": "float32"}, {"dtype": OTHER}),
    "of old": ({"torch_dtype": "float32"}, {"torch_dtype": OTHER}),
    "twice": (
        {"torch_dtype": "float32", "dtype": "bfloat16"},
        {"torch_dtype": OTHER, "dtype": OTHER},
    ),
    "already": ({"dtype": OTHER}, {"dtype": OTHER}),
    "no dtype": ({}, {}),
}
MAPPED = ("--layout", "jax_attn.transfer:LINEAR")


def carried(tmp_path, config, *options):
    """(the config beside the source, that beside the port), as bytes."""
    (tmp_path / "source").mkdir()
    source = saved(tmp_path / "source", tensors({"weight": (7, 3)}), config)
    ported(source, tmp_path / "flax", "flax", *MAPPED, *options)
    return [(tmp_path / at / "config.json").read_bytes() for at in ("source", "flax")]


@pytest.mark.parametrize("name", SAID)
def test_the_config_names_the_dtype_that_was_written(tmp_path, name):
    before, after = SAID[name]
    theirs, ours = carried(tmp_path, CONFIG | before, "--dtype", OTHER)
    assert json.loads(ours) == CONFIG | after
    assert (theirs == ours) == (before == after)


def test_without_another_dtype_it_stays_byte_for_byte(tmp_path):
    theirs, ours = carried(tmp_path, CONFIG | {"torch_dtype": "float32"})
    assert theirs == ours
