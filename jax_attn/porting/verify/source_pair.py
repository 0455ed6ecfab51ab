"""Check an encoder-decoder of transformers against ours, and choose the pair of a checkpoint.

The check is that of any model, for two sequences in each row: the encoder's and the decoder's.
"""

import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_attn.families import Config
from jax_attn.models import EncoderDecoder, load
from jax_attn.porting.verify.model_pair import LONGEST, ModelPair, by_token, logits_of, real

DECODED = 19
"""The decoder's tokens in a row: more than the 16 distances that have a bias of their own."""


def pair_of(path: Path, config: Config, dtype: str) -> ModelPair:
    """Read a checkpoint by transformers and by us, each in its own way."""
    port = load(path, dtype=dtype)  # reports missing tensors, which transformers fills in
    kind = SourcePair if isinstance(port, EncoderDecoder) else ModelPair
    return kind.of(path, config, dtype, port)


class SourcePair(ModelPair):
    """An encoder-decoder on both sides. Its methods are called by the names of its inputs."""

    @property
    def inputs(self) -> dict[str, np.ndarray]:
        """Three rows for each side: without padding, padded at the end, padded at the start."""
        rng = np.random.default_rng(zlib.crc32(self.dtype.encode()))
        pad = getattr(self.reference.config, "pad_token_id", None) or 0
        ids = np.delete(np.arange(self.traits.embedding.vocab_size), pad)
        arrays: dict[str, np.ndarray] = {}
        for side, length in (("", LONGEST), ("decoder_", DECODED)):
            mask = np.ones((3, length), np.int32)
            mask[1, length - length // 3 :] = mask[2, : length // 4] = 0
            tokens = np.where(mask, rng.choice(ids, mask.shape), pad).astype(np.int32)
            arrays |= {f"{side}tokens": tokens, f"{side}mask": mask}
        return arrays

    def reference_outputs(  # type: ignore[override]
        self, module: Any, tokens: Any, mask: Any, decoder_tokens: Any, decoder_mask: Any
    ) -> dict:
        """Return transformers' outputs by masks; those of padding are 0."""
        out = module(
            input_ids=tokens,
            attention_mask=mask,
            decoder_input_ids=decoder_tokens,
            decoder_attention_mask=decoder_mask,
            output_hidden_states=True,
            use_cache=False,
        )
        states = out.get("decoder_hidden_states")
        hidden = out.get("last_hidden_state", states[-1])
        own = real({"hidden": hidden, "logits": logits_of(out)}, decoder_mask)
        return own | real({"source": out.encoder_last_hidden_state}, mask)

    def port_outputs(  # type: ignore[override]
        self, model: Any, tokens: Any, mask: Any, decoder_tokens: Any, decoder_mask: Any
    ) -> dict:
        """Return our model's outputs by masks; those of padding are 0."""
        masks = {"attention_mask": mask, "decoder_attention_mask": decoder_mask}
        out = model(tokens, decoder_tokens=decoder_tokens, **masks)
        return self._of_both(out, mask, decoder_mask)

    def call_reference(self, module: Any, *arrays: Any, **named: Any) -> dict:
        """Return transformers' outputs, under a name for each way in which the port is called."""
        own = self.reference_outputs(module, *arrays, **named)
        ways = own | {f"{name} by lengths": x[:2].detach() for name, x in own.items()}
        by_cache = (name for name in own if name != "source")
        return ways | {f"{name} by a cache": own[name][:1].detach() for name in by_cache}

    def call_port(  # type: ignore[override]
        self, model: Any, tokens: Any, mask: Any, decoder_tokens: Any, decoder_mask: Any
    ) -> dict:
        """Return our model's outputs by masks, by lengths and by a cache."""
        ways = self.port_outputs(model, tokens, mask, decoder_tokens, decoder_mask)
        by_lengths = model(
            tokens[:2],
            mask[:2].sum(axis=1),
            decoder_tokens=decoder_tokens[:2],
            decoder_lengths=decoder_mask[:2].sum(axis=1),
        )
        found = self._of_both(by_lengths, mask[:2], decoder_mask[:2])
        ways |= {f"{name} by lengths": x for name, x in found.items()}
        T = decoder_tokens.shape[1]
        cache = model.empty_cache(model.encode(tokens[:1]), T)
        parts = []
        for part in (slice(0, T // 2), slice(T // 2, T)):
            out = model.decode(decoder_tokens[:1, part], cache=cache)
            cache = out.cache
            parts.append(self._of_decoder(out, decoder_mask[:1, part]))
        joined = {name: [part[name] for part in parts] for name in by_token(parts[0])}
        ways |= {
            f"{name} by a cache": jax.numpy.concatenate(x, axis=1) for name, x in joined.items()
        }
        return {n: jax.lax.stop_gradient(x) if " by " in n else x for n, x in ways.items()}

    def _of_both(self, out: Any, mask: Any, decoder_mask: Any) -> dict[str, Any]:
        source = real({"source": out.source.hidden}, mask)
        return self._of_decoder(out, decoder_mask) | source

    def _of_decoder(self, out: Any, mask: Any) -> dict[str, Any]:
        return real({"hidden": out.hidden, "logits": out.logits}, mask)
