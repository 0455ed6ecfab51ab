"""Attention found by keys and shapes: every spelling, what is no attention, what is undecided."""

import re

import pytest

import torch_ref
from jax_attn.porting.inspect.discover import (
    AttentionBlock,
    ProjectionRows,
    UnreadBlock,
    discover,
    pattern,
)
from jax_attn.transfer import TransferError
from jax_attn.transfer.arrays import Spec, describe
from jax_attn.transfer.table.spellings import SPELLINGS

D, N, K, H = 30, 6, 3, 5
HEAD_DIM, KDIM, VDIM = 7, 11, 13


def specs(shapes, dtype="float32"):
    return {key: Spec(tuple(shape), dtype) for key, shape in shapes.items()}


def linears(prefix="", bias=True, **shapes):
    """Weights (and biases) of modules by name; __ stands for a dot."""
    made = {}
    for name, (rows, columns) in shapes.items():
        key = prefix + name.replace("__", ".")
        made |= {f"{key}.weight": (rows, columns)} | ({f"{key}.bias": (rows,)} if bias else {})
    return made


def bert(prefix="encoder.layer.0.attention.", **options):
    square = dict.fromkeys(("self__query", "self__key", "self__value", "output__dense"), (D, D))
    return linears(prefix, **square, **options)


def llama(prefix="layers.0.self_attn.", rows=K * H):
    shapes = {"q_proj": (D, D), "k_proj": (rows, D), "v_proj": (rows, D), "o_proj": (D, D)}
    return linears(prefix, bias=False, **shapes)


def only(shapes, **options):
    (found,) = discover(specs(shapes), **options)
    return found


# --- spellings ----------------------------------------------------------------------------------

SPELLED = [(spelling, out) for spelling in SPELLINGS for out in spelling.outs]


@pytest.mark.parametrize("prefix", ["", "model.layers.11.attn."], ids=["root", "deep"])
@pytest.mark.parametrize(
    ("spelling", "out"), SPELLED, ids=[f"{s.weights[0]}-{out}" for s, out in SPELLED]
)
def test_every_spelling_is_one_block_with_all_its_keys(spelling, out, prefix):
    packed = len(spelling.weights) == 1
    tall = {True: 3 * D, False: D}
    shapes = {f"{prefix}{key}": (tall[packed], D) for key in spelling.weights}
    shapes |= {f"{prefix}{key}": (tall[len(spelling.biases) == 1],) for key in spelling.biases}
    shapes |= {f"{prefix}{out}.weight": (D, D), f"{prefix}{out}.bias": (D,)}
    others = {"embeddings.weight": (99, D), f"{prefix}mlp.up.weight": (D, D)}
    block = only(shapes | others)
    assert isinstance(block, AttentionBlock)
    assert set(block.keys) == shapes.keys()
    assert block.prefix == prefix.removesuffix(".")
    assert (block.embed_dim, block.kdim, block.vdim) == (D, D, D)
    assert block.absent == ()
    assert [block.rows[f"{role}.weight"].length for role in "qkv"] == [D, D, D]


DESIGNS = {
    "weights_mha": ((D, N), {}),
    "fused_mha": ((D, N), {}),
    "masked_mha": ((D, N), {}),
    "mqa": ((D, N), {}),
    "plain_mha": ((D, N), {}),
    "torch_mha": ((D, N), {}),
    "torch_mha without biases": ((D, N), {"bias": False}),
    "torch_mha with kdim and vdim": ((D, N), {"kdim": KDIM, "vdim": VDIM}),
    "gqa": ((D, N, K), {}),
    "gqa with head_dim": ((D, N, K), {"head_dim": HEAD_DIM, "out_bias": False}),
    "gqa with kdim and vdim": ((D, N, K), {"kdim": KDIM, "vdim": VDIM}),
}


@pytest.mark.parametrize("name", DESIGNS)
def test_every_published_design_is_found_from_its_own_names(name):
    args, options = DESIGNS[name]
    module = torch_ref.DESIGNS[name.partition(" ")[0]](*args, **options)
    state = {f"blocks.3.{key}": tensor for key, tensor in module.state_dict().items()}
    (block,) = discover({key: describe(tensor) for key, tensor in state.items()})
    assert isinstance(block, AttentionBlock)
    assert (block.name, set(block.keys)) == ("blocks.3", state.keys())
    rows = {"mqa": H, "gqa": K * H}.get(name.partition(" ")[0], D)
    rows = K * HEAD_DIM if "head_dim" in options else rows
    assert block.rows["k.weight"].length == rows
    assert (block.kdim, block.vdim) == (options.get("kdim", D), options.get("vdim", D))


