"""A linear layer with its port, for golden references that are used in many ways."""

from flax import nnx

ROWS, IN, OUT = 3, 5, 7


class Up(nnx.Module):
    def __init__(self, bias=True):
        self.up = nnx.Linear(IN, OUT, use_bias=bias, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.up(x)
