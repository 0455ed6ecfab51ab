"""`suggest_inputs`: that its inputs run, and that each property that it promises holds.

The references are designs, torch's own modules, modules written by hand, and whole models of
transformers', all small and with random weights.
"""

import numpy as np
import pytest
import torch
import transformers as tf
from torch import nn

from helpers.parity.block_pair import pair
from helpers.parity.one_reference import Once
from helpers.parity.suggested import (
    PLAIN,
    POSITIONS,
    ROWS,
    VOCABULARY,
    ByHand,
    D,
    N,
    OfImages,
    reference,
    suggested,
)
from jax_attn import parity
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.run.inputs_and_runs import Inputs
from jax_attn.parity.run.reference import Reference

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
