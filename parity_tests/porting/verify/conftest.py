"""Fixtures of `jax-attn verify CHECKPOINT`."""

from functools import partial

import pytest


@pytest.fixture
def one_dtype(monkeypatch):
    """Models are verified in float32 alone; the tests of models check the other dtype."""
    monkeypatch.setattr("jax_attn.porting.verify.whole.DTYPES_OF_MODELS", ("float32",))


@pytest.fixture
def outputs_alone(monkeypatch, one_dtype):
    """Models are verified in float32 without gradients, which the tests of models compare."""
    from jax_attn.porting.verify import model_pair

    monkeypatch.setattr(model_pair, "check", partial(model_pair.check, gradients=False))
