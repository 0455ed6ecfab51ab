"""The laws of attention on the other side: torch's own function, and the reference's grouped heads.

torch has no cache; `torch_ref` has.
"""

import functools

import numpy as np
import pytest
import torch
from hypothesis import given

from helpers.laws import CHUNKS, DRAWN, HV, LAWS, Draw, H, N, S, Side, excess
from torch_ref.cache import KVCache
from torch_ref.gqa import GroupedQueryAttention

tensor = torch.from_numpy


def sdpa(q, k, v, *, allowed=None, bias=None, causal=False):
    """torch's heads come before the sequence, and its float mask is a bias."""
    heads = (tensor(np.ascontiguousarray(x.swapaxes(1, 2))) for x in (q, k, v))
    mask = bias if allowed is None else np.where(allowed, 0 if bias is None else bias, -np.inf)
    mask = None if mask is None else tensor(np.ascontiguousarray(mask, np.float32))
    run = torch.nn.functional.scaled_dot_product_attention
    return run(*heads, attn_mask=mask, is_causal=causal, enable_gqa=True).numpy().swapaxes(1, 2)


def parts(kv_heads: int) -> tuple[int, int, int]:
    """How many features queries, keys and values have, in heads of HV."""
    return N * HV, kv_heads * HV, kv_heads * HV


@functools.cache
def chooses(kv_heads: int) -> GroupedQueryAttention:
    """Its projections only choose: queries, keys and values side by side in what it is given."""
    widths = parts(kv_heads)
    D = sum(widths)
    module = GroupedQueryAttention(D, N, kv_heads, head_dim=HV, scale=H**-0.5, bias=False).eval()
    one_D = torch.eye(D)
    chosen = one_D.split(widths)
    for linear, rows in zip((module.q_proj, module.k_proj, module.v_proj), chosen, strict=True):
        linear.weight.data.copy_(rows)
    module.out_proj.weight.data.copy_(one_D[:, : N * HV])
    return module


def beside(x, widths, place: int) -> np.ndarray:
    """Heads of x, filled up with zeros to HV, in their place of the features."""
    B, length, heads, width = x.shape
    full = np.pad(x, [(0, 0)] * 3 + [(0, HV - width)]).reshape(B, length, heads * HV)
    before, after = sum(widths[:place]), sum(widths[place + 1 :])
    return np.pad(full, [(0, 0), (0, 0), (before, after)])


def grouped(q, k, v, *, causal=False, **options):
    kv_heads = k.shape[2]
    given = (tensor(beside(x, parts(kv_heads), i)) for i, x in enumerate((q, k, v)))
    options = {"mask": options.get("allowed"), "bias": options.get("bias")}
    options = {name: None if x is None else tensor(x.copy()) for name, x in options.items()}
    out = chooses(kv_heads)(*given, **options, is_causal=causal)
    return out[..., : N * HV].unflatten(-1, (N, HV)).numpy()


def grouped_in_chunks(q, k, v):
    B, kv_heads = q.shape[0], k.shape[2]
    together = sum(beside(x, parts(kv_heads), i) for i, x in enumerate((q, k, v)))
    cache = KVCache(B, length=S, num_kv_heads=kv_heads, head_dim=HV)
    chunks = tensor(together).split(CHUNKS, dim=1)
    outs = [chooses(kv_heads)(chunk, cache=cache) for chunk in chunks]
    return torch.cat(outs, dim=1)[..., : N * HV].unflatten(-1, (N, HV)).numpy()


SIDES = {
    "scaled_dot_product_attention": Side(sdpa),
    "torch_ref": Side(grouped, grouped_in_chunks),
}
ROWS = [
    (side, law)
    for side in SIDES
    for law in LAWS
    if law != "cache is full pass" or SIDES[side].cached
]


@pytest.mark.parametrize(("side", "law"), ROWS)
@given(**DRAWN)
def test_law(side, law, seed, size):
    with torch.no_grad():
        assert excess(*LAWS[law](SIDES[side], Draw(seed, size))) <= 1


def test_the_projections_only_choose():
    """Bit for bit: in multi-head attention of one key the output is its value."""
    draw = Draw(5)
    q, k, v = draw.arrays(keys=1, kv_heads=N)
    with torch.no_grad():
        out = grouped(q, k, v)
    assert np.array_equal(out, np.broadcast_to(v, out.shape))
