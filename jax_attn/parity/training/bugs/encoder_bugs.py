"""Bugs of an encoder beside its attention: in norms, the activation and dropout."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn.parity.checking.prepared import Prepared, judge_port
from jax_attn.parity.judge.result import Result
from jax_attn.parity.run.inputs_and_runs import Inputs
from jax_attn.parity.run.port import Port
from jax_attn.parity.run.reference import Reference
from jax_attn.parity.training.bugs.encoder import (
    ENCODER,
    Encoder,
    TorchEncoder,
    draws,
    dropped,
    ported,
)

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
    """case: of `ENCODER_CASES`. options: of the `Encoder` with the bug. call: how it is called."""

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
"""name -> what is wrong beside attention, and the case that is meant to see it."""


@cache
def _prepared(case: str) -> tuple[TorchEncoder, Prepared]:
    """The torch side of a case."""
    encoder = TorchEncoder(VOCAB, WIDTH, HEADS, INNER, seed=3)
    tokens = np.random.default_rng(4).integers(0, VOCAB, (B, T))
    inputs = Inputs.of({"tokens": tokens} | ENCODER_CASES[case], np.dtype("float32"))
    return encoder, Prepared(Reference(encoder, None, inputs), "float32")


def judge_encoder(case: str, bug: EncoderBug | None = None) -> Result:
    """The `Result` of a case, right or with a bug."""
    encoder, prepared = _prepared(case)
    module = ported(encoder, **(bug.options if bug else {}))
    port = Port(module, bug.call if bug else None, prepared.reference.inputs)
    return judge_port(prepared, port, ("jit",), to_torch=ENCODER.to_torch, name=f"encoder/{case}")
