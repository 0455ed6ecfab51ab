"""A torch module and its port, with their inputs and the way to call them."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from flax import nnx

from jax_attn.bench.workload import CACHED, FORWARD, PAIR_MODES, STEP
from jax_attn.parity.pair.pair import Given, Pair
from jax_attn.transfer import flatten

RATE, DECAY = 1e-3, 1e-2
"""The learning rate and weight decay of AdamW in a training step."""


class Cached(NamedTuple):
    """Functions by which a side reads a prompt into a cache, and then one more token.

    prefill: (module, **inputs) -> (output, cache). step: (module, cache, **one token of each
    input) -> (output, a cache equal to the given one).
    """

    prefill: Callable[..., Any]
    step: Callable[..., Any]


@dataclass(frozen=True, eq=False)
class TimedPair(Pair):
    """A pair as the bench times it; `parity.check` runs it with the arguments of the `Pair`.

    inputs: those of one call. by_length: length -> inputs, if several lengths are measured. cached:
    functions of the reference and of the port, if they have a cache. own_check: a check of the
    pair's own, which returns a `Result`; by default `parity.check` runs on the inputs.
    """

    inputs: Given
    by_length: Mapping[int, Given] = field(default_factory=dict, kw_only=True)
    cached: tuple[Cached, Cached] | None = field(default=None, kw_only=True)
    own_check: Callable[[], Any] | None = field(default=None, kw_only=True)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths to measure; (0,) means the inputs as given."""
        return tuple(self.by_length) or (0,)

    @property
    def modes(self) -> tuple[str, ...]:
        """Modes in which the pair can be measured; gradients need every parameter trainable."""
        trainable = [p.requires_grad for p in self.reference.parameters()]
        with_gradients = PAIR_MODES[1:] if trainable and all(trainable) else ()
        return (FORWARD, *with_gradients, *(CACHED if self.cached else ()))

    @property
    def usual_modes(self) -> tuple[str, ...]:
        """Modes in which the pair is measured by default."""
        if not self.cached:
            return self.modes
        return tuple(mode for mode in (*CACHED, STEP) if mode in self.modes)

    def at(self, length: int) -> "TimedPair":
        """Return the pair with its inputs of this length."""
        return replace(self, inputs=self.by_length.get(length, self.inputs))

    @property
    def named_inputs(self) -> dict[str, np.ndarray]:
        """The inputs by keyword or, if they are positional, by "0", "1" and so on."""
        if isinstance(self.inputs, Mapping):
            return dict(self.inputs)
        return {str(i): a for i, a in enumerate(self.inputs)}

    def call_reference(self, *args: Any, **kwargs: Any) -> Any:
        call = self.reference_call or _called
        return call(self.reference, *args, **kwargs)

    def call_port(self, port: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        call = self.port_call or _called
        return call(port, *args, **kwargs)

    def with_arrays(self, arrays: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return (args, kwargs) of a call on arrays, which have the names of the inputs."""
        if isinstance(self.inputs, Mapping):
            return (), dict(arrays)
        return tuple(arrays.values()), {}


def described(pair: TimedPair) -> str:
    """Return the names, dtypes and shapes of the inputs in one line."""
    return ", ".join(
        f"{name} {np.dtype(a.dtype).name}{list(a.shape)}" for name, a in pair.named_inputs.items()
    )


def _called(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def digests(pair: TimedPair) -> dict[str, str]:
    """Return SHA-256 digests of the inputs and of the state of both sides, by name."""
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
