"""Make inputs of other sizes from given ones, cut and repeated along their axes."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jax_attn.transfer import as_numpy

Axes = Mapping[str, Mapping[int, str]]
"""The axes whose sizes vary, by input and axis, each with the name of its size."""
Arrays = Mapping[str, np.ndarray]


def traced_sizes(inputs: Arrays, dynamic: Axes) -> dict[str, int]:
    """Return each size by name.

    Raises ValueError, with every reason, for inputs and axes that there are not, and for a name
    that stands for two sizes.
    """
    sizes: dict[str, int] = {}
    problems = []
    for name, axes in dynamic.items():
        if name not in inputs:
            problems.append(f"dynamic: expected some of {', '.join(inputs)}, got {name!r}")
            continue
        shape = inputs[name].shape
        for axis, size in axes.items():
            if not 0 <= axis < len(shape):
                problems.append(
                    f"dynamic: {name}: expected an axis of {len(shape)}, from 0, got {axis}"
                )
            elif sizes.setdefault(size, shape[axis]) != shape[axis]:
                problems.append(
                    f"dynamic: {size}: expected one size, got {sizes[size]}, and {shape[axis]} for "
                    f"axis {axis} of {name}"
                )
    if problems:
        raise ValueError("\n".join(problems))
    return sizes


def resized(inputs: Arrays, dynamic: Axes, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Return the inputs with these sizes: cut, or repeated from the beginning."""
    made = {}
    for name, array in inputs.items():
        for axis, size in dynamic.get(name, {}).items():
            array = array.take(np.arange(sizes[size]) % array.shape[axis], axis)
        made[name] = np.ascontiguousarray(array)
    return made


def other_inputs(
    inputs: Arrays, dynamic: Axes, runs: Callable[[Arrays], bool]
) -> list[dict[str, np.ndarray]]:
    """Return inputs of sizes beyond the given ones, and of 1, where `runs` says that they run.

    All sizes change at once; if that does not run, each alone. Sizes that run at none beyond the
    given one are cut by one instead.
    """
    sizes = traced_sizes(inputs, dynamic)
    beyond = dict(zip(sizes, _others([*sizes.values()]), strict=True))
    below = {name: max(size - 1, 1) for name, size in sizes.items()}
    ones = dict.fromkeys(sizes, 1)
    made: list[dict[str, np.ndarray]] = []
    seen = [sizes]
    for wanted, instead in ((beyond, below), (ones, {})):
        for trial in _trials(sizes, wanted, instead):
            arrays = resized(inputs, dynamic, trial)
            if trial not in seen and runs(arrays):
                seen.append(trial)
                made.append(arrays)
                if trial == wanted:
                    break
    return made


def _trials(
    sizes: Mapping[str, int], wanted: Mapping[str, int], instead: Mapping[str, int]
) -> Iterator[dict[str, int]]:
    """Yield all sizes as wanted; then each alone, or what stands in its place."""
    yield dict(wanted)
    for name in sizes:
        yield {**sizes, name: wanted[name]}
    if instead:
        yield dict(instead)


def _others(sizes: Sequence[int]) -> Iterator[int]:
    """Yield a larger size for each, all of them different from each other and from the given."""
    taken = {*sizes}
    for size in sizes:
        more = next(n for n in itertools.count(size + 1) if n not in taken)
        taken.add(more)
        yield more


def as_named(inputs: Arrays | tuple[Any, ...], names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return inputs by name; those by position take the names of `forward`'s parameters."""
    if isinstance(inputs, tuple):
        return dict(zip(names, map(as_numpy, inputs), strict=False))
    return {name: as_numpy(array) for name, array in inputs.items()}
