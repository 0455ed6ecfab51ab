"""Models from checkpoints and configs, and back into files; every weight goes through a table."""

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jax_attn.dtypes import DTYPES
from jax_attn.families import Config, Family, model_family
from jax_attn.families.config import Reading, reading
from jax_attn.families.family import other_layers, prefixed
from jax_attn.families.traits import ModelTraits
from jax_attn.families.whole import architecture, as_plain, is_mxfp4
from jax_attn.models import defaults
from jax_attn.models.encoder_decoder import EncoderDecoder
from jax_attn.models.model import PARTS, Model, Origin, lacks_pooler
from jax_attn.models.sharding import Placing, record, refuse_other_kinds
from jax_attn.transfer import Layout, Problem, TransferError, export, flatten, load_checkpoint, row
from jax_attn.transfer import load as load_tensors
from jax_attn.transfer.arrays import LazyMapping, Spec, read, recast, specs
from jax_attn.transfer.files import port_folder, staging
from jax_attn.transfer.files.checkpoint import Checkpoint
from jax_attn.transfer.files.mxfp4 import dequantized
from jax_attn.transfer.files.port_folder import read_config
from jax_attn.transfer.files.prefixes import stripped, unwrapped
from jax_attn.transfer.table.layout import moves_by_sizes

_LANGUAGE = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")
_CLASSES = {
    **dict.fromkeys(_LANGUAGE, ("lm_head",)),
    "ForPreTraining": ("lm_head", "pooler", "seq_relationship"),
    "ForNextSentencePrediction": ("pooler", "seq_relationship"),
    **dict.fromkeys(("ForSequenceClassification", "ForMultipleChoice"), ("classifier",)),
    "ForTokenClassification": ("classifier",),
    "ForQuestionAnswering": ("qa_outputs",),
}
"""Endings of transformers' class names -> their heads. Classes without heads end with "Model"."""

_CLASSIFIER_OF_TOKENS = ("bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neox")
"""Decoders, by model_type, whose head for tokens has another name than the one for rows."""


def load(
    path: str | Path,
    *,
    dtype: DTypeLike | None = None,
    sharding: Placing = None,
    part: str | None = None,
    strip: str = "",
) -> Model | EncoderDecoder:
    """Load the whole model of a checkpoint; every weight is kept bit for bit.

    Experts in MXFP4, as gpt-oss was published, are read as bfloat16, stack by stack; `save` writes
    such a model with plain numbers.

    Args:
      path: a folder as transformers writes it, or a file in one, with its config.json; or a folder
        that `jax-attn port --to flax` or `save` wrote.
      dtype: cast the parameters to this dtype; the file's own unless given.
      sharding: the parameters' sharding: a `jax.sharding.Sharding` for all; a mapping to shardings
        from patterns of dotted paths, such as "layers.{layer}.mlp.up.kernel", of which the first
        that matches is used; or a function `(dotted path, shape) -> Sharding or None`. Under
        `jax.set_mesh`, a PartitionSpec is a sharding too. Each device receives its part while the
        file is read. A pattern that matches no path raises TransferError.
      part: the key of the tensors, such as "state_dict", in a pickle of a trainer, which holds
        other values too; "state.model" for a key within a key.
      strip: a prefix that a trainer added to the keys, such as "model.", which is removed from
        those that have it.

    Returns:
      A `Model`, or an `EncoderDecoder` if there are both. It computes in its parameters' dtype.

    Raises:
      TransferError: the config or the file has something that no model here supports, or lacks
        something that a model needs; all problems are listed.
      OSError: a file cannot be read.
    """
    refuse_other_kinds(sharding)
    path = Path(path)
    config = read_config(path)
    if config is None:
        is_there = os.path.lexists(path)
        text = "expected a config.json in the folder of the tensors, got none"
        absent = "expected a folder or a file, which does not exist; nothing is downloaded"
        raise _error([Problem("file", str(path), text if is_there else absent)])
    family = model_family(config)
    is_flax = port_folder.side_of(path) == "flax"
    if is_flax and (part is not None or strip):
        text = "expected neither part= nor strip= for the Flax side of a port, got one of them"
        raise _error([Problem("refused", str(path), text)])
    opened: Any = port_folder.read_again(path) if is_flax else load_checkpoint(path, part=part)
    with opened if isinstance(opened, Checkpoint) else nullcontext():
        tensors, problems = stripped(opened, strip)
        if not is_flax:
            tensors, wrapped = unwrapped(tensors)
            problems += wrapped
        if is_mxfp4(config) and not is_flax:
            tensors, halved = dequantized(tensors)
            problems += halved
            config = as_plain(config)
        keys = tuple(port_folder.read_record(path).get("keys", ()) if is_flax else tensors)
        config = dict(family.settled(config, keys))
        described, unreadable = specs(tensors)
        family.model_traits(config, ())  # raises every problem of the config, whatever the file
        # Checked before making traits for as many layers as the config claims.
        prefix = [] if is_flax else prefixed(family, config, keys)
        others = prefix or other_layers(config, family.blocks(config, keys))
        if problems := [*problems, *unreadable, *others]:
            raise _error(problems)
        traits = family.model_traits(config)
        same = Layout(*(row(name, name) for name in described))
        layout = same if is_flax else family.model(config, keys)
        by_key = {key: spec.shape for key, spec in described.items()}
        moves = moves_by_sizes(layout, by_key, traits.blocks[0].attention.sizes)
        shapes = {path: shape for move in moves for path, shape in move.paths.items()}
        carried = [described[key] for move in moves for key in move.row.keys]
        param_dtype = _dtype(carried, dtype)
        heads = _heads(shapes, traits, config)
        _expect_pooler(heads, traits)
        make = partial(_class_of(traits), traits, heads, param_dtype=param_dtype)
        model = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
        if unplaced := _unplaced(shapes, model):
            raise _error(unplaced)
        record(model, sharding)
        load_tensors(model, _Cast(tensors, param_dtype), layout)
    model.generation, file = defaults.read(path, config)
    model.origin = Origin(json.dumps(config), keys, json.dumps(file))
    model.eval()
    return model


