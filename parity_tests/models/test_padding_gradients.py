"""What reading the padding token gives its vector: no gradient where torch has a padding_idx."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers as tf
from flax import nnx

from helpers.families.whole_models import GEMMA2, GPT2, GROUPED, IDS, OPT, PLAIN
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
    model = models.load(tmp_path)
    weights = np.random.default_rng(0).standard_normal((*TOKENS.shape, 41)).astype(np.float32)
    (reference(torch.from_numpy(TOKENS)).logits * torch.from_numpy(weights)).sum().backward()
    ours = nnx.grad(lambda m: (m(jnp.asarray(TOKENS)).logits * weights).sum())(model)
    tables = [(ours.token_embedding, reference.get_input_embeddings())]
    if name == "RobertaForMaskedLM":
        tables.append((ours.position_embedding, reference.roberta.embeddings.position_embeddings))
    for table, theirs in tables:
        gradient = theirs.weight.grad.numpy()
        scale = np.abs(gradient).max()
        np.testing.assert_allclose(table.embedding[...], gradient, rtol=1e-4, atol=1e-5 * scale)
    if name in ("PhiForCausalLM", "LlamaForCausalLM", "GPTNeoXForCausalLM"):  # of untied heads
        assert gradient[PAD].any() == (is_read or pad != PAD)
