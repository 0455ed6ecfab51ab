"""A bias's gradient, which JAX adds up in its own dtype: how XLA sums, and that ports pass."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jax_attn import parity
from jax_attn.parity.judge.compare import Verdict
from jax_attn.parity.run.modes.sums import xla_windows
from jax_attn.transfer import Layout, conv, load, row

SIZES = {
    "one short axis": (13,),
    "one long axis": (256,),
    "two passes over one axis": (4096,),
    "two axes, one long": (4, 64),
    "short axes": (2, 5, 7, 9),
    "long axes": (40, 40),
}


@pytest.mark.parametrize("name", SIZES)
def test_windows_are_those_of_the_compiled_program(name):
    *sizes, D = *SIZES[name], 3

    def gradient(bias, cotangent):
        (of_bias,) = jax.vjp(lambda b: b + jnp.zeros((*sizes, D), b.dtype), bias)[1](cotangent)
        return of_bias

    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((D,), (*sizes, D))]
    cpu = jax.jit(gradient, backend="cpu")
    text = cpu.lower(*shapes).compile().as_text()
    found = [
        np.prod([*map(int, size.split("x"))]) for size in re.findall(r"window={size=(\S+) ", text)
    ]
    windows, last = xla_windows(sizes)
    assert sorted(found) == sorted(windows)
    assert last == math.prod(sizes) if not windows else last <= 32


CONVOLUTIONS = {
    "1-D": (torch.nn.Conv1d, (2, 4, 17), 1),
    "2-D": (torch.nn.Conv2d, (2, 4, 8, 11), 1),
    "2-D, strided": (torch.nn.Conv2d, (2, 4, 8, 11), 2),
    "3-D, strided": (torch.nn.Conv3d, (1, 4, 5, 3, 7), 2),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_flaxs_own_convolution_passes(name, dtype):
    kind, shape, stride = CONVOLUTIONS[name]
    axes = len(shape) - 2
    torch.manual_seed(0)
    reference = kind(4, 6, 3, stride, 1).to(getattr(torch, dtype)).eval()
    port = nnx.Conv(
        4,
        6,
        (3,) * axes,
        strides=stride,
        padding=1,
        dtype=dtype,
        param_dtype=dtype,
        rngs=nnx.Rngs(0),
    )
    layout = Layout(row("bias", "bias"), row("weight", "kernel", conv))
    load(port, reference.state_dict(), layout)
    last, first = (0, *range(2, axes + 2), 1), (0, axes + 1, *range(1, axes + 1))
    result = parity.check(
        reference,
        port,
        (np.random.default_rng(0).standard_normal(shape),),
        layout=layout,
        port_call=lambda module, x: module(x.transpose(last)).transpose(first),
        dtype=dtype,
        transforms=("jit",),
    )
    assert result.verdict is Verdict.PASS, str(result)
