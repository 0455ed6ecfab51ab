"""Drawn tokens: the logits that transformers draws from, drawn as often as they say."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from scipy import stats

from helpers.families.whole_models import made
from jax_attn import models
from jax_attn.attention.checks import ArgumentError
from jax_attn.models import sampling
from jax_attn.models.defaults import Defaults
from jax_attn.models.sampling import Sampling

pytestmark = pytest.mark.filterwarnings("error")
B, T, NEW, V = 3, 7, 5, 41
TOKENS = np.random.default_rng(0).integers(3, V, (B, T)).astype(np.int32)
NUMBERS = {
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_k of more than there are": {"temperature": 1.0, "top_k": 99},
    "top_p": {"temperature": 1.0, "top_p": 0.6},
    "top_p of hardly any": {"temperature": 1.0, "top_p": 1e-6},
    "top_p of all": {"temperature": 1.0, "top_p": 1.0},
    "min_p": {"temperature": 1.0, "min_p": 0.3},
    "repetition_penalty": {"temperature": 1.0, "repetition_penalty": 1.7},
    "all, in transformers' order": {
        "temperature": 0.6,
        "top_k": 11,
        "top_p": 0.8,
        "min_p": 0.1,
        "repetition_penalty": 1.3,
    },
}


@pytest.fixture(scope="module")
def theirs():
    return made("llama").eval()


@pytest.fixture(scope="module")
def ours(theirs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    theirs.save_pretrained(folder)
    return models.load(folder)


@pytest.mark.parametrize("name", NUMBERS)
def test_logits_are_changed_as_transformers_changes_them(name, theirs):
    """In its own loop: raw and changed logits of each step.

    The largest is subtracted here, there it is not: four roundings, each of no more than the sum
    of a logit and the largest.
    """
    torch.manual_seed(0)
    options = {"do_sample": True, "top_k": 0, "eos_token_id": None, "pad_token_id": 0}
    given = torch.tensor(TOKENS, dtype=torch.int64)
    out = theirs.generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=NEW,
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
        **options | NUMBERS[name],
    )
    seen = np.zeros((B, V), bool)
    for step, (raw, wanted) in enumerate(zip(out.logits, out.scores, strict=True)):
        np.put_along_axis(seen, out.sequences[:, : T + step].numpy(), True, axis=1)
        numbers = sampling.settled(Sampling(**NUMBERS[name]), V)
        found = np.float64(sampling.changed(jnp.asarray(raw.numpy()), seen, numbers))
        wanted = np.float64(wanted.numpy())
        assert (np.isinf(found) == np.isinf(wanted)).all()
        largest = wanted.max(axis=1, keepdims=True)
        bound = 4 * np.finfo(np.float32).eps / 2 * (np.abs(wanted) + np.abs(largest))
        is_left = np.isfinite(found)
        gap = found[is_left] - (wanted - largest)[is_left]
        assert (np.abs(gap) <= bound[is_left]).all()


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_tokens_are_drawn_as_often_as_the_logits_say(temperature):
    """By a χ² test, which the other temperature does not pass."""
    logits = np.random.default_rng(1).standard_normal(7)
    numbers = Sampling(temperature=temperature, top_k=5)
    rows = jnp.tile(jnp.asarray(logits, jnp.float32), (4001, 1))
    counts = np.bincount(sampling.chosen(rows, None, numbers, jax.random.key(2)), minlength=7)

    def p_value(numbers):
        p = np.asarray(jax.nn.softmax(sampling.changed(rows[:1], None, numbers)[0]), np.float64)
        return stats.chisquare(counts[p > 0], counts.sum() * p[p > 0] / p.sum()).pvalue

    assert counts[np.argsort(logits)[:2]].sum() == 0
    assert p_value(numbers) > 1e-3
    assert p_value(numbers._replace(temperature=2.2 - temperature)) < 1e-9


def test_the_likeliest_of_equal_logits_is_the_first_and_all_of_them_are_kept():
    logits = jnp.array([[0.0, 3.0, 1.0, 3.0, 3.0]])
    assert sampling.chosen(logits, None, Sampling(), None).tolist() == [1]
    kept = sampling.changed(logits, None, Sampling(temperature=1.0, top_k=2))
    assert np.isfinite(kept).tolist() == [[False, True, False, True, True]]


def test_the_likeliest_stays_however_extreme_the_numbers():
    logits = jnp.array([[0.5, 1.0, 9.0, 4.0]])
    for extreme in ({"temperature": 1e-38}, {"temperature": 1.0, "top_p": 1e-45}):
        drawn = sampling.chosen(logits, None, Sampling(**extreme), jax.random.key(0))
        assert drawn.tolist() == [2]
    far = jnp.array([[0.0, -20.0, -21.0]])
    assert np.isfinite(sampling.changed(far, None, Sampling(1.0, top_p=1.0))).all()


@pytest.mark.slow
def test_a_key_decides_and_the_penalty_holds_without_a_draw(ours):
    how = {"temperature": 1.3, "eos_token_id": ()}
    first, again, other = (
        ours.generate(TOKENS, None, NEW, key=jax.random.key(n), **how).tolist() for n in (0, 0, 1)
    )
    assert first == again != other
    greedy = ours.generate(TOKENS, None, 20, eos_token_id=(), repetition_penalty=1e6)
    for row, prompt in zip(np.asarray(greedy), TOKENS, strict=True):
        assert len({*row.tolist(), *prompt.tolist()}) == 20 + len({*prompt.tolist()})


@pytest.mark.slow
def test_other_numbers_compile_nothing(ours):
    compiled = []

    def note(name, _, **about):
        if name.endswith("backend_compile_duration"):
            compiled.append(about.get("fun_name"))

    def run(count=NEW, T=T, **numbers):
        tokens = np.resize(TOKENS, (B, T))
        key = jax.random.key(0)
        return ours.generate(tokens, None, count, key=key, eos_token_id=(), **numbers).tolist()

    numbers = {"temperature": 0.7, "top_k": 9, "top_p": 0.7}
    run(**numbers)
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        run(temperature=1, top_k=10**12, top_p=np.float64(0.9))
        assert compiled == []
        for length, count in ((2, 5), (9, 7), (11, 2)):
            run(T=length, count=count, **numbers)
        assert not {"jit(begun)", "jit(_gone_on)"} & {*compiled}
        run(T=17, **numbers)
        assert {"jit(begun)", "jit(_gone_on)"} <= {*compiled}
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


LLAMA = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [5, 40, 41]}
FILES = {
    "none": (None, Defaults(ends=(7,))),
    "a draw": (LLAMA, Defaults((5, 40), True, Sampling(0.6, 50, 0.9))),
    "a draw of all": (
        {"do_sample": True, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0},
        Defaults((), True, Sampling(1.0)),
    ),
    "numbers without a draw": (
        {"temperature": 0.6, "repetition_penalty": 1.2},
        Defaults((), False, Sampling(0.6, repetition_penalty=1.2)),
    ),
    "an end": ({"eos_token_id": 3, "num_beams": 1, "min_length": 0}, Defaults((3,))),
    "no end": ({"eos_token_id": -1}, Defaults()),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_defaults_is_read(name):
    file, wanted = FILES[name]
    assert Defaults.of({"eos_token_id": 7, "vocab_size": V}, file) == wanted


WRONG = {
    "beams": ({"num_beams": 4}, "num_beams: not supported, got 4; take it out of the file"),
    "ends by name": ({"eos_token_id": "</s>"}, "eos_token_id: expected tokens, got '</s>'"),
    "a top_p above 1": (
        {"do_sample": True, "top_p": 1.2},
        "top_p: expected a number above 0 and at most 1, got float 1.2; give top_p=",
    ),
    "a temperature of 0": (
        {"do_sample": True, "temperature": 0.0},
        "temperature: expected a number above 0",
    ),
    "a penalty in words": ({"repetition_penalty": "1.2"}, "repetition_penalty: expected a number"),
    "a number in a list": ({"do_sample": True, "top_p": [0.9]}, "top_p: expected a number above"),
    "a draw in words": ({"do_sample": "no"}, "do_sample: expected true or false, got 'no'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_file_asks_for_in_vain_is_refused_by_generate(name, theirs, tmp_path):
    file, says = WRONG[name]
    theirs.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(file))
    model = models.load(tmp_path)
    with pytest.raises(ArgumentError, match=f"model.generation: {says}"):
        model.generate(TOKENS, None, NEW, key=jax.random.key(0))
    model.generation = Defaults()
    assert model.generate(TOKENS, None, 1).shape == (B, 1)


def test_a_call_wins_over_a_file_that_is_wrong(theirs, tmp_path):
    """What does not count is not told: numbers of a draw, if nothing is drawn."""
    theirs.save_pretrained(tmp_path)
    wrong = {"eos_token_id": "</s>", "top_p": 1.2, "typical_p": 0.9, "top_k": -1}
    (tmp_path / "generation_config.json").write_text(json.dumps(wrong))
    model = models.load(tmp_path)
    assert model.generate(TOKENS, None, 1, eos_token_id=5).shape == (B, 1)
    with pytest.raises(ArgumentError) as told:
        model.generate(TOKENS, None, 1, temperature=1.0, top_p=0.9, key=jax.random.key(0))
    names = re.findall(r"model\.generation: (\w+)", str(told.value))
    assert names == ["eos_token_id", "top_k", "typical_p"]


@pytest.mark.parametrize("text", ["[]", "{", '{"a": 1, "a": 2}'])
def test_a_file_that_is_no_config_is_refused_by_generate_alone(text, theirs, tmp_path):
    theirs.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    model = models.load(tmp_path)
    assert model(TOKENS).logits.shape == (B, T, V)
    with pytest.raises(ArgumentError, match="generation: generation_config"):
        model.generate(TOKENS, None, NEW)


@pytest.mark.slow
def test_a_call_wins_over_its_checkpoint_and_save_keeps_the_file(theirs, tmp_path):
    theirs.save_pretrained(tmp_path / "file")
    (tmp_path / "file" / "generation_config.json").write_text(json.dumps(LLAMA))
    model = models.load(tmp_path / "file")
    with pytest.raises(ArgumentError, match="key: expected one jax"):
        model.generate(TOKENS, None, NEW)
    key = jax.random.key(3)
    as_file = model.generate(TOKENS, None, NEW, key=key)
    said = {"temperature": 0.6, "top_k": 50, "top_p": 0.9, "eos_token_id": (5, 40)}
    assert (as_file == model.generate(TOKENS, None, NEW, key=key, **said)).all()
    likeliest = model.generate(TOKENS, None, NEW, temperature=0, eos_token_id=())
    model.generation = Defaults()
    assert (likeliest == model.generate(TOKENS, None, NEW)).all()
    for n, file in enumerate((LLAMA, {})):
        (tmp_path / "file" / "generation_config.json").write_text(json.dumps(file))
        models.save(models.load(tmp_path / "file"), saved := tmp_path / f"saved {n}")
        assert json.loads((saved / "generation_config.json").read_text()) == file


REFUSED = {
    "a temperature below 0": ({"temperature": -1.0}, "temperature: expected a number above 0, or"),
    "no key": ({"temperature": 1.0}, "key: expected one jax.random.key"),
    "top_k of 0": ({"temperature": 1.0, "top_k": 0}, "top_k: expected an int ≥ 1"),
    "top_p of 0": ({"temperature": 1.0, "top_p": 0.0}, "top_p: expected a number above 0 and"),
    "min_p of 2": ({"temperature": 1.0, "min_p": 2}, "min_p: expected a number of 0 to 1"),
    "no penalty": ({"repetition_penalty": 0}, "repetition_penalty: expected a number above 0"),
    "top_p without a draw": ({"top_p": 0.9}, "top_p: expected a temperature beside it, got none"),
    "a choice and numbers": (
        {"choose": lambda logits, _: logits.argmax(-1), "temperature": 1.0},
        "temperature: expected None beside choose",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_numbers_are_refused_by_name(name, ours):
    given, says = REFUSED[name]
    with pytest.raises(ArgumentError, match=says):
        ours.generate(TOKENS, None, NEW, **given)


def test_an_unknown_option_is_refused(ours):
    with pytest.raises(TypeError, match="unexpected arguments do_sample, num_beams"):
        ours.generate(TOKENS, None, NEW, do_sample=True, num_beams=4)
