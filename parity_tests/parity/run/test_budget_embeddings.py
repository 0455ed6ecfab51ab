"""An embedding's gradient: its budget is that of the rows that are read, the others' is 0."""

import numpy as np
import pytest
import torch
from torch import nn

from jax_attn.parity.run.inputs_and_runs import Inputs
from jax_attn.parity.run.reference import Reference

TOKENS = np.array([[3, 5, 3], [7, 0, 3]])
OPTIONS = {
    "plain": {},
    "padding": {"padding_idx": 0},
    "a padding that is not read": {"padding_idx": 9},
    "by frequency": {"scale_grad_by_freq": True},
}


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("row", OPTIONS)
def test_torchs_own_gradient_lies_within_its_budget_and_unread_rows_are_exact(row, dtype):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(11, 5, **OPTIONS[row]), nn.Linear(5, 5))
    reference = Reference(module, None, Inputs((TOKENS.astype(dtype),), {}))
    cotangents = {"output": np.random.default_rng(1).standard_normal((2, 3, 5))}
    kind, name = "gradient of parameter", "0.weight"
    exact = reference.exact(cotangents).kinds[kind][name]
    own = reference.run("float32", cotangents).kinds[kind][name]
    budget = reference.spread("float32", cotangents)[kind][name]
    assert exact[3].any()
    assert (np.abs(own - exact) <= budget.element).all()
    read = np.unique(TOKENS)
    read = read[read != 0] if row == "padding" else read
    others = np.delete(budget.element, read, axis=0)
    # What a row that is not read may err by is the tensor's own half of a budget, less than any's.
    assert (others == others.flat[0]).all()
    assert (budget.element[read] > others.flat[0]).all()
