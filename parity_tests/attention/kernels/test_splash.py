"""Splash attention by Pallas's interpreter, against the definition; and what it refuses, by row."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.attention import attention_definition as definition
from helpers.attention.extra_keys import folded, written_out
from helpers.attention.kernel_refusals import refusals
from helpers.attention.meshes import mesh, placed
from jax_attn.attention import Dropout, Mask, dispatch, dot_product_attention
from jax_attn.attention.call import ExtraKeys, checked_call
from jax_attn.attention.kernels import splash, splash_kernel

B, N, K, H, HV = 2, 6, 3, 5, 7


def drawn(T, S):
    rng = np.random.default_rng(5)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, HV), (B, T, N, HV)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def segments(T, S):
    rng = np.random.default_rng(6)
    return Mask.segments(rng.integers(0, 3, (B, T)), rng.integers(0, 2, (B, S)))


SINKS = np.array([0.5, -1, 2, 0, -np.inf, 1], np.float32)

# (T, S), the mask, other options; nearly all have padding on both axes, and empty rows.
ROWS = {
    "open, whole blocks": ((128, 256), None, {}),
    "causal, offset before the first key": ((7, 11), Mask.causal(-3), {"softcap": 1.5}),
    "window, several blocks": ((300, 290), Mask.window(40, 10, offset=-60), {"scale": 0.3}),
    "lengths, one of them 0": ((7, 11), Mask.lengths([0, 4]), {}),
    "segments, lengths and a band": (
        (7, 11),
        segments(7, 11) & Mask.lengths([9, 4]) & Mask.causal(2),
        {"softcap": 0.7, "scale": -1.1},
    ),
    "a band that hides everything": ((7, 11), Mask.causal(-30), {}),
    "sinks and a zero key": ((7, 11), Mask.causal(-3), {"add_zero_attn": True, "sinks": SINKS}),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(splash_kernel, "BLOCK", splash_kernel.LANES)


INTERPRETED = dataclasses.replace(
    dispatch.KERNELS["splash"],
    run=functools.partial(splash.attention, interpret=True),
    only_on=None,
)


def errors(name, gradients=True, on=None) -> list[float]:
    """The worst error of output and gradients, each in units of its budget.

    on: a mesh whose devices have parts of the batch and of the query heads.
    """
    (T, S), mask, options = ROWS[name]
    *arrays, cotangent = drawn(T, S)
    by_head, by_row = (jax.P("rows", None, axis) for axis in ("heads", None))
    given = {"softcap": None, "scale": None} | options
    zero, sinks = given.pop("add_zero_attn", False), given.pop("sinks", None)

    # Interpreted, it is one long program for a few numbers: compiled quickly, it runs as fast.
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(cotangent, *arrays):
        def attend(*arrays, sinks=sinks):
            extra = ExtraKeys(add_zero_attn=zero, sinks=sinks)
            if on is not None:
                options = given | {"add_zero_attn": zero, "sinks": sinks}
                kernel = {"implementation": INTERPRETED}
                return dot_product_attention(*arrays, mask=mask, **options, **kernel)
            call = checked_call("attend", *arrays, mask, extra=extra, **given)
            assert not splash.refusals(call)
            return splash.attention(call, interpret=True)

        if not gradients:
            return (attend(*arrays),)
        if sinks is None:
            out, pull = jax.vjp(attend, *arrays)
        else:
            out, pull = jax.vjp(lambda q, k, v, s: attend(q, k, v, sinks=s), *arrays, sinks)
        return out, *pull(cotangent)

    allowed = None if mask is None else np.asarray(mask.materialize(T, S))
    there = [cotangent, *arrays]
    if on is not None:
        there = placed(on, there, [by_head, by_head, by_row, by_row])
    found = run(*there)
    arrays, given = written_out(*arrays, None, None, zero, sinks, allowed=allowed, **given)
    want, _ = definition.attend(*arrays, **given)
    budget, _ = definition.forward_budget("float32", *arrays, **given)
    grads = folded(*definition.gradients(cotangent, *arrays, **given))
    budgets = folded(*definition.gradient_budget("float32", cotangent, *arrays, **given))
    of_arrays_and_sinks = [*zip(grads, budgets, strict=True)]
    wanted = [(want, budget), *of_arrays_and_sinks[:3], of_arrays_and_sinks[-1]]
    assert len(found) == (1 if not gradients else 4 if sinks is None else 5)
    return [definition.worst(got, *pair) for got, pair in zip(found, wanted, strict=False)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_it_is_attention_forward_and_backward(name):
    assert max(errors(name)) <= 1


# Three query heads on a device read two key/value heads, or one. One axis of the mesh cuts nothing.
@pytest.mark.slow
@pytest.mark.parametrize("name", list(ROWS)[3:])
def test_on_a_mesh_each_device_computes_its_part(name):
    assert max(errors(name, on=mesh("explicit", rows=2, heads=2, others=2))) <= 1


@pytest.mark.slow
def test_the_gradient_of_sinks_has_their_dtype_beside_bfloat16():
    def total(sinks, *arrays):
        extra = ExtraKeys(sinks=sinks, add_zero_attn=True)
        call = checked_call("attend", *arrays, extra=extra)
        return splash.attention(call, interpret=True).astype(jnp.float32).sum()

    q, k, v = (jnp.asarray(a, jnp.bfloat16) for a in drawn(7, 11)[:3])
    gradient = jax.eval_shape(jax.grad(total), jnp.asarray(SINKS), q, k, v)
    assert gradient.dtype == jnp.float32


def without_scale(monkeypatch):
    attention = splash_kernel.attention

    def mistaken(call, interpret):
        return attention(dataclasses.replace(call, scale=1.0), interpret)

    monkeypatch.setattr(splash_kernel, "attention", mistaken)


def window_off_by_one(monkeypatch):
    def mistaken(call, T, S):
        return splash_kernel.Band((T, S), call.mask.lo, call.mask.hi + 1)

    monkeypatch.setattr(splash_kernel, "_mask", mistaken)


def padding_seen(monkeypatch):
    monkeypatch.setattr(splash_kernel, "_segments", lambda *_: None)


def without_sink(monkeypatch):
    """As the kernel is: a row that sees nothing gets the mean of what was hidden, or NaN."""
    monkeypatch.setattr(splash_kernel, "SINK", -np.inf)


def without_sinks(monkeypatch):
    monkeypatch.setattr(splash_kernel, "_sinks", lambda call: jnp.full(call.N, splash_kernel.SINK))


MISTAKES = {
    "sinks left out": (without_sinks, "sinks and a zero key"),
    "no scale": (without_scale, "open, whole blocks"),
    "window off by one": (window_off_by_one, "window, several blocks"),
    "padded keys seen": (padding_seen, "lengths, one of them 0"),
    "empty rows left as they are": (without_sink, "lengths, one of them 0"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_that_comparison_sees(monkeypatch, name):
    plant, row = MISTAKES[name]
    plant(monkeypatch)
    assert not max(errors(row, gradients=False)) <= 1


def test_bands_know_their_blocks_without_writing_them_out():
    """Each block of a band against all of its elements, and it is written out only at an edge."""
    written = 0
    for lo, hi in ((None, 0), (-9, 3), (4, None), (-40, -33), (2, 2)):
        band = splash_kernel.Band((32, 48), lo, hi)
        i, j = np.arange(32)[:, None], np.arange(48)
        whole = np.broadcast_to(band.mask_function(i, j), band.shape)
        assert np.array_equal(whole, Mask(lo=lo, hi=hi).materialize(32, 48)[0, 0])
        for rows in (slice(n, n + 8) for n in range(0, 32, 8)):
            for columns in (slice(n, n + 16) for n in range(0, 48, 16)):
                got, want = band[rows, columns], whole[rows, columns]
                assert (got.any(), got.all()) == (want.any(), want.all())
                written += got.shape == want.shape
                assert got.shape in ((1, 1), want.shape)
    assert 0 < written < 5 * 12


@pytest.mark.parametrize(
    ("n", "size"), [(1, 128), (128, 128), (500, 512), (600, 384), (2048, 512), (8192, 1024)]
)
def test_blocks_are_large_and_leave_little_over(monkeypatch, n, size):
    monkeypatch.undo()
    assert splash_kernel.block(n) == size


x = jnp.ones((2, 130, 2, 8), jnp.bfloat16)
ANY = np.ones((130, 130), bool)
# One row a reason: what is asked, what is said.
REFUSED = {
    "float16": ({"dtype": "float16"}, "it takes bfloat16 and float32, not float16"),
    "precision": ({"precision": "highest"}, "it multiplies in single bfloat16 passes, whatever"),
    "dropout": ({"dropout": Dropout(0.5, keep=ANY)}, "its dropout differs"),
    "bias": ({"bias": jnp.ones((130, 130))}, "it adds no bias"),
    "bias_k": (
        {"extra": ExtraKeys(*jnp.ones((2, 2, 8), jnp.bfloat16))},
        "it supports no bias_k",
    ),
    "array": ({"mask": ANY}, "it takes no boolean array"),
    "segments in int64": (
        {"mask": Mask(q_segments=np.ones((2, 1), int), kv_segments=np.ones((2, 1), int))},
        "it compares segments in int32, not in int64",
    ),
    "traced band": ({"mask": Mask.causal(np.array([1, 2]))}, "it takes no band that differs"),
    "wide heads": ({"H": 264}, "H and Hv may be 256 at most, here 264 and 264"),
    "empty batch": ({"B": 0}, "there is nothing to compute: the batch is empty"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_each_reason_is_told(name):
    options, why = REFUSED[name]
    (told,) = refusals(splash, **options)
    assert why in told


def test_all_reasons_are_told_at_once():
    options = {k: v for row in ("float16", "bias", "array") for k, v in REFUSED[row][0].items()}
    assert len(refusals(splash, **options)) == 3
    assert refusals(splash) == []
    assert refusals(splash, dropout=Dropout(0.0, keep=ANY), precision="default") == []


@pytest.mark.parametrize("check_vma", [True, False])
def test_within_a_shard_map_that_checks_what_varies_it_is_refused(check_vma):
    over = jax.make_mesh((1,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))
    told = []

    def local(x):
        told.extend(refusals(splash))
        return x

    specs = {"in_specs": jax.P(), "out_specs": jax.P()}
    jax.shard_map(local, mesh=over, check_vma=check_vma, **specs)(jnp.ones(1))
    why = "within a shard_map with check_vma=True it does not declare along which axes its "
    why += "results vary"
    assert told == ([why] if check_vma else [])


def test_sizes_that_are_not_known_are_refused():
    (b,) = jax.export.symbolic_shape("b")
    assert refusals(splash, B=b) == ["it needs known sizes, not B = b"]


@pytest.mark.slow
def test_the_chooser_carries_it_to_tpus_beside_the_cpu_s():
    """In a program for each platform and in one for all, forward and gradient."""

    def attend(x):
        return dot_product_attention(x, x, x, is_causal=True)

    def gradient(x):
        return jax.grad(lambda x: attend(x).astype(jnp.float32).sum())(x)

    for fn, shape in ((attend, x), (gradient, x), (jax.vmap(attend), x[None])):
        for platforms in (["cpu"], ["tpu"], ["cuda"], [*dispatch.PLATFORMS]):
            text = jax.export.export(jax.jit(fn), platforms=platforms)(shape).mlir_module()
            assert ("tpu_custom_call" in text) == ("tpu" in platforms)
