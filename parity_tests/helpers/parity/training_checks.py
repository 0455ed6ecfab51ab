"""For the tests of check_training: two optimizers, and a check of one linear layer."""

from torch.optim import SGD, AdamW

from jax_attn import parity, transfer
from jax_attn.selfcheck.training_bugs.cases import batches, layers


def sgd(module):
    return SGD(module.parameters(), 0.1, momentum=0.9)


def adamw(module):
    return AdamW(module.parameters(), 0.01)


def linear_check(**changed):
    reference, port = layers("float32")
    arguments = {"reference": reference, "port": port, "batches": batches(), "optimizer": sgd}
    arguments |= {"layout": transfer.LINEAR, "loss": "mse", "steps": 1}
    return parity.check_training(
        **(arguments | {"port_call": lambda module, input: module(input)} | changed)
    )
