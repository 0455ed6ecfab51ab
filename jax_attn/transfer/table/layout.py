"""`Layout`: a table of rows from which both directions of a transfer follow."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from jax_attn.transfer.arrays import Tensors, as_numpy, read, same_bits
from jax_attn.transfer.problems import Problem, TransferError, grid, nearest
from jax_attn.transfer.table.reasons import problems_of
from jax_attn.transfer.table.resolve import Move, keys_of, paths_of, resolve
from jax_attn.transfer.table.rows import (
    Either,
    Ignored,
    Refused,
    Row,
    Table,
    bindings,
    either,
    filled,
    ignored,
    regex,
    row,
    tied,
)
from jax_attn.transfer.table.steps import MisfitError, Shape, Sizes, Step

LAYOUT_HINT = (
    "transfer.LAYOUTS has the built-in designs', and transfer.layout_for(PATH) returns that of a "
    "checkpoint of a known family"
)
"""Sources of a Layout, for callers who pass something else, such as a Family."""


def _renamed(dotted: str, names: Mapping[str, str]) -> str:
    """Return a name with whole parts between its dots replaced."""
    return ".".join(names.get(part, part) for part in dotted.split("."))


@dataclass(frozen=True, init=False, repr=False)
class Layout(Table):
    """A table that pairs torch keys with Flax paths; its items are rows or other layouts.

    For example::

        MASKED_MHA = Layout(
            row("W_Q.weight", "q_proj.kernel", linear, heads),  # (N·H, D) -> (D, N, H)
            row("W_Q.bias", "q_proj.bias", heads),
            ...
        )

    The table contains no sizes: they come from the module that is loaded or exported.
    """

    def __init__(self, *items: "Row | Either | Refused | Ignored | Layout") -> None:
        parts: list[Any] = []
        for item in items:
            if isinstance(item, Layout):
                parts += (*item.groups, *item.refusals, *item.passed_over)
            elif isinstance(item, Row | Either | Refused | Ignored):
                parts.append(either(item) if isinstance(item, Row) else item)
            else:
                raise TypeError(f"Layout: expected rows or layouts, got {item!r}")
        for name, kind in (("groups", Either), ("refusals", Refused), ("passed_over", Ignored)):
            object.__setattr__(self, name, tuple(x for x in parts if isinstance(x, kind)))

    def __add__(self, other: "Layout") -> "Layout":
        return Layout(self, other)

    def __str__(self) -> str:
        return grid(
            ("torch", "flax", "steps"),
            ((", ".join(r.keys), ", ".join(r.paths), r.effect) for r in self._rows()),
        )

    __repr__ = __str__

    def under(self, torch_prefix: str, flax_prefix: str) -> "Layout":
        """Return the same table for a sub-module: both sides get a prefix, '' for none.

        `under("encoder.layer.{layer}.attention", "layers.{layer}.attn")` serves every layer.
        """
        return self._mapped(
            lambda key: f"{torch_prefix}.{key}" if torch_prefix else key,
            lambda path: f"{flax_prefix}.{path}" if flax_prefix else path,
        )

    def renamed(self, names: Mapping[str, str]) -> "Layout":
        """Rename Flax paths, for a module that names its parts differently: {"q_proj": "query", …}.

        Whole parts of the dotted paths are replaced. Raises ValueError for a name that no path has.
        """
        self._check_parts("renamed: expected names", names, self.flax_paths())
        return self._mapped(lambda key: key, lambda path: _renamed(path, names))

    def renamed_torch(self, names: Mapping[str, str]) -> "Layout":
        """Rename torch keys: {"out_proj": "o_proj", …}.

        Raises ValueError for a name that no key has.
        """
        keys = [*self.torch_keys(), *(refusal.key for refusal in self.refusals)]
        keys += [item.key for item in self.passed_over]
        self._check_parts("renamed_torch: expected names", names, keys)
        return self._mapped(lambda key: _renamed(key, names), lambda path: path)

    def through(self, step: Step, *parts: str) -> "Layout":
        """Add a step on the Flax side of every row of these parts.

        `LAYOUTS["gqa"].through(to_half_split(), "q_proj", "k_proj")` reads weights whose rotary
        pairs are interleaved. Raises ValueError for a part that no Flax path has, and for a row
        that has other parts as well.
        """
        self._check_parts("through: expected parts", parts, self.flax_paths())

        def change(r: Row) -> Row:
            chosen = [not set(parts).isdisjoint(path.split(".")) for path in r.paths]
            if any(chosen) and not all(chosen):
                raise ValueError(f"through: expected rows of only {', '.join(parts)}, got {r!r}")
            return row(r.keys, r.paths, *r.steps, *([step] if any(chosen) else []))

        return Layout(*self._changed(change), *self.refusals, *self.passed_over)

    def spelled_as(self, keys: Iterable[str]) -> "Layout":
        """Reduce the table to the alternatives that `keys` use, so that an export uses them.

        If `keys` have no key of any alternative, all alternatives stay. Of tied keys of which only
        another one is there, the row gets that one, as in `tied_as`.
        """
        keys = list(keys)
        table = self.tied_as(keys)

        def used(group: Either) -> Either:
            by_use = [a for a in group.alternatives if bindings(keys_of(a), keys)]
            return either(*(by_use or group.alternatives))

        return Layout(*map(used, table.groups), *table.refusals, *table.passed_over)

    def tied_as(self, keys: Iterable[str]) -> "Layout":
        """Return the table for files that lack a key and have another one that is tied to it.

        The row then reads the other key, and the absent one is tied to it: a file may hold a tied
        tensor under any of its names. If the file has an alternative to the absent key's row, that
        one is read, and the others are tied to its key. A key that `keys` have, or that no row
        reads, stays.
        """
        keys, read = list(keys), {*self.torch_keys()}
        names: dict[str, str] = {}
        spelled: dict[str, str] = {}
        for item in self.passed_over:
            is_there = bindings([item.key], keys) and not bindings([item.same_as], keys)
            if not (item.same_as in read and is_there):
                continue
            is_spelled_otherwise, same = self._other_spellings(item.same_as, keys)
            if same:
                spelled[item.same_as] = same[0]
            elif not is_spelled_otherwise:
                names.setdefault(item.same_as, item.key)
        if not names and not spelled:
            return self
        names |= {other: absent for absent, other in names.items()}
        ties = [
            tied(i.key, spelled[i.same_as]) if i.same_as in spelled else i for i in self.passed_over
        ]
        table = Layout(*self.groups, *self.refusals, *ties)
        return table._mapped(lambda key: names.get(key, key), lambda path: path)

    def torch_keys(self) -> list[str]:
        """Return the torch keys of every row, with names in braces left open."""
        return keys_of(self._rows())

    def flax_paths(self) -> list[str]:
        """Return the Flax paths of every row, with names in braces left open."""
        return paths_of(self._rows())

    def row_of(self, torch_key: str) -> str:
        """Return the row for a torch key: "W_Q.weight -> q_proj.kernel [linear heads]".

        Names in braces are filled in. Raises ValueError for a key of no row.
        """
        for r in self._rows():
            for pattern in r.keys:
                if match := regex(pattern).fullmatch(torch_key):
                    bound = r.at(tuple(match.groupdict().items()))
                    return f"{', '.join(bound.keys)} -> {', '.join(bound.paths)} [{r.effect}]"
        near = nearest(torch_key, self.torch_keys())
        raise ValueError(f"torch_key: expected a key of one of the rows, got {torch_key!r}; {near}")

    def to_flax(self, tensors: Tensors, shapes: Mapping[str, Shape]) -> dict[str, np.ndarray]:
        """Convert torch tensors to Flax arrays of `shapes`, by dotted path; dtypes are kept.

        tensors: torch key to NumPy, JAX or torch tensor. shapes: every path that must be written.
        The arrays may share memory with `tensors`. Raises TransferError.
        """
        arrays = {key: as_numpy(tensor, key) for key, tensor in tensors.items()}
        key_shapes = {key: array.shape for key, array in arrays.items()}
        table = self.tied_as(arrays)
        moves, left = resolve(table, key_shapes, shapes)
        return _carried("to Flax", moves, arrays, [*problems_of(left), *untied(table, arrays)])

    def shapes(self, keys: Mapping[str, Shape], sizes: Sizes) -> dict[str, Shape]:
        """Return the shapes of the Flax side, by dotted path, for use without a module.

        keys: torch key to shape. sizes: what cannot be inferred from the shapes of flat
        projections. Raises TransferError for keys that no row takes, rows that are only partly
        present, two alternatives at once, and shapes that a row's steps cannot take.
        """
        moves = moves_by_sizes(self, keys, sizes)
        return {path: shape for move in moves for path, shape in move.paths.items()}

    def to_torch(self, arrays: Tensors) -> dict[str, np.ndarray]:
        """Convert Flax arrays to torch tensors, by key: parameters, or their gradients.

        arrays: dotted path to NumPy or JAX array; rows without any of them are left out. The result
        may share memory with `arrays`. Raises TransferError for a path that no row reads and for a
        row that is only partly present.
        """
        sources = {path: as_numpy(array, path) for path, array in arrays.items()}
        shapes = {path: array.shape for path, array in sources.items()}
        moves, left = resolve(self, None, shapes)
        return _carried("to torch", moves, sources, problems_of(left))

    def _rows(self) -> list[Row]:
        return [r for group in self.groups for r in group.rows]

    def _other_spellings(self, key: str, keys: Sequence[str]) -> tuple[bool, list[str]]:
        """Return whether `keys` have an alternative to a key's row, and its keys for that tensor.

        An alternative has no such key if it reads the tensor as a part of another or by other
        steps.
        """
        used = [
            a
            for group in self.groups
            if key in keys_of(group.rows)
            for a in group.alternatives
            if key not in keys_of(a) and bindings(keys_of(a), keys)
        ]
        own = [(r.paths, r.steps) for r in self._rows() if r.keys == (key,)]
        same = [r.keys[0] for a in used for r in a if (r.paths, r.steps) in own]
        return bool(used), same

    def _check_parts(self, expected: str, names: Iterable[str], dotted: Iterable[str]) -> None:
        """Raise ValueError unless each name is a word between the dots of a key or path."""
        parts = {part for name in dotted for part in name.split(".")}
        if unknown := sorted(set(names) - parts):
            raise ValueError(f"{expected} among {sorted(parts)}, got {unknown}")

    def _mapped(self, key: Callable[[str], str], path: Callable[[str], str]) -> "Layout":
        groups = self._changed(lambda r: row([*map(key, r.keys)], [*map(path, r.paths)], *r.steps))
        refusals = (Refused(key(refusal.key), refusal.reason) for refusal in self.refusals)
        passed_over = (
            tied(key(i.key), key(i.same_as)) if i.same_as else ignored(key(i.key), i.reason)
            for i in self.passed_over
        )
        return Layout(*groups, *refusals, *passed_over)

    def _changed(self, change: Callable[[Row], Row]) -> list[Either]:
        def changed(r: Row) -> Row:
            return replace(change(r), is_optional=r.is_optional)

        return [either(*(list(map(changed, a)) for a in g.alternatives)) for g in self.groups]


def optional(*items: Row | Layout) -> Layout:
    """Return a table for modules that may lack whole rows; `unused` ignores these."""
    whole = Layout(*items)
    groups = (
        either(*([replace(r, is_optional=True) for r in a] for a in group.alternatives))
        for group in whole.groups
    )
    return Layout(*groups, *whole.refusals, *whole.passed_over)


def spellings(*layouts: Layout) -> Layout:
    """Combine several tables with the same Flax paths and different torch keys into one.

    Row by row, loading takes the spelling that is present and exporting takes the first;
    `Layout.spelled_as` picks another.

    Raises:
      ValueError: the tables differ in their Flax paths.
    """
    written = [
        [sorted({path for r in group.rows for path in r.paths}) for group in x.groups]
        for x in layouts
    ]
    if any(paths != written[0] for paths in written):
        raise ValueError(f"spellings: expected tables of the same Flax paths, got {written}")
    merged = zip(*(layout.groups for layout in layouts), strict=True)
    return Layout(
        *(either(*(a for group in groups for a in group.alternatives)) for groups in merged),
        *(refusal for layout in layouts for refusal in layout.refusals),
        *(item for layout in layouts for item in layout.passed_over),
    )


def moves_by_sizes(layout: Layout, keys: Mapping[str, Shape], sizes: Sizes) -> list[Move]:
    """Return the rows that apply without a module; arguments and errors as for `Layout.shapes`."""
    moves, left = resolve(layout.tied_as(keys), keys, None, sizes)
    if left:
        raise TransferError("the Flax side's shapes", problems_of(left))
    return moves


def untied(layout: Layout, tensors: Tensors) -> list[Problem]:
    """Report keys whose tensor differs from the one they are tied to, or that cannot be read."""
    keys = [key for key in tensors if isinstance(key, str)]
    ties = [(item.key, item.same_as) for item in layout.passed_over if item.same_as]
    pairs = (filled(tie, binding) for tie in ties for binding in bindings(tie[:1], keys))
    problems = []
    for key, other in pairs:
        if other not in keys:
            continue
        try:
            if same_bits(read(tensors, key), read(tensors, other)):
                continue
        except TransferError as error:
            problems += error.problems
        else:
            text = f"expected the tensor of {other!r}, bit for bit, to which it is tied"
            hint = "if the model has both, untie them by tie_word_embeddings=false in config.json, "
            hint += "or by rows of their own; leaving one out would change the model"
            problems.append(Problem("ambiguous", key, text, hint))
    return problems


def _carried(
    doing: Literal["to Flax", "to torch"],
    moves: Iterable[Move],
    sources: Mapping[str, np.ndarray],
    problems: list[Problem],
) -> dict[str, np.ndarray]:
    """Carry out the moves; raise TransferError with `problems` and those of the values."""
    targets: dict[str, np.ndarray] = {}
    for move in moves:
        r, forward = move.row, doing == "to Flax"
        before, after = (r.keys, r.paths) if forward else (r.paths, r.keys)
        arrays = tuple(sources[name] for name in before)
        try:
            arrays = r.to_flax(arrays, move.path_shapes) if forward else r.to_torch(arrays)
        except MisfitError as misfit:
            problems.append(Problem("wrong dtype", before[0], str(misfit)))
            continue
        targets |= zip(after, arrays, strict=True)
    if problems:
        raise TransferError(doing, problems)
    return targets
