"""Whole models against transformers': every family, what each head gives, mistakes that fail."""

import json
from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from helpers.families.whole_model_mistakes import MISTAKES, attention, embedding
from helpers.families.whole_models import CASES, ROUNDED, USUAL, assert_gradients
from helpers.parity.findings import kinds
from jax_attn import models, transfer
from jax_attn.models import inputs, mlp
from jax_attn.parity.checking.judging import judge_port
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.compare import Verdict
from jax_attn.parity.run.inputs_and_runs import Inputs
from jax_attn.parity.run.port import Port
from jax_attn.parity.run.reference import Reference
from jax_attn.porting.verify.model_pair import _groups
from jax_attn.transfer.table import resolve


@pytest.fixture(scope="module", params=CASES)
def each(request, small):
    return small(request.param)


@pytest.mark.slow
def test_outputs_agree_and_mistakes_fail(each):
    """By a mask, by lengths and by a cache, with padding on both sides; mistakes by a mask."""
    assert each.judged(each.pair.port) is Verdict.PASS
    mistakes = MISTAKES.get(each.name, {})
    found = {words: each.by_mask(each.mistaken(change)) for words, change in mistakes.items()}
    assert {words for words, verdict in found.items() if verdict is not Verdict.FAIL} == set()


# what is mistaken -> case, what reads it -> how it reads it
PLANTED = {
    "lengths are not read": ("bert", "mask", lambda read: lambda _, *others: read(None, *others)),
    **{
        f"positions in a cache begin again, {name}": (
            *(name, "position_rows"),
            lambda read: lambda *arguments: read(*arguments[:-1], None),
        )
        for name in ("gpt2", "roberta, causal")
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_mistake_by_lengths_or_by_a_cache_alone_fails(name, small, monkeypatch):
    case, read, change = PLANTED[name]
    model = replace(small(case))  # anew: what is compiled has no mistake
    monkeypatch.setattr(inputs, read, change(getattr(inputs, read)))
    assert model.by_mask(model.pair.port) is Verdict.PASS
    assert model.judged(model.pair.port) is Verdict.FAIL


def as_halves(model, monkeypatch):
    """The first half of gpt-oss's features taken for gates, the second one for ups."""
    for layer in model.layers:
        gate, up = layer.mlp.experts.gate, layer.mlp.experts.up
        for name in ("kernel", "bias"):
            one, other = getattr(gate, name), getattr(up, name)
            in_turn = jnp.stack([one[...], other[...]], axis=-1)
            one[...], other[...] = jnp.split(in_turn.reshape(*one.shape[:-1], -1), 2, axis=-1)


def without_one(model, monkeypatch):
    """up · gate · sigmoid(alpha · gate), without the 1."""
    right = mlp.clamped_swiglu
    wrong = lambda gate, up, traits: right(gate, up, traits) - right(gate, 0 * up, traits)  # noqa: E731
    monkeypatch.setattr(mlp, "clamped_swiglu", wrong)


@pytest.mark.slow
@pytest.mark.parametrize("plant", [as_halves, without_one])
def test_gpt_oss_s_product_mistaken_fails(plant, small, monkeypatch):
    case = replace(small("gpt_oss"))  # anew: what is compiled has no mistake
    model = models.load(case.folder) if case.config else None
    assert case.by_mask(model) is Verdict.PASS
    plant(model, monkeypatch)
    assert case.by_mask(model) is Verdict.FAIL


def whole(module, tokens):
    """Both rows in one pass."""
    return module(tokens).logits


def in_two_calls(model, tokens, starts, counted):
    """Rows whose first call has as many tokens as `starts` says, the rest of them padding.

    counted: as many as it is told that they are.
    """
    T = tokens.shape[1]
    longest, least = max(starts), min(starts)
    starts = jnp.array(starts)[:, None]
    cache = model.empty_cache(2, 2 * T)
    first = model(tokens[:, :longest], jnp.array(counted), cache=cache)
    places = jnp.minimum(starts + jnp.arange(T - least), T - 1)
    later = jnp.take_along_axis(tokens, places, axis=1)
    rest = model(later, T - starts[:, 0], cache=first.cache)
    before = jnp.pad(first.logits, ((0, 0), (0, T - longest), (0, 0)))
    behind = jnp.clip(jnp.arange(T) - starts, 0, T - least - 1)
    after = jnp.take_along_axis(rest.logits, behind[..., None], axis=1)
    return jnp.where((jnp.arange(T) < starts)[..., None], before, after)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "roberta, causal", "mistral"])
