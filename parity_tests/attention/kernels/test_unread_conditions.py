"""A condition that is new to Mask: each kernel refuses it until the kernel is taught to read it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_attn.attention import (
    ArgumentError,
    KVCache,
    Mask,
    attend_with_cache,
    attention_weights,
    dot_product_attention,
    explain_kernel,
)
from jax_attn.attention.call import checked_call
from jax_attn.attention.dispatch import KERNELS

pytestmark = pytest.mark.filterwarnings("error")


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Strided(Mask):
    """Each query sees every `stride`-th key alone."""

    stride: Any = None


x, MASK = jnp.ones((1, 130, 2, 8)), Strided(lo=0, stride=3)


@pytest.mark.parametrize("name", [name for name in KERNELS if name != "dense"])
def test_each_kernel_refuses_it_by_name(name):
    assert "it takes no stride" in KERNELS[name].refusals(checked_call("call", x, x, x, MASK))
    assert "it takes no stride" not in KERNELS[name].refusals(
        checked_call("call", x, x, x, Strided(lo=0))
    )


CALLS = {
    "attention, by dense, which writes the mask out": lambda: dot_product_attention(x, x, x, MASK),
    "joined by a causal mask": lambda: dot_product_attention(x, x, x, MASK, is_causal=True),
    "weights": lambda: attention_weights(x, x, MASK),
    "over a cache": lambda: attend_with_cache(
        x, x, x, KVCache.empty(1, 200, num_kv_heads=2, head_dim=8), MASK
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_no_call_ignores_it(name):
    with pytest.raises(ArgumentError, match="it takes no stride"):
        CALLS[name]()


def test_the_chooser_leaves_it_to_what_reads_the_mask_written_out():
    assert "not blocked: it takes no stride" in str(explain_kernel(x, x, x, MASK))
    assert explain_kernel(x, x, x, Strided(lo=0)).chosen == "blocked"


def test_two_of_them_are_not_joined():
    with pytest.raises(ValueError, match="both have stride"):
        MASK & MASK
