"""A real sentence encoder, end to end: MiniLM's file, tokenizer and vectors, against torch's."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import BertConfig, BertModel

from helpers.families.decoder_cases import drawn
from helpers.minilm import (
    FOLDER,
    STRANGE,
    Pair,
    batched,
    mean_pooled,
    ours,
    own_rows,
    rankings,
    sentences,
    theirs,
)
from jax_attn import models, parity, transfer
from jax_attn.families import BERT
from jax_attn.models.mlp import ACTIVATIONS
from jax_attn.parity.checking.judging import judge_port
from jax_attn.parity.checking.weights import Weights, compare_weights
from jax_attn.parity.judge.compare import Verdict
from jax_attn.parity.run.port import Port

SHORT = ["", *STRANGE[2:4], "A query sees every key."]
ROWS = len(SHORT)


@pytest.fixture(scope="module")
def pair():
    return Pair()


@pytest.fixture(scope="module")
def short(pair):
    """Four sentences, compared: a batch and what was found."""
    (batch,) = batched(SHORT, ROWS)
    return batch, pair.compared(batch)


@pytest.mark.slow
def test_every_number_of_every_sentence(pair, short, request):
    """And each one's neighbours in the same order; 208 of 2 to 256 tokens with --long."""
    texts, batches, found = SHORT, [short[0]], [short[1]]
    if request.config.getoption("--long"):
        texts = sentences()
        batches = batched(texts, 8)
        found = [pair.compared(batch) for batch in batches]
    assert [str(one.report) for one in found if one.report.verdict is not Verdict.PASS] == []
    arrays = [own_rows(batches, found, name) for name in ("exact", "torch", "port", "budget")]
    n = len(texts)
    assert [array.shape for array in arrays] == [(n, 384)] * 4
    ranked = rankings(*arrays)
    assert (ranked.n, ranked.same_top, ranked.unexplained) == (n, n, 0)


@pytest.mark.slow
def test_the_vectors_are_those_of_sentence_transformers(short):
    """Tokens and vectors are those of sentence-transformers: what is compared is its recipe."""
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(str(FOLDER), device="cpu", local_files_only=True)
    batch, found = short
    exact, budget = (own_rows([batch], [found], name) for name in ("exact", "budget"))
    assert (np.abs(encoder.encode(SHORT) - exact) <= budget).all()


def test_rankings_can_differ():
    rng = np.random.default_rng(0)
    exact = rng.standard_normal((13, 5))
    budget = np.full(exact.shape, 1e-9)
    assert rankings(exact, exact, exact, budget, top=3) == (
        type(rankings(exact, exact, exact, budget, top=3))(13, 3, 13, 0, 0)
    )
    other = rankings(exact, exact, exact + 0.1 * rng.standard_normal(exact.shape), budget, top=3)
    assert other.same_top < 13
    assert 0 < other.unexplained <= other.swapped


def set_epsilons(encoder, epsilon):
    for norm in [m for _, m in nnx.iter_modules(encoder) if isinstance(m, models.Norm)]:
        norm.traits = norm.traits._replace(epsilon=epsilon)


def with_epsilon(encoder, tokens, lengths):
    set_epsilons(encoder, 1e-5)
    return ours(encoder, tokens, lengths)


def approximate_gelu(encoder, tokens, lengths):
    right = ACTIVATIONS["gelu"]
    try:
        ACTIVATIONS["gelu"] = ACTIVATIONS["gelu_tanh"]
        return ours(encoder, tokens, lengths)
    finally:
        ACTIVATIONS["gelu"] = right


def first_token(encoder, tokens, lengths):
    state = encoder(tokens, lengths).hidden[:, 0]
    return state / jnp.linalg.norm(state, axis=-1, keepdims=True)


def later_positions(encoder, tokens, lengths):
    positions = jnp.arange(1, tokens.shape[1] + 1)
    return mean_pooled(encoder(tokens, lengths, positions=positions).hidden, lengths)


def without_types(encoder, tokens, lengths):
    encoder.type_embedding.embedding[...] = jnp.zeros_like(encoder.type_embedding.embedding[...])
    return ours(encoder, tokens, lengths)


