"""Rows of several texts: each is computed as if it were alone, in every family."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jax_attn import models
from jax_attn.attention.checks import ArgumentError
from jax_attn.parity.checking.judging import judge_port
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.compare import Verdict
from jax_attn.parity.run.inputs_and_runs import Inputs
from jax_attn.parity.run.port import Port
from jax_attn.parity.run.reference import Reference

SPANS = (5, 2, 7)  # the one in the middle is short: its first token is not its own last one
TOKENS = np.random.default_rng(0).integers(4, 41, (2, sum(SPANS)))
IDS = np.repeat([7, 0, 3], SPANS)
SEGMENTS = np.stack([IDS, np.where(IDS == 3, 0, IDS)])  # of the second row, the last two are one
AGAIN = np.concatenate([np.arange(n) for n in SPANS])
FOLLOWING, ONE = np.arange(sum(SPANS)), np.zeros_like(SEGMENTS)


def alone(module, tokens):
    """The logits of each text, from a call of its own."""
    first = [module(part).logits for part in tokens[:1].split(SPANS, dim=1)]
    second = [module(part).logits for part in tokens[1:].split((5, 9), dim=1)]
    return torch.cat([torch.cat(first, 1), torch.cat(second, 1)])


def as_transformers_packs(module, tokens):
    """The logits of a row that transformers cuts by its positions."""
    rows = np.stack([AGAIN, np.concatenate([np.arange(5), np.arange(9)])])
    return module(tokens, position_ids=torch.tensor(rows), use_cache=False).logits


CALLS = {
    **dict.fromkeys(("bert", "roberta", "bloom", "falcon, alibi", "opt", "mistral"), alone),
    **dict.fromkeys(("gpt2", "llama", "gemma2", "phi"), as_transformers_packs),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_texts_of_a_row_do_not_see_each_other(name, small):
    """Positions begin again by themselves. As one text, the row fails."""
    pair = small(name).pair
    given = Inputs.of({"tokens": TOKENS}, np.float32)
    reference = Reference(pair.reference, CALLS[name], given)
    prepared = Prepared(reference, "float32", gradients=False)

    def judged(segments):
        port = Port(pair.port, lambda m, tokens: m(tokens, segments=segments).logits, given)
        return judge_port(prepared, port, ("jit",), to_torch=None).verdict

    assert (judged(SEGMENTS), judged(ONE)) == (Verdict.PASS, Verdict.FAIL)


def row(*positions):
    return {"positions": np.array(positions)}


THREE = np.array([[1, 2, 3]])
# name -> case, arguments of a call of three tokens, whether they are refused
POSITIONS = {
    "follow": ("llama", row(4, 5, 6), False),
    "begin again": ("llama", row(0, 1, 0), True),
    "stay": ("llama", row(1, 1, 1), True),
    "jump": ("llama", row(0, 1, 9), True),
    "begin again, one text": ("llama", row(0, 1, 0) | {"segments": THREE * 0}, False),
    "begin again, several": ("llama", row(0, 1, 0) | {"segments": THREE // 3}, False),
    "jump in an encoder": ("bert", row(0, 1, 9), False),
    "begin again in an encoder": ("bert", row(0, 1, 0), True),
    "jump under a mask": ("llama", row(0, 1, 9) | {"attention_mask": THREE * 0 + 1}, False),
    "begin again under a mask": ("llama", row(0, 1, 0) | {"attention_mask": THREE * 0 + 1}, True),
    "padding in front": ("llama", row(1, 0, 1) | {"attention_mask": np.array([[0, 1, 1]])}, False),
    "padding between": ("llama", row(0, 0, 1) | {"attention_mask": np.array([[1, 0, 1]])}, False),
    "padding behind": ("llama", row(0, 1, 0) | {"lengths": np.array([2])}, False),
    "in the second row": ("llama", {"positions": np.array([[0, 1, 2], [0, 1, 1]])}, True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", POSITIONS)
def test_positions_that_begin_again_are_refused(name, small):
    """By an error if they are known, by NaN in their rows if they are not."""
    case, given, is_refused = POSITIONS[name]
    model = models.load(small(case).folder)
    tokens = np.full((np.atleast_2d(given["positions"]).shape[0], 3), 5)
    traced = jax.jit(lambda given: model(tokens, **given).logits)(given)
    assert np.isnan(traced[-1]).any() == is_refused
    assert not np.isnan(traced[: len(tokens) - 1]).any()
    if not is_refused:
        assert jnp.allclose(traced, model(tokens, **given).logits, atol=1e-5)
        return
    with pytest.raises(ArgumentError, match="positions: expected each token's"):
        model(tokens, **given)
    with pytest.raises(ArgumentError, match="positions: expected each token's"):
        jax.jit(lambda tokens: model(tokens, **given).logits)(tokens)


AGAIN_0 = np.stack([IDS, np.where(IDS == 3, 7, IDS)])
# name -> case, arguments beside tokens of shape TOKENS.shape, words of the error
REFUSED = {
    "another shape": ("gpt2", {"segments": IDS}, r"segments: expected \(2, 14\) integers"),
    "no integers": ("gpt2", {"segments": SEGMENTS / 2}, r"segments: expected \(2, 14\) integers"),
    "an id that comes again": ("gpt2", {"segments": AGAIN_0}, r"an id comes again in rows \[1\]"),
    "one answer for a row": ("gpt2, classes", {"segments": SEGMENTS}, "classifier would answer"),
    "a pooler": ("bert, a pooler", {"segments": SEGMENTS}, "pooler would answer"),
    "pairs": ("bert, for two sentences", {"segments": SEGMENTS}, "seq_relationship would answer"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_segments_are_refused_by_name(name, small):
    case, given, words = REFUSED[name]
    with pytest.raises(ArgumentError, match=words):
        models.load(small(case).folder)(TOKENS, **given)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gpt2, classes", "bert, a pooler", "bert, for two sentences"])
def test_heads_with_one_answer_take_rows_of_one_text(case, small):
    model = models.load(small(case).folder)
    assert_near(model(TOKENS, segments=ONE), model(TOKENS))


def assert_near(found, wanted):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), found, wanted)


@pytest.mark.slow
def test_an_id_that_comes_again_is_another_text_if_it_is_not_known(small):
    model = models.load(small("llama").folder)
    traced = jax.jit(lambda ids: model(TOKENS, segments=ids).logits)
    assert_near(traced(AGAIN_0), model(TOKENS, segments=np.stack([IDS, IDS])).logits)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["llama", "bert"])
def test_padding_may_have_any_id(case, small):
    """It is no text, so that its id may come again, in front and behind."""
    model = models.load(small(case).folder)
    ids = np.array([[0] * 3 + [1] * 8 + [0] * 3] * 2)
    found = model(TOKENS, segments=ids, attention_mask=ids).logits
    assert_near(found[:, 3:11], model(TOKENS[:, 3:11]).logits)


@pytest.mark.slow
def test_frequencies_that_depend_on_the_length_take_one_text_in_a_row():
    """They are those of the whole batch's largest position."""
    scaling = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 5}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 41}
    config |= {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config |= {"intermediate_size": 29, "max_position_embeddings": 5, "rope_scaling": scaling}
    model = models.from_config(config, rngs=nnx.Rngs(0))
    with pytest.raises(ArgumentError, match="DynamicNTK's frequencies"):
        model(TOKENS, segments=SEGMENTS)
    assert_near(model(TOKENS, segments=ONE).logits, model(TOKENS).logits)


@pytest.mark.slow
def test_a_row_may_be_longer_than_the_table_of_positions(small):
    """If its texts are not."""
    model = models.load(small("gpt2").folder)
    tokens = np.full((1, 29), 5)  # there are 23 positions
    assert not np.isnan(model(tokens, segments=np.arange(29)[None] // 15).logits).any()
    with pytest.raises(ArgumentError, match="expected at most 23 in a row, got 28"):
        model(tokens, segments=np.arange(29)[None] // 28)


@pytest.mark.slow
def test_a_cache_takes_no_segments(small):
    model = models.load(small("gpt2").folder)
    with pytest.raises(ArgumentError, match="segments: expected None with a cache"):
        model(TOKENS, segments=SEGMENTS, cache=model.empty_cache(2, 14))
