"""Ids without padding are noted where the reference treats padding apart."""

import numpy as np
import pytest
import torch

from helpers.parity.canary_trials import try_on

D, PAD = 5, 1
IDS = np.array([[2, 5, 3, 7], [4, 2, 6, 3]])


class Words(torch.nn.Module):
    """An embedding and positions. of: what is computed beside, from the ids and the embedding."""

    def __init__(self, of):
        super().__init__()
        self.words = torch.nn.Embedding(11, D, padding_idx=PAD)
        self.places = torch.nn.Embedding(13, D, padding_idx=PAD)
        self.of = of

    def forward(self, input_ids):
        return self.of(self, input_ids)


def in_order(m, ids):
    return torch.tanh(m.words(ids) + m.places(torch.arange(ids.shape[1])))


def skipping(m, ids):
    """As RoBERTa counts positions."""
    real = ids != PAD
    return torch.tanh(m.words(ids) + m.places(real.cumsum(1) * real + PAD))


def tied(m, ids):
    return in_order(m, ids) @ m.words.weight.T


ROWS = {
    "positions that skip it": (skipping, IDS, True),
    "padding among the ids": (skipping, np.where(IDS == 7, PAD, IDS), False),
    "an id as others": (in_order, IDS, False),
    "rows that are read otherwise, too": (tied, IDS, False),
}


# ids -> whether they show only padding at one end, to a reference that counts positions by tokens
ENDS = {
    "on the right": (skipping, np.where(IDS == 7, PAD, IDS), True),
    "on the left": (skipping, np.where(IDS == 4, PAD, IDS), True),
    "at both ends": (skipping, np.where((IDS == 4) | (IDS == 7), PAD, IDS), False),
    "between tokens": (skipping, np.where(IDS == 5, PAD, IDS), False),
    "an id as others": (in_order, np.where(IDS == 7, PAD, IDS), False),
    "rows that are read otherwise, too": (tied, np.where(IDS == 7, PAD, IDS), False),
}


@pytest.mark.parametrize("row", ENDS)
def test_padding_at_one_end_is_noted(row):
    of, ids, noted = ENDS[row]
    torch.manual_seed(0)
    tried = try_on(Words(of), {"input_ids": ids}, gradients=True)
    assert ("mask-one-end" in tried.standing) == noted, tried.said


@pytest.mark.parametrize("row", ROWS)
def test_ids_without_padding_are_noted(row):
    of, ids, noted = ROWS[row]
    torch.manual_seed(0)
    module = Words(of)
    before = module.words.weight.detach().clone()
    tried = try_on(module, {"input_ids": ids}, gradients=True)
    assert ("no-padding" in tried.notes) == noted, tried.said
    said = "no id of input 'input_ids' is 1, the padding of `words`, which the reference treats"
    assert (said in tried.said) == noted
    assert torch.equal(module.words.weight, before)
