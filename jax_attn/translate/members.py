"""What `__init__` makes: parameters, buffers and the modules below."""

import ast
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from jax_attn.translate.expression import DTYPES
from jax_attn.translate.leaves import leaf
from jax_attn.translate.places import CONTAINERS, LARGEST_LITERAL, Places


class Members:
    """Write the statements of `__init__`.

    Args:
      places: where modules are.
      made_class: the constructor's call of a module that is a class of the file, by its path.
    """

    def __init__(self, places: Places, made_class: Callable[[str], str]) -> None:
        self.places = places
        self.made_class = made_class

    def init(self, path: str) -> list[ast.stmt]:
        module = self.places.modules[path]
        made: list[ast.stmt] = []
        for name, parameter in module.named_parameters(recurse=False):
            if self._is_read(path, name):
                made.append(self._assign(name, f"nnx.Param({_start(parameter)})"))
        buffers = dict(module.named_buffers(recurse=False))
        for name, buffer in buffers.items():
            if self._is_read(path, name):
                made.append(self._assign(name, self._buffer(module, name, buffer)))
        if isinstance(module, CONTAINERS):
            return [self._assign("layers", self._members(path, module))]
        for name, child in module.named_children():
            below = f"{path}.{name}".lstrip(".")
            if self.places.is_present(below):
                text = self._made(below, child)
                if text is not None:
                    made.append(self._assign(name, text))
        return made

    def _is_read(self, path: str, tensor: str) -> bool:
        return f"{path}.{tensor}".lstrip(".") in self.places.tensors

    def _assign(self, name: str, text: str) -> ast.stmt:
        return ast.parse(f"self.{name} = {text}").body[0]

    def _buffer(self, module: nn.Module, name: str, value: torch.Tensor) -> str:
        dtype = f"jnp.{DTYPES[value.dtype]}"
        if name not in module._non_persistent_buffers_set:
            return f"Buffer(jnp.zeros({tuple(value.shape)}, {dtype}))"
        return f"Buffer({_values(value)})"

    def _made(self, path: str, module: nn.Module) -> str | None:
        """Write the constructor of a module of the reference."""
        if isinstance(module, CONTAINERS):
            return self._members(path, module)
        if path in self.places.calls:
            return self.made_class(path)
        found = leaf(module)
        if found is not None:
            text = found.made(module)
            assert text is not None
            return text[:-1] + ", rngs=rngs)"
        if not self.places.is_present(path):
            return None
        raise NotImplementedError(
            f"`{path}` ({type(module).__name__}) is never called, and its tensors are read"
        )

    def _members(self, path: str, module: nn.Module) -> str:
        """Write the list, or the dict, of the modules that a container holds."""
        members = []
        for name, child in module.named_children():
            below = f"{path}.{name}".lstrip(".")
            if self.places.is_present(below) and (text := self._made(below, child)) is not None:
                members.append((name, text))
        texts = [text for _, text in members]
        if isinstance(module, nn.ModuleDict):
            return "nnx.Dict(" + ", ".join(f"{name}={text}" for name, text in members) + ")"
        if len(texts) > 1 and len(set(texts)) == 1:
            return f"nnx.List([{texts[0]} for _ in range({len(texts)})])"
        return f"nnx.List([{', '.join(texts)}])"


def _start(value: torch.Tensor) -> str:
    """Write what a parameter is before weights are loaded: torch's constant, or drawn."""
    shape = tuple(value.shape)
    flat = value.detach().reshape(-1)
    if flat.numel() and bool((flat == flat[0]).all()) and float(flat[0]) in (0.0, 1.0):
        return f"jnp.{'ones' if flat[0] == 1 else 'zeros'}({shape})"
    deviation = float(f"{float(flat.float().std()) if flat.numel() > 1 else 1.0:.1g}")
    return f"{deviation} * jax.random.normal(rngs.params(), {shape})"


def _values(value: torch.Tensor) -> str:
    """Write the values of a buffer that no file of weights holds."""
    dtype = f"jnp.{DTYPES[value.dtype]}"
    shape = tuple(value.shape)
    flat = value.detach().reshape(-1)
    if flat.numel() and bool((flat == flat[0]).all()):
        return f"jnp.full({shape}, {flat[0].item()!r}, {dtype})"
    if value.numel() > 1 and torch.equal(flat, torch.arange(flat.numel()).to(flat.dtype)):
        count = f"jnp.arange({flat.numel()}, dtype={dtype})"
        return count if len(shape) == 1 else f"{count}.reshape({shape})"
    if flat.numel() > LARGEST_LITERAL:
        raise NotImplementedError(f"a buffer of {flat.numel()} elements that no file holds")
    numbers = np.asarray(flat.float().numpy() if flat.is_floating_point() else flat.numpy())
    text = f"jnp.array({numbers.tolist()!r}, {dtype})"
    return text if len(shape) == 1 else f"{text}.reshape({shape})"
