"""Rotary positions by their definition: pairs as complex numbers, in NumPy and float64."""

import jax.numpy as jnp
import numpy as np

B, T, S, N, K, H, DIM, D = 2, 5, 11, 6, 3, 14, 10, 13
BASE = 100.0
U = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
POSITIONS = np.array([[0, 1, 7, 40, 2**20], [3, 2, 5, 1, 0]])


def drawn(*shape, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def by_definition(x_BTNH, positions, rotary, frequencies=None):
    """Pairs as complex numbers, times exp(i · position · frequency); and their magnitudes."""
    x = np.array(x_BTNH, np.float64)
    dim = x.shape[-1] if rotary.dim is None else rotary.dim
    m = np.arange(dim // 2)
    frequencies = rotary.base ** (-2 * m / dim) if frequencies is None else frequencies
    real, imaginary = (2 * m, 2 * m + 1) if rotary.interleaved else (m, m + dim // 2)
    angles = np.broadcast_to(positions, x.shape[:2])[..., None, None] * frequencies
    z = (x[..., real] + 1j * x[..., imaginary]) * np.exp(1j * angles)
    size = np.abs(x)
    out = x.copy()
    out[..., real], out[..., imaginary] = z.real, z.imag
    size[..., real] = size[..., imaginary] = np.abs(z)
    return out, size


def worst(got, want, budget):
    got = np.asarray(got).astype(np.float64)
    assert got.shape == want.shape
    return float(np.where(np.isfinite(got), np.abs(got - want) / budget, np.inf).max())
