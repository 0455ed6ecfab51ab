"""What two names say about each other, as a table."""

import pytest

from jax_attn.transfer.proposal.naming import Bond, bond, read

SAID = {
    # torch, Flax: what the names alone say; None: they contradict each other.
    ("attn.q_proj", "attn.q_proj"): Bond.SAME,
    ("attn.wq", "attn.query"): Bond.AGREE,
    ("attn.W_K", "attn.k_proj"): Bond.AGREE,
    ("h.3.attn.q_proj", "layers.3.attn.query"): Bond.AGREE,
    ("h.3.self_attn.q_proj", "layers.3.attn.query"): Bond.AGREE_AROUND,
    ("attn.q_proj", "attn.k_proj"): None,
    ("h.3.attn.q_proj", "layers.2.attn.q_proj"): None,
    ("attn.ky", "attn.key"): Bond.NONE,
    ("decoder.cross_attn.q", "decoder.self_attn.q"): None,
    ("encoder.q", "decoder.q"): None,
    ("attn.c_attn", "attn.qkv"): Bond.AGREE,
    ("attn.query_key_value", "attn.qkv"): Bond.AGREE,
    ("wte", "tokens"): Bond.AGREE,
    ("wpe", "tokens"): None,
    ("embeddings.word_embeddings", "embed_tokens"): Bond.AGREE_AROUND,
    ("embed", "tokens"): Bond.AKIN,
    ("ln_f", "final_norm"): Bond.AGREE,
    ("h.0.ln_1", "layers.0.norm1"): Bond.AKIN,
    ("h.0.ln_2", "layers.0.norm1"): None,
    ("h.0.input_layernorm", "layers.0.norm1"): Bond.NONE,
    ("h.0.post_attention_layernorm", "layers.0.attn_norm"): Bond.NONE,
    ("norm", "final_norm"): Bond.NONE,
    ("embeddings.LayerNorm", "norm"): Bond.NONE,
    ("mlp.c_fc", "mlp.up"): Bond.AKIN,
    ("mlp.c_proj", "mlp.down"): Bond.AKIN,
    ("mlp.0", "mlp.up"): Bond.AKIN,
    ("mlp.up_proj", "mlp.down"): None,
    ("h.0.mlp.fc1", "layers.0.attn.out"): None,
    ("layers.0.linear1", "layers.1.up"): None,
    ("layers.0.mlp.linear1", "layers.0.mlp.up"): Bond.AKIN,
    ("pooler.dense", "pooler"): Bond.AGREE,
    ("foo", "bar"): Bond.NONE,
}
# Others beside the two: a word that all share says nothing.
OTHERS = [("norm9",), ("other", "thing")]


def of(torch, flax):
    (a, *_), (b, *_) = (read([name.split("."), *OTHERS]) for name in (torch, flax))
    return bond(a, b)


@pytest.mark.parametrize(("torch", "flax"), SAID)
def test_names_say(torch, flax):
    assert of(torch, flax) == SAID[torch, flax]


def test_the_one_projection_without_a_word_beside_query_key_and_value_is_their_output():
    beside = [("attn", p) for p in ("q", "k", "v")]
    flax = read([*beside, ("attn", "out")])[-1]
    assert bond(read([*beside, ("attn", "c_proj")])[-1], flax) == Bond.AGREE
    assert bond(read([*beside[1:], ("attn", "c_proj")])[-1], flax) == Bond.NONE
    two = read([*beside, ("attn", "c_proj"), ("attn", "dense")])
    assert [bond(name, flax) for name in two[-2:]] == [Bond.NONE, Bond.NONE]


# Names beside each other at the root of a module -> whether its "dense" is attention's output.
ALONE = {
    "query, key and value": ("q_proj k_proj v_proj dense", True),
    "packed": ("query_key_value dense", True),
    "with norms of queries and keys": ("q_proj k_proj v_proj q_norm k_norm dense", True),
    "two without a word": ("q_proj k_proj v_proj dense proj", False),
    "an MLP": ("q_proj k_proj v_proj dense fc1 fc2", False),
    "no key": ("q_proj v_proj dense", False),
    "layers": ("0.q_proj 0.k_proj 0.v_proj 0.dense", False),
}


@pytest.mark.parametrize("case", ALONE)
def test_dense_is_the_output_where_nothing_but_attention_is_beside_it(case):
    names, is_output = ALONE[case]
    parts = [tuple(name.split(".")) for name in names.split()]
    dense = next(name for name in read(parts) if name.tokens[-1] == "dense")
    assert (dense.role == {"out"}) == is_output


def test_a_word_that_all_names_share_says_nothing():
    torch = read([("bert", "h", "0", "q"), ("bert", "h", "1", "q")])
    (flax,) = read([("layers", "0", "query")])
    assert [bond(name, flax) for name in torch] == [Bond.AGREE, None]
    lone = read([("bert", "h", "0", "q"), ("bart", "h", "0", "q")])
    assert [bond(name, flax) for name in lone] == [Bond.NONE, Bond.NONE]
