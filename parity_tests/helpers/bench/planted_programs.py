"""Programs that compute something wrong. Builders, as those of the bench's own programs."""

from dataclasses import replace
from functools import partial

import numpy as np
import torch.nn.functional as F  # noqa: N812

from jax_attn.attention import attend_with_cache
from jax_attn.bench.arrays import sampled_rows
from jax_attn.bench.programs.jax_programs import ours_cached
from jax_attn.bench.programs.program import TimedProgram
from jax_attn.bench.programs.torch_programs import _Cache, fused_attention


def of_sdpa(workload, change_key=lambda key: key, change_output=lambda output: output):
    """SDPA of a changed key, its output changed."""

    def call(query, key, value):
        key = change_key(key)
        return change_output(fused_attention(query, key, value, is_causal=workload.is_causal))

    return TimedProgram(call, {})


def scale_off(workload, tensors):
    """By 1%, which is a key larger by as much."""
    return of_sdpa(workload, lambda key: 1.01 * key)


def causal_ignored(workload, tensors):
    return TimedProgram(partial(fused_attention, is_causal=False), {})


def key_gradient_lost(workload, tensors):
    """Right outputs, and no gradient for the key."""
    return of_sdpa(workload, lambda key: key.detach() + 0 * key)


def key_gradient_infinite(workload, tensors):
    """Right outputs, and a gradient for the key that is not finite."""

    def change(key):
        if key.requires_grad:
            key = key.clone()
            key.register_hook(lambda gradient: gradient / 0)
        return key

    return of_sdpa(workload, change)


def one_row_lost(workload, tensors):
    """The first query that is not judged made NaN in one batch entry: 2 heads of 5."""
    unjudged = int(np.setdiff1d(np.arange(workload.T), sampled_rows(workload))[0])

    def change(output):
        output = output.clone()
        output[0, unjudged, :2] = float("nan")
        return output

    return of_sdpa(workload, change_output=change)


def in_bfloat16(workload, tensors):
    return of_sdpa(workload, change_output=lambda output: output.bfloat16())


def over_cache(workload, tensors, seen=None, **masked):
    """SDPA over the first `seen` places of the cache; masked: its mask."""
    cache = _Cache(workload, tensors)

    def call(query, key, value):
        cache.grown(key, value)
        heads = (x[:, :, : seen or workload.S] for x in (cache.keys, cache.values))
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2), *heads, enable_gqa=True, **masked
        )
        return attended.transpose(1, 2)

    return TimedProgram(call, {})


def last_forgotten(workload, tensors):
    """The cache as it was before the call: its last token is not there."""
    return over_cache(workload, tensors, workload.S - 1)


def stale_tail(workload, tensors):
    """One place more than is filled."""
    return over_cache(workload, tensors, workload.S + 1)


def corner_top_left(workload, tensors):
    """The first of several tokens sees nothing of what was there before."""
    return over_cache(workload, tensors, is_causal=True)


def grows(workload, arrays):
    """Ours, the cache given back with the call's tokens counted: the next call is another one."""

    def call(cache, query, key, value):
        return attend_with_cache(query, key, value, cache)

    return replace(ours_cached(workload, arrays), call=call)
