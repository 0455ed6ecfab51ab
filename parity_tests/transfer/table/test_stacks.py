"""The steps of stacked matrices and of Equinox's biases, there and back, and what they refuse."""

import numpy as np
import pytest

from helpers.same_arrays import assert_same
from jax_attn.transfer import (
    Layout,
    TransferError,
    alternating,
    conv_bias,
    export,
    linears,
    load,
    packed_stack,
    row,
    stacked,
)

E, OUT, IN = 3, 5, 7
rng = np.random.default_rng(0)
EXPERTS = rng.standard_normal((E, OUT, IN)).astype(np.float32)
LAYERS = {f"layers.{i}.up": EXPERTS[i] for i in range(E)}
BIAS = np.arange(OUT, dtype=np.float32)

ROWS = {
    "experts": ({"up": EXPERTS}, (E, IN, OUT), row("up", "up", linears)),
    "scanned layers": (LAYERS, (E, IN, OUT), row([*LAYERS], "up", stacked, linears)),
    "scanned layers as in torch": (LAYERS, (E, OUT, IN), row([*LAYERS], "up", stacked)),
    "one layer": ({"up": EXPERTS[0]}, (1, IN, OUT), row("up", "up", stacked, linears)),
    "a bias of Equinox's Conv1d": ({"bias": BIAS}, (OUT, 1), row("bias", "up", conv_bias)),
    "a bias of Equinox's Conv2d": ({"bias": BIAS}, (OUT, 1, 1), row("bias", "up", conv_bias)),
}


@pytest.mark.parametrize(("tensors", "shape", "one"), ROWS.values(), ids=ROWS)
def test_a_tree_is_loaded_and_exported_bit_for_bit(tensors, shape, one):
    loaded = load({"up": np.zeros(shape, np.float32)}, tensors, Layout(one))
    assert loaded["up"].shape == shape
    assert_same(export(loaded, Layout(one)), tensors)


def test_each_matrix_of_a_stack_is_transposed():
    zeros = {"up": np.zeros((E, IN, OUT), np.float32)}
    for name in ("experts", "scanned layers"):
        tensors, _, one = ROWS[name]
        loaded = load(zeros, tensors, Layout(one))
        assert_same({i: loaded["up"][i] for i in range(E)}, {i: EXPERTS[i].T for i in range(E)})


def test_a_stack_that_is_packed_has_its_parts_one_after_the_other():
    packed = np.concatenate([EXPERTS, 2 * EXPERTS], axis=1)  # (E, 2·OUT, IN)
    both = Layout(row("packed", ("gate", "up"), packed_stack, linears))
    zeros = {name: np.zeros((E, IN, OUT), np.float32) for name in ("gate", "up")}
    loaded = load(zeros, {"packed": packed}, both)
    transposed = EXPERTS.swapaxes(1, 2)
    assert_same(loaded, {"gate": transposed, "up": 2 * transposed})
    assert_same(export(loaded, both), {"packed": packed})
    wrong = {"gate": np.zeros((E, IN, OUT), np.float32), "up": np.zeros((E, IN + 1, OUT))}
    with pytest.raises(TransferError):
        load(wrong, {"packed": packed}, both)


def test_parts_that_take_turns_are_every_other_feature():
    table = Layout(
        row("both", ("gate", "up"), alternating),
        row("both_bias", ("gate_bias", "up_bias"), alternating),
    )
    tensors = {"both": EXPERTS.repeat(2, axis=-1), "both_bias": EXPERTS[0].repeat(2, axis=-1)}
    tensors = {key: array.copy() for key, array in tensors.items()}
    for array in tensors.values():
        array[..., 1::2] *= -1
    zeros = {name: np.zeros((E, OUT, IN), np.float32) for name in ("gate", "up")}
    zeros |= {f"{name}_bias": np.zeros((OUT, IN), np.float32) for name in ("gate", "up")}
    loaded = load(zeros, tensors, table)
    wanted = {"gate": EXPERTS, "up": -EXPERTS, "gate_bias": EXPERTS[0], "up_bias": -EXPERTS[0]}
    assert_same(loaded, wanted)
    assert_same(export(loaded, table), tensors)
    for wrong in ({"gate": (E, OUT, IN + 1)}, {"gate": (E, OUT, IN + 1), "up": (E, OUT, IN + 1)}):
        with pytest.raises(TransferError):
            load(zeros | {k: np.zeros(s, np.float32) for k, s in wrong.items()}, tensors, table)


WRONG = {
    "a matrix is no stack": ({"up": EXPERTS[0]}, (IN, OUT), row("up", "up", linears)),
    "a layer too few": (LAYERS, (E + 1, IN, OUT), row([*LAYERS], "up", stacked, linears)),
    "a bias with two axes": ({"bias": BIAS}, (OUT, 2), row("bias", "up", conv_bias)),
}


@pytest.mark.parametrize(("tensors", "shape", "one"), WRONG.values(), ids=WRONG)
def test_a_shape_that_does_not_fit_is_refused(tensors, shape, one):
    with pytest.raises(TransferError) as raised:
        load({"up": np.zeros(shape, np.float32)}, tensors, Layout(one))
    assert {problem.kind for problem in raised.value.problems} == {"wrong shape"}
