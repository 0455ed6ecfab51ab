"""The config beside a checkpoint, and the heads that it and the shapes give a block.

A block found by its spelling is of no known family, so that its config may name heads in any way.
Needs no framework.

Letters: N and K query and key/value heads, H head_dim.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jax_attn.transfer.families.config import (
    HEAD_DIM,
    NUM_HEADS,
    NUM_KV_HEADS,
    Config,
    Reading,
    StandIn,
)
from jax_attn.transfer.files.safetensors_file import unique
from jax_attn.transfer.inspect.discover import AttentionBlock, ProjectionRows
from jax_attn.transfer.port.files import CONFIGS
from jax_attn.transfer.problems import Problem, TransferError

# Part of a config -> the modules that it is about, where they have other names.
_MODULES = {"text": ("text", "language"), "vision": ("vision", "visual")}


class HeadCounts(NamedTuple):
    """N, K and H, and the softcap, None for none."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    softcap: float | None


class UnknownHeadsError(ValueError):
    """Neither the config nor the caller says how many query heads there are."""


def read_config(path: Path) -> Config | None:
    """The config.json in a checkpoint's folder, else Meta's params.json; None where neither is.

    path: the checkpoint, a file or a folder. Raises TransferError where it is no JSON object.
    """
    folder = path if path.is_dir() else path.parent
    file = next((folder / name for name in CONFIGS if (folder / name).is_file()), None)
    if file is None:
        return None
    try:
        config = json.loads(file.read_text("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError, OSError) as error:
        raise _config_error(file, f"expected JSON: {error}") from error
    if not isinstance(config, dict):
        raise _config_error(file, f"expected a JSON object, got {type(config).__name__}")
    return config


def seen_from(config: Config, prefix: str) -> Config:
    """The config as it concerns the block at `prefix`.

    A part of its own (vision_config, decoder, attn_config, decoder_attention_heads) counts where
    the prefix runs through a module of that name; one that names heads counts alone.
    """
    modules = prefix.split(".")

    def concerns(scope: str) -> bool:
        names = _MODULES.get(scope, (scope,))
        return any(m == name or m.startswith(f"{name}_") for m in modules for name in names)

    seen = dict(config)
    for key, value in config.items():
        if key.endswith("_attention_heads") and concerns(key.removesuffix("_attention_heads")):
            seen["num_attention_heads"] = value
        elif isinstance(value, dict) and concerns(key.removesuffix("_config")):
            seen = dict(value) if any(name in value for name in NUM_HEADS) else seen | value
    return seen


def head_counts(
    block: AttentionBlock, config: Config, num_heads: int | None, num_kv_heads: int | None
) -> HeadCounts:
    """N, K and H of a block, from its shapes and whoever names its heads.

    config: as `seen_from` the block. num_heads, num_kv_heads: as the caller gives them. Raises
    UnknownHeadsError; TransferError with everything that disagrees.
    """
    read = Reading(config)
    N = _agreed(read, NUM_HEADS, "--num-heads", num_heads)
    K = _agreed(read, NUM_KV_HEADS, "--num-kv-heads", num_kv_heads)
    H = _agreed(read, HEAD_DIM)
    softcap = read.real("attn_logit_softcapping", default=None)
    problems = [*read.problems]
    if not problems and N is None:
        raise UnknownHeadsError(
            f"{block.rows['q.weight'].key}: num_heads cannot be inferred from shapes: expected "
            f"one of {', '.join(NUM_HEADS)} in {read.file} beside the checkpoint, or --num-heads"
        )
    if not problems and N is not None:
        problems += _misfits(block, N, K, H)
    if problems or N is None:
        raise TransferError(f"heads of {block.name}", problems)
    head_dim = block.rows["q.weight"].length // N.value
    num_kv_heads = block.rows["k.weight"].length // head_dim
    return HeadCounts(N.value, num_kv_heads, head_dim, None if softcap is None else float(softcap))


class _Named(NamedTuple):
    """A number and who names it."""

    source: str
    value: int

    def __str__(self) -> str:
        return f"{self.source} = {self.value}"


def _agreed(
    read: Reading, names: Sequence[str], option: str = "", chosen: int | None = None
) -> _Named | None:
    """The number that the option and all `names` of the config agree on; None if nobody has it."""
    numbers = [] if chosen is None else [_Named(option, chosen)]
    for name in names:
        value = read.number(name, default=None)
        if value is not None and not isinstance(value, StandIn):
            numbers.append(_Named(f"{read.file} {name}", value))
    if len({number.value for number in numbers}) > 1:
        text = f"expected one number from all who name it, got {', '.join(map(str, numbers))}"
        read.problems[Problem("ambiguous", numbers[0].source, text)] = None
    return numbers[0] if numbers else None


def _misfits(
    block: AttentionBlock, N: _Named, K: _Named | None, H: _Named | None
) -> Iterator[Problem]:
    """Rows that are no whole number of heads, or not as many as the numbers ask for."""
    query, key = block.rows["q.weight"], block.rows["k.weight"]
    if query.length % N.value:
        yield _misfit(query, f"a multiple of {N} query rows")
        return
    head_dim = query.length // N.value
    if H is not None and H.value != head_dim:
        yield _misfit(query, f"{N.value * H.value} query rows for {N} and {H}")
    if key.length % head_dim:
        yield _misfit(key, f"a multiple of head_dim = {head_dim} key rows ({N})")
        return
    kv_heads = key.length // head_dim
    if K is not None and K.value != kv_heads:
        yield _misfit(key, f"{K.value * head_dim} key rows for {K} of head_dim = {head_dim}")
    if N.value % kv_heads:
        yield _misfit(key, f"key/value heads that divide {N}, of head_dim = {head_dim}")


def _misfit(rows: ProjectionRows, expected: str) -> Problem:
    return Problem("wrong shape", rows.key, f"expected {expected}, got {rows.length} rows")


def _config_error(file: Path, reason: str) -> TransferError:
    return TransferError("reading the config", [Problem("file", str(file), reason)])
