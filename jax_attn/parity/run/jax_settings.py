"""Settings of JAX that hold while a port runs and are put back afterwards."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def x64_for(dtype: str) -> Iterator[None]:
    """JAX's x64 mode where `dtype` needs it, and only there."""
    with jax.enable_x64(dtype == "float64"):
        yield
