"""The input of a pre-norm block, drawn once for each file of tests."""

import numpy as np
import pytest


@pytest.fixture(scope="module")
def x():
    from helpers.parity.block_pair import B, D, T  # needs torch, which may be absent

    return np.random.default_rng(0).standard_normal((B, T, D))
