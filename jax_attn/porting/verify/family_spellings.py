"""Read a known family's attention weights from a file's own tensors, under torch_ref's names.

This module shares nothing with the transfer tables, by intent: they are what is verified, and one
table for both sides would agree with itself. `SPELLED` states independently the names of the
projections and the layout of a packed one. Letters: N and K query and key/value heads, G = N // K,
H head_dim.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jax_attn.families.traits import Traits
from jax_attn.transfer.problems import Problem, TransferError

Arrays = Mapping[str, np.ndarray]


class Spelled(NamedTuple):
    """Names relative to a block's prefix.

    projections: query, key and value, or a packed one. by_group: the packed one has, for each
    key/value head in turn, G queries, the key and the value; else all queries, all keys, all
    values. columns: weights are (in, out). pairs_apart: rotary pairs are (2m, 2m + 1), which
    torch_ref's module has at (m, m + H/2). table: that of a learned position bias. norms: those of
    queries and keys. sinks: the scores of no key.
    """

    projections: tuple[str, ...]
    out: str
    by_group: bool = False
    columns: bool = False
    pairs_apart: bool = False
    table: str = ""
    norms: tuple[str, str] = ("q_norm", "k_norm")
    sinks: str = ""

    @property
    def weights(self) -> set[str]:
        return {f"{name}.weight" for name in (*self.projections, self.out)}


_SPLIT = Spelled(("q_proj", "k_proj", "v_proj"), "o_proj")
_PACKED = Spelled(("query_key_value",), "dense", by_group=True)

# Family -> its spellings; the first whose projections are all present counts.
SPELLED: dict[str, tuple[Spelled, ...]] = {
    "bert": (Spelled(("self.query", "self.key", "self.value"), "output.dense"),),
    "bloom": (_PACKED,),
    "falcon": (_PACKED,),
    "gemma2": (_SPLIT,),
    "gpt2": (Spelled(("c_attn",), "c_proj", columns=True),),
    "gpt_bigcode": (Spelled(("c_attn",), "c_proj", by_group=True),),
    "gpt_neox": (_PACKED,),
    "gpt_oss": (_SPLIT._replace(sinks="sinks"),),
    "llama": (_SPLIT,),
    "llama-meta": (Spelled(("wq", "wk", "wv"), "wo", pairs_apart=True),),
    "opt": (_SPLIT._replace(out="out_proj"),),
    "phi": (_SPLIT._replace(out="dense", norms=("q_layernorm", "k_layernorm")),),
    "t5": (Spelled(("q", "k", "v"), "o", table="relative_attention_bias"),),
    "vit": (
        Spelled(("attention.query", "attention.key", "attention.value"), "output.dense"),
        _SPLIT,
    ),
}


def state(family: str, traits: Traits, tensors: Arrays) -> dict[str, np.ndarray]:
    """Return torch_ref's "gqa" state for a block.

    tensors: the block's tensors, by their keys after its prefix. The state holds weights (out, in)
    and biases (out,), views or copies, bit for bit, and norms of queries and keys and sinks
    unchanged.
    Raises TransferError if projections are missing or of another size.
    """
    spelled = next((s for s in SPELLED[family] if s.weights <= tensors.keys()), None)
    if spelled is None:
        known = " or ".join(", ".join((*s.projections, s.out)) for s in SPELLED[family])
        text = f"expected the weights of {known}, got {', '.join(sorted(tensors))}"
        raise TransferError("reading a block", [Problem("missing", family, text)])
    if spelled.columns:
        tensors = {key: array.T for key, array in tensors.items()}
    rows: dict[str, np.ndarray] = {}
    for kind in ("weight", "bias"):
        for role, name in zip("qk", spelled.norms, strict=True):
            if (key := f"{name}.{kind}") in tensors:
                rows[f"{role}_norm.{kind}"] = tensors[key]
        keys = [f"{name}.{kind}" for name in spelled.projections]
        if all(key in tensors for key in keys):
            parts = _three([tensors[key] for key in keys], spelled, traits, keys)
            if spelled.pairs_apart:
                parts[:2] = (_halves(part, traits) for part in parts[:2])
            rows |= {f"{role}_proj.{kind}": p for role, p in zip("qkv", parts, strict=True)}
        if (key := f"{spelled.out}.{kind}") in tensors:
            rows[f"out_proj.{kind}"] = tensors[key]
    if spelled.sinks and spelled.sinks in tensors:
        rows["sinks"] = tensors[spelled.sinks]
    if spelled.table and (key := bias_table(family)) in tensors:
        rows["position_bias.weight"] = tensors[key]
    return rows


def bias_table(family: str) -> str:
    """Return the key of a learned position bias's table, after a block's prefix."""
    return f"{SPELLED[family][0].table}.weight"


def _three(
    arrays: list[np.ndarray], spelled: Spelled, traits: Traits, keys: list[str]
) -> list[np.ndarray]:
    """Return query (N·H, …), key and value (K·H, …), split if they are packed."""
    if len(arrays) == 3:
        return arrays
    (array,), (N, K, H) = arrays, traits.sizes
    if array.shape[0] != (N + 2 * K) * H:
        text = f"expected ({N} + 2·{K})·{H} rows, got {array.shape[0]}"
        raise TransferError("reading a block", [Problem("wrong shape", keys[0], text)])
    if not spelled.by_group:
        return np.split(array, [N * H, (N + K) * H])
    grouped = array.reshape(K, N // K + 2, H, *array.shape[1:])
    parts = grouped[:, :-2], grouped[:, -2], grouped[:, -1]
    return [part.reshape(-1, *array.shape[1:]) for part in parts]


def _halves(array: np.ndarray, traits: Traits) -> np.ndarray:
    paired = array.reshape(-1, traits.sizes.head_dim // 2, 2, *array.shape[1:])
    return np.moveaxis(paired, 2, 1).reshape(array.shape)
