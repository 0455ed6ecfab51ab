"""Training mode of translated modules: dropout by its rate, and statistics of the batch."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from jax_attn import parity
from jax_attn.translate.proof import loaded
from jax_attn.translate.translation import translate

B, C, D, T = 11, 5, 7, 3
RATE = 0.3


class Block(nn.Module):
    """A residual block; what follows a dropout in place reads what is left of its input."""

    def __init__(self, norm, inplace=False):
        super().__init__()
        self.up = nn.Linear(D, D)
        self.norm = norm
        self.drop = nn.Dropout(RATE, inplace)
        self.down = nn.Linear(D, D)

    def forward(self, x):
        hidden = torch.tanh(self.up(x))
        kept = self.drop(hidden)
        return self.down(self.norm(kept)) + hidden


def normed(channels, kind=nn.BatchNorm1d, **options):
    norm = kind(channels, **options)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 1.5)
    return norm


BLOCKS = {
    "features": lambda: (Block(normed(D)), (B, D)),
    "channels": lambda: (Block(normed(C, eps=1e-3, momentum=0.3)), (B, C, D)),
    "images": lambda: (Block(normed(C, nn.BatchNorm2d)), (B, C, T, D)),
    "dropout in place": lambda: (Block(normed(D), inplace=True), (B, D)),
}


def translated(name):
    torch.manual_seed(0)
    block, shape = BLOCKS[name]()
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return block, x, translate(block, (x,))


def without_rates(block, port):
    """Return both in training mode, with nothing dropped."""
    block = copy.deepcopy(block).train()
    block.drop.p = 0.0
    port.train()
    port.drop.rate = 0.0
    return block, port


def checked(pair, x, translation, **options):
    options = {"transforms": ("eager",), **options}
    return parity.check(*pair, (x,), layout=translation.layout, **options)


@pytest.mark.parametrize("name", BLOCKS)
def test_statistics_of_the_batch_are_those_of_torch(name):
    block, x, translation = translated(name)
    pair = without_rates(block, loaded(translation, block))
    result = checked(pair, x, translation)
    assert result.verdict is parity.Verdict.PASS, result
    assert {"norm.running_mean", "norm.running_var"} <= {each.name for each in result.tensors}


WRONG = {
    "a biased variance": ("variance * count / (count - 1)", "variance"),
    "another momentum": ("self.momentum = momentum", "self.momentum = 0.2"),
    "running statistics": ("if self.use_running_average", "if True"),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", WRONG)
def test_a_wrong_one_is_seen(bug):
    block, x, translation = translated("features")
    right, wrong = WRONG[bug]
    assert right in translation.source
    altered = replace(translation, source=translation.source.replace(right, wrong))
    pair = without_rates(block, loaded(altered, block))
    assert checked(pair, x, translation).verdict is parity.Verdict.FAIL


@pytest.mark.slow
@pytest.mark.parametrize("name", ["features", "dropout in place"])
def test_dropout_drops_by_its_rate_where_torch_does(name):
    block, x, translation = translated(name)
    port = loaded(translation, block)
    port.train()
    many = np.ones((1009, D), np.float32)
    kept = np.asarray(port.drop(many))
    share = (kept == 0).mean()
    deviation = np.sqrt(RATE * (1 - RATE) / many.size)
    assert abs(share - RATE) < 5 * deviation
    assert np.unique(kept).tolist() == [0, np.float32(1) / np.float32(1 - RATE)]
    # All is dropped: in place, from the residual too.
    port.drop.rate = 1.0
    block = copy.deepcopy(block).train()
    block.drop.p = 1.0
    assert checked((block, port), x, translation, gradients=False).verdict is parity.Verdict.PASS


@pytest.mark.slow
def test_a_training_step_runs_jitted_and_keeps_statistics():
    block, x, translation = translated("features")
    port = loaded(translation, block)
    port.train()

    @nnx.jit
    def step(port, x):
        return nnx.value_and_grad(lambda port: (port(x) ** 2).sum())(port)

    before = np.asarray(port.norm.running_mean[...])
    losses = {float(step(port, x)[0]) for _ in range(3)}
    assert len(losses) == 3  # each call drops others
    assert not np.array_equal(before, port.norm.running_mean[...])
