"""`infer` proposes the table of every design, says what it leaves open, and prints both as code."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from helpers.transfer.renamed_models import abstract, as_published, written
from helpers.transfer.small_model import MODEL, model, torch_tensors
from jax_attn import GroupedQueryAttention, Rotary, transfer
from jax_attn.selfcheck.matrix.cases import Size
from jax_attn.selfcheck.matrix.designs import PORTED_DESIGNS
from jax_attn.transfer import TransferError, infer

N, K, D = 6, 3, 30
SIZE = Size(B=2, T=3, S=3, N=N, K=K, D=D)

# What shapes do not tell: the order in a packed projection, though torch's own is known; and, where
# there are but tensors, whether a square one is transposed.
PACKED = {"fused_mha": {"qkv_proj.weight", "qkv_proj.bias"}}
SQUARE = {
    "weights_mha": {"w_q.weight", "w_k.weight", "w_v.weight", "w_o.weight"},
    "fused_mha": {"qkv_proj.weight", "qkv_proj.bias", "out_proj.weight"},
    "mqa": {"W_Q.weight", "W_O.weight"},
    "torch_mha": {"in_proj_weight", "in_proj_bias", "out_proj.weight"},
    "gqa": {"q_proj.weight", "out_proj.weight"},
    "gqa/head_dim_scale": set(),
}


def pair(name):
    design = PORTED_DESIGNS[name]
    module = nnx.eval_shape(lambda: design.port(SIZE, "float32", nnx.Rngs(0)))
    return design.reference(SIZE), module, design.layout


def executed(proposal):
    names = {}
    exec(proposal.code, names)
    return names["LAYOUT"]


def open_keys(proposal):
    return {question.key for question in proposal.undecided}


def same(ours, true):
    return ours.keys() == true.keys() and all(np.array_equal(ours[p], true[p]) for p in ours)


@pytest.mark.parametrize("name", PORTED_DESIGNS)
def test_modules_of_every_design_give_its_table(name):
    reference, module, layout = pair(name)
    proposal = infer(reference, module)
    tensors = reference.state_dict()
    ours, true = (written(table, tensors, module) for table in (proposal.layout, layout))
    assert open_keys(proposal) == PACKED.get(name, set())
    assert same(ours, {path: array for path, array in true.items() if path not in proposal.left})
    assert ours.keys() | proposal.left.keys() == true.keys()
    assert executed(proposal) == proposal.layout


@pytest.mark.parametrize("name", SQUARE)
def test_of_tensors_alone_squares_stay_open_with_both_candidates(name):
    reference, module, layout = pair(name)
    proposal = infer(reference.state_dict(), module)
    assert open_keys(proposal) == SQUARE[name]
    assert all(len(question.candidates) >= 2 for question in proposal.undecided)
    true = written(layout, reference.state_dict(), module)
    ours = written(proposal.layout, reference.state_dict(), module)
    assert same(ours, {path: true[path] for path in ours})


def test_what_is_whole_loads_at_once():
    reference, _, layout = pair("gqa")
    modules = [PORTED_DESIGNS["gqa"].port(SIZE, "float32", nnx.Rngs(0)) for _ in range(2)]
    transfer.load(modules[0], reference.state_dict(), infer(reference, modules[0]).layout)
    transfer.load(modules[1], reference.state_dict(), layout)
    assert same(*map(transfer.flatten, modules))


def test_layers_are_folded_and_the_code_says_what_is_open():
    proposal = infer(torch_tensors(), model())
    query, out = (f"h.{{layer}}.self_attention.{p}_proj.weight" for p in ("q", "out"))
    assert open_keys(proposal) == {query, out}
    assert set(proposal.left) == {f"layers.{{layer}}.attn.{p}.kernel" for p in ("query", "out")}
    key = '"h.{layer}.self_attention.k_proj.weight", "layers.{layer}.attn.key.kernel"'
    assert f"    row({key}, linear, heads),\n" in proposal.code
    assert f'# undecided: "{query}" [30, 30]: square; neither its shape nor' in proposal.code
    assert executed(proposal) == proposal.layout
    ours, true = (written(t, torch_tensors(), model()) for t in (proposal.layout, MODEL))
    assert same(ours, {path: true[path] for path in ours})
    assert len(true) - len(ours) == 6  # the query's and the output's kernel, in three layers


@pytest.mark.slow
def test_order_decides_nothing():
    tensors = torch_tensors()
    backwards = dict(reversed(tensors.items()))
    there, back = (infer(given, model()) for given in (tensors, backwards))
    assert set(there.layout.groups) == set(back.layout.groups)
    assert set(there.undecided) == set(back.undecided)


def test_a_checkpoint_is_read_no_further_than_its_header(tmp_path, monkeypatch):
    def unread(checkpoint, key):
        raise AssertionError(f"{key} was read")

    transfer.save_checkpoint(tmp_path / "a.safetensors", torch_tensors())
    monkeypatch.setattr(transfer.Checkpoint, "mapped", unread)
    with transfer.load_checkpoint(tmp_path / "a.safetensors") as checkpoint:
        there, here = infer(checkpoint, model()), infer(torch_tensors(), model())
        with pytest.raises(AssertionError, match="was read"):
            checkpoint[next(iter(checkpoint))]
    assert set(there.layout.groups) == set(here.layout.groups)


class Pair(nnx.Module):
    """Two maps of one shape under names of their own."""

    def __init__(self, rngs, **names):
        for name, shape in names.items():
            setattr(self, name, nnx.Linear(*shape, rngs=rngs))


def maps(**shapes):
    return nnx.eval_shape(lambda: Pair(nnx.Rngs(0), **shapes))


def tensors(**shapes):
    return {f"{name.replace('__', '.')}.weight": np.zeros(s, "f4") for name, s in shapes.items()}


WIDE, TALL, SQUARE_MAP = (5, 7), (7, 5), (5, 5)
FALSE_FRIENDS = {
    "two maps without a telling name": ({"a": WIDE, "b": WIDE}, {"k": TALL, "v": TALL}),
    "one of them named": ({"k": WIDE, "b": WIDE}, {"k": TALL, "v": TALL}),
    "nearly the same letters": ({"ky": WIDE, "kez": WIDE}, {"key": TALL, "value": TALL}),
    "the last one left": ({"foo": WIDE}, {"up": TALL}),
    "a name of one kind, twice": ({"fc1": WIDE, "fc2": WIDE}, {"up": TALL, "down": TALL}),
    "an output, of what": ({"pooler__output": WIDE, "other": WIDE}, {"out": TALL}),
    "another's query": ({"teacher__q": WIDE, "student__q": WIDE}, {"ema__q": TALL, "q": TALL}),
    "packed in a mapping": ({"qkv": (15, 5)}, {"q": SQUARE_MAP, "k": SQUARE_MAP, "v": SQUARE_MAP}),
    "square": ({"up": SQUARE_MAP}, {"up": SQUARE_MAP}),
    "counted from one": ({"q.1": WIDE, "q.2": WIDE}, {"q0": TALL, "q1": TALL}),
}
DECIDED = {"one of them named": {"k.kernel"}}


@pytest.mark.parametrize("name", FALSE_FRIENDS)
def test_false_friends_are_never_decided(name):
    torch_side, flax_side = FALSE_FRIENDS[name]
    flax_side = {key.replace("__", "_of_"): shape for key, shape in flax_side.items()}
    given, module = tensors(**torch_side), maps(**flax_side)
    proposal = infer(given, module)
    assert written(proposal.layout, given, module).keys() == DECIDED.get(name, set())
    assert len(proposal.undecided) == len(given) - len(DECIDED.get(name, ()))


def test_shapes_tell_names_of_one_kind_apart_where_types_tell_how_they_lie():
    """(out, in) of the one is (in, out) of the other: tensors alone would not do."""
    module = torch.nn.Module()
    module.fc1, module.fc2 = (torch.nn.Linear(n, m, bias=False) for m, n in (WIDE, TALL))
    flax_module = maps(up=TALL, down=WIDE)
    assert infer(module.state_dict(), flax_module).layout.groups == ()
    assert "fc1.weight -> up.kernel [linear]" in infer(module, flax_module).layout.row_of(
        "fc1.weight"
    )
    assert "fc2.weight -> down.kernel [linear]" in infer(module, flax_module).layout.row_of(
        "fc2.weight"
    )


@pytest.mark.slow
def test_numbers_that_do_not_agree_throughout_decide_nothing():
    published, _ = as_published()
    proposal = infer(published, abstract(layers=3))
    assert not any("layers" in path for path in written_paths(proposal, published, 3))
    assert "the numbers in its name differ from those of the Flax side" in proposal.code
    assert infer(published, abstract(layers=2)).undecided == ()


def written_paths(proposal, published, layers):
    return written(proposal.layout, published.state_dict(), abstract(layers=layers))


def test_tied_tensors_are_told_by_the_module():
    published, _ = as_published()
    published.add_module("second", torch.nn.Linear(3, 3, bias=False))
    published.second.weight = published.wte.weight
    proposal = infer(published, abstract())
    assert 'tied("second.weight", "wte.weight")' in proposal.code
    assert executed(proposal) == proposal.layout
    assert open_keys(proposal) == set()


def test_what_no_table_shows_is_said():
    assert "# assumed: both sides rotate the same pairs" in infer(*pair("gqa/rotary")[:2]).code
    assert "assumed" not in infer(*pair("gqa")[:2]).code


@pytest.mark.slow
def test_norms_of_queries_and_keys_turn_with_them():
    module = GroupedQueryAttention(16, 4, 2, rotary=Rotary(), qk_norm=nnx.RMSNorm, rngs=nnx.Rngs(0))
    assert '(to_half_split(), "q_proj", "k_proj", "q_norm", "k_norm")' in infer({}, module).code


HOSTILE = 'x"); raise SystemExit  #\n\\'


@pytest.mark.parametrize("key", [HOSTILE, "a.{b}", "{0}", "a..weight", "", "ö.weight", "a, b" * 40])
def test_any_key_is_carried_into_the_code_as_a_name_alone(key):
    given = {f"{key}": np.zeros((7, 5), "f4"), "up.weight": np.zeros((7, 5), "f4")}
    proposal = infer(given, maps(up=(5, 7)))
    assert executed(proposal) == proposal.layout
    assert open_keys(proposal) == {key}
    assert len(proposal.layout.groups) == 1


def test_all_that_is_wrong_with_the_arguments_is_said_at_once():
    with pytest.raises(
        TypeError, match=r"torch_module: expected a torch\.nn\.Module, or a mapping"
    ):
        infer([1], model())
    with pytest.raises(TypeError, match="module: expected an nnx"):
        infer({}, torch.nn.Linear(2, 2))
    with pytest.raises(TransferError) as error:
        infer({3: np.zeros(2), "a": "text", "b": jnp.zeros(2)}, model())
    assert [(p.kind, p.name) for p in error.value.problems] == [
        ("unreadable", "3"),
        ("unreadable", "a"),
    ]
