"""What goes into both frameworks and what comes out: NumPy arrays under names."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Arrays = Mapping[str, np.ndarray]

COMPARED = ("output", "gradient of input", "gradient of parameter")
STATE, SECOND = "state after the call", "output of the second call"
"""Kinds of tensors: those that every run has, and those of a module that a call changes."""


@dataclass(frozen=True)
class Inputs:
    """Arrays given to both sides alike: positional ones and keyword ones.

    A positional array is called by its place, "0"; a keyword one by its keyword.
    """

    args: tuple[np.ndarray, ...]
    kwargs: dict[str, np.ndarray]

    @classmethod
    def of(cls, inputs: tuple | Mapping[str, Any], dtype: np.dtype) -> "Inputs":
        """Floating arrays rounded to `dtype`, so that both sides start from the same bits."""
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

    def named(self, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The same names for what each side made of the arrays."""
        return {str(i): a for i, a in enumerate(args)} | dict(kwargs)


@dataclass(frozen=True)
class Run:
    """Arrays by name from one run of one side; no gradients where there were no cotangents.

    left: what the call changed in the module: all buffers of a reference of which it changed any,
    the changed arrays of a port by dotted path. second: outputs of another call from there.
    unlike: what of all this two devices of a mesh hold with other bits, though it is one array.
    """

    outputs: Arrays
    input_grads: Arrays
    parameter_grads: Arrays
    left: Arrays = field(default_factory=dict)
    second: Arrays = field(default_factory=dict)
    unlike: tuple[str, ...] = ()

    def one(self, run: int) -> "Run":
        """Return one of the runs of a pass, whose arrays have the runs as their first axis."""

        def of_run(arrays: Arrays) -> Arrays:
            return {name: a[run] for name, a in arrays.items()}

        grads = of_run(self.input_grads), of_run(self.parameter_grads)
        return Run(of_run(self.outputs), *grads, of_run(self.left), of_run(self.second))

    @property
    def kinds(self) -> dict[str, "Wide"]:
        """kind of tensor -> name -> array, as float64."""
        return {
            "output": wide(self.outputs),
            "gradient of input": wide(self.input_grads),
            "gradient of parameter": wide(self.parameter_grads),
            STATE: wide(self.left),
            SECOND: wide(self.second),
        }


class Wide(Mapping[str, np.ndarray]):
    """Arrays by name as float64, which holds all narrower values: widened when read, not kept.

    What is float64 already is the array itself, not to be written to.
    """

    def __init__(self, arrays: Arrays):
        self._arrays = arrays

    def __getitem__(self, name: str) -> np.ndarray:
        return np.asarray(self._arrays[name]).astype(np.float64, order="C", copy=False)

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def wide(arrays: Arrays) -> Wide:
    """Every array as float64."""
    return Wide(arrays)


def is_float(dtype: np.dtype) -> bool:
    """Whether `dtype` is floating; NumPy does not count ml_dtypes' among its own."""
    return dtype.kind == "f" or dtype.name == "bfloat16"


def named_outputs(result: Any, array: type | tuple[type, ...], side: str) -> dict[str, Any]:
    """One array as {"output": it}; a dict of arrays as it is; else a TypeError."""
    named = {"output": result} if isinstance(result, array) else result
    if isinstance(named, Mapping) and named and all(isinstance(v, array) for v in named.values()):
        return dict(named)
    got = type(result).__name__
    if isinstance(result, tuple | list):
        got += " of " + ", ".join(type(v).__name__ for v in result)
    raise TypeError(
        f"{side}: expected an array or a dict of named arrays, got {got}; give "
        f"{side}_call=lambda module, *args, **inputs: {{name: array, ...}} to name the outputs"
    )
