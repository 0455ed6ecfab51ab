"""GPTBigCode: GPT-2 with linear layers and, mostly, one key/value head."""

from dataclasses import replace
from functools import partial

from jax_attn.transfer.families import gpt2
from jax_attn.transfer.families.config import Reading
from jax_attn.transfer.families.family import Traits
from jax_attn.transfer.table.layout import Layout
from jax_attn.transfer.table.layouts import BY_TURNS, FROM_HEADS, IN_TURN, LINEAR
from jax_attn.transfer.table.steps import HeadSizes


def _multi_query(config: Reading) -> bool:
    return config.flag("multi_query", default=True)


def _block(config: Reading) -> Layout:
    gpt2.check_alone(config)
    packing = IN_TURN if _multi_query(config) else BY_TURNS
    return packing.under("c_attn", "") + FROM_HEADS.under("c_proj", "out_proj")


def _traits(config: Reading, prefix: str) -> Traits:
    D, N, H = gpt2.sizes(config)
    K = 1 if _multi_query(config) else N
    scale = None if config.flag("scale_attn_weights", default=True) else 1.0
    return Traits(D, HeadSizes(N, K, H), is_causal=True, scale=scale)


GPT_BIGCODE = replace(
    gpt2.GPT2,
    name="gpt_bigcode",
    block_of=_block,
    rest_of=partial(gpt2.rest, LINEAR),
    traits_of=_traits,
)
