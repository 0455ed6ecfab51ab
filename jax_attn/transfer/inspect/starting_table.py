"""A starting table for any checkpoint: what names and shapes settle, and questions for the rest.

The Flax paths are torch's names, but for attention, whose projections have the names of this
package's modules, and for the last word: kernel, scale, embedding. What is assumed stands beside
its row. A question is a row that `port` refuses until another takes its place. Needs no framework.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from jax_attn.transfer.arrays import Spec
from jax_attn.transfer.families.config import Config
from jax_attn.transfer.inspect.config import UnknownHeadsError, head_counts, seen_from
from jax_attn.transfer.inspect.discover import AttentionBlock, Block, UnreadBlock, discover
from jax_attn.transfer.port.table import by_layout
from jax_attn.transfer.problems import TransferError, printable
from jax_attn.transfer.proposal.folding import LayerItem, folded, marked
from jax_attn.transfer.table.as_code import (
    call_lines,
    quoted,
    row_arguments,
    row_call,
    step_names,
)
from jax_attn.transfer.table.layout import Layout
from jax_attn.transfer.table.rows import Row, bindings
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
"""Modules of whose matrix a row is looked up."""
_CONVOLUTION = re.compile(r"conv|patch")
_WHOLE_NUMBERS = ("int", "uint", "bool")
_TABLE = "LAYOUT"
_OPTIONS = ("--num-heads", "--num-kv-heads", "--head-dim")


@dataclass(frozen=True)
class Entry:
    """A row, and what is assumed; or several that are possible, each with what it means.

    asked: what the question is; "" for none.
    """

    rows: tuple[Row, ...]
    why: str = ""
    asked: str = ""
    options: tuple[tuple[str, tuple[Row, ...]], ...] = ()

    @property
    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The torch keys and the Flax paths."""
        every = [*self.rows, *(r for _, rows in self.options for r in rows)]
        keys = dict.fromkeys(k for r in every for k in r.keys)
        return tuple(keys), tuple(dict.fromkeys(p for r in every for p in r.paths))


@dataclass(frozen=True)
class StartingTable:
    """The text of a module that defines LAYOUT, and how many questions are in it."""

    text: str
    questions: int


def starting_table(
    specs: Specs, config: Config, tied: Mapping[str, str], name: str
) -> StartingTable:
    """The table of a checkpoint called `name`. tied: key to the key whose tensor it is."""
    blocks = _blocks(specs, config)
    own = {key for key, same in tied.items() if same in specs}
    read = {key: spec for key, spec in specs.items() if key not in own}
    sizes, options = _sizes(blocks, config)
    entries: list[Entry] = []
    for block in blocks:
        entries += _of_attention(block, read, sizes)
    taken = {key for entry in entries for key in entry.names[0]}
    passed = [key for key, spec in read.items() if _is_whole_numbers(spec) and key not in taken]
    left = [key for key in read if key not in taken and key not in passed]
    entries += [_of_key(key, read) for key in left]
    return _written(_folded(entries, read), passed, tied, own, name, options)


def _blocks(specs: Specs, config: Config) -> list[Block]:
    try:
        return discover(specs, str(config.get("model_type") or ""))
    except TransferError:  # two blocks of one tensor: what is not read as attention is a question
        return []


def _sizes(blocks: Iterable[Block], config: Config) -> tuple[Sizes | None, str]:
    """N, K and H of every block, and the options of `port` that name them; None where they differ
    or nobody names them."""
    found = set()
    try:
        for block in blocks:
            if isinstance(block, AttentionBlock):
                found.add(head_counts(block, seen_from(config, block.prefix), None, None)[0])
            elif (sizes := by_layout(Layout(), config, dict.fromkeys(_OPTIONS)).sizes) is not None:
                found.add(sizes)
    except (UnknownHeadsError, TransferError):
        return None, ""
    if len(found) != 1:
        return None, ""
    (sizes,) = found
    named = zip(_OPTIONS, sizes, strict=True)
    return sizes, " ".join(f"{option} {number}" for option, number in named)


def _is_whole_numbers(spec: Spec) -> bool:
    return spec.dtype.startswith(_WHOLE_NUMBERS)


# --- attention ----------------------------------------------------------------------------------

_ROLES = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
_OUTPUTS = sorted({"c_proj", *(out for spelling in SPELLINGS for out in spelling.outs)})
_LEAVES = {"weight": "kernel", "bias": "bias"}
_STEPS: dict[str, tuple[Step, ...]] = {
    "q.weight": (linear, heads),
    "o.weight": (linear, heads_in),
    "q.bias": (heads,),
    "o.bias": (),
}
_STEPS |= {f"{role}.{leaf}": _STEPS[f"q.{leaf}"] for role in "kv" for leaf in _LEAVES}
_PACKED: dict[str, tuple[Step, ...]] = {"weight": (packed, linear, heads), "bias": (packed, heads)}
_CODEGEN = in_parts(4)
_FLAT = "kept flat: its heads are not known, or not of one size in all of the file"


