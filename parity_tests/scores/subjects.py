"""The references of the benchmark, with inputs that reveal most, and their right translations."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import torch
import transformers as tf

from helpers.attack import decoders, encoders
from helpers.attack.port import Model, randomised
from jax_attn.selfcheck.calibration.anatomies import ANATOMIES
from jax_attn.selfcheck.calibration.blocks import TorchBlock
from jax_attn.selfcheck.matrix.cases import Size
from jax_attn.translate import Translation, translate
from scores.qualities import QUALITIES, Inputs

SIZE = Size(B=3, T=13, S=13, N=4, K=2, D=60)


def _block(anatomy: str) -> tuple[torch.nn.Module, Inputs]:
    """A block of calibration's, whose masks hide other keys in each head, and all in one row."""
    rng, one = np.random.default_rng(0), ANATOMIES[anatomy]
    allowed = rng.random((SIZE.B, SIZE.N, SIZE.T, SIZE.T)) < 0.6
    allowed |= np.eye(SIZE.T, dtype=bool)
    allowed[1, :, 4] = False
    x = rng.standard_normal((SIZE.B, SIZE.T, SIZE.D)).astype(np.float32)
    tokens = rng.integers(11, size=(SIZE.B, SIZE.T))
    module = randomised(TorchBlock(SIZE, one))
    return module, {"x": tokens if one.tokens else x, "allowed": allowed}


def _model(model: Model) -> tuple[torch.nn.Module, Inputs]:
    return model.reference, dict(model.inputs)


def _of_logits(kind: type, config: Any) -> tuple[torch.nn.Module, Inputs]:
    """A language model with its head, on token ids and a mask that pads a row at its end."""
    config.use_cache, rng = False, np.random.default_rng(0)
    ids = rng.integers(1, config.vocab_size, size=(3, 11))
    mask = np.ones_like(ids)
    mask[1, 7:] = 0
    return randomised(kind(config)), {"input_ids": ids, "attention_mask": mask}


_SIZES = decoders.SIZES
LOGITS = {
    "llama, logits": (tf.LlamaForCausalLM, tf.LlamaConfig(**_SIZES)),
    "mistral, logits": (tf.MistralForCausalLM, tf.MistralConfig(**_SIZES, sliding_window=5)),
    "gpt2, logits": (
        tf.GPT2LMHeadModel,
        tf.GPT2Config(vocab_size=97, n_positions=13, n_embd=24, n_layer=2, n_head=4),
    ),
}


# name -> the reference, and inputs that are made to reveal mistakes
SUBJECTS: dict[str, Callable[[], tuple[torch.nn.Module, Inputs]]] = {
    **{f"block, {name}": partial(_block, name) for name in ANATOMIES},
    **{name: partial(_model, encoders.MODELS[name]) for name in ("bert", "t5")},
    **{name: partial(_of_logits, *made) for name, made in LOGITS.items()},
}


@dataclass(frozen=True)
class Subject:
    """A reference, the inputs that reveal most, and the translation, whose mistakes are ours."""

    name: str

    @cached_property
    def made(self) -> tuple[torch.nn.Module, Inputs]:
        return SUBJECTS[self.name]()

    @property
    def reference(self) -> torch.nn.Module:
        return self.made[0]

    def inputs(self, quality: str) -> Inputs:
        """Inputs of one of the `QUALITIES`, all of the same shapes."""
        return QUALITIES[quality](self.made[1])

    @cached_property
    def translation(self) -> Translation:
        inputs: dict[str, Any] = {k: torch.from_numpy(a) for k, a in self.made[1].items()}
        return translate(self.reference, inputs)


@cache
def subject(name: str) -> Subject:
    return Subject(name)
