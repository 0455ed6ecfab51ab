"""One small golden reference, which the tests of this folder use in many ways.

What needs torch is imported where it is used: this folder has tests that run without it.
"""

import numpy as np
import pytest

from helpers.parity.up import IN, OUT, ROWS, Up
from jax_attn.transfer import LINEAR, load


@pytest.fixture(scope="module")
def linear():
    import torch

    torch.manual_seed(0)
    reference, x = torch.nn.Linear(IN, OUT), np.random.default_rng(0).standard_normal((ROWS, IN))
    port, layout = Up(), LINEAR.under("", "up")
    load(port, reference.state_dict(), layout)
    return reference, port, (x.astype(np.float32),), layout


@pytest.fixture(scope="module")
def golden(linear):
    from jax_attn.parity import prepare

    reference, _, inputs, _ = linear
    return prepare(reference, inputs)


@pytest.fixture
def folder(golden, tmp_path):
    golden.save(tmp_path / "golden")
    return tmp_path / "golden"
