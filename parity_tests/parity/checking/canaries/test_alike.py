"""A batch of one row, and two inputs that are one array: what of them could not be told apart."""

import numpy as np
import pytest
import torch

from helpers.parity.canary_trials import attend, try_on

B, T, D = 2, 7, 3
rng = np.random.default_rng(0)
X = rng.standard_normal((B, T, D))


def test_a_batch_of_one_is_noted_where_rows_are_kept_apart():
    assert "a batch of one" in try_on(lambda x: attend(x, x, x), {"x": X[:1]})[1]
    assert try_on(lambda x: attend(x, x, x), {"x": X}) == ("", "")

    def mixes(x):
        return attend(x, x, x) + x.mean(0)

    assert try_on(mixes, {"x": X[:1]})[1] == ""


# shape of x, what is computed of it -> what the note says, "" for none.
ONE = {
    "a row, without a softmax": ((1, T, D), torch.tanh, "every input has a batch of one"),
    "a position": ((B, 1, D), torch.tanh, "every input has one position, so a port that mixes"),
    "a position that others would change": ((B, 1, D), lambda x: x.cumsum(1).flip(1), ""),
    "several of both": ((B, T, D), torch.tanh, ""),
    "an axis that no other fits": ((B, 1, D), lambda x: x.reshape(B, D), ""),
}


@pytest.mark.parametrize("row", ONE)
def test_an_axis_of_one_is_noted_where_two_are_kept_apart(row):
    shape, compute, note = ONE[row]
    _, notes = try_on(compute, {"x": rng.standard_normal(shape)}, gradients=True)
    said = [line for line in notes.splitlines() if line.startswith("every input has")]
    assert [line[: len(note)] for line in said] == ([note] if note else [])


def three(query, key, value):
    return attend(query, key, value)


def test_inputs_that_are_one_array_are_doubted_unless_gradients_tell_them_apart():
    one = {"query": X, "key": X, "value": X}
    doubts, _ = try_on(three, one)
    for pair in ("'query' and 'key'", "'query' and 'value'", "'key' and 'value'"):
        assert f"that inputs {pair} are swapped, because they are the same" in doubts
    assert "to reveal it, use arrays that differ, or gradients=True" in doubts
    assert try_on(three, {name: rng.permutation(X.ravel()).reshape(X.shape) for name in one}) == (
        "",
        "",
    )
    assert try_on(three, one, gradients=True)[0] == ""


def test_two_inputs_that_are_alike_in_effect_need_not_differ():
    assert try_on(lambda x, y: attend(x + y, x + y, x + y), {"x": X, "y": X}) == ("", "")


def test_two_masks_that_are_one_array_are_doubted():
    def call(x, mask, other_mask):
        return attend(x, x, x, mask) + attend(x, x, x, other_mask) * x

    hidden = np.tri(T, dtype=bool) & (np.eye(T, k=-3) == 0)
    doubts, _ = try_on(call, {"x": X, "mask": hidden, "other_mask": hidden})
    assert "that inputs 'mask' and 'other_mask' are swapped" in doubts
    assert "gradients" not in doubts
    assert try_on(call, {"x": X, "mask": hidden, "other_mask": hidden.T}) == ("", "")


def test_a_mask_of_queries_none_of_which_it_empties_is_noted_where_that_has_a_meaning():
    def filled(fill):
        def call(x, mask):
            return torch.softmax((x @ x.mT).masked_fill(~mask, fill), -1) @ x

        return call

    mask = rng.random((B, T, T)) < 0.6
    mask |= np.eye(T, dtype=bool)
    note = "mask 'mask' leaves every query a key, so what the port gives a query without keys"
    assert note in try_on(filled(-1e9), {"x": X, "mask": mask})[1]
    assert try_on(filled(-torch.inf), {"x": X, "mask": mask}) == ("", "")
    mask[0, 2] = False
    assert try_on(filled(-1e9), {"x": X, "mask": mask}) == ("", "")


def test_a_padding_mask_that_leaves_each_text_a_token_is_a_standing_note():
    def call(x, mask):
        return torch.softmax((x @ x.mT).masked_fill(~mask[:, None], -1e9), -1) @ x

    mask = np.array([[1, 0, 1, 1, 0, 1, 1], [1, 1, 1, 0, 1, 0, 0]], bool)
    note = "mask 'mask' leaves every query a key"
    assert note in try_on(call, {"x": X, "mask": mask})[1]
    mask[1] = False
    assert try_on(call, {"x": X, "mask": mask}) == ("", "")
