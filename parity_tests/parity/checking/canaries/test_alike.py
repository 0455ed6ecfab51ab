"""A batch of one row, and two inputs that are one array: what of them could not be told apart."""

import numpy as np
import pytest
import torch

from helpers.parity.canary_trials import QUIET, attend, try_on

B, T, D = 2, 7, 3
rng = np.random.default_rng(0)
X = rng.standard_normal((B, T, D))


def test_a_batch_of_one_is_noted_where_rows_are_kept_apart():
    assert try_on(lambda x: attend(x, x, x), {"x": X[:1]}).notes == ["one-row"]
    assert try_on(lambda x: attend(x, x, x), {"x": X})[:2] == QUIET

    def mixes(x):
        return attend(x, x, x) + x.mean(0)

    assert try_on(mixes, {"x": X[:1]}).notes == []


# shape of x, what is computed of it -> what the note says, "" for none.
ONE = {
    "a row, without a softmax": ((1, T, D), torch.tanh, "a batch of one"),
    "a position": ((B, 1, D), torch.tanh, "one position"),
    "a position that others would change": ((B, 1, D), lambda x: x.cumsum(1).flip(1), ""),
    "several of both": ((B, T, D), torch.tanh, ""),
    "an axis that no other fits": ((B, 1, D), lambda x: x.reshape(B, D), ""),
}


@pytest.mark.parametrize("row", ONE)
def test_an_axis_of_one_is_noted_where_two_are_kept_apart(row):
    shape, compute, note = ONE[row]
    tried = try_on(compute, {"x": rng.standard_normal(shape)}, gradients=True)
    assert tried.notes.count("one-row") == bool(note)
    assert not note or f"every input has {note}, so a port that mixes" in tried.said


def three(query, key, value):
    return attend(query, key, value)


def test_inputs_that_are_one_array_are_doubted_unless_gradients_tell_them_apart():
    one = {"query": X, "key": X, "value": X}
    tried = try_on(three, one)
    assert tried.doubts == 3 * ["swapped-inputs"]
    for pair in ("'query' and 'key'", "'query' and 'value'", "'key' and 'value'"):
        assert f"that inputs {pair} are swapped, because they are the same" in tried.said
    assert "to reveal it, use arrays that differ, or gradients=True" in tried.said
    others = {name: rng.permutation(X.ravel()).reshape(X.shape) for name in one}
    assert try_on(three, others)[:2] == QUIET
    assert try_on(three, one, gradients=True).doubts == []


def test_two_inputs_that_are_alike_in_effect_need_not_differ():
    assert try_on(lambda x, y: attend(x + y, x + y, x + y), {"x": X, "y": X})[:2] == QUIET


def test_two_masks_that_are_one_array_are_doubted():
    def call(x, mask, other_mask):
        return attend(x, x, x, mask) + attend(x, x, x, other_mask) * x

    hidden = np.tri(T, dtype=bool) & (np.eye(T, k=-3) == 0)
    tried = try_on(call, {"x": X, "mask": hidden, "other_mask": hidden})
    assert (tried.doubts, "gradients" in tried.said) == (["swapped-inputs"], False)
    assert try_on(call, {"x": X, "mask": hidden, "other_mask": hidden.T})[:2] == QUIET


def test_a_mask_of_queries_none_of_which_it_empties_is_noted_where_that_has_a_meaning():
    def filled(fill):
        def call(x, mask):
            return torch.softmax((x @ x.mT).masked_fill(~mask, fill), -1) @ x

        return call

    mask = rng.random((B, T, T)) < 0.6
    mask |= np.eye(T, dtype=bool)
    tried = try_on(filled(-1e9), {"x": X, "mask": mask})
    assert (tried.notes, tried.standing) == (["no-empty-query"], [])
    assert tried.said.startswith("mask 'mask' leaves every query a key, so what the port gives a")
    assert try_on(filled(-torch.inf), {"x": X, "mask": mask})[:2] == QUIET
    mask[0, 2] = False
    assert try_on(filled(-1e9), {"x": X, "mask": mask})[:2] == QUIET


def test_a_padding_mask_that_leaves_each_text_a_token_is_a_standing_note():
    def call(x, mask):
        return torch.softmax((x @ x.mT).masked_fill(~mask[:, None], -1e9), -1) @ x

    mask = np.array([[1, 0, 1, 1, 0, 1, 1], [1, 1, 1, 0, 1, 0, 0]], bool)
    assert try_on(call, {"x": X, "mask": mask}).standing == ["no-empty-query"]
    mask[1] = False
    assert try_on(call, {"x": X, "mask": mask})[:2] == QUIET
