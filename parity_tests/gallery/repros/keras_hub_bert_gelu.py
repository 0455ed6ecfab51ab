"""KerasHub's BERT takes GELU's approximation by tanh; transformers' takes GELU itself."""

import os

os.environ["KERAS_BACKEND"] = "jax"
import numpy as np
import torch
from keras_hub.src.models.bert.bert_backbone import gelu_approximate

x = np.linspace(-4, 4, 801, dtype=np.float32)
theirs, exact = np.asarray(gelu_approximate(x)), torch.nn.functional.gelu(torch.from_numpy(x))
print("largest difference:", np.abs(theirs - exact.numpy()).max())
