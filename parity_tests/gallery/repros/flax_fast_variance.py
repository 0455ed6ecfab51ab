"""flax's default variance, the mean of squares less the square of the mean, loses digits."""

import numpy as np
from flax import nnx

x = (np.random.default_rng(0).standard_normal((3, 8)) + 30).astype(np.float32)
y = x.astype(np.float64)
exact = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-5)
for fast in (True, False):
    norm = nnx.LayerNorm(8, epsilon=1e-5, use_fast_variance=fast, rngs=nnx.Rngs(0))
    print("use_fast_variance:", fast, "largest error:", np.abs(norm(x) - exact).max())
