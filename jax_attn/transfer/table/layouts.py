"""Tables of the published designs, and of the layers around them.

Flax paths are those of this package's modules: q_proj.kernel (D, N, H), k_proj.kernel and
v_proj.kernel (D, K, H), out_proj.kernel (N, H, D), biases (N, H), (K, H) and (D,). Torch's Linear
weights are (out, in); its packed rows are in the order query, key, value.
"""

from jax_attn.transfer.table.layout import Layout, optional
from jax_attn.transfer.table.rows import either, row
from jax_attn.transfer.table.steps import grouped, heads, heads_in, inward, linear, packed, squeezed

LINEAR = Layout(row("weight", "kernel", linear), row("bias", "bias"))
BIASLESS = Layout(row("weight", "kernel", linear))
EMBEDDING = Layout(row("weight", "embedding"))
LAYER_NORM = Layout(row("weight", "scale"), row("bias", "bias"))
RMS_NORM = Layout(row("weight", "scale"))

FLAX_NAMES = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "out"}
"""`layout.renamed(FLAX_NAMES)` is a table for flax's own nnx.MultiHeadAttention."""

TO_HEADS = Layout(
    row("weight", "kernel", linear, heads),  # (N·H, D) -> (D, N, H)
    row("bias", "bias", heads),
)
FROM_HEADS = Layout(
    row("weight", "kernel", linear, heads_in),  # (D, N·H) -> (N, H, D)
    row("bias", "bias"),
)

QKV_KERNELS = ("q_proj.kernel", "k_proj.kernel", "v_proj.kernel")
QKV_BIASES = ("q_proj.bias", "k_proj.bias", "v_proj.bias")
_IN_TURN = Layout(
    row("weight", QKV_KERNELS, packed, linear, heads),
    row("bias", QKV_BIASES, packed, heads),
)
_BY_HEAD = Layout(
    row("weight", QKV_KERNELS, grouped, inward),
    row("bias", QKV_BIASES, grouped),
)

BIAS_KV = optional(
    row("bias_k", "bias_k", squeezed, heads),  # (1, 1, K·H) -> (K, H)
    row("bias_v", "bias_v", squeezed, heads),
)
"""A learned key and its value; `add_zero_attn` has no parameters."""


def projections(query: str, key: str, value: str, out: str) -> Layout:
    """Return the table of four projections with these torch names."""
    return Layout(
        TO_HEADS.under(query, "q_proj"),
        TO_HEADS.under(key, "k_proj"),
        TO_HEADS.under(value, "v_proj"),
        FROM_HEADS.under(out, "out_proj"),
    )


def fused(qkv: str, out: str, *, by_head: bool) -> Layout:
    """Return the table of a packed query, key and value projection, and the output projection.

    qkv, out: their torch names. by_head: for each key/value head in turn the rows hold its queries,
    its key and its value; otherwise they hold all queries, all keys, then all values.
    """
    packing = _BY_HEAD if by_head else _IN_TURN
    return packing.under(qkv, "") + FROM_HEADS.under(out, "out_proj")


LAYOUTS = {
    "weights_mha": projections("w_q", "w_k", "w_v", "w_o"),
    "fused_mha": fused("qkv_proj", "out_proj", by_head=False),
    "masked_mha": projections("W_Q", "W_K", "W_V", "W_O"),
    "mqa": projections("W_Q", "W_K", "W_V", "W_O"),
    "plain_mha": projections("query", "key", "value", "out"),
    "torch_mha": Layout(
        either(
            row("in_proj_weight", QKV_KERNELS, packed, linear, heads),
            [  # with kdim or vdim
                row("q_proj_weight", "q_proj.kernel", linear, heads),
                row("k_proj_weight", "k_proj.kernel", linear, heads),
                row("v_proj_weight", "v_proj.kernel", linear, heads),
            ],
        ),
        row("in_proj_bias", QKV_BIASES, packed, heads),
        FROM_HEADS.under("out_proj", "out_proj"),
        BIAS_KV,
    ),
    "gqa": Layout(
        projections("q_proj", "k_proj", "v_proj", "out_proj"),
        BIAS_KV,
        optional(
            LAYER_NORM.under("q_norm", "q_norm"),  # RMSNorm has no bias: that row is then unused
            LAYER_NORM.under("k_norm", "k_norm"),
            EMBEDDING.under("position_bias", "position_bias"),  # if it is learned
            row("sinks", "sinks"),
        ),
    ),
}

PLAIN_PIPELINE = Layout(
    EMBEDDING.under("embedding", "embedding"),
    LAYOUTS["plain_mha"].under("attention", "attention"),
)
"""Token ids -> embedding -> attention, as `plain_mha` was published."""
