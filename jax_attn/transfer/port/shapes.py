"""What can be wrong with the shapes of a port: layers unlike each other, widths that disagree.

The steps of a row say how a shape becomes another, not which it must be. Of attention's heads
`port_checks` says more. Needs no framework.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from jax_attn.transfer.families import Config, Traits
from jax_attn.transfer.problems import Problem
from jax_attn.transfer.table.layout import Layout
from jax_attn.transfer.table.resolve import Move
from jax_attn.transfer.table.rows import bindings, filled
from jax_attn.transfer.table.step import Shape

_LAYER = "layer"

_AXES = {
    "token_embedding.embedding": "VE",
    "position_embedding.embedding": "PE",
    "type_embedding.embedding": "YE",
    "embedding_norm.scale": "E",
    "embedding_projection.kernel": "ED",
    "attention_norm.scale": "D",
    "cross_attention_norm.scale": "D",
    "mlp_norm.scale": "D",
    "final_norm.scale": "D",
    "q_norm.scale": "H",
    "k_norm.scale": "H",
    "out_proj.kernel": "NHD",
    "position_bias.embedding": "RN",
    "mlp.up.kernel": "DI",
    "mlp.gate.kernel": "DI",
    "mlp.down.kernel": "ID",
    "pooler.kernel": "DO",
    "lm_head.kernel": "EV",
    "lm_head.dense.kernel": "DE",
    "lm_head.norm.scale": "E",
    "classifier.kernel": "Dc",
    "classifier.dense.kernel": "DD",
    "classifier.out.kernel": "Dc",
    "token_classifier.kernel": "Dc",
    "seq_relationship.kernel": "Dc",
    "qa_outputs.kernel": "Dc",
    "choice_head.kernel": "Dc",
    "discriminator.dense.kernel": "DD",
    "discriminator.out.kernel": "Dc",
    "summary.kernel": "Dc",
    "patch_embedding.kernel": "hwcD",
    "cls_token": "abD",
    "mask_token": "abD",
    "position_embedding": "apD",
}
"""The axes of the families' Flax paths, by how these end: a capital is one number in all of a
file, a small letter the module's own. A bias has the last axis of its kernel or scale."""

_NAMES = {
    "D": ("hidden_size",),
    "N": ("num_heads",),
    "H": ("head_dim",),
    "V": ("vocab_size",),
    "I": ("intermediate_size", "n_inner", "d_ff", "ffn_hidden_size"),
    "P": ("max_position_embeddings", "n_positions"),
    "Y": ("type_vocab_size",),
    "E": ("embedding_size",),
    "O": ("pooler_output_size",),
    "R": ("relative_attention_num_buckets",),
}
"""What messages call a number, and configs."""


def unlike(layout: Layout, shapes: Mapping[str, Shape], side: str) -> list[Problem]:
    """Tensors of a layer that have another shape than those of the other layers.

    Layers are what {layer} counts in a row: a table of layers that are meant to differ calls them
    otherwise. shapes: of the names that are there; side: "keys" or "paths", of which side they are.
    """
    problems = []
    for pattern in dict.fromkeys(
        name for group in layout.groups for r in group.rows for name in getattr(r, side)
    ):
        found = sorted(bindings([pattern], shapes), key=lambda b: [int(n) for _, n in b])
        if not found or [name for name, _ in found[0]] != [_LAYER]:
            continue
        of = {name: shapes[name] for b in found for name in filled((pattern,), b)}
        (usual, count), *_ = Counter(of.values()).most_common(1)
        for name, shape in of.items():
            if shape != usual:
                text = f"expected {[*usual]}, as {count} of {len(of)} layers have it"
                problems.append(Problem("wrong shape", name, f"{text}, got {[*shape]}"))
    return problems


def wrong_axes(moves: Iterable[Move], traits: Traits, config: Config, side: str) -> list[Problem]:
    """Tensors of a family that do not have the widths of the config, or of each other.

    traits: those of any of its blocks. side: as there. What the config does not say is as most
    tensors have it.
    """
    found = {
        path: (getattr(move.row, side)[0], shape)
        for move in moves
        for path, shape in zip(move.row.paths, move.path_shapes, strict=True)
    }
    axes = {path: named for path in found if (named := _axes(path))}
    numbers = {"D": traits.embed_dim, "N": traits.sizes.num_heads, "H": traits.sizes.head_dim}
    numbers |= {letter: n for letter in "VIPYEOR" if (n := _said(config, letter))}
    numbers.setdefault("O", traits.embed_dim)
    if not any(path.startswith("embedding_projection.") for path in found):
        axes = {path: tuple("D" if a == "E" else a for a in names) for path, names in axes.items()}
    seen: dict[str, Counter[int]] = defaultdict(Counter)
    for path, names in axes.items():
        for axis, width in zip(names, found[path][1], strict=False):
            seen[axis][width] += 1
    numbers = {axis: widths.most_common(1)[0][0] for axis, widths in seen.items()} | numbers
    problems = []
    for path, names in axes.items():
        name, shape = found[path]
        if shape != (expected := tuple(numbers[axis] for axis in names)):
            wanted = ", ".join(map(_shown, names, expected))
            text = f"{path}: expected [{wanted}], by config.json and the others, got {[*shape]}"
            problems.append(Problem("wrong shape", name, text))
    return problems


def _axes(path: str) -> tuple[str, ...]:
    """The names of a path's axes, those of the module's own with its path; () where none says."""
    module, _, leaf = path.rpartition(".")
    leaves = ("kernel", "scale") if leaf == "bias" else (leaf,)
    for end in leaves:
        parts = [*module.split("."), end] if module else [end]
        tails = (".".join(parts[i:]) for i in range(len(parts)))
        if axes := next((_AXES[tail] for tail in tails if tail in _AXES), ""):
            axes = axes[-1] if leaf == "bias" else axes
            return tuple(a if a.isupper() else f"{module}.{a}" for a in axes)
    return ()


def _said(config: Config, letter: str) -> int | None:
    """A number of the config; -1 and null, which leave it to something else, are none."""
    values = (config.get(name) for name in _NAMES[letter])
    return next((n for n in values if isinstance(n, int) and n > 0 and n is not True), None)


def _shown(name: str, width: int) -> str:
    return f"{_NAMES[name][0]} = {width}" if name in _NAMES else str(width)
