"""Train an NNX module by a compiled optax transformation."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.tree_util import GetAttrKey, keystr, tree_flatten_with_path

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

Parameters = dict[str, jax.Array]
JaxLoss = Callable[[nnx.Module, Mapping[str, jax.Array]], jax.Array]


class PortLoop:
    """An NNX module and its training data; never changed. Its parameters are a flat dict.

    loss: (module, batch of JAX arrays) -> scalar. batches, dtype: as for `TorchLoop`.
    """

    def __init__(self, module: nnx.Module, loss: JaxLoss, batches: Sequence[Batch], dtype: str):
        self.module, self.loss = module, loss
        self._dtype, self._master_dtype = dtype, master_dtype(dtype)
        self.batches = [{k: _array(a, dtype) for k, a in batch.items()} for batch in batches]
        self.start = {path: jnp.array(a, self._master_dtype) for path, a in flatten(module).items()}

    @cached_property
    def _gradients(self) -> Callable[[Parameters, Mapping], tuple[jax.Array, Parameters]]:
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
            return loss, {path: g.astype(self._master_dtype) for path, g in grads.items()}

        return jax.jit(gradients)

    def free_run(self, tx: optax.GradientTransformation, steps: int, accumulate: int) -> FreeRun:
        """Run `steps` updates, each from `accumulate` batches."""
        params, state, update = self.start, tx.init(self.start), _compiled_update(tx)
        losses: list[jax.Array] = []
        first: Parameters = {}
        moved = {}
        for i in range(steps * accumulate):
            loss, gradients = self._gradients(params, self.batches[i % len(self.batches)])
            losses.append(loss)
            first = first or gradients
            params, state = update(params, state, gradients)
            step, left = divmod(i + 1, accumulate)
            if not left and step in checkpoints(steps):
                moved[step] = self._moved(params)
        return FreeRun(np.array([float(loss) for loss in losses]), _arrays(first), moved)

    def replay(
        self, tx: optax.GradientTransformation, gradients: Sequence[Arrays], accumulate: int
    ) -> Replay:
        """Run updates from the given gradients, each path -> array."""
        params, state, update = self.start, tx.init(self.start), _compiled_update(tx)
        moved = {}
        for i, by_path in enumerate(gradients):
            masters = {path: jnp.array(g, self._master_dtype) for path, g in by_path.items()}
            params, state = update(params, state, masters)
            step, left = divmod(i + 1, accumulate)
            if not left:
                moved[step] = self._moved(params)
        return Replay(moved, moments(state))

    def _moved(self, params: Parameters) -> dict[str, np.ndarray]:
        return difference(_arrays(params), _arrays(self.start))


def moments(state: Any) -> dict[str, Arrays]:
    """Return torch's name of a moment -> path -> array, from every state of an optax chain."""
    by_field: dict[str, dict[str, np.ndarray]] = {}
    for keys, leaf in tree_flatten_with_path(state)[0]:
        owners = [i for i, k in enumerate(keys) if isinstance(k, GetAttrKey)]
        if owners:
            path = keystr(keys[owners[-1] + 1 :], simple=True, separator=".")
            by_field.setdefault(keys[owners[-1]].name, {})[path] = np.asarray(leaf)
    return {name: by_field[field] for name, field in MOMENT_FIELDS.items() if field in by_field}


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
