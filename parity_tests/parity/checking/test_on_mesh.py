"""Ports on a mesh of eight devices: what is right passes, and what goes wrong on meshes fails."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax import P, lax
from jax.sharding import AxisType

from helpers.attention.meshes import KINDS, mesh
from helpers.parity.cut_layers import (
    FEED,
    FEED_ROW,
    RIGHT,
    SCALE_NOT_SUMMED,
    WRONG,
    B,
    D,
    G,
    Jax,
    K,
    T,
    Torch,
    checked,
    hidden,
    mean_of_means,
    of_feed,
    of_mean,
    torch_mean,
)
from helpers.parity.findings import kinds, sentences
from jax_attn import parity
from jax_attn.parity import Verdict
from jax_attn.parity.judge.compare import BESIDE
from jax_attn.parity.run import TRANSFORMS
from jax_attn.transfer import Layout, row


def failing(result, rows):
    """How each row was run where some tensor of it fails."""
    names = list(rows)
    found = {name: set() for name in rows}
    for t in result.tensors:
        name = t.name if t.name in rows else names[int(t.name.split("_")[-1])]
        found[name] |= {t.transform} if t.verdict is not Verdict.PASS else set()
    return found


def runs(*transforms):
    return {f"{name}{end}" for name in transforms for end in ("", BESIDE)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_right_on_a_mesh_passes_and_what_goes_wrong_fails_beside_one_device_too(kind):
    rows = RIGHT | WRONG
    result = checked(kind, rows)
    assert failing(result, rows) == {name: runs("jit") if name in WRONG else set() for name in rows}
    assert {t.transform for t in result.tensors} == runs("jit")
    (copies,) = sentences(result, "unlike-copies")
    assert "devices hold different numbers for `no sum`" in copies
    assert f"`grad scale_{[*rows].index(SCALE_NOT_SUMMED)}`" in copies
    assert {*kinds(result, "failure", "doubt")} == {"over-budget", "unlike-copies"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_mesh_under_every_transform(kind):
    right, wrong = "neighbours", "a neighbour off by one"
    rows = {right: RIGHT[right], wrong: WRONG[wrong]}
    result = checked(kind, rows, transforms=TRANSFORMS)
    assert failing(result, rows) == {right: set(), wrong: runs(*TRANSFORMS)}


@pytest.mark.slow
def test_what_differs_on_the_mesh_alone_is_explained_so():
    explanation = checked("explicit", {"output": WRONG["summed twice"]}).explain()
    assert "computes something else on the mesh than on one device" in explanation.sentence


@pytest.mark.slow
def test_what_is_wrong_everywhere_is_explained_as_without_a_mesh():
    def halved(*arrays):
        return lax.psum(hidden(*arrays) / 2, "model")

    explanation = checked("explicit", {"output": (*FEED_ROW, of_feed(halved))}).explain()
    assert explanation.regions, explanation.sentence


def labels_of(lengths):
    return np.where(np.arange(T)[None] < np.array(lengths)[:, None], 3, -100)


# name -> lengths of the rows, what the input makes of them, whether a mean of means would pass
SHARES = {
    "unequal lengths": ((11, 2), np.array, False),
    "equal lengths": ((7, 7), np.array, True),
    "equal labels": ((7, 7), labels_of, True),
    "unequal labels": ((11, 2), labels_of, False),
    "an equal mask": ((7, 7), lambda lengths: labels_of(lengths) > 0, True),
}


@pytest.mark.parametrize("name", SHARES)
def test_equal_shares_of_tokens_hide_a_mean_of_means_and_a_note_says_so(name):
    lengths, made, hides = SHARES[name]
    counts = made(lengths)

    def torch_call(module, x, counts):
        shown = counts if counts.ndim == 1 else (counts > 0).sum(1)
        return torch_mean(module, x, shown)

    def port_call(module, x, counts):
        shown = counts if counts.ndim == 1 else (counts > 0).sum(1)
        return of_mean(mean_of_means)(module, x, shown)

    reference = Torch(scale=(D,))
    result = parity.check(
        reference,
        Jax(reference),
        {"x": np.random.default_rng(0).standard_normal((B, T, D)), "counts": counts},
        reference_call=torch_call,
        port_call=port_call,
        gradients=False,
        mesh=mesh("auto", data=2, model=4),
        specs={"x": P("data"), "counts": P("data")},
        transforms=("jit",),
    )
    assert result.verdict is (Verdict.PASS if hides else Verdict.FAIL), str(result)
    assert ("equal-shares" in kinds(result, "note")) is hides


class Kept(nnx.Module):
    """A scale, running statistics that lie on the mesh, and a parameter that nothing reads."""

    def __init__(self, scale):
        self.scale, self.idle = nnx.Param(scale), nnx.Param(jnp.ones(3))
        self.shift = nnx.BatchStat(jnp.ones(D))

    def __call__(self, x):
        return x * self.scale[...] + self.shift[...]


class TorchKept(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.idle = Torch(scale=(D,)).scale, torch.nn.Parameter(torch.ones(3))
        self.register_buffer("shift", torch.ones(D))

    def forward(self, x):
        return x * self.scale + self.shift


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_on_the_mesh_and_what_nothing_reads(kind):
    reference, on = TorchKept(), mesh(kind, data=2, model=4)
    with jax.set_mesh(on):
        port = Kept(jnp.array(reference.scale.detach().numpy()))
    names = ("scale", "idle", "shift")
    result = parity.check(
        reference,
        port,
        {"x": np.random.default_rng(0).standard_normal((B, T, D)).astype(np.float32)},
        layout=Layout(*(row(name, name) for name in names)),
        mesh=on,
        specs={"x": P("data")},
    )
    assert result.verdict is Verdict.PASS, str(result)


def test_a_mesh_on_which_nothing_is_cut_shows_nothing():
    shapes, torch_call, *_ = RIGHT["neighbours"]
    reference = Torch(**shapes)
    result = parity.check(
        reference,
        Jax(reference),
        {"x": np.random.default_rng(0).standard_normal((B, T, D)).astype(np.float32)},
        reference_call=torch_call,
        port_call=lambda m, x: (
            m.here[...] * x + m.before[...] * jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        ),
        transforms=("jit",),
        mesh=mesh("auto", data=2, model=4),
    )
    assert result.verdict is Verdict.INCONCLUSIVE
    assert kinds(result, "doubt") == ["nothing-cut"]


@pytest.mark.slow
def test_what_is_sent_and_held_is_noted():
    result = checked("explicit", {"output": RIGHT["a sum over features"]})
    texts = sentences(result, "traffic")
    assert all("data=2, model=4 (Explicit)" in text for text in texts)
    assert [text.split(",")[0] for text in texts] == ["forward", "forward and backward"]
    # A sum of (1, 12, 5) numbers; each device holds that much of x, too, and its own parameters.
    assert "sends 1 all-reduce with results of 240 bytes" in texts[0]
    assert f"holds {4 * (60 + 5 + 10 + 10)} bytes of arguments, 240 of results" in texts[0]


def test_a_gradient_that_is_cut_less_than_its_parameter_is_noted():
    """One whose own backward pass leaves it whole."""

    @jax.custom_vjp
    def scaled(x, scale):
        return x * scale

    def backward(saved, cotangent):
        x, scale = saved
        whole = lax.with_sharding_constraint((x * cotangent).sum((0, 1)), P())
        return cotangent * scale, whole

    scaled.defvjp(lambda x, scale: (x * scale, (x, scale)), backward)
    reference = Torch(scale=(K * G,))
    shape = (B, T, K * G)
    result = parity.check(
        reference,
        Jax(reference),
        {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32)},
        layout=Layout(row("scale", "scale")),
        reference_call=lambda module, x: x * module.scale,
        port_call=lambda module, x: scaled(x, module.scale[...]),
        transforms=("jit",),
        mesh=mesh("auto", data=2, model=4),
        specs={"x": P("data", None, "model"), "scale": P("model")},
    )
    assert result.verdict is Verdict.PASS, str(result)
    text = "grad scale: each device holds shape (4,) of it, and (1,) of scale itself"
    assert sentences(result, "gradient-replicated") == [text]


BAD_TYPES = {
    "no mesh": ({"mesh": None, "specs": {"x": P()}}, "specs: expected a mesh as well, got"),
    "no mesh of JAX's": ({"mesh": 8}, "mesh: expected a jax.sharding.Mesh, got int"),
    "no specs": ({"specs": [P()]}, "specs: expected a dict of PartitionSpecs, got list"),
    "no spec": ({"specs": {"x": "data"}}, "specs['x']: expected a PartitionSpec, got str 'data'"),
}


@pytest.mark.parametrize("name", BAD_TYPES)
def test_arguments_of_other_types_are_refused_together(name):
    given, text = BAD_TYPES[name]
    reference = Torch(**FEED)
    on = {"mesh": mesh("auto", data=2, model=4), "specs": {}} | given
    with pytest.raises(TypeError, match=re.escape(text)) as told:
        parity.check(reference, Jax(reference), {}, layout="none", **on)
    assert "layout: expected a Layout" in str(told.value)


BAD = {
    "nothing of this name": (
        "auto",
        {"z": P(), "layers.{i}.up": P()},
        "specs['z']: expected the name of an input (x) or a pattern that a parameter matches, such "
        "as 'down'\nspecs['layers.{i}.up']: expected",
    ),
    "an axis that is not there": (
        "explicit",
        {"x": P("rows"), "up": P("model")},
        "specs['x']: input x of shape (2, 12, 5): expected axes of the mesh ('data', 'model'), got "
        "['rows']\nspecs['up']: parameter up of shape (5, 8): expected parts whose number divides "
        "5, got 4 by 'model'",
    ),
    "too many axes": ("auto", {"up": P(None, None, "model")}, "expected at most 2 axes, got P("),
    "one axis twice": (
        "auto",
        {"down": P("model", "model")},
        "expected each axis of the mesh once, got ['model'] more often",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_the_mesh_is_refused(name):
    kind, specs, text = BAD[name]
    shapes, torch_call, shape, _, call = RIGHT["a sum over features"]
    reference = Torch(**shapes)
    x = {"x": np.ones(shape, np.float32)}
    with pytest.raises(ValueError, match=re.escape(text)):
        parity.check(
            reference,
            Jax(reference),
            x,
            reference_call=torch_call,
            port_call=call,
            mesh=kind and mesh(kind, data=2, model=4),
            specs=specs,
        )


def test_a_mesh_of_mixed_axes_is_refused():
    kinds = (AxisType.Explicit, AxisType.Auto)
    mixed = jax.make_mesh((2, 4), ("data", "model"), kinds)
    shapes, _, shape, *_ = RIGHT["a sum over features"]
    reference = Torch(**shapes)
    with pytest.raises(ValueError, match="axes that are all Explicit, or all Auto"):
        parity.check(reference, Jax(reference), {"x": np.ones(shape, np.float32)}, mesh=mixed)


def test_patterns_that_contradict_are_refused():
    class Stack(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0))])

        def __call__(self, x):
            return self.layers[0](x)

    with pytest.raises(
        ValueError, match=r"specs: expected one for parameter layers\.0\.kernel, got"
    ):
        parity.check(
            torch.nn.Linear(4, 4, bias=False),
            Stack(),
            {"x": np.ones((2, 4), np.float32)},
            mesh=mesh("auto", data=2, model=4),
            specs={"layers.{i}.kernel": P("model"), "layers.0.kernel": P(None, "model")},
        )
