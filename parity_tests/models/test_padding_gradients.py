"""What reading the padding token gives its vector: no gradient where torch has a padding_idx."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers as tf
from flax import nnx

from helpers.attention.meshes import moved
from helpers.families.whole_models import GEMMA2, GPT2, GROUPED, IDS, LAYERS, OPT, PLAIN, D
from jax_attn import models

PAD = 3
# transformers' class -> what its config says, and whether reading PAD gives its vector a gradient
CASES = {
    "BertForMaskedLM": (PLAIN, False),
    "RobertaForMaskedLM": (PLAIN, False),
    "OPTForCausalLM": (OPT, False),
    "PhiForCausalLM": (PLAIN, False),
    "LlamaForCausalLM": (GROUPED, False),
    "Gemma2ForCausalLM": (GEMMA2, False),
    "GPT2LMHeadModel": (GPT2, True),
    "GPTNeoXForCausalLM": (PLAIN, True),
}
OTHERS = [(name, pad) for name in ("BertForMaskedLM", "LlamaForCausalLM") for pad in (None, -1)]
"""Classes and padding tokens: none, and the last of the table, as torch counts."""
TOKENS = np.array([[5, PAD, 11, 7], [PAD, 13, 17, 40]])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "pad"), [*((name, PAD) for name in CASES), *OTHERS])
def test_the_table_of_tokens_learns_as_torchs_does(name, pad, tmp_path):
    """The padding token is seen here: nothing masks it."""
    says, is_read = CASES[name]
    kind = getattr(tf, name)
    torch.manual_seed(0)
    reference = kind(kind.config_class(**(IDS | says | {"pad_token_id": pad}))).eval()
    reference.save_pretrained(tmp_path)
    weights = np.random.default_rng(0).standard_normal((*TOKENS.shape, 41)).astype(np.float32)
    (reference(torch.from_numpy(TOKENS)).logits * torch.from_numpy(weights)).sum().backward()

    @nnx.jit
    def gradients(model):
        return nnx.grad(lambda m: (m(jnp.asarray(TOKENS)).logits * weights).sum())(model)

    ours = gradients(models.load(tmp_path))
    near = gradients(moved(models.load(tmp_path), unit=2.0**-24))
    tables = [("token_embedding", reference.get_input_embeddings())]
    if name == "RobertaForMaskedLM":
        tables.append(("position_embedding", reference.roberta.embeddings.position_embeddings))
    # Each addition errs as parameters moved by their last bit: a product adds up at most D numbers,
    # attention those of each token, and both passes do.
    additions = 2 * (LAYERS * (8 * D + TOKENS.shape[1] + 1) + D)
    for table, theirs in tables:
        gradient = theirs.weight.grad.numpy()
        found, moves = (np.asarray(getattr(g, table).embedding[...]) for g in (ours, near))
        allowed = additions * np.abs(moves - found).max()
        assert np.abs(found - gradient).max() <= allowed
        # A row that has no gradient, or one too many, is seen.
        rows = np.abs(gradient).max(axis=1)
        assert allowed < rows[rows > 0].min()
    if name in ("PhiForCausalLM", "LlamaForCausalLM", "GPTNeoXForCausalLM"):  # of untied heads
        assert gradient[PAD].any() == (is_read or pad != PAD)
