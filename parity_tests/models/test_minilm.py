"""A real sentence encoder, end to end: MiniLM's file, tokenizer and vectors, against torch's."""

import json
import os
import re
import shutil
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import AutoTokenizer, BertConfig, BertModel

from helpers.families.decoder_cases import drawn
from helpers.minilm import FOLDER, STRANGE, Pair, ours, own_rows, rankings, sentences, theirs
from jax_attn import models, parity, transfer
from jax_attn.environment import install_line
from jax_attn.families import BERT
from jax_attn.models import load_sentence_encoder, mean_pooled
from jax_attn.models.block import ACTIVATIONS
from jax_attn.parity.checking.judging import judge_port
from jax_attn.parity.checking.weights import Weights, compare_weights
from jax_attn.parity.judge.compare import Verdict
from jax_attn.parity.run.port import Port
from jax_attn.transfer import TransferError

SHORT = ["", *STRANGE[2:4], "A query sees every key."]
ROWS = len(SHORT)


@pytest.fixture(scope="module")
def pair():
    return Pair()


@pytest.fixture(scope="module")
def short(pair):
    """Four sentences, compared: a batch and what was found."""
    (batch,) = pair.encoder.batches(SHORT, ROWS)
    return batch, pair.compared(batch)


@pytest.mark.slow
def test_every_number_of_every_sentence(pair, short, request):
    """And each one's neighbours in the same order; 208 of 2 to 256 tokens with --long."""
    texts, batches, found = SHORT, [short[0]], [short[1]]
    if request.config.getoption("--long"):
        texts = sentences()
        batches = list(pair.encoder.batches(texts, 8))
        found = [pair.compared(batch) for batch in batches]
    assert [str(one.report) for one in found if one.report.verdict is not Verdict.PASS] == []
    arrays = [own_rows(batches, found, name) for name in ("exact", "torch", "port", "budget")]
    n = len(texts)
    assert [array.shape for array in arrays] == [(n, 384)] * 4
    ranked = rankings(*arrays)
    assert (ranked.n, ranked.same_top, ranked.unexplained) == (n, n, 0)


@pytest.mark.slow
def test_embeds_in_the_order_given(pair, short):
    batch, found = short
    assert [*batch.rows] != [*range(ROWS)]
    exact, budget = (own_rows([batch], [found], name) for name in ("exact", "budget"))
    assert (np.abs(pair.encoder.embed(SHORT, ROWS) - exact) <= budget).all()


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
        port = Port(nnx.clone(pair.encoder.encoder), call, side.reference.inputs)
        found[name] = judge_port(side, port, ("eager",), to_torch=None).verdict
    assert [n for n, verdict in found.items() if verdict is not Verdict.FAIL] == ["nothing"]


def test_back_to_torch_bit_for_bit(pair):
    """Every tensor of the file, but the buffer of positions, which counts from 0."""
    file = dict(transfer.load_checkpoint(FOLDER / "model.safetensors"))
    exported = transfer.export(pair.encoder.encoder, pair.layout)
    assert file.keys() - exported.keys() == {"embeddings.position_ids"}
    assert np.array_equal(file["embeddings.position_ids"], np.arange(512)[None])
    assert len(exported) == 103
    for name, tensor in exported.items():
        assert tensor.dtype == file[name].dtype, name
        assert tensor.tobytes() == file[name].tobytes(), name
    weights = compare_weights(Weights.of(pair.reference), pair.encoder.encoder, pair.layout)
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


def test_tokens_are_those_of_the_model_s_own_tokenizer(pair):
    texts = sentences()
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    assert pair.encoder.tokens(texts) == tokenizer(texts, truncation=True, max_length=256).input_ids


def test_batches_hold_every_sentence_once(pair):
    texts = sentences()
    ids, seen = pair.encoder.tokens(texts), []
    for batch in pair.encoder.batches(texts, 32):
        assert batch.tokens.shape[1] in (16, 32, 64, 128, 256)
        assert (batch.tokens.shape[0], batch.lengths.shape) == (32, (32,))
        for b, row in enumerate(batch.rows):
            assert batch.tokens[b, : batch.lengths[b]].tolist() == ids[row]
            assert not batch.tokens[b, batch.lengths[b] :].any()
        seen += batch.rows.tolist()
    assert sorted(seen) == list(range(len(texts)))
    assert (min(map(len, ids)), max(map(len, ids))) == (2, 256)


def test_no_sentence_is_no_vector(pair):
    assert pair.encoder.embed([]).shape == (0, 384)


