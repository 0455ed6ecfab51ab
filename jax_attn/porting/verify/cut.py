"""Cut one layer out of a checkpoint, as a small checkpoint of its own.

The cut has that layer, all tensors outside the layers, and the first rows of the vocabulary. So
transformers and `jax_attn.models` read it like any other checkpoint, and a model that does not fit
into memory can be verified layer by layer.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from jax_attn.families import Config, model_family
from jax_attn.families.config import LAYER_KINDS, LAYERS
from jax_attn.families.family import Family
from jax_attn.transfer import Problem, TransferError, load_checkpoint, save_checkpoint
from jax_attn.transfer.arrays import LazyMapping, Spec, specs
from jax_attn.transfer.files.prefixes import Renamed, unwrapped

ROWS = 512
"""The largest number of rows of the vocabulary in a cut."""


def problems(path: Path, config: Config, layers: Iterable[int]) -> list[Problem]:
    """Report why some of these layers cannot be cut out of a checkpoint, without reading a tensor.

    path: the checkpoint, of a family that has a model. A layer may be absent, or depend on its own
    number, which a model of one layer cannot reproduce.
    """
    family = model_family(config)
    with load_checkpoint(path) as tensors:
        named, found = unwrapped(tensors)
        described, unreadable = specs(named)
    found = [*found, *unreadable]
    stems = _stems(family, config, described)
    if len({stem for stem, _ in _numbered(family, config, described)}) > 1:
        text = "expected a model of one stack, got an encoder and a decoder"
        problem = Problem("refused", "--layers", text, "verify the whole model")
        return [*found, problem]
    there = f"the layers 0 to {max(stems)}" if stems else "layers, of which the file has none"
    for layer in layers:
        if layer not in stems:
            text = f"expected one of {there}, got {layer}"
            found.append(Problem("missing", "--layers", text))
        elif _config(family, config, layer) is None:
            name = "scale_attn_by_inverse_layer_idx"
            field = f" ({name})" if config.get(name) else ""
            text = f"layer {layer} depends on its own number{field}, "
            text += "which a model of one layer cannot reproduce"
            found.append(Problem("refused", "--layers", text, "verify the whole model"))
    return found


def cut(path: Path, config: Config, layer: int, folder: Path) -> Config:
    """Write one layer of a checkpoint, and all tensors outside the layers, into a folder.

    layer: one for which `problems` reports none. folder: an empty one. Returns the cut's config.
    """
    family = model_family(config)
    cut_config = _config(family, config, layer)
    assert cut_config is not None
    with load_checkpoint(path) as tensors:
        named, _ = unwrapped(tensors)
        stem = _stems(family, config, named)[layer]
        kept = Renamed(named, _names(named, stem, layer))
        vocab_size = family.model_traits(config, ()).embedding.vocab_size
        save_checkpoint(folder / "model.safetensors", _Cut(kept, stem, vocab_size))
    (folder / "config.json").write_text(json.dumps(cut_config, indent=2), encoding="utf-8")
    return cut_config


def _stems(family: Family, config: Config, keys: Iterable[str]) -> dict[int, str]:
    """Map each layer's number to the text before it in the layer's keys: "model.layers."."""
    return {number: stem for stem, number in _numbered(family, config, keys)}


def _numbered(family: Family, config: Config, keys: Iterable[str]) -> Iterator[tuple[str, int]]:
    for place in family.blocks(config, keys):
        stem, number, _ = re.split(r"(\d+)", place.torch, maxsplit=1)
        yield stem, int(number)


def _names(keys: Iterable[str], stem: str, layer: int) -> dict[str, str]:
    """Map each key in the cut, whose only layer is the first, to its key in the file."""
    own = f"{stem}{layer}."
    names = {f"{stem}0.{k.removeprefix(own)}": k for k in keys if k.startswith(own)}
    return names | {k: k for k in keys if not re.match(rf"{re.escape(stem)}\d+\.", k)}


def _config(family: Family, config: Config, layer: int) -> Config | None:
    """Return the config of a model with only that layer, which acts as in the whole model.

    Returns None if there is no such config.
    """
    wanted = family.model_traits(config, (layer,)).blocks
    rows = min(ROWS, family.model_traits(config, ()).embedding.vocab_size)
    small = {**config, "vocab_size": rows} | {name: 1 for name in LAYERS if name in config}
    for name, value in config.items():
        if name.endswith("_token_id") and isinstance(value, int) and value >= rows:
            small[name] = rows - 1 if name == "pad_token_id" else None
    # In the whole model the layer's number may imply its kind; the cut names the kind.
    named = small | {"layer_types": [LAYER_KINDS[wanted[0].attention.window is not None]]}
    for candidate in (small, named):
        with contextlib.suppress(TransferError):
            if family.model_traits(candidate).blocks == wanted:
                return candidate
    return None


class _Cut(LazyMapping[np.ndarray]):
    """Tensors in which those with a row for each token of the vocabulary keep only the first rows.

    Outside the layers, these tensors are recognized by their length; a file in which another tensor
    has the same length does not load.
    """

    def __init__(self, tensors: Renamed, stem: str, vocab_size: int):
        super().__init__(tensors)
        self._tensors, self._stem, self._vocab_size = tensors, stem, vocab_size

    def __getitem__(self, key: str) -> np.ndarray:
        array, (shape, _) = self._tensors.mapped(key), self.describe(key)
        return np.array(array[: shape[0]] if shape else array)

    def describe(self, key: str) -> Spec:
        """Return shape and dtype name of one tensor, without reading it."""
        (*shape,), dtype = self._tensors.describe(key)
        if shape[:1] == [self._vocab_size] and not key.startswith(self._stem):
            shape[0] = min(ROWS, self._vocab_size)
        return Spec(tuple(shape), dtype)
