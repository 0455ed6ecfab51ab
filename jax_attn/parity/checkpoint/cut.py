"""One layer of a checkpoint, cut out as a small checkpoint of its own.

The cut has that layer, all that is beside the layers, and the first rows of the vocabulary. So
transformers and `jax_attn.models` read it like any other checkpoint, and a model that does not fit
into memory is verified layer by layer.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jax_attn.transfer import Problem, TransferError, load_checkpoint, save_checkpoint
from jax_attn.transfer.arrays import LazyMapping, Spec, specs
from jax_attn.transfer.families import Config, model_family
from jax_attn.transfer.families.config import LAYER_KINDS, LAYERS
from jax_attn.transfer.families.family import Family
from jax_attn.transfer.files.prefixes import Renamed, unwrapped

ROWS = 512
"""Rows of the vocabulary that a cut has, where the model has as many."""


def cut(path: Path, config: Config, layer: int, folder: Path) -> Config:
    """Write one layer of a checkpoint, and what is beside the layers, into a folder.

    path: the checkpoint, of a family that has a model. folder: an empty one. Returns the config of
    the cut. Raises TransferError for a layer that the checkpoint lacks, and for one that does what
    only its number tells, which a model of a single layer cannot do.
    """
    family = model_family(config)
    with load_checkpoint(path) as tensors:
        named, problems = unwrapped(tensors)
        described, unreadable = specs(named)
        if problems := [*problems, *unreadable]:
            raise TransferError(f"layer {layer}", problems)
        stem = _stem(family, config, described, layer)
        cut_config = _config(family, config, layer)
        kept = Renamed(named, _names(described, stem, layer))
        vocab_size = family.model_traits(config, ()).embedding.vocab_size
        save_checkpoint(folder / "model.safetensors", _Cut(kept, vocab_size))
    (folder / "config.json").write_text(json.dumps(cut_config, indent=2), encoding="utf-8")
    return cut_config


def _stem(family: Family, config: Config, keys: Mapping[str, Any], layer: int) -> str:
    """What precedes the number of a layer in its keys: "model.layers."."""
    stems = {}
    for place in family.blocks(config, keys):
        stem, number, _ = re.split(r"(\d+)", place.torch, maxsplit=1)
        stems[int(number)] = stem
    if layer in stems:
        return stems[layer]
    text = f"expected one of the layers 0 to {max(stems)}" if stems else "the file has no layers"
    raise TransferError(f"layer {layer}", [Problem("missing", "--layers", f"{text}, got {layer}")])


def _names(keys: Mapping[str, Any], stem: str, layer: int) -> dict[str, str]:
    """Key in the cut, whose only layer is the first -> key in the file."""
    own = f"{stem}{layer}."
    names = {f"{stem}0.{k.removeprefix(own)}": k for k in keys if k.startswith(own)}
    return names | {k: k for k in keys if not re.match(rf"{re.escape(stem)}\d+\.", k)}


def _config(family: Family, config: Config, layer: int) -> Config:
    """The config of a model of that layer alone, which does there what the whole model does."""
    wanted = family.model_traits(config, (layer,)).blocks
    rows = min(ROWS, family.model_traits(config, ()).embedding.vocab_size)
    small = {**config, "vocab_size": rows} | {name: 1 for name in LAYERS if name in config}
    for name, value in config.items():
        if name.endswith("_token_id") and isinstance(value, int) and value >= rows:
            small[name] = rows - 1 if name == "pad_token_id" else None
    # What the number of a layer tells in the whole model, the cut says by name.
    named = small | {"layer_types": [LAYER_KINDS[wanted[0].attention.window is not None]]}
    for candidate in (small, named):
        try:
            if family.model_traits(candidate).blocks == wanted:
                return candidate
        except TransferError:
            continue
    text = (
        f"layer {layer} does what only its number tells (scale_attn_by_inverse_layer_idx, for "
        "example), and a model of one layer has no such number: verify the whole model"
    )
    raise TransferError(f"layer {layer}", [Problem("refused", "--layers", text)])


class _Cut(LazyMapping[np.ndarray]):
    """Tensors, but of what has a row for each token of the vocabulary only the first rows."""

    def __init__(self, tensors: Renamed, vocab_size: int):
        super().__init__(tensors)
        self._tensors, self._vocab_size = tensors, vocab_size

    def __getitem__(self, key: str) -> np.ndarray:
        array, (shape, _) = self._tensors.mapped(key), self.describe(key)
        return np.array(array[: shape[0]] if shape else array)

    def describe(self, key: str) -> Spec:
        """Shape and dtype name of one tensor, unread."""
        (*shape,), dtype = self._tensors.describe(key)
        if shape[:1] == [self._vocab_size]:
            shape[0] = min(ROWS, self._vocab_size)
        return Spec(tuple(shape), dtype)
