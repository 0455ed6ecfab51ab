"""Every gradient of every small model, in both dtypes that files have; with --long alone."""

import pytest

from helpers.families.whole_models import CASES, assert_gradients
from jax_attn.porting.verify.whole import DTYPES_OF_MODELS


@pytest.mark.parametrize("dtype", DTYPES_OF_MODELS)
@pytest.mark.parametrize("name", CASES)
def test_every_gradient(name, dtype, small):
    assert_gradients(small(name).of(dtype))
