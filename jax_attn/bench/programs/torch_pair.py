"""The reference of a pair in torch, called in every mode.

The loss is the mean square of each floating-point output, added up; gradients are taken with
respect to the parameters. A training step is AdamW's and continues from the last one. If the pair
has a cache, prefill reads a prompt into an empty cache, and decode reads one token after it; every
call repeats the same one.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree

from jax_attn.bench.pair.pair import DECAY, RATE, Cached, TimedPair
from jax_attn.bench.programs.operations import Operations, torch_operations
from jax_attn.bench.workload import BACKWARD, CACHE, DECODE, FORWARD, PREFILL, STEP
from jax_attn.transfer.arrays import as_torch


def eager(pair: TimedPair, device: str) -> "TorchPair":
    return TorchPair(pair, device)


def compiled(pair: TimedPair, device: str) -> "TorchPair":
    return TorchPair(pair, device, torch.compile)


def reducing_overhead(pair: TimedPair, device: str) -> "TorchPair":
    return TorchPair(pair, device, partial(torch.compile, mode="reduce-overhead"))


class TorchPair:
    """A copy of the reference on one device; its functions are compiled by `compile` if given."""

    def __init__(
        self, pair: TimedPair, device: str, compile: Callable[..., Any] | None = None
    ) -> None:
        self.compiled = compile is not None
        self.device = {"cpu": "cpu", "gpu": "cuda"}[device]
        # Steps change the parameters, but these belong to the caller.
        self.pair = pair = replace(pair, reference=copy.deepcopy(pair.reference))
        self.module = pair.reference.to(self.device)
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.optimizer: Any = None
        if self.parameters:
            self.optimizer = torch.optim.AdamW(self.parameters, RATE, weight_decay=DECAY)
        wrap: Any = compile or (lambda function: function)
        self.call: Callable[..., Any] = wrap(pair.call_reference)
        self.cached = pair.cached and Cached(*map(wrap, pair.cached[0]))

    def at(self, length: int) -> tuple[dict[str, Callable[[], Any]], dict[str, Any]]:
        """Return the functions by mode, on the inputs of this length, and the state they share."""
        named = self.pair.at(length).named_inputs
        arrays = {name: as_torch(a.copy()).to(self.device) for name, a in named.items()}
        args, kwargs = self.pair.with_arrays(arrays)
        state: dict[str, Any] = {}

        def forward() -> Any:
            return self.call(*args, **kwargs)

        def loss() -> torch.Tensor:
            tensors = (x for x in _pytree.tree_leaves(forward()) if isinstance(x, torch.Tensor))
            outputs = [x for x in tensors if x.requires_grad]
            return torch.stack([x.float().square().mean() for x in outputs]).sum()

        def backward() -> Any:
            return torch.autograd.grad(loss(), self.parameters, allow_unused=True)

        def step() -> None:
            self.optimizer.zero_grad()
            loss().backward()
            self.optimizer.step()

        calls = {FORWARD: forward, BACKWARD: backward, STEP: step}
        if self.cached:
            calls |= self._cached(self.cached, arrays, state)
        return calls, state

    def _cached(
        self, cached: Cached, arrays: Mapping[str, torch.Tensor], state: dict[str, Any]
    ) -> dict[str, Callable[[], Any]]:
        one = {name: a[:, :1] for name, a in arrays.items()}

        def prefill() -> tuple[Any, Any]:
            return cached.prefill(self.module, **arrays)

        def decode() -> Any:
            out, state[CACHE] = cached.step(self.module, state[CACHE], **one)
            return out

        return {PREFILL: prefill, DECODE: decode}

    def operations(self, mode: str, call: Callable[[], Any]) -> Operations:
        """Return where a call spends its time; nothing if compiled, as its modules are unknown."""
        if self.compiled or self.device != "cpu":  # the profiler's own times are the host's
            return ()
        return torch_operations(self.module, call)
