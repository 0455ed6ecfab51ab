"""Rules of operators that make tensors."""

import pytest
import torch
from torch import tensor

from helpers.rule_comparison import differences
from helpers.rule_rows import INF, INTS, SCALAR, F, call, named, paired, text
from jax_attn.translate.rules.table import RULES

ROWS = [
    ("arange.default", 5),
    ("arange.start", 1, 5, {"dtype": torch.float32}),
    ("arange.start_step", 0, 1, 0.3),
    ("arange.default", 5.0),
    ("full.default", [2, 3], 1.0),
    ("full.default", [2, 3], 0.5),
    ("full.default", [2, 3], 5),
    ("full.default", [2], True),
    ("full.default", [2], -INF),
    ("zeros.default", [2], {"dtype": torch.int64}),
    ("zeros.default", [2]),
    ("ones.default", [2, 3], {"dtype": torch.bool}),
    ("new_zeros.default", F, [3]),
    ("new_ones.default", F, [3], {"dtype": torch.bool}),
    ("full_like.default", F, 2.0),
    ("zeros_like.default", F),
    ("ones_like.default", INTS),
    ("scalar_tensor.default", 0.5),
    ("new_full.default", F, [2], 3),
    ("linspace.default", 0, 1, 5),
    ("linspace.default", -1.0, 1.0, 4, {"dtype": torch.float32}),
    ("linspace.Tensor_Tensor", SCALAR, tensor(5.0), 3),
    ("eye.default", 3),
    ("eye.m", 2, 3, {"dtype": torch.int64}),
    ("tril_indices.default", 3, 4, -1),
    ("triu_indices.default", 3, 3),
    ("hann_window.default", 5),
    ("hamming_window.periodic", 5, False),
    ("blackman_window.default", 4),
    ("bartlett_window.default", 4),
    ("full_like.default", INTS, 0.5, {"dtype": torch.float32}),
    ("new_full.default", F, [2], 2.0, {"dtype": torch.int64}),
    ("full.default", [], 2.0),
    ("full.default", [2], 1, {"dtype": torch.float16}),
    ("arange.start_step", 5, 0, -2),
    ("arange.default", 5, {"dtype": torch.float16}),
    ("arange.start_step", 0, 5, 2),
    ("scalar_tensor.default", 3, {"dtype": torch.int64}),
    ("scalar_tensor.default", True),
    ("empty_like.default", F),
    ("full_like.default", INTS, 2),
]

TEXTS = [
    (("arange.default", 5), "jnp.arange(5)"),
    (
        ("arange.start_step", 0, 8, 2, {"dtype": torch.float32}),
        "jnp.arange(0, 8, 2, dtype=jnp.float32)",
    ),
    (("zeros.default", [2, 3]), "jnp.zeros((2, 3))"),
    (("ones.default", [2], {"dtype": torch.bool}), "jnp.ones((2,), dtype=jnp.bool)"),
    (("full.default", [2], -INF), "jnp.full((2,), -jnp.inf, dtype=jnp.float32)"),
    (("new_zeros.default", F, [3]), "jnp.zeros((3,), dtype=x0.dtype)"),
    (("zeros_like.default", F), "jnp.zeros_like(x0)"),
    (("scalar_tensor.default", 0.5), "jnp.array(0.5, dtype=jnp.float32)"),
    (("linspace.default", 0, 1, 5), "jnp.linspace(0, 1, 5)"),
    (("tril_indices.default", 3, 3), "jnp.array(jnp.tril_indices(3))"),
]

PLANTED = [
    (("arange.default", 5, {"dtype": torch.float32}), "jnp.arange(end)"),
    (("full.default", [2], 0.5), "jnp.full(size, fill_value)"),  # a weak dtype
    (("arange.start_step", 0, 5, 2), "jnp.arange(start, end)"),
    (("tril_indices.default", 3, 4, 1), "jnp.array(jnp.tril_indices(row, 1))"),
    (("hann_window.default", 5), "jnp.hanning(window_length)"),
]


@pytest.mark.parametrize(("name", "args", "kwargs"), named(ROWS))
def test_a_rule_equals_torch(name, args, kwargs):
    assert differences(name, *args, **kwargs) == []


@pytest.mark.parametrize(("row", "expected"), paired(TEXTS))
def test_the_text_is_what_a_person_would_write(row, expected):
    assert text(row) == expected


@pytest.mark.parametrize(("row", "wrong"), paired(PLANTED))
def test_a_wrong_rule_is_noticed(row, wrong, monkeypatch):
    name, args, kwargs = call(row)
    monkeypatch.setitem(RULES, name, wrong)
    assert differences(name, *args, **kwargs)
