"""Train an NNX module by an optax transformation, compiled."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.tree_util import GetAttrKey, keystr, tree_flatten_with_path

from jax_attn.parity.training.trajectory import (
    Arrays,
    Trajectory,
    Updated,
    checkpoints,
    difference,
    of_masters,
)
from jax_attn.transfer import flatten

Batch = Mapping[str, np.ndarray]

FIELDS = {
    "exp_avg": "mu",
    "exp_avg_sq": "nu",
    "grad_avg": "mu",
    "momentum_buffer": "trace",
    "square_avg": "nu",
    "sum": "sum_of_squares",
}
"""What torch keeps for a parameter, and the field of optax's states that holds it."""


class PortLoop:
    """An NNX module and what it is trained on; never changed. Its parameters are a flat dict.

    loss: (module, batch of JAX arrays) -> scalar. batches, dtype: as for `TorchLoop`.
    """

    def __init__(
        self,
        module: nnx.Module,
        loss: Callable[[nnx.Module, Mapping[str, jax.Array]], jax.Array],
        batches: Sequence[Batch],
        dtype: str,
    ):
        self._graph, params, self._rest = nnx.split(module, nnx.Param, ...)
        self._places = {".".join(map(str, place)): place for place, _ in nnx.to_flat_state(params)}
        self._variables = dict(nnx.to_flat_state(params))
        self._loss, self._dtype, self._kept = loss, dtype, of_masters(dtype)
        self.batches = [{k: _array(a, dtype) for k, a in batch.items()} for batch in batches]
        self.start = {path: jnp.array(a, self._kept) for path, a in flatten(module).items()}

    @cached_property
    def _gradients(self) -> Callable[..., tuple[jax.Array, dict[str, jax.Array]]]:
        def forward(params, batch):
            state = nnx.from_flat_state(
                [
                    (place, self._variables[place].replace(params[path]))
                    for path, place in self._places.items()
                ]
            )
            return self._loss(nnx.merge(self._graph, state, self._rest, copy=True), batch)

        def gradients(masters, batch):
            params = {path: a.astype(self._dtype) for path, a in masters.items()}
            loss, grads = jax.value_and_grad(forward)(params, batch)
            return loss, {path: g.astype(self._kept) for path, g in grads.items()}

        return jax.jit(gradients)

    def train(self, tx: optax.GradientTransformation, steps: int, accumulate: int) -> Trajectory:
        """A free run of `steps` updates, each from `accumulate` batches."""
        params, state, update = self.start, tx.init(self.start), _updating(tx)
        losses, first, moved, marks = [], {}, {}, checkpoints(steps)
        for i in range(steps * accumulate):
            loss, grads = self._gradients(params, self.batches[i % len(self.batches)])
            losses.append(loss)
            first = first or grads
            params, state = update(params, state, grads)
            step, left = divmod(i + 1, accumulate)
            if not left and step in marks:
                moved[step] = difference(_arrays(params), _arrays(self.start))
        return Trajectory(np.array([float(loss) for loss in losses]), _arrays(first), moved)

    def replay(
        self, tx: optax.GradientTransformation, gradients: Sequence[Arrays], accumulate: int
    ) -> Updated:
        """Updates from `gradients`, by path."""
        params, state, update = self.start, tx.init(self.start), _updating(tx)
        moved = {}
        for i, given in enumerate(gradients):
            grads = {path: jnp.array(g, self._kept) for path, g in given.items()}
            params, state = update(params, state, grads)
            step, left = divmod(i + 1, accumulate)
            if not left:
                moved[step] = difference(_arrays(params), _arrays(self.start))
        return Updated(moved, moments(state))


def moments(state: Any) -> dict[str, dict[str, np.ndarray]]:
    """field -> path -> array, of every state of an optax chain that holds a moment."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for keys, leaf in tree_flatten_with_path(state)[0]:
        owners = [i for i, k in enumerate(keys) if isinstance(k, GetAttrKey)]
        if owners and (field := keys[owners[-1]].name) in FIELDS.values():
            path = keystr(keys[owners[-1] + 1 :], simple=True, separator=".")
            found.setdefault(field, {})[path] = np.asarray(leaf)
    return found


def _updating(tx: optax.GradientTransformation):
    @jax.jit
    def update(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return update


def _array(a: np.ndarray, dtype: str) -> jax.Array:
    return jnp.array(a) if a.dtype.kind in "biu" else jnp.array(a, dtype)


def _arrays(arrays: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    return {path: np.asarray(a) for path, a in arrays.items()}
