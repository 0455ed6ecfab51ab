"""Rows of a starting table, key by key: attention, open questions, and all other tensors.

What names and shapes do not determine is a question, with every answer that the shapes allow.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from jax_attn.porting.inspect.discover import AttentionBlock, Block, UnreadBlock, under
from jax_attn.transfer.arrays import Spec
from jax_attn.transfer.table.rows import Row
from jax_attn.transfer.table.spellings import OTHERWISE_PACKED, SPELLINGS, UNORDERED
from jax_attn.transfer.table.steps import (
    MisfitError,
    Sizes,
    Step,
    conv,
    grouped,
    heads,
    heads_in,
    in_parts,
    inward,
    linear,
    packed,
    squeezed,
)

Specs = Mapping[str, Spec]
_EMBEDDING = re.compile(
    r"(^|[._])(wte|wpe|shared|embed\w*|\w*embeddings?|relative_attention_bias)$", re.IGNORECASE
)
"""Names of modules that look up rows of a matrix."""
_CONVOLUTION = re.compile(r"conv|patch")


@dataclass(frozen=True)
class Entry:
    """A row with its assumption; or a question with several possible rows, each with its meaning.

    asked: the question; "" if there is none.
    """

    rows: tuple[Row, ...]
    why: str = ""
    asked: str = ""
    options: tuple[tuple[str, tuple[Row, ...]], ...] = ()

    @property
    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Torch keys and Flax paths of all rows."""
        every = [*self.rows, *(r for _, rows in self.options for r in rows)]
        keys = dict.fromkeys(k for r in every for k in r.keys)
        return tuple(keys), tuple(dict.fromkeys(p for r in every for p in r.paths))


# --- attention ----------------------------------------------------------------------------------

_OUTPUTS = sorted({"c_proj", *(out for spelling in SPELLINGS for out in spelling.outs)})
_PARTS: dict[str, tuple[str, tuple[Step, ...]]] = {
    "q.weight": ("q_proj.kernel", (linear, heads)),
    "k.weight": ("k_proj.kernel", (linear, heads)),
    "v.weight": ("v_proj.kernel", (linear, heads)),
    "o.weight": ("out_proj.kernel", (linear, heads_in)),
    "q.bias": ("q_proj.bias", (heads,)),
    "k.bias": ("k_proj.bias", (heads,)),
    "v.bias": ("v_proj.bias", (heads,)),
    "o.bias": ("out_proj.bias", ()),
    "bias_k": ("bias_k", (squeezed, heads)),
    "bias_v": ("bias_v", (squeezed, heads)),
}
"""A part of a block, as `AttentionBlock.rows` names it -> its Flax path, and the steps to it."""
_CODEGEN = in_parts(4)
_FLAT = "kept flat: its heads are not known, or differ in size within the file"


def rows_of(block: AttentionBlock, prefix: str = "") -> list[Row]:
    """Return the rows between the block's own keys and its attention module at this Flax prefix."""
    parts_of: dict[str, list[str]] = {}
    for part, at in block.rows.items():
        parts_of.setdefault(at.key, []).append(part)
    return [
        _row(prefix, key, parts, (packed,) * (len(parts) > 1) + _PARTS[parts[0]][1])
        for key, parts in parts_of.items()
    ]


def _row(prefix: str, key: str, parts: Iterable[str], steps: tuple[Step, ...]) -> Row:
    return Row((key,), tuple(under(prefix, _PARTS[part][0]) for part in parts), steps)


def of_attention(block: Block, specs: Specs, sizes: Sizes | None) -> Iterator[Entry]:
    """Yield the rows of one block; without heads if `sizes` are unknown or do not fit."""
    if isinstance(block, UnreadBlock):
        yield from _of_packing(block, specs, sizes)
        return
    for r in rows_of(block, block.prefix):
        if r.keys[0] in specs:
            yield _fitting(r, specs, sizes)


def _fitting(r: Row, specs: Specs, sizes: Sizes | None) -> Entry:
    """Return the row, without heads if they do not fit: a packed tensor is then kept whole."""
    if _fits(r, specs, sizes):
        return Entry((r,))
    if len(r.paths) > 1:
        return Entry((_as_it_is(r.keys[0], specs),), _FLAT)
    steps = tuple(step for step in r.steps if step not in (heads, heads_in))
    return Entry((Row(r.keys, r.paths, steps),), _FLAT)


def _fits(r: Row, specs: Specs, sizes: Sizes | None) -> bool:
    if sizes is None:
        return not {heads, heads_in, packed, grouped} & {*r.steps}
    try:
        r.path_shapes(tuple(specs[key].shape for key in r.keys), sizes)
    except MisfitError:
        return False
    return True


