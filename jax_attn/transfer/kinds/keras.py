"""A Keras layer or model on the JAX backend as a port.

Keras is never imported here: a user who has one of its models has imported it.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flax import nnx

from jax_attn.transfer.kinds.kind import Arrays, Call, Kind, call_itself

_SEED = "seed_generator_state"
"""Last part of the path of a variable from which layers such as Dropout draw."""


@dataclass(frozen=True, eq=False)
class Keras(Kind):
    """A built model, called statelessly.

    A variable has its own `path` without the model's name, with dots: "block_0.dense.kernel".
    Variables made to be trained are parameters, also those of a layer that is frozen; the others
    are state. A load writes into the model.
    """

    model: Any

    def leaves(self) -> dict[str, nnx.Variable]:
        layers = self.model._flatten_layers()
        # The public lists count those of a frozen layer as state, among running statistics.
        trainable = {id(v) for layer in layers for v in layer._trainable_variables}
        leaves: dict[str, nnx.Variable] = {}
        for path, v in self._variables().items():
            state = nnx.RngState if path.endswith(_SEED) else nnx.BatchStat
            leaves[path] = (nnx.Param if id(v) in trainable else state)(v.value)
        return leaves

    def rebuilt(self, arrays: Arrays) -> Any:
        for path, v in self._variables().items():
            v.assign(arrays[path])
        return self.model

    def run(
        self, arrays: Arrays, call: Call | None, args: tuple[Any, ...], inputs: Mapping[str, Any]
    ) -> tuple[Any, Arrays]:
        variables = self._variables()
        mapping = [(v, arrays[path]) for path, v in variables.items()]
        with sys.modules["keras"].StatelessScope(state_mapping=mapping) as scope:
            before = {path: scope.get_current_value(v) for path, v in variables.items()}
            outputs = (call or call_itself)(self.model, *args, **inputs)
            after = {path: scope.get_current_value(v) for path, v in variables.items()}
        return outputs, {path: a for path, a in after.items() if a is not before[path]}

    def modules(self) -> Iterator[tuple[str, Any]]:
        layers = self.model._flatten_layers()
        return ((self._path(layer.path), layer) for layer in layers if layer.path)

    def _variables(self) -> dict[str, Any]:
        """Return the model's variables by path. Raises ValueError if two have the same."""
        variables: dict[str, Any] = {}
        model = self.model
        for v in (*model.trainable_variables, *model.non_trainable_variables):
            path = self._path(v.path)
            if path in variables:
                raise ValueError(
                    f"port: two variables of the Keras model have the path {v.path!r}; give its "
                    "layers names of their own"
                )
            variables[path] = v
        return variables

    def _path(self, path: str) -> str:
        return path.removeprefix(f"{self.model.name}/").replace("/", ".")
