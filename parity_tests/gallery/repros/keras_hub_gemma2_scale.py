"""KerasHub's Gemma 2 scales queries by head_dim, also where it is told not to."""

import os

os.environ["KERAS_BACKEND"] = "jax"
from keras_hub.src.models.gemma.gemma_decoder_block import GemmaDecoderBlock
from keras_hub.src.utils.transformers.convert_gemma import convert_backbone_config
from transformers import Gemma2Config

sizes = {"hidden_size": 4608, "num_attention_heads": 32, "head_dim": 128}
read = convert_backbone_config(Gemma2Config(**sizes, query_pre_attn_scalar=144).to_dict())
block = GemmaDecoderBlock(
    hidden_dim=12,
    intermediate_dim=8,
    head_dim=8,
    num_query_heads=2,
    num_key_value_heads=1,
    query_head_dim_normalize=read["query_head_dim_normalize"],
)
print("the converter reads:", read["query_head_dim_normalize"])
print("the attention has:", block.attention.query_head_dim_normalize)
