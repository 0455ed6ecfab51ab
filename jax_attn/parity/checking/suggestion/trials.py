"""Run a reference on arrays that it may refuse."""

import inspect
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import torch

from jax_attn.parity.bugs.planting import Watched
from jax_attn.parity.bugs.softmax import Weightless
from jax_attn.parity.checking.suggestion.input_table import Choice, Lengths, MaskForm
from jax_attn.parity.judge.compare import POWER
from jax_attn.parity.run.call_side import as_raised
from jax_attn.parity.run.inputs_and_runs import Arrays, Inputs, float_dtype, is_float
from jax_attn.parity.run.reference import Reference


@dataclass(frozen=True)
class Signature:
    """The signature of a reference's call: names in order, and those without a default.

    positional: whether arrays are passed by position, as to a call that takes `*args` and no
    `**inputs`.
    """

    parameters: tuple[str, ...]
    required: tuple[str, ...]
    positional: bool

    @classmethod
    def of(cls, module: torch.nn.Module, call: Callable[..., Any] | None) -> "Signature":
        of_forward = list(inspect.signature(module.forward).parameters.values())
        of_call = list(inspect.signature(call).parameters.values())[1:] if call else of_forward
        named = [p for p in of_call if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if not named:
            named = [p for p in of_forward if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        kinds = {p.kind for p in (*of_call, *named)}
        by_keyword = inspect.Parameter.VAR_KEYWORD in kinds
        positional = inspect.Parameter.POSITIONAL_ONLY in kinds or (
            inspect.Parameter.VAR_POSITIONAL in kinds and not by_keyword
        )
        required = [p.name for p in named if p.default is p.empty]
        names = required if positional else [p.name for p in named]
        return cls(tuple(names), tuple(required), positional)

    def bound(self, arrays: Arrays) -> dict[str, np.ndarray] | tuple[np.ndarray, ...]:
        ordered = {name: arrays[name] for name in self.parameters if name in arrays}
        return tuple(ordered.values()) if self.positional else ordered


@dataclass
class ReferenceTrial:
    """A reference and the way to call it. fixed: the arrays that the caller gave."""

    module: torch.nn.Module
    call: Callable[..., Any] | None
    dtype: str
    seed: int
    signature: Signature
    fixed: Arrays
    refusals: list[str] = field(default_factory=list)

    def draw(self, name: str, choice: Choice, lengths: Lengths) -> np.ndarray | None:
        """Draw an array, whatever was tried before; None if an axis has no length."""
        shape = choice.shape(lengths)
        return None if shape is None else self._kept(choice.draw(self._generator(name), shape))

    def mask(self, name: str, form: MaskForm, *, empty: bool = False) -> np.ndarray:
        return self._kept(form.mask(self._generator(name), self._lowest, empty=empty))

    def probe(self, form: MaskForm) -> np.ndarray:
        return self._kept(form.probe(self._lowest))

    @property
    def _lowest(self) -> float:
        return float(ml_dtypes.finfo(float_dtype(self.dtype)).min)

    def outputs(self, arrays: Arrays) -> Arrays | None:
        """Return the outputs, or None if the reference raises or is not finite in either pass."""
        try:
            reference = self._reference(arrays)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # they concern trials, not the suggested inputs
                outputs = reference.outputs(self.dtype)
                run = reference.run(self.dtype, {k: np.ones(a.shape) for k, a in outputs.items()})
        except Exception as error:
            self.refusals.append(as_raised(error).splitlines()[0])
            return None
        if all(np.isfinite(a).all() for kind in run.kinds.values() for a in kind.values()):
            return outputs
        self.refusals.append("an output or a gradient is not finite")
        return None

    def is_accurate(self, arrays: Arrays) -> bool:
        """Return whether torch's own gradients, on arrays that run, are near those of float64.

        Those of its fused kernel are not if a finite constant hides all keys of a query.
        """
        reference = self._reference(arrays)
        cotangents = {k: np.ones(a.shape) for k, a in reference.outputs(self.dtype).items()}
        own, exact = reference.run(self.dtype, cotangents), reference.exact(cotangents)
        pairs = [
            (own.kinds[kind][name], a)
            for kind, tensors in exact.kinds.items()
            for name, a in tensors.items()
        ]
        error = sum(float(np.square(got - want).sum()) for got, want in pairs)
        return error <= POWER**2 * sum(float(np.square(want).sum()) for _, want in pairs)

    def changes(self, before: Arrays, after: Arrays) -> bool:
        """Return whether `after` runs, and gives other outputs than `before`."""
        new = self.outputs(after)
        old = None if new is None else self.outputs(before)
        if new is None or old is None:
            return new is not None
        return new.keys() != old.keys() or any(
            not np.array_equal(new[name], a) for name, a in old.items()
        )

    def weightless_keys(self, arrays: Arrays) -> int:
        """Return how many weights of torch's softmaxes are 0 or NaN, on arrays that run."""
        weightless = Weightless()
        self._reference(arrays).under(Watched(weightless), {})
        return weightless.keys

    def _generator(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())])

    def _kept(self, array: np.ndarray) -> np.ndarray:
        return array.astype(float_dtype(self.dtype)) if is_float(array.dtype) else array

    def _reference(self, arrays: Arrays) -> Reference:
        def named(module: torch.nn.Module, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
            call = self.call or torch.nn.Module.__call__
            tensors = _floating(call(module, *args, **kwargs))
            return {str(i): x for i, x in enumerate(tensors)}

        inputs = Inputs.of(self.signature.bound(arrays), float_dtype(self.dtype))
        return Reference(self.module, named, inputs)


def _floating(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the floating-point tensors in the outputs of a model, but none of a cache of keys."""
    if isinstance(tree, torch.Tensor):
        yield from [tree] if tree.is_floating_point() else []
    elif isinstance(tree, Mapping | tuple | list):
        for branch in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _floating(branch)
