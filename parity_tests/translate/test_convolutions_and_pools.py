"""Rules of convolutions, pools, padding and resizing, beside torch's operators."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import max_pool2d

from helpers.beside_torch import assert_caught, check, compare, draws, row, with_varying

real, whole = draws(2)

CONVOLUTIONS = [
    row(
        "aten.conv1d.default",
        *(real(2, 3, 11), real(5, 3, 3)),
        text="jax.lax.conv_general_dilated(x0, x1, (1,), 'VALID')",
    ),
    row("aten.conv1d.default", real(3, 11), real(5, 3, 3), real(5), [2], [1]),
    row(
        "aten.conv2d.default",
        *(real(2, 6, 11, 7), real(4, 3, 3, 2), real(4), [2, 1], [1, 0], [1, 2], 2),
    ),
    row("aten.conv2d.padding", real(2, 3, 11, 7), real(5, 3, 4, 3), None, [1, 1], "same", [2, 1]),
    row("aten.conv3d.default", real(2, 3, 5, 7, 6), real(2, 3, 2, 3, 1), real(2)),
    row("aten.conv_transpose1d.default", real(2, 3, 5), real(3, 4, 3), real(4), [2], [1], [1]),
    row(
        "aten.conv_transpose2d.input",
        *(real(2, 6, 5, 4), real(6, 2, 3, 2), real(4), [2, 3], [1, 3], [1, 2], 2, [2, 1]),
    ),
    row(
        "aten.conv_transpose2d.input",
        *(real(2, 3, 5, 4), real(3, 2, 3, 2), real(2), [2, 3], [1, 0], [1, 2], 1, [1, 2]),
    ),
    row("aten.conv_transpose3d.input", real(3, 5, 4, 2), real(3, 2, 3, 2, 2)),
    row(
        "aten.convolution.default",
        *(real(2, 3, 5, 4), real(3, 2, 3, 2), None, [2, 2], [0, 0], [1, 1], True, [0, 0], 1),
    ),
    row(
        "aten.convolution.default",
        *(real(2, 3, 5, 4), real(2, 3, 3, 2), None, [2, 2], [0, 0], [1, 1], False, [0, 0], 1),
    ),
]
UNPOOLED = max_pool2d(real(2, 3, 8, 6), 2, return_indices=True)
POOLS = [
    row(
        "aten.max_pool1d.default",
        *(real(2, 3, 11), [3]),
        text="jax.lax.reduce_window(x0, -jnp.inf, jax.lax.max, (1, 1, 3), (1, 1, 3), 'VALID')",
    ),
    row("aten.max_pool2d.default", real(2, 3, 5, 5).round(), [3, 3], [2, 2], [1, 1]),
    row("aten.max_pool2d.default", real(2, 3, 11, 8).round(), [3, 2], [2, 2], [1, 1], [1, 2], True),
    row("aten.max_pool2d_with_indices.default", real(3, 9, 8).round(), [3, 2], [2, 3], 1, 1, True),
    row("aten.max_pool2d_with_indices.default", real(3, 9, 8).round(), [3, 2], [2, 3], 1, [1, 2]),
    row("aten.max_pool3d.default", real(2, 3, 7, 6, 5), [2]),
    row("aten.avg_pool1d.default", real(2, 3, 11), [3], [2], [1]),
    row("aten.avg_pool2d.default", real(2, 3, 11, 8), [3, 2], [2, 3], [1, 1], True),
    row("aten.avg_pool2d.default", real(2, 3, 11, 8), [3, 2], [2, 3], [1, 0], True, False),
    row("aten.avg_pool2d.default", real(2, 3, 11, 8), [3, 2], [], [0, 0], True),
    row("aten.avg_pool2d.default", real(2, 3, 10, 8), [3, 2], [2, 3], [1, 1], True),
    row("aten.avg_pool2d.default", real(2, 3, 11, 8), [3, 2], [2, 3], [1, 0], False, True, 5),
    row("aten.avg_pool3d.default", real(3, 5, 6, 7), [2, 3, 3], [2, 1, 2], [1, 0, 1], False, False),
    row(
        "aten.adaptive_avg_pool2d.default",
        *(real(2, 3, 7, 6), [1, 1]),
        text="x0.mean((-2, -1), keepdims=True)",
    ),
    row(
        "aten.adaptive_avg_pool2d.default",
        *(real(2, 3, 9, 6), [3, 2]),
        text="x0.reshape(*x0.shape[:-2], 3, 3, 2, 3).mean((-3, -1))",
    ),
    row("aten.adaptive_avg_pool1d.default", real(2, 3, 9), [3]),
    row("aten.adaptive_avg_pool2d.default", real(2, 3, 7, 6), [3, 4]),
    row("aten.adaptive_avg_pool2d.default", real(2, 3, 3, 2), [7, 7]),
    row("aten.adaptive_max_pool2d.default", real(2, 3, 6, 6).round(), [2, 1]),
    row("aten.adaptive_max_pool2d.default", real(2, 3, 7, 6).round(), [3, 4]),
    row("aten.max_unpool2d.default", *UNPOOLED, [8, 6]),
    row("aten.im2col.default", real(2, 3, 7, 8), [2, 3], [1, 2], [1, 0], [2, 1]),
    row("aten.im2col.default", real(3, 7, 8), [2, 3], [1, 1], [1, 0], [2, 1]),
    row("aten.col2im.default", real(2, 18, 16), [7, 8], [2, 3], [1, 2], [1, 0], [2, 1]),
]
PADS = [
    row("aten.pad.default", real(2, 3, 5), [1, 2], text="jnp.pad(x0, ((0, 0), (0, 0), (1, 2)))"),
    row("aten.pad.default", real(7), [1, 2], text="jnp.pad(x0, (1, 2))"),
    row("aten.pad.default", real(2, 3, 5), [-1, 2, 0, -2], "constant", -1.5),
    row("aten.pad.default", whole(5, 2, 3, 5), [-1, -2], text="x0[..., 1:-2]"),
    row("aten.pad.default", whole(5, 2, 3, 5), [1, 2], "constant", 3.0),
    row("aten.pad.default", whole(5, 2, 3, 5) > 2, [1, 2], "constant", 1.0),
    row("aten.pad.default", real(2, 3, 5), [1, 2], "replicate"),
    row("aten.pad.default", real(2, 3, 5), [1, 2], "circular"),
    row("aten.reflection_pad2d.default", real(2, 3, 5, 4), [1, 2, 3, 0]),
    row("aten.constant_pad_nd.default", real(2, 3, 5, 4), [1, 2, 3, 0], 2),
]
RESIZED = [
    row(
        "aten.upsample_nearest2d.vec",
        *(real(2, 3, 5, 4), None, [2.0, 2.0]),
        text="x0.repeat(2, axis=-2).repeat(2, axis=-1)",
    ),
    row("aten.upsample_nearest1d.default", real(2, 3, 5), [7]),
    row("aten.upsample_nearest3d.vec", real(2, 3, 3, 4, 2), None, [1.7, 1.5, 2.0]),
    row("aten._upsample_nearest_exact2d.vec", real(2, 3, 5, 4), None, [1.7, 1.7]),
    row("aten._upsample_nearest_exact2d.default", real(2, 3, 5, 4), [7, 3]),
    row(
        "aten.upsample_bilinear2d.vec",
        *(real(2, 3, 5, 4), [7, 3], False, None),
        text="jax.image.resize(x0, (*x0.shape[:-2], 7, 3), 'linear', antialias=False)",
    ),
    row("aten.upsample_bilinear2d.vec", real(2, 3, 5, 4), None, False, [1.7, 1.7]),
    row("aten.upsample_bilinear2d.default", real(2, 3, 5, 4), [7, 1], True),
    row("aten.upsample_linear1d.default", real(2, 3, 5), [7], True),
    row("aten.upsample_trilinear3d.vec", real(2, 3, 3, 4, 2), [6, 5, 1], False, None),
    row("aten.upsample_bicubic2d.vec", real(2, 3, 5, 4), [10, 3], False, None),
    row("aten.upsample_bicubic2d.vec", real(2, 3, 5, 4), None, False, [1.7, 1.7]),
    row("aten.upsample_bicubic2d.default", real(2, 3, 5, 4), [7, 3], True),
    row("aten._upsample_bilinear2d_aa.default", real(2, 3, 5, 4), [3, 7], False),
    row("aten._upsample_bicubic2d_aa.vec", real(2, 3, 5, 4), [3, 7], False, None),
    *(
        row("aten.grid_sampler.default", real(2, 3, 5, 4), real(2, 7, 6, 2), mode, padding, align)
        for mode, padding, align in [
            *((0, padding, align) for padding in (0, 1, 2) for align in (False, True)),
            (1, 0, False),
            (1, 2, True),
        ]
    ),
    row("aten.grid_sampler.default", real(2, 3, 5, 4, 3), real(2, 2, 3, 5, 3), 0, 0, False),
    row("aten.affine_grid_generator.default", real(2, 2, 3), [2, 3, 5, 4], False),
    row("aten.affine_grid_generator.default", real(2, 3, 4), [2, 3, 5, 1, 3], True),
]


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "text"), [*CONVOLUTIONS, *POOLS, *PADS, *RESIZED]
)
def test_values_gradients_and_dtypes_are_those_of_torch(name, args, kwargs, text):
    check(name, args, kwargs, text)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(st.data())
def test_drawn_convolutions_and_pools(data):
    """Windows of any width, step, padding and dilation along one axis."""
    width = data.draw(st.integers(1, 4))
    stride = [data.draw(st.integers(1, 3))]
    dilation = data.draw(st.integers(1, 2))
    groups = data.draw(st.sampled_from([1, 2]))
    padding = [data.draw(st.integers(0, 3))]
    x = real(3, 4, dilation * (width - 1) + data.draw(st.integers(1, 5)))
    kernel = real(6, 4 // groups, width)
    compare("aten.conv1d.default", x, kernel, None, stride, padding, [dilation], groups)
    inside = [min(padding[0], width // 2)]
    ceil, counted = data.draw(st.booleans()), data.draw(st.booleans())
    compare("aten.avg_pool1d.default", x, [width], stride, inside, ceil, counted)
    compare("aten.max_pool1d.default", x.round(), [width], stride, inside, [1], ceil)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("aten.pad.default", (real(2, 3, 5), [-1, 2], "replicate")),
        ("aten._upsample_bilinear2d_aa.default", (real(2, 3, 5, 4), [3, 7], True)),
        ("aten.grid_sampler.default", (real(2, 3, 5, 4), real(2, 7, 6, 2), 2, 0, True)),
        ("aten.max_pool2d.default", (whole(9, 2, 3, 5, 4), [2, 2])),
    ],
)
def test_what_has_no_right_expression_is_refused(name, args):
    with pytest.raises(NotImplementedError):
        compare(name, *args)


@pytest.mark.parametrize(
    ("name", "args", "text"),
    [
        ("aten.pad.default", (real(2, 3), [1, 11]), "jnp.pad(self, ((0, 0), (1, T)))"),
        (
            "aten.adaptive_avg_pool2d.default",
            (real(2, 3, 11, 11), [3, 5]),
            "adaptive_avg_pool(self, (3, 5))",
        ),
        ("aten.upsample_nearest1d.vec", (real(2, 3, 11), None, [2.0]), "input.repeat(2, axis=-1)"),
        (
            "aten.upsample_nearest1d.vec",
            (real(2, 3, 5), [11], None),
            "upsample_nearest(input, (T,))",
        ),
        (
            "aten.upsample_linear1d.vec",
            (real(2, 3, 5), [11], False, None),
            "jax.image.resize(input, (*input.shape[:-1], T), 'linear', antialias=False)",
        ),
        (
            "aten.im2col.default",
            (real(11, 3, 5, 4), [2, 2], [1, 1], [0, 0], [1, 1]),
            "jax.lax.conv_general_dilated_patches(self, (2, 2), (1, 1), ((0, 0), (0, 0)), "
            "precision=jax.lax.Precision.HIGHEST).reshape(self.shape[0], 12, -1)",
        ),
    ],
)
def test_sizes_that_vary_are_named(name, args, text):
    assert with_varying(11, name, *args) == text


CONV = "jax.lax.conv_general_dilated(input, weight, (1,), {})"
POOL = (
    "jax.lax.reduce_window(self, 0.0, jax.lax.add, (1, 1, 2), (1, 1, 2), ((0, 0), (0, 0), (1, 1)))"
)


@pytest.mark.parametrize(
    ("name", "wrong", "args"),
    [
        (
            "aten.conv1d.default",
            CONV.format("'SAME'"),
            (real(2, 3, 7), real(5, 3, 4), None, [1], [2]),
        ),
        (
            "aten.conv1d.default",
            CONV.format("((1, 1),)"),
            (real(2, 3, 7), real(5, 3, 3), real(5), [1], [1]),
        ),
        ("aten.avg_pool1d.default", f"{POOL} / 2", (real(2, 3, 6), [2], [2], [1], False, False)),
        ("aten.pad.default", "jnp.pad(self, ((0, 0), (2, 1)))", (real(2, 3), [1, 2])),
        (
            "aten.pad.default",
            "jnp.pad(self, ((0, 0), (1, 2)), mode='symmetric')",
            (real(2, 3), [1, 2], "reflect"),
        ),
        (
            "aten.upsample_nearest1d.vec",
            "jax.image.resize(input, (2, 3, 3), 'nearest')",
            (real(2, 3, 5), [3], None),
        ),
        (
            "aten.upsample_bicubic2d.vec",
            "jax.image.resize(input, (2, 3, 7, 7), 'cubic')",
            (real(2, 3, 5, 4), [7, 7], False, None),
        ),
        (
            "aten.upsample_linear1d.vec",
            "jax.image.resize(input, (2, 3, 2), 'linear')",
            (real(2, 3, 5), [2], False, None),
        ),
    ],
)
def test_a_mistake_is_caught(name, wrong, args):
    assert_caught(name, wrong, *args)


def test_equal_maxima_give_the_gradient_to_the_first():
    x = torch.zeros(2, 3, 4)
    compare("aten.max_pool1d.default", x, [2])
    assert_caught("aten.max_pool1d.default", "self.reshape(2, 3, 2, 2).max(-1)", x, [2])
