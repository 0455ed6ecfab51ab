"""Rules of operators that make tensors."""

import torch
from torch import tensor

from helpers.rules.rows import HALF, INF, INTS, SCALAR, F, row, table

ROWS = [
    row("arange.default", 5),
    row("arange.start", 1, 5, dtype=torch.float32),
    row("arange.start_step", 0, 1, 0.3),
    row("arange.default", 5.0),
    row("full.default", [2, 3], 1.0),
    row("full.default", [2, 3], 0.5),
    row("full.default", [2, 3], 5),
    row("full.default", [2], True),
    row("full.default", [2], -INF),
    row("zeros.default", [2], dtype=torch.int64),
    row("zeros.default", [2]),
    row("ones.default", [2, 3], dtype=torch.bool),
    row("new_zeros.default", F, [3]),
    row("new_ones.default", F, [3], dtype=torch.bool),
    row("full_like.default", F, 2.0),
    row("zeros_like.default", F),
    row("ones_like.default", INTS),
    row("scalar_tensor.default", 0.5),
    row("new_full.default", F, [2], 3),
    row("linspace.default", 0, 1, 5),
    row("linspace.default", -1.0, 1.0, 4, dtype=torch.float32),
    row("linspace.Tensor_Tensor", SCALAR, tensor(5.0), 3),
    row("eye.default", 3),
    row("eye.m", 2, 3, dtype=torch.int64),
    row("tril_indices.default", 3, 4, -1),
    row("triu_indices.default", 3, 3),
    row("hann_window.default", 5),
    row("hamming_window.periodic", 5, False),
    row("blackman_window.default", 4),
    row("bartlett_window.default", 4),
    row("full_like.default", INTS, 0.5, dtype=torch.float32),
    row("new_full.default", F, [2], 2.0, dtype=torch.int64),
    row("full.default", [], 2.0),
    row("full.default", [2], 1, dtype=torch.float16),
    row("arange.start_step", 5, 0, -2),
    row("arange.default", 5, dtype=torch.float16),
    row("arange.start_step", 0, 5, 2),
    row("scalar_tensor.default", 3, dtype=torch.int64),
    row("scalar_tensor.default", True),
    row("empty_like.default", HALF),  # its values are any, so its dtype alone is compared
    row("full_like.default", INTS, 2),
    row("arange.default", 3.1, dtype=torch.int64),
    row("arange.start", 0.5, 3, dtype=torch.int64),
    *(row(f"{name}_window.default", 1) for name in ("hann", "hamming", "blackman", "bartlett")),
]

TEXTS = [
    row("arange.default", 5, text="jnp.arange(5)"),
    row(
        "arange.start_step",
        0,
        8,
        2,
        dtype=torch.float32,
        text="jnp.arange(0, 8, 2, dtype=jnp.float32)",
    ),
    row("zeros.default", [2, 3], text="jnp.zeros((2, 3))"),
    row("ones.default", [2], dtype=torch.bool, text="jnp.ones((2,), dtype=jnp.bool)"),
    row("full.default", [2], -INF, text="jnp.full((2,), -jnp.inf, dtype=jnp.float32)"),
    row("new_zeros.default", F, [3], text="jnp.zeros((3,), dtype=x0.dtype)"),
    row("zeros_like.default", F, text="jnp.zeros_like(x0)"),
    row("scalar_tensor.default", 0.5, text="jnp.array(0.5, dtype=jnp.float32)"),
    row("linspace.default", 0, 1, 5, text="jnp.linspace(0, 1, 5)"),
    row("tril_indices.default", 3, 3, text="jnp.array(jnp.tril_indices(3))"),
]

MISTAKES = [
    row("arange.default", 5, dtype=torch.float32, wrong="jnp.arange(end)"),
    row("full.default", [2], 0.5, wrong="jnp.full(size, fill_value)"),  # a weak dtype
    row("arange.start_step", 0, 5, 2, wrong="jnp.arange(start, end)"),
    row("tril_indices.default", 3, 4, 1, wrong="jnp.array(jnp.tril_indices(row, 1))"),
    row("hann_window.default", 5, wrong="jnp.hanning(window_length)"),
]


@table(ROWS, TEXTS, MISTAKES)
def test_values_gradients_and_dtypes_are_those_of_torch(row):
    row.check()
