"""A Linen module and its variables as a port: (module, variables), or a module that is bound.

Linen is never imported here: a user who has one of its modules has imported it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flax import nnx
from flax.core import meta

from jax_attn.transfer.kinds.kind import (
    Arrays,
    Call,
    Kind,
    arrays_of,
    call_itself,
    variable,
    with_arrays,
)

_PARAMS = "params"
_TYPES: dict[str, type[nnx.Variable]] = {
    "batch_stats": nnx.BatchStat,
    "cache": nnx.Cache,
    "intermediates": nnx.Intermediate,
}
"""Collection -> the nnx type of its variables; those of other collections are nnx.Variable."""


@dataclass(frozen=True, eq=False)
class Linen(Kind):
    """An unbound module and its variables.

    A parameter has its path within "params"; another variable has its collection before it:
    "batch_stats.norm.mean". All collections except "params" are mutable in a call.
    """

    module: Any
    variables: Mapping[str, Any]
    is_bound: bool = False

    def leaves(self) -> dict[str, nnx.Variable]:
        leaves: dict[str, nnx.Variable] = {}
        for collection, tree in self.variables.items():
            own = arrays_of(meta.unbox(tree))
            kind = None if collection == _PARAMS else _TYPES.get(collection, nnx.Variable)
            named = {_name(collection, path): variable(a, kind) for path, a in own.items()}
            if both := sorted(leaves.keys() & named):
                raise ValueError(f"port: two variables have the path {both[0]!r}")
            leaves |= named
        return leaves

    def rebuilt(self, arrays: Arrays) -> Any:
        variables = self._variables(arrays)
        return self.module.bind(variables) if self.is_bound else (self.module, variables)

    def run(
        self, arrays: Arrays, call: Call | None, args: tuple[Any, ...], inputs: Mapping[str, Any]
    ) -> tuple[Any, Arrays]:
        mutable = [collection for collection in self.variables if collection != _PARAMS]
        method = call or call_itself
        result = self.module.apply(
            self._variables(arrays), *args, **inputs, method=method, mutable=mutable or False
        )
        if not mutable:
            return result, {}
        outputs, after = result
        changed = {
            _name(collection, path): a
            for collection, tree in after.items()
            for path, a in arrays_of(meta.unbox(tree)).items()
        }
        return outputs, {path: a for path, a in changed.items() if path in arrays}

    def _variables(self, arrays: Arrays) -> Any:
        def of(collection: str, boxed: Any) -> Any:
            tree = meta.unbox(boxed)
            own = {path: arrays[_name(collection, path)] for path in arrays_of(tree)}
            return meta.replace_boxed(boxed, with_arrays(tree, own))

        return {collection: of(collection, tree) for collection, tree in self.variables.items()}


def _name(collection: str, path: str) -> str:
    return path if collection == _PARAMS else f"{collection}.{path}"
