"""A few tensors of several dtypes, and where the tests write them."""

import ml_dtypes  # noqa: F401  NumPy's bfloat16
import numpy as np


def drawn(seed, *shape, dtype="float32"):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


A = drawn(0, 3, 5)
# 60, 28, 26, 0 and 8 bytes
TENSORS = {
    "a": A,
    "b": drawn(1, 7),
    "c": drawn(2, 13, dtype="bfloat16"),
    "none": drawn(3, 0, 5),
    "one": drawn(4, dtype="float64"),
}


def bits(tensors):
    return {key: (a.dtype.name, a.shape, a.tobytes()) for key, a in tensors.items()}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def model(folder):
    return folder / "model.safetensors"
