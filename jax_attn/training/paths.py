"""Arrays of a torch module by the port's paths, through the transfer table."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Self

import numpy as np
import torch
from flax import nnx

from jax_attn.training.runs import Arrays
from jax_attn.transfer import Layout, TransferError, flatten
from jax_attn.transfer.table.steps import Shape


@dataclass(frozen=True)
class Paths:
    """The port's paths, and what the table reads for them.

    shapes: path -> shape. names: the name by which torch knows a parameter -> the names under which
    the table reads it, several if the port does not tie it. buffers: name -> shape of each buffer
    that stands for a parameter of the port.
    """

    layout: Layout
    shapes: Mapping[str, Shape]
    names: Mapping[str, list[str]]
    buffers: Mapping[str, Shape]

    @classmethod
    def of(cls, module: torch.nn.Module, layout: Layout, port: nnx.Module) -> Self:
        """Pair two modules. port: only the shapes of its parameters are read."""
        shapes = {path: a.shape for path, a in flatten(port).items()}
        every: dict[int, list[str]] = {}
        for name, p in module.named_parameters(remove_duplicate=False):
            every.setdefault(id(p), []).append(name)
        buffers = {name: tuple(b.shape) for name, b in module.named_buffers()}
        known = [*chain.from_iterable(every.values()), *buffers]
        read = _read(layout.spelled_as(known), shapes)
        return cls(
            layout,
            shapes,
            {own[0]: [name for name in own if name in read] or own[:1] for own in every.values()},
            {name: shape for name, shape in buffers.items() if name in read},
        )

    def __call__(self, by_key: Arrays) -> dict[str, np.ndarray]:
        """Return arrays of the parameters, such as weights or gradients, by path.

        A buffer has zeros: it has no gradient and does not move.
        """
        tensors = {name: a for own, a in by_key.items() for name in self.names[own]}
        zeros = {name: np.zeros(shape) for name, shape in self.buffers.items()}
        return self.layout.to_flax(tensors | zeros, self.shapes)

    def by_key(self, by_path: Arrays) -> dict[str, np.ndarray]:
        """Return arrays by path as those of torch's parameters; zeros where there are none."""
        every = {path: by_path.get(path, np.zeros(shape)) for path, shape in self.shapes.items()}
        known = [*chain.from_iterable(self.names.values()), *self.buffers]
        tensors = self.layout.spelled_as(known).to_torch(every)
        return {own: tensors[names[0]] for own, names in self.names.items() if names[0] in tensors}

    @cached_property
    def constants(self) -> frozenset[str]:
        """Paths of parameters that stand for buffers of the reference."""
        if not self.buffers:
            return frozenset()
        tensors = self.layout.spelled_as(self.buffers).to_torch(
            {path: np.zeros(shape, np.int8) for path, shape in self.shapes.items()}
        )
        marks = {key: np.full(a.shape, key in self.buffers) for key, a in tensors.items()}
        marked = self.layout.to_flax(marks, self.shapes)
        return frozenset(path for path, mark in marked.items() if mark.any())


def _read(layout: Layout, shapes: Mapping[str, Shape]) -> Collection[str]:
    """Return the torch keys that the table reads for these paths; none if it does not fit them."""
    try:
        return layout.to_torch({path: np.zeros(shape, np.int8) for path, shape in shapes.items()})
    except TransferError:  # `to_flax` gives the reasons in torch's names
        return ()
