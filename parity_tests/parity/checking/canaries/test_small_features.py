"""Features too small, compared with the others, for an error to show are noted; no others are."""

import numpy as np
import pytest
import torch

from jax_attn.parity.checking.canaries.outputs import small_features
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.run.inputs_and_runs import Inputs, float_dtype
from jax_attn.parity.run.reference import Reference

B, T, D = 2, 7, 5
X = np.random.default_rng(0).standard_normal((B, T, D))


def mixed(*scales):
    """A sum, each of its features at a scale of its own."""
    kernel = torch.from_numpy(np.random.default_rng(1).standard_normal((D, D)))
    scale = torch.tensor(scales, dtype=torch.float64)
    return lambda x: (x @ kernel.to(x)) * scale.to(x)


def zero_in_theory(x):
    """Two features that cancel but for rounding."""
    y = mixed(1, 1, 1, 1, 1)(x)
    return torch.cat([y, (y[..., :2] + 3.1) - y[..., :2] - 3.1], -1)


# what is computed, the dtype -> how many features are too small.
FEATURES = {
    "all of a size": (mixed(1, 1, 1, 1, 1), "float32", 0),
    "a thousandth": (mixed(1e3, 1, 1, 1, 1), "float32", 0),
    "a billionth": (mixed(1e9, 1, 1, 1, 1), "float32", 4),
    "one of them": (mixed(1, 1, 1e-9, 1, 1), "float32", 1),
    "the same in float64": (mixed(1e9, 1, 1, 1, 1), "float64", 0),
    "a thousandth in bfloat16": (mixed(1e3, 1, 1, 1, 1), "bfloat16", 0),
    "exactly zero": (mixed(1, 1, 0, 1, 1), "float32", 0),
    "zero but for rounding": (zero_in_theory, "float32", 0),
    "alone": (lambda x: 1e-9 * mixed(1, 1, 1, 1, 1)(x), "float32", 0),
}


@pytest.mark.parametrize("row", FEATURES)
def test_features_too_small_to_show_an_error_are_noted(row):
    call, dtype, count = FEATURES[row]
    inputs = Inputs.of((X,), float_dtype(dtype))
    reference = Reference(torch.nn.Module(), lambda _, x: call(x), inputs)
    notes = small_features(Prepared(reference, dtype, gradients=False))
    assert [note.kind for note in notes] == ["small-features"] * (count > 0)
    said = f"{count} of the {D} features of output 'output', along its last axis, are so much"
    assert all(said in note for note in notes)
