"""Ports of every kind: one block passes in each, and one bug in each fails for the same cause."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import P

from helpers.attention.meshes import mesh
from helpers.parity import five_kinds
from helpers.parity.findings import kinds
from helpers.parity.five_kinds import BUGS, KINDS, eqx, keras, nn
from helpers.parity.one_reference import Once
from jax_attn import parity
from jax_attn.parity import Verdict
from jax_attn.parity.judge.compare import BESIDE
from jax_attn.transfer import Layout, ignored, linear, load, row

ONCE = Once()
REFERENCE = five_kinds.reference()


def check(kind: str, bug: str = "", **options) -> parity.Result:
    port, layout = five_kinds.port(kind, REFERENCE, bug), KINDS[kind].layout
    options = {"layout": layout, "transforms": ("jit",)} | options
    return parity.check(REFERENCE, port, five_kinds.inputs(), **options)


OF_LIBRARIES = ("equinox", "linen", "keras")


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=pytest.mark.slow if k in OF_LIBRARIES else ()) for k in KINDS],
)
def test_a_right_port_passes_with_its_table_and_every_gradient(kind, monkeypatch):
    ONCE.patch(monkeypatch)
    result = check(kind, transforms=("eager", "jit"))
    assert result.verdict is Verdict.PASS, str(result)
    compared = {t.name for t in result.tensors if t.kind == "gradient of parameter"}
    assert compared == {name for name, _ in REFERENCE.named_parameters()}
    assert set(kinds(result)) == {"zero-gradient", "scope"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_right_port_passes_under_every_transform(kind, monkeypatch):
    ONCE.patch(monkeypatch)
    result = check(kind, transforms=("grad", "vmap", "remat"))
    assert result.verdict is Verdict.PASS, str(result)


CAUSES = {
    "scale": "0.5 (1/2) times as large",
    "no mask": "no mask",
    "mask one key too far": "one more visible key after each query",
    "epsilon": "an epsilon of 0.001 in place of 1e-05 in `norm_2`",
    "tanh gelu": "gelu by tanh",
    "relu": "relu",
    "heads interleaved": "",
    "keys for values": "`k.weight` in place of `v.weight`",
    "no residual": "a sum that lacks its first summand",
    "norm after": "no norm in `norm_2`",
    "transposed weight": "`out.weight` transposed",
    "reversed bias": "",
}
"""Bug -> words of its cause; "" if a region is found and no cause is confirmed."""


def few_or_all(with_long: bool) -> tuple[str, list[str]]:
    """Return three bugs of different sites, or all: each is explained in every kind."""
    return "bug", [*BUGS] if with_long else ["no mask", "epsilon", "transposed weight"]


@pytest.mark.slow
def test_a_bug_fails_in_every_kind_for_the_same_cause(bug, monkeypatch):
    ONCE.patch(monkeypatch)
    # A limit by the clock would try more causes for one kind than for another.
    monkeypatch.setattr("jax_attn.parity.explaining.explain._SECONDS", 3600.0, raising=False)
    found = {}
    for kind in KINDS:
        result = check(kind, bug)
        assert result.verdict is Verdict.FAIL, f"{kind}: {result}"
        regions = result.explain().regions
        found[kind] = [
            (region.first_wrong.theirs.op, {c.sentence for c in region.causes if c.confirmed})
            for region in regions
        ]
    ((_, causes),) = found["nnx"]
    assert any(CAUSES[bug] in cause for cause in causes) if CAUSES[bug] else not causes
    assert all(found[kind] == found["nnx"] for kind in KINDS), found


test_a_bug_fails_in_every_kind_for_the_same_cause.in_dtypes = few_or_all


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_mesh_a_port_is_sharded_by_the_paths_of_its_tree(kind, monkeypatch):
    ONCE.patch(monkeypatch)
    stem, leaf, norm = {
        "nnx": ("", "kernel", "scale"),
        "equinox": ("layers.", "weight", "weight"),
        "linen": ("", "kernel", "scale"),
        "keras": ("", "kernel", "gamma"),
        "function": ("", "w", "w"),
    }[kind]
    spec = P("model", None) if kind == "equinox" else P(None, "model")
    specs = {"0": P("data"), f"{stem}q.{leaf}": spec, f"{stem}norm_1.{norm}": P()}
    result = check(kind, mesh=mesh("auto", data=2, model=4), specs=specs)
    assert result.verdict is Verdict.PASS, str(result)
    assert {t.transform for t in result.tensors} == {"jit", f"jit{BESIDE}"}
    assert "traffic" in kinds(result)


# --- what a call adapts ---


@pytest.mark.slow
def test_a_call_receives_what_was_handed_in(monkeypatch):
    ONCE.patch(monkeypatch)
    seen = {}

    def call(port, x):
        seen[type(port).__name__] = port
        return port(x)

    for kind in KINDS:
        result = check(kind, port_call=call, transforms=("jit",), gradients=False)
        assert result.verdict is Verdict.PASS, f"{kind}: {result}"
    assert seen.keys() == {"NnxBlock", "EquinoxBlock", "LinenBlock", "KerasBlock", "partial"}
    assert seen["LinenBlock"].scope is not None


# --- state that a call changes ---

B, D = 11, 5


class TorchNorm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


NORM = TorchNorm().train()


class TorchWithTable(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(D, 5)
        self.register_buffer("f", torch.linspace(0.5, 2.0, 5))

    def forward(self, x):
        return torch.sin(self.up(x) * self.f)


class EquinoxWithTable(eqx.Module):
    up: eqx.nn.Linear
    f: jax.Array

    def __init__(self):
        self.up, self.f = eqx.nn.Linear(D, 5, key=jax.random.key(0)), jnp.zeros(5)

    def __call__(self, x):
        return jnp.sin(self.up(x) * self.f)


@pytest.mark.parametrize(("factor", "verdict"), [(1, Verdict.PASS), (1.5, Verdict.FAIL)])
def test_a_constant_table_in_the_tree_is_compared_without_a_gradient(factor, verdict):
    torch.manual_seed(0)
    reference = TorchWithTable()
    layout = Layout(*(row(name, name) for name in ("up.weight", "up.bias", "f")))
    tensors = reference.state_dict()
    port = load(EquinoxWithTable(), tensors | {"f": tensors["f"] * factor}, layout)
    given = (np.random.default_rng(0).standard_normal((3, D)).astype(np.float32),)
    options = {"port_call": lambda m, x: jax.vmap(m)(x), "transforms": ("jit",)}
    result = parity.check(reference, port, given, layout=layout, **options)
    assert result.verdict is verdict, str(result)
    assert ("weights-differ" in kinds(result)) == (verdict is Verdict.FAIL)
    assert "buffer-gradient" in kinds(result)
    compared = {t.name for t in result.tensors if t.kind == "gradient of parameter"}
    assert compared == {"up.weight", "up.bias"}


class EquinoxNorm(eqx.Module):
    norm: eqx.nn.BatchNorm

    def __init__(self, momentum: float) -> None:
        self.norm = eqx.nn.BatchNorm(D, "batch", momentum=momentum, mode="batch")

    def __call__(self, x, state):
        return self.norm(x, state)


class LinenNorm(nn.Module):
    momentum: float

    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(
            use_running_average=False,
            momentum=self.momentum,
            epsilon=1e-5,
            use_fast_variance=False,
            name="norm",
        )(x)


def _equinox(momentum):
    return eqx.nn.make_with_state(EquinoxNorm)(momentum)


def _linen(momentum):
    module = LinenNorm(momentum)
    return module, module.init(jax.random.key(0), jnp.zeros((B, D)))


def _keras(momentum):
    layers = keras.layers
    norm = layers.BatchNormalization(momentum=momentum, epsilon=1e-5, name="norm")
    return keras.Sequential([layers.Input((D,)), norm])


def _vmapped(port, x):
    return jax.vmap(port[0], axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, port[1])


STATEFUL = {
    "equinox": (_equinox, _vmapped, "norm.weight", "norm.bias", "norm.batch_state_index.0"),
    "linen": (_linen, None, "norm.scale", "norm.bias", "batch_stats.norm.mean"),
    "keras": (
        _keras,
        lambda model, x: model(x, training=True),
        *("norm.gamma", "norm.beta", "norm.moving_mean"),
    ),
}


@pytest.mark.parametrize(
    ("momentum", "verdict"), [(0.9, Verdict.PASS), (0.5, Verdict.FAIL)], ids=["right", "wrong"]
)
@pytest.mark.parametrize("kind", STATEFUL)
def test_state_that_a_call_changes_is_compared(kind, momentum, verdict, monkeypatch):
    ONCE.patch(monkeypatch)
    make, call, weight, bias, mean = STATEFUL[kind]
    # torch keeps the unbiased variance and JAX's libraries the other, so only means are paired.
    layout = Layout(
        row("norm.weight", weight),
        row("norm.bias", bias),
        row("norm.running_mean", mean),
        ignored("norm.running_var", "unbiased in torch"),
        ignored("norm.num_batches_tracked", "a count"),
    )
    port = load(make(momentum), NORM.state_dict(), layout)
    x = np.random.default_rng(0).standard_normal((B, D)).astype(np.float32)
    result = parity.check(NORM, port, (x,), layout=layout, port_call=call, transforms=("jit",))
    assert result.verdict is verdict, str(result)
    wrong = {t.name for t in result.tensors if t.verdict is not Verdict.PASS}
    assert wrong == (set() if verdict is Verdict.PASS else {"norm.running_mean"})
    assert "norm.running_mean" in {t.name for t in result.tensors}


LINEAR = torch.nn.Linear(D, D)


def of_keras(call=None, **options) -> parity.Result:
    """A check of a linear layer and a dropout, the layer with these options."""
    layers = keras.layers
    layer = layers.Dense(D, name="a", **options)
    model = keras.Sequential([layers.Input((D,)), layer, layers.Dropout(0.5)])
    layout = Layout(row("weight", "a.kernel", linear), row("bias", "a.bias"))
    load(model, LINEAR.state_dict(), layout)
    x = np.random.default_rng(0).standard_normal((B, D)).astype(np.float32)
    return parity.check(LINEAR, model, (x,), layout=layout, port_call=call, transforms=("jit",))


def test_a_keras_model_that_draws_is_told(monkeypatch):
    ONCE.patch(monkeypatch)
    result = of_keras(lambda model, x: model(x, training=True))
    assert result.verdict is Verdict.FAIL
    assert "draws-random" in kinds(result)


def test_the_gradients_of_a_frozen_keras_layer_are_compared(monkeypatch):
    ONCE.patch(monkeypatch)
    result = of_keras(trainable=False)
    assert result.verdict is Verdict.PASS, str(result)
    assert {"weight", "bias"} <= {t.name for t in result.tensors}


# --- what is no port ---


class _Plain(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(D)(x)


NO_PORTS = {
    "a Linen module alone": (_Plain, "without its variables: pass \\(module, variables\\)"),
    "a tree": (lambda: {"w": np.zeros(3)}, "parity.function\\(apply, parameters\\)"),
    "a function": (lambda: lambda x: x, "parity.function\\(apply, parameters\\)"),
    "an Equinox module and a number": (
        lambda: (eqx.nn.Linear(2, 3, key=jax.random.key(0)), 3),
        "make_with_state",
    ),
    "a Keras model that is not built": (
        lambda: keras.Sequential([keras.layers.Dense(3)]),
        "not built",
    ),
    "a torch module": (lambda: torch.nn.Linear(2, 3), "a torch.nn.Module"),
}


@pytest.mark.parametrize(("make", "says"), NO_PORTS.values(), ids=NO_PORTS)
def test_anything_else_is_refused_with_the_ways_to_hand_in_a_port(make, says):
    with pytest.raises(TypeError, match=f"(?s)port: .*parity.function.*{says}"):
        parity.check(torch.nn.Linear(2, 3), make(), (np.zeros((1, 2), np.float32),))


@pytest.mark.parametrize(
    ("apply", "parameters"), [(3, {"w": np.zeros(2)}), (abs, {"w": 3.0})], ids=["no call", "empty"]
)
def test_a_function_needs_a_call_and_arrays(apply, parameters):
    with pytest.raises(TypeError, match=r"apply|parameters"):
        parity.function(apply, parameters)
