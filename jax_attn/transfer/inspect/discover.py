"""Attention blocks in a checkpoint, found by their keys and shapes.

`SPELLINGS` says how projections are called; shapes say whether what is so called is one block.
What looks like attention and cannot be read is given back too, with the reason: nothing is
guessed, nothing left out. Reads names, shapes and dtypes only; needs no framework.

Letters: N and K query and key/value heads, H head_dim, D embed_dim.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from jax_attn.dtypes import DTYPES
from jax_attn.transfer.arrays import Spec
from jax_attn.transfer.problems import Problem, TransferError

Specs = Mapping[str, Spec]


class Spelling(NamedTuple):
    """Names relative to a block's prefix.

    weights, biases: those of query, key and value, or of all three packed in one, rows in that
    order. outs: the modules that may be the output projection.
    """

    weights: tuple[str, ...]
    biases: tuple[str, ...]
    outs: tuple[str, ...]


def _modules(names: str, *outs: str) -> Spelling:
    parts = names.split()
    return Spelling(
        tuple(f"{part}.weight" for part in parts), tuple(f"{part}.bias" for part in parts), outs
    )


# A spelling that ends in another's names stands before it.
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

_INTERLEAVED = "packs query, key and value, and how its rows are interleaved no shape tells"
UNDECIDED = {
    "c_attn": f"{_INTERLEAVED} (GPT-2 and GPTBigCode differ)",
    "query_key_value": f"{_INTERLEAVED} (Falcon, GPT-NeoX and BLOOM differ)",
    "self.in_proj": f"{_INTERLEAVED} (DeBERTa mixes the heads)",
    "kv_b_proj": "expands a compressed state into keys and values: no such projection is rebuilt",
    "q_proj.qweight": "is quantised: no such projection is rebuilt",
    "rel_attn.q": "is a projection with heads in its shape, for relative attention",
}
"""Names that look like attention and whose contents they do not tell."""

# The one published module that packs under a name of the table and not in its order.
OTHERWISE_PACKED = {"codegen": "qkv_proj"}


class Part(NamedTuple):
    """Rows start to stop of the tensor `key`."""

    key: str
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Block:
    """One attention block.

    parts: "q.weight", "k.bias", "o.weight" … -> where it lies; a bias may be absent.
    embed_dim, kdim, vdim: what query, key and value have for features.
    absent: key of a bias that is not there, though others of query, key and value have one; its
        part is in `parts` all the same. beside: other keys under the prefix, relative to it.
    """

    prefix: str
    parts: Mapping[str, Part]
    embed_dim: int
    kdim: int
    vdim: int
    dtype: str
    absent: tuple[str, ...]
    beside: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.prefix or "attention"

    @property
    def keys(self) -> tuple[str, ...]:
        """Every tensor of it that the checkpoint has."""
        found = dict.fromkeys(part.key for part in self.parts.values())
        return tuple(key for key in found if key not in self.absent)


@dataclass(frozen=True)
class Unread:
    """What looks like attention and is not rebuilt, and why."""

    prefix: str
    keys: tuple[str, ...]
    reason: str
    beside: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.prefix or "attention"


class _MisfitError(ValueError):
    """Why tensors of the right names are no block."""


def discover(specs: Specs, model_type: str = "") -> list[Block | Unread]:
    """Every attention block in a checkpoint, in the order of its layers.

    specs: torch key to shape and dtype. model_type: as a config names it. Raises TransferError
    where one tensor belongs to two blocks, such as packed and split keys together.
    """
    read = list(_readings(specs))
    blocks = [block for block in read if isinstance(block, Block)]
    _refuse_ambiguous(blocks)
    found = [_unless_packed_otherwise(block, model_type) for block in blocks]
    claimed = {key for block in blocks for key in block.keys}
    for unread in (*_undecided(specs), *(item for item in read if isinstance(item, Unread))):
        if not claimed.intersection(unread.keys):
            claimed.update(unread.keys)
            found.append(unread)
    return sorted(found, key=lambda block: _in_order(block.name))


def pattern(name: str) -> str:
    """A block's name with its layer numbers left open: encoder.layer.{i}.attention."""
    return ".".join("{i}" if part.isdecimal() else part for part in name.split("."))


