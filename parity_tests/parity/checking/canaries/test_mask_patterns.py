"""Masks the same along an axis, or that hide tokens at one end: what a port could read instead."""

import numpy as np
import pytest
import torch

from helpers.parity.canary_trials import attend, try_on

B, N, T, D = 2, 3, 7, 5
rng = np.random.default_rng(0)
X = rng.standard_normal((B, T, D))
HEADS = rng.standard_normal((B, N, T, D))
CAUSAL = np.tri(T, dtype=bool)
VARIED = np.eye(T, dtype=bool) | (rng.random((B, N, T, T)) > 0.4)
RIGHT = np.arange(T) < np.array([[T], [4]])
HOLES = np.array([[1, 0, 1, 1, 0, 1, 1], [1, 1, 1, 0, 1, 0, 0]], bool)


def by_head(x, mask):
    return attend(x, x, x, mask)


def by_token(x, mask):
    return attend(x, x, x, mask[:, None])


def of_last(x, mask):
    return attend(x[:, 2:], x, x, mask)


def of_queries(x, mask):
    return attend(x, x, x) * mask


# The reference, x, the mask -> the axes that are noted, and whether the end is.
NOTED = {
    "causal, alike in rows and heads": (
        by_head,
        HEADS,
        np.tile(CAUSAL, (B, N, 1, 1)),
        (0, 1),
        False,
    ),
    "alike for queries": (by_head, X, np.tile(HOLES[:, None], (1, T, 1)), (1,), False),
    "rows of queries alike": (of_queries, X, HOLES[[0, 0], :, None], (0,), False),
    "the same row twice": (by_token, X, HOLES[[0, 0]], (0,), False),
    "and padding": (by_token, X, RIGHT[[1, 1]], (0,), True),
    "varied": (by_head, HEADS, VARIED, (), False),
    "with holes": (by_token, X, HOLES, (), False),
    "causal": (by_head, X, CAUSAL, (), False),
    "causal, from the end": (of_last, X, np.tri(T - 2, T, 2, dtype=bool), (), False),
    "causal, of which True hides": (lambda x, mask: by_head(x, ~mask), X, ~CAUSAL, (), False),
    "almost causal": (by_head, X, CAUSAL & (np.eye(T, k=-3) == 0), (), False),
    "on the right": (by_token, X, RIGHT, (), True),
    "on the left": (by_token, X, RIGHT[:, ::-1], (), True),
    "of which 0 hides": (by_token, X, RIGHT.astype(int), (), True),
    "of which True hides": (lambda x, mask: by_token(x, ~mask), X, ~RIGHT, (), True),
    "(B, 1, 1, S)": (by_head, HEADS, RIGHT[:, None, None], (), True),
}


@pytest.mark.parametrize("row", NOTED)
def test_a_mask_alike_along_an_axis_or_at_one_end_is_noted(row):
    call, x, mask, axes, at_one_end = NOTED[row]
    tried = try_on(call, {"x": x, "mask": mask})
    assert tried.doubts == []
    for axis in range(mask.ndim):
        assert (f"mask 'mask' is the same all along its axis {axis}," in tried.said) == (
            axis in axes
        )
    assert tried.notes.count("alike-along-axis") == len(axes)
    assert ("mask-one-end" in tried.standing) is at_one_end
    assert ("mask-causal" in tried.standing) is row.startswith("causal")


def of_first_row(x, mask):
    return attend(x, x, x, mask[0])


def of_lengths(x, mask):
    return attend(x, x, x, (torch.arange(T) < mask.sum(-1, keepdim=True))[:, None])


UNREAD = {
    "the other rows": (of_first_row, np.stack([VARIED[0, 0]] * B)),
    "more than the lengths": (of_lengths, RIGHT),
}


@pytest.mark.parametrize("row", UNREAD)
def test_what_the_reference_does_not_read_of_a_mask_is_not_noted(row):
    call, mask = UNREAD[row]
    assert {*try_on(call, {"x": X, "mask": mask}).notes} <= {"no-empty-query"}


def test_an_input_that_is_the_same_along_an_axis_is_noted_where_no_gradient_shows_it():
    bias = np.tile(rng.standard_normal((N, T, T)), (B, 1, 1, 1))
    inputs = {"x": HEADS, "attn_bias": bias}
    assert try_on(added, inputs).notes == ["alike-along-axis"]
    assert try_on(added, inputs, gradients=True).notes == []
    assert try_on(added, {"x": HEADS, "attn_bias": bias[::-1] + HEADS[..., :1]}).notes == []


FILLED = np.where(CAUSAL, 0, -1e9)


def added(x, attn_bias):
    return attend(x, x, x, added=attn_bias)


def as_mask(x, attn_bias):
    return attend(x, x, x, attn_bias > -1)


# The reference, its bias, whether gradients are compared -> whether that is noted.
BIASES = {
    "a mask in effect": (added, FILLED, False, True),
    "with gradients": (added, FILLED, True, False),
    "with numbers between": (added, FILLED - CAUSAL * rng.random((T, T)), False, False),
    "read as a mask": (as_mask, FILLED, False, False),
}


@pytest.mark.parametrize("row", BIASES)
def test_a_bias_that_is_a_mask_in_effect_is_noted(row):
    call, bias, gradients, is_noted = BIASES[row]
    tried = try_on(call, {"x": X, "attn_bias": bias}, gradients=gradients)
    assert ("bias-as-mask" in tried.notes) is is_noted
    assert ("input 'attn_bias' holds only 0 and -1e+09" in tried.said) is is_noted
