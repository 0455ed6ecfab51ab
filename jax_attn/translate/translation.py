"""Write the source of an NNX module that computes what a torch module computes."""

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from jax_attn import transfer
from jax_attn.transfer import Layout
from jax_attn.translate.both_modes import BothModes, in_both_modes
from jax_attn.translate.module.classes import Class, Classes
from jax_attn.translate.module.methods.expressions import RAISING
from jax_attn.translate.module.places.file_places import FilePlaces
from jax_attn.translate.module.source import file_text
from jax_attn.translate.tracing.export.sizes import Dynamic
from jax_attn.translate.tracing.problems import TranslationError, Unsupported
from jax_attn.translate.tracing.unsupported import unsupported


@dataclass(frozen=True)
class Translation:
    """Hold a translated module.

    Attributes:
      source: the text of a Python file that imports jax and flax alone.
      layout: the table between the reference's tensors and those of the module.
      name: the class of the module.
      tables: buffers that no state dict of the reference holds and that are too large for the
        source, by their path in the module.
      unsupported: what has no translation, of a partial one: the source calls `not_translated`
        there, which raises NotImplementedError.
      is_trained: whether the source has what the reference's own code does in training mode only.
      untrained: why the source lacks it, or ().
    """

    source: str
    layout: Layout
    name: str
    tables: Mapping[str, np.ndarray] = field(default_factory=dict)
    unsupported: tuple[Unsupported, ...] = ()
    is_trained: bool = False
    untrained: tuple[Unsupported, ...] = ()

    @property
    def training_notes(self) -> tuple[str, ...]:
        """Return sentences on what the source lacks of what the reference does in training mode."""
        return tuple(f"only eval mode is translated: {problem}" for problem in self.untrained)

    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        """Run the source and make the module, with weights that are not yet the reference's."""
        module = types.ModuleType("translated")
        exec(compile(self.source, "translated.py", "exec"), module.__dict__)
        made = getattr(module, self.name)(rngs=rngs)
        assert isinstance(made, nnx.Module)
        variables = {".".join(map(str, path)): value for path, value in nnx.iter_graph(made)}
        for path, array in self.tables.items():
            variables[path][...] = jnp.array(array)
        return made


def translate(
    reference: torch.nn.Module,
    inputs: Mapping[str, Any] | tuple[Any, ...],
    *,
    dynamic: Dynamic | None = None,
    partial: bool = False,
) -> Translation:
    """Translate a torch module.

    Args:
      reference: the module.
      inputs: its inputs as tensors or NumPy arrays, or sequences and dicts of these, positional or
        by name.
      dynamic: the axes whose sizes vary, `{"input_ids": {0: "B", 1: "T"}}`.
      partial: whether to write the source although operators have no rule; it raises there.

    Raises:
      TranslationError: the module cannot be translated; every reason at once.
      TypeError: the reference is no torch module.
    """
    if not isinstance(reference, torch.nn.Module):
        raise TypeError(f"reference: expected a torch.nn.Module, got {type(reference).__name__}")
    tensors = torch.utils._pytree.tree_map(_tensor, inputs)
    found = in_both_modes(reference, tensors, dynamic)
    problems = unsupported(found.evaluated)
    _expect_none(problems, partial)
    places, ordered, untrained = _written(found)
    problems = [*dict.fromkeys([*problems, *places.problems])]
    _expect_none(problems, partial)
    title = f"{type(reference).__name__}, translated from torch."
    return Translation(
        file_text(ordered, places.functions.written, title),
        layout(places),
        ordered[-1].name,
        places.tables(),
        tuple(problems),
        not untrained and (bool(places.dropouts) or any(one.has_modes for one in ordered)),
        untrained,
    )


def _written(found: BothModes) -> tuple[FilePlaces, list[Class], tuple[Unsupported, ...]]:
    """Write the classes, for both modes if that is possible; else the reasons come last."""
    untrained = found.untrained
    if found.trained is not None:
        places = FilePlaces(found.evaluated, found.trained)
        ordered = Classes(places).classes
        if not places.problems:
            return places, ordered, untrained
        untrained = tuple(places.problems)
    places = FilePlaces(found.evaluated)
    return places, Classes(places).classes, untrained


def layout(places: FilePlaces) -> transfer.Layout:
    """Return the table between the reference's tensors and those of the file."""
    rows: dict[str, Any] = {}
    tensors = places.reference.state_dict(keep_vars=True)
    by_id = {id(tensor): name for name, tensor in tensors.items() if name in places.tensors}
    for name, tensor in tensors.items():
        if name in places.tensors:
            continue
        first = by_id.get(id(tensor))
        rows[name] = (
            transfer.ignored(name, "not used by the outputs")
            if first is None
            else transfer.tied(name, first)
        )
    pairs: dict[str, list[tuple[str, str, Any]]] = {}
    for name in places.tensors:
        if name not in tensors:
            continue
        if not places.is_carried(name):
            rows[name] = transfer.ignored(name, "integers that the source writes")
            continue
        path, _, tensor = name.rpartition(".")
        held = places.leaf_at(path)
        step = held.tensors[tensor].step if held is not None else None
        steps = (step,) if step is not None else ()
        pairs.setdefault(_blank(name), []).append((name, places.target(name), steps))
    for group in pairs.values():
        (key, target), *others = {_pattern(name, target) for name, target, _ in group}
        steps = group[0][2]
        if len(group) > 1 and not others and all(each == steps for *_, each in group):
            rows[key] = transfer.row(key, target, *steps)
        else:
            rows |= {name: transfer.row(name, target, *steps) for name, target, steps in group}
    return transfer.Layout(*rows.values())


def _blank(name: str) -> str:
    """Return a name without its integers."""
    return ".".join("" if part.isdigit() else part for part in name.split("."))


def _pattern(key: str, path: str) -> tuple[str, str]:
    """Write the integers that a key and a path share as names in braces."""
    theirs, ours = key.split("."), path.split(".")
    if [part for part in theirs if part.isdigit()] != [part for part in ours if part.isdigit()]:
        return key, path

    def filled(parts: list[str]) -> str:
        names = iter(("{layer}", "{part}", "{piece}", "{item}", "{member}"))
        return ".".join(next(names) if part.isdigit() else part for part in parts)

    return filled(theirs), filled(ours)


def _expect_none(problems: Sequence[Unsupported], partial: bool) -> None:
    """Raise TranslationError for problems; in a partial translation only where no call can raise.

    Such a problem is not of one operator: a module called in two ways, a write into a buffer.
    """
    if any(not partial or problem.kind not in RAISING for problem in problems):
        raise TranslationError(problems)


def _tensor(value: Any) -> Any:
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
