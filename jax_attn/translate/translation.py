"""Write the source of an NNX module that computes what a torch module computes."""

import inspect
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from flax import nnx

from jax_attn.transfer import Layout
from jax_attn.translate.calls import Traced, traced
from jax_attn.translate.classes import Classes
from jax_attn.translate.exported import Dynamic, exported
from jax_attn.translate.other_sizes import as_named, traced_sizes
from jax_attn.translate.source import file_text


@dataclass(frozen=True)
class Translation:
    """A translated module.

    Attributes:
      source: the text of a Python file that imports jax and flax alone.
      layout: the table between the reference's tensors and those of the module.
      name: the class of the module.
    """

    source: str
    layout: Layout
    name: str

    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        """Run the source and make the module, with weights that are not yet the reference's."""
        module = types.ModuleType("translated")
        exec(compile(self.source, "translated.py", "exec"), module.__dict__)
        made = getattr(module, self.name)(rngs=rngs)
        assert isinstance(made, nnx.Module)
        return made


def translate(
    reference: torch.nn.Module,
    inputs: Mapping[str, Any] | tuple[Any, ...],
    *,
    dynamic: Dynamic | None = None,
) -> Translation:
    """Translate a torch module.

    Args:
      reference: the module.
      inputs: its inputs as tensors or NumPy arrays, positional or by name.
      dynamic: the axes whose sizes vary, `{"input_ids": {0: "B", 1: "T"}}`.

    Raises:
      TypeError: the reference is no torch module.
      ValueError: the inputs do not have the axes of `dynamic`; every reason is listed.
      NotImplementedError: an operator that has no rule.
    """
    if not isinstance(reference, torch.nn.Module):
        raise TypeError(f"reference: expected a torch.nn.Module, got {type(reference).__name__}")
    names = list(inspect.signature(reference.forward).parameters)
    traced_sizes(as_named(inputs, names), dynamic or {})
    tensors: Any = (
        tuple(map(_tensor, inputs))
        if isinstance(inputs, tuple)
        else {name: _tensor(value) for name, value in inputs.items()}
    )
    found = traced(exported(reference, tensors, dynamic), reference)
    classes = Classes(found, _sizes(found, dynamic))
    ordered = classes.classes
    title = f"{type(reference).__name__}, translated from torch."
    return Translation(file_text(ordered, title), Layout(*classes.rows()), ordered[-1].name)


def _tensor(value: Any) -> Any:
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value)


def _sizes(found: Traced, dynamic: Dynamic | None) -> dict[str, str]:
    names: dict[str, str] = {}
    for argument, axes in (dynamic or {}).items():
        node = found.root.given[argument]
        for axis, name in axes.items():
            size = node.meta["val"].shape[axis]
            if isinstance(size, torch.SymInt):
                names[str(size.node.expr)] = name
    return names
