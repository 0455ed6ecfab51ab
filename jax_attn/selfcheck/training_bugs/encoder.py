"""A two-layer pre-norm encoder over characters, in torch and in Flax, and bugs in it.

It has parts that attention modules lack: LayerNorm, GELU, residuals, and dropout outside attention.
Dropout's draws are arguments, so that the two sides can be compared.

Letters: L layers, B batch, T tokens, D width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from jax_attn import transfer
from jax_attn.nn import MultiHeadAttention
from jax_attn.parity.checking.judging import judge_port
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.result import Result
from jax_attn.parity.run.inputs_and_runs import Inputs
from jax_attn.parity.run.port import Port
from jax_attn.parity.run.reference import Reference
from jax_attn.transfer import EMBEDDING, LAYER_NORM, LAYOUTS, LINEAR, Layout

LAYERS, RATE = 2, 0.1

Activation = Callable[[jax.Array], jax.Array]
Drop = Callable[[jax.Array, jax.Array | None], jax.Array]

ENCODER = Layout(
    EMBEDDING.under("embedding", "embedding"),
    LAYER_NORM.under("layers.{layer}.norm1", "layers.{layer}.norm1"),
    LAYOUTS["torch_mha"].under("layers.{layer}.self_attn", "layers.{layer}.self_attn"),
    LAYER_NORM.under("layers.{layer}.norm2", "layers.{layer}.norm2"),
    LINEAR.under("layers.{layer}.linear1", "layers.{layer}.linear1"),
    LINEAR.under("layers.{layer}.linear2", "layers.{layer}.linear2"),
    LINEAR.under("head", "head"),
)


class TorchEncoderLayer(torch.nn.Module):
    """torch.nn.TransformerEncoderLayer(norm_first=True, activation="gelu") with given draws."""

    def __init__(self, width: int, heads: int, inner: int):
        super().__init__()
        self.norm1 = torch.nn.LayerNorm(width)
        self.self_attn = torch.nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm2 = torch.nn.LayerNorm(width)
        self.linear1 = torch.nn.Linear(width, inner)
        self.linear2 = torch.nn.Linear(inner, width)

    def forward(
        self, x: torch.Tensor, hidden: torch.Tensor, keep: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return (B, T, D) for x (B, T, D). Masks are boolean.

        hidden: (T, T), True = ignored. keep: (2, B, T, D), True = kept.
        """
        y = self.norm1(x)
        y, _ = self.self_attn(y, y, y, attn_mask=hidden, need_weights=False)
        x = x + (y if keep is None else y * keep[0] / (1 - RATE))
        y = self.linear2(torch.nn.functional.gelu(self.linear1(self.norm2(x))))
        return x + (y if keep is None else y * keep[1] / (1 - RATE))


class TorchEncoder(torch.nn.Module):
    """tokens (B, T) → logits (B, T, vocab), causal.

    Every bias and scale is drawn, and embeddings are small: with torch's initial values, an eps, a
    dropped bias or a scale would not show.
    """

    def __init__(self, vocab: int, width: int, heads: int, inner: int, *, seed: int):
        super().__init__()
        self.sizes = vocab, width, heads, inner
        self.embedding = torch.nn.Embedding(vocab, width)
        layers = [TorchEncoderLayer(width, heads, inner) for _ in range(LAYERS)]
        self.layers = torch.nn.ModuleList(layers)
        self.head = torch.nn.Linear(width, vocab)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, p in self.named_parameters():
                drawn = torch.randn(p.shape, generator=generator)
                fan_in = p.shape[-1] if p.ndim > 1 else 100
                p.copy_(drawn * 0.1 if "embedding" in name else drawn / fan_in**0.5)
                if "norm" in name and name.endswith("weight"):
                    p.add_(1.0)
        self.eval()

    def forward(self, tokens: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits. keep: (L, 2, B, T, D) booleans, dropout's draws; None keeps all."""
        T = tokens.shape[1]
        hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
        x = self.embedding(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, hidden, None if keep is None else keep[i])
        return self.head(x)


def dropped(x_BTD: jax.Array, keep_BTD: jax.Array | None) -> jax.Array:
    """Return x with dropout by `keep`, scaled by 1 / (1 - rate); all of x if `keep` is None."""
    return x_BTD if keep_BTD is None else x_BTD * keep_BTD.astype(x_BTD.dtype) / (1 - RATE)


def exact_gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)