def test_rows_of_different_lengths_go_on_from_a_cache(name, small):
    """Within the budget of one pass; not if the first call's padding counts as tokens."""
    model = small(name)
    tokens = np.random.default_rng(0).integers(3, 41, (2, 7)).astype(np.int32)
    given = Inputs.of({"tokens": tokens}, np.float32)
    reference = Reference(model.pair.reference, whole, given)
    prepared = Prepared(reference, "float32", gradients=False)

    def judged(counted):
        call = partial(in_two_calls, starts=(5, 3), counted=counted)
        port = Port(model.pair.port, lambda model, tokens: call(model, tokens), given)
        return judge_port(prepared, port, ("jit",), to_torch=None).verdict

    assert (judged((5, 3)), judged((5, 5))) == (Verdict.PASS, Verdict.FAIL)


@pytest.mark.slow
@pytest.mark.parametrize("name", USUAL)
def test_gradients_of_every_parameter(name, small):
    """Of some cases; GPT-2's are in test_verify_model.py, all in test_every_gradient.py."""
    assert_gradients(small(name).pair)


@pytest.mark.slow
def test_gradients_compared_in_groups_are_those_compared_at_once(small):
    pair = small("bert, tanh").pair
    assert len(_groups(pair.reference, 7000)) == 2
    once, groups = assert_gradients(pair), pair.check(part=7000)
    assert {t.label for t in once.tensors} == {t.label for t in groups.tensors}
    assert len(groups.tensors) == len(once.tensors)
    assert groups.verdict is once.verdict is Verdict.PASS
    assert "parameters-selected" not in kinds(groups)


@pytest.mark.slow
def test_a_gradient_of_the_padding_s_own_vector_is_noticed(small):
    """torch's padding_idx gives it none, and neither does ours: see assert_gradients."""
    model = small("bert, tanh")
    mistaken = replace(model.pair, port=model.mistaken(embedding(pad=None)))
    with pytest.raises(AssertionError, match=r"row 0 of grad bert\.embeddings\.word_embeddings"):
        assert_gradients(mistaken)


@pytest.mark.slow
def test_falcons_slopes_are_rounded_as_transformers_rounds_them(small):
    """Its float32 is the one that ours is near; float64, which rounds none of them, is not."""
    model = small(ROUNDED)
    given = model.pair.inputs
    tokens, mask = (torch.from_numpy(given[name]) for name in ("tokens", "mask"))
    ours = model.pair.port_outputs(model.pair.port, given["tokens"], given["mask"])["logits"]
    unrounded = model.mistaken(attention(bias=lambda a: a.bias._replace(rounded=False)))
    other = model.pair.port_outputs(unrounded, given["tokens"], given["mask"])["logits"]
    with torch.no_grad():
        theirs = model.pair.reference_outputs(model.pair.reference, tokens, mask)["logits"].numpy()
    assert np.abs(other - theirs).max() > 100 * np.abs(ours - theirs).max()
    result = model.pair.check()
    assert result.verdict is Verdict.INCONCLUSIVE
    assert result.reasons[0].kind == "reference-errs"
    assert "bfloat16 at modeling_falcon.py" in result.reasons[0]
    assert model.of("bfloat16").check().verdict is Verdict.PASS


@pytest.mark.slow
def test_back_to_both_sides_bit_for_bit(each, tmp_path):
    """What is written for torch is the file that was read; what is written for Flax loads."""
    file = dict(transfer.load_checkpoint(each.folder)) if each.config else {}
    models.save(each.pair.port, tmp_path / "torch")
    models.save(each.pair.port, tmp_path / "flax", to="flax")
    written = dict(transfer.load_checkpoint(tmp_path / "torch"))
    passed_over = resolve.passed(each.pair.layout.passed_over, file)
    assert file.keys() - written.keys() <= passed_over.keys()
    for key, tensor in written.items():
        assert tensor.tobytes() == file[key].tobytes(), key
    again = models.load(tmp_path / "flax")
    for path, array in transfer.flatten(each.pair.port).items():
        assert np.asarray(array).tobytes() == np.asarray(transfer.flatten(again)[path]).tobytes()


@pytest.mark.slow
def test_untrained_models_have_the_same_parts(each):
    """Of the config that a loaded model keeps: every parameter of the file, of the same shape."""
    config = json.loads(each.pair.port.origin.config)
    model = models.from_config(config, rngs=nnx.Rngs(0))
    loaded = transfer.flatten(each.pair.port)
    assert {p: a.shape for p, a in transfer.flatten(model).items()} == {
        path: array.shape for path, array in loaded.items()
    }
