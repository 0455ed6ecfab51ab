"""Tables on arrays alone: steps, rows, alternatives."""

import numpy as np
import pytest

from helpers.transfer.small_model import NARROW, WIDE, D, H, K, N, counting, problems_of
from jax_attn.transfer import (
    LINEAR,
    Layout,
    Sizes,
    conv,
    either,
    heads,
    heads_in,
    in_parts,
    joined,
    linear,
    packed,
    row,
    spellings,
    tied,
)

STEPS = {  # torch shapes, Flax shapes
    "nothing": ((), [(WIDE, NARROW)], [(WIDE, NARROW)]),
    "linear": ((linear,), [(NARROW, WIDE)], [(WIDE, NARROW)]),
    "linear heads": ((linear, heads), [(N * H, WIDE)], [(WIDE, N, H)]),
    "linear heads_in": ((linear, heads_in), [(WIDE, N * H)], [(N, H, WIDE)]),
    "heads of a bias": ((heads,), [(N * H,)], [(N, H)]),
    "packed in unequal parts": (
        (packed, linear, heads),
        [((N + 2 * K) * H, WIDE)],
        [(WIDE, N, H), (WIDE, K, H), (WIDE, K, H)],
    ),
    "packed part by part": (
        (in_parts(2), packed, linear, heads),
        [(3 * N * H, WIDE)],
        [(WIDE, N, H)] * 3,
    ),
    "packed after linear": ((linear, packed), [(WIDE, 5)], [(2, WIDE), (3, WIDE)]),
    "conv": ((conv,), [(WIDE, NARROW, 5, 2)], [(5, 2, NARROW, WIDE)]),
    "conv in one dimension": ((conv,), [(WIDE, NARROW, 5)], [(5, NARROW, WIDE)]),
    "joined": ((linear, joined), [(WIDE, 2)] * 3, [(6, WIDE)]),
}


def names(kind, count):
    return [f"{kind}_{i}" for i in range(count)]


@pytest.mark.parametrize(("steps", "torch_side", "flax_side"), STEPS.values(), ids=STEPS)
def test_steps_are_invertible(steps, torch_side, flax_side):
    keys, paths = names("key", len(torch_side)), names("path", len(flax_side))
    layout = Layout(row(keys, paths, *steps))
    tensors = dict(zip(keys, counting(torch_side), strict=True))
    arrays = layout.to_flax(tensors, dict(zip(paths, flax_side, strict=True)))
    assert [array.shape for array in arrays.values()] == flax_side
    back = layout.to_torch(arrays)
    for key in keys:
        np.testing.assert_array_equal(back[key], tensors[key], strict=True)


def test_steps_put_numbers_where_they_belong():
    weight = counting([(N * H, WIDE)])[0]
    layout = Layout(row("w", "kernel", linear, heads))
    kernel_DNH = layout.to_flax({"w": weight}, {"kernel": (WIDE, N, H)})["kernel"]
    for n in range(N):
        np.testing.assert_array_equal(kernel_DNH[:, n], weight[n * H : (n + 1) * H].T)
    weight = counting([(WIDE, N * H)])[0]
    layout = Layout(row("w", "kernel", linear, heads_in))
    kernel_NHD = layout.to_flax({"w": weight}, {"kernel": (N, H, WIDE)})["kernel"]
    for n in range(N):
        np.testing.assert_array_equal(kernel_NHD[n], weight[:, n * H : (n + 1) * H].T)


def test_parts_of_a_packed_tensor_come_together():
    (weight,) = counting([(12, WIDE)])
    layout = Layout(row("w", ["q", "k", "v"], in_parts(2), packed))
    found = layout.to_flax({"w": weight}, dict.fromkeys("qkv", (4, WIDE)))
    for name, rows in {"q": [0, 1, 6, 7], "k": [2, 3, 8, 9], "v": [4, 5, 10, 11]}.items():
        np.testing.assert_array_equal(found[name], weight[rows])
    _, message = problems_of(lambda: layout.shapes({"w": (14, WIDE)}, Sizes(2, 2, 2)))
    assert "in_parts(2) expects a first axis of a multiple of 3·2 on the torch side" in message


