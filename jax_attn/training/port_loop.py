"""Train an NNX module by a compiled optax transformation."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.tree_util import GetAttrKey, keystr, tree_flatten_with_path

from jax_attn.parity.run.port import x64_for
from jax_attn.training.runs import (
    MOMENT_FIELDS,
    Arrays,
    Batch,
    FreeRun,
    Replay,
    checkpoints,
    difference,
    master_dtype,
)
from jax_attn.transfer import flatten
from jax_attn.transfer.optimizer.optax_state import slots

Parameters = dict[str, jax.Array]
JaxLoss = Callable[[nnx.Module, Mapping[str, jax.Array]], jax.Array]


class PortLoop:
    """An NNX module and its training data; never changed. Its parameters are a flat dict.

    Attributes:
      module: the port.
      loss: a function (module, batch of JAX arrays) -> scalar.
      batches: the batches as JAX arrays; floating arrays have the port's dtype.
      start: path -> master weight before the first update.
    """

    def __init__(self, module: nnx.Module, loss: JaxLoss, batches: Sequence[Batch], dtype: str):
        self.module, self.loss = module, loss
        self._dtype, self.master_dtype = dtype, master_dtype(dtype)
        self.batches = [{k: _array(a, dtype) for k, a in batch.items()} for batch in batches]
        self.start = {path: jnp.array(a, self.master_dtype) for path, a in flatten(module).items()}

    @cached_property
    def gradients(self) -> Callable[[Parameters, Mapping], tuple[jax.Array, Parameters]]:
        """The jitted function (master weights, batch) -> (loss, gradients of the masters)."""
        graph, state, *others = nnx.split(self.module, nnx.Param, ...)
        variables = dict(nnx.to_flat_state(state))

        def forward(params: Parameters, batch: Mapping[str, jax.Array]) -> jax.Array:
            flat = [
                (place, variable.replace(params[".".join(map(str, place))]))
                for place, variable in variables.items()
            ]
            module = nnx.merge(graph, nnx.from_flat_state(flat), *others, copy=True)
            return self.loss(module, batch)

        def gradients(
            masters: Parameters, batch: Mapping[str, jax.Array]
        ) -> tuple[jax.Array, Parameters]:
            params = {path: a.astype(self._dtype) for path, a in masters.items()}
            loss, grads = jax.value_and_grad(forward)(params, batch)
            return loss, {path: g.astype(self.master_dtype) for path, g in grads.items()}

        return jax.jit(gradients)


@dataclass(frozen=True)
class PortTraining:
    """A port in training by an optimizer, which updates it from `accumulate` batches at a time.

    state: place in the optimizer's state -> the array from which every run goes on; None if every
    run begins with a new state.
    """

    loop: PortLoop
    tx: optax.GradientTransformation
    accumulate: int = 1
    state: Arrays | None = None

    def _updates(self, dtype: str | None) -> "_Updates":
        return _Updates(self.tx, self.loop.start, dtype or self.loop.master_dtype, self.state)

    def free_run(self, steps: int, dtype: str | None = None) -> FreeRun:
        """Run `steps` updates. dtype: the optimizer's, if another than that of the masters."""
        loop, updates = self.loop, self._updates(dtype)
        losses: list[jax.Array] = []
        first: Parameters = {}
        moved = {}
        for i in range(steps * self.accumulate):
            params = {path: jnp.array(a, loop.master_dtype) for path, a in updates.now.items()}
            loss, gradients = loop.gradients(params, loop.batches[i % len(loop.batches)])
            losses.append(loss)
            first = first or gradients
            updates.make(gradients)
            step, left = divmod(i + 1, self.accumulate)
            if not left and step in checkpoints(steps):
                moved[step] = updates.moved()
        return FreeRun(np.array([float(loss) for loss in losses]), _arrays(first), moved)

    def replay(self, gradients: Sequence[Arrays], dtype: str | None = None) -> Replay:
        """Run updates from the given gradients, each path -> array. dtype: as for `free_run`."""
        updates, moved = self._updates(dtype), {}
        for i, by_path in enumerate(gradients):
            updates.make(by_path)
            step, left = divmod(i + 1, self.accumulate)
            if not left:
                moved[step] = updates.moved()
        return Replay(moved, moments(updates.state))

    def drift(self, gradients: Sequence[Arrays]) -> dict[int, float]:
        """Return how far the optimizer's rounding moves the parameters: update -> share of their
        movement in float64. The gradients are taken in turn."""
        stacked = {path: np.stack([g[path] for g in gradients]) for path in gradients[0]}
        size = self.accumulate * sum(a.size for a in self.loop.start.values())
        runs = [self._updates(dtype) for dtype in (None, "float64")]
        shares, made = {}, 0
        for updates in (n for n in _DRIFTS if n == 1 or n * size <= _MOST):
            for run in runs:
                run.make_many(stacked, made, updates * self.accumulate)
            made = updates * self.accumulate
            ours, right = (run.moved() for run in runs)
            off = sum(float(np.square(ours[path] - a).sum()) for path, a in right.items())
            total = sum(float(np.square(a).sum()) for a in right.values())
            shares[updates] = math.sqrt(off / total) if total else 0.0
        return shares


