"""The default epsilon of flax's norms is 1e-6, that of torch's is 1e-5."""

import numpy as np
import torch
from flax import nnx

x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
theirs = torch.nn.LayerNorm(8)(torch.from_numpy(x)).detach().numpy()
for words in ({}, {"epsilon": 1e-5}):
    ours = np.asarray(nnx.LayerNorm(8, rngs=nnx.Rngs(0), **words)(x))
    print(words, "largest difference:", np.abs(ours - theirs).max())
