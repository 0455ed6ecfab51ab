"""Inputs and outputs of both frameworks, as named NumPy arrays."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from jax_attn.transfer.arrays import same_bits

Arrays = Mapping[str, np.ndarray]

COMPARED = ("output", "gradient of input", "gradient of parameter")
STATE, SECOND = "state after the call", "output of the second call"
"""Kinds of tensors: those of every run, and those of a run whose call changes its module."""


@dataclass(frozen=True)
class Inputs:
    """Positional and keyword arrays that both sides are called on.

    The name of a positional array is its index, such as "0"; that of a keyword array its keyword.
    """

    args: tuple[np.ndarray, ...]
    kwargs: dict[str, np.ndarray]

    @classmethod
    def of(cls, inputs: object, dtype: np.dtype) -> "Inputs":
        """Build inputs with floating arrays rounded to `dtype`, so both sides get the same bits.

        Raises TypeError with every reason why the inputs are invalid.
        """
        if not isinstance(inputs, tuple | Mapping):
            raise TypeError(
                "inputs: expected a tuple of positional or a dict of keyword NumPy arrays, "
                f"got {type(inputs).__name__}"
            )
        named: dict[Any, Any] = dict(inputs if isinstance(inputs, Mapping) else enumerate(inputs))
        arrays, problems = {}, []
        for name, value in named.items():
            if isinstance(inputs, Mapping) and not isinstance(name, str):
                problems.append(f"inputs: expected strings as keywords, got {name!r}")
            elif not isinstance(value, np.ndarray):
                problems.append(f"inputs[{name!r}]: expected a NumPy array, got {type(value)}")
            elif value.dtype.kind in "biu":
                arrays[name] = value
            elif is_float(value.dtype):
                with np.errstate(over="ignore"):
                    arrays[name] = value.astype(dtype)
                if not np.array_equal(np.isfinite(arrays[name]), np.isfinite(value)):
                    problems.append(f"inputs[{name!r}]: expected numbers that {dtype} holds")
            else:
                problems.append(f"inputs[{name!r}]: expected real numbers, got {value.dtype}")
        if problems:
            raise TypeError("\n".join(problems))
        return cls(tuple(arrays.values()), {}) if isinstance(inputs, tuple) else cls((), arrays)

    @property
    def by_name(self) -> dict[str, np.ndarray]:
        """The arrays by name."""
        return self.named(self.args, self.kwargs)

    def named(self, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the names of these inputs with each side's own arrays, `args` and `kwargs`."""
        return {str(i): a for i, a in enumerate(args)} | dict(kwargs)


@dataclass(frozen=True)
class Run:
    """Named arrays from one run of one side; without cotangents it has no gradients.

    left: the module's state after the call: all buffers of a reference if the call changed any of
    them; for a port, the changed arrays by dotted path. second: the outputs of another call from
    that state. unlike: names of arrays whose replicas on two devices of a mesh differ in bits.
    """

    outputs: Arrays
    input_grads: Arrays
    parameter_grads: Arrays
    left: Arrays = field(default_factory=dict)
    second: Arrays = field(default_factory=dict)
    unlike: tuple[str, ...] = ()

    def one(self, run: int) -> "Run":
        """Return one run of a pass over several, whose arrays have the runs as first axis."""

        def of_run(arrays: Arrays) -> Arrays:
            return {name: a[run] for name, a in arrays.items()}

        grads = of_run(self.input_grads), of_run(self.parameter_grads)
        return Run(of_run(self.outputs), *grads, of_run(self.left), of_run(self.second))

    @property
    def kinds(self) -> dict[str, "Wide"]:
        """The arrays as float64: kind of tensor -> name -> array."""
        return {
            "output": wide(self.outputs),
            "gradient of input": wide(self.input_grads),
            "gradient of parameter": wide(self.parameter_grads),
            STATE: wide(self.left),
            SECOND: wide(self.second),
        }


class RaisedError(ValueError):
    """A side raised an error on its inputs; that error is the cause of this one."""


class Wide(Mapping[str, np.ndarray]):
    """Named arrays as float64, which holds all narrower values; each is widened anew when read.

    Complex numbers become pairs, (..., 2). A float64 array is returned without a copy; do not
    write to it.
    """

    def __init__(self, arrays: Arrays):
        self._arrays = arrays

    def __getitem__(self, name: str) -> np.ndarray:
        a = np.asarray(self._arrays[name])
        if a.dtype.kind == "c":
            return np.ascontiguousarray(a, np.complex128)[..., None].view(np.float64)
        return a.astype(np.float64, order="C", copy=False)

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def wide(arrays: Arrays) -> Wide:
    """Return the arrays as float64, each widened when it is read."""
    return Wide(arrays)


def changed(before: Arrays, after: Arrays) -> list[str]:
    """Return the names in `after` that `before` lacks or holds with other bits."""
    return [
        name
        for name, array in after.items()
        if name not in before or not same_bits(array, before[name])
    ]


def is_float(dtype: np.dtype) -> bool:
    """Return whether `dtype` is floating; NumPy does not class bfloat16 of ml_dtypes as such."""
    return dtype.kind == "f" or dtype.name == "bfloat16"


def float_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype of a name such as "float32" or "bfloat16"."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    assert is_float(dtype)
    return dtype


def holds(wide: np.dtype, dtype: str) -> bool:
    """Return whether a floating dtype holds every number of `dtype`."""
    return is_float(wide) and np.can_cast(float_dtype(dtype), wide)


def named_outputs(result: Any, array: type | tuple[type, ...], side: str) -> dict[str, Any]:
    """Return one array as {"output": array}, a dict of arrays as it is; else raise TypeError."""
    named = {"output": result} if isinstance(result, array) else result
    if isinstance(named, Mapping) and named and all(isinstance(v, array) for v in named.values()):
        return dict(named)
    got = type(result).__name__
    if isinstance(result, tuple | list):
        got += " of " + ", ".join(type(v).__name__ for v in result)
    elif isinstance(result, Mapping):
        others = {k: v for k, v in result.items() if not isinstance(v, array)}
        kinds = ", ".join(f"{k!r} ({type(v).__name__})" for k, v in others.items())
        got += f" with {kinds}" if others else " that is empty"
    raise TypeError(
        f"{side}: expected an array or a dict of named arrays, got {got}; give "
        f"{side}_call=lambda module, *args, **inputs: {{name: array, ...}} to name the outputs"
    )
