"""Arrays of numbers, as the source writes them."""

import numpy as np
import torch

from jax_attn.translate.rules.expression import DTYPES


def regular(value: torch.Tensor) -> str | None:
    """Write an array that is one number throughout, or that counts; None if it is neither."""
    dtype, shape = f"jnp.{DTYPES[value.dtype]}", tuple(value.shape)
    flat = value.detach().reshape(-1)
    if flat.numel() > 1 and bool((flat == flat[0]).all()):
        return f"jnp.full({shape}, {flat[0].item()!r}, {dtype})"
    if flat.numel() > 1 and torch.equal(flat, torch.arange(flat.numel()).to(flat.dtype)):
        count = f"jnp.arange({flat.numel()}, dtype={dtype})"
        return count if len(shape) == 1 else f"{count}.reshape({shape})"
    return None


def array_text(value: torch.Tensor) -> str:
    """Write an array, number by number unless it is regular."""
    if (text := regular(value)) is not None:
        return text
    held = value.detach()
    numbers = held.float().numpy() if held.is_floating_point() else held.numpy()
    return f"jnp.array({_shortest(numbers)}, jnp.{DTYPES[value.dtype]})"


def _shortest(numbers: np.ndarray) -> str:
    """Write numbers with as few digits as give the same bits again."""
    if numbers.ndim:
        return "[" + ", ".join(map(_shortest, numbers)) + "]"
    if not np.isfinite(numbers):
        return str(numbers).replace("inf", "jnp.inf").replace("nan", "jnp.nan")
    return str(numbers)
