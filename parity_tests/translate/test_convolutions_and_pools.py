"""Rules of convolutions, pools, padding and resizing, beside torch's operators."""

import random

import pytest
import torch
from torch.nn.functional import max_pool2d

from helpers.rules.rows import draws, row, table, written
from helpers.rules.varying import with_varying

real, whole = draws(2)

CONVOLUTIONS = [
    row(
        "conv1d.default",
        *(real(2, 3, 11), real(5, 3, 3)),
        text="jax.lax.conv_general_dilated(x0, x1, (1,), 'VALID')",
    ),
    row("conv1d.default", real(3, 11), real(5, 3, 3), real(5), [2], [1]),
    row(
        "conv2d.default",
        *(real(2, 6, 11, 7), real(4, 3, 3, 2), real(4), [2, 1], [1, 0], [1, 2], 2),
    ),
    row("conv2d.padding", real(2, 3, 11, 7), real(5, 3, 4, 3), None, [1, 1], "same", [2, 1]),
    row("conv3d.default", real(2, 3, 5, 7, 6), real(2, 3, 2, 3, 1), real(2)),
    row("conv_transpose1d.default", real(2, 3, 5), real(3, 4, 3), real(4), [2], [1], [1]),
    row(
        "conv_transpose2d.input",
        *(real(2, 6, 5, 4), real(6, 2, 3, 2), real(4), [2, 3], [1, 3], [1, 2], 2, [2, 1]),
    ),
    row(
        "conv_transpose2d.input",
        *(real(2, 3, 5, 4), real(3, 2, 3, 2), real(2), [2, 3], [1, 0], [1, 2], 1, [1, 2]),
    ),
    row("conv_transpose3d.input", real(3, 5, 4, 2), real(3, 2, 3, 2, 2)),
    row(
        "convolution.default",
        *(real(2, 3, 5, 4), real(3, 2, 3, 2), None, [2, 2], [0, 0], [1, 1], True, [0, 0], 1),
    ),
    row(
        "convolution.default",
        *(real(2, 3, 5, 4), real(2, 3, 3, 2), None, [2, 2], [0, 0], [1, 1], False, [0, 0], 1),
    ),
]
UNPOOLED = max_pool2d(real(2, 3, 8, 6), 2, return_indices=True)
POOLS = [
    row(
        "max_pool1d.default",
        *(real(2, 3, 11), [3]),
        text="jax.lax.reduce_window(x0, -jnp.inf, jax.lax.max, (1, 1, 3), (1, 1, 3), 'VALID')",
    ),
    row("max_pool2d.default", real(2, 3, 5, 5).round(), [3, 3], [2, 2], [1, 1]),
    row("max_pool2d.default", real(2, 3, 11, 8).round(), [3, 2], [2, 2], [1, 1], [1, 2], True),
    row("max_pool2d_with_indices.default", real(3, 9, 8).round(), [3, 2], [2, 3], 1, 1, True),
    row("max_pool2d_with_indices.default", real(3, 9, 8).round(), [3, 2], [2, 3], 1, [1, 2]),
    row("max_pool3d.default", real(2, 3, 7, 6, 5), [2]),
    row("avg_pool1d.default", real(2, 3, 11), [3], [2], [1]),
    row("avg_pool2d.default", real(2, 3, 11, 8), [3, 2], [2, 3], [1, 1], True),
    row("avg_pool2d.default", real(2, 3, 11, 8), [3, 2], [2, 3], [1, 0], True, False),
    row("avg_pool2d.default", real(2, 3, 11, 8), [3, 2], [], [0, 0], True),
    row("avg_pool2d.default", real(2, 3, 10, 8), [3, 2], [2, 3], [1, 1], True),
    row("avg_pool2d.default", real(2, 3, 11, 8), [3, 2], [2, 3], [1, 0], False, True, 5),
    row("avg_pool3d.default", real(3, 5, 6, 7), [2, 3, 3], [2, 1, 2], [1, 0, 1], False, False),
    row(
        "adaptive_avg_pool2d.default",
        *(real(2, 3, 7, 6), [1, 1]),
        text="x0.mean((-2, -1), keepdims=True)",
    ),
    row(
        "adaptive_avg_pool2d.default",
        *(real(2, 3, 9, 6), [3, 2]),
        text="x0.reshape(*x0.shape[:-2], 3, 3, 2, 3).mean((-3, -1))",
    ),
    row("adaptive_avg_pool1d.default", real(2, 3, 9), [3]),
    row("adaptive_avg_pool2d.default", real(2, 3, 7, 6), [3, 4]),
    row("adaptive_avg_pool2d.default", real(2, 3, 3, 2), [7, 7]),
    row("adaptive_max_pool2d.default", real(2, 3, 6, 6).round(), [2, 1]),
    row("adaptive_max_pool2d.default", real(2, 3, 7, 6).round(), [3, 4]),
    row("max_unpool2d.default", *UNPOOLED, [8, 6]),
    row("im2col.default", real(2, 3, 7, 8), [2, 3], [1, 2], [1, 0], [2, 1]),
    row("im2col.default", real(3, 7, 8), [2, 3], [1, 1], [1, 0], [2, 1]),
    row("col2im.default", real(2, 18, 16), [7, 8], [2, 3], [1, 2], [1, 0], [2, 1]),
]
PADS = [
    row("pad.default", real(2, 3, 5), [1, 2], text="jnp.pad(x0, ((0, 0), (0, 0), (1, 2)))"),
    row("pad.default", real(7), [1, 2], text="jnp.pad(x0, (1, 2))"),
    row("pad.default", real(2, 3, 5), [-1, 2, 0, -2], "constant", -1.5),
    row("pad.default", whole(5, 2, 3, 5), [-1, -2], text="x0[..., 1:-2]"),
    row("pad.default", whole(5, 2, 3, 5), [1, 2], "constant", 3.0),
    row("pad.default", whole(5, 2, 3, 5) > 2, [1, 2], "constant", 1.0),
    row("pad.default", real(2, 3, 5), [1, 2], "replicate"),
    row("pad.default", real(2, 3, 5), [1, 2], "circular"),
    row("reflection_pad2d.default", real(2, 3, 5, 4), [1, 2, 3, 0]),
    row("constant_pad_nd.default", real(2, 3, 5, 4), [1, 2, 3, 0], 2),
]
RESIZED = [
    row(
        "upsample_nearest2d.vec",
        *(real(2, 3, 5, 4), None, [2.0, 2.0]),
        text="x0.repeat(2, axis=-2).repeat(2, axis=-1)",
    ),
    row("upsample_nearest1d.default", real(2, 3, 5), [7]),
    row("upsample_nearest3d.vec", real(2, 3, 3, 4, 2), None, [1.7, 1.5, 2.0]),
    row("_upsample_nearest_exact2d.vec", real(2, 3, 5, 4), None, [1.7, 1.7]),
    row("_upsample_nearest_exact2d.default", real(2, 3, 5, 4), [7, 3]),
    row(
        "upsample_bilinear2d.vec",
        *(real(2, 3, 5, 4), [7, 3], False, None),
        text="jax.image.resize(x0, (*x0.shape[:-2], 7, 3), 'linear', antialias=False)",
    ),
    row("upsample_bilinear2d.vec", real(2, 3, 5, 4), None, False, [1.7, 1.7]),
    row("upsample_bilinear2d.default", real(2, 3, 5, 4), [7, 1], True),
    row("upsample_linear1d.default", real(2, 3, 5), [7], True),
    row("upsample_trilinear3d.vec", real(2, 3, 3, 4, 2), [6, 5, 1], False, None),
    row("upsample_bicubic2d.vec", real(2, 3, 5, 4), [10, 3], False, None),
    row("upsample_bicubic2d.vec", real(2, 3, 5, 4), None, False, [1.7, 1.7]),
    row("upsample_bicubic2d.default", real(2, 3, 5, 4), [7, 3], True),
    row("_upsample_bilinear2d_aa.default", real(2, 3, 5, 4), [3, 7], False),
    row("_upsample_bicubic2d_aa.vec", real(2, 3, 5, 4), [3, 7], False, None),
    *(
        row("grid_sampler.default", real(2, 3, 5, 4), real(2, 7, 6, 2), mode, padding, align)
        for mode, padding, align in [
            *((0, padding, align) for padding in (0, 1, 2) for align in (False, True)),
            (1, 0, False),
            (1, 2, True),
        ]
    ),
    row("grid_sampler.default", real(2, 3, 5, 4, 3), real(2, 2, 3, 5, 3), 0, 0, False),
    row("affine_grid_generator.default", real(2, 2, 3), [2, 3, 5, 4], False),
    row("affine_grid_generator.default", real(2, 3, 4), [2, 3, 5, 1, 3], True),
]


