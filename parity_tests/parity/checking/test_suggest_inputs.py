"""`suggest_inputs`: that its inputs run, and that each property that it promises holds.

The references are designs, torch's own modules, modules written by hand, and whole models of
transformers', all small and with random weights.
"""

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as tf
from flax import nnx
from torch import nn

import torch_ref
from helpers.parity.block_pair import pair
from helpers.parity.one_reference import Once
from jax_attn import parity
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.run.inputs_and_runs import Inputs
from jax_attn.parity.run.reference import Reference
from torch_ref.rotary import Rotary

D, N, VOCABULARY, POSITIONS = 24, 6, 41, 37
SIZES = {"hidden_size": D, "num_attention_heads": N, "num_hidden_layers": 2, "vocab_size": 41}
PLAIN = SIZES | {"intermediate_size": 29, "max_position_embeddings": POSITIONS}
GROUPED = PLAIN | {"num_key_value_heads": 3, "head_dim": 10}
T5 = {"d_model": 31, "d_kv": 7, "num_heads": N, "num_layers": 2, "d_ff": 29, "vocab_size": 41}
T5 |= {"relative_attention_max_distance": 29, "relative_attention_num_buckets": 8}
VIT = {"hidden_size": D, "num_attention_heads": N, "num_hidden_layers": 2, "intermediate_size": 29}
EXPERTS = GROUPED | {"num_local_experts": 8, "experts_implementation": "eager"}
SMALL_EXPERTS = EXPERTS | {"num_hidden_layers": 1}


class ByHand(nn.Module):
    """Keys from elsewhere, a mask that must be given and of which 0 hides, a table of languages."""

    def __init__(self):
        super().__init__()
        self.language_embedding = nn.Embedding(5, D)
        self.q, self.k = nn.Linear(D, D), nn.Linear(17, D)

    def forward(self, x, context, mask, language_id=None):
        x = self.q(x)
        if language_id is not None:
            x = x + self.language_embedding(language_id)
        scores = x @ self.k(context).mT + (1.0 - mask) * -1e9
        return scores.softmax(-1) @ self.k(context)


class OfImages(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, D, 3, stride=2)
        self.attention = nn.MultiheadAttention(D, 4, batch_first=True)

    def forward(self, images):
        y = self.conv(images).flatten(2).mT
        return self.attention(y, y, y)[0]


