"""Blocks whose queries and keys turn, at positions where a wrong turn is seen."""

from dataclasses import dataclass

import numpy as np
import torch

from helpers.families.family_cases import BlockPair, T, added
from helpers.families.family_mistakes import otherwise
from jax_attn.porting.verify import rebuild
from jax_attn.transfer import TransferError

# So far apart that the slowest pair turns. At 0 … T − 1 a wrong base or scaling would go unseen,
# and a key bias has hardly a gradient: no softmax sees what all keys share.
POSITIONS = np.stack([3 + 260 * np.arange(T), 80 * np.arange(T)])


@dataclass(frozen=True)
class Turned(BlockPair):
    """theirs: (module, x, added mask, positions (B, T)) -> output (B, T, D).

    It works its angles out anew: "dynamic" ones depend on what was asked before, and only what a
    call makes itself is known to be a constant, which a model in bfloat16 keeps in float32.
    """

    @property
    def inputs(self):
        return super().inputs | {"positions": POSITIONS}

    def call_reference(self, module, x, lengths, positions):
        mask = added(rebuild.torch_mask(self.traits, lengths, T), x.dtype)
        return self.theirs(module, x, mask, positions)

    def call_port(self, module, x, lengths, positions):
        return module(x, mask=rebuild.flax_mask(self.traits, lengths), positions=positions)


def drawn(module: torch.nn.Module) -> torch.nn.Module:
    """The module with parameters of which no two are alike, and scores of standard size."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.normal_(0, p.shape[-1] ** -0.5 if p.ndim > 1 else 0.5, generator=generator)
            if "norm" in name.lower() and name.endswith("weight"):
                p += 1
    return module


def turning(**fields):
    """The mistake of queries and keys that turn otherwise."""
    return lambda block: otherwise(rotary=block.traits.rotary._replace(**fields))(block)


def named(error: TransferError) -> str:
    """What an error says, its names without quotes."""
    return "\n".join(f"{problem.name}: {problem.text}" for problem in error.problems)