def _of_packing(block: UnreadBlock, specs: Specs, sizes: Sizes | None) -> Iterator[Entry]:
    """Yield a question about a packed projection whose order no name determines."""
    for key in block.keys:
        module, _, leaf = key.rpartition(".")
        packs = any(module.endswith(name) for name in (*UNORDERED, *OTHERWISE_PACKED.values()))
        if leaf != "weight" or not packs:
            continue
        prefix = module.rpartition(".")[0]
        turned = _orientation(key, specs)
        first: tuple[Step, ...] = () if turned is not False else (linear,)
        ways: list[tuple[str, str, tuple[tuple[Step, ...], tuple[Step, ...]]]] = [
            (
                "query, key, value one after another",
                "qkv",
                ((*first, packed, linear, heads), (packed, heads)),
            ),
            (
                "for each key/value head: its queries, its key, its value",
                "qkv",
                ((*first, grouped, inward), (grouped,)),
            ),
        ]
        if module.endswith(OTHERWISE_PACKED["codegen"]):
            words = "in four parts, as in CodeGen: each has its queries, its values, its keys"
            of_weight = (*first, _CODEGEN, packed, linear, heads)
            ways.append((words, "qvk", (of_weight, (_CODEGEN, packed, heads))))
        keys = {"weight": key, "bias": f"{module}.bias"}
        there = [leaf for leaf in keys if keys[leaf] in specs]
        options = []
        for words, roles, steps in ways:
            by_leaf = dict(zip(keys, steps, strict=True))
            rows = tuple(
                _row(prefix, keys[leaf], [f"{role}.{leaf}" for role in roles], by_leaf[leaf])
                for leaf in there
            )
            # The user who answers may know heads that no config names.
            if sizes is None or all(_fits(r, specs, sizes) for r in rows):
                options.append((words, rows))
        whole = tuple(of_key(keys[leaf], specs).rows[0] for leaf in there)
        options.append(("another order: keep it whole", whole))
        asked = f"how does {module.rpartition('.')[2]} pack query, key and value?"
        yield Entry((), asked=asked, options=tuple(options))
        yield from _of_output(prefix, specs, sizes)


def _of_output(prefix: str, specs: Specs, sizes: Sizes | None) -> Iterator[Entry]:
    """Yield the output projection's rows next to a packed one, if only one module can be it."""
    modules = [under(prefix, name) for name in _OUTPUTS]
    there = [module for module in modules if f"{module}.weight" in specs]
    if len(there) != 1:
        return
    (module,) = there
    weight, bias = f"{module}.weight", f"{module}.bias"
    first: tuple[Step, ...] = () if _orientation(weight, specs) is False else (linear,)
    yield _fitting(_row(prefix, weight, ["o.weight"], (*first, heads_in)), specs, sizes)
    if bias in specs:
        yield Entry((_row(prefix, bias, ["o.bias"], ()),))


# --- everything else ------------------------------------------------------------------------------


def of_key(key: str, specs: Specs) -> Entry:
    """Return the row of a tensor outside attention."""
    module, _, leaf = key.rpartition(".")
    shape = specs[key].shape
    if leaf == "bias":
        return Entry((Row((key,), (key,), ()),))
    if leaf != "weight" or not module or not shape:
        return Entry((_as_it_is(key, specs),))
    if len(shape) == 1:
        return Entry((Row((key,), (f"{module}.scale",), ()),))
    if _EMBEDDING.search(module) and f"{module}.bias" not in specs and len(shape) == 2:
        return Entry((Row((key,), (f"{module}.embedding",), ()),))
    if len(shape) > 2:
        if _CONVOLUTION.search(module.lower()):
            return Entry(
                (Row((key,), (f"{module}.kernel",), (conv,)),), "a convolution, by its name"
            )
        return Entry((_as_it_is(key, specs),), "unchanged: its axes are unknown")
    turned = _orientation(key, specs)
    of = {True: (linear,), False: ()}
    path = (f"{module}.kernel",)
    if turned is not None:
        return Entry((Row((key,), path, of[turned]),))
    ways = {
        "torch.nn.Linear, (out, in)": (Row((key,), path, (linear,)),),
        "transformers' Conv1D, (in, out)": (Row((key,), path, ()),),
    }
    asked = f"which axis of {module} is its input? It is square, and no other matrix decides."
    return Entry((), asked=asked, options=tuple(ways.items()))


def _as_it_is(key: str, specs: Specs) -> Row:
    return Row((key,), (key,), ())


def _orientation(key: str, specs: Specs) -> bool | None:
    """Return whether a matrix is (out, in), as in torch.nn.Linear, and not (in, out), as in Conv1D.

    Its bias decides, or those of the file's other matrices if it is square; None if neither does.
    Conv1D always has a bias.
    """
    module = key.rpartition(".")[0]
    if f"{module}.bias" not in specs:
        return True
    if (own := _by_bias(module, specs)) is not None:
        return own
    modules = (k.removesuffix(".weight") for k in specs if k.endswith(".weight"))
    ways = {way for m in modules if (way := _by_bias(m, specs)) is not None}
    return ways.pop() if len(ways) == 1 else None


def _by_bias(module: str, specs: Specs) -> bool | None:
    weight, bias = specs.get(f"{module}.weight"), specs.get(f"{module}.bias")
    if weight is None or bias is None or len(weight.shape) != 2 or len(bias.shape) != 1:
        return None
    first, second = (n == bias.shape[0] for n in weight.shape)
    return None if first == second else first
