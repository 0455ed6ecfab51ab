"""Tokens that a model chooses one after another: those that transformers chooses."""

from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax import P
from jax.sharding import NamedSharding

from helpers.attention.meshes import KINDS, mesh
from helpers.families.whole_models import made
from jax_attn import models
from jax_attn.attention.checks import ArgumentError
from jax_attn.bench.pair.checkpoint import cache_name
from jax_attn.models import generate
from jax_attn.models.asked import Rows, Wanted
from jax_attn.models.sampling import Sampling

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
    "gemma3_text",
    "mixtral",
    "gpt_oss",
    "bloom",
    "falcon, alibi",
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

    def likeliest(self, b, count=NEW):
        """What follows a row that is read alone, by calls of transformers' model.

        Its `generate` counts RoBERTa's positions from 0, which its model does not (5.24).
        """
        name, cache, found = cache_name(self.theirs), None, []
        last = torch.tensor(TOKENS[b : b + 1, : LENGTHS[b]])
        with torch.no_grad():
            for _ in range(count):
                out = self.theirs(last, **{name: cache}, use_cache=True)
                last, cache = out.logits[:, -1:].argmax(-1), out[name]
                found.append(int(last))
        return found


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    with jax.enable_x64(True):
        row = Row("llama", tmp_path_factory.mktemp("llama"))
        assert row.ours
    return row


def assert_alike(row):
    wanted = [row.likeliest(b) for b in range(B)]
    assert row.ours.generate(TOKENS, LENGTHS, NEW, eos_token_id=()).tolist() == wanted
    ends = (wanted[0][3], wanted[1][1])
    found = row.ours.generate(TOKENS, LENGTHS, NEW, eos_token_id=ends).tolist()
    for got, want in zip(found, wanted, strict=True):
        read = next((i + 1 for i, token in enumerate(want) if token in ends), NEW)
        assert got == want[:read] + [want[read - 1]] * (NEW - read)


def test_rows_of_any_length_go_on_as_transformers_goes_on(llama):
    """Together, through a cache, as each of them alone; and end behind either of two tokens."""
    assert_alike(llama)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_so_do_those_of_other_families(name, tmp_path):
    assert_alike(Row(name, tmp_path))


ENDS = (5, np.int64(5), np.array(5), jnp.array([5]), [5, 5], torch.tensor(5))


@pytest.mark.slow
def test_ends_of_any_kind_are_read_alike(llama):
    wanted = llama.ours.generate(TOKENS, LENGTHS, NEW, eos_token_id=(5,)).tolist()
    for end in ENDS:
        assert llama.ours.generate(TOKENS, LENGTHS, NEW, eos_token_id=end).tolist() == wanted


@pytest.mark.slow
def test_transformers_own_generate_agrees(llama):
    found = llama.ours.generate(TOKENS, None, NEW, eos_token_id=()).tolist()
    given = torch.tensor(TOKENS)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = llama.theirs.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=NEW, **options
    )
    assert found == wanted[:, T:].tolist()


@pytest.mark.slow
def test_nothing_is_read_once_all_rows_have_ended(llama):
    """It asks for one choice of the prompt's logits, and one for each token that it reads."""
    asked = []

    def counted(logits, _):
        jax.debug.callback(lambda: asked.append(1))
        return jnp.argmax(logits, -1)

    wanted = np.asarray(llama.ours.generate(TOKENS, LENGTHS, NEW, eos_token_id=()))
    ends = tuple(wanted[:, 2])
    llama.ours.generate(TOKENS, LENGTHS, NEW, eos_token_id=ends, choose=counted).block_until_ready()
    jax.effects_barrier()
    assert len(asked) == np.argmax(np.isin(wanted, ends), axis=1).max() + 1 < NEW


KEYS = {"new": jax.random.key, "old": jax.random.PRNGKey}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KEYS)
def test_a_choice_reads_each_step_s_logits_and_a_key_of_its_own(kind, llama):
    """The logits are those of one pass over the prompt and all that was chosen."""
    read = []

    def drawn(logits, key):
        jax.debug.callback(lambda *a: read.append(a), logits, jax.random.bits(key), ordered=True)
        return jax.random.categorical(key, logits)

    options = {"choose": drawn, "key": KEYS[kind](0), "eos_token_id": ()}
    found = llama.ours.generate(TOKENS, None, NEW, **options)
    jax.effects_barrier()
    logits, keys = map(np.stack, zip(*read, strict=True))
    assert len({*keys.tolist()}) == NEW
    whole = llama.ours(np.concatenate([TOKENS, found], axis=1)).logits[:, T - 1 : -1]
    # A callback reads float32, to which float64's roundoff may give the next number.
    in_float32 = np.asarray(whole, np.float32)
    np.testing.assert_array_max_ulp(np.float32(logits.swapaxes(0, 1)), in_float32, maxulp=1)
    assert (np.asarray(found) != np.asarray(whole).argmax(-1)).any()


