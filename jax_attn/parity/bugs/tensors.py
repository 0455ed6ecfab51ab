"""Plant a bug in what a reference is given: its inputs, and the tensors that its modules hold."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from jax_attn.parity.run.inputs_and_runs import Inputs
from jax_attn.parity.run.reference import Reference


def with_inputs(reference: Reference, others: Mapping[str, np.ndarray]) -> Reference:
    """Return the reference with some inputs replaced, cast to the dtypes that they had."""
    named = {
        name: others[name].astype(given.dtype) if name in others else given
        for name, given in reference.inputs.by_name.items()
    }
    args = tuple(named.pop(str(i)) for i in range(len(reference.inputs.args)))
    return reference.given(Inputs(args, named))


def with_tensors(
    reference: Reference, changes: Mapping[str, Callable[[torch.Tensor], torch.Tensor]]
) -> Reference:
    """Return the reference with some parameters or buffers replaced, each where it is named.

    changes: path -> a function that returns the new tensor. It is given a copy, so that nothing can
    be written to the parameters that all runs share.
    """
    call = reference.call or torch.nn.Module.__call__

    def changed(module: torch.nn.Module, *args: Any, **inputs: Any) -> Any:
        for path, change in changes.items():
            of, _, name = path.rpartition(".")
            part = module.get_submodule(of)
            held = getattr(part, name)
            other = change(held.detach().clone())
            if isinstance(held, torch.nn.Parameter):
                other = torch.nn.Parameter(other, requires_grad=held.requires_grad)
            setattr(part, name, other)
        return call(module, *args, **inputs)

    return reference.called(changed)
