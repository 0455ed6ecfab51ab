"""Prove a translation: outputs and every gradient, at the sizes it was traced at and at others."""

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch
from flax import nnx

from jax_attn import transfer
from jax_attn.parity.checking.check import check
from jax_attn.parity.judge.result import Result
from jax_attn.translate.other_sizes import as_named, other_inputs
from jax_attn.translate.outputs import called
from jax_attn.translate.tracing.exported import Dynamic
from jax_attn.translate.translation import Translation

Inputs = Mapping[str, Any] | tuple[Any, ...]


def loaded(translation: Translation, reference: torch.nn.Module) -> nnx.Module:
    """Build the translation, with the weights of its reference and no drawn ones before."""
    port: nnx.Module = nnx.eval_shape(lambda: translation.build(nnx.Rngs(0)))
    others = jax.jit(lambda: nnx.state(translation.build(nnx.Rngs(0)), nnx.Not(nnx.Param)))()
    nnx.update(port, others)
    transfer.load(port, reference.state_dict(), translation.layout)
    return port


def prove(
    translation: Translation,
    reference: torch.nn.Module,
    inputs: Inputs,
    *,
    dynamic: Dynamic | None = None,
    port: nnx.Module | None = None,
) -> Result:
    """Check that a translation computes what its reference computes in eval mode, in float32.

    Every output is compared, named by its path in what the reference returns, and the gradient of
    every parameter and floating-point input; eager and jitted. With `dynamic`, also on inputs of
    other sizes, made from the given ones: sizes beyond them, and sizes of 1, where the reference
    runs on them and stays finite.

    Args:
      translation: what `translate` returned.
      reference: the module, in float32.
      inputs: its inputs as tensors or NumPy arrays, positional or by name.
      dynamic: as for `translate`.
      port: the translation as `loaded` made it; made here if it is left out.

    Returns:
      The result of `parity.check`.

    Raises:
      ValueError, TypeError: as `parity.check` raises them.
    """
    given = _arrays(inputs)
    if reference.training:
        reference = copy.deepcopy(reference).eval()
    return check(
        reference,
        loaded(translation, reference) if port is None else port,
        [given, *_others(reference, given, dynamic)] if dynamic else given,
        layout=translation.layout,
        reference_call=called,
        port_call=called,
        dtype="float32",
    )


def _arrays(inputs: Inputs) -> Any:
    if isinstance(inputs, tuple):
        return tuple(map(transfer.as_numpy, inputs))
    return {name: transfer.as_numpy(value) for name, value in inputs.items()}


def _others(reference: torch.nn.Module, given: Any, dynamic: Dynamic) -> list[Any]:
    """Return inputs of other sizes, by position if the given ones are."""
    names = [*inspect.signature(reference.forward).parameters]

    def bound(arrays: Mapping[str, np.ndarray]) -> Any:
        return tuple(arrays.values()) if isinstance(given, tuple) else arrays

    def runs(arrays: Mapping[str, np.ndarray]) -> bool:
        tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        try:
            with torch.no_grad():
                result = (
                    called(reference, *tensors.values())
                    if isinstance(given, tuple)
                    else called(reference, **tensors)
                )
        except Exception:  # whatever a module says of sizes that it does not take
            return False
        found = result.values() if isinstance(result, dict) else [result]
        return all(bool(torch.isfinite(each).all()) for each in found)

    return [bound(each) for each in other_inputs(as_named(given, names), dynamic, runs)]