_DRIFTS, _MOST = (1, 100, 10_000), 2**31
"""Updates after which a drift is measured, and the numbers to update for it at most."""


class _Updates:
    """Parameters and an optimizer's state, which each update replaces.

    The update is compiled, and computes in the optimizer's own dtype.

    Attributes:
      now: path -> the parameter after the updates made.
      state: the optimizer's state after them.
    """

    def __init__(
        self,
        tx: optax.GradientTransformation,
        start: Parameters,
        dtype: str,
        state: Arrays | None,
    ):
        self._dtype, self._update = dtype, _compiled_update(tx)
        self._start = _arrays(start)
        with x64_for(dtype):
            self.now = self._given(self._start)
            self.state = _filled(tx.init(self.now), state) if state else tx.init(self.now)

    def make(self, gradients: Mapping[str, Any]) -> None:
        """Make one update."""
        with x64_for(self._dtype):
            self.now, self.state = self._update(self.now, self.state, self._given(gradients))

    def make_many(self, gradients: Mapping[str, np.ndarray], first: int, end: int) -> None:
        """Make the updates from `first` to `end`, of stacked gradients taken in turn."""

        def one(i: jax.Array, now: tuple[Parameters, Any], stacked: Parameters) -> Any:
            taken = {path: a[i % a.shape[0]] for path, a in stacked.items()}
            return self._update(*now, taken)

        @jax.jit
        def many(now: tuple[Parameters, Any], stacked: Parameters, first: int, end: int) -> Any:
            return jax.lax.fori_loop(first, end, partial(one, stacked=stacked), now)

        with x64_for(self._dtype):
            now = self.now, self.state
            self.now, self.state = many(now, self._given(gradients), first, end)

    def moved(self) -> dict[str, np.ndarray]:
        """Return the distance of each parameter from its start."""
        return difference(_arrays(self.now), self._start)

    def _given(self, arrays: Mapping[str, Any]) -> Parameters:
        return {path: jnp.array(np.asarray(a), self._dtype) for path, a in arrays.items()}


def _filled(new: Any, arrays: Arrays) -> Any:
    """Return a new state with the arrays of another run's, in the dtypes of the new one."""
    leaves = [jnp.asarray(arrays[slot.where], slot.array.dtype) for slot in slots(new)[0]]
    return jax.tree.unflatten(jax.tree.structure(new), leaves)


def moments(state: Any) -> dict[str, Arrays]:
    """Return torch's name of a moment -> path -> array, from every state of an optax chain."""
    by_field: dict[str, dict[str, np.ndarray]] = {}
    for keys, leaf in tree_flatten_with_path(state)[0]:
        owners = [i for i, k in enumerate(keys) if isinstance(k, GetAttrKey)]
        if owners:
            path = keystr(keys[owners[-1] + 1 :], simple=True, separator=".")
            by_field.setdefault(keys[owners[-1]].name, {})[path] = np.asarray(leaf)
    return {
        name: by_field[field]
        for name, fields in MOMENT_FIELDS.items()
        for field in fields
        if field in by_field
    }


def _compiled_update(
    tx: optax.GradientTransformation,
) -> Callable[[Parameters, Any, Parameters], tuple[Parameters, Any]]:
    @jax.jit
    def update(params: Parameters, state: Any, grads: Parameters) -> tuple[Parameters, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return update


def _array(a: np.ndarray, dtype: str) -> jax.Array:
    return jnp.array(a) if a.dtype.kind in "biu" else jnp.array(a, dtype)


def _arrays(arrays: Parameters) -> dict[str, np.ndarray]:
    return {path: np.asarray(a) for path, a in arrays.items()}