def drawn():
    """Windows of any width, step, padding and dilation along one axis."""
    rng = random.Random(1)
    for _ in range(12):
        width, stride, dilation = rng.randint(1, 4), [rng.randint(1, 3)], rng.randint(1, 2)
        groups, padding = rng.randint(1, 2), [rng.randint(0, 3)]
        x = real(3, 4, dilation * (width - 1) + rng.randint(1, 5))
        kernel = real(6, 4 // groups, width)
        yield row("conv1d.default", x, kernel, None, stride, padding, [dilation], groups)
        inside, ceil = [min(padding[0], width // 2)], rng.random() < 0.5
        yield row("avg_pool1d.default", x, [width], stride, inside, ceil, rng.random() < 0.5)
        yield row("max_pool1d.default", x.round(), [width], stride, inside, [1], ceil)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("pad.default", (real(2, 3, 5), [-1, 2], "replicate")),
        ("_upsample_bilinear2d_aa.default", (real(2, 3, 5, 4), [3, 7], True)),
        ("grid_sampler.default", (real(2, 3, 5, 4), real(2, 7, 6, 2), 2, 0, True)),
        ("max_pool2d.default", (whole(9, 2, 3, 5, 4), [2, 2])),
        ("avg_pool1d.default", (whole(9, 2, 3, 5), [2])),
    ],
)
def test_what_has_no_right_expression_is_refused(name, args):
    with pytest.raises(NotImplementedError):
        written(name, *args)


@pytest.mark.parametrize(
    ("name", "args", "text"),
    [
        ("pad.default", (real(2, 3), [1, 11]), "jnp.pad(self, ((0, 0), (1, T)))"),
        (
            "adaptive_avg_pool2d.default",
            (real(2, 3, 11, 11), [3, 5]),
            "adaptive_avg_pool(self, (3, 5))",
        ),
        ("upsample_nearest1d.vec", (real(2, 3, 11), None, [2.0]), "input.repeat(2, axis=-1)"),
        (
            "upsample_nearest1d.vec",
            (real(2, 3, 5), [11], None),
            "upsample_nearest(input, (T,))",
        ),
        (
            "upsample_linear1d.vec",
            (real(2, 3, 5), [11], False, None),
            "jax.image.resize(input, (*input.shape[:-1], T), 'linear', antialias=False)",
        ),
        (
            "im2col.default",
            (real(11, 3, 5, 4), [2, 2], [1, 1], [0, 0], [1, 1]),
            "jax.lax.conv_general_dilated_patches(self, (2, 2), (1, 1), ((0, 0), (0, 0)), "
            "precision=jax.lax.Precision.HIGHEST).reshape(self.shape[0], 12, -1)",
        ),
    ],
)
def test_sizes_that_vary_are_named(name, args, text):
    assert with_varying(name, *args) == text


CONV = "jax.lax.conv_general_dilated(input, weight, (1,), {})"
POOL = (
    "jax.lax.reduce_window(self, 0.0, jax.lax.add, (1, 1, 2), (1, 1, 2), ((0, 0), (0, 0), (1, 1)))"
)


MISTAKES = [
    # Equal maxima give the gradient to the first.
    row("max_pool1d.default", torch.zeros(2, 3, 4), [2], wrong="self.reshape(2, 3, 2, 2).max(-1)"),
    row(
        "conv1d.default", real(2, 3, 7), real(5, 3, 4), None, [1], [2], wrong=CONV.format("'SAME'")
    ),
    row(
        "conv1d.default",
        real(2, 3, 7),
        real(5, 3, 3),
        real(5),
        [1],
        [1],
        wrong=CONV.format("((1, 1),)"),
    ),
    row("avg_pool1d.default", real(2, 3, 6), [2], [2], [1], False, False, wrong=f"{POOL} / 2"),
    row("pad.default", real(2, 3), [1, 2], wrong="jnp.pad(self, ((0, 0), (2, 1)))"),
    row(
        "pad.default",
        real(2, 3),
        [1, 2],
        "reflect",
        wrong="jnp.pad(self, ((0, 0), (1, 2)), mode='symmetric')",
    ),
    row(
        "upsample_nearest1d.vec",
        real(2, 3, 5),
        [3],
        None,
        wrong="jax.image.resize(input, (2, 3, 3), 'nearest')",
    ),
    row(
        "upsample_bicubic2d.vec",
        real(2, 3, 5, 4),
        [7, 7],
        False,
        None,
        wrong="jax.image.resize(input, (2, 3, 7, 7), 'cubic')",
    ),
    row(
        "upsample_linear1d.vec",
        real(2, 3, 5),
        [2],
        False,
        None,
        wrong="jax.image.resize(input, (2, 3, 2), 'linear')",
    ),
]


@table(CONVOLUTIONS, POOLS, PADS, RESIZED, drawn(), MISTAKES)
def test_values_gradients_and_dtypes_are_those_of_torch(row):
    row.check()
