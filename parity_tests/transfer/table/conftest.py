"""The small model, loaded once for each file of tests."""

import pytest

from jax_attn import transfer


@pytest.fixture(scope="module")
def loaded():
    # It imports torch, and this file is read where torch is absent too.
    from helpers.transfer.small_model import MODEL, Model, torch_tensors

    module = Model()
    transfer.load(module, torch_tensors(), MODEL)
    return module