def from_config(
    config: Config | Any, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs
) -> Model | EncoderDecoder:
    """Make an untrained model; parameters are drawn as torch's layers draw theirs.

    Args:
      config: the content of a config.json, as a mapping, or a configuration object of transformers.
        Its `architectures` name the head; without them it is a language model's.
      dtype: the parameters' dtype.
      rngs: "params" for the parameters.

    Raises:
      TransferError: the config has something that no model here supports; all problems are listed.
    """
    config = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(config, Mapping):
        raise TypeError(f"config: expected a mapping, got {type(config).__name__}")
    config = _as_json(config)
    family = model_family(config)
    traits = family.model_traits(config)
    heads = _heads_of_class(family, traits, config)
    model = _class_of(traits)(traits, heads, param_dtype=dtype, rngs=rngs)
    model.origin = Origin(json.dumps(config))
    model.generation = defaults.Defaults.of(config, None)
    return model


def save(
    model: Model | EncoderDecoder, path: str | Path, *, to: Literal["torch", "flax"] = "torch"
) -> None:
    """Write a model into a new folder: its tensors and its config.json.

    Args:
      model: a model from `load` or `from_config`, trained or not.
      path: a folder that does not exist yet.
      to: "torch" for the names and shapes that transformers reads: those of the loaded file, bit
        for bit if nothing was changed; "flax" for those of the model, as `jax-attn port --to flax`
        writes them. `load` reads both.

    Raises:
      TransferError: the folder exists, or cannot be written; no files remain.
      ValueError: the model is from neither `load` nor `from_config`, or `to` is another string.
    """
    if to not in ("torch", "flax"):
        raise ValueError(f"to: expected 'torch' or 'flax', got {to!r}")
    origin = model.origin
    if origin is None:
        raise ValueError("model: expected one from load or from_config, which has a config")
    path = Path(path)
    if problems := port_folder.refused_target(path):
        raise _error(problems)
    config, tensors, keys = json.loads(origin.config), flatten(model), origin.keys
    family = model_family(config)
    if to == "torch" or not keys:
        named = export(model, family.model(config, keys))
        tensors, keys = named if to == "torch" else tensors, keys or tuple(named)
    config |= {"dtype": str(model.token_embedding.embedding[...].dtype)}
    config.pop("torch_dtype", None)
    if (kind := family.model_type(config)) is not None:
        config["model_type"] = kind  # transformers' Auto classes need it
    record = {"to": to, "family": family.name, "passed_over": {}, "keys": list(keys)}
    held = {"config.json": config, port_folder.GENERATION: json.loads(origin.generation)}
    texts = {k: f"{json.dumps(x, indent=2)}\n".encode() for k, x in held.items() if x is not None}
    with staging.staged(path) as folder:
        port_folder.write_all(folder, tensors, texts, record)


def _dtype(carried: Iterable[Spec], dtype: DTypeLike | None) -> str:
    """Return the dtype of the parameters: the requested one, or that of all floating tensors."""
    if dtype is not None:
        name = jnp.dtype(dtype).name
        if name not in DTYPES:
            raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {name}")
        return name
    names = sorted({spec.dtype for spec in carried if "float" in spec.dtype})
    if len(names) == 1 and names[0] in DTYPES:
        return names[0]
    text = f"expected tensors of one of {', '.join(DTYPES)}, got {', '.join(names) or 'none'}"
    raise _error([Problem("wrong dtype", "tensors", text, "pass dtype= to cast them")])


