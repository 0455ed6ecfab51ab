"""Prove a translation: outputs and every gradient, at the sizes it was traced at and at others."""

import copy
import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import torch
from flax import nnx

from jax_attn import transfer
from jax_attn.parity.checking.check import check
from jax_attn.parity.checking.several_inputs import join_results
from jax_attn.parity.judge.finding import StandingNote, findings
from jax_attn.parity.judge.result import Result
from jax_attn.translate.other_sizes import as_named, other_inputs
from jax_attn.translate.outputs import called
from jax_attn.translate.same_draws import called_with_draws, jax_with_draws
from jax_attn.translate.tracing.export.exported import Dynamic
from jax_attn.translate.translation import Translation

Inputs = Mapping[str, Any] | tuple[Any, ...]


def loaded(translation: Translation, reference: torch.nn.Module) -> nnx.Module:
    """Build the translation, with the weights of its reference and no drawn ones before."""
    port: nnx.Module = nnx.eval_shape(lambda: translation.build(nnx.Rngs(0)))
    others = jax.jit(lambda: nnx.state(translation.build(nnx.Rngs(0)), nnx.Not(nnx.Param)))()
    nnx.update(port, others)
    if tensors := reference.state_dict():  # a loss may have none
        transfer.load(port, tensors, translation.layout)
    return port


def prove(
    translation: Translation,
    reference: torch.nn.Module,
    inputs: Inputs,
    *,
    dynamic: Dynamic | None = None,
    port: nnx.Module | None = None,
) -> Result:
    """Check that a translation computes what its reference computes, in float32.

    Every output is compared, named by its path in what the reference returns, and the gradient of
    every parameter and floating-point input; eager and jitted. With `dynamic`, also on inputs of
    other sizes, made from the given ones: sizes beyond them, and sizes of 1, where the reference
    runs on them and stays finite.

    Both are in eval mode. If the source has what the reference does in training mode only, both are
    compared in training mode too, jitted, on the first inputs of other sizes if there are any: both
    sides draw the same random numbers, so that what is dropped is compared as all else is.

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
    others = _others(reference, given, dynamic) if dynamic else []
    result = check(
        reference,
        loaded(translation, reference) if port is None else port,
        [given, *others] if dynamic else given,
        layout=translation.layout,
        reference_call=called,
        port_call=called,
        dtype="float32",
    )
    left_out = findings("training-left-out", translation.training_notes)
    result = replace(result, notes=(*left_out, *result.notes))
    if not translation.is_trained:
        return result
    trained = _in_training(translation, reference, others[0] if others else given)
    return join_results([result, trained], ["", "training"])


def _in_training(translation: Translation, reference: torch.nn.Module, given: Any) -> Result:
    """Check a translation in training mode, with the same random numbers on both sides."""
    port = loaded(translation, reference)
    port.train()
    with jax_with_draws():
        result = check(
            copy.deepcopy(reference).train(),
            port,
            given,
            layout=translation.layout,
            reference_call=called_with_draws,
            port_call=called,
            dtype="float32",
            transforms=("jit",),
        )

    def explain(found: Result) -> Any:
        with jax_with_draws():
            return replace(found, explainer=result.explainer).explain()

    notes = tuple(
        note
        for note in result.notes
        if note.kind != "draws-random" and not isinstance(note, StandingNote)
    )
    return replace(result, notes=notes, explainer=explain)


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
