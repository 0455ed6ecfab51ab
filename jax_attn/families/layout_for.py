"""The transfer table of a known family, from a checkpoint or a config."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_attn.families import family_of, known_types, said_type
from jax_attn.transfer.files.checkpoint import load_checkpoint
from jax_attn.transfer.files.port_folder import read_config
from jax_attn.transfer.files.prefixes import unwrapped
from jax_attn.transfer.problems import Problem, TransferError, nearest
from jax_attn.transfer.table.layout import Layout


def layout_for(source: str | Path | Mapping[str, Any]) -> Layout:
    """Return the table between a known family's torch keys and this package's Flax paths.

    Args:
      source: a checkpoint (a file, or a folder with its config.json); or a config, as a dict such
        as transformers' `config.to_dict()`. A checkpoint's keys are read as well, so that the table
        spells them as the file does.

    Returns:
      A `Layout` of the whole model; `Layout.renamed` adapts its Flax side to another module, and
      `Layout.renamed_torch` its torch side.

    Raises:
      TransferError: there is no config, its family is unknown, or a value is not supported.
    """
    config, keys, where = source, [], "the config"
    if not isinstance(config, Mapping):
        path = Path(config)
        with load_checkpoint(path) as tensors:
            keys = [*unwrapped(tensors)[0]]
        config, where = read_config(path) or {}, str(path)
    if (family := family_of(config)) is not None:
        return family.model(config, keys)
    kind, known = config.get("model_type"), known_types()
    text = f"{where}: expected one of {', '.join(known)}, got {said_type(config)}"
    start = "jax-attn inspect CHECKPOINT --table table.py writes a starting table"
    hint = "; ".join(filter(None, (nearest(str(kind), known), start)))
    raise TransferError("layout_for", [Problem("refused", "model_type", text, hint)])
