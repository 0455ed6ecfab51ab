"""Translate the model of a checkpoint: inputs are made for it, and all sizes vary that can."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from jax_attn.parity.checking.suggestion.input_table import is_position
from jax_attn.parity.checking.suggestion.suggest_inputs import suggest_inputs
from jax_attn.transfer import Problem, TransferError
from jax_attn.translate.pretrained import MAKE_IT, pretrained
from jax_attn.translate.rules.table import RULES
from jax_attn.translate.tracing.export.sizes import Dynamic
from jax_attn.translate.tracing.problems import TranslationError, Unsupported
from jax_attn.translate.translation import Translation, translate

Inputs = Mapping[str, Any] | tuple[Any, ...]


class AnySize(NamedTuple):
    """Hold a translation and the sizes that vary in it. fixed: why others do not, or ()."""

    translation: Translation
    dynamic: Dynamic
    fixed: tuple[Unsupported, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Return sentences on sizes that do not vary."""
        return tuple(f"a size that does not vary: {problem}" for problem in self.fixed)


class CheckpointModel(NamedTuple):
    """Hold a checkpoint's model and inputs for it. notes: what of the checkpoint it lacks."""

    module: torch.nn.Module
    inputs: Inputs
    notes: tuple[str, ...]


def model_of(path: Path, part: str | None = None) -> CheckpointModel:
    """Read the model of a checkpoint, or a part of it, and make inputs for it.

    Raises TransferError and MemoryError as `pretrained` does; TransferError also if no inputs are
    found on which the model runs.
    """
    found = pretrained(path, part)
    try:
        return CheckpointModel(found.module, inputs_for(found.module), found.notes)
    except ValueError as error:
        kind = type(found.module).__name__
        problem = Problem("refused", kind, f"no inputs could be made: {error}", MAKE_IT)
        raise TransferError(f"making inputs for {path}", [problem]) from error


def inputs_for(reference: torch.nn.Module) -> Inputs:
    """Make inputs by `suggest_inputs`, without positions that the reference counts by itself.

    Raises ValueError: see `suggest_inputs`.
    """
    inputs = suggest_inputs(reference)
    if isinstance(inputs, tuple):
        return inputs
    parameters = inspect.signature(reference.forward).parameters
    counted = {
        name
        for name in inputs
        if is_position(name) and parameters[name].default is not inspect.Parameter.empty
    }
    return {name: array for name, array in inputs.items() if name not in counted}


def axes_of(inputs: Inputs, names: Sequence[str]) -> Dynamic:
    """Name the axes that usually vary: B for rows, and T and S for the lengths of rows of tokens.

    B is the first axis, if all inputs begin with the same size. Lengths are the second axes of
    inputs that have two; equal lengths have one name.

    names: those of the arguments, for inputs by position.
    """
    by_name = dict(zip(names, inputs, strict=False)) if isinstance(inputs, tuple) else inputs
    shapes = {name: np.shape(array) for name, array in by_name.items()}
    if len({shape[:1] for shape in shapes.values()}) != 1 or () in shapes.values():
        return {}
    lengths = dict.fromkeys(shape[1] for shape in shapes.values() if len(shape) == 2)
    letters = dict(zip(lengths, "TSRQ", strict=False))
    return {
        name: {0: "B", 1: letters[shape[1]]} if len(shape) == 2 else {0: "B"}
        for name, shape in shapes.items()
    }


def translate_any_size(
    reference: torch.nn.Module, inputs: Inputs, *, partial: bool = False
) -> AnySize:
    """Translate with every size of `axes_of` that varies, else with B alone, else with none.

    Raises TranslationError: the reference cannot be translated at the sizes of the inputs either.
    """
    axes = axes_of(inputs, [*inspect.signature(reference.forward).parameters])
    batch = {name: {0: "B"} for name in axes}
    fixed: tuple[Unsupported, ...] = ()
    for dynamic in (axes, batch) if axes else ():
        try:
            made = translate(reference, inputs, dynamic=dynamic, partial=partial)
        except TranslationError as error:
            if any(map(_is_of_any_size, error.problems)):
                raise
            fixed = fixed or error.problems
        else:
            return AnySize(made, dynamic, fixed)
    return AnySize(translate(reference, inputs, partial=partial), {}, fixed)


def _is_of_any_size(problem: Unsupported) -> bool:
    """Return whether a problem stays if no size varies."""
    if problem.kind == "operator":
        return problem.operator not in RULES  # else its rule may refuse a size that varies
    return problem.kind in ("input", "random", "buffer", "autocast", "alias")
