"""What canaries say of masks among the inputs: one that hides nothing is told by any name.

Each row is a torch function as the reference; no port takes part.
"""

import warnings

import numpy as np
import pytest
import torch

from helpers.parity.canary_trials import QUIET, attend, try_on

B, T, S, D = 2, 7, 5, 3
rng = np.random.default_rng(0)
X, MEMORY = rng.standard_normal((B, T, D)), rng.standard_normal((B, S, D))
UNIFORM, SHOWN = np.ones((B, T, D)), np.tri(T) - np.eye(T, k=-3)


def only(x, mask):
    return attend(x, x, x, mask)


def added(x, mask):
    return attend(x, x, x, added=mask)


def hidden(x, mask):
    return attend(x, x, x, 1 - mask)


HIDES_NOTHING = {
    "booleans": (only, "shown", np.ones((T, T), bool)),
    "integers": (only, "shown", np.ones((T, T), int)),
    "integers, of which 1 hides": (hidden, "ignored", np.zeros((T, T), int)),
    "floats": (only, "shown", np.ones((T, T))),
    "added zeros": (added, "attn_bias", np.zeros((T, T))),
    "padding": (lambda x, mask: only(x, mask[:, None]), "real", np.ones((B, T), int)),
}


@pytest.mark.parametrize("by", ["name", "place"])
@pytest.mark.parametrize("row", HIDES_NOTHING)
def test_a_mask_that_hides_nothing_is_met_by_whatever_name(row, by):
    call, name, mask = HIDES_NOTHING[row]
    inputs = {"x": X, name: mask} if by == "name" else (X, mask)
    tried = try_on(lambda *args, **kwargs: call(*args, *kwargs.values()), inputs)
    assert "ignored-mask" in tried.doubts
    label = name if by == "name" else "1"
    assert f"that mask {label!r} is ignored, because it is {mask.flat[0]} everywhere" in tried.said


@pytest.mark.parametrize("name", ["attention_mask", "allowed", "keep_tokens"])
def test_a_mask_of_no_softmax_is_known_by_its_name(name):
    def by_hand(x, mask):
        weights = torch.exp(x @ x.mT) * mask
        return weights / weights.sum(-1, keepdim=True) @ x

    tried = try_on(lambda x, **mask: by_hand(x, *mask.values()), {"x": X, name: SHOWN**0})
    assert "ignored-mask" in tried.doubts


SEEN = {
    "floats that hide": (only, SHOWN),
    "integers that hide": (only, SHOWN.astype(int)),
    "-inf": (added, np.where(SHOWN == 1, 0, -np.inf)),
    "the lowest": (added, np.where(SHOWN == 1, 0, np.finfo(np.float32).min)),
    "a bias of both signs": (added, rng.standard_normal((T, T))),
    "a bias that falls with distance": (added, -np.abs(np.subtract.outer(range(T), range(T)) / T)),
}
TABLE = torch.from_numpy(rng.standard_normal((2, D)))
NO_MASK = {
    "token types, all 0": (lambda x, kind: only(x + TABLE[kind], None), np.zeros((B, T), int)),
    "token types, all 1": (lambda x, kind: only(x + TABLE[kind], None), np.ones((B, T), int)),
    "a gain of 1": (lambda x, gain: only(gain * x, None), np.ones(D)),
    "an offset of 0": (lambda x, offset: only(x, None) + offset, np.zeros(D)),
    "a cache of zeros": (
        lambda x, past: attend(x, torch.cat([past, x], 1), torch.cat([past, x], 1)),
        np.zeros((B, 4, D)),
    ),
    "an index of one row": (lambda x, row: only(x + TABLE[:1][row], None), np.zeros((B, T), int)),
}
NEUTRAL = {"a gain of 1", "an offset of 0", "a cache of zeros"}


@pytest.mark.slow
@pytest.mark.parametrize("row", [*SEEN, *NO_MASK])
def test_a_mask_that_matters_and_what_is_none_are_not_doubted(row):
    call, value = (SEEN | NO_MASK)[row]
    tried = try_on(lambda x, other: call(x, other), {"x": X, "other": value})
    notes = ["neutral-input"] if row in NEUTRAL else []
    assert tried[:2] == ([], notes)
    if row in SEEN:
        assert try_on(lambda x, mask: call(x, mask), {"x": X, "mask": value})[:2] == QUIET


def test_a_mask_that_the_reference_refuses_is_noted_and_not_doubted():
    keep = np.array([[1, 0, 1, 0, 0, 1, 0], [0, 1, 1, 0, 1, 0, 0]], bool)  # three in each row

    def gathered(x, keep):
        return x[keep].reshape(B, 3, D) * 2

    tried = try_on(gathered, {"x": X, "keep": keep})
    assert (tried.doubts, {*tried.notes} >= {"mask-not-tried"}) == ([], True)
    assert "that mask 'keep' is inverted was not checked: the reference raises" in tried.said

    def strict(x, keep):
        if not keep.any():
            raise ValueError("no token is left")
        return attend(x, x, x, keep[:, None])

    assert try_on(strict, {"x": X, "keep": keep})[:2] == ([], ["mask-not-tried"])
    assert "ignored-mask" in try_on(strict, {"x": X, "keep": keep | True}).doubts


def test_a_mask_is_turned_within_what_float16_holds():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mask = np.where(SHOWN == 1, 0, -1e4)
        assert try_on(added, {"x": X, "mask": mask}, "float16")[:2] == QUIET


@pytest.mark.parametrize("by", ["name", "place", "a call's place"])
def test_a_mask_is_known_by_its_parameter(by):
    class Masked(torch.nn.Module):
        def forward(self, x, attention_mask):
            return attend(x, x, x, attention_mask[:, None])

    real = (np.arange(T) < np.array([[T], [4]])).astype(int)
    call = (lambda x, mask: Masked()(x, mask)) if by == "a call's place" else Masked()
    inputs = {"x": X, "attention_mask": real} if by == "name" else (X, real)
    assert "mask-one-end" in try_on(call, inputs).standing


def test_a_mask_of_any_name_is_known_by_what_it_hides():
    real = (np.arange(T) < np.array([[T], [4]])).astype(int)
    tried = try_on(lambda x, m: attend(x, x, x, m[:, None]), {"x": X, "m": real})
    assert "mask-one-end" in tried.standing


SEGMENTS = np.array([[0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1]])


def test_segments_of_two_numbers_are_no_mask():
    def within(x, ids):
        return attend(x, x, x, ids[:, None] == ids[..., None])

    tried = try_on(within, {"x": X, "ids": SEGMENTS})
    assert {"inverted-mask", "ignored-mask"}.isdisjoint(tried.doubts)