def test_more_tokens_than_positions_are_told(pair):
    with pytest.raises(ValueError, match=r"tokens: expected at most 512 in a row, got 513"):
        pair.encoder.encoder(jnp.zeros((1, 513), int), jnp.array([513]))


# file, what is changed there, what is said
REFUSED = {
    "another pooling": (
        "1_Pooling/config.json",
        {"pooling_mode_cls_token": True},
        "expected 'mean' or only pooling_mode_mean_tokens, got .'pooling_mode_cls_token', ",
    ),
    "two poolings, as newer versions write them": (
        "1_Pooling/config.json",
        {"pooling_mode": ["cls", "mean"]},
        "pooling_mode': expected 'mean' or .* got ..cls', 'mean'",
    ),
    "a module behind": (
        "modules.json",
        [{"type": "sentence_transformers.models.Dense", "path": "3_Dense"}],
        "modules.json type': expected Transformer, Pooling and perhaps Normalize of "
        "sentence_transformers, got .*Normalize', 'sentence_transformers.models.Dense'.",
    ),
    "a module that the folder brings along": (
        "modules.json",
        [{"type": "own.Normalize"}, "Normalize"],
        "Normalize', 'own.Normalize', 'Normalize'.",
    ),
    "lower case": (
        "sentence_bert_config.json",
        {"do_lower_case": True},
        "do_lower_case': expected false.*, got True",
    ),
    "a prompt": (
        "config_sentence_transformers.json",
        {"default_prompt_name": "query"},
        "default_prompt_name': expected null.*, got 'query'",
    ),
    "an unknown activation": (
        "config.json",
        {"hidden_act": "mish"},
        "hidden_act': expected one of gelu, .*, got 'mish'",
    ),
    "another family": ("config.json", {"model_type": "gpt2"}, "expected 'bert', got 'gpt2'"),
    "a decoder": ("config.json", {"is_decoder": True}, "is_decoder': expected false, got True"),
    "no length": (
        "sentence_bert_config.json",
        {"max_seq_length": 0},
        "max_seq_length': expected a whole",
    ),
}


def with_other(file, text, tmp_path):
    """A folder of links, but for one file."""
    folder = shutil.copytree(FOLDER, tmp_path / "model", copy_function=os.symlink)
    (folder / file).unlink()
    (folder / file).write_text(text)
    return folder


@pytest.mark.parametrize("name", REFUSED)
def test_another_model_is_refused(name, tmp_path):
    file, change, words = REFUSED[name]
    old = json.loads((FOLDER / file).read_text())
    new = old + change if isinstance(old, list) else old | change
    with pytest.raises(TransferError, match=words):
        load_sentence_encoder(with_other(file, json.dumps(new), tmp_path))


# file, text, what is said
NOT_JSON = {
    "cut off": ("1_Pooling/config.json", '{"', "expected JSON: "),
    "a list": ("sentence_bert_config.json", "[]", "expected a JSON object, got list"),
    "no list": ("modules.json", "{}", "expected a JSON list, got dict"),
}


@pytest.mark.parametrize("name", NOT_JSON)
def test_a_file_of_another_kind_is_named(name, tmp_path):
    file, text, words = NOT_JSON[name]
    with pytest.raises(TransferError, match=f"{file}': {words}"):
        load_sentence_encoder(with_other(file, text, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 2])
def test_a_folder_that_sentence_transformers_writes_now(count, short, tmp_path):
    """With normalization and without it. Its own vectors and ours lie within the budget."""
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(str(FOLDER), device="cpu", local_files_only=True)
    theirs = SentenceTransformer(modules=list(theirs)[:count], device="cpu")
    theirs.save(str(tmp_path), create_model_card=False)
    encoder = load_sentence_encoder(tmp_path)
    assert encoder.max_length == 256
    batch, found = short
    exact, budget = (own_rows([batch], [found], name) for name in ("exact", "budget"))
    for vectors in (encoder.embed(SHORT, ROWS), theirs.encode(SHORT)):
        lengths = np.linalg.norm(np.float64(vectors), axis=1, keepdims=True)
        assert (np.abs(vectors / lengths - exact) <= budget).all()
        # A vector is as much longer than 1 as it errs, at most.
        is_unit = np.abs(lengths - 1) <= np.linalg.norm(budget, axis=1, keepdims=True)
        assert (is_unit == (count == 3)).all()


def test_without_the_tokenizers_the_line_that_installs_them_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=re.escape(install_line("models"))):
        load_sentence_encoder(FOLDER)