def _heads(
    shapes: Mapping[str, tuple[int, ...]], traits: ModelTraits, config: Config
) -> dict[str, int]:
    """Return the heads of a file, by its Flax paths, with the number of their outputs."""
    named = architecture(Reading(config))
    heads: dict[str, int] = {}
    for head in PARTS:
        parts = {path: shape for path, shape in shapes.items() if path.split(".")[0] == head}
        if parts:
            last = [p for p in (f"{head}.kernel", f"{head}.out.kernel") if p in parts]
            heads[head] = parts[last[0]][-1] if last else 0
    # A tied head without a bias has no tensor of its own in the file.
    has_none = traits.lm_head.is_tied and not traits.lm_head.use_bias
    if named.endswith(_LANGUAGE) or "lm_head" in heads or (has_none and not named):
        heads["lm_head"] = traits.embedding.vocab_size
    return heads


def _expect_pooler(heads: Mapping[str, int], traits: ModelTraits) -> None:
    if lacks_pooler(heads, traits.classifier):
        text = "expected the weights of a pooler, because the file's head reads its output"
        raise _error([Problem("missing", "pooler", text)])


def _heads_of_class(family: Family, traits: ModelTraits, config: Config) -> dict[str, int]:
    """Return the heads of the class that a config names, with the number of their outputs."""
    named = architecture(Reading(config)) or "ForMaskedLM"
    stems = [kind.replace("-", "").replace("_", "") for kind in family.model_types]
    if named.lower() in {f"{stem}{end}model" for stem in stems for end in ("", "encoder")}:
        has_pooler = "pooler.kernel" in family.model(config, ()).flax_paths()
        return {"pooler": traits.embed_dim} if has_pooler else {}
    ending = next((end for end in _CLASSES if named.endswith(end)), None)
    if ending is None:
        endings = ", ".join(f"…{end}" for end in _CLASSES)
        text = f"expected one of {endings}, or a model without a head, got {named}"
        raise _error([Problem("refused", "config.json architectures", text)])
    with reading(config) as read:
        labels = read.inside("id2label").config
        count = len(labels) or read.number("num_labels", default=2)
    if ending == "ForTokenClassification" and family.model_type(config) in _CLASSIFIER_OF_TOKENS:
        return {"token_classifier": count}
    D = traits.embed_dim
    outputs = {"lm_head": traits.embedding.vocab_size, "pooler": D, "seq_relationship": 2}
    outputs |= {"classifier": 1 if ending == "ForMultipleChoice" else count, "qa_outputs": 2}
    heads = {head: outputs[head] for head in _CLASSES[ending]}
    return heads | ({"pooler": D} if lacks_pooler(heads, traits.classifier) else {})


def _class_of(traits: ModelTraits) -> type[Model] | type[EncoderDecoder]:
    return EncoderDecoder if traits.decoder else Model


def _unplaced(
    shapes: Mapping[str, tuple[int, ...]], model: Model | EncoderDecoder
) -> list[Problem]:
    """Report the parts of a file that the model does not have."""
    own = {path.split(".")[0] for path in flatten(model)}
    parts = sorted({path.split(".")[0] for path in shapes} - own)
    text = "the file has weights under this name, but no model here has such a part"
    return [Problem("unexpected", part, text) for part in parts]


class _Cast(LazyMapping[np.ndarray]):
    """Tensors whose floating-point values are cast to this dtype, each when it is read."""

    def __init__(self, tensors: Mapping[str, Any], dtype: str):
        self._tensors, self._dtype = tensors, dtype
        self._specs, _ = specs(tensors)
        super().__init__(tensors)

    def __getitem__(self, key: str) -> np.ndarray:
        return recast(read(self._tensors, key), self._dtype)

    def describe(self, key: str) -> Spec:
        """Return shape and dtype name of one tensor without reading it."""
        spec = self._specs[key]
        return Spec(spec.shape, self._dtype) if spec.dtype in DTYPES else spec


def _as_json(config: Config) -> dict[str, Any]:
    """Return a config as a file holds it, without its dtype, which is that of the parameters."""

    def number(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError

    held, problems = {}, []
    for name, value in config.items():
        if name in ("dtype", "torch_dtype"):
            continue
        try:
            held[name] = json.loads(json.dumps(value, default=number))
        except (TypeError, ValueError):
            text = f"expected a JSON value, got {value!r}"
            problems.append(Problem("refused", f"config.json {name}", text))
    if problems:
        raise _error(problems)
    return held


def _error(problems: list[Problem]) -> TransferError:
    return TransferError("models", problems)
