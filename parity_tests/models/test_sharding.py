"""Where parameters lie: `models.load(sharding=…)`, and every kind of it that is refused."""

import jax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_attn import models, transfer
from jax_attn.transfer import TransferError

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 41,
    "intermediate_size": 29,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    written = tmp_path_factory.mktemp("made") / "llama"
    models.save(models.from_config(CONFIG, rngs=nnx.Rngs(0)), written)
    return written


@pytest.mark.slow
def test_every_parameter_lies_where_it_is_asked_to(folder):
    """By one sharding for all, and by a function of path and shape."""
    mesh = jax.make_mesh((1,), ("data",))
    everywhere, rows = (NamedSharding(mesh, P(*axes)) for axes in ((), ("data",)))
    asked = {}

    def by_path(path, shape):
        asked[path] = shape
        return rows if path.endswith("embedding") else everywhere

    for sharding in (everywhere, by_path):
        loaded = models.load(folder, sharding=sharding)
        for path, array in transfer.flatten(loaded).items():
            wanted = everywhere if sharding is everywhere else by_path(path, array.shape)
            assert array.sharding == wanted, path
    assert asked == {path: a.shape for path, a in transfer.flatten(models.load(folder)).items()}


def test_a_pattern_of_paths_says_where_they_lie(folder):
    """A pattern that no path matches would leave what it was meant for on every device."""
    mesh = jax.make_mesh((2,), ("heads",))
    halves = NamedSharding(mesh, P(None, "heads"))
    heads = "layers.{layer}.attention.q_proj.kernel"
    loaded = models.load(folder, sharding={heads: halves})
    for path, array in transfer.flatten(loaded).items():
        assert (array.sharding == halves) == path.endswith("q_proj.kernel"), path
    with pytest.raises(TransferError, match=r"(?s)sharding 'q_proj'.*sharding 'blocks.\{n\}.wq'"):
        models.load(folder, sharding={heads: halves, "q_proj": halves, "blocks.{n}.wq": halves})


def test_under_a_mesh_a_spec_is_a_sharding(folder):
    head = "lm_head.kernel"
    with jax.set_mesh(mesh := jax.make_mesh((1,), ("heads",))):
        by_spec = [models.load(folder, sharding=of) for of in (P(), {head: P("heads")})]
    assert by_spec[0].final_norm.scale[...].sharding == NamedSharding(mesh, P())
    assert by_spec[1].lm_head.kernel[...].sharding == NamedSharding(mesh, P("heads"))
    with pytest.raises(TransferError, match="sharding"):
        models.load(folder, sharding=mesh)


NO_SHARDINGS = {
    # what it is -> (given, the places that are told)
    "a name": ("heads", ["sharding"]),
    "a number": (3, ["sharding"]),
    "a list": ([P()], ["sharding"]),
    "a mesh": (AbstractMesh((1,), ("heads",)), ["sharding"]),
    "a class": (NamedSharding, ["sharding"]),
    "a spec without a mesh": (P(), ["sharding"]),
    "values of a mapping": (
        {"lm_head.kernel": None, "final_norm.scale": "heads", 7: P()},
        ["sharding 'lm_head.kernel'", "sharding 'final_norm.scale'", "sharding"],
    ),
}


@pytest.mark.parametrize("kind", NO_SHARDINGS)
def test_what_is_no_sharding_is_refused_before_a_file_is_looked_for(kind):
    given, places = NO_SHARDINGS[kind]
    with pytest.raises(TransferError) as caught:
        models.load("nowhere", sharding=given)
    assert [(p.kind, p.name) for p in caught.value.problems] == [("refused", p) for p in places]


@pytest.mark.parametrize("returned", [3, "heads", P("heads")])
def test_a_function_that_returns_none_is_told_once(returned, folder):
    with pytest.raises(TransferError) as caught:
        models.load(folder, sharding=lambda path, shape: returned)
    assert [(p.kind, p.name) for p in caught.value.problems] == [("refused", "sharding")]


@pytest.mark.parametrize("spec", [P("rows"), P("heads", "heads"), P(None, None, None, "heads")])
def test_a_spec_that_fits_no_parameter_names_each(spec, folder):
    with jax.set_mesh(jax.make_mesh((1,), ("heads",))), pytest.raises(TransferError) as caught:
        models.load(folder, sharding={"lm_head.kernel": spec, "final_norm.scale": spec})
    told = {(p.kind, p.name) for p in caught.value.problems}
    assert told == {("unwritten", "lm_head.kernel"), ("unwritten", "final_norm.scale")}
