"""Tokens that a model chooses one after another: those that transformers chooses."""

from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import P
from jax.sharding import NamedSharding

from helpers.attention.meshes import KINDS, mesh
from helpers.families.whole_models import SmallModel, made
from jax_attn import models
from jax_attn.attention.checks import ArgumentError
from jax_attn.bench.pair.checkpoint import cache_name
from jax_attn.models.generate import likeliest
from jax_attn.models.model import _generated

pytestmark = pytest.mark.filterwarnings("error")
B, T, NEW, V = 3, 7, 9, 41
TOKENS = np.random.default_rng(0).integers(3, V, (B, T)).astype(np.int32)
LENGTHS = np.array([T, 4, 1], np.int32)
FAMILIES = (
    "gpt2",
    "bert, causal",
    "roberta, causal",
    "gpt_bigcode",
    "gpt_neox",
    "falcon, groups",
    "opt",
    "phi",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
)


class Row:
    """A case of both sides, in float64, in which no two logits are as good as equal."""

    def __init__(self, name, folder):
        self.name, self.folder = name, folder

    @cached_property
    def theirs(self):
        return made(self.name).double()

    @cached_property
    def ours(self):
        self.theirs.save_pretrained(self.folder)
        return models.load(self.folder)

    def likeliest(self, b):
        """What follows a row that is read alone, by calls of transformers' model.

        Its `generate` counts RoBERTa's positions from 0, which its model does not (5.24).
        """
        name, cache, found = cache_name(self.theirs), None, []
        last = torch.tensor(TOKENS[b : b + 1, : LENGTHS[b]])
        with torch.no_grad():
            for _ in range(NEW):
                out = self.theirs(last, **{name: cache}, use_cache=True)
                last, cache = out.logits[:, -1:].argmax(-1), out[name]
                found.append(int(last))
        return found


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def llama(tmp_path):
    return Row("llama", tmp_path)


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES)]
)
def test_rows_of_any_length_go_on_as_transformers_goes_on(name, tmp_path):
    """Together, through a cache, as each of them alone; and end behind either of two tokens."""
    row = Row(name, tmp_path)
    wanted = [row.likeliest(b) for b in range(B)]
    assert row.ours.generate(TOKENS, LENGTHS, NEW).tolist() == wanted
    ends = (wanted[0][3], wanted[1][1])
    found = row.ours.generate(TOKENS, LENGTHS, NEW, eos_token_id=ends).tolist()
    for got, want in zip(found, wanted, strict=True):
        read = next((i + 1 for i, token in enumerate(want) if token in ends), NEW)
        assert got == want[:read] + [want[read - 1]] * (NEW - read)


def test_transformers_own_generate_agrees(llama):
    found = llama.ours.generate(TOKENS, None, NEW).tolist()
    given = torch.tensor(TOKENS)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = llama.theirs.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=NEW, **options
    )
    assert found == wanted[:, T:].tolist()


def test_nothing_is_read_once_all_rows_have_ended(llama):
    """It asks for one choice of the prompt's logits, and one for each token that it reads."""
    asked = []

    def counted(logits, _):
        jax.debug.callback(lambda: asked.append(1))
        return jnp.argmax(logits, -1)

    wanted = np.asarray(llama.ours.generate(TOKENS, LENGTHS, NEW))
    ends = tuple(wanted[:, 2])
    llama.ours.generate(TOKENS, LENGTHS, NEW, eos_token_id=ends, choose=counted).block_until_ready()
    jax.effects_barrier()
    assert len(asked) == np.argmax(np.isin(wanted, ends), axis=1).max() + 1 < NEW


def drawn(logits, key):
    return jax.random.categorical(key, logits)


def by_key_alone(logits, key):
    return jax.random.randint(key, logits.shape[:1], 0, V)


