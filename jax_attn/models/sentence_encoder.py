"""Sentence embeddings by a BERT encoder whose hidden states are averaged.

encoder = load_sentence_encoder("all-MiniLM-L6-v2")
encoder.embed(["A sentence.", "Another one."])  # (2, 384)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_attn.attention.annotations import AnyArray
from jax_attn.environment import install_line
from jax_attn.families import model_problems
from jax_attn.families.config import Reading, reading
from jax_attn.models.load import load
from jax_attn.models.model import Model
from jax_attn.transfer.files.json_file import read_json
from jax_attn.transfer.problems import Problem, file_error

_SHORTEST = 16
_PROMPTS = "config_sentence_transformers.json"
_MODULES, _NORMALIZE = ["Transformer", "Pooling"], "Normalize"


class Batch(NamedTuple):
    """Rows of tokens followed by padding: tokens (B, T) and lengths (B,), int32.

    rows: the index of each row's sentence; rows beyond them hold one dummy token each.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    rows: np.ndarray


def mean_pooled(
    hidden_BTD: Float[Array, "B T D"], lengths_B: Int[AnyArray, " B"], *, normalize: bool = True
) -> Float[Array, "B D"]:
    """Return the mean over each row's own tokens, scaled to unit length if `normalize`: (B, D)."""
    own_BT = jnp.arange(hidden_BTD.shape[1]) < lengths_B[:, None]
    total = jnp.where(own_BT[..., None], hidden_BTD, 0).sum(axis=1)
    mean = total / lengths_B[:, None].astype(total.dtype)
    if not normalize:
        return mean
    return mean / jnp.maximum(jnp.linalg.norm(mean, axis=-1, keepdims=True), 1e-12)


@dataclass(frozen=True)
class SentenceEncoder:
    """An encoder and its tokenizer.

    Attributes:
      encoder: a BERT `Model`.
      tokenizer: a `tokenizers.Tokenizer`.
      max_length: the most tokens of a sentence; longer ones are truncated, keeping the last
        special token.
      normalize: whether the vectors have unit length.
    """

    encoder: Model
    tokenizer: Any
    max_length: int
    normalize: bool

    def tokens(self, sentences: Sequence[str]) -> list[list[int]]:
        """Return each sentence's token ids, truncated to max_length."""
        return [encoding.ids for encoding in self.tokenizer.encode_batch(list(sentences))]

    def batches(self, sentences: Sequence[str], size: int = 32) -> Iterator[Batch]:
        """Batch the sentences by length, `size` in a batch, padded to a power of two.

        So few shapes are compiled, and little padding is needed.
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
        """Return a vector for each sentence, in the given order: (n, D) float32.

        Args:
          sentences: the sentences.
          size: sentences in a batch. Each length of batch is compiled once in a process.
        """
        vectors = np.empty((len(sentences), self.encoder.embed_dim), np.float32)
        for batch in self.batches(sentences, size):
            rows = embedded(self.encoder, batch.tokens, batch.lengths, normalize=self.normalize)
            vectors[batch.rows] = np.asarray(rows)[: len(batch.rows)]
        return vectors


@nnx.jit(static_argnames="normalize", graph_updates=False)
def embedded(
    encoder: Model,
    tokens: Int[AnyArray, "B T"],
    lengths: Int[AnyArray, " B"],
    *,
    normalize: bool,
) -> Float[Array, "B D"]:
    """Map (B, T) tokens and (B,) lengths to (B, D) vectors."""
    return mean_pooled(encoder(tokens, lengths).hidden, lengths, normalize=normalize)


def load_sentence_encoder(folder: str | Path) -> SentenceEncoder:
    """Load the encoder from a folder of sentence-transformers; every weight goes through a table.

    Its modules are a BERT encoder, mean pooling and perhaps normalization; anything else is
    refused.

    Raises:
      TransferError: another module, family, activation or pooling, or anything else that the
        encoder here does not support; a file that is not JSON; weights that do not fit the config.
      FileNotFoundError: a file is missing.
      ImportError: tokenizers is not installed; the message has the line that installs it.
    """
    folder = Path(folder)
    config = _json(folder / "config.json")
    with reading(config) as read:

        def part(name: str) -> Reading:
            return Reading(_json(folder / name), read.problems, name)

        names = _check_modules(_json(folder / "modules.json", list), read.problems)
        if "Pooling" in names:
            _check_pooling(part("1_Pooling/config.json"))
        _check_model(read)
        read.problems |= dict.fromkeys(model_problems(config))
        limits = part("sentence_bert_config.json")
        if limits.flag("do_lower_case", default=False):
            limits.refuse("do_lower_case", True, "false: tokenizer.json says what is lower-cased")
        max_length = limits.number("max_seq_length", default=None)
        if max_length is None:  # newer versions write it elsewhere
            max_length = part("tokenizer_config.json").number("model_max_length")
        if (folder / _PROMPTS).is_file():
            prompts = part(_PROMPTS)
            if name := prompts.get("default_prompt_name"):
                prompts.refuse("default_prompt_name", name, "null: prompts are not supported")
    tokenizer = _tokenizer(folder / "tokenizer.json", max_length)
    model = load(folder / "model.safetensors")
    return SentenceEncoder(model, tokenizer, max_length, _NORMALIZE in names)


def _check_modules(modules: list[Any], problems: dict[Problem, None]) -> list[str]:
    """Return the names of the modules' classes, and report unsupported ones."""
    types = [str(m.get("type") if isinstance(m, dict) else m) for m in modules]
    names = [t.rpartition(".")[2] for t in types if t.startswith("sentence_transformers.")]
    if len(names) < len(types) or names not in (_MODULES, [*_MODULES, _NORMALIZE]):
        expected = f"{', '.join(_MODULES)} and perhaps {_NORMALIZE} of sentence_transformers"
        Reading({}, problems, "modules.json").refuse("type", types, expected)
    return names


def _check_pooling(pooling: Reading) -> None:
    names = sorted(name for name in pooling.config if name.startswith("pooling_mode_"))
    modes = pooling.get("pooling_mode", [name for name in names if pooling.get(name) is True])
    if modes not in ("mean", ["pooling_mode_mean_tokens"]):
        pooling.refuse("pooling_mode", modes, "'mean' or only pooling_mode_mean_tokens")


def _check_model(config: Reading) -> None:
    if (kind := config.get("model_type")) != "bert":
        config.refuse("model_type", kind, "'bert'")
    elif config.flag("is_decoder", default=False):
        config.refuse("is_decoder", True, "false")


def _tokenizer(path: Path, max_length: int) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ImportError(f"tokenizers is not installed: {install_line('models')}") from error
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected a tokenizer.json, got no such file")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length)
    return tokenizer


def _json(path: Path, kind: type = dict) -> Any:
    try:
        content = read_json(path)
    except (ValueError, RecursionError) as error:
        raise file_error(path, f"expected JSON: {error}") from error
    if not isinstance(content, kind):
        expected = "a JSON object" if kind is dict else "a JSON list"
        raise file_error(path, f"expected {expected}, got {type(content).__name__}")
    return content
