"""A module traced, and the calls in it."""

from collections.abc import Iterator
from typing import Any

import torch

from jax_attn.translate.tracing.calls import ModuleCall
from jax_attn.translate.tracing.export.exported import exported
from jax_attn.translate.tracing.traced import TracedModule, traced

X = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))


def tree(
    reference: torch.nn.Module, *inputs: Any, dynamic: Any = None, **named: Any
) -> TracedModule:
    return traced(exported(reference, inputs or named, dynamic), reference)


def calls(call: ModuleCall) -> Iterator[ModuleCall]:
    """Iterate over the calls below one, in order."""
    for step in call.steps:
        if isinstance(step, ModuleCall):
            yield step
            yield from calls(step)
