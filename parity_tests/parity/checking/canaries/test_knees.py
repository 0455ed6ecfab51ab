"""Thresholds, conditions, indices and sizes that hide a mistake are noted; others are not."""

import numpy as np
import pytest
import torch

from helpers.parity.canary_trials import try_on

F = torch.nn.functional

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((2, 3, 7))
IMAGE, SMALL = RNG.standard_normal((2, 3, 9, 7)), RNG.standard_normal((2, 3, 8, 6))
BOTH = RNG.standard_normal((2, 3, 9, 8))
DISTINCT = np.stack([RNG.permutation(9)[:7] for _ in range(3)])
REPEATED = DISTINCT // 2
IDS, LOW = np.array([[0, 19, 5], [11, 3, 7]]), np.array([[4, 9, 5], [1, 3, 7]])
TABLE = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))


def near(x):
    """Attend to a window of 9 keys before each query."""
    away = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
    return ((away < 9) & (away >= 0)).to(x.dtype) @ x


def ones_at(x, at):
    return torch.zeros(3, 9).to(x).scatter_add(1, at, x)


def rows_at(x, at):
    return torch.zeros(9, 7).to(x).index_add(0, at[0][:3], x)


def put_at(x, at):
    return torch.zeros(9, 7).to(x).index_put((at[0][:3],), x, accumulate=True)


def strided(x):
    return F.conv2d(x, torch.ones(1, 3, 3, 3).to(x), stride=2, padding=1)


def target(x, classes):
    return F.cross_entropy(x, classes, ignore_index=6)


# name -> call, inputs that hide it, inputs that show it, what the note names
ROWS = {
    "smooth_l1_loss": (F.smooth_l1_loss, (0.1 * X, 0.1 * Y), (X, 2 * Y), "smooth_l1_loss(beta=1)"),
    "huber_loss": (F.huber_loss, (9 * X, 9 * X + 5), (X, 2 * Y), "huber_loss(delta=1)"),
    "multi_margin_loss": (
        lambda x, y: F.multi_margin_loss(x, y),
        (0.1 * X, np.array([1, 2, 0])),
        (9 * X, np.array([1, 2, 0])),
        "multi_margin_loss(margin=1)",
    ),
    "a loss's ignored class": (
        target,
        (X, np.array([1, 2, 0])),
        (X, np.array([1, 6, 0])),
        "ignore_index=6",
    ),
    "softplus's threshold": (lambda x: F.softplus(x, 1.0, 2.0), (-abs(X),), (3 * X,), "softplus"),
    "truncation": (lambda x: x + x.trunc(), (3 * abs(X),), (3 * X,), "trunc in place of floor"),
    "division into parts": (
        lambda x, n: x * torch.div(n, 2, rounding_mode="floor"),
        (X[0, :3], np.array([2, 4, 8])),
        (X[0, :3], np.array([2, 3, 8])),
        "the rounding of a division by 2",
    ),
    "a window as long as the text": (
        near,
        (BOTH[:, :, :, 0],),
        (X.repeat(4, 0)[None],),
        "a comparison with 9 that",
    ),
    "a count": (
        lambda x: x * (x > -0.5).sum(-1, keepdim=True),
        (abs(X),),
        (X,),
        "a count of where a condition holds",
    ),
    "scatter_add": (ones_at, (X, DISTINCT), (X, REPEATED), "adding, in place of setting"),
    "index_add": (rows_at, (X, DISTINCT), (X, 0 * DISTINCT), "adding, in place of setting"),
    "index_put": (put_at, (X, DISTINCT), (X, 0 * DISTINCT), "adding, in place of setting"),
    "half a table": (
        lambda ids: F.embedding(ids, TABLE.to(torch.float64)),
        (LOW,),
        (IDS,),
        "the second half of a table's rows",
    ),
    "SAME at odd sizes": (strided, (IMAGE,), (BOTH,), "padding=1 in place of SAME"),
    "ceil_mode at even sizes": (
        lambda x: F.max_pool2d(x, 2),
        (SMALL,),
        (BOTH,),
        "ceil_mode=False of max_pool2d(2)",
    ),
    "a mean over windows that fit": (
        lambda x: F.avg_pool2d(x, 2),
        (SMALL,),
        (BOTH,),
        "ceil_mode=False of avg_pool2d(2)",
    ),
    "an adaptive pool of equal windows": (
        lambda x: F.adaptive_avg_pool2d(x, 2),
        (SMALL,),
        (BOTH,),
        "the uneven windows of adaptive_avg_pool2d(2)",
    ),
    "irfft of an even number": (
        lambda x: torch.fft.irfft(torch.fft.rfft(x), n=x.shape[-1]),
        (SMALL,),
        (IMAGE,),
        "the odd n of an irfft",
    ),
    "the sign of a remainder": (
        lambda x, ids: x * torch.remainder(ids, 2),
        (X, DISTINCT),
        (X, DISTINCT - 4),
        "the sign of remainder(2)",
    ),
    "nearest to a multiple": (
        lambda x: F.interpolate(x, size=(16, 12)),
        (SMALL,),
        (BOTH,),
        "nearest in place of nearest-exact",
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_inputs_that_hide_it_get_a_note_and_others_do_not(row):
    call, hiding, showing, named = ROWS[row]
    assert named in try_on(call, hiding).said
    assert named not in try_on(call, showing).said


# Right ports of these get no note, because no input would show more.
QUIET = {
    "softplus's default threshold, below rounding": (F.softplus, (X,)),
    "a scale of two": (lambda x: F.interpolate(x, scale_factor=2), (SMALL,)),
    "an average over everything": (lambda x: F.adaptive_avg_pool2d(x, 1), (SMALL,)),
    "a convolution of stride 1": (lambda x: F.conv2d(x, x[:1], padding=1), (IMAGE[:, :, :3, :3],)),
    "an index that is not negative": (lambda x, i: x * ((i >= 0) & (i < 5)), (X, DISTINCT)),
    "positions in order": (
        lambda x: x + F.embedding(torch.arange(7), TABLE.to(x))[:, 0],
        (X,),
    ),
    "experts whose tokens differ": (
        lambda x, at: torch.zeros(9, 7).to(x).index_add(0, at[0, :3], x).index_add(0, at[1, :3], x),
        (X, np.stack([np.arange(7)] * 3)),
    ),
}


@pytest.mark.parametrize("row", QUIET)
def test_what_no_input_would_show_gets_no_note(row):
    call, inputs = QUIET[row]
    tried = try_on(call, inputs)
    assert "idle-branch" not in tried.notes, tried.said


class Bag(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = torch.nn.EmbeddingBag(20, 4, padding_idx=0)
        torch.nn.init.normal_(self.bag.weight, generator=torch.Generator().manual_seed(0))

    def forward(self, ids):
        return self.bag(ids)


def test_a_bag_without_padding_is_noted():
    assert "no-padding" in try_on(Bag(), (LOW,)).notes
    assert "no-padding" not in try_on(Bag(), (IDS,)).notes
