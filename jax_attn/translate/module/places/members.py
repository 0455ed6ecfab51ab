"""Write what `__init__` makes: parameters, buffers and the modules below."""

import ast
import math
from collections.abc import Callable
from itertools import chain

import torch
from torch import nn

from jax_attn.translate.module.methods.leaves import dropout
from jax_attn.translate.module.places.arrays import array_text
from jax_attn.translate.module.places.containers import CONTAINERS, attribute_name
from jax_attn.translate.module.places.file_places import FilePlaces
from jax_attn.translate.rules.expression import DTYPES


class Members:
    """Write the statements of `__init__`.

    Args:
      places: where modules are.
      made_class: the constructor's call of a module that is a class of the file, by its path.
    """

    def __init__(self, places: FilePlaces, made_class: Callable[[str], str]) -> None:
        self.places = places
        self.made_class = made_class

    def init(self, path: str) -> dict[str, ast.stmt]:
        """Return the statement that makes each attribute, by its name."""
        module = self.places.modules[path]
        made: dict[str, ast.stmt] = {}
        tensors = (module.named_parameters(recurse=False), module.named_buffers(recurse=False))
        for name, tensor in chain(*tensors):
            if self._is_read(path, name):
                text = self._variable(f"{path}.{name}".lstrip("."), tensor)
                attribute = attribute_name(module, name)
                made[attribute] = self._assign(attribute, text)
        for constant, name in self.places.constants.attributes.get(path, {}).items():
            made[name] = self._assign(name, _buffer(self.places.constants.values[constant]))
        for name, rate in self.places.dropouts.get(path, {}).items():
            made[name] = self._assign(name, f"{dropout(rate)[:-1]}, rngs=rngs)")
        if isinstance(module, CONTAINERS):
            return {**made, "layers": self._assign("layers", self._members(path, module))}
        for name, child in module.named_children():
            below = f"{path}.{name}".lstrip(".")
            if self.places.is_present(below):
                attribute = attribute_name(module, name)
                made[attribute] = self._assign(attribute, self._made(below, child))
        return made

    def _is_read(self, path: str, tensor: str) -> bool:
        return f"{path}.{tensor}".lstrip(".") in self.places.tensors

    def _assign(self, name: str, text: str) -> ast.stmt:
        return ast.parse(f"self.{name} = {text}").body[0]

    def _variable(self, path: str, value: torch.Tensor) -> str:
        if isinstance(value, nn.Parameter) and self.places.is_carried(path):
            return f"nnx.Param({_start(value)})"
        if self.places.is_table(path) or self.places.is_carried(path):
            return _buffer(value)
        return f"Buffer({array_text(value)})"

    def _made(self, path: str, module: nn.Module) -> str:
        """Write the constructor of a module of the reference."""
        if self.places.is_container(path):
            return self._members(path, module)
        found = self.places.leaf_at(path)
        if found is None:
            return self.made_class(path)
        text = found.made(module)
        assert text is not None
        return text[:-1] + ", rngs=rngs)"

    def _members(self, path: str, module: nn.Module) -> str:
        """Write the list, or the dict, of what a container holds."""
        names = self.places.members(path)
        texts = [self._member(f"{path}.{name}".lstrip("."), module, name) for name in names]
        if isinstance(module, (nn.ModuleDict, nn.ParameterDict)):
            named = zip(names, texts, strict=True)
            return "nnx.Dict({" + ", ".join(f"{name!r}: {text}" for name, text in named) + "})"
        if len(texts) > 1 and len(set(texts)) == 1:
            return f"nnx.List([{texts[0]} for _ in range({len(texts)})])"
        return f"nnx.List([{', '.join(texts)}])"

    def _member(self, path: str, module: nn.Module, name: str) -> str:
        parameter = module._parameters.get(name)
        if parameter is not None:
            return self._variable(path, parameter)
        child = module._modules[name]
        assert child is not None
        return self._made(path, child)


def _buffer(value: torch.Tensor) -> str:
    """Write a buffer whose numbers are loaded with the weights."""
    return f"Buffer(jnp.zeros({tuple(value.shape)}, jnp.{DTYPES[value.dtype]}))"


def _start(value: torch.Tensor) -> str:
    """Write what a parameter is before weights are loaded: torch's constant, or drawn."""
    shape, flat = tuple(value.shape), value.detach().reshape(-1)
    dtype = ", jnp.complex64" if value.is_complex() else ""
    if flat.numel() and bool((flat == flat[0]).all()) and flat[0].item() in (0.0, 1.0):
        return f"jnp.{'ones' if flat[0] == 1 else 'zeros'}({shape}{dtype})"
    deviation = float(
        f"{float((flat.abs() if dtype else flat.float()).std()) if flat.numel() > 1 else 1.0:.1g}"
    )
    if not math.isfinite(deviation):  # it holds what memory held
        deviation = 1.0
    return f"{deviation} * jax.random.normal(rngs.params(), {shape}{dtype})"
