"""A port of any kind as an NNX module, which all the rest handles."""

import sys
from collections.abc import Mapping
from typing import Any

from flax import nnx

from jax_attn.transfer.kinds.equinox import Equinox, EquinoxWithState
from jax_attn.transfer.kinds.function import Function, Tree
from jax_attn.transfer.kinds.keras import Keras
from jax_attn.transfer.kinds.kind import Call, Kind
from jax_attn.transfer.kinds.linen import Linen

PORTS = (
    "an nnx.Module, an Equinox module or (module, state), a Linen (module, variables), a built "
    "Keras model on the JAX backend, or parity.function(apply, parameters)"
)
_PORT = "(port)"
"""The attribute of a `HeldPort` that holds its port; no path of a tree is so named."""


class HeldPort(nnx.Module):
    """A port of another kind: an nnx.Variable for each of its arrays, named by the array's path.

    Calling it calls the port with the arrays that the Variables hold, and keeps the state that the
    call leaves in them.
    """

    def __init__(self, port: Kind):
        setattr(self, _PORT, port)
        for path, leaf in port.leaves().items():
            setattr(self, path, leaf)

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        return _called(self, None, args, inputs)


def as_module(port: Any) -> nnx.Module:
    """Return an nnx.Module as it is, and a port of another kind as a `HeldPort`.

    Raises TypeError if it is no port.
    """
    if isinstance(port, nnx.Module):
        return port
    kind = kind_of(port)
    if kind is None:
        raise TypeError(f"port: {why_no_port(port)}")
    return HeldPort(kind)


def as_call(port: Any, call: Call | None) -> Call | None:
    """Return a `port_call` of the user's own object as one of `as_module(port)`."""
    if call is None or isinstance(port, nnx.Module):
        return call

    def of_held(module: HeldPort, *args: Any, **inputs: Any) -> Any:
        return _called(module, call, args, inputs)

    return of_held


def kind_of(port: Any) -> Kind | None:
    """Return what a port offers, or None if it is of no kind, or an nnx.Module.

    Kinds are recognized without an import: an object's package was imported to make it.
    """
    first, second = port if isinstance(port, tuple) and len(port) == 2 else (port, None)
    if isinstance(port, Function):
        return port
    if isinstance(first, _type("equinox", "Module")):
        if second is None:
            return Equinox(first)
        state = _type("equinox.nn", "State")
        return EquinoxWithState(first, second) if isinstance(second, state) else None
    if isinstance(first, _type("flax.linen", "Module")):
        if isinstance(second, Mapping):
            return Linen(first, second)
        if first.scope and second is None:
            module, variables = first.unbind()
            return Linen(module, variables, is_bound=True)
        return None
    if isinstance(port, _type("keras", "Layer")):
        return None if _keras_problem(port) else Keras(port)
    return None


def kind_of_weights(weights: Any) -> Kind | None:
    """Return `kind_of`, or a `Tree` for a mapping of arrays, which has no function."""
    return Tree(weights) if isinstance(weights, Mapping) else kind_of(weights)


def why_no_port(port: Any) -> str:
    """Return why this is no port, with the ways to hand one in; "" if it is one."""
    if isinstance(port, nnx.Module) or kind_of(port) is not None:
        return ""
    first = port[0] if isinstance(port, tuple) and port else port
    got = type(port).__name__
    if isinstance(first, _type("flax.linen", "Module")):
        got += ", a Linen module without its variables: pass (module, variables)"
    elif isinstance(first, _type("equinox", "Module")):
        got += ": pass the Equinox module alone, or (module, state) of equinox.nn.make_with_state"
    elif isinstance(port, _type("keras", "Layer")):
        got += f", a Keras model {_keras_problem(port)}"
    elif isinstance(port, _type("torch.nn", "Module")):
        got += ", a torch.nn.Module"
    elif isinstance(port, Mapping) or callable(port):
        got += ": pass parity.function(apply, parameters)"
    return f"expected {PORTS}; got {got}"


def variables_of(module: HeldPort) -> dict[str, nnx.Variable]:
    """Return the Variables of a held port by path."""
    return {name: v for name, v in vars(module).items() if isinstance(v, nnx.Variable)}


def rebuilt(module: HeldPort) -> Any:
    """Return what the user handed in, with the arrays that a held port now holds."""
    arrays = {path: v.get_value() for path, v in variables_of(module).items()}
    return port_of(module).rebuilt(arrays)


def port_of(module: HeldPort) -> Kind:
    """Return the port that is held."""
    port: Kind = getattr(module, _PORT)
    return port


def _called(
    module: HeldPort, call: Call | None, args: tuple[Any, ...], inputs: Mapping[str, Any]
) -> Any:
    variables = variables_of(module)
    arrays = {path: v.get_value() for path, v in variables.items()}
    outputs, after = port_of(module).run(arrays, call, args, inputs)
    for path, a in after.items():
        if a is not arrays[path]:
            variables[path].set_value(a)
    return outputs


def _keras_problem(model: Any) -> str:
    """Return why a Keras model cannot be called statelessly; "" if it can."""
    backend = sys.modules["keras"].config.backend()
    if backend != "jax":
        return f"on the backend {backend}: set KERAS_BACKEND=jax before keras is imported"
    return "" if model.built else "that is not built: call it once, or call its build(shape)"


def _type(module: str, name: str) -> Any:
    """Return a class of a package that is imported, else the empty tuple, which nothing is of."""
    return getattr(sys.modules.get(module), name, ())
