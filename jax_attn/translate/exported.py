"""A torch module as one functional graph of operators, with the modules that ran them."""

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.export import Dim, ExportedProgram

Dynamic = Mapping[str, Mapping[int, str]]


def exported(
    reference: torch.nn.Module,
    inputs: Mapping[str, torch.Tensor] | tuple[torch.Tensor, ...],
    dynamic: Dynamic | None = None,
) -> ExportedProgram:
    """Export a module, in eval mode, as one graph without in-place operators.

    Args:
      reference: the module; it is not changed.
      inputs: its inputs, positional or by name.
      dynamic: the axes whose sizes vary, by input and axis, each with the name of its size. Two
        axes with one name have one size.
    """
    args, kwargs = (inputs, {}) if isinstance(inputs, tuple) else ((), dict(inputs))
    sizes: dict[str, Any] = {}
    for axes in (dynamic or {}).values():
        for name in axes.values():
            sizes.setdefault(name, Dim(name, min=2))
    shapes = None
    if dynamic:
        names = (
            list(kwargs)
            if kwargs
            else list(inspect.signature(reference.forward).parameters)[: len(args)]
        )
        shapes = {
            name: {axis: sizes[size] for axis, size in dynamic.get(name, {}).items()}
            for name in names
        }
    paths = tuple(name for name, _ in reference.named_modules(remove_duplicate=False) if name)
    was_training = reference.training
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program = torch.export.export(
                reference.eval(),
                args,
                kwargs,
                dynamic_shapes=shapes,
                strict=False,
                preserve_module_call_signature=paths,
            )
        finally:
            reference.train(was_training)
        return program.run_decompositions({})
