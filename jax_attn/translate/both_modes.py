"""Trace a reference in eval mode and, if its own code asks for it, in training mode too."""

from collections import Counter
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from jax_attn.translate.module.methods.leaves import leaf
from jax_attn.translate.tracing.export.alike import alike
from jax_attn.translate.tracing.export.exported import Exported, exported, unchanged
from jax_attn.translate.tracing.export.refusals import silence
from jax_attn.translate.tracing.export.sizes import Dynamic
from jax_attn.translate.tracing.problems import TranslationError, Unsupported
from jax_attn.translate.tracing.traced import TracedModule, traced
from jax_attn.translate.tracing.training import (
    called_elsewhere,
    leave_to_layers,
    name_dropouts,
    share_dropouts,
    working,
)
from jax_attn.translate.tracing.unsupported import unsupported

# What a class of the file keeps for training mode.
_KEPT = {"deterministic", "rngs"}


class BothModes(NamedTuple):
    """Hold a reference as it is traced.

    Attributes:
      evaluated: in eval mode.
      trained: in training mode; None if layers of the file do all that it does there, or if it
        cannot be translated.
      untrained: why it cannot be, or ().
    """

    evaluated: TracedModule
    trained: TracedModule | None = None
    untrained: tuple[Unsupported, ...] = ()


def in_both_modes(
    reference: nn.Module,
    inputs: Mapping[str, Any] | tuple[Any, ...],
    dynamic: Dynamic | None,
) -> BothModes:
    """Trace a reference.

    Raises:
      TranslationError: it cannot be traced in eval mode.
    """
    export = exported(reference, inputs, dynamic)
    layers = _layers(reference, called_elsewhere(export.program))
    if not export.readers - layers.keys() or _alike(reference, inputs):
        return BothModes(traced(export, reference))
    try:
        other = exported(reference, inputs, dynamic, is_training=True)
        trained = _trained(other, reference, layers)
    except TranslationError as error:
        return BothModes(traced(export, reference), None, error.problems)
    share_dropouts(export.program, other.program)
    return BothModes(traced(export, reference, {*working(trained.root)}), trained)


def _alike(reference: nn.Module, inputs: Mapping[str, Any] | tuple[Any, ...]) -> bool:
    """Return whether the reference does the same in both modes, as where each rate is 0."""
    tensors = (dict(reference.named_buffers()), inputs)
    buffers, given = tree_map_only(torch.Tensor, torch.clone, tensors)  # it may write into them
    args, kwargs = (given, {}) if isinstance(given, tuple) else ((), given)
    with unchanged(reference), silence():
        return alike(reference, lambda: functional_call(reference, buffers, args, kwargs))


def _layers(reference: nn.Module, elsewhere: Container[str]) -> dict[nn.Module, str]:
    """Return the modules that are layers of the file, which `train()` reaches, with their paths.

    elsewhere: the modules that are written where they are called, as those of several names are.
    """
    named = list(reference.named_modules(remove_duplicate=False))
    names = Counter(module for _, module in named)
    return {
        module: path
        for path, module in named
        if names[module] == 1
        and path not in elsewhere
        and (leaf(module) is not None or (type(module) is nn.Dropout and module.p == 0))
    }


def _trained(
    export: Exported, reference: nn.Module, layers: Mapping[nn.Module, str]
) -> TracedModule:
    """Arrange the graph of training mode.

    Raises:
      TranslationError: something in it has no translation.
    """
    names = [
        Unsupported("module", f"{path}.{name}".lstrip("."), "the file needs this name for training")
        for path, module in reference.named_modules()
        for name in sorted(_KEPT & {*vars(module), *module._modules, *module._buffers})
    ]
    buffers = {f"{path}.{name}" for module, path in layers.items() for name in module._buffers}
    leave_to_layers(export.program, buffers)
    name_dropouts(export.program)
    found = traced(export, reference)
    if problems := [*names, *unsupported(found)]:
        raise TranslationError(problems)
    return found
