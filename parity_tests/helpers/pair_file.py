"""A user's file with pairs, right and wrong, for the commands that read one."""

PAIRS = """
import os
import sys
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from jax_attn import parity
from jax_attn.transfer import Layout, linear, load, row


class Port(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(np.zeros((5, 7), np.float32))

    def __call__(self, x):
        return jnp.tanh(x @ self.kernel[...])


class Reference(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(5, 7, bias=False)

    def forward(self, x):
        return torch.tanh(self.linear(x))


TABLE = Layout(row("linear.weight", "kernel", linear))


def right():
    torch.manual_seed(0)
    reference, port = Reference(), Port()
    load(port, reference.state_dict(), TABLE)
    x = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    return parity.Pair(reference, port, {"x": x}, layout=TABLE)


def wrong():
    return replace(right(), port_call=lambda module, x: 1.125 * module(x))


def doubtful():
    x = np.ones((3, 5), np.float32)
    x[1, 2] = np.nan
    return replace(right(), inputs={"x": x})


def noisy():
    print("made by the user")
    os.write(1, b"and by a process of theirs")
    return right()


def in_dtype(dtype):
    pair = right()
    pair.reference.to(getattr(torch, dtype))
    pair.port.kernel = nnx.Param(pair.port.kernel[...].astype(dtype))
    return pair


def training():
    pair = right()
    batch = {**pair.inputs, "target": np.ones((3, 7), np.float32)}
    return parity.TrainingPair(
        pair.reference, pair.port, [batch], layout=TABLE, loss="mse", steps=3,
        optimizer=lambda module: torch.optim.SGD(module.parameters(), 0.125),
    )


def raises():
    raise KeyError("no such weight")


def nothing():
    pass


def needs_transformers():
    import transformers.models.absent_in_tests


def needs_another():
    import a_package_of_nobody


def fails_forward():
    return replace(right(), port_call=failing)


def failing(module, x):
    raise RuntimeError("the port's own")


def leaves_forward():
    return replace(right(), reference_call=lambda module, x: sys.exit(0))


class Leaving(BaseException):
    pass  # as pytest's outcomes are: no Exception


def leaves():
    raise Leaving("made nothing")


def needs_too_much():
    raise MemoryError("no room for 8 TB")


def leaves_port():
    return replace(right(), port_call=leaving)


def leaves_reference():
    return replace(right(), reference_call=leaving)


def leaving(module, x):
    raise Leaving("gave nothing")


class Own(parity.Pair):
    def __init__(self, *given):
        if given:
            super().__init__(*given)


def own():
    pair = right()
    return Own(pair.reference, pair.port, pair.inputs)


def own_without_fields():
    return Own()


def lazy():
    pair = right()
    pair.reference.linear = torch.nn.LazyLinear(7)
    return pair


def no_optimizer():
    return replace(training(), optimizer=lambda module: None)


def wrong_type():
    return replace(right(), layout="a table")
"""
