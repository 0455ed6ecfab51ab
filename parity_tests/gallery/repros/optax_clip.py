"""torch divides by the norm plus 1e-6, optax by the norm; printed: the clipped over the limit."""

import jax.numpy as jnp
import optax
import torch

for norm in (1.0, 1e-3, 1e-5):
    w = torch.nn.Parameter(torch.zeros(1))
    w.grad = torch.tensor([2 * norm])
    torch.nn.utils.clip_grad_norm_([w], norm)
    clipped, _ = optax.clip_by_global_norm(norm).update(jnp.array([2 * norm]), optax.EmptyState())
    print(f"limit {norm:g}: torch {w.grad.item() / norm:.6f} optax {float(clipped[0]) / norm:.6f}")
