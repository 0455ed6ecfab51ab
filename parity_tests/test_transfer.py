"""Tables at work on any NNX module: rows, patterns, plans, loads, exports, and every refusal."""

import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx

from jax_attn import transfer
from jax_attn.transfer import (
    EMBEDDING,
    LAYER_NORM,
    LINEAR,
    Layout,
    TransferError,
    either,
    heads,
    heads_in,
    joined,
    linear,
    packed,
    refused,
    row,
)

N, K, H, D = 6, 3, 5, 30
VOCAB, WIDE, NARROW, LAYERS = 11, 13, 7, 3

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
    "packed after linear": ((linear, packed), [(WIDE, 5)], [(2, WIDE), (3, WIDE)]),
    "joined": ((linear, joined), [(WIDE, 2)] * 3, [(6, WIDE)]),
}


def names(kind, count):
    return [f"{kind}_{i}" for i in range(count)]


def counting(shapes):
    """Arrays that hold every number once, so that any misplacement shows."""
    starts = np.cumsum([0, *(int(np.prod(shape)) for shape in shapes)])
    return [
        np.arange(start, stop, dtype=np.float32).reshape(shape)
        for start, stop, shape in zip(starts, starts[1:], shapes, strict=False)
    ]


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


BAD_ROWS = {
    "several paths, nothing to split": (lambda: row("a", ["b", "c"], linear), "need"),
    "one path, but split": (lambda: row("a", "b", packed), "need"),
    "several keys, nothing to join": (lambda: row(["a", "b"], "c"), "need"),
    "several of both": (lambda: row(["a", "b"], ["c", "d"], packed), "one row for each"),
    "layer on one side": (lambda: row("h.{layer}.a", "a"), "same names in braces"),
    "another name": (lambda: row("h.{layer}.a", "h.{block}.a"), "same names in braces"),
    "a name twice": (lambda: row(["a", "a"], "b", joined), "twice"),
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


class Block(nnx.Module):
    def __init__(self, rngs, dtype):
        self.attn = nnx.MultiHeadAttention(
            N, D, num_kv_heads=K, decode=False, param_dtype=dtype, rngs=rngs
        )
        self.norm = nnx.LayerNorm(D, param_dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(D, WIDE, use_bias=False, param_dtype=dtype, rngs=rngs)


class Model(nnx.Module):
    """A user's own small model: nothing in it is known to the package."""

    def __init__(self, layers=LAYERS, dtype=jnp.float32):
        rngs = nnx.Rngs(0)
        self.tokens = nnx.Embed(VOCAB, D, param_dtype=dtype, rngs=rngs)
        self.layers = nnx.List([Block(rngs, dtype) for _ in range(layers)])
        self.running = nnx.BatchStat(jnp.zeros(D))  # no parameter: none of a transfer's business


ATTENTION = transfer.LAYOUTS["gqa"].renamed(transfer.FLAX_NAMES)
MODEL = (
    EMBEDDING.under("wte", "tokens")
    + ATTENTION.under("h.{layer}.self_attention", "layers.{layer}.attn")
    + LAYER_NORM.under("h.{layer}.ln", "layers.{layer}.norm")
    + LINEAR.under("h.{layer}.mlp.up", "layers.{layer}.up")
)


def torch_tensors(layers=LAYERS, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = {"wte.weight": (VOCAB, D)}
    for i in range(layers):
        shapes |= {
            f"h.{i}.self_attention.q_proj.weight": (N * H, D),
            f"h.{i}.self_attention.q_proj.bias": (N * H,),
            f"h.{i}.self_attention.k_proj.weight": (K * H, D),
            f"h.{i}.self_attention.k_proj.bias": (K * H,),
            f"h.{i}.self_attention.v_proj.weight": (K * H, D),
            f"h.{i}.self_attention.v_proj.bias": (K * H,),
            f"h.{i}.self_attention.out_proj.weight": (D, N * H),
            f"h.{i}.self_attention.out_proj.bias": (D,),
            f"h.{i}.ln.weight": (D,),
            f"h.{i}.ln.bias": (D,),
            f"h.{i}.mlp.up.weight": (WIDE, D),
        }
    return {key: torch.randn(s, generator=generator).to(dtype) for key, s in shapes.items()}


def model(**options):
    return nnx.eval_shape(lambda: Model(**options))


@pytest.fixture(scope="module")
def loaded():
    module = Model()
    transfer.load(module, torch_tensors(), MODEL)
    return module


def bits(module):
    return {path: np.asarray(array).tobytes() for path, array in transfer.flatten(module).items()}


def test_one_pattern_serves_every_layer(loaded):
    tensors, arrays = torch_tensors(), transfer.flatten(loaded)
    for i in range(LAYERS):
        np.testing.assert_array_equal(
            arrays[f"layers.{i}.up.kernel"], tensors[f"h.{i}.mlp.up.weight"].T
        )
        np.testing.assert_array_equal(
            np.reshape(arrays[f"layers.{i}.attn.key.kernel"], (D, K * H)),
            tensors[f"h.{i}.self_attention.k_proj.weight"].T,
        )
        np.testing.assert_array_equal(arrays[f"layers.{i}.norm.scale"], tensors[f"h.{i}.ln.weight"])
    np.testing.assert_array_equal(arrays["tokens.embedding"], tensors["wte.weight"])


def test_export_is_the_inverse(loaded):
    tensors, exported = torch_tensors(), transfer.export(loaded, MODEL)
    assert exported.keys() == tensors.keys()
    for key, tensor in tensors.items():
        np.testing.assert_array_equal(exported[key], tensor.numpy(), strict=True)


def test_gradients_take_the_same_table(loaded):
    gradients = nnx.grad(lambda m: m.layers[1].up(jnp.ones((1, D))).sum())(loaded)
    by_key = MODEL.to_torch(transfer.flatten(gradients))
    assert by_key["h.1.mlp.up.weight"].shape == (WIDE, D)
    assert by_key["h.1.mlp.up.weight"].all()
    assert not by_key["h.0.mlp.up.weight"].any()


SOURCES = {
    "torch": lambda tensor: tensor,
    "torch parameter": lambda tensor: torch.nn.Parameter(tensor),
    "torch, not contiguous": lambda tensor: tensor.T.contiguous().T if tensor.ndim == 2 else tensor,
    "NumPy": lambda tensor: tensor.numpy(),
    "NumPy, other byte order": lambda tensor: tensor.numpy().astype(">f4"),
    "NumPy, read only": lambda tensor: np.frombuffer(tensor.numpy().tobytes(), "f4").reshape(
        tensor.shape
    ),
    "JAX": lambda tensor: jnp.asarray(tensor.numpy()),
}


@pytest.mark.parametrize("convert", SOURCES.values(), ids=SOURCES)
def test_tensors_of_every_framework(convert, loaded):
    module = model()
    transfer.load(module, {k: convert(t) for k, t in torch_tensors().items()}, MODEL)
    assert bits(module) == bits(loaded)


DTYPES = ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32", "float64", "int8")


@pytest.mark.parametrize("dtype", DTYPES)
def test_as_numpy_keeps_every_bit(dtype):
    raw = np.random.default_rng(0).integers(0, 256, 64, dtype=np.uint8)
    tensor = torch.from_numpy(raw).view(getattr(torch, dtype)).reshape(2, -1)
    array = transfer.as_numpy(tensor)
    assert array.dtype.name == dtype
    assert array.shape == tuple(tensor.shape)
    assert array.tobytes() == raw.tobytes()
    assert transfer.as_numpy(tensor[0, 0]).shape == ()


def test_bfloat16_is_the_same_number_everywhere():
    numbers = torch.tensor([1.0, -0.0, 3.140625, float("inf")], dtype=torch.bfloat16)
    array = transfer.as_numpy(numbers)
    assert array.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(array.astype(np.float32), numbers.float())
    np.testing.assert_array_equal(transfer.as_numpy(jnp.asarray(array)), array)


def test_loaded_arrays_are_copies():
    tensors = {key: t.numpy().copy() for key, t in torch_tensors().items()}
    module = model()
    transfer.load(module, tensors, MODEL)
    before = bits(module)
    for tensor in tensors.values():
        tensor += 1
    assert bits(module) == before


def test_without_the_copy_the_source_would_show_through():
    """What the copy guards against: this is how device_put treats aligned NumPy memory."""
    buffer = np.zeros(4096 + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    source = buffer[start : start + 4096].view(np.float32)
    shared = jax.device_put(source)
    source += 1
    assert np.asarray(shared).any()


def test_exported_arrays_are_copies(loaded):
    exported = transfer.export(loaded, MODEL)
    before = bits(loaded)
    for array in exported.values():
        array += 1
    assert bits(loaded) == before


def test_load_returns_the_plan_it_carried_out():
    plan = transfer.load(model(), torch_tensors(), MODEL)
    assert plan.problems == []
    assert len(plan.moves) == len(torch_tensors())


def test_a_plan_prints_as_a_table_and_writes_nothing():
    module = Model(layers=1)
    before = bits(module)
    plan = transfer.plan(module, torch_tensors(layers=1), MODEL)
    assert bits(module) == before
    lines = str(plan).splitlines()
    assert lines[0].split() == ["torch", "shape", "flax", "shape", "dtype", "steps"]
    line = next(line for line in lines if "k_proj.weight" in line)
    assert re.split(r"\s{2,}", line) == [
        "h.0.self_attention.k_proj.weight",
        "[15, 30]",
        "layers.0.attn.key.kernel",
        "[30, 3, 5]",
        "float32",
        "linear heads",
    ]
    assert "h.{layer}.self_attention.k_proj.weight" in str(MODEL)


def test_a_plan_reads_no_values():
    class Shapes:
        """A tensor that can be described and nothing else."""

        def __init__(self, tensor):
            self.shape, self.dtype = tensor.shape, tensor.numpy().dtype

    class Lazy(dict):
        def describe(self, key):
            return transfer.arrays.describe(self[key])

    tensors = Lazy({key: Shapes(t) for key, t in torch_tensors().items()})
    assert transfer.plan(model(), tensors, MODEL).problems == []


def problems_of(act):
    with pytest.raises(TransferError) as error:
        act()
    return [(p.kind, p.name) for p in error.value.problems], str(error.value)


UP = "h.1.mlp.up.weight"
NORM = "h.1.ln.weight"
WTE = "wte.weight"
BAD_TENSORS = {  # tensors -> (kind, name) of every problem, and what the message must say
    "missing": (
        {UP: None},
        [("missing", UP)],
        'row("h.1.mlp.up.weight", "layers.1.up.kernel", linear)',
    ),
    "missing, one letter off": (
        {UP: None, "h.1.mlp.upp.weight": torch.ones(WIDE, D)},
        [("missing", UP), ("unexpected", "h.1.mlp.upp.weight")],
        "nearest: h.1.mlp.upp.weight",
    ),
    "unexpected": (
        {"h.1.rotary.inv_freq": torch.ones(H)},
        [("unexpected", "h.1.rotary.inv_freq")],
        "no row takes it",
    ),
    "a layer too many": (
        {"h.3.ln.weight": torch.ones(D)},
        [("unexpected", "h.3.ln.weight")],
        "layers.3.norm.scale, which the module lacks",
    ),
    "a layer spelt otherwise": (
        {"h.01.ln.weight": torch.ones(D)},
        [("unexpected", "h.01.ln.weight")],
        "nearest: h.1.ln.weight",
    ),
    "a bias that the module lacks": (
        {"h.1.mlp.up.bias": torch.ones(WIDE)},
        [("unexpected", "h.1.mlp.up.bias")],
        "build the module with biases",
    ),
    "wrong shape": (
        {UP: torch.ones(NARROW, D)},
        [("wrong shape", UP)],
        "expected [13, 30] for layers.1.up.kernel [30, 13], got [7, 30]",
    ),
    "transposed": ({UP: torch.ones(D, WIDE)}, [("wrong shape", UP)], "got [30, 13]"),
    "a scalar": ({UP: torch.tensor(1.0)}, [("wrong shape", UP)], "got []"),
    "wrong dtype": (
        {UP: torch.ones(WIDE, D, dtype=torch.bfloat16)},
        [("wrong dtype", UP)],
        "param_dtype=bfloat16",
    ),
    "wider dtype": (
        {UP: torch.ones(WIDE, D, dtype=torch.float64)},
        [("wrong dtype", UP)],
        "expected float32",
    ),
    "integers": ({UP: np.ones((WIDE, D), np.int32)}, [("wrong dtype", UP)], "got int32"),
    "meta": ({UP: torch.ones(WIDE, D, device="meta")}, [("unreadable", UP)], "meta device"),
    "sparse": ({UP: torch.ones(WIDE, D).to_sparse()}, [("unreadable", UP)], ".to_dense()"),
    "objects": (
        {UP: np.full((WIDE, D), None)},
        [("unreadable", UP)],
        "expected numbers, got dtype object",
    ),
    "a list": (
        {UP: [[1.0] * D] * WIDE},
        [("unreadable", UP)],
        "expected a NumPy, JAX or torch tensor, got list",
    ),
    "a key that is no string": ({7: torch.ones(2)}, [("unreadable", "7")], "a string as key"),
    "several at once": (
        {UP: None, WTE: torch.ones(D, VOCAB), NORM: torch.ones(D).half(), "x": torch.ones(2)},
        [("missing", UP), ("wrong shape", WTE), ("unexpected", "x"), ("wrong dtype", NORM)],
        "4 problems",
    ),
}


@pytest.mark.parametrize(("change", "expected", "says"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_bad_tensors_are_named_and_nothing_is_written(change, expected, says, loaded):
    tensors = {key: t for key, t in {**torch_tensors(), **change}.items() if t is not None}
    before = bits(loaded)
    found, message = problems_of(lambda: transfer.load(loaded, tensors, MODEL))
    assert found == expected
    assert says in message
    assert bits(loaded) == before
    assert [(p.kind, p.name) for p in transfer.plan(loaded, tensors, MODEL).problems] == expected


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns that it will drop quantisation
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_quantised_tensors_are_refused():
    whole = torch.ones(WIDE, D)
    quantised = torch.quantize_per_tensor(whole, scale=0.1, zero_point=0, dtype=torch.qint8)
    found, message = problems_of(
        lambda: transfer.load(model(), torch_tensors() | {UP: quantised}, MODEL)
    )
    assert found == [("unreadable", UP)]
    assert ".dequantize()" in message


def test_a_parameter_that_no_row_writes():
    layout = Layout(*(g for g in MODEL.groups if "up" not in str(g)))
    tensors = {key: t for key, t in torch_tensors().items() if "up" not in key}
    found, _ = problems_of(lambda: transfer.load(model(), tensors, layout))
    assert found == [("unwritten", f"layers.{i}.up.kernel") for i in range(LAYERS)]


def test_the_row_that_would_mend_it_is_proposed():
    layout = Layout(*(g for g in MODEL.groups if "k_proj" not in str(g) and "up" not in str(g)))
    _, message = problems_of(lambda: transfer.load(model(), torch_tensors(), layout))
    for proposed in (
        'row("h.0.mlp.up.weight", "layers.0.up.kernel", linear)',
        'row("h.0.self_attention.k_proj.weight", "layers.0.attn.key.kernel", linear, heads)',
        'row("h.0.self_attention.k_proj.bias", "layers.0.attn.key.bias", heads)',
    ):
        assert f"{proposed} would take it" in message
    mended = layout + Layout(
        row("h.{i}.mlp.up.weight", "layers.{i}.up.kernel", linear),
        row("h.{i}.self_attention.k_proj.weight", "layers.{i}.attn.key.kernel", linear, heads),
        row("h.{i}.self_attention.k_proj.bias", "layers.{i}.attn.key.bias", heads),
    )
    transfer.load(model(), torch_tensors(), mended)


@pytest.mark.parametrize(
    ("prefix", "author"), {"module": "DataParallel", "_orig_mod": "torch.compile"}.items()
)
def test_a_wrapper_s_prefix_is_recognised(prefix, author):
    tensors = {f"{prefix}.{key}": t for key, t in torch_tensors().items()}
    _, message = problems_of(lambda: transfer.load(model(), tensors, MODEL))
    assert author in message
    assert f'layout.under("{prefix}", "")' in message
    transfer.load(model(), tensors, MODEL.under(prefix, ""))


DOUBLED = {
    "two keys onto one path": (
        MODEL + Layout(row("wpe.weight", "tokens.embedding")),
        {"wpe.weight": torch.ones(VOCAB, D)},
        ("doubly written", "tokens.embedding"),
    ),
    "one row twice": (MODEL + EMBEDDING.under("wte", "tokens"), {}, ("doubly written", WTE)),
}


@pytest.mark.parametrize(("layout", "more", "expected"), DOUBLED.values(), ids=DOUBLED)
def test_doubly_written(layout, more, expected):
    found, message = problems_of(lambda: transfer.load(model(), torch_tensors() | more, layout))
    assert expected in found
    assert "expected one row" in message


def test_two_paths_onto_one_key(loaded):
    layout = Layout(
        *(g for g in MODEL.groups if "norm.bias" not in str(g)),
        row("h.{layer}.ln.weight", "layers.{layer}.norm.bias"),
    )
    found, _ = problems_of(lambda: transfer.export(loaded, layout))
    assert ("doubly written", "h.1.ln.weight") in found


def test_keys_refused_by_the_table():
    layout = MODEL + Layout(refused("h.{layer}.rel", "a relative bias has no place here"))
    tensors = torch_tensors() | {"h.2.rel": torch.ones(3)}
    found, message = problems_of(lambda: transfer.load(model(), tensors, layout))
    assert found == [("refused", "h.2.rel")]
    assert "a relative bias has no place here" in message


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
    assert "['h.0.q', 'h.0.k', 'h.0.v'] would do instead" in message


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


def test_export_leaves_no_parameter_behind(loaded):
    layout = Layout(*(g for g in MODEL.groups if "scale" not in str(g)))
    found, _ = problems_of(lambda: transfer.export(loaded, layout))
    assert found == [("unexpected", f"layers.{i}.norm.scale") for i in range(LAYERS)]


class FailsOnSecondReading(Mapping):
    """A file that goes away between the plan and the load."""

    def __init__(self, tensors):
        self.tensors, self.read = tensors, set()

    def __getitem__(self, key):
        if key in self.read and key == NORM:
            raise OSError("the disk is gone")
        self.read.add(key)
        return self.tensors[key]

    def __iter__(self):
        return iter(self.tensors)

    def __len__(self):
        return len(self.tensors)


def test_all_or_nothing_when_reading_breaks_off(loaded):
    tensors = {key: tensor + 1 for key, tensor in torch_tensors().items()}
    before = bits(loaded)
    with pytest.raises(OSError, match="the disk is gone"):
        transfer.load(loaded, FailsOnSecondReading(tensors), MODEL)
    assert bits(loaded) == before


def test_float64_needs_x64_around_the_load():
    with jax.enable_x64(True):
        module = model(dtype=jnp.float64)
    tensors = torch_tensors(dtype=torch.float64)
    with jax.enable_x64(False):
        found, message = problems_of(lambda: transfer.load(module, tensors, MODEL))
    assert len(found) == len(tensors)
    assert {kind for kind, _ in found} == {"wrong dtype"}
    assert "enable x64" in message
    with jax.enable_x64(True):
        transfer.load(module, tensors, MODEL)
        assert transfer.flatten(module)["tokens.embedding"].dtype == jnp.float64


def test_metadata_and_other_variables_stay():
    module = Model(layers=1)
    module.tokens.embedding = nnx.Param(module.tokens.embedding.get_value(), note="mine")
    transfer.load(module, torch_tensors(layers=1), MODEL)
    assert module.tokens.embedding.note == "mine"
    assert not np.asarray(module.running.get_value()).any()


def test_an_uncommitted_array_stays_free_to_move():
    module = Model(layers=1)
    transfer.load(module, torch_tensors(layers=1), MODEL)
    assert not transfer.flatten(module)["tokens.embedding"].committed


def test_a_hopeless_pairing_is_told_quickly():
    """Names are compared with each other for hints: not each with each in a big model."""
    shapes = {f"l.{i}.attn.{name}_proj.kernel": (D, N, H) for i in range(300) for name in "qkv"}
    weight = np.broadcast_to(np.float32(0), (N * H, D))
    tensors = {path.replace("kernel", "weight"): weight for path in shapes}
    layout = transfer.LAYOUTS["gqa"].under("l.{i}.attn", "x.l.{i}.attn")
    start = time.perf_counter()
    assert len(problems_of(lambda: layout.to_flax(tensors, shapes))[0]) == 2 * len(shapes)
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize("variables", [{"ref": True}, {"hijax": True}], ids=str)
def test_variables_of_every_kind(variables):
    with nnx.var_defaults(**variables):
        module = nnx.Linear(NARROW, WIDE, rngs=nnx.Rngs(0))
    weight, bias = counting([(WIDE, NARROW), (WIDE,)])
    transfer.load(module, {"weight": weight, "bias": bias}, LINEAR)
    np.testing.assert_array_equal(transfer.export(module, LINEAR)["weight"], weight)
    np.testing.assert_array_equal(module.kernel[...], weight.T)


ON_TWO_DEVICES = """
import jax, numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jax_attn import transfer
first, second = jax.devices()
halves = NamedSharding(jax.make_mesh((2,), ("d",)), PartitionSpec(None, "d"))
module = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
module.kernel.set_value(jax.device_put(module.kernel.get_value(), halves))
module.bias.set_value(jax.device_put(module.bias.get_value(), second))
weight, bias = np.arange(12, dtype=np.float32).reshape(4, 3), np.ones(4, np.float32)
transfer.load(module, {"weight": weight, "bias": bias}, transfer.LINEAR)
kernel = module.kernel.get_value()
assert kernel.sharding == halves, kernel.sharding
assert {shard.data.shape for shard in kernel.addressable_shards} == {(3, 2)}
assert module.bias.get_value().devices() == {second}
np.testing.assert_array_equal(transfer.export(module, transfer.LINEAR)["weight"], weight)
"""


def test_sharding_and_device_are_kept():
    flags = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    run = [sys.executable, "-c", ON_TWO_DEVICES]
    done = subprocess.run(run, env=os.environ | flags, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


WRONG_ARGUMENTS = {
    "a torch module": (lambda: (model(), torch.nn.Linear(2, 3), LINEAR), "hand in its state_dict"),
    "a list": (lambda: (model(), [], LINEAR), "tensors: expected a mapping"),
    "a table's name": (lambda: (model(), {}, "gqa"), "layout: expected a Layout"),
    "no module": (lambda: (torch.nn.Linear(2, 3), {}, LINEAR), "expected an nnx.Module .* Linear"),
    "a state": (lambda: (nnx.state(model()), {}, LINEAR), "module: expected an nnx.Module"),
}


@pytest.mark.parametrize(("make", "says"), WRONG_ARGUMENTS.values(), ids=WRONG_ARGUMENTS)
def test_arguments_of_the_wrong_kind(make, says):
    with pytest.raises(TypeError, match=says):
        transfer.load(*make())


def test_nothing_to_load_is_an_error():
    found, _ = problems_of(lambda: transfer.load(nnx.Dropout(0.5), {}, MODEL))
    assert found == [("missing", "module")]


def test_flatten_takes_modules_and_states(loaded):
    paths = transfer.flatten(loaded)
    assert list(paths) == list(transfer.flatten(nnx.state(loaded)))
    assert "running" not in paths
    assert "layers.2.attn.query.kernel" in paths


def test_the_error_prints_the_first_problems_and_survives_pickling():
    tensors = {f"stray.{i}": np.ones(2) for i in range(100)}
    with pytest.raises(TransferError) as error:
        transfer.load(model(), tensors, MODEL)
    assert isinstance(error.value, ValueError)
    hidden = len(error.value.problems) - 30
    assert f"and {hidden} more" in str(error.value)
    copy = pickle.loads(pickle.dumps(error.value))
    assert (copy.problems, str(copy)) == (error.value.problems, str(error.value))
