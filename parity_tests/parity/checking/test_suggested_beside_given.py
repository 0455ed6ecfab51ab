"""`suggest_inputs` beside what the caller says: what is given stays, and what is wrong is named."""

import numpy as np
import pytest
from flax import nnx
from torch import nn

from helpers.parity.suggested import (
    ByHand,
    D,
    reference,
)
from jax_attn import parity


def test_what_is_given_stays_and_the_others_fit_it():
    x = np.random.default_rng(0).standard_normal((4, 9, D)).astype("float32")
    inputs = parity.suggest_inputs(reference("by hand"), given={"x": x})
    assert inputs["x"] is x
    assert (inputs["context"].shape[0], inputs["mask"].shape) == (4, (4, 9, 5))


def test_a_config_may_be_a_dict():
    module = nn.Linear(D, D)
    module.config = {"hidden_size": D}
    assert parity.suggest_inputs(module)["input"].shape[-1] == D


def test_parameters_without_names_give_a_tuple():
    def call(module, *arrays):
        return module(*arrays)[0]

    (x,) = parity.suggest_inputs(reference("fused_mha"), reference_call=call)
    assert x.shape == (3, 11, 30)


class Strange(ByHand):
    def forward(self, x, context, mask, strange, flag):
        return super().forward(x, context, mask) * (strange if flag else 1)


REFUSED = {
    "unknown parameters": (Strange, {}, "parameter 'strange': expected a name (.|\n)*'flag'"),
    "given what there is not": (ByHand, {"given": {"y": np.ones(3)}}, "given: expected some of x,"),
    "an unknown dtype": (ByHand, {"dtype": "int8"}, "dtype: expected one of float32"),
    "a dtype that is no name": (
        ByHand,
        {"dtype": np.dtype("float32")},
        "dtype: expected one of float32.* got dtype",
    ),
    "a reference that refuses all": (
        ByHand,
        {"given": {"x": np.ones((2, 3, D + 1))}},
        r"made for context and mask.* with x float64\[.*, as given, .* raised on all .*mat1 and",
    ),
    "no set": (ByHand, {"sets": 0}, "sets: expected at least 1, got 0"),
    "a seed below zero": (ByHand, {"seed": -1}, "seed: expected an integer of 0 or more, got -1"),
}


@pytest.mark.parametrize("row", REFUSED)
def test_what_cannot_be_made_is_named(row):
    build, options, message = REFUSED[row]
    with pytest.raises(ValueError, match=message):
        parity.suggest_inputs(build().eval(), **options)


class Placed(nn.Module):
    """Positions in order, of which padding has none; or simply in order."""

    def __init__(self, skips):
        super().__init__()
        self.words, self.places = nn.Embedding(31, D, padding_idx=1), nn.Embedding(64, D)
        self.skips = skips

    def forward(self, input_ids, position_ids=None):
        if position_ids is None:
            real = (input_ids != 1) | (not self.skips)
            position_ids = (real.cumsum(1) - 1) * real
        return self.words(input_ids) + self.places(position_ids)


@pytest.mark.parametrize("skips", [False, True])
def test_positions_are_left_out_where_the_reference_computes_them_from_its_ids(skips):
    inputs = parity.suggest_inputs(Placed(skips))
    assert (inputs["input_ids"] == 1).any()
    assert ("position_ids" in inputs) == (not skips)


NOT_OF_THESE_TYPES = {
    "an array": (np.ones(3), {}, "reference: expected a torch.nn.Module, got ndarray"),
    "an NNX module": (nnx.Module(), {}, "reference: .* got Module, which is a port"),
    "a seed that is no integer": (ByHand(), {"seed": "a"}, "seed: expected an integer .*got 'a'"),
    "sets that are no number": (ByHand(), {"sets": True}, "sets: expected an int, got True"),
    "given in a list": (ByHand(), {"given": [1]}, "given: expected a dict of NumPy arrays"),
    "a number given": (ByHand(), {"given": {"x": 1}}, r"given\['x'\]: expected a NumPy array"),
    "no function": (ByHand(), {"reference_call": 3}, "reference_call: expected a function"),
}


@pytest.mark.parametrize("row", NOT_OF_THESE_TYPES)
def test_arguments_of_other_types_are_refused_by_name(row):
    reference, options, message = NOT_OF_THESE_TYPES[row]
    with pytest.raises(TypeError, match=message):
        parity.suggest_inputs(reference, **options)