class EncoderLayer(nnx.Module):
    """The same layer in Flax; its norms have torch's eps, and no fast variance."""

    def __init__(self, width: int, heads: int, inner: int, *, eps: float, rngs: nnx.Rngs):
        norm = partial(nnx.LayerNorm, width, epsilon=eps, use_fast_variance=False, rngs=rngs)
        self.norm1, self.norm2 = norm(), norm()
        self.self_attn = MultiHeadAttention(width, heads, rngs=rngs)
        self.linear1 = nnx.Linear(width, inner, rngs=rngs)
        self.linear2 = nnx.Linear(inner, width, rngs=rngs)

    def __call__(
        self, x_BTD: jax.Array, keep: jax.Array | None, *, gelu: Activation, drop: Drop
    ) -> jax.Array:
        keeps = (None, None) if keep is None else keep
        x_BTD = x_BTD + drop(self.self_attn(self.norm1(x_BTD), is_causal=True), keeps[0])
        return x_BTD + drop(self.linear2(gelu(self.linear1(self.norm2(x_BTD)))), keeps[1])


class Encoder(nnx.Module):
    """The same encoder in Flax. eps, gelu, drop: those of its norms, activation and dropout."""

    def __init__(
        self,
        vocab: int,
        width: int,
        heads: int,
        inner: int,
        *,
        eps: float = 1e-5,
        gelu: Activation = exact_gelu,
        drop: Drop = dropped,
        rngs: nnx.Rngs,
    ):
        self.embedding = nnx.Embed(vocab, width, rngs=rngs)
        layers = [EncoderLayer(width, heads, inner, eps=eps, rngs=rngs) for _ in range(LAYERS)]
        self.layers = nnx.List(layers)
        self.head = nnx.Linear(width, vocab, rngs=rngs)
        self.gelu, self.drop = gelu, drop

    def __call__(self, tokens: jax.Array, keep: jax.Array | None = None) -> jax.Array:
        x = self.embedding(jnp.asarray(tokens))
        for i, layer in enumerate(self.layers):
            x = layer(x, None if keep is None else keep[i], gelu=self.gelu, drop=self.drop)
        return self.head(x)


def ported(reference: TorchEncoder, **options: Any) -> Encoder:
    """Build the Flax encoder with the reference's weights. options: as for `Encoder`."""
    port = Encoder(*reference.sizes, rngs=nnx.Rngs(0), **options)
    transfer.load(port, reference.state_dict(), ENCODER)
    return port


def draws(seed: int, batch: int, tokens: int, width: int) -> np.ndarray:
    """Draw dropout's masks for one batch, (L, 2, B, T, D), True = kept."""
    rng = np.random.default_rng(seed)
    return rng.random((LAYERS, 2, batch, tokens, width)) >= RATE


# --- bugs outside attention ---

VOCAB, WIDTH, HEADS, INNER, B, T = 11, 10, 2, 17, 3, 7

ENCODER_CASES: dict[str, dict[str, np.ndarray]] = {
    "eval": {},
    "dropout": {"keep": draws(0, B, T, WIDTH)},
}
"""name -> the inputs besides the tokens."""


def _dropping(module: Encoder, tokens: jax.Array) -> jax.Array:
    return module(tokens, jnp.asarray(draws(0, B, T, WIDTH)))


@dataclass(frozen=True)
class EncoderBug:
    """A bug. case: in `ENCODER_CASES`. options: the `Encoder`'s. call: a wrong call, if any."""

    case: str
    options: dict[str, Any]
    call: Callable[..., jax.Array] | None = None


ENCODER_BUGS: dict[str, EncoderBug] = {
    "LayerNorm: eps 1e-6 for 1e-5": EncoderBug("eval", {"eps": 1e-6}),
    "GELU: tanh for erf": EncoderBug("eval", {"gelu": jax.nn.gelu}),
    "dropout in eval": EncoderBug("eval", {}, _dropping),
    "dropout: without 1/keep": EncoderBug(
        "dropout", {"drop": lambda x, keep: x * keep.astype(x.dtype)}
    ),
    "dropout: polarity of the draw": EncoderBug(
        "dropout", {"drop": lambda x, keep: dropped(x, ~keep)}
    ),
}
"""name -> the bug outside attention, with the case designed to detect it."""


@cache
def _prepared(case: str) -> tuple[TorchEncoder, Prepared]:
    """Return the torch side of a case."""
    encoder = TorchEncoder(VOCAB, WIDTH, HEADS, INNER, seed=3)
    tokens = np.random.default_rng(4).integers(0, VOCAB, (B, T))
    inputs = Inputs.of({"tokens": tokens} | ENCODER_CASES[case], np.dtype("float32"))
    return encoder, Prepared(Reference(encoder, None, inputs), "float32")


def judge_encoder(case: str, bug: EncoderBug | None = None) -> Result:
    """Judge a case, without a bug or with one."""
    encoder, prepared = _prepared(case)
    module = ported(encoder, **(bug.options if bug else {}))
    port = Port(module, bug.call if bug else None, prepared.reference.inputs)
    return judge_port(prepared, port, ("jit",), to_torch=ENCODER.to_torch, name=f"encoder/{case}")
