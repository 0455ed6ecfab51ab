"""`infer`: a table proposed from names, shapes and types, and what they do not decide."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from flax import nnx

from jax_attn.transfer.arrays import Tensors
from jax_attn.transfer.kinds.held import HeldPort, port_of
from jax_attn.transfer.nnx.variables import Weights, flatten, spelled, state_of
from jax_attn.transfer.problems import Problem, TransferError
from jax_attn.transfer.proposal.folding import (
    LayerItem,
    folded,
    folded_rows,
    misnumbered,
    pattern_of,
)
from jax_attn.transfer.proposal.matching import (
    Fit,
    Leaf,
    ModulePair,
    TensorModule,
    differ_as_biases,
    fit_of,
    flax_modules,
    possible_pairs,
    settled_pairs,
    torch_modules,
)
from jax_attn.transfer.proposal.naming import Bond, contradict
from jax_attn.transfer.proposal.undecided import Undecided, decided, is_certain, undecided
from jax_attn.transfer.table import as_code
from jax_attn.transfer.table.layout import Layout
from jax_attn.transfer.table.rows import Ignored, Row, bindings, row, tied
from jax_attn.transfer.table.steps import Shape

_CANDIDATES_SHOWN = 6
_BRACES = "in a table, braces in a name represent a number"

# Types whose matrices have their framework's axis order: (package, class) -> kind.
_TORCH_KINDS = {
    ("torch", "Linear"): "linear",
    ("torch", "Embedding"): "embedding",
    ("torch", "MultiheadAttention"): "attention",
    ("transformers", "Conv1D"): "conv1d",
    ("torch", "Conv1d"): "conv",
    ("torch", "Conv2d"): "conv",
    ("torch", "Conv3d"): "conv",
}
_FLAX_KINDS = {
    ("flax", "Linear"): "linear",
    ("flax", "LinearGeneral"): "linear",
    ("jax_attn", "Projection"): "linear",
    ("flax", "Embed"): "embedding",
    ("flax", "Conv"): "conv",
    ("keras", "Dense"): "linear",
    ("keras", "Embedding"): "embedding",
    ("keras", "BaseConv"): "conv",
    ("equinox", "Linear"): "linear as torch",
    ("equinox", "Embedding"): "embedding",
    ("equinox", "Conv"): "conv as torch",
}


@dataclass(frozen=True, repr=False)
class Proposal:
    """A table that `infer` proposes; prints as Python code that defines it as `LAYOUT`.

    The table is complete if `undecided` and `left` are empty.

    Attributes:
      layout: the rows that are decided.
      undecided: every other torch key.
      left: the Flax paths that no row writes, with their shapes.
      granted: assumptions of the rows that neither names nor shapes can confirm.
    """

    layout: Layout
    undecided: tuple[Undecided, ...]
    left: Mapping[str, Shape]
    granted: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        """Python code of the proposal, with comments on what is undecided."""
        return as_code.source(self.layout, _comments(self))

    def __str__(self) -> str:
        return self.code

    __repr__ = __str__


def infer(torch_module: Any, nnx_module: Weights) -> Proposal:
    """Propose the table that carries a torch module's tensors to a port. It never guesses.

    A row is decided if the names pair two modules, no other pair has names as close, all numbers
    agree, and only one order of the axes fits the shapes and types. If all that names leave open
    can be paired, parameters that only each other fit are paired by their shapes, unless that would
    pair a bias with another parameter. The shape of a square matrix decides nothing, nor that of a
    convolution with axes of one size: the types of the modules decide (Linear, Conv1D, Embedding,
    Conv), in torch, NNX, Equinox and Keras; without types, as in a mapping, a tree or a Linen port,
    the row stays open. A packed query, key and value stays open, except in
    torch.nn.MultiheadAttention. Rows with heads assume that N·H is N consecutive heads of H
    features.

    Args:
      torch_module: a torch.nn.Module, or a mapping of torch keys to tensors: a state_dict, or a
        checkpoint, of which only the header is read.
      nnx_module: an nnx.Module, a port of another kind as `parity.check` takes them, or a tree of
        arrays, a mapping. An abstract one, from `nnx.eval_shape` or `jax.eval_shape`, is enough.

    Returns:
      A `Proposal`; `print` it.

    Raises:
      TypeError: arguments of another kind.
      TransferError: some keys are not strings or some values not tensors; all are listed.
    """
    keys, torch_kinds, same = _torch_side(torch_module)
    paths, flax_kinds, granted = _flax_side(nnx_module)
    plain_keys, plain_paths = _without_braces(keys), _without_braces(paths)
    torch, flax = torch_modules(plain_keys, torch_kinds), flax_modules(plain_paths, flax_kinds)
    pairs = possible_pairs(torch, flax)
    settled = settled_pairs(pairs)
    odd = misnumbered(settled, torch, flax)
    rows = decided(pair for pair in settled if pair not in odd)
    ties = _ties(same, rows)
    done = {key for r, _ in rows for key in r.keys} | {item.key for item in ties}
    written = {path for r, _ in rows for path in r.paths}
    of_shape = forced(torch, flax, done, written, is_certain)
    pairs += (unlike := [pair for pair in of_shape if differ_as_biases(pair)])
    by_shape = [
        Row(pair.fits[0].source.names, pair.fits[0].target.names, pair.fits[0].steps[0])
        for pair in of_shape
        if not unlike  # then no table is complete
    ]
    rows += [LayerItem(r, r) for r in by_shape]
    done |= {r.keys[0] for r in by_shape}
    granted += tuple(
        f"{as_code.quoted(r.keys[0])} is {as_code.quoted(r.paths[0])}, which "
        "their shapes alone decide"
        for r in by_shape
    )
    open_keys = undecided(torch, plain_keys, pairs, settled, odd, rows, done)
    open_keys += [Undecided(k, keys[k], _BRACES, ()) for k in keys if k not in plain_keys]
    table = folded_rows(rows, plain_keys, plain_paths)
    return Proposal(
        Layout(*(row(r.keys, r.paths, *r.steps) for r in table), *ties),
        tuple(open_keys),
        _left(flax, paths, plain_paths, rows),
        granted,
    )


def _torch_side(module: Any) -> tuple[dict[str, Shape], dict[str, str], list[list[str]]]:
    """Return shapes by key, kinds by module, and the keys that share a parameter."""
    if isinstance(module, Mapping):
        return _shapes("torch_module", module), {}, []
    if not all(hasattr(module, name) for name in ("state_dict", "named_modules")):
        kind = type(module).__name__
        text = f"expected a torch.nn.Module, or a mapping of torch keys to tensors, got {kind}"
        raise TypeError(f"torch_module: {text}")
    kinds = {name: _kind(inner, _TORCH_KINDS) for name, inner in module.named_modules()}
    shared: dict[int, list[str]] = {}
    for key, parameter in module.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), []).append(key)
    same = [names for names in shared.values() if len(names) > 1]
    return _shapes("torch_module", module.state_dict()), kinds, same


def _flax_side(module: Weights) -> tuple[dict[str, Shape], dict[str, str], tuple[str, ...]]:
    """Return shapes by path, kinds by module, and the assumptions."""
    own = state_of(module)
    shapes = _shapes("nnx_module", flatten(own))
    modules: list[tuple[str, Any]] = []
    if isinstance(own, HeldPort):
        modules = list(port_of(own).modules())
    elif isinstance(own, nnx.Module):
        modules = [(spelled(path), inner) for path, inner in nnx.iter_modules(own)]
    kinds = {path: _kind(inner, _FLAX_KINDS) for path, inner in modules}
    turns = any(getattr(inner, "rotary", None) is not None for _, inner in modules)
    return shapes, kinds, (_same_pairs(shapes),) if turns else ()


def _same_pairs(paths: Iterable[str]) -> str:
    """Return the assumption on rotary pairs; it covers norms of queries and keys, if any."""
    there = {part for path in paths for part in path.split(".")}
    norms = (name for name in ("q_norm", "k_norm") if name in there)
    turned = ", ".join(f'"{name}"' for name in ("q_proj", "k_proj", *norms))
    return (
        "both sides rotate the same pairs of features; if torch rotates neighbours, use "
        f"layout.through(to_half_split(), {turned})"
    )


def _shapes(argument: str, tensors: Tensors) -> dict[str, Shape]:
    lazy = getattr(tensors, "describe", None)  # a checkpoint's `describe` reads only the header
    shapes, problems = {}, []
    for key in tensors:
        if not isinstance(key, str):
            text = f"expected a string as key, got {type(key).__name__}"
            problems.append(Problem("unreadable", str(key), text))
        elif lazy:
            shapes[key] = lazy(key).shape
        elif hasattr(tensor := tensors[key], "shape"):
            shapes[key] = tuple(map(int, tensor.shape))
        else:
            text = f"expected a tensor, got {type(tensor).__name__}"
            problems.append(Problem("unreadable", key, text))
    if problems:
        raise TransferError(f"reading the names and shapes of {argument}", problems)
    return shapes


def _kind(module: Any, kinds: Mapping[tuple[str, str], str]) -> str:
    """Return the kind of the first known class in the MRO; by name, so that nothing is imported."""
    classes = ((c.__module__.partition(".")[0], c.__name__) for c in type(module).__mro__)
    return next((kinds[name] for name in classes if name in kinds), "")


def _without_braces(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    return {name: shape for name, shape in shapes.items() if not {"{", "}"} & set(name)}


def _ties(same: Sequence[Sequence[str]], rows: Sequence[LayerItem[Row]]) -> list[Ignored]:
    """Return ties for keys that share the parameter of a key that a row reads."""
    read = {key for r, _ in rows for key in r.keys}
    ties = []
    for names in same:
        carried = [key for key in names if key in read]
        if len(carried) == 1:
            ties += [tied(key, carried[0]) for key in names if key not in read]
    return ties


def _left(
    flax: Sequence[TensorModule],
    paths: Mapping[str, Shape],
    plain: Mapping[str, Shape],
    rows: Sequence[LayerItem[Row]],
) -> dict[str, Shape]:
    """Return the paths that no row writes; one pattern if a path is open in every layer."""
    written = {path for r, _ in rows for path in r.paths}
    open_paths = [
        LayerItem((path, paths[path]), (pattern_of(path, module.name), paths[path]))
        for module in flax
        for leaf in module.leaves.values()
        for path in leaf.names
        if not module.packs and path not in written
    ]
    left = folded(open_paths, lambda one, count: len(bindings([one[0]], plain)) == count)
    return dict(left) | {path: shape for path, shape in paths.items() if path not in plain}


def _comments(proposal: Proposal) -> list[str]:
    lines = [f"assumed: {text}" for text in proposal.granted]
    for key in proposal.undecided:
        lines.append(f"undecided: {as_code.quoted(key.key)} {list(key.shape)}: {key.why}")
        shown = key.candidates[:_CANDIDATES_SHOWN]
        lines += [f"    {as_code.row_call(c.row)},  # {c.why}" for c in shown]
        if more := len(key.candidates) - len(shown):
            lines.append(f"    … and {more} more, in .undecided")
    left = proposal.left.items()
    return lines + [f"left in Flax: {as_code.quoted(path)} {list(shape)}" for path, shape in left]


# --- parameters that only each other fit, where all that is open can pair -------------------------


def forced(
    torch: Iterable[TensorModule],
    flax: Iterable[TensorModule],
    done: Collection[str],
    written: Collection[str],
    is_certain: Callable[[TensorModule, TensorModule, Fit], bool],
) -> list[ModulePair]:
    """Return pairs, each with the one fit of two open parameters that a complete table must have.

    done, written: torch keys and Flax paths that are decided. A fit is forced if each of its two
    parameters fits no other open one, and if as many are open on both sides in every group of
    parameters that fit one another. Otherwise no table is complete, and shapes tell nothing.
    """
    ours = _open(torch, done)
    theirs = _open((module for module in flax if not module.packs), written)
    options: dict[Leaf, list[tuple[TensorModule, TensorModule, Fit]]] = defaultdict(list)
    for (t, source), (f, target) in product(ours, theirs):
        fit = None if contradict(t.name, f.name) else fit_of(t, source, f, target)
        if fit is not None:
            options[source].append((t, f, fit))
            options[target].append((t, f, fit))
    if not _all_can_pair([leaf for _, leaf in ours], [leaf for _, leaf in theirs], options):
        return []
    return [
        ModulePair(t, f, Bond.NONE, (fit,))
        for _, source in ours
        for t, f, fit in options[source][:1]
        if len(options[source]) == len(options[fit.target]) == 1 and is_certain(t, f, fit)
    ]


def _open(
    modules: Iterable[TensorModule], names: Collection[str]
) -> list[tuple[TensorModule, Leaf]]:
    return [
        (module, leaf)
        for module in modules
        for leaf in module.leaves.values()
        if not set(names) & set(leaf.names)
    ]


def _all_can_pair(
    ours: Sequence[Leaf],
    theirs: Sequence[Leaf],
    options: dict[Leaf, list[tuple[TensorModule, TensorModule, Fit]]],
) -> bool:
    """Return whether each group of parameters that fit one another has as many on both sides."""
    group = {leaf: {leaf} for leaf in (*ours, *theirs)}
    for fit in (fit for found in options.values() for _, _, fit in found):
        whole = group[fit.source] | group[fit.target]
        group.update(dict.fromkeys(whole, whole))
    of_ours = set(ours)
    return all(2 * len(of_ours & whole) == len(whole) for whole in group.values())
