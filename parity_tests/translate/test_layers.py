"""Rules of norms, attention, recurrent layers, dropout and Fourier transforms, beside torch's."""

import inspect
import random

import jax
import jax.numpy as jnp
import pytest
import torch
import transformers.integrations.moe  # noqa: F401  (registers the operator of experts)

from helpers.rules.call import FLOAT32
from helpers.rules.rows import draws, row, table, written
from helpers.rules.varying import with_varying
from jax_attn.translate.rules.functions import fourier, indexing, pools, recurrent, resizing

real, whole = draws(3)
positive = real(3).exp()
RUNNING = (real(3), real(3), real(3), positive)
CHANNELS = real(2, 3, 7, 5)

NORMS = [
    row(
        "layer_norm.default",
        *(real(2, 3, 7), [7], real(7), real(7)),
        text="jax.nn.standardize(x0, epsilon=1e-05, algorithm='stable') * x1 + x2",
    ),
    row("layer_norm.default", real(2, 3, 7), [3, 7], real(3, 7), None, 1e-3),
    row("native_layer_norm.default", real(2, 3, 7), [3, 7], real(3, 7), None, 1e-3),
    row(
        "rms_norm.default",
        *(real(2, 3, 7), [7], real(7), 1e-6),
        text="x0 * jax.lax.rsqrt(jnp.mean(jnp.square(x0), -1, keepdims=True) + 1e-06) * x1",
    ),
    row("rms_norm.default", real(2, 3, 7), [3, 7]),
    row("_fused_rms_norm.default", real(2, 3, 7), [7], real(7), 1e-4),
    row("group_norm.default", real(2, 6, 7, 5), 3, real(6), real(6)),
    row("group_norm.default", real(2, 6), 2),
    row("native_group_norm.default", real(2, 6, 7, 5), real(6), real(6), 2, 6, 35, 3, 1e-5),
    row("instance_norm.default", CHANNELS, *RUNNING[:2], None, None, True, 0.1, 1e-5, False),
    row("instance_norm.default", CHANNELS, *RUNNING, False, 0.1, 1e-5, False),
    row(
        "batch_norm.default",
        *(real(5, 3), *RUNNING, False, 0.1, 1e-5, False),
        text="jax.nn.standardize(x0, mean=x3, variance=x4, epsilon=1e-05) * x1 + x2",
    ),
    row("batch_norm.default", CHANNELS, None, None, *RUNNING[2:], False, 0.1, 1e-5, False),
    row("batch_norm.default", real(5, 3), *[None] * 4, True, 0.1, 1e-5, False),
    *(
        row(
            "_native_batch_norm_legit_functional.default",
            CHANNELS,
            *RUNNING,
            training,
            0.2,
            1e-5,
        )
        for training in (True, False)
    ),
    row("_native_batch_norm_legit.no_stats", CHANNELS, None, None, True, 0.2, 1e-5),
    row("_native_batch_norm_legit_no_training.default", CHANNELS, *RUNNING, 0.2, 1e-5),
    row("_weight_norm.default", real(5, 3, 2), real(1, 1, 2), 2),
    row("_weight_norm.default", real(5, 3, 2), real(), -1),
    row(
        "_trilinear.default",
        real(2, 3),
        real(5, 3, 4),
        real(2, 4),
        [1, 3],
        [0],
        [1, 2],
        [2, 3],
    ),
]

