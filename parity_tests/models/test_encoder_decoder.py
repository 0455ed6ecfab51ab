"""Encoder-decoders: tokens generated from a source, mistakes between the sides, arguments."""

from dataclasses import replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax import P
from jax.sharding import NamedSharding
from transformers.generation import RepetitionPenaltyLogitsProcessor

from helpers.attention.meshes import KINDS, mesh
from helpers.families.whole_models import made
from jax_attn import models
from jax_attn.attention import Mask
from jax_attn.attention.checks import ArgumentError
from jax_attn.attention.position_bias import DistanceBias
from jax_attn.models import block, encoder_decoder
from jax_attn.models.cross_attention import recalled, remembered
from jax_attn.parity.judge.compare import Verdict

B, S, T, NEW, V = 3, 7, 5, 9, 41
TOKENS = np.random.default_rng(0).integers(3, V, (B, S)).astype(np.int32)
LENGTHS = np.array([S, 4, 1], np.int32)
BEGUN = np.random.default_rng(1).integers(3, V, (B, T)).astype(np.int32)
CASES = ("t5", "t5, gated, a head of its own", "mt5", "umt5")


class Sides:
    """A case of both sides, in float64, in which no two logits are as good as equal."""

    def __init__(self, name, folder):
        self.name, self.folder = name, folder

    @cached_property
    def theirs(self):
        return made(self.name).double()

    @cached_property
    def ours(self):
        with jax.enable_x64(True):
            self.theirs.save_pretrained(self.folder)
            return models.load(self.folder)

    def likeliest(self, b, penalty):
        """What a row's source gives alone, by passes of transformers' model over the whole text.

        Its `generate` (5.24) fails if the decoder has more layers than the encoder.
        """
        change = RepetitionPenaltyLogitsProcessor(penalty)
        source, found = torch.tensor(TOKENS[b : b + 1, : LENGTHS[b]]), torch.zeros(1, 1).long()
        with torch.no_grad():
            for _ in range(NEW):
                logits = self.theirs(source, decoder_input_ids=found).logits[:, -1]
                last = change(found, logits).argmax(-1, keepdim=True)
                found = torch.cat([found, last], dim=1)
        return found[0, 1:].tolist()


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    rows = {}

    def of(name):
        return rows.setdefault(name, Sides(name, tmp_path_factory.mktemp("model")))

    return of


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("penalty", [1.0, 1.7])
@pytest.mark.parametrize("name", CASES)
def test_rows_of_any_length_give_the_tokens_of_transformers(name, penalty, sides):
    """Together, through a cache, as each alone in full passes; and end behind either of two."""
    model, wanted = sides(name).ours, [sides(name).likeliest(b, penalty) for b in range(B)]
    given = {"repetition_penalty": penalty}
    assert penalty == 1 or len({*np.ravel(wanted)}) > NEW // 2  # or any model would do
    found = model.generate(TOKENS, LENGTHS, NEW, eos_token_id=(), **given)
    assert found.tolist() == wanted
    shown = np.arange(S) >= S - LENGTHS[:, None]
    rolled = np.stack([np.roll(row, S - n) for row, n in zip(TOKENS, LENGTHS, strict=True)])
    options = {"attention_mask": shown.astype(np.int32), "eos_token_id": (), **given}
    assert model.generate(rolled, None, NEW, **options).tolist() == wanted
    ends = (wanted[0][3], wanted[1][1])
    found = model.generate(TOKENS, LENGTHS, NEW, eos_token_id=ends, **given).tolist()
    for got, want in zip(found, wanted, strict=True):
        read = next((i + 1 for i, token in enumerate(want) if token in ends), NEW)
        assert got == want[:read] + [want[read - 1]] * (NEW - read)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["t5, gated, a head of its own", "mt5"])
