"""What a cache is not given: every refusal by its name."""

import jax.numpy as jnp
import numpy as np
import pytest

from helpers.attention.small_attention import numpy_weights
from jax_attn.attention import Alibi, ArgumentError, DistanceBias, Mask
from jax_attn.attention.kv_cache import PageSizes
from jax_attn.attention.rotary import DynamicNTK, Rotary
from jax_attn.nn import GroupedQueryAttention, KVCache

pytestmark = pytest.mark.filterwarnings("error")

B, N, K, H = 2, 6, 3, 5


def module(**options):
    return GroupedQueryAttention(12, N, K, **options, **numpy_weights())


X = np.zeros((B, 3, 12), np.float32)
FAR = DistanceBias(jnp.zeros((N, 3)), -2)
BAD = {
    "no size": (
        lambda: KVCache.empty(B, num_kv_heads=K, head_dim=H),
        "length, window: expected one of them, got None and None",
    ),
    "both sizes and no batch": (
        lambda: KVCache.empty(0, 5, window=3, num_kv_heads=K, head_dim=H),
        r"(?s)batch: expected an int ≥ 1, got int 0.*length, window: expected one of them",
    ),
    "integers": (
        lambda: KVCache.empty(B, 5, num_kv_heads=K, head_dim=H, dtype="int8"),
        "dtype: expected",
    ),
    "another module's": (
        lambda: module()(X, cache=KVCache.empty(B, 5, num_kv_heads=2, head_dim=2)),
        r"cache: expected .*'K': 3.* as in the call, got .*'K': 2",
    ),
    "another batch's, and rotary": (
        lambda: module(head_dim=4, rotary=Rotary())(X, cache=module().empty_cache(B + 1, 5)),
        r"^GroupedQueryAttention: cache: expected a batch of 2, as in the query .*, got one of 3$",
    ),
    "no cache at all": (
        lambda: module()(X, cache={}),
        "cache: expected a KVCache, got dict",
    ),
    "a key, a bias": (
        lambda: module()(X, X, bias=np.zeros(3), cache=module().empty_cache(B, 5)),
        r"(?s)key: expected None with a cache.*bias: expected None, an Alibi or a DistanceBias",
    ),
    "an Alibi twice": (
        lambda: module(position_bias=Alibi(N))(X, bias=Alibi(N), cache=module().empty_cache(B, 5)),
        "cache: expected one bias by position, of the call or of the module",
    ),
    "an Alibi of other heads": (
        lambda: module(position_bias=Alibi(N + 1))(X, cache=module().empty_cache(B, 5)),
        r"alibi: expected None or an Alibi of 6 heads, got Alibi\(num_heads=7",
    ),
    "a DistanceBias beside an Alibi": (
        lambda: module(position_bias=Alibi(N))(X, bias=FAR, cache=module().empty_cache(B, 5)),
        "cache: expected one bias by position, of the call or of the module",
    ),
    "a DistanceBias of other heads": (
        lambda: module()(
            X, bias=DistanceBias(jnp.zeros((N + 1, 3)), -2), cache=module().empty_cache(B, 5)
        ),
        "distances: expected None or a DistanceBias of 6 heads, got one of 7",
    ),
    "a DistanceBias beside extra keys": (
        lambda: module(add_zero_attn=True)(X, bias=FAR, cache=module().empty_cache(B, 5)),
        "distances: expected None beside extra keys",
    ),
    "an Alibi beside extra keys": (
        lambda: module(add_zero_attn=True)(X, bias=Alibi(N), cache=module().empty_cache(B, 5)),
        "alibi: expected None beside extra keys",
    ),
    "an array for a mask": (
        lambda: module()(X, mask=np.ones((3, 3), bool), cache=module().empty_cache(B, 5)),
        "mask: expected only lengths and a band with a cache: it takes no boolean array",
    ),
    "a band that ends before the query": (
        lambda: module()(X, mask=Mask.causal(-1), cache=module().empty_cache(B, 5)),
        "mask: expected a band that ends at the query itself, got hi = -1",
    ),
    "lengths beyond the chunk": (
        lambda: module()(X, mask=Mask.lengths(np.array([3, 4])), cache=module().empty_cache(B, 5)),
        r"mask: expected lengths of 0 to 3, got \[3, 4\]",
    ),
    "deterministic as an array": (
        lambda: module()(X, deterministic=np.array([1, 0]), cache=module().empty_cache(B, 5)),
        "deterministic: expected a static Python bool",
    ),
    "a flag that is a word": (
        lambda: module()(X, cache=module().empty_cache(B, 5), is_causal="no"),
        "is_causal: expected a static Python bool, got str 'no'",
    ),
    "pages of no place": (lambda: PageSizes(first=0), "first: expected an int ≥ 1, got int 0"),
    "sizes of pages as a number": (
        lambda: KVCache.empty(1, 8, num_kv_heads=1, head_dim=2, page_sizes=7),
        "page_sizes: expected a PageSizes, got int 7",
    ),
    "dropout": (
        lambda: module(dropout_rate=0.5)(X, cache=module().empty_cache(B, 5)),
        r"cache: expected no dropout: eval\(\) or deterministic=True",
    ),
    "a kernel insisted on": (
        lambda: module(implementation="dense")(X, cache=module().empty_cache(B, 5)),
        "cache: expected implementation = None.*implementation = 'dense'",
    ),
    "frequencies that follow the length": (
        lambda: module(head_dim=4, rotary=Rotary(scaling=DynamicNTK(2.0, 8)))(
            X, cache=module().empty_cache(B, 5)
        ),
        "cache: cannot be combined with DynamicNTK: its frequencies depend",
    ),
    "keys of other inputs": (
        lambda: module(kdim=5)(X, cache=module().empty_cache(B, 5)),
        "it has kdim = 5",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("row", BAD)
def test_what_cannot_be_is_refused_by_name(row):
    call, message = BAD[row]
    with pytest.raises(ArgumentError, match=message):
        call()