SDPA = "scaled_dot_product_attention.default"
QUERY, KEY, VALUE = real(2, 3, 5, 4), real(2, 3, 7, 4), real(2, 3, 7, 4)
SOME = real(2, 1, 5, 7) > -1
SOME[1, 0, 2] = False  # a row without a key
CALL = (
    "jax.nn.dot_product_attention(x0.swapaxes({0}), x1.swapaxes({0}), x2.swapaxes({0}){1})"
    ".swapaxes({0})"
)
# jax.nn.dot_product_attention computes its softmax in float32, the products in the inputs' dtype.
ATTENTION = [
    row(SDPA, QUERY, KEY, VALUE, text=CALL.format("1, 2", ""), roundoff=FLOAT32),
    row(
        SDPA,
        *(QUERY, KEY, VALUE, None, 0.0, True),
        text=CALL.format("1, 2", ", scale=0.3, is_causal=True"),
        scale=0.3,
        roundoff=FLOAT32,
    ),
    row(SDPA, real(2, 6, 5, 4), KEY, VALUE, SOME, enable_gqa=True, roundoff=FLOAT32),
    row(
        SDPA,
        *(QUERY, KEY, VALUE, real(5, 7)),
        text=CALL.format("1, 2", ", bias=x3"),
        roundoff=FLOAT32,
    ),
    row(SDPA, QUERY, KEY, VALUE, real(2, 1, 1, 7) > -1, roundoff=FLOAT32),
    row(
        SDPA,
        *(QUERY, KEY, VALUE, SOME),
        text="jnp.where(x3.any(-1, keepdims=True).swapaxes(-3, -2), "
        "jax.nn.dot_product_attention(x0.swapaxes(1, 2), x1.swapaxes(1, 2), x2.swapaxes(1, 2), "
        "mask=x3), 0).swapaxes(1, 2)",
        roundoff=FLOAT32,
    ),
    row(SDPA, QUERY, KEY, VALUE, SOME[1, 0], roundoff=FLOAT32),
    row(SDPA, *(QUERY[0], KEY[0], VALUE[0]), text=CALL.format("0, 1", ""), roundoff=FLOAT32),
    row(SDPA, QUERY[0], KEY[0], VALUE[0], real(3, 5, 7) > -1, roundoff=FLOAT32),
    row(
        SDPA,
        *(QUERY, KEY, real(2, 3, 7, 2), real(2, 3, 5, 7)),
        text="jax.nn.softmax(x0 @ x1.swapaxes(-1, -2) / x0.shape[-1] ** 0.5 + x3) @ x2",
    ),
    row(SDPA, QUERY, KEY, real(2, 3, 7, 2), SOME, scale=0.7),
    row(SDPA, real(2, 6, 5, 4), KEY, real(2, 3, 7, 2), None, 0.0, True, enable_gqa=True),
    row(SDPA, real(5, 4), real(7, 4), real(7, 4)),
    row(
        "transformers.grouped_mm_fallback.default",
        *(real(11, 3), real(4, 3, 5), torch.tensor([2, 2, 9, 11], dtype=torch.int32)),
        text="jax.lax.ragged_dot(x0, x1, jnp.diff(x2, prepend=0))",
    ),
]


def weights(inputs, hidden, gates, layers, directions, biases, projected=None):
    """Draw the weights of recurrent layers in torch's order, as small as torch draws them."""
    shapes = []
    out = projected or hidden
    for layer in range(layers):
        width = out * directions if layer else inputs
        each = [(gates * hidden, width), (gates * hidden, out)]
        each += [(gates * hidden,)] * 2 if biases else []
        each += [(projected, hidden)] if projected else []
        shapes += each * directions
    return [real(*shape) / hidden**0.5 for shape in shapes]


RECURRENT = [
    row(
        "lstm.input",
        *(real(5, 2, 3), [real(1, 2, 7), real(1, 2, 7)], weights(3, 7, 4, 1, 1, True)),
        *(True, 1, 0.0, False, False, False),
        text="recurrent(lstm_cell, x0, (x1, x2), (x3, x4, x5, x6))",
    ),
    row(
        "lstm.input",
        *(real(2, 5, 3), [real(4, 2, 7), real(4, 2, 7)], weights(3, 7, 4, 2, 2, False)),
        *(False, 2, 0.5, False, True, True),
    ),
    row(
        "lstm.input",
        *(real(2, 5, 3), [real(2, 2, 4), real(2, 2, 7)], weights(3, 7, 4, 1, 2, True, 4)),
        *(True, 1, 0.0, True, True, True),
    ),
    row(
        "gru.input",
        *(real(2, 5, 3), real(2, 2, 7), weights(3, 7, 3, 1, 2, True)),
        *(True, 1, 0.0, False, True, True),
    ),
    row(
        "rnn_tanh.input",
        *(real(2, 5, 3), real(1, 2, 7), weights(3, 7, 1, 1, 1, True)),
        *(True, 1, 0.0, False, False, True),
    ),
    row(
        "rnn_relu.input",
        *(real(2, 5, 3), real(1, 5, 7), weights(3, 7, 1, 1, 1, False)),
        *(False, 1, 0.0, False, False, False),
    ),
    row(
        "lstm_cell.default",
        *(real(2, 3), [real(2, 7), real(2, 7)], *weights(3, 7, 4, 1, 1, True)),
    ),
    row("gru_cell.default", real(2, 3), real(2, 7), *weights(3, 7, 3, 1, 1, True)),
    row("rnn_tanh_cell.default", real(2, 3), real(2, 7), *weights(3, 7, 1, 1, 1, False)),
]

