"""The chooser: the first kernel that can, or the one insisted on, or every reason why not."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_attn.attention import dispatch, dot_product_attention, explain

ARRAYS = [jnp.ones((1, 2, 3, 5))] * 3


@pytest.fixture
def picky(monkeypatch):
    """A second kernel, tried first, that serves only calls without a softcap or a bias."""

    def refusals(call):
        reasons = []
        if call.softcap is not None:
            reasons.append("no softcap")
        if call.bias is not None:
            reasons.append("no bias")
        return reasons

    kernel = dispatch.Kernel(lambda call: call.query * 0 + 7, refusals, "picky")
    monkeypatch.setattr(dispatch, "KERNELS", {"picky": kernel, **dispatch.KERNELS})


@pytest.mark.usefixtures("picky")
class TestWithTwoKernels:
    def test_the_first_that_can_is_chosen(self):
        assert float(dot_product_attention(*ARRAYS)[0, 0, 0, 0]) == 7
        told = explain(*ARRAYS)
        assert told.chosen == "picky"
        assert told.refusals == {"dense": ("picky comes first",)}

    def test_what_the_first_refuses_goes_to_the_next(self):
        assert np.array_equal(dot_product_attention(*ARRAYS, softcap=1.0), ARRAYS[2])
        told = explain(*ARRAYS, softcap=1.0)
        assert (told.chosen, told.refusals) == ("dense", {"picky": ("no softcap",)})
        assert "not picky: no softcap" in str(told)

    def test_insisting_passes_over_the_first(self):
        assert np.array_equal(dot_product_attention(*ARRAYS, implementation="dense"), ARRAYS[2])

    def test_insisting_on_one_that_cannot_raises_with_every_reason(self):
        options = {"softcap": 1.0, "bias": jnp.ones((2, 2)), "implementation": "picky"}
        with pytest.raises(ValueError, match=r"(?s)picky.*no softcap.*no bias"):
            dot_product_attention(*ARRAYS, **options)
        told = explain(*ARRAYS, **options)
        assert told.chosen is None
        assert told.refusals == {"picky": ("no softcap", "no bias")}


def test_an_unknown_name_is_an_error_that_lists_the_known():
    for call in (dot_product_attention, explain):
        with pytest.raises(ValueError, match=r"implementation: .*'dense'.*'flash'"):
            call(*ARRAYS, implementation="flash")