PLANTED = {
    "nothing": ours,
    "padding is seen": lambda e, tokens, lengths: ours(e, tokens, jnp.full_like(lengths, 16)),
    "padding is averaged": lambda e, tokens, lengths: ours(
        lambda *given: e(tokens, lengths), tokens, jnp.full_like(lengths, 16)
    ),
    "torch's own epsilon": with_epsilon,
    "the approximate gelu": approximate_gelu,
    "the first token's state": first_token,
    "positions from 1": later_positions,
    "no token types": without_types,
    "no unit length": lambda e, tokens, lengths: 1.000001 * ours(e, tokens, lengths),
}


USUAL = ("nothing", "padding is seen", "the approximate gelu")


@pytest.mark.slow
def test_a_planted_mistake_fails(pair, short, request):
    """The usual ones; all with --long."""
    side, found = short[1].side, {}
    for name in PLANTED if request.config.getoption("--long") else USUAL:
        call = PLANTED[name]
        # What a call writes into a module stays there.
        port = Port(nnx.clone(pair.encoder), call, side.reference.inputs)
        found[name] = judge_port(side, port, ("eager",), to_torch=None).verdict
    assert [n for n, verdict in found.items() if verdict is not Verdict.FAIL] == ["nothing"]


@pytest.mark.slow
def test_back_to_torch_bit_for_bit(pair):
    """Every tensor of the file, but the buffer of positions, which counts from 0."""
    file = dict(transfer.load_checkpoint(FOLDER / "model.safetensors"))
    exported = transfer.export(pair.encoder, pair.layout)
    assert file.keys() - exported.keys() == {"embeddings.position_ids"}
    assert np.array_equal(file["embeddings.position_ids"], np.arange(512)[None])
    assert len(exported) == 103
    for name, tensor in exported.items():
        assert tensor.dtype == file[name].dtype, name
        assert tensor.tobytes() == file[name].tobytes(), name
    weights = compare_weights(Weights.of(pair.reference), pair.encoder, pair.layout)
    assert weights.differences == ()


SMALL = BertConfig(
    hidden_size=30,
    num_attention_heads=3,
    num_hidden_layers=1,
    intermediate_size=37,
    vocab_size=41,
    max_position_embeddings=23,
    attn_implementation="eager",
)


@pytest.mark.slow
def test_gradients_of_every_parameter(tmp_path):
    """A small encoder, read from its file as the real one is; the pooler has its own output."""
    reference = drawn(BertModel(SMALL)).eval()
    reference.save_pretrained(tmp_path)
    port = models.load(tmp_path)
    layout = BERT.model(SMALL.to_dict(), reference.state_dict())
    rng = np.random.default_rng(0)

    def both_of_theirs(module, tokens, lengths):
        own = (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
        pooled = module(tokens, attention_mask=own).pooler_output
        return {"vectors": theirs(module, tokens, lengths), "pooled": pooled}

    def both_of_ours(encoder, tokens, lengths):
        out = encoder(tokens, lengths)
        return {"vectors": mean_pooled(out.hidden, lengths), "pooled": out.pooled}

    result = parity.check(
        reference,
        port,
        {
            "tokens": rng.integers(1, 41, (3, 11)).astype(np.int32),
            "lengths": np.array([11, 2, 7], np.int32),
        },
        layout=layout,
        reference_call=both_of_theirs,
        port_call=both_of_ours,
        transforms=("jit",),
    ).raise_for_status()
    assert {t.name for t in result.tensors} >= set(dict(reference.named_parameters()))


def test_a_file_without_a_pooler(tmp_path):
    reference = BertModel(SMALL, add_pooling_layer=False)
    reference.save_pretrained(tmp_path)
    port = models.load(tmp_path)
    layout = BERT.model(SMALL.to_dict(), reference.state_dict())
    assert transfer.export(port, layout).keys() == reference.state_dict().keys()


def test_more_tokens_than_positions_are_told(pair):
    with pytest.raises(ValueError, match=r"tokens: expected at most 512 in a row, got 513"):
        pair.encoder(jnp.zeros((1, 513), int), jnp.array([513]))
