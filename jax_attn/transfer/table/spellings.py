"""Names of attention's projections in published models: query, key, value, output.

Shared by the search for attention in a file and by the reading of names. The torch side of
`verify CHECKPOINT` has its own table, because it checks the results of this one.
"""

from typing import NamedTuple


class Spelling(NamedTuple):
    """Names relative to a block's prefix.

    weights, biases: those of query, key and value, or one that packs all three, with rows in that
    order. outs: possible names of the output projection.
    """

    weights: tuple[str, ...]
    biases: tuple[str, ...]
    outs: tuple[str, ...]


def _modules(names: str, *outs: str) -> Spelling:
    modules = names.split()
    return Spelling(
        tuple(f"{module}.weight" for module in modules),
        tuple(f"{module}.bias" for module in modules),
        outs,
    )


def _roles(spelling: Spelling) -> list[str]:
    return [*"qkv"] if len(spelling.weights) == 3 else ["qkv"]


# A spelling whose names end like another's precedes it.
SPELLINGS = (
    _modules("self.query self.key self.value", "output.dense"),  # BERT
    _modules("self.query_proj self.key_proj self.value_proj", "output.dense"),  # DeBERTa
    _modules("attention.query attention.key attention.value", "output.dense"),  # ViT's files
    _modules("q_proj k_proj v_proj", "out_proj", "o_proj", "out", "dense"),
    _modules("query key value", "out", "out_proj", "dense"),
    _modules("q_lin k_lin v_lin", "out_lin"),  # DistilBERT
    _modules("to_q to_k to_v", "to_out.0", "to_out"),  # diffusers
    _modules("w_q w_k w_v", "w_o"),
    _modules("W_Q W_K W_V", "W_O"),
    _modules("wq wk wv", "wo"),  # Llama as first published
    _modules("q k v", "o", "out", "proj"),  # T5
    Spelling(("in_proj_weight",), ("in_proj_bias",), ("out_proj",)),  # torch's own
    Spelling(  # and with kdim or vdim
        ("q_proj_weight", "k_proj_weight", "v_proj_weight"), ("in_proj_bias",), ("out_proj",)
    ),
    _modules("qkv_proj", "out_proj", "o_proj"),
    _modules("qkv", "proj", "out_proj"),  # timm
    _modules("Wqkv", "out_proj", "Wo"),
)

UNORDERED = {
    "c_attn": "GPT-2 and GPTBigCode differ",
    "query_key_value": "Falcon, GPT-NeoX and BLOOM differ",
    "self.in_proj": "DeBERTa mixes the heads",
}
"""Modules that pack query, key and value in an order that the name does not determine, and why."""

# The only published module with a packed name of SPELLINGS that has another order.
OTHERWISE_PACKED = {"codegen": "qkv_proj"}

WORDS = {
    "q": "q query queries",
    "k": "k key keys",
    "v": "v val value values",
    "out": "o out output",
}
"""Names of each single projection, in lower case."""

ROLES = {
    weight.removesuffix(".weight").rpartition(".")[2].lower(): role
    for spelling in SPELLINGS
    for role, weight in zip(_roles(spelling), spelling.weights, strict=True)
    if weight.endswith(".weight")
}
ROLES |= dict.fromkeys(UNORDERED, "qkv") | {"wo": "out"}
"""A module's own name, in lower case -> "q", "k", "v", "qkv" for all three in one, or "out"."""
