"""An embedding's gradient: its budget is that of the rows that are read, the others' is 0."""

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from jax_attn.parity.run.inputs_and_runs import Inputs
from jax_attn.parity.run.modes.kernel_steps import unwritten_zeros
from jax_attn.parity.run.reference import Reference

STATM = Path("/proc/self/statm")
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


@pytest.mark.parametrize("shape", [(3, 5), (0, 5)])
def test_a_table_of_zeros(shape):
    zeros = unwritten_zeros(shape)
    assert torch.equal(zeros, torch.zeros(shape, dtype=torch.float64))
    assert torch.equal(zeros.add_(1), torch.ones(shape, dtype=torch.float64))


@pytest.mark.skipif(not STATM.exists(), reason="Linux tells how much memory is held")
def test_rows_that_are_not_written_take_no_memory():
    def resident():
        return int(STATM.read_text().split()[1]) * mmap.PAGESIZE

    before = resident()
    table = unwritten_zeros((2**15, 2**9))  # 128 MiB
    table.index_copy_(0, torch.tensor([3, 30000]), torch.ones(2, 2**9, dtype=torch.float64))
    assert table.sum() == 2**10  # reading takes none either
    assert resident() - before < 2**23