def test_transformers_own_generate_agrees(name, sides):
    """Of models whose sides have as many layers. The penalty counts no token of the source."""
    both, mask = sides(name), np.arange(S) < LENGTHS[:, None]
    options = {"do_sample": False, "eos_token_id": None, "repetition_penalty": 1.7}
    given = torch.tensor(TOKENS), torch.tensor(mask).long()
    wanted = both.theirs.generate(given[0], attention_mask=given[1], max_new_tokens=NEW, **options)
    found = both.ours.generate(TOKENS, LENGTHS, NEW, eos_token_id=(), repetition_penalty=1.7)
    assert found.tolist() == wanted[:, 1:].tolist()


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_a_choice_reads_the_logits_of_one_pass(sides):
    """And tokens are drawn by a key of each step."""
    model, read = sides("umt5").ours, []

    def drawn(logits, key):
        jax.debug.callback(lambda x: read.append(x), logits, ordered=True)
        return jax.random.categorical(key, logits)

    options = {"choose": drawn, "key": jax.random.key(0), "eos_token_id": ()}
    found = np.asarray(model.generate(TOKENS, LENGTHS, NEW, **options))
    jax.effects_barrier()
    text = np.concatenate([np.zeros((B, 1), np.int32), found[:, :-1]], axis=1)
    whole = model(TOKENS, LENGTHS, decoder_tokens=text).logits
    # A callback reads float32, to which float64's roundoff may give the next number.
    given = np.float32(np.stack(read, axis=1)), np.asarray(whole, np.float32)
    np.testing.assert_array_max_ulp(*given, maxulp=1)
    assert (found != np.asarray(whole).argmax(-1)).any()
    by_number = {"temperature": 1.0, "key": jax.random.key(0), "eos_token_id": ()}
    assert (model.generate(TOKENS, LENGTHS, NEW, **by_number) == found).all()


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_mesh(kind, sides):
    """Rows are sharded, and the tokens are the same."""
    on, both = mesh(kind, rows=2, heads=2), sides("umt5")
    tokens, lengths = np.concatenate([TOKENS, TOKENS[:1]]), np.append(LENGTHS, 5)
    how = {"repetition_penalty": 1.7, "eos_token_id": 5}
    wanted = both.ours.generate(tokens, lengths, NEW, **how)
    with jax.set_mesh(on):
        model = models.load(both.folder, sharding=P())
        placed = [jax.device_put(x, NamedSharding(on, P("rows"))) for x in (tokens, lengths)]
        found = model.generate(*placed, NEW, **how)
    assert (np.asarray(found) == np.asarray(wanted)).all()


@pytest.mark.slow
def test_a_stream_gives_the_same_tokens_in_pieces_and_keeps_what_is_given(small):
    model, lengths = small("mt5").pair.port, jnp.asarray(LENGTHS)
    tokens = jnp.asarray(TOKENS)
    whole = model.generate(tokens, lengths, NEW, eos_token_id=())
    pieces = [*model.stream(tokens, lengths, NEW, every=4, eos_token_id=())]
    assert [piece.shape[1] for piece in pieces] == [4, 4, 1]
    assert (np.concatenate(pieces, axis=1) == whole).all()
    assert lengths.tolist() == LENGTHS.tolist()  # given up, it could not be read


@pytest.mark.slow
def test_a_step_reads_neither_the_encoder_nor_its_output_again(small):
    """With NaN in all that makes keys and values of the source, the next tokens are the same."""
    model = models.load(small("t5").folder)
    source = model.encode(TOKENS, LENGTHS)
    out = model.decode(BEGUN[:, :2], cache=model.empty_cache(source, T))
    wanted = model.decode(BEGUN[:, 2:], cache=out.cache).logits
    spoiled = [model.encoder]
    for layer in model.decoder.layers:
        spoiled += [layer.cross_attention.k_proj, layer.cross_attention.v_proj]
    for part in spoiled:
        nnx.update(part, jax.tree.map(lambda x: x * jnp.nan, nnx.state(part)))
    assert (model.decode(BEGUN[:, 2:], cache=out.cache).logits == wanted).all()
    assert jnp.isnan(model(TOKENS, LENGTHS, decoder_tokens=BEGUN).logits).all()


def of_itself(attention, x, memory, mask):
    return recalled(attention, x, remembered(attention, x), Mask())


def of_padding_too(attention, x, memory, mask):
    return recalled(attention, x, memory, Mask())


def of_the_source_backwards(attention, hidden):
    return remembered(attention, hidden[:, ::-1])