def test_the_parameters_are_read_where_they_lie(llama):
    """A call copies none of them, and the next one reads what has been put in place of one."""
    model = models.load(llama.folder)
    before = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(nnx.state(model))]
    found = model.generate(TOKENS, LENGTHS, NEW)
    assert before == [x.unsafe_buffer_pointer() for x in jax.tree.leaves(nnx.state(model))]
    table = model.token_embedding.embedding
    table.set_value(table.get_value()[::-1])
    assert (model.generate(TOKENS, LENGTHS, NEW) != found).any()


@pytest.mark.slow
def test_in_the_caller_s_own_transforms(llama):
    model = llama.ours
    wanted = model.generate(TOKENS, LENGTHS, 2).tolist()
    assert jax.jit(lambda *given: model.generate(*given, 2))(TOKENS, LENGTHS).tolist() == wanted
    by_row = jax.vmap(lambda row, n: model.generate(row[None], n[None], 2)[0])
    assert by_row(TOKENS, LENGTHS).tolist() == wanted
    given = nnx.jit(lambda model, *given: model.generate(*given, 2))(model, TOKENS, LENGTHS)
    assert given.tolist() == wanted


def test_only_the_last_logits_are_computed(llama):
    prompt = generate.prompt_of(Rows(TOKENS, LENGTHS, None))
    given = Wanted(Sampling(), None, (), None), prompt, None, None
    program = generate.begun.lower(llama.ours, *given, length=32).compile()
    assert f"[{B},{prompt.tokens.shape[1]},{V}]" not in program.as_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_mesh(kind, llama):
    on = mesh(kind, rows=2, heads=2)
    columns, rows = (NamedSharding(on, spec) for spec in (P(None, "heads"), P("heads")))
    cut = {f"{name}_proj": columns for name in "qkv"} | {"out_proj": rows}
    sharding = {f"layers.{{layer}}.attention.{name}.kernel": at for name, at in cut.items()}
    tokens, lengths = np.concatenate([TOKENS, TOKENS[:1]]), np.append(LENGTHS, 5)
    how = {"temperature": 1.1, "top_k": 9, "top_p": 0.9, "repetition_penalty": 1.3}
    how |= {"eos_token_id": 5, "key": jax.random.key(0)}
    wanted = llama.ours.generate(tokens, lengths, NEW, **how)
    with jax.set_mesh(on):
        model = models.load(llama.folder, sharding=sharding)
        placed = [jax.device_put(x, NamedSharding(on, P("rows"))) for x in (tokens, lengths)]
        found = model.generate(*placed, NEW, **how)
    assert (np.asarray(found) == np.asarray(wanted)).all()


REFUSED = {
    "none": ({"max_new_tokens": 0}, "max_new_tokens: expected an int ≥ 1, got int 0"),
    "an end outside the vocabulary": (
        {"eos_token_id": (5, V)},
        "eos_token_id: expected a token of 0 to 40, or a sequence of them, got 5, 41",
    ),
    "ends by name": ({"eos_token_id": "</s>"}, "eos_token_id: expected a token of 0 to 40"),
    "ends in a list in a list": ({"eos_token_id": [[2], [2, 3]]}, r"got \[2\], \[2, 3\]"),
    "ends of a dict": ({"eos_token_id": {"a": 2}}, "got {'a': 2}"),
    "an end of True": ({"eos_token_id": True}, "to 40, or a sequence of them, got True"),
    "no function": ({"choose": "greedy"}, "choose: expected a function of logits and a key, got"),
    "a choice of probabilities": (
        {"choose": lambda logits, _: jax.nn.softmax(logits)},
        r"choose: expected integers of shape \(3,\), a token for each row, got float64",
    ),
    "a seed": ({"key": 0}, r"key: expected one jax\.random\.key"),
    "half a key": ({"key": np.zeros(3, np.uint32)}, r"key: expected one jax\.random\.key"),
    "all at once": (
        {"max_new_tokens": 0, "choose": "greedy", "lengths": [1, 2, 3]},
        "(?s)lengths: expected.*max_new_tokens: expected.*choose: expected",
    ),
    "torch's lengths": ({"lengths": torch.ones(3, dtype=torch.int32)}, "lengths: expected"),
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
        "max_new_tokens: expected at most 17 after 7 tokens, got 18",
    ),
    "an encoder": ("bert", "expected a causal model"),
    "a classifier": (
        "gpt2, classes",
        "expected a language model's head and no other",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_cannot_go_on_are_refused(name, small):
    case, says = MODELS[name]
    with pytest.raises(ArgumentError, match=says):
        models.load(small(case).folder).generate(TOKENS, LENGTHS, 18)


@pytest.mark.slow
def test_a_row_goes_on_to_the_end_of_the_table_and_no_further(tmp_path):
    """Under jit, where lengths are not known, -1 stands for what would follow."""
    row = Row("gpt2", tmp_path)
    model, most = row.ours, 23 - T + 1
    wanted = row.likeliest(0, most)
    assert model.generate(TOKENS[:1], None, most, eos_token_id=()).tolist() == [wanted]
    longer = jax.jit(lambda n: model.generate(TOKENS, n, most + 2, eos_token_id=()))
    found = longer(LENGTHS)
    assert found[0].tolist() == [*wanted, -1, -1]