def test_each_step_has_a_key_of_its_own(llama):
    found = llama.ours.generate(TOKENS, None, NEW, choose=by_key_alone, key=jax.random.key(0))
    assert all(len({*row}) > NEW // 2 for row in found.tolist())


@pytest.mark.slow
def test_a_choice_draws_by_the_logits(llama):
    """The first token by the distribution that they are, the same one by the same key."""
    model = llama.ours
    keys = jax.random.split(jax.random.key(0), 150)
    many = np.stack([model.generate(TOKENS, LENGTHS, 2, choose=drawn, key=key) for key in keys])
    again = model.generate(TOKENS, LENGTHS, 2, choose=drawn, key=keys[0])
    assert (many[0] == again).all()
    logits = model(TOKENS, LENGTHS).logits[jnp.arange(B), LENGTHS - 1]
    for b, wanted in enumerate(np.asarray(jax.nn.softmax(logits))):
        shares = np.bincount(many[:, b, 0], minlength=V) / len(keys)
        # Five standard deviations of a share.
        assert (np.abs(shares - wanted) <= 5 * np.sqrt(wanted / len(keys)) + 1 / len(keys)).all()


def test_only_the_last_logits_are_computed(llama):
    given = jnp.asarray(TOKENS), LENGTHS, None, NEW, (), likeliest
    text = _generated.lower(llama.ours, *given).compile().as_text()
    assert f"[{B},{T},{V}]" not in text
    assert f"[{B},1,{V}]" in text or f"[{B},{V}]" in text


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_mesh(kind, llama):
    on = mesh(kind, rows=2, heads=2)
    columns, rows = (NamedSharding(on, spec) for spec in (P(None, "heads"), P("heads")))
    cut = {f"{name}_proj": columns for name in "qkv"} | {"out_proj": rows}
    sharding = {f"layers.{{layer}}.attention.{name}.kernel": at for name, at in cut.items()}
    tokens, lengths = np.concatenate([TOKENS, TOKENS[:1]]), np.append(LENGTHS, 5)
    wanted = llama.ours.generate(tokens, lengths, NEW, eos_token_id=5)
    with jax.set_mesh(on):
        model = models.load(llama.folder, sharding=sharding)
        placed = [jax.device_put(x, NamedSharding(on, P("rows"))) for x in (tokens, lengths)]
        found = model.generate(*placed, NEW, eos_token_id=5)
    assert (np.asarray(found) == np.asarray(wanted)).all()


REFUSED = {
    "none": ({"max_new_tokens": 0}, "max_new_tokens: expected an int ≥ 1, got int 0"),
    "an end outside the vocabulary": (
        {"eos_token_id": (5, V)},
        "eos_token_id: expected a token of 0 to 40, or a sequence of them, got 5, 41",
    ),
    "ends by name": ({"eos_token_id": "</s>"}, "eos_token_id: expected a token of 0 to 40"),
    "ends in a list in a list": ({"eos_token_id": [[2], [2, 3]]}, r"got \[2\], \[2, 3\]"),
    "an end of True": ({"eos_token_id": True}, "to 40, or a sequence of them, got True"),
    "no function": ({"choose": "greedy"}, "choose: expected a function of logits and a key, got"),
    "a choice of probabilities": (
        {"choose": lambda logits, _: jax.nn.softmax(logits)},
        r"choose: expected integers of shape \(3,\), a token for each row, got float64",
    ),
    "a seed": ({"key": 0}, r"key: expected one jax\.random\.key"),
    "lengths of 0": ({"lengths": np.array([7, 0, 1])}, "lengths: expected 1 to 7, got 0 to 7"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_are_refused_by_name(name, llama):
    given, says = REFUSED[name]
    arguments = {"lengths": LENGTHS, "max_new_tokens": NEW} | given
    with pytest.raises(ArgumentError, match=says):
        llama.ours.generate(TOKENS, **arguments)


MODELS = {
    "a table of positions that ends": (
        "gpt2",
        "max_new_tokens: expected at most 17 behind 7 tokens, got 18",
    ),
    "an encoder": ("bert", "expected a causal model"),
    "ALiBi": ("bloom", "expected a model without ALiBi"),
    "a classifier": (
        "gpt2, classes",
        "expected one with the head of a language model and no other",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_cannot_go_on_are_refused(name, tmp_path):
    case, says = MODELS[name]
    small = SmallModel(case, tmp_path)
    assert small.config
    with pytest.raises(ArgumentError, match=says):
        models.load(tmp_path).generate(TOKENS, LENGTHS, 18)


def test_a_row_goes_on_to_the_end_of_the_table(tmp_path):
    small = SmallModel("gpt2", tmp_path)
    assert small.config
    found = models.load(tmp_path).generate(TOKENS, None, 17)
    assert (found.shape, found.dtype) == ((B, 17), jnp.int32)
