"""Discovery of attention blocks in a checkpoint, by keys and shapes.

`SPELLINGS` lists names of projections; shapes decide whether tensors with such names are one block.
Tensors that look like attention and cannot be read are returned too, with the reason: nothing is
guessed or left out. Reads only names, shapes and dtypes; needs no framework.

Letters: N and K query and key/value heads, H head_dim, D embed_dim.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from jax_attn.dtypes import DTYPES
from jax_attn.transfer.arrays import Spec
from jax_attn.transfer.problems import Problem, TransferError
from jax_attn.transfer.table.spellings import OTHERWISE_PACKED, SPELLINGS, UNORDERED, Spelling

Specs = Mapping[str, Spec]

_INTERLEAVED = (
    "packs query, key and value; how its rows are interleaved cannot be inferred from shapes"
)
UNDECIDED = {name: f"{_INTERLEAVED} ({why})" for name, why in UNORDERED.items()}
UNDECIDED |= {
    "kv_b_proj": "expands a compressed state into keys and values, which is not supported",
    "q_proj.qweight": "is quantised, which is not supported",
    "rel_attn.q": "is a projection with heads in its shape, for relative attention",
}
"""Names that look like attention, and why a block with them is not read."""


class ProjectionRows(NamedTuple):
    """Location of a projection's weight or bias: rows start to stop of the tensor `key`."""

    key: str
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class AttentionBlock:
    """One attention block.

    rows: "q.weight", "k.bias", "o.weight" … -> its location; a block may have no biases. Also
        "bias_k" and "bias_v", if torch's learned key and value are present.
    embed_dim, kdim, vdim: numbers of features of query, key and value.
    absent: keys of the biases that are missing although query, key or value has one; `rows` has
        them anyway. beside: other keys under the prefix, relative to it.
    """

    prefix: str
    rows: Mapping[str, ProjectionRows]
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
        """Keys of the block's tensors that the checkpoint has."""
        keys = dict.fromkeys(rows.key for rows in self.rows.values())
        return tuple(key for key in keys if key not in self.absent)


@dataclass(frozen=True)
class UnreadBlock:
    """Tensors that look like attention and cannot be read, with the reason."""

    prefix: str
    keys: tuple[str, ...]
    reason: str
    beside: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.prefix or "attention"


Block = AttentionBlock | UnreadBlock


class _MisfitError(ValueError):
    """Tensors with the names of a block that do not form one; the message says why."""


def discover(specs: Specs, model_type: str = "") -> list[Block]:
    """Return every attention block in a checkpoint, in the order of its layers.

    specs: torch key to shape and dtype. model_type: as in a config. Raises TransferError if one
    tensor belongs to two blocks, for example if packed and split keys are both present.
    """
    candidates = list(_spelled_blocks(specs))
    blocks = [block for block in candidates if isinstance(block, AttentionBlock)]
    _refuse_ambiguous(blocks)
    result = [_unless_packed_otherwise(block, model_type) for block in blocks]
    claimed = {key for block in blocks for key in block.keys}
    misfits = [block for block in candidates if isinstance(block, UnreadBlock)]
    for unread in (*_undecided(specs), *misfits):
        if not claimed.intersection(unread.keys):
            claimed.update(unread.keys)
            result.append(unread)
    return sorted(result, key=lambda block: _in_order(block.name))


def pattern(name: str) -> str:
    """Return a block's name with its layer numbers left open: encoder.layer.{i}.attention."""
    return ".".join("{i}" if part.isdecimal() else part for part in name.split("."))


def _in_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key that places layer 10 after layer 9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


# --- spellings ------------------------------------------------------------------------------


def _spelled_blocks(specs: Specs) -> Iterator[Block]:
    """Yield a block for each spelling and each prefix that has all or most of its weights."""
    for spelling in SPELLINGS:
        counts = Counter(p for name in spelling.weights for p in _prefixes(specs, name))
        for prefix, count in counts.items():
            if count >= min(2, len(spelling.weights)):
                yield from _spelled_at(prefix, specs, spelling)


def _spelled_at(prefix: str, specs: Specs, spelling: Spelling) -> Iterator[Block]:
    weights = [under(prefix, name) for name in spelling.weights]
    outs = [under(prefix, f"{out}.weight") for out in spelling.outs]
    present = [key for key in weights if key in specs]
    present_outs = [key for key in outs if key in specs]
    if present != weights:
        missing = ", ".join(key for key in weights if key not in specs)
        yield _unread(specs, prefix, present, f"missing: {missing}")
    elif not present_outs:
        reason = f"no output projection: expected one of {', '.join(outs)}"
        yield _unread(specs, prefix, present, reason)
    else:
        biases = [under(prefix, name) for name in spelling.biases]
        for out in present_outs:
            try:
                yield _block(specs, prefix, weights, biases, out)
            except _MisfitError as misfit:
                yield _unread(specs, prefix, [*weights, out], str(misfit))


