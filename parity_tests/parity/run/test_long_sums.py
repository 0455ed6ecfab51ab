"""What torch's kernels do in one operator, as long sums: their error lies within its budget."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from helpers.parity.functions import TorchFunction as Operator
from jax_attn.parity.run.inputs_and_runs import Inputs
from jax_attn.parity.run.reference import Reference

AT = torch.arange(400) % 3


class OfTime(nn.Conv1d):
    """A convolution of (time, batch, channels)."""

    def forward(self, x):
        return torch.conv_tbc(x, self.weight.permute(2, 1, 0), self.bias, 1)


class Pair(nn.Bilinear):
    """A bilinear layer of an array and its mirror image."""

    def forward(self, x):
        return super().forward(x, x.flip(-1))


def added(x):
    return torch.zeros(2, 3, 7, dtype=x.dtype).index_add_(1, AT, x)


def scattered(x):
    at = AT[None, :, None].expand(2, -1, 7)
    return torch.zeros(2, 3, 7, dtype=x.dtype).scatter_add(1, at, x)


def reduced(x):
    at = AT[None, :, None].expand(2, -1, 7)
    return torch.zeros(2, 3, 7, dtype=x.dtype).scatter_reduce(1, at, x, "sum")


def put(x):
    return torch.zeros(3, 7, dtype=x.dtype).index_put_((AT,), x, accumulate=True)


def averaged(x):
    at = AT[None, :, None].expand(2, -1, 7)
    return torch.zeros(2, 3, 7, dtype=x.dtype).scatter_reduce(1, at, x, "mean")


class Bag(nn.EmbeddingBag):
    """The sums of many rows, each weighted by an input."""

    def forward(self, weights):
        rows = torch.arange(weights.numel()).reshape(weights.shape) % self.num_embeddings
        return super().forward(rows, per_sample_weights=weights)


class Rotated(nn.Module):
    """Rotary positions as a product of complex numbers, the table in float32."""

    def __init__(self):
        super().__init__()
        angles = torch.outer(torch.arange(31.0), 10000 ** -(torch.arange(17) / 17))
        self.register_buffer("table", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x):
        turned = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * self.table
        return torch.view_as_real(turned).flatten(-2)


def resized(mode, **options):
    return lambda: Operator(lambda x: functional.interpolate(x, (13, 17), mode=mode, **options))


# operator -> a module and the shape of its input; both ways, as gradients are sums, too
ROWS = {
    "convolution, a patch of 16": (lambda: nn.Conv2d(3, 31, 16, stride=16), (2, 3, 32, 32)),
    "convolution, 7 by 7": (lambda: nn.Conv2d(3, 13, 7, 2, 3, bias=False), (2, 3, 17, 17)),
    "convolution, 1 by 1": (lambda: nn.Conv2d(257, 13, 1), (2, 257, 3, 3)),
    "convolution, 3 by 3": (lambda: nn.Conv2d(61, 13, 3, padding=1), (2, 61, 5, 5)),
    "convolution, in 3 axes": (lambda: nn.Conv3d(7, 11, 3), (2, 7, 5, 5, 5)),
    "convolution, in groups": (lambda: nn.Conv1d(16, 16, 64, padding=32, groups=2), (2, 16, 41)),
    "convolution, by channel": (lambda: nn.Conv1d(7, 7, 31, padding=15, groups=7), (2, 7, 41)),
    "convolution, of spectra": (lambda: nn.Conv1d(80, 31, 3, 2, 1), (2, 80, 21)),
    "convolution, transposed": (lambda: nn.ConvTranspose1d(31, 17, 4, 2), (2, 31, 9)),
    "conv_tbc": (lambda: OfTime(61, 7, 3), (19, 2, 61)),
    "_trilinear": (lambda: Pair(23, 23, 7), (5, 23)),
    "avg_pool2d": (lambda: Operator(lambda x: functional.avg_pool2d(x, 9)), (2, 5, 27, 27)),
    "avg_pool3d": (
        lambda: Operator(lambda x: functional.avg_pool3d(x, 5)),
        (2, 3, 10, 10, 10),
    ),
    "cumsum": (lambda: Operator(lambda x: x.cumsum(1)), (3, 1009)),
    "index_add_": (lambda: Operator(added), (2, 400, 7)),
    "scatter_add": (lambda: Operator(scattered), (2, 400, 7)),
    "scatter_reduce": (lambda: Operator(reduced), (2, 400, 7)),
    "index_put_": (lambda: Operator(put), (400, 7)),
    "index, backward": (lambda: Operator(lambda x: x[:, AT]), (2, 3, 7)),
    "put": (
        lambda: Operator(
            lambda x: torch.zeros(5, dtype=x.dtype).put_(AT, x.flatten(), accumulate=True)
        ),
        (20, 20),
    ),
    "scatter_reduce, mean": (lambda: Operator(averaged), (2, 400, 7)),
    "_embedding_bag": (lambda: Bag(7, 5, mode="sum"), (3, 199)),
    "mul, complex": (Rotated, (3, 31, 34)),
    "_fft_r2c": (lambda: Operator(lambda x: torch.fft.rfft(x).abs()), (3, 301)),
    "_fft_c2c": (lambda: Operator(lambda x: torch.fft.fft2(x).real), (3, 17, 61)),
    "_fft_c2r": (lambda: Operator(lambda x: torch.fft.irfft(torch.fft.rfft(x))), (3, 300)),
    "linalg_qr": (lambda: Operator(lambda x: torch.linalg.qr(x)[1]), (3, 31, 31)),
    "linalg_matrix_exp": (lambda: Operator(torch.matrix_exp), (3, 7, 7)),
    "_cdist_forward": (lambda: Operator(lambda x: torch.cdist(x, x + 3, p=1.0)), (3, 11, 61)),
    "upsample_bilinear2d, to more": (resized("bilinear"), (2, 3, 5, 7)),
    "upsample_bilinear2d, to fewer": (resized("bilinear"), (2, 3, 33, 37)),
    "upsample_bicubic2d, to more": (resized("bicubic"), (2, 3, 5, 7)),
    "upsample_bicubic2d, to fewer": (resized("bicubic"), (2, 3, 33, 37)),
    "_upsample_bicubic2d_aa": (resized("bicubic", antialias=True), (2, 3, 33, 37)),
    "upsample_nearest2d": (
        lambda: Operator(lambda x: functional.interpolate(x, (65, 65))),
        (2, 3, 5, 5),
    ),
}


def half_in_bfloat16(a):
    rounded = torch.from_numpy(a).bfloat16().double().numpy()
    return np.where(np.random.default_rng(2).random(a.shape) < 0.5, rounded, a)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_torchs_own_error_lies_within_the_budget_and_half_of_the_terms_in_bfloat16_do_not(row):
    make, shape = ROWS[row]
    torch.manual_seed(0)
    rng = np.random.default_rng(1)
    x = rng.standard_normal(shape, np.float32)
    module = make()
    reference = Reference(module, None, Inputs((x,), {}))
    of_output = rng.standard_normal(reference.outputs("float32")["output"].shape, np.float32)
    cotangents = {"output": of_output}
    exact, own = reference.exact(cotangents).kinds, reference.run("float32", cotangents).kinds
    coarse = Reference(module, None, Inputs((half_in_bfloat16(x),), {}))
    wrong = coarse.exact({"output": half_in_bfloat16(of_output.astype(float))}).kinds
    for kind, budgets in reference.spread("float32", cotangents).items():
        for name, budget in budgets.items():
            want = exact[kind][name]
            assert (np.abs(own[kind][name] - want) <= budget.element).all(), (kind, name)
            assert np.sqrt(np.mean((own[kind][name] - want) ** 2)) <= budget.rms, (kind, name)
            over = np.sqrt(np.mean((wrong[kind][name] - want) ** 2)) / budget.rms
            assert over > 1, (kind, name)
