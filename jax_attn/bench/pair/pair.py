"""A torch module and its port, the inputs of both, and how they are called."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from flax import nnx

from jax_attn.bench.workload import CACHED, FORWARD, PAIR_MODES, STEP
from jax_attn.transfer import Layout, flatten

Inputs: TypeAlias = tuple[np.ndarray, ...] | Mapping[str, np.ndarray]


class Cached(NamedTuple):
    """How a side reads a prompt into a cache, and one token more.

    prefill: (module, **inputs) -> (output, cache). step: (module, cache, **one token of each
    input) -> (output, a cache as it was given).
    """

    prefill: Callable[..., Any]
    step: Callable[..., Any]


class Pair(NamedTuple):
    """As `parity.check` takes them.

    by_length: inputs of other lengths. cached: of the reference and the port, where they have a
    cache. check: the pair's own, which returns a `Result`; `parity.check` of the inputs unless
    given.
    """

    reference: torch.nn.Module
    port: nnx.Module
    inputs: Inputs
    layout: Layout | None = None
    calls: tuple[Callable[..., Any] | None, Callable[..., Any] | None] = (None, None)
    by_length: Mapping[int, Inputs] = {}
    cached: tuple[Cached, Cached] | None = None
    check: Callable[[], Any] | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Those that are measured; 0 stands for the inputs, where there is no other."""
        return tuple(self.by_length) or (0,)

    @property
    def modes(self) -> tuple[str, ...]:
        """Those in which it can be measured; gradients are those of all parameters or of none."""
        trainable = [p.requires_grad for p in self.reference.parameters()]
        with_gradients = PAIR_MODES[1:] if trainable and all(trainable) else ()
        return (FORWARD, *with_gradients, *(CACHED if self.cached else ()))

    @property
    def usual_modes(self) -> tuple[str, ...]:
        """Those in which it is measured unless others are asked for."""
        if not self.cached:
            return self.modes
        return tuple(mode for mode in (*CACHED, STEP) if mode in self.modes)

    def at(self, length: int) -> "Pair":
        """The pair with its inputs of this length."""
        return self._replace(inputs=self.by_length.get(length, self.inputs))

    @property
    def named_inputs(self) -> dict[str, np.ndarray]:
        """By position, "0" first, or by keyword."""
        if isinstance(self.inputs, Mapping):
            return dict(self.inputs)
        return {str(i): a for i, a in enumerate(self.inputs)}

    def call_reference(self, *args: Any, **kwargs: Any) -> Any:
        call = self.calls[0] or _called
        return call(self.reference, *args, **kwargs)

    def call_port(self, port: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        call = self.calls[1] or _called
        return call(port, *args, **kwargs)

    def with_arrays(self, arrays: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) of a call on other arrays under the names of the inputs."""
        if isinstance(self.inputs, Mapping):
            return (), dict(arrays)
        return tuple(arrays.values()), {}


def _called(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def digests(pair: Pair) -> dict[str, str]:
    """What tells one pair from another, by name: its inputs and the state of both sides."""
    arrays = {
        f"input {name}" + f" of length {length}" * bool(length): np.asarray(a)
        for length in pair.lengths
        for name, a in pair.at(length).named_inputs.items()
    }
    arrays |= {
        f"reference's {name}": x.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
        for name, x in pair.reference.state_dict().items()
        if isinstance(x, torch.Tensor)  # extra state may be anything
    }
    state = flatten(nnx.state(pair.port, nnx.Not(nnx.RngState)))
    arrays |= {f"port's {path}": np.asarray(a) for path, a in state.items()}
    return {
        name: hashlib.sha256(
            f"{a.dtype} {a.shape}".encode() + np.ascontiguousarray(a).tobytes()
        ).hexdigest()
        for name, a in arrays.items()
    }
