"""Checks of shapes in a port: heads, widths, layers that differ from each other.

The steps of a row say how one shape becomes another, not which shape is right. Needs no framework.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

from jax_attn.families import Config, family_of
from jax_attn.families.family import Prefixes
from jax_attn.families.traits import Traits
from jax_attn.porting.port.parts import RowSide
from jax_attn.transfer.problems import Problem, TransferError
from jax_attn.transfer.table.layout import Layout
from jax_attn.transfer.table.resolve import Move
from jax_attn.transfer.table.rows import Row, bindings, filled
from jax_attn.transfer.table.steps import Shape, Sizes, grouped, heads, heads_in, packed

SIZED = (heads, heads_in, grouped, packed)
"""Steps whose shapes cannot be inferred from flat projections."""

_LAYER = "layer"
_HEADS = {"q_proj": "num_heads", "out_proj": "num_heads"}
_HEADS |= dict.fromkeys(("k_proj", "v_proj"), "num_kv_heads")

_AXES = {
    "token_embedding.embedding": "VE",
    "position_embedding.embedding": "PW",
    "type_embedding.embedding": "YE",
    "embedding_norm.scale": "E",
    "embedding_projection.kernel": "ED",
    "output_projection.kernel": "DE",
    "q_norm.scale": "H",
    "k_norm.scale": "H",
    "out_proj.kernel": "NHD",
    "position_bias.embedding": "RN",
    "sinks": "N",
    "mlp.up.kernel": "DI",
    "mlp.gate.kernel": "DI",
    "mlp.down.kernel": "ID",
    "mlp.router.kernel": "DX",
    "mlp.experts.up.kernel": "XDF",
    "mlp.experts.gate.kernel": "XDF",
    "mlp.experts.down.kernel": "XFD",
    "mlp.experts.up.bias": "XF",
    "mlp.experts.gate.bias": "XF",
    "mlp.experts.down.bias": "XD",
    "pooler.kernel": "DO",
    "lm_head.kernel": "EV",
    "lm_head.dense.kernel": "DE",
    "lm_head.norm.scale": "E",
    "classifier.dense.kernel": "DD",
    "discriminator.dense.kernel": "DD",
    "patch_embedding.kernel": "hwcD",
    "cls_token": "abD",
    "mask_token": "abD",
    "position_embedding": "apD",
}
_BLOCK_NORMS = (
    *("attention_norm", "attention_out_norm", "cross_attention_norm", "mlp_norm", "mlp_out_norm"),
    "final_norm",
)
_AXES |= {f"{norm}.scale": "D" for norm in _BLOCK_NORMS}
_TASK_HEADS = (
    *("classifier", "classifier.out", "token_classifier", "seq_relationship", "qa_outputs"),
    *("choice_head", "discriminator.out", "summary"),
)
_AXES |= {f"{head}.kernel": "Dc" for head in _TASK_HEADS}
"""Axes of the families' Flax paths, by the paths' endings: a capital is one number throughout a
file, a small letter belongs to the module. Other biases have the last axis of their kernel or
scale."""

_NAMES = {
    "D": ("hidden_size",),
    "N": ("num_heads",),
    "H": ("head_dim",),
    "V": ("vocab_size",),
    "I": ("intermediate_size", "n_inner", "d_ff", "ffn_dim", "ffn_hidden_size"),
    "F": ("moe_intermediate_size", "intermediate_size"),
    "X": ("num_experts", "num_local_experts"),
    "P": ("max_position_embeddings", "n_positions"),
    "Y": ("type_vocab_size",),
    "E": ("embedding_size", "word_embed_proj_dim"),
    "O": ("pooler_output_size",),
    "R": ("relative_attention_num_buckets",),
}
"""Names of a width in configs; messages use the first."""


def wrong_heads(moves: Iterable[Move], sizes: Sizes) -> Iterator[Problem]:
    """Report kernels and biases whose number of heads differs from `sizes`."""
    for move in moves:
        for path, shape in move.paths.items():
            count = _head_count(move.row, shape)
            part = path.split(".")[-2] if "." in path else ""
            expected = [getattr(sizes, _HEADS[part])] if part in _HEADS else [*sizes[:2]]
            if count is not None and count not in expected:
                numbers = " or ".join(map(str, dict.fromkeys(expected)))
                text = f"expected {numbers} heads of head_dim = {sizes.head_dim}, got {count}"
                yield Problem("wrong shape", move.row.keys[0], f"{path}: {text}")


def wrong_widths(
    moves: Iterable[Move], blocks: Iterable[tuple[Prefixes, Traits]]
) -> Iterator[Problem]:
    """Report kernels of a block whose width differs from the config's."""
    arrays = _by_path(moves, "keys")
    for place, traits in blocks:
        D, (kdim, vdim) = traits.embed_dim, traits.widths
        widths = {"q_proj": (0, D), "k_proj": (0, kdim), "v_proj": (0, vdim), "out_proj": (-1, D)}
        for part, (axis, width) in widths.items():
            path = f"{place.flax}.{part}.kernel"
            key, shape = arrays.get(path, ("", ()))
            if shape and shape[axis] != width:
                text = f"{path}: expected {width} features, as the config says, got {shape[axis]}"
                yield Problem("wrong shape", key, text)


