"""Two mappings to arrays, the same to the bit."""

from collections.abc import Mapping

from jax_attn.transfer import as_numpy


def assert_same(got: Mapping, want: Mapping) -> None:
    """The same names, dtypes, shapes and bits; NumPy, JAX or torch."""
    assert got.keys() == want.keys()
    for name in want:
        made, expected = as_numpy(got[name]), as_numpy(want[name])
        assert (made.dtype, made.shape) == (expected.dtype, expected.shape), name
        assert made.tobytes() == expected.tobytes(), name
