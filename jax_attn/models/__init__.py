"""Whole models in Flax NNX: one block, one stack, and the traits of a family.

model = load("folder-of-a-checkpoint")
model(tokens, lengths).logits
"""

from jax_attn.families import traits
from jax_attn.models.asked import How
from jax_attn.models.block import Block
from jax_attn.models.chat import Chat
from jax_attn.models.cross_attention import Source
from jax_attn.models.defaults import Defaults
from jax_attn.models.encoder_decoder import Decoded, Decoding, EncoderDecoder
from jax_attn.models.load import from_config, load, save
from jax_attn.models.mlp import MLP
from jax_attn.models.model import Model, Output
from jax_attn.models.norm import Norm
from jax_attn.models.sampling import Sampling

__all__ = [
    "MLP",
    "Block",
    "Chat",
    "Decoded",
    "Decoding",
    "Defaults",
    "EncoderDecoder",
    "How",
    "Model",
    "Norm",
    "Output",
    "Sampling",
    "Source",
    "from_config",
    "load",
    "save",
    "traits",
]
