"""What the tests of emulated matrix units share: operands, their rounding, and error bounds."""

import jax.numpy as jnp
import numpy as np

T, D, H = 5, 13, 7  # (T, D) @ (D, H)
U32 = 2.0**-24


def operands(dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((T, D)).astype(dtype), rng.standard_normal((D, H)).astype(dtype)


def rounded(x: np.ndarray, bits: int) -> np.ndarray:
    """float64: x to the nearest with `bits` explicit mantissa bits, ties to even."""
    mantissa, exponent = np.frexp(x.astype(np.float64))
    return np.ldexp(np.rint(np.ldexp(mantissa, bits + 1)), exponent - bits - 1)


def accumulation_bound(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Products of numbers of at most 12 significant bits are exact in float32; adding D of
    them errs by at most D·u of their absolute sum, in whatever order (Higham, §4.2)."""
    return D * U32 * (np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64))


def excess(got, want, bound) -> float:
    """The largest error as a multiple of its bound: at most 1 is as it should be."""
    return float(np.max(np.abs(np.asarray(got, np.float64) - want) / bound))


def product(a, b):
    return jnp.matmul(a, b)