class OfWaves(nn.Module):
    """Tokens of samples, and a mask of samples, of which a token needs the first."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(conv_kernel=(10, 3), conv_stride=(5, 2))
        self.convs = nn.Sequential(nn.Conv1d(1, D, 10, 5), nn.Conv1d(D, D, 3, 2))
        self.attention = nn.MultiheadAttention(D, 4, batch_first=True)

    def forward(self, input_values, attention_mask=None):
        y = self.convs(input_values[:, None]).mT
        hidden = None
        if attention_mask is not None:
            hidden = attention_mask[:, ::10][:, : y.shape[1]] == 0
        return self.attention(y, y, y, key_padding_mask=hidden)[0]


def unweighted(m, query, key, value, attn_mask=None, key_padding_mask=None):
    masks = {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask}
    return m(query, key, value, **masks, need_weights=False)[0]


def logits(model, *args, **inputs):
    return model(*args, **inputs).logits


def hidden_state(model, **inputs):
    return model(**inputs).last_hidden_state


# name -> (builds the reference, reference_call, which parameters)
ROWS = {
    "weights_mha": (lambda: torch_ref.DESIGNS["weights_mha"](30, 6), None, "x mask"),
    "fused_mha": (lambda: torch_ref.DESIGNS["fused_mha"](30, 6), None, "x"),
    "mqa": (lambda: torch_ref.DESIGNS["mqa"](30, 6), None, "x mask"),
    "plain_mha": (lambda: torch_ref.DESIGNS["plain_mha"](30, 6), None, "X"),
    "gqa": (
        lambda: torch_ref.DESIGNS["gqa"](30, 6, 3, kdim=17, vdim=19, head_dim=10, rotary=Rotary()),
        None,
        "query key value mask bias positions key_positions",
    ),
    "torch_mha": (
        lambda: nn.MultiheadAttention(D, N, batch_first=True, kdim=17, vdim=19),
        None,
        "query key value key_padding_mask attn_mask",
    ),
    "torch_mha without weights": (
        lambda: nn.MultiheadAttention(D, N, batch_first=True),
        unweighted,
        "query key value attn_mask key_padding_mask",
    ),
    "decoder layer": (
        lambda: nn.TransformerDecoderLayer(D, N, 29, batch_first=True),
        None,
        "tgt memory tgt_mask memory_mask tgt_key_padding_mask memory_key_padding_mask",
    ),
    "by hand": (ByHand, None, "x context mask language_id"),
    "of images": (OfImages, None, "images"),
    "of waves": (OfWaves, None, "input_values attention_mask"),
    "bert": (
        lambda: tf.BertModel(tf.BertConfig(**PLAIN)),
        None,
        "input_ids attention_mask token_type_ids position_ids",
    ),
    "llama": (
        lambda: tf.LlamaModel(tf.LlamaConfig(**GROUPED)),
        hidden_state,
        "input_ids attention_mask position_ids",
    ),
    "llama with a head": (
        lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED)),
        logits,  # the form of call that `check` documents
        "input_ids attention_mask position_ids",  # not logits_to_keep, which is a count
    ),
    "mistral": (
        lambda: tf.MistralModel(tf.MistralConfig(**GROUPED, sliding_window=17)),
        None,
        "input_ids attention_mask position_ids",
    ),
    "gemma2": (
        lambda: tf.Gemma2Model(tf.Gemma2Config(**GROUPED, sliding_window=13)),
        None,
        "input_ids attention_mask position_ids",
    ),
    "mixtral": (
        lambda: tf.MixtralModel(tf.MixtralConfig(**SMALL_EXPERTS)),
        None,
        "input_ids attention_mask position_ids",
    ),
    "t5": (
        lambda: tf.T5Model(tf.T5Config(**T5)),
        None,
        "input_ids attention_mask decoder_input_ids decoder_attention_mask",
    ),
    "mpnet": (
        lambda: tf.MPNetModel(tf.MPNetConfig(**PLAIN)),
        None,
        "input_ids attention_mask",  # its own positions count what is no padding
    ),
    "vit": (
        lambda: tf.ViTModel(tf.ViTConfig(**VIT, image_size=8, patch_size=4)),
        None,
        "pixel_values attention_mask",
    ),
}


@cache
def reference(row):
    torch.manual_seed(0)
    return ROWS[row][0]().eval()


@cache
def suggested(row):
    return parity.suggest_inputs(reference(row), reference_call=ROWS[row][1])


MASKS = [(row, name) for row in ROWS for name in ROWS[row][2].split() if "mask" in name]
IDS = [(row, name) for row in ROWS for name in ROWS[row][2].split() if "input_ids" in name]
POSITIONED = [row for row in ROWS if "position_ids" in ROWS[row][2]]


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_every_parameter_that_does_something_is_given(row):
    assert list(suggested(row)) == ROWS[row][2].split()


@pytest.mark.slow
@pytest.mark.parametrize("row", ["torch_mha", "bert"])
def test_a_seed_gives_the_same_arrays_and_another_others(row):
    def drawn(seed):
        return parity.suggest_inputs(reference(row), reference_call=ROWS[row][1], seed=seed)

    first, again, other = suggested(row), drawn(0), drawn(1)
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not any(np.array_equal(first[name], other[name]) for name in first)


# row -> B, T and, where keys come from elsewhere, S; none of them a width or a number of heads
LENGTHS = {
    "weights_mha": (3, 11),
    "gqa": (5, 11, 7),
    "torch_mha": (3, 11, 5),
    "decoder layer": (3, 11, 5),
    "bert": (3, 11),
    "llama": (5, 11),
    "mistral": (5, 19),  # beyond the window of 17
    "gemma2": (5, 17),  # beyond 13, of which every other layer has none
    "mixtral": (5, 17),  # two tokens for each of the experts, whichever text they are in
    "t5": (3, 37, 41),  # beyond the distance at which the last bucket begins
    "mpnet": (3, 31),  # what the table of positions holds
}


@pytest.mark.slow
@pytest.mark.parametrize("row", LENGTHS)
def test_lengths_are_distinct_primes_beyond_every_window(row):
    B, T, *_ = LENGTHS[row]
    assert all(n > 1 and all(n % d for d in range(2, n)) for n in LENGTHS[row])
    inputs = suggested(row)
    of_tokens = [a.shape[:2] for name, a in inputs.items() if not name.endswith("mask")]
    assert {n for shape in of_tokens for n in shape} - {N} == set(LENGTHS[row])
    assert (B, T) in of_tokens


@pytest.mark.parametrize("row", ROWS)
def test_floats_are_normal_and_each_array_is_its_own(row):
    arrays = [a for k, a in suggested(row).items() if a.dtype.kind == "f"]
    assert all(0.8 < a.std() < 1.2 and np.unique(a).size > 0.9 * a.size for a in arrays)
    assert all(not np.isin(a, b).mean() > 0.1 for i, a in enumerate(arrays) for b in arrays[:i])


@pytest.mark.parametrize(("row", "name"), IDS)
def test_ids_are_drawn_over_the_vocabulary_and_padding_occurs_once(row, name):
    ids = suggested(row)[name]
    assert ids.min() >= 0
    assert ids.max() < VOCABULARY
    end = getattr(getattr(reference(row), "config", None), "eos_token_id", None)
    others = ids[ids != end]
    assert np.unique(others).size == min(others.size, VOCABULARY - (end is not None))
    tables = (m.padding_idx for m in reference(row).modules() if isinstance(m, nn.Embedding))
    if (padding := next(tables)) is not None:
        assert (ids == padding).sum() == 1


def test_the_end_of_a_text_is_where_what_is_pooled_there_shows_a_causal_mask():
    """The first, as CLIP pools, sees most keys and not those behind it; the second is the last."""
    ids = suggested("llama")["input_ids"]
    is_end = ids == reference("llama").config.eos_token_id
    assert [list(np.flatnonzero(row)) for row in is_end[:3]] == [[7, 10], [8, 10], [7, 10]]
    assert (is_end.sum(axis=1) == 2).all()


# name -> (reference, its call, the shape of what it is given): sizes are those of the norm alone
NORMS = {
    "batch norm": (nn.BatchNorm1d(D), None, (3, D, 11)),
    "batch norm, of tokens": (nn.BatchNorm1d(D), lambda m, x: m(x.mT).mT, (3, 11, D)),
    "batch norm, of images": (nn.BatchNorm2d(D), None, (3, D, 17, 14)),
    "group norm": (nn.GroupNorm(4, D), None, (3, D, 11)),
    "layer norm of a prime width": (nn.LayerNorm(11), None, (3, 13, 11)),
}


@pytest.mark.parametrize("row", NORMS)
def test_a_norm_says_how_wide_its_input_is(row):
    module, call, shape = NORMS[row]
    inputs = parity.suggest_inputs(module.eval(), reference_call=call)
    assert [a.shape for a in inputs.values()] == [shape]


class OfBlocks(nn.Module):
    """Blocks of 4 tokens; or at most 4 tokens."""

    def __init__(self, is_limit):
        super().__init__()
        self.block_size, self.is_limit = 4, is_limit
        self.words, self.places = nn.Embedding(31, D), nn.Embedding(4, D)

    def forward(self, input_ids):
        places = torch.arange(input_ids.shape[1])
        places = places if self.is_limit else places % self.block_size
        return self.words(input_ids) + self.places(places)


@pytest.mark.parametrize(("is_limit", "shape"), [(False, (3, 11)), (True, (5, 3))])
def test_a_small_number_limits_the_length_only_where_more_is_refused(is_limit, shape):
    inputs = parity.suggest_inputs(OfBlocks(is_limit))
    assert inputs["input_ids"].shape == shape


def test_token_types_and_what_is_named_like_a_table_take_all_values():
    assert set(suggested("bert")["token_type_ids"].flat) == {0, 1}
    assert set(suggested("by hand")["language_id"].flat) == set(range(5))


@pytest.mark.parametrize("row", POSITIONED)
def test_positions_are_distinct_in_a_row_and_in_no_order(row):
    positions = suggested(row)["position_ids"]
    assert all(np.unique(x).size == x.size for x in positions)
    assert 0 <= positions.min() <= positions.max() < POSITIONS
    assert (np.diff(positions) != 1).any(axis=-1).all()
    assert not (positions == positions[:1]).all(axis=-1)[1:].any()


# True hides in torch's own; added: what is added to the scores
TRUE_HIDES = ("torch_mha", "torch_mha without weights", "decoder layer")
EMPTY_ROWS = {"gqa", "torch_mha without weights", "by hand", "bert", "llama", "mistral", "gemma2"}
# Not T5's: with its masks of finfo.min torch's fused kernel gives wrong gradients in such a row.
EMPTY_ROWS |= {"llama with a head", "mixtral", "mpnet", "vit"}


@pytest.mark.parametrize(("row", "name"), MASKS)
def test_masks_hide_one_key_or_several_and_all_where_the_reference_allows(row, name):
    mask = suggested(row)[name]
    hidden = mask if row in TRUE_HIDES else mask == 0
    counts = hidden.reshape(-1, hidden.shape[-1]).sum(axis=-1)
    assert counts[0] == 1
    assert (counts[1:] > 1).all()
    assert hidden.shape[-1] - 1 not in counts
    if name in ("mask", "attn_mask", "attention_mask"):
        assert (counts.max() == hidden.shape[-1]) == (row in EMPTY_ROWS)


def test_masks_are_what_is_added_where_booleans_would_hide_nothing():
    layer = tf.models.bert.modeling_bert.BertLayer(
        tf.BertConfig(**PLAIN, attn_implementation="eager")
    )
    mask = parity.suggest_inputs(layer.eval())["attention_mask"]
    assert mask.shape == (3, 1, 11, 11)
    assert set(mask.flat) == {0, np.finfo(np.float32).min}


def test_one_axis_is_the_batch_where_a_layer_says_it_is_the_second():
    inputs = parity.suggest_inputs(nn.MultiheadAttention(D, N).eval())
    assert [inputs[name].shape[:2] for name in ("query", "key")] == [(11, 3), (5, 3)]


def test_a_waveform_has_the_samples_of_several_tokens_and_its_mask_as_many():
    module = reference("of waves")
    inputs = suggested("of waves")
    samples = inputs["input_values"].shape
    assert module(*map(torch.from_numpy, inputs.values())).shape[1] == 11
    assert inputs["attention_mask"].shape == samples
    given = {"input_values": np.ones((3, 151), np.float32)}
    assert parity.suggest_inputs(module, given=given)["attention_mask"].shape == (3, 151)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 5, 3, padding=1)

    def forward(self, sample, timestep):
        return self.conv(sample) * (1 + timestep)[:, None, None, None].sqrt()


def test_a_sample_has_the_channels_of_the_first_convolution_and_each_row_its_step():
    inputs = parity.suggest_inputs(Denoiser())
    B = len(inputs["sample"])
    assert inputs["sample"].shape[1] == 4
    assert inputs["timestep"].shape == (B,)
    assert len({*inputs["timestep"]}) == B
    assert 0 <= inputs["timestep"].min() <= inputs["timestep"].max() < 1000


def test_floats_have_the_dtype_that_is_asked_for():
    module = nn.MultiheadAttention(D, N, batch_first=True, dtype=torch.bfloat16).eval()
    inputs = parity.suggest_inputs(module, dtype="bfloat16")
    assert {a.dtype.name for a in inputs.values()} == {"bfloat16", "bool"}


FREE = {ByHand: ("x", (0, 1)), OfImages: ("images", (2, 3))}


@pytest.mark.parametrize("build", FREE)
def test_of_two_sets_what_is_odd_in_one_is_even_in_the_other(build):
    module, (name, axes) = build().eval(), FREE[build]
    first, second = parity.suggest_inputs(module, sets=2)
    odd, other = ([each[name].shape[axis] % 2 for axis in axes] for each in (first, second))
    assert [1 - n for n in odd] == other
    alone = parity.suggest_inputs(module)
    assert all(np.array_equal(first[k], alone[k]) for k in alone), "the first is that of one set"


# --- what the caller says -------------------------------------------------------------------------


def test_what_is_given_stays_and_the_others_fit_it():
    x = np.random.default_rng(0).standard_normal((4, 9, D)).astype("float32")
    inputs = parity.suggest_inputs(reference("by hand"), given={"x": x})
    assert inputs["x"] is x
    assert (inputs["context"].shape[0], inputs["mask"].shape) == (4, (4, 9, 5))


def test_a_config_may_be_a_dict():
    module = nn.Linear(D, D)
    module.config = {"hidden_size": D}
    assert parity.suggest_inputs(module)["input"].shape[-1] == D


def test_parameters_without_names_give_a_tuple():
    def call(module, *arrays):
        return module(*arrays)[0]

    (x,) = parity.suggest_inputs(reference("fused_mha"), reference_call=call)
    assert x.shape == (3, 11, 30)


class Strange(ByHand):
    def forward(self, x, context, mask, strange, flag):
        return super().forward(x, context, mask) * (strange if flag else 1)


REFUSED = {
    "unknown parameters": (Strange, {}, "parameter 'strange': expected a name (.|\n)*'flag'"),
    "given what there is not": (ByHand, {"given": {"y": np.ones(3)}}, "given: expected some of x,"),
    "an unknown dtype": (ByHand, {"dtype": "int8"}, "dtype: expected one of float32"),
    "a dtype that is no name": (
        ByHand,
        {"dtype": np.dtype("float32")},
        "dtype: expected one of float32.* got dtype",
    ),
    "a reference that refuses all": (
        ByHand,
        {"given": {"x": np.ones((2, 3, D + 1))}},
        r"made for context and mask.* with x float64\[.*, as given, .* raised on all .*mat1 and",
    ),
    "no set": (ByHand, {"sets": 0}, "sets: expected at least 1, got 0"),
    "a seed below zero": (ByHand, {"seed": -1}, "seed: expected an integer of 0 or more, got -1"),
}


@pytest.mark.parametrize("row", REFUSED)
def test_what_cannot_be_made_is_named(row):
    build, options, message = REFUSED[row]
    with pytest.raises(ValueError, match=message):
        parity.suggest_inputs(build().eval(), **options)


class Placed(nn.Module):
    """Positions in order, of which padding has none; or simply in order."""

    def __init__(self, skips):
        super().__init__()
        self.words, self.places = nn.Embedding(31, D, padding_idx=1), nn.Embedding(64, D)
        self.skips = skips

    def forward(self, input_ids, position_ids=None):
        if position_ids is None:
            real = (input_ids != 1) | (not self.skips)
            position_ids = (real.cumsum(1) - 1) * real
        return self.words(input_ids) + self.places(position_ids)


@pytest.mark.parametrize("skips", [False, True])
def test_positions_are_left_out_where_the_reference_computes_them_from_its_ids(skips):
    inputs = parity.suggest_inputs(Placed(skips))
    assert (inputs["input_ids"] == 1).any()
    assert ("position_ids" in inputs) == (not skips)


NOT_OF_THESE_TYPES = {
    "an array": (np.ones(3), {}, "reference: expected a torch.nn.Module, got ndarray"),
    "an NNX module": (nnx.Module(), {}, "reference: .* got Module, which is a port"),
    "a seed that is no integer": (ByHand(), {"seed": "a"}, "seed: expected an integer .*got 'a'"),
    "sets that are no number": (ByHand(), {"sets": True}, "sets: expected an int, got True"),
    "given in a list": (ByHand(), {"given": [1]}, "given: expected a dict of NumPy arrays"),
    "a number given": (ByHand(), {"given": {"x": 1}}, r"given\['x'\]: expected a NumPy array"),
    "no function": (ByHand(), {"reference_call": 3}, "reference_call: expected a function"),
}


@pytest.mark.parametrize("row", NOT_OF_THESE_TYPES)
def test_arguments_of_other_types_are_refused_by_name(row):
    reference, options, message = NOT_OF_THESE_TYPES[row]
    with pytest.raises(TypeError, match=message):
        parity.suggest_inputs(reference, **options)


@pytest.mark.slow
def test_a_check_on_them_passes_without_a_note_and_fails_a_wrong_port(monkeypatch):
    Once().patch(monkeypatch)
    reference, port = pair()
    inputs = parity.suggest_inputs(reference)
    result = parity.check(reference, port, inputs, transforms=("jit",))
    assert (result.verdict, result.reasons) == ("PASS", ())
    port.attention.scale = 1.001 * 5**-0.5
    assert parity.check(reference, port, inputs, transforms=("jit",)).verdict == "FAIL"


SMALL = {"vocab_size": 37, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.slow
def test_a_spectrogram_is_as_long_as_all_positions_of_the_encoder():
    sizes = {"d_model": 16, "num_mel_bins": 8, "max_source_positions": 30}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 1, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 8}
    config = tf.WhisperConfig(**sizes, **SMALL, max_target_positions=20, decoder_start_token_id=1)
    inputs = parity.suggest_inputs(tf.WhisperModel(config).eval())
    assert inputs["input_features"].shape == (3, 8, 60)


@pytest.mark.slow
def test_experts_in_one_product_of_groups_are_run_in_float64():
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 3}
    model = tf.MixtralModel(tf.MixtralConfig(**sizes, **heads, **SMALL)).eval()
    inputs = parity.suggest_inputs(model)
    assert inputs["input_ids"].shape[0] == 3
    reference = Reference(
        model, lambda m, **x: m(**x).last_hidden_state, Inputs.of(inputs, np.dtype("float32"))
    )
    side = Prepared(reference, "float32")
    reports = list(side.compare(side.own, "torch's own grouped product, in float32"))
    found = {(report.kind, report.verdict) for report in reports}
    assert ("output", parity.Verdict.PASS) in found
    assert parity.Verdict.FAIL not in {verdict for _, verdict in found}
    grads = side.exact.parameter_grads
    assert any("experts" in name and a.any() for name, a in grads.items())
    # How many tokens go to an expert is counted in floats: that rounds nothing, and moves none.
    assert side.has_power
    output = side.budgets["output"]["output"]
    assert output.rms < 1e-6
