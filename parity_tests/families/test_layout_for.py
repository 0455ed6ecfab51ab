"""The table of a known family, by a folder or a config; renamed on either side."""

import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from jax_attn import parity
from jax_attn.families import FAMILIES
from jax_attn.transfer import TransferError, layout_for, save_checkpoint

CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 23,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
}
KEY = "model.layers.0.self_attn.q_proj.weight"


def test_of_a_config():
    layout = layout_for(CONFIG)
    assert layout.row_of(KEY) == f"{KEY} -> layers.0.attention.q_proj.kernel [linear heads]"
    assert layout_for(transformers.LlamaConfig(**CONFIG).to_dict()).row_of(KEY)


def test_of_a_folder_whose_keys_have_no_root(tmp_path):
    torch.manual_seed(0)
    transformers.LlamaModel(transformers.LlamaConfig(**CONFIG)).save_pretrained(tmp_path)
    rootless = KEY.removeprefix("model.")
    assert layout_for(tmp_path).row_of(rootless).startswith(f"{rootless} -> layers.0.attention")


def test_an_unknown_family_is_refused_with_the_command_that_helps(tmp_path):
    with pytest.raises(TransferError, match=r"(?s)llama.*got 'lama'.*inspect CHECKPOINT --table"):
        layout_for({"model_type": "lama"})
    save_checkpoint(tmp_path / "model.safetensors", {"a": np.zeros(3, np.float32)})
    with pytest.raises(TransferError, match="got none, and no architectures"):
        layout_for(tmp_path)


def test_torch_names_are_replaced_as_flax_names_are():
    layout = layout_for(CONFIG).renamed_torch({"self_attn": "attn"})
    key = KEY.replace("self_attn", "attn")
    assert layout.row_of(key).startswith(f"{key} -> ")
    with pytest.raises(ValueError, match="renamed_torch: expected names among"):
        layout.renamed_torch({"self_attn": "attn"})


def test_check_says_so_where_a_family_is_passed():
    says = r"layout: expected a Layout, got Family; .* transfer\.layout_for\(PATH\) returns that"
    reference, port = torch.nn.Linear(2, 3), nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=says):
        parity.check(reference, port, (np.zeros((1, 2)),), layout=FAMILIES["llama"])
