"""The chooser: the first kernel that can, or the one insisted on, or every reason why not."""

import jax
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

    kernel = dispatch.Kernel(lambda call: call.query * 0 + 7, refusals, dispatch.none, "picky")
    monkeypatch.setattr(dispatch, "KERNELS", {"picky": kernel, **dispatch.KERNELS})


@pytest.mark.usefixtures("picky")
class TestWithTwoKernels:
    def test_the_first_that_can_is_chosen(self):
        assert float(dot_product_attention(*ARRAYS)[0, 0, 0, 0]) == 7
        told = explain(*ARRAYS)
        assert told.chosen == "picky"
        assert told.refusals["dense"] == ("picky comes first",)

    def test_what_the_first_refuses_goes_to_the_next(self):
        assert np.array_equal(dot_product_attention(*ARRAYS, softcap=1.0), ARRAYS[2])
        told = explain(*ARRAYS, softcap=1.0)
        assert (told.chosen, told.refusals["picky"]) == ("dense", ("no softcap",))
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


def arrays(T, S, B=1, N=2, K=1, H=3):
    """query, key and value, abstract."""
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H)
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


# (T, S) on a CPU: the kernel that is faster there, and why the other is not chosen.
CHOICES = {
    "long": ((512, 512), "blocked", "blocked comes first"),
    "128 by 128": ((128, 128), "blocked", "blocked comes first"),
    "just below": ((127, 128), "dense", "below 16384 scores a head, here 127·128"),
    "short": ((5, 7), "dense", "fewer than 32 queries, here 5"),
    "one query, many keys": ((1, 65536), "dense", "fewer than 32 queries, here 1"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_faster_one_is_chosen_and_the_other_says_why_not(name):
    (T, S), chosen, why = CHOICES[name]
    told = explain(*arrays(T, S))
    assert told.chosen == chosen
    ((_, reasons),) = told.refusals.items()
    assert any(why in reason for reason in reasons)


def test_elsewhere_dense_is_chosen_while_its_scores_fit(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    told = explain(*arrays(8192, 8192))
    assert told.chosen == "dense"
    assert "on gpu while its scores fit in 1 GiB, here 512 MiB" in str(told)
    assert explain(*arrays(16384, 16384)).chosen == "blocked"


@pytest.mark.parametrize("implementation", ["dense", "blocked"])
def test_the_one_insisted_on_runs_though_another_is_faster(implementation):
    for T in (2, 256):
        assert explain(*arrays(T, T), implementation=implementation).chosen == implementation


def test_an_unknown_name_is_an_error_that_lists_the_known():
    for call in (dot_product_attention, explain):
        with pytest.raises(ValueError, match=r"implementation: .*'dense'.*'flash'"):
            call(*ARRAYS, implementation="flash")
