"""Every test of this room promotes strictly, and files that ask for it run by each kernel."""

import jax
import pytest

from helpers.attention.attention_cases import INSISTED
from helpers.attention.kernel_comparison import in_tiles


@pytest.fixture(autouse=True)
def strict():
    """No number changes its dtype unasked."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(params=["dense", "blocked"])
def kernel(request, monkeypatch):
    """The kernel insisted on, `blocked` in tiles that divide no axis: 2 queries by 3 keys."""
    kernel = in_tiles(K=1, T=2, S=3) if request.param == "blocked" else request.param
    monkeypatch.setitem(INSISTED, "implementation", kernel)
    return request.param
