"""Every test of this room promotes strictly: no number changes its dtype unasked."""

import jax
import pytest


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield
