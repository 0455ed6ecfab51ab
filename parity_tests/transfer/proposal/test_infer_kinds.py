"""`infer` on ports of other kinds: types where the kind has them, else names and shapes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from helpers.parity import five_kinds
from jax_attn.transfer import infer

SQUARE = {f"{name}.weight" for name in ("q", "k", "v", "out")}
TYPED = ("nnx", "equinox", "keras")


def rows(layout) -> set[str]:
    return {str(r) for group in layout.groups for r in group.rows}


@pytest.mark.parametrize("kind", five_kinds.KINDS)
def test_a_block_is_decided_but_for_square_matrices_without_a_type(kind):
    port, layout = five_kinds.KINDS[kind].make(""), five_kinds.KINDS[kind].layout
    proposal = infer(five_kinds.reference(), port)
    assert {one.key for one in proposal.undecided} == (set() if kind in TYPED else SQUARE)
    right = {r for r in rows(layout) if kind in TYPED or not any(f'"{key}"' in r for key in SQUARE)}
    assert rows(proposal.layout) == right


# --- convolutions, whose axes have one size ---


def _torch_convolutions() -> torch.nn.Module:
    module = torch.nn.Module()
    module.two, module.one = torch.nn.Conv2d(4, 6, 3), torch.nn.Conv1d(5, 5, 5)
    return module


def _nnx_convolutions() -> nnx.Module:
    port = nnx.Module()
    port.two = nnx.Conv(4, 6, (3, 3), rngs=nnx.Rngs(0))
    port.one = nnx.Conv(5, 5, (5,), rngs=nnx.Rngs(0))
    return port


class _EquinoxConvolutions(five_kinds.eqx.Module):
    two: five_kinds.eqx.nn.Conv2d
    one: five_kinds.eqx.nn.Conv1d


def _equinox_convolutions() -> _EquinoxConvolutions:
    conv, key = five_kinds.eqx.nn, jax.random.key(0)
    return _EquinoxConvolutions(conv.Conv2d(4, 6, 3, key=key), conv.Conv1d(5, 5, 5, key=key))


def _keras_convolutions() -> five_kinds.keras.Model:
    layers = five_kinds.keras.layers
    images, lines = layers.Input((8, 8, 4)), layers.Input((8, 5))
    outputs = [layers.Conv2D(6, 3, name="two")(images), layers.Conv1D(5, 5, name="one")(lines)]
    return five_kinds.keras.Model([images, lines], outputs)


CONVOLUTIONS = {
    "nnx": (_nnx_convolutions, ("kernel", ", conv"), ""),
    "equinox": (_equinox_convolutions, ("weight", ""), ", conv_bias"),
    "keras": (_keras_convolutions, ("kernel", ", conv"), ""),
}


@pytest.mark.parametrize(("make", "kernel", "of_bias"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_a_convolution_is_decided_by_its_type(make, kernel, of_bias):
    leaf, step = kernel
    proposal = infer(_torch_convolutions(), make())
    assert not proposal.undecided
    assert rows(proposal.layout) == {
        *(f'row("{name}.weight", "{name}.{leaf}"{step})' for name in ("one", "two")),
        *(f'row("{name}.bias", "{name}.bias"{of_bias})' for name in ("one", "two")),
    }


def test_without_a_type_a_convolution_with_axes_of_one_size_stays_open():
    proposal = infer(_torch_convolutions().state_dict(), _nnx_convolutions())
    assert {one.key for one in proposal.undecided} == {"two.weight", "one.weight"}


# --- stacks of matrices ---


def _stack(*shape: int) -> dict:
    return {"experts": {"up": jnp.zeros(shape)}}


def test_a_stack_is_transposed_if_only_that_fits():
    tensors = {"experts.up": torch.zeros(3, 5, 7)}
    assert rows(infer(tensors, _stack(3, 7, 5)).layout) == {
        'row("experts.up", "experts.up", linears)'
    }
    assert rows(infer(tensors, _stack(3, 5, 7)).layout) == {'row("experts.up", "experts.up")'}


def test_a_stack_of_square_matrices_stays_open():
    (one,) = infer({"experts.up": torch.zeros(3, 5, 5)}, _stack(3, 5, 5)).undecided
    assert {candidate.row.effect for candidate in one.candidates} == {"=", "linears"}


# --- shapes alone ---


def _sequential(*widths: int) -> torch.nn.Module:
    pairs = itertools.pairwise(widths)
    return torch.nn.Sequential(*(torch.nn.Linear(*pair) for pair in pairs))


def _tree(*widths: int) -> dict:
    """Layers whose names say nothing: alpha, beta, …"""
    names = ("alpha", "omega", "delta")
    pairs = ((n, i, o) for n, (i, o) in zip(names, itertools.pairwise(widths), strict=False))
    return {n: {"w": np.zeros((i, o), "f"), "b": np.zeros(o, "f")} for n, i, o in pairs}


def test_with_one_parameter_a_shape_shapes_decide_and_the_proposal_says_so():
    proposal = infer(_sequential(5, 7, 3), _tree(5, 7, 3))
    assert not proposal.undecided
    assert not proposal.left
    assert rows(proposal.layout) == {
        'row("0.weight", "alpha.w", linear)',
        'row("0.bias", "alpha.b")',
        'row("1.weight", "omega.w", linear)',
        'row("1.bias", "omega.b")',
    }
    assert len(proposal.granted) == 4


GAINED = {"up.weight": np.zeros((7, 5), "f"), "gain": np.zeros(7, "f")}
OPEN = {
    "two of one shape": (_sequential(5, 7, 5, 7), _tree(5, 7, 5, 7), {"0.weight", "2.weight"}),
    "a layer more in torch": (_sequential(5, 7, 3), _tree(5, 7), {"0.weight", "1.weight"}),
    "a layer more in JAX": (_sequential(5, 7), _tree(5, 7, 3), {"{layer}.weight"}),
    "a bias and no bias": (GAINED, _tree(5, 7), {"gain", "up.weight"}),
    "a square": (_sequential(5, 7, 7), _tree(5, 7, 7), {"1.weight"}),
}


@pytest.mark.parametrize(("reference", "port", "still_open"), OPEN.values(), ids=OPEN)
def test_shapes_that_leave_a_choice_decide_nothing(reference, port, still_open):
    assert {one.key for one in infer(reference, port).undecided} >= still_open


@pytest.mark.parametrize(("name", "is_bias"), [("gain", False), ("up_bias", True), ("b", True)])
def test_a_bare_parameter_is_a_bias_only_by_name(name, is_bias):
    port = {"up": {"kernel": np.zeros((5, 7), "f"), "bias": np.zeros(7, "f")}}
    proposal = infer({"up.weight": GAINED["up.weight"], name: GAINED["gain"]}, port)
    candidates = {str(c.row) for one in proposal.undecided for c in one.candidates}
    of_bias = {f'row("{name}", "up.bias")'}
    assert rows(proposal.layout) & of_bias == (of_bias if is_bias else set())
    assert candidates == (set() if is_bias else of_bias)


def test_names_that_contradict_are_never_paired_by_shape():
    tensors = {"attn.q_proj.weight": torch.zeros(5, 7)}
    (one,) = infer(tensors, {"attn": {"k_proj": {"kernel": np.zeros((7, 5), "f")}}}).undecided
    assert one.key == "attn.q_proj.weight"
