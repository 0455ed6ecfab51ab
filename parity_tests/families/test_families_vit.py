"""ViT: transformers' own blocks and files against ours, through the table in both spellings."""

from functools import cache

import numpy as np
import pytest
import torch
from flax import nnx
from transformers import ViTConfig, ViTModel
from transformers.models.vit.modeling_vit import ViTAttention

from helpers.dtype_rows import in_dtypes
from helpers.families.family_cases import BlockPair
from helpers.families.family_mistakes import assert_seen, otherwise, swapped
from jax_attn import transfer
from jax_attn.families.vit import VIT
from jax_attn.transfer import Layout, Sizes, TransferError

SIZES = {"hidden_size": 30, "num_attention_heads": 6, "attn_implementation": "eager"}
WHOLE = SIZES | {
    "num_hidden_layers": 2,
    "intermediate_size": 37,
    "image_size": 14,
    "patch_size": 7,
    "num_channels": 5,
    "encoder_stride": 7,
}
PLACE = "layers.1.attention"
CASES = {
    "vit": ViTConfig(**SIZES),
    "vit without biases": ViTConfig(**SIZES, qkv_bias=False),
    "vit of another head_dim": ViTConfig(**SIZES, head_dim=6),
}


@cache
def block(name, dtype="float32"):
    torch.manual_seed(0)
    reference = ViTAttention(CASES[name])
    return BlockPair.of(
        reference, CASES[name], PLACE, lambda module, x, mask: module(x, mask)[0], dtype
    )


@in_dtypes("name", ("vit", "vit of another head_dim"), long=("vit without biases",))
def test_a_block_agrees_with_transformers(name, dtype):
    block(name, dtype).check().raise_for_status()


MISTAKES = {
    "query and key swapped": swapped("q_proj", "k_proj"),
    "key and value swapped": swapped("k_proj", "v_proj"),
    "causal": otherwise(is_causal=True),
    "other heads of as many numbers": otherwise(sizes=Sizes(5, 5, 6)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake):
    assert_seen(MISTAKES[mistake], block("vit"))


def test_both_spellings_at_once_are_ambiguous(tmp_path):
    model = ViTModel(ViTConfig(**WHOLE))
    model.save_pretrained(tmp_path)
    file = dict(transfer.load_checkpoint(tmp_path / "model.safetensors"))
    name = "layers.0.attention.q_proj.weight"
    both = file | {name: transfer.as_numpy(model.state_dict()[name])}
    layout = VIT.model(model.config.to_dict(), both)
    with pytest.raises(TransferError, match="ambiguous") as caught:
        layout.shapes({k: a.shape for k, a in both.items()}, Sizes(6, 6, 5))
    (problem,) = caught.value.problems
    assert name in problem.text


def test_the_patches_kernel_embeds_patches():
    """nnx.Conv with the moved weight gives what torch's convolution does, exactly."""
    rng = np.random.default_rng(0)
    conv = torch.nn.Conv2d(3, 13, (5, 2), stride=(5, 2), bias=False)
    with torch.no_grad():
        conv.weight.copy_(torch.from_numpy(rng.integers(-9, 9, conv.weight.shape)))
    image = rng.integers(-9, 9, (2, 3, 10, 8)).astype(np.float32)
    table = Layout(transfer.row("weight", "kernel", transfer.conv))
    port = nnx.eval_shape(
        lambda: nnx.Conv(
            3, 13, (5, 2), strides=(5, 2), padding="VALID", use_bias=False, rngs=nnx.Rngs(0)
        )
    )
    transfer.load(port, conv.state_dict(), table)
    got = port(np.moveaxis(image, 1, -1))
    want = conv(torch.from_numpy(image)).detach().numpy()
    assert np.array_equal(np.moveaxis(got, -1, 1), want)
    assert np.abs(want).max() > 0
