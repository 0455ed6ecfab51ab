"""optax's nadam has a constant momentum, torch's one that a schedule raises."""

import jax.numpy as jnp
import optax
import torch

w = torch.nn.Parameter(torch.zeros(1))
theirs = torch.optim.NAdam([w], lr=0.1)
ours, x = optax.nadam(0.1), jnp.zeros(1)
state = ours.init(x)
for gradient in (3.0, 1.0, 1.0, 1.0):
    w.grad = torch.tensor([gradient])
    theirs.step()
    update, state = ours.update(jnp.array([gradient]), state, x)
    x = optax.apply_updates(x, update)
    print(f"gradient {gradient:g}, weight: torch {w.item():.4f} optax {float(x[0]):.4f}")