@pytest.mark.parametrize("kv_heads", [1, K, N])
def test_packed_rows_follow_from_the_output_projection(kv_heads):
    rows = kv_heads * H
    block = only(linears("attn.", qkv_proj=(D + 2 * rows, D), o_proj=(D, D)))
    for kind in ("weight", "bias"):
        key = f"attn.qkv_proj.{kind}"
        assert block.rows[f"q.{kind}"] == ProjectionRows(key, 0, D)
        assert block.rows[f"k.{kind}"] == ProjectionRows(key, D, D + rows)
        assert block.rows[f"v.{kind}"] == ProjectionRows(key, D + rows, D + 2 * rows)


def test_layers_come_in_order_and_share_a_pattern():
    layers = [f"encoder.layer.{i}.attention" for i in (0, 1, 2, 9, 10, 11)]
    shuffled = [layers[i] for i in (4, 0, 3, 5, 1, 2)]
    found = discover(specs({k: s for p in shuffled for k, s in bert(f"{p}.").items()}))
    assert [block.name for block in found] == layers
    assert {pattern(block.name) for block in found} == {"encoder.layer.{i}.attention"}


def test_several_families_in_one_file_are_told_apart():
    tower = linears("vision.blocks.0.attn.", qkv=(3 * D, D), proj=(D, D))
    found = discover(specs(bert() | llama("text.layers.0.self_attn.") | tower))
    assert [block.name for block in found] == [
        "encoder.layer.0.attention",
        "text.layers.0.self_attn",
        "vision.blocks.0.attn",
    ]
    assert all(isinstance(block, AttentionBlock) for block in found)


def test_biases_may_be_absent_or_only_some():
    assert set(only(llama()).rows) == {"q.weight", "k.weight", "v.weight", "o.weight"}
    without_output = bert() | {}
    del without_output["encoder.layer.0.attention.output.dense.bias"]
    assert "o.bias" not in only(without_output).rows
    without_key = bert() | {}
    del without_key["encoder.layer.0.attention.self.key.bias"]
    block = only(without_key)
    assert block.absent == ("encoder.layer.0.attention.self.key.bias",)
    assert set(block.keys) == without_key.keys()


def test_what_lies_beside_is_kept():
    beside = {"q_norm.weight": (H,), "k_norm.weight": (H,), "a.b.c.d": (1,)}
    block = only(llama() | {f"layers.0.self_attn.{key}": s for key, s in beside.items()})
    assert block.beside == ("q_norm.weight", "k_norm.weight")


# --- what is not rebuilt, by name ---------------------------------------------------------------


def without(shapes, *keys):
    return {key: shape for key, shape in shapes.items() if not key.endswith(keys)}


def with_shape(shapes, **changed):
    made = dict(shapes)
    for name, shape in changed.items():
        (key,) = [key for key in shapes if key.endswith(name.replace("__", "."))]
        made[key] = shape
    return made


UNDECIDED = {
    "GPT-2": ({"h.0.attn.c_attn.weight": (D, 3 * D)}, "c_attn.*interleaved"),
    "NeoX": ({"layers.0.attention.query_key_value.weight": (3 * D, D)}, "interleaved"),
    "DeBERTa, first": ({"layer.0.attention.self.in_proj.weight": (3 * D, D)}, "interleaved"),
    "DeepSeek": ({"layers.0.self_attn.kv_b_proj.weight": (D, 8)}, "compressed"),
    "XLNet": ({"layer.0.rel_attn.q": (D, N, H)}, "relative"),
    "quantised": ({"layers.0.self_attn.q_proj.qweight": (D, D)}, "quantised"),
    "value missing": (without(llama(), "v_proj.weight"), r"missing: layers.0.self_attn.v_proj"),
    "output missing": (without(llama(), "o_proj.weight"), "no output projection: expected one"),
    "packed, output missing": ({"attn.qkv.weight": (3 * D, D)}, "attn.proj.weight"),
    "key and value unlike": (with_shape(llama(), v_proj__weight=(D, D)), r"v_proj.weight \[30, 30"),
    "output too wide": (with_shape(llama(), o_proj__weight=(D, D + 1)), r"o_proj.weight \[30, 31"),
    "output elsewhere": (with_shape(llama(), o_proj__weight=(D + 1, D)), "output"),
    "packed, odd": (linears(qkv_proj=(3 * D + 1, D), out_proj=(D, D)), "30 rows for the query"),
    "packed, too few": (linears(qkv_proj=(D, D), out_proj=(D, D)), "30 rows for the query"),
    "short bias": (with_shape(bert(), self__key__bias=(D - 1,)), r"key.bias \[30\], got .*\[29\]"),
    "wide bias": (with_shape(bert(), self__key__bias=(D, 1)), r"key.bias \[30\], got"),
    "convolutions": ({f"mid.attn.{m}.weight": (D, D, 1, 1) for m in "qkvo"}, "matrices"),
    "of no size": ({f"attn.{m}.weight": (0, D) for m in "qkv"} | {"attn.o.weight": (D, 0)}, "0"),
}


