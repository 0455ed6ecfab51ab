"""A starting table for any checkpoint: what names and shapes determine, and open questions.

The Flax paths are torch's names, except in attention, whose projections have the names of this
package's modules, and for the last word: kernel, scale, embedding. Assumptions are comments on
their rows. A question is a row that `port` refuses until another replaces it. Needs no framework.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from jax_attn.families.config import Config
from jax_attn.porting.inspect.config import UnknownHeadsError, head_counts, seen_from, typed
from jax_attn.porting.inspect.discover import AttentionBlock, Block, discover
from jax_attn.porting.inspect.starting_rows import Entry, Specs, of_attention, of_key
from jax_attn.porting.port.table import by_layout
from jax_attn.transfer.problems import TransferError, printable
from jax_attn.transfer.proposal.folding import LayerItem, folded, marked
from jax_attn.transfer.table.as_code import call_lines, quoted, row_arguments, row_call, step_names
from jax_attn.transfer.table.layout import Layout
from jax_attn.transfer.table.rows import Row, bindings
from jax_attn.transfer.table.steps import Sizes

_WHOLE_NUMBERS = ("int", "uint", "bool")
_TABLE = "LAYOUT"
_OPTIONS = ("--num-heads", "--num-kv-heads", "--head-dim")


@dataclass(frozen=True)
class StartingTable:
    """Text of a module that defines LAYOUT, and the number of its questions."""

    text: str
    questions: int


def starting_table(
    specs: Specs, config: Config, tied: Mapping[str, str], name: str, opening: str = ""
) -> StartingTable:
    """Return the table of a checkpoint called `name`.

    tied: key to the key whose tensor it is. opening: the options with which `port` reads the same
    tensors, each after a space.
    """
    blocks = _blocks(specs, config)
    own = {key for key, same in tied.items() if same in specs}
    read = {key: spec for key, spec in specs.items() if key not in own}
    sizes, options = _sizes(blocks, config)
    entries: list[Entry] = []
    for block in blocks:
        entries += of_attention(block, read, sizes)
    taken = {key for entry in entries for key in entry.names[0]}
    left = [key for key in read if key not in taken]
    passed = [key for key in left if read[key].dtype.startswith(_WHOLE_NUMBERS)]
    left = [key for key in left if key not in passed]
    entries += [of_key(key, read) for key in left]
    return _written(_folded(entries, read), passed, tied, own, name, f"{opening} {options}".strip())


def _blocks(specs: Specs, config: Config) -> list[Block]:
    try:
        return discover(specs, str(typed(config).get("model_type") or ""))
    except TransferError:  # a tensor in two blocks: what is not read as attention is a question
        return []


def _sizes(blocks: Iterable[Block], config: Config) -> tuple[Sizes | None, str]:
    """Return N, K and H of every block, and the options of `port` that name them.

    Return None and "" if the blocks differ or the sizes are unknown.
    """
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


# --- one entry for all layers, and the text -----------------------------------------------------


def _folded(entries: Iterable[Entry], specs: Specs) -> list[Entry]:
    """Merge entries of all layers into one, if it matches exactly the layers' own names."""
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
    """Map each prefix of a first number in any of the names to the numbers there."""
    found: dict[str, set[str]] = defaultdict(set)
    for name in names:
        tokens = name.split(".")
        if place := next((i for i, token in enumerate(tokens) if token.isdecimal()), 0):
            found[".".join(tokens[:place])].add(tokens[place])
    return found


def _in_each_layer(key: str, specs: Specs, every: Mapping[str, set[str]]) -> bool:
    """Return whether a pattern has every layer, as a port expects of a row with {layer}."""
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
    """Return a dotted name with its numbers left open: layer, part2, part3, …"""
    places = [i for i, token in enumerate(name.split(".")) if token.isdecimal()]
    words = (f"part{i}" if i > 1 else "layer" for i in count(1))
    return marked(name, dict(zip(places, words, strict=False)))


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
        line("ignored", [quoted(key), quoted("integers or booleans, which are not parameters")])
    for key in own:
        line("tied", [quoted(key), quoted(tied[key])])
    questions = [entry for entry in entries if entry.asked]
    for number, entry in enumerate(questions, 1):
        body += [f"    # Question {number}: {printable(entry.asked)}"]
        body += ["    # Delete the refused(…) lines below, and uncomment the rows of one answer."]
        for key in entry.names[0]:
            why = f"question {number} of the table is unanswered"
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
    """Return names of layers, with {layer} if that matches only these."""
    items = [LayerItem(key, _pattern(key)) for key in keys]
    return folded(items, lambda pattern, members: len(bindings([pattern], keys)) == members)
