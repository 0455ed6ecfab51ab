"""Whole blocks in both frameworks, as users write them.

A block is attention and an MLP, each after a norm and with a residual connection; `anatomies` names
the norm, the attention and the MLP of each. Each torch part is followed by its port.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch.nn import functional

from jax_attn.nn import GroupedQueryAttention
from jax_attn.selfcheck.calibration.anatomies import ANATOMIES, PADDING, TOKENS, Anatomy
from jax_attn.selfcheck.matrix.cases import Size
from jax_attn.selfcheck.matrix.designs import Design
from jax_attn.transfer import EMBEDDING, LAYER_NORM, LAYOUTS, LINEAR, Layout, ignored

_EPSILON, _WIDER = 1e-5, 2
_EXPERTS, _CHOSEN = 4, 2
_BUCKETS, _FARTHEST = 8, 20  # no distance lies within rounding of a bucket's edge


# --- norms ----------------------------------------------------------------------------------------


def _statistics(features: int) -> tuple[np.ndarray, np.ndarray]:
    """Return running mean and variance of each feature, in float32, as torch has them."""
    mean, variance = np.linspace(-0.5, 0.5, features), np.linspace(0.5, 2.0, features)
    return mean.astype(np.float32), variance.astype(np.float32)


class TorchBatchNorm(torch.nn.BatchNorm1d):
    def __init__(self, features: int, eps: float):
        super().__init__(features, eps=eps)
        mean, variance = map(torch.from_numpy, _statistics(features))
        self.running_mean.copy_(mean)  # type: ignore[union-attr]
        self.running_var.copy_(variance)  # type: ignore[union-attr]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class FlaxBatchNorm(nnx.BatchNorm):
    def __init__(self, features: int, **options: Any):
        super().__init__(features, use_running_average=True, **options)
        for seen, values in zip((self.mean, self.var), _statistics(features), strict=True):
            seen.set_value(jnp.asarray(values, options["dtype"]))


_NORMS: dict[str, tuple[Callable[..., torch.nn.Module], Callable[..., nnx.Module]]] = {
    "layer": (torch.nn.LayerNorm, partial(nnx.LayerNorm, use_fast_variance=False)),
    "rms": (torch.nn.RMSNorm, nnx.RMSNorm),
    "batch": (TorchBatchNorm, FlaxBatchNorm),
}

# --- attention ------------------------------------------------------------------------------------

_HIDDEN: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., jax.Array]]] = {
    "masked_fill(-1e9)": (
        lambda scores, allowed: scores.masked_fill(~allowed, -1e9),
        lambda scores, allowed: jnp.where(allowed, scores, -1e9),
    ),
    "+ finfo.min": (
        lambda scores, allowed: (
            scores + (1.0 - allowed.to(scores.dtype)) * torch.finfo(scores.dtype).min
        ),
        lambda scores, allowed: scores + jnp.where(allowed, 0.0, jnp.finfo(scores.dtype).min),
    ),
    "+ -1e4": (
        lambda scores, allowed: scores + (1.0 - allowed.to(scores.dtype)) * -1e4,
        lambda scores, allowed: scores + (1.0 - allowed.astype(scores.dtype)) * -1e4,
    ),
    "where(finfo.min)": (
        lambda scores, allowed: torch.where(allowed, scores, torch.finfo(scores.dtype).min),
        lambda scores, allowed: jnp.where(allowed, scores, jnp.finfo(scores.dtype).min),
    ),
}


def torch_buckets(T: int) -> torch.Tensor:
    """Return T5's bucket for the distance of each pair of positions, (T, T).

    Each direction has half of the buckets. Half of these hold a single distance each; the others
    become wider with the distance.
    """
    distance = torch.arange(T)[None, :] - torch.arange(T)[:, None]
    half, near = _BUCKETS // 2, _BUCKETS // 4
    n = distance.abs()
    far = torch.log(n.float() / near) / math.log(_FARTHEST / near) * (half - near)
    far = torch.min(near + far.to(torch.long), torch.full_like(n, half - 1))
    return (distance > 0).long() * half + torch.where(n < near, n, far)


def flax_buckets(T: int) -> jax.Array:
    """Return the same buckets in JAX."""
    distance = jnp.arange(T)[None, :] - jnp.arange(T)[:, None]
    half, near = _BUCKETS // 2, _BUCKETS // 4
    n = jnp.abs(distance)
    ratio = jnp.log(jnp.maximum(n, 1).astype(jnp.float32) / near) / math.log(_FARTHEST / near)
    far = jnp.minimum(near + (ratio * (half - near)).astype(jnp.int32), half - 1)
    return (distance > 0) * half + jnp.where(n < near, n, far)


class TorchAttention(torch.nn.Module):
    """Attention by torch's fused function, or written out as in transformers' eager models."""

    def __init__(self, size: Size, anatomy: Anatomy):
        super().__init__()
        self.heads, self.kv_heads = size.N, size.K
        H = size.D // size.N
        self.q_proj = torch.nn.Linear(size.D, size.N * H)
        self.k_proj = torch.nn.Linear(size.D, size.K * H)
        self.v_proj = torch.nn.Linear(size.D, size.K * H)
        self.out_proj = torch.nn.Linear(size.N * H, size.D)
        self.hide = _HIDDEN[anatomy.hide][0] if anatomy.hide else None
        self.relative_bias = torch.nn.Embedding(_BUCKETS, size.N) if anatomy.buckets else None

    def forward(self, x: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        q_BNTH = self.q_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k_BKSH, v_BKSH = (
            project(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
            for project in (self.k_proj, self.v_proj)
        )
        k_BNSH, v_BNSH = (
            a.repeat_interleave(self.heads // self.kv_heads, dim=1) for a in (k_BKSH, v_BKSH)
        )
        y_BNTH = self.attend(q_BNTH, k_BNSH, v_BNSH, allowed)
        return self.out_proj(y_BNTH.transpose(1, 2).flatten(2))

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor
    ) -> torch.Tensor:
        if self.hide is None:
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if self.relative_bias is not None:
            scores = scores + self.relative_bias(torch_buckets(q.shape[-2])).permute(2, 0, 1)
        return functional.softmax(self.hide(scores, allowed), dim=-1) @ v


class FlaxAttention(nnx.Module):
    """The port of the written-out attention."""

    def __init__(self, size: Size, anatomy: Anatomy, options: Mapping[str, Any]):
        self.heads, self.kv_heads = size.N, size.K
        H = size.D // size.N
        self.q_proj = nnx.Linear(size.D, size.N * H, **options)
        self.k_proj = nnx.Linear(size.D, size.K * H, **options)
        self.v_proj = nnx.Linear(size.D, size.K * H, **options)
        self.out_proj = nnx.Linear(size.N * H, size.D, **options)
        self.hide = _HIDDEN[anatomy.hide or ""][1]
        bias = nnx.Embed(_BUCKETS, size.N, **options) if anatomy.buckets else None
        self.relative_bias = nnx.data(bias)

    def __call__(self, x: jax.Array, *, mask: jax.Array) -> jax.Array:
        B, T, _ = x.shape
        q_BTNH = self.q_proj(x).reshape(B, T, self.heads, -1)
        k_BSNH, v_BSNH = (
            jnp.repeat(
                project(x).reshape(B, T, self.kv_heads, -1), self.heads // self.kv_heads, axis=2
            )
            for project in (self.k_proj, self.v_proj)
        )
        scores = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BSNH) / math.sqrt(q_BTNH.shape[-1])
        if self.relative_bias is not None:
            scores = scores + self.relative_bias(flax_buckets(T)).transpose(2, 0, 1)
        probabilities = jax.nn.softmax(self.hide(scores, mask), axis=-1)
        y_BTNH = jnp.einsum("BNTS,BSNH->BTNH", probabilities, v_BSNH)
        return self.out_proj(y_BTNH.reshape(B, T, -1))


# --- MLPs -----------------------------------------------------------------------------------------


_ACTIVATIONS: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., jax.Array]]] = {
    "gelu": (functional.gelu, partial(jax.nn.gelu, approximate=False)),
    "tanh gelu": (partial(functional.gelu, approximate="tanh"), jax.nn.gelu),
    "gated": (functional.silu, jax.nn.silu),
    "experts": (functional.silu, jax.nn.silu),
}


class TorchMLP(torch.nn.Module):
    def __init__(self, size: Size, kind: str):
        super().__init__()
        self.up = torch.nn.Linear(size.D, _WIDER * size.D)
        self.gate = torch.nn.Linear(size.D, _WIDER * size.D) if kind == "gated" else None
        self.down = torch.nn.Linear(_WIDER * size.D, size.D)
        self.activation = _ACTIVATIONS[kind][0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        return self.down(self.activation(self.gate(x)) * self.up(x))


class FlaxMLP(nnx.Module):
    def __init__(self, size: Size, kind: str, options: Mapping[str, Any]):
        self.up = nnx.Linear(size.D, _WIDER * size.D, **options)
        gate = nnx.Linear(size.D, _WIDER * size.D, **options) if kind == "gated" else None
        self.gate = nnx.data(gate)
        self.down = nnx.Linear(_WIDER * size.D, size.D, **options)
        self.activation = _ACTIVATIONS[kind][1]

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        return self.down(self.activation(self.gate(x)) * self.up(x))


class TorchExperts(torch.nn.Module):
    """A mixture of experts: each token goes to the two with the highest router probability."""

    def __init__(self, size: Size, kind: str):
        super().__init__()
        self.router = torch.nn.Linear(size.D, _EXPERTS)
        self.experts = torch.nn.ModuleList(TorchMLP(size, kind) for _ in range(_EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares, chosen = functional.softmax(self.router(x), dim=-1).topk(_CHOSEN, dim=-1)
        shares = shares / shares.sum(-1, keepdim=True)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            y = y + (shares * (chosen == number)).sum(-1, keepdim=True) * expert(x)
        return y


class FlaxExperts(nnx.Module):
    def __init__(self, size: Size, kind: str, options: Mapping[str, Any]):
        self.router = nnx.Linear(size.D, _EXPERTS, **options)
        self.experts = nnx.List(FlaxMLP(size, kind, options) for _ in range(_EXPERTS))

    def __call__(self, x: jax.Array) -> jax.Array:
        shares, chosen = jax.lax.top_k(jax.nn.softmax(self.router(x)), _CHOSEN)
        shares = shares / shares.sum(-1, keepdims=True)
        y_BTED = jnp.stack([expert(x) for expert in self.experts], axis=-2)
        return (shares[..., None] * jnp.take_along_axis(y_BTED, chosen[..., None], -2)).sum(-2)


# --- blocks ---------------------------------------------------------------------------------------


class TorchBlock(torch.nn.Module):
    """A block: (B, T, D) or token ids (B, T), and a mask (B, N, T, T) -> (B, T, D)."""

    def __init__(self, size: Size, anatomy: Anatomy):
        super().__init__()
        norm = _NORMS[anatomy.norm][0]
        mlp = TorchExperts if anatomy.mlp == "experts" else TorchMLP
        tokens = torch.nn.Embedding(TOKENS, size.D, padding_idx=PADDING)
        self.embedding = tokens if anatomy.tokens else None
        self.attention_norm = norm(size.D, eps=_EPSILON)
        self.attention = TorchAttention(size, anatomy)
        self.mlp_norm = norm(size.D, eps=_EPSILON)
        self.mlp = mlp(size, anatomy.mlp)

    def forward(self, x: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        x = x if self.embedding is None else self.embedding(x)
        x = x + self.attention(self.attention_norm(x), allowed)
        return x + self.mlp(self.mlp_norm(x))


class FlaxBlock(nnx.Module):
    """The same block in Flax. As in torch, the embedding of the padding token gets no gradient."""

    def __init__(self, size: Size, dtype: str, rngs: nnx.Rngs, anatomy: Anatomy):
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        norm = partial(_NORMS[anatomy.norm][1], size.D, epsilon=_EPSILON, **options)
        mlp = FlaxExperts if anatomy.mlp == "experts" else FlaxMLP
        self.embedding = nnx.data(nnx.Embed(TOKENS, size.D, **options) if anatomy.tokens else None)
        self.attention_norm = norm()
        self.attention: Callable[..., Any] = (
            GroupedQueryAttention(size.D, size.N, size.K, **options)
            if anatomy.hide is None
            else FlaxAttention(size, anatomy, options)
        )
        self.mlp_norm = norm()
        self.mlp = mlp(size, anatomy.mlp, options)

    def __call__(self, x: jax.Array, allowed: jax.Array) -> jax.Array:
        if self.embedding is not None:
            embedded = self.embedding(x)
            padding = (x == PADDING)[..., None]
            x = jnp.where(padding, jax.lax.stop_gradient(embedded), embedded)
        x = x + self.attention(self.attention_norm(x), mask=allowed)
        return x + self.mlp(self.mlp_norm(x))


_SEEN = ("running_mean", "running_var", "num_batches_tracked")
_PARTS = Layout(
    EMBEDDING.under("embedding", "embedding"),
    LAYER_NORM.under("attention_norm", "attention_norm"),
    LAYER_NORM.under("mlp_norm", "mlp_norm"),
    LINEAR.under("mlp.router", "mlp.router"),
    *(LINEAR.under(f"mlp.{name}", f"mlp.{name}") for name in ("up", "gate", "down")),
    *(
        LINEAR.under(f"mlp.experts.{{expert}}.{name}", f"mlp.experts.{{expert}}.{name}")
        for name in ("up", "down")
    ),
    *(
        ignored(f"{norm}.{name}", "the port has its own, with the same values")
        for norm, name in product(("attention_norm", "mlp_norm"), _SEEN)
    ),
)
_WRITTEN_OUT = Layout(
    *(LINEAR.under(f"{name}_proj", f"{name}_proj") for name in ("q", "k", "v", "out")),
    EMBEDDING.under("relative_bias", "relative_bias"),
)


def _block_call(module: Any, x: Any, allowed: Any) -> Any:
    return module(x, allowed)


def _design(anatomy: Anatomy) -> Design:
    attention = LAYOUTS["gqa"] if anatomy.hide is None else _WRITTEN_OUT
    return Design(
        reference=partial(TorchBlock, anatomy=anatomy),
        port=partial(FlaxBlock, anatomy=anatomy),
        layout=_PARTS + attention.under("attention", "attention"),
        reference_call=lambda kind: _block_call,
        port_call=lambda kind: _block_call,
        weights={},
    )


BLOCKS = {name: _design(anatomy) for name, anatomy in ANATOMIES.items()}
"""Both sides of every block."""