def _undecided(specs: Specs) -> Iterator[UnreadBlock]:
    for name, why in UNDECIDED.items():
        for suffix in (f"{name}.weight", name):
            for prefix in _prefixes(specs, suffix):
                key = under(prefix, suffix)
                yield _unread(specs, prefix, [key], f"{key} {list(specs[key].shape)} {why}")


def _unless_packed_otherwise(block: AttentionBlock, model_type: str) -> Block:
    name = OTHERWISE_PACKED.get(model_type)
    key = block.rows["q.weight"].key
    if name is None or not key.endswith(f"{name}.weight"):
        return block
    reason = f"{key}: model_type {model_type!r} packs its rows in its own order"
    return UnreadBlock(block.prefix, block.keys, reason, block.beside)


def _refuse_ambiguous(blocks: Iterable[AttentionBlock]) -> None:
    owners: dict[str, list[AttentionBlock]] = {}
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


def _block(
    specs: Specs, prefix: str, weights: list[str], biases: list[str], out: str
) -> AttentionBlock:
    """Return the block of these tensors. Raises _MisfitError if their shapes do not form one."""
    shapes = {key: specs[key].shape for key in (*weights, out)}
    if any(len(shape) != 2 or 0 in shape for shape in shapes.values()):
        raise _MisfitError(f"expected matrices (out, in), got {_listed(shapes)}")
    counts = _row_counts(weights, out, shapes)
    embed_dim, kdim, vdim = (shapes[weights[i % len(weights)]][1] for i in range(3))
    if (counts[0], counts[1], embed_dim) != (shapes[out][1], counts[2], shapes[out][0]):
        raise _MisfitError(
            f"expected query (N·H, D), key and value (K·H, …), output (D, N·H), "
            f"got {_listed(shapes)}"
        )
    rows = _rows("weight", weights, counts) | {"o.weight": ProjectionRows(out, 0, embed_dim)}
    if any(key in specs for key in biases):
        rows |= _rows("bias", biases, counts)
    if (out_bias := f"{out.removesuffix('weight')}bias") in specs:
        rows["o.bias"] = ProjectionRows(out_bias, 0, embed_dim)
    _check_biases(specs, rows)
    rows |= _learned(specs, prefix, counts[1])
    keys = [*dict.fromkeys(each.key for each in rows.values())]
    dtype = _dtype(specs, [key for key in keys if key in specs])
    absent = tuple(key for key in keys if key not in specs)
    beside = _beside(specs, prefix, keys)
    return AttentionBlock(prefix, rows, embed_dim, kdim, vdim, dtype, absent, beside)


def _row_counts(weights: list[str], out: str, shapes: Mapping[str, tuple[int, ...]]) -> list[int]:
    """Return the rows of query, key and value; if packed, `out` determines the query's."""
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


def _rows(kind: str, keys: list[str], counts: list[int]) -> dict[str, ProjectionRows]:
    starts = (0, 0, 0) if len(keys) == 3 else (0, counts[0], counts[0] + counts[1])
    return {
        f"{role}.{kind}": ProjectionRows(keys[i % len(keys)], start, start + count)
        for i, (role, start, count) in enumerate(zip("qkv", starts, counts, strict=True))
    }


def _learned(specs: Specs, prefix: str, width: int) -> dict[str, ProjectionRows]:
    """Return torch's bias_k and bias_v (1, 1, K·H), if both are present."""
    keys = {name: under(prefix, name) for name in ("bias_k", "bias_v")}
    if not all(key in specs and specs[key].shape == (1, 1, width) for key in keys.values()):
        return {}
    return {name: ProjectionRows(key, 0, 1) for name, key in keys.items()}


def _check_biases(specs: Specs, rows: Mapping[str, ProjectionRows]) -> None:
    ends: dict[str, int] = {}
    for name, (key, _, stop) in rows.items():
        if name.endswith("bias") and key in specs:
            ends[key] = max(stop, ends.get(key, 0))
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

# Deeper keys belong to other modules, if the prefix is that of a whole layer.
_NEAR = 3


def _unread(specs: Specs, prefix: str, keys: list[str], reason: str) -> UnreadBlock:
    return UnreadBlock(prefix, tuple(keys), reason, _beside(specs, prefix, keys))


def _beside(specs: Specs, prefix: str, keys: Iterable[str]) -> tuple[str, ...]:
    start, own = under(prefix, ""), set(keys)
    below = [k.removeprefix(start) for k in specs if k.startswith(start) and k not in own]
    return tuple(key for key in below if key.count(".") < _NEAR)


def _prefixes(specs: Specs, name: str) -> list[str]:
    """Return the prefixes, without the dot, of keys that end with `name`."""
    dotted = f".{name}"
    whole = [key for key in specs if key == name or key.endswith(dotted)]
    return [key.removesuffix(name).removesuffix(".") for key in whole]


def under(prefix: str, name: str) -> str:
    """Return a name after a prefix, "" for none."""
    return f"{prefix}.{name}" if prefix else name


def _listed(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{key} {list(shape)}" for key, shape in shapes.items())
