"""The judge of a user's pair, in a process of its own; it also counts operations and bytes."""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import torch
from flax import nnx

from jax_attn.bench.engine.judge import fields
from jax_attn.bench.pair.made import made
from jax_attn.bench.pair.pair import TimedPair, described, digests
from jax_attn.bench.programs.torch_pair import TorchPair
from jax_attn.bench.workload import (
    BACKWARD,
    CACHE,
    CACHED,
    DECODE,
    FORWARD,
    PREFILL,
    STEP,
    PairWorkload,
)
from jax_attn.parity.checking.check import check
from jax_attn.parity.judge.result import Result
from jax_attn.parity.judge.text import joined
from jax_attn.parity.pair.errors import PairError, told
from jax_attn.parity.run.torch_settings import plain_kernels

# Whether a mode has a cache -> why a pair lacks it.
_LACKS = {
    True: "the pair has no cache; only the generative model of a checkpoint has one",
    False: "gradients need parameters, and none may be frozen",
}


class PairJudge:
    """Server; call `load` first. named, lengths: as `made` takes them."""

    def __init__(self, named: str | TimedPair, lengths: tuple[int, ...]) -> None:
        self.named, self.lengths = named, lengths

    def load(self) -> dict[str, str]:
        """Make the pair, and return its digests."""
        self.pair = made(self.named, self.lengths)
        return digests(self.pair)

    def judged(
        self, name: str, modes: tuple[str, ...]
    ) -> tuple[tuple[str, ...], dict[PairWorkload, dict[str, Any]]]:
        """Judge the pair under jit at each length.

        A pair with a check of its own is judged once, on the inputs of that check.

        name: the pair's name in the record. modes: the modes to measure; the usual ones if empty.

        Returns the modes, and fields of a measurement by workload. Raises PairError if the pair
        lacks a mode, or raises.
        """
        pair = self.pair
        if lacking := [mode for mode in modes if mode not in pair.modes]:
            got = f"expected modes among {', '.join(pair.modes)}, got {joined(lacking)}"
            whys = dict.fromkeys(_LACKS[mode in CACHED] for mode in lacking)
            raise PairError(f"{name}: {got}: {'; '.join(whys)}")
        modes = modes or pair.usual_modes
        once = pair.lengths[:1] if pair.own_check else pair.lengths
        verdicts = [self._judged(length) for length in once]
        side = TorchPair(pair, "cpu")
        workloads = [
            PairWorkload(
                f"{name}, length {length}" if length else name,
                described(pair.at(length)),
                pair.options["dtype"],
                tuple(flops(side, length, modes).items()),
                length,
                tuple(_reads(pair.at(length), modes).items()),
            )
            for length in pair.lengths
        ]
        return modes, dict(zip(workloads, itertools.cycle(verdicts), strict=False))

    def _judged(self, length: int) -> dict[str, Any]:
        pair = self.pair.at(length)
        try:
            result = pair.own_check() if pair.own_check else _checked(pair)
        except (TypeError, ValueError) as error:
            raise PairError(told(error)) from error
        return fields(result.verdict, map(str, result.reasons), result.tensors)


def flops(side: TorchPair, length: int, modes: Sequence[str]) -> dict[str, int]:
    """Count the operations of the reference's products and convolutions in a call, by mode.

    A training step counts as its forward and backward pass, as torch counts them. The counter does
    not see fused kernels, so the call runs with plain ones.
    """
    from torch.utils.flop_counter import FlopCounterMode

    calls, state = side.at(length)
    counts = {}
    for mode in modes:
        counted = BACKWARD if mode == STEP else mode
        if mode == DECODE:
            with torch.inference_mode():
                _, state[CACHE] = calls[PREFILL]()
        counter = FlopCounterMode(display=False)
        # In inference mode, the counter would not see the products of linear layers.
        with torch.set_grad_enabled(counted == BACKWARD), plain_kernels(), counter:
            calls[counted]()
        counts[mode] = counter.get_total_flops()
    return counts


def _reads(pair: TimedPair, modes: Sequence[str]) -> dict[str, int]:
    """Return the bytes of the parameters by mode; decode adds those of the cache.

    Parameters of embeddings are left out, because a call reads only one row for each token.
    """
    parts = (m for m in pair.reference.modules() if not isinstance(m, torch.nn.Embedding))
    read = {p for part in parts for p in part.parameters(recurse=False)}
    parameters = sum(p.numel() * p.element_size() for p in read)
    by_mode = {mode: parameters for mode in modes if mode in (FORWARD, *CACHED)}
    if pair.cached and DECODE in by_mode:
        _, of_port = pair.cached
        _, cache = nnx.eval_shape(partial(of_port.prefill, **pair.named_inputs), pair.port)
        by_mode[DECODE] += sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    return by_mode


def _checked(pair: TimedPair) -> Result:
    # All that is timed is judged, whatever the pair's own check leaves out.
    options = pair.options | {"transforms": ("jit",), "gradients": True, "parameters": None}
    return check(pair.reference, pair.port, pair.inputs, **options)
