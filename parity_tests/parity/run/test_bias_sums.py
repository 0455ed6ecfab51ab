"""A bias's gradient, which JAX adds up in its own dtype: how XLA sums."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_attn.parity.run.modes.sums import xla_windows

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
