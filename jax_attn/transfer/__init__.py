"""Weights between torch names and those of a port in JAX, through tables, bit for bit.

Files and tables need no framework. `plan`, `load`, `export`, `merge_lora`, `flatten`, `infer`,
`load_optimizer` and `export_optimizer` import jax and flax when first used; reading one of torch's
own files imports torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jax_attn.transfer.arrays import as_numpy
from jax_attn.transfer.files.checkpoint import Checkpoint, load_checkpoint
from jax_attn.transfer.files.writing import save_checkpoint
from jax_attn.transfer.problems import Problem, TransferError
from jax_attn.transfer.table.layout import Layout, spellings
from jax_attn.transfer.table.layouts import (
    EMBEDDING,
    FLAX_NAMES,
    FROM_HEADS,
    LAYER_NORM,
    LAYOUTS,
    LINEAR,
    PLAIN_PIPELINE,
    TO_HEADS,
)
from jax_attn.transfer.table.rows import either, ignored, refused, row, tied
from jax_attn.transfer.table.stacks import alternating, conv_bias, linears, packed_stack, stacked
from jax_attn.transfer.table.steps import (
    Sizes,
    Step,
    conv,
    grouped,
    heads,
    heads_in,
    in_parts,
    inward,
    joined,
    linear,
    packed,
    squeezed,
    to_half_split,
    to_interleaved,
)

if TYPE_CHECKING:
    from jax_attn.families.layout_for import layout_for
    from jax_attn.transfer.nnx.adapters import merge_lora
    from jax_attn.transfer.nnx.load import Plan, export, load, load_flax, plan
    from jax_attn.transfer.nnx.variables import flatten
    from jax_attn.transfer.optimizer.carry import export_optimizer, load_optimizer
    from jax_attn.transfer.proposal.infer import Proposal, infer

_NNX = ("Plan", "export", "load", "load_flax", "plan")
_HOMES = dict.fromkeys(_NNX, "jax_attn.transfer.nnx.load")
_HOMES |= dict.fromkeys(("export_optimizer", "load_optimizer"), "jax_attn.transfer.optimizer.carry")
_HOMES |= dict.fromkeys(("Proposal", "infer"), "jax_attn.transfer.proposal.infer")
_HOMES |= {"flatten": "jax_attn.transfer.nnx.variables"}
_HOMES |= {"merge_lora": "jax_attn.transfer.nnx.adapters"}
_HOMES |= {"layout_for": "jax_attn.families.layout_for"}

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
    "Proposal",
    "Sizes",
    "Step",
    "TransferError",
    "alternating",
    "as_numpy",
    "conv",
    "conv_bias",
    "either",
    "export",
    "export_optimizer",
    "flatten",
    "grouped",
    "heads",
    "heads_in",
    "ignored",
    "in_parts",
    "infer",
    "inward",
    "joined",
    "layout_for",
    "linear",
    "linears",
    "load",
    "load_checkpoint",
    "load_flax",
    "load_optimizer",
    "merge_lora",
    "packed",
    "packed_stack",
    "plan",
    "refused",
    "row",
    "save_checkpoint",
    "spellings",
    "squeezed",
    "stacked",
    "tied",
    "to_half_split",
    "to_interleaved",
]


if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            return getattr(importlib.import_module(_HOMES[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
