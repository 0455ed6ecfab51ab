"""torch keeps the unbiased variance of a batch, flax the biased one; momentum is 1 - torch's."""

import numpy as np
import torch
from flax import nnx

x = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
theirs = torch.nn.BatchNorm1d(3).train()
theirs(torch.from_numpy(x))
for momentum in (0.9, 0.99):
    ours = nnx.BatchNorm(3, momentum=momentum, use_running_average=False, rngs=nnx.Rngs(0))
    ours(x)
    mean = np.asarray(ours.mean[...]) / theirs.running_mean.numpy()
    print("momentum", momentum, "mean, flax/torch:", mean[0], "kept variance:", ours.var[0])
print("torch's variance:", theirs.running_var[0].item(), "of a batch's", x[:, 0].var(ddof=1))
