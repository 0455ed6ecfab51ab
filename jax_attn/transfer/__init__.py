"""Attention weights between torch names and NNX state, through tables, bit for bit.

Files and tables need no framework; `plan`, `load`, `export` and `flatten` import jax and flax
when first used. torch is never imported.
"""

import importlib

from jax_attn.transfer.arrays import as_numpy
from jax_attn.transfer.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from jax_attn.transfer.layout import Layout
from jax_attn.transfer.layouts import (
    EMBEDDING,
    FLAX_NAMES,
    FROM_HEADS,
    LAYER_NORM,
    LAYOUTS,
    LINEAR,
    PLAIN_PIPELINE,
    TO_HEADS,
)
from jax_attn.transfer.problems import Problem, TransferError
from jax_attn.transfer.rows import either, ignored, refused, row, tied
from jax_attn.transfer.steps import (
    Sizes,
    Step,
    grouped,
    heads,
    heads_in,
    inward,
    joined,
    linear,
    packed,
    to_half_split,
    to_interleaved,
)

_ON_STATE = ("Plan", "export", "flatten", "load", "plan")

__all__ = [
    "EMBEDDING",
    "FLAX_NAMES",
    "FROM_HEADS",
    "LAYER_NORM",
    "LAYOUTS",
    "LINEAR",
    "PLAIN_PIPELINE",
    "TO_HEADS",
    "Checkpoint",
    "Layout",
    "Plan",
    "Problem",
    "Sizes",
    "Step",
    "TransferError",
    "as_numpy",
    "either",
    "export",
    "flatten",
    "grouped",
    "heads",
    "heads_in",
    "ignored",
    "inward",
    "joined",
    "linear",
    "load",
    "load_checkpoint",
    "packed",
    "plan",
    "refused",
    "row",
    "save_checkpoint",
    "tied",
    "to_half_split",
    "to_interleaved",
]


def __getattr__(name: str):
    if name in _ON_STATE:
        return getattr(importlib.import_module("jax_attn.transfer.state"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