# what is mistaken -> where, its name, what is in its place
PLANTED = {
    "cross-attention reads the decoder": (block, "recalled", of_itself),
    "cross-attention reads padding": (block, "recalled", of_padding_too),
    "cross-attention reads the source backwards": (
        encoder_decoder,
        "remembered",
        of_the_source_backwards,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_mistake_between_the_sides_fails(name, small, monkeypatch):
    model = small("t5")
    assert model.by_mask(model.pair.port) is Verdict.PASS
    monkeypatch.setattr(*PLANTED[name])
    assert model.by_mask(model.pair.port) is Verdict.FAIL


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_distances_that_begin_again_with_each_call_fail(name, small, monkeypatch):
    """By a cache alone: in every other way a call is the whole text."""
    model = replace(small(name))
    between = DistanceBias.between

    def begun_again(self, queries, keys):
        return between(self, queries, keys - keys[:, :1])

    jax.clear_caches()  # what is compiled has no mistake
    monkeypatch.setattr(DistanceBias, "between", begun_again)
    assert model.by_mask(model.pair.port) is Verdict.PASS
    assert model.judged(model.pair.port) is Verdict.FAIL
    jax.clear_caches()


def source(model, rows=B):
    return model.encode(TOKENS[:rows], LENGTHS[:rows])


REFUSED = {
    "all of a call at once": (
        lambda m: m(TOKENS + V, decoder_tokens=BEGUN[:, 0], decoder_lengths=LENGTHS),
        r"(?s)\btokens: expected 0 to 40.*decoder_tokens: expected \(B, T\) integers",
    ),
    "other rows": (
        lambda m: m(TOKENS, decoder_tokens=BEGUN[:2]),
        "decoder_tokens: expected 3 rows as in tokens, got 2",
    ),
    "lengths and a mask on each side": (
        lambda m: m(
            *(TOKENS, LENGTHS),
            decoder_tokens=BEGUN,
            decoder_lengths=LENGTHS,
            attention_mask=np.ones_like(TOKENS),
            decoder_attention_mask=np.ones_like(BEGUN),
        ),
        r"(?s)\blengths: expected one of.*decoder_lengths: expected one of",
    ),
    "a mask without a token": (
        lambda m: m.encode(TOKENS, attention_mask=np.zeros_like(TOKENS)),
        r"EncoderDecoder\.encode: attention_mask: expected a 1 in every row, got none in rows",
    ),
    "no source": (
        lambda m: m.decode(BEGUN),
        r"EncoderDecoder\.decode: source, cache: expected one of them, got neither",
    ),
    "a source and a cache, and no tokens": (
        lambda m: m.decode(BEGUN + V, source=source(m), cache=m.empty_cache(source(m), T)),
        r"(?s)tokens: expected 0 to 40.*source, cache: expected one of them, got both",
    ),
    "another source": (
        lambda m: m.decode(BEGUN, source=source(m, 2)),
        "tokens: expected 2 rows as in the source, got 3",
    ),
    "states for a source": (
        lambda m: m.decode(BEGUN, source=source(m).hidden),
        r"source: expected one that encode returned, got float32\[3, 7, 31\]",
    ),
    "no source for a cache": (
        lambda m: m.empty_cache(None, T),
        r"EncoderDecoder\.empty_cache: source: expected one that encode returned, got None",
    ),
    "the source of a model with other layers": (
        lambda m: m.decode(BEGUN, source=source(m)._replace(memories=source(m).memories[:1])),
        "source: expected one for 2 layers of width 31, got one for 1 layers of width 31",
    ),
    "a cache of layers alone": (
        lambda m: m.decode(BEGUN, cache=m.empty_cache(source(m), T).caches),
        "cache: expected one that empty_cache or decode returned, got tuple",
    ),
    "a mask with a cache": (
        lambda m: m.decode(
            BEGUN, attention_mask=np.ones_like(BEGUN), cache=m.empty_cache(source(m), T)
        ),
        "attention_mask: expected None with a cache",
    ),
    "all of generate at once": (
        lambda m: m.generate(TOKENS + V, LENGTHS, 0, temperature=0.5, top_p=2.0),
        "(?s)tokens: expected 0 to 40.*max_new_tokens: expected.*top_p: expected.*key: expected",
    ),
    "more tokens than are counted": (
        lambda m: m.generate(TOKENS, LENGTHS, 2**31),
        "max_new_tokens: expected at most 2147483647, got 2147483648",
    ),
    "a conversation": (
        lambda m: models.Chat(m, batch=0),
        r"(?s)batch: expected.*model: expected a decoder alone, got one that reads an encoder",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_are_refused_by_name(name, small):
    call, says = REFUSED[name]
    with pytest.raises(ArgumentError, match=says):
        call(small("mt5").pair.port)


@pytest.mark.parametrize("start", [None, V, "0"])
def test_a_decoder_needs_a_token_to_begin_with(start, small):
    model = models.load(small("mt5").folder)
    model.generation = replace(model.generation, start=start)
    says = rf"(?s)max_new_tokens: .*decoder_start_token_id: .* of 0 to 40, got {start!r}"
    with pytest.raises(ArgumentError, match=says):
        model.generate(TOKENS, LENGTHS, 0)


def test_a_model_without_a_head_generates_nothing(small):
    with pytest.raises(ArgumentError, match="model: expected a language model's head"):
        small("t5, no head").pair.port.generate(TOKENS, LENGTHS, 2)


def test_traits_of_one_stack_are_no_encoder_decoder(small):
    traits = small("t5, its encoder").pair.traits
    says = r"(?s)heads: expected lm_head or none, got pooler.*traits: expected blocks of a decoder"
    with pytest.raises(ArgumentError, match=says):
        models.EncoderDecoder(traits, {"pooler": 31}, rngs=nnx.Rngs(0))


def test_an_encoder_alone_packs_texts_in_a_row(small):
    """A distance in a text is the same wherever the text begins."""
    model = small("umt5, its encoder").pair.port
    segments = np.repeat([[0, 0, 0, 1, 1, 1, 1]], B, axis=0)
    packed, alone = model(TOKENS, segments=segments).hidden, model(TOKENS[:, 3:]).hidden
    mixed = model(TOKENS).hidden
    near, far = (np.abs(np.asarray(x)[:, 3:] - alone).max() for x in (packed, mixed))
    assert near < 1e-3 * far
