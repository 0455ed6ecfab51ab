"""`torch.nn.MultiheadAttention` itself, which the published code calls; nothing is rewritten.

Parameters `in_proj_weight in_proj_bias out_proj` (with kdim/vdim other than embed_dim
`q_proj_weight k_proj_weight v_proj_weight` and the packed `in_proj_bias`). In its masks True
forbids, contrary to every other mask here. With `add_bias_kv=True` a learned key and value,
`bias_k` and `bias_v` (1, 1, D), follow the sequence's own; with `add_zero_attn=True` a key and
value of 0 follow those. Every query sees both, and both have a column of the weights.
"""

from torch import nn

MultiheadAttention = nn.MultiheadAttention