def _of_attention(block: Block, specs: Specs, sizes: Sizes | None) -> Iterator[Entry]:
    if isinstance(block, UnreadBlock):
        yield from _of_packing(block, specs, sizes)
        return
    by_key: dict[str, list[str]] = defaultdict(list)
    for role, rows in block.rows.items():
        if rows.key in specs:
            by_key[rows.key].append(role)
    for key, roles in by_key.items():
        first, *others = roles
        if first.startswith("bias_"):
            yield _fitting(
                Row((key,), (_under(block.prefix, first),), (squeezed, heads)), specs, sizes
            )
        elif others:
            leaf = first.partition(".")[2]
            yield _fitting(_together(block.prefix, key, leaf, _PACKED[leaf]), specs, sizes)
        else:
            role, _, leaf = first.partition(".")
            path = _under(block.prefix, f"{_ROLES[role]}.{_LEAVES[leaf]}")
            yield _fitting(Row((key,), (path,), _STEPS[first]), specs, sizes)


def _together(prefix: str, key: str, leaf: str, steps: tuple[Step, ...], roles: str = "qkv") -> Row:
    paths = tuple(_under(prefix, f"{_ROLES[role]}.{_LEAVES[leaf]}") for role in roles)
    return Row((key,), paths, steps)


def _fitting(r: Row, specs: Specs, sizes: Sizes | None) -> Entry:
    """The row, without heads where they do not fit: a packed tensor is then kept whole."""
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
    """A question about a packed projection whose order no name tells; else what it is alone."""
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
            words = "in four parts, as CodeGen does: in each its queries, its values, its keys"
            of_weight = (*first, _CODEGEN, packed, linear, heads)
            ways.append((words, "qvk", (of_weight, (_CODEGEN, packed, heads))))
        keys = {"weight": key, "bias": f"{module}.bias"}
        there = [leaf for leaf in keys if keys[leaf] in specs]
        options = []
        for words, roles, steps in ways:
            by_leaf = dict(zip(keys, steps, strict=True))
            rows = tuple(
                _together(prefix, keys[leaf], leaf, by_leaf[leaf], roles) for leaf in there
            )
            # Whoever answers may know heads that no config names.
            if sizes is None or all(_fits(r, specs, sizes) for r in rows):
                options.append((words, rows))
        whole = tuple(_of_key(keys[leaf], specs).rows[0] for leaf in there)
        options.append(("another order: kept whole, as it is", whole))
        asked = f"how does {module.rpartition('.')[2]} pack query, key and value?"
        yield Entry((), asked=asked, options=tuple(options))
        yield from _of_output(prefix, specs, sizes)


def _of_output(prefix: str, specs: Specs, sizes: Sizes | None) -> Iterator[Entry]:
    """The rows of the output projection beside a packed one, where only one module can be it."""
    modules = [_under(prefix, name) for name in _OUTPUTS]
    there = [module for module in modules if f"{module}.weight" in specs]
    if len(there) != 1:
        return
    (module,) = there
    weight, bias = f"{module}.weight", f"{module}.bias"
    first: tuple[Step, ...] = () if _orientation(weight, specs) is False else (linear,)
    path = _under(prefix, _ROLES["o"])
    yield _fitting(Row((weight,), (f"{path}.kernel",), (*first, heads_in)), specs, sizes)
    if bias in specs:
        yield Entry((Row((bias,), (f"{path}.bias",), ()),))


# --- everything else ------------------------------------------------------------------------------


def _of_key(key: str, specs: Specs) -> Entry:
    """The row of a tensor outside attention."""
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
        return Entry((_as_it_is(key, specs),), "as it is: of its axes nothing is known")
    turned = _orientation(key, specs)
    of = {True: (linear,), False: ()}
    path = (f"{module}.kernel",)
    if turned is not None:
        return Entry((Row((key,), path, of[turned]),))
    ways = {
        "torch.nn.Linear, (out, in)": (Row((key,), path, (linear,)),),
        "transformers' Conv1D, (in, out)": (Row((key,), path, ()),),
    }
    asked = f"which axis of {module} is its input? It is square, as are all that could tell."
    return Entry((), asked=asked, options=tuple(ways.items()))


def _as_it_is(key: str, specs: Specs) -> Row:
    return Row((key,), (key,), ())


def _orientation(key: str, specs: Specs) -> bool | None:
    """Whether a matrix is (out, in), as torch.nn.Linear has it, and not (in, out), as Conv1D has.

    Its bias tells, or those of the file's other matrices where it is square. Conv1D always has one.
    """
    module = key.rpartition(".")[0]
    if f"{module}.bias" not in specs:
        return True
    if (own := _by_bias(module, specs)) is not None:
        return own
    modules = (k.removesuffix(".weight") for k in specs if k.endswith(".weight"))
    told = {way for m in modules if (way := _by_bias(m, specs)) is not None}
    return told.pop() if len(told) == 1 else None