BAD_ROWS = {
    "no parts": (lambda: in_parts(0), "parts: expected an int ≥ 1, got 0"),
    "several paths, nothing to split": (lambda: row("a", ["b", "c"], linear), "need"),
    "one path, but split": (lambda: row("a", "b", packed), "need"),
    "several keys, nothing to join": (lambda: row(["a", "b"], "c"), "need"),
    "several of both": (lambda: row(["a", "b"], ["c", "d"], packed), "one row for each"),
    "layer on one side": (lambda: row("h.{layer}.a", "a"), "same names in braces"),
    "another name": (lambda: row("h.{layer}.a", "h.{block}.a"), "same names in braces"),
    "a name twice": (lambda: row(["a", "a"], "b", joined), "each name once"),
    "no name": (lambda: row("", "b"), "keys"),
    "alternatives that share a key": (
        lambda: either(row("a", "b"), [row("a", "c"), row("d", "e")]),
        "cannot tell them apart",
    ),
    "alternatives of other patterns": (
        lambda: either(row("a", "b"), row("c.{layer}", "b.{layer}")),
        "same names in braces",
    ),
    "renaming what is not there": (
        lambda: LINEAR.under("a", "q_proj").renamed({"q_prj": "query"}),
        "q_prj",
    ),
}


@pytest.mark.parametrize(("make", "reason"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_row_that_cannot_be_inverted_is_refused(make, reason):
    with pytest.raises(ValueError, match=reason):
        make()


def test_what_is_no_row_is_refused():
    with pytest.raises(TypeError, match="expected steps"):
        row("a", "b", "linear")
    with pytest.raises(TypeError, match="expected rows or layouts"):
        Layout(("a", "b"))


PARTS = ("q.kernel", "k.kernel", "v.kernel")
FUSED_OR_SPLIT = Layout(
    either(
        row("h.{i}.qkv", [f"l.{{i}}.{part}" for part in PARTS], packed, linear),
        [row(f"h.{{i}}.{part[0]}", f"l.{{i}}.{part}", linear) for part in PARTS],
    )
)


def test_alternatives_are_chosen_layer_by_layer():
    """Loading goes by the keys; exporting by the shapes, packed first."""
    shapes = {f"l.{i}.{part}": (D, WIDE) for i in range(2) for part in PARTS}
    q, k, v = counting([(WIDE, D)] * 3)
    tensors = {"h.0.qkv": np.concatenate([q, k, v]), "h.1.q": q, "h.1.k": k, "h.1.v": v}
    arrays = FUSED_OR_SPLIT.to_flax(tensors, shapes)
    for part in PARTS:
        np.testing.assert_array_equal(arrays[f"l.0.{part}"], arrays[f"l.1.{part}"])
    assert set(FUSED_OR_SPLIT.to_torch(arrays)) == {"h.0.qkv", "h.1.qkv"}
    arrays["l.1.v.kernel"] = arrays["l.1.v.kernel"][:NARROW]
    assert set(FUSED_OR_SPLIT.to_torch(arrays)) == {"h.0.qkv", "h.1.q", "h.1.k", "h.1.v"}


def test_some_keys_of_an_alternative():
    shapes = {f"l.0.{part}": (D, WIDE) for part in PARTS}
    tensors = {"h.0.q": np.ones((WIDE, D)), "h.0.v": np.ones((WIDE, D))}
    found, _ = problems_of(lambda: FUSED_OR_SPLIT.to_flax(tensors, shapes))
    assert found == [("missing", "h.0.k")]
    found, message = problems_of(lambda: FUSED_OR_SPLIT.to_flax({}, shapes))
    assert found == [("missing", "h.0.qkv")]
    assert "['h.0.q', 'h.0.k', 'h.0.v'] could replace it" in message


def test_parts_of_one_tensor_need_one_dtype():
    arrays = {f"l.0.{part}": np.ones((D, WIDE), np.float32) for part in PARTS}
    arrays["l.0.k.kernel"] = arrays["l.0.k.kernel"].astype(np.float16)
    found, message = problems_of(lambda: FUSED_OR_SPLIT.to_torch(arrays))
    assert found == [("wrong dtype", "l.0.q.kernel")]
    assert "float16, float32" in message


BAD_ARRAYS = {
    "no row": ({"head.kernel": np.ones((D, 2))}, [("unexpected", "head.kernel")]),
    "part of a row": (
        {"q.bias": np.ones((N, H)), "v.bias": np.ones((K, H))},
        [("missing", "k.bias")],
    ),
    "too few axes": (
        {f"{part}.bias": np.ones(()) for part in "qkv"},
        [("wrong shape", "q.bias")],
    ),
}


@pytest.mark.parametrize(("arrays", "expected"), BAD_ARRAYS.values(), ids=BAD_ARRAYS)
def test_arrays_that_are_no_whole_row(arrays, expected):
    layout = Layout(row("bias", ["q.bias", "k.bias", "v.bias"], packed, heads))
    assert problems_of(lambda: layout.to_torch(arrays))[0] == expected


def test_a_convolution_without_a_module():
    layout = Layout(row("weight", "kernel", conv))
    sizes = Sizes(N, K, H)
    assert layout.shapes({"weight": (WIDE, NARROW, 5, 2)}, sizes) == {
        "kernel": (5, 2, NARROW, WIDE)
    }
    found, message = problems_of(lambda: layout.shapes({"weight": (WIDE, NARROW)}, sizes))
    assert found == [("wrong shape", "weight")]
    assert f"conv expects at least 3 axes (out, in, …) on the torch side, got [{WIDE}, " in message


NORM = Layout(row("weight", "scale"), row("bias", "bias"))
OLD_NORM = Layout(row("gamma", "scale"), row("beta", "bias"))
SPELLED = spellings(NORM, OLD_NORM).under("l.{i}.norm", "l.{i}.norm")


def test_spellings():
    """Any is read; the first is written, or the one that the keys at hand show."""
    scale, bias = counting([(D,), (D,)])
    old = {"l.0.norm.gamma": scale, "l.0.norm.beta": bias}
    new = {"l.0.norm.weight": scale, "l.0.norm.bias": bias}
    shapes = {"l.0.norm.scale": (D,), "l.0.norm.bias": (D,)}
    flax = SPELLED.to_flax(old, shapes)
    np.testing.assert_equal(flax, SPELLED.to_flax(new, shapes))
    assert SPELLED.to_torch(flax).keys() == new.keys()
    assert SPELLED.spelled_as(old).to_torch(flax).keys() == old.keys()
    assert SPELLED.spelled_as(["elsewhere"]).to_torch(flax).keys() == new.keys()
    found, _ = problems_of(lambda: SPELLED.spelled_as(old | new).to_flax(old | new, shapes))
    assert {kind for kind, _ in found} == {"ambiguous"}


TIED = Layout(row("in.weight", "e"), *(tied(f"{side}.weight", "in.weight") for side in "ab"))


@pytest.mark.parametrize("keys", [("in", "a"), ("a",), ("b",), ("a", "b")], ids="/".join)
def test_a_tied_tensor_under_any_of_its_names(keys):
    """It is read, and written under the first of them."""
    (array,) = counting([(D,)])
    held = {f"{key}.weight": array for key in keys}
    first = next(iter(held))
    flax = TIED.to_flax(held, {"e": (D,)})
    np.testing.assert_equal(flax, {"e": array})
    assert TIED.shapes(dict.fromkeys(held, (D,)), Sizes(1, 1, 1)) == {"e": (D,)}
    assert [*TIED.spelled_as(held).to_torch(flax)] == [first]


def test_names_of_one_tied_tensor_that_differ_are_told():
    one, other = counting([(D,), (D,)])
    held = {"a.weight": one, "b.weight": other}
    found, _ = problems_of(lambda: TIED.to_flax(held, {"e": (D,)}))
    assert found == [("ambiguous", "b.weight")]


# alternatives to the row of the key to which another is tied -> what the file has in its place
INSTEAD = {
    "another spelling": ([row("old", "e")], {"old": 0}),
    "parts": ([row(("upper", "lower"), "e", joined)], {"upper": 1, "lower": 2}),
}


@pytest.mark.parametrize("name", INSTEAD)
def test_a_tied_key_next_to_an_alternative_of_its_row(name):
    """The alternative is read; another tensor than its own, under the tied key, is told."""
    rows, there = INSTEAD[name]
    layout = Layout(either([row("new", "e")], rows), tied("head", "new"))
    whole, *parts = (np.arange(42.0).reshape(6, 7), *np.split(np.arange(42.0).reshape(6, 7), 2))
    held = {key: [whole, *parts][at] for key, at in there.items()}
    flax = layout.to_flax(held | {"head": whole}, {"e": whole.shape})
    np.testing.assert_equal(flax, {"e": whole})
    assert layout.spelled_as([*held, "head"]).to_torch(flax).keys() == held.keys()
    if len(held) == 1:
        found, _ = problems_of(lambda: layout.to_flax(held | {"head": -whole}, {"e": (6, 7)}))
        assert found == [("ambiguous", "head")]


def test_spellings_of_different_paths_are_told():
    with pytest.raises(ValueError, match="tables of the same Flax paths, got"):
        spellings(NORM, Layout(row("gamma", "scale")))
