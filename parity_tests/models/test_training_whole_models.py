"""A whole model of two layers trains as torch's does: AdamW, warm-up, a clipped norm."""

import numpy as np
import pytest
from torch.optim import AdamW, lr_scheduler

from jax_attn import parity
from jax_attn.parity.judge.compare import Verdict
from jax_attn.porting.verify.model_pair import ModelPair

B, T, BATCHES, STEPS, WARM_UP = 3, 7, 2, 4, 3


def batches(pair: ModelPair) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    names = "tokens", "target"
    vocab_size = pair.traits.embedding.vocab_size
    return [{k: rng.integers(1, vocab_size, (B, T)) for k in names} for _ in range(BATCHES)]


def trained(pair: ModelPair) -> parity.Result:
    return parity.check_training(
        pair.reference,
        pair.port,
        batches(pair),
        layout=pair.layout,
        optimizer=lambda module: AdamW(module.parameters(), 3e-3, weight_decay=0.1),
        loss="cross_entropy",
        schedule=lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.2, total_iters=WARM_UP),
        clip_norm=0.5,
        steps=STEPS,
        reference_call=lambda module, tokens: module(tokens).logits,
        port_call=lambda module, tokens: module(tokens).logits,
    )


@pytest.mark.slow
def test_a_whole_model_trains_alike(small):
    result = trained(small("gpt2").pair)
    assert result.verdict is Verdict.PASS, str(result)
    labels = {t.label for t in result.tensors}
    assert "moved token_embedding.embedding" in labels, "the table that the head shares"
