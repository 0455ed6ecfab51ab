"""The small model, loaded once for each file of tests."""

import pytest

from helpers.small_model import MODEL, Model, torch_tensors
from jax_attn import transfer


@pytest.fixture(scope="module")
def loaded():
    module = Model()
    transfer.load(module, torch_tensors(), MODEL)
    return module