@pytest.mark.parametrize(("shapes", "reason"), UNDECIDED.values(), ids=UNDECIDED)
def test_what_cannot_be_decided_is_named_with_the_reason(shapes, reason):
    found = only(shapes | {"norm.weight": (D,)})
    assert isinstance(found, UnreadBlock)
    assert found.keys
    assert set(found.keys) <= shapes.keys()
    assert re.search(reason, found.reason), found.reason


def test_dtypes_that_are_no_floats_or_differ_are_named():
    (found,) = discover(specs(bert(), "int8"))
    assert "got int8" in found.reason
    mixed = specs(bert())
    mixed["encoder.layer.0.attention.self.key.weight"] = Spec((D, D), "bfloat16")
    (found,) = discover(mixed)
    assert "got bfloat16, float32" in found.reason


def test_a_family_that_packs_otherwise_under_a_known_name():
    shapes = linears("h.0.attn.", bias=False, qkv_proj=(3 * D, D), out_proj=(D, D))
    assert isinstance(only(shapes), AttentionBlock)
    found = only(shapes, model_type="codegen")
    assert isinstance(found, UnreadBlock)
    assert "in its own order" in found.reason


def test_one_broken_layer_does_not_hide_the_others():
    broken = without(bert("encoder.layer.1.attention."), "query.weight")
    found = discover(specs(bert() | broken | bert("encoder.layer.2.attention.")))
    assert [type(item) for item in found] == [AttentionBlock, UnreadBlock, AttentionBlock]
    assert found[1].reason == "missing: encoder.layer.1.attention.self.query.weight"


NOTHING = {
    "nothing": {},
    "perceptron": linears("mlp.", up=(99, D), down=(D, 99), dense=(D, D)),
    "one word": {"head.value.weight": (1, D), "bank.key.weight": (9, D)},
    "names, not parts of names": {f"x{name}.weight": (D, D) for name in ("q_proj", "k_proj")},
}


@pytest.mark.parametrize("shapes", NOTHING.values(), ids=NOTHING)
def test_what_is_no_attention_is_not_found(shapes):
    assert discover(specs(shapes)) == []


AMBIGUOUS = {
    "packed and split": llama("a.") | linears("a.", bias=False, qkv_proj=(3 * D, D)),
    "two output projections": llama("a.", rows=D) | linears("a.", bias=False, dense=(D, D)),
    "torch's both ways": {
        "a.in_proj_weight": (3 * D, D),
        **{f"a.{role}_proj_weight": (D, D) for role in "qkv"},
        "a.out_proj.weight": (D, D),
    },
}


@pytest.mark.parametrize("shapes", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_keys_of_two_blocks_are_an_error_that_names_them(shapes):
    with pytest.raises(TransferError) as error:
        discover(specs(shapes))
    assert {problem.kind for problem in error.value.problems} == {"ambiguous"}
    for key in shapes:
        assert key in str(error.value)


def test_a_shape_decides_between_two_output_projections():
    feed_forward = linears("layer.0.", bias=False, output__dense=(D, 4 * D))
    square = dict.fromkeys(("query", "key", "value", "dense"), (D, D))
    block = only(linears("layer.0.attention.", **square) | feed_forward)
    assert isinstance(block, AttentionBlock)
    assert block.rows["o.weight"].key == "layer.0.attention.dense.weight"


@pytest.mark.parametrize("key", sorted(bert(bias=False)))
def test_no_half_of_a_block_is_ever_dropped_in_silence(key):
    """Any one weight taken away: what is left is named, never read as whole."""
    (found,) = discover(specs({k: s for k, s in bert(bias=False).items() if k != key}))
    assert isinstance(found, UnreadBlock)
    assert found.name == "encoder.layer.0.attention"
