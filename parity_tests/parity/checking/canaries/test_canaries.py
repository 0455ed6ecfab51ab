"""What a check says of inputs that could not show a bug: never PASS."""

import numpy as np
import pytest
import torch
from flax import nnx

from helpers.parity.findings import kinds, sentences
from jax_attn import MultiHeadAttention
from jax_attn.parity import Verdict, check
from jax_attn.parity.judge.result import Result
from jax_attn.transfer import LAYOUTS, LINEAR, load

B, T, N, D = 2, 7, 3, 15
DRAWN = np.random.default_rng(0).standard_normal
CAUSAL = np.tri(T, dtype=bool)


def both(dtype: str):
    reference = torch.nn.MultiheadAttention(D, N, batch_first=True).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in reference.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * D**-0.5)
    reference = reference.to(getattr(torch, dtype))
    port = MultiHeadAttention(D, N, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))
    load(port, reference.state_dict(), LAYOUTS["torch_mha"])
    return reference, port


def run(x: np.ndarray, dtype: str = "float32", gradients: bool = True, **masks) -> Result:
    def torch_call(module, x, **masks):
        hidden = {name: ~mask for name, mask in masks.items()}
        torch_masks = {"attn_mask": hidden.get("allowed"), "key_padding_mask": hidden.get("real")}
        return module(x, x, x, need_weights=False, **torch_masks)[0]

    def port_call(module, x, allowed=None, real=None):
        masks = [] if allowed is None else [allowed[None, None]]
        masks += [] if real is None else [real[:, None, None]]
        mask = masks[0] if len(masks) == 1 else masks[0] & masks[1] if masks else None
        return module(x, mask=mask)

    calls = {"reference_call": torch_call, "port_call": port_call}
    options = {"dtype": dtype, "gradients": gradients, "transforms": ("jit",)}
    return check(*both(dtype), {"x": x} | masks, **calls, **options)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drawn_inputs_under_a_mask_that_matters_pass(dtype):
    result = run(DRAWN((B, T, D)), dtype, allowed=CAUSAL)
    assert result.verdict is Verdict.PASS, str(result)


@pytest.mark.slow
def test_a_blind_check_is_inconclusive_and_says_every_reason():
    """Uniform inputs, a mask that hides nothing, as many queries as heads."""
    result = run(np.ones((B, N, D)), allowed=np.ones((N, N), bool))
    assert result.verdict is Verdict.INCONCLUSIVE
    assert {*kinds(result, "doubt")} >= {
        "ignored-mask",
        "scale",
        "other-keys",
        "softmax-over-queries",
        "mixed-heads",
        "stopped-gradient",
    }
    (mixed,) = sentences(result, "mixed-heads")
    assert "queries and heads mixed up, because T is the number of heads" in mixed
    assert "to reveal it, use T other than N, or inputs drawn at random" in mixed
    assert "use a mask that hides some keys" in "".join(sentences(result, "ignored-mask"))


BLIND = {
    "a mask over keys that are all alike": (
        {"x": np.broadcast_to(DRAWN((B, 1, D)), (B, T, D)), "allowed": CAUSAL},
        "ignored-mask",
        "is ignored, because the hidden keys would not change the outputs",
    ),
    "of two masks one that hides nothing": (
        {"x": DRAWN((B, T, D)), "allowed": CAUSAL, "real": np.ones((B, T), bool)},
        "ignored-mask",
        "that mask 'real' is ignored, because it is True everywhere",
    ),
    "attention that is flat in bfloat16": (
        {"x": 2.0**-8 * DRAWN((B, T, D)), "dtype": "bfloat16"},
        "scale",
        "a scale of the scores twice too large",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BLIND)
def test_what_hides_a_bug_is_named(name):
    arguments, kind, doubt = BLIND[name]
    result = run(gradients=False, **arguments)
    assert result.verdict is not Verdict.PASS
    assert any(doubt in sentence for sentence in sentences(result, kind))


def test_a_module_without_attention_is_not_doubted():
    reference = torch.nn.Linear(D, N)
    port = nnx.Linear(D, N, rngs=nnx.Rngs(0))
    load(port, reference.state_dict(), LINEAR)
    result = check(reference, port, (np.ones((B, D)),), layout=LINEAR, transforms=("jit",))
    assert result.verdict is Verdict.PASS, str(result)
    assert kinds(result) == ["no-softmax", "scope"]
