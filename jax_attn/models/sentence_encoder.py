"""Sentences → unit vectors, by a BERT encoder whose hidden states are averaged.

encoder = load_sentence_encoder("all-MiniLM-L6-v2")
encoder.embed(["A sentence.", "Another one."])  # (2, 384)
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_attn.attention.annotations import AnyArray
from jax_attn.models.load import load
from jax_attn.models.model import Model
from jax_attn.transfer.families import model_problems
from jax_attn.transfer.families.config import Reading, reading

_SHORTEST = 16


class Batch(NamedTuple):
    """Rows of tokens, padded behind: tokens (B, T) and lengths (B,), int32.

    rows: which sentences these are; rows beyond them are filled up with a token each.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    rows: np.ndarray


def mean_pooled(
    hidden_BTD: Float[Array, "B T D"], lengths_B: Int[AnyArray, " B"]
) -> Float[Array, "B D"]:
    """The mean over each row's own tokens, as a unit vector: (B, T, D) → (B, D)."""
    own_BT = jnp.arange(hidden_BTD.shape[1]) < lengths_B[:, None]
    total = jnp.where(own_BT[..., None], hidden_BTD, 0).sum(axis=1)
    mean = total / lengths_B[:, None].astype(total.dtype)
    return mean / jnp.maximum(jnp.linalg.norm(mean, axis=-1, keepdims=True), 1e-12)


@dataclass(frozen=True)
class SentenceEncoder:
    """An encoder and its tokenizer.

    Attributes:
      encoder: a `Model` of BERT's.
      tokenizer: a `tokenizers.Tokenizer`.
      max_length: the most tokens of a sentence; later ones are cut off, except the closing one.
    """

    encoder: Model
    tokenizer: Any
    max_length: int

    def tokens(self, sentences: Sequence[str]) -> list[list[int]]:
        """Each sentence's token ids, cut to max_length."""
        return [encoding.ids for encoding in self.tokenizer.encode_batch(list(sentences))]

    def batches(self, sentences: Sequence[str], size: int = 32) -> Iterator[Batch]:
        """Batch the sentences by length, `size` in a batch, padded to a power of two.

        Few shapes are compiled, and little is padding.
        """
        ids = self.tokens(sentences)
        order = np.argsort([len(row) for row in ids], kind="stable")
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            longest = max(len(ids[row]) for row in rows)
            T = min(max(_SHORTEST, 1 << (longest - 1).bit_length()), self.max_length)
            tokens, lengths = np.zeros((size, T), np.int32), np.ones(size, np.int32)
            for b, row in enumerate(rows):
                tokens[b, : len(ids[row])], lengths[b] = ids[row], len(ids[row])
            yield Batch(tokens, lengths, rows)

    def embed(self, sentences: Sequence[str], size: int = 32) -> Float[np.ndarray, "n D"]:
        """Return a unit vector for each sentence, in the given order: (n, D) float32.

        Args:
          sentences: the sentences.
          size: sentences in a batch. Each length of batch is compiled once in a process.
        """
        unit_vectors = np.empty((len(sentences), self.encoder.embed_dim), np.float32)
        for batch in self.batches(sentences, size):
            vectors = embedded(self.encoder, batch.tokens, batch.lengths)
            unit_vectors[batch.rows] = np.asarray(vectors)[: len(batch.rows)]
        return unit_vectors


@nnx.jit
def embedded(
    encoder: Model, tokens: Int[AnyArray, "B T"], lengths: Int[AnyArray, " B"]
) -> Float[Array, "B D"]:
    """(B, T) tokens and (B,) lengths → (B, D) unit vectors."""
    return mean_pooled(encoder(tokens, lengths).hidden, lengths)


def load_sentence_encoder(folder: str | Path) -> SentenceEncoder:
    """Load the encoder of a folder that sentence-transformers wrote, every weight through a table.

    It reads config.json, model.safetensors, tokenizer.json, sentence_bert_config.json and
    1_Pooling/config.json.

    Raises:
      TransferError: another family, activation or pooling, or weights that do not fit the config.
      FileNotFoundError: a file is missing.
      ImportError: tokenizers is not installed; the message has the line that installs it.
    """
    folder = Path(folder)
    config = _json(folder / "config.json")
    pooling, lengths = "1_Pooling/config.json", "sentence_bert_config.json"
    with reading(config) as read:
        _check_pooling(Reading(_json(folder / pooling), read.problems, pooling))
        cut = Reading(_json(folder / lengths), read.problems, lengths)
        max_length = cut.number("max_seq_length")
        _check_model(read)
        read.problems |= dict.fromkeys(model_problems(config))
    tokenizer = _tokenizer(folder / "tokenizer.json", max_length)
    return SentenceEncoder(load(folder / "model.safetensors"), tokenizer, max_length)


def _check_pooling(pooling: Reading) -> None:
    names = (name for name in pooling.config if name.startswith("pooling_mode"))
    modes = sorted(name for name in names if pooling.get(name) is True)
    if modes != ["pooling_mode_mean_tokens"]:
        pooling.refuse("pooling_mode", modes, "pooling_mode_mean_tokens alone")


def _check_model(config: Reading) -> None:
    if (kind := config.get("model_type")) != "bert":
        config.refuse("model_type", kind, "'bert'")
    elif config.flag("is_decoder", default=False):
        config.refuse("is_decoder", True, "false")


def _tokenizer(path: Path, max_length: int) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        install = 'pip install "jax-attn[models]"'
        raise ImportError(f"tokenizers is not installed: {install}") from error
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected a tokenizer.json, got no such file")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length)
    return tokenizer


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
