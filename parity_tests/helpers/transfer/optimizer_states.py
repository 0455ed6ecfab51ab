"""torch optimizers' state dicts after a step, optax states before one, and changes to them."""

import numpy as np
import optax
import torch

from helpers.transfer.optimizer_runs import LR, MOMENTUM, drawn, to_flax, torch_module

WEIGHTS = drawn(1, dtype=np.float32)
PARAMS = to_flax(WEIGHTS)
NAMES = list(WEIGHTS)


def stepped(kind, **options):
    """A torch optimizer's state dict after one step, its parameters in the order of NAMES."""
    module = torch_module(WEIGHTS).float()
    optimizer = kind([dict(module.named_parameters())[name] for name in NAMES], **options)
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer.state_dict()


ADAM = stepped(torch.optim.Adam)
SGD = stepped(torch.optim.SGD, lr=LR, momentum=MOMENTUM)
ADAM_STATE = optax.adam(LR).init(PARAMS)
SGD_STATE = optax.sgd(LR, MOMENTUM).init(PARAMS)


def keeping(change, of=0, here=ADAM):
    """A state dict, changed in what it keeps for one parameter; None leaves out."""
    kept = here["state"].get(of, {}) | change
    kept = {name: value for name, value in kept.items() if value is not None}
    return here | {"state": here["state"] | {of: kept}}


def having(here, **options):
    """A state dict with other options in its first group."""
    return here | {"param_groups": [here["param_groups"][0] | options]}
