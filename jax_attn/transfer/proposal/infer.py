"""`infer`: a table proposed from names, shapes and types, and what they leave open.

Not called `infer`: a module of that name would hide the function in the package.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flax import nnx

from jax_attn.transfer.nnx.state import flatten
from jax_attn.transfer.problems import Problem, TransferError
from jax_attn.transfer.proposal.folding import (
    PairedRow,
    folded,
    folded_rows,
    inconsistent,
    pattern_of,
)
from jax_attn.transfer.proposal.matching import (
    TensorModule,
    edges,
    flax_parts,
    settled,
    torch_parts,
)
from jax_attn.transfer.proposal.undecided import Undecided, decided, undecided
from jax_attn.transfer.table import as_code
from jax_attn.transfer.table.layout import Layout
from jax_attn.transfer.table.rows import Ignored, row, tied
from jax_attn.transfer.table.step import Shape

_CANDIDATES_SHOWN = 6
_BRACES = "in a table, braces in a name stand for a number"

# The types whose matrices lie as their framework's own do: (package, class) -> kind.
_TORCH_KINDS = {
    ("torch", "Linear"): "linear",
    ("torch", "Embedding"): "embedding",
    ("torch", "MultiheadAttention"): "attention",
    ("transformers", "Conv1D"): "conv1d",
}
_FLAX_KINDS = {
    ("flax", "Linear"): "linear",
    ("flax", "LinearGeneral"): "linear",
    ("jax_attn", "Projection"): "linear",
    ("flax", "Embed"): "embedding",
}
_ROTARY = (
    "queries and keys turn by the same pairs of features on both sides; where "
    'not, layout.through(to_half_split(), "q_proj", "k_proj")'
)


@dataclass(frozen=True, repr=False)
class Proposal:
    """What `infer` found. Prints as Python that makes `layout` as `LAYOUT`, and as comments.

    layout: the rows that are decided. undecided: every other torch key. left: the Flax paths that
    no row writes, to their shapes. With neither of the two the layout is whole.
    granted: what the rows stand on that neither a name nor a shape tells.
    """

    layout: Layout
    undecided: tuple[Undecided, ...]
    left: Mapping[str, Shape]
    granted: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        return as_code.program(self.layout, _comments(self))

    def __str__(self) -> str:
        return self.code

    __repr__ = __str__


def infer(torch_module: Any, nnx_module: Any) -> Proposal:
    """Propose the table that carries a torch module's tensors to an NNX module. Never guesses.

    torch_module: a torch.nn.Module, or a mapping of torch keys to tensors: a state_dict, a
    checkpoint, of which nothing but the header is read. nnx_module: an nnx.Module; an abstract one
    (nnx.eval_shape) will do. Returns a Proposal; `print` it.

    A row is decided where names say that two modules are one another's, no other pair is named as
    closely, numbers agree throughout, and one order of the axes alone fits the shapes and types. A
    square matrix says nothing by its shape: of a mapping it stays open, of modules their types
    tell (Linear, Conv1D, Embedding). A packed query, key and value stays open, but that of
    torch.nn.MultiheadAttention itself. Rows of heads hold N·H as N heads of H, one after another.

    Raises TypeError for arguments of another kind; TransferError, every problem at once, for keys
    that are no strings and values that are no tensors.
    """
    keys, torch_kinds, same = _torch_side(torch_module)
    paths, flax_kinds, granted = _flax_side(nnx_module)
    plain_keys, plain_paths = _without_braces(keys), _without_braces(paths)
    torch, flax = torch_parts(plain_keys, torch_kinds), flax_parts(plain_paths, flax_kinds)
    found = edges(torch, flax)
    chosen = settled(found)
    wrong = inconsistent(chosen, torch, flax)
    rows = decided(edge for edge in chosen if edge not in wrong)
    ties = _ties(same, rows)
    done = {key for one in rows for key in one.row.keys} | {item.key for item in ties}
    open_keys = undecided(torch, plain_keys, found, chosen, wrong, rows, done)
    open_keys += [Undecided(k, keys[k], _BRACES, ()) for k in keys if k not in plain_keys]
    made = folded_rows(rows, plain_keys, plain_paths)
    return Proposal(
        Layout(*(row(r.keys, r.paths, *r.steps) for r in made), *ties),
        tuple(open_keys),
        _left(flax, paths, plain_paths, rows),
        granted,
    )


def _torch_side(given: Any) -> tuple[dict[str, Shape], dict[str, str], list[list[str]]]:
    """Shapes by key, kinds by module, and the keys that share a parameter."""
    if isinstance(given, Mapping):
        return _shapes("torch_module", given), {}, []
    if not all(hasattr(given, name) for name in ("state_dict", "named_modules")):
        kind = type(given).__name__
        text = f"expected a torch.nn.Module, or a mapping of torch keys to tensors, got {kind}"
        raise TypeError(f"torch_module: {text}")
    kinds = {name: _kind(module, _TORCH_KINDS) for name, module in given.named_modules()}
    shared: dict[int, list[str]] = {}
    for key, parameter in given.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), []).append(key)
    same = [names for names in shared.values() if len(names) > 1]
    return _shapes("torch_module", given.state_dict()), kinds, same


def _flax_side(given: Any) -> tuple[dict[str, Shape], dict[str, str], tuple[str, ...]]:
    """Shapes by path, kinds by module, and what has to be taken for granted."""
    shapes = _shapes("nnx_module", flatten(given))
    modules = list(nnx.iter_modules(given)) if isinstance(given, nnx.Module) else []
    kinds = {".".join(map(str, path)): _kind(module, _FLAX_KINDS) for path, module in modules}
    turns = any(getattr(module, "rotary", None) is not None for _, module in modules)
    return shapes, kinds, (_ROTARY,) if turns else ()


def _shapes(argument: str, tensors: Mapping[str, Any]) -> dict[str, Shape]:
    lazy = getattr(tensors, "describe", None)  # a checkpoint knows without reading
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
    """What the first known class among those it descends from is; by name, so without import."""
    classes = ((c.__module__.partition(".")[0], c.__name__) for c in type(module).__mro__)
    return next((kinds[name] for name in classes if name in kinds), "")


def _without_braces(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    return {name: shape for name, shape in shapes.items() if not {"{", "}"} & set(name)}


def _ties(same: Sequence[Sequence[str]], rows: Sequence[PairedRow]) -> list[Ignored]:
    """Keys that repeat one which a row reads."""
    read = {key for one in rows for key in one.row.keys}
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
    rows: Sequence[PairedRow],
) -> dict[str, Shape]:
    written = {path for one in rows for path in one.row.paths}
    open_ones = [
        (path, part)
        for part in flax
        for leaf in part.leaves.values()
        for path in leaf.names
        if not part.packs and path not in written
    ]
    made = {}
    for complete, members in folded(
        open_ones, lambda one: (pattern_of(one[0], one[1].name), paths[one[0]]), plain
    ):
        path, part = members[0]
        made[pattern_of(path, part.name) if complete else path] = paths[path]
    return made | {path: shape for path, shape in paths.items() if path not in plain}


def _comments(proposal: Proposal) -> list[str]:
    lines = [f"taken for granted: {text}" for text in proposal.granted]
    for key in proposal.undecided:
        lines.append(f"undecided: {as_code.quoted(key.key)} {list(key.shape)}: {key.why}")
        shown = key.candidates[:_CANDIDATES_SHOWN]
        lines += [f"    {as_code.row_call(c.row)},  # {c.why}" for c in shown]
        if more := len(key.candidates) - len(shown):
            lines.append(f"    … and {more} more, in .undecided")
    left = proposal.left.items()
    return lines + [f"left in Flax: {as_code.quoted(path)} {list(shape)}" for path, shape in left]
