"""JAX's x64 mode, without which float64 is narrowed silently."""

import contextlib
from collections.abc import Iterator

import jax
import numpy as np


def x64_is_on() -> bool:
    """Whether JAX keeps float64."""
    return jax.dtypes.canonicalize_dtype(np.float64) == np.float64


@contextlib.contextmanager
def x64_for(dtype: str) -> Iterator[None]:
    """JAX's x64 mode where `dtype` needs it, and only there."""
    with jax.enable_x64(dtype == "float64"):
        yield
