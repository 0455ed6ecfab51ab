"""The PyTorch attention designs that jax_attn ports, one file per design. No jax here."""

from torch_ref import fused_mha, gqa, masked_mha, mqa, plain_mha, torch_mha, weights_mha

DESIGNS = {
    "weights_mha": weights_mha.MultiHeadSelfAttention,
    "fused_mha": fused_mha.MultiHeadSelfAttention,
    "masked_mha": masked_mha.MultiHeadAttention,
    "mqa": mqa.MultiQueryAttention,
    "plain_mha": plain_mha.MultiHeadAttention,
    "torch_mha": torch_mha.MultiheadAttention,
    "gqa": gqa.GroupedQueryAttention,
}
