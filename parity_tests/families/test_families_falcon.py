"""Falcon's three forms, rotary and ALiBi: transformers' own attention and files against ours."""

from functools import cache

import numpy as np
import pytest
import torch
from transformers import FalconConfig, FalconModel
from transformers.models.falcon.modeling_falcon import (
    FalconAttention,
    FalconRotaryEmbedding,
    build_alibi_tensor,
)

from helpers.dtype_rows import in_dtypes
from helpers.families import family_mistakes as mistakes
from helpers.families.decoder_cases import Turned, drawn, turning
from helpers.families.family_cases import BlockPair, T
from jax_attn.attention import alibi
from jax_attn.families.falcon import FALCON
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.compare import Verdict
from jax_attn.parity.run.inputs_and_runs import Inputs, Run
from jax_attn.parity.run.reference import Reference
from jax_attn.transfer import grouped, heads, heads_in, inward, linear, packed, row
from jax_attn.transfer.table.layouts import QKV_BIASES, QKV_KERNELS

N, K, H = 6, 2, 10
SIZES = {
    "vocab_size": 17,
    "hidden_size": N * H,
    "num_attention_heads": N,
    "ffn_hidden_size": 37,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}
LAST = "transformer.h.1.self_attention"
GROUPED = {"new_decoder_architecture": True, "num_kv_heads": K}
EACH = {"multi_query": False}
ALIBI = {"alibi": True, "bias": True, **EACH}
# name -> what the config says besides
CASES = {
    "one key/value head": {},
    "one key/value head, biases": {"bias": True},
    "grouped": GROUPED,
    "grouped, biases": {"bias": True, **GROUPED},
    "each its own": EACH,
    "each its own, biases, scaled": {
        "bias": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
        **EACH,
    },
    "alibi": ALIBI,
    "alibi, one key/value head": {"alibi": True},
}

USUAL = ("one key/value head, biases", "grouped, biases", "alibi")


@cache
def block(name, dtype="float32") -> BlockPair:
    config = FalconConfig(**SIZES, **CASES[name])

    def turned(module, x, mask, positions):
        angles = FalconRotaryEmbedding(config)(x, positions)  # see `Turned`
        return module(x, None, mask, position_embeddings=angles)[0]

    def biased(module, x, mask):
        real = (mask[:, 0, -1] > torch.finfo(x.dtype).min / 2).long()
        return module(x, build_alibi_tensor(real, N, x.dtype), mask)[0]

    kind, theirs = (BlockPair, biased) if config.alibi else (Turned, turned)
    return kind.of(drawn(FalconAttention(config, layer_idx=1)), config, LAST, theirs, dtype)


@pytest.mark.slow
@in_dtypes("name", USUAL, long=[name for name in CASES if name not in USUAL])
def test_a_block_agrees_with_transformers(name, dtype):
    block(name, dtype).check().raise_for_status()


@pytest.mark.parametrize("count", [N, 12])
def test_alibi_in_transformers_is_ours_rounded_twice_to_bfloat16(count):
    """Slope and product, even in a float32 model; up to one number a head, which no softmax sees.

    Up to 8 heads, and in short texts, nothing is rounded: the slopes are powers of two.
    """
    theirs = build_alibi_tensor(torch.ones(1, T), count, torch.float32).numpy()
    ours = np.asarray(alibi(count, T), np.float64)
    ours -= ours[..., :1]
    u = 2.0**-8  # half a unit in the last place of 8 bits, relative
    assert (np.abs(theirs - ours) <= ((1 + u) ** 2 - 1) * ours).all()
    assert (theirs == ours).all() == (count == N)


@pytest.mark.parametrize(("options", "agree"), [({}, True), (ALIBI, False)], ids=str)
def test_in_transformers_a_whole_eager_model_adds_alibi_twice(options, agree):
    """To the mask and to the scores: a fault that its other path, and its block alone, lack."""
    kinds = ({**SIZES, **options, "attn_implementation": kind} for kind in ("eager", "sdpa"))
    models = (drawn(FalconModel(FalconConfig(**kind))).eval() for kind in kinds)
    given = Inputs.of({"tokens": np.arange(T)[None]}, np.float32)
    eager, sdpa = (Reference(model, last_state, given) for model in models)
    judge = Prepared(sdpa, "float32", gradients=False)
    (report,) = judge.compare(Run(eager.outputs("float32"), {}, {}), "eager")
    assert (report.verdict is Verdict.PASS) == agree


def last_state(model, tokens):
    return model(tokens).last_hidden_state


BY_TURNS = mistakes.but(
    row("query_key_value.weight", QKV_KERNELS, grouped, inward),
    row("query_key_value.bias", QKV_BIASES, grouped),
)
ONE_AFTER_ANOTHER = mistakes.but(
    row("query_key_value.weight", QKV_KERNELS, packed, linear, heads),
    row("query_key_value.bias", QKV_BIASES, packed, heads),
)
UNTURNED = mistakes.but(row("dense.weight", "out_proj.kernel", heads_in))
# what is wrong -> (the case, how its port is made)
MISTAKES = {
    "grouped read one after another": ("grouped", ONE_AFTER_ANOTHER),
    "each its own read one after another": ("each its own", ONE_AFTER_ANOTHER),
    "key and value swapped": ("grouped", mistakes.swapped("k_proj", "v_proj")),
    "the one key and value swapped": ("one key/value head", mistakes.swapped("k_proj", "v_proj")),
    "query and key swapped": ("each its own", mistakes.swapped("q_proj", "k_proj")),
    "a square weight transposed": ("one key/value head", UNTURNED),
    "another base": ("grouped", turning(base=1.01e4)),
    "another scale": ("grouped", mistakes.otherwise(scale=11**-0.5)),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake):
    name, mistaken = MISTAKES[mistake]
    mistakes.assert_seen(mistaken, block(name))


def test_one_key_and_value_lie_behind_all_queries_either_way():
    """With one key/value head, a group is all there is: both tables read the same."""
    right = block("one key/value head, biases")
    got = BY_TURNS(right).port
    for part in ("q_proj", "k_proj", "v_proj"):
        want = getattr(right.port, part).kernel[...]
        assert np.array_equal(getattr(got, part).kernel[...], want)


# --- configs --------------------------------------------------------------------------------------


def test_what_a_config_does_not_say_is_transformers_default():
    made = FALCON.traits({"model_type": "falcon"}, LAST)
    assert made == FALCON.traits(FalconConfig().to_dict(), LAST)
    assert made.sizes == (71, 1, 64)
