"""`torch.nn.MultiheadAttention` itself: the published code calls it, so nothing is rewritten.

Parameters `in_proj_weight in_proj_bias out_proj` (with kdim/vdim other than embed_dim
`q_proj_weight k_proj_weight v_proj_weight` and the packed `in_proj_bias`). In its masks
True forbids, contrary to every other mask here.

Refused, since no other design has them: keys and values learnt or zero that stand behind
the sequence's own (`add_bias_kv=True`, parameters `bias_k` and `bias_v`; `add_zero_attn=True`).
"""

from torch import nn

MultiheadAttention = nn.MultiheadAttention


def refused(module: nn.MultiheadAttention) -> list[str]:
    """The names, as torch spells them, of what `module` has and no port supports."""
    names = [name for name in ("bias_k", "bias_v") if getattr(module, name) is not None]
    return names + ["add_zero_attn"] * bool(module.add_zero_attn)


def refuse(module: nn.MultiheadAttention) -> None:
    """Raise ValueError where `module` has a bias_k, a bias_v or add_zero_attn, naming each."""
    if names := refused(module):
        raise ValueError(
            f"torch.nn.MultiheadAttention with {', '.join(names)} is not supported: "
            "expected add_bias_kv=False and add_zero_attn=False"
        )
