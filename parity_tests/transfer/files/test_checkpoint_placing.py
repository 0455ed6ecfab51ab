"""Arrays straight from a file onto their devices: where they lie, and what is held meanwhile."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from helpers.attention import meshes
from helpers.transfer.fresh_python import fresh_python
from jax_attn import transfer
from jax_attn.nn import GroupedQueryAttention
from jax_attn.transfer import LINEAR, Layout, joined, load_checkpoint, row, save_checkpoint

IN, OUT = 7, 4


def drawn(*shape, dtype="float32"):
    return np.random.default_rng(shape).standard_normal(shape).astype(dtype)


def linear(**options):
    return nnx.Linear(IN, OUT, **options, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_abstract_module_becomes_a_real_one(tmp_path, dtype):
    tensors = {"weight": drawn(OUT, IN, dtype=dtype), "bias": drawn(OUT, dtype=dtype)}
    save_checkpoint(tmp_path / "m.safetensors", tensors, shard_bytes=20)
    module = nnx.eval_shape(lambda: linear(param_dtype=jnp.dtype(dtype)))
    with load_checkpoint(tmp_path) as checkpoint:
        transfer.load(module, checkpoint, LINEAR)
    exported = transfer.export(module, LINEAR)
    assert {k: a.tobytes() for k, a in exported.items()} == {
        k: a.tobytes() for k, a in tensors.items()
    }
    assert module(jnp.ones((2, IN), dtype)).shape == (2, OUT)


def aligned(shape, begin=0):
    """NumPy memory as the CPU's arrays would have it, and `begin` bytes further."""
    nbytes = 4 * int(np.prod(shape))
    raw = np.zeros(nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 64 + begin
    return raw[start : start + nbytes].view(np.float32).reshape(shape)


@pytest.mark.parametrize("begin", [0, 4])
@pytest.mark.parametrize("committed", [False, True])
def test_what_is_loaded_is_never_the_source_s_own_memory(begin, committed):
    module = linear()
    if committed:
        module.bias.set_value(jax.device_put(module.bias.get_value(), jax.devices()[0]))
    tensors = {"weight": aligned((OUT, IN), begin), "bias": aligned((OUT,), begin)}
    transfer.load(module, tensors, LINEAR)
    for tensor in tensors.values():
        tensor += 1
    for array in transfer.flatten(module).values():
        np.testing.assert_array_equal(array, 0)


def test_that_memory_would_be_shared_without_the_copy():
    """So that the test above can fail; `may_alias=False` does not forbid it in jax 0.10."""
    source = aligned((OUT,))
    array = jax.device_put(source, may_alias=False)
    source += 1
    assert array[0] == 1


ON_FOUR_DEVICES = """
import sys
import jax, numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jax_attn import transfer
from jax_attn.transfer import Layout, heads, linear, row

mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
SPLIT = {"both": P("a", "b"), "one": P(None, "a"), "none": P(), "head": P("b"), "scalar": P()}
SHAPES = {"both": (6, 10), "one": (6, 10), "none": (6, 10), "head": (6, 2, 5), "scalar": ()}
STEPS = {"both": (linear,), "one": (linear,), "none": (), "head": (linear, heads), "scalar": ()}
layout = Layout(*(row(name, name, *STEPS[name]) for name in SPLIT))

class Model(nnx.Module):
    def __init__(self):
        for name, shape in SHAPES.items():
            metadata = {"out_sharding": tuple(SPLIT[name])}
            setattr(self, name, nnx.Param(jax.numpy.zeros(shape), **metadata))

def sliced():
    definition, state = nnx.get_abstract_model(Model, mesh)
    return nnx.merge(definition, state)

def abstract():
    with jax.set_mesh(mesh):
        return nnx.as_abstract(nnx.eval_shape(Model))

class Odd(nnx.Module):
    def __init__(self):
        where = NamedSharding(mesh, P("a"))
        self.odd = nnx.Param(jax.ShapeDtypeStruct((5,), "float32", sharding=where))

odd = {"odd": np.ones(5, np.float32)}
try:
    transfer.load(Odd(), odd, Layout(row("odd", "odd")))
except transfer.TransferError as error:
    assert "should evenly divide the shape" in str(error)
    assert error.problems == transfer.plan(Odd(), odd, Layout(row("odd", "odd"))).problems
else:
    raise AssertionError("five numbers do not go to two devices")

put, given = jax.device_put, []
def recorded(array, *args, **options):
    given.append((type(array).__name__, array.shape))
    return put(array, *args, **options)

with transfer.load_checkpoint(sys.argv[1]) as checkpoint:
    try:
        transfer.load(abstract(), checkpoint, layout)
    except transfer.TransferError as error:
        assert "load under jax.set_mesh(mesh)" in str(error)
        assert len(error.problems) == 5
        assert error.problems == transfer.plan(abstract(), checkpoint, layout).problems
    else:
        raise AssertionError("devices of an abstract mesh are not known")
    for module in (sliced(), abstract()):
        with jax.set_mesh(mesh):
            jax.device_put = recorded
            transfer.load(module, checkpoint, layout)
            jax.device_put = put
        arrays = transfer.flatten(module)
        for name, array in arrays.items():
            assert array.sharding.is_equivalent_to(NamedSharding(mesh, SPLIT[name]), array.ndim)
            assert array.committed
            assert len(array.addressable_shards) == 4
        for key, tensor in transfer.export(module, layout).items():
            np.testing.assert_array_equal(tensor, checkpoint[key], strict=True)
        parts = {"both": (3, 5), "one": (6, 5), "none": (6, 10), "head": (3, 2, 5), "scalar": ()}
        want = sorted(("ndarray", shape) for shape in parts.values() for _ in range(4))
        assert sorted(set(given)) == sorted(set(want)), given
        # at most twice: what the CPU took as it was is copied, and given again
        assert all(want.count(g) <= given.count(g) <= 2 * want.count(g) for g in set(given)), given
        given.clear()

last = jax.devices()[3]
single = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
single.bias.set_value(jax.device_put(single.bias.get_value(), last))
transfer.load(single, {"weight": np.ones((4, 3), "f4"), "bias": np.ones(4, "f4")}, transfer.LINEAR)
assert single.bias.get_value().devices() == {last}
"""


@pytest.mark.slow
def test_each_device_is_given_its_own_part_and_no_more(tmp_path):
    shapes = {"both": (10, 6), "one": (10, 6), "none": (6, 10), "head": (10, 6), "scalar": ()}
    tensors = {name: drawn(*shape) if shape else np.float32(3) for name, shape in shapes.items()}
    save_checkpoint(tmp_path / "m.safetensors", tensors, shard_bytes=300)
    fresh_python(ON_FOUR_DEVICES, tmp_path, devices=4)


ANONYMOUS = """
import json, sys, threading, time
from pathlib import Path
import jax, numpy as np
from flax import nnx
from jax_attn import transfer

def anonymous():
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.partition("RssAnon:")[2].split()[0])

class Watch:
    def __enter__(self):
        self.before = self.most = anonymous()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.look)
        self.thread.start()
        return self
    def look(self):
        while not self.done.wait(5e-4):
            self.most = max(self.most, anonymous())
    def __exit__(self, *_):
        self.done.set()
        self.thread.join()
        self.grown = max(self.most, anonymous()) - self.before

COUNT, D = 6, 2048
class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        make = lambda: nnx.Linear(D, D, use_bias=False, rngs=rngs)
        self.layers = nnx.List([make() for _ in range(COUNT)])
layout = transfer.LINEAR.under("layers.{i}", "layers.{i}")
module = nnx.eval_shape(Model)
jax.device_put(np.ones(2)).block_until_ready()
checkpoint = transfer.load_checkpoint(sys.argv[1])
one = D * D * 4
with Watch() as loading:
    transfer.load(module, checkpoint, layout)
with Watch() as writing:
    transfer.save_checkpoint(sys.argv[1] + "/again.safetensors", checkpoint, shard_bytes=2 * one)
with Watch() as holding:  # what the two do not do
    held = dict(checkpoint)
print(json.dumps([(loading.grown - COUNT * one) / one, writing.grown / one, holding.grown / one]))
"""


@pytest.mark.slow
def test_loading_and_writing_hold_no_more_than_a_tensor_beyond_what_is_kept(tmp_path):
    weights = {f"layers.{i}.weight": np.full((2048, 2048), i, np.float32) for i in range(6)}
    save_checkpoint(tmp_path / "model.safetensors", weights, shard_bytes=2**25)
    loading, writing, holding = json.loads(fresh_python(ANONYMOUS, tmp_path))
    assert loading < 1.5  # tensors of 16 MiB, and half of one for all else
    assert writing < 1.5
    assert holding > 4  # so that it would be seen


def test_several_keys_that_make_one_array_are_read_together(tmp_path):
    save_checkpoint(tmp_path / "m.safetensors", {"a": drawn(2, OUT), "b": drawn(2, OUT) + 1})
    module = nnx.eval_shape(lambda: nnx.Linear(4, OUT, use_bias=False, rngs=nnx.Rngs(0)))
    with load_checkpoint(tmp_path) as checkpoint:
        transfer.load(module, checkpoint, Layout(row(("a", "b"), "kernel", joined)))
        expected = np.concatenate([checkpoint["a"], checkpoint["b"]])
    np.testing.assert_array_equal(module.kernel[...], expected)


def test_a_mapping_that_fails_half_way_leaves_the_module_as_it_was(tmp_path):
    class Fails(dict):
        def mapped(self, key):
            if key == "weight":
                raise transfer.TransferError("reading", [transfer.Problem("unreadable", key, "")])
            return self[key]

    module = linear()
    before = {path: np.asarray(a).tobytes() for path, a in transfer.flatten(module).items()}
    with pytest.raises(transfer.TransferError):
        transfer.load(module, Fails(weight=drawn(OUT, IN), bias=drawn(OUT)), LINEAR)
    assert {path: np.asarray(a).tobytes() for path, a in transfer.flatten(module).items()} == before


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_the_plan_says_what_each_device_holds(kind):
    """A layer keeps its parameters where its names put them."""
    mesh = meshes.mesh(kind, rows=2, heads=4)
    cut = GroupedQueryAttention(24, 8, 4, rngs=nnx.Rngs(0))
    tensors = transfer.export(cut, transfer.LAYOUTS["gqa"])
    assert transfer.plan(cut, tensors, transfer.LAYOUTS["gqa"]).per_device is None
    with jax.set_mesh(mesh):
        cut = GroupedQueryAttention(24, 8, 4, sharding={"heads": "heads"}, rngs=nnx.Rngs(1))
        planned = transfer.load(cut, tensors, transfer.LAYOUTS["gqa"])
    q, kv, out = 24 * 24 + 24, 2 * (24 * 12 + 12), 24 * 24
    assert planned.per_device == 4 * ((q + kv + out) // 4 + 24)
    total = 4 * (q + kv + out + 24)
    assert f"each device holds {planned.per_device:,} of {total:,} bytes" in str(planned)
    assert cut.k_proj.kernel.get_value().sharding.spec == jax.P(None, "heads", None)
    exported = transfer.export(cut, transfer.LAYOUTS["gqa"])
    assert all((exported[key] == tensor).all() for key, tensor in tensors.items())
