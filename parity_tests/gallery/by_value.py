"""Make the table of a port whose weights are in place, by the numbers of the weights alone.

A converter has filled the port, so no table is needed to run it. One is needed to pair gradients.
Random weights differ from each other, so a parameter of the port is that of the reference whose
numbers it has, with its axes merged, split and permuted; or a part of it, or several of them.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from jax_attn.parity.bugs.views import View, views
from jax_attn.transfer import Layout, Step, ignored, row
from jax_attn.transfer.kinds.held import as_module, variables_of
from jax_attn.transfer.table.rows import Row

NARROWED = 2.0**-10
"""Weights that were rounded to float16 are still paired; the check reports that they differ."""
MOST_PARTS = 8


def layout_by_value(reference: torch.nn.Module, port: Any) -> Layout | None:
    """Return a table of every parameter of a reference whose numbers the port holds.

    The others are passed over, so that the check notes that their gradients were not compared. None
    if a parameter of the port has numbers of its own, as a sum of two embeddings has: no row can
    give its gradient.
    """
    arrays = {path: v.get_value() for path, v in variables_of(as_module(port)).items()}
    theirs = {
        path: np.asarray(a, np.float64)
        for path, a in arrays.items()
        if jnp.issubdtype(a.dtype, jnp.floating)
    }
    own = {
        name: parameter.detach().double().numpy()
        for name, parameter in reference.named_parameters()
    }
    rows = [*_whole(own, theirs)]
    taken = {path for each in rows for path in each.paths}
    left = {path: a for path, a in theirs.items() if path not in taken}
    unpaired = {name: a for name, a in own.items() if all(name not in r.keys for r in rows)}
    rows += _split(unpaired, left)
    rows += _joined(unpaired, left)
    if theirs.keys() - {path for each in rows for path in each.paths}:
        return None
    paired = {key for each in rows for key in each.keys}
    names = dict(reference.named_parameters(remove_duplicate=False))
    skipped = [
        ignored(name, "no parameter of the port has its numbers, or its numbers once more")
        for name in reference.state_dict()
        if name not in paired and name in names
    ]
    buffers = [ignored(name, "a buffer") for name in reference.state_dict() if name not in names]
    return Layout(*rows, *skipped, *buffers)


def _whole(own: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> Iterator[Row]:
    free = dict(theirs)
    for name, x in own.items():
        for path, y in free.items():
            if (view := _view(x, y)) is not None:
                yield row(name, path, *_steps(view, x.shape, y.shape))
                del free[path]
                break


def _split(own: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> Iterator[Row]:
    """Pair a parameter of the reference with several of the port: parts of equal size."""
    for name, x in [*own.items()]:
        for count, axis in itertools.product(range(2, MOST_PARTS + 1), range(x.ndim)):
            if x.shape[axis] % count:
                continue
            found = _each(np.split(x, count, axis), theirs)
            if found:
                yield row(name, [path for path, _ in found], _parts(x.shape, axis, found, theirs))
                del own[name]
                for path, _ in found:
                    del theirs[path]
                break


def _joined(own: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> Iterator[Row]:
    """Pair several parameters of the reference with one of the port, as of stacked experts."""
    for path, y in [*theirs.items()]:
        for count, axis in itertools.product(range(2, MOST_PARTS + 1), range(y.ndim)):
            if y.shape[axis] % count:
                continue
            found = _each(np.split(y, count, axis), own)
            if found:
                shapes = [own[name].shape for name, _ in found]
                yield row([name for name, _ in found], path, _join(y.shape, axis, found, shapes))
                for name, _ in found:
                    del own[name]
                break


Found = Sequence[tuple[str, View]]


def _each(parts: Sequence[np.ndarray], among: Mapping[str, np.ndarray]) -> Found:
    """Return for each part which array it is, and how it is viewed as that; () unless all are."""
    found: list[tuple[str, View]] = []
    for part in parts:
        taken = {name for name, _ in found}
        pairs = ((n, _view(part, y)) for n, y in among.items() if n not in taken)
        match = next(((n, view) for n, view in pairs if view is not None), None)
        if match is None:
            return ()
        found.append(match)
    return found


def _view(x: np.ndarray, y: np.ndarray) -> View | None:
    """Return the view of `x` that is `y`."""
    if x.size != y.size or not _near(np.sort(x, None), np.sort(y, None)):
        return None
    return next((v for v in views(x.shape, y.shape) if _near(v.of(x), y)), None)


def _near(x: np.ndarray, y: np.ndarray) -> bool:
    return bool(np.all(np.abs(x - y) <= NARROWED * np.abs(x) + 2.0**-24))


def _steps(view: View, before: tuple[int, ...], after: tuple[int, ...]) -> tuple[Step, ...]:
    if before == after and view.axes == tuple(range(len(view.axes))):
        return ()
    step = Step(
        "viewed",
        lambda shapes, keys: (before,),
        lambda shapes, paths, sizes: (after,),
        lambda arrays, shapes: (view.of(arrays[0]),),
        lambda arrays, shapes: (view.back(arrays[0]).reshape(before),),
    )
    return (step,)


def _parts(
    before: tuple[int, ...], axis: int, found: Found, theirs: Mapping[str, np.ndarray]
) -> Step:
    after = tuple(theirs[path].shape for path, _ in found)
    return Step(
        "split",
        lambda shapes, keys: (before,),
        lambda shapes, paths, sizes: after,
        lambda arrays, shapes: _cut(arrays[0], axis, found),
        lambda arrays, shapes: (_put(arrays, before, axis, found),),
        "split",
    )


def _join(
    after: tuple[int, ...], axis: int, found: Found, before: Sequence[tuple[int, ...]]
) -> Step:
    return Step(
        "joined",
        lambda shapes, keys: tuple(before),
        lambda shapes, paths, sizes: (after,),
        lambda arrays, shapes: (_put(arrays, after, axis, found),),
        lambda arrays, shapes: _cut(arrays[0], axis, found),
        "join",
    )


def _cut(whole: np.ndarray, axis: int, found: Found) -> tuple[np.ndarray, ...]:
    """Cut an array into equal parts, and view each as the other side has it."""
    parts = np.split(whole, len(found), axis)
    return tuple(view.of(part) for (_, view), part in zip(found, parts, strict=True))


def _put(
    parts: Sequence[np.ndarray], whole: tuple[int, ...], axis: int, found: Found
) -> np.ndarray:
    """Undo `_cut`. whole: the shape of the array."""
    own = (*whole[:axis], whole[axis] // len(found), *whole[axis + 1 :])
    back = [view.back(part).reshape(own) for (_, view), part in zip(found, parts, strict=True)]
    return np.concatenate(back, axis)