def _by_bias(module: str, specs: Specs) -> bool | None:
    weight, bias = specs.get(f"{module}.weight"), specs.get(f"{module}.bias")
    if weight is None or bias is None or len(weight.shape) != 2 or len(bias.shape) != 1:
        return None
    first, second = (n == bias.shape[0] for n in weight.shape)
    return None if first == second else first


# --- one entry for all layers, and the text -----------------------------------------------------


def _folded(entries: Iterable[Entry], specs: Specs) -> list[Entry]:
    """One entry for all layers where it stands for exactly the layers' own."""
    entries = list(entries)
    paths = {path for entry in entries for path in entry.names[1]}
    every = _numbers(specs)

    def complete(pattern: Entry, members: int) -> bool:
        keys, targets = pattern.names
        reach = [bindings([key], specs) for key in keys]
        reach += [bindings([path], paths) for path in targets]
        alike = all(len(some) == members and some == reach[0] for some in reach)
        return alike and _in_each_layer(keys[0], specs, every)

    return folded((LayerItem(entry, _patterned(entry)) for entry in entries), complete)


def _numbers(names: Iterable[str]) -> dict[str, set[str]]:
    """What precedes the first number in any of the names -> the numbers there."""
    found: dict[str, set[str]] = defaultdict(set)
    for name in names:
        tokens = name.split(".")
        if place := next((i for i, token in enumerate(tokens) if token.isdecimal()), 0):
            found[".".join(tokens[:place])].add(tokens[place])
    return found


def _in_each_layer(key: str, specs: Specs, every: Mapping[str, set[str]]) -> bool:
    """Whether a pattern has every layer, as a port expects of a row that is open in its layer."""
    stem, hole, _ = key.partition(".{layer}")
    met = {dict(binding)["layer"] for binding in bindings([key], specs)} if hole else set()
    return not hole or met == every[stem]


def _patterned(entry: Entry) -> Entry:
    def of(r: Row) -> Row:
        return Row(tuple(map(_pattern, r.keys)), tuple(map(_pattern, r.paths)), r.steps)

    options = tuple((words, tuple(map(of, rows))) for words, rows in entry.options)
    asked = " ".join(map(_pattern, entry.asked.split(" ")))
    return Entry(tuple(map(of, entry.rows)), entry.why, asked, options)


def _pattern(name: str) -> str:
    """A dotted name with its numbers left open: layer, part2, part3, …"""
    places = [i for i, token in enumerate(name.split(".")) if token.isdecimal()]
    words = (f"part{i}" if i > 1 else "layer" for i in count(1))
    return marked(name, dict(zip(places, words, strict=False)))


def _under(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _written(
    entries: Sequence[Entry],
    passed: Sequence[str],
    tied: Mapping[str, str],
    own: Collection[str],
    name: str,
    options: str,
) -> StartingTable:
    body: list[str] = []
    used: set[str] = {"Layout"}

    def line(function: str, arguments: list[str], why: str = "") -> None:
        used.add(function)
        *lines, last = call_lines(function, arguments)
        body.extend([*lines, f"{last}  # {why}" if why else last])

    for entry in (e for e in entries if not e.asked):
        used.update(("row", *step_names(entry.rows[0])))
        line("row", row_arguments(entry.rows[0]), entry.why)
    for key in _patterns(passed):
        line("ignored", [quoted(key), quoted("whole numbers, which are no parameters")])
    for key in own:
        line("tied", [quoted(key), quoted(tied[key])])
    questions = [entry for entry in entries if entry.asked]
    for number, entry in enumerate(questions, 1):
        body += [f"    # Question {number}: {printable(entry.asked)}"]
        body += ["    # Delete the next lines that refuse, and uncomment the rows of one answer."]
        for key in entry.names[0]:
            why = f"question {number} of the table is not answered"
            body.append(f"    refused({quoted(key)}, {quoted(why)}),")
            used.add("refused")
        for words, rows in entry.options:
            body.append(f"    # - {words}:")
            for r in rows:  # on one line, however long, so that one edit uncomments it
                used.update(("row", *step_names(r)))
                body.append(f"    # {row_call(r)},")
    asked = f"{len(questions)} question{'' if len(questions) == 1 else 's'}"
    port = " ".join(
        filter(None, ("jax-attn port IN OUT --to flax --layout MODULE:LAYOUT", options))
    )
    head = [
        f"# A starting table for {printable(name)}: {asked} to answer, below. Then:",
        f"# {port}",
        "",
        "from jax_attn.transfer import (",
        *(f"    {each}," for each in sorted(used)),
        ")",
        "",
        f"{_TABLE} = Layout(",
    ]
    return StartingTable("\n".join([*head, *body, ")", ""]), len(questions))


def _patterns(keys: Sequence[str]) -> list[str]:
    """Names of layers, left open where that stands for these alone."""
    items = [LayerItem(key, _pattern(key)) for key in keys]
    return folded(items, lambda pattern, members: len(bindings([pattern], keys)) == members)