def unlike(layout: Layout, shapes: Mapping[str, Shape], side: RowSide) -> Iterator[Problem]:
    """Report tensors of a layer whose shape differs from that of the other layers.

    Layers are counted by {layer} in a row; a table with layers that should differ uses another
    word. shapes: by the names that are present; side: the side that they belong to.
    """
    for pattern in dict.fromkeys(
        name for group in layout.groups for r in group.rows for name in getattr(r, side)
    ):
        layers = sorted(bindings([pattern], shapes), key=lambda b: [int(n) for _, n in b])
        if not layers or [name for name, _ in layers[0]] != [_LAYER]:
            continue
        by_name = {name: shapes[name] for b in layers for name in filled((pattern,), b)}
        (usual, count), *_ = Counter(by_name.values()).most_common(1)
        for name, shape in by_name.items():
            if shape != usual:
                text = f"expected {[*usual]}, as {count} of {len(by_name)} layers have it"
                yield Problem("wrong shape", name, f"{text}, got {[*shape]}")


def wrong_axes(
    moves: Iterable[Move], traits: Traits, config: Config, side: RowSide
) -> Iterator[Problem]:
    """Report tensors of a family whose widths differ from the config's, or from each other's.

    traits: those of any of its blocks. side: as in `unlike`. A width that the config lacks is the
    one that most tensors have.
    """
    arrays = _by_path(moves, side)
    axes = {path: names for path in arrays if (names := _axes(path))}
    if not any(path.startswith("embedding_projection.") for path in arrays):
        axes = {path: tuple("D" if a in "EW" else a for a in names) for path, names in axes.items()}
    seen: dict[str, Counter[int]] = defaultdict(Counter)
    for path, names in axes.items():
        for axis, width in zip(names, arrays[path][1], strict=False):
            seen[axis][width] += 1
    widths = {axis: counts.most_common(1)[0][0] for axis, counts in seen.items()}
    if "E" in widths:
        widths["W"] = widths["E"]  # may be overridden below
    widths |= _config_widths(config, traits)
    for path, names in axes.items():
        name, shape = arrays[path]
        if shape != (expected := tuple(widths[axis] for axis in names)):
            wanted = ", ".join(map(_shown, names, expected))
            text = (
                f"{path}: expected [{wanted}], by config.json and the other tensors, got {[*shape]}"
            )
            yield Problem("wrong shape", name, text)


def _by_path(moves: Iterable[Move], side: RowSide) -> dict[str, tuple[str, Shape]]:
    """Map each Flax path to its name in messages and its Flax shape."""
    return {
        path: (getattr(move.row, side)[0], shape)
        for move in moves
        for path, shape in move.paths.items()
    }


def _head_count(r: Row, shape: Shape) -> int | None:
    """Return how many heads a Flax array has; None if its row makes none."""
    if heads in r.steps and len(shape) >= 2:
        return shape[-2]
    return shape[0] if heads_in in r.steps and shape else None


def _axes(path: str) -> tuple[str, ...]:
    """Return the names of a path's axes, the module's own with its path; () if unknown."""
    module, _, leaf = path.rpartition(".")
    for end in ("bias", "kernel", "scale") if leaf == "bias" else (leaf,):
        parts = [*module.split("."), end] if module else [end]
        tails = (".".join(parts[i:]) for i in range(len(parts)))
        if axes := next((_AXES[tail] for tail in tails if tail in _AXES), ""):
            axes = axes[-1] if leaf != end else axes
            return tuple(a if a.isupper() else f"{module}.{a}" for a in axes)
    return ()


def _config_widths(config: Config, traits: Traits) -> dict[str, int]:
    """Return each axis's width; values such as -1 and null leave it open."""
    widths = {"O": traits.embed_dim}
    for axis, names in _NAMES.items():
        values = (config.get(name) for name in names)
        numbers = (n for n in values if isinstance(n, int) and n > 0 and n is not True)
        if number := next(numbers, None):
            widths[axis] = number
    own = {"D": traits.embed_dim, "N": traits.sizes.num_heads, "H": traits.sizes.head_dim}
    return widths | own | _model_widths(config)


def _model_widths(config: Config) -> dict[str, int]:
    """Return widths of the config's whole model, whose position table may have extra rows."""
    family = family_of(config)
    try:
        model = family.model_traits(config, ()) if family and family.model_of else None
    except TransferError:  # can be carried without a model
        model = None
    if model is None or model.embedding.positions is None:
        return {}
    return {"P": model.embedding.positions.rows, "W": model.embed_dim}


def _shown(name: str, width: int) -> str:
    return f"{_NAMES[name][0]} = {width}" if name in _NAMES else str(width)
