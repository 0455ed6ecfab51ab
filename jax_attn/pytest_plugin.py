"""The pytest fixture `parity`. Loaded by pytest wherever this package is installed: so light."""

import pytest


@pytest.fixture
def parity():
    """`jax_attn.parity.check` that fails the test, with the whole report, unless it passes.

        def test_port(parity):
            parity(torch_module, nnx_module, (x,), layout=LAYOUT)

    Returns the `Result`.
    """
    from jax_attn.parity import check

    def checked(*args, **kwargs):
        return check(*args, **kwargs).raise_for_status()

    return checked
