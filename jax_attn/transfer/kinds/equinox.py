"""An Equinox module as a port: alone, or as (module, state) if layers such as BatchNorm keep state.

Equinox is never imported here: a user who has one of its modules has imported it.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jax_attn.transfer.kinds.kind import (
    Arrays,
    Call,
    Kind,
    arrays_of,
    call_itself,
    dotted,
    variable,
    with_arrays,
)


@dataclass(frozen=True, eq=False)
class Equinox(Kind):
    """A module that is a tree: every floating-point array in it is a parameter."""

    module: Any

    def leaves(self) -> dict[str, nnx.Variable]:
        return {path: variable(a) for path, a in arrays_of(self.module).items()}

    def rebuilt(self, arrays: Arrays) -> Any:
        return with_arrays(self.module, arrays)

    def run(
        self, arrays: Arrays, call: Call | None, args: tuple[Any, ...], inputs: Mapping[str, Any]
    ) -> tuple[Any, Arrays]:
        return (call or call_itself)(self.rebuilt(arrays), *args, **inputs), {}

    def modules(self) -> Iterator[tuple[str, Any]]:
        return _modules(self.module, "")


@dataclass(frozen=True, eq=False)
class EquinoxWithState(Kind):
    """A module and its `equinox.nn.State`.

    An array of the state has the path of its StateIndex in the module: "norm.ema_state_index.0".
    """

    module: Any
    state: Any

    def leaves(self) -> dict[str, nnx.Variable]:
        own = {path: variable(a) for path, a in arrays_of(self.module).items()}
        return own | {path: variable(a, nnx.BatchStat) for path, a in self._named(self.state)}

    def rebuilt(self, arrays: Arrays) -> tuple[Any, Any]:
        given = {path: arrays[path] for path, _ in self._named(self.state)}
        leaves = [given.get(name, leaf) for name, leaf in self._leaves(self.state)]
        state = jax.tree.unflatten(jax.tree.structure(self.state), leaves)
        return with_arrays(self.module, arrays), state

    def run(
        self, arrays: Arrays, call: Call | None, args: tuple[Any, ...], inputs: Mapping[str, Any]
    ) -> tuple[Any, Arrays]:
        module, state = self.rebuilt(arrays)
        given = ((module, state), *args) if call else (*args, state)
        result = (call or module)(*given, **inputs)
        is_pair = isinstance(result, tuple) and len(result) == 2
        if not is_pair or not isinstance(result[1], type(self.state)):
            raise TypeError(
                "expected (outputs, state) from an Equinox module with state, or from its "
                f"port_call, got {type(result).__name__}"
            )
        return result[0], dict(self._named(result[1]))

    def modules(self) -> Iterator[tuple[str, Any]]:
        return _modules(self.module, "")

    def _named(self, state: Any) -> Iterator[tuple[str, Any]]:
        """Yield the arrays of a state that a StateIndex of the module refers to, by path."""
        return ((name, leaf) for name, leaf in self._leaves(state) if name)

    def _leaves(self, state: Any) -> Iterator[tuple[str, Any]]:
        """Yield every leaf of a state with its path, "" for one that no StateIndex refers to."""
        leaves, structure = jax.tree.flatten(state)
        numbered = jax.tree.unflatten(structure, range(len(leaves)))
        index_type = sys.modules["equinox"].nn.StateIndex
        names: dict[int, str] = {}
        indices = jax.tree_util.tree_leaves_with_path(
            self.module, is_leaf=lambda x: isinstance(x, index_type)
        )
        for path, index in indices:
            if isinstance(index, index_type):
                for inside, n in jax.tree_util.tree_leaves_with_path(numbered.get(index)):
                    names.setdefault(n, dotted((*path, *inside)))
        return ((names.get(n, ""), leaf) for n, leaf in enumerate(leaves))


def _modules(module: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield a module and every one inside of it, by dotted path."""
    kind = sys.modules["equinox"].Module
    yield path, module
    inside = jax.tree_util.tree_leaves_with_path(
        module, is_leaf=lambda x: isinstance(x, kind) and x is not module
    )
    for keys, inner in inside:
        if isinstance(inner, kind) and inner is not module:
            yield from _modules(inner, ".".join(filter(None, (path, dotted(keys)))))
