"""What stands in for frameworks and processes in the tests of the bench's engine."""

import os
from dataclasses import replace
from functools import partial
from typing import ClassVar

import numpy as np

from jax_attn.bench.engine import memory
from jax_attn.bench.engine.worker import usable_cores
from jax_attn.bench.programs.program import Program, UnsuitedError


class StandIn:
    """Served by a real worker process."""

    def echo(self, *given):
        print("noise that must not reach our own output")
        return given

    def peaks(self, sizes):
        """Of calls that each free an array of so many bytes before they end."""

        def call(size):
            np.ones(size, np.uint8)

        return [memory.peak_during(partial(call, size)) for size in sizes]

    def threads(self):
        return os.environ["OMP_NUM_THREADS"], usable_cores()

    def load(self):
        raise ImportError("does not import: it is planted")

    def refuse(self):
        raise UnsuitedError("not for this workload")

    def fail(self):
        raise ArithmeticError("planted\nand more")

    def die(self):
        os.write(2, b"last words\n")
        os._exit(7)


class Fake:
    """In the place of `Worker`: answers at once, from a table of method -> answer by name."""

    answers: ClassVar[dict] = {}
    started: ClassVar[list] = []

    def __init__(self, name, make, *arguments, threads, environment, patience=None):
        self.name, self.environment, self.patience, self.closed = name, environment, patience, False
        self.started.append(self)

    def ask(self, method, *arguments):
        answer = self.answers.get((self.name, method), DEFAULTS.get(method))
        answer = answer(*arguments) if callable(answer) else answer
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def hang_up(self):
        pass

    def close(self):
        self.closed = True


DEFAULTS = {
    "build": {"kernel": "a kernel", "cache_bytes": 512},
    "compile": (0.5, 1024),
    "first_call": 0.25,
    "tensors": {},
    "peak": 4096,
    "turn": (0.125, 0.0625),
}


def scale_off(workload, tensors):
    """SDPA, its scale wrong by 1%."""
    import torch.nn.functional as F  # noqa: N812

    def call(query, key, value):
        heads = (x.transpose(1, 2) for x in (query, key, value))
        wrong = 1.01 * query.shape[-1] ** -0.5
        attended = F.scaled_dot_product_attention(
            *heads, is_causal=workload.is_causal, scale=wrong, enable_gqa=True
        )
        return attended.transpose(1, 2)

    return Program(call, {})


def causal_ignored(workload, tensors):
    """SDPA that lets every query see every key."""
    from functools import partial

    from jax_attn.bench.programs.torch_programs import fused_attention

    return Program(partial(fused_attention, is_causal=False), {})


def key_gradient_lost(workload, tensors):
    """Right outputs, and no gradient for the key."""
    from jax_attn.bench.programs.torch_programs import fused_attention

    def call(query, key, value):
        return fused_attention(query, key.detach() + 0 * key, value, is_causal=workload.is_causal)

    return Program(call, {})


def one_row_lost(workload, tensors):
    """SDPA, the first query that is not judged made NaN in one batch entry: 2 heads of 5."""
    import numpy as np

    from jax_attn.bench.arrays import sampled_rows
    from jax_attn.bench.programs.torch_programs import fused_attention

    unjudged = np.setdiff1d(np.arange(workload.T), sampled_rows(workload))

    def call(query, key, value):
        output = fused_attention(query, key, value, is_causal=workload.is_causal).clone()
        output[0, int(unjudged[0]), :2] = float("nan")
        return output

    return Program(call, {})


def in_bfloat16(workload, tensors):
    """SDPA, its output narrowed."""
    from jax_attn.bench.programs.torch_programs import fused_attention

    def call(query, key, value):
        return fused_attention(query, key, value, is_causal=workload.is_causal).bfloat16()

    return Program(call, {})


def key_gradient_infinite(workload, tensors):
    """Right outputs, and a gradient for the key that is not finite."""
    from jax_attn.bench.programs.torch_programs import fused_attention

    def call(query, key, value):
        if key.requires_grad:
            key = key.clone()
            key.register_hook(lambda gradient: gradient / 0)
        return fused_attention(query, key, value, is_causal=workload.is_causal)

    return Program(call, {})


def last_forgotten(workload, tensors):
    """SDPA over the cache as it was before the call: its last token is not there."""
    return _over_cache(workload, tensors, workload.S - 1)


def stale_tail(workload, tensors):
    """SDPA over one place more than is filled."""
    return _over_cache(workload, tensors, workload.S + 1)


def _over_cache(workload, tensors, seen):
    import torch.nn.functional as F  # noqa: N812

    from jax_attn.bench.programs.torch_programs import _Cache

    cache = _Cache(workload, tensors)

    def call(query, key, value):
        cache.grown(key, value)
        heads = (x[:, :, :seen] for x in (cache.keys, cache.values))
        return F.scaled_dot_product_attention(
            query.transpose(1, 2), *heads, enable_gqa=True
        ).transpose(1, 2)

    return Program(call, {})


def corner_top_left(workload, tensors):
    """SDPA that lets the first of several tokens see nothing of what was there before."""
    import torch.nn.functional as F  # noqa: N812

    from jax_attn.bench.programs.torch_programs import _Cache

    cache = _Cache(workload, tensors)

    def call(query, key, value):
        heads = cache.grown(key, value)
        return F.scaled_dot_product_attention(
            query.transpose(1, 2), *heads, is_causal=True, enable_gqa=True
        ).transpose(1, 2)

    return Program(call, {})


def grows(workload, arrays):
    """Ours, the cache given back with the call's tokens counted: the next call is another one."""
    from jax_attn.attention import attend_with_cache
    from jax_attn.bench.programs.jax_programs import ours_cached

    def call(cache, query, key, value):
        return attend_with_cache(query, key, value, cache)

    return replace(ours_cached(workload, arrays), call=call)
