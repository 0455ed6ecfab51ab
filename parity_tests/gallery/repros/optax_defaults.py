"""Optimizers of one name have other defaults in torch and in optax."""

from inspect import signature

import optax
import torch

ROWS = (
    (optax.adamw, "weight_decay", torch.optim.AdamW, "weight_decay"),
    (optax.rmsprop, "decay", torch.optim.RMSprop, "alpha"),
    (optax.adagrad, "initial_accumulator_value", torch.optim.Adagrad, "initial_accumulator_value"),
    (optax.adagrad, "eps", torch.optim.Adagrad, "eps"),
)
for ours, own, theirs, other in ROWS:
    values = signature(ours).parameters[own].default, signature(theirs).parameters[other].default
    print(ours.__name__, own, "optax:", values[0], "torch:", values[1])
print("rmsprop eps within the root:", signature(optax.rmsprop).parameters["eps_in_sqrt"].default)