def _in_order(name: str) -> list[tuple[int, str]]:
    """Layer 10 behind layer 9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


# --- spellings met ------------------------------------------------------------------------------


def _readings(specs: Specs) -> Iterator[Block | Unread]:
    """What each spelling makes of each prefix under which it, or most of it, is there."""
    for spelling in SPELLINGS:
        met = Counter(p for name in spelling.weights for p in _prefixes(specs, name))
        for prefix, names in met.items():
            if names >= min(2, len(spelling.weights)):
                yield from _read(specs, spelling, prefix)


def _read(specs: Specs, spelling: Spelling, prefix: str) -> Iterator[Block | Unread]:
    weights = [_under(prefix, name) for name in spelling.weights]
    outs = [_under(prefix, f"{out}.weight") for out in spelling.outs]
    there = [key for key in weights if key in specs]
    found = [key for key in outs if key in specs]
    if there != weights:
        missing = ", ".join(key for key in weights if key not in specs)
        yield _unread(specs, prefix, there, f"missing: {missing}")
    elif not found:
        reason = f"no output projection: expected one of {', '.join(outs)}"
        yield _unread(specs, prefix, there, reason)
    else:
        biases = [_under(prefix, name) for name in spelling.biases]
        for out in found:
            try:
                yield _block(specs, prefix, weights, biases, out)
            except _MisfitError as misfit:
                yield _unread(specs, prefix, [*weights, out], str(misfit))


def _undecided(specs: Specs) -> Iterator[Unread]:
    for name, why in UNDECIDED.items():
        for suffix in (f"{name}.weight", name):
            for prefix in _prefixes(specs, suffix):
                key = _under(prefix, suffix)
                yield _unread(specs, prefix, [key], f"{key} {list(specs[key].shape)} {why}")


def _unless_packed_otherwise(block: Block, model_type: str) -> Block | Unread:
    name = OTHERWISE_PACKED.get(model_type)
    key = block.parts["q.weight"].key
    if name is None or not key.endswith(f"{name}.weight"):
        return block
    reason = f"{key}: model_type {model_type!r} packs its rows in an order of its own"
    return Unread(block.prefix, block.keys, reason, block.beside)


def _refuse_ambiguous(blocks: Iterable[Block]) -> None:
    owners: dict[str, list[Block]] = {}
    for block in blocks:
        for key in block.keys:
            owners.setdefault(key, []).append(block)
    disputes: dict[tuple[str, ...], str] = {}
    for key, several in owners.items():
        if len(several) > 1:
            disputes.setdefault(tuple(dict.fromkeys(k for b in several for k in b.keys)), key)
    if disputes:
        text = "expected the keys of one attention block, got those of several: {}"
        problems = [Problem("ambiguous", k, text.format(", ".join(s))) for s, k in disputes.items()]
        raise TransferError("finding attention", problems)


# --- shapes that fit ----------------------------------------------------------------------------


def _block(specs: Specs, prefix: str, weights: list[str], biases: list[str], out: str) -> Block:
    """The block of these tensors. Raises _MisfitError where they are none."""
    shapes = {key: specs[key].shape for key in (*weights, out)}
    if any(len(shape) != 2 or 0 in shape for shape in shapes.values()):
        raise _MisfitError(f"expected matrices (out, in), got {_listed(shapes)}")
    rows = _rows(weights, out, shapes)
    embed_dim, kdim, vdim = (shapes[weights[i % len(weights)]][1] for i in range(3))
    if (rows[0], rows[1], embed_dim) != (shapes[out][1], rows[2], shapes[out][0]):
        raise _MisfitError(
            f"expected query (N·H, D), key and value (K·H, …), output (D, N·H), "
            f"got {_listed(shapes)}"
        )
    parts = _parts("weight", weights, rows) | {"o.weight": Part(out, 0, embed_dim)}
    if any(key in specs for key in biases):
        parts |= _parts("bias", biases, rows)
    if (out_bias := f"{out.removesuffix('weight')}bias") in specs:
        parts["o.bias"] = Part(out_bias, 0, embed_dim)
    keys = dict.fromkeys(part.key for part in parts.values())
    _check_biases(specs, parts)
    return Block(
        prefix=prefix,
        parts=parts,
        embed_dim=embed_dim,
        kdim=kdim,
        vdim=vdim,
        dtype=_dtype(specs, [key for key in keys if key in specs]),
        absent=tuple(key for key in keys if key not in specs),
        beside=_beside(specs, prefix, keys),
    )


def _rows(weights: list[str], out: str, shapes: Mapping[str, tuple[int, ...]]) -> list[int]:
    """Rows of query, key and value. Packed, the query has what the output projection reads."""
    if len(weights) == 3:
        return [shapes[key][0] for key in weights]
    total, query = shapes[weights[0]][0], shapes[out][1]
    shared, odd = divmod(total - query, 2)
    if shared < 1 or odd:
        raise _MisfitError(
            f"expected {query} rows for the query, and as many for the key as for the value, "
            f"got {_listed(shapes)}"
        )
    return [query, shared, shared]


def _parts(kind: str, keys: list[str], rows: list[int]) -> dict[str, Part]:
    starts = (0, 0, 0) if len(keys) == 3 else (0, rows[0], rows[0] + rows[1])
    return {
        f"{role}.{kind}": Part(keys[i % len(keys)], start, start + count)
        for i, (role, start, count) in enumerate(zip("qkv", starts, rows, strict=True))
    }


def _check_biases(specs: Specs, parts: Mapping[str, Part]) -> None:
    ends: dict[str, int] = {}
    for name, part in parts.items():
        if name.endswith("bias") and part.key in specs:
            ends[part.key] = max(part.stop, ends.get(part.key, 0))
    wrong = {key: specs[key].shape for key, end in ends.items() if specs[key].shape != (end,)}
    if wrong:
        expected = ", ".join(f"{key} [{ends[key]}]" for key in wrong)
        raise _MisfitError(f"expected {expected}, got {_listed(wrong)}")


def _dtype(specs: Specs, keys: Iterable[str]) -> str:
    dtypes = sorted({specs[key].dtype for key in keys})
    if len(dtypes) > 1 or dtypes[0] not in DTYPES:
        raise _MisfitError(
            f"expected one of {', '.join(DTYPES)} for all of a block, got {', '.join(dtypes)} "
            f"in {', '.join(keys)}"
        )
    return dtypes[0]


# --- names --------------------------------------------------------------------------------------

# Deeper than this below a prefix lie other modules, where the prefix is that of a whole layer.
_NEAR = 3


def _unread(specs: Specs, prefix: str, keys: list[str], reason: str) -> Unread:
    return Unread(prefix, tuple(keys), reason, _beside(specs, prefix, keys))


def _beside(specs: Specs, prefix: str, keys: Iterable[str]) -> tuple[str, ...]:
    start, own = _under(prefix, ""), set(keys)
    below = [k.removeprefix(start) for k in specs if k.startswith(start) and k not in own]
    return tuple(key for key in below if key.count(".") < _NEAR)


def _prefixes(specs: Specs, name: str) -> list[str]:
    """What stands before `name`, without the dot, in the keys that end in it."""
    dotted = f".{name}"
    whole = [key for key in specs if key == name or key.endswith(dotted)]
    return [key.removesuffix(name).removesuffix(".") for key in whole]


def _under(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _listed(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{key} {list(shape)}" for key, shape in shapes.items())