RANDOM = [
    row("dropout.default", real(5, 3), 0.5, False, text="x0"),
    row("native_dropout.default", real(5, 3), 0.5, False),
    row("alpha_dropout.default", real(5, 3), 0.5, False, text="x0"),
    row("rrelu.default", real(5, 3).round()),
]

SPECTRUM = torch.complex(real(2, 5, 7), real(2, 5, 7))
FOURIER = [
    row("fft_fft.default", real(2, 7), text="jnp.fft.fft(x0)"),
    row("fft_ifft.default", SPECTRUM, 6, 1, "ortho"),
    row("fft_rfft.default", real(2, 5, 7), 9),
    row("fft_irfft.default", SPECTRUM),
    row("fft_hfft.default", SPECTRUM),
    row("fft_ihfft.default", real(2, 7), None, -1, "forward"),
    row("fft_fft2.default", SPECTRUM, [4, -1], [0, 2], "forward"),
    row("fft_fftn.default", SPECTRUM, [3, 4]),
    row("fft_rfft2.default", real(2, 5, 7), text="jnp.fft.rfft2(x0)"),
    row("fft_irfftn.default", SPECTRUM),
    row("fft_fft.default", whole(5, 2, 7), roundoff=FLOAT32),
    row("fft_fftshift.default", real(2, 5, 7), [1]),
    row("fft_ifftshift.default", real(2, 5, 7)),
    row("fft_fftfreq.default", 8, 0.25),
    *(row("_fft_r2c.default", real(2, 5, 7), [1, 2], norm, True) for norm in (0, 2)),
    *(row("_fft_c2c.default", SPECTRUM, [1, 2], norm, forward) for norm, forward in
      [(0, False), (1, True), (2, True)]),
    row("_fft_c2r.default", SPECTRUM, [0, 2], 2, 12),
    row("stft.default", real(2, 31), 8, 3, 6, real(6), False, None, True),
    row("stft.center", real(31), 8, 2, None, real(8), True, "reflect", True, False, True),
    row("istft.default", SPECTRUM, 8, 2, None, real(8).exp()),
    row("istft.default", SPECTRUM[0], 8, 2, 8, real(8).exp(), False, True, None, 19),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def drawn():
    """Any sizes, masks of any of the shapes that broadcast, and any number of heads a group."""
    rng = random.Random(1)
    for _ in range(8):
        batch, heads, queries, keys = (rng.randint(1, 5) for _ in range(4))
        groups = rng.randint(1, 3)
        mask = [rng.choice([1, size]) for size in (batch, heads * groups, queries, keys)]
        mask = real(*mask[rng.randint(0, 2) :])
        yield row(
            SDPA,
            *(real(batch, heads * groups, queries, 4), real(batch, heads, keys, 4)),
            *(real(batch, heads, keys, 4), mask if rng.random() < 0.5 else mask > 0),
            enable_gqa=True,
            roundoff=FLOAT32,
        )


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("dropout.default", (real(5, 3), 0.5, True)),
        ("multinomial.default", (real(5, 3).sigmoid(), 2)),
        ("batch_norm.default", (CHANNELS, *RUNNING, True, 0.1, 1e-5, False)),
        ("istft.default", (SPECTRUM, 5, 2, None, torch.ones(5), True, False, False)),
        (
            "rnn_relu.input",
            (
                real(5, 2, 3),
                real(2, 2, 7),
                weights(3, 7, 1, 2, 1, False),
                False,
                2,
                0.5,
                True,
                False,
                False,
            ),
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_has_no_right_expression_is_refused(name, args):
    with pytest.raises(NotImplementedError):
        written(name, *args)


def test_sizes_that_vary_are_named():
    text = with_varying("group_norm.default", real(11, 6, 5), 3)
    assert "input.reshape(input.shape[0], 3, -1)" in text
    sizes = (real(2, 6, 11, 4), real(2, 3, 11, 4), real(2, 3, 11, 4))
    assert "swapaxes" in with_varying(SDPA, *sizes, enable_gqa=True)
    assert with_varying("fft_rfft.default", real(11), 11) == "jnp.fft.rfft(self, T)"


PLAIN = (
    "jax.nn.dot_product_attention(query.swapaxes(1, 2), key.swapaxes(1, 2), value.swapaxes(1, 2){})"
    ".swapaxes(1, 2)"
)
NORM = "jax.nn.standardize(input, epsilon={}, algorithm='stable') * weight"


MISTAKES = [
    # torch keeps the unbiased variance of the batch.
    row(
        "_native_batch_norm_legit_functional.default",
        *(CHANNELS, *RUNNING, True, 0.2, 1e-5),
        wrong=lambda: (
            *("input", "input", "input", "running_mean"),
            "0.8 * running_var + 0.2 * input.var((0, 2, 3))",
        ),
    ),
    row(SDPA, QUERY, KEY, VALUE, SOME, wrong=PLAIN.format(", mask=~attn_mask"), roundoff=FLOAT32),
    row(SDPA, QUERY, KEY, VALUE, None, 0.0, True, wrong=PLAIN.format(""), roundoff=FLOAT32),
    row(SDPA, QUERY, KEY, VALUE, SOME, wrong=PLAIN.format(", mask=attn_mask"), roundoff=FLOAT32),
    row(SDPA, QUERY, KEY, VALUE, wrong=PLAIN.format(", scale=0.501"), roundoff=FLOAT32),
    row(
        SDPA,
        QUERY,
        KEY,
        VALUE,
        real(5, 7),
        wrong=PLAIN.format(", bias=0.99 * attn_mask"),
        roundoff=FLOAT32,
    ),
    row("layer_norm.default", real(2, 7), [7], real(7), wrong=NORM.format("1e-6")),
    row(
        "batch_norm.default",
        real(5, 3),
        None,
        None,
        *RUNNING[2:],
        False,
        0.1,
        1e-5,
        False,
        wrong="jax.nn.standardize(input, mean=running_mean, variance=running_var**0.5)",
    ),
    row(
        "lstm_cell.default",
        real(2, 3),
        [real(2, 7), real(2, 7)],
        *weights(3, 7, 4, 1, 1, True),
        wrong="lstm_cell(input @ w_ih.T, hx, w_hh, b_hh)",
    ),
    row("rrelu.default", real(9).round(), wrong="jax.nn.leaky_relu(self, (lower + upper) / 2)"),
    row("fft_ifft.default", SPECTRUM, wrong="jnp.fft.fft(self)"),
]


def test_functions_that_files_contain_stand_alone():
    """A file imports jax, jax.numpy and jax.Array for them, nothing else."""
    functions = {
        name: function
        for module in (fourier, indexing, pools, recurrent, resizing)
        for name, function in vars(module).items()
        if inspect.isfunction(function)
    }
    assert "recurrent" in functions
    for name, function in functions.items():
        used = inspect.getclosurevars(function).globals.keys()
        assert used <= {"jax", "jnp", "Array", *functions}, name
        exec(inspect.getsource(function), {"jax": jax, "jnp": jnp, "Array": jax.Array})


@table(NORMS, ATTENTION, RECURRENT, RANDOM, FOURIER, drawn(), MISTAKES)
def test_values_gradients_and_dtypes_are_those_of_torch(row):
    row.check()
