"""Draw the same random numbers on both sides, to compare training mode as eval mode is."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jax_attn.parity.run.modes.mode import Mode
from jax_attn.translate.outputs import called

_LAST = 0.9712345


def _uniform(shape: Sequence[int]) -> np.ndarray:
    """Draw evenly spaced numbers in (0, 1) in random order, the same for each shape.

    One of several is nearly 1, so that something is dropped of a few rows too. None equals a rate,
    which the two sides round apart.
    """
    count = math.prod(shape)
    drawn = np.random.default_rng(0).permutation(count).reshape(tuple(shape))
    return ((drawn + (_LAST if count > 1 else 1 - _LAST)) / count).astype(np.float32)


def _normal(shape: Sequence[int]) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(tuple(shape), np.float32)


def _like(x: torch.Tensor, drawn: np.ndarray, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.from_numpy(drawn).to(dtype or x.dtype)


def _new(size: Sequence[int], drawn: np.ndarray, dtype: torch.dtype | None) -> torch.Tensor:
    return torch.from_numpy(drawn).to(dtype or torch.get_default_dtype()).reshape(tuple(size))


def _dropout(x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    kept = torch.from_numpy(_uniform(x.shape) < 1 - p)
    return x * kept.to(x.dtype) / (1 - p), kept


_aten = torch.ops.aten
_TORCH: dict[Any, Callable[..., Any]] = {
    _aten.native_dropout.default: _dropout,
    _aten.bernoulli_.float: lambda x, p=0.5, **_: x.copy_(_like(x, _uniform(x.shape) < p)),
    _aten.bernoulli.p: lambda x, p=0.5, **_: _like(x, _uniform(x.shape) < p),
    _aten.bernoulli.default: lambda p, **_: (_like(p, _uniform(p.shape)) < p).to(p.dtype),
    _aten.rand.default: lambda size, dtype=None, **_: _new(size, _uniform(size), dtype),
    _aten.randn.default: lambda size, dtype=None, **_: _new(size, _normal(size), dtype),
    _aten.rand_like.default: lambda x, dtype=None, **_: _like(x, _uniform(x.shape), dtype),
    _aten.randn_like.default: lambda x, dtype=None, **_: _like(x, _normal(x.shape), dtype),
    _aten.normal_.default: lambda x, mean=0.0, std=1.0, **_: x.copy_(
        _like(x, _normal(x.shape)) * std + mean
    ),
}


class _Drawing(Mode):
    """Draw these numbers in torch."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if is_random and func not in _TORCH and func._can_decompose():
            with self:  # dropout arrives whole in inference mode
                return func.decompose(*args, **kwargs)
        return _TORCH.get(func, func)(*args, **kwargs)


def called_with_draws(module: torch.nn.Module, *args: Any, **inputs: Any) -> Any:
    """Call a module of torch, which draws these numbers, and name what it returns."""
    with _Drawing():
        return called(module, *args, **inputs)


def _jax_bernoulli(key: Any, p: Any = 0.5, shape: Any = None, **_: Any) -> jax.Array:
    return jnp.asarray(_uniform(jnp.shape(p) if shape is None else shape)) < p


def _jax_uniform(key: Any, shape: Any = (), dtype: Any = jnp.float32, **_: Any) -> jax.Array:
    return jnp.asarray(_uniform(shape), dtype)


def _jax_normal(key: Any, shape: Any = (), dtype: Any = jnp.float32, **_: Any) -> jax.Array:
    return jnp.asarray(_normal(shape), dtype)


@contextmanager
def jax_with_draws() -> Iterator[None]:
    """Let jax.random draw these numbers, whatever the key is, in all that is traced meanwhile."""
    with (
        patch.object(jax.random, "bernoulli", _jax_bernoulli),
        patch.object(jax.random, "uniform", _jax_uniform),
        patch.object(jax.random, "normal", _jax_normal),
    ):
        yield
