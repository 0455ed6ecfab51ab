"""Why a kernel refuses a call of these shapes."""

import jax
import jax.numpy as jnp

from jax_attn.attention.call import checked_call


def refusals(kernel, *, B=2, T=130, H=8, Hv=None, dtype="bfloat16", mask=None, **options):
    shapes = (B, T, 2, H), (B, T, 2, H), (B, T, 2, Hv or H)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes]
    return kernel.refusals(checked_call("refusals", *arrays, mask, **options))
